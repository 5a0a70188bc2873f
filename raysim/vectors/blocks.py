"""Arithmetic on long vectors, in blocks that fit a cache and that the cores share; its bits depend on neither."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 1 << 18  # numbers of each vector that are at hand at once
_COMPILER: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
_MOST = 8  # threads: by then memory is the limit

WeightedVectors: TypeAlias = tuple[
    Sequence[np.ndarray], Sequence[float]
]  # vectors [d], and the weight of each


def num_threads() -> int:
    """How many threads share the blocks: as many as this process may use."""
    usable = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(usable, _MOST)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads(), "raysim-blocks")


@cache
def compile_function(function: F) -> F:
    """``function`` of arrays and numbers as machine code, made at its first call (a second or so) and kept on disk.

    What takes PyTorch many passes over a vector then takes one, outside Python's lock. Nothing is
    reordered; a product that is added is rounded once. It calls no function of another module.
    """
    import numba  # slow to import, and few methods need it

    from raysim.primitives.machinecode import MachineCodeCache

    fast = numba.njit(**_COMPILER)(function)
    with contextlib.suppress(RuntimeError):  # no place on disk: every process compiles for itself
        fast._cache = MachineCodeCache(function, _COMPILER)
    return cast(F, fast)


def split_range(start: int, stop: int, size: int) -> list[slice]:
    """The entries from `start` to `stop`, `size` at a time."""
    return [slice(first, min(first + size, stop)) for first in range(start, stop, size)]


def in_blocks(length: int, work: Callable[[slice], T], size: int = BLOCK) -> list[T]:
    """``work`` on every block of `length` entries, `size` each; what it returns, in the order of the blocks.

    ``work`` runs in several threads, writes nothing outside its block, and calls no `in_blocks`
    itself.
    """
    blocks = split_range(0, length, size)
    if len(blocks) < 2 or num_threads() == 1:
        return [work(block) for block in blocks]
    return list(_pool().map(work, blocks))


def is_finite(values: Tensor) -> bool:
    """Whether all entries are; mostly one pass without a copy, for a finite sum has finite terms."""
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())


def run_compiled(
    rule: Callable[..., None], arrays: Sequence[Tensor], settings: Sequence[float], *switches: bool
) -> None:
    """The compiled ``rule`` on all entries of ``arrays`` [d], on the CPU, a block at a time.

    settings: numbers, which become the arrays' own kind; switches are passed on as they are.
    """
    views = [array.detach().numpy() for array in arrays]
    numbers = [views[0].dtype.type(setting) for setting in settings]
    run = compile_function(rule)
    in_blocks(len(views[0]), lambda part: run(*(view[part] for view in views), *numbers, *switches))


def fold_groups(groups: Sequence[WeightedVectors], into: Tensor | None = None) -> Tensor:
    """[d] the sum over groups of w_1 a_1 + w_2 a_2 + ..., each folded in its order: every sum of updates on the server.

    A group that a worker has summed is one vector of weight 1. into: the place of the sum, a new
    one if None.
    """
    first = torch.from_numpy(groups[0][0][0])
    total = torch.empty_like(first) if into is None else into

    def fold(part: slice) -> None:
        block = total[part]
        for place, (arrays, weights) in enumerate(groups):
            if place and len(arrays) == 1 and weights[0] == 1.0:
                block.add_(torch.from_numpy(arrays[0][part]))
                continue
            own = block if place == 0 else torch.empty_like(block)
            torch.mul(torch.from_numpy(arrays[0][part]), weights[0], out=own)
            for array, weight in zip(arrays[1:], weights[1:], strict=True):
                own.add_(torch.from_numpy(array[part]), alpha=weight)
            if place:
                block.add_(own)

    in_blocks(len(total), fold)
    return total


def split_into_groups(
    arrays: Sequence[np.ndarray], weights: Sequence[float], size: int
) -> list[WeightedVectors]:
    """Groups of `size` consecutive vectors, as the server folds them."""
    cuts = [slice(start, start + size) for start in range(0, len(arrays), size)]
    return [(arrays[cut], weights[cut]) for cut in cuts]
