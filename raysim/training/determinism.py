"""What bits depend on besides settings and seed: threads, and algorithms that give the same sum every time."""

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
    """Fix the number of threads in this process, and let torch choose only deterministic algorithms."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(
        "warn"
    )  # torch.use_deterministic_algorithms imports the compiler: seconds
    # Else every torch.empty is a write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    openblas_threads().limit(limits=1)
    _keep_memory()


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Whether products of float32 may be made from TF32 (10 bits of 23) on a GPU that does so many times as fast."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@functools.cache
def openblas_threads() -> Any:
    """The threads of the library in which NumPy multiplies; torch's own are not among them."""
    return ThreadpoolController().select(internal_api="openblas")


def _keep_memory() -> None:
    """Let glibc keep freed memory: gradients of 30 MB would be mapped anew at every step (11 % of W3's time)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: use the heap below 1 GiB
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: return memory only above that
