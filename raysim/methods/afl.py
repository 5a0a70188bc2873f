"""AFL, agnostic federated learning: minimise the loss of the worst mixture of the clients.

Source: Mohri et al., "Agnostic Federated Learning" (ICML 2019), with local steps as in Deng et al.
(NeurIPS 2020). x is the model and gamma a step size. The server learns a weight lambda_i for each
of N clients. These weights sum to one and are equal at first. S are the participants of a round.
D_i is the update of client i, and F_i the loss of the received model on the client's training
samples:

    x <- x + sum_{i in S} lambda_i D_i / sum_{i in S} lambda_i
    lambda_i <- lambda_i + gamma (N / |S|) F_i         for the participants
    lambda <- Euclidean projection of lambda onto the simplex (Duchi et al., ICML 2008)

Departures from the paper
- N counts only the clients with training samples, and is at most 100,000.
- F_i is the task loss alone, in eval mode and without augmentation.
- If lambda_i = 0 for all participants, the run's weights replace lambda_i in the mean.
- BatchNorm's statistics are averaged with the same weights as the updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.declarations import FORWARD, Participation
from raysim.api.method import Method
from raysim.methods.qfedavg import loss_before_training
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

MAX_CLIENTS = 100_000


def project_onto_simplex(values: Tensor) -> Tensor:
    """Return the point of the probability simplex that is nearest to `values` [n].

    Its entries are at least 0 and sum to 1.
    """
    largest_first = values.sort(descending=True).values
    excess = largest_first.cumsum(0) - 1.0
    counts = torch.arange(1, len(values) + 1, dtype=values.dtype)
    num_positive = int((largest_first * counts > excess).sum())
    threshold = excess[num_positive - 1] / num_positive
    return (values - threshold).clamp_min(0.0)


class AFL(Method):
    """A server rule that minimises the loss of the worst mixture of the clients.

    step_size: the step size gamma by which clients' weights follow their losses; 0 keeps the
    weights uniform.
    """

    name = "afl"
    paper = "Mohri et al., ICML 2019"
    weighting = "uniform"

    def __init__(self, step_size: float = 0.1):
        self.step_size = at_least("method.afl.step_size", step_size, 0.0)

    def setup(self, run: Setup) -> None:
        """Declare the learnt aggregation weights as server state, and the upload of a loss.

        The server state has one weight for each client. Each job uploads the loss of the model that
        the client received.
        """
        run.needs_fixed_clients("the server has a weight for each client")
        run.require(
            run.clients_with_samples <= MAX_CLIENTS,
            f"method.afl: {run.clients_with_samples} clients have training samples, but method "
            f"'afl' supports at most {MAX_CLIENTS}, because each round sorts their weights. "
            f"Set partition.clients={MAX_CLIENTS} or less, or choose another method.",
        )
        run.warn_if_single("its weights change nothing")
        for other in ("fedasync", "fedcda", "ca2fl", "ace"):
            run.excludes(other, f"the server's step of '{other}' does not use the weights of 'afl'")
        run.server_state("weights", self._first_weights)
        run.upload("loss", 1)

    def _first_weights(self, server: ServerView) -> Tensor:
        """Return the initial aggregation weight of each client: float64 [clients]."""
        has_samples = torch.from_numpy(server.sample_counts > 0).double()
        return has_samples / has_samples.sum()

    def cost(self, job: Participation) -> float:
        """Return the cost of a forward pass over the client's samples, in trained samples.

        A forward pass of a sample costs a third of training on it.
        """
        return FORWARD * job.samples

    def end(self, job: LocalJob) -> None:
        """Upload the loss of the received model on the client's samples."""
        job.upload["loss"] = loss_before_training(job)

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        """Multiply the weight of each client's update by lambda_i, the learnt weight of client i.

        First divide all lambda_i by the largest lambda_i of these clients. If the largest one is 0,
        the weights of the updates do not change.
        """
        chosen = server.state["weights"][torch.tensor(aggregation.clients)]
        largest = float(chosen.max())
        if largest == 0:
            return aggregation
        ratios = (chosen / largest).tolist()
        pairs = zip(aggregation.weights, ratios, strict=True)
        return aggregation.with_weights([weight * ratio for weight, ratio in pairs])

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Change the learnt weights by an ascent step, and project them onto the simplex."""
        if not self.step_size:
            return
        clients = torch.tensor(aggregation.clients)
        losses = torch.cat(aggregation.uploads("loss"))
        ascent = losses * (self.step_size * server.clients_with_samples / len(clients))
        weights = server.state["weights"].index_add(0, clients, ascent)
        active = torch.from_numpy(server.sample_counts > 0)
        weights[active] = project_onto_simplex(weights[active])
        server.state["weights"] = weights
