"""Store on the server a table, called cache, with a row for each client that sent an update.

A row is what the method keeps for the client. `server.state` has the rows in "cache", and the
client of each row in "clients".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.vectors.row_store import CachePlace, claim_rows, reserve

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def most_rows(server: ServerView) -> int:
    """Return the largest number of rows that the server's table `cache` can have.

    The table has at most one row for each client with training samples.
    """
    return server.clients_with_samples


def refuse_sample_weights(run: Setup) -> None:
    """Raise ValueError for weighting=samples, which would have no effect on the method.

    The method stores a row for each client on the server, and gives all clients the same weight.
    """
    run.require(
        run.weighting != "samples",
        f"weighting=samples has no effect on method '{run.method}', which gives all clients the "
        "same weight. Set weighting=uniform.",
    )


def declare_rows(
    run: Setup,
    shape: Callable[[ServerView], tuple[int, ...]],
    place: CachePlace,
    cache: str = "cache",
) -> None:
    """Declare a cache as server state: a table with at most one row for each client.

    The cache starts without rows; `rows_of` adds rows.
    shape: returns the shape of a row.
    place: where rows are stored, "disk" or "memory".
    cache: the name of the cache in `server.state`.
    """

    def room(server: ServerView) -> Tensor:
        return reserve((most_rows(server), *shape(server)), server.params.dtype, place)

    run.needs_fixed_clients("the server has a row for each client")
    run.server_state("clients", lambda server: torch.empty(0, dtype=torch.int64))
    run.server_state(cache, room)


def rows_of(
    aggregation: Aggregation, server: ServerView, place: CachePlace, cache: str = "cache"
) -> list[int]:
    """Return, for each update, the index of its client's row in the cache.

    A client without a row gets a new row of zeros.
    place: where rows are stored, "disk" or "memory".
    cache: the name of the cache in `server.state`.
    """
    return claim_rows(server.state, aggregation.clients, most_rows(server), place, cache)


def padded(column: Tensor, rows: int) -> Tensor:
    """Return a copy of a column [R, ...] to which zeros are added, so that its length is `rows`.

    column: a number or an array for each of the R rows of a cache.
    """
    return torch.cat([column, column.new_zeros(rows - len(column), *column.shape[1:])])
