"""Test that every notebook runs from its first cell to its last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shorter_programs import shorten

# The notebooks' own plots are drawn, and the pictures that runs write are a point. The kernel
# itself runs the commands of raysim; what a pipe passes on is printed whole.
FIRST_CELL = f"""
%reset -f
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from one_point import replace_pictures
replace_pictures()
del sys.path[0]

def call_raysim(line):
    import shlex
    from raysim import cli
    program, *words = shlex.split(line.partition("|")[0])
    assert program == "raysim" and cli.call(words) == 0, line

get_ipython().system = call_raysim
del sys
"""
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """Yield a Jupyter kernel, in which all notebooks of this file run one after another.

    Each notebook starts without variables. Packages that an earlier notebook imported stay loaded.
    """
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_its_last_cell_outputs_true(path: Path, kernel: Any) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = shorten(cell.source)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(FIRST_CELL))
    NotebookClient(notebook, km=kernel, timeout=None).execute()
    assert notebook.cells[-1].outputs[0]["data"]["text/plain"] == "True"
    shown = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output
    ]
    assert any(kind.startswith("image/") for output in shown for kind in output["data"])
