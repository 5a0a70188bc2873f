"""What the tests said in the round that validation likes best: each client's own, and that of the shared model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raysim.data.partition import CSR


class BestRounds:
    """The first round of the highest validation score so far (of an error, of the least); part of a checkpoint.

    tests: each client's test rows. A client without validation samples has its last round.
    """

    def __init__(self, tests: CSR):
        self._offsets = tests.offsets
        # "hits", by test row in the client's round, comes with the first scores: they say what is kept of a row.
        self._arrays: dict[str, np.ndarray] = {
            "validation": np.full(len(tests), -np.inf),  # by client
            "shared": np.array(
                [-np.inf, 0.0, np.nan]
            ),  # of the shared model: validation, round, central score
        }

    def take(
        self, clients: np.ndarray, validation: np.ndarray, hits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take the validation scores [m] of some clients, and what is kept of their test rows, client after client.

        Returns the same of the clients' best rounds, this one included.
        """
        rows = int(self._offsets[-1])
        stored = self._arrays.setdefault("hits", np.zeros((rows, *hits.shape[1:]), hits.dtype))
        if stored.shape[1:] != hits.shape[1:]:
            raise ValueError(
                "resume: an earlier version of raysim, which scored samples in another way, wrote this checkpoint. "
                "Start the run again."
            )
        best = self._arrays["validation"]
        better = ~(validation <= best[clients])  # also where there is nothing to compare
        best[clients[better]] = validation[better]
        sizes = np.diff(self._offsets)[clients]
        starts = np.repeat(self._offsets[clients] - (np.cumsum(sizes) - sizes), sizes)
        places = starts + np.arange(len(hits))
        new = np.repeat(better, sizes)
        stored[places[new]] = hits[new]
        return best[clients], stored[places]

    def take_shared(
        self, round: int, validation: float, central: float | None
    ) -> tuple[int, float | None]:
        """The round and the central accuracy of the shared model where its validation accuracy was highest."""
        kept = self._arrays["shared"]
        if validation > kept[0]:
            kept[:] = validation, round, np.nan if central is None else central
        return int(kept[1]), None if np.isnan(kept[2]) else float(kept[2])

    def state(self) -> Mapping[str, np.ndarray]:
        """All of it, for a checkpoint."""
        return self._arrays

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from a checkpoint."""
        self._arrays |= {key: np.array(value) for key, value in arrays.items()}
