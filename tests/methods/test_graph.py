"""An iteration recorded once and replayed: what is replayed is what would be computed, for every method.

On a CPU a tape takes the place of a CUDA graph. Like a graph it knows nothing but the operations that were recorded,
and reads nothing but tensors that stay where they are: a Python number that should have been a tensor gives other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_conformance import EPOCHS, TABLE
from test_lanes import Dropping
from tiny_runs import BUFFER, NORMED_MLP, Ran, coordinate, ran, run, run_spec, several
from torch import Tensor, float64

from raysim.api.declarations import Local
from raysim.methods.mixup import Mixup
from raysim.training import graph
from raysim.training.run_spec import RunSpec

NEAR = 1e-8  # in float64, of the loop: a rate that is a tensor is multiplied with a rounding of its own
DRAWING = "fedsr"
SOME = ("scaffold", "groupdro", "dann", "fedmix", "fedpac", "moon", "fedbss", "local")


def study(name: str, **others: Any) -> RunSpec:
    row = TABLE.get(name)
    others = {"model": row.model if row else NORMED_MLP, "local": EPOCHS, "lanes": 3, "graph": True} | others
    return run_spec(*([row.make()] if row else []), **others)


def computed(compute: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Records nothing."""
    return compute


def recorded(found: Ran) -> int:
    """How many recordings the host has."""
    return len(found.coordinator.runtime.members[0].loop.graphs)  # type: ignore[attr-defined]


def assert_near(found: Ran, expected: Ran) -> None:
    assert not found.failures, found.failures[0].error
    for one, other in ((expected.tensors, found.tensors), (expected.private, found.private)):
        for name, values in one.items():
            np.testing.assert_allclose(other[name], values, rtol=NEAR, atol=NEAR, err_msg=name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in SOME else pytest.mark.slow)
        for name in ("fedavg", *TABLE)
        if name != DRAWING
    ],
)
def test_what_is_replayed_is_what_would_be_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tapes: list[graph.Tape] = []

    def noted(*args: Any) -> graph.Tape:
        tapes.append(tape(*args))
        return tapes[-1]

    tape = graph.Tape
    monkeypatch.setattr(graph, "Tape", noted)
    replayed = run(study(name), rounds=3)
    assert 0 < len(tapes) <= recorded(replayed) <= 32, "few kinds of iterations, whatever the number of rounds"
    monkeypatch.setattr(graph, "taped", computed)
    assert run(study(name), rounds=3).bits == replayed.bits
    assert_near(
        run(study(name, dtype=float64), rounds=2), run(study(name, dtype=float64, lanes=1, graph=False), rounds=2)
    )


@pytest.mark.parametrize(
    "local",
    [
        Local(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, batch=8, epochs=2, lr_decay=0.7),
        Local(lr=0.01, optimizer="adam", batch=8, epochs=2, lr_decay=0.7),
        Local(lr=0.05, momentum=0.5, clip=0.1, batch=8, epochs=1),
        Local(lr=0.05, batch=8, epochs=None, steps=7, sampling="replacement"),
    ],
    ids=["nesterov", "adam", "clipped", "steps"],
)
@pytest.mark.parametrize("lanes", [1, 3])
def test_rates_and_counts_of_steps_are_no_part_of_a_recording(local: Local, lanes: int) -> None:
    asked = study("fedavg", local=local, dtype=float64, lanes=lanes)
    found = run(asked, rounds=4)
    assert_near(found, run(replace(asked, lanes=1, graph=False), rounds=4))
    assert 1 <= recorded(found) <= 4, "one for each size of a batch, whatever the rate"


@pytest.mark.parametrize("name", ["scaffold", pytest.param("fraug", marks=pytest.mark.slow)])
def test_replayed_runs_end_alike_on_one_host_and_on_two(name: str) -> None:
    here = run(study(name), BUFFER, rounds=5)
    there = ran(coordinate(study(name), BUFFER, runtime=several(study(name), 2), rounds=5))
    assert (there.bits, there.history) == (here.bits, here.history)


def test_a_model_that_draws_in_its_steps_is_not_recorded() -> None:
    with pytest.raises(ValueError, match=r"runtime.graph=true: the model draws .*set runtime.graph=false"):
        run(study("fedavg", model=Dropping()), rounds=1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SOME[:3] else pytest.mark.slow) for name in ("fedavg", *TABLE)],
)
def test_products_in_bfloat16_train_a_vector_of_float32(name: str) -> None:
    ways = [{"lanes": 1, "graph": False}, {"lanes": 3, "graph": False}, {"lanes": 3, "graph": name != DRAWING}]
    coarse = [run(study(name, precision="bfloat16", **way), rounds=2) for way in ways]
    fine = run(study(name, lanes=1, graph=False), rounds=2)
    for found in coarse:
        assert not found.failures, found.failures[0].error
        assert found.bits != fine.bits
        for key, values in found.tensors.items():
            assert values.dtype == fine.tensors[key].dtype and np.isfinite(values).all()


def test_a_hook_sees_the_same_in_bfloat16() -> None:
    assert not run(run_spec(Mixup(), precision="bfloat16"), rounds=1).failures
