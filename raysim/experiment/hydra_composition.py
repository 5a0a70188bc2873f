"""Compose the files of the chosen options with Hydra's public API."""

from __future__ import annotations

import functools
import pickle
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from raysim.experiment.config_files import Node, load_yaml, parse_yaml
from raysim.experiment.groups import LISTS, Groups, config_roots, load_option, option_names
from raysim.primitives.errors import RefusedError, first_line, suggest

# The chosen options of each group, in a form that can be hashed.
Options: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]
Names: TypeAlias = list[str]

_HYDRA_LOCK = threading.Lock()  # Hydra has one state for the whole process
# The first line of a file whose values belong to another group than the file.
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")


class ConfigFiles(ConfigSource):
    """A Hydra config source that reads configuration files from several folders.

    If two folders have a file of the same name in a group, the later folder's file counts. Files
    outside of groups, such as config.yaml, are read only from the first folder.
    roots: the folders, set only while raysim composes a configuration; otherwise empty.
    """

    # Hydra's own class for files parses each file again for each composition. Without the parsing,
    # a composition takes a third less time.

    roots: Sequence[Path] = ()

    @staticmethod
    def scheme() -> str:
        """Return the start of this source's addresses: "raysim" in "raysim://conf"."""
        return "raysim"

    def available(self) -> bool:
        """Return True, because the folders were checked before."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return True if one of the folders has this group.

        config_path: the name of the group.
        """
        return any((root / config_path).is_dir() for root in self.roots)

    def is_config(self, config_path: str) -> bool:
        """Return True if one of the folders has this file.

        config_path: the path of the file in the folder, without the ending ".yaml".
        """
        return self._file(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a file, which must exist.

        config_path: the path of the file in the folder, without the ending ".yaml".
        """
        file = self._file(config_path)
        assert file is not None, config_path
        text = file.read_text(encoding="utf-8")
        mark = _PACKAGE.match(text)
        header = {"package": mark[1] if mark else None}
        return ConfigResult(self.provider, self.full_path(), parse_yaml(text), header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> Names:
        """Return the names of a group's files and subfolders, which Hydra lists in its errors.

        config_path: the name of the group.
        results_filter: CONFIG selects the files, GROUP the subfolders, None both. The names of
        files have no ending.
        """
        names: set[str] = set()
        for root in self.roots:
            for path in (root / config_path).glob("*"):
                if path.suffix == ".yaml" and results_filter is not ObjectType.GROUP:
                    names.add(path.stem)
                elif path.is_dir() and results_filter is not ObjectType.CONFIG:
                    names.add(path.name)
        return sorted(names)

    def _file(self, config_path: str) -> Path | None:
        has_group = "/" in config_path
        for root in reversed(self.roots if has_group else self.roots[:1]):
            file = root / f"{config_path.removesuffix('.yaml')}.yaml"
            if file.is_file():
                return file
        return None


class SearchConfigFiles(SearchPathPlugin):
    """A Hydra plugin that lets Hydra search `ConfigFiles` first for raysim's configurations."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add `ConfigFiles` to the search path.

        Do nothing if another application in this process composes with Hydra.
        """
        if ConfigFiles.roots:
            search_path.prepend("raysim", f"{ConfigFiles.scheme()}://conf")


class Composition(NamedTuple):
    """The result of one composition by Hydra.

    values: the complete configuration. It also has values that the preset sets for options that
    are not used.
    chosen_values: the values of the chosen options as they are without the preset, by group. It
    has only groups that the preset mentions: "method", "observer", and each other group in which
    the user chose an option. With a preset only its keys count; the values may be None.
    choices: the option of each group; a list of options for "method" and "observer".
    """

    values: Node
    chosen_values: Node
    choices: Node


def compose_files(options: Options, groups: Groups, folders: tuple[Path, ...]) -> DictConfig:
    """Compose a configuration from the files of the chosen options.

    options: the chosen options, by group.
    folders: the user's own folders of options.
    """
    return cast(DictConfig, pickle.loads(_compose_pickled(options, groups, folders)))


# Many runs choose the same options.
@functools.lru_cache(maxsize=64)
def _compose_pickled(options: Options, groups: Groups, folders: tuple[Path, ...]) -> bytes:
    """Return the pickle of the configuration that `compose_files` returns."""
    chosen = {group: list(names) for group, names in options}
    try:
        _check_user_files(chosen, groups, folders)
        composition = _compose_by_hydra(chosen, groups, folders)
    except RefusedError:
        raise
    except Exception as error:
        has_only_conf = len(config_roots(folders)) == 1
        if has_only_conf and not isinstance(error, (HydraException, OmegaConfBaseException)):
            raise
        reason = first_line(error).rstrip(".:")
        raise RefusedError(
            f"the configuration files cannot be combined ({reason}). Correct your own "
            "configuration files, in the folders given with --conf and in the folder conf of your "
            "packages."
        ) from error
    config = OmegaConf.create(composition.values)
    has_preset = "experiment" in chosen
    if has_preset:
        for group in LISTS:
            _check_preset_options(config, group, groups, chosen["experiment"][0])
    for group, values in composition.chosen_values.items():
        # Hydra keeps a preset's list when the user's is empty, and a preset's keys whatever
        # option is chosen.
        if has_preset:
            # Values may refer to keys of the whole configuration, so they stay unresolved here.
            preset_values: Any = OmegaConf.to_container(config[group])
            values = {key: preset_values[key] for key in values}
        config[group] = values
    config["choices"] = composition.choices
    return pickle.dumps(config)


def _compose_by_hydra(
    chosen: Mapping[str, list[str]], groups: Groups, folders: Sequence[Path]
) -> Composition:
    has_preset = "experiment" in chosen
    preset = chosen["experiment"][0] if has_preset else "default"
    lists, mentioned = _read_preset(preset, groups)
    lists |= {group: chosen[group] for group in LISTS if group in chosen}
    changed = mentioned & {*chosen, *(LISTS if has_preset else ())}
    roots = tuple(config_roots(folders))
    has_user_files = len(roots) > 1
    # A user's file may set values of another group than its own. In raysim's own files, methods and
    # observers set only their own values, so all lists of methods share one composition.
    for_hydra = {**chosen} if has_user_files else {**chosen, **dict.fromkeys(LISTS, ())}
    options = tuple((group, tuple(names)) for group, names in for_hydra.items())
    values, choices = pickle.loads(_compose_options(options, groups, roots))
    choices |= {group: lists.get(group, []) for group in LISTS}
    if not has_user_files:
        for group in LISTS:
            values[group] = _add_options(group, choices[group], values[group], groups)

    chosen_values: Node = {}
    # With a preset, only the keys of the chosen options count. In raysim's own files they are those
    # of the files, and reading these takes much less time than another composition.
    if has_preset and not has_user_files:
        for group in sorted(changed):
            names = choices[group] if group in LISTS else [choices[group]]
            chosen_values[group] = dict.fromkeys(_option_keys(group, names, groups))
    elif changed:
        used = []
        for group, name in choices.items():
            if name is not None and group != "experiment":
                used.append((group, tuple(name if group in LISTS else [name])))
        with _start_hydra(roots):
            chosen_values = _values_without_preset(
                tuple(used), tuple(sorted(changed)), has_user_files
            )
    return Composition(values, chosen_values, choices)


@functools.lru_cache(maxsize=64)
def _compose_options(options: Options, groups: Groups, roots: tuple[Path, ...]) -> bytes:
    """Compose the files of the chosen options with Hydra.

    Return the pickle of two dictionaries: the values, and the option of each group.
    """
    overrides = _hydra_overrides(dict(options))
    with _start_hydra(roots):
        config = hydra.compose("config", overrides=overrides, return_hydra_config=True)
    choices = {
        group: name for group, name in config.hydra.runtime.choices.items() if "/" not in group
    }
    return pickle.dumps((_values(config), choices))


def _add_options(group: str, names: Sequence[str], preset_values: Node, groups: Groups) -> Node:
    """Return the values of the chosen options of "method" or "observer", by name.

    The result also has the preset's values for options that are not chosen.
    names: the chosen options, which have only raysim's own files.
    preset_values: the values that a preset sets, by name.
    """
    parts = [node for name in names for _, node in _option_files(groups, group, name)]
    return cast(Node, OmegaConf.to_container(OmegaConf.merge(*parts, preset_values)))


def _values_without_preset(options: Options, groups: tuple[str, ...], has_user_files: bool) -> Node:
    """Return the values that some groups have without a preset, by group.

    Call this function only after Hydra has started.
    options: the chosen options of all groups.
    groups: the groups whose values are returned.
    has_user_files: True if there are configuration files besides raysim's own.
    """
    if has_user_files:  # the file of an option may set values of another group
        values = _compose_without_preset(options, ())
    else:
        chosen = tuple((group, names) for group, names in options if group in groups)
        left_out = tuple(group for group, _ in options if group not in (*groups, *LISTS))
        values = _compose_own_options(chosen, left_out)
    return {group: values[group] for group in groups if group in values}


def _compose_without_preset(options: Options, left_out: tuple[str, ...]) -> Node:
    """Return the values of a configuration without a preset.

    Call this function only after Hydra has started.
    options: the chosen options, by group.
    left_out: the groups that are removed from the result.
    """
    deletions = [f"~{group}" for group in ("experiment", *left_out)]
    overrides = [*_hydra_overrides(dict(options)), *deletions]
    return _values(hydra.compose("config", overrides=overrides))


# Only for raysim's own files, because these do not change. Many compositions have the same methods.
# Do not change a result: the next call with the same options returns it again.
_compose_own_options = functools.lru_cache(maxsize=256)(_compose_without_preset)


def _hydra_overrides(chosen: Mapping[str, Sequence[str]]) -> list[str]:
    overrides = []
    for group, names in chosen.items():
        quoted = [_quote(name) for name in names]
        value = f"[{','.join(quoted)}]" if group in LISTS else quoted[0]
        overrides.append(f"{group}={value}")
    return overrides


def _quote(name: str) -> str:
    escaped = name.replace("'", "\\'")
    return f"'{escaped}'"


def _values(config: DictConfig) -> Node:
    """Return the values of a configuration, without Hydra's own settings.

    References such as `${seed}` stay unresolved.
    """
    values = cast(Node, OmegaConf.to_container(config))
    values.pop("hydra", None)
    values.pop("experiment", None)
    return values


@contextmanager
def _start_hydra(roots: Sequence[Path]) -> Iterator[None]:
    """Let Hydra read the files of some folders during a `with` block.

    roots: the folders. Hydra reads config.yaml only from the first folder. It reads every other
    file from the last folder that has a file of this name.
    """
    with _HYDRA_LOCK:
        Plugins.instance().register(ConfigFiles)
        Plugins.instance().register(SearchConfigFiles)
        application = GlobalHydra.instance().hydra  # the Hydra of an application that calls raysim
        GlobalHydra.instance().clear()
        ConfigFiles.roots = roots
        try:
            with hydra.initialize_config_dir(str(roots[0].absolute()), version_base="1.3"):
                yield
        finally:
            ConfigFiles.roots = ()
            GlobalHydra.instance().clear()
            if application is not None:
                GlobalHydra.instance().initialize(application)


def _read_preset(preset: str, groups: Groups) -> tuple[dict[str, list[str]], set[str]]:
    """Return the methods and observers that a preset chooses, and all groups that it mentions.

    The first result maps "method" or "observer" to the chosen options. A preset mentions a group if
    it sets an option or a value of the group.
    """
    lists: dict[str, list[str]] = {}
    mentioned: set[str] = set()
    # A preset's entries replace those of the files that it includes.
    for _, node in reversed(list(_option_files(groups, "experiment", preset))):
        defaults = _default_options(node)
        mentioned |= {*node, *defaults}
        for group, names in defaults.items():
            if group in LISTS:
                lists[group] = option_names(names, group)
    return lists, mentioned


def _check_user_files(
    chosen: Mapping[str, Sequence[str]], groups: Groups, folders: Sequence[Path]
) -> None:
    """Raise `RefusedError` if a file of the user is broken, because Hydra's own error is unclear.

    chosen: the options that the user chose, by group.
    groups: all options and their files.
    folders: the user's folders of options.
    """
    roots = config_roots(folders)
    if len(roots) == 1:
        return
    main = roots[0]
    options: dict[str, Sequence[str]] = {}
    for group, name in _default_options(load_yaml(main / "config.yaml")).items():
        if group not in LISTS:
            options[group] = [name]
    options |= chosen
    unchecked = [(group, str(name)) for group, names in options.items() for name in names]
    checked: set[tuple[str, str]] = set()
    while unchecked:
        option = unchecked.pop()
        if option in checked:
            continue
        checked.add(option)
        group, name = option
        for path, node in _option_files(groups, group, name):
            if not path.is_relative_to(main):
                load_option(path, group)
            for other_group, value in _default_options(node).items():
                names = value if isinstance(value, list) else [value]
                unchecked += [(other_group, str(other_name)) for other_name in names]


def _option_files(groups: Groups, group: str, name: str) -> Iterator[tuple[Path, Node]]:
    """Yield the file of an option and the files that it includes, each with its content.

    A broken file counts as empty: `_check_user_files` and Hydra report it.
    groups: all options and their files.
    group, name: the option.
    """
    path = groups.files.get(group, {}).get(name) or groups.common.get(f"{group}/{name}")
    if path is None:
        return
    try:
        node = load_yaml(path)
    except RefusedError:
        node = {}
    yield path, node
    for entry in node.get("defaults") or ():
        if isinstance(entry, str) and entry != "_self_":
            inner = entry.removeprefix("/").removeprefix(f"{group}/")
            folder = "" if entry.startswith("/") else f"{Path(name).parent.as_posix()}/"
            yield from _option_files(groups, group, f"{folder}{inner}".removeprefix("./"))


def _option_keys(group: str, names: Sequence[str], groups: Groups) -> list[str]:
    """Return the keys in the files of a group's options; those of included files come first.

    names: the options.
    """
    keys: list[str] = []
    for name in names:
        for _, node in reversed(list(_option_files(groups, group, name))):
            keys += [key for key in node if key != "defaults"]
    return keys


def _default_options(node: Node) -> Node:
    """Read the list `defaults` of a configuration file; return the option of each group in it.

    node: the content of the file. The result is {} if the file has no such list.
    """
    options: Node = {}
    for entry in node.get("defaults") or ():
        if not isinstance(entry, dict):
            continue
        for key, value in entry.items():
            options[str(key).removeprefix("override ").strip("/ ")] = value
    return {group: value for group, value in options.items() if value is not None}


def _check_preset_options(config: DictConfig, group: str, groups: Groups, preset: str) -> None:
    """Raise `RefusedError` if a preset sets values for options that do not exist.

    config: the configuration with the values of the preset.
    group: "method" or "observer".
    """
    files = groups.files[group]
    for name in config[group]:
        if name in files:
            continue
        if not any(name in load_option(path, group) for path in files.values()):
            raise RefusedError(
                f"experiment={preset} sets values of {group}.{name}, but there is no such "
                f"option: {suggest(name, files)}"
            )
