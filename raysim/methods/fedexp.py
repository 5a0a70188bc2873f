"""FedExP: stretch the mean update, the more so the less the clients' updates agree.

Jhunjhunwala, Wang and Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation" (ICLR 2023), Algorithm 1.
With D_i what client i moved, p_i its normalised weight, and D = sum_i p_i D_i,

    eta_t = max(1, sum_i p_i |D_i|^2 / (2 (|D|^2 + epsilon)))        x_{t+1} = x_t + eta_t D

What is evaluated is (x_{t+1} + x_t) / 2, for the iterates oscillate; training goes on from x_{t+1}.

Choices where paper and code disagree or are silent
- epsilon as printed; the released code takes M epsilon 0.998^(2t) for M participants (epsilon_scale="count",
  epsilon_decay=0.996004).
- Both sums have the run's weights; paper and code weigh uniformly, and their clients are of equal size.
- Trainable parameters only. Buffers are averaged, which the code leaves undone, and are those of the newest model.
- D is the update in front of other methods' mixing (InCo). A divisor that is not the sum of the weights (FedBuff's)
  scales the step, not the ratio.
- A client sends |D_i|^2 beside its update, so that updates may be summed before they are seen.
- The code's variant with server momentum, without the maximum, is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from raysim.api.declarations import Cost, Participation
from raysim.api.hooked_method import HookedMethod
from raysim.methods.fedavg import weight_total, weighted_sum
from raysim.primitives.checks import above, at_least, in_range, one_of

if TYPE_CHECKING:
    from raysim.api.context import Context
    from raysim.api.hooked_method import OldSetup as Setup
    from raysim.api.server_view import Aggregation, Server

SCALES = ("one", "count")
_BLOCK = 8192  # entries squared and summed in float32 at once: too few for BLAS to use threads, or to lose digits


def extrapolation(mean_square: float, square: float, epsilon: float, minimum: float = 1.0) -> float:
    """eta of sum_i p_i |D_i|^2, |D|^2 and epsilon; ``minimum`` where nobody moved."""
    divisor = 2.0 * (square + epsilon)
    return max(minimum, mean_square / divisor) if divisor else minimum


def server_step_size(
    *,
    deltas: Tensor,
    epsilon: float,
    weights: Tensor | None = None,
    epsilon_scale: str = "one",
    minimum: float = 1.0,
) -> float:
    """eta of the updates ``deltas`` [M, D]; ``weights`` [M] at least 0, normalised inside, None: uniform.

    ``epsilon_scale`` "count" takes M times epsilon. ValueError for weights without a mean.
    """
    shares = _shares(deltas, weights)
    factor = len(deltas) if epsilon_scale == "count" else 1
    mean_square = float(shares @ deltas.double().square().sum(dim=1))
    square = float(weighted_sum(deltas, shares).double().square().sum())
    return extrapolation(mean_square, square, factor * epsilon, minimum)


def server_step(
    *,
    params: Tensor,
    deltas: Tensor,
    epsilon: float,
    weights: Tensor | None = None,
    epsilon_scale: str = "one",
    minimum: float = 1.0,
) -> Tensor:
    """``params`` [D] plus eta times the mean update; see ``server_step_size``."""
    eta = server_step_size(
        deltas=deltas, epsilon=epsilon, weights=weights, epsilon_scale=epsilon_scale, minimum=minimum
    )
    return params + eta * weighted_sum(deltas, _shares(deltas, weights))


def _shares(deltas: Tensor, weights: Tensor | None) -> Tensor:
    """Normalised weights, float64 [M]."""
    raw = torch.ones(len(deltas)) if weights is None else weights
    return raw.double() / weight_total(raw)


def squared_norm(values: np.ndarray) -> float:
    """|values|^2 of a float vector [d], in one pass: float32 within blocks, float64 over them."""
    cut = len(values) // _BLOCK * _BLOCK
    blocks, rest = values[:cut].reshape(-1, _BLOCK), values[cut:]
    sums = blocks[:, None, :] @ blocks[:, :, None]
    return float(sums.sum(dtype=np.float64)) + float(rest @ rest)


class FedExP(HookedMethod):
    """epsilon bounds the stretch; minimum=0 exposes the raw ratio. Decays per version."""

    name = "fedexp"
    paper = "Jhunjhunwala et al., ICLR 2023"

    def __init__(
        self,
        epsilon: float = 1e-3,
        epsilon_scale: Literal["one", "count"] = "one",
        epsilon_decay: float = 1.0,
        minimum: float = 1.0,
    ):
        above("method.fedexp.epsilon", epsilon, 0.0, "it bounds the step")
        in_range("method.fedexp.epsilon_decay", epsilon_decay, above=0.0, most=1.0)
        one_of("method.fedexp.epsilon_scale", epsilon_scale, SCALES)
        self.epsilon, self.epsilon_scale, self.epsilon_decay = epsilon, epsilon_scale, epsilon_decay
        self.minimum = at_least("method.fedexp.minimum", minimum, 0.0)

    def check(self, setup: Setup) -> Sequence[str]:
        """One update has no spread, from which the step is taken."""
        return setup.warn_if_single("fedexp", "the server's step is FedAvg's")

    def cost(self, job: Participation) -> Cost:
        """A scalar travels up."""
        return Cost(up=1)

    def finish(self, ctx: Context) -> None:
        """|D_i|^2."""
        trained = ctx.vector.layout.trained
        moved = ctx.vector.data[:trained] - ctx.received[:trained]
        ctx.upload["fedexp.square"] = moved.square_().sum(dtype=torch.float64).reshape(1)

    def mix(self, direction: Tensor, aggregation: Aggregation, server: Server) -> Tensor:
        """Only looks: eta, of the update in front of other methods' mixing."""
        server.report["fedexp.step_size"] = self._step_size(direction, aggregation, server.version)
        return direction

    def apply(self, direction: Tensor, out: Tensor, aggregation: Aggregation, server: Server) -> None:
        """x + eta D. What is kept as previous after the first step is x^1 itself, whose mean with x^1 is x^1."""
        eta = server.report["fedexp.step_size"]
        torch.add(server.params, direction, alpha=eta, out=out)
        server.state["fedexp.previous"] = server.params if "fedexp.previous" in server.state else out

    def scored(self, server: Server) -> Tensor:
        """The mean of the last two iterates, with the buffers of the newest."""
        if "fedexp.previous" not in server.state:
            return server.vector
        mean = (server.params + server.state["fedexp.previous"]).mul_(0.5)
        return torch.cat([mean, server.vector[server.layout.trained :]])

    def _step_size(self, direction: Tensor, aggregation: Aggregation, version: int) -> float:
        weights, total = aggregation.weights, float(sum(aggregation.weights))
        squares = [float(update.extras["fedexp.square"][0]) for update in aggregation.updates]
        mean_square = sum(w * square for w, square in zip(weights, squares, strict=True)) / total
        # The mean update, whatever the sum was divided by (FedBuff).
        square = squared_norm(direction.numpy()) * (aggregation.divisor / total) ** 2
        epsilon = self.epsilon * self.epsilon_decay**version
        if self.epsilon_scale == "count":
            epsilon *= len(weights)
        return extrapolation(mean_square, square, epsilon, self.minimum)
