"""ACE and ACED: step along the mean of all clients' latest updates after each arrival.

Source: Chang et al., "Mitigating Participation Imbalance Bias in Asynchronous Federated Learning"
(arXiv 2511.19066). x is the model, eta the server's learning rate, u_i the last update of client i,
and tau_i the base version of u_i. At version t, client j returns Delta, trained from version tau:

    u_j <- Delta      tau_j <- tau      x <- x + eta / |A| sum_{i in A} u_i      t <- t + 1

A is the set of all clients with an update (ACE), or with an update for which t - tau_i <=
max_staleness (ACED). If A is empty, x does not change.

The method is meant for `schedule=immediate` and tens to hundreds of clients. Several updates in one
aggregation make one step together.

Departures from the paper
- The paper's server waits for an update of every client before its first step, as initialise=true
  does. By default, raysim does not wait, so the first means are over fewer clients.
- BatchNorm's statistics become the mean over the arriving updates, if x changes.
- A job may have several local steps; the paper makes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.client_rows import (
    declare_rows,
    most_rows,
    padded,
    refuse_sample_weights,
    rows_of,
)
from raysim.primitives.checks import at_least, one_of
from raysim.vectors.blocks import in_blocks
from raysim.vectors.row_store import CachePlace, check_budget

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def active_clients(
    *, dispatch_versions: Tensor, version: int, max_staleness: int | None = None
) -> Tensor:
    """Return the clients whose cached update is at most `max_staleness` versions old: bool [N].

    dispatch_versions: int64 [N], the base version of each client's cached update; -1 for none.
    version: the current version.
    max_staleness: None returns all clients with a cached update.
    """
    known = dispatch_versions >= 0
    return (
        known if max_staleness is None else known & (version - dispatch_versions <= max_staleness)
    )


def all_client_step(
    *,
    params: Tensor,
    cache: Tensor,
    dispatch_versions: Tensor,
    client: int,
    delta: Tensor,
    dispatch_version: int,
    version: int,
    server_lr: float,
    max_staleness: int | None = None,
) -> dict[str, Tensor]:
    """Return the new "params", "cache" and "dispatch_versions" after one update has arrived.

    params: [D].
    cache: [N, D], the last update of each client.
    dispatch_versions: int64 [N], the base version of each cached update; -1 for none.
    client, delta, dispatch_version: the arriving update [D] with its client and base version.
    version: the current version.
    server_lr: the factor eta on the mean of the updates.
    max_staleness: the largest age, in versions, of an update in the mean; None for no limit.
    """
    cache, versions = cache.clone(), dispatch_versions.clone()
    versions[client] = dispatch_version
    active = active_clients(
        dispatch_versions=versions, version=version, max_staleness=max_staleness
    )
    total = torch.zeros(len(params), dtype=torch.float64)
    _refresh({client: delta}, cache, total, torch.zeros_like(active), active)
    return {
        "params": params + _direction(total, active, server_lr),
        "cache": cache,
        "dispatch_versions": versions,
    }


def _refresh(
    new_updates: Mapping[int, Tensor],
    cache: Tensor,
    total: Tensor,
    was_active: Tensor,
    is_active: Tensor,
) -> None:
    """Store new updates in the cache, and correct the sum of the active rows, in place.

    A row is active if its update counts in the server's step.
    new_updates: the new updates, each [D], by their row of the cache.
    total: float64 [D], the sum of the active rows.
    was_active: bool [R], whether each of the cache's R rows is active before the call.
    is_active: bool [R], whether each row is active after the call.
    """
    changes = torch.zeros_like(is_active)
    changes[list(new_updates)] = True
    leaving = (was_active & (changes | ~is_active)).nonzero().flatten().tolist()
    joining = (is_active & (changes | ~was_active)).nonzero().flatten().tolist()

    def replace(part: slice) -> None:
        for row in leaving:
            total[part] -= cache[row, part]
        for row, delta in new_updates.items():
            cache[row, part] = delta[part]
        for row in joining:
            total[part] += cache[row, part]

    in_blocks(len(total), replace)


def _direction(total: Tensor, active: Tensor, server_lr: float) -> Tensor:
    """Return `server_lr` times the mean of the active rows: float64 [D]; 0 without active rows.

    total: float64 [D], the sum of the active rows.
    active: bool [R], the rows of the cache that count in the mean.
    """
    return total * (server_lr / max(1, int(active.sum())))


class ACE(Method):
    """A server rule that steps along the mean of all clients' latest updates.

    server_lr: the server's learning rate eta.
    max_staleness: the largest age, in versions, of the updates in the mean (ACED). None has no
    limit (ACE).
    initialise: True makes no step until every client with samples has sent an update.
    cache: where updates are stored, "disk" or "memory".
    budget: the largest size of the cache, in GiB.
    """

    name = "ace"
    paper = "Chang et al. 2025"
    weighting = "uniform"

    def __init__(
        self,
        server_lr: float = 0.1,
        max_staleness: int | None = None,
        initialise: bool = False,
        cache: CachePlace = "disk",
        budget: float = 8.0,
    ):
        self.server_lr = at_least("method.ace.server_lr", server_lr, 0.0)
        if max_staleness is not None:
            at_least("method.ace.max_staleness", max_staleness, 0)
        one_of("method.ace.cache", cache, get_args(CachePlace))
        self.max_staleness, self.initialise, self.cache = max_staleness, initialise, cache
        self.budget = at_least("method.ace.budget", budget, 0.0)

    def setup(self, run: Setup) -> None:
        """Declare the server state: each client's last update, and the sum of the active updates.

        An update is active if it counts in the server's step. The state also has the base version
        of each client's last update, and says whether this update was active in the last step.
        """
        refuse_sample_weights(run)
        run.warn_of_second_correction("scaffold")
        for other in ("fedbuff", "groupdro"):
            run.excludes(other, "it sets weights, but ACE's mean gives all clients the same weight")
        run.excludes(
            "fedexp",
            "it compares the mean with the arriving updates, but ACE takes the mean of cached "
            "updates",
        )
        declare_rows(run, self._shape, self.cache)
        run.server_state("versions", lambda server: torch.empty(0, dtype=torch.int64))
        run.server_state("counted", lambda server: torch.empty(0, dtype=torch.bool))
        run.server_state("total", lambda server: run.zeros().double())

    def _shape(self, server: ServerView) -> tuple[int, ...]:
        """Return the shape [D] of a row of the cache, for D trainable parameters.

        Raise ValueError if the cache needs more than `budget` GiB.
        """
        check_budget("method.ace", most_rows(server), server.params.nbytes, self.budget)
        return tuple(server.params.shape)

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Store the new updates; return server_lr times the mean of the active updates.

        A client's last update is active if it is at most `max_staleness` versions old. The result
        is 0 without active updates. With `initialise`, it is 0 until every client with samples has
        sent an update.
        """
        state, trained = server.state, server.layout.trained
        rows = rows_of(aggregation, server, self.cache)
        versions = padded(state["versions"], len(state["clients"]))
        counted = padded(state["counted"], len(versions))
        for row, update in zip(rows, aggregation.updates, strict=True):
            versions[row] = update.version
        active = active_clients(
            dispatch_versions=versions, version=server.version, max_staleness=self.max_staleness
        )
        deltas = (delta[:trained] for delta in aggregation.deltas)
        new_updates = dict(zip(rows, deltas, strict=True))
        _refresh(new_updates, state["cache"], state["total"], counted, active)
        state["versions"], state["counted"] = versions, active
        ages = (server.version - versions[active]).double()
        server.report["active"] = float(len(ages))
        server.report["age"] = float(ages.mean()) if len(ages) else 0.0
        if not len(ages) or (self.initialise and len(versions) < most_rows(server)):
            return torch.zeros_like(server.vector)  # buffers do not change, either
        return _direction(state["total"], active, self.server_lr).to(server.vector.dtype)
