"""Which version of the user's files a run was started with."""

from __future__ import annotations

import functools
import json
import os
import subprocess

SOURCE = "RAYSIM_SOURCE"  # in the environment of a submitted job, whose files are no checkout: what it was packed from


@functools.cache
def source_commit() -> dict[str, str]:
    """The commit that is checked out where the run was started, and whether files differ from it; {} without git."""
    if given := os.environ.get(SOURCE):
        return dict(json.loads(given))

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        found = {"commit": git("rev-parse", "HEAD")}
        return found | {
            "dirty": str(bool(git("status", "--porcelain", "--untracked-files=no"))).lower()
        }
    except (OSError, subprocess.SubprocessError):
        return {}
