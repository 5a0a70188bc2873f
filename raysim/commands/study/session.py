"""Execute `raysim study` from overrides to tables: plan, check, run, report."""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.commands.study.plan import StudyPlan, move, plan
from raysim.commands.study.report import check_metrics, report
from raysim.commands.study.runner import check, make_runs, store
from raysim.commands.study.tracking import track
from raysim.experiment.many_runs import new_folder
from raysim.primitives.errors import RefusedError, errors_as_refusals
from raysim.primitives.files import lock_folder, make_folder
from raysim.primitives.output import terminal_width
from raysim.results.progress import waiting_line

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class StudyResult:
    """The result of a study.

    folder: the study's folder. The properties `runs` and `differences` read tables from it.
    failures: for each failed run, by name, why it failed.
    """

    folder: Path
    failures: Mapping[str, str]

    @property
    def runs(self) -> pd.DataFrame:
        """Return a table of the runs: settings, seed and scores.

        Raise FileNotFoundError if no run has finished.
        """
        return self._table("study.csv")

    @property
    def differences(self) -> pd.DataFrame:
        """Return a table of differences between settings, with intervals and p-values.

        The compared keys are `method` and "method.*" if they have several values, otherwise the
        first key with several values, except the seed. The first setting of these keys is compared
        with each other setting, separately for each combination of further keys, such as
        `partition`.

        The table is empty if nothing can be compared. Raise FileNotFoundError if no run has
        finished.
        """
        return self._table("differences.csv")

    def _table(self, name: str) -> pd.DataFrame:
        import pandas as pd

        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist, because no run of the study has finished. Continue the "
                f"study with out={self.folder} resume=latest."
            )
        if not path.read_text().strip():
            return pd.DataFrame()
        return pd.read_csv(path)


def study(
    overrides: str | Sequence[str] | StudyPlan,
    *,
    parallel: int = 1,
    metrics: Sequence[str] = (),
    conf: Sequence[str] = (),
    allow: Sequence[str] = (),
    quiet: bool = False,
) -> StudyResult:
    """Execute the runs of a study, as the command `raysim study` does; return the result.

        result = raysim.study("method=fedavg,fedprox seed=0..4 rounds=20 out=studies/mine")
        result.runs, result.differences

    metrics: the metrics to compare; () means the usual ones.
    conf: your own folders of options.
    allow: your own packages whose classes the options may use.

    Raise `RefusedError` if an override or a run is impossible (the study's folder is not written
    then), and `Interrupted` if the user stops the study.
    """
    if parallel < 1:
        raise RefusedError(f"--parallel {parallel}: it must be at least 1. Change it.")
    if isinstance(overrides, StudyPlan):
        planned = overrides
    else:
        texts = shlex.split(overrides) if isinstance(overrides, str) else overrides
        planned = plan(texts, conf)
    check_metrics(metrics, _own_metrics(planned))
    planned = check(planned, allow, parallel)
    with ExitStack() as stack:
        with errors_as_refusals():
            if planned.is_new:
                folder = stack.enter_context(new_folder(planned.folder, planned.is_dated))
            else:
                folder = make_folder(planned.folder)
                stack.enter_context(lock_folder(folder))
        if folder != planned.folder:  # another study that began in the same second has the name
            planned = check(move(planned, folder), allow, parallel)
        failures = _make_and_report(planned, parallel, metrics, allow, quiet)
    return StudyResult(planned.folder, failures)


def _own_metrics(planned: StudyPlan) -> list[str]:
    """Return the names of all metrics in the setting `evaluate.metrics` of any run of a study.

    The name of the metric "mine.metrics.brier" is "brier".
    planned: the study.
    """
    names: dict[str, None] = {}
    for run in planned.runs:
        for path in run.config["evaluate"].get("metrics") or ():
            names[path.rpartition(".")[2]] = None
    return list(names)


def _make_and_report(
    planned: StudyPlan, parallel: int, metrics: Sequence[str], allow: Sequence[str], quiet: bool
) -> dict[str, str]:
    """Execute the runs and print the tables; return the reasons why runs failed.

    The result maps the name of each failed run to its reason.

    parallel: the number of runs at a time.
    metrics: () compares the usual metrics.
    allow: the user's packages whose classes may be used.
    """
    from rich.console import Console

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    say("\n".join([str(planned), *planned.warnings]))
    with errors_as_refusals():
        store(planned)
    console = Console(file=io.StringIO()) if quiet else Console()
    with track(planned, say):
        with waiting_line(console) as show:
            failures = make_runs(planned, parallel=parallel, allow=allow, say=say, show=show)
        with errors_as_refusals():
            say(f"\n{report(planned, metrics, failures, terminal_width())}")
    return failures
