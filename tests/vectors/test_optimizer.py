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
