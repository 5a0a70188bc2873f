"""Test the command that repeats a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from raysim.results.rerun import rerun_command


def test_rerun_command_has_one_allow_flag_for_each_user_package() -> None:
    config = {
        "method": [
            {"_target_": "raysim.methods.fedprox.FedProx"},
            {"_target_": "mine.methods.Gentle", "mu": 0.1},
        ],
        "model": {"_target_": "theirs.Net", "head": {"_target_": "mine.Head"}},
        "seed": 0,
    }
    command = rerun_command(config, Path("a run") / "config.yaml", "out=again")
    assert (
        command == "raysim run --config 'a run/config.yaml' --allow mine --allow theirs out=again"
    )
    assert shlex.split(command)[3] == "a run/config.yaml"


def test_rerun_command_has_no_allow_flag_if_all_classes_belong_to_raysim() -> None:
    config = {"method": [], "model": {"_target_": "raysim.models.Mlp"}}
    assert rerun_command(config, Path("best.yaml")) == "raysim run --config best.yaml"
