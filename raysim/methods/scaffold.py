"""SCAFFOLD: shift every local gradient by the difference of the server's and the client's control variate.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh (ICML 2020), Algorithm 1:

    g <- g - c_i + c                                     every local step
    c_i+ = c_i - c + (x - y) / (K eta)                   Option II
    c <- c + (1/N) sum_{i in S} (c_i+ - c_i)             N: all clients, not only the participants

Choices where the sources differ or are silent
- The paper has no momentum. With momentum rho, K becomes K' = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho), the
  movement of K momentum steps under a constant gradient (so does FedNTD's code); with K itself, rho = 0.9 inflates c_i
  up to tenfold and diverges.
- Control variates exist for trainable parameters only; buffers are averaged as in FedAvg.
- Models and control variates are averaged uniformly, as in the paper (FedNTD's code weighs the models by samples).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.declarations import Cost, Download, Participation
from raysim.api.method import Method
from raysim.methods.fedavg import weighted_sum

if TYPE_CHECKING:
    from raysim.api.context import Context
    from raysim.api.method import Setup
    from raysim.api.server_view import Aggregation, Server
    from raysim.vectors.layout import Layout


def corrected_gradient(gradient: Tensor, client_control: Tensor, server_control: Tensor) -> Tensor:
    """g - c_i + c, all [d]; weight decay and momentum come after it."""
    return gradient - client_control + server_control


def effective_steps(num_steps: int, momentum: float) -> float:
    """K': how many plain steps ``num_steps`` momentum steps are worth under a constant gradient; K at momentum 0."""
    if num_steps < 1 or not 0.0 <= momentum < 1.0:
        raise ValueError(
            f"scaffold needs at least one local step and a momentum in [0, 1), got {num_steps} steps and momentum "
            f"{momentum}: set local.momentum below 1 and give the client a step to do."
        )
    geometric = momentum * (1.0 - momentum**num_steps) / (1.0 - momentum)
    return (num_steps - geometric) / (1.0 - momentum)


def updated_control_variate(
    client_control: Tensor,
    server_control: Tensor,
    global_params: Tensor,
    local_params: Tensor,
    lr: float,
    num_steps: int,
    momentum: float = 0.0,
) -> Tensor:
    """Option II: c_i - c + (x - y) / (K' lr), all [d], where y is what the client trained from x.

    ``lr`` is the mean rate of the steps where it changes from step to step. Raises ValueError if no step can have moved
    the client.
    """
    if lr <= 0.0:
        raise ValueError(f"scaffold divides by the local rate, which is {lr}: set local.lr (and its schedule) above 0.")
    scale = 1.0 / (effective_steps(num_steps, momentum) * lr)
    return client_control - server_control + scale * (global_params - local_params)


def server_control_variate(server_control: Tensor, control_deltas: Tensor, num_clients: int) -> Tensor:
    """c + (1/N) sum of ``control_deltas`` [m, d] (a row a participant); ``num_clients`` is N, idle clients included."""
    return server_control + weighted_sum(control_deltas, control_deltas.new_ones(len(control_deltas))) / num_clients


class Scaffold(Method):
    """Option II. Both control variates cover all shared trainable parameters, extra networks among them.

    A group of parameters that ascends (FedBR's projector) has the gradient of its negated objective as its own.
    """

    name = "scaffold"
    paper = "Karimireddy et al., ICML 2020"
    weighting = "uniform"
    correction = "shift"

    def check(self, setup: Setup) -> Sequence[str]:
        """Option II reads gradients off the movement, which only SGD allows."""
        if setup.local.optimizer != "sgd":
            raise ValueError(
                f"method 'scaffold' needs SGD, not local.optimizer={setup.local.optimizer}: set local.optimizer=sgd"
            )
        return ()

    def state(self, layout: Layout, samples: int) -> Mapping[str, Tensor]:
        """c_i, zero."""
        return {"scaffold.control": torch.zeros(layout.trained)}

    def start(self, server: Server) -> None:
        """c, zero."""
        server.state["scaffold.control"] = torch.zeros_like(server.params)

    def cost(self, job: Participation) -> Cost:
        """c travels down, the change of c_i up."""
        return Cost(down=job.run.layout.trained, up=job.run.layout.trained)

    def send(self, server: Server) -> Download:
        """c goes to everybody."""
        return Download(version=lambda: {"scaffold.control": server.state["scaffold.control"]})

    def gradient(self, ctx: Context, grad: Tensor, part: slice) -> None:
        """`corrected_gradient`, in place."""
        grad.sub_(ctx.state["scaffold.control"][part]).add_(ctx.download["scaffold.control"][part])

    def finish(self, ctx: Context) -> None:
        """Option II, for each group with the number of steps that it made."""
        old, server = ctx.state["scaffold.control"], ctx.download["scaffold.control"]
        control, momentum = old.clone(), ctx.trainer.local.momentum
        for part, steps, factor in ctx.optimizers.movements():
            y, rate = ctx.vector.data[part], ctx.rate * factor
            control[part] = updated_control_variate(old[part], server[part], ctx.base[part], y, rate, steps, momentum)
        ctx.upload["scaffold.control"] = control - old
        ctx.state["scaffold.control"] = control

    def absorb(self, aggregation: Aggregation, server: Server) -> None:
        """Every change enters once, with 1/N."""
        deltas = torch.stack([torch.from_numpy(update.extras["scaffold.control"]) for update in aggregation.updates])
        old = server.state["scaffold.control"]
        server.state["scaffold.control"] = server_control_variate(old, deltas, server.population)
