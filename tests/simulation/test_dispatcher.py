"""Test how many jobs a worker gets in one call, and how many calls it has in flight."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tiny_runs import MLP, coordinate, equal_clients, run_spec, run_to_end

from raysim.api.declarations import Evaluation, Local
from raysim.api.messages import TrainingResult
from raysim.simulation.fleet import Fleet, Ideal, Lognormal
from raysim.simulation.schedule import Buffered, Immediate, Schedule, Synchronous
from raysim.training.run_spec import RunSpec
from raysim.training.worker import Worker

CLIENTS, SAMPLES = 12, 12


@dataclass
class Slow:
    """Workers that report a fixed training time.

    seconds: the reported seconds per sample.
    workers: the number of workers.
    calls: for each training call, the number of the worker, and how many jobs it was to train.
    most: the largest number of unread results that one worker had at the same time.
    """

    spec: RunSpec
    seconds: float
    workers: int = 2
    calls: list[tuple[int, int]] = field(
        default_factory=list
    )  # worker and jobs of each call to train
    most: int = 0  # such calls that were under way on one worker
    is_in_process: bool = False
    combine_from: float = 0.0

    def __post_init__(self) -> None:
        self.nodes = (0,) * self.workers
        self.members = [Worker(self.spec, f"worker-{index}") for index in range(self.workers)]
        self.open: list[list[Any]] = [[] for _ in self.members]

    def put(self, value: object) -> object:
        return value

    def call(self, worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        if method != "train":
            return [getattr(self.members[worker], method)(*args)]
        assert returns == 1
        jobs = args[0]
        result: Any = self.members[worker].train(*args)
        result = replace(result, busy=self.seconds * SAMPLES * len(jobs))
        self.calls.append((worker, len(jobs)))
        self.open[worker].append(result)
        self.most = max(self.most, len(self.open[worker]))
        return [result]

    def get(self, ref: Any) -> Any:
        for own in self.open:
            own[:] = [each for each in own if each is not ref]
        return ref

    def ready(self, refs: Any, seconds: float) -> int:
        self.turn = getattr(self, "turn", 0) + 1
        return self.turn % len(refs)

    def revive(self, worker: int) -> None:
        raise AssertionError

    def find_lost_workers(self) -> dict[int, Any]:
        return {}

    def take_new_workers(self) -> list[int]:
        return []

    def explain_death(self, worker: int, death: Exception) -> str:
        return str(death)

    def take_notices(self) -> list[str]:
        return []


def calls(schedule: Schedule, fleet: Fleet, seconds: float, rounds: int) -> Slow:
    spec = run_spec(
        model=MLP, local=Local(lr=0.05, batch=6), data=equal_clients(CLIENTS, CLIENTS * SAMPLES)
    )
    runtime: Any = Slow(spec, seconds)
    run_to_end(
        coordinate(
            spec, schedule, fleet, runtime=runtime, rounds=rounds, evaluate=Evaluation(every=10**6)
        )
    )
    assert isinstance(runtime, Slow)
    return runtime


@pytest.mark.parametrize(("seconds", "jobs"), [(0.001, 2), (0.0004, 5), (0.1, 1)])
def test_several_small_jobs_are_sent_in_one_call(seconds: float, jobs: int) -> None:
    result = calls(Buffered(concurrency=CLIENTS, size=1), Ideal(), seconds, 60)
    sizes = [size for _, size in result.calls]
    assert 60 <= sum(sizes) <= 60 + CLIENTS and max(sizes) <= jobs
    assert sum(sizes) / len(sizes) > jobs / 2, sizes


def test_maximum_number_of_calls_in_flight_to_a_worker_is_two_or_three() -> None:
    result = calls(Immediate(CLIENTS), Lognormal(), 0.1, 40)
    assert 2 <= result.most <= 3


def test_immediate_schedule_gives_each_of_two_workers_over_40_percent_of_jobs() -> None:
    result = calls(Immediate(10), Lognormal(), 0.01, 80)
    jobs = [sum(size for worker, size in result.calls if worker == own) for own in range(2)]
    assert min(jobs) > 0.4 * sum(jobs)


def test_each_worker_gets_one_call_per_round_if_clients_are_equal() -> None:
    result = calls(Synchronous(10), Ideal(), 0.001, 5)
    assert sorted(result.calls) == [(0, 5)] * 5 + [(1, 5)] * 5


def test_worker_returns_one_array_for_each_sum_of_updates() -> None:
    """A worker that trains five clients returns the arrays of their updates as two sums.

    The first array is the sum of four updates, the second one is the fifth update. All five
    `Update` objects have a `delta` of None.
    """
    answers: list[TrainingResult] = []

    @dataclass
    class Watched(Slow):
        def get(self, ref: Any) -> Any:
            if isinstance(ref, TrainingResult):
                answers.append(ref)
            return super().get(ref)

    spec = run_spec(
        model=MLP, local=Local(lr=0.05, batch=6), data=equal_clients(CLIENTS, CLIENTS * SAMPLES)
    )
    runtime: Any = Watched(spec, 0.001)
    run_to_end(coordinate(spec, Synchronous(10), Ideal(), runtime=runtime, rounds=3))
    assert [len(answer.sums) for answer in answers] == [2] * 6
    assert [len(answer.updates) for answer in answers] == [5] * 6
    assert all(update.delta is None for answer in answers for update in answer.updates)  # type: ignore[union-attr]
