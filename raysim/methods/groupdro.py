"""GroupDRO: increase the weights of clients with a high loss, round by round.

Source: Sagawa et al., "Distributionally Robust Neural Networks for Group Shifts" (ICLR 2020),
Algorithm 1, in the federated form of FedBR's Appendix A. Client i has the weight q_i, and the loss
l_i in a round. eta_q is the setting `step_size`. Each round changes the weights of its
participants:

    q_i <- q_i exp(eta_q l_i)

The server averages the participants' models with the weights q_i / sum_j q_j.

Departures from the paper or public code
- A group is a client, not a set of samples.
- l_i is the task loss of the first local batch, as in FedBR's code. With batches="all", it is the
  mean over all local steps.
- q_i belongs to client i. In FedBR's code, it belongs to position i in a round.
- Mixup and momentum are optional. FedBR's code always uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

CountedBatches: TypeAlias = Literal["first", "all"]
Prior: TypeAlias = Literal["uniform", "samples"]


# The method computes the same without these functions, which state the rule on plain tensors.
def updated_weights(weights: Tensor, losses: Tensor, indices: Tensor, step_size: float) -> Tensor:
    """Return the weights q of all N clients after one round, divided by their sum: [N].

    A participant's q is multiplied by exp(step_size * loss), without overflow.

    weights: [N], q before the round, above 0.
    losses: [M], the losses of the participants.
    indices: int64 [M], the numbers of the participants.
    """
    updated = _add_losses(weights.log(), losses, indices, step_size).softmax(0)
    return updated.clamp_min(torch.finfo(updated.dtype).tiny)


def aggregation_weights(weights: Tensor, indices: Tensor) -> Tensor:
    """Return the weights of the M participants, divided by their sum: [M].

    weights: [N], the weights of all clients.
    indices: int64 [M], the numbers of the participants, in the order of the result.
    """
    participants = weights[indices]
    return participants / participants.sum()


def _add_losses(log_weights: Tensor, losses: Tensor, indices: Tensor, step_size: float) -> Tensor:
    """Add step_size * loss to the logarithm of each participant's weight.

    log_weights: [N], the logarithms of all clients' weights, changed in place and returned; not
    normalised.
    losses: [M], the losses of the participants.
    indices: int64 [M], the participants; a client may be there twice.
    """
    return log_weights.index_add_(0, indices, step_size * losses.to(log_weights.dtype))


class GroupDRO(Method):
    """A server rule that gives clients with a high loss more weight.

    step_size: eta_q. After a round with loss l, a client's weight is multiplied by exp(eta_q l).
    batches: a client's loss is the loss of the "first" batch, or the mean loss of "all" batches.
    prior: the weights before the first round, "uniform" or by "samples".
    """

    name = "groupdro"
    paper = "Sagawa et al., ICLR 2020"
    weighting = "uniform"

    def __init__(
        self,
        step_size: float = 0.01,
        batches: CountedBatches = "first",
        prior: Prior = "uniform",
    ):
        self.step_size = at_least("method.groupdro.step_size", step_size, 0.0)
        self.batches = one_of("method.groupdro.batches", batches, get_args(CountedBatches))
        self.prior = one_of("method.groupdro.prior", prior, get_args(Prior))

    def setup(self, run: Setup) -> None:
        """Keep the logarithm of each client's weight on the server; each job uploads its loss."""
        run.needs_fixed_clients("the server has a weight for each client")
        run.warn_if_single("its weights change nothing")
        run.server_state("log_weights", self._first_log_weights)
        run.upload("loss", 1)

    def _first_log_weights(self, server: ServerView) -> Tensor:
        """Return the logarithms of all clients' initial weights, float64 [clients]."""
        ones = np.ones(server.clients)
        start = ones if self.prior == "uniform" else np.maximum(server.sample_counts, 1e-9)
        return torch.from_numpy(np.log(start / start.sum()))

    def end(self, job: LocalJob) -> None:
        """Upload the client's loss, without terms that other methods add.

        The loss is 0 if no step had the task loss.
        """
        losses = job.losses
        if not len(losses):  # No step had the task loss.
            losses = losses.new_zeros(1)
        if self.batches == "first":
            job.upload["loss"] = losses[:1]
        else:
            job.upload["loss"] = losses.mean(0, keepdim=True)

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        """Update each participant's q, and multiply the weight of the participant's update by q.

        q is first multiplied by exp(step_size * loss), with the loss that the participant uploaded.
        The factor on an update's weight is then q divided by the largest q of all participants.
        """
        clients = torch.tensor(aggregation.clients)
        losses = torch.cat(aggregation.uploads("loss"))
        log_weights = server.state["log_weights"]
        if self.step_size:
            _add_losses(log_weights, losses, clients, self.step_size)
        participants = log_weights[clients]
        ratios = (participants - participants.max()).exp().tolist()
        pairs = zip(aggregation.weights, ratios, strict=True)
        return aggregation.with_weights([weight * ratio for weight, ratio in pairs])
