"""The local optimiser's settings: what is taken and what is refused. Its steps are tested in training/test_step.py."""

from __future__ import annotations

import pytest
import torch

from raysim.vectors.optimizer import Optimizer, StackedOptimizer


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_a_setting_of_zero_is_taken_and_one_below_is_refused(key: str) -> None:
    Optimizer(**{key: 0.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"local\.{key}=-0\.01 must be at least 0"):
        Optimizer(**{key: -0.01})  # type: ignore[arg-type]


def test_the_optimisers_of_many_clients_start_from_zeros() -> None:
    for kind in ("sgd", "adam"):
        stacked = StackedOptimizer(Optimizer(kind=kind, momentum=0.9 if kind == "sgd" else 0.0), [torch.ones(3, 2)])
        assert stacked.counts == [0, 0, 0] and not any(part.any() for part in (*stacked.first, *stacked.second))
        assert (len(stacked.first), len(stacked.second)) == (1, int(kind == "adam"))


@pytest.mark.parametrize("settings", [Optimizer(), Optimizer(momentum=0.9, nesterov=True), Optimizer("adam")])
def test_rows_that_are_stepped_one_by_one_are_those_that_are_stepped_together(settings: Optimizer) -> None:
    together, apart = torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    whole, parted = StackedOptimizer(settings, [together]), StackedOptimizer(settings, [apart])
    parts = [parted.part(row) for row in range(2)]
    for step in range(3):
        grads = torch.arange(6, dtype=torch.float64).view(2, 3) + step
        whole.step_rows(torch.ones(2, dtype=torch.float64), [together], [grads], 0.1)
        for row, part in enumerate(parts):
            own = slice(row, row + 1)
            part.step_rows(torch.ones(1, dtype=torch.float64), [apart[own]], [grads[own]], 0.1)
    assert torch.equal(apart, together) and not torch.equal(apart, torch.ones(2, 3, dtype=torch.float64))
    assert all(map(torch.equal, [*parted.first, *parted.second], [*whole.first, *whole.second]))
