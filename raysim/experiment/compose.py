"""Command-line words to one checked configuration: the folder `conf`, the overrides, and Hydra, used here alone.

Hydra composes files; overrides are checked and applied here, because its own rules for them are too lenient (a misspelt
key with `+` creates a new one) and its messages speak of its internals.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from hydra import version
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from raysim.experiment.instantiate import TARGET, shown
from raysim.experiment.plugins import brought, installed, unallowed
from raysim.primitives.errors import Refused, first_line, instead, nearest
from raysim.primitives.files import conf_folder, regular, user_path, without_password
from raysim.primitives.stores import is_remote, parted, store

Node: TypeAlias = dict[str, Any]

NAMED_FREELY = ("runtime.resources",)  # keys below which any name may be given
LISTS = ("method", "observer")  # groups of which any number of options is chosen
NONE = {"method": "fedavg"}  # what a list without any is called
COMPLETE = ("method", "schedule", "fleet", "data", "partition", "model", "runtime")  # groups without which nothing runs
SWEEP = "sweep"  # the group that no run has
# Setting one empties the other, unless it is set too. A checksum belongs to the file that is named with it.
ALTERNATIVES = (("local.epochs", "local.steps"), ("init.file", "init.sha256"))
SHORT = {"init": "init.file"}  # keys with several values, of which one may be set by the short name
_SPAN = re.compile(r"(?<![^=,])(-?\d{1,18})\.\.(-?\d{1,18})(?![^,])")  # 0..4
_MOST = 10_000  # values that one word may stand for
HYDRAS = {  # what Hydra's own words are here
    "hydra/launcher": "raysim study --parallel N makes runs side by side, and raysim sweep on all nodes of a Ray",
    "hydra.launcher": "raysim study --parallel N makes runs side by side, and raysim sweep on all nodes of a Ray",
    "hydra/sweeper": "raysim sweep searches, as sweep.search says: random, grid or optuna",
    "hydra.sweeper": "raysim sweep searches, as sweep.search says: random, grid or optuna",
    "hydra.mode": "raysim study makes several runs, raysim sweep searches",
    "hydra": "out=DIR names the folder of the results, and all else is raysim's own",
}
TUNES = {  # what Ray Tune's functions are here
    "uniform": "'interval(LOW, HIGH)'",
    "loguniform": "'tag(log, interval(LOW, HIGH))'",
    "randint": "'int(interval(LOW, HIGH))'",
    "lograndint": "'int(tag(log, interval(LOW, HIGH)))'",
    "grid_search": "VALUE,VALUE and sweep.search=grid",
}
_FUNCTION = re.compile(r"([^=]+)=(?:tune\.)?(\w+)\(")
_QUOTE = "put a value with special characters into quotes, such as 'out=\"a=b\"'"


@dataclass(frozen=True)
class Groups:
    """The options of every group, and the files they are in; a folder given later wins.

    state: all files there, options or not, with the time of their last change and their size: while it is the same,
    what they compose is too.
    """

    files: Mapping[str, Mapping[str, Path]] = field(compare=False)
    state: tuple[tuple[str, int, int], ...]


def groups(folders: Sequence[Path] = ()) -> Groups:
    """All groups of `conf`, of the installed packages that bring options, and of the user's own folders."""
    files: dict[str, dict[str, Path]] = {group: {} for group in LISTS}
    state = []
    for root in (roots := _roots(folders)):
        if not root.is_dir():
            raise Refused(f"the configuration folder {root} does not exist: name one that does, or leave it out")
        paths = sorted(_files(root))
        state += [_as_it_is(path) for path in (root / "config.yaml", *paths)]
        for path in paths:
            group, *rest = path.relative_to(root).with_suffix("").parts
            if group in NONE and path.stem == NONE[group]:
                raise Refused(f"{path}: {group}={NONE[group]} means that there is none: give the file another name")
            if path.name.startswith("_"):  # what several options have in common
                continue
            options, name = files.setdefault(group, {}), "/".join(rest)
            if name in options and root not in (*folders, roots[0]):
                raise Refused(f"{path} has the name of {options[name]}: rename it, or uninstall the package it is in")
            options[name] = path
    return Groups(files, tuple(state))


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
    return list(dict.fromkeys([conf_folder(), *brought(installed()), *folders]))


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
    given = _stored(stored)
    config, values, named = _drafted(overrides, groups(roots := config_folders(folders)), roots, given, settings or {})
    before = given or (_continued(values) if "experiment" not in named else None)
    if before:
        config = _onto(before, config, named)
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
) -> tuple[DictConfig, dict[str, Any], list[str]]:
    """The configuration before its references are resolved, the values set in it, and all keys and groups named.

    stored: gives the options of groups that no override names. settings: overrides that are values already.
    """
    parsed = [_in_full(single_override(text)) for text in overrides]
    given = _flat(settings or {})
    given = {SHORT.get(key, key): value for key, value in given.items()}
    texts = {override.key_or_group: str(override.input_line) for override in parsed}
    for key, text in (texts | {key: f"{key}={shown(value)}" for key, value in given.items()}).items():
        if key.partition(".")[0] == SWEEP:
            raise Refused(f"'{text}' is for searches: write raysim sweep {text}")
    chosen = {o.key_or_group: _options(o, known) for o in parsed if o.key_or_group in known.files}
    values = {o.key_or_group: (o.value(), str(o.input_line)) for o in parsed if o.key_or_group not in known.files}
    for key, value in given.items():
        if key in chosen or key in values:
            raise Refused(f"{key} is given twice, in a word and as {key}={shown(value)}: keep one of them")
        if key in known.files:
            chosen[key] = _names(key, value, known)
        else:
            values[key] = value, f"{key}={shown(value)}"
    options = tuple((group, tuple(names)) for group, names in (_chosen_before(stored, known) | chosen).items())
    config = copy.deepcopy(_composed(options, known, tuple(roots)))
    for key, (value, text) in values.items():
        _check_key(config, key, known)
        _refuse_plus(text)
        _assign(config, key, value, text)
    plain_values = {key: value for key, (value, _) in values.items()}
    _empty_alternatives(config, plain_values)
    return config, plain_values, [*chosen, *values]


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
        raise Refused(f"{named} refers to something that does not exist: write the value itself") from error
    return config


def _stored(path: str | Path | None) -> Node | None:
    """A configuration file to start from, without what belongs to its own run alone."""
    if path is None:
        return None
    if not user_path(path).is_file():
        raise Refused(f"{path} is no file: name the config.yaml of a run, or the best.yaml of a search")
    node = load_yaml(user_path(path))
    if not _is_complete(node):
        raise Refused(
            f"{path} is no complete configuration: name the config.yaml of a run, or the best.yaml of a search"
        )
    return node | {"out": None, "resume": None}


def _is_complete(node: Node) -> bool:
    """Whether it has what every run has: groups, and the names of their options."""
    choices = node.get("choices")
    if not isinstance(choices, dict) or not all(isinstance(node.get(group), dict) for group in COMPLETE):
        return False
    lists = [choices.get(group, []) for group in LISTS]  # older runs had no observers in theirs
    if not choices.keys() >= {*COMPLETE} or not all(isinstance(each, list) for each in lists):
        return False
    names = (name for group, each in choices.items() for name in (each if group in LISTS else [each]))
    return all(isinstance(name, str) for name in names)


def _chosen_before(stored: Node | None, known: Groups) -> dict[str, list[str]]:
    """The options that a stored configuration was made of, as far as they still exist; presets are in its values."""
    chosen = {}
    for group, choice in (stored or {}).get("choices", {}).items():
        names = choice if isinstance(choice, list) else [choice]
        if group in known.files and group != "experiment" and all(name in known.files[group] for name in names):
            chosen[group] = names
    return chosen


# --- searches -------------------------------------------------------------------------------------------------------
def draft(overrides: Sequence[str], folders: Sequence[str | Path], keys: Sequence[str]) -> tuple[Node, dict[str, str]]:
    """A configuration as plain data in which the values of some keys are still to be set.

    Also a sentence for each of the keys that it does not have. Raises Refused.
    """
    known = groups(roots := config_folders(folders))
    config, *_ = _drafted(overrides, known, roots)
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
    return plain(_resolved(config, values))


# --- a run that is continued ----------------------------------------------------------------------------------------
def _continued(values: Mapping[str, Any]) -> Node | None:
    """The stored configuration of the run that `resume` names, if there is one."""
    resume, out = values.get("resume"), values.get("out")
    if resume == "latest":
        places = [out, values.get("checkpoint.folder")]
    else:  # a checkpoint, in the folder of its run or apart
        apart = parted(str(resume))[0] if resume else ""
        places = [apart] if is_remote(apart) else [apart and parted(apart)[0], apart]
    for place in (str(place) for place in places if place):
        there = store(place if is_remote(place) else user_path(place))
        if "config.yaml" in there.names():
            with there.local("config.yaml") as path:
                node = load_yaml(path)
            if not _is_complete(node):
                raise Refused(f"{there}/config.yaml is no complete configuration: restore it, or start in a new folder")
            return node
    return None


def _onto(stored: Node, config: DictConfig, named: Sequence[str]) -> DictConfig:
    """The stored configuration, with the groups and keys that the user named as they would be in a new run."""
    result = OmegaConf.create(stored)
    for key in named:
        pairs = next((pair for pair in ALTERNATIVES if key in pair), (key,))
        for each in pairs:
            try:
                OmegaConf.update(result, each, OmegaConf.select(config, each), merge=False, force_add=True)
            except (OmegaConfBaseException, ValueError, TypeError) as error:
                raise Refused(f"the stored configuration has no place for {each}: restore its file") from error
        if key in config.choices:
            OmegaConf.update(result, f"choices.{key}", config.choices[key])
    return result


# --- overrides ----------------------------------------------------------------------------------------------------
def spread(text: str) -> tuple[str, list[str]]:
    """The key of a word of a study, and an override for each of the values that it gives.

    "seed=0,1", "seed=range(2)" and "seed=0..1" give two; "method=fedavg,fedbr+mixup" gives two lists, as do
    brackets, "method=[],[a,b]". Raises Refused.
    """
    override = read_override(text)
    key = override.key_or_group
    if not override.is_sweep_override():
        return single_override(text).key_or_group, [text]
    value = override.value()
    if not isinstance(value, (ChoiceSweep, RangeSweep)) or value.shuffle or override.package is not None:
        raise Refused(f"'{text}' does not list the values of {key}: write {key}=VALUE,VALUE or {key}=0..4")
    return key, [f"{key}={each}" for each in override.sweep_string_iterator()]


def read_override(text: str) -> Override:
    """One override as Hydra reads it, but for "0..4", which is 0,1,2,3,4. Raises Refused."""
    if (found := _FUNCTION.match(text)) and found[2] in TUNES:
        raise Refused(f"'{text}' is written as in Ray Tune: write {found[1]}={TUNES[found[2]]} for raysim sweep")
    counted = _counted(text)
    try:
        override: Override = OverridesParser.create().parse_override(counted)
        if not override.is_delete() and not override.is_sweep_override():
            override.value()
    except (HydraException, ValueError, TypeError) as error:
        hint = _QUOTE if "=" in text else _with_key(text)
        if len(found_words := text.split()) > 1 and all("=" in word for word in found_words):
            hint = f"these are {len(found_words)} settings: give each a word of its own, without quotes around all"
        raise Refused(f"'{text}' cannot be read as key=value: {hint}") from error
    return override


def _with_key(word: str) -> str:
    """What to write for a word without a key: "fedprox" is an option of method."""
    found = [f"{group}={word}" for group, options in groups().files.items() if group != SWEEP and word in options]
    return f"write {' or '.join(found)}" if found else "write the name of a setting, '=' and its value"


def _counted(text: str) -> str:
    """A word in which "0..4" is written out, which no shell reads as a pattern; a quoted value stays as it is."""

    def listed(found: re.Match[str]) -> str:
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + _MOST:
            raise Refused(f"'{text}' counts up, by {_MOST:,} values at most: write the lower end first, such as 0..4")
        return ",".join(map(str, range(first, last + 1)))

    return text if {*"'\"[({"} & {*text} else _SPAN.sub(listed, text)


def option_names(value: object, group: str = "method") -> list[Any]:
    """What a list of options names: "a+b" as [a, b]; null, "" and method=fedavg as an empty list."""
    if isinstance(value, str):
        value = value.split("+") if value else []
    names = value if isinstance(value, list) else [] if value is None else [value]
    return [] if names == [NONE.get(group)] else names


def joined(names: Sequence[object], group: str = "method") -> str:
    """A list of options as a word that no shell changes: the other way round."""
    return "+".join(map(str, names)) or NONE.get(group, "null")


def single_override(text: str) -> Override:
    """One override `key=value`; anything else that Hydra knows is refused."""
    override = read_override(text)
    key = override.key_or_group
    if override.is_delete():
        raise Refused(f"'{text}' would remove a setting, but every setting stays: give it another value instead")
    if override.is_sweep_override():
        raise Refused(
            f"'{text}' gives several values, but a run takes one: raysim study {text} makes a run of each"
            + (f"; {key}=a+b is a list" if key in LISTS else "")
        )
    if override.package is not None:
        raise Refused(f"'{text}' moves a group with '@', but groups keep their names: write {key}=VALUE")
    return override


def _in_full(override: Override) -> Override:
    """Return an override with the full key where it has a short one and gives a single value."""
    if not isinstance(override.value(), Mapping):
        override.key_or_group = SHORT.get(override.key_or_group, override.key_or_group)
    return override


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


def _options(override: Override, known: Groups) -> list[str]:
    """The options that an override of a group chooses."""
    _refuse_plus(str(override.input_line))
    return _names(override.key_or_group, override.value(), known)


def _names(group: str, value: object, known: Groups) -> list[str]:
    """The options of a group that a value names."""
    options = known.files[group]
    valid = [*([NONE[group]] if group in NONE else []), *options]
    found = option_names(value, group) if group in LISTS else [value]
    names = [name for name in found if isinstance(name, str)]
    for name in found:
        if group in NONE and name == NONE[group]:
            raise Refused(f"{group}={joined(found)}: {name} means that there is no other {group}, leave it out")
        if not isinstance(name, str) or name not in options:
            said = "null" if name is None else str(name)
            if (there := unallowed(group, said))[0]:
                raise Refused(f"{group}={said} does not exist, but {there[1]} is here: add --allow {there[0]}")
            meant = f"did you mean model=torchvision model.name={said}?" if _is_foreign(group, said, valid) else ""
            raise Refused(f"{group}={said} does not exist: {meant or instead(str(name), valid)}")
        if names.count(name) > 1:
            raise Refused(f"{group}={joined(names)} names {name} {names.count(name)} times: keep one of them")
    return names


def _is_foreign(group: str, name: str, ours: Sequence[str]) -> bool:
    """Whether torchvision has a model of this name; a misspelt mlp is answered without importing PyTorch."""
    if group != "model" or (nearest(name, ours) and not re.search(r"\d", name)):
        return False
    from raysim.models.zoo import in_torchvision

    return in_torchvision(name)


@functools.lru_cache(maxsize=64)
def _composed(options: tuple[tuple[str, tuple[str, ...]], ...], known: Groups, roots: tuple[Path, ...]) -> DictConfig:
    """The files put together, with these options of these groups: kept, since a study composes the same many times.

    What a preset says about options that were not chosen is dropped. So a preset may hold a paper's values for all
    methods of its tables, whichever of them a run takes, and of what it says about a group whose option the user
    chose, the common keys remain; of what the default study says, none.
    """
    chosen = {group: list(names) for group, names in options}
    words = {group: f"{group}=[{','.join(names)}]" for group, names in chosen.items()}
    words |= {group: f"{group}={names[0]}" for group, names in chosen.items() if group not in LISTS}
    try:
        parts, choices = _parts(list(words.values()), roots)
        config = _merged(parts)
    except Refused:
        raise
    except Exception as error:
        if len(_roots(roots)) == 1 and not isinstance(error, (HydraException, OmegaConfBaseException)):
            raise
        raise Refused(
            f"the configuration files do not fit together ({first_line(error).rstrip('.:')}): check your own files"
        ) from error
    for group in set(LISTS) - set(chosen) if "experiment" in chosen else ():
        names = [path.removeprefix(f"{group}/") for path, _ in parts if path.startswith(f"{group}/")]
        chosen = {**chosen, group: [name for name in names if name in known.files[group]]}
    config.pop("experiment", None)
    for group in LISTS if "experiment" in chosen else ():
        _refuse_unknown(config, group, known, chosen["experiment"][0])
    own = _merged([(path, values) for path, values in parts if not path.startswith("experiment/")])
    for group in [each for each in chosen if each in config]:
        # Hydra keeps a preset's list when the user's is empty, and a preset's keys whatever option is chosen.
        said = config[group] if "experiment" in chosen else own[group]
        config[group] = {key: said[key] for key in own[group]}
    for group in LISTS:
        choices[group] = chosen[group] if group in chosen else list(config[group])
    config["choices"] = choices
    return config


def _parts(words: Sequence[str], roots: Sequence[Path]) -> tuple[list[tuple[str, DictConfig]], Node]:
    """Every file by its path, with its values where it puts them, and the option of every group.

    As Hydra's own compose has them, without what Hydra brings for itself: most of its time.
    """
    Plugins.instance()  # knows how to read files
    version.setbase("1.3")
    places = ConfigSearchPathImpl()
    for root in _roots(roots):
        places.append("raysim", f"file://{root}")
    files = CachingConfigRepository(_Files(places))
    overrides = OverridesParser.create().parse_overrides(list(words))
    listed = create_defaults_list(files, "config", overrides, prepend_hydra=False, skip_missing=False)
    parts = []
    for each in listed.defaults:
        path = str(each.config_path)
        values: Any = cast(Any, files.load_config(path)).config
        values.pop("defaults", None)
        for name in reversed(each.package.split(".") if each.package else ()):
            values = OmegaConf.create({name: values})
        parts.append((path, values))
    return parts, {group: name for group, name in listed.overrides.known_choices.items() if "/" not in group}


class _Files(ConfigRepository):
    """Of several folders with a file Hydra takes the first, here the last counts; but raysim's own at the top."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Refuses a file of the user's own that is none of its group, which Hydra would say in words of its own."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source not in (None, self.sources[0]):
            load_option(Path(source.path, f"{config_path}.yaml"), config_path.partition("/")[0])
        return super().load_config(config_path)

    def _find_object_source(self, config_path: str, object_type: ObjectType | None) -> ConfigSource | None:
        is_file = object_type == ObjectType.CONFIG
        found = [s for s in self.sources if (s.is_config(config_path) if is_file else s.is_group(config_path))]
        return found[0 if config_path == "config" else -1] if found else None


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


def _merged(parts: Sequence[tuple[str, DictConfig]]) -> DictConfig:
    config = OmegaConf.create()
    for path, values in parts:
        try:
            config.merge_with(values)
        except OmegaConfBaseException as error:
            raise HydraException(f"In '{path}': {type(error).__name__} raised while composing config") from error
    config.pop("hydra", None)
    return config


def _refuse_unknown(config: DictConfig, group: str, known: Groups, preset: str) -> None:
    """A preset may speak of options that are not chosen, but not of ones that do not exist."""
    files = known.files[group]
    for name in config[group]:
        if name not in files and not any(name in load_option(path, group) for path in files.values()):
            raise Refused(
                f"experiment={preset} gives values to {group}.{name}, which does not exist: {instead(name, files)}"
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


def _unknown(config: DictConfig, node: Any, path: list[str], part: str, key: str, known: Groups) -> str:
    where = ".".join(path)
    if not isinstance(node, DictConfig):
        return f"{key} does not exist: {where} is a single value, so write {where}=VALUE"
    if not path:
        return f"{key} does not exist: {_anywhere(config, key, known)}"
    option = config.choices.get(path[0])
    if path[0] in LISTS and len(path) == 1:
        if part == NONE.get(path[0]):
            return f"{key} does not exist: {part} has no values of its own, it is what remains without any {path[0]}"
        if part in known.files[path[0]]:
            now, both = joined(option, path[0]), joined([*option, part])
            return f"{key} has no effect because {part} is not in {where}={now}: write {where}={both}"
        if near := _inner(config, part):
            return f"{key} does not exist: did you mean {' or '.join(near)}?"
        return f"{key} does not exist: {instead(part, known.files[path[0]])}"
    has = f"{path[0]}={option} has" if len(path) == 1 and option not in (None, "default") else f"{where} has"
    return f"{where}.{part} does not exist: {instead(part, [str(name) for name in node if name != '_target_'], has)}"


def _anywhere(config: DictConfig, key: str, known: Groups) -> str:
    """What an unknown first part may have meant: a group, a key at the top, or the last part of a longer key."""
    if ours := next((ours for word, ours in HYDRAS.items() if f"{key}.".startswith((f"{word}.", f"{word}/"))), None):
        return ours
    head, _, rest = key.partition(".")
    top = [str(name) for name in config if name != "choices"] + ["experiment"]
    if near := nearest(head, top):
        return f"did you mean {near}{'.' + rest if rest else ''}?"
    matches = _inner(config, key)
    return f"did you mean {' or '.join(matches)}?" if matches else f"the valid ones are {', '.join(top)}"


def _inner(config: DictConfig, key: str) -> list[str]:
    """Longer keys that end in this one."""
    nodes = {str(name): config[name] for name in config}
    nodes |= {f"{group}.{part!s}": node for group in LISTS for part, node in config[group].items()}
    inner = [f"{name}.{leaf!s}" for name, node in nodes.items() if isinstance(node, DictConfig) for leaf in node]
    return [name for name in inner if name.endswith(f".{key}")]


def _assign(config: DictConfig, key: str, value: Any, text: str) -> None:
    try:
        listed = isinstance(value, str) and "/" not in value and OmegaConf.is_list(OmegaConf.select(config, key))
        if listed:  # as a list of options; paths stay whole
            value = [read_override(f"{key}={each}").value() for each in value.split("+")]
        OmegaConf.update(config, key, value, merge=True, force_add=key.rpartition(".")[0] in NAMED_FREELY)
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
    return without_password(str(OmegaConf.to_yaml(OmegaConf.create(config))))


def load_yaml(path: Path, mend: str = "restore it, or start in a new folder") -> Node:
    """A stored configuration. Raises Refused where the file is broken, or holds anything but names and their values.

    mend: what to do about it.
    """
    try:
        node = OmegaConf.to_container(OmegaConf.load(regular(path)))
        if not isinstance(node, dict) or not _has_text_keys(node):
            raise ValueError("it holds no names with values")
        if "${oc.env" in str(node).replace(" ", ""):
            raise ValueError("it reads the environment, which would be stored with the results; write the value itself")
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
