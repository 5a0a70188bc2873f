"""Store for each client which rows of a data set the client has, in two integer arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CSR:
    """The row numbers of each of N clients.

    Client k has the rows `indices[offsets[k]:offsets[k+1]]`. Both arrays are int64; `offsets` has N
    + 1 entries. The arrays can also be read by name, such as `csr["indices"]`.
    """

    indices: Ints
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[str]:
        return iter(("indices", "offsets"))

    def __getitem__(self, name: str) -> Ints:
        return {"indices": self.indices, "offsets": self.offsets}[name]

    @property
    def counts(self) -> Ints:
        """Return the number of rows of each of the N clients, [N]."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> Ints:
        """Return the client of each entry of `indices`."""
        return np.repeat(np.arange(len(self)), self.counts)

    def rows(self, client: int) -> Ints:
        """Return the row numbers of one client, as a view."""
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @classmethod
    def from_counts(cls, indices: Ints, counts: Ints) -> CSR:
        """Cut `indices` into consecutive ranges, one for each client.

        indices: the row numbers of client 0, then those of client 1, and so on.
        counts: the number of row numbers of each client.
        """
        return cls(indices, np.concatenate(([0], np.cumsum(counts))))

    @classmethod
    def from_owners(cls, indices: Ints, owners: Ints, clients: int) -> CSR:
        """Group row numbers by the client that owns them; the rows of a client keep their order.

        indices: [n], row numbers.
        owners: [n], the client of each row.
        clients: the number of clients.
        """
        counts = np.bincount(owners, minlength=clients)
        return cls.from_counts(indices[np.argsort(owners, kind="stable")], counts)


@dataclass(frozen=True, eq=False)
class Partition:
    """The training, test and validation rows of each client.

    train: the rows that clients train on; unseen clients have none here.
    validation: rows for choosing settings or rounds, or None.
    spare: training rows that `partition.fraction` left out, or None.
    unseen: the ascending numbers of the clients that are never trained, or None.
    with_unseen: the training rows of all clients. None without unseen clients, and if all data were
    pooled into one client.
    """

    train: CSR
    test: CSR
    spare: CSR | None = None
    validation: CSR | None = None
    unseen: Ints | None = None
    with_unseen: CSR | None = None

    def __len__(self) -> int:
        return len(self.train)

    @property
    def all_train(self) -> CSR:
        """Return the row numbers of all clients' training samples, including unseen clients."""
        return self.train if self.with_unseen is None else self.with_unseen

    def parts_of_clients(self) -> list[CSR]:
        """Return all clients' training samples, test samples and validation samples, in a list.

        Each entry of the list is a `CSR`. The training samples include those of unseen clients.
        Without validation samples, the list has only two entries.
        """
        parts = (self.all_train, self.test, self.validation)
        return [part for part in parts if part is not None]

    @property
    def unseen_count(self) -> int:
        """Return the number of unseen clients; 0 if all data were pooled into one client."""
        if self.unseen is None or self.with_unseen is None:
            return 0
        return len(self.unseen)
