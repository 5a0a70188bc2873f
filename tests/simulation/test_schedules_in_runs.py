"""Test runs with every schedule and with drop-outs.

A run has the same bits with any number of workers, and if it is interrupted and resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_runs import (
    NORMED_MLP,
    FinishedRun,
    Spy,
    coordinate,
    equal_clients,
    run_spec,
    run_to_end,
    several_workers,
    tiny_data,
)

from raysim.api.declarations import Evaluation
from raysim.methods.fedasync import FedAsync
from raysim.methods.fedbn import FedBN
from raysim.methods.scaffold import Scaffold
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.schedule import (
    Buffered,
    Deadline,
    Immediate,
    Oversample,
    Schedule,
    Synchronous,
    Tiered,
)
from raysim.simulation.trace import Trace

SCHEDULES: dict[str, Schedule] = {
    "synchronous": Synchronous(4),
    "oversample": Oversample(3, 1.5),
    "deadline, stale": Deadline(4, 0.15),
    "deadline, discard": Deadline(4, 0.15, "discard"),
    "buffered": Buffered(5, 2),
    "buffered, at most 1 late": Buffered(5, 2, max_staleness=1),
    "buffered, larger than the number in flight": Buffered(2, 5),
    "immediate": Immediate(4),
    "tiered": Tiered(2, 2),
}
METHODS: dict[str, list[Any]] = {"stateless": [], "stateful": [Scaffold(), FedBN()]}
ASKED: dict[str, Any] = {"rounds": 9, "evaluate": Evaluation(every=4)}
FLEET = Lognormal(dropout=0.2, availability="markov", on=3.0, off=0.5)


def small(name: str) -> Any:
    return run_spec(*METHODS[name], model=NORMED_MLP, data=tiny_data(clients=8))


def under(name: str, schedule: str, workers: int = 1, **others: Any) -> FinishedRun:
    runtime = several_workers(small(name), workers)
    return run_to_end(
        coordinate(small(name), SCHEDULES[schedule], FLEET, runtime=runtime, **ASKED, **others)
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", METHODS)
def test_schedules_have_same_bits_on_several_workers_and_after_resume(
    name: str, schedule: str, tmp_path: Path
) -> None:
    whole = under(name, schedule)
    assert not whole.failures
    workers = {"stateless": 2, "stateful": 3}[name]
    there = under(name, schedule, workers, checkpoint_every=3, folder=str(tmp_path))
    assert (there.bits, there.history) == (whole.bits, whole.history)
    saved = sorted((tmp_path / "checkpoints").glob("round-*"))[:-1]
    assert saved
    for path in saved:
        stop = int(path.name.removeprefix("round-"))
        again = under(name, schedule, 1, resume=str(path))
        assert (again.bits, again.history) == (whole.bits, whole.history)
        assert again.jobs == [end for end in whole.jobs if end.round > stop]


def test_run_with_fleet_trace_has_same_bits_on_several_workers_and_after_resume(
    tmp_path: Path,
) -> None:
    starts = [[c / 10 + 2.0 * k for k in range(20)] for c in range(8)]
    rows = [
        {
            "client": c,
            "start": own,
            "end": [each + 1.5 for each in own],
            "period": 50.0,
            "speed": 40.0,
            "down": 1e5,
            "up": 1e5,
        }
        for c, own in enumerate(starts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "trace.parquet")

    def traced(workers: int, **others: Any) -> FinishedRun:
        runtime, fleet = (
            several_workers(small("stateful"), workers),
            Trace(file=str(tmp_path / "trace.parquet")),
        )
        return run_to_end(
            coordinate(
                small("stateful"), SCHEDULES["buffered"], fleet, runtime=runtime, **ASKED, **others
            )
        )

    whole = traced(1)
    assert any(each.lost for each in whole.aggregations)
    saved = traced(2, checkpoint_every=5, folder=str(tmp_path))
    again = traced(3, resume=str(tmp_path / "checkpoints" / "round-000005"))
    assert saved.bits == again.bits == whole.bits
    assert saved.history == again.history == whole.history


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_aggregated_jobs_are_trained_and_stored(schedule: str) -> None:
    spied = small("stateful")
    spy = Spy(spied)
    result = run_to_end(coordinate(spied, SCHEDULES[schedule], FLEET, runtime=spy, **ASKED))
    taken = [job.number for each in result.aggregations for job in each.aggregated]
    assert {job.number for job, _ in spy.sent} == set(taken)
    jobs = {job.number: job for each in result.aggregations for job in each.dispatched}
    last = {jobs[number].client: number for number in taken}
    assert dict(result.coordinator.client_states.committed_jobs) == last
    before: dict[int, int] = {}
    for job in sorted((job for job, _ in spy.sent), key=lambda job: job.number):
        assert job.state == before.get(job.client, -1), (
            "from its own latest job that was or will be aggregated"
        )
        before[job.client] = job.number


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_server_control_variate_of_scaffold_is_the_mean_over_clients(schedule: str) -> None:
    result = under("stateful", schedule)
    controls = [value for key, value in result.private.items() if key.endswith("scaffold.control")]
    mean = np.sum(controls, axis=0, dtype=np.float64) / 8
    server = result.coordinator.server.state["scaffold.control"].numpy()
    assert np.abs(server).max() > 1e-3
    np.testing.assert_allclose(server, mean, rtol=1e-4, atol=1e-6)


def test_fedasync_with_one_job_at_a_time_equals_sequential_sgd() -> None:
    spied = run_spec(FedAsync(alpha=1.0, kind="constant"), data=equal_clients())
    spy = Spy(spied)
    result = run_to_end(
        coordinate(
            spied, Immediate(1), Ideal(), runtime=spy, rounds=5, evaluate=Evaluation(every=9)
        )
    )
    deltas = {update.job: update.delta for update in spy.updates}  # type: ignore[attr-defined]
    vector = spy.sent[0][1].vector
    for job, published in spy.sent:
        np.testing.assert_array_equal(published.vector, vector)
        vector = published.vector + deltas[job.number]
    np.testing.assert_array_equal(result.coordinator.server.vector.numpy(), vector)
    assert all(row["staleness"] == 0 for row in result.rows)
