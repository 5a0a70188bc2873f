"""FedSR: a stochastic representation that is kept short, and near a learned Gaussian of its class.

Nguyen, Torr and Lim, "FedSR: A Simple and Effective Domain Generalization Method for Federated Learning" (NeurIPS
2022). A linear layer in front of the classifier makes mu and (through softplus) sigma; in training z = mu + sigma eps,
one eps per sample, takes the place of the features, and the loss is

    CE + alpha_l2r mean_b |z_b| + alpha_cmi mean_b KL( N(s mu_b, (s sigma_b)^2) || N(r_mu[y_b], r_sigma[y_b]^2) )

with the KL summed over dimensions, and r_mu, r_sigma (C x Z each) and the scale s trained along. FedL2R is the
deterministic variant with the norm alone (probabilistic=False).

Choices where paper and code disagree or are silent
- The norm (code), not its square.
- References and scale stay on the client: the code leaves them out of what it averages; share_reference averages them.
- Weights as everywhere; the code's mean over clients is unweighted.
- The code draws a fresh shuffled batch per step; here local.* says how a client goes through its data.
- eps comes from torch's generator, which a job seeds for its model as it does for dropout: however many rows and passes
  other methods ask for, each has noise of its own.
- A model is scored by the log of its mean softmax over `samples` draws of z (code); here the same draws of eps for all
  inputs, made once from the seed, so that scoring touches no stream. What looks at features outside training (frozen
  copies, probes) sees mu.
- Soft targets (Mixup) count as their heaviest class in the KL.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.context import Stage
from raysim.api.method import Method
from raysim.models.classifier import Classifier
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.declarations import Task
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup


def representation_norm_penalty(*, representations: Tensor) -> Tensor:
    """mean_b |z_b| of ``representations`` (B, Z)."""
    penalty: Tensor = representations.norm(dim=1).mean()
    return penalty


def conditional_information_penalty(
    *,
    mean: Tensor,
    std: Tensor,
    labels: Tensor,
    reference_mean: Tensor,
    reference_std_raw: Tensor,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """The KL above, summed over Z, the mean over B: ``mean`` and ``std`` > 0 (B, Z), ``labels`` int64 (B,).

    ``reference_mean`` and ``reference_std_raw`` (C, Z), the latter in front of its softplus; ``scale`` is s, not 0.
    """
    centre, spread = reference_mean[labels], F.softplus(reference_std_raw)[labels]
    sigma = (scale * std).abs()
    each = (
        (spread / sigma).log()
        + (sigma.square() + (scale * mean - centre).square()) / (2 * spread.square())
        - 0.5
    )
    penalty: Tensor = each.sum(dim=1).mean()
    return penalty


class Gaussian(Classifier):
    """A classifier of samples of N(mu, sigma^2) in training, of mu elsewhere; scored over fixed noise."""

    p = 1.0  # training draws from torch's generator: see `is_stochastic`

    def __init__(self, base: Classifier, width: int, samples: int) -> None:
        mapping = nn.Linear(base.feature_dim, 2 * width)
        super().__init__(nn.Sequential(base.extractor, mapping), width, base.num_classes)
        # No buffer: those travel, and every process makes this one from the seed. [samples, Z]
        self.noise = torch.randn(samples, width)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """mu and sigma [B, Z]."""
        mean, raw = self.extractor(x).chunk(2, dim=1)
        return mean, F.softplus(raw)

    def features(self, x: Tensor) -> Tensor:
        """z [B, Z], with what it was drawn from as its attribute `moments`."""
        mean, std = self.moments(x)
        z = mean + std * torch.randn_like(mean) if self.training else mean.view_as(mean)
        z.moments = mean, std  # type: ignore[attr-defined]
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a sample in training; else the log of the mean softmax over the noise."""
        if self.training:
            return super().forward(x)
        mean, std = self.moments(x)
        scores = torch.stack(
            [self.head(mean + std * eps).log_softmax(dim=1) for eps in self.noise.to(mean)]
        )
        return scores.logsumexp(dim=0) - math.log(len(scores))


class Reference(nn.Module):
    """A Gaussian for each class, and the scale of what is compared with it."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(classes, width))
        self.std = nn.Parameter(torch.ones(classes, width))  # in front of its softplus
        self.scale = nn.Parameter(torch.ones(()))


REFERENCE = "fedsr.reference"


class FedSR(Method):
    """alpha_l2r weighs the norm, alpha_cmi the conditional information; width: Z, None: as wide as the features.

    samples: of z that a score is the mean of.
    """

    name = "fedsr"
    paper = "Nguyen et al., NeurIPS 2022"

    def __init__(
        self,
        alpha_l2r: float = 0.01,
        alpha_cmi: float = 5e-4,
        width: int | None = None,
        samples: int = 20,
        probabilistic: bool = True,
        share_reference: bool = False,
    ):
        self.alpha_l2r = at_least("method.fedsr.alpha_l2r", alpha_l2r, 0.0)
        self.alpha_cmi = at_least("method.fedsr.alpha_cmi", alpha_cmi, 0.0)
        self.width = None if width is None else int(at_least("method.fedsr.width", width, 1))
        self.samples = int(at_least("method.fedsr.samples", samples, 1))
        self.probabilistic, self.share_reference = probabilistic, share_reference

    @property
    def _informed(self) -> bool:
        return self.probabilistic and self.alpha_cmi > 0

    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """Add a linear layer after the extractor, and a new head."""
        base = cast(Classifier, model)
        width = self.width or base.feature_dim
        if self.probabilistic:
            return Gaussian(base, width, self.samples)
        extractor = nn.Sequential(base.extractor, nn.Linear(base.feature_dim, width))
        return Classifier(extractor, width, base.num_classes)

    def setup(self, run: Setup) -> None:
        """Add the reference, private unless it is shared, and train it along with the model."""
        run.needs("classes", "features")
        run.needs_clients("each client has a reference of its own")
        if self._informed:
            reference = Reference(run.task.num_classes, run.model.feature_dim)
            run.network("reference", reference, private=not self.share_reference)
            run.stages((Stage(trains=("model", REFERENCE)),))
        elif not self.alpha_l2r:
            run.skip("loss")

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add both penalties on the z that is classified."""
        terms = []
        if self.alpha_l2r:
            penalty = representation_norm_penalty(representations=out.features)
            terms.append(self.alpha_l2r * penalty)
        if self._informed:
            terms.append(self.alpha_cmi * self._information(job, out))
        return loss + sum(terms)

    def _information(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the divergence of the batch from the references of its classes."""
        reference = cast(Reference, job.network("reference"))
        targets = out.batch.targets
        mean, std = _moments(out.features)
        return conditional_information_penalty(
            mean=mean,
            std=std,
            labels=targets if targets.ndim == 1 else targets.argmax(dim=1),
            reference_mean=reference.mean,
            reference_std_raw=reference.std,
            scale=reference.scale,
        )


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """What features (B, Z) were drawn from; they may be the first rows of a larger pass."""
    whole = features if hasattr(features, "moments") else features._base
    mean, std = whole.moments  # type: ignore[union-attr]
    return mean[: len(features)], std[: len(features)]
