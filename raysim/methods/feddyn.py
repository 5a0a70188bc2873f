"""FedDyn: add a linear and a quadratic term to each client's loss.

Source: Acar et al., "Federated Learning Based on Dynamic Regularization" (ICLR 2021), Algorithm 1.
F_k is the loss of client k, g_k its stored correction, x^t the received model and theta_k the
trained model. The server stores a drift h. P are the participants of a round, and N is the number
of all clients:

    local gradient at theta:   grad F_k(theta) - g_k + alpha (theta - x^t)
    g_k     <- g_k - alpha (theta_k - x^t)              0 at first; unchanged for absent clients
    h       <- h - (alpha / N) sum_{k in P} (theta_k - x^t)
    x^{t+1} <- mean_{k in P} theta_k - h / alpha

Choices, and departures from the paper or its code
- If the run sets weights, the mean over P is weighted, and the sum over P is |P| times the weighted
  mean.
- The authors' code multiplies alpha by a factor that depends on the client's share of the data.
- Weight decay and momentum act on the corrected gradient; g_k contains neither.
- alpha = 0 is FedAvg. A small alpha is not close to FedAvg, because h / alpha does not depend on
  alpha.
- g_k and h cover all shared trainable parameters, including networks of other methods.
- x^t is the received vector, even if another method (PartialFed) starts training elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def regularised_gradient(
    grad: Tensor, params: Tensor, received: Tensor, correction: Tensor, alpha: float
) -> Tensor:
    """Return FedDyn's gradient: grad - correction + alpha * (params - received), all [d].

    grad: the gradient of the client's loss.
    params: the current parameters.
    received: the parameters that the client received.
    correction: the client's state.
    alpha: the weight of the regularisation.
    """
    return grad - correction + alpha * (params - received)


def updated_correction(
    correction: Tensor, trained: Tensor, received: Tensor, alpha: float
) -> Tensor:
    """Return the client's next correction: correction - alpha * (trained - received), all [d].

    correction: the client's state g_k before the job.
    trained: the parameters at the end of the job.
    received: the parameters that the client received.
    """
    return correction - alpha * (trained - received)


def updated_drift(
    drift: Tensor, mean_change: Tensor, participants: int, clients: int, alpha: float
) -> Tensor:
    """Return the server's next drift: drift - (alpha * participants / clients) * mean_change.

    drift: the drift before this aggregation, [d].
    mean_change: the mean update of the participants, [d].
    clients: the number of all clients.
    alpha: the weight of the regularisation.
    """
    return drift - alpha * participants / clients * mean_change


class FedDyn(Method):
    """A method that adds a linear and a quadratic term to each client's loss.

    alpha: the weight of the regularisation; 0 is FedAvg.
    """

    name = "feddyn"
    paper = "Acar et al., ICLR 2021"
    weighting = "uniform"

    def __init__(self, alpha: float = 0.01):
        self.alpha = at_least("method.feddyn.alpha", alpha, 0.0)

    def setup(self, run: Setup) -> None:
        """Declare the client's correction and the server's drift, which both start at 0."""
        run.needs_fixed_clients("its drift is the mean of the clients' corrections")
        for other in ("fedcda", "fedasync", "ca2fl", "ace"):
            run.excludes(
                other, "it takes another step, but FedDyn needs the plain mean of the updates"
            )
        run.owns("step")
        if not self.alpha:
            run.skip("gradient", "end", "step")
            return
        run.corrects("shift")
        run.client_state("gradient", run.zeros)
        run.server_state("drift", run.zeros)

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Add the gradients of FedDyn's linear and quadratic terms to `grad`, in place.

        grad: the gradient with respect to the parameters `job.params[at]`.
        at: the positions of these parameters in the vector.
        """
        params, received = job.params[at], job.broadcast[at]
        correction = job.state["gradient"][at]
        grad.copy_(regularised_gradient(grad, params, received, correction, self.alpha))

    def end(self, job: LocalJob) -> None:
        """Update the client's correction."""
        size = job.layout.trained
        trained, received = job.params[:size], job.broadcast[:size]
        correction = job.state["gradient"]
        job.state["gradient"] = updated_correction(correction, trained, received, self.alpha)

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Update the drift, and return the server's step: the mean update minus drift / alpha.

        direction: the mean update of the participants.
        """
        count = len(aggregation.updates)
        drift = server.state["drift"]
        drift = updated_drift(drift, direction, count, server.population, self.alpha)
        server.state["drift"] = drift
        return direction - drift / self.alpha
