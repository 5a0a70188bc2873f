"""Test client states: how they are sent, committed, moved to disk, and counted in bytes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raysim.api.client_state import ClientState, num_bytes
from raysim.simulation.client_states import ClientStates, StateUse

FLOATS = 10
EACH = 4 * FLOATS  # bytes of a state


class Books:
    """A `ClientStates` object with stand-ins for workers, which only record calls.

    told: the pair (worker, clients) of each call that tells a worker to release states.
    """

    def __init__(self, budget: float = math.inf, workers: int = 2):
        self.told: list[tuple[int, list[int]]] = []
        self.jobs = 0
        runtime: Any = SimpleNamespace(
            workers=workers, put=lambda value: value, get=lambda ref: ref, call=self._call
        )
        layout: Any = SimpleNamespace(personal_entries=((SimpleNamespace(name="model.w"),), ()))
        self.client_states = ClientStates(runtime, layout, True, budget)

    def _call(self, worker: int, method: str, clients: list[int]) -> None:
        assert method == "release"
        self.told.append((worker, clients))

    def send(self, client: int, worker: int = 0) -> tuple[Any, list[Any], int]:
        """Send a client's job and its state to a worker.

        Return the job, the client states that the message contains, and the number of bytes that
        were read from disk for the message.
        """
        job = SimpleNamespace(client=client, number=self.jobs)
        self.jobs += 1
        before = self.client_states.dispatch(client, job.number)
        sent, read = self.client_states.send(worker, [StateUse(client, before, job.number)])
        state = ClientState(np.full(FLOATS, job.number, np.float32), np.empty(0, np.int64), {})
        self.client_states.store([job.number], [state])
        return job, sent, read

    def back(self, job: Any, read: int = 0) -> None:
        """Report to `client_states` that the worker has finished a job.

        The report also releases the memory of states that were read from disk for the job.

        job, read: the job and the number of bytes read from disk, as `send` returned them.
        """
        trained: Any = SimpleNamespace(updates=[SimpleNamespace(job=job.number)], states=[EACH])
        self.client_states.note_sizes(trained)
        self.client_states.release_read(read)

    def done(self, *clients: int) -> None:
        """Train clients on worker 0 and commit their states."""
        for client in clients:
            job, _, read = self.send(client)
            self.back(job, read)
            self.client_states.commit([job])


def values(states: Any) -> list[float]:
    return [float(state.personal[0]) for state in states]


def test_memory_estimate_of_unfinished_jobs_uses_the_mean_state_size() -> None:
    books = Books()
    first, second, third = (books.send(client)[0] for client in range(3))
    assert books.client_states.bytes == 0, "nothing is known yet"
    for job in (first, second):
        books.back(job)
    assert books.client_states.bytes == 3 * EACH
    books.back(third)
    assert books.client_states.bytes == 3 * EACH


def test_client_state_from_disk_occupies_memory_until_its_job_is_finished() -> None:
    books = Books(budget=0)
    books.done(5)
    assert books.client_states.spilled_bytes == EACH and books.client_states.bytes == 0
    job, sent, read = books.send(5)
    assert read == EACH and values(sent) == [0.0], "what it had left"
    assert books.client_states.bytes == 2 * EACH, "what was read, and what its job will leave"
    books.back(job, read)
    assert books.client_states.bytes == EACH


def test_used_memory_includes_only_the_newest_state_of_each_client() -> None:
    books = Books(budget=2 * EACH)
    books.done(*[7] * 6, 3)
    assert books.client_states.spilled_bytes == 0 and books.client_states.bytes == 2 * EACH
    books.done(4)
    assert books.client_states.spilled_bytes == EACH, "the state that was committed first"
    assert values(state for _, state in books.client_states.committed()) == [5.0, 6.0, 7.0]


def test_number_of_spilled_bytes_excludes_replaced_client_states() -> None:
    books = Books(budget=2 * EACH - 1)
    books.done(1, 2)
    assert books.client_states.spilled_bytes == EACH
    books.done(1)
    assert values(state for _, state in books.client_states.committed()) == [2.0, 1.0]
    assert books.client_states.spilled_bytes == books.client_states.bytes == EACH


def test_worker_releases_a_client_state_that_was_written_to_disk() -> None:
    books = Books(budget=0)
    books.done(1)
    assert books.told == [(0, [1])]
    job, _, read = books.send(2, worker=1)
    books.back(job, read)
    books.client_states.worker_died(1)
    books.client_states.commit([job])
    assert books.told == [(0, [1])], "no worker has it any more"
    assert books.client_states.spilled_bytes == 2 * EACH


def test_client_state_of_unknown_size_counts_as_0_bytes() -> None:
    books = Books(budget=0)
    job, _, _ = books.send(3)
    books.client_states.commit([job])
    assert books.client_states.spilled_bytes == 0 and values(
        [books.client_states.committed_state(3)]
    ) == [0.0]


def test_state_is_sent_if_its_client_trains_on_another_worker() -> None:
    books = Books()
    books.done(1)
    _, sent, read = books.send(1)
    assert sent == [None] and not read, "the worker has it"
    _, sent, _ = books.send(1, worker=1)
    assert values(sent) == [1.0] and books.told == [(0, [1])]


def test_worker_has_the_client_states_of_all_jobs_that_it_has_finished() -> None:
    books = Books()
    finished = [books.send(client, worker)[0] for client, worker in ((1, 0), (2, 1), (3, 0))]
    in_flight, *_ = books.send(4, worker=0)
    for job in finished:
        books.back(job)
    assert books.client_states.states_of(0) == [finished[0].number, finished[2].number]
    assert books.client_states.states_of(1) == [finished[1].number]
    books.back(in_flight)
    assert in_flight.number in books.client_states.states_of(0)


@pytest.mark.parametrize("budget", [2 * EACH, 2 * EACH + 1])
def test_client_states_are_read_from_disk_in_parts_that_fit_the_memory_budget(
    budget: float,
) -> None:
    books = Books(budget=0)
    books.done(0, 1, 2, 3, 4)
    books.client_states.budget = 2 * budget  # of two workers
    assert list(books.client_states.split_reads([0, 1, 2, 3, 4])) == [
        slice(0, 2),
        slice(2, 4),
        slice(4, 5),
    ]
    assert list(books.client_states.split_reads([0, 8, 9, 1])) == [slice(0, 4)], "8, 9: not on disk"


def test_states_restored_beyond_the_memory_budget_are_spilled_to_disk() -> None:
    states = [
        ClientState(np.full(FLOATS, n, np.float32), np.empty(0, np.int64), {}) for n in range(4)
    ]
    books = Books(budget=2 * EACH)
    books.client_states.restore(
        {c: 10 + c for c in range(4)},
        {c: {"model.w": state.personal} for c, state in enumerate(states)},
    )
    assert books.client_states.spilled_bytes == books.client_states.bytes == 2 * EACH
    assert values(state for _, state in books.client_states.committed()) == [0.0, 1.0, 2.0, 3.0]


def test_used_memory_includes_client_states_restored_from_a_checkpoint() -> None:
    states = [ClientState(np.zeros(n, np.float32), np.empty(0, np.int64), {}) for n in (3, 50)]
    books = Books()
    arrays = {
        client: {"model.w": state.personal} for client, state in zip((4, 6), states, strict=True)
    }
    books.client_states.restore({4: 11, 6: 12}, arrays)
    assert books.client_states.bytes == sum(map(num_bytes, states)) and dict(
        books.client_states.committed_jobs
    ) == {
        4: 11,
        6: 12,
    }
    assert books.send(6)[1] == [books.client_states.committed_state(6)]
