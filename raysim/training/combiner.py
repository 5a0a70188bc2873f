"""Add up the sums of a node's workers on the node, before they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raysim.api.messages import Job, TrainingResult
from raysim.vectors.blocks import fold_groups


class Combiner:
    """The part of a worker that adds up sums."""

    train: Callable[..., Any]  # see `Worker.train`

    def train_apart(
        self, jobs: Sequence[Job], groups: Sequence[tuple[int, ...]], *values: Any
    ) -> tuple[TrainingResult | np.ndarray | None, ...]:
        """Train as `train` does, and return each group's sum as a separate value.

        Such a sum can stay on its node. It is None if all jobs of the group failed.
        """
        result: TrainingResult = self.train(jobs, groups, *values)
        sums = [result.sums.get(group) for group in groups]
        return replace(result, sums={}), *sums

    def combine(
        self, start: int, stop: int, before: np.ndarray | None, *totals: np.ndarray | None
    ) -> tuple[None, np.ndarray | None]:
        """Add up entries [start, stop) of sums in order; None if all of them are None.

        before: [stop - start], the sum of earlier nodes. The first returned value is always None:
        the caller waits for it, while the second can stay on the node.
        """
        arrays = [] if before is None else [before]
        arrays += [total[start:stop] for total in totals if total is not None]
        if not arrays:
            return None, None
        return None, fold_groups([([array], [1.0]) for array in arrays]).numpy()
