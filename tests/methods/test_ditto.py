"""Test that Ditto's shared model does not depend on the personal ones.

The values of the personal models are compared with `textbook/ditto.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_perturb import Dropping
from tiny_runs import (
    BUFFER,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    Spy,
    coordinate,
    run,
    run_spec,
    run_to_end,
    same_arrays,
)

from raysim.api.method import Method
from raysim.methods.ditto import Ditto
from raysim.methods.fedbn import FedBN
from raysim.methods.fedprox import FedProx
from raysim.methods.scaffold import Scaffold
from raysim.simulation.fleet import Ideal


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
@pytest.mark.parametrize("model", [NORMED, Dropping()], ids=["BatchNorm", "dropout"])
@pytest.mark.parametrize(
    "others", [(), (FedProx(0.1), Scaffold())], ids=["alone", "with fedprox and scaffold"]
)
def test_ditto_does_not_change_the_shared_model(
    others: tuple[Method, ...], model: Any, schedule: Any
) -> None:
    # On ideal devices: elsewhere the personal model's steps change when clients arrive, and so the
    # order of the sum.
    result = run(run_spec(*others, Ditto(), model=model), schedule, Ideal(), rounds=4)
    plain = run(run_spec(*others, model=model), schedule, Ideal(), rounds=4)
    assert result.finished.model_sha256 == plain.finished.model_sha256 and same_arrays(
        result.tensors, plain.tensors
    )
    for row, reference in zip(result.rows, plain.rows, strict=True):
        assert row["accuracy_shared"] == reference["accuracy"]
        for key in ("train_loss", "accuracy_global", "loss_global", "floats_down", "floats_up"):
            assert row[key] == reference[key], key


def test_ditto_sends_no_personal_model() -> None:
    spied = run_spec(Ditto(), model=NORMED_MLP)
    spy, plain = Spy(spied), run_spec(model=NORMED_MLP)
    shared = run_to_end(coordinate(spied, runtime=spy)).coordinator.layout.shared
    assert shared == coordinate(plain).layout.shared
    assert all(not update.extras for update in spy.updates)
    assert all(
        published.vector.size == shared and not published.extras for _, published in spy.sent
    )


def test_ditto_adds_no_tensors_to_the_model_when_fedbn_is_also_used() -> None:
    result = run(run_spec(FedBN(), Ditto(), model=NORMED_MLP))
    plain = run(run_spec(FedBN(), model=NORMED_MLP), fleet=Ideal())
    assert not result.failures
    assert (
        run(run_spec(FedBN(), Ditto(), model=NORMED_MLP), fleet=Ideal()).tensors.keys()
        == plain.tensors.keys()
    )


@pytest.mark.parametrize("settings", [{"lam": -1.0}, {"lr_factor": 0.0}], ids=str)
def test_ditto_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"^method\.ditto\.{key}\b"):
        Ditto(**settings)


@pytest.mark.parametrize(
    ("batch", "sizes"), [(1, [1] * 5), (2, [2] * 5), (3, [3, 2, 3, 2, 3]), (9, [5] * 5)]
)
def test_ditto_uses_every_sample_before_repeating_any(batch: int, sizes: list[int]) -> None:
    rows = np.array([3, 5, 8, 11, 12])
    job: Any = SimpleNamespace(
        plan=SimpleNamespace(steps=5),
        rows=rows,
        local=SimpleNamespace(batch=batch),
        gather=lambda chosen, augment: chosen.tolist(),
        stream=lambda name: np.random.default_rng(1),
    )
    batches: list[Any] = list(Ditto()._batches(job))
    assert [len(chosen) for chosen in batches] == sizes
    if batch == 1:
        assert sorted(row for chosen in batches for row in chosen) == rows.tolist()
        assert batches[0] != [3], "the first pass is shuffled, too"
