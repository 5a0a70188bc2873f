"""Define the result of a method's own local training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, nan

from raysim.primitives.checks import at_least


@dataclass(frozen=True)
class LocalResult:
    """The result of a job that a method trained with a function of its own (`run.train`).

    loss: the mean training loss over the samples; nan if it is unknown.
    samples: the number of trained samples; a sample counts once in each epoch. The history weights
    `loss` by it.
    steps: the number of optimizer steps, which methods such as FedNova read (`LocalJob.moves`).
    metrics: numbers for the history, by name.

    None for `samples` or `steps` means the number that follows from the settings `local.*`. Neither
    argument changes virtual time.

    Raises ValueError for negative samples or steps and for metrics that are not finite.
    """

    loss: float = nan
    samples: int | None = None
    steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.samples is not None:
            at_least("LocalResult.samples", self.samples, 0)
        if self.steps is not None:
            at_least("LocalResult.steps", self.steps, 0)
        for name, value in self.metrics.items():
            try:
                is_finite = isfinite(float(value))
            except (TypeError, ValueError):
                is_finite = False
            if not is_finite:
                raise ValueError(
                    f"LocalResult.metrics[{name!r}]={value!r} must be a finite number. Return a "
                    "finite number, or leave this metric out."
                )
