"""What a user sees instead of a traceback, and the nearest valid name to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_TOO_LARGE = (
    "can't allocate memory",
    "Storage size calculation overflowed",
)  # what torch calls a RuntimeError


class Refused(ValueError):
    """A study that cannot be run as asked: one sentence with the value, its place and what to do."""


@contextmanager
def errors_as_refusals() -> Iterator[None]:
    """Turns the errors that a wrong setting causes into `Refused`; whatever else is raised is our own mistake."""
    try:
        yield
    except Refused:
        raise
    except (ValueError, OSError, OverflowError) as error:
        raise Refused(on_one_line(error)) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in _TOO_LARGE):
            raise
        raise Refused(
            f"this takes more memory than there is ({first_line(error)}): ask for less"
        ) from error


def on_one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(_text(error).split())


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or the name of its type if it says nothing."""
    return next(iter(_text(error).strip().splitlines()), type(error).__name__)


def _text(error: BaseException) -> str:
    """What an error says; one that crossed a process has its original, without the other's traceback, in `cause`."""
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, Exception) else error)


MANY = 20  # names that hide the one that is meant


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the most similar valid name in upper or lower case, or ""."""
    by_lower_case = {option.lower(): option for option in reversed(list(valid))}
    cutoff = 0.5 if len(name) < 4 else 0.6  # rl is half of lr
    matches = difflib.get_close_matches(name.lower(), list(by_lower_case), 1, cutoff)
    return by_lower_case[matches[0]] if matches else ""


def suggest(name: str, valid: Iterable[str], what: str = "the valid ones are") -> str:
    """The end of a sentence about a wrong name: the nearest one if any is similar, and all if they do not hide it."""
    names = list(valid)
    if not names:
        return f"{what} no settings" if what.endswith("has") else f"{what} none"
    everything = f"{what} {', '.join(names)}"
    if not (near := nearest(name, names)):
        return everything
    return f"did you mean {near}?" + (f" ({everything})" if len(names) <= MANY else "")
