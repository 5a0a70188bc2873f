"""Test the table jobs.parquet: its rows and columns, also after a run was continued."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tiny_runs import run_to_end, untrained_run

from raysim.results import jobs as jobs_file
from raysim.results.jobs import FATES, JOBS, Jobs, JobWriter, read_jobs
from raysim.simulation.events import JobRecord
from raysim.simulation.fleet import Lognormal
from raysim.simulation.schedule import Buffered, Oversample, Schedule


def ends(number: int, count: int = 2) -> list[JobRecord]:
    """Return records of jobs that ended in a round.

    number: the number of the round.
    count: the number of jobs.
    """
    return [
        JobRecord(
            client,
            number,
            number - 1,
            number - 0.5,
            float(number),
            FATES[(number + client) % 4],
            number,
            client,
        )
        for client in range(count)
    ]


def written(folder: Path) -> list[JobRecord]:
    """Return all rows of jobs.parquet, as any reader of Parquet sees them."""
    return [JobRecord(**row) for row in pq.read_table(folder / JOBS).to_pylist()]


def write(folder: Path, rounds: range, kept: int = 0) -> None:
    """Write the jobs of some rounds, with a checkpoint after each.

    kept: the number of earlier rounds whose jobs remain in the file, as in a resumed run.
    """
    writer = JobWriter.open(folder, kept)
    assert writer is not None
    for number in rounds:
        writer.add(ends(number))
        writer.write()


def all_of(rounds: range) -> list[JobRecord]:
    return [job for number in rounds for job in ends(number)]


@pytest.fixture(params=[1 << 18, 3, 2, 1])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit how many rows a part of jobs.parquet has, and return this limit.

    More rows are written to further parts.
    """
    monkeypatch.setattr(jobs_file, "_FILE_ROWS", request.param)
    return int(request.param)


def test_job_files_have_a_row_for_every_job(tmp_path: Path, part: int) -> None:
    write(tmp_path, range(1, 8))
    assert written(tmp_path) == all_of(range(1, 8))
    files = sorted(path.name for path in (tmp_path / JOBS).iterdir())
    assert files[0] == "part-000000.parquet"
    assert len(files) == {1 << 18: 1, 3: 4, 2: 8, 1: 8}[part]


def test_columns_of_job_files_are_read_as_arrays(tmp_path: Path, part: int) -> None:
    write(tmp_path, range(1, 8))
    found, wanted = read_jobs(tmp_path), all_of(range(1, 8))
    assert found is not None and len(found) == 14
    for name in ("client", "version", "start", "finish", "round", "staleness"):
        assert getattr(found, name).tolist() == [getattr(job, name) for job in wanted]
    for fate in FATES:
        assert found.has_fate(fate).tolist() == [job.fate == fate for job in wanted]
    assert found[found.has_fate("lost", "failed")].client.tolist() == [
        job.client for job in wanted if job.fate in ("lost", "failed")
    ]


@pytest.mark.parametrize("kept", range(7))
def test_resumed_run_replaces_job_rows_that_were_written_after_the_checkpoint(
    tmp_path: Path, part: int, kept: int
) -> None:
    write(tmp_path, range(1, 7))
    write(tmp_path, range(kept + 1, 9), kept)
    assert written(tmp_path) == all_of(range(1, 9))


def test_resumed_run_without_a_job_file_writes_none(tmp_path: Path) -> None:
    assert JobWriter.open(tmp_path, 3) is None
    assert read_jobs(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_error_of_a_broken_job_file_contains_its_name(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    (tmp_path / JOBS / "part-000000.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"part-000000\.parquet"):
        read_jobs(tmp_path)


@pytest.mark.parametrize("schedule", [Oversample(4, 1.6), Buffered(6, 2, max_staleness=1)])
def test_job_table_of_a_run_says_how_every_job_ended(tmp_path: Path, schedule: Schedule) -> None:
    coordinator, _, _ = untrained_run(
        [30, 60, 90, 10] * 5, schedule, Lognormal(dropout=0.2), rounds=20
    )
    result = run_to_end(coordinator)
    writer = JobWriter.open(tmp_path, 0)
    assert writer is not None
    writer.add([*result.jobs, *result.finished.jobs])
    writer.write()
    jobs = read_jobs(tmp_path)
    assert jobs is not None and len(jobs) == coordinator.planner.dispatched
    planned = sorted(
        (job.client, job.participation, job.version, job.start, job.finish)
        for step in result.aggregations
        for job in step.dispatched
    )
    assert sorted(job[:5] for job in written(tmp_path)) == planned
    rows = {
        key: sum(int(row[key] or 0) for row in result.rows)
        for key in ("clients", "lost", "discarded")
    }
    counts = {fate: int(jobs.has_fate(fate).sum()) for fate in FATES}
    assert counts["aggregated"] == rows["clients"] and counts["failed"] == 0
    assert 0 < counts["lost"] == rows["lost"] and 0 < counts["discarded"] == rows["discarded"]
    _check_times(jobs, result.rows[-1]["virtual_seconds"] or 0.0)


def _check_times(jobs: Jobs, end: float) -> None:
    """Assert the times and staleness of aggregated jobs, and the times of jobs in flight.

    end: virtual time at the end of the run, in seconds. Aggregated jobs finish before it, and jobs
    in flight start before it.
    """
    taken, left = jobs[jobs.has_fate("aggregated")], jobs[jobs.has_fate("in flight")]
    assert (taken.staleness == taken.round - 1 - taken.version).all()
    assert (taken.finish <= end).all() and (left.start <= end).all()
    assert (left.round == jobs.round.max()).all()
    assert np.isfinite(jobs.finish).all()
