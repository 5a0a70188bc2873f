"""Test how the trainer gathers data, keeps optimizers between jobs, and loads frozen networks."""

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
from raysim.training import client_data
from raysim.training.batch_plan import cut_batches, usual_batch_sizes
from raysim.training.trainer import Trainer
from raysim.training.worker import Worker

ROW = 64  # floats of an image
FLIPPED = replace(equal_clients(), pipeline=replace(equal_clients().pipeline, augment=("flip",)))
JOBS = [
    Job(number=10 + client, client=client, participation=3, version=0, state=-1, weight=1.0)
    for client in range(4)
]


class GatherLog:
    """A trainer of a tiny run, with a log of the samples that it reads from its data.

    Each call of `trainer.data.gather` adds a pair to `gathered`: the positions and the inputs of
    the samples.
    options: arguments of `tiny_runs.run_spec`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any):
        spec = run_spec(local=replace(LOCAL, epochs=1, batch=8), **options)
        self.trainer: Trainer = Worker(spec).trainer
        self.samples = len(self.trainer.partition.rows(0))
        self.gathered: list[tuple[np.ndarray, Tensor]] = []
        original = self.trainer.data.gather

        def gather(
            rows: np.ndarray, generator: np.random.Generator | None = None
        ) -> tuple[Tensor, Tensor]:
            inputs, labels = original(rows, generator)
            self.gathered.append((rows, inputs.clone()))
            return inputs, labels

        monkeypatch.setattr(self.trainer.data, "gather", gather)

    def train(self, job: Job) -> list[int]:
        """Train a job; return the number of rows in each call of `gather`."""
        self.gathered.clear()
        vector = self.trainer.vector
        self.trainer.train(job, vector.shared.clone(), vector.counters.clone(), {}, EMPTY_STATE)
        return [len(rows) for rows, _ in self.gathered]


class TestChunks:
    def test_batches_of_several_small_jobs_are_gathered_together(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = GatherLog(monkeypatch, data=equal_clients())
        monkeypatch.setattr(client_data, "CHUNK_FLOATS", 2 * log.samples * ROW)
        prepared = log.trainer.prepared
        prepared.prepare(JOBS)
        assert [prepared.has(job) for job in JOBS] == [True, True, False, False]
        assert [len(rows) for rows, _ in log.gathered] == [2 * log.samples]
        assert log.train(JOBS[0]) == [] and log.train(JOBS[2]) == [log.samples]

    def test_batches_of_a_job_are_gathered_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = GatherLog(monkeypatch, data=equal_clients())
        assert log.train(JOBS[0]) == [log.samples]
        monkeypatch.setattr(client_data, "CHUNK_FLOATS", 16 * ROW)
        assert log.train(JOBS[0])[0] == 16
        monkeypatch.setattr(client_data, "CHUNK_FLOATS", 1)
        sizes = log.train(JOBS[0])
        assert sizes[:2] == [8, 8] and sum(sizes) == log.samples

    def test_client_samples_are_gathered_in_order_of_the_partition(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = GatherLog(monkeypatch, data=equal_clients())
        monkeypatch.setattr(client_data, "CHUNK_FLOATS", 10 * ROW)
        sizes = [len(labels) for _, labels in log.trainer.client_samples(1)]
        assert sizes[:2] == [10, 10] and max(sizes) == 10
        rows = np.concatenate([rows for rows, _ in log.gathered])
        assert np.array_equal(rows, log.trainer.partition.rows(1))

    def test_augmentation_of_each_job_has_a_separate_random_stream(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = GatherLog(monkeypatch, data=FLIPPED)
        log.trainer.prepared.prepare(JOBS)
        assert not log.trainer.prepared.has(JOBS[2]), "an augmentation needs to see the job first"
        assert log.train(JOBS[2]) == [log.samples]
        ((rows, inputs),) = log.gathered
        pipeline, pixels = log.trainer.data.pipeline, log.trainer.data.inputs[rows]
        augmented = pipeline.augment_images(pixels, stream(SEED, "augment", 2, 3))
        assert torch.equal(inputs, pipeline.normalise(augmented))
        assert not torch.equal(inputs, pipeline.normalise(pixels))

    def test_large_job_gathers_batches_in_parts_of_a_million_floats(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = GatherLog(monkeypatch, data=equal_clients(1, 30_000))
        log.trainer.planner.local = replace(log.trainer.local, batch=1000)
        assert log.train(JOBS[0]) == [16_000, 8_000], "of 64 floats each"


def test_last_batch_of_one_sample_can_be_dropped() -> None:
    order = np.arange(5)
    assert [part.tolist() for part in cut_batches(order, 4, True)] == [[0, 1, 2, 3]]
    assert [part.tolist() for part in cut_batches(order, 4, False)] == [[0, 1, 2, 3], [4]]
    assert [part.tolist() for part in cut_batches(order[:1], 4, True)] == [[0]], "the only batch"


def test_usual_batch_sizes_include_a_last_batch_only_if_most_clients_have_its_size() -> None:
    assert usual_batch_sizes(np.array([23, 23, 13, 8, 0]), 10) == {10, 3}
    assert usual_batch_sizes(np.array([23, 24, 25, 20]), 10) == {10}, "no rest is that of most"
    assert usual_batch_sizes(np.array([20, 30, 20, 24]), 10) == {10}, "most have none"


class Continuing(Method):
    """A method that keeps a client's optimizer buffers from one job to the client's next job."""

    name = "continuing"

    def setup(self, run: Setup) -> None:
        run.keep_optimizer()


@pytest.mark.parametrize("by_setting", [True, False])
@pytest.mark.parametrize("by_method", [True, False])
def test_optimizer_state_is_kept_between_jobs_if_requested(
    by_setting: bool, by_method: bool
) -> None:
    methods = [FedProx(0.1), Continuing()] if by_method else [FedProx(0.1)]
    spec = run_spec(*methods, local=replace(LOCAL, keep_optimizer=by_setting))
    assert Worker(spec).trainer.keeps_optimizer == (by_setting or by_method)


class Compared(Method):
    """A method with a further loss term: the mean square of the received head's outputs.

    The frozen head of the received model gets the features that the trained model computes.
    """

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
    """A method with a personal head, which it sets to zero at the start of each job.

    Each step asserts that the head is also zero in `job.frozen()`, a copy of the model from which
    the job started.
    """

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


def test_frozen_model_contains_personal_tensors_that_the_begin_hook_has_set() -> None:
    method = Starting()
    assert not run(run_spec(method), ROUNDS, rounds=2).failures
    assert method.steps
