"""Find packages that extend raysim with classes, and with options in their folder `conf`.

An installed package is found if its `pyproject.toml` has this entry point:

    [project.entry-points."raysim.plugins"]
    mine = "mine"

Any other package needs `--allow PACKAGE`. A package is imported only when a configuration uses it.
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

from raysim.primitives.errors import RefusedError

ENTRY_POINT_GROUP = "raysim.plugins"


@functools.cache
def installed_packages() -> tuple[str, ...]:
    """Return the names of the installed packages that extend raysim, sorted."""
    points = entry_points(group=ENTRY_POINT_GROUP)
    return tuple(sorted({point.value for point in points}))


def allow_packages(packages: Sequence[str]) -> list[Path]:
    """Check that Python finds packages; return the packages' folders `conf`.

    If there are packages, the current folder is added to Python's search path.
    Raise `RefusedError` for a package that does not exist, and if `packages` is a string in place
    of a list.
    """
    if isinstance(packages, str):
        raise RefusedError(
            f"allow={packages!r} is one text, not a list of packages. Write allow=[{packages!r}]."
        )
    current_folder = os.getcwd()
    if packages and "" not in sys.path and current_folder not in sys.path:
        sys.path.append(current_folder)  # after the folder of the user's own script
    for package in packages:
        root = package.partition(".")[0]
        if root not in sys.modules and not _find_spec(root):
            raise RefusedError(
                f"allow={package}: there is no such package. "
                "Correct its name, install it, or go to the folder where it is."
            )
    return conf_folders_of(packages)


def used_packages(node: object, allow: Sequence[str], paths: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the packages besides raysim that a worker may have to import, sorted.

    node: the configuration. The result has the packages of all classes in the configuration.
    allow: the packages that the user allowed; all are in the result.
    paths: full names of further functions and classes.
    """
    names = {package.partition(".")[0] for package in (*allow, *paths)} | _target_packages(node)
    return tuple(sorted(names - {"raysim", ""}))


def _target_packages(node: object) -> set[str]:
    packages: set[str] = set()
    if isinstance(node, Mapping):
        target = str(node.get("_target_") or "")
        packages.add(target.partition(".")[0])
        for value in node.values():
            packages |= _target_packages(value)
    elif isinstance(node, list):
        for value in node:
            packages |= _target_packages(value)
    return packages


def find_unallowed_package(group: str, option: str) -> tuple[str, str]:
    """Find a package in the current folder whose folder `conf` contains an option's file.

    group: the configuration group, such as "method".
    option: the name of the option, such as "mine".
    Return the package's name and the path of the file. Both are "" if there is no such package.
    """
    for file in sorted(Path().glob(f"*/conf/{group}/**/*.yaml")):
        package, _, _, *name = file.with_suffix("").parts
        if "/".join(name) == option and Path(package, "__init__.py").is_file():
            return package, str(file)
    return "", ""


def conf_folders_of(packages: Sequence[str]) -> list[Path]:
    """Return the folder `conf` of each package that has one.

    Raise `RefusedError` if Python would import a folder that only contains the package, such as
    mine/ in place of the package mine/mine/.
    """
    folders = []
    for name in dict.fromkeys(package.partition(".")[0] for package in packages):
        for location in map(Path, _package_locations(name)):
            inner = location / name
            if not (location / "__init__.py").exists() and (inner / "__init__.py").is_file():
                raise RefusedError(
                    f"allow={name}: Python would import the folder {location}, which has no "
                    f"__init__.py, instead of the package {inner} inside it. Start raysim in the "
                    f"folder {location}, so that Python finds the package."
                )
            folders.append(location / "conf")
    return [folder for folder in folders if folder.is_dir()]


def _package_locations(package: str) -> list[str]:
    """Return the folders of a package; [] if the package is a single file or does not exist."""
    spec = _find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec else []


def _find_spec(package: str) -> ModuleSpec | None:
    """Find a package without importing it; return its import spec, or None if it does not exist."""
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
