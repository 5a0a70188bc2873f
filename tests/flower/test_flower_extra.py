import sys

import pytest

from raysim.primitives.errors import RefusedError


def test_error_of_missing_flwr_mentions_the_extra_to_install(monkeypatch):
    from raysim.flower.learner import FlowerLearner

    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(ValueError, match=r"learner=flower .*\[flower\]"):
        FlowerLearner(app="package.module:app")


def test_error_of_command_without_flwr_mentions_the_extra_to_install(monkeypatch, tmp_path):
    from raysim.commands.flower import run_flower

    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(RefusedError, match=r"\[flower\]"):
        run_flower([str(tmp_path)], [])
