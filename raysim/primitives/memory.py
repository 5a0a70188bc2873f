"""Measure memory, and refuse data that do not fit into the memory of the machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import NamedTuple

_GIB = 2**30
# Files with the largest memory of a container, in versions 2 and 1 of control groups.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far; 0 if it is unknown."""
    try:
        # Unlike getrusage, it does not begin with the memory of the parent process.
        status = Path("/proc/self/status").read_text()
        peaks = [line for line in status.splitlines() if line.startswith("VmHWM")]
        return int(peaks[0].split()[1]) * 1024
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def total_memory_bytes() -> float:
    """Return the memory of this machine, or of its container if that is less; inf if unknown."""
    limits = [float("inf")]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(name).read_text()))
    return min(limits)


class MemoryState(NamedTuple):
    """The memory of a machine, and what happened when it was full.

    kills: the number of processes that the kernel has ended since the machine's start because
    memory ran out; 0 if unknown.
    total_bytes: the memory of the machine, or of a smaller container; inf if unknown.
    """

    kills: int
    total_bytes: float


def memory_state() -> MemoryState:
    """Return the memory of this machine, and how often it ran out."""
    kills = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                kills = int(count)
    return MemoryState(kills, total_memory_bytes())


def release_free_memory() -> None:
    """Return freed memory of the heap to the operating system, if the C library is glibc."""
    # Large arrays that are freed one by one leave holes in the heap.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def check_memory(what: str, needed_bytes: float) -> None:
    """Raise `ValueError` if some data need more memory than the machine or its container has.

    what: the data, in the plural and with the setting: "2 images of data.size=30000".
    needed_bytes: the memory that they need.
    """
    total = total_memory_bytes()
    if needed_bytes > total:
        raise ValueError(
            f"{what} need {needed_bytes / _GIB:,.0f} GiB of memory, but this machine or its "
            f"container has only {total / _GIB:,.0f} GiB. Reduce the named settings, or use less "
            "data."
        )
