"""Find the round with the best validation score, and keep the test scores of that round.

This is done for each client and for the shared model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raysim.data.partition import CSR


class BestRounds:
    """The best round so far of each client and of the shared model, with its test scores.

    The best round is the first one with the highest validation score. For a client without
    validation samples, it is the last round. If a lower score is better, pass scores times -1.
    tests: for each client, the rows of the data set that are its test samples.
    """

    def __init__(self, tests: CSR):
        self._offsets = tests.offsets
        # By name: "validation", each client's best score; "shared", the shared model's best
        # validation score, its round and its central score. "hits", the scores of test rows in the
        # clients' best rounds, comes with the first scores, which decide its shape and dtype.
        self._arrays: dict[str, np.ndarray] = {
            "validation": np.full(len(tests), -np.inf),
            "shared": np.array([-np.inf, 0.0, np.nan]),
        }

    def take(
        self, clients: np.ndarray, validation: np.ndarray, hits: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Record the scores of some clients in a round; return the scores of their best rounds.

        validation: [clients], the validation scores; nan for a client without validation samples.
        hits: the scores of single test samples, client after client.
        The two results have the shapes of `validation` and `hits`. For each client, they contain
        the values of its best round so far.
        Raises ValueError if a resumed run's checkpoint has scores of another shape.
        """
        rows = int(self._offsets[-1])
        stored = self._arrays.setdefault("hits", np.zeros((rows, *hits.shape[1:]), hits.dtype))
        if stored.shape[1:] != hits.shape[1:]:
            raise ValueError(
                "resume: an earlier version of raysim, which scored samples in another way, wrote "
                "this checkpoint. Start the run again."
            )
        best = self._arrays["validation"]
        # True also for nan, which means no validation samples.
        is_better = ~(validation <= best[clients])
        best[clients[is_better]] = validation[is_better]
        sizes = np.diff(self._offsets)[clients]
        starts = np.repeat(self._offsets[clients] - (np.cumsum(sizes) - sizes), sizes)
        places = starts + np.arange(len(hits))
        is_new = np.repeat(is_better, sizes)
        stored[places[is_new]] = hits[is_new]
        return best[clients], stored[places]

    def take_shared(
        self, round: int, validation: float, central: float | None
    ) -> tuple[int, float | None]:
        """Record the shared model's scores in a round; return its best round so far.

        Return the number of the best round, and its score on the central test set.
        validation: the validation score in this round.
        central: the score on the central test set; None without such a set.
        """
        best = self._arrays["shared"]
        if validation > best[0]:
            best[:] = validation, round, np.nan if central is None else central
        return int(best[1]), None if np.isnan(best[2]) else float(best[2])

    def state(self) -> Mapping[str, np.ndarray]:
        """Return the best rounds of all clients and of the shared model, for a checkpoint."""
        return self._arrays

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from the arrays of a checkpoint."""
        self._arrays |= {key: np.array(value) for key, value in arrays.items()}
