"""How a trainer gathers data: small jobs and several batches at once, in chunks, augmented on named streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import LOCAL, NOTHING, ROUNDS, SEED, even, run, run_spec
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Outputs
from raysim.api.hooked_method import HookedMethod
from raysim.api.messages import Job
from raysim.methods.fedprox import FedProx
from raysim.primitives.streams import stream
from raysim.training import trainer as module
from raysim.training.host import Host
from raysim.training.trainer import Trainer

ROW = 64  # floats of an image
FLIPPED = replace(even(), pipeline=replace(even().pipeline, augment=("flip",)))
JOBS = [Job(number=10 + client, client=client, participation=3, version=0, state=-1, weight=1.0) for client in range(4)]


class Watched:
    """A trainer that goes through a client's samples once, and the rows and inputs that it gathers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **study: Any):
        self.trainer: Trainer = Host(run_spec(local=replace(LOCAL, epochs=1, batch=8), **study)).trainer
        self.samples = len(self.trainer.partition.rows(0))
        self.gathered: list[tuple[np.ndarray, Tensor]] = []
        original = self.trainer.gather

        def gather(rows: np.ndarray, generator: np.random.Generator | None = None) -> tuple[Tensor, Tensor]:
            inputs, labels = original(rows, generator)
            self.gathered.append((rows, inputs.clone()))
            return inputs, labels

        monkeypatch.setattr(self.trainer, "gather", gather)

    def sizes(self, job: Job) -> list[int]:
        """Train; how many rows were gathered at once."""
        self.gathered.clear()
        vector = self.trainer.vector
        self.trainer.train(job, vector.shared.clone(), vector.counters.clone(), {}, NOTHING)
        return [len(rows) for rows, _ in self.gathered]


def test_as_many_small_jobs_are_prepared_as_fit_into_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, data=even())
    monkeypatch.setattr(module, "_CHUNK", 2 * watched.samples * ROW)
    watched.trainer.look_ahead(JOBS)
    assert [watched.trainer.prepared(job) for job in JOBS] == [True, True, False, False]
    assert [len(rows) for rows, _ in watched.gathered] == [2 * watched.samples]
    assert watched.sizes(JOBS[0]) == [] and watched.sizes(JOBS[2]) == [watched.samples]


def test_batches_are_gathered_as_many_at_once_as_fit_into_a_chunk_and_one_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, data=even())
    assert watched.sizes(JOBS[0]) == [watched.samples]
    monkeypatch.setattr(module, "_CHUNK", 16 * ROW)
    assert watched.sizes(JOBS[0])[0] == 16
    monkeypatch.setattr(module, "_CHUNK", 1)
    assert watched.sizes(JOBS[0])[:2] == [8, 8] and sum(watched.sizes(JOBS[0])) == watched.samples


def test_a_clients_own_samples_come_in_order_in_batches_that_fit_into_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, data=even())
    monkeypatch.setattr(module, "_CHUNK", 10 * ROW)
    sizes = [len(labels) for _, labels in watched.trainer.own(1)]
    assert sizes[:2] == [10, 10] and max(sizes) == 10
    assert np.array_equal(np.concatenate([rows for rows, _ in watched.gathered]), watched.trainer.partition.rows(1))


def test_a_participation_is_augmented_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, data=FLIPPED)
    watched.trainer.look_ahead(JOBS)
    assert not watched.trainer.prepared(JOBS[2]), "an augmentation needs to see the job first"
    assert watched.sizes(JOBS[2]) == [watched.samples]
    ((rows, inputs),) = watched.gathered
    own, pixels = watched.trainer.pipeline, watched.trainer.inputs[rows]
    assert torch.equal(inputs, own.normalise(own.augmented(pixels, stream(SEED, "augment", 2, 3))))
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


class Kept(FedProx):
    """Keeps its optimisers, as far as it says so."""

    def __init__(self, name: str, keeps: bool):
        super().__init__(0.1)
        self.name, self.keep_optimizer = name, keeps  # type: ignore[misc]


@pytest.mark.parametrize("keeps", [(False, False), (False, True), (True, False)])
def test_the_run_keeps_optimisers_unless_a_method_does(keeps: tuple[bool, bool]) -> None:
    methods = [Kept(f"kept{index}", each) for index, each in enumerate(keeps)]
    trainer = Host(run_spec(*methods, local=replace(LOCAL, keep_optimizer=True))).trainer
    assert trainer.keeps == (not any(keeps))


class Compared(HookedMethod):
    """A term that is computed from the model's features by the head as it was received."""

    name = "compared"
    paper = "a test"

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """See `Method`."""
        head = ctx.frozen("received", None)["model"].get_submodule("head")
        found: Tensor = head(out.features).square().mean()
        return found


def test_gradients_pass_through_frozen_networks() -> None:
    trainer = Host(run_spec(Compared(), local=LOCAL)).trainer
    vector = trainer.vector
    for job in JOBS[:2]:
        outcome = trainer.train(job, vector.shared.clone(), vector.counters.clone(), {}, NOTHING)
        assert outcome is not None


class Starting(HookedMethod):
    """Its own head starts from zero at every participation; notes the head of the frozen model."""

    name = "starting"
    paper = "none"

    def personal(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        return ("model.head.weight", "model.head.bias")

    def receive(self, ctx: Context) -> None:
        with torch.no_grad():
            for value in ctx.vector.networks["model"].get_submodule("head").parameters():
                value.zero_()

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        frozen = ctx.frozen()["model"].get_submodule("head")
        assert not any(bool(value.any()) for value in frozen.parameters())
        return out.logits.sum() * 0.0


def test_frozen_networks_start_from_what_methods_made_of_the_personal_part() -> None:
    run(run_spec(Starting()), ROUNDS, rounds=2)


def test_a_chunk_is_a_million_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, data=even(1, 30_000))
    watched.trainer.local = replace(watched.trainer.local, batch=1000)
    assert watched.sizes(JOBS[0]) == [16_000, 8_000], "of 64 floats each"
