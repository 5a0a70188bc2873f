"""pFedMe: train on each client a personal model that is pulled to the shared model.

Source: Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes" (NeurIPS
2020), Algorithm 1. A client has a local model w and a personal model theta. A job sets w to x, the
shared model. On each batch, with the loss f:

    theta = w, then K times   theta <- theta - eta_p (grad f(theta) + lam (theta - w))
    w <- w - eta lam (w - theta)

K is the setting `steps`, eta_p is `personal_lr`, and eta is local.lr. If eta lam is above 1, w
overshoots theta. The server averages w over the participants:

    x <- (1 - beta) x + beta mean(w)

A client is scored with its last theta. Before its first job, it is scored with x.

Departures from the paper
- lam (w - theta) is the gradient of w for the local optimizer. So weight decay, momentum, clipping
  and corrections of other methods apply.
- f includes the loss terms of other methods.
- Only the first forward pass on a batch updates BatchNorm's running statistics.
- beta applies to parameters only; buffers are averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.declarations import Participation
from raysim.api.method import Method
from raysim.primitives.checks import above, at_least

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def envelope_shift(
    grad: Tensor, gradient_at: Callable[[Tensor], Tensor], steps: int, rate: float, lam: float
) -> Tensor:
    """Train the personal parameters theta on a batch; return the shift theta - w, [n].

    theta starts at the shared parameters w. The term lam / 2 |theta - w|^2 is added to the loss.

    grad: [n], the gradient of the loss at w.
    gradient_at: returns the gradient of the loss at w + shift for a shift [n].
    steps: at least 1.
    rate: the learning rate of theta.
    """
    shift = -rate * grad
    for _ in range(steps - 1):
        shift = shift - rate * (gradient_at(shift) + lam * shift)
    return shift


class PFedMe(Method):
    """A method in which each client trains a personal model that is pulled to the shared model.

    steps: the number of steps of the personal model on each batch.
    lam: the personal loss includes lam / 2 times the squared distance to the job's local model w,
    which starts as the shared model.
    personal_lr: the learning rate of the personal model.
    beta: the server's learning rate.
    """

    name = "pfedme"
    paper = "Dinh et al., NeurIPS 2020"
    weighting = "uniform"

    def __init__(
        self, steps: int = 5, lam: float = 15.0, personal_lr: float = 0.01, beta: float = 1.0
    ):
        self.steps = at_least("method.pfedme.steps", steps, 1)
        self.lam = above("method.pfedme.lam", lam, 0.0)
        self.personal_lr = above("method.pfedme.personal_lr", personal_lr, 0.0)
        self.beta = above("method.pfedme.beta", beta, 0.0)

    def setup(self, run: Setup) -> None:
        """Declare the client state: the vector of the personal model, [layout.total].

        Before the client's first job the state has no entries.
        """
        run.client_state("theta", lambda samples: torch.empty(0))
        if self.beta == 1:
            run.skip("step")

    def cost(self, job: Participation) -> float:
        """Return the cost of training the personal model, as a number of trained samples.

        The personal model needs `steps` - 1 passes over each batch, in addition to the pass that
        trains the shared model.
        """
        return (self.steps - 1) * job.trained_samples

    # --- a client's job -----------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Initialise the personal model with a copy of the parameters that the job starts with."""
        job.scratch["theta"] = job.params.clone()

    def perturb(
        self,
        job: LocalJob,
        params: Tensor,
        grad: Tensor,
        gradient_at: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Train the personal model theta on the batch; return lam (w - theta), [n].

        The optimizer of the local model w uses the result as the gradient.
        params: [n], the parameters w.
        grad: [n], the gradient of the loss at w.
        gradient_at: returns the gradient of the loss at w + shift for a shift [n], on the same
        batch.
        """
        shift = envelope_shift(grad, gradient_at, self.steps, self.personal_lr, self.lam)
        theta = job.scratch["theta"].clone()
        stretches = job.layout.stretches(job.layout.entries_in(job.stage.trains))
        sizes = [at.stop - at.start for at in stretches]
        for at, values in zip(stretches, (params + shift).split(sizes), strict=True):
            theta[at] = values
        job.scratch["theta"] = theta
        return -self.lam * shift

    def end(self, job: LocalJob) -> None:
        """Keep the personal model, with the BatchNorm statistics after training."""
        theta = job.scratch["theta"].clone()
        for entry in job.layout.entries:
            if not entry.parameter:
                theta[entry.start : entry.stop] = job.params[entry.start : entry.stop]
        job.state["theta"] = theta

    def personalise(self, client: PersonalModel) -> None:
        """Load the client's personal model, if there is one."""
        if client.trained:
            client.vector.data.copy_(client.state["theta"])

    # --- an aggregation -----------------------------------------------------------------------
    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return beta times the mean update.

        direction: [layout.trained], the mean update.
        """
        return self.beta * direction
