"""A selection: clients whose last update is the oldest are dispatched first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raysim import Selection, SelectionView
from raysim.primitives.checks import between


@dataclass(frozen=True)
class MySelection(Selection):
    """Choose the clients whose last update is the oldest, and draw more at random.

    share: the fraction of the clients, from 0 to 1, that is chosen by the age of the last update.
    The other clients are drawn at random. Clients without an update are chosen first.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        between("selection.share", self.share, 0, 1)

    def select(self, view: SelectionView) -> np.ndarray:
        """Return the clients to dispatch: at most `view.count` of `view.clients`."""
        ages = view.now - np.nan_to_num(view.last_finish, nan=-np.inf)
        oldest = np.argsort(-ages, kind="stable")[: round(self.share * view.count)]
        chosen = view.clients[oldest]
        remaining = view.generator.permutation(np.setdiff1d(view.clients, chosen))
        return np.concatenate([chosen, remaining[: view.count - len(chosen)]])
