"""What a worker does so that the sums of a node are added up there, before they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raysim.api.messages import Job, TrainingResult
from raysim.vectors.blocks import fold_groups


class Combiner:
    """A part of a worker."""

    train: Callable[..., Any]  # see `Worker`

    def train_apart(
        self, jobs: Sequence[Job], groups: Sequence[tuple[int, ...]], *others: Any
    ) -> tuple[TrainingResult | np.ndarray | None, ...]:
        """`train`, whose sums are values of their own, one for each group (None: all of it failed): they can stay."""
        result: TrainingResult = self.train(jobs, groups, *others)
        return replace(result, sums={}), *(result.sums.get(group) for group in groups)

    def combine(
        self, start: int, stop: int, before: np.ndarray | None, *totals: np.ndarray | None
    ) -> tuple[None, np.ndarray | None]:
        """Entries [start, stop) of a sum: those of nodes before (stop - start floats) plus each of `totals`, in order.

        The first value only says that the second is there, which can stay as well. It is None where all are None.
        """
        own = [total[start:stop] for total in totals if total is not None]
        arrays = own if before is None else [before, *own]
        return None, fold_groups([([array], [1.0]) for array in arrays]).numpy() if arrays else None
