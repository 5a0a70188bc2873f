"""Errors that users see."""

from __future__ import annotations

from raysim.primitives.errors import Refused


def test_refused_shows_one_line_in_notebooks() -> None:
    # IPython calls this method of an error in place of printing its traceback.
    assert Refused("local.lr=-1: must be above 0")._render_traceback_() == [
        "Refused: local.lr=-1: must be above 0"
    ]
