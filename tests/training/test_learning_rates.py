"""Test how the learning rate of clients changes with the version."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from raysim.api.declarations import Local
from raysim.experiment.compose import compose
from raysim.training.run_spec import RunSettings

ROUNDS = 12
STEPS: dict[str, Any] = {"epochs": None, "steps": 4}


def torch_rates(make: Any) -> list[float]:
    """Return the learning rate of each round under a scheduler of torch.

    make(optimizer): the scheduler. The first rate is 0.4.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    scheduler = make(optimizer)
    rates = []
    for _ in range(ROUNDS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        (
            {"schedule": "cosine", "schedule_rounds": ROUNDS, "final_lr": 0.1},
            lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS, eta_min=0.1),
        ),
        (
            {"schedule": "linear", "schedule_rounds": ROUNDS, "final_lr": 0.1},
            lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.25, ROUNDS),
        ),
        (
            {"schedule": "step", "drop_every": 5, "drop_factor": 0.5},
            lambda optimizer: lr_scheduler.StepLR(optimizer, 5, 0.5),
        ),
        (
            {"lr_decay": 0.9},
            lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
        ),
    ],
    ids=["cosine", "linear", "step", "decay"],
)
def test_learning_rate_of_each_version_equals_that_of_a_torch_scheduler(
    settings: dict[str, Any], make: Any
) -> None:
    local = Local(lr=0.4, **settings)
    rates = [local.rate(version) for version in range(ROUNDS)]
    assert rates == pytest.approx(torch_rates(make), rel=1e-12)


def test_learning_rate_rises_in_the_warmup_rounds_and_decays_afterwards() -> None:
    local = Local(lr=0.4, schedule="linear", schedule_rounds=7, warmup_rounds=3)
    rates = [local.rate(version) for version in range(9)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"schedule": "cosin"}, "local.schedule"),
        ({"schedule": "cosine"}, "local.schedule_rounds"),
        ({"schedule": "step"}, "local.drop_every"),
        ({"schedule": "step", "drop_every": 0}, "local.drop_every"),
        ({"schedule": "linear", "schedule_rounds": 0}, "local.schedule_rounds"),
        ({"final_lr": 0.5}, "local.final_lr"),
        ({"drop_factor": 0.0}, "local.drop_factor"),
        ({"warmup_rounds": -1}, "local.warmup_rounds"),
        (
            {"schedule": "cosine", "schedule_rounds": 3, "warmup_rounds": 3},
            r"local\.warmup_rounds=3 .*local\.schedule_rounds=3",
        ),
        (
            {"schedule": "linear", "schedule_over": "steps", "warmup_steps": 5, **STEPS},
            r"local\.warmup_steps=5 .*local\.steps=4",
        ),
    ],
    ids=str,
)
def test_impossible_learning_rate_schedules_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Local(lr=0.4, **settings)


def test_run_with_a_learning_rate_of_zero_is_refused() -> None:
    local = Local(schedule="cosine", schedule_rounds=3)
    RunSettings(rounds=3, local=local)
    with pytest.raises(ValueError, match=r"local\.schedule_rounds=4"):
        RunSettings(rounds=4, local=local)


@pytest.mark.parametrize(
    "options",
    [[], ["local=default"], ["experiment=fedbr/rotated_mnist"]],
    ids=["default", "group", "preset"],
)
def test_learning_rate_schedule_lasts_all_rounds_by_default(options: list[str]) -> None:
    config = compose([*options, "rounds=7", "local.schedule=cosine"])
    assert config.local.schedule_rounds == 7
