"""Keep a Ctrl-C that a library would lose or would replace by an error of its own."""

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
    """Remember from now on that Ctrl-C was pressed. It still raises `KeyboardInterrupt`.

    Some code cannot raise errors, for example the callback of a weak reference. If Ctrl-C is
    pressed in such code, the error is raised a moment later. A process that ignores Ctrl-C, as
    background commands of a shell do, continues to ignore it.
    """
    sys.unraisablehook = _repeat_interrupt(sys.unraisablehook)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _notice)


def _notice(number: int, frame: Any) -> None:
    _interrupted.set()
    signal.default_int_handler(number, frame)


def _repeat_interrupt(usual: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a function for `sys.unraisablehook`, which gets the errors that Python cannot raise.

    If the error is a Ctrl-C, the function sends the signal to this process again.
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
