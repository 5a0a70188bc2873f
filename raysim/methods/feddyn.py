"""FedDyn: each client's loss gets a linear and a quadratic term, so that local minima agree with the global one.

Acar, Zhao, Matas, Mattina, Whatmough and Saligrama, "Federated Learning Based on Dynamic Regularization" (ICLR 2021),
Algorithm 1, with P the participants of a round and N all clients:

    local gradient at theta:   grad F_k(theta) - g_k + alpha (theta - x^t)
    g_k     <- g_k - alpha (theta_k - x^t)              0 at the start; stays where a client sits out
    h       <- h - (alpha / N) sum_{k in P} (theta_k - x^t)
    x^{t+1} <- mean_{k in P} theta_k - h / alpha

Choices where the sources differ or are silent
- The mean is uniform; under other weights h moves by |P| / N of the weighted mean. The authors' code scales alpha by
  the client's share of the data; the paper, and this file, do not.
- Weight decay and momentum act on the corrected gradient; g_k holds neither.
- alpha = 0 switches everything off and is FedAvg. The limit of alpha to 0 is so for clients alone: h / alpha does not
  depend on alpha.
- g_k and h cover all shared trainable parameters, extra networks among them, in whatever stage they are trained.
  Buffers are averaged.
- x^t is the vector that the client received, whatever another method (PartialFed) lets training start from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.context import Context
    from raysim.api.server_view import Aggregation, Server
    from raysim.vectors.layout import Layout

GRADIENT, DRIFT = "feddyn.gradient", "feddyn.drift"
_OTHERS = "FedDyn's server needs the plain mean of this round's updates, and it takes another step"


def regularised_gradient(grad: Tensor, params: Tensor, received: Tensor, correction: Tensor, alpha: float) -> Tensor:
    """grad - g_k + alpha (params - received), all [d]."""
    return grad - correction + alpha * (params - received)


def updated_gradient(correction: Tensor, trained: Tensor, received: Tensor, alpha: float) -> Tensor:
    """g_k - alpha (trained - received), all [d]."""
    return correction - alpha * (trained - received)


def updated_drift(drift: Tensor, mean_change: Tensor, participants: int, clients: int, alpha: float) -> Tensor:
    """h after a round whose participants moved by ``mean_change`` [d] on average; ``clients`` counts all of the run."""
    return drift - alpha * participants / clients * mean_change


class FedDyn(Method):
    """alpha weighs the regularisation; 0 is FedAvg."""

    name = "feddyn"
    paper = "Acar et al., ICLR 2021"
    weighting = "uniform"
    correction = "shift"
    excludes: ClassVar[Mapping[str, str]] = dict.fromkeys(("fedcda", "fedasync", "ca2fl", "ace"), _OTHERS)

    def __init__(self, alpha: float = 0.01):
        self.alpha = at_least("method.feddyn.alpha", alpha, 0.0)

    @property
    def idle(self) -> frozenset[str]:
        """Without regularisation everything."""
        return frozenset() if self.alpha else frozenset({"state", "gradient", "finish", "apply"})

    def state(self, layout: Layout, samples: int) -> Mapping[str, Tensor]:
        """g_k, zero."""
        return {GRADIENT: torch.zeros(layout.trained)}

    def start(self, server: Server) -> None:
        """h, zero."""
        if self.alpha:
            server.state[DRIFT] = torch.zeros_like(server.params)

    def gradient(self, ctx: Context, grad: Tensor, part: slice) -> None:
        """`regularised_gradient`, in place."""
        params, received, correction = ctx.vector.data[part], ctx.received[part], ctx.state[GRADIENT][part]
        grad.copy_(regularised_gradient(grad, params, received, correction, self.alpha))

    def finish(self, ctx: Context) -> None:
        """Move g_k on."""
        correction, received = ctx.state[GRADIENT], ctx.received[: ctx.vector.layout.trained]
        ctx.state[GRADIENT] = updated_gradient(correction, ctx.vector.data[: len(correction)], received, self.alpha)

    def apply(self, direction: Tensor, out: Tensor, aggregation: Aggregation, server: Server) -> None:
        """The mean, from which h / alpha is taken; h moves first."""
        drift = updated_drift(server.state[DRIFT], direction, len(aggregation.updates), server.population, self.alpha)
        server.state[DRIFT] = drift
        torch.sub(server.params + direction, drift / self.alpha, out=out)
