"""Test the example in docs/extending.md of a method that keeps client state.

Also test the client states that the result of a run has.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import NormedMlp

import raysim
from raysim.api.method import Method
from raysim.conformance import checks
from raysim.methods.fedbn import FedBN
from raysim.methods.scaffold import Scaffold
from raysim.primitives.errors import RefusedError

TEXT = (
    (Path(__file__).parents[2] / "docs" / "extending.md")
    .read_text()
    .partition("## A method with client state")[2]
)
NAMES: dict[str, Any] = {"__name__": __name__}
exec(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0], NAMES)
Steady: Any = NAMES["Steady"]
FEW: dict[str, Any] = {
    "runtime": "inprocess",
    "tracking": "none",
    "quiet": True,
    "rounds": 3,
    "out": "a",
}
FEW |= {"checkpoint": {"every": 1}}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ran(*methods: Method, **given: Any) -> raysim.Result:
    return raysim.run(methods=methods, **(FEW | given))


@pytest.mark.parametrize("check", checks(Steady(mu=0.5)), ids=str)
def test_example_method_with_client_state_passes_checks(check: Any) -> None:
    check()


def test_example_method_with_client_state_changes_the_model() -> None:
    result, free = ran(Steady(mu=0.5)), ran(Steady(mu=0.0), out="b")
    assert (
        free.summary["model_sha256"]
        == ran(out="c").summary["model_sha256"]
        != result.summary["model_sha256"]
    )
    assert (result.history["steady.moved"] > 0).all()


def test_result_returns_client_states_with_tensors_of_methods_and_model() -> None:
    result = ran(Steady(), Scaffold(), FedBN(), model=NormedMlp(), rounds=1)
    by_participation: dict[bool, list[dict[str, np.ndarray]]] = {True: [], False: []}
    for client in range(20):
        kept = result.client_state(client)
        by_participation[bool(kept["steady.known"])].append(kept)
    trained, idle = by_participation[True], by_participation[False]
    assert len(trained) == len(idle) == 10
    names = {"steady.last", "steady.known", "scaffold.control"}
    assert all(
        names < kept.keys() and any(key.startswith("model.") for key in kept)
        for kept in [*trained, *idle]
    )
    assert all(kept["scaffold.control"].any() for kept in trained)
    assert not any(kept["scaffold.control"].any() for kept in idle)
    with pytest.raises(RefusedError, match="client 20 does not exist"):
        result.client_state(20)


def test_client_state_cannot_be_read_from_a_run_without_checkpoints() -> None:
    assert ran().client_state(0) == {}
    with pytest.raises(RefusedError, match=r"checkpoint\.every"):
        ran(Scaffold(), out="b", checkpoint={"every": 0}).client_state(0)
