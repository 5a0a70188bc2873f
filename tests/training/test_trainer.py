"""How a trainer gathers data: small jobs and several batches at once, in chunks, augmented on named streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import EMPTY_STATE, LOCAL, ROUNDS, SEED, equal_clients, run, run_spec
from torch import Tensor

from raysim.api.context import Outputs
from raysim.api.local_job import LocalJob
from raysim.api.messages import Job
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.methods.fedprox import FedProx
from raysim.primitives.streams import stream
from raysim.training import trainer as module
from raysim.training.trainer import Trainer
from raysim.training.worker import Worker

ROW = 64  # floats of an image
FLIPPED = replace(equal_clients(), pipeline=replace(equal_clients().pipeline, augment=("flip",)))
JOBS = [
    Job(number=10 + client, client=client, participation=3, version=0, state=-1, weight=1.0)
    for client in range(4)
]


class Watched:
    """A trainer that goes through a client's samples once, and the rows and inputs that it gathers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **study: Any):
        self.trainer: Trainer = Worker(
            run_spec(local=replace(LOCAL, epochs=1, batch=8), **study)
        ).trainer
        self.samples = len(self.trainer.partition.rows(0))
        self.gathered: list[tuple[np.ndarray, Tensor]] = []
        original = self.trainer.gather

        def gather(
            rows: np.ndarray, generator: np.random.Generator | None = None
        ) -> tuple[Tensor, Tensor]:
            inputs, labels = original(rows, generator)
            self.gathered.append((rows, inputs.clone()))
            return inputs, labels

        monkeypatch.setattr(self.trainer, "gather", gather)

    def sizes(self, job: Job) -> list[int]:
        """Train; how many rows were gathered at once."""
        self.gathered.clear()
        vector = self.trainer.vector
        self.trainer.train(job, vector.shared.clone(), vector.counters.clone(), {}, EMPTY_STATE)
        return [len(rows) for rows, _ in self.gathered]


def test_as_many_small_jobs_are_prepared_as_fit_into_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, data=equal_clients())
    monkeypatch.setattr(module, "_CHUNK", 2 * watched.samples * ROW)
    watched.trainer.look_ahead(JOBS)
    assert [watched.trainer.prepared(job) for job in JOBS] == [True, True, False, False]
    assert [len(rows) for rows, _ in watched.gathered] == [2 * watched.samples]
    assert watched.sizes(JOBS[0]) == [] and watched.sizes(JOBS[2]) == [watched.samples]


def test_batches_are_gathered_as_many_at_once_as_fit_into_a_chunk_and_one_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, data=equal_clients())
    assert watched.sizes(JOBS[0]) == [watched.samples]
    monkeypatch.setattr(module, "_CHUNK", 16 * ROW)
    assert watched.sizes(JOBS[0])[0] == 16
    monkeypatch.setattr(module, "_CHUNK", 1)
    assert watched.sizes(JOBS[0])[:2] == [8, 8] and sum(watched.sizes(JOBS[0])) == watched.samples


def test_a_clients_own_samples_come_in_order_in_batches_that_fit_into_a_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, data=equal_clients())
    monkeypatch.setattr(module, "_CHUNK", 10 * ROW)
    sizes = [len(labels) for _, labels in watched.trainer.client_samples(1)]
    assert sizes[:2] == [10, 10] and max(sizes) == 10
    assert np.array_equal(
        np.concatenate([rows for rows, _ in watched.gathered]), watched.trainer.partition.rows(1)
    )


def test_a_participation_is_augmented_on_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, data=FLIPPED)
    watched.trainer.look_ahead(JOBS)
    assert not watched.trainer.prepared(JOBS[2]), "an augmentation needs to see the job first"
    assert watched.sizes(JOBS[2]) == [watched.samples]
    ((rows, inputs),) = watched.gathered
    own, pixels = watched.trainer.pipeline, watched.trainer.inputs[rows]
    assert torch.equal(
        inputs, own.normalise(own.augment_images(pixels, stream(SEED, "augment", 2, 3)))
    )
    assert not torch.equal(inputs, own.normalise(pixels))


def test_a_last_batch_of_one_sample_is_dropped_where_asked_and_never_the_only_one() -> None:
    order = np.arange(5)
    assert [part.tolist() for part in module._cut(order, 4, True)] == [[0, 1, 2, 3]]
    assert [part.tolist() for part in module._cut(order, 4, False)] == [[0, 1, 2, 3], [4]]
    assert [part.tolist() for part in module._cut(order[:1], 4, True)] == [[0]]


def test_usual_are_full_batches_and_the_rest_that_most_clients_have() -> None:
    assert module._usual_sizes(np.array([23, 23, 13, 8, 0]), 10) == {10, 3}
    assert module._usual_sizes(np.array([23, 24, 25, 20]), 10) == {10}, "no rest is that of most"
    assert module._usual_sizes(np.array([20, 30, 20, 24]), 10) == {10}, "most have none"


class Continuing(Method):
    """Keep a client's optimizer."""

    name = "continuing"

    def setup(self, run: Setup) -> None:
        run.keep_optimizer()


@pytest.mark.parametrize("by_setting", [True, False])
@pytest.mark.parametrize("by_method", [True, False])
def test_optimizer_is_kept_once_whoever_asks(by_setting: bool, by_method: bool) -> None:
    methods = [FedProx(0.1), Continuing()] if by_method else [FedProx(0.1)]
    spec = run_spec(*methods, local=replace(LOCAL, keep_optimizer=by_setting))
    assert Worker(spec).trainer.keeps == (by_setting or by_method)


class Compared(Method):
    """Add a term that the received head computes from the features in training."""

    name = "compared"
    paper = "a test"

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        head = job.frozen()["model"].get_submodule("head")
        term: Tensor = head(out.features).square().mean()
        return loss + term


def test_gradients_pass_through_frozen_networks() -> None:
    trainer = Worker(run_spec(Compared(), local=LOCAL)).trainer
    vector = trainer.vector
    for job in JOBS[:2]:
        outcome = trainer.train(
            job, vector.shared.clone(), vector.counters.clone(), {}, EMPTY_STATE
        )
        assert outcome is not None


class Starting(Method):
    """Set the private head to zero before each job, and count the steps that see it frozen so."""

    name = "starting"
    paper = "none"
    steps = 0

    def setup(self, run: Setup) -> None:
        run.private_parameters(["model.head.weight", "model.head.bias"])

    def begin(self, job: LocalJob) -> None:
        with torch.no_grad():
            for value in job.model.head.parameters():
                value.zero_()

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        frozen = job.frozen()["model"].get_submodule("head")
        assert not any(bool(value.any()) for value in frozen.parameters())
        self.steps += 1
        return loss


def test_frozen_networks_have_the_private_part_of_begin() -> None:
    method = Starting()
    assert not run(run_spec(method), ROUNDS, rounds=2).failures
    assert method.steps


def test_a_chunk_is_a_million_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, data=equal_clients(1, 30_000))
    watched.trainer.local = replace(watched.trainer.local, batch=1000)
    assert watched.sizes(JOBS[0]) == [16_000, 8_000], "of 64 floats each"
