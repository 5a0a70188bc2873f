"""Test that Ray, Hydra and MLflow are each imported in one file only.

Also test that no modules import each other in a circle.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import grimp
import pytest

PACKAGE = Path(__file__).parent.parent / "raysim"
ON_RAY = [
    f"runtime/ray/{name}.py"
    for name in (
        "__init__",
        "actors",
        "cluster",
        "driver",
        "failures",
        "node_watch",
        "object_workers",
        "processes",
        "recruiter",
    )
]
CORE = (
    "raysim",
    "raysim.simulation.coordinator",
    "raysim.runtime.inprocess",
    "raysim.methods.fedbr",
    "raysim.models",
    "raysim.commands.bench.loops",
)


@pytest.mark.slow
def test_core_imports_no_optional_package() -> None:
    others = {"ray", "hydra", "omegaconf", "mlflow", "matplotlib"}
    program = f"import sys, {', '.join(CORE)}; print(*({others} & {{*sys.modules}}))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == ""


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("ray", {*ON_RAY, "commands/submit/job_server.py", "commands/sweep/tune.py"}),
        ("hydra", {"experiment/hydra_composition.py", "experiment/overrides.py"}),
        ("mlflow", {"results/mlflow_server.py"}),
    ],
)
def test_optional_packages_are_imported_only_in_listed_files(
    library: str, places: set[str]
) -> None:
    pattern = re.compile(rf"^\s*(import|from) {library}\b", re.MULTILINE)
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if pattern.search(path.read_text())
    }
    assert found == places


def import_circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the import cycles, each as the set of its modules."""
    reachable = {module: set(imported) for module, imported in imports.items()}
    for between in imports:
        for module in imports:
            if between in reachable[module]:
                reachable[module] |= reachable[between]
    circles: list[set[str]] = []
    for module in sorted(imports):
        circle = {other for other in reachable[module] if module in reachable[other]}
        if circle and circle not in circles:
            circles.append(circle)
    return circles


def test_search_finds_direct_and_indirect_import_cycles() -> None:
    imports = {
        "a": {"b"},
        "b": {"c"},
        "c": {"a", "d"},
        "d": {"e"},
        "e": {"d"},
        "f": {"a"},
        "g": set[str](),
    }
    assert import_circles(imports) == [{"a", "b", "c"}, {"d", "e"}]


def test_modules_have_no_import_cycles() -> None:
    """Imports inside functions and under `TYPE_CHECKING` are included in the search."""
    graph = grimp.build_graph("raysim", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert {"raysim.simulation.coordinator"} < imports.keys()
    assert import_circles(imports) == []
