"""GroupDRO with clients as groups: clients with a high loss gain aggregation weight exponentially.

Sagawa, Koh, Hashimoto and Liang, "Distributionally Robust Neural Networks for Group Shifts" (ICLR 2020), Algorithm 1,
in the federated form of FedBR's Appendix A: q_i <- q_i exp(eta_q l_i) for the participants, who are then averaged with
the weights q_i / sum q_j.

Choices where the sources differ or are silent
- l_i is the task loss of the received model on the first local batch (code); batches="all" takes the
  mean over all local steps.
- q belongs to the client (paper), not to a worker slot; it is renormalised, which changes no weight.
- Mixup and momentum across rounds, always on in FedBR's code, are choices of their own here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from raysim.api.declarations import Cost, Participation
from raysim.api.hooked_method import HookedMethod
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.context import Context
    from raysim.api.hooked_method import OldSetup as Setup
    from raysim.api.server_view import Aggregation, Server


def updated_weights(weights: Tensor, losses: Tensor, indices: Tensor, step_size: float) -> Tensor:
    """q after one round: ``weights`` (N,) above 0, ``losses`` (M,) of the clients ``indices`` int64 (M,).

    Sums to 1. In the log domain, for exp(step_size * loss) may overflow.
    """
    raised = _raise(weights.log(), losses, indices, step_size).softmax(0)
    return raised.clamp_min(torch.finfo(raised.dtype).tiny)


def aggregation_weights(weights: Tensor, indices: Tensor) -> Tensor:
    """The weights of the participants ``indices`` int64 (M,), in their order; they sum to 1."""
    chosen = weights[indices]
    return chosen / chosen.sum()


def _raise(log_weights: Tensor, losses: Tensor, indices: Tensor, step_size: float) -> Tensor:
    """log q after one round but for a common factor, in place: so who takes no part costs nothing."""
    return log_weights.index_add_(0, indices, step_size * losses.to(log_weights.dtype))  # a client may be there twice


class GroupDRO(HookedMethod):
    """step_size is eta_q. batches: those whose mean loss is l_i. prior: q at the start, equal or by samples."""

    name = "groupdro"
    paper = "Sagawa et al., ICLR 2020"
    weighting = "uniform"

    def __init__(
        self,
        step_size: float = 0.01,
        batches: Literal["first", "all"] = "first",
        prior: Literal["uniform", "samples"] = "uniform",
    ):
        self.step_size = at_least("method.groupdro.step_size", step_size, 0.0)
        self.batches, self.prior = batches, prior

    def check(self, setup: Setup) -> Sequence[str]:
        """A weight matters beside others."""
        return setup.warn_if_single("groupdro", "its weights change nothing")

    def start(self, server: Server) -> None:
        """log q, float64 [clients], but for a factor that all have."""
        start = np.ones(server.clients) if self.prior == "uniform" else np.maximum(server.counts, 1e-9)
        server.state["groupdro.log_weights"] = torch.from_numpy(np.log(start / start.sum()))

    def cost(self, job: Participation) -> Cost:
        """The loss travels up."""
        return Cost(up=1)

    def finish(self, ctx: Context) -> None:
        """l_i, without the terms that methods add."""
        losses = ctx.losses
        if not len(losses):  # no iteration had the task: nothing is known of this client
            losses = losses.new_zeros(1)
        ctx.upload["groupdro.loss"] = losses[:1] if self.batches == "first" else losses.mean(0, keepdim=True)

    def weigh(self, aggregation: Aggregation, server: Server) -> Aggregation:
        """Update q, then weigh by it; only ratios count, so the largest is 1 and equal ones change nothing."""
        clients = torch.tensor([update.client for update in aggregation.updates])
        losses = torch.from_numpy(np.concatenate([update.extras["groupdro.loss"] for update in aggregation.updates]))
        log_weights = server.state["groupdro.log_weights"]
        if self.step_size:
            _raise(log_weights, losses, clients, self.step_size)
        own = log_weights[clients]
        ratios = (own - own.max()).exp().tolist()
        return aggregation.reweighted([weight * r for weight, r in zip(aggregation.weights, ratios, strict=True)])
