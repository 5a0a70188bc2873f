"""Ditto: the shared model knows nothing of the personal ones; where these end is `textbook/ditto.py`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_perturb import Dropping
from tiny_runs import BUFFER, LOCAL, NORMED, NORMED_MLP, ROUNDS, Spy, coordinate, ran, run, run_spec, same

from raysim.api.method import Method
from raysim.methods.ditto import Ditto
from raysim.methods.fedbn import FedBN
from raysim.methods.fedprox import FedProx
from raysim.methods.scaffold import Scaffold
from raysim.simulation.fleet import Ideal


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
@pytest.mark.parametrize("model", [NORMED, Dropping()], ids=["BatchNorm", "dropout"])
@pytest.mark.parametrize("others", [(), (FedProx(0.1), Scaffold())], ids=["alone", "with fedprox and scaffold"])
def test_the_shared_model_is_that_of_the_other_methods_bit_for_bit(
    others: tuple[Method, ...], model: Any, schedule: Any
) -> None:
    # On ideal devices: elsewhere the personal model's steps change when clients arrive, and so the order of the sum.
    found = run(run_spec(*others, Ditto(), model=model), schedule, Ideal(), rounds=4)
    plain = run(run_spec(*others, model=model), schedule, Ideal(), rounds=4)
    assert found.finished.model_sha256 == plain.finished.model_sha256 and same(found.tensors, plain.tensors)
    for row, reference in zip(found.rows, plain.rows, strict=True):
        assert row["accuracy_shared"] == reference["accuracy"]
        for key in ("train_loss", "accuracy_global", "loss_global", "floats_down", "floats_up"):
            assert row[key] == reference[key], key


def personal(*methods: Method, **others: Any) -> dict[str, np.ndarray]:
    return run(run_spec(*methods, model=NORMED_MLP, **others), rounds=4).private


def test_without_a_pull_a_personal_model_is_trained_by_its_client_alone() -> None:
    free, beside = personal(Ditto(0.0)), personal(Ditto(0.0), FedProx(10.0))
    assert any("/ditto.model." in name for name in free)
    assert same(free, beside), "whatever becomes of the shared model"
    assert not same(personal(Ditto()), personal(Ditto(), FedProx(10.0)))


def test_a_strong_pull_keeps_the_personal_model_at_the_shared_one() -> None:
    def distance(lam: float) -> float:
        found = run(run_spec(Ditto(lam), model=NORMED_MLP, local=replace(LOCAL, batch=8)), rounds=4)
        size = found.coordinator.layout.trained  # of the shared model; its copy begins each personal part
        shared = found.coordinator.server.vector.numpy()[:size]
        models = [state.personal[:size] for _, state in found.coordinator.private.accepted()]
        return float(np.mean([np.linalg.norm(model - shared) for model in models]))

    assert distance(10.0) < 0.5 * distance(0.0)


def test_nothing_of_a_personal_model_travels() -> None:
    spied = run_spec(Ditto(), model=NORMED_MLP)
    spy, plain = Spy(spied), run_spec(model=NORMED_MLP)
    shared = ran(coordinate(spied, runtime=spy)).coordinator.layout.shared
    assert shared == coordinate(plain).layout.shared
    assert all(not update.extras for update in spy.updates)
    assert all(published.vector.size == shared and not published.extras for _, published in spy.sent)


def test_beside_fedbn_personal_layers_of_the_shared_model_are_not_pulled_to() -> None:
    found = run(run_spec(FedBN(), Ditto(), model=NORMED_MLP))
    plain = run(run_spec(FedBN(), model=NORMED_MLP), fleet=Ideal())
    assert not found.failures
    assert run(run_spec(FedBN(), Ditto(), model=NORMED_MLP), fleet=Ideal()).tensors.keys() == plain.tensors.keys()


@pytest.mark.parametrize("settings", [{"lam": -1.0}, {"lr_factor": 0.0}], ids=str)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"ditto\.{next(iter(settings))}"):
        Ditto(**settings)


@pytest.mark.parametrize(("batch", "sizes"), [(1, [1] * 5), (2, [2, 2, 2, 2, 2]), (3, [3, 2, 3, 2, 3]), (9, [5] * 5)])
def test_personal_batches_go_through_all_samples_before_any_comes_again(batch: int, sizes: list[int]) -> None:
    rows = np.array([3, 5, 8, 11, 12])
    trainer = SimpleNamespace(
        partition=SimpleNamespace(rows=lambda client: rows),
        local=SimpleNamespace(batch=batch),
        gather=lambda chosen, augment: chosen.tolist(),
    )
    ctx: Any = SimpleNamespace(
        plan=SimpleNamespace(steps=5), client=0, trainer=trainer, stream=lambda name: np.random.default_rng(1)
    )
    found: list[Any] = list(Ditto()._batches(ctx))
    assert [len(each) for each in found] == sizes
    if batch == 1:
        assert sorted(row for each in found for row in each) == rows.tolist()
        assert found[0] != [3], "shuffled from the first one on"
