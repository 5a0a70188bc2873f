"""A queue of jobs that wait for a worker, in the order in which they will be aggregated."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from raysim.api.messages import Job

MAX_PASSED_JOBS = 64  # a bundle is closed after this many jobs that its worker does not accept


class JobQueue:
    """The jobs that will be aggregated and are not yet sent to a worker."""

    def __init__(self) -> None:
        # A heap. The first four values order the jobs: aggregation, finish, client and number.
        self._jobs: list[tuple[int, float, int, int, Job]] = []

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def put(self, job: Job, aggregation: int) -> None:
        """Add a job to the queue.

        aggregation: the number of the aggregation that will use the job's update. The run's first
        aggregation has the number 0.
        """
        heapq.heappush(self._jobs, (aggregation, job.finish, job.client, job.number, job))

    def take_all(self, aggregation: int) -> list[Job]:
        """Remove and return all jobs that are needed for this aggregation or for an earlier one.

        aggregation: the number of the aggregation. The run's first aggregation has the number 0.
        """
        jobs: list[Job] = []
        while self._jobs and self._jobs[0][0] <= aggregation:
            jobs.append(heapq.heappop(self._jobs)[-1])
        return jobs

    def take_bundle(
        self, accepts: Callable[[Job, bool], bool], max_jobs: int, max_work: float
    ) -> list[Job]:
        """Remove and return the first jobs in the queue that a worker accepts.

        At most `MAX_PASSED_JOBS` jobs are passed over.

        accepts: returns True if the worker accepts a job. The first argument is the job. The second
        argument is True until the worker has accepted a job in this call.
        max_work: no more jobs are added once the accepted jobs have this many samples.
        """
        bundle: list[Job] = []
        passed: list[tuple[int, float, int, int, Job]] = []
        work = 0.0
        while self._jobs and len(bundle) < max_jobs and work < max_work:
            if len(passed) == MAX_PASSED_JOBS:
                break
            entry = heapq.heappop(self._jobs)
            job = entry[-1]
            if accepts(job, not bundle):
                bundle.append(job)
                work += job.work
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._jobs, entry)
        return bundle
