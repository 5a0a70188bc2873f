"""Every notebook runs from its first cell to its last."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_shows_pictures_and_its_last_cell_is_true(path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=None, kernel_name="python3").execute()
    assert notebook.cells[-1].outputs[0]["data"]["text/plain"] == "True"
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert any(kind.startswith("image/") for output in shown for kind in output["data"])
