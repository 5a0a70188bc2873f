"""SCAFFOLD: correct each local gradient by the difference of two control variates.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML
2020), Algorithm 1 with Option II. The control variate c_i estimates the gradient of client i, and c
the mean gradient of all N clients. A job corrects the gradient g of each local step:

    g <- g - c_i + c

x are the received parameters, and y the parameters after K steps with the learning rate eta. After
a job, c_i+ is the next c_i. After a round with the participants S, c changes, too:

    c_i+ = c_i - c + (x - y) / (K eta)
    c <- c + (1/N) sum_{i in S} (c_i+ - c_i)

Models are averaged uniformly, as in the paper. FedNTD's code, which has SCAFFOLD as a baseline,
weights them by samples.

Departures from the paper
- With momentum rho, (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho) replaces K, as in FedNTD's code.
  With K itself, c_i would be too large.
- Buffers have no control variates, and are averaged as in FedAvg.
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
    """Return gradient - client_control + server_control, all [d]."""
    return gradient - client_control + server_control


def effective_steps(num_steps: int, momentum: float) -> float:
    """Return the number of plain steps that move as far as `num_steps` steps with momentum.

    The gradient is assumed constant. Raises ValueError if `num_steps` is 0 or if the momentum is
    outside [0, 1).
    """
    if num_steps < 1 or not 0.0 <= momentum < 1.0:
        raise ValueError(
            f"local.momentum={momentum} with {num_steps} local steps: method 'scaffold' needs a "
            "momentum below 1 and at least one step. Set local.momentum below 1, and "
            "local.epochs or local.steps to 1 or more."
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
    """Return the client's next control variate by Option II of SCAFFOLD: [d].

    It is client_control - server_control + (global_params - local_params) / (K lr). K is
    `effective_steps(num_steps, momentum)`.

    global_params, local_params: [d], the received and the trained parameters.
    lr: the mean learning rate of the steps.
    Raises ValueError if num_steps or lr is 0, or if momentum is outside [0, 1).
    """
    if lr <= 0.0:
        raise ValueError(
            f"local: the mean learning rate of a job is {lr}, but method 'scaffold' divides by it. "
            "Change local.lr, local.schedule or local.rates so that it is above 0."
        )
    scale = 1.0 / (effective_steps(num_steps, momentum) * lr)
    return client_control - server_control + scale * (global_params - local_params)


def server_control_variate(
    server_control: Tensor, control_deltas: Tensor, num_clients: int
) -> Tensor:
    """Return the server's next control variate [d]: server_control + total / num_clients.

    total is the sum of the rows of control_deltas.

    control_deltas: [m, d], the change of each participant's control variate.
    num_clients: the number of all clients, absent clients included.
    """
    ones = control_deltas.new_ones(len(control_deltas))
    return server_control + weighted_sum(control_deltas, ones) / num_clients


class Scaffold(Method):
    """A method that corrects local gradients by control variates, with Option II of the paper."""

    name = "scaffold"
    paper = "Karimireddy et al., ICML 2020"
    weighting = "uniform"

    def setup(self, run: Setup) -> None:
        """Declare a control variate for each client and for the server; both start at zero."""
        run.needs_fixed_clients(
            "the server's control variate is the mean of the clients' control variates"
        )
        run.require(
            run.local.optimizer == "sgd",
            f"local.optimizer={run.local.optimizer}: method 'scaffold' computes gradients from "
            "the difference between the received and the trained parameters, which is possible "
            "only with SGD. Set local.optimizer=sgd.",
        )
        run.corrects("shift")
        run.client_state("control", run.zeros)
        run.server_state("control", run.zeros)
        run.send("control")
        run.upload("control")

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Subtract the client's control variate from the gradient, and add the server's.

        grad: the gradient with respect to `job.params[at]`, changed in place.
        """
        grad -= job.state["control"][at]
        grad += job.received["control"][at]

    def end(self, job: LocalJob) -> None:
        """Compute the client's next control variate, and upload its change."""
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
        """Add the mean change of all clients' control variates to the server's control variate."""
        changes = torch.stack(aggregation.uploads("control"))
        control = server.state["control"]
        server.state["control"] = server_control_variate(control, changes, server.population)
