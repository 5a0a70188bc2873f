"""Read one override, `key=value`, with Hydra's parser.

Outside quotes, Hydra accepts only ASCII letters, digits and a few signs. This module also accepts
most other characters in values, so a path such as `/home/ü/x` needs no quotes.
"""

from __future__ import annotations

import functools
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

from raysim.primitives.errors import RefusedError

# The largest number of values of one "low..high".
MAX_COUNTED_VALUES = 10_000
# Functions of Ray Tune, and how to write them in an override.
TUNE_FUNCTIONS = {
    "uniform": "'interval(LOW, HIGH)'",
    "loguniform": "'tag(log, interval(LOW, HIGH))'",
    "randint": "'int(interval(LOW, HIGH))'",
    "lograndint": "'int(tag(log, interval(LOW, HIGH)))'",
    "grid_search": "VALUE,VALUE and sweep.search=grid",
}
_COUNT = re.compile(r"(?<![^=,])(-?\d{1,18})\.\.(-?\d{1,18})(?![^,])")  # 0..4
_SETTING = re.compile(r"[A-Za-z_][\w.]*=")
_TUNE_CALL = re.compile(r"([^=]+)=(?:tune\.)?(\w+)\(")
_CALL = re.compile(r"(?:^|[\[,{:(])\s*[A-Za-z_]\w*\s*\(")  # the start of a function call
# the grammar refuses these unless they are quoted
_FOREIGN = re.compile(r"[^\x00-\x7f]|[~#!&;<>^`]")
# the grammar accepts these only as parts of a function
_OUTSIDE_CALLS = re.compile(r"(?<!\\)[=()]")
_QUOTE_ADVICE = "Put a value with special characters into quotes, such as 'out=\"a(b\"'"


@dataclass(frozen=True)
class NumberRange:
    """A range of numbers in an override, such as "lr=interval(0.01,1)" for a sweep.

    low, high: the smallest and the largest number.
    tags: the words of `tag(...)` around the range, such as "log" for a search on a logarithmic
    scale.
    """

    low: int | float
    high: int | float
    tags: frozenset[str]


@dataclass(frozen=True)
class SettingOverride:
    """A parsed override, `key=value`.

    text: the override as the user wrote it.
    key: the key alone, such as "group" in "+group@package=option".
    value: the only value; None if there are several.
    choices: the listed values, such as (0, 1) for "seed=0,1"; or None.
    choice_texts: the text of each listed value.
    range: the range of values, as in "lr=interval(0.01,1)"; or None.
    is_delete: True for "~key", which in Hydra removes a key.
    package: the text after "@", or None.
    """

    text: str
    key: str
    value: Any = None
    is_sweep: bool = False
    choices: tuple[Any, ...] | None = None
    choice_texts: tuple[str, ...] = ()
    range: NumberRange | None = None
    is_delete: bool = False
    package: str | None = None


def _advise_key_and_value(text: str) -> str:
    return "Write key=value."


def read_override(
    text: str, advise: Callable[[str], str] = _advise_key_and_value
) -> SettingOverride:
    """Read one override; "0..4" means 0,1,2,3,4.

    advise: function that returns advice about a text without "=".
    Raise `RefusedError` for text that is no override.
    """
    _check_text(text)
    letters = _Letters(text)
    hidden_text = letters.hide(_expand_counts(text))
    try:
        return _to_setting(_parse(hidden_text), text, letters)
    except (HydraException, ValueError, TypeError) as error:
        advice = _QUOTE_ADVICE if "=" in text else advise(text)
        raise RefusedError(f"'{text}' cannot be read as key=value. {advice}") from error


# A study reads the same overrides for each of its runs. Nothing changes an `Override`.
@functools.lru_cache(maxsize=1024)
def _parse(text: str) -> Override:
    return OverridesParser.create().parse_override(text)


def _check_text(text: str) -> None:
    """Raise `RefusedError` if an override has one of three mistakes.

    The mistakes are: text that is not UTF-8, a value that is a function call of Ray Tune, and
    several overrides in one text ("a=1 b=2").
    """
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RefusedError(
            f"{text!r} is not text in UTF-8. If a file's name causes this, rename the file. "
            "Otherwise set the shell's encoding (the variable LANG) to UTF-8."
        )
    call = _TUNE_CALL.match(text)
    if call and call[2] in TUNE_FUNCTIONS:
        raise RefusedError(
            f"'{text}' is written for Ray Tune. For raysim sweep, write "
            f"{call[1]}={TUNE_FUNCTIONS[call[2]]}."
        )
    words = text.split()
    if len(words) > 1 and all(map(_SETTING.match, words)):
        raise RefusedError(
            f"'{text}' cannot be read as key=value, because it has {len(words)} settings. Write "
            "each setting as an argument of its own: quotes must not enclose several settings."
        )


def _to_setting(override: Override, text: str, letters: _Letters) -> SettingOverride:
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
        values = override.sweep_iterator(Transformer.identity)
        choices = tuple(letters.restore(choice) for choice in values)
        texts = tuple(letters.restore(choice) for choice in override.sweep_string_iterator())
    if isinstance(value, IntervalSweep):
        assert value.start is not None and value.end is not None, "the parser asks for both"
        interval = NumberRange(value.start, value.end, frozenset(value.tags))
    return SettingOverride(text, key, None, True, choices, texts, interval, package=package)


def _expand_counts(text: str) -> str:
    """Return a text in which a range such as "0..4" is written as "0,1,2,3,4".

    A text with a quote or an opening bracket stays unchanged.
    text: the override.
    """

    def expand(count: re.Match[str]) -> str:
        first, last = int(count[1]), int(count[2])
        if not first <= last < first + MAX_COUNTED_VALUES:
            raise RefusedError(
                f"'{text}' must be an ascending range of at most {MAX_COUNTED_VALUES:,} values. "
                "Write the lower end first, such as 0..4."
            )
        return ",".join(map(str, range(first, last + 1)))

    has_quotes_or_brackets = not {*"'\"[({"}.isdisjoint(text)
    return text if has_quotes_or_brackets else _COUNT.sub(expand, text)


class _Letters:
    """A reversible encoding of an override, because Hydra's grammar refuses some characters.

    `hide` replaces each such character by letters and digits, and `restore` undoes this.
    text: the override. The replacements start with letters that do not occur in it.
    """

    # A character becomes a prefix that does not occur in the override, six hexadecimal digits and
    # "Z".
    def __init__(self, text: str):
        self._mark = "Zq"
        while self._mark in text:
            self._mark += "q"
        self._hidden = re.compile(f"{self._mark}([0-9a-f]{{6}})Z")

    def hide(self, text: str) -> str:
        """Return an override in which letters and digits replace the characters that Hydra refuses.

        text: the override.
        """
        key, equals, value = text.partition("=")
        key = re.sub("[^ -~]", self._hide_character, key)
        value = _FOREIGN.sub(self._hide_character, value)
        if not _CALL.search(value):
            value = _OUTSIDE_CALLS.sub(self._hide_character, value)
        return f"{key}{equals}{value}"

    def restore(self, value: Any) -> Any:
        """Restore the characters that `hide` replaced before Hydra read the override.

        value: the value that Hydra read. Texts in a list or dictionary are restored, too.
        A quoted text loses its quotes.
        """
        if isinstance(value, str):
            return self._hidden.sub(lambda hidden: chr(int(hidden[1], 16)), value)
        if isinstance(value, QuotedString):
            return self.restore(value.text)
        if isinstance(value, list):
            return [self.restore(item) for item in value]
        if isinstance(value, dict):
            return {self.restore(key): self.restore(item) for key, item in value.items()}
        return value

    def _hide_character(self, character: re.Match[str]) -> str:
        return f"{self._mark}{ord(character[0]):06x}Z"
