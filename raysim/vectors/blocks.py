"""Arithmetic on long vectors, in blocks that fit into a cache and that threads share.

The bits of a result depend neither on the size of the blocks nor on the number of threads. In
shapes, d is the length of a vector.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar, cast

from torch import Tensor

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 1 << 18  # entries of each vector in a block
_COMPILER: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
_MAX_THREADS = 8  # with more threads, memory bandwidth is the limit


def num_threads() -> int:
    """Return the number of threads that share the blocks: the usable cores, at most 8."""
    usable = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        usable = len(os.sched_getaffinity(0))
    return min(usable, _MAX_THREADS)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads(), "raysim-blocks")


@cache
def compile_function(function: F) -> F:
    """Return `function` of arrays and numbers as machine code.

    It is compiled at the first call, in about a second, and kept on disk. One pass over a vector
    then does what takes PyTorch many, without Python's lock. Nothing is reordered, but a product
    that is added is rounded once. The function may not call a function of another module.
    """
    import numba  # slow to import, and few methods need it

    from raysim.primitives.machinecode import MachineCodeCache

    fast = numba.njit(**_COMPILER)(function)
    # Without a place on disk, every process compiles for itself.
    with contextlib.suppress(RuntimeError):
        fast._cache = MachineCodeCache(function, _COMPILER)
    return cast(F, fast)


def split_range(start: int, stop: int, size: int) -> list[slice]:
    """Return slices of `size` entries from `start` to `stop`; the last one may be shorter."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def in_blocks(length: int, work: Callable[[slice], T], size: int = BLOCK) -> list[T]:
    """Call `work` on blocks of `size` out of `length` entries; return the results in order.

    `work` runs in several threads. It writes nothing outside its block and does not call
    `in_blocks` itself.
    """
    blocks = split_range(0, length, size)
    if len(blocks) < 2 or num_threads() == 1:
        return [work(block) for block in blocks]
    return list(_pool().map(work, blocks))


def is_finite(values: Tensor) -> bool:
    """Return True if all entries are finite.

    This is usually one pass without a copy, because a finite sum has finite terms.
    """
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def run_compiled(
    rule: Callable[..., None], arrays: Sequence[Tensor], settings: Sequence[float], *switches: bool
) -> None:
    """Run the compiled `rule` on all entries of the arrays [d], on the CPU, block by block.

    settings: numbers, which are converted to the dtype of the arrays. switches: values passed
    unchanged.
    """
    views = [array.detach().numpy() for array in arrays]
    numbers = [views[0].dtype.type(setting) for setting in settings]
    run = compile_function(rule)
    in_blocks(len(views[0]), lambda part: run(*(view[part] for view in views), *numbers, *switches))
