"""FedRS: scale down the logits of the classes that a client does not have.

Source: Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution
Non-IID Data" (KDD 2021). s_c is 1 for a class that the client has, else alpha. The loss is the
cross-entropy of the scaled logits

    z_c = s_c <w_c, h>        w_c: the head's weights of class c, h: the features

Departures from the paper
- With kind="relative", s_c = alpha + (1 - alpha) n_c / max n, as in the released code. n_c is the
  number of the client's samples of class c.
- The head has no bias, as in the released code.
- With alpha = 0, a missing class has the logit 0 and stays in the softmax.
- Outputs that the method vhl adds are not scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.declarations import Task
from raysim.api.method import Method
from raysim.models.classifier import Classifier
from raysim.primitives.checks import between, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

ScaleKind: TypeAlias = Literal["binary", "relative"]


def class_scales(*, class_counts: Tensor, alpha: float, kind: str = "binary") -> Tensor:
    """Return the factor on the logit of each class: float64 [C].

    class_counts: [C], the client's number of samples of each class, not all 0.
    alpha: the factor of a class without samples.
    kind: the factor of a class with n samples: 1 ("binary") or alpha + (1 - alpha) n / max n
    ("relative").
    """
    counts = class_counts.double()
    presence = (counts > 0).double() if kind == "binary" else counts / counts.max()
    return alpha + (1.0 - alpha) * presence


# The method computes the same without this function, which states the rule on plain tensors.
def restricted_softmax_cross_entropy(
    *, logits: Tensor, labels: Tensor, class_counts: Tensor, alpha: float, kind: str = "binary"
) -> Tensor:
    """Return the mean cross-entropy of `logits` [B, C] after each class's logit is scaled.

    logits: the outputs of a head without a bias.
    labels: int64 [B].
    class_counts, alpha, kind: the arguments of `class_scales`, which returns the scales.
    """
    scales = class_scales(class_counts=class_counts, alpha=alpha, kind=kind)
    return F.cross_entropy(logits * scales.to(logits.dtype), labels)


class FedRS(Method):
    """A task loss that scales down the logits of classes that the client does not have.

    The method removes the bias of the model's head, also with alpha = 1.

    alpha: the factor on the logit of a class without samples.
    kind: the factor on the logit of a class with samples. "binary" is 1. "relative" grows from
    alpha to 1 with the number of the client's samples of the class.
    """

    name = "fedrs"
    paper = "Li and Zhan, KDD 2021"

    def __init__(self, alpha: float = 0.5, kind: ScaleKind = "binary"):
        self.alpha = between("method.fedrs.alpha", alpha, 0.0, 1.0)
        one_of("method.fedrs.kind", kind, get_args(ScaleKind))
        self.kind = kind

    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """Remove the bias of the head."""
        cast(Classifier, model).head.register_parameter("bias", None)
        return model

    def setup(self, run: Setup) -> None:
        """Require a classification task and a model with a linear head; replace the task loss."""
        run.needs("classes", "features")
        run.owns("loss")

    def begin(self, job: LocalJob) -> None:
        """Compute the client's scales, one for each output of the model."""
        counts = job.class_counts()
        scales = class_scales(class_counts=counts, alpha=self.alpha, kind=self.kind)
        padded = F.pad(scales, (0, job.num_classes - len(scales)), value=1.0)
        job.scratch["scales"] = padded.to(job.params)

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the task loss of the scaled logits."""
        scaled = out.logits * job.scratch["scales"]
        return job.task.objective.loss(scaled, out.batch.targets)
