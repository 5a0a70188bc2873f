"""FedBR: reduce the bias of local learning with a small shared set of pseudo-data.

Guo et al., "FedBR: Improving Federated Learning on Heterogeneous Data via Local Learning Bias
Reduction" (ICML 2023), eqs. (2)-(7), Algorithms 1-3. A pseudo-sample is a mean of samples; its
target is 1 / C for each of C classes. z and z_p are the trained model's features of a batch and of
pseudo-data, and z_g the received model's features of the pseudo-data. P is a projection, L_local
the loss on the batch, and lambda, mu, tau1 and tau2 are settings. For row j of the features, s+_j =
cos(P(z_p), P(z_g)) and s-_j = cos(P(z_p), P(z)):

    L_con = mean_j -log( f1 / (f1 + f2) )     f1 = exp(tau1 s+_j), f2 = exp(tau2 s-_j)
    L_p   = cross-entropy of the outputs for pseudo-data with the targets of the pseudo-data
    max step: the projection P ascends L_con
    min step: features and classifier descend L_local + lambda L_p + mu L_con

With pseudo="mixture", samples of the batch enter the mean, and their labels enter the target.

Departures from the paper
- Similarities are multiplied by tau, as in the released code. Eqs. (5) and (6) divide by tau
  (temperature_mode="divide"), which the published ablation with tau2 = 0 rules out.
- Each pseudo-sample is compared with one sample of the batch, row by row, as in the released code.
  Eq. (2) has an expectation over all samples.
- With pseudo="mixture", z_g is computed in each step, because the pseudo-data change in each step.
  The released code computes z_g only in a job's first step, as global_features="round" does.
- The received model is in eval mode; in the released code it is in train mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.context import Stage, without_gradient
from raysim.api.declarations import FORWARD
from raysim.api.method import Method
from raysim.data.sources import Source
from raysim.methods.mixup import soft_targets

# The shared test vectors expect `random_sample_mean` in this module.
from raysim.methods.pseudo_data import (
    PseudoData,
    PseudoKind,
    PseudoRefresh,
    SamplingRule,
    random_sample_mean as random_sample_mean,
)
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.declarations import Participation
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup
    from raysim.models import Classifier

TemperatureMode: TypeAlias = Literal["multiply", "divide"]
Projection: TypeAlias = Literal["paper", "code", "none"]
FeatureRefresh: TypeAlias = Literal["step", "round"]


def contrastive_loss(
    z_local_pseudo: Tensor,
    z_global_pseudo: Tensor,
    z_local: Tensor,
    tau1: float,
    tau2: float,
    temperature_mode: str = "multiply",
) -> Tensor:
    """Return FedBR's contrastive loss (eqs. 2, 5, 6), the mean over rows of embeddings [B, D].

    z_local_pseudo: the local model's embeddings of pseudo-data.
    z_global_pseudo: the received model's embeddings of the same pseudo-data.
    z_local: the local model's embeddings of real samples.
    tau1, tau2: the temperatures of the similarities to `z_global_pseudo` and to `z_local`.
    temperature_mode: "multiply" multiplies similarities by the temperatures, "divide" divides.
    Raises ValueError for another mode, and for a division by a temperature of 0 or less.
    """
    kappa1, kappa2 = (_similarity_scale(tau, temperature_mode) for tau in (tau1, tau2))
    positive = kappa1 * F.cosine_similarity(z_local_pseudo, z_global_pseudo, dim=-1)
    negative = kappa2 * F.cosine_similarity(z_local_pseudo, z_local, dim=-1)
    # -log(f1 / (f1 + f2)) without exponentials, which overflow for small temperatures.
    return -F.logsigmoid(positive - negative).mean()


def _similarity_scale(tau: float, temperature_mode: str) -> float:
    """Return the factor by which a similarity is multiplied: tau or 1/tau.

    temperature_mode: "multiply" gives tau, "divide" gives 1/tau.
    Raises ValueError for another mode, and for a division by a number that is not positive.
    """
    one_of("method.fedbr.temperature_mode", temperature_mode, get_args(TemperatureMode))
    if temperature_mode == "multiply":
        return tau
    if tau <= 0.0:
        raise ValueError(
            f"method.fedbr.temperature_mode=divide cannot divide by the temperature {tau} "
            "(method.fedbr.tau1 or method.fedbr.tau2). Set all temperatures above 0, or set "
            "method.fedbr.temperature_mode=multiply."
        )
    return 1.0 / tau


def pseudo_label_loss(logits: Tensor, targets: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of logits [B, C] with targets [B, C]; None means uniform."""
    log_probabilities = F.log_softmax(logits, dim=-1)
    if targets is None:
        return -log_probabilities.mean()
    return -(targets * log_probabilities).sum(dim=-1).mean()


def mixture_pseudo_data(
    proxy_means: Tensor, inputs: Tensor, labels: Tensor, indices: Tensor, num_classes: int
) -> dict[str, Tensor]:
    """Average each of R proxy means with K of the client's samples (FedBR: Algorithm 3, eq. 4).

    A proxy mean is a mean of samples of the public set. It counts as one sample, whose target is 1
    / C for each of C classes.
    Return R pseudo-samples: "inputs" [R, ...] and "targets" [R, C].
    proxy_means: [R, ...].
    inputs, labels: the client's samples, [n, ...], with labels int64 [n] or probabilities [n, C].
    indices: int64 [R, K], the client's samples for each proxy mean; K may be 0.
    """
    parts = indices.shape[1] + 1
    rows = soft_targets(labels, num_classes, torch.promote_types(inputs.dtype, torch.float32))
    return {
        "inputs": (proxy_means + inputs[indices].sum(dim=1)) / parts,
        "targets": (1.0 / num_classes + rows[indices].sum(dim=1)) / parts,
    }


def make_projector(features: int, projection: str) -> nn.Module:
    """Return the projection of features, three linear layers with ReLU.

    features: the number F of features.
    projection: the widths of the layers: "paper" is (256, 256, 128), "code" is (2F, 2F, F).
    """
    hidden, out = (256, 128) if projection == "paper" else (2 * features, features)
    first, second = nn.Linear(features, hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(hidden, out))


PROJECTOR = "fedbr.projector"


class FedBR(Method):
    """A method that trains on pseudo-data to reduce the bias of local learning.

    lam: weight of Component 1 (the loss of pseudo-data); 0 switches it off.
    mu: weight of Component 2 (the contrastive loss); 0 switches it off.
    tau1: the temperature of the similarity between the features of a pseudo-sample in the trained
    and in the received model.
    tau2: the temperature of the similarity between the features of a pseudo-sample and of a real
    sample, both in the trained model.
    temperature_mode: "multiply" multiplies similarities by the temperatures, "divide" divides.
    max_step: False does not train the projector.
    projection: the widths of the projector's layers. "paper" is (256, 256, 128), "code" is (2F, 2F,
    F) for F features, and "none" leaves the projector out.
    pseudo: how pseudo-data are made. With "rsm" (the paper's random sample mean), each client sends
    means of its samples before round 0. With "mixture", each step averages means of a public set
    with samples of the batch.
    pseudo_refresh: "round" draws new pseudo-samples in every round; "once" draws them only before
    the first round.
    pseudo_batch: the number of pseudo-samples in a step.
    samples_per_mean: the number of samples in a mean.
    means_per_client: with "rsm", the number of means that a client sends; None is `pseudo_batch`.
    sources: how samples are drawn for means of clients' samples. "balanced" draws all clients
    equally often, "unbalanced" in proportion to their samples. "classes" draws all clients, and all
    classes of a client, equally often. For means of a public set, "balanced" and "classes" draw all
    classes equally often, and "unbalanced" all samples.
    fresh: True draws new means of all clients' raw data in every round, which only a simulator can
    do.
    proxy: with "mixture", the data source of the public set; otherwise None.
    mix_samples: with "mixture", how many samples of the batch enter each pseudo-sample.
    global_features: with "mixture", when the received model computes the features of pseudo-data.
    "step" computes them in every step, "round" once for a job.
    """

    name = "fedbr"
    paper = "Guo et al., ICML 2023"

    def __init__(
        self,
        lam: float = 1.0,
        mu: float = 0.5,
        tau1: float = 2.0,
        tau2: float = 2.0,
        temperature_mode: TemperatureMode = "multiply",
        max_step: bool = True,
        projection: Projection = "paper",
        pseudo: PseudoKind = "rsm",
        pseudo_refresh: PseudoRefresh = "round",
        pseudo_batch: int = 64,
        samples_per_mean: int = 10,
        means_per_client: int | None = None,
        sources: SamplingRule = "balanced",
        fresh: bool = False,
        proxy: Source | None = None,
        mix_samples: int = 1,
        global_features: FeatureRefresh = "step",
    ):
        self.lam = at_least("method.fedbr.lam", lam, 0.0)
        self.mu = at_least("method.fedbr.mu", mu, 0.0)
        for tau in (tau1, tau2):
            _similarity_scale(tau, temperature_mode)
        self.tau1, self.tau2, self.temperature_mode = tau1, tau2, temperature_mode
        self.max_step = max_step
        self.projection = one_of("method.fedbr.projection", projection, get_args(Projection))
        self.pseudo = one_of("method.fedbr.pseudo", pseudo, get_args(PseudoKind))
        self.pseudo_refresh = one_of(
            "method.fedbr.pseudo_refresh", pseudo_refresh, get_args(PseudoRefresh)
        )
        self.pseudo_batch = pseudo_batch
        self.samples_per_mean, self.sources = samples_per_mean, sources
        self.means_per_client = pseudo_batch if means_per_client is None else means_per_client
        self.fresh, self.proxy = fresh, proxy
        self.global_features = one_of(
            "method.fedbr.global_features", global_features, get_args(FeatureRefresh)
        )
        self.mix_samples = int(at_least("method.fedbr.mix_samples", mix_samples, 0))
        self._pseudo_data = PseudoData(
            kind=pseudo,
            refresh=pseudo_refresh,
            rows=pseudo_batch,
            samples_per_mean=samples_per_mean,
            means_per_client=self.means_per_client,
            sources=sources,
            fresh=fresh,
            proxy=proxy,
        )

    @property
    def _projects(self) -> bool:
        return self.mu > 0 and self.projection != "none"

    @property
    def _mixes(self) -> bool:
        return self.pseudo == "mixture" and self.mix_samples > 0

    # --- before the run ------------------------------------------------------------------------
    def setup(self, run: Setup) -> None:
        """Declare the projector, the stage that trains it, and the exchange of pseudo-data."""
        run.needs("classes", "features", "numbers")
        if self.lam == 0 and self.mu == 0:
            run.skip("begin", "loss")
            return
        if self._projects:
            run.network("projector", make_projector(run.model.feature_dim, self.projection))
        if self._projects and self.max_step:
            climb = Stage("fedbr.max", (PROJECTOR,), self.projected_contrast, ascend=True)
            run.stages((climb, Stage()))
        if self._mixes:
            run.draw("mix", self.draw_mixed_samples)
        self._pseudo_data.declare(run)

    def cost(self, job: Participation) -> float:
        """Return the cost of the pseudo-data, as a number of trained samples.

        Training on pseudo-data costs as much as training on the batches. If the received model
        makes a forward pass over new pseudo-data in every step, a third of this cost is added. If
        `lam` and `mu` are 0, the cost is 0.
        """
        if self.lam == 0 and self.mu == 0:
            return 0.0
        changes = self.mu and self._mixes and self.global_features == "step"
        return (1 + FORWARD if changes else 1) * job.trained_samples

    # --- a client's job ------------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Draw this job's pseudo-data from all clients' raw data, if `fresh` is True.

        All jobs with the same base version get the same pseudo-data.
        """
        job.scratch["pseudo"] = self._pseudo_data.draw_fresh(job)

    def draw_mixed_samples(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        """Draw for each step which samples of its batch are averaged with each pseudo-sample.

        Return a tensor for each step: int64 [pseudo_batch, mix_samples], positions in the batch.
        generator: the random generator of the job.
        """
        shape = (self.pseudo_batch, self.mix_samples)
        return [torch.from_numpy(generator.integers(size, size=shape)) for size in job.plan.sizes]

    def projected_contrast(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the contrastive loss of a batch, which the projector is trained to maximise.

        No gradient reaches the features.
        """
        return self.contrast(job, out, self._features(job, out).detach(), out.features.detach())

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add lam times the loss of pseudo-data and mu times the contrastive loss to the task loss.

        If the projector is trained, this comes first in each step.
        """
        terms = []
        if self.lam:
            logits = job.model.head(self._features(job, out))
            terms.append(self.lam * pseudo_label_loss(logits, self.pseudo_data(job, out)[1]))
        if self.mu:
            contrast = self.contrast(job, out, self._features(job, out), out.features)
            terms.append(self.mu * contrast)
        return loss + sum(terms)

    def pseudo_data(self, job: LocalJob, out: Outputs) -> tuple[Tensor, Tensor | None]:
        """Return this step's pseudo-data [B, ...] and their targets [B, C].

        The targets are None if all of them are uniform.
        """
        means = job.scratch["pseudo"] if self.fresh else job.received["pseudo"]
        if not self._mixes:
            return means, None

        def mix() -> dict[str, Tensor]:
            inputs, labels = out.batch.inputs.detach(), out.batch.targets
            indices = job.drawn("mix").to(means.device)
            return mixture_pseudo_data(means, inputs, labels, indices, job.num_classes)

        mixed = out.once("fedbr.mixed", mix)
        return mixed["inputs"], mixed["targets"]

    def contrast(self, job: LocalJob, out: Outputs, pseudo: Tensor, real: Tensor) -> Tensor:
        """Return the contrastive loss, which compares pseudo-sample j with sample j of the batch.

        If the two numbers of samples differ, samples of the batch are repeated or left out.
        pseudo: [B, F], features of the pseudo-data.
        real: [b, F], features of the batch.
        """
        if len(real) != len(pseudo):
            real = real[torch.arange(len(pseudo), device=real.device) % len(real)]
        project = job.network("projector") if self._projects else nn.Identity()
        z_p, z_g, z = project(pseudo), project(self.global_of(job, out)), project(real)
        return contrastive_loss(z_p, z_g, z, self.tau1, self.tau2, self.temperature_mode)

    def global_of(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the received model's features of pseudo-data, [B, F], without a gradient.

        They are computed in every step if the pseudo-data change in every step and
        `global_features` is "step"; otherwise once for a job.
        """

        def compute() -> Tensor:
            received = cast("Classifier", job.frozen()["model"])
            return without_gradient(lambda: received.features(self.pseudo_data(job, out)[0]))

        if self._mixes and self.global_features == "step":
            return out.once("fedbr.global", compute)
        return job.once("global", compute)

    def _features(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the trained model's features of pseudo-data.

        BatchNorm's running statistics stay unchanged.
        """

        def compute() -> Tensor:
            with job.keep_statistics():
                return job.model.features(self.pseudo_data(job, out)[0])

        return out.once("fedbr.pseudo_features", compute)
