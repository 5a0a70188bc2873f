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

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.fedavg import weight_total, weighted_sum
from raysim.primitives.checks import above, at_least, in_range, one_of

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

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
        deltas=deltas,
        epsilon=epsilon,
        weights=weights,
        epsilon_scale=epsilon_scale,
        minimum=minimum,
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


class FedExP(Method):
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

    def setup(self, run: Setup) -> None:
        """Take the server's step; each job uploads the squared norm of its update."""
        run.warn_if_single("the server's step is FedAvg's")
        run.owns("step")
        run.upload("square", 1)
        run.scores(self._mean_iterate)

    def end(self, job: LocalJob) -> None:
        """Upload |D_i|^2."""
        trained = job.layout.trained
        moved = job.params[:trained] - job.broadcast[:trained]
        job.upload["square"] = moved.square_().sum(dtype=torch.float64).reshape(1)

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return eta D, with eta of the update in front of other methods' changes."""
        assert aggregation.combined is not None, "a step has a combined direction"
        eta = self._step_size(aggregation.combined, aggregation, server.version)
        server.report["step_size"] = eta
        step = direction.mul_(eta)
        # After the first step the mean of the last two iterates is x^1 itself.
        first = "previous" not in server.state
        server.state["previous"] = server.params + step if first else server.params
        return step

    def _mean_iterate(self, server: ServerView) -> Tensor:
        """Return the mean of the last two iterates, with the buffers of the newest."""
        if "previous" not in server.state:
            return server.vector
        mean = (server.params + server.state["previous"]).mul_(0.5)
        return torch.cat([mean, server.vector[server.layout.trained :]])

    def _step_size(self, direction: Tensor, aggregation: Aggregation, version: int) -> float:
        weights, total = aggregation.weights, float(sum(aggregation.weights))
        squares = [float(square) for square in aggregation.uploads("square")]
        mean_square = sum(w * square for w, square in zip(weights, squares, strict=True)) / total
        # The mean update, whatever the sum was divided by (FedBuff).
        square = squared_norm(direction.numpy()) * (aggregation.divisor / total) ** 2
        epsilon = self.epsilon * self.epsilon_decay**version
        if self.epsilon_scale == "count":
            epsilon *= len(weights)
        return extrapolation(mean_square, square, epsilon, self.minimum)
