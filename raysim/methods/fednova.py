"""FedNova: divide each update by the number of its local steps.

Source: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization" (NeurIPS 2020). D_i is the update of client i after tau_i local steps, and p_i its
normalised weight. a_i is the number of plain steps that have the same effect as these tau_i steps:

    x <- x + (sum_j p_j a_j) sum_i p_i D_i / a_i

    a_i = tau_i                                                          plain SGD
    a_i = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho)          momentum rho
    a_i = sum_{k < tau_i} (1 - eta mu)^k                                 proximal term mu, rate eta

Departures from the paper
- Momentum, Nesterov's momentum and a proximal term can be combined: a_i is computed by tau_i steps
  with a constant gradient of 1.
- If layers are trained with different numbers of steps, tau_i is the largest of these numbers.
- Weight decay, clipping and local.keep_optimizer do not change a_i.
- Buffers are averaged as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import parameters_of
from raysim.primitives.checks import at_least
from raysim.vectors.gram import linear_combination

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def effective_steps(
    steps: int, momentum: float = 0.0, pull: float = 0.0, nesterov: bool = False
) -> float:
    """Return how many plain SGD steps move as far as the steps of a job, under a constant gradient.

    momentum: the factor of the momentum; 0 without momentum.
    pull: the learning rate times the weight of a proximal term; 0 without one.
    """
    moved, velocity = 0.0, 0.0
    for _ in range(steps):
        gradient = 1.0 - pull * moved
        velocity = momentum * velocity + gradient
        moved += gradient + momentum * velocity if nesterov else velocity
    return moved


def normalising_factors(weights: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Return the factor (sum_j p_j a_j / sum_j p_j) / a_i for each update i.

    The factors are exactly 1 if all a_i are equal.
    weights: the weight p_i of each update; the sum need not be 1.
    steps: the number a_i of effective steps of each update.
    """
    total = 0.0
    for weight in weights:  # `sum` rounds differently in later versions of Python
        total += weight
    factors = []
    for update_steps in steps:
        weighted_steps = 0.0
        for weight, other_steps in zip(weights, steps, strict=True):
            weighted_steps += weight * (other_steps / update_steps)
        factors.append(weighted_steps / total)
    return factors


class FedNova(Method):
    """A server rule that normalises each update by its number of effective steps.

    mu: the weight of the proximal term in the local loss. With FedProx, set it to
    `method.fedprox.mu`; 0 means no proximal term. FedNova only computes how this term changes the
    number of effective steps.
    """

    name = "fednova"
    paper = "Wang et al., NeurIPS 2020"

    def __init__(self, mu: float = 0.0):
        self.mu = at_least("method.fednova.mu", mu, 0.0)

    def setup(self, run: Setup) -> None:
        """Declare the upload of effective step numbers; refuse all optimizers except SGD."""
        run.require(
            run.local.optimizer == "sgd",
            f"local.optimizer={run.local.optimizer}: method 'fednova' needs SGD to count "
            "effective steps. Set local.optimizer=sgd.",
        )
        if self.mu == 0 and "fedprox" in run.methods:
            run.warn(
                "method.fednova.mu=0: method 'fednova' counts effective steps without the proximal "
                "term of method 'fedprox'. Set method.fednova.mu to the value of "
                "method.fedprox.mu."
            )
        run.warn_of_second_correction("scaffold")
        run.warn_if_single("it does what FedAvg does")
        run.upload("steps", 1)

    def end(self, job: LocalJob) -> None:
        """Upload the number of effective steps."""
        moves = [(steps, rate) for _, steps, rate in job.moves()]
        steps, rate = max(moves, default=(job.plan.steps, job.rate))
        local = job.local
        effective = effective_steps(steps, local.momentum, rate * self.mu, local.nesterov)
        job.upload["steps"] = torch.tensor([effective], dtype=torch.float64)

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the weighted mean of normalised updates; with equal steps it is FedAvg's mean."""
        steps = [float(upload) for upload in aggregation.uploads("steps")]
        factors = normalising_factors(aggregation.weights, steps)
        pairs = zip(aggregation.weights, factors, strict=True)
        weights = [weight * factor for weight, factor in pairs]
        rows = parameters_of(aggregation, server)
        return linear_combination(rows, weights).div_(aggregation.divisor)
