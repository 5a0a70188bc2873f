"""Cache one vector per client on the server, as rows of a tensor on disk or in memory.

A cache has only the rows in use, at the beginning of space that is reserved for all rows. A
checkpoint saves only these rows. The file on disk has no name, so the system frees its space when
the process ends.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import MutableMapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

CachePlace: TypeAlias = Literal["disk", "memory"]
GIB = 2**30


def reserve(shape: tuple[int, ...], dtype: torch.dtype, place: CachePlace) -> Tensor:
    """Return an empty cache [0, ...] with reserved space for `shape`, [rows, ...].

    place: "disk" makes a file of the full size in the folder for temporary files. In "memory", only
    written rows occupy memory.
    Raises ValueError if the disk is too small.
    """
    if place == "memory" or not math.prod(shape):
        return torch.empty(shape, dtype=dtype)[:0]
    size, folder = math.prod(shape) * dtype.itemsize, tempfile.gettempdir()
    if size > (free := shutil.disk_usage(folder).free):
        raise ValueError(
            f"a method's cache of updates (method.NAME.cache=disk) needs {size / GIB:.3g} GiB, but "
            f"{folder} has {free / GIB:.3g} GiB free. Set TMPDIR to a folder with more space, or "
            "set method.NAME.cache=memory."
        )
    handle, path = tempfile.mkstemp(prefix="raysim-cache-", dir=folder)
    try:
        if hasattr(
            os, "posix_fallocate"
        ):  # in a file with holes, a disk that fills up ends the process by a signal
            os.posix_fallocate(handle, 0, size)
        room = torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype)
    finally:
        os.close(handle)
        os.unlink(path)
    return room.view(shape)[:0]


def extend_rows(rows: Tensor, count: int) -> Tensor:
    """Return a longer view of the same storage, in which all additional rows are zeros.

    rows: a view of the first rows of a tensor that has space for at least `count` rows.
    count: the number of rows of the result.
    """
    extended = rows.as_strided((count, *rows.shape[1:]), rows.stride())
    extended[len(rows) :].zero_()
    return extended


def rows_with_room(rows: Tensor, capacity: int, place: CachePlace) -> Tensor:
    """Return the rows of a cache as a tensor whose storage has space for `capacity` rows.

    `rows` is copied if the old storage is too small, or if `rows` is in memory and `place` is
    "disk".
    """
    shape = (capacity, *rows.shape[1:])
    storage = rows.untyped_storage()
    roomy = storage.nbytes() >= math.prod(shape) * rows.dtype.itemsize
    if roomy and (place == "memory" or storage.filename is not None or not math.prod(shape)):
        return rows
    return extend_rows(reserve(shape, rows.dtype, place), len(rows)).copy_(rows)


def check_budget(
    key: str, clients: int, size: int, budget: float, what: str = "updates", less: str = ""
) -> None:
    """Raise ValueError if a cache of one row per client may become larger than its budget.

    key: the method's key ("method.ace").
    size: bytes of a client's row.
    budget: the limit in GiB.
    what: what the rows are, for the text of the error.
    less: a setting with which the cache would fit, such as "method.fedcda.memory=2". The error
    suggests it; "" means that there is none.
    """
    needed = clients * size / GIB
    if needed <= budget:
        return
    alternative = f"{less}, or set " if less else ""
    raise ValueError(
        f"{key}.budget={budget:g} allows {budget:g} GiB, but the {what} of {clients} clients need "
        f"{needed:.3g} GiB. Set {alternative}{key}.budget={math.ceil(100 * needed) / 100:g}."
    )


def claim_rows(
    state: MutableMapping[str, Tensor],
    clients: Sequence[int],
    capacity: int,
    place: CachePlace,
    cache: str = "cache",
) -> list[int]:
    """Return the index of each client's row in a cache; new clients get a row of zeros.

    state: the method's server state. Two of its tensors are replaced: the rows of the cache, and
    "clients", which has the client of each row.
    capacity: the number of rows for which the cache must have space.
    cache: the name of the rows in `state`.
    """
    ids = state["clients"]
    known = {client: row for row, client in enumerate(ids.tolist())}
    new = [client for client in dict.fromkeys(clients) if client not in known]
    known |= {client: len(ids) + number for number, client in enumerate(new)}
    rows = rows_with_room(state[cache], capacity, place)  # it may be a checkpoint's
    state[cache] = extend_rows(rows, len(known))
    state["clients"] = torch.cat([ids, torch.tensor(new, dtype=torch.int64)])
    return [known[client] for client in clients]
