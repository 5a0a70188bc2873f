"""Machine code of `raysim.vectors.blocks.compiled` that outlives its process: numba's files, made safe to share."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core import caching

from raysim.primitives.files import wait_for_folder

_PLAIN = (bool, int, float, str, tuple, type(None))
_OnDisk: Any = caching.FunctionCache  # numba has no types


class MachineCodeCache(_OnDisk):  # type: ignore[misc]
    """Beside the function's own file, else where numba keeps a user's. Raises RuntimeError if neither can be written.

    Numba asks whether the file is a new one and the bytecode the same. Here constants, the plain values of names from
    the module, and the options of the compiler count too, so code of an older source is never taken for that of a newer
    one. What fails on disk only costs the time to compile.
    """

    def __init__(self, function: Callable[..., Any], options: object):
        super().__init__(function)
        self._exact = digest(function, options)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), self._exact)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for these types, or None."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged file fails in pickle, or in numba, in many ways
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """One process at a time: two that add code to one index would give it one name."""
        with (
            contextlib.suppress(Exception),
            wait_for_folder(Path(self.cache_path), "NUMBA_CACHE_DIR"),
        ):
            super().save_overload(sig, data)


def digest(function: Callable[..., Any], options: object) -> str:
    """What the machine code of a function depends on beside its bytecode; equal in all processes."""
    code: Any = function.__code__
    known = getattr(function, "__globals__", {})
    names = [
        (name, value) for name in code.co_names if isinstance(value := known.get(name), _PLAIN)
    ]
    read = (code.co_code, code.co_consts, code.co_names, code.co_varnames, names, options)
    return hashlib.sha256(repr(read).encode()).hexdigest()
