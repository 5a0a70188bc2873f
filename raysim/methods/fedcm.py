"""FedCM: every local step mixes its gradient with the mean direction of the previous round.

Xu, Wang, Wang and Yao, "FedCM: Federated Learning with Client-level Momentum" (2021), Algorithm 1:

    v <- alpha g + (1 - alpha) Delta                                   every local step
    Delta <- sum_i p_i (x - y_i) / (eta_l K_i)                         p_i: normalised weights

Choices where the sources differ or are silent
- Delta starts at 0 (paper), so the first round moves alpha times as far; warm_start=True is plain SGD in round 1, as in
  FedBR's code.
- Weight decay is part of g; with local.clip the part of it that mixing takes away is clipped too. With local momentum
  the mix comes first and momentum sees v; FedBR's code shifts the momentum buffer in place, which is another method.
- K_i is what the client really stepped, each group of parameters for itself (FedBR's projector, DANN's discriminator);
  eta_l is the rate of the round that moved.
- The server's own rate is 1; `method=fedcm+fedavgm` has others.
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


def update_direction(gradient: Tensor, server_direction: Tensor, alpha: float) -> Tensor:
    """alpha g + (1 - alpha) Delta, all [d]."""
    return alpha * gradient + (1.0 - alpha) * server_direction


def server_direction(
    global_params: Tensor, client_params: Tensor, lr: float, num_steps: Tensor, weights: Tensor
) -> Tensor:
    """Delta: the weighted mean over the clients of (x - y_i) / (lr K_i).

    ``global_params`` [d], ``client_params`` [m, d], ``num_steps`` [m] above 0, ``weights`` [m], normalised here.
    """
    exact = weights.double()
    shares = exact / exact.sum() / (num_steps.double() * lr)
    total = torch.zeros_like(global_params)
    for params, share in zip(client_params, shares.tolist(), strict=True):
        total.add_(global_params - params, alpha=share)
    return total


class FedCM(Method):
    """alpha is the fresh gradient's part; 1 is FedAvg."""

    name = "fedcm"
    paper = "Xu et al., 2021"
    weighting = "uniform"

    def __init__(self, alpha: float = 0.1, warm_start: bool = False):
        self.alpha, self.warm_start = between("method.fedcm.alpha", alpha, 0.0, 1.0), warm_start

    def setup(self, run: Setup) -> None:
        """Keep Delta, zero, on the server; it travels down."""
        run.require(
            run.local.optimizer == "sgd",
            f"local.optimizer={run.local.optimizer}: method 'fedcm' reads Delta off the movement of "
            "the parameters, which only SGD allows. Set local.optimizer=sgd.",
        )
        run.corrects("mix")
        run.read_updates()
        run.server_state("direction", run.zeros)
        run.send("direction")

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Apply `update_direction` in place.

        The optimizer adds the whole weight decay later, of which only alpha is due.
        """
        if self.alpha == 1 or (self.warm_start and job.version == 0):
            return
        grad.mul_(self.alpha).add_(job.received["direction"][at], alpha=1 - self.alpha)
        decay = job.local.weight_decay
        if decay:
            grad.add_(job.params[at], alpha=(self.alpha - 1) * decay)

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Compute Delta, each stretch of parameters by the steps that were made there."""
        direction = torch.zeros_like(server.params)
        weights = torch.tensor(aggregation.weights, dtype=torch.float64)
        shares = (weights / weights.sum()).tolist()
        for share, update, delta in zip(
            shares, aggregation.updates, aggregation.deltas, strict=True
        ):
            for start, stop, travelled in update.moves:
                direction[start:stop].sub_(delta[start:stop], alpha=share / travelled)
        server.state["direction"] = direction
