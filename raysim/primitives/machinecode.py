"""Cache the machine code of compiled functions on disk, safely for several processes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core import caching

from raysim.primitives.files import wait_for_folder

_PLAIN_TYPES = (bool, int, float, str, tuple, type(None))
_FunctionCache: Any = caching.FunctionCache  # numba has no types


class MachineCodeCache(_FunctionCache):  # type: ignore[misc]
    """A cache of machine code next to the function's source file, or in numba's cache folder.

    Unlike numba's own cache, it also notices changed constants, plain module-level values and
    compiler options.

    Raises `RuntimeError` if numba finds no folder that can be written. If a later write fails, the
    next process compiles again.
    """

    def __init__(self, function: Callable[..., Any], options: object):
        super().__init__(function)
        self._digest = digest(function, options)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), self._digest)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the stored code for these argument types, or None if there is none.

        sig: the argument types.
        target_context: the processor for which numba compiles.
        """
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged file can raise any error in pickle or numba
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save the machine code `data` for the argument types `sig`.

        A lock on the folder makes other processes wait, so that only one process saves at a time.
        An error while saving is ignored.
        """
        # Two processes that save at the same time would give the same name to their code.
        folder = Path(self.cache_path)
        with contextlib.suppress(Exception), wait_for_folder(folder, "NUMBA_CACHE_DIR"):
            super().save_overload(sig, data)


def digest(function: Callable[..., Any], options: object) -> str:
    """Return a checksum of a function's code, and of plain module-level values that it uses.

    Plain values are numbers, texts, tuples, bools and None. All processes compute the same
    checksum, unless the function contains another function.
    options: numba's options for the compilation.
    """
    code: Any = function.__code__
    module_values = getattr(function, "__globals__", {})
    values = [(name, module_values.get(name)) for name in code.co_names]
    plain_values = [(name, value) for name, value in values if isinstance(value, _PLAIN_TYPES)]
    content = (
        code.co_code,
        code.co_consts,
        code.co_names,
        code.co_varnames,
        plain_values,
        options,
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()
