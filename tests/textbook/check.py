"""Run raysim on a small world, record its batches and draws, and compare it with a textbook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import SEED, FinishedRun, coordinate, run_spec, run_to_end, tiny_data, with_settings
from torch import Tensor

from raysim.api.client_state import to_named_arrays
from raysim.api.context import Batch
from raysim.api.declarations import Local
from raysim.api.messages import ScoringTask
from raysim.api.method import Method
from raysim.models import Mlp
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Schedule, Synchronous
from raysim.simulation.server import Server
from raysim.training.trainer import RunningJob, Trainer
from raysim.training.worker import Worker
from textbook.world import Book, Job, World

# Everything that a method could get wrong: momentum, weight decay, a falling rate, several epochs.
LOCAL = Local(lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9, batch=8, epochs=2)
EXACT = 1e-9  # float64 end to end


@dataclass(frozen=True)
class Row:
    """A textbook, the methods that must agree with it, and the settings of the compared run.

    By default, three of four clients train in each of three rounds.

    study: arguments of `tiny_runs.run_spec`.
    run: arguments of `tiny_runs.coordinate`.
    drawn: raysim's random values for `World.drawn`, or a function that returns them for the run's
    worker.
    skips: state tensors and columns that the textbook lacks, each with the reason.
    """

    book: Callable[[World], Book]
    methods: Callable[[], Sequence[Method]]
    study: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=lambda: Synchronous(3))
    drawn: Mapping[str, Any] | Callable[[Worker], Mapping[str, Any]] = field(default_factory=dict)
    skips: Mapping[str, str] = field(default_factory=dict)


class RecordingTrainer(Trainer):
    """A trainer that records the batches of each job, and the random draws of each batch.

    The keys of both records are (client, number of the client's job).
    """

    batches: dict[tuple[int, int], list[tuple[Tensor, Tensor]]]
    draws: dict[tuple[int, int], list[Mapping[str, Tensor]]]

    def begin(self, *received: Any) -> RunningJob:
        """Begin a job whose batches and draws are recorded.

        received: the arguments of `Trainer.begin`.
        """
        job = super().begin(*received)
        return replace(job, batches=self._record(job))

    def _record(self, job: RunningJob) -> Iterator[Batch]:
        context = job.ctx
        key = (context.client, context.participation)
        batches = self.batches.setdefault(key, [])
        draws = self.draws.setdefault(key, [])
        for step, batch in enumerate(job.batches):
            batches.append((batch.raw_inputs.clone(), batch.raw_targets.clone()))
            drawn = {name: values[step] for name, values in context.draws.items()}
            # Other values are decisions, which a textbook makes itself.
            tensors = {name: value for name, value in drawn.items() if isinstance(value, Tensor)}
            draws.append({name: value.clone() for name, value in tensors.items()})
            yield batch


@dataclass(frozen=True)
class Recorded:
    """A finished run, with all that a textbook needs to repeat it.

    ended: the results of the run.
    world: what the textbook gets: data, batches and draws.
    starts: the initial tensors of each replica, by full name.
    """

    ended: FinishedRun
    coordinator: Coordinator
    worker: Worker
    world: World
    starts: Sequence[Mapping[str, Tensor]]


def run_recorded(row: Row) -> Recorded:
    """Run raysim with the settings of a comparison, and record its batches and random draws."""
    # The clients have 5, 7, 9 and 11 samples: the third one's last batch is a single sample.
    data = row.study.get("data", tiny_data(clients=4, samples=38))
    settings = {"model": Mlp((6,)), "local": LOCAL, "dtype": torch.float64, "data": data}
    study = with_settings(
        run_spec(*row.methods(), **(settings | row.study)), **({"rounds": 3} | row.run)
    )
    worker = Worker(study)
    trainer: Any = worker.trainer
    trainer.__class__ = RecordingTrainer
    trainer.batches, trainer.draws = {}, {}
    coordinator = coordinate(study, row.schedule, Ideal(), InProcess(worker))
    initial = coordinator.initial.named(coordinator.initial.data, coordinator.initial.counters)
    start = {name: tensor.clone() for name, tensor in initial.items()}
    starts = [
        start | replica_tensors(coordinator, server) for server in coordinator.replicas.servers
    ]
    accepted = record_accepted_jobs(coordinator)

    ended = run_to_end(coordinator)
    assert not ended.failures
    rounds = []
    for jobs in accepted:
        rounds.append([_job(*facts, trainer) for facts in jobs])
    world = _world(row, rounds, start, coordinator, worker)
    return Recorded(ended, coordinator, worker, world, starts)


def replica_tensors(coordinator: Coordinator, server: Server) -> dict[str, Tensor]:
    """Return copies of the tensors of one model of the server, by full name.

    Personal tensors of clients are left out.

    server: the server object of the model; a topology has one for each model.
    """
    named = coordinator.initial.named(server.vector, server.counters)
    return {name: tensor.clone() for name, tensor in named.items()}


def check(row: Row) -> None:
    """Assert that raysim and the textbook of a comparison end with the same values.

    These are the tensors of models, client states and server state, and the columns of the history.
    """
    recorded = run_recorded(row)
    ended, coordinator, worker = recorded.ended, recorded.coordinator, recorded.worker
    study, rounds = coordinator.spec, recorded.world.rounds
    book = row.book(recorded.world)

    personal = _personal_names(coordinator)
    shared = {name: tensor for name, tensor in book.shared.items() if name not in personal}
    assert_equal("shared", ended.tensors, shared)
    for client in {job.client for jobs in rounds for job in jobs}:
        expected = book.private.get(client, {})
        assert_equal(f"client {client}", client_state(coordinator, client), expected, row.skips)
    server_state = {name: value.numpy() for name, value in coordinator.server.state.items()}
    assert_equal("server", server_state, book.server, row.skips)
    _assert_equal_columns(ended.rows, study.methods, book, row.skips)
    for client, tensors in book.own.items():
        scored = scored_model(coordinator, worker, client, tensors)
        assert_equal(f"client {client}'s own model", scored, tensors)


def _world(
    row: Row,
    rounds: list[list[Job]],
    start: dict[str, Tensor],
    coordinator: Coordinator,
    worker: Worker,
) -> World:
    """Return what the textbook gets: data, batches and draws of the run, but no results.

    rounds: for each aggregation its jobs, in the order in which they are aggregated.
    start: the initial values of all networks, by full name.
    """
    study = coordinator.spec
    partition = study.data.partition
    clients = range(partition.train.counts.size)
    torch.set_grad_enabled(True)
    return World(
        seed=SEED,
        clients=len(clients),
        classes=study.task.num_classes,
        rounds=rounds,
        data=[worker.trainer.gather(partition.train.rows(client)) for client in clients],
        central=worker.trainer.gather(study.data.central),
        start=start,
        personal=_personal_names(coordinator),
        local=study.settings.local,
        weighting=coordinator.server.weighting,
        drawn=row.drawn(worker) if callable(row.drawn) else row.drawn,
        tests=[worker.trainer.gather(partition.test.rows(client)) for client in clients],
    )


def _job(client: int, turn: int, version: int, samples: int, trainer: Any) -> Job:
    key = (client, turn)
    return Job(client, turn, version, samples, trainer.batches[key], trainer.draws[key])


def _personal_names(coordinator: Coordinator) -> frozenset[str]:
    layout = coordinator.layout
    entries = (*layout.entries, *layout.counters)
    return frozenset(entry.name for entry in entries if entry.personal)


def record_accepted_jobs(coordinator: Coordinator) -> list[list[tuple[int, int, int, int]]]:
    """Return an empty list, to which the run will add a list of jobs for each aggregation.

    A job is a tuple (client, turn, version, samples). "turn" counts the client's earlier jobs,
    "version" is the received version, and "samples" counts the client's training samples.
    """
    accepted: list[list[tuple[int, int, int, int]]] = []
    aggregate = coordinator._aggregate

    def recording(aggregation: Any, jobs: Any) -> Any:
        facts = []
        for job in jobs:
            samples = int(coordinator.counts[job.client])
            facts.append((job.client, job.participation, job.version, samples))
        accepted.append(facts)
        return aggregate(aggregation, jobs)

    coordinator._aggregate = recording  # type: ignore[method-assign]
    return accepted


def client_state(coordinator: Coordinator, client: int) -> dict[str, np.ndarray]:
    """Return the client state after the client's last aggregated job, as arrays by name.

    Personal tensors have full names, such as "model.head.weight". The result is empty for a client
    without a state.
    """
    state = dict(coordinator.client_states.committed()).get(client)
    return {} if state is None else to_named_arrays(state, coordinator.layout)


def scored_model(
    coordinator: Coordinator, worker: Worker, client: int, names: Iterable[str]
) -> dict[str, np.ndarray]:
    """Return some tensors of the model with which a client is scored at the end of a run.

    The model is fine-tuned if the run fine-tunes models before it scores them.
    names: the full names of the tensors.
    """
    states = coordinator.client_states
    finetune = coordinator.evaluator.evaluation.finetune
    task = ScoringTask(
        client,
        coordinator.spec.data.partition.test.rows(client),
        states.committed_job(client),
        coordinator.server.sent_to(client),
        finetune=finetune if finetune.epochs else None,
    )
    sent_states = [dict(states.committed()).get(client)] if states.stateful else []
    worker.evaluate([task], coordinator.server.published(), *sent_states)
    tensors = worker.vector.named(worker.vector.data, worker.vector.counters)
    return {name: tensors[name].detach().numpy().copy() for name in names}


def _assert_equal_columns(
    rows: Sequence[Mapping[str, Any]],
    methods: Sequence[Method],
    book: Book,
    skips: Mapping[str, str],
) -> None:
    """Assert that the textbook's columns have the values of raysim's history.

    The textbook must have all columns of the methods, except for those in `skips`.
    skips: the reason for each column that the textbook lacks.
    """
    prefixes = tuple(f"{method.name}." for method in methods)
    method_columns = {name for name in rows[-1] if prefixes and name.startswith(prefixes)}
    missing = method_columns - book.columns.keys() - skips.keys()
    assert not missing, f"columns that the textbook leaves out: {missing}"
    for name, expected in book.columns.items():
        values = [np.nan if row.get(name) is None else float(row[name]) for row in rows]
        assert values == pytest.approx(expected, rel=EXACT, abs=EXACT, nan_ok=True), name


def assert_equal(
    where: str,
    tensors: Mapping[str, np.ndarray],
    expected: Mapping[str, Tensor],
    skips: Mapping[str, str] | None = None,
) -> None:
    """Assert that raysim has the same tensors as the textbook, up to rounding, and no others.

    where: what is compared, for error messages.
    tensors, expected: raysim's and the textbook's tensors.
    skips: the reason for each tensor that only raysim has.
    """
    tensors = {name: value for name, value in tensors.items() if name not in (skips or {})}
    assert tensors.keys() == expected.keys(), (
        f"{where}: raysim has {sorted(tensors)}, the textbook {sorted(expected)}"
    )
    for name, tensor in expected.items():
        np.testing.assert_allclose(
            tensors[name],
            tensor.detach().numpy(),
            rtol=EXACT,
            atol=EXACT,
            err_msg=f"{where}: {name}",
        )
