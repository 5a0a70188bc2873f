"""The local optimiser's settings: what is taken and what is refused. Its steps are tested in training/test_step.py."""

from __future__ import annotations

import pytest

from raysim.vectors.optimizer import Optimizer


@pytest.mark.parametrize("key", ["momentum", "weight_decay"])
def test_a_setting_of_zero_is_taken_and_one_below_is_refused(key: str) -> None:
    Optimizer(**{key: 0.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"local\.{key}=-0\.01 must be at least 0"):
        Optimizer(**{key: -0.01})  # type: ignore[arg-type]
