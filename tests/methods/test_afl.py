"""Test the weights of AFL's updates at the borders of the simplex."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysim.methods.afl import AFL


@pytest.mark.parametrize(
    ("learnt", "expected"),
    [
        ([0.0, 0.0], [3.0, 5.0]),  # no client of the cohort has a weight
        ([1.0, 0.0], [3.0, 0.0]),
        ([0.25, 0.5], [1.5, 5.0]),
    ],
)
def test_afl_multiplies_client_weights_by_learnt_weights_unless_all_learnt_weights_are_zero(
    learnt: list[float], expected: list[float]
) -> None:
    given: Any = SimpleNamespace(clients=[0, 1], weights=[3.0, 5.0])
    given.with_weights = lambda weights: SimpleNamespace(weights=weights)
    server: Any = SimpleNamespace(state={"weights": torch.tensor(learnt)})
    assert AFL().weigh(given, server).weights == expected
