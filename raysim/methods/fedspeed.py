"""FedSpeed: pull local models to the received one, and correct the bias of this pull.

Source: Sun et al., "FedSpeed: Larger Local Interval, Less Communication Round, and Higher
Generalization Accuracy" (ICLR 2023), Algorithm 1. Client k receives x^t, trains the parameters
theta, and has theta_K after K local steps. F is the loss, lr the learning rate, and c_k the
client's correction, at first 0. alpha, rho and lam are settings:

    g_1 = grad F(theta),  g_2 = grad F(theta + rho g_1),  g = (1 - alpha) g_1 + alpha g_2
    theta <- theta - lr (g - c_k + (theta - x^t) / lam)
    c_k   <- c_k - (theta_K - x^t) / lam
    upload theta_K - lam c_k

Departures from the paper
- The paper's experiments use alpha for rho, too.
- F includes the loss terms of other methods. Corrections of the gradient, weight decay and momentum
  are added to g.
- With PartialFed, x^t is the mixture with which training starts.
- Stages with another loss use g_1 in place of g.
- Methods that keep the trained model (pfedavg, moon) must precede fedspeed in the list of methods.
  Otherwise they keep the uploaded model.
- Buffers have no correction. Only the pass for g_1 updates BatchNorm's running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.declarations import Participation
from raysim.api.method import Method
from raysim.methods.fedprox import proximal_gradient
from raysim.primitives.checks import above, at_least, between

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup


def mixed_gradient(grad: Tensor, uphill_grad: Tensor, alpha: float) -> Tensor:
    """Return (1 - alpha) * grad + alpha * uphill_grad, [n].

    grad: the gradient at the model's parameters, [n].
    uphill_grad: the gradient at a nearby point with a higher loss, [n].
    """
    return torch.lerp(grad, uphill_grad, alpha)


def updated_correction(correction: Tensor, trained: Tensor, received: Tensor, lam: float) -> Tensor:
    """Return the client's next correction: correction - (trained - received) / lam, all [d]."""
    return correction - (trained - received) / lam


class FedSpeed(Method):
    """A method that pulls local models to the received one and corrects the bias of this pull.

    lam: the pull is divided by this number.
    rho: a second gradient is computed at the model plus rho times the first gradient.
    alpha: the share of the second gradient in each step, from 0 to 1.
    """

    name = "fedspeed"
    paper = "Sun et al., ICLR 2023"
    weighting = "uniform"

    def __init__(self, lam: float = 0.1, rho: float = 0.1, alpha: float = 1.0):
        self.lam = above("method.fedspeed.lam", lam, 0.0, "the proximal term is divided by it")
        self.rho = at_least("method.fedspeed.rho", rho, 0.0)
        self.alpha = between("method.fedspeed.alpha", alpha, 0.0, 1.0)

    def setup(self, run: Setup) -> None:
        """Declare the client's correction, which starts at 0.

        If alpha or rho is 0, let raysim skip `perturb`, because it would have no effect.
        """
        run.corrects("shift")
        run.client_state("correction", run.zeros)
        if not (self.alpha and self.rho):
            run.skip("perturb", "cost")

    def cost(self, job: Participation) -> float:
        """Return the cost of the second gradient of each step, as a number of trained samples."""
        return job.trained_samples

    def perturb(
        self,
        job: LocalJob,
        params: Tensor,
        grad: Tensor,
        gradient_at: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return (1 - alpha) grad + alpha g, where g is the gradient at params + rho * grad, [n].

        params: the parameters that the step trains, [n].
        grad: the gradient at `params`, [n].
        gradient_at: returns the gradient at params + shift for a shift [n].
        """
        return mixed_gradient(grad, gradient_at(self.rho * grad), self.alpha)

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Add the proximal term's gradient to `grad` in place; subtract the client's correction.

        The proximal term pulls the model towards the received one.
        grad: the gradient of the loss with respect to `job.params[at]`.
        """
        grad += proximal_gradient(job.params[at], job.start[at], 1 / self.lam)
        grad -= job.state["correction"][at]

    def end(self, job: LocalJob) -> None:
        """Update the client's correction c_k, and subtract lam c_k from the uploaded model."""
        trained = job.params[: job.layout.trained]
        start = job.start[: job.layout.trained]
        correction = updated_correction(job.state["correction"], trained, start, self.lam)
        trained.sub_(correction, alpha=self.lam)
        job.state["correction"] = correction
