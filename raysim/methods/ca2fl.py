"""CA2FL: correct the mean update of a buffer with the last updates of all clients.

Source: Wang et al., "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached
Update Calibration" (ICLR 2024), Algorithm 2. h_i is the last update of client i (0 at first), and h
the mean of h_i over all clients (average="all"). The buffer has K updates Delta_i. x is the model,
eta the server's learning rate:

    v = h + sum_i (Delta_i - h_i) / K
    x <- x + eta v
    h_i <- Delta_i                         for the clients in the buffer

Departures from the paper
- With average="seen", h is the mean over the clients that have sent an update before. With the
  paper's mean over all clients, the first steps are short.
- Updates have no staleness weights.
- BatchNorm's statistics become the mean over the updates in the buffer.
- If a client has two updates in a buffer, v uses its old h_i for both updates. The later update
  becomes h_i.
- The paper's MF-CA2FL, which saves memory, is not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.client_rows import (
    declare_rows,
    most_rows,
    refuse_sample_weights,
    rows_of,
)
from raysim.primitives.checks import at_least, one_of
from raysim.vectors.blocks import in_blocks
from raysim.vectors.row_store import CachePlace, check_budget

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

AveragedClients: TypeAlias = Literal["all", "seen"]


def calibrated_step(
    *, params: Tensor, deltas: Tensor, clients: Tensor, cache: Tensor, server_lr: float
) -> dict[str, Tensor]:
    """Return the result of an aggregation: new "params", new "cache" and the direction "update".

    params: [D], the current version.
    deltas: [K, D], the buffered updates.
    clients: int64 [K], the client of each update.
    cache: [N, D], each client's last update.
    """
    cache, total = cache.clone(), cache.double().sum(0)
    update = _calibrate(list(deltas), clients.tolist(), cache, total, len(cache)).to(params.dtype)
    return {"params": params + server_lr * update, "cache": cache, "update": update}


def _calibrate(
    deltas: Sequence[Tensor],
    rows: Sequence[int],
    cache: Tensor,
    total: Tensor,
    averaged_clients: int,
    scale: float = 1.0,
) -> Tensor:
    """Return the server's step, `scale` times v [D]; update the cache and its sum in place.

    v = h + (1 / K) sum_i (Delta_i - h_i), where h is total / averaged_clients.
    deltas: the K updates Delta_i, each [D].
    rows: for each update, the row of the cache that has h_i.
    cache: the last updates of R clients, [R, D].
    total: float64 [D], the sum of the cache's rows.
    """
    into = torch.empty_like(deltas[0])

    def flush(part: slice) -> None:
        v = total[part] / averaged_clients
        for row, delta in zip(rows, deltas, strict=True):
            v.add_(delta[part].double() - cache[row, part], alpha=1 / len(deltas))
        into[part] = v.mul_(scale)
        for row, delta in zip(rows, deltas, strict=True):
            total[part] += delta[part].double() - cache[row, part]
            cache[row, part] = delta[part]

    in_blocks(len(into), flush)
    return into


class CA2FL(Method):
    """A server rule that corrects the mean of arriving updates with all clients' last updates.

    server_lr: the server's learning rate eta.
    average: how the mean of all clients' last updates counts a client that has sent none. "all"
    counts its update as 0; "seen" leaves the client out.
    cache: where updates are stored, "disk" or "memory".
    budget: the largest size of the cache, in GiB.
    """

    name = "ca2fl"
    paper = "Wang et al., ICLR 2024"
    weighting = "uniform"

    def __init__(
        self,
        server_lr: float = 1.0,
        average: AveragedClients = "all",
        cache: CachePlace = "disk",
        budget: float = 8.0,
    ):
        self.server_lr = at_least("method.ca2fl.server_lr", server_lr, 0.0)
        one_of("method.ca2fl.average", average, get_args(AveragedClients))
        one_of("method.ca2fl.cache", cache, get_args(CachePlace))
        self.average, self.cache = average, cache
        self.budget = at_least("method.ca2fl.budget", budget, 0.0)

    def setup(self, run: Setup) -> None:
        """Declare the server state: each client's last update, and the sum of these updates."""
        refuse_sample_weights(run)
        run.warn_of_second_correction("scaffold")
        for other in ("fedbuff", "groupdro"):
            run.excludes(other, "it sets weights, but CA2FL gives all updates the same weight")
        run.excludes(
            "fedexp",
            "it compares the mean with single updates, but CA2FL's step also contains cached "
            "updates",
        )
        declare_rows(run, self._shape, self.cache)
        run.server_state("total", lambda server: run.zeros().double())

    def _shape(self, server: ServerView) -> tuple[int, ...]:
        """Return the shape [D] of a row of the cache, for D trainable parameters.

        Raise ValueError if the cache needs more than `budget` GiB.
        """
        check_budget("method.ca2fl", most_rows(server), server.params.nbytes, self.budget)
        return tuple(server.params.shape)

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the server's step: server_lr times the corrected mean of the arriving updates.

        The mean is corrected with the stored last update of each client. Then each arriving update
        replaces the stored last update of its client.
        """
        state, clients = server.state, most_rows(server)
        seen = len(state["clients"])  # before this aggregation, like the mean of the cache
        rows = rows_of(aggregation, server, self.cache)
        server.report["seen"] = len(state["clients"]) / clients
        deltas = [delta[: server.layout.trained] for delta in aggregation.deltas]
        count = clients if self.average == "all" else max(1, seen)
        return _calibrate(deltas, rows, state["cache"], state["total"], count, self.server_lr)
