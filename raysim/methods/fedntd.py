"""FedNTD: distil the received model's outputs for the classes other than the true one.

Source: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning" (NeurIPS 2022). beta and tau are settings. For the C - 1 classes other than the true one,
p is the softmax of the received model's outputs divided by tau. q is the softmax of the local
model's outputs divided by tau:

    loss = cross-entropy + beta L_NTD        L_NTD = tau^2 KL(p || q)

Departures from the paper
- The received model is in eval mode. In the authors' code it is in train mode for the first client.
- With Mixup, L_NTD is averaged over both labels with Mixup's weights. No paper describes this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.api.declarations import FORWARD, Participation
from raysim.api.method import Method
from raysim.primitives.checks import above, at_least

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup


def not_true_distillation_loss(
    logits: Tensor, global_logits: Tensor, labels: Tensor, temperature: float
) -> Tensor:
    """Return the mean over the batch of tau^2 KL(teacher || student), without the true classes.

    With C = 2 only one class remains, and the loss is 0.
    logits: [B, C], the student's outputs.
    global_logits: [B, C], the teacher's outputs, which get no gradient.
    labels: int64 [B].
    temperature: tau, by which all outputs are divided.
    """
    index = torch.arange(logits.shape[1] - 1, device=logits.device)
    other_classes = index + (index >= labels.unsqueeze(1))
    student_logits = logits.gather(1, other_classes)
    teacher_logits = global_logits.detach().gather(1, other_classes)
    student = F.log_softmax(student_logits / temperature, dim=1)
    teacher = F.log_softmax(teacher_logits / temperature, dim=1)
    return temperature**2 * (teacher.exp() * (teacher - student)).sum(dim=1).mean()


class FedNTD(Method):
    """A method that distils the received model's outputs for all classes but the true one.

    beta: the weight of the distillation.
    temperature: the number tau by which the outputs of both models are divided before the softmax.
    """

    name = "fedntd"
    paper = "Lee et al., NeurIPS 2022"

    def __init__(self, beta: float = 1.0, temperature: float = 1.0):
        self.beta = at_least("method.fedntd.beta", beta, 0.0)
        self.temperature = above("method.fedntd.temperature", temperature, 0.0)

    def setup(self, run: Setup) -> None:
        """Refuse a task without classes."""
        run.needs("classes")

    def cost(self, job: Participation) -> float:
        """Return the cost of the received model's forward passes, as a number of trained samples.

        The cost is a third of the number of samples on which the job trains; 0 with beta = 0.
        """
        return FORWARD * job.trained_samples if self.beta else 0.0

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add the weighted distillation loss."""
        if not self.beta:
            return loss
        if out.batch.pair is None:
            return loss + self.beta * self._distillation(out, out.batch.targets)
        first, second, lam = out.batch.pair
        share = lam.to(out.logits)
        first_loss = self._distillation(out, first)
        second_loss = self._distillation(out, second)
        return loss + self.beta * (share * first_loss + (1 - share) * second_loss)

    def _distillation(self, out: Outputs, labels: Tensor) -> Tensor:
        return not_true_distillation_loss(out.logits, out.base_logits, labels, self.temperature)
