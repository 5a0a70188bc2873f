"""Which version of the user's files a run was started with."""

from __future__ import annotations

import functools
import subprocess


@functools.cache
def source() -> dict[str, str]:
    """The commit that is checked out where the run was started, and whether files differ from it; {} without git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        found = {"commit": git("rev-parse", "HEAD")}
        return found | {"dirty": str(bool(git("status", "--porcelain", "--untracked-files=no"))).lower()}
    except (OSError, subprocess.SubprocessError):
        return {}
