"""Test every function with a vector in the shared folder."""

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
    """The shared script that decodes vectors and says when two values agree."""
    spec = importlib.util.spec_from_file_location("check_vectors", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RULES = rules() if SCRIPT.is_file() else None


def every_block() -> list[dict[str, Any]]:
    """Each with a function's name and its cases; none without the shared folder."""
    return (
        [] if RULES is None else [block for _, block in RULES.blocks([SCRIPT.parent / "vectors"])]
    )


def functions_with_vectors() -> set[str]:
    """Their names, "module:function"; the test that asks is skipped without the shared folder."""
    if RULES is None:
        pytest.skip("RAYSIM_SHARED does not name a folder with vectors")
    return {block["function"] for block in every_block()}


def every_case() -> list[Any]:
    """One parameter a case."""
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
def test_function_agrees_with_its_test_vector(name: str, case: dict[str, Any]) -> None:
    assert RULES is not None
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    got, want = function(**RULES.decode(case["args"])), RULES.decode(case["expected"])
    why = RULES.difference(got, want, case.get("rtol", 1e-6), case.get("atol", 1e-8))
    assert why is None, f"{name}: {why}"
