"""Errors that users see without a traceback, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Parts of the texts of a RuntimeError by which torch reports too little memory.
_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "Storage size calculation overflowed")
# An error with a suggestion also lists all valid names if there are at most so many.
MAX_LISTED_NAMES = 20


class RefusedError(ValueError):
    """The error of a request that cannot be carried out.

    Its text names the configuration key and the value, and says what is wrong and what to do.
    """

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows in place of raysim's traceback."""
        return [f"RefusedError: {self}"]


Refused = RefusedError  # the name in version 0.1


@contextmanager
def errors_as_refusals() -> Iterator[None]:
    """Inside `with`, raise `RefusedError` in place of errors that wrong settings can cause.

    This applies to `ValueError`, `OSError`, `OverflowError` and errors that report too little
    memory of the machine, but not of a GPU. All other errors pass unchanged.
    """
    try:
        yield
    except RefusedError:
        raise
    except (ValueError, OSError, OverflowError) as error:
        raise RefusedError(on_one_line(error)) from error
    except (MemoryError, RuntimeError) as error:
        is_out_of_memory = any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
        if isinstance(error, RuntimeError) and not is_out_of_memory:
            raise
        raise RefusedError(
            f"the run needs more memory than is available ({first_line(error)}). Use a smaller "
            "model, smaller batches or fewer workers."
        ) from error


def on_one_line(error: BaseException) -> str:
    """Return an error's text on one line."""
    return " ".join(_text(error).split())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has no text."""
    return next(iter(_text(error).strip().splitlines()), type(error).__name__)


def _text(error: BaseException) -> str:
    # An error from another process has the original error, without a traceback, in `cause`.
    cause = getattr(error, "cause", None)
    return str(cause if isinstance(cause, Exception) else error)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the valid name most similar to this one, ignoring case; "" if none is similar."""
    by_lower_case = {option.lower(): option for option in reversed(list(valid))}
    cutoff = 0.5 if len(name) < 4 else 0.6  # "rl" and "lr" have 0.5
    matches = difflib.get_close_matches(name.lower(), list(by_lower_case), 1, cutoff)
    return by_lower_case[matches[0]] if matches else ""


def suggest(name: str, valid: Iterable[str], what: str = "the valid ones are") -> str:
    """Return the end of an error about a wrong name: the nearest valid name, or all of them.

    Return both if a name is near and there are at most `MAX_LISTED_NAMES` valid names.
    what: the words in front of the list of valid names.
    """
    names = list(valid)
    if not names:
        return f"{what} no settings" if what.endswith("has") else f"{what} none"
    all_names = f"{what} {', '.join(names)}"
    near = nearest(name, names)
    if not near:
        return all_names
    listed = f" ({all_names})" if len(names) <= MAX_LISTED_NAMES else ""
    return f"did you mean {near}?{listed}"
