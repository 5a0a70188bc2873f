"""FedAsync: move the shared model towards each arriving model, less if it is stale.

Source: Xie et al., "Asynchronous Federated Optimization" (OPT 2020), Algorithm 1 and section 5.2. x
is the shared model. alpha, a and b are settings. A client received version tau and returns the
model y when the server has version t:

    x <- (1 - a_t) x + a_t y      a_t = alpha sigma(t - tau)      t <- t + 1

    sigma(s): constant 1; polynomial (s + 1)^-a; hinge 1 if s <= b, else 1 / (a (s - b) + 1)

The method is meant for `schedule=immediate`. `method=fedasync+fedprox` adds the paper's local term.

Departures from the paper or public code
- If an aggregation has several models, they are mixed into x one after another. In synchronous
  rounds the last model then counts most.
- A model that is left out because of max_staleness still increases t.
- easyFL's code has the hinge 1 / (a (s - b)).
- y includes BatchNorm's statistics.
- To add y minus the received model in place of mixing, use FedBuff with a buffer of one update.
- With weighting=samples, a_t is multiplied by the client's number of samples, divided by the mean
  number over clients. The product is limited to 1.
- The paper draws the staleness at random.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least, between, in_range, one_of
from raysim.vectors.blocks import in_blocks

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

WeightKind: TypeAlias = Literal["polynomial", "hinge", "constant"]


def staleness_weight(
    *, staleness: int, kind: str = "polynomial", a: float = 0.5, b: float = 4.0
) -> float:
    """Return sigma(s), the weight of an update with staleness s; it is at most 1.

    kind, a, b: the settings of `FedAsync`.
    Raises ValueError for a negative staleness or an unknown kind.
    """
    if staleness < 0:
        raise ValueError(f"staleness={staleness} must be at least 0.")
    one_of("method.fedasync.kind", kind, get_args(WeightKind))
    if kind == "polynomial":
        return float((staleness + 1.0) ** -a)
    return 1.0 if kind == "constant" or staleness <= b else 1.0 / (a * (staleness - b) + 1.0)


def mixed_params(*, params: Tensor, client_params: Tensor, rate: float) -> Tensor:
    """Return (1 - rate) params + rate client_params, both [D]; exact at the rates 0 and 1."""
    return torch.lerp(params, client_params, rate)


def arrival_rates(
    *,
    base_versions: Tensor,
    version: int,
    alpha: float,
    kind: str = "polynomial",
    a: float = 0.5,
    b: float = 4.0,
    max_staleness: int | None = None,
    factors: Tensor | None = None,
) -> list[float]:
    """Return the rate alpha sigma(s) at which each of M arriving models is mixed in.

    base_versions: int64 [M], the version from which each model started.
    version: the current version when the first model arrives; each model increases it by 1.
    kind, a, b: the function sigma, as in `staleness_weight`.
    max_staleness: the rate is 0 for a larger staleness; None for no limit.
    factors: [M], a factor on each rate; the product is limited to 1. None for no factors.
    """
    rates = []
    for number, base in enumerate(base_versions.tolist()):
        staleness = version + number - base
        rate = alpha * staleness_weight(staleness=staleness, kind=kind, a=a, b=b)
        if factors is not None:
            rate = min(1.0, rate * float(factors[number]))
        rates.append(0.0 if max_staleness is not None and staleness > max_staleness else rate)
    return rates


def apply_arrivals(
    *, params: Tensor, client_params: Tensor, version: int, **arrivals: Any
) -> dict[str, Any]:
    """Mix arriving models into the shared model, in order; return "params" and "version".

    params: the shared model, [D].
    client_params: the arriving models, [M, D].
    version: the current version; each arriving model increases it by 1.
    arrivals: further arguments of `arrival_rates`.
    """
    rates = arrival_rates(version=version, **arrivals)
    for model, rate in zip(client_params, rates, strict=True):
        params = mixed_params(params=params, client_params=model, rate=rate)
    return {"params": params, "version": version + len(rates)}


_SETS = (
    "it changes the step along a mean update, but FedAsync mixes single models one after the other"
)
_WEIGHS = "it sets weights of a mean, but FedAsync mixes single models one after the other"


class FedAsync(Method):
    """A server rule that moves the shared model towards each arriving model.

    alpha: the rate for a model of staleness s = 0.
    kind: the factor for staleness s. "constant" is 1. "polynomial" is (s + 1)^-a. "hinge" is 1 for
    s <= b, else 1 / (a (s - b) + 1).
    a, b: the constants in these formulas.
    max_staleness: staler models are left out; None for no limit.
    alpha_decay: factor on alpha for each version.
    """

    name = "fedasync"
    paper = "Xie et al., OPT 2020"
    weighting = "uniform"

    def __init__(
        self,
        alpha: float = 0.6,
        kind: WeightKind = "polynomial",
        a: float = 0.5,
        b: float = 4.0,
        max_staleness: int | None = None,
        alpha_decay: float = 1.0,
    ):
        self.alpha = between("method.fedasync.alpha", alpha, 0.0, 1.0)
        one_of("method.fedasync.kind", kind, get_args(WeightKind))
        self.kind, self.a = kind, at_least("method.fedasync.a", a, 0.0)
        self.b = at_least("method.fedasync.b", b, 0.0)
        if max_staleness is not None:
            at_least("method.fedasync.max_staleness", max_staleness, 0)
        in_range("method.fedasync.alpha_decay", alpha_decay, above=0.0, most=1.0)
        self.max_staleness, self.alpha_decay = max_staleness, alpha_decay

    def setup(self, run: Setup) -> None:
        """Exclude methods that change the server's step or the weights of updates.

        Warn if synchronous rounds aggregate several updates, because these updates do not count
        equally.
        """
        for other in (
            "fedavgm",
            "fedadagrad",
            "fedadam",
            "fedyogi",
            "fedexp",
            "fadas",
            "inco",
            "delayed_nesterov",
            "streaming_diloco",
        ):
            run.excludes(other, _SETS)
        for other in ("fedbuff", "groupdro"):
            run.excludes(other, _WEIGHS)
        if not run.has_stale_updates and run.max_updates > 1:
            run.warn(
                f"method 'fedasync' mixes the models of a round (at most {run.max_updates}) into "
                "the server's model one after the other, so that their order changes the result. "
                "Choose a schedule that aggregates each update when it arrives, such as "
                "schedule=immediate."
            )

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the difference from the current model to the mixed model, including buffers."""
        how: dict[str, Any] = {
            "base_versions": torch.tensor([update.version for update in aggregation.updates]),
            "version": server.version,
            "alpha": self.alpha * self.alpha_decay**server.version,
            "kind": self.kind,
            "a": self.a,
            "b": self.b,
            "max_staleness": self.max_staleness,
        }
        if server.weighting == "samples":
            mean_samples = server.total_samples / server.clients_with_samples
            weights = torch.tensor(aggregation.weights, dtype=torch.float64)
            how["factors"] = weights / mean_samples
        rates = arrival_rates(**how)
        bases = [aggregation.base(update) for update in aggregation.updates]
        server.report["rate"] = sum(rates) / len(rates)
        if self.max_staleness is not None:
            late = [
                server.version + number - update.version
                for number, update in enumerate(aggregation.updates)
            ]
            server.report["discarded"] = float(
                sum(staleness > self.max_staleness for staleness in late)
            )
        direction = torch.empty_like(server.vector)

        def mix(part: slice) -> None:
            x = server.vector[part]
            arrivals = zip(bases, aggregation.deltas, strict=True)
            moved = torch.stack([delta[part] + (base[part] - x) for base, delta in arrivals])
            direction[part] = apply_arrivals(
                params=torch.zeros_like(x), client_params=moved, **how
            )["params"]

        in_blocks(len(direction), mix)
        return direction
