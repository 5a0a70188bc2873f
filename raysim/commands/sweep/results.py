"""What a finished search gives to Python: the setting, score, history and folder of each trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysim.commands.sweep.records import Record, Records
from raysim.primitives.checks import finite_values, one_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TrialResult:
    """A trial of a search.

    config: the searched keys. metrics: the last row of the history, `{}` if there is none. error: the reason of a trial
    that failed, None for any other. path: the trial's folder. history: all rows; with several seeds, their means.
    """

    number: int
    config: Mapping[str, Any]
    metrics: Mapping[str, Any]
    error: str | None
    path: str
    history: tuple[Mapping[str, Any], ...]

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """Return the history as a table, a row for each round."""
        import pandas as pd

        return pd.DataFrame(list(self.history))


@dataclass(frozen=True)
class SweepResult:
    """The trials of a search in their order.

    metric: the column that the search compared. mode: "max" or "min".
    """

    trials: tuple[TrialResult, ...]
    metric: str
    mode: str

    def __len__(self) -> int:
        return len(self.trials)

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self.trials)

    def __getitem__(self, place: int) -> TrialResult:
        return self.trials[place]

    @property
    def errors(self) -> list[str]:
        """Return the reasons of the trials that failed."""
        return [trial.error for trial in self.trials if trial.error is not None]

    @property
    def num_errors(self) -> int:
        """Return how many trials failed."""
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """Return how many trials did not fail."""
        return len(self) - self.num_errors

    def get_best_result(self, metric: str | None = None, mode: str | None = None) -> TrialResult:
        """Return the trial whose last row has the best value of a column; None: as in the search.

        Raises ValueError if no trial has a value.
        """
        name, direction = metric or self.metric, one_of("mode", mode or self.mode, ("max", "min"))
        scored = [
            (values[0], trial)
            for trial in self.trials
            if (values := finite_values([trial.metrics.get(name)]))
        ]
        if not scored:
            raise ValueError(
                f"metric={name}: no trial has a value of this column. Name one of its history."
            )
        choose = max if direction == "max" else min
        return choose(scored, key=lambda pair: pair[0])[1]

    def get_dataframe(self) -> pd.DataFrame:
        """Return a table with a row for each trial: its last measurements, its setting as config/KEY, its folder."""
        import pandas as pd

        rows = [
            {
                "trial": trial.number,
                **trial.metrics,
                **{f"config/{key}": value for key, value in trial.config.items()},
                "error": trial.error,
                "path": trial.path,
            }
            for trial in self.trials
        ]
        return pd.DataFrame(rows)


def collect_results(records: Records, mode: str) -> SweepResult:
    """Return what the records of a search say."""
    trials = [_trial_result(records, records.all[number]) for number in sorted(records.all)]
    return SweepResult(tuple(trials), records.metric, mode)


def _trial_result(records: Records, record: Record) -> TrialResult:
    history = tuple(record.history())
    metrics = history[-1] if history else {}
    setting = records.search.setting(record.point)
    path = str(records.path(record.number).resolve())
    return TrialResult(record.number, setting, metrics, record.error or None, path, history)
