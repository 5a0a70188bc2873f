"""The words of a search: its options, what each key is searched over, and the settings of all its runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from raysim.commands.sweep.space import Choice, Interval, Range, checked
from raysim.experiment.config_files import Node
from raysim.experiment.groups import (
    LISTS,
    SWEEP,
    config_folders,
    find_groups,
    load_option,
    option_names,
)
from raysim.experiment.overrides import SettingOverride
from raysim.experiment.run_overrides import read_setting, single_override
from raysim.primitives.errors import Refused, suggest


def sweeping(
    words: Sequence[str], folders: Sequence[str | Path] = ()
) -> tuple[Node, dict[str, Range], list[str]]:
    """The words of a search, apart: its options, what each key is searched over, and the overrides of all its runs.

    "sweep=NAME" chooses a file of `conf/sweep`, "sweep.trials=8" sets an option, "method.fedprox.mu=0.01,0.1" or
    "local.lr='tag(log, interval(1e-3, 1))'" search over a key, and any other word holds for all runs: a key of the
    file's space that it names is not searched. Raises Refused.
    """
    options = find_groups(config_folders(folders)).files.get(SWEEP, {})
    overrides = {override.key: override for override in map(read_setting, words)}
    name = str(overrides[SWEEP].value) if SWEEP in overrides else "default"
    if name not in options:
        raise Refused(f"{SWEEP}={name} does not exist: {suggest(name, options)}")
    node = load_option(options[name], SWEEP)
    space = {
        key: _listed_range(key, value) for key, value in (node.pop("space", None) or {}).items()
    }
    fixed = []
    for key, override in overrides.items():
        text = override.text
        head, _, option = key.partition(".")
        if head != SWEEP and override.is_sweep:
            space[key] = _range(override)
        elif head != SWEEP:
            fixed.append(text)
            space.pop(key, None)
        elif option.partition(".")[0] == "space":
            raise Refused(
                f"'{text}' sets the space as a whole: give each key its values, such as local.lr=0.01,0.1"
            )
        elif option:
            single_override(text)
            node[option] = override.value
    return {"name": name, **node}, {key: checked(key, found) for key, found in space.items()}, fixed


def _listed_range(key: str, value: Any) -> Range:
    """A range as a file writes it: a list of values, or text as on the command line."""
    if isinstance(value, list):
        return _choice(key, value)
    override = read_setting(f"{key}={value}")
    return _range(override) if override.is_sweep else Choice((override.value,))


def _choice(key: str, values: Iterable[Any]) -> Choice:
    return Choice(tuple(option_names(value, key) if key in LISTS else value for value in values))


def _range(override: SettingOverride) -> Range:
    key = override.key
    if override.choices is not None and override.package is None:
        return _choice(key, override.choices)
    interval = override.range
    if interval is not None and interval.tags <= {"log"} and override.package is None:
        is_whole = isinstance(interval.low, int) and isinstance(interval.high, int)
        return Interval(interval.low, interval.high, "log" in interval.tags, is_whole)
    raise Refused(
        f"'{override.text}' is no range: write {key}=VALUE,VALUE, or {key}='interval(LOW, HIGH)', "
        "'int(interval(LOW, HIGH))' or 'tag(log, interval(LOW, HIGH))'"
    )
