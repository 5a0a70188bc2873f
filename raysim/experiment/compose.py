"""Command-line words to one checked configuration: the folder `conf`, the overrides, and Hydra, used here alone.

Hydra composes files; overrides are checked and applied here, because its own rules for them are too lenient (a misspelt
key with `+` creates a new one) and its messages speak of its internals.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from raysim.experiment.instantiate import TARGET, format_value
from raysim.experiment.overrides import SettingOverride, read_override
from raysim.experiment.plugins import conf_folders_of, installed_packages, unallowed
from raysim.primitives.errors import Refused, first_line, nearest, suggest
from raysim.primitives.files import conf_folder, regular_file, user_path, without_password
from raysim.primitives.stores import is_remote, open_store, split_address

Node: TypeAlias = dict[str, Any]

_COMPOSING = threading.Lock()  # Hydra has one state for a process

NAMED_FREELY = ("runtime.resources",)  # keys below which any name may be given
# Keys of an earlier version, and what they are called now.
RENAMED_KEYS = {"runtime.hosts": "runtime.workers", "sweep.hosts": "sweep.workers"}
LISTS = ("method", "observer")  # groups of which any number of options is chosen
NONE = {"method": "fedavg"}  # what a list without any is called
COMPLETE = (
    "method",
    "schedule",
    "fleet",
    "data",
    "partition",
    "model",
    "runtime",
)  # groups without which nothing runs
PARTS_FROM_PYTHON = (
    "schedule",
    "fleet",
    "data",
    "partition",
    "model",
)  # groups of which a run may store an object
SWEEP = "sweep"  # the group that no run has
SET = "_set_"  # in `choices`: the keys and groups that the user set; no file holds it
# Setting one empties the other, unless it is set too. A checksum belongs to the file that is named with it.
ALTERNATIVES = (("local.epochs", "local.steps"), ("init.file", "init.sha256"))
SHORT = {"init": "init.file"}  # keys with several values, of which one may be set by the short name
HYDRAS = {  # what Hydra's own words are here
    "hydra/launcher": "raysim study --parallel N makes runs side by side, and raysim sweep on all nodes of a Ray",
    "hydra.launcher": "raysim study --parallel N makes runs side by side, and raysim sweep on all nodes of a Ray",
    "hydra/sweeper": "raysim sweep searches, as sweep.search says: random, grid or optuna",
    "hydra.sweeper": "raysim sweep searches, as sweep.search says: random, grid or optuna",
    "hydra.mode": "raysim study makes several runs, raysim sweep searches",
    "hydra": "out=DIR names the folder of the results, and all else is raysim's own",
}


@dataclass(frozen=True)
class Groups:
    """The options of every group, and the files they are in; a folder given later wins.

    state: all files there, options or not, with the time of their last change and their size: while it is the same,
    what they compose is too.
    """

    files: Mapping[str, Mapping[str, Path]] = field(compare=False)
    common: Mapping[str, Path] = field(
        compare=False
    )  # what several options have in common, by group/_name
    state: tuple[tuple[str, int, int], ...]


def groups(folders: Sequence[Path] = ()) -> Groups:
    """All groups of `conf`, of the installed packages that bring options, and of the user's own folders."""
    files: dict[str, dict[str, Path]] = {group: {} for group in LISTS}
    common: dict[str, Path] = {}
    state = []
    for root in (roots := _roots(folders)):
        if not root.is_dir():
            raise Refused(
                f"the configuration folder {root} does not exist: name one that does, or leave it out"
            )
        paths = sorted(_files(root))
        state += [_as_it_is(path) for path in (root / "config.yaml", *paths)]
        for path in paths:
            group, *rest = path.relative_to(root).with_suffix("").parts
            if group in NONE and path.stem == NONE[group]:
                raise Refused(
                    f"{path}: {group}={NONE[group]} means that there is none: give the file another name"
                )
            if path.name.startswith("_"):
                common["/".join([group, *rest])] = path
                continue
            options, name = files.setdefault(group, {}), "/".join(rest)
            if name in options and root not in (*folders, roots[0]):
                raise Refused(
                    f"{path} has the name of {options[name]}: rename it, or uninstall the package it is in"
                )
            options[name] = path
    return Groups(files, common, tuple(state))


def _as_it_is(path: Path) -> tuple[str, int, int]:
    with suppress(OSError):
        now = path.stat()
        return str(path), now.st_mtime_ns, now.st_size
    return str(path), 0, 0


def _files(root: Path) -> Iterator[Path]:
    """All YAML files in its folders; those that vanish meanwhile, or cannot be looked into, are passed by."""
    _, groups, others = next(os.walk(root), ("", [], []))
    for path in (root / name for name in others):
        if path.is_symlink() and not path.exists():
            raise Refused(f"{path} is a link to nothing: mend it, or remove it")
    for group in groups:
        for folder, _, names in os.walk(root / group):
            yield from (Path(folder, name) for name in names if name.endswith(".yaml"))


def _roots(folders: Sequence[Path]) -> list[Path]:
    """Where options are, a later folder before an earlier one: `conf`, installed packages, the user's own folders."""
    return list(dict.fromkeys([conf_folder(), *conf_folders_of(installed_packages()), *folders]))


def compose(
    overrides: Sequence[str] = (),
    folders: Sequence[str | Path] = (),
    stored: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
) -> DictConfig:
    """One resolved configuration; `choices` in it names the option of every group.

    folders: the user's own, laid out like `conf`. stored: a configuration file of a run or of a search, which holds
    for all that no override names; with resume=, that of the run's folder. settings: more overrides, as values by
    their keys ("rounds", "local.lr"; {"local": {"lr": 0.1}} says the same). Raises Refused, in one sentence, for
    whatever does not exist.
    """
    roots = config_folders(folders)
    config, values, named, before = _drafted(
        overrides, groups(roots), roots, _stored(stored), settings or {}
    )
    if before:
        config = _onto(before, config, named)
    _remember_set(config, named)
    return _resolved(config, values)


def config_folders(folders: Sequence[str | Path]) -> list[Path]:
    """The user's own folders of configuration, as absolute paths."""
    return [user_path(folder).absolute() for folder in folders]


def _drafted(
    overrides: Sequence[str],
    known: Groups,
    roots: Sequence[Path],
    stored: Node | None = None,
    settings: Mapping[str, object] | None = None,
) -> tuple[DictConfig, dict[str, Any], list[str], Node | None]:
    """The configuration before its references are resolved, the values set in it, and all keys and groups named.

    Also the stored configuration that it continues, if any. stored: a configuration that gives the options of groups
    that no override names; that of the run which is resumed does so as well. settings: overrides that are values
    already.
    """
    parsed = [_in_full(single_override(text)) for text in overrides]
    given = _flat(settings or {})
    given = {SHORT.get(key, key): value for key, value in given.items()}
    texts = {override.key: override.text for override in parsed}
    for key, text in (
        texts | {key: f"{key}={format_value(value)}" for key, value in given.items()}
    ).items():
        if key.partition(".")[0] == SWEEP:
            raise Refused(f"'{text}' is for searches: write raysim sweep {text}")
    chosen = {each.key: _options(each, known) for each in parsed if each.key in known.files}
    values = {each.key: (each.value, each.text) for each in parsed if each.key not in known.files}
    for key, value in given.items():
        if key in chosen or key in values:
            raise Refused(
                f"{key} is given twice, in a word and as {key}={format_value(value)}: keep one of them"
            )
        if key in known.files:
            chosen[key] = _names(key, value, known)
        else:
            values[key] = value, f"{key}={format_value(value)}"
    plain_values = {key: value for key, (value, _) in values.items()}
    if stored is None and "experiment" not in chosen:
        stored = _continued(plain_values)
    options = tuple(
        (group, tuple(names)) for group, names in (_chosen_before(stored, known) | chosen).items()
    )
    config = copy.deepcopy(_composed(options, known, tuple(roots)))
    for group in PARTS_FROM_PYTHON:  # what is no option was an object
        if (
            stored is not None
            and group not in chosen
            and stored["choices"].get(group) not in known.files[group]
        ):
            config[group], config.choices[group] = stored.get(group), stored["choices"].get(group)
    for key, (value, text) in values.items():
        _check_key(config, key, known)
        _refuse_plus(text)
        _assign(config, key, value, text)
    _empty_alternatives(config, plain_values)
    return config, plain_values, [*chosen, *values], stored


def set_aside(
    words: Sequence[str], settings: Mapping[str, object], places: Iterable[str]
) -> tuple[list[str], dict[str, object], dict[str, dict[str, tuple[Any, str]]]]:
    """Separate the overrides below some places ("data", "method.fedprox") from the other words and settings.

    Those set aside are, for each place, values and what the user wrote by their keys in it. Raise `Refused` for an
    override that chooses an option of such a place, or for one that is given twice.
    """
    aside: dict[str, dict[str, tuple[Any, str]]] = {place: {} for place in places}
    rest = []
    for text in words:
        override = single_override(text)
        key = override.key
        if (place := _place_of(key, aside)) is None:
            rest.append(text)
            continue
        _refuse_plus(text)
        _set_aside(aside, place, key, override.value, text)
    others = {}
    for key, value in _flat(settings).items():
        if (place := _place_of(key, aside)) is None:
            others[key] = value
        else:
            _set_aside(aside, place, key, value, f"{key}={format_value(value)}")
    return rest, others, aside


def _place_of(key: str, places: Iterable[str]) -> str | None:
    return next((place for place in places if f"{key}.".startswith(f"{place}.")), None)


def _set_aside(
    aside: dict[str, dict[str, tuple[Any, str]]], place: str, key: str, value: Any, text: str
) -> None:
    inner = key.removeprefix(place).removeprefix(".")
    if not inner:
        raise Refused(
            f"{key}: '{text}' has no effect next to an object from Python. Keep one of them"
        )
    if inner in aside[place]:
        raise Refused(
            f"{key}: is given twice, as '{aside[place][inner][1]}' and as '{text}'. Keep one of them"
        )
    aside[place][inner] = value, text


def _remember_set(config: DictConfig, keys: Sequence[str]) -> None:
    """Add keys to those that the user set, which no method may change."""
    before = config.choices.get(SET) or []
    config.choices[SET] = sorted({*before, *keys})


def is_set(key: str, node: Node) -> bool:
    """Return whether the user set a key, its group, or a key below it; True if that is not known."""
    keys = node["choices"].get(SET)
    if keys is None:
        return True
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in keys)


def without_set(node: Node) -> Node:
    """Return the configuration without the keys that the user set, as files hold it."""
    if not isinstance(choices := node.get("choices"), Mapping) or SET not in choices:
        return node
    return {**node, "choices": {group: name for group, name in choices.items() if group != SET}}


def _empty_alternatives(config: DictConfig, values: Mapping[str, Any]) -> None:
    for pair in ALTERNATIVES:
        for one, other in (pair, pair[::-1]):
            if one in values and other not in values and values[one] is not None:
                OmegaConf.update(config, other, None)


def _resolved(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        named = next((f"{key}={value}" for key, value in values.items() if "${" in str(value)), "")
        named = named or "a ${...} in the configuration"
        raise Refused(
            f"{named} refers to something that does not exist: write the value itself"
        ) from error
    return config


def _stored(path: str | Path | None) -> Node | None:
    """A configuration file to start from, without what belongs to its own run alone."""
    if path is None:
        return None
    if not user_path(path).is_file():
        raise Refused(
            f"{path} is no file: name the config.yaml of a run, or the best.yaml of a search"
        )
    node = load_yaml(user_path(path))
    if not _is_complete(node):
        raise Refused(
            f"{path} is no complete configuration: name the config.yaml of a run, or the best.yaml of a search"
        )
    return node | {"out": None, "resume": None}


def _is_complete(node: Node) -> bool:
    """Whether it has what every run has: groups, and the names of their options."""
    choices = node.get("choices")
    if not isinstance(choices, dict) or not all(
        isinstance(node.get(group), dict) for group in COMPLETE
    ):
        return False
    lists = [choices.get(group, []) for group in LISTS]  # older runs had no observers in theirs
    if not choices.keys() >= {*COMPLETE} or not all(isinstance(each, list) for each in lists):
        return False
    options = {group: each for group, each in choices.items() if group != SET}
    names = (
        name for group, each in options.items() for name in (each if group in LISTS else [each])
    )
    return all(isinstance(name, str) for name in names)


def _chosen_before(stored: Node | None, known: Groups) -> dict[str, list[str]]:
    """The options that a stored configuration was made of, as far as they still exist; presets are in its values."""
    chosen = {}
    for group, choice in (stored or {}).get("choices", {}).items():
        names = choice if isinstance(choice, list) else [choice]
        if (
            group in known.files
            and group != "experiment"
            and all(name in known.files[group] for name in names)
        ):
            chosen[group] = names
    return chosen


# --- searches -------------------------------------------------------------------------------------------------------
def draft(
    overrides: Sequence[str], folders: Sequence[str | Path], keys: Sequence[str]
) -> tuple[Node, dict[str, str]]:
    """A configuration as plain data in which the values of some keys are still to be set.

    Also a sentence for each of the keys that it does not have. Raises Refused.
    """
    known = groups(roots := config_folders(folders))
    config, _, named, _ = _drafted(overrides, known, roots)
    _remember_set(config, named)
    missing = {}
    for key in keys:
        try:
            _check_key(config, key, known)
        except Refused as error:
            missing[key] = str(error)
    return cast(Node, OmegaConf.to_container(config)), missing


def settled(drafted: Node, values: Mapping[str, Any]) -> Node:
    """A draft with these values, resolved; no file is read."""
    config = OmegaConf.create(drafted)
    values = {SHORT.get(key, key): value for key, value in values.items()}
    for key, value in values.items():
        _assign(config, key, value, f"{key}={value}")
    _empty_alternatives(config, values)
    _remember_set(config, list(values))
    return plain(_resolved(config, values))


# --- a run that is continued ----------------------------------------------------------------------------------------
def _continued(values: Mapping[str, Any]) -> Node | None:
    """The stored configuration of the run that `resume` names, if there is one."""
    resume, out = values.get("resume"), values.get("out")
    if resume == "latest":
        places = [out, values.get("checkpoint.folder")]
    else:  # a checkpoint, in the folder of its run or apart
        apart = split_address(str(resume))[0] if resume else ""
        places = [apart] if is_remote(apart) else [apart and split_address(apart)[0], apart]
    for place in (str(place) for place in places if place):
        there = open_store(place if is_remote(place) else user_path(place))
        if "config.yaml" in there.names():
            with there.local("config.yaml") as path:
                node = load_yaml(path)
            if not _is_complete(node):
                raise Refused(
                    f"{there}/config.yaml is no complete configuration: restore it, or start in a new folder"
                )
            return node
    return None


def _onto(stored: Node, config: DictConfig, named: Sequence[str]) -> DictConfig:
    """The stored configuration, with the groups and keys that the user named as they would be in a new run."""
    result = OmegaConf.create(stored)
    for key in named:
        pairs = next((pair for pair in ALTERNATIVES if key in pair), (key,))
        for each in pairs:
            try:
                OmegaConf.update(
                    result, each, OmegaConf.select(config, each), merge=False, force_add=True
                )
            except (OmegaConfBaseException, ValueError, TypeError) as error:
                raise Refused(
                    f"the stored configuration has no place for {each}: restore its file"
                ) from error
        if key in config.choices:
            OmegaConf.update(result, f"choices.{key}", config.choices[key])
    return result


# --- overrides ----------------------------------------------------------------------------------------------------
def spread(text: str) -> tuple[str, list[str]]:
    """The key of a word of a study, and an override for each of the values that it gives.

    "seed=0,1", "seed=range(2)" and "seed=0..1" give two; "method=fedavg,fedbr+mixup" gives two lists, as do
    brackets, "method=[],[a,b]". Raises Refused.
    """
    override = read_setting(text)
    key = override.key
    if not override.is_sweep:
        return single_override(text).key, [text]
    if override.choices is None or override.package is not None:
        raise Refused(
            f"'{text}' does not list the values of {key}: write {key}=VALUE,VALUE or {key}=0..4"
        )
    return key, [f"{key}={each}" for each in override.choice_texts]


def read_setting(text: str) -> SettingOverride:
    """Read one override. Raise `Refused` for what is none, with the option that a word without a key may mean."""
    return read_override(text, _with_key)


def _with_key(word: str) -> str:
    """What to write for a word without a key: "fedprox" is an option of method."""
    found = [
        f"{group}={word}"
        for group, options in groups().files.items()
        if group != SWEEP and word in options
    ]
    return (
        f"write {' or '.join(found)}" if found else "write the name of a setting, '=' and its value"
    )


def option_names(value: object, group: str = "method") -> list[Any]:
    """What a list of options names: "a+b" as [a, b]; null, "" and method=fedavg as an empty list."""
    if isinstance(value, str):
        value = value.split("+") if value else []
    names = value if isinstance(value, list) else [] if value is None else [value]
    return [] if names == [NONE.get(group)] else names


def joined(names: Sequence[object], group: str = "method") -> str:
    """A list of options as a word that no shell changes: the other way round."""
    return "+".join(map(str, names)) or NONE.get(group, "null")


def single_override(text: str) -> SettingOverride:
    """Read one override `key=value`; anything else that Hydra knows is refused."""
    override = read_setting(text)
    key = override.key
    if override.is_delete:
        raise Refused(
            f"'{text}' would remove a setting, but every setting stays: give it another value instead"
        )
    if override.is_sweep:
        is_path = "/" in text
        do = f"raysim study {text} makes a run of each"
        if key in LISTS:
            do += f"; {key}=a+b is a list"
        elif is_path:
            do += f"; a comma in a name needs quotes of its own, '{key}=\"a,b\"'"
        raise Refused(f"'{text}' gives several values, but a run takes one: {do}")
    if override.package is not None:
        raise Refused(
            f"'{text}' moves a group with '@', but groups keep their names: write {key}=VALUE"
        )
    return override


def _in_full(override: SettingOverride) -> SettingOverride:
    """Return an override with the full key where it has a short one and gives a single value."""
    if isinstance(override.value, Mapping) or override.key not in SHORT:
        return override
    return replace(override, key=SHORT[override.key])


def _refuse_plus(text: str) -> None:
    """With '+' Hydra adds what does not exist; here all that is known exists."""
    if text.startswith("+"):
        raise Refused(f"'{text}' would add a setting that exists already: write {text.lstrip('+')}")


def _flat(settings: Mapping[str, object]) -> dict[str, Any]:
    """Values by their keys, {"local": {"lr": 0.1}} as {"local.lr": 0.1}, in the types that files have."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat({f"{key}.{inner}": each for inner, each in value.items()})
        elif isinstance(value, (tuple, range)):
            flat[key] = list(value)
        else:
            flat[key] = str(value) if isinstance(value, Path) else value
    return flat


def _options(override: SettingOverride, known: Groups) -> list[str]:
    """The options that an override of a group chooses."""
    _refuse_plus(override.text)
    return _names(override.key, override.value, known)


def _names(group: str, value: object, known: Groups) -> list[str]:
    """The options of a group that a value names."""
    options = known.files[group]
    valid = [*([NONE[group]] if group in NONE else []), *options]
    found = option_names(value, group) if group in LISTS else [value]
    names = [name for name in found if isinstance(name, str)]
    for name in found:
        if group in NONE and name == NONE[group]:
            raise Refused(
                f"{group}={joined(found)}: {name} means that there is no other {group}, leave it out"
            )
        if not isinstance(name, str) or name not in options:
            said = "null" if name is None else str(name)
            if (there := unallowed(group, said))[0]:
                raise Refused(
                    f"{group}={said} does not exist, but {there[1]} is here: add --allow {there[0]}"
                )
            meant = (
                f"did you mean model=torchvision model.name={said}?"
                if _is_foreign(group, said, valid)
                else ""
            )
            raise Refused(f"{group}={said} does not exist: {meant or suggest(str(name), valid)}")
        if names.count(name) > 1:
            raise Refused(
                f"{group}={joined(names)} names {name} {names.count(name)} times: keep one of them"
            )
    return names


def _is_foreign(group: str, name: str, ours: Sequence[str]) -> bool:
    """Whether torchvision has a model of this name; a misspelt mlp is answered without importing PyTorch."""
    if group != "model" or (nearest(name, ours) and not re.search(r"\d", name)):
        return False
    from raysim.models.zoo import is_torchvision_model

    return is_torchvision_model(name)


@functools.lru_cache(maxsize=64)
def _composed(
    options: tuple[tuple[str, tuple[str, ...]], ...], known: Groups, roots: tuple[Path, ...]
) -> DictConfig:
    """The files put together, with these options of these groups: kept, since a study composes the same many times.

    What a preset says about options that were not chosen is dropped. So a preset may hold a paper's values for all
    methods of its tables, whichever of them a run takes, and of what it says about a group whose option the user
    chose, the common keys remain; of what the default study says, none.
    """
    chosen = {group: list(names) for group, names in options}
    try:
        _check_files(chosen, known, roots)
        whole, own, choices = _composed_by_hydra(chosen, known, roots)
    except Refused:
        raise
    except Exception as error:
        if len(_roots(roots)) == 1 and not isinstance(
            error, (HydraException, OmegaConfBaseException)
        ):
            raise
        raise Refused(
            f"the configuration files do not fit together ({first_line(error).rstrip('.:')}): check your own files"
        ) from error
    config = OmegaConf.create(whole)
    has_preset = "experiment" in chosen
    for group in LISTS if has_preset else ():
        _refuse_unknown(config, group, known, chosen["experiment"][0])
    for group, values in own.items():
        # Hydra keeps a preset's list when the user's is empty, and a preset's keys whatever option is chosen.
        said = config[group] if has_preset else OmegaConf.create(values)
        config[group] = {key: said[key] for key in values}
    config["choices"] = choices
    return config


def _composed_by_hydra(
    chosen: Mapping[str, list[str]], known: Groups, roots: Sequence[Path]
) -> tuple[Node, Node, Node]:
    """Compose the files with these options of these groups.

    Return all values, those of the chosen groups without any preset, and the option of every group.
    """
    preset = chosen["experiment"][0] if "experiment" in chosen else "default"
    listed, mentioned = _groups_of_preset(preset, known)
    listed |= {group: chosen[group] for group in LISTS if group in chosen}
    changed = mentioned & {*chosen, *(LISTS if "experiment" in chosen else ())}
    own: Node = {}
    with _hydra_in(_roots(roots)):
        config = hydra.compose("config", overrides=_words(chosen), return_hydra_config=True)
        choices = {
            group: name for group, name in config.hydra.runtime.choices.items() if "/" not in group
        }
        choices |= {group: listed.get(group, []) for group in LISTS}
        if changed:
            names = {
                group: name if group in LISTS else [name]
                for group, name in choices.items()
                if name is not None
            }
            names.pop("experiment")
            without = _values(hydra.compose("config", overrides=[*_words(names), "~experiment"]))
            own = {group: without[group] for group in changed if group in without}
    return _values(config), own, choices


def _words(chosen: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the options of groups as Hydra reads them."""
    words = []
    for group, names in chosen.items():
        quoted = [_quote(name) for name in names]
        words.append(f"{group}=[{','.join(quoted)}]" if group in LISTS else f"{group}={quoted[0]}")
    return words


def _values(config: DictConfig) -> Node:
    """Return the values of a configuration, without Hydra's own and with references unresolved."""
    values = cast(Node, OmegaConf.to_container(config))
    values.pop("hydra", None)
    values.pop("experiment", None)
    return values


def _quote(name: str) -> str:
    """Return the name of an option as Hydra reads it, whatever letters it has."""
    return "'{}'".format(name.replace("'", "\\'"))


@contextmanager
def _hydra_in(roots: Sequence[Path]) -> Iterator[None]:
    """Let Hydra compose the files of these folders, of which a later one goes before an earlier one."""
    with _COMPOSING, tempfile.TemporaryDirectory(prefix="raysim-conf-") as folder:
        main = roots[0].absolute()
        if len(roots) > 1:  # Hydra would take the first of several files with one name
            main = Path(folder)
            (main / "config.yaml").symlink_to(roots[0].absolute() / "config.yaml")
            for root in roots:
                for path in _files(root):
                    link = main / path.relative_to(root)
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.unlink(missing_ok=True)
                    link.symlink_to(path.absolute())
        current = GlobalHydra.instance().hydra  # that of an application which calls raysim
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(str(main), version_base="1.3"):
                yield
        finally:
            GlobalHydra.instance().clear()
            if current is not None:
                GlobalHydra.instance().initialize(current)


def _groups_of_preset(preset: str, known: Groups) -> tuple[dict[str, list[str]], set[str]]:
    """Return the options that a preset chooses of the groups `LISTS`, and all groups that it says something about."""
    listed: dict[str, list[str]] = {}
    mentioned: set[str] = set()
    for _, node in reversed(
        list(_files_of(known, "experiment", preset))
    ):  # a preset goes before what it is made of
        entries = _entries(node)
        mentioned |= {*node, *entries}
        listed |= {
            group: option_names(names, group) for group, names in entries.items() if group in LISTS
        }
    return listed, mentioned


def _check_files(chosen: Mapping[str, Sequence[str]], known: Groups, roots: Sequence[Path]) -> None:
    """Refuse files of the user's own that are none of their group, which Hydra would say in words of its own."""
    if len(_roots(roots)) == 1:
        return
    main = _roots(roots)[0]
    defaults = {
        group: [name]
        for group, name in _entries(load_yaml(main / "config.yaml")).items()
        if group not in LISTS
    }
    left = [(group, str(name)) for group, names in {**defaults, **chosen}.items() for name in names]
    seen: set[tuple[str, str]] = set()
    while left:
        if (option := left.pop()) in seen:
            continue
        seen.add(option)
        group, name = option
        for path, node in _files_of(known, group, name):
            if not path.is_relative_to(main):
                load_option(path, group)
            for other, names in _entries(node).items():
                left += [
                    (other, str(each)) for each in (names if isinstance(names, list) else [names])
                ]


def _files_of(known: Groups, group: str, name: str) -> Iterator[tuple[Path, Node]]:
    """Return the file of an option and those that it is made of, each with its content.

    A broken file counts as empty: `_check_files` and Hydra say what is wrong with it.
    """
    path = known.files.get(group, {}).get(name) or known.common.get(f"{group}/{name}")
    if path is None:
        return
    try:
        node = load_yaml(path)
    except Refused:
        node = {}
    yield path, node
    for entry in node.get("defaults") or ():
        if isinstance(entry, str) and entry != "_self_":
            inner = entry.removeprefix("/").removeprefix(f"{group}/")
            beside = "" if entry.startswith("/") else str(Path(name).parent.as_posix()) + "/"
            yield from _files_of(known, group, f"{beside}{inner}".removeprefix("./"))


def _entries(node: Node) -> Node:
    """Return the options that the defaults of a file choose, by their groups."""
    chosen: Node = {}
    for entry in node.get("defaults") or ():
        if isinstance(entry, dict):
            chosen |= {
                str(key).removeprefix("override ").strip("/ "): value
                for key, value in entry.items()
            }
    return {group: value for group, value in chosen.items() if value is not None}


def load_option(path: Path, group: str) -> Node:
    """The file of an option. Raises Refused for one that is broken, or none of its group."""
    node = load_yaml(path, "mend it")
    if group in LISTS and not node:
        raise Refused(f"{path} is empty: name a class in it, or remove it")
    if group in LISTS and TARGET in node:
        raise Refused(
            f"{path} begins with {TARGET}: a file of the group {group} begins with a name, such as {path.stem}:, and "
            "what it has is indented below"
        )
    return node


def _refuse_unknown(config: DictConfig, group: str, known: Groups, preset: str) -> None:
    """A preset may speak of options that are not chosen, but not of ones that do not exist."""
    files = known.files[group]
    for name in config[group]:
        if name not in files and not any(
            name in load_option(path, group) for path in files.values()
        ):
            raise Refused(
                f"experiment={preset} gives values to {group}.{name}, which does not exist: {suggest(name, files)}"
            )


def _check_key(config: DictConfig, key: str, known: Groups) -> None:
    """Refuse a key that the composed configuration does not have."""
    node: Any = config
    path: list[str] = []
    for part in key.split("."):
        if isinstance(node, DictConfig) and part in node and (path or part != "choices"):
            node, path = node[part], [*path, part]
            continue
        if ".".join(path) in NAMED_FREELY:
            return
        raise Refused(_unknown(config, node, path, part, key, known))


def _unknown(
    config: DictConfig, node: Any, path: list[str], part: str, key: str, known: Groups
) -> str:
    where = ".".join(path)
    if not isinstance(node, DictConfig):
        return f"{key} does not exist: {where} is a single value, so write {where}=VALUE"
    renamed = RENAMED_KEYS.get(f"{where}.{part}")
    if renamed is not None:
        return f"{where}.{part} is now called {renamed}"
    if not path:
        return f"{key} does not exist: {_anywhere(config, key, known)}"
    option = config.choices.get(path[0])
    if path[0] in LISTS and len(path) == 1:
        if part == NONE.get(path[0]):
            return f"{key} does not exist: {part} has no values of its own, it is what remains without any {path[0]}"
        if part in known.files[path[0]]:
            now, both = joined(option, path[0]), joined([*option, part])
            return (
                f"{key} has no effect because {part} is not in {where}={now}: write {where}={both}"
            )
        if near := _inner(config, part):
            return f"{key} does not exist: did you mean {' or '.join(near)}?"
        return f"{key} does not exist: {suggest(part, known.files[path[0]])}"
    has = (
        f"{path[0]}={option} has"
        if len(path) == 1 and option not in (None, "default")
        else f"{where} has"
    )
    names = [str(name) for name in node if not str(name).startswith("_")]
    sentence = f"{where}.{part} does not exist: {suggest(part, names, has)}"
    others = _options_with(part, path[0], known) if len(path) == 1 else []
    return (
        f"{sentence}; {' and '.join(others)} {'has' if len(others) == 1 else 'have'} it"
        if others
        else sentence
    )


def _options_with(key: str, group: str, known: Groups) -> list[str]:
    """Return the options of a group whose files name a key."""
    return [
        f"{group}={name}"
        for name, path in known.files.get(group, {}).items()
        if key in load_option(path, group)
    ]


def _anywhere(config: DictConfig, key: str, known: Groups) -> str:
    """What an unknown first part may have meant: a group, a key at the top, or the last part of a longer key."""
    if ours := next(
        (ours for word, ours in HYDRAS.items() if f"{key}.".startswith((f"{word}.", f"{word}/"))),
        None,
    ):
        return ours
    head, _, rest = key.partition(".")
    top = [str(name) for name in config if name != "choices"] + ["experiment"]
    if near := nearest(head, top):
        return f"did you mean {near}{'.' + rest if rest else ''}?"
    matches = _inner(config, key)
    return (
        f"did you mean {' or '.join(matches)}?"
        if matches
        else f"the valid ones are {', '.join(top)}"
    )


def _inner(config: DictConfig, key: str) -> list[str]:
    """Longer keys that end in this one."""
    nodes = {str(name): config[name] for name in config}
    nodes |= {f"{group}.{part!s}": node for group in LISTS for part, node in config[group].items()}
    inner = [
        f"{name}.{leaf!s}"
        for name, node in nodes.items()
        if isinstance(node, DictConfig)
        for leaf in node
    ]
    return [name for name in inner if name.endswith(f".{key}")]


def _assign(config: DictConfig, key: str, value: Any, text: str) -> None:
    try:
        listed = (
            isinstance(value, str)
            and "/" not in value
            and OmegaConf.is_list(OmegaConf.select(config, key))
        )
        if listed:  # as a list of options; paths stay whole
            value = [read_setting(f"{key}={each}").value for each in value.split("+")]
        OmegaConf.update(
            config, key, value, merge=True, force_add=key.rpartition(".")[0] in NAMED_FREELY
        )
    except OmegaConfBaseException as error:
        raise Refused(f"'{text}' does not fit there: {key} takes a single value") from error


# --- a run folder's own configuration -----------------------------------------------------------------------------
def plain(config: DictConfig | Mapping[str, Any]) -> Node:
    """The configuration as dictionaries and lists; "???" stands for a value that is still missing."""
    if isinstance(config, DictConfig):
        return cast(Node, OmegaConf.to_container(config, resolve=True, throw_on_missing=False))
    return dict(config)


def to_yaml(config: Node) -> str:
    """As it is stored in a run folder: without the passwords of addresses."""
    return without_password(str(OmegaConf.to_yaml(OmegaConf.create(without_set(config)))))


def load_yaml(path: Path, mend: str = "restore it, or start in a new folder") -> Node:
    """A stored configuration. Raises Refused where the file is broken, or holds anything but names and their values.

    mend: what to do about it.
    """
    try:
        node = OmegaConf.to_container(OmegaConf.load(regular_file(path)))
        if not isinstance(node, dict) or not _has_text_keys(node):
            raise ValueError("it holds no names with values")
        if "${oc.env" in str(node).replace(" ", ""):
            raise ValueError(
                "it reads the environment, which would be stored with the results; write the value itself"
            )
    except Exception as error:  # a damaged file fails in the YAML reader in many ways
        raise Refused(f"{path} cannot be read ({_reason(error)}): {mend}") from error
    return cast(Node, node)


def _reason(error: Exception) -> str:
    """Why a file cannot be read, with the place in it where YAML knows one."""
    if isinstance(error, MarkedYAMLError) and error.problem and (mark := error.problem_mark):
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return first_line(error).rstrip(".:")


def _has_text_keys(node: object) -> bool:
    if isinstance(node, dict):
        return all(isinstance(key, str) and _has_text_keys(value) for key, value in node.items())
    return not isinstance(node, list) or all(map(_has_text_keys, node))
