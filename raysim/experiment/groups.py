"""Find configuration groups and their options, and read which options an override selects."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from raysim.experiment.config_files import Node, load_yaml
from raysim.experiment.instantiate import TARGET
from raysim.experiment.plugins import (
    conf_folders_of,
    find_unallowed_package,
    installed_packages,
)
from raysim.primitives.errors import RefusedError, nearest, suggest
from raysim.primitives.files import conf_folder, user_path

# Groups of which a run can have several options.
LISTS = ("method", "observer")
# Names for an empty list of options.
NONE = {"method": "fedavg"}
# Groups that every run needs.
COMPLETE = ("method", "schedule", "fleet", "data", "partition", "model", "runtime")
# Groups for which a run may store an object from Python.
PARTS_FROM_PYTHON = (
    "schedule", "selection", "fleet", "topology", "data", "partition", "model", "learner",
    "compression",
)  # fmt: skip
# Options of earlier versions, and the overrides that replace them.
_MOVED = {("method", "ifca"): "topology=clustered topology.rule=loss"}
# The group that belongs to searches; no run has it.
SWEEP = "sweep"
# The path, the time of change and the size of a file.
FileState: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True)
class Groups:
    """The files of all options, and the shared files that options include.

    files: the file of each option, by group and name.
    common: the shared files. The key of conf/GROUP/_NAME.yaml is "GROUP/_NAME".
    state: the path, time of change and size of every file.
    """

    files: Mapping[str, Mapping[str, Path]] = field(compare=False)
    common: Mapping[str, Path] = field(compare=False)
    state: tuple[FileState, ...]


def find_groups(folders: Sequence[Path] = ()) -> Groups:
    """Find all options: those in `conf`, in the installed packages and in the user's folders.

    A file in a user's folder replaces an earlier option of the same group and name.
    Raise `RefusedError` if a folder is missing, a link is broken or a package repeats an option.
    Raise it also for a method's file fedavg.yaml, because fedavg means an empty list.
    """
    roots = config_roots(folders)
    scans = []
    for root in roots:
        if not root.is_dir():
            raise RefusedError(
                f"{root}: this configuration folder does not exist. Give an existing folder, or "
                "leave it out."
            )
        may_replace = root in (*folders, roots[0])
        states = [_file_state(name) for name in sorted(_yaml_files(root))]
        main_file = _file_state(str(root / "config.yaml"))
        scans.append(_Scan(root, may_replace, main_file, tuple(states)))
    return _sort_files(tuple(scans))


class _Scan(NamedTuple):
    """A folder of options.

    may_replace: True if its options may replace those of the folders before it.
    main_file: the state of the folder's config.yaml.
    states: the state of each option's file.
    """

    root: Path
    may_replace: bool
    main_file: FileState
    states: tuple[FileState, ...]


# Every composition looks for the options, and they seldom change.
@functools.lru_cache(maxsize=64)
def _sort_files(scans: tuple[_Scan, ...]) -> Groups:
    """Return the files in some folders by group and name; raise errors as `find_groups` does."""
    files: dict[str, dict[str, Path]] = {group: {} for group in LISTS}
    common: dict[str, Path] = {}
    state: list[FileState] = []
    for scan in scans:
        state += [scan.main_file, *scan.states]
        for path in sorted(Path(name) for name, _, _ in scan.states):
            group, *inner = path.relative_to(scan.root).with_suffix("").parts
            name = "/".join(inner)
            if group in NONE and path.stem == NONE[group]:
                raise RefusedError(
                    f"{path}: no option of the group {group} can have this name, because "
                    f"{group}={NONE[group]} means an empty list. Rename the file."
                )
            if path.name.startswith("_"):
                common[f"{group}/{name}"] = path
                continue
            options = files.setdefault(group, {})
            if name in options and not scan.may_replace:
                raise RefusedError(
                    f"{path}: the group {group} already has an option of this name, in the file "
                    f"{options[name]}. Rename {path.name}, or uninstall the Python package that "
                    f"contains {path}."
                )
            options[name] = path
    return Groups(files, common, tuple(state))


def _file_state(path: str) -> FileState:
    with suppress(OSError):
        status = os.stat(path)
        return path, status.st_mtime_ns, status.st_size
    return path, 0, 0


def _yaml_files(root: Path) -> Iterator[str]:
    """Yield the YAML files in the group folders below `root`; skip unreadable folders."""
    _, group_names, other_names = next(os.walk(root), ("", [], []))
    for path in (root / name for name in other_names):
        if path.is_symlink() and not path.exists():
            raise RefusedError(f"{path} is a broken link. Fix it, or remove it.")
    for group in group_names:
        for folder, _, names in os.walk(root / group):
            for name in names:
                if name.endswith(".yaml"):
                    yield os.path.join(folder, name)


def config_roots(folders: Sequence[Path]) -> list[Path]:
    """Return the folders with options: `conf`, installed packages, and the user's folders.

    The order matters: a file in one of the user's folders replaces a file of the same name in an
    earlier folder.
    folders: the user's folders.
    """
    return list(dict.fromkeys([conf_folder(), *conf_folders_of(installed_packages()), *folders]))


def config_folders(folders: Sequence[str | Path]) -> list[Path]:
    """Return the absolute path of each configuration folder that the user gave (--conf)."""
    return [user_path(folder).absolute() for folder in folders]


def load_option(path: Path, group: str) -> Node:
    """Read the YAML file of an option.

    group: the option's group. A file of "method" or "observer" must have a name on top, with
    `_target_` and all arguments below it.
    Raise `RefusedError` if the file is not valid, or in these two groups if it is empty.
    """
    node = load_yaml(path, "Fix it.")
    if group in LISTS and not node:
        raise RefusedError(f"{path} is empty. Name a class in it (_target_), or remove the file.")
    if group in LISTS and TARGET in node:
        raise RefusedError(
            f"{path} has {TARGET} as a key of the top level. In the group {group}, the first line "
            "of a file must be a name and a colon. Insert the line "
            f"'{path.stem}:' at the top, and indent all other lines below it."
        )
    return node


def options_with_key(key: str, group: str, groups: Groups) -> list[str]:
    """Return "group=option" for each option of `group` that has a key.

    The key is in the option's file, or in a file that this file includes.
    key: the name of a setting without its group, such as "lr".
    """
    paths = groups.files.get(group, {})
    return [f"{group}={name}" for name, path in paths.items() if _has_key(path, key, group)]


def _has_key(path: Path, key: str, group: str) -> bool:
    """Return True if the file of an option, or a file that the option includes, has a key.

    path: the file of the option.
    group: the option's group, for errors.
    """
    node = load_option(path, group)
    included = [entry for entry in node.get("defaults") or () if isinstance(entry, str)]
    files = [path.with_name(f"{entry}.yaml") for entry in included]
    return key in node or any(key in load_option(file, group) for file in files if file.is_file())


def option_names(value: object, group: str = "method") -> list[Any]:
    """Return the names of the options that an override of `method` or `observer` selects.

    value: the name of an option, "a+b" for the options a and b, or a list of names. None and ""
    select no option, and neither does "fedavg" in the group "method".
    """
    if isinstance(value, str):
        value = value.split("+") if value else []
    if value is None:
        value = []
    names = value if isinstance(value, list) else [value]
    return [] if names == [NONE.get(group)] else names


def join_options(names: Sequence[object], group: str = "method") -> str:
    """Return a list of options as text, "a+b", which needs no quotes in a shell.

    The empty list is "fedavg" for the group "method", and "null" for any other group.
    """
    return "+".join(map(str, names)) or NONE.get(group, "null")


def check_options(group: str, value: object, groups: Groups) -> list[str]:
    """Return the names of the options that an override selects in a group.

    value: the override's value, an option's name. Groups such as "method" also accept the text
    "a+b", a list of names, or None.
    Raise `RefusedError` for an option that does not exist or is named twice. Raise it also if
    "fedavg", which stands for no methods, is combined with a method.
    """
    options = groups.files[group]
    values = option_names(value, group) if group in LISTS else [value]
    names = [name for name in values if isinstance(name, str)]
    for name in values:
        if group in NONE and name == NONE[group]:
            raise RefusedError(
                f"{group}={join_options(values)} combines options with {name}, but {name} "
                f"stands for an empty list of options. Leave {name} out."
            )
        if not isinstance(name, str) or name not in options:
            raise RefusedError(_unknown_option(group, name, options))
        if names.count(name) > 1:
            raise RefusedError(
                f"{group}={join_options(names)} names {name} {names.count(name)} times. "
                "Keep one of them."
            )
    return names


def _unknown_option(group: str, name: object, options: Mapping[str, Path]) -> str:
    text = "null" if name is None else str(name)
    package, file = find_unallowed_package(group, text)
    if package:
        return f"{group}={text} does not exist, but {file} is in this folder: add --allow {package}"
    if (group, text) in _MOVED:
        return f"{group}={text} does not exist any more. Set {_MOVED[group, text]}"
    valid = [*([NONE[group]] if group in NONE else []), *options]
    hint = suggest(str(name), valid)
    words = text.split()
    if group in LISTS and len(words) > 1 and all(word in options for word in words):
        hint = f"did you mean {group}={'+'.join(words)}?"
    if _is_torchvision_model(group, text, valid):
        hint = f"did you mean model=torchvision model.name={text}?"
    return f"{group}={text} does not exist: {hint}"


def _is_torchvision_model(group: str, name: str, options: Sequence[str]) -> bool:
    # Check names here, so that a misspelt option is refused before PyTorch is imported.
    if group != "model" or (nearest(name, options) and not re.search(r"\d", name)):
        return False
    from raysim.models.zoo import is_torchvision_model

    return is_torchvision_model(name)
