"""FedProx: keep the local model near the one received, by a quadratic term in the local loss.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks" (MLSys 2020),
eq. (2):

    h(w) = f_i(w) + mu/2 |w - w_t|^2         gradient: grad f_i(w) + mu (w - w_t)

Choices where the sources differ or are silent
- A plain sum over all shared trainable coordinates, BatchNorm's affine ones among them; never a buffer, a personal
  parameter, or the projection that FedBR trains by ascent.
- The gradient enters before weight decay and momentum, as that of any loss. FedBR's optimiser adds it after the
  momentum buffer (the same only at momentum 0).
- No inexact local solver and no stragglers' tolerance of the original.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob


def proximal_term(params: Tensor, global_params: Tensor, mu: float) -> Tensor:
    """mu/2 |params - global_params|^2 of two flat vectors [d] -> scalar, in float32 or better.

    No gradient reaches ``global_params``.
    """
    dtype = torch.promote_types(params.dtype, torch.float32)
    return 0.5 * mu * (params.to(dtype) - global_params.detach().to(dtype)).square().sum()


def proximal_gradient(params: Tensor, global_params: Tensor, mu: float) -> Tensor:
    """The gradient of ``proximal_term`` with respect to ``params``: mu (params - global_params), [d]."""
    return mu * (params - global_params)


class FedProx(Method):
    """Add the gradient of the proximal term; the loss of a step is reported without the term."""

    name = "fedprox"
    paper = "Li et al., MLSys 2020"

    def __init__(self, mu: float = 0.01):
        self.mu = at_least("method.fedprox.mu", mu, 0.0)

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Add the term for the shared parameters that the stage with the task loss trains."""
        if self.mu and job.stage.task:
            grad += proximal_gradient(job.params[at], job.start[at], self.mu)
