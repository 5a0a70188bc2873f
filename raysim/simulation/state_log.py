"""Store the client states of checkpoints as a log of files; changed states go to new files.

A file of the log is never changed. An index says which file contains the current state of each
client. If most bytes of a file are old states, its current states go to a new file. So the log
needs at most about twice the space of all current states. Over a long run, checkpoints write at
most about twice the changed states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from raysim.api.messages import Arrays

# A file has at most this many bytes of states, or a single larger state. It is mapped, or fetched
# from a URL, as a whole.
FILE_BYTES = 2**26
# The most tensors in a file. Its header may have 100 MB, and a tensor takes about 150 bytes of it.
MAX_TENSORS = 100_000
# If more than this many files have less than this many live bytes each, they are merged.
SMALL_FILE_BYTES, MAX_SMALL_FILES = 2**20, 256

CLIENT, JOB, FILE, SIZE = range(4)  # columns of `StateIndex.states`
UNWRITTEN = -1  # in the column FILE


@dataclass(frozen=True, eq=False)
class StatesByClient(Mapping[int, Arrays]):
    """The named tensors of each client's state, which are read when they are accessed.

    read: function that returns the tensors of a client.
    """

    clients: Collection[int]
    read: Callable[[int], Arrays]

    def __getitem__(self, client: int) -> Arrays:
        if client not in self.clients:
            raise KeyError(client)
        return self.read(client)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


def _empty_table(columns: int) -> np.ndarray:
    return np.empty((0, columns), np.int64)


@dataclass(frozen=True)
class StateIndex:
    """The index of a checkpoint: it says which file contains each client's committed state.

    states: int64 [clients, 4], in the order in which clients' first states were committed. The
    columns are: client, job that made the state, number of the file, bytes of the state.
    files: int64 [files, 2]: number of the file, total bytes of the states in it.
    """

    states: np.ndarray = field(default_factory=lambda: _empty_table(4))
    files: np.ndarray = field(default_factory=lambda: _empty_table(2))

    @property
    def jobs(self) -> dict[int, int]:
        """The number of the job that made each client's committed state, by client."""
        return dict(self.states[:, [CLIENT, JOB]].tolist())

    def update(self, jobs: Mapping[int, int]) -> StateIndex:
        """Return the index for the next checkpoint, after more jobs were aggregated.

        Changed states, and states in abandoned files, get the file number `UNWRITTEN`. So do all
        states if `jobs` does not begin with the clients of this index. This can happen after the
        run was resumed from a checkpoint that is older than this index.

        jobs: the job that made each client's committed state, in the order in which the clients'
        first states were committed.
        """
        states = np.zeros((len(jobs), 4), np.int64)
        states[:, CLIENT] = np.fromiter(jobs.keys(), np.int64, len(jobs))
        states[:, JOB] = np.fromiter(jobs.values(), np.int64, len(jobs))
        states[:, FILE] = UNWRITTEN
        known = len(self.states)
        if not np.array_equal(states[:known, CLIENT], self.states[:, CLIENT]):
            # The run continues from an earlier checkpoint: everything is written again.
            return StateIndex(states)
        unchanged = np.flatnonzero(states[:known, JOB] == self.states[:, JOB])
        states[unchanged] = self.states[unchanged]
        abandoned = self._abandoned_files(states[unchanged])
        states[np.isin(states[:, FILE], abandoned), FILE] = UNWRITTEN
        return StateIndex(states, self.files)

    def _abandoned_files(self, states: np.ndarray) -> np.ndarray:
        """Return the numbers of the state files that the next checkpoint shall not use.

        A file is abandoned if less than half of its bytes belong to unchanged states. A file is
        small if it has less than `SMALL_FILE_BYTES` bytes of unchanged states. If there are more
        than `MAX_SMALL_FILES` small files, all small files are abandoned, too.

        states: the rows of `StateIndex.states` with unchanged states.
        """
        number, written = self.files.T
        size = number.max(initial=-1) + 1
        live = np.bincount(states[:, FILE], states[:, SIZE], minlength=size)[number]
        is_small = live < SMALL_FILE_BYTES
        has_too_many = is_small.sum() > MAX_SMALL_FILES
        abandoned: np.ndarray = number[(2 * live < written) | (is_small & has_too_many)]
        return abandoned

    def write_files(
        self, clients: Mapping[int, Arrays], number: int
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield new files for the states that are not in a file yet; the caller writes the files.

        A file is a pair: its number, and its tensors by name. The index records where each state
        is.

        clients: the named tensors of each client's state.
        number: the number of the first new file.
        """
        tensors: dict[str, np.ndarray] = {}
        size = 0
        for row in np.flatnonzero(self.states[:, FILE] == UNWRITTEN):
            client = int(self.states[row, CLIENT])
            state = {
                f"{client}/{name}": np.asarray(array, order="C")
                for name, array in clients[client].items()
            }
            state_bytes = sum(array.nbytes for array in state.values())
            is_full = size + state_bytes > FILE_BYTES or len(tensors) + len(state) > MAX_TENSORS
            if tensors and is_full:
                yield number, tensors
                number, size, tensors = number + 1, 0, {}
            self.states[row, FILE:] = number, state_bytes
            tensors |= state
            size += state_bytes
        if size or tensors or (self.states[:, FILE] == number).any():
            yield number, tensors

    def with_sizes(self) -> StateIndex:
        """Return a copy of this index that also has the size of each file in bytes.

        Before this, every state must be in a file (`write_files`).
        """
        numbers = np.unique(self.states[:, FILE])
        live = np.bincount(self.states[:, FILE], self.states[:, SIZE])[numbers].astype(np.int64)
        known = dict(self.files.tolist())
        sizes = [
            known.get(number, size)
            for number, size in zip(numbers.tolist(), live.tolist(), strict=True)
        ]
        files = np.stack([numbers, np.array(sizes, np.int64)], axis=1).reshape(-1, 2)
        return StateIndex(self.states, files)
