"""FedProx: keep the local model near the received one by a quadratic term in the local loss.

Source: Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), eq. (2):

    h(w) = f_i(w) + mu/2 |w - w_t|^2         gradient: grad f_i(w) + mu (w - w_t)

f_i is the loss of client i, and w_t the received model.

Departures from the paper
- The term covers the shared trainable parameters. Stages with another loss have no such term.
- PartialFed and FedALA start training from a mixture of the received and the client's own model.
  This mixture is then w_t.
- The term's gradient is added before weight decay and momentum.
- `local.*` alone decides the number of steps. In the paper, slow clients make fewer steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob


# The method computes the same without this function, which states the rule on plain tensors.
def proximal_term(params: Tensor, global_params: Tensor, mu: float) -> Tensor:
    """Return mu/2 |params - global_params|^2 of two vectors [d], in float32 or float64.

    `global_params` get no gradient.
    """
    dtype = torch.promote_types(params.dtype, torch.float32)
    return 0.5 * mu * (params.to(dtype) - global_params.detach().to(dtype)).square().sum()


def proximal_gradient(params: Tensor, global_params: Tensor, mu: float) -> Tensor:
    """Return the derivative of `proximal_term` by `params`: mu (params - global_params), [d]."""
    return mu * (params - global_params)


class FedProx(Method):
    """A method that adds a quadratic pull towards the received model to the loss.

    mu: the weight of the pull, which is not part of the reported loss; 0 is FedAvg.
    """

    name = "fedprox"
    paper = "Li et al., MLSys 2020"

    def __init__(self, mu: float = 0.01):
        self.mu = at_least("method.fedprox.mu", mu, 0.0)

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Add the gradient of the proximal term to `grad`, in place.

        Nothing is added in a stage without the task loss.
        grad: the gradient of the loss with respect to `job.params[at]`.
        """
        if self.mu and job.stage.has_task_loss:
            grad += proximal_gradient(job.params[at], job.start[at], self.mu)
