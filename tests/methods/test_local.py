"""Test local training: clients send nothing, are independent, and may keep their optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    BUFFER,
    MLP,
    NORMED,
    ROUNDS,
    Spy,
    coordinate,
    run,
    run_spec,
    run_to_end,
    same_arrays,
    tiny_data,
)
from torch import Tensor

from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.data.federated import FederatedData
from raysim.data.partition import CSR, Partition
from raysim.methods.dann import Dann
from raysim.methods.local import LocalTraining
from raysim.models import ModelRecipe
from raysim.simulation.schedule import Buffered, Synchronous


def population(*clients: int) -> FederatedData:
    """Return federated data with some of the clients of `tiny_data`.

    All clients have the same ten test samples.
    clients: the numbers of the clients in `tiny_data`. In the result they are numbered from 0.
    """
    rows = [tiny_data().partition.train.rows(client) for client in clients]
    train = CSR(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))
    tests = tiny_data().central[:10]
    test = CSR(np.tile(tests, len(rows)), np.arange(len(rows) + 1) * 10)
    return replace(tiny_data(), partition=Partition(train, test), central=np.empty(0, np.int64))


class Watch(Method):
    """A method that stores the parameters and BatchNorm's counters at the end of each job."""

    name = "watch"
    paper = "a test"

    def __init__(self) -> None:
        self.ended: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def end(self, job: LocalJob) -> None:
        ended = job.params.clone(), job.vector.counters.clone()
        self.ended[job.client, job.participation] = ended

    def results_of(self, client: int) -> list[tuple[Tensor, Tensor]]:
        """Return the client's parameters and integer buffers at the end of each of its jobs."""
        return [
            ended
            for (who, _), ended in sorted(self.ended.items(), key=lambda item: item[0])
            if who == client
        ]


# --- nothing travels --------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True], ids=["fresh optimisers", "kept optimisers"])
@pytest.mark.parametrize("model", [MLP, NORMED], ids=["mlp", "cnn with BatchNorm"])
@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_local_training_sends_nothing_in_either_direction(
    schedule: Any, model: ModelRecipe, keep: bool
) -> None:
    study = run_spec(LocalTraining(keep), model=model)
    spy = Spy(study)
    ended_run = run_to_end(coordinate(study, schedule, runtime=spy, rounds=4))
    assert all(row["floats_down"] == 0 == row["floats_up"] for row in ended_run.rows)
    assert all(published.floats == 0 == published.counters.size for _, published in spy.sent)
    assert all(update.counters.size == 0 == update.floats for update in spy.updates)
    assert all(update.delta is None or update.delta.size == 0 for update in spy.updates)
    layout = ended_run.coordinator.layout
    assert layout.shared == 0 == layout.shared_counters and layout.personal == layout.total > 0
    assert (
        ended_run.rows[-1]["accuracy"] is not None and ended_run.rows[-1]["accuracy_global"] is None
    )


# --- clients are independent -----------------------------------------------------------------

# Clients 0 and 2 have the same data everywhere, client 1 never the same as in a population of (0,
# 1, 2).
POPULATIONS: dict[str, tuple[Sequence[int], Any, int]] = {
    "other data": ((0, 5, 2), Synchronous(2), 4),
    "more clients": ((0, 3, 2, 1, 4), Synchronous(4), 4),
    "a buffer": ((0, 4, 2, 1), Buffered(concurrency=3, size=2), 14),
}


@pytest.mark.parametrize("keep", [False, True], ids=["fresh optimisers", "kept optimisers"])
@pytest.mark.parametrize("name", POPULATIONS)
def test_locally_trained_model_depends_only_on_data_and_jobs_of_its_client(
    name: str, keep: bool
) -> None:
    def trained(clients: Sequence[int], schedule: Any, rounds: int) -> Watch:
        watch = Watch()
        run(
            run_spec(LocalTraining(keep), watch, model=NORMED, data=population(*clients)),
            schedule,
            rounds=rounds,
        )
        return watch

    alone, other = trained((0, 1, 2), Synchronous(3), 3), trained(*POPULATIONS[name])
    for client in (0, 2):
        first_run, second_run = alone.results_of(client), other.results_of(client)
        common = min(len(first_run), len(second_run))
        assert common > 1
        for one, two in zip(first_run[:common], second_run[:common], strict=True):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])
        assert not torch.equal(first_run[0][0], first_run[1][0])
    assert not torch.equal(alone.results_of(1)[0][0], other.results_of(1)[0][0])


def test_local_models_start_from_the_same_initial_model() -> None:
    class Look(Method):
        name, paper = "look", "a test"

        def begin(self, job: LocalJob) -> None:
            if job.participation == 0:
                first.append((job.client, job.params.clone()))

    first: list[tuple[int, Tensor]] = []
    finished = run(run_spec(LocalTraining(), Look()), ROUNDS, rounds=4)
    assert {client for client, _ in first} == set(range(6))
    assert all(torch.equal(start, finished.coordinator.initial.data) for _, start in first)


# --- optimisers -------------------------------------------------------------------------------


def test_stored_optimizers_are_separate_for_each_stage() -> None:
    # All samples are in one batch, whose order does not matter.
    whole = Local(batch=1000, lr=0.05, momentum=0.9)

    def trained(rounds: int, epochs: int) -> dict[str, np.ndarray]:
        methods, local = [LocalTraining(True), Dann(0.5, width=4)], replace(whole, epochs=epochs)
        return run(run_spec(*methods, local=local), Synchronous(6), rounds=rounds).private

    long, kept = trained(1, 4), trained(2, 2)
    model = ("extractor.1.weight", "extractor.1.bias", "head.weight", "head.bias")
    names = {f"model.{name}" for name in model}
    for leaf in ("weight", "bias"):
        names |= {f"dann.discriminator.{layer}.{leaf}" for layer in (0, 2, 4)}
    for stage in ("task", "dann.discriminate"):
        names |= {f"local.kept.{stage}/{buffer}" for buffer in ("steps", "first")}
    assert {key.partition("/")[2] for key in long} == names
    for key, values in long.items():
        np.testing.assert_allclose(kept[key], values, rtol=0, atol=2e-5, err_msg=key)


def test_setting_keep_optimizer_has_the_same_effect_in_method_local_and_in_group_local() -> None:
    local = Local(lr=0.05, momentum=0.9)
    by_method = run(run_spec(LocalTraining(True), local=local), rounds=3)
    by_setting = run(run_spec(LocalTraining(), local=replace(local, keep_optimizer=True)), rounds=3)
    fresh = run(run_spec(LocalTraining(), local=local), rounds=3)
    assert same_arrays(by_method.private, by_setting.private)
    assert any(
        not np.array_equal(values, by_method.private[key]) for key, values in fresh.private.items()
    )
