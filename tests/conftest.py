"""Fixtures that every test may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data sets and test vectors; tests that need it are skipped without it."""
    folder = os.environ.get("RAYSIM_SHARED", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("RAYSIM_SHARED does not name a folder with the real data and the vectors")
    return Path(folder).resolve()
