"""Find the terminal's width, and write text to streams that cannot show all characters."""

from __future__ import annotations

import codecs
import io
import shutil
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

# The name of the error handler of a stream.
HANDLER = "raysim-equivalents"
EQUIVALENTS = {
    "±": "+/-",
    "·": "|",
    "×": "x",
    "–": "-",
    "—": "-",
    "…": "...",
    "→": "->",
    "←": "<-",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "Δ": "delta",
    "μ": "mu",
    "µ": "mu",
    "σ": "sigma",
    "Σ": "sum",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "│": "|",
    "┃": "|",
}
UNKNOWN = "?"


def terminal_width() -> int:
    """Return the number of columns of the terminal, or 120 without a terminal."""
    return shutil.get_terminal_size((120, 24)).columns


def ascii_equivalent(character: str) -> str:
    """Return ASCII text that can replace a character; "?" if there is none."""
    if character in EQUIVALENTS:
        return EQUIVALENTS[character]
    name = unicodedata.name(character, "")
    if name.startswith(("BOX DRAWINGS", "BLOCK")):
        return "-"
    if name.startswith("BRAILLE"):  # frames of a spinner
        return "*"
    letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return letters or UNKNOWN


def _replace_characters(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII text for characters that an encoding lacks, to handle an encoding error.

    `codecs` calls this function, and also needs the position after these characters.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(map(ascii_equivalent, characters)), error.end


codecs.register_error(HANDLER, _replace_characters)


@contextmanager
def lossy_output(*streams: object) -> Iterator[None]:
    """Inside `with`, write ASCII text for characters that a stream's encoding lacks.

    Without this, such characters raise an error. Streams that are no text files stay unchanged.
    """
    with ExitStack() as stack:
        for stream in streams:
            if isinstance(stream, io.TextIOWrapper):
                stack.callback(_set_errors, stream, stream.errors)
                _set_errors(stream, HANDLER)
        yield


def _set_errors(stream: io.TextIOWrapper, errors: str | None) -> None:
    with suppress(ValueError, OSError):  # the stream is closed, or nothing reads it any more
        stream.reconfigure(errors=errors)
