"""FedOpt: the mean client update as a gradient for a server optimiser (FedAvgM, FedAdagrad, FedAdam, FedYogi).

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan, "Adaptive Federated Optimization" (ICLR 2021),
Algorithms 1 and 2; FedAvgM: Hsu, Qi and Brown (arXiv 1909.06335). With D the mean update (new minus old),

    FedAvgM      u <- beta u + D               x <- x + eta u       (Nesterov: x + eta (D + beta u))
    adaptive     m <- beta1 m + (1 - beta1) D  x <- x + eta m / (sqrt(v) + tau)
      FedAdagrad v <- v + D^2
      FedAdam    v <- beta2 v + (1 - beta2) D^2
      FedYogi    v <- v - (1 - beta2) D^2 sign(v - D^2)

Choices where paper and code disagree or are silent
- No bias correction (Algorithm 2); ``step`` asks for the TensorFlow form, which leaves tau uncorrected. PyTorch's Adam
  divides sqrt(v) before adding epsilon and is a different rule.
- v starts at tau^2 (the paper allows any v0 >= tau^2); the code starts at 0.
- beta2 = 0.99 (paper; the code has 0.999). FedAvgM is the plain heavy ball unless ``nesterov``.
- No weight decay on the server, and buffers never pass through the optimiser.

All tensors are those of the CPU, where the server is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import above, at_least, between
from raysim.vectors.blocks import run_compiled

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def fedavgm_step(
    *,
    params: Tensor,
    delta: Tensor,
    momentum_buffer: Tensor,
    server_lr: float,
    momentum: float,
    nesterov: bool = False,
) -> dict[str, Tensor]:
    """One step of server momentum, all [D]: {"params", "momentum_buffer"}; ``delta`` points towards improvement."""
    into, buffer = torch.empty_like(params), momentum_buffer.clone()
    run_compiled(_fedavgm, [into, delta, buffer], [server_lr, momentum], nesterov)
    return {"params": params + into, "momentum_buffer": buffer}


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
    """One FedAdagrad step, all [D]: {"params", "first_moment", "second_moment"}."""
    return _adapted(params, delta, first_moment, second_moment, server_lr, beta1, tau)


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
    """One FedAdam step, as ``fedadagrad_step``; ``step`` (the server's, counted from 1) asks for bias correction."""
    return _adapted(params, delta, first_moment, second_moment, server_lr, beta1, tau, beta2, step)


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
    """One FedYogi step, as ``fedadam_step``; v moves by at most (1 - beta2) delta^2."""
    return _adapted(
        params, delta, first_moment, second_moment, server_lr, beta1, tau, beta2, step, yogi=True
    )


def _adapted(
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
    """Write the step into ``arrays[0]``; the rest: the update, and both moments, which change in place.

    beta2 None: FedAdagrad. step None: no bias correction.
    """
    if step is not None and beta2 is not None:
        server_lr *= math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
    decay, gain = (1.0, 1.0) if beta2 is None else (1.0 if yogi else beta2, 1.0 - beta2)
    run_compiled(_adaptive, arrays, [server_lr, beta1, 1.0 - beta1, decay, gain, tau], yogi)


# --- compiled: every array [d]; the first one is written, states change in place --------------------------------------
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
    """Server momentum."""

    name = "fedavgm"
    paper = "Hsu et al. 2019"

    def __init__(self, server_lr: float = 1.0, momentum: float = 0.9, nesterov: bool = False):
        self.server_lr = at_least("method.fedavgm.server_lr", server_lr, 0.0)
        self.momentum = between("method.fedavgm.momentum", momentum, 0.0, 1.0)
        self.nesterov = nesterov

    def setup(self, run: Setup) -> None:
        """Take the server's step; keep the momentum, zero."""
        run.owns("step")
        run.server_state("momentum", run.zeros)

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the step of `fedavgm_step`."""
        step = torch.empty_like(direction)
        arrays = [step, direction, server.state["momentum"]]
        run_compiled(_fedavgm, arrays, [self.server_lr, self.momentum], self.nesterov)
        return step


class _Adaptive(Method):
    """Two moments on the server; subclasses say how the second one moves."""

    paper = "Reddi et al., ICLR 2021"
    server_lr: float
    tau: float

    def _check(self, server_lr: float, tau: float, **decays: float) -> None:
        self.server_lr = at_least(f"method.{self.name}.server_lr", server_lr, 0.0)
        self.tau = above(f"method.{self.name}.tau", tau, 0.0, "it keeps the divisor away from 0")
        for key, value in decays.items():
            setattr(self, key, between(f"method.{self.name}.{key}", value, 0.0, 1.0))

    def setup(self, run: Setup) -> None:
        """Take the server's step; keep the moments m = 0 and v = tau^2."""
        run.owns("step")
        run.server_state("first_moment", run.zeros)
        run.server_state("second_moment", lambda server: run.zeros(server) + self.tau**2)

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the step of the rule."""
        step = torch.empty_like(direction)
        moments = [server.state["first_moment"], server.state["second_moment"]]
        _adapt([step, direction, *moments], **self._settings(server.version + 1))
        return step

    def _settings(self, step: int) -> dict[str, Any]:
        """What `_adapt` needs; step: the server's, counted from 1."""
        return dict(vars(self))


class FedAdagrad(_Adaptive):
    """The second moment is a sum of squares."""

    name = "fedadagrad"

    def __init__(self, server_lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3):
        self._check(server_lr, tau, beta1=beta1)


class _Decaying(_Adaptive):
    """The second moment forgets. bias_correction: the TensorFlow form."""

    def __init__(
        self,
        server_lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        bias_correction: bool = False,
    ):
        self._check(server_lr, tau, beta1=beta1, beta2=beta2)
        self.bias_correction = bias_correction

    def _settings(self, step: int) -> dict[str, Any]:
        settings = super()._settings(step)
        return settings | {"step": step if settings.pop("bias_correction") else None}


class FedAdam(_Decaying):
    """The second moment is a moving average of squares."""

    name = "fedadam"


class FedYogi(_Decaying):
    """The second moment moves by at most a part of the square."""

    name = "fedyogi"

    def _settings(self, step: int) -> dict[str, Any]:
        return super()._settings(step) | {"yogi": True}
