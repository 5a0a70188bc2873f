"""A method: each client's loss gets lam times the sum of the parameters' absolute values."""

from __future__ import annotations

from torch import Tensor

from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.primitives.checks import at_least


class MyMethod(Method):
    """A method that adds an L1 penalty to the loss of every client.

    `raysim.Method` lists the hooks; this method overrides one.
    """

    name = "mypackage"
    paper = "Tibshirani 1996"

    def __init__(self, lam: float = 1e-3):
        self.lam = at_least("method.mypackage.lam", lam, 0.0)

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Add the penalty's derivative to the gradient of the shared parameters, in place."""
        grad.add_(job.params[at].sign(), alpha=self.lam)
