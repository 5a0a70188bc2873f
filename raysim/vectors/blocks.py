"""Compute on long vectors in blocks that fit into a CPU cache, with several threads.

Neither the block size nor the number of threads changes the bits of a result. In shapes, d is the
length of a vector.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 1 << 18  # entries of each vector in a block
LARGE_PAGES_BYTES = 1 << 22  # for arrays from this size on, NumPy asks for large pages
MAX_UNUSED_BYTES = 1 << 29  # of memory that a process keeps for new vectors
_COMPILER: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
_MAX_THREADS = 8  # with more threads, memory bandwidth is the limit


def num_threads() -> int:
    """Return how many threads compute on a vector's blocks: the usable CPU cores, at most 8."""
    usable = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    return min(usable, _MAX_THREADS)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads(), "raysim-blocks")


@cache
def compile_function(function: F) -> F:
    """Compile a function of arrays and numbers with numba; return the compiled function.

    The first call compiles, in about a second, and stores machine code on disk. Compiled code runs
    without Python's global lock, and may round a * b + c only once. `function` may not call
    functions of other modules.
    """
    import numba  # slow to import, and few methods need it

    from raysim.primitives.machinecode import MachineCodeCache

    fast = numba.njit(**_COMPILER)(function)
    # Without a writable folder for the machine code, every process compiles again.
    with contextlib.suppress(RuntimeError):
        fast._cache = MachineCodeCache(function, _COMPILER)
    return cast(F, fast)


def split_range(start: int, stop: int, size: int) -> list[slice]:
    """Return slices of `size` entries from `start` to `stop`; the last one may be shorter."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def in_blocks(length: int, work: Callable[[slice], T], size: int = BLOCK) -> list[T]:
    """Call `work` on blocks of `size` entries out of `length`; return the results in order.

    Several threads call `work` at the same time. Therefore it must not write outside its block, nor
    call `in_blocks`.
    """
    blocks = split_range(0, length, size)
    if len(blocks) < 2 or num_threads() == 1:
        return [work(block) for block in blocks]
    return list(_pool().map(work, blocks))


def is_finite(values: Tensor) -> bool:
    """Return True if all entries are finite."""
    # If the sum of the entries is finite, so are all entries. Without overflow, this check needs
    # one pass and no copy.
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


class _RecycledMemory:
    """Memory of a long vector, which a later vector of the same size uses again.

    NumPy keeps this object while an array or a tensor uses the memory. After the object is deleted,
    `new_like` may use the memory.
    """

    # The system would clear new memory first, which takes as long as a sum of two vectors.
    _unused: ClassVar[list[np.ndarray]] = []  # what was used last is the last one
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, num_bytes: int):
        """Take unused memory of `num_bytes` bytes, or new memory if there is none."""
        with self._lock:
            sizes = [memory.nbytes for memory in self._unused]
            place = sizes.index(num_bytes) if num_bytes in sizes else -1
            memory = np.empty(num_bytes, np.uint8) if place < 0 else self._unused.pop(place)
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        # The thread that holds the lock may run this function itself, at any place, so do not wait.
        if not self._lock.acquire(blocking=False):
            return
        self._unused.append(self._memory)
        while sum(memory.nbytes for memory in self._unused) > MAX_UNUSED_BYTES:
            del self._unused[0]
        self._lock.release()


def new_like(values: Tensor) -> Tensor:
    """Return a tensor of the shape and dtype of `values` [d] with arbitrary entries.

    On the CPU, a tensor with many entries uses the memory of a deleted tensor of the same size, if
    there is one.
    """
    is_short = values.nbytes < LARGE_PAGES_BYTES
    if (
        is_short
        or values.device.type != "cpu"
        or values.dtype not in (torch.float32, torch.float64)
    ):
        return torch.empty_like(values)
    # NumPy asks the system for large pages. The first write to 38 MB of new memory then takes 6 ms
    # on one core; after `torch.empty_like` it takes 18 ms, and in memory that was used before 3 ms.
    memory = np.asarray(_RecycledMemory(values.nbytes))
    return torch.from_numpy(memory).view(values.dtype).view(values.shape)


def run_compiled(
    rule: Callable[..., None], arrays: Sequence[Tensor], settings: Sequence[float], *switches: bool
) -> None:
    """Compile `rule` and run it on all entries of the CPU arrays [d], block by block.

    rule: called as rule(*blocks, *settings, *switches), see `compile_function`. It changes the
    blocks in place.
    settings: numbers, which are converted to the dtype of the arrays.
    """
    views = [array.detach().numpy() for array in arrays]
    numbers = [views[0].dtype.type(setting) for setting in settings]
    run = compile_function(rule)
    in_blocks(len(views[0]), lambda part: run(*(view[part] for view in views), *numbers, *switches))
