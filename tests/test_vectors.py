"""Every test vector of the shared folder, against the functions of the modules that exist."""

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


def exists(module: str) -> bool:
    """Whether there is such a module; a missing parent package counts as no."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def every_case() -> list[Any]:
    """One parameter a case, and a skipped one for each block whose module is not written yet."""
    if RULES is None:
        return [pytest.param("", {}, marks=pytest.mark.skip("RAYSIM_SHARED does not name a folder with vectors"))]
    parameters = []
    for _, block in RULES.blocks([SCRIPT.parent / "vectors"]):
        name, short = block["function"], block["function"].removeprefix("raysim.")
        module = name.partition(":")[0]
        if not exists(module):
            parameters.append(pytest.param(name, {}, id=short, marks=pytest.mark.skip(f"there is no {module} yet")))
            continue
        parameters += [pytest.param(name, case, id=f"{short}-{n}") for n, case in enumerate(block["cases"])]
    return parameters


@pytest.mark.parametrize(("name", "case"), every_case())
def test_a_function_agrees_with_its_vector(name: str, case: dict[str, Any]) -> None:
    assert RULES is not None
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    got, want = function(**RULES.decode(case["args"])), RULES.decode(case["expected"])
    why = RULES.difference(got, want, case.get("rtol", 1e-6), case.get("atol", 1e-8))
    assert why is None, f"{name}: {why}"
