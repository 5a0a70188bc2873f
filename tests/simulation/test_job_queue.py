"""Test the queue of jobs that wait for a worker."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, strategies as st

from raysim.api.messages import Job
from raysim.simulation.job_queue import MAX_PASSED_JOBS, JobQueue


def job(number: int, client: int = 0, finish: float = 0.0, work: float = 1.0) -> Job:
    return Job(number, client, 0, 0, finish=finish, work=work)


def queue_of(jobs: Sequence[tuple[Job, int]]) -> JobQueue:
    queue = JobQueue()
    for each, aggregation in jobs:
        queue.put(each, aggregation)
    return queue


def take_bundle(queue: JobQueue, max_jobs: int = 100, max_work: float = math.inf) -> list[int]:
    return [
        each.number for each in queue.take_bundle(lambda job, is_first: True, max_jobs, max_work)
    ]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.integers(0, 2)), max_size=20),
    st.integers(0, 3),
)
def test_queue_returns_each_job_once_and_in_order(
    entries: list[tuple[int, float, int]], taken: int
) -> None:
    jobs = [
        (job(number, client, finish), at) for number, (at, finish, client) in enumerate(entries)
    ]
    queue = queue_of(jobs)
    first = [each.number for each in queue.take_all(taken)]
    rest = take_bundle(queue)
    order = sorted(
        jobs, key=lambda entry: (entry[1], entry[0].finish, entry[0].client, entry[0].number)
    )
    assert first + rest == [each.number for each, _ in order]
    assert set(first) == {each.number for each, aggregation in jobs if aggregation <= taken}
    assert not queue


def test_bundle_of_jobs_has_a_maximum_number_of_jobs_and_of_samples() -> None:
    jobs = [(job(number, work=2.0), 0) for number in range(10)]
    assert take_bundle(queue_of(jobs), max_work=5.0) == [0, 1, 2]
    assert take_bundle(queue_of(jobs), max_jobs=4) == [0, 1, 2, 3]


def test_jobs_that_a_worker_does_not_accept_stay_in_the_queue() -> None:
    queue = queue_of([(job(number, client=number % 2), 0) for number in range(6)])
    bundle = queue.take_bundle(lambda job, is_first: job.client == 1, 2, math.inf)
    assert [each.number for each in bundle] == [1, 3]
    assert take_bundle(queue) == [0, 2, 4, 5]


def test_queue_offers_no_more_jobs_after_the_maximum_number_of_refusals() -> None:
    queue = queue_of([(job(number), 0) for number in range(MAX_PASSED_JOBS + 1)])
    bundle = queue.take_bundle(lambda job, is_first: job.number == MAX_PASSED_JOBS, 10, math.inf)
    assert bundle == []
    assert len(take_bundle(queue, max_jobs=1000)) == MAX_PASSED_JOBS + 1


def test_queue_tells_the_worker_whether_its_bundle_of_jobs_is_still_empty() -> None:
    heard: list[tuple[int, bool]] = []

    def accepts(job: Job, is_first: bool) -> bool:
        heard.append((job.number, is_first))
        return job.number > 0

    queue_of([(job(number), 0) for number in range(3)]).take_bundle(accepts, 10, math.inf)
    assert heard == [(0, True), (1, True), (2, False)]
