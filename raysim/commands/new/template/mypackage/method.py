"""A method: each client's loss gets lam times the sum of the parameters' absolute values."""

from __future__ import annotations

from torch import Tensor

from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.primitives.checks import at_least


class MyMethod(Method):
    """A method that adds an L1 penalty to the loss of every client.

    Methods change the training by overriding hooks, which `raysim.Method` lists. This method
    overrides the hook `gradient`.
    """

    name = "mypackage"
    paper = "Tibshirani 1996"

    def __init__(self, lam: float = 1e-3):
        self.lam = at_least("method.mypackage.lam", lam, 0.0)

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Add the derivative of the penalty to `grad`, in place.

        grad: the gradient of the shared parameters `job.params[at]`.
        at: the positions of these parameters in the vector.
        """
        grad.add_(job.params[at].sign(), alpha=self.lam)
