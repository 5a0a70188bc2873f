"""FedLC: lower the logits of a client's rare classes in training, so that it has to learn a larger margin for them.

Zhang, Li, Li, Xu, Wu, Ding and Wu, "Federated Learning with Label Distribution Skew via Logits Calibration" (ICML
2022). With n_c the client's samples of class c, and m_c = tau n_c^(-1/4),

    loss = mean_b -log( exp(z_y - m_y) / sum_c exp(z_c - m_c) )        over the classes with n_c > 0

Choices where the paper and the public re-implementations disagree or are silent
- The sum includes the true class ("all", re-implementations), or the loss has no lower bound; "others" is as printed.
- Classes that a client lacks are left out, the limit of their margin; count_floor > 0 bounds the margin instead.
- A client with one class has loss 0 and no gradient, so what it sends is what it received, but for weight decay, other
  methods' terms, and BatchNorm's statistics. History: `fedlc.one_class`, the share of such clients.
- Outputs that are no classes of the data (VHL's) have no margin.
- With soft targets (Mixup) "all" is the cross-entropy with them, "others" the mix of both labels' losses. FedMix has a
  loss of its own and is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

DENOMINATORS = ("all", "others")


def calibration_margins(*, class_counts: Tensor, tau: float, count_floor: float = 0.0) -> Tensor:
    """m_c of ``class_counts`` [C], at least ``count_floor`` each: float64 [C], infinite where that leaves 0."""
    counts = class_counts.double().clamp(min=count_floor)
    return torch.where(counts > 0, tau * counts.pow(-0.25), torch.inf)


def shifts(margins: Tensor, dtype: torch.dtype) -> Tensor:
    """What is subtracted from logits: ``margins`` in ``dtype``, an infinite one as a number that no softmax notices.

    Infinity would do the same to a softmax; but 0 times it, as with soft targets, is nan.
    """
    return margins.clamp(max=torch.finfo(dtype).max / 4).to(dtype)


def others_loss(calibrated: Tensor, labels: Tensor, several: Tensor) -> Tensor:
    """The printed loss, the mean over the batch: the sum leaves the true class ``labels`` int64 (B,) out.

    ``calibrated``: logits (B, C) less their shifts. ``several``: whether two margins are finite, else it is 0.
    """
    true = labels.unsqueeze(1)
    losses = calibrated.scatter(1, true, -torch.inf).logsumexp(dim=1) - calibrated.gather(
        1, true
    ).squeeze(1)
    return (losses * several).mean()  # not after the mean: a sum of shifts is infinite


def calibrated_cross_entropy(
    *,
    logits: Tensor,
    labels: Tensor,
    class_counts: Tensor,
    tau: float,
    denominator: str = "all",
    count_floor: float = 0.0,
) -> Tensor:
    """The loss, the mean over the batch: ``logits`` (B, C), ``labels`` int64 (B,), ``class_counts`` [C].

    Every label needs a finite margin. No gradient reaches the logits of classes that are left out.
    """
    margins = calibration_margins(class_counts=class_counts, tau=tau, count_floor=count_floor)
    calibrated = logits - shifts(margins, logits.dtype)
    if denominator == "all":
        return F.cross_entropy(calibrated, labels)
    return others_loss(calibrated, labels, margins.isfinite().sum() > 1)


class FedLC(Method):
    """tau scales the margins. Replaces the loss, for "others" is no cross-entropy; terms read the raw logits."""

    name = "fedlc"
    paper = "Zhang et al., ICML 2022"

    def __init__(
        self,
        tau: float = 1.0,
        denominator: Literal["all", "others"] = "all",
        count_floor: float = 0.0,
    ):
        self.tau = at_least("method.fedlc.tau", tau, 0.0)
        one_of("method.fedlc.denominator", denominator, DENOMINATORS)
        self.denominator = denominator
        self.count_floor = at_least("method.fedlc.count_floor", count_floor, 0.0)

    def setup(self, run: Setup) -> None:
        """Need classes; replace the task loss."""
        run.needs("classes")
        run.owns("loss")

    def begin(self, job: LocalJob) -> None:
        """Compute what is subtracted from the logits [outputs of the model] in this job."""
        counts = job.class_counts()
        margins = calibration_margins(
            class_counts=counts, tau=self.tau, count_floor=self.count_floor
        )
        margins = F.pad(margins, (0, job.num_classes - len(margins)))
        device = job.params.device
        job.scratch["shifts"] = shifts(margins, job.params.dtype).to(device)
        job.scratch["several"] = (margins.isfinite().sum() > 1).to(device)
        job.report["one_class"] = float((counts > 0).sum() == 1)

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the cross-entropy of the calibrated logits, or the printed form."""
        calibrated, batch = out.logits - job.scratch["shifts"], out.batch
        if self.denominator == "all":
            return F.cross_entropy(calibrated, batch.targets)
        several = job.scratch["several"]
        if batch.pair is None:
            return others_loss(calibrated, batch.targets, several)
        first, second, lam = batch.pair
        share = lam.to(calibrated)
        first_loss = others_loss(calibrated, first, several)
        second_loss = others_loss(calibrated, second, several)
        return share * first_loss + (1 - share) * second_loss
