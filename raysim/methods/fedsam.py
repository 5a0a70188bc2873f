"""FedSAM: every local step descends along the gradient at a point a little uphill, which prefers flat minima.

Qu, Li, Duan, Liu, Tang and Lu, "Generalized Federated Learning via Sharpness Aware Minimization" (ICML 2022),
Algorithm 1; Caldarola, Caputo and Ciccone, "Improving Generalization in Federated Learning by Seeking Flat Minima"
(ECCV 2022) for the adaptive form:

    g = grad F(theta)      eps = rho g / |g|               adaptive: eps = rho T^2 g / |T g|,  T = |theta| + eta
    theta <- theta - lr grad F(theta + eps)                both gradients on the same batch

MoFedSAM mixes the gradient with the mean direction of the last round, as FedCM does: `method=fedsam+fedcm` with
method.fedcm.alpha as the paper's beta.

Choices where the sources differ or are silent
- Norms are over everything that the stage trains: all layers, BatchNorm's affine parameters and personal ones too.
- F is the task loss with all methods' terms. Corrections of the gradient (FedProx, SCAFFOLD, FedCM), weight decay and
  momentum come afterwards, at theta. Stages with another loss (FedBR's projector, FRAug's generator) are not perturbed.
- Both passes share dropout masks and Mixup's draws, and BatchNorm's running statistics move in the first pass only.
- Weights by samples, as in FedAvg; T of all parameters alike (some codes leave biases out); no weight averaging (SWA).
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

_SMALLEST = 1e-12  # of a norm, so that a gradient of zeros shifts nothing


def sharpness_shift(grad: Tensor, rho: float) -> Tensor:
    """rho g / |g|, [n]."""
    scale: Tensor = rho / grad.norm().clamp_min(_SMALLEST)
    return grad * scale


def adaptive_shift(params: Tensor, grad: Tensor, rho: float, eta: float) -> Tensor:
    """rho T^2 g / |T g| with T = |params| + eta, all [n]."""
    scale = params.abs() + eta
    return scale * sharpness_shift(scale * grad, rho)


class FedSAM(Method):
    """rho: how far uphill; 0 is FedAvg. adaptive: FedASAM's shift, with its eta."""

    name = "fedsam"
    paper = "Qu et al., ICML 2022"

    def __init__(self, rho: float = 0.05, adaptive: bool = False, eta: float = 0.2):
        self.rho, self.adaptive = at_least("method.fedsam.rho", rho, 0.0), adaptive
        self.eta = at_least("method.fedsam.eta", eta, 0.0)

    def setup(self, run: Setup) -> None:
        """Skip the second pass without a shift."""
        if not self.rho:
            run.skip("perturb", "cost")

    def cost(self, job: Participation) -> float:
        """Return a second pass of every batch."""
        return job.trained

    def perturb(
        self,
        job: LocalJob,
        params: Tensor,
        grad: Tensor,
        gradient_at: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the gradient uphill."""
        if self.adaptive:
            return gradient_at(adaptive_shift(params, grad, self.rho, self.eta))
        return gradient_at(sharpness_shift(grad, self.rho))
