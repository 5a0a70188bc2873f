"""Packages of the user's own that bring parts: options in a folder `conf` inside them, and the classes that these name.

A package is one by its entry point, `[project.entry-points."raysim.plugins"] mine = "mine"`, once it is installed; any
other that can be imported is one for a single command, by `--allow mine`. Nothing of it is imported before a
configuration names a class of it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path

from raysim.primitives.errors import Refused

GROUP = "raysim.plugins"


@functools.cache
def installed_packages() -> tuple[str, ...]:
    """The packages that say by an entry point that they bring parts, by name."""
    return tuple(sorted({point.value for point in entry_points(group=GROUP)}))


def allow_packages(packages: Sequence[str]) -> list[Path]:
    """The folders `conf` that lie inside these packages, which are also looked for in the current folder.

    Raises Refused for one that is nowhere, and for text, which is a sequence of letters.
    """
    if isinstance(packages, str):
        raise Refused(
            f"allow={packages!r} is one text where a list of packages belongs: write allow=[{packages!r}]"
        )
    if packages and not {"", here := os.getcwd()} & {*sys.path}:
        sys.path.append(here)  # behind the folder of the user's own script
    for package in packages:
        if (root := package.partition(".")[0]) not in sys.modules and not _spec(root):
            raise Refused(
                f"there is no package {package} to allow: correct its name, install it, or go to the folder where it is"
            )
    return conf_folders_of(packages)


def used_packages(node: object, allow: Sequence[str]) -> tuple[str, ...]:
    """Return the packages besides raysim that are allowed, or whose classes a configuration names."""
    names = {package.partition(".")[0] for package in allow} | _targets(node)
    return tuple(sorted(names - {"raysim", ""}))


def _targets(node: object) -> set[str]:
    """Return the packages of all classes that a configuration names."""
    found: set[str] = set()
    if isinstance(node, Mapping):
        found.add(str(node.get("_target_") or "").partition(".")[0])
        for value in node.values():
            found |= _targets(value)
    elif isinstance(node, list):
        for value in node:
            found |= _targets(value)
    return found


def find_unallowed_package(group: str, option: str) -> tuple[str, str]:
    """A package in the current folder that has an option, and the file that it is in; empty where there is none."""
    for file in sorted(Path().glob(f"*/conf/{group}/**/*.yaml")):
        package, _, _, *name = file.with_suffix("").parts
        if "/".join(name) == option and Path(package, "__init__.py").is_file():
            return package, str(file)
    return "", ""


def conf_folders_of(packages: Sequence[str]) -> list[Path]:
    """The folders `conf` that lie inside these packages; of those that have one.

    Raises Refused for the folder around a package of the same name, which Python takes for a package.
    """
    found = []
    for package in dict.fromkeys(name.partition(".")[0] for name in packages):
        for place in map(Path, _places(package)):
            if not (place / "__init__.py").exists() and (place / package / "__init__.py").is_file():
                raise Refused(
                    f"the package {package} is one folder further in, {place / package}: go to {place} first"
                )
            found.append(place / "conf")
    return [path for path in found if path.is_dir()]


def _places(package: str) -> list[str]:
    """Where a package lies; nothing for a single file, or for what is not there."""
    spec = _spec(package)
    return list(spec.submodule_search_locations or ()) if spec else []


def _spec(package: str) -> ModuleSpec | None:
    """What Python knows of a package without importing it; None for what is not there."""
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
