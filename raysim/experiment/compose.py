"""Make a checked configuration from overrides and the files of options.

The files are in raysim's folder `conf`, in packages and in the user's folders. A configuration may
also start from an earlier run's config.yaml. `hydra_composition` composes the files; this module
checks and applies the overrides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from raysim.experiment.config_files import SET_KEYS, Node, load_yaml, to_dict
from raysim.experiment.groups import (
    COMPLETE,
    LISTS,
    PARTS_FROM_PYTHON,
    SWEEP,
    Groups,
    check_options,
    config_folders,
    find_groups,
)
from raysim.experiment.hydra_composition import compose_files
from raysim.experiment.instantiate import format_value
from raysim.experiment.keys import (
    ALTERNATIVES,
    RUNTIME_KEYS_OF_BITS,
    check_key,
    empty_alternatives,
    set_value,
)
from raysim.experiment.run_overrides import (
    SetValue,
    check_no_plus,
    flatten_settings,
    full_keys,
    read_full_key,
)
from raysim.primitives.errors import RefusedError, first_line
from raysim.primitives.files import user_path
from raysim.primitives.stores import is_remote, is_url, open_store, split_address

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Draft:
    """A configuration in which references, such as `${seed}`, are not yet resolved.

    values: the user's values, by key; `config` has them already.
    set_keys: the keys in `values`, and the groups for which the user chose an option.
    stored: an earlier run's configuration, which gives the values of all other keys, or None.
    """

    config: DictConfig
    values: Mapping[str, Any]
    set_keys: Sequence[str]
    stored: Node | None


def compose(
    overrides: Sequence[str] = (),
    folders: Sequence[str | Path] = (),
    stored: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
) -> DictConfig:
    """Return one resolved configuration; its `choices` give the option of every group.

    overrides: texts "key=value".
    folders: the user's folders of options, laid out like `conf`.
    stored: the configuration file of an earlier run or sweep, for the values of keys without an
    override. None uses the file of the run that the key `resume` names, unless an override chooses
    a preset.
    settings: more overrides, as {"local.lr": 0.1} or {"local": {"lr": 0.1}}.
    Raise `RefusedError` for keys, options and files that do not exist.
    """
    roots = config_folders(folders)
    groups = find_groups(roots)
    draft = _draft_config(overrides, groups, roots, _load_stored(stored), settings or {})
    config = draft.config
    if draft.stored:
        config = _apply_to_stored(draft.stored, config, draft.set_keys)
    _add_set_keys(config, draft.set_keys)
    return _resolve(config, draft.values)


def _draft_config(
    overrides: Sequence[str],
    groups: Groups,
    roots: Sequence[Path],
    stored: Node | None = None,
    settings: Mapping[str, object] | None = None,
) -> Draft:
    """Compose a configuration of options, and set the user's values in it.

    A group's option comes from an override, or else from an earlier run, a preset or the defaults.
    roots: the user's folders of options.
    stored: the configuration of an earlier run. If it is None and no override chooses a preset,
    the configuration is read from the run that the setting `resume` names.
    """
    options, set_values = _separate_options(overrides, settings or {}, groups)
    values = {key: set_value.value for key, set_value in set_values.items()}
    resumed = None
    if stored is None and "experiment" not in options:
        stored = resumed = _load_resumed(values)
    all_options = _stored_options(stored, groups) | options
    hashable_options = tuple((group, tuple(names)) for group, names in all_options.items())
    config = compose_files(hashable_options, groups, tuple(roots))
    if stored is not None:
        _restore_objects(config, stored, options, groups)
    if resumed is not None and "runtime" in options:
        _keep_runtime(config, resumed)
    for key, (value, text) in set_values.items():
        check_key(config, key, groups)
        check_no_plus(text)
        set_value(config, key, value, text)
    empty_alternatives(config, values)
    return Draft(config, values, [*options, *set_values], stored)


def _separate_options(
    overrides: Sequence[str], settings: Mapping[str, object], groups: Groups
) -> tuple[dict[str, list[str]], dict[str, SetValue]]:
    """Return the options that the user chose, by group, and the values that the user set, by key.

    overrides: texts "key=value".
    settings: overrides as Python values, by key.
    groups: all options.
    Raise `RefusedError` for a key in both `overrides` and `settings`, and for unknown options.
    """
    parsed = [read_full_key(text) for text in overrides]
    setting_values = full_keys(flatten_settings(settings))
    setting_texts = {key: f"{key}={format_value(value)}" for key, value in setting_values.items()}
    texts = {override.key: override.text for override in parsed} | setting_texts
    for key, text in texts.items():
        if key.partition(".")[0] == SWEEP:
            raise RefusedError(f"'{text}' is only for raysim sweep. Write raysim sweep {text}.")

    options: dict[str, list[str]] = {}
    values: dict[str, SetValue] = {}
    for override in parsed:
        if override.key in groups.files:
            check_no_plus(override.text)
            options[override.key] = check_options(override.key, override.value, groups)
        else:
            values[override.key] = SetValue(override.value, override.text)
    for key, value in setting_values.items():
        if key in options or key in values:
            raise RefusedError(
                f"{key} is given twice, as an override and as {setting_texts[key]}. "
                "Keep one of them."
            )
        if key in groups.files:
            options[key] = check_options(key, value, groups)
        else:
            values[key] = SetValue(value, setting_texts[key])
    return options, values


def _restore_objects(
    config: DictConfig, stored: Node, options: Mapping[str, object], groups: Groups
) -> None:
    """Copy the entries that describe Python objects from a stored configuration to `config`.

    config: the new configuration, which is changed in place.
    stored: an earlier run's configuration, with entries for objects such as a model.
    options: the options that the user chooses now, by group. Entries of these groups are not
    copied.
    """
    choices = stored["choices"]
    for group in PARTS_FROM_PYTHON:
        # The choice of a group with an object is a title, not the name of an option.
        is_object = group in choices and choices[group] not in groups.files[group]
        if group not in options and is_object:
            config[group] = stored.get(group)
            config.choices[group] = choices.get(group)


def _keep_runtime(config: DictConfig, stored: Node) -> None:
    """Copy the stored runtime settings of a resumed run to `config`, in place.

    If the overrides choose another runtime, only the settings on which the bits of the results
    depend are copied.
    """
    stored_runtime = stored.get("runtime") or {}
    is_same = stored["choices"].get("runtime") == config.choices.get("runtime")
    for name in config.runtime:
        if name in stored_runtime and (is_same or f"runtime.{name}" in RUNTIME_KEYS_OF_BITS):
            config.runtime[name] = stored_runtime[name]


def _add_set_keys(config: DictConfig, keys: Sequence[str]) -> None:
    """Add keys to `config`'s list of keys that the user set; methods cannot change these keys."""
    earlier_keys = config.choices.get(SET_KEYS) or []
    config.choices[SET_KEYS] = sorted({*earlier_keys, *keys})


def _resolve(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        references = [f"{key}={value}" for key, value in values.items() if "${" in str(value)]
        place = references[0] if references else "the configuration"
        raise RefusedError(
            f"{place}: the reference ${{...}} to another key cannot be resolved "
            f"({first_line(error).rstrip('.')}). Write the value itself in its place."
        ) from error
    return config


# --- searches -------------------------------------------------------------------------------------
def draft(
    overrides: Sequence[str], folders: Sequence[str | Path], keys: Sequence[str]
) -> tuple[Node, dict[str, str]]:
    """Return the configuration that all trials of a sweep have in common, and the wrong keys.

    `complete_draft` makes a trial's configuration from it. The second result has an error text for
    each wrong key.
    overrides: texts "key=value".
    folders: the user's own folders of options.
    keys: the keys that the sweep varies.
    Raise `RefusedError` for overrides that `compose` would refuse. Only wrong references `${...}`
    are found later, by `complete_draft`.
    """
    roots = config_folders(folders)
    groups = find_groups(roots)
    drafted = _draft_config(overrides, groups, roots)
    _add_set_keys(drafted.config, drafted.set_keys)
    missing = {}
    for key in keys:
        try:
            check_key(drafted.config, key, groups)
        except RefusedError as error:
            missing[key] = str(error)
    return cast(Node, OmegaConf.to_container(drafted.config)), missing


def complete_draft(drafted: Node, values: Mapping[str, Any]) -> Node:
    """Complete the common configuration of a sweep with the values of one trial. Read no file.

    drafted: the configuration that all trials have in common, the first result of `draft`.
    values: the trial's values, by key.
    """
    config = OmegaConf.create(drafted)
    values = full_keys(values)
    for key, value in values.items():
        set_value(config, key, value, f"{key}={value}")
    empty_alternatives(config, values)
    _add_set_keys(config, list(values))
    return to_dict(_resolve(config, values))


# --- stored configurations ------------------------------------------------------------------------
def _load_stored(path: str | Path | None) -> Node | None:
    """Load a configuration to start from; its keys `out` and `resume` become None.

    path: a path or a URL; None returns None.
    Raise `RefusedError` if the file is missing or is not a complete configuration.
    """
    if path is None:
        return None
    advice = "Give the config.yaml of a run, or the best.yaml of a search."
    folder, name = split_address(str(path) if is_url(path) else user_path(path))
    store = open_store(folder)
    if name not in store.names():
        raise RefusedError(f"{path} is not a file. {advice}")
    with store.local(name) as copy:
        node = load_yaml(copy)
    if not _is_complete(node):
        raise RefusedError(f"{path} is not the complete configuration of a run. {advice}")
    return node | {"out": None, "resume": None}


def _load_resumed(values: Mapping[str, Any]) -> Node | None:
    """Load the config.yaml of the run that `resume` names.

    Return None if the user did not set `resume`, or if the file does not exist.
    values: the user's values, by key.
    Raise `RefusedError` if the configuration is not complete.
    """
    for place in _folders_of_resumed_run(values):
        folder = open_store(place if "://" in place else user_path(place))
        if CONFIG_FILE not in folder.names():
            continue
        with folder.local(CONFIG_FILE) as path:
            node = load_yaml(path)
        if not _is_complete(node):
            raise RefusedError(
                f"{folder}/{CONFIG_FILE} is not a complete configuration. Restore it, or start in "
                "a new folder."
            )
        return node
    return None


def _folders_of_resumed_run(values: Mapping[str, Any]) -> list[str]:
    """Return the folders or URLs that may contain the configuration of the resumed run.

    values: the values that the user set, by key, such as `resume`, `out` and `checkpoint.folder`.
    """
    resume = values.get("resume")
    if resume == "latest":
        places = [values.get("out"), values.get("checkpoint.folder")]
    elif resume:
        # A checkpoint lies in the folder of its run, or in a folder for checkpoints.
        checkpoints = split_address(str(resume))[0]
        places = [checkpoints]
        if not is_remote(checkpoints):
            places = [split_address(checkpoints)[0], checkpoints]
    else:
        places = []
    return [str(place) for place in places if place]


def _is_complete(node: Node) -> bool:
    """Return True if a configuration has all groups that every run needs, and their options' names.

    Each such group must have a dictionary of settings. Each entry of `choices` must be the name of
    an option, or for "method" and "observer" a list of names.
    """
    choices = node.get("choices")
    if not isinstance(choices, dict) or not choices.keys() >= {*COMPLETE}:
        return False
    if not all(isinstance(node.get(group), dict) for group in COMPLETE):
        return False
    names: list[object] = []
    for group, choice in choices.items():
        if group == SET_KEYS:
            continue
        if group in LISTS:
            if not isinstance(choice, list):
                return False
            names += choice
        else:
            names.append(choice)
    return all(isinstance(name, str) for name in names)


def _stored_options(stored: Node | None, groups: Groups) -> dict[str, list[str]]:
    """Return the options of a stored configuration, by group, if they still exist.

    The preset (experiment=NAME) is left out, because the configuration stores its values.
    stored: the stored configuration; None returns no options.
    groups: all options that exist.
    """
    options: dict[str, list[str]] = {}
    if stored is None:
        return options
    for group, choice in stored["choices"].items():
        if group not in groups.files or group == "experiment":
            continue
        names = choice if isinstance(choice, list) else [choice]
        if all(name in groups.files[group] for name in names):
            options[group] = names
    return options


def _apply_to_stored(stored: Node, config: DictConfig, set_keys: Sequence[str]) -> DictConfig:
    """Return a stored configuration in which the keys that the user set have the user's values.

    config: a configuration with the user's values.
    set_keys: the keys that the user set, and the groups for which the user chose an option.
    """
    result = OmegaConf.create(stored)
    for set_key in set_keys:
        keys = next((pair for pair in ALTERNATIVES if set_key in pair), (set_key,))
        for key in keys:
            value = OmegaConf.select(config, key)
            try:
                OmegaConf.update(result, key, value, merge=False, force_add=True)
            except (OmegaConfBaseException, ValueError, TypeError) as error:
                raise RefusedError(
                    f"{key}: this key cannot be set in the stored configuration, so the file of "
                    "that configuration seems to be damaged. Restore the file."
                ) from error
        if set_key in config.choices:
            OmegaConf.update(result, f"choices.{set_key}", config.choices[set_key])
    return result
