import logging
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent / "project"


def pytest_ignore_collect(collection_path, config):
    return collection_path.is_relative_to(PROJECT)


@pytest.fixture(autouse=True)
def quiet_flower(monkeypatch):
    for handler in logging.getLogger("flwr").handlers:
        handler.setLevel(logging.CRITICAL)
    monkeypatch.setattr(sys, "path", [str(PROJECT), *sys.path])


@pytest.fixture
def project():
    return PROJECT
