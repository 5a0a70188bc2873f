"""Set the number of threads, and let libraries use their deterministic algorithms."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from threadpoolctl import ThreadpoolController


def make_deterministic(threads: int) -> None:
    """Set torch's threads in this process, and let torch use its deterministic algorithms.

    For an operation without a deterministic algorithm, torch uses another one and warns.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    # torch.use_deterministic_algorithms would import the compiler, which takes seconds.
    torch.set_deterministic_debug_mode("warn")
    # Without this every torch.empty would fill its tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    openblas_threads().limit(limits=1)
    _keep_freed_memory()


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Inside `with`, allow or forbid TF32 for products and convolutions of float32 on a GPU.

    TF32 keeps 10 of the 23 bits of a float32's mantissa.
    """
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@functools.cache
def openblas_threads() -> Any:
    """Return a `ThreadpoolController` for OpenBLAS, with which NumPy computes matrix products.

    Its method `limit` sets the number of threads.
    """
    return ThreadpoolController().select(internal_api="openblas")


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the operating system.

    Otherwise every step would map the memory of large gradients again. This took 11 % of a
    benchmark's time with gradients of 30 MB.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: use the heap below 1 GiB
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: return memory only above that
