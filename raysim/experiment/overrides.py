"""Overrides: `key=value` on the command line, read by Hydra's parser.

Hydra's grammar knows ASCII letters and a few signs only, so that a path such as `/home/ü/x` would need quotes inside of
the shell's. Every other character is written in the grammar's letters before Hydra reads the text, and restored then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
    Transformer,
)
from hydra.errors import HydraException

from raysim.primitives.errors import Refused

MAX_COUNTED_VALUES = 10_000  # that one override may stand for
TUNES = {  # how Ray Tune's functions are written here
    "uniform": "'interval(LOW, HIGH)'",
    "loguniform": "'tag(log, interval(LOW, HIGH))'",
    "randint": "'int(interval(LOW, HIGH))'",
    "lograndint": "'int(tag(log, interval(LOW, HIGH)))'",
    "grid_search": "VALUE,VALUE and sweep.search=grid",
}
_SPAN = re.compile(r"(?<![^=,])(-?\d{1,18})\.\.(-?\d{1,18})(?![^,])")  # 0..4
_SETTING = re.compile(r"[A-Za-z_][\w.]*=")
_TUNE_CALL = re.compile(r"([^=]+)=(?:tune\.)?(\w+)\(")
_CALL = re.compile(r"(?:^|[\[,{:(])\s*[A-Za-z_]\w*\s*\(")  # where a function may stand
_FOREIGN = re.compile(r"[^\x00-\x7f]|[~#!&;<>^`]")  # never read by the grammar, unless quoted
_OUTSIDE_CALLS = re.compile(r"(?<!\\)[=()]")  # read by the grammar as parts of a function alone
_QUOTE = "put a value with special characters into quotes, such as 'out=\"a(b\"'"


@dataclass(frozen=True)
class Range:
    """All numbers from low to high, both of one type. tags: Hydra's, such as "log"."""

    low: int | float
    high: int | float
    tags: frozenset[str]


@dataclass(frozen=True)
class SettingOverride:
    """An override as it was read.

    text: as the user wrote it. value: of one that gives a single value. choices: the values of one that lists several;
    choice_texts: what gives one of them each. range: of one that names an interval. is_sweep: whether it gives more
    than one value; neither choices nor a range where these cannot be listed. package: what follows an "@".
    """

    text: str
    key: str
    value: Any = None
    is_sweep: bool = False
    choices: tuple[Any, ...] | None = None
    choice_texts: tuple[str, ...] = ()
    range: Range | None = None
    is_delete: bool = False
    package: str | None = None


def read_override(
    text: str, hint: Callable[[str], str] = lambda text: "write key=value"
) -> SettingOverride:
    """Read one override, in which "0..4" is 0,1,2,3,4. Raise `Refused` for what is none.

    hint: what to write in place of a text without "=".
    """
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise Refused(
            f"{text!r} is no text in UTF-8: rename the file, or set the shell's encoding (LANG)"
        )
    if (call := _TUNE_CALL.match(text)) and call[2] in TUNES:
        raise Refused(
            f"'{text}' is written as in Ray Tune: write {call[1]}={TUNES[call[2]]} for raysim sweep"
        )
    words = text.split()
    if len(words) > 1 and all(map(_SETTING.match, words)):
        raise Refused(
            f"'{text}' cannot be read as key=value: these are {len(words)} settings. Give each a word of its "
            "own, without quotes around all"
        )
    letters = _Letters(text)
    counted = letters.hide(_count_up(text))
    try:
        override: Override = OverridesParser.create().parse_override(counted)
        return _read(override, text, letters)
    except (HydraException, ValueError, TypeError) as error:
        do = _QUOTE if "=" in text else hint(text)
        raise Refused(f"'{text}' cannot be read as key=value: {do}") from error


def _read(override: Override, text: str, letters: _Letters) -> SettingOverride:
    key, package = letters.restore(override.key_or_group), override.package
    if override.is_delete():
        return SettingOverride(text, key, is_delete=True, package=package)
    value = override.value()
    if not override.is_sweep_override():
        return SettingOverride(text, key, letters.restore(value), package=package)
    choices: tuple[Any, ...] | None = None
    texts: tuple[str, ...] = ()
    interval = None
    if isinstance(value, (ChoiceSweep, RangeSweep)) and not value.shuffle:
        choices = tuple(
            letters.restore(each) for each in override.sweep_iterator(Transformer.identity)
        )
        texts = tuple(letters.restore(each) for each in override.sweep_string_iterator())
    if isinstance(value, IntervalSweep):
        assert value.start is not None and value.end is not None, "the parser asks for both"
        interval = Range(value.start, value.end, frozenset(value.tags))
    return SettingOverride(text, key, None, True, choices, texts, interval, package=package)


def _count_up(text: str) -> str:
    """Write "0..4" out, which no shell reads as a pattern; a quoted value stays unchanged."""

    def listed(found: re.Match[str]) -> str:
        first, last = int(found[1]), int(found[2])
        if not first <= last < first + MAX_COUNTED_VALUES:
            raise Refused(
                f"'{text}' counts up, by {MAX_COUNTED_VALUES:,} values at most: write the lower end first, such as 0..4"
            )
        return ",".join(map(str, range(first, last + 1)))

    return text if {*"'\"[({"} & {*text} else _SPAN.sub(listed, text)


class _Letters:
    """Characters that the grammar does not know, as letters that it knows, and back."""

    def __init__(self, text: str):
        self._mark = "Zq"
        while self._mark in text:
            self._mark += "q"
        self._hidden = re.compile(f"{self._mark}([0-9a-f]{{6}})Z")

    def hide(self, text: str) -> str:
        """Return a text that the grammar reads as one with letters of any language."""
        key, equals, value = text.partition("=")
        value = _FOREIGN.sub(self._hide, value)
        if not _CALL.search(value):
            value = _OUTSIDE_CALLS.sub(self._hide, value)
        return f"{re.sub('[^ -~]', self._hide, key)}{equals}{value}"

    def restore(self, value: Any) -> Any:
        """Return a value with the characters that its texts had before."""
        if isinstance(value, str):
            return self._hidden.sub(lambda found: chr(int(found[1], 16)), value)
        if isinstance(value, QuotedString):
            return self.restore(value.text)
        if isinstance(value, list):
            return [self.restore(each) for each in value]
        if isinstance(value, dict):
            return {self.restore(key): self.restore(each) for key, each in value.items()}
        return value

    def _hide(self, found: re.Match[str]) -> str:
        return f"{self._mark}{ord(found[0]):06x}Z"
