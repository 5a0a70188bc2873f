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

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


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
    return log_weights.index_add_(
        0, indices, step_size * losses.to(log_weights.dtype)
    )  # a client may be there twice


class GroupDRO(Method):
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

    def setup(self, run: Setup) -> None:
        """Keep log q of all clients on the server; each job uploads its loss."""
        run.warn_if_single("its weights change nothing")
        run.server_state("log_weights", self._first_log_weights)
        run.upload("loss", 1)

    def _first_log_weights(self, server: ServerView) -> Tensor:
        """Return log q, float64 [clients], up to an additive constant."""
        ones = np.ones(server.clients)
        start = ones if self.prior == "uniform" else np.maximum(server.counts, 1e-9)
        return torch.from_numpy(np.log(start / start.sum()))

    def end(self, job: LocalJob) -> None:
        """Upload l_i, without the terms that methods add."""
        losses = job.losses
        if not len(losses):  # no step had the task loss: nothing is known of this client
            losses = losses.new_zeros(1)
        first = self.batches == "first"
        job.upload["loss"] = losses[:1] if first else losses.mean(0, keepdim=True)

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        """Update q, then weigh by it.

        Only ratios count, so the largest is 1 and equal ones change nothing.
        """
        clients = torch.tensor(aggregation.clients)
        losses = torch.cat(aggregation.uploads("loss"))
        log_weights = server.state["log_weights"]
        if self.step_size:
            _raise(log_weights, losses, clients, self.step_size)
        chosen = log_weights[clients]
        ratios = (chosen - chosen.max()).exp().tolist()
        pairs = zip(aggregation.weights, ratios, strict=True)
        return aggregation.reweighted([weight * ratio for weight, ratio in pairs])
