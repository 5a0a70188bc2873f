"""SCAFFOLD: correct each local gradient by the difference of two control variates.

The client's control variate estimates its own gradient, the server's that of all clients, so that
local steps follow the common direction.

Source: Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled
Averaging for Federated Learning" (ICML 2020), Algorithm 1:

    g <- g - c_i + c                                     every local step
    c_i+ = c_i - c + (x - y) / (K eta)                   Option II
    c <- c + (1/N) sum_{i in S} (c_i+ - c_i)             N: all clients, not only the participants

Departures from the paper
- The paper has no momentum. With momentum rho, K becomes
  K' = (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho), the movement of K momentum steps under a
  constant gradient (as in FedNTD's code). With K itself, rho = 0.9 makes c_i up to ten times too
  large, and training diverges.
- Control variates exist for trainable parameters only; buffers are averaged as in FedAvg.
- Models and control variates are averaged uniformly, as in the paper; FedNTD's code weights the
  models by samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.fedavg import weighted_sum

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


# The method computes the same without this function, which states the rule on plain tensors.
def corrected_gradient(gradient: Tensor, client_control: Tensor, server_control: Tensor) -> Tensor:
    """Return g - c_i + c, all [d]; weight decay and momentum follow it."""
    return gradient - client_control + server_control


def effective_steps(num_steps: int, momentum: float) -> float:
    """Return K', the number of plain steps that move as far as K steps with momentum.

    The gradient is assumed constant. Raises ValueError without a step, and for a momentum outside
    [0, 1).
    """
    if num_steps < 1 or not 0.0 <= momentum < 1.0:
        raise ValueError(
            f"local.momentum={momentum}: method 'scaffold' needs a momentum below 1 and at least "
            f"one local step, and there are {num_steps}. Set local.momentum below 1."
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
    """Return the next c_i by Option II of SCAFFOLD: c_i - c + (x - y) / (K' lr), all [d].

    global_params: x.
    local_params: y, which the client trained from x.
    lr: the mean rate of the steps. K' is the number of steps, corrected for momentum
    (`effective_steps`).
    Raises ValueError if there was no step, or if lr is 0.
    """
    if lr <= 0.0:
        raise ValueError(
            f"local.lr={lr}: method 'scaffold' divides by the learning rate. Set local.lr and its "
            "schedule above 0."
        )
    scale = 1.0 / (effective_steps(num_steps, momentum) * lr)
    return client_control - server_control + scale * (global_params - local_params)


def server_control_variate(
    server_control: Tensor, control_deltas: Tensor, num_clients: int
) -> Tensor:
    """Return the next c [d]: c + (1/N) sum of `control_deltas` [m, d], one row a participant.

    num_clients: N, absent clients included.
    """
    ones = control_deltas.new_ones(len(control_deltas))
    return server_control + weighted_sum(control_deltas, ones) / num_clients


class Scaffold(Method):
    """A method that corrects local gradients by control variates, with Option II of the paper.

    Control variates cover all shared trainable parameters of all networks. If a group of parameters
    ascends (FedBR's projector), its gradient is that of the negated loss.
    """

    name = "scaffold"
    paper = "Karimireddy et al., ICML 2020"
    weighting = "uniform"

    def setup(self, run: Setup) -> None:
        """Keep c_i on clients and c on the server, zero at first; exchange c and changes of c_i."""
        run.needs_fixed_clients("c is the mean of their c_i")
        run.require(
            run.local.optimizer == "sgd",
            f"local.optimizer={run.local.optimizer}: method 'scaffold' computes gradients from the "
            "movement of the parameters, which only SGD allows. Set local.optimizer=sgd.",
        )
        run.corrects("shift")
        run.client_state("control", run.zeros)
        run.server_state("control", run.zeros)
        run.send("control")
        run.upload("control")

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Apply the correction g - c_i + c."""
        grad -= job.state["control"][at]
        grad += job.received["control"][at]

    def end(self, job: LocalJob) -> None:
        """Compute c_i by Option II, for each group of parameters with its number of steps."""
        old, server = job.state["control"], job.received["control"]
        control = old.clone()
        for at, steps, rate in job.moves():
            control[at] = updated_control_variate(
                old[at],
                server[at],
                job.start[at],
                job.params[at],
                rate,
                steps,
                job.local.momentum,
            )
        job.state["control"] = control
        job.upload["control"] = control - old

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Add the mean change of the c_i over all N clients."""
        changes = torch.stack(aggregation.uploads("control"))
        control = server.state["control"]
        server.state["control"] = server_control_variate(control, changes, server.population)
