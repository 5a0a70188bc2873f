"""Let Ctrl-C stop a process, even if a library catches it or raises another error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_interrupted = threading.Event()


def notice_interrupts() -> None:
    """Make sure that Ctrl-C raises `KeyboardInterrupt` in this process.

    After Ctrl-C in code that cannot raise errors, such as the callback of a weak reference, the
    error is raised a moment later. A process that ignores Ctrl-C continues to ignore it.
    Call this before `keep_interrupts` is used.
    """
    sys.unraisablehook = _repeat_interrupt(sys.unraisablehook)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _notice)


def _notice(number: int, frame: Any) -> None:
    _interrupted.set()
    signal.default_int_handler(number, frame)


def _repeat_interrupt(usual: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a hook for `sys.unraisablehook` that raises a lost Ctrl-C again.

    A Ctrl-C is lost in code that cannot raise errors. The hook then sends the signal again.
    usual: the previous hook, which handles all other errors.
    """

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()
        else:
            usual(unraisable)

    return hook


@contextlib.contextmanager
def keep_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` if the code inside `with` fails after Ctrl-C was pressed.

    A C library, such as one that Matplotlib uses, may raise its own error in place of Ctrl-C.
    """
    try:
        yield
    except Exception as error:
        if _interrupted.is_set():
            raise KeyboardInterrupt from error
        raise
