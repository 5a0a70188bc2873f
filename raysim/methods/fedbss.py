"""FedBSS: in each job, train on samples with a low loss first, then also on the other samples.

Xu et al., "Federated Learning with Sample-level Client Drift Mitigation" (AAAI 2025). A job has the
epochs e = 1, ..., E. The received model gives sample i, with label y_i, the probability p_ic of
each class c:

    S_i = -log p_{i, y_i}                                 (3)   loss; samples are sorted by it
    alpha_i = 1 - (max_c p_ic - min_c p_ic)               (4)   uncertainty
    unbiased = {i: S_i <= S_m}, m = argmax_i alpha_i      (5)   all other samples are biased
    a_e = (1 - cos(pi e / E)) / 2                         (6)   share of biased samples in epoch e

Choices where the paper is silent or inconsistent
- The biased samples with the lowest losses take part; their number is rounded down.
- Epochs count from 1, so the last epoch trains on every sample.
- If several samples are the most uncertain, m is the sample with the lowest loss. A sample whose
  uncertainty is nan is never m.
- Samples with non-finite losses come last in the order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from raysim.api.declarations import FORWARD, Participation
from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

InclusionKind: TypeAlias = Literal["cosine", "linear", "filter", "all"]
FractionUnit: TypeAlias = Literal["samples", "loss"]


class SampleSplit(TypedDict):
    """A client's samples by ascending loss.

    order: int64 [N], positions in the client's samples.
    num_unbiased: the number of unbiased samples, which come first in `order`.
    """

    order: Tensor
    num_unbiased: int


def uncertainty(*, probabilities: Tensor) -> Tensor:
    """Return 1 - (largest - smallest class probability) of each row (FedBSS: eq. 4), [N].

    probabilities: N samples, [N, C]. A uniform row gives 1, a one-hot row 0.
    """
    return 1.0 - (probabilities.amax(dim=-1) - probabilities.amin(dim=-1))


def split_by_uncertainty(*, losses: Tensor, uncertainties: Tensor) -> SampleSplit:
    """Order samples by loss, and split them at the most uncertain one (FedBSS: eqs. 3 and 5).

    Samples with a larger loss than the most uncertain sample are biased; all others are unbiased.
    losses, uncertainties: [N], for N >= 1 samples.
    """
    comparable = torch.where(losses.isfinite(), losses, torch.inf)
    ranked, order = torch.sort(comparable, stable=True)
    # argmax returns the first of equal maxima, here the sample with the lowest loss.
    border = uncertainties.nan_to_num(nan=-torch.inf)[order].argmax()
    return {"order": order, "num_unbiased": int((ranked <= ranked[border]).sum())}


def inclusion_fraction(*, epoch: int, total_epochs: int, kind: str = "cosine") -> float:
    """Return the share of the biased samples that take part in an epoch (FedBSS: eq. 6).

    epoch: the number e of the epoch, from 1 to E = `total_epochs`.
    kind: "cosine" is (1 - cos(pi e / E)) / 2, "linear" is e / E, "filter" is 0, "all" is 1.
    Raises ValueError for any other kind or epoch.
    """
    if not 1 <= epoch <= total_epochs:
        raise ValueError(
            f"fedbss: epoch {epoch} of {total_epochs} does not exist. Epochs count from 1 to "
            "local.epochs."
        )
    if kind == "cosine":
        return (1.0 - math.cos(math.pi * epoch / total_epochs)) / 2.0
    if kind == "linear":
        return epoch / total_epochs
    one_of("method.fedbss.kind", kind, get_args(InclusionKind))
    return 1.0 if kind == "all" else 0.0


def included_count(*, num_biased: int, fraction: float) -> int:
    """Return floor(fraction * num_biased + 1e-9), the number of biased samples that take part."""
    return math.floor(fraction * num_biased + 1e-9)


def selected_indices(
    *, losses: Tensor, uncertainties: Tensor, epoch: int, total_epochs: int, kind: str = "cosine"
) -> Tensor:
    """Return the samples that are used in one epoch: int64 positions, by ascending loss.

    All unbiased samples of `split_by_uncertainty` are used, and a share of the biased ones: those
    with the lowest losses.
    losses, uncertainties: [N], of the client's samples.
    epoch, total_epochs, kind: the arguments of `inclusion_fraction`, which returns the share.
    """
    split = split_by_uncertainty(losses=losses, uncertainties=uncertainties)
    fraction = inclusion_fraction(epoch=epoch, total_epochs=total_epochs, kind=kind)
    num_biased = len(losses) - split["num_unbiased"]
    return split["order"][
        : split["num_unbiased"] + included_count(num_biased=num_biased, fraction=fraction)
    ]


def loss_weights(
    *, losses: Tensor, uncertainties: Tensor, epoch: int, total_epochs: int, kind: str = "cosine"
) -> Tensor:
    """Return the weight of each sample's loss in one epoch, [N].

    `split_by_uncertainty` says which samples are biased. Each unbiased sample has the weight 1. All
    biased samples have the same weight, which `inclusion_fraction` returns.
    losses, uncertainties: [N], of the client's samples.
    epoch, total_epochs, kind: the arguments of `inclusion_fraction`.
    """
    split = split_by_uncertainty(losses=losses, uncertainties=uncertainties)
    weights = torch.ones_like(losses)
    biased = split["order"][split["num_unbiased"] :]
    weights[biased] = inclusion_fraction(epoch=epoch, total_epochs=total_epochs, kind=kind)
    return weights


class FedBSS(Method):
    """A method that trains on unbiased samples first and adds biased samples epoch by epoch.

    A sample is unbiased if its loss is at most the loss of the client's most uncertain sample.
    warmup_rounds: a job whose base version is smaller than this number trains on all samples.
    refresh: after the warm-up, every `refresh`-th job of a client computes the losses and
    uncertainties. Jobs in between use the stored values.
    kind: the share of the biased samples in epoch e of E. "cosine" is (1 - cos(pi e / E)) / 2,
    "linear" is e / E, "filter" is 0, "all" is 1.
    fraction_of: how the share of `kind` is used. With "samples", this share of the biased samples
    takes part. With "loss", all biased samples take part, and the share is a factor on their
    losses.
    """

    name = "fedbss"
    paper = "Xu et al., AAAI 2025"
    weighting = "uniform"

    def __init__(
        self,
        warmup_rounds: int = 50,
        refresh: int = 1,
        kind: InclusionKind = "cosine",
        fraction_of: FractionUnit = "samples",
    ):
        self.warmup_rounds = int(at_least("method.fedbss.warmup_rounds", warmup_rounds, 0))
        self.refresh = int(at_least("method.fedbss.refresh", refresh, 1))
        inclusion_fraction(epoch=1, total_epochs=1, kind=kind)
        self.kind = kind
        self.fraction_of = one_of("method.fedbss.fraction_of", fraction_of, get_args(FractionUnit))

    def setup(self, run: Setup) -> None:
        """Declare the client state and the selection of samples; refuse tasks without classes."""
        run.needs("classes")
        local = run.local
        unit, key, parts = "epoch", "epochs", local.epochs
        if not local.epochs:
            steps = local.steps or 1
            unit, parts = "phase", min(local.phases, steps)
            key = "steps" if steps == 1 else "phases"
        if parts == 1 and self.kind != "filter":
            run.warn(
                f"local.{key}=1: method 'fedbss' never leaves samples out in the last {unit} of a "
                f"job. Each job has only one {unit}, so it uses all samples, as FedAvg does. "
                f"Increase local.{key}."
            )
        run.client_state("losses", torch.zeros)
        run.client_state("uncertainties", torch.zeros)
        run.client_state("version", lambda samples: torch.full((1,), -1))  # no losses yet
        run.client_state("count", lambda samples: torch.zeros(1, dtype=torch.int64))
        run.select(self._select)
        if self.fraction_of == "loss":
            run.owns("loss")
            run.draw("weights", self.draw_weights)
        else:
            run.skip("loss")

    def cost(self, job: Participation) -> float:
        """Return the cost of ranking the client's samples, as a number of trained samples.

        Ranking makes a forward pass over all samples. With `refresh` above 1, jobs that use stored
        values have this cost, too.
        """
        return FORWARD * job.samples if self._selects(job.version) else 0.0

    def begin(self, job: LocalJob) -> None:
        """Compute the loss and uncertainty of each of the client's samples with the received model.

        The model is in eval mode, without augmentation. The values are stored in the client state.
        Warm-up jobs compute nothing, and later only every `refresh`-th job of the client computes
        values. With kind="all", no job does.
        Raises FloatingPointError if no loss is finite.
        """
        if not self._selects(job.version):
            return
        count = int(job.state["count"])  # jobs so far that selected samples
        if count % self.refresh == 0:
            job.model.eval()
            with torch.no_grad():
                ranked = [self._rank(job.model(inputs), labels) for inputs, labels in job.data()]
            job.model.train()
            losses, uncertainties = (torch.cat(column) for column in zip(*ranked, strict=True))
            if not bool(losses.isfinite().any()):
                raise FloatingPointError(
                    "method 'fedbss': on every sample of the client, the loss of the received "
                    "model is nan or infinite. Decrease local.lr."
                )
            job.state["losses"], job.state["uncertainties"] = losses, uncertainties
            job.state["version"] = torch.full((1,), job.version)
        job.state["count"] = torch.full((1,), count + 1)
        self._report(job)

    def _report(self, job: LocalJob) -> None:
        """Report three numbers about the client's samples.

        These are the share of biased samples, the largest loss of an unbiased sample, and the mean
        uncertainty of all samples (Figure 3d of the paper).
        """
        losses, uncertainties = job.state["losses"], job.state["uncertainties"]
        split = split_by_uncertainty(losses=losses, uncertainties=uncertainties)
        unbiased = split["num_unbiased"]
        job.report["biased_share"] = 1 - unbiased / len(losses)
        job.report["threshold"] = float(losses[split["order"][unbiased - 1]])
        job.report["uncertainty"] = float(uncertainties.mean())

    def draw_weights(self, job: LocalJob, _: np.random.Generator) -> Sequence[Tensor]:
        """Return the weights of the samples' losses in each batch, [B] for B samples.

        `_` is the random generator of the job, which is not used.
        """
        steps, dtype = job.plan.steps, job.params.dtype
        if not self._selects(job.version):
            return [torch.ones(size, dtype=dtype) for size in job.plan.sizes]
        losses, uncertainties = job.state["losses"].cpu(), job.state["uncertainties"].cpu()
        batches = torch.from_numpy(job.plan.positions).split(job.plan.sizes)
        epochs = job.local.epochs or min(job.local.phases, steps)
        weights: list[Tensor] = []
        # Every epoch has all samples, so all epochs (or phases) have the same number of batches.
        for epoch in range(1, epochs + 1):
            of_samples = loss_weights(
                losses=losses,
                uncertainties=uncertainties,
                epoch=epoch,
                total_epochs=epochs,
                kind=self.kind,
            ).to(dtype)
            for batch in batches[steps * (epoch - 1) // epochs : steps * epoch // epochs]:
                weights.append(of_samples[batch])
        return weights

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the mean over the batch of the weighted losses."""
        losses = job.task.objective.losses(out.logits, out.batch.targets)
        weights: Tensor = job.drawn("weights")
        return (weights.to(losses.dtype) * losses).mean()

    def _select(self, job: LocalJob, epoch: int, epochs: int) -> np.ndarray | None:
        """Return the client's samples that take part in an epoch, as positions; None means all.

        Every unbiased sample takes part, and the share of biased samples that `inclusion_fraction`
        returns. With fraction_of="loss", all samples take part.
        epoch: the number of the epoch, from 1 to `epochs`.
        """
        if not self._selects(job.version):
            return None
        if self.fraction_of == "loss":
            return np.arange(job.samples)
        chosen = selected_indices(
            losses=job.state["losses"].cpu(),
            uncertainties=job.state["uncertainties"].cpu(),
            epoch=epoch,
            total_epochs=epochs,
            kind=self.kind,
        )
        return chosen.numpy()

    def _selects(self, version: int) -> bool:
        return version >= self.warmup_rounds and self.kind != "all"

    @staticmethod
    def _rank(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses = cross_entropy(logits, labels, reduction="none")
        return losses, uncertainty(probabilities=logits.softmax(1))
