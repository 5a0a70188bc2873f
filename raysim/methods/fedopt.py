"""FedOpt: use the mean update as the gradient of an optimizer on the server.

Source: Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), Algorithms 1 and 2; for FedAvgM
Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification" (2019). D is the mean update, x the model and eta the server's learning rate. u, m
and v are server state:

    FedAvgM      u <- beta u + D               x <- x + eta u       (Nesterov: x + eta (D + beta u))
    adaptive     m <- beta1 m + (1 - beta1) D  x <- x + eta m / (sqrt(v) + tau)
      FedAdagrad v <- v + D^2
      FedAdam    v <- beta2 v + (1 - beta2) D^2
      FedYogi    v <- v - (1 - beta2) D^2 sign(v - D^2)

Departures from the paper
- The paper has no bias_correction. With True, step t is multiplied by sqrt(1 - beta2^t) / (1 -
  beta1^t). This is the rule of TensorFlow's Adam, not of PyTorch's.
- v starts at tau^2, which the paper allows. In the authors' code it starts at 0, and beta2 is
  0.999.
- Buffers are averaged as in FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import above, at_least, between, in_range
from raysim.vectors.blocks import run_compiled

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


# The method computes the same without these functions, which state the rule on plain tensors.
def fedavgm_step(
    *,
    params: Tensor,
    delta: Tensor,
    momentum_buffer: Tensor,
    server_lr: float,
    momentum: float,
    nesterov: bool = False,
) -> dict[str, Tensor]:
    """Return "params" and "momentum_buffer" after a step of server momentum; all tensors are [D].

    params: the current version.
    delta: the mean update, which points towards improvement.
    momentum_buffer: the momentum before the step.
    momentum: the factor of the momentum.
    """
    step, buffer = torch.empty_like(params), momentum_buffer.clone()
    run_compiled(_fedavgm, [step, delta, buffer], [server_lr, momentum], nesterov)
    return {"params": params + step, "momentum_buffer": buffer}


def fedadagrad_step(
    *,
    params: Tensor,
    delta: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    server_lr: float,
    beta1: float = 0.0,
    tau: float = 1e-3,
) -> dict[str, Tensor]:
    """Return "params", "first_moment" and "second_moment" after a FedAdagrad step, all [D].

    params: the current version.
    delta: the mean update, which points towards improvement.
    beta1: the factor on the old first moment.
    tau: the constant added to the root of the second moment.
    """
    moments = (first_moment, second_moment)
    return _adaptive_step(params, delta, *moments, server_lr, beta1, tau)


def fedadam_step(
    *,
    params: Tensor,
    delta: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    step: int | None = None,
) -> dict[str, Tensor]:
    """Return "params", "first_moment" and "second_moment" after a FedAdam step, all [D].

    delta: the mean update, which points towards improvement.
    first_moment, second_moment: the two moments m and v before the step.
    server_lr: the server's learning rate eta.
    beta1, beta2: the factors on the old first and second moment.
    tau: the constant that is added to the root of the second moment.
    step: the number of the server's step, from 1, for bias correction; None for no correction.
    """
    moments = (first_moment, second_moment)
    return _adaptive_step(params, delta, *moments, server_lr, beta1, tau, beta2, step)


def fedyogi_step(
    *,
    params: Tensor,
    delta: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    step: int | None = None,
) -> dict[str, Tensor]:
    """Return "params", "first_moment" and "second_moment" after a FedYogi step, all [D].

    beta2: a step changes the second moment by at most (1 - beta2) times the squared update.
    All other arguments are those of `fedadam_step`.
    """
    moments = (first_moment, second_moment)
    return _adaptive_step(params, delta, *moments, server_lr, beta1, tau, beta2, step, yogi=True)


def _adaptive_step(
    params: Tensor, delta: Tensor, first: Tensor, second: Tensor, *settings: Any, yogi: bool = False
) -> dict[str, Tensor]:
    step, first, second = torch.empty_like(params), first.clone(), second.clone()
    _adapt((step, delta, first, second), *settings, yogi=yogi)
    return {"params": params + step, "first_moment": first, "second_moment": second}


def _adapt(
    arrays: Sequence[Tensor],
    server_lr: float,
    beta1: float,
    tau: float,
    beta2: float | None = None,
    step: int | None = None,
    *,
    yogi: bool = False,
) -> None:
    """Write the change of the parameters into the first array; update both moments in place.

    arrays: four tensors [D]: the result, the mean update, the first and the second moment.
    beta2: None computes FedAdagrad.
    step: the number of the step, from 1; None makes no bias correction.
    yogi: True computes FedYogi.
    """
    if step is not None and beta2 is not None:
        server_lr *= math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
    decay, gain = 1.0, 1.0
    if beta2 is not None:
        decay = 1.0 if yogi else beta2
        gain = 1.0 - beta2
    run_compiled(_adaptive, arrays, [server_lr, beta1, 1.0 - beta1, decay, gain, tau], yogi)


# --- compiled: all arrays are [d]; `into` is written, buffer and moments change in place ----------
def _fedavgm(
    into: np.ndarray,
    delta: np.ndarray,
    buffer: np.ndarray,
    rate: float,
    momentum: float,
    nesterov: bool,
) -> None:
    for i in range(len(into)):
        buffer[i] = momentum * buffer[i] + delta[i]
        direction = delta[i] + momentum * buffer[i] if nesterov else buffer[i]
        into[i] = rate * direction


def _adaptive(
    into: np.ndarray,
    delta: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    rate: float,
    beta1: float,
    weight: float,
    decay: float,
    gain: float,
    tau: float,
    yogi: bool,
) -> None:
    for i in range(len(into)):
        square = delta[i] * delta[i]
        if yogi:
            square *= np.sign(square - second[i])
        second[i] = decay * second[i] + gain * square
        first[i] = beta1 * first[i] + weight * delta[i]
        into[i] = rate * (first[i] / (np.sqrt(second[i]) + tau))


class FedAvgM(Method):
    """A server rule that adds momentum to the mean update.

    server_lr: the server's learning rate eta.
    momentum: the factor beta of the momentum.
    nesterov: True uses Nesterov's momentum.
    """

    name = "fedavgm"
    paper = "Hsu et al. 2019"

    def __init__(self, server_lr: float = 1.0, momentum: float = 0.9, nesterov: bool = False):
        self.server_lr = at_least("method.fedavgm.server_lr", server_lr, 0.0)
        self.momentum = between("method.fedavgm.momentum", momentum, 0.0, 1.0)
        self.nesterov = nesterov

    def setup(self, run: Setup) -> None:
        """Declare the momentum as server state, and that this method makes the server's step.

        The momentum starts at 0.
        """
        run.owns("step")
        run.server_state("momentum", run.zeros)

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the change of the parameters for a mean update; change the momentum.

        direction: the mean update D.
        """
        step = torch.empty_like(direction)
        arrays = [step, direction, server.state["momentum"]]
        run_compiled(_fedavgm, arrays, [self.server_lr, self.momentum], self.nesterov)
        return step


class _Adaptive(Method):
    """The base class of FedAdagrad, FedAdam and FedYogi.

    The server stores two moments. The first is a moving average of the mean updates. The second is
    computed from their squares.
    server_lr: the server's learning rate eta.
    tau: the constant that is added to the root of the second moment.
    beta1: the factor on the old first moment.
    """

    paper = "Reddi et al., ICLR 2021"
    server_lr: float
    tau: float
    beta1: float

    def _check(self, server_lr: float, tau: float, beta1: float) -> None:
        self.server_lr = at_least(f"method.{self.name}.server_lr", server_lr, 0.0)
        self.tau = above(f"method.{self.name}.tau", tau, 0.0, "it keeps the divisor away from 0")
        # With a factor of 1 the first moment stays 0, and the model never changes.
        self.beta1 = in_range(f"method.{self.name}.beta1", beta1, least=0.0, below=1.0)

    def setup(self, run: Setup) -> None:
        """Declare two moments as server state, and that this method makes the server's step.

        The first moment starts at 0, the second at tau^2.
        """
        run.owns("step")
        run.server_state("first_moment", run.zeros)
        run.server_state("second_moment", lambda server: run.zeros(server) + self.tau**2)

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the change of the parameters for a mean update; update both moments.

        direction: the mean update.
        """
        step = torch.empty_like(direction)
        moments = [server.state["first_moment"], server.state["second_moment"]]
        _adapt([step, direction, *moments], **self._settings(server.version + 1))
        return step

    def _settings(self, step: int) -> dict[str, Any]:
        """Return the keyword arguments of `_adapt` for one step of the server.

        These are the method's settings; a subclass may return other arguments.
        step: the number of the server's step, from 1.
        """
        return dict(vars(self))


class FedAdagrad(_Adaptive):
    """A server rule with Adagrad: the second moment is tau^2 plus all squared updates.

    server_lr: the server's learning rate eta.
    beta1: the factor on the old first moment.
    tau: the constant that is added to the root of the second moment.
    """

    name = "fedadagrad"

    def __init__(self, server_lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3):
        self._check(server_lr, tau, beta1)


class _Decaying(_Adaptive):
    """The base class of FedAdam and FedYogi, which have the settings beta2 and bias_correction."""

    def __init__(
        self,
        server_lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        bias_correction: bool = False,
    ):
        self._check(server_lr, tau, beta1)
        self.beta2 = between(f"method.{self.name}.beta2", beta2, 0.0, 1.0)
        if bias_correction:  # its factor would be 0
            in_range(f"method.{self.name}.beta2", beta2, below=1.0)
        self.bias_correction = bias_correction

    def _settings(self, step: int) -> dict[str, Any]:
        settings = super()._settings(step)
        return settings | {"step": step if settings.pop("bias_correction") else None}


class FedAdam(_Decaying):
    """A server rule with Adam: the second moment is a moving average of squared updates.

    server_lr: the server's learning rate eta.
    beta1: the factor on the old first moment.
    beta2: the factor on the old second moment.
    tau: the constant that is added to the root of the second moment.
    bias_correction: True multiplies step t by sqrt(1 - beta2^t) / (1 - beta1^t), as in TensorFlow.
    """

    name = "fedadam"


class FedYogi(_Decaying):
    """A server rule with Yogi: the second moment follows the squared update in bounded steps.

    server_lr: the server's learning rate eta.
    beta1: the factor on the old first moment.
    beta2: the second moment changes by at most (1 - beta2) times the squared update.
    tau: the constant that is added to the root of the second moment.
    bias_correction: True multiplies step t by sqrt(1 - beta2^t) / (1 - beta1^t).
    """

    name = "fedyogi"

    def _settings(self, step: int) -> dict[str, Any]:
        return super()._settings(step) | {"yogi": True}
