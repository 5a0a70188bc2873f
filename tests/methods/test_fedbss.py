"""FedBSS: what its ranking pass costs and what it warns of; its training is held against tests/textbook/fedbss.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_runs import LOCAL, setup, taking_part

from raysim.methods.fedbss import FedBSS


def charged(method: FedBSS, version: int) -> float:
    return method.cost(taking_part(None, 30, 60.0, 1, version)).samples


def test_a_forward_pass_over_all_samples_is_charged_from_the_first_selecting_version_on() -> None:
    assert [charged(FedBSS(2), version) for version in range(4)] == pytest.approx([0, 0, 10, 10])
    assert charged(FedBSS(0, kind="all"), 5) == 0


@pytest.mark.parametrize(
    ("kind", "change", "warns"),
    [
        ("cosine", {"epochs": 1}, "local.epochs=1"),
        ("linear", {"epochs": None, "steps": 9, "phases": 1}, "local.phases=1"),
        ("cosine", {"epochs": None, "steps": 1, "phases": 5}, "local.phases=1"),
        ("cosine", {"epochs": 2}, None),
        ("cosine", {"epochs": None, "steps": 2, "phases": 5}, None),
        ("filter", {"epochs": 1}, None),
    ],
)
def test_a_single_epoch_or_phase_is_warned_of(kind: Any, change: dict[str, Any], warns: str | None) -> None:
    nothing: Any = None
    found = FedBSS(kind=kind).check(setup(nothing, replace(LOCAL, **change), {}))
    assert len(found) == (warns is not None)
    assert warns is None or warns in found[0]


@pytest.mark.parametrize("settings", [{"warmup_rounds": -1}, {"refresh": 0}, {"kind": "cosin"}], ids=str)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedbss\.{key}="):
        FedBSS(**settings)
