"""Call functions of raysim with stored arguments; compare the results with stored results."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(os.environ.get("RAYSIM_SHARED") or "missing") / "check_vectors.py"


def rules() -> ModuleType:
    """Load the script `check_vectors.py`, and return it as a module.

    The script is in the folder that the environment variable RAYSIM_SHARED names. It reads files
    with test vectors and compares values.
    """
    spec = importlib.util.spec_from_file_location("check_vectors", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RULES = rules() if SCRIPT.is_file() else None


def every_block() -> list[dict[str, Any]]:
    """Return the contents of all files with test vectors.

    An entry has one function's name and cases (arguments and result). The list is empty unless the
    environment variable RAYSIM_SHARED names a folder with `check_vectors.py`.
    """
    return (
        [] if RULES is None else [block for _, block in RULES.blocks([SCRIPT.parent / "vectors"])]
    )


def functions_with_vectors() -> set[str]:
    """Return the names, as "module:function", of the functions that have stored examples.

    Skip the calling test if the environment variable RAYSIM_SHARED does not name a folder with the
    script `check_vectors.py`.
    """
    if RULES is None:
        pytest.skip("RAYSIM_SHARED does not name a folder with vectors")
    return {block["function"] for block in every_block()}


def every_case() -> list[Any]:
    """Return a pytest parameter for each pair of stored arguments and result."""
    if RULES is None:
        return [
            pytest.param(
                "", {}, marks=pytest.mark.skip("RAYSIM_SHARED does not name a folder with vectors")
            )
        ]
    return [
        pytest.param(
            block["function"], case, id=f"{block['function'].removeprefix('raysim.')}-{number}"
        )
        for block in every_block()
        for number, case in enumerate(block["cases"])
    ]


@pytest.mark.parametrize(("name", "case"), every_case())
def test_function_returns_the_result_that_is_stored_for_its_arguments(
    name: str, case: dict[str, Any]
) -> None:
    assert RULES is not None
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    got, want = function(**RULES.decode(case["args"])), RULES.decode(case["expected"])
    why = RULES.difference(got, want, case.get("rtol", 1e-6), case.get("atol", 1e-8))
    assert why is None, f"{name}: {why}"
