"""Find the git commit of the user's files at the start of a run."""

from __future__ import annotations

import functools
import json
import os
import subprocess

# The environment variable with the commit of a submitted job, whose files are not a git checkout.
SOURCE = "RAYSIM_SOURCE"


@functools.cache
def source_commit() -> dict[str, str]:
    """Return the git commit of the current folder, or of the files of a submitted job.

    The keys are "commit" and "dirty" ("true" if tracked files differ from the commit, else
    "false"). Without a git checkout or git, return {}.
    """
    submitted = os.environ.get(SOURCE)
    if submitted:
        return dict(json.loads(submitted))
    try:
        commit = _run_git("rev-parse", "HEAD")
        changes = _run_git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit, "dirty": "true" if changes else "false"}


def _run_git(*words: str) -> str:
    completed = subprocess.run(
        ["git", *words], capture_output=True, text=True, check=True, timeout=10
    )
    return completed.stdout.strip()
