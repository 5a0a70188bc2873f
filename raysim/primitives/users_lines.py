"""Find the line of a user's code in which an error was raised."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_OWN_FOLDER = Path(__file__).parent.parent  # the package raysim
_PYTHON_FOLDER = Path(sysconfig.get_path("stdlib"))


def users_line(error: BaseException, folder: Path | None = None) -> str:
    """Return text that names the line of the user's code in which an error was raised.

    The text is " (file, line N: code)", or "" if the error passed through no line of the user's
    code.
    folder: the folder with the user's code; None if it is unknown. If the error passed through
    lines in this folder and elsewhere, a line in the folder is named.
    """
    frames = [
        frame
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not is_foreign(Path(frame.filename))
    ]
    in_folder = [
        frame for frame in frames if folder and Path(frame.filename).is_relative_to(folder)
    ]
    for frame in (*in_folder, *frames):
        return f" ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
    return ""


def is_foreign(file: Path) -> bool:
    """Return True if a file belongs to raysim, to Python or to an installed package.

    Also return True for code that is in no file, such as "<string>".
    """
    is_installed = "site-packages" in file.parts or file.is_relative_to(_PYTHON_FOLDER)
    return is_installed or file.is_relative_to(_OWN_FOLDER) or str(file).startswith("<")
