"""Delayed Nesterov: server momentum for updates that arrive one by one.

Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling" (2024). It makes DiLoCo
(Douillard et al. 2023: AdamW on the clients, Nesterov's momentum on the server) asynchronous. D_t
is the update t = 1, 2, ... to the parameters x. m is the momentum, beta the factor of the old
momentum, b a sum of updates, and eta the learning rate. N is the setting `every`, and c the setting
`activation`:

    b <- b + D_t
    every N-th t    m <- beta m + b / N    b <- 0
                    x <- x + eta ((1 - c N + c) beta m + D_t / N)
    other t         x <- x + eta (c beta m + D_t / N)

With c = 0 the sum of N steps is one step of Nesterov's momentum with the mean of N updates.

Departures from the paper
- If a schedule aggregates several updates at once, D_t is their mean. The method is meant for
  `schedule=immediate`, with weights that do not depend on samples.
- In the paper, slow clients make fewer local steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least, between
from raysim.vectors.blocks import run_compiled

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def delayed_nesterov_step(
    *,
    params: Tensor,
    delta: Tensor,
    momentum_buffer: Tensor,
    sum_of_updates: Tensor,
    step: int,
    server_lr: float,
    momentum: float,
    every: int,
    activation: float = 0.0,
) -> dict[str, Tensor]:
    """Return "params", "momentum_buffer" and "sum_of_updates" after one step; all are [d].

    The module's docstring has the formulas.
    params: the parameters x of the current version.
    delta: the update D_t, which points towards improvement.
    momentum_buffer: the momentum m.
    sum_of_updates: the sum b of the updates since m last changed.
    step: the number t of the update, from 1.
    server_lr: the learning rate eta.
    momentum: the factor beta of the old momentum.
    every: the number N.
    activation: the number c.
    """
    into, buffer, total = torch.empty_like(params), momentum_buffer.clone(), sum_of_updates.clone()
    _step([into, delta, buffer, total], step, server_lr, momentum, every, activation)
    return {"params": params + into, "momentum_buffer": buffer, "sum_of_updates": total}


def _step(
    arrays: list[Tensor],
    step: int,
    server_lr: float,
    momentum: float,
    every: int,
    activation: float,
) -> None:
    """Write the server's step into `arrays[0]`; change the momentum and the sum of updates.

    arrays: four tensors [d]: the change of the parameters, the update, the momentum, and the sum of
    updates. The first one may be uninitialized.
    step, server_lr, momentum, every, activation: see `delayed_nesterov_step`.
    """
    is_due = step % every == 0
    share = activation
    if is_due:
        share = 1.0 - activation * every + activation
    settings = [server_lr, momentum, share * momentum, 1.0 / every]
    run_compiled(_delayed_nesterov, arrays, settings, is_due)


def _delayed_nesterov(
    into: np.ndarray,
    delta: np.ndarray,
    buffer: np.ndarray,
    total: np.ndarray,
    rate: float,
    momentum: float,
    momentum_share: float,
    update_share: float,
    is_due: bool,
) -> None:
    """Write the server's step into `into`; change `buffer` and `total` in place.

    All arrays are [d].
    delta: the update.
    buffer: the momentum.
    total: the sum of the updates since `buffer` last changed.
    rate: the server's learning rate.
    momentum: the factor of the old momentum when `buffer` changes.
    momentum_share, update_share: the factors of `buffer` and of `delta` in the step.
    is_due: True if `buffer` changes in this step.
    """
    # The loop is compiled.
    for i in range(len(into)):
        total[i] = total[i] + delta[i]
        if is_due:
            buffer[i] = momentum * buffer[i] + update_share * total[i]
            total[i] = 0.0
        into[i] = rate * (momentum_share * buffer[i] + update_share * delta[i])


class DelayedNesterov(Method):
    """A server rule whose Nesterov momentum changes only once in N updates.

    server_lr: the server's learning rate eta.
    momentum: the factor beta of the old momentum.
    every: the number N; the momentum changes in every N-th step.
    activation: the number c, from 0 to 1 / N. Between two changes of the momentum m, an update D
    moves the model by eta (c beta m + D / N).
    """

    name = "delayed_nesterov"
    paper = "Liu et al. 2024"
    weighting = "uniform"

    def __init__(
        self,
        server_lr: float = 0.7,
        momentum: float = 0.9,
        every: int = 8,
        activation: float = 0.0,
    ):
        self.server_lr = at_least("method.delayed_nesterov.server_lr", server_lr, 0.0)
        self.momentum = between("method.delayed_nesterov.momentum", momentum, 0.0, 1.0)
        self.every = at_least("method.delayed_nesterov.every", every, 1)
        self.activation = between(
            "method.delayed_nesterov.activation", activation, 0.0, 1.0 / every
        )

    def setup(self, run: Setup) -> None:
        """Declare the server state, and that this method makes the server's step.

        The server state is the momentum, the sum of updates and the number of steps.
        """
        run.owns("step")
        run.server_state("momentum", run.zeros)
        run.server_state("sum", run.zeros)
        run.server_state("steps", lambda server: torch.zeros(1, dtype=torch.int64))

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the change of the parameters for an update; change the server state.

        direction: the update, which points towards improvement.
        """
        server.state["steps"] += 1
        into = torch.empty_like(direction)
        arrays = [into, direction, server.state["momentum"], server.state["sum"]]
        number = int(server.state["steps"])
        _step(arrays, number, self.server_lr, self.momentum, self.every, self.activation)
        return into
