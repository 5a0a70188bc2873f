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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.blocks import in_blocks
from raysim.methods.method import Method, at_least, between

if TYPE_CHECKING:
    from raysim.server import Server


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
    state = {"momentum_buffer": momentum_buffer.clone()}
    return {"params": _fedavgm(torch.empty_like(params), params, delta, state, server_lr, momentum, nesterov), **state}


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
    state = {"first_moment": first_moment.clone(), "second_moment": second_moment.clone()}
    return {
        "params": _adaptive(_adagrad, torch.empty_like(params), params, delta, state, server_lr, beta1, tau),
        **state,
    }


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
    state = {"first_moment": first_moment.clone(), "second_moment": second_moment.clone()}
    return {
        "params": _adaptive(_adam, torch.empty_like(params), params, delta, state, server_lr, beta1, tau, beta2, step),
        **state,
    }


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
    state = {"first_moment": first_moment.clone(), "second_moment": second_moment.clone()}
    return {
        "params": _adaptive(_yogi, torch.empty_like(params), params, delta, state, server_lr, beta1, tau, beta2, step),
        **state,
    }


# --- the same, stepping `state` in place; each writes the next params `into` a place, and returns it ------------------
def _fedavgm(
    into: Tensor,
    params: Tensor,
    delta: Tensor,
    state: Mapping[str, Tensor],
    server_lr: float,
    momentum: float,
    nesterov: bool,
) -> Tensor:
    buffer = state["momentum_buffer"].mul_(momentum).add_(delta)
    direction = delta + momentum * buffer if nesterov else buffer
    return torch.add(params, direction, alpha=server_lr, out=into)


def _adagrad(second: Tensor, delta: Tensor, beta2: float) -> None:
    second.addcmul_(delta, delta)


def _adam(second: Tensor, delta: Tensor, beta2: float) -> None:
    second.mul_(beta2).addcmul_(delta, delta, value=1.0 - beta2)


def _yogi(second: Tensor, delta: Tensor, beta2: float) -> None:
    signed = torch.addcmul(second, delta, delta, value=-1.0).sign_().mul_(delta)
    second.addcmul_(delta, signed, value=beta2 - 1.0)  # rounds as Adam's does


def _adaptive(
    move: Callable[[Tensor, Tensor, float], None],
    into: Tensor,
    params: Tensor,
    delta: Tensor,
    state: Mapping[str, Tensor],
    server_lr: float,
    beta1: float,
    tau: float,
    beta2: float = 0.0,
    step: int | None = None,
) -> Tensor:
    """What the adaptive rules share: all but how the second moment moves."""
    if step is not None:
        server_lr *= math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
    first, second = state["first_moment"], state["second_moment"]
    move(second, delta, beta2)
    if beta1:
        first.lerp_(delta, 1.0 - beta1)
    else:
        first.copy_(delta)
    divisor = torch.sqrt(second, out=into).add_(tau)  # in the place of what follows: no memory of its own
    return torch.addcdiv(params, first, divisor, value=server_lr, out=into)


def _stepped(
    rule: Callable[..., Tensor], into: Tensor, params: Tensor, delta: Tensor, state: Mapping[str, Tensor]
) -> Tensor:
    """The next params, `into` their place; ``state`` is stepped in place. The rules go entry by entry."""

    def step(part: slice) -> None:
        rule(into[part], params[part], delta[part], {key: values[part] for key, values in state.items()})

    in_blocks(len(params), step)
    return into


class FedAvgM(Method):
    """Server momentum."""

    name = "fedavgm"
    paper = "Hsu et al. 2019"

    def __init__(self, server_lr: float = 1.0, momentum: float = 0.9, nesterov: bool = False):
        self.server_lr = at_least("method.fedavgm.server_lr", server_lr, 0.0)
        self.momentum = between("method.fedavgm.momentum", momentum, 0.0, 1.0)
        self.nesterov = nesterov

    def start(self, server: Server) -> None:
        """No momentum yet."""
        server.state["fedavgm.momentum"] = torch.zeros_like(server.params)

    def apply(self, params: Tensor, direction: Tensor, server: Server) -> Tensor:
        """One step of `fedavgm_step`."""
        rule = partial(_fedavgm, server_lr=self.server_lr, momentum=self.momentum, nesterov=self.nesterov)
        return _stepped(
            rule, server.following, params, direction, {"momentum_buffer": server.state["fedavgm.momentum"]}
        )


class _Adaptive(Method):
    """Two moments on the server; subclasses say how the second one moves."""

    paper = "Reddi et al., ICLR 2021"
    server_lr: float
    tau: float

    def _check(self, server_lr: float, tau: float, **decays: float) -> None:
        self.server_lr = at_least(f"method.{self.name}.server_lr", server_lr, 0.0)
        if not tau > 0:
            raise ValueError(f"method.{self.name}.tau={tau} must be above 0: it keeps the divisor away from 0")
        self.tau = tau
        for key, value in decays.items():
            setattr(self, key, between(f"method.{self.name}.{key}", value, 0.0, 1.0))

    def start(self, server: Server) -> None:
        """m = 0, v = tau^2."""
        server.state[f"{self.name}.first_moment"] = torch.zeros_like(server.params)
        server.state[f"{self.name}.second_moment"] = torch.full_like(server.params, self.tau**2)

    def apply(self, params: Tensor, direction: Tensor, server: Server) -> Tensor:
        """One step of the rule."""
        moments = {key: server.state[f"{self.name}.{key}"] for key in ("first_moment", "second_moment")}
        return _stepped(self._rule(server.version + 1), server.following, params, direction, moments)

    def _rule(self, step: int) -> Callable[..., Tensor]:
        """The rule with its settings; step: the server's, counted from 1."""
        raise NotImplementedError


class FedAdagrad(_Adaptive):
    """The second moment is a sum of squares."""

    name = "fedadagrad"

    def __init__(self, server_lr: float = 0.1, beta1: float = 0.0, tau: float = 1e-3):
        self._check(server_lr, tau, beta1=beta1)

    def _rule(self, step: int) -> Callable[..., Tensor]:
        return partial(_adaptive, _adagrad, **vars(self))


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

    def _own(self, step: int) -> dict[str, float | int | None]:
        own = {key: value for key, value in vars(self).items() if key != "bias_correction"}
        return own | {"step": step if self.bias_correction else None}


class FedAdam(_Decaying):
    """The second moment is a moving average of squares."""

    name = "fedadam"

    def _rule(self, step: int) -> Callable[..., Tensor]:
        return partial(_adaptive, _adam, **self._own(step))  # type: ignore[arg-type]


class FedYogi(_Decaying):
    """The second moment moves by at most a part of the square."""

    name = "fedyogi"

    def _rule(self, step: int) -> Callable[..., Tensor]:
        return partial(_adaptive, _yogi, **self._own(step))  # type: ignore[arg-type]
