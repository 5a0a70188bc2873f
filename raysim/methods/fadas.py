"""FADAS: AMSGrad on the server along the mean of a buffer, with a lower rate for late updates.

Source: Wang et al., "FADAS: Towards Federated Adaptive Asynchronous Optimization" (ICML 2024),
Algorithm 1 and its delay-adaptive rule. Delta is the mean update of a buffer, and s the largest
staleness in the buffer. m and v are the moments of Delta, w is the largest v so far, and x the
model:

    m <- beta1 m + (1 - beta1) Delta      v <- beta2 v + (1 - beta2) Delta^2      w <- max(w, v)
    x <- x + eta_t m / (sqrt(w) + eps)    eta_t = eta if s <= threshold,
                                          else eta / s ("scale") or min(eta, 1/s) ("cap")

Departures from the paper
- "scale" (the default) is the rule of the released code, "cap" the rule of the paper. With "cap"
  and eta = 1e-3, only a staleness above 1000 lowers the rate.
- bias_correction=True is the released code's rule: step n divides m by 1 - beta1^n and w by 1 -
  beta2^n. All other defaults are those of this code.
- An update is the trained model minus the received model, as in the paper. The released code
  subtracts a model that the client did not receive.

FADAS does not remove the bias towards fast clients. With the method CA2FL, CA2FL's step replaces
Delta; this combination is not published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.fedexp import squared_norm
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.vectors.blocks import run_compiled

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

StalenessRule: TypeAlias = Literal["scale", "cap"]

MOMENTS = ("first_moment", "second_moment", "max_second_moment")


def delay_adaptive_lr(
    *, server_lr: float, max_staleness: int, threshold: int, rule: str = "scale"
) -> float:
    """Return the server's learning rate for a buffer with the largest staleness `max_staleness`.

    threshold: the largest staleness at which the rate is `server_lr`.
    rule: for a larger staleness s, "scale" returns server_lr / s, "cap" min(server_lr, 1 / s).
    """
    one_of("method.fadas.rule", rule, get_args(StalenessRule))
    if max_staleness <= threshold:
        return server_lr
    return min(server_lr, 1.0 / max_staleness) if rule == "cap" else server_lr / max_staleness


def amsgrad_step(
    *,
    params: Tensor,
    delta: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    max_second_moment: Tensor,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    step: int | None = None,
) -> dict[str, Tensor]:
    """Return "params" and the three moments after one step, all [D], on the CPU.

    delta: the mean update, which points towards improvement.
    first_moment, second_moment: the running means of the update and of its square.
    max_second_moment: the largest second moment so far, for each entry.
    beta1, beta2: the factors of the old first and second moment.
    eps: added to the root in the divisor.
    step: the number of the step, from 1, for bias correction; None for no correction.
    """
    moments = [moment.clone() for moment in (first_moment, second_moment, max_second_moment)]
    into = torch.empty_like(params)
    _step([into, delta, *moments], server_lr, beta1, beta2, eps, step)
    return {"params": params + into} | dict(zip(MOMENTS, moments, strict=True))


def _step(
    arrays: Sequence[Tensor],
    server_lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | None,
) -> None:
    """Write the server's step into `arrays[0]`; the moments change in place.

    arrays: five tensors [D]: the result, the update, the first and the second moment, and the
    largest second moment so far.
    step: the number of the step, from 1; None makes no bias correction.
    """
    growth, growth2 = (
        (1.0, 1.0) if step is None else (1.0 / (1.0 - beta1**step), 1.0 / (1.0 - beta2**step))
    )
    settings = (server_lr * growth, beta1, 1.0 - beta1, beta2, 1.0 - beta2, growth2, eps)
    run_compiled(_amsgrad, arrays, settings)


def _amsgrad(
    into: np.ndarray,
    delta: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    highest: np.ndarray,
    rate: float,
    beta1: float,
    weight1: float,
    beta2: float,
    weight2: float,
    growth: float,
    eps: float,
) -> None:
    """Write the server's step into `into`, and update the moments in place; all arrays are [d].

    delta: the mean update.
    first, second: the first and the second moment.
    highest: the largest second moment so far.
    rate: the learning rate; with bias correction, divided by 1 - beta1^n at step n.
    weight1, weight2: 1 - beta1 and 1 - beta2.
    growth: 1 / (1 - beta2^n) at step n; 1 without bias correction.
    """
    for i in range(len(into)):
        first[i] = beta1 * first[i] + weight1 * delta[i]
        second[i] = beta2 * second[i] + weight2 * (delta[i] * delta[i])
        highest[i] = max(highest[i], second[i])
        into[i] = rate * (first[i] / (np.sqrt(growth * highest[i]) + eps))


class FADAS(Method):
    """A server rule with AMSGrad that takes smaller steps after very stale updates.

    server_lr: the server's learning rate eta.
    threshold: the largest staleness at the full rate; None always uses the full rate.
    rule: the rate for a larger staleness s. "scale" is eta / s, "cap" is min(eta, 1 / s).
    beta1, beta2: the factors of the old first and second moment.
    eps: the constant that is added to the root in the divisor.
    bias_correction: True corrects the moments for their start at 0.
    """

    name = "fadas"
    paper = "Wang et al., ICML 2024"
    weighting = "uniform"

    def __init__(
        self,
        server_lr: float = 1e-3,
        threshold: int | None = 1,
        rule: StalenessRule = "scale",
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-8,
        bias_correction: bool = False,
    ):
        self.server_lr = at_least("method.fadas.server_lr", server_lr, 0.0)
        if threshold is not None:
            at_least("method.fadas.threshold", threshold, 0)
        one_of("method.fadas.rule", rule, get_args(StalenessRule))
        above("method.fadas.eps", eps, 0.0, "it keeps the divisor away from 0")
        for key, decay in (("beta1", beta1), ("beta2", beta2)):
            in_range(f"method.fadas.{key}", decay, least=0.0, below=1.0)
        self.threshold, self.rule, self.eps = threshold, rule, eps
        self.beta1, self.beta2, self.bias_correction = beta1, beta2, bias_correction

    def setup(self, run: Setup) -> None:
        """Declare the server state, and that this method makes the server's step.

        The server state is the three moments, which are 0 at first, and the number of steps.
        """
        run.owns("step")
        for name in MOMENTS:
            run.server_state(name, run.zeros)
        run.server_state("steps", lambda server: torch.zeros(1, dtype=torch.int64))

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return AMSGrad's step along the mean update; update the moments in the server state.

        The learning rate depends on the largest staleness of the updates in this aggregation.
        direction: the mean update.
        """
        rate = self.server_lr
        if self.threshold is not None:
            rate = delay_adaptive_lr(
                server_lr=rate,
                max_staleness=max(aggregation.staleness),
                threshold=self.threshold,
                rule=self.rule,
            )
        server.state["steps"] += 1
        moments = [server.state[name] for name in MOMENTS]
        number = int(server.state["steps"]) if self.bias_correction else None
        step = torch.empty_like(direction)
        arrays = [step, direction, *moments]
        _step(arrays, rate, self.beta1, self.beta2, self.eps, number)
        server.report["rate"] = rate
        server.report["moved"] = math.sqrt(squared_norm(step.numpy()))
        return step
