"""Test the cost of FedBSS's ranking pass, and its warnings and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_runs import LOCAL, participation_facts, run_spec

from raysim.methods.fedbss import FedBSS
from raysim.training.run_spec import declare_run


def charged(method: FedBSS, version: int) -> float:
    return method.cost(participation_facts(None, 30, 60.0, 1, version))


def test_fedbss_adds_the_cost_of_a_ranking_pass_after_the_warmup() -> None:
    assert [charged(FedBSS(2), version) for version in range(4)] == pytest.approx([0, 0, 10, 10])
    assert charged(FedBSS(0, kind="all"), 5) == 0


@pytest.mark.parametrize(
    ("kind", "change", "key"),
    [
        ("cosine", {"epochs": 1}, "local.epochs=1"),
        ("linear", {"epochs": None, "steps": 9, "phases": 1}, "local.phases=1"),
        ("cosine", {"epochs": None, "steps": 1, "phases": 5}, "local.steps=1"),
        ("cosine", {"epochs": 2}, None),
        ("cosine", {"epochs": None, "steps": 2, "phases": 5}, None),
        ("filter", {"epochs": 1}, None),
    ],
)
def test_fedbss_warns_if_jobs_have_only_one_epoch_or_phase_or_step(
    kind: Any, change: dict[str, Any], key: str | None
) -> None:
    spec = run_spec(FedBSS(kind=kind), local=replace(LOCAL, **change))
    warnings = list(declare_run(spec).warnings)
    assert len(warnings) == (key is not None)
    assert key is None or key in warnings[0]


@pytest.mark.parametrize(
    "settings",
    [{"warmup_rounds": -1}, {"refresh": 0}, {"kind": "cosin"}, {"fraction_of": "los"}],
    ids=str,
)
def test_error_of_fedbss_setting_out_of_range_mentions_its_key(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedbss\.{key}="):
        FedBSS(**settings)
