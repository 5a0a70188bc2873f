"""The model of the best round, and the column that decides which round is best."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.simulation.events import Row
from raysim.training.run_spec import RunSpec


@dataclass(frozen=True)
class Criterion:
    """The column of the history that decides which round is best.

    higher: True if a higher value is better.
    """

    column: str
    higher: bool


def best_criterion(spec: RunSpec) -> Criterion:
    """Return the criterion of a run: its validation score, or else its training loss.

    The training loss is used if there are no validation samples. A test score would overestimate
    the quality of the chosen model.
    """
    column = validation_column(spec)
    if column is None:
        return Criterion("train_loss", higher=False)
    return Criterion(column, spec.task.metric.higher)


def validation_column(spec: RunSpec) -> str | None:
    """Return the name of the history's validation column; None without validation samples."""
    validation = spec.data.partition.validation
    if validation is None or not validation.counts.any():
        return None
    return f"{spec.task.metric.name}_validation"


class BestModel:
    """The weights of the best round so far; checkpoints contain them.

    If several rounds have the best value, the first one is the best.
    criterion: the column of the history that decides which round is best.
    """

    def __init__(self, criterion: Criterion):
        self.criterion = criterion
        self.round, self.value = 0, math.nan  # round 0: none so far
        self.vector: Tensor | None = None  # None: none so far
        self.counters: Tensor | None = None

    def take(self, row: Row, vector: Tensor, counters: Tensor) -> None:
        """Keep the weights of a round if the round is better than all rounds before.

        row: the history's row of the round.
        vector, counters: the scored weights: the shared vector and the shared integer buffers.
        """
        if self._is_better(row):
            self.vector, self.counters = vector, counters

    def _is_better(self, row: Row) -> bool:
        value = row.get(self.criterion.column)
        if value is None or not math.isfinite(value):
            return False
        gain = value - self.value if self.criterion.higher else self.value - value
        if self.round and gain <= 0:
            return False
        self.round, self.value = int(row["round"] or 0), float(value)
        return True

    def summary(self) -> dict[str, object] | None:
        """Return the entry of the best model in summary.json; None if there is no best model."""
        if self.vector is None or self.counters is None:
            return None
        content = self.vector.numpy().tobytes() + self.counters.numpy().tobytes()
        digest = hashlib.sha256(content).hexdigest()
        return {
            "round": self.round,
            "by": self.criterion.column,
            "value": self.value,
            "sha256": digest,
        }

    # --- checkpoints ------------------------------------------------------------------------------
    def state(self, current: Tensor) -> Mapping[str, np.ndarray]:
        """Return the arrays for a checkpoint, from which `restore` continues.

        current: the vector of the current version. If this version is the best one, the result does
        not contain its vector, because the checkpoint already does.
        """
        is_current = self.vector is current
        arrays = {
            "round": np.array(self.round),
            "value": np.array(self.value),
            "is_current": np.array(is_current),
        }
        if self.vector is not None and self.counters is not None and not is_current:
            arrays |= {"vector": self.vector.numpy(), "counters": self.counters.numpy()}
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray], vector: Tensor, counters: Tensor) -> None:
        """Continue from the arrays that `state` returned.

        vector, counters: the shared vector and the shared integer buffers of the checkpoint's
        version. They are used if this version is the best one.
        """
        self.round, self.value = int(arrays["round"]), float(arrays["value"])
        if arrays["is_current"]:
            self.vector, self.counters = vector, counters
        elif "vector" in arrays:
            self.vector = torch.from_numpy(np.array(arrays["vector"]))
            self.counters = torch.from_numpy(np.array(arrays["counters"]))
