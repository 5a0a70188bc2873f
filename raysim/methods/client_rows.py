"""What methods share that keep a row for every client that the server has seen: CA2FL and ACE an update, FedCDA models.

The rows in use are `server.state["NAME.CACHE"]`, and `server.state["NAME.clients"]` says whose they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.vectors.row_store import Place, claimed, reserve

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, Server

PLACES = ("disk", "memory")


def most_rows(server: Server) -> int:
    """The clients that have samples: no others take part."""
    return server.able


def refuse_sample_weights(name: str, server: Server) -> None:
    """Weights by samples have no part in a mean over rows."""
    if server.weighting == "samples":
        raise ValueError(
            f"weighting=samples has no effect on method '{name}', which counts all clients alike: set weighting=uniform"
        )


def start_rows(name: str, server: Server, shape: tuple[int, ...], place: Place, cache: str = "cache") -> None:
    """No rows yet, and room for one of this shape for each client that has samples."""
    server.state[f"{name}.clients"] = torch.empty(0, dtype=torch.int64)
    server.state[f"{name}.{cache}"] = reserve((most_rows(server), *shape), server.params.dtype, place)


def rows_of(name: str, aggregation: Aggregation, server: Server, place: Place, cache: str = "cache") -> list[int]:
    """The row of each update's client; new clients get zeros."""
    clients = [update.client for update in aggregation.updates]
    return claimed(server.state, name, clients, most_rows(server), place, cache)


def padded(column: Tensor, rows: int) -> Tensor:
    """A copy of a column [R, ...] that is kept beside the rows, with zeros for those that are new."""
    return torch.cat([column, column.new_zeros(rows - len(column), *column.shape[1:])])
