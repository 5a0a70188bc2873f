"""Test errors that users see."""

from __future__ import annotations

from raysim.primitives.errors import RefusedError


def test_notebook_shows_the_error_of_a_refused_setting_in_one_line() -> None:
    # IPython calls this method of an error in place of printing its traceback.
    assert RefusedError("local.lr=-1: must be above 0")._render_traceback_() == [
        "RefusedError: local.lr=-1: must be above 0"
    ]
