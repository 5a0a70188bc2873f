"""q-FedAvg: weight each client by its loss to the power q, so that accuracies become more equal.

Source: Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning" (ICLR
2020), Algorithm 2. F_i is the loss of the received model on client i's training samples. D_i is the
client's update, and x the shared model. L is 1 divided by the learning rate of the job:

    x <- x + sum_i L F_i^q D_i / sum_i h_i
    h_i = q F_i^(q-1) |L D_i|^2 + L F_i^q

Departures from the paper
- The terms of both sums have weights; by default, all weights are equal.
- F_i is measured in eval mode, without augmentation and loss terms of other methods. It is at least
  1e-10.
- |D_i| is the norm over the shared trainable parameters.
- Buffers are averaged with the weights F_i^q.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.declarations import FORWARD, Participation
from raysim.api.method import Method
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

LEAST_LOSS = 1e-10


def loss_before_training(job: LocalJob) -> Tensor:
    """Return the mean loss of the received model on the client's training samples: float64 [1]."""
    model = job.frozen()["model"]
    total = torch.zeros(1, dtype=torch.float64, device=job.params.device)
    with torch.no_grad():
        for inputs, labels in job.data():
            total += job.task.objective.loss(model(inputs), labels) * len(labels)
    return total / job.samples


def divisor(
    weights: Sequence[float], losses: Sequence[float], curvatures: Sequence[float], q: float
) -> float:
    """Return the divisor of the weighted sum of updates: the sum over clients of w (1 + q c / F).

    weights: w for each client: the aggregation weight, already multiplied by F^q.
    losses: F for each client: the loss of the received model on the client's data.
    curvatures: c for each client: the squared norm of the update, divided by the job's learning
    rate.
    """
    total = 0.0
    for weight, loss, curvature in zip(weights, losses, curvatures, strict=True):
        total += weight * (1.0 + q * curvature / loss)
    return total


class QFedAvg(Method):
    """A server rule that weights each client by its loss to the power q.

    q: the power of the loss in a client's weight; 0 is the mean of updates.
    """

    name = "qfedavg"
    paper = "Li et al., ICLR 2020"
    weighting = "uniform"

    def __init__(self, q: float = 1.0):
        self.q = at_least("method.qfedavg.q", q, 0.0)

    def setup(self, run: Setup) -> None:
        """Declare two uploaded numbers; refuse methods that also change the divisor of the mean."""
        for other in ("fedbuff", "fedasync", "fedcda", "ca2fl", "ace"):
            run.excludes(other, "both set the divisor of the sum of updates")
        run.upload("loss", 1)
        run.upload("curvature", 1)

    def cost(self, job: Participation) -> float:
        """Return the cost of measuring a client's loss, as a number of trained samples.

        This is one forward pass over all samples of the client. A forward pass over one sample
        costs a third of a trained sample.
        """
        return FORWARD * job.samples

    def end(self, job: LocalJob) -> None:
        """Upload the loss of the received model, and the curvature.

        The curvature is |u|^2 / lr, with u the update and lr the job's learning rate.
        """
        trained = job.layout.trained
        moved = job.params[:trained] - job.broadcast[:trained]
        job.upload["loss"] = loss_before_training(job)
        job.upload["curvature"] = moved.square_().sum(dtype=torch.float64).reshape(1) / job.rate

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        """Multiply each client's weight by F^q, and replace the divisor of the sum of updates.

        F is the loss of the received model on the client's data, and q is the setting `q`. The
        function `divisor` computes the new divisor.
        """
        losses = [max(float(loss), LEAST_LOSS) for loss in aggregation.uploads("loss")]
        curvatures = [float(curvature) for curvature in aggregation.uploads("curvature")]
        pairs = zip(aggregation.weights, losses, strict=True)
        weights = [weight * loss**self.q for weight, loss in pairs]
        return aggregation.with_weights(
            weights, lambda final: divisor(final, losses, curvatures, self.q)
        )
