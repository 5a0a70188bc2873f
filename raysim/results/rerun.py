"""The command that repeats a run from its stored configuration."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

TARGET = "_target_"  # of a class, as Hydra has it


def rerun_command(config: object, path: Path, *words: str) -> str:
    """`raysim run --config PATH`, with the packages whose classes the configuration names."""
    foreign = dict.fromkeys(name for name in _packages(config) if name != "raysim")
    return " ".join(
        [
            "raysim run --config",
            shlex.quote(str(path)),
            *(f"--allow {name}" for name in foreign),
            *words,
        ]
    )


def _packages(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(target := node.get(TARGET), str):
            yield target.partition(".")[0]
        for value in node.values():
            yield from _packages(value)
    elif isinstance(node, list):
        for value in node:
            yield from _packages(value)
