"""Clients' client states as an append-only log: what changed since the last checkpoint goes to new files.

A file of the log is written once, and is named in the manifest of every checkpoint that needs it. An index says which
file has which client's state. A file is left behind when less than half of its bytes are still some client's state, or
when there are very many small ones: what is left in it is written again, beside what is new. So a checkpoint costs what
changed (over a long run at most about twice that), and the log takes at most twice the room of the states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from raysim.api.messages import Arrays

PART = 2**26  # bytes of states in a file, about: so much is mapped, or fetched from afar, at once
MOST = 100_000  # tensors in a file: their names and places may take 100 MB at most, and take some 150 bytes each
SMALL, MANY = 2**20, 256  # more than so many files with fewer bytes are brought together

CLIENT, JOB, FILE, SIZE = range(4)
TO_WRITE = -1  # in the place of a file


@dataclass(frozen=True, eq=False)
class StatesByClient(Mapping[int, Arrays]):
    """The named tensors of each client, got when they are asked for."""

    clients: Collection[int]
    of: Callable[[int], Arrays]

    def __getitem__(self, client: int) -> Arrays:
        if client not in self.clients:
            raise KeyError(client)
        return self.of(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


def _nothing(columns: int) -> np.ndarray:
    return np.empty((0, columns), np.int64)


@dataclass(frozen=True)
class Index:
    """Which file has which client's accepted state.

    states: [clients, 4]: client, the job that left its state, number of a file, bytes; a client that was accepted for
    the first time comes last. files: [files, 2]: number, bytes that were written into it.
    """

    states: np.ndarray = field(default_factory=lambda: _nothing(4))
    files: np.ndarray = field(default_factory=lambda: _nothing(2))

    @property
    def jobs(self) -> dict[int, int]:
        """By client: the job that left its accepted state."""
        return dict(self.states[:, [CLIENT, JOB]].tolist())

    def of_now(self, jobs: Mapping[int, int]) -> Index:
        """The index of a run that has come to these jobs; the file is `TO_WRITE` where a state must be written."""
        states = np.zeros((len(jobs), 4), np.int64)
        states[:, CLIENT] = np.fromiter(jobs.keys(), np.int64, len(jobs))
        states[:, JOB] = np.fromiter(jobs.values(), np.int64, len(jobs))
        states[:, FILE] = TO_WRITE
        known = len(self.states)
        if not np.array_equal(
            states[:known, CLIENT], self.states[:, CLIENT]
        ):  # the run went back: it starts anew
            return Index(states)
        same = np.flatnonzero(states[:known, JOB] == self.states[:, JOB])
        states[same] = self.states[same]
        states[np.isin(states[:, FILE], self._left_behind(states[same])), FILE] = TO_WRITE
        return Index(states, self.files)

    def _left_behind(self, states: np.ndarray) -> np.ndarray:
        """Files whose last states are to be written again."""
        number, written = self.files.T
        live = np.bincount(states[:, FILE], states[:, SIZE], minlength=number.max(initial=-1) + 1)[
            number
        ]
        small = live < SMALL
        left: np.ndarray = number[(2 * live < written) | (small & (small.sum() > MANY))]
        return left

    def parts(
        self, clients: Mapping[int, Arrays], number: int
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """The tensors of new files, by number, from `number` on; notes here which state is in which of them."""
        tensors: dict[str, np.ndarray] = {}
        size = 0
        for row in np.flatnonzero(self.states[:, FILE] == TO_WRITE):
            client = int(self.states[row, CLIENT])
            own = {
                f"{client}/{name}": np.asarray(array, order="C")
                for name, array in clients[client].items()
            }
            nbytes = sum(array.nbytes for array in own.values())
            if tensors and (size + nbytes > PART or len(tensors) + len(own) > MOST):
                yield number, tensors
                number, size, tensors = number + 1, 0, {}
            self.states[row, FILE:] = number, nbytes
            tensors |= own
            size += nbytes
        if size or tensors or (self.states[:, FILE] == number).any():
            yield number, tensors

    def closed(self) -> Index:
        """The same with what was written, once all of it was."""
        numbers = np.unique(self.states[:, FILE])
        now = np.bincount(self.states[:, FILE], self.states[:, SIZE])[numbers].astype(np.int64)
        known = dict(self.files.tolist())
        written = [
            known.get(number, size)
            for number, size in zip(numbers.tolist(), now.tolist(), strict=True)
        ]
        return Index(
            self.states, np.stack([numbers, np.array(written, np.int64)], axis=1).reshape(-1, 2)
        )
