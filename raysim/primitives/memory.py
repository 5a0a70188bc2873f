"""How much memory a process has taken, how much there is, and what does not fit into it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far, in bytes; 0 where the platform does not tell."""
    try:
        # Unlike getrusage, this one starts anew when a process is spawned by a larger one.
        status = Path("/proc/self/status").read_text()
        return next(
            int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")
        )
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def total_memory_bytes() -> float:
    """Bytes that this machine has, or the group of processes (a container) that this one is in; infinite if unknown."""
    limits = [float("inf")]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def check_memory(what: str, needed: float) -> None:
    """Raises ValueError where `needed` [bytes] for what the settings ask for are more than there are."""
    if needed > (there := total_memory_bytes()):
        raise ValueError(
            f"{what} take {needed / 2**30:,.0f} GiB of memory, of which there are {there / 2**30:,.0f}: ask for less"
        )
