"""Runs raysim on a small world, writes down its batches and draws, and compares its end with a textbook's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import SEED, changed, coordinate, ran, run_spec, tiny
from torch import Tensor

from raysim.api.client_state import named
from raysim.api.context import Batch
from raysim.api.declarations import Local
from raysim.api.method import Method
from raysim.models import Mlp
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Schedule, Synchronous
from raysim.training.trainer import RunningJob, Trainer
from raysim.training.worker import Worker
from textbook.world import Book, Job, World

# Everything that a method may get wrong is switched on: momentum, weight decay, a rate that falls, several epochs.
LOCAL = Local(lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9, batch=8, epochs=2)
EXACT = 1e-9  # float64 end to end


@dataclass(frozen=True)
class Row:
    """What a textbook is checked at: four clients of unequal size, three in each of three rounds, unless said.

    methods: fresh ones, for the run. study: of `tiny_runs.run_spec`; run: of `tiny_runs.coordinate`; drawn: handed over
    in `World.drawn`, or how to find that on the worker. skips: entries of private or server state that are raysim's own
    book-keeping, with the reason.
    """

    book: Callable[[World], Book]
    methods: Callable[[], Sequence[Method]]
    study: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=lambda: Synchronous(3))
    drawn: Mapping[str, Any] | Callable[[Worker], Mapping[str, Any]] = field(default_factory=dict)
    skips: Mapping[str, str] = field(default_factory=dict)


class Watched(Trainer):
    """A trainer that writes down which batches it trains on, and what was drawn for them."""

    batches: dict[tuple[int, int], list[tuple[Tensor, Tensor]]]
    given: dict[tuple[int, int], list[Mapping[str, Tensor]]]

    def begin(self, *received: Any) -> RunningJob:
        """See `Trainer`."""
        work = super().begin(*received)
        return replace(work, batches=self._written(work))

    def _written(self, work: RunningJob) -> Iterator[Batch]:
        ctx = work.ctx
        seen, drawn = (
            table.setdefault((ctx.client, ctx.participation), [])
            for table in (self.batches, self.given)
        )
        for step, batch in enumerate(work.batches):
            seen.append((batch.raw_inputs.clone(), batch.raw_targets.clone()))
            drawn.append({name: values[step].clone() for name, values in ctx.draws.items()})
            yield batch


def check(row: Row) -> None:
    """Fail where raysim and the textbook end at different numbers, and say where."""
    data = row.study.get("data", tiny(clients=4, samples=70))
    settings = {"model": Mlp((6,)), "local": LOCAL, "dtype": torch.float64, "data": data}
    study = changed(run_spec(*row.methods(), **(settings | row.study)), **({"rounds": 3} | row.run))
    worker = Worker(study)
    trainer: Any = worker.trainer
    trainer.__class__, trainer.batches, trainer.given = Watched, {}, {}
    coordinator = coordinate(study, row.schedule, Ideal(), InProcess(worker))
    start = {k: v.clone() for k, v in coordinator.initial.named(*_whole(coordinator)).items()}
    taken = _taken(coordinator)
    found = ran(coordinator)
    assert not found.failures
    rounds = [
        [
            Job(c, turn, v, n, trainer.batches[c, turn], trainer.given[c, turn])
            for c, turn, v, n in jobs
        ]
        for jobs in taken
    ]
    layout = coordinator.layout
    world = World(
        SEED,
        data.partition.train.counts.size,
        study.task.num_classes,
        rounds,
        [
            _all(worker, data.partition.train.rows(client))
            for client in range(data.partition.train.counts.size)
        ],
        worker.trainer.gather(data.central),
        start,
        frozenset(e.name for e in (*layout.entries, *layout.counters) if e.personal),
        study.settings.local,
        coordinator.server.weighting,
        row.drawn(worker) if callable(row.drawn) else row.drawn,
        [
            _all(worker, data.partition.test.rows(client))
            for client in range(data.partition.train.counts.size)
        ],
    )
    torch.set_grad_enabled(True)
    book = row.book(world)
    _compare(
        "shared",
        found.tensors,
        {k: v for k, v in book.shared.items() if k not in world.personal},
        {},
    )
    for client in {job.client for jobs in rounds for job in jobs}:
        _compare(
            f"client {client}",
            _private(coordinator, client),
            book.private.get(client, {}),
            row.skips,
        )
    _compare(
        "server",
        {k: v.numpy() for k, v in coordinator.server.state.items()},
        book.server,
        row.skips,
    )
    own = {
        name
        for method in study.methods
        for name in found.rows[-1]
        if name.startswith(f"{method.name}.")
    }
    assert own <= book.columns.keys() | row.skips.keys(), (
        "columns of the history that the textbook leaves out"
    )
    for name, values in book.columns.items():
        seen = [np.nan if r.get(name) is None else float(r[name]) for r in found.rows]  # type: ignore[arg-type]
        assert seen == pytest.approx(values, rel=EXACT, abs=EXACT, nan_ok=True), name
    for client, tensors in book.own.items():
        _compare(
            f"client {client}'s own model",
            _scored(coordinator, worker, client, tensors),
            tensors,
            {},
        )


def _taken(coordinator: Coordinator) -> list[list[tuple[int, int, int, int]]]:
    """Filled while it runs: of every aggregation the (client, turn, version, samples) of its jobs, as accepted."""
    taken: list[list[tuple[int, int, int, int]]] = []
    aggregate = coordinator._aggregate

    def watched(aggregation: Any, jobs: Any) -> Any:
        taken.append(
            [
                (job.client, job.participation, job.version, int(coordinator.counts[job.client]))
                for job in jobs
            ]
        )
        return aggregate(aggregation, jobs)

    coordinator._aggregate = watched  # type: ignore[method-assign]
    return taken


def _whole(coordinator: Coordinator) -> tuple[Tensor, Tensor]:
    return coordinator.initial.data, coordinator.initial.counters


def _all(worker: Worker, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    return worker.trainer.gather(rows)


def _private(coordinator: Coordinator, client: int) -> dict[str, np.ndarray]:
    """The client's accepted client state; its personal tensors by name."""
    state = dict(coordinator.client_states.accepted()).get(client)
    return {} if state is None else named(state, coordinator.layout)


def _scored(
    coordinator: Coordinator, worker: Worker, client: int, names: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    """What raysim scores a client with after the last round; fine-tuned if the run asks for it."""
    from raysim.api.messages import Task

    state, sent = (
        coordinator.client_states.accepted_job(client),
        dict(coordinator.client_states.accepted()).get(client),
    )
    rows, how = (
        coordinator.spec.data.partition.test.rows(client),
        coordinator.evaluator.evaluation.finetune,
    )
    task = Task(
        client,
        rows,
        state,
        coordinator.server.sent_to(client),
        finetune=how if how.epochs else None,
    )
    worker.evaluate(
        [task],
        coordinator.server.published(),
        *([sent] if coordinator.client_states.stateful else []),
    )
    tensors = worker.vector.named(worker.vector.data, worker.vector.counters)
    return {name: tensors[name].detach().numpy().copy() for name in names}


def _compare(
    where: str,
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, Tensor],
    skips: Mapping[str, str],
) -> None:
    found = {name: value for name, value in found.items() if name not in skips}
    assert found.keys() == expected.keys(), (
        f"{where}: raysim has {sorted(found)}, the textbook {sorted(expected)}"
    )
    for name, tensor in expected.items():
        want = tensor.detach().numpy()
        np.testing.assert_allclose(
            found[name], want, rtol=EXACT, atol=EXACT, err_msg=f"{where}: {name}"
        )
