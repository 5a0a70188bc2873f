"""How much memory a process has taken."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes; 0 where the platform does not tell."""
    try:
        # Unlike getrusage, this one starts anew when a process is spawned by a larger one.
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB
