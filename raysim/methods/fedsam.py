"""FedSAM: use the gradient at a nearby point with a higher loss, to find flat minima.

Source: Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization" (ICML 2022),
Algorithm 1. The adaptive form is from Caldarola et al., "Improving Generalization in Federated
Learning by Seeking Flat Minima" (ECCV 2022). F is the loss at the parameters theta, and lr the
learning rate. rho and eta are settings, and T has the absolute values of theta plus eta:

    g = grad F(theta)      eps = rho g / |g|
    adaptive (FedASAM):    eps = rho T^2 g / |T g|
    theta <- theta - lr grad F(theta + eps)                both gradients on the same batch

MoFedSAM is `method=fedsam+fedcm`; method.fedcm.alpha is the beta of Qu et al.

Departures from the paper
- Norms include BatchNorm's weight and bias.
- F includes the loss terms of other methods. Weight decay, momentum and corrections of the gradient
  are applied at theta.
- Stages with another loss use the gradient at theta.
- Only the forward pass at theta updates BatchNorm's running statistics.
- Clients are weighted by samples. SWA, the mean of the models of several rounds, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from raysim.api.declarations import Participation
from raysim.api.method import Method
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

# The smallest divisor, so that a gradient of zeros gives a shift of zeros.
_SMALLEST_NORM = 1e-12


def sharpness_shift(grad: Tensor, rho: float) -> Tensor:
    """Return FedSAM's shift to a point with a higher loss, [n]: rho g / |g|.

    grad: g, the gradient with respect to the parameters, [n].
    rho: the length of the shift.
    """
    scale: Tensor = rho / grad.norm().clamp_min(_SMALLEST_NORM)
    return grad * scale


def adaptive_shift(params: Tensor, grad: Tensor, rho: float, eta: float) -> Tensor:
    """Return FedASAM's shift to a point with a higher loss, [n]: rho T^2 g / norm(T g).

    Each entry of T is the absolute value of a parameter plus eta.

    params: the parameters, [n].
    grad: the gradient g, [n].
    rho: if each entry of the shift is divided by its entry of T, the result has the norm rho.
    """
    scale = params.abs() + eta
    return scale * sharpness_shift(scale * grad, rho)


class FedSAM(Method):
    """A method that uses the gradient at a nearby point with a higher loss.

    rho: the distance of this point from the model; 0 is FedAvg. With `adaptive`, it is the norm of
    the shift after each entry was divided by |parameter| + eta.
    adaptive: True shifts large parameters more than small ones (FedASAM).
    eta: see `rho`; used only with `adaptive`.
    """

    name = "fedsam"
    paper = "Qu et al., ICML 2022"

    def __init__(self, rho: float = 0.05, adaptive: bool = False, eta: float = 0.2):
        self.rho = at_least("method.fedsam.rho", rho, 0.0)
        self.adaptive = adaptive
        self.eta = at_least("method.fedsam.eta", eta, 0.0)

    def setup(self, run: Setup) -> None:
        """Let raysim skip `perturb` if rho is 0, because the shift of the parameters is then 0."""
        if not self.rho:
            run.skip("perturb", "cost")

    def cost(self, job: Participation) -> float:
        """Return the cost that FedSAM adds to a job, as a number of trained samples.

        FedSAM needs a second forward and backward pass of each batch, so it adds the cost of plain
        training.
        """
        return job.trained_samples

    def perturb(
        self,
        job: LocalJob,
        params: Tensor,
        grad: Tensor,
        gradient_at: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the gradient at params + shift, a nearby point with a higher loss, [n].

        params: the parameters that the step trains, [n].
        grad: the gradient at `params`, [n].
        gradient_at: returns the gradient at params + shift for a shift [n].
        """
        if self.adaptive:
            return gradient_at(adaptive_shift(params, grad, self.rho, self.eta))
        return gradient_at(sharpness_shift(grad, self.rho))
