"""Execute one trial of a sweep: the runs of a setting, one per seed, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raysim.experiment import run_table
from raysim.experiment.config_files import Node
from raysim.experiment.many_runs import mean_row
from raysim.experiment.runner import StartEvents, SteppedRun
from raysim.results.history import FINAL_SUFFIXES, Row, metric_of
from raysim.results.number_format import format_amount
from raysim.simulation.events import RunStoppedError


def run_name(number: int, seed: int) -> str:
    """Return the name of a trial's run: "0003_seed-0" for trial 3 and seed 0."""
    return f"{number:04d}_seed-{seed}"


def run_folders(folder: Path, number: int, seeds: Sequence[int]) -> list[Path]:
    """Return the folders of a trial's runs, in the order of the seeds.

    folder: the sweep's folder.
    number: the trial's number.
    """
    return [run_table.run_folder(folder, run_name(number, seed)) for seed in seeds]


class Trial:
    """The runs of one setting, which advance together and report their mean rows to Ray Tune.

    runs: a run for each seed.
    metric: the column of the history by which Ray Tune compares trials.
    """

    def __init__(self, runs: Sequence[SteppedRun], metric: str):
        self.runs = list(runs)
        self.metric = metric
        self.rounds = min(run.rounds for run in runs)
        self.rounds_done = 0

    def advance(self) -> list[Row]:
        """Advance to the next round that measures the metric; return the rows since the last call.

        A row is the mean over the seeds. The histories on the disk have the rows already. Raise
        `RunStoppedError` if no further round measures the metric.
        """
        rows: list[Row] = []
        while self.rounds_done < self.rounds:
            self.rounds_done += 1
            seed_rows = [run.until(self.rounds_done) for run in self.runs]
            rows.append(mean_row(seed_rows, self.metric))
            if rows[-1].get(self.metric) is not None:
                break
        else:
            raise RunStoppedError(self._explain_unmeasured(rows))
        for run in self.runs:
            if self.is_finished:
                run.to_the_end()
            else:
                run.write_history()
        return rows

    def _explain_unmeasured(self, rows: Sequence[Row]) -> str:
        last = rows[-1] if rows else {}
        usual = [f"{metric_of(rows)}{suffix}" for suffix in FINAL_SUFFIXES]
        columns = dict.fromkeys([*usual, *last])
        measured = [name for name in columns if name != "round" and last.get(name) is not None]
        return (
            f"sweep.metric={self.metric}: this trial has no value in this column in its last "
            f"{format_amount(len(rows), 'round')}. Set it to one of {', '.join(measured)}"
        )

    @property
    def is_finished(self) -> bool:
        """Return True if all rounds have been reported."""
        return self.rounds_done == self.rounds

    def write_due_checkpoint(self) -> None:
        """Write the checkpoint of the last reported round, if `checkpoint.every` requests one."""
        # A run reports a round before it writes the checkpoint of this round, so each run goes on
        # until the checkpoint exists.
        for run in self.runs:
            run.write_due_checkpoint(self.rounds_done)

    def close(self) -> None:
        """Stop the runs, without writing anything."""
        for run in self.runs:
            run.close()


def open_trial(
    number: int,
    configs: Sequence[Node],
    metric: str,
    start_events: StartEvents,
    *,
    folder: Path,
    allow: Sequence[str] = (),
    accepts_changes: bool = False,
) -> Trial:
    """Begin or continue a trial; return it.

    configs: a complete configuration for each seed.
    metric: the column of the history by which trials are compared.
    start_events: function that starts a run in a folder and yields its events.
    folder: the sweep's folder.
    allow: packages that the configurations may use.
    accepts_changes: True if an unfinished run may continue with other settings.
    Raise `RunFailedError` for a run that cannot be made or started.
    """
    runs: list[SteppedRun] = []
    try:
        for config in configs:
            name = run_name(number, config["seed"])
            placed = run_table.configure_run(config, folder, name)
            log = run_table.log_file(folder, name)
            run = SteppedRun(
                placed, log, start_events, allow=allow, accepts_changes=accepts_changes
            )
            runs.append(run)
    except BaseException:
        for run in runs:
            run.close()
        raise
    return Trial(runs, metric)
