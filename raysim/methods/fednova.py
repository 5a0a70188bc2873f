"""FedNova: divide each update by the local steps behind it, so that more steps weigh no more.

Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization" (NeurIPS 2020). With D_i the movement of client i in tau_i local steps, p_i
its normalised weight, and a_i the plain steps that its tau_i steps are worth:

    x <- x + (sum_j p_j a_j) sum_i p_i D_i / a_i

    a_i = tau_i                                                          plain SGD
    a_i = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho)          momentum rho
    a_i = sum_{k < tau_i} (1 - eta mu)^k                                 proximal term mu, rate eta

Choices where the source is silent
- a_i is how far tau_i steps move under a constant gradient of 1, divided by the learning rate. That
  gives all formulas above, and covers a proximal term with momentum, and Nesterov's momentum.
- tau_i counts the steps really made: smaller batches and selected samples (FedBSS) count. Where
  parts of the model make different numbers of steps, the largest number of a shared part counts.
- Weight decay and clipping are left out of a_i, and momentum starts at 0 in each job.
- Buffers are averaged as in FedAvg. With another divisor than the sum of weights (FedBuff) the
  same factors apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import parameters_of
from raysim.primitives.checks import at_least
from raysim.vectors.gram import combination

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def effective_steps(
    steps: int, momentum: float = 0.0, pull: float = 0.0, nesterov: bool = False
) -> float:
    """Return a_i: how far some SGD steps move under a constant gradient of 1, at the rate 1.

    pull: eta mu of a proximal term.
    """
    moved, velocity = 0.0, 0.0
    for _ in range(steps):
        gradient = 1.0 - pull * moved
        velocity = momentum * velocity + gradient
        moved += gradient + momentum * velocity if nesterov else velocity
    return moved


def normalising_factors(weights: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Return (sum_j p_j a_j) / a_i of each update: exactly 1 where all a_i are equal."""
    total = sum(weights)
    factors = []
    for own_steps in steps:
        ratios = [
            weight * (other / own_steps) for weight, other in zip(weights, steps, strict=True)
        ]
        factors.append(sum(ratios) / total)
    return factors


class FedNova(Method):
    """mu: that of the proximal term in the local loss, `method.fedprox.mu`; 0 without one."""

    name = "fednova"
    paper = "Wang et al., NeurIPS 2020"

    def __init__(self, mu: float = 0.0):
        self.mu = at_least("method.fednova.mu", mu, 0.0)

    def setup(self, run: Setup) -> None:
        """Let each job upload a_i; refuse optimizers whose steps have no such number."""
        run.require(
            run.local.optimizer == "sgd",
            f"local.optimizer={run.local.optimizer}: method 'fednova' counts steps of SGD. Set local.optimizer=sgd.",
        )
        if self.mu == 0 and "fedprox" in run.methods:
            run.warn(
                "method.fednova.mu=0 ignores the proximal term of method 'fedprox'. Set it to method.fedprox.mu."
            )
        run.warn_of_second_correction("scaffold")
        run.warn_if_single("it does what FedAvg does")
        run.upload("steps", 1)

    def end(self, job: LocalJob) -> None:
        """Upload a_i."""
        moves = [(steps, rate) for _, steps, rate in job.moves()]
        steps, rate = max(moves, default=(job.plan.steps, job.rate))
        local = job.local
        effective = effective_steps(steps, local.momentum, rate * self.mu, local.nesterov)
        job.upload["steps"] = torch.tensor([effective], dtype=torch.float64)

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the normalised sum of updates; with FedAvg's bits if all a_i are equal."""
        steps = [float(upload) for upload in aggregation.uploads("steps")]
        factors = normalising_factors(aggregation.weights, steps)
        pairs = zip(aggregation.weights, factors, strict=True)
        weights = [weight * factor for weight, factor in pairs]
        rows = parameters_of(aggregation, server)
        return combination(rows, weights, server.group).div_(aggregation.divisor)
