"""FedSR: learn noisy features of a small norm, near one Gaussian for each class.

Source: Nguyen, Torr and Lim, "FedSR: A Simple and Effective Domain Generalization Method for
Federated Learning" (NeurIPS 2022). A linear layer in front of the classifier makes mu and (through
softplus) sigma. In training, z = mu + sigma eps replaces the features of each sample b; eps is
normal noise. Class c has the Gaussian N(r_mu[c], r_sigma[c]^2), which is trained, as is the factor
s. The loss is

    CE + alpha_l2r mean_b |z_b|
       + alpha_cmi mean_b KL( N(s mu_b, (s sigma_b)^2) || N(r_mu[y_b], r_sigma[y_b]^2) )

Departures from the paper
- As in the authors' code, the first penalty is the norm, not its square. r_mu, r_sigma and s stay
  on the client, unless share_reference=True.
- Clients have the run's aggregation weights; the authors' code has equal weights.
- As in the authors' code, a model is scored with the mean of the softmax over `samples` draws of z.
  Here all inputs have the same values of eps in these draws.
- With Mixup, the KL uses the class of the larger weight.
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
    """Return the mean norm of `representations` [B, Z]."""
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
    """Return the mean KL divergence of features from the Gaussian of their class, a scalar.

    The divergence of N(s mu, (s sigma)^2) from N(r, t^2) is summed over Z features.

    mean, std: mu and sigma > 0, [B, Z].
    labels: int64 [B].
    reference_mean: r for each class, [C, Z].
    reference_std_raw: [C, Z]; its softplus is t for each class.
    scale: s, not 0.
    """
    centre = reference_mean[labels]
    spread = F.softplus(reference_std_raw)[labels]
    sigma = (scale * std).abs()
    squares = sigma.square() + (scale * mean - centre).square()
    divergence = (spread / sigma).log() + squares / (2 * spread.square()) - 0.5
    penalty: Tensor = divergence.sum(dim=1).mean()
    return penalty


class Gaussian(Classifier):
    """A classifier whose features are drawn from N(mu, sigma^2) in training.

    In evaluation, `features` returns mu, and `forward` averages the predictions for several draws
    of the features, always with the same noise.
    base: the classifier whose extractor is used. A new linear layer computes mu and sigma.
    width: the number of features.
    samples: the number of these draws.
    """

    # Training draws from torch's generator; see `is_stochastic`.
    p = 1.0

    def __init__(self, base: Classifier, width: int, samples: int) -> None:
        mapping = nn.Linear(base.feature_dim, 2 * width)
        super().__init__(nn.Sequential(base.extractor, mapping), width, base.num_classes)
        # [samples, Z]. Not a buffer, because buffers travel; each process makes it from the seed.
        self.noise = torch.randn(samples, width)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean mu and the standard deviation sigma of the features, both [B, Z]."""
        mean, raw = self.extractor(x).chunk(2, dim=1)
        return mean, F.softplus(raw)

    def features(self, x: Tensor) -> Tensor:
        """Return the features of x, [B, Z]: drawn from N(mu, sigma^2) in training, otherwise mu.

        The returned tensor has an attribute `moments`, the pair (mu, sigma), both [B, Z].
        """
        mean, std = self.moments(x)
        # A view of the mean, so that the attribute is not set on `mean` itself.
        z = mean + std * torch.randn_like(mean) if self.training else mean.view_as(mean)
        z.moments = mean, std  # type: ignore[attr-defined]
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for x, [B, C]: logits in training, log probabilities in evaluation.

        Training draws the features once. Evaluation draws them `samples` times, averages the
        softmax over these draws, and returns the logarithm of this average.
        """
        if self.training:
            return super().forward(x)
        mean, std = self.moments(x)
        scores = []
        for eps in self.noise.to(mean):
            logits = self.head(mean + std * eps)
            scores.append(logits.log_softmax(dim=1))
        return torch.stack(scores).logsumexp(dim=0) - math.log(len(scores))


class Reference(nn.Module):
    """The trained reference Gaussians of the classes, and the trained factor s.

    Features are multiplied by s before they are compared with the Gaussian of their class.
    classes: the number C of classes.
    width: the number Z of features.
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(classes, width))
        self.std = nn.Parameter(torch.ones(classes, width))  # before the softplus
        self.scale = nn.Parameter(torch.ones(()))


REFERENCE = "fedsr.reference"


class FedSR(Method):
    """A method that learns noisy features of a small norm, near one Gaussian for each class.

    alpha_l2r: the weight of the penalty on the norm of the features.
    alpha_cmi: the weight of the KL divergence of the features from the Gaussian of their class. The
    features are first multiplied by a trained factor s.
    width: the number of features; None takes as many as the model has.
    samples: the number of draws whose predictions are averaged when the model is scored.
    probabilistic: False is FedL2R: no noise, and only the norm as penalty.
    share_reference: True averages the Gaussians and s over the clients. False keeps them on the
    client.
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
        self.probabilistic = probabilistic
        self.share_reference = share_reference

    @property
    def _has_reference(self) -> bool:
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
        """Declare the Gaussians of the classes as a network that is trained with the model.

        They stay on each client unless `share_reference` is True. Without the KL divergence there
        are no Gaussians.
        """
        run.needs("classes", "features")
        if self._has_reference:
            if not self.share_reference:
                run.needs_clients("each client has its own class Gaussians")
            reference = Reference(run.task.num_classes, run.model.feature_dim)
            run.network("reference", reference, private=not self.share_reference)
            run.stages((Stage(trains=("model", REFERENCE)),))
        elif not self.alpha_l2r:
            run.skip("loss")

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add two penalties on the features.

        The first is their mean norm, the second their KL divergence from the Gaussian of their
        class. A penalty of weight 0 is left out; FedL2R has only the first one.
        """
        terms = []
        if self.alpha_l2r:
            penalty = representation_norm_penalty(representations=out.features)
            terms.append(self.alpha_l2r * penalty)
        if self._has_reference:
            terms.append(self.alpha_cmi * self._information(job, out))
        return loss + sum(terms)

    def _information(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the KL divergence of a batch's features from the Gaussians of their classes."""
        reference = cast(Reference, job.network("reference"))
        labels = out.batch.targets
        if labels.ndim > 1:
            labels = labels.argmax(dim=1)
        mean, std = _moments(out.features)
        return conditional_information_penalty(
            mean=mean,
            std=std,
            labels=labels,
            reference_mean=reference.mean,
            reference_std_raw=reference.std,
            scale=reference.scale,
        )


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of the features, each [B, Z].

    features: [B, Z], a tensor that `Gaussian.features` returned. It may also be a slice with the
    first B rows of such a tensor.
    """
    all_rows = features if hasattr(features, "moments") else features._base
    mean, std = all_rows.moments  # type: ignore[union-attr]
    return mean[: len(features)], std[: len(features)]
