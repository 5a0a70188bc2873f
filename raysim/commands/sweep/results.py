"""Return a sweep's result to Python: setting, score, history and folder of each trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from raysim.commands.sweep.plan import RankingMode
from raysim.commands.sweep.records import TrialRecord, TrialRecords
from raysim.primitives.checks import finite_values, one_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TrialResult:
    """A trial of a sweep.

    number: counted from 0.
    config: the searched keys with their values.
    metrics: the last row of `history`; {} if there is none.
    error: why the trial failed, or None.
    path: the folder of the run with the first seed.
    history: the rows of the run; with several seeds, their means.
    """

    number: int
    config: Mapping[str, Any]
    metrics: Mapping[str, Any]
    error: str | None
    path: str
    history: tuple[Mapping[str, Any], ...]

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """Return the history as a table with a row for each round."""
        import pandas as pd

        return pd.DataFrame(list(self.history))


@dataclass(frozen=True)
class SweepResult:
    """The trials of a sweep, also failed ones, in the order of their numbers.

    `result[3]` is trial 3, and `for trial in result` loops over the trials.
    metric: the column of the history that ranks trials.
    mode: "max" if the largest value is the best, else "min".
    """

    trials: tuple[TrialResult, ...]
    metric: str
    mode: str

    def __len__(self) -> int:
        return len(self.trials)

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self.trials)

    def __getitem__(self, index: int) -> TrialResult:
        return self.trials[index]

    @property
    def errors(self) -> list[str]:
        """Return, for each failed trial, why it failed."""
        return [trial.error for trial in self.trials if trial.error is not None]

    @property
    def num_errors(self) -> int:
        """Return the number of trials that failed."""
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """Return the number of trials that did not fail."""
        return len(self) - self.num_errors

    def get_best_result(self, metric: str | None = None, mode: str | None = None) -> TrialResult:
        """Return the trial whose last row has the best value of a column.

        metric: the column; None takes the sweep's column.
        mode: "max" or "min"; None takes the sweep's mode.
        Raise `ValueError` if no trial has a finite value.
        """
        name = metric or self.metric
        direction = one_of("mode", mode or self.mode, get_args(RankingMode))
        scored: list[tuple[float, TrialResult]] = []
        for trial in self.trials:
            values = finite_values([trial.metrics.get(name)])
            if values:
                scored.append((values[0], trial))
        if not scored:
            raise ValueError(
                f"metric={name}: trials are ranked by this column in the last row of their "
                "history, but no trial has a finite number there. Give another column of the "
                "history."
            )
        choose = max if direction == "max" else min
        return choose(scored, key=lambda pair: pair[0])[1]

    def get_dataframe(self) -> pd.DataFrame:
        """Return a table with a row for each trial.

        Columns:
        - "trial": the number of the trial.
        - The columns of the history, with the values of its last row.
        - "config/KEY": the value of the searched key KEY. There is a column for each such key.
        - "error": why the trial failed, or None.
        - "path": the folder of the run with the first seed.
        """
        import pandas as pd

        rows = []
        for trial in self.trials:
            setting = {f"config/{key}": value for key, value in trial.config.items()}
            end = {"error": trial.error, "path": trial.path}
            rows.append({"trial": trial.number, **trial.metrics, **setting, **end})
        return pd.DataFrame(rows)


def collect_results(records: TrialRecords, mode: str) -> SweepResult:
    """Return the recorded trials as the result that users get.

    records: the trials of the sweep.
    mode: "max" if the largest value of the compared column is the best, "min" if the smallest is.
    """
    trials = [_trial_result(records, records.all[number]) for number in sorted(records.all)]
    return SweepResult(tuple(trials), records.metric, mode)


def _trial_result(records: TrialRecords, record: TrialRecord) -> TrialResult:
    history = tuple(record.history())
    return TrialResult(
        number=record.number,
        config=records.plan.setting(record.point),
        metrics=history[-1] if history else {},
        error=record.error or None,
        path=str(records.run_folders(record.number)[0].resolve()),
        history=history,
    )
