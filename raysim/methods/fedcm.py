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

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.declarations import Cost, Download, Participation
from raysim.api.hooked_method import HookedMethod
from raysim.primitives.checks import between

if TYPE_CHECKING:
    from raysim.api.context import Context
    from raysim.api.hooked_method import OldSetup as Setup
    from raysim.api.server_view import Aggregation, Server


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


class FedCM(HookedMethod):
    """alpha is the fresh gradient's part; 1 is FedAvg."""

    name = "fedcm"
    paper = "Xu et al., 2021"
    weighting = "uniform"
    correction = "mix"
    needs_single_updates = True

    def __init__(self, alpha: float = 0.1, warm_start: bool = False):
        self.alpha, self.warm_start = between("method.fedcm.alpha", alpha, 0.0, 1.0), warm_start

    def check(self, setup: Setup) -> Sequence[str]:
        """Delta is read off the movement, which only SGD allows."""
        if setup.local.optimizer != "sgd":
            raise ValueError(
                f"method 'fedcm' needs SGD, not local.optimizer={setup.local.optimizer}: set local.optimizer=sgd"
            )
        return ()

    def start(self, server: Server) -> None:
        """Delta, zero."""
        server.state["fedcm.direction"] = torch.zeros_like(server.params)

    def cost(self, job: Participation) -> Cost:
        """Delta travels down."""
        return Cost(down=job.run.layout.trained)

    def send(self, server: Server) -> Download:
        """Delta goes to everybody."""
        return Download(version=lambda: {"fedcm.direction": server.state["fedcm.direction"]})

    def gradient(self, ctx: Context, grad: Tensor, part: slice) -> None:
        """`update_direction`, in place; the optimiser adds the whole weight decay later, of which alpha is due."""
        if self.alpha == 1 or (self.warm_start and ctx.version == 0):
            return
        grad.mul_(self.alpha).add_(ctx.download["fedcm.direction"][part], alpha=1 - self.alpha)
        if decay := ctx.trainer.local.weight_decay:
            grad.add_(ctx.vector.data[part], alpha=(self.alpha - 1) * decay)

    def absorb(self, aggregation: Aggregation, server: Server) -> None:
        """Each stretch of parameters by the steps that were made there."""
        direction = torch.zeros_like(server.params)
        weights = torch.tensor(aggregation.weights, dtype=torch.float64)
        shares = (weights / weights.sum()).tolist()
        for share, update, delta in zip(shares, aggregation.updates, aggregation.deltas, strict=True):
            for start, stop, travelled in update.moves:
                direction[start:stop].sub_(delta[start:stop], alpha=share / travelled)
        server.state["fedcm.direction"] = direction
