"""FedLC: lower the logits of a client's rare classes in training.

Source: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration" (ICML
2022). z are the logits of sample b, y is its label, and n_c the number of the client's samples of
class c. With m_c = tau n_c^(-1/4),

    loss = mean_b -log( exp(z_y - m_y) / sum_c exp(z_c - m_c) )        over the classes with n_c > 0

Departures from the paper
- The sum includes the true class, as in public re-implementations. The paper's sum does not
  (denominator="others"), so the paper's loss has no lower bound.
- With count_floor=0, a client with only one class has loss 0 and no gradient. `fedlc.one_class` in
  the history is the share of such clients.
- Outputs that the method vhl adds have margin 0.
- With Mixup, the loss is the cross-entropy with the mixed labels. With denominator="others", the
  loss is the weighted mean of the losses for both labels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

Denominator: TypeAlias = Literal["all", "others"]


def calibration_margins(*, class_counts: Tensor, tau: float, count_floor: float = 0.0) -> Tensor:
    """Return the margin tau * n^(-1/4) of each class: float64 [C], infinite for a count of 0.

    class_counts: [C], the client's number n of samples of each class.
    tau: the scale of the margins.
    count_floor: smaller counts are raised to this number.
    """
    counts = class_counts.double().clamp(min=count_floor)
    return torch.where(counts > 0, tau * counts.pow(-0.25), torch.inf)


def shifts(margins: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the margins in `dtype`, with a large finite number in place of infinity.

    margins: the margin of each class, [C]; infinite for a class that the client lacks.
    """
    # In a softmax, the large number has the same effect. Infinity times a soft target of 0 is nan.
    return margins.clamp(max=torch.finfo(dtype).max / 4).to(dtype)


def others_loss(calibrated: Tensor, labels: Tensor, has_several: Tensor) -> Tensor:
    """Return the loss in the paper's form: mean_b -log(exp(u_by) / sum_{c != y} exp(u_bc)).

    calibrated: u, [B, C], the logits minus the margins.
    labels: int64 [B], the label y of each sample b.
    has_several: a bool scalar, True if more than one class has a finite margin. False makes the
    loss 0.
    """
    true_class = labels.unsqueeze(1)
    without_true = calibrated.scatter(1, true_class, -torch.inf).logsumexp(dim=1)
    losses = without_true - calibrated.gather(1, true_class).squeeze(1)
    # Before the mean, because a sum of shifts may be infinite.
    return (losses * has_several).mean()


# The method computes the same without this function, which states the rule on plain tensors.
def calibrated_cross_entropy(
    *,
    logits: Tensor,
    labels: Tensor,
    class_counts: Tensor,
    tau: float,
    denominator: str = "all",
    count_floor: float = 0.0,
) -> Tensor:
    """Return FedLC's loss: the cross-entropy in which each logit is lowered by its class's margin.

    The loss is the mean over the batch. A class with an infinite margin is left out.
    logits: [B, C].
    labels: int64 [B], of classes with a finite margin.
    class_counts, tau, count_floor: the arguments of `calibration_margins`.
    denominator: "all" has all classes in the softmax's sum, "others" all but the true class.
    """
    margins = calibration_margins(class_counts=class_counts, tau=tau, count_floor=count_floor)
    calibrated = logits - shifts(margins, logits.dtype)
    if denominator == "all":
        return F.cross_entropy(calibrated, labels)
    return others_loss(calibrated, labels, margins.isfinite().sum() > 1)


class FedLC(Method):
    """A task loss that lowers the logits of the client's rare classes.

    The logit of a class with n samples is lowered by the margin tau * n^(-1/4). Terms of other
    methods use the unchanged logits.

    tau: the scale of the margins.
    denominator: "all" has all classes in the softmax's sum, "others" all but the true class.
    count_floor: smaller counts of a class are replaced by this number. 0 leaves out classes that
    the client lacks.
    """

    name = "fedlc"
    paper = "Zhang et al., ICML 2022"

    def __init__(
        self,
        tau: float = 1.0,
        denominator: Denominator = "all",
        count_floor: float = 0.0,
    ):
        self.tau = at_least("method.fedlc.tau", tau, 0.0)
        one_of("method.fedlc.denominator", denominator, get_args(Denominator))
        self.denominator = denominator
        self.count_floor = at_least("method.fedlc.count_floor", count_floor, 0.0)

    def setup(self, run: Setup) -> None:
        """Require a classification task; replace the task loss."""
        run.needs("classes")
        run.owns("loss")

    def begin(self, job: LocalJob) -> None:
        """Compute the margins of the logits in this job, one for each output of the model."""
        counts = job.class_counts()
        margins = calibration_margins(
            class_counts=counts, tau=self.tau, count_floor=self.count_floor
        )
        margins = F.pad(margins, (0, job.num_classes - len(margins)))
        device = job.params.device
        job.scratch["shifts"] = shifts(margins, job.params.dtype).to(device)
        job.scratch["has_several"] = (margins.isfinite().sum() > 1).to(device)
        job.report["one_class"] = float((counts > 0).sum() == 1)

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the cross-entropy after each class's margin is subtracted from its logit.

        With `denominator="others"`, the softmax's sum leaves out the true class, as the paper
        prints it.
        """
        calibrated = out.logits - job.scratch["shifts"]
        batch = out.batch
        if self.denominator == "all":
            return F.cross_entropy(calibrated, batch.targets)
        has_several = job.scratch["has_several"]
        if batch.pair is None:
            return others_loss(calibrated, batch.targets, has_several)
        first, second, lam = batch.pair
        share = lam.to(calibrated)
        first_loss = others_loss(calibrated, first, has_several)
        second_loss = others_loss(calibrated, second, has_several)
        return share * first_loss + (1 - share) * second_loss
