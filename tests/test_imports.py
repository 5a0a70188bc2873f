"""The core stands on PyTorch and NumPy; Ray, Hydra and MLflow are each imported in one place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "raysim"
ON_RAY = [f"runtime/ray/{name}.py" for name in ("__init__", "actors", "cluster", "driver", "team")]
CORE = (
    "raysim",
    "raysim.simulation.coordinator",
    "raysim.runtime.inprocess",
    "raysim.methods.fedbr",
    "raysim.models",
    "raysim.commands.bench.loops",
)


@pytest.mark.slow
def test_the_core_imports_neither_ray_nor_hydra_nor_mlflow() -> None:
    others = {"ray", "hydra", "omegaconf", "mlflow", "matplotlib"}
    program = f"import sys, {', '.join(CORE)}; print(*({others} & {{*sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("ray", {*ON_RAY, "commands/submit/job_server.py", "commands/sweep/tune.py"}),
        ("hydra", {"experiment/compose.py", "experiment/overrides.py"}),
        ("mlflow", {"results/tracking.py"}),
    ],
)
def test_each_of_them_is_imported_in_its_place_alone(library: str, places: set[str]) -> None:
    pattern = re.compile(rf"^\s*(import|from) {library}\b", re.MULTILINE)
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text())}
    assert found == places


@pytest.mark.parametrize("path", [*ON_RAY, "commands/submit/job_server.py", "commands/sweep/tune.py"])
def test_only_public_names_of_ray_are_used_but_for_a_start_that_can_do_without_them(path: str) -> None:
    found = re.findall(r"\bray\._[\w.]*|ray\.[a-z.]*\._\w*", (PACKAGE / path).read_text())
    assert found == (["ray._private.parameter", "ray._private.node"] if path == "runtime/ray/cluster.py" else [])
