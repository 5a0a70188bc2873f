"""Build the command that repeats a run from its stored configuration."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

TARGET = "_target_"  # Hydra's key for the path of a class


def rerun_command(config: object, path: str | Path, *overrides: str) -> str:
    """Return the command that repeats a run: `raysim run --config PATH --allow PACKAGE ...`.

    The command allows each package, other than raysim, from which the configuration names a class.
    config, path: the stored configuration and its file.
    """
    packages = dict.fromkeys(name for name in _packages(config) if name != "raysim")
    parts = ["raysim run --config", shlex.quote(str(path))]
    parts += [f"--allow {name}" for name in packages]
    return " ".join([*parts, *overrides])


def _packages(node: object) -> Iterator[str]:
    """Yield the top-level package of every class in a configuration.

    node: the configuration, or a part of it. A class is named by the key `_target_`.
    """
    if isinstance(node, dict):
        target = node.get(TARGET)
        if isinstance(target, str):
            yield target.partition(".")[0]
        for value in node.values():
            yield from _packages(value)
    elif isinstance(node, list):
        for value in node:
            yield from _packages(value)
