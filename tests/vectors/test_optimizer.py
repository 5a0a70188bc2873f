"""Test the settings of the local optimizer, and that its three implementations are equal.

The implementations are for one client, for several lanes, and for recorded steps. The file
training/test_step.py tests the steps of one optimizer.
"""

from __future__ import annotations

import pytest
import torch

from raysim.vectors.optimizer import (
    LocalOptimizer,
    OptimizerKind,
    OptimizerSettings,
    RecordedOptimizer,
    StackedOptimizer,
)


@pytest.mark.parametrize("kind", ["adam", "adamw", "lion", "muon"])
def test_optimizers_other_than_sgd_refuse_momentum_and_nesterov(kind: OptimizerKind) -> None:
    with pytest.raises(ValueError, match=rf"local\.momentum=0\.9 .*local\.optimizer={kind}"):
        OptimizerSettings(kind, momentum=0.9)
    with pytest.raises(ValueError, match=rf"local\.nesterov=true .*local\.optimizer={kind}"):
        OptimizerSettings(kind, nesterov=True)


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_optimizer_setting_below_zero_is_refused(key: str) -> None:
    OptimizerSettings(**{key: 0.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"local\.{key}=-0\.01 must be at least 0"):
        OptimizerSettings(**{key: -0.01})  # type: ignore[arg-type]


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"local\.optimizer='sdg'"):
        OptimizerSettings("sdg")  # type: ignore[arg-type]


def test_optimizer_of_several_lanes_starts_with_zero_state() -> None:
    for kind in ("sgd", "adam", "adamw", "lion"):
        stacked = StackedOptimizer(
            OptimizerSettings(kind=kind, momentum=0.9 if kind == "sgd" else 0.0), [torch.ones(3, 2)]
        )
        assert stacked.counts == [0, 0, 0] and not any(
            part.any() for part in (*stacked.first, *stacked.second)
        )
        assert (len(stacked.first), len(stacked.second)) == (1, int(kind in ("adam", "adamw")))


SETTINGS = [
    OptimizerSettings(),
    OptimizerSettings(momentum=0.9, nesterov=True),
    OptimizerSettings(momentum=0.5, weight_decay=0.1),
    OptimizerSettings("adam"),
    OptimizerSettings("adamw", weight_decay=0.1),
    OptimizerSettings("lion", weight_decay=0.1),
]


def gradient(step: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float64).view(2, 3) + step


def stepped(settings: OptimizerSettings, steps: int = 3) -> tuple[torch.Tensor, LocalOptimizer]:
    """Make steps of an optimizer on three parameters; return the parameters and the optimizer.

    The parameters start at 1. The gradients are [3, 4, 5] in the first step, [4, 5, 6] in the
    second, and so on.
    """
    single, row = LocalOptimizer(settings), torch.ones(3, dtype=torch.float64)
    for step in range(steps):
        single.step([row], [gradient(step)[1]], 0.1)
    return row, single


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_optimizer_of_several_lanes_equals_one_optimizer_per_client(
    settings: OptimizerSettings,
) -> None:
    whole = torch.ones(2, 3, dtype=torch.float64)
    stacked = StackedOptimizer(settings, [whole])
    stacked.step_rows([0], [whole], [gradient(7)], 0.1)  # the second row has no client yet
    stacked.restart(1, {})
    whole[1] = 1.0
    for step in range(3):
        stacked.step_rows([0, 1], [whole], [gradient(step)], 0.1)
    row, single = stepped(settings)
    torch.testing.assert_close(whole[1], row, rtol=1e-12, atol=1e-12)
    assert stacked.counts == [4, 3] and stacked.row(1).steps == single.steps
    for saved, expected in zip(stacked.row(1).save().values(), single.save().values(), strict=True):
        torch.testing.assert_close(saved, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_optimizer_for_recorded_steps_equals_the_ordinary_optimizer(
    settings: OptimizerSettings,
) -> None:
    row, rate = torch.ones(3, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    recorded = RecordedOptimizer(settings, [row])
    recorded.step([row], [gradient(7)[1]], rate)
    places = [buffer.data_ptr() for buffer in (*recorded.first, *recorded.second)]
    recorded.restart({})
    row.fill_(1.0)
    for step in range(3):
        recorded.step([row], [gradient(step)[1]], rate)
    expected, _ = stepped(settings)
    torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-12)
    assert recorded.steps == 0, "a replay runs no Python, so the caller counts"
    assert places == [buffer.data_ptr() for buffer in (*recorded.first, *recorded.second)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_restored_optimizer_makes_the_same_step_as_the_saved_one(
    settings: OptimizerSettings,
) -> None:
    row, single = stepped(settings)
    saved, whole = single.save(), torch.stack([row, row])
    stacked, recorded = StackedOptimizer(settings, [whole]), RecordedOptimizer(settings, [row])
    stacked.restart(1, saved)
    recorded.restart(saved)
    alone = row.clone()
    stacked.step_rows([1], [whole], [gradient(5)], 0.1)
    single.step([alone], [gradient(5)[1]], 0.1)
    recorded.step([row], [gradient(5)[1]], 0.1)
    torch.testing.assert_close(whole[1], alone, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(row, alone, rtol=1e-12, atol=1e-12)
    assert stacked.counts[1] == single.steps == recorded.steps + 1
