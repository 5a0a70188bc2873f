"""Check the overrides of one run: each sets one key, as text or as a Python value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from raysim.experiment.groups import LISTS, SWEEP, find_groups
from raysim.experiment.instantiate import format_value
from raysim.experiment.overrides import SettingOverride, read_override
from raysim.primitives.errors import RefusedError

# Keys with several values, of which one may be set by the short name.
SHORT_KEYS = {"init": "init.file"}
# Keys whose values are lists that users write with commas.
LIST_KEYS = (
    "evaluate.metrics",
    "evaluate.lower",
    "thresholds",
    "data.augment",
    "data.columns",
    "data.domains",
    "data.targets",
)


class SetValue(NamedTuple):
    """A value that the user set for a key.

    value: the value.
    text: the override as the user wrote it, such as "local.lr=0.1", for errors.
    """

    value: Any
    text: str


class ExtractedOverrides(NamedTuple):
    """The user's overrides. Those that change an object that the user passed are kept separately.

    overrides: all other overrides that are texts "key=value".
    settings: all other overrides that are Python values, by key.
    by_place: the overrides that change an object that the user passed, by the object's key and the
    name of the setting, such as by_place["method.fedprox"]["mu"].
    """

    overrides: list[str]
    settings: dict[str, object]
    by_place: dict[str, dict[str, SetValue]]


def read_setting(text: str) -> SettingOverride:
    """Read one override with one or several values, such as "seed=0" or "seed=0,1".

    Raise `RefusedError` for a text that is no override.
    """
    return read_override(text, _suggest_key)


def _suggest_key(word: str) -> str:
    """Return advice for an override without a key.

    For "fedprox", which is an option of the group method, the advice names method=fedprox.
    """
    overrides = [
        f"{group}={word}"
        for group, options in find_groups().files.items()
        if group != SWEEP and word in options
    ]
    if overrides:
        return f"Write {' or '.join(overrides)}."
    return "Write the name of a setting, '=' and its value."


def single_override(text: str) -> SettingOverride:
    """Read one override with a single value.

    Raise `RefusedError` for an override that has several values, removes a key ("~key") or renames
    a group ("group@name=option").
    """
    override = read_setting(text)
    key = override.key
    if override.is_delete:
        raise RefusedError(
            f"'{text}' would remove a setting, but settings cannot be removed. Give it another "
            "value instead."
        )
    _check_not_renamed(override)
    if override.is_sweep:
        advice = f"The command raysim study {text} makes a run of each"
        if override.range is not None:
            advice = "The command raysim sweep searches a range"
        elif override.choices is None:
            advice = f"Write {key}=VALUE"
        elif key in LISTS:
            advice += f"; {key}=a+b is a list"
        elif key in LIST_KEYS:
            advice += f"; {key}={'+'.join(override.choice_texts)} is a list"
        elif "/" in text:
            advice += f"; a comma in a name needs quotes of its own, '{key}=\"a,b\"'"
        raise RefusedError(
            f"'{text}' gives several values, but a run needs one value for {key}. {advice}"
        )
    return override


def _check_not_renamed(override: SettingOverride) -> None:
    """Raise `RefusedError` for an override that renames a group ("group@name=option")."""
    if override.package is not None:
        raise RefusedError(
            f"'{override.text}' renames a group with '@', but groups cannot be renamed. Write "
            f"{override.key}=VALUE."
        )


def expand_override(text: str) -> tuple[str, list[str]]:
    """Return the key of an override, and one override for each value that it lists.

    "seed=0,1", "seed=range(2)" and "seed=0..1" list the values 0 and 1. "method=fedavg,fedbr+mixup"
    lists two values: no method (fedavg), and a pair of methods.
    Raise `RefusedError` for a range without listed values, such as interval(0,1), and for a renamed
    group ("group@name=option").
    """
    override = read_setting(text)
    key = override.key
    if not override.is_sweep:
        return single_override(text).key, [text]
    _check_not_renamed(override)
    if override.choices is None:
        raise RefusedError(
            f"'{text}' does not list the values of {key}. Write {key}=VALUE,VALUE or {key}=0..4."
        )
    return key, [f"{key}={choice}" for choice in override.choice_texts]


def read_full_key(text: str) -> SettingOverride:
    """Read one override with a single value; replace a short key ("init") by the full one."""
    override = single_override(text)
    if isinstance(override.value, Mapping) or override.key not in SHORT_KEYS:
        return override
    return replace(override, key=SHORT_KEYS[override.key])


def full_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with full keys in place of short ones, such as "init"."""
    return {SHORT_KEYS.get(key, key): value for key, value in values.items()}


def check_no_plus(text: str) -> None:
    """Raise `RefusedError` for "+key=value", with which Hydra adds a key.

    text: the override.
    """
    if text.startswith("+"):
        raise RefusedError(
            f"'{text}' begins with '+', but no setting of raysim needs it. Write "
            f"{text.lstrip('+')}."
        )


def flatten_settings(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return values by their full keys: {"local": {"lr": 0.1}} becomes {"local.lr": 0.1}.

    Values become types that files can store: tuples and ranges become lists, paths become text.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings({f"{key}.{name}": inner for name, inner in value.items()})
        elif isinstance(value, (tuple, range)):
            flat[key] = list(value)
        else:
            flat[key] = str(value) if isinstance(value, Path) else value
    return flat


def extract_overrides(
    overrides: Sequence[str], settings: Mapping[str, object], places: Iterable[str]
) -> ExtractedOverrides:
    """Separate the overrides that set arguments of the user's objects from all other overrides.

    overrides: texts, such as "data.padding=1".
    settings: Python values, by key or in nested dictionaries.
    places: the keys of the user's objects, such as "data" or "method.fedprox".
    Raise `RefusedError` for an override that replaces an object, such as "data=mnist". Raise it
    also if two overrides set the same argument of an object.
    """
    by_place: dict[str, dict[str, SetValue]] = {place: {} for place in places}
    other_overrides = []
    for text in overrides:
        override = single_override(text)
        place = _find_place(override.key, by_place)
        if place is None:
            other_overrides.append(text)
            continue
        check_no_plus(text)
        _add_to_place(by_place, place, override.key, SetValue(override.value, text))
    other_settings = {}
    for key, value in flatten_settings(settings).items():
        place = _find_place(key, by_place)
        if place is None:
            other_settings[key] = value
            continue
        text = f"{key}={format_value(value)}"
        _add_to_place(by_place, place, key, SetValue(value, text))
    return ExtractedOverrides(other_overrides, other_settings, by_place)


def _find_place(key: str, places: Iterable[str]) -> str | None:
    return next((place for place in places if f"{key}.".startswith(f"{place}.")), None)


def _add_to_place(
    by_place: dict[str, dict[str, SetValue]], place: str, key: str, value: SetValue
) -> None:
    inner = key.removeprefix(place).removeprefix(".")
    if not inner:
        raise RefusedError(
            f"{key}: '{value.text}' has no effect, because an object was passed for {place}. Keep "
            "one of them."
        )
    if inner in by_place[place]:
        earlier = by_place[place][inner]
        raise RefusedError(
            f"{key} is given twice, as '{earlier.text}' and as '{value.text}'. Keep one of them."
        )
    by_place[place][inner] = value
