"""FedExP: make the server's step longer if the clients' updates disagree more.

Source: Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation" (ICLR
2023), Algorithm 1. With D_i the update of client i, p_i its normalised weight, and D = sum_i p_i
D_i,

    eta_t = max(1, sum_i p_i |D_i|^2 / (2 (|D|^2 + epsilon)))        x_{t+1} = x_t + eta_t D

Because iterates oscillate, the mean (x_{t+1} + x_t) / 2 is evaluated. Training continues from
x_{t+1}.

Departures from the paper or its code
- In round t with M participants, the released code has M epsilon 0.998^(2t) in place of epsilon.
  For this, set epsilon_scale="count" and epsilon_decay=0.996004.
- The weights p_i are those of the run. In the paper, all clients have the same weight.
- All norms are over the trainable parameters alone.
- The evaluated model has the buffers of the newest model.
- eta_t is computed before other methods, such as InCo, change the mean update.
- The released code's variant with server momentum is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

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

EpsilonScale: TypeAlias = Literal["one", "count"]

# Entries that are squared and summed in float32 at once: so few that BLAS does not use threads and
# no digits are lost.
_BLOCK = 8192


def extrapolation(mean_square: float, square: float, epsilon: float, minimum: float = 1.0) -> float:
    """Return FedExP's step size, max(minimum, mean_square / (2 (square + epsilon))).

    The step size is `minimum` if square + epsilon is 0.
    mean_square: the weighted mean of the squared norms of the updates.
    square: the squared norm of the mean update.
    """
    divisor = 2.0 * (square + epsilon)
    if not divisor:
        return minimum
    return max(minimum, mean_square / divisor)


# The method computes the same without these functions, which state the rule on plain tensors.
def server_step_size(
    *,
    deltas: Tensor,
    epsilon: float,
    weights: Tensor | None = None,
    epsilon_scale: str = "one",
    minimum: float = 1.0,
) -> float:
    """Return FedExP's step size, max(minimum, q / (2 (|u|^2 + epsilon))).

    u is the mean update, and q the mean of the updates' squared norms.
    deltas: [M, D], the M updates.
    weights: [M], the weights of both means; None means uniform weights.
    epsilon_scale: "count" multiplies epsilon by M, "one" does not.
    Raises ValueError unless the weights are finite and at least 0, and one of them is positive.
    """
    shares = _normalised(deltas, weights)
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
    """Return the parameters after FedExP's server step: params + eta * mean update, [D].

    eta is the result of `server_step_size`, which explains all arguments but `params`.
    params: [D], the parameters of the current version.
    """
    eta = server_step_size(
        deltas=deltas,
        epsilon=epsilon,
        weights=weights,
        epsilon_scale=epsilon_scale,
        minimum=minimum,
    )
    return params + eta * weighted_sum(deltas, _normalised(deltas, weights))


def _normalised(deltas: Tensor, weights: Tensor | None) -> Tensor:
    """Return the weights divided by their sum, float64 [M].

    deltas: the M updates.
    weights: [M]; None means equal weights.
    """
    if weights is None:
        weights = torch.ones(len(deltas))
    return weights.double() / weight_total(weights)


def squared_norm(values: np.ndarray) -> float:
    """Return |values|^2 of a vector [d] in one pass.

    Blocks of the vector are summed in float32, and the sums of the blocks in float64.
    """
    cut = len(values) // _BLOCK * _BLOCK
    blocks, rest = values[:cut].reshape(-1, _BLOCK), values[cut:]
    sums = blocks[:, None, :] @ blocks[:, :, None]
    return float(sums.sum(dtype=np.float64)) + float(rest @ rest)


class FedExP(Method):
    """A server rule that makes a longer step if the clients' updates disagree more.

    The step is the mean update D times max(minimum, q / (2 (|D|^2 + epsilon))). q is the mean of
    the updates' squared norms.
    epsilon: a larger number gives a shorter step.
    epsilon_scale: "count" multiplies epsilon by the number of participants, "one" does not.
    epsilon_decay: the factor by which each aggregation multiplies epsilon.
    minimum: the smallest step size.
    """

    name = "fedexp"
    paper = "Jhunjhunwala et al., ICLR 2023"

    def __init__(
        self,
        epsilon: float = 1e-3,
        epsilon_scale: EpsilonScale = "one",
        epsilon_decay: float = 1.0,
        minimum: float = 1.0,
    ):
        above("method.fedexp.epsilon", epsilon, 0.0, "it bounds the step")
        in_range("method.fedexp.epsilon_decay", epsilon_decay, above=0.0, most=1.0)
        one_of("method.fedexp.epsilon_scale", epsilon_scale, get_args(EpsilonScale))
        self.epsilon = epsilon
        self.epsilon_scale = epsilon_scale
        self.epsilon_decay = epsilon_decay
        self.minimum = at_least("method.fedexp.minimum", minimum, 0.0)

    def setup(self, run: Setup) -> None:
        """Declare that this method makes the server's step, and which model is scored.

        The mean of the last two versions is scored. Each job uploads the squared norm of its
        update.
        """
        run.warn_if_single("no updates disagree")
        run.owns("step")
        run.upload("square", 1)
        run.scores(self._mean_iterate)

    def end(self, job: LocalJob) -> None:
        """Upload the squared norm of the update."""
        trained = job.layout.trained
        moved = job.params[:trained] - job.broadcast[:trained]
        job.upload["square"] = moved.square_().sum(dtype=torch.float64).reshape(1)

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the step size times the mean update.

        direction: the mean update, after other methods have changed it in their hook `step`. The
        step size is computed without these changes, from `aggregation.combined`.
        """
        assert aggregation.combined is not None, "a step has a combined direction"
        eta = self._step_size(aggregation.combined, aggregation, server.version)
        server.report["step_size"] = eta
        step = direction.mul_(eta)
        # After the first step the evaluated mean is the new model itself.
        first = "previous" not in server.state
        server.state["previous"] = server.params + step if first else server.params
        return step

    def _mean_iterate(self, server: ServerView) -> Tensor:
        """Return the mean of the last two versions, with the float buffers of the newer one."""
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
