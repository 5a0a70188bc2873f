"""FedCM: mix the gradient of every local step with the mean direction of the previous round.

Source: Xu et al., "FedCM: Federated Learning with Client-level Momentum" (2021), Algorithm 1. g is
the gradient of a local step, x the received model, and eta_l the local learning rate. Client i made
K_i steps; y_i is its trained model and p_i its normalised weight. A local step moves along v:

    v <- alpha g + (1 - alpha) Delta                                   every local step
    Delta <- sum_i p_i (x - y_i) / (eta_l K_i)                         every aggregation

Choices, and departures from the paper
- Delta starts at 0, as in the paper. So the first round's steps are alpha times as long as those of
  SGD. With warm_start=True, as in FedBR's code, they are as long as those of SGD.
- v contains alpha times the weight decay.
- Local momentum is a sum of earlier v. In FedBR's code it is not.
- If stages train separate networks, each network has its own K_i.
- The server's learning rate is 1; `method=fedcm+fedavgm` has a setting for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import between

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


# The method computes the same without these functions, which state the rule on plain tensors.
def update_direction(gradient: Tensor, server_direction: Tensor, alpha: float) -> Tensor:
    """Return alpha * gradient + (1 - alpha) * server_direction, all [d].

    gradient: the gradient of a local step.
    server_direction: the mean direction of the previous round, as the server sent it.
    """
    return alpha * gradient + (1.0 - alpha) * server_direction


def server_direction(
    global_params: Tensor, client_params: Tensor, lr: float, num_steps: Tensor, weights: Tensor
) -> Tensor:
    """Return the direction sum_i p_i (x - y_i) / (eta_l K_i), [d].

    global_params: [d], the model x that the clients received.
    client_params: [m, d], each client's trained model y_i.
    lr: the local learning rate eta_l.
    num_steps: [m], the steps K_i of each client.
    weights: float64 [m]; divided by their sum, these are p_i.
    """
    factors = weights / weights.sum() / (num_steps.double() * lr)
    total = torch.zeros_like(global_params)
    for params, factor in zip(client_params, factors.tolist(), strict=True):
        total.add_(global_params - params, alpha=factor)
    return total


class FedCM(Method):
    """A method that mixes every local gradient with the last round's mean direction.

    alpha: the share of the gradient in the mixture. With alpha=1, the method is FedAvg.
    warm_start: True uses the gradients unchanged in the first round, before a direction exists.
    """

    name = "fedcm"
    paper = "Xu et al., 2021"
    weighting = "uniform"

    def __init__(self, alpha: float = 0.1, warm_start: bool = False):
        self.alpha = between("method.fedcm.alpha", alpha, 0.0, 1.0)
        self.warm_start = warm_start

    def setup(self, run: Setup) -> None:
        """Declare the mean direction as server state that is sent to clients; it starts at 0."""
        run.require(
            run.local.optimizer == "sgd",
            f"local.optimizer={run.local.optimizer}: method 'fedcm' computes gradients from the "
            "difference between the received and the trained parameters, which is possible only "
            "with SGD. Set local.optimizer=sgd.",
        )
        run.corrects("mix")
        run.read_updates()
        run.server_state("direction", run.zeros)
        run.send("direction")

    def begin(self, job: LocalJob) -> None:
        """Decide whether the job uses its gradients unchanged."""
        is_warm_up = self.warm_start and job.version == 0
        job.scratch["is_plain"] = is_warm_up or self.alpha == 1

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Replace the gradient by its mixture with the server's direction, in place.

        grad: the gradient with respect to the parameters `job.params[at]`.
        at: the positions of these parameters in the vector.
        """
        if job.scratch["is_plain"]:
            return
        grad.mul_(self.alpha).add_(job.received["direction"][at], alpha=1 - self.alpha)
        decay = job.local.weight_decay
        # The optimizer later adds the full weight decay, but the mixture should contain only alpha
        # times the weight decay.
        if decay:
            grad.add_(job.params[at], alpha=(self.alpha - 1) * decay)

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Compute the next direction from the updates of this round.

        A client contributes its received model minus its trained model, divided by its number of
        steps and the learning rate. The direction is the weighted mean over the clients.
        """
        direction = torch.zeros_like(server.params)
        weights = torch.tensor(aggregation.weights, dtype=torch.float64)
        shares = (weights / weights.sum()).tolist()
        updates = zip(shares, aggregation.updates, aggregation.deltas, strict=True)
        for share, update, delta in updates:
            # steps_times_rate: the number of steps times the learning rate of this slice.
            for start, stop, steps_times_rate in update.moves:
                direction[start:stop].sub_(delta[start:stop], alpha=share / steps_times_rate)
        server.state["direction"] = direction
