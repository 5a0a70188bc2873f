"""End a run with a short text if a hook fails or a file cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from raysim.api.composition import failing_method_name
from raysim.api.hook_checks import HookError, format_error, format_traceback
from raysim.experiment.run_folder import CONFIG
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import is_disk_full
from raysim.simulation.events import RunStoppedError


@contextmanager
def explain_errors(folder: Path) -> Iterator[None]:
    """Raise `RunStoppedError` with a short text for two kinds of errors in a `with` block.

    These are errors of methods' hooks, and an `OSError` or `SafetensorError` of a file.
    folder: the run's folder.
    """
    with _report_unwritable_files(folder), _name_failing_method():
        yield


@contextmanager
def _name_failing_method() -> Iterator[None]:
    """Raise `RunStoppedError`, which says what failed, if a method's hook fails inside `with`."""
    try:
        yield
    except (RefusedError, RunStoppedError):
        raise
    except (Exception, SystemExit) as error:
        name = failing_method_name(error)
        if not (name or isinstance(error, HookError)):
            raise
        text = f"method {name!r} failed: {format_error(error)}" if name else format_error(error)
        text += ". Correct its code, then continue the run with resume=latest."
        raise RunStoppedError(f"{text}\n{format_traceback(error)}".rstrip("\n")) from error


@contextmanager
def _report_unwritable_files(folder: Path) -> Iterator[None]:
    """Raise `RunStoppedError` with advice for an `OSError` or `SafetensorError` inside `with`.

    Usually a file cannot be written.
    folder: the run's folder, which the advice names.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = str(error)
        fix = "Correct the cause"
        if is_disk_full(error):
            fix = "Free space on the disk"
            if isinstance(error, OSError):
                reason = str(error.strerror)
        has_begun = (folder / CONFIG).is_file()
        command = "start the run again with the same settings"
        if has_begun:
            command = f"continue the run with out={folder} resume=latest"
        raise RunStoppedError(f"{reason}. {fix}. Then {command}.") from error
