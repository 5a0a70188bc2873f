"""Divide the overrides of a sweep into its options, the searched keys, and fixed values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysim.commands.sweep.space import Choice, Interval, ValueRange, check_range
from raysim.experiment.config_files import Node
from raysim.experiment.groups import (
    LISTS,
    SWEEP,
    config_folders,
    find_groups,
    load_option,
    option_names,
)
from raysim.experiment.keys import RENAMED_KEYS
from raysim.experiment.overrides import SettingOverride
from raysim.experiment.run_overrides import read_setting, single_override
from raysim.primitives.errors import RefusedError, suggest


@dataclass(frozen=True)
class SweepOverrides:
    """The overrides of a sweep in three groups.

    options: settings of the sweep, by the names of `SweepOptions`.
    space: the values that the sweep tries, by key.
    fixed: the overrides that all runs have.
    """

    options: Node
    space: dict[str, ValueRange]
    fixed: list[str]


def sort_overrides(overrides: Sequence[str], folders: Sequence[str | Path] = ()) -> SweepOverrides:
    """Sort a sweep's overrides into its options, keys to search, and fixed values.

    - Options: "sweep=NAME" chooses a file of `conf/sweep`, and "sweep.trials=8" sets an option.
    - A key to search has a list such as "method.fedprox.mu=0.01,0.1", or an interval such as
      "local.lr='tag(log, interval(1e-3, 1))'".
    - A fixed value is a single value, such as "rounds=20". If the chosen file searches this key,
      the fixed value is used instead.

    folders: the user's own folders of options.

    Raise `RefusedError` for a missing file, a renamed option, and a range without values.
    """
    files = find_groups(config_folders(folders)).files.get(SWEEP, {})
    parsed = {override.key: override for override in map(read_setting, overrides)}
    name = str(parsed[SWEEP].value) if SWEEP in parsed else "default"
    if name not in files:
        raise RefusedError(f"{SWEEP}={name} does not exist: {suggest(name, files)}")
    options = load_option(files[name], SWEEP)
    listed = options.pop("space", None) or {}
    space = {key: _listed_range(key, values) for key, values in listed.items()}
    fixed = []
    for key, override in parsed.items():
        head, _, option = key.partition(".")
        if head == SWEEP:
            if option:
                options[option] = _option_value(option, override)
        elif override.is_sweep:
            space[key] = _range(override)
        else:
            fixed.append(override.text)
            space.pop(key, None)
    for option in options:
        _check_renamed(option)
    space = {key: check_range(key, values) for key, values in space.items()}
    return SweepOverrides({"name": name, **options}, space, fixed)


def _option_value(option: str, override: SettingOverride) -> Any:
    if option.partition(".")[0] == "space":
        raise RefusedError(
            f"{override.text}: sweep.space cannot be set on the command line. Give each searched "
            "key its values, such as local.lr=0.01,0.1."
        )
    return single_override(override.text).value


def _check_renamed(option: str) -> None:
    key = f"{SWEEP}.{option}"
    if key in RENAMED_KEYS:
        raise RefusedError(f"{key} is now called {RENAMED_KEYS[key]}. Write the new name.")


def _listed_range(key: str, values: Any) -> ValueRange:
    """Return the values that a sweep tries for a key, as a file in `conf/sweep` lists them.

    values: the key's entry in the file: a list, or a text such as "0.1,0.2" or "interval(0.1, 1)".
    """
    if isinstance(values, list):
        return _choice(key, values)
    override = read_setting(f"{key}={values}")
    return _range(override) if override.is_sweep else Choice((override.value,))


def _choice(key: str, values: Iterable[Any]) -> Choice:
    if key in LISTS:
        values = [option_names(value, key) for value in values]
    return Choice(tuple(values))


def _range(override: SettingOverride) -> ValueRange:
    key = override.key
    interval = override.range
    if override.package is None:
        if override.choices is not None:
            return _choice(key, override.choices)
        if interval is not None and interval.tags <= {"log"}:
            is_whole = isinstance(interval.low, int) and isinstance(interval.high, int)
            return Interval(interval.low, interval.high, "log" in interval.tags, is_whole)
    raise RefusedError(
        f"{override.text}: a sweep cannot search this. Write {key}=VALUE,VALUE or "
        f"{key}='interval(LOW, HIGH)', 'int(interval(LOW, HIGH))' or "
        "'tag(log, interval(LOW, HIGH))'."
    )
