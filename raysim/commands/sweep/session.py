"""Execute `raysim sweep` from overrides to results: check, connect to Ray, search, report."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.api.objectives import MetricRule
from raysim.commands.sweep import report
from raysim.commands.sweep.plan import (
    RankingMode,
    SweepOptions,
    SweepPlan,
    SweepRequest,
    read_request,
    store,
)
from raysim.commands.sweep.records import ENDED, StatusLine, TrialRecords
from raysim.commands.sweep.results import SweepResult, collect_results
from raysim.commands.sweep.space import Choice, ValueRange
from raysim.commands.sweep.tune import free_resources, multiply, search, trial_task
from raysim.experiment.build import build
from raysim.experiment.many_runs import join_ray, new_folder, resume_hint, value_label
from raysim.experiment.recorder import say, warn
from raysim.experiment.run_folder import check_writable
from raysim.experiment.settings import Experiment, Interrupted, RuntimeOptions
from raysim.primitives.errors import RefusedError, errors_as_refusals
from raysim.primitives.files import lock_folder, make_folder
from raysim.primitives.output import lossy_output
from raysim.results.number_format import format_amount
from raysim.results.progress import format_duration
from raysim.results.rerun import rerun_command
from raysim.runtime import ray as cluster
from raysim.runtime.placement import Resources, format_resources, worker_capacity, worker_resources
from raysim.simulation.best_model import validation_column

if TYPE_CHECKING:
    from rich.console import Console

TERMINAL_SIZE = (120, 24)  # used if the terminal's size is unknown


def sweep(
    overrides: str | Sequence[str] | SweepRequest,
    *,
    quiet: bool = False,
    allow: Sequence[str] = (),
    console: Console | None = None,
) -> SweepResult:
    """Execute all trials of a sweep, as `raysim sweep` does; return their results.

        result = raysim.sweep("method=fedprox method.fedprox.mu=0.01,0.1,1 out=sweeps/mu")
        result.get_best_result().config, result.get_best_result().metrics

    allow: the packages whose classes and options the sweep may use.
    console: where to print; None takes the standard output.

    Raise `RefusedError` for an impossible sweep, before its folder is written, and `Interrupted` if
    the user stops the sweep.
    """
    from rich.console import Console

    since = time.monotonic()
    console = console or Console(quiet=quiet)
    if isinstance(overrides, SweepRequest):
        request = overrides
    else:
        texts = shlex.split(overrides) if isinstance(overrides, str) else overrides
        request = read_request(texts)
    folder = request.folder
    experiments = _build_samples(request.plan, allow)
    spec = experiments[0].spec
    check_writable(folder, spec.settings.checkpoint)
    runtime = _cluster_options(experiments[0].execution.runtime)
    with ExitStack() as stack:
        stack.enter_context(lossy_output(sys.stdout, sys.stderr, console.file))
        join_ray(runtime, stack)
        with errors_as_refusals():
            options = request.plan.options
            resources, capacity = _trial_capacity(options, runtime, spec.device, spec.threads)
            if request.is_new:
                folder = stack.enter_context(new_folder(folder, request.is_dated))
            else:
                stack.enter_context(lock_folder(make_folder(folder)))
            store(request, folder)
        plan = _choose_metric(request.plan, experiments, console)
        session = SweepSession(plan, folder, experiments, resources, capacity, console, quiet)
        return session.run(allow, since)


# --- before the search --------------------------------------------------------------------------
def _build_samples(plan: SweepPlan, allow: Sequence[str]) -> list[Experiment]:
    """Build the runs of `SweepPlan.samples`, to find impossible values before the search.

    Raise `RefusedError` if a run is impossible, if Optuna is needed and missing, or if
    checkpoint.folder is set.
    """
    if plan.options.search == "optuna" and importlib.util.find_spec("optuna") is None:
        raise RefusedError(
            "sweep.search=optuna needs Optuna. Run pip install optuna, or set sweep.search=random."
        )
    experiments = [build(plan.node(point), allow) for point in plan.samples()]
    if experiments[0].spec.settings.checkpoint.folder:
        raise RefusedError(
            "checkpoint.folder is for one run, but a sweep has many. Leave it out: each run's "
            "checkpoints are in its own folder."
        )
    return experiments


def _cluster_options(runtime: RuntimeOptions) -> RuntimeOptions:
    """Return the options with which the sweep connects to Ray.

    With runtime=cluster the trials run on the cluster at `runtime.address`. With any other runtime
    the sweep starts Ray on this machine.
    """
    return replace(runtime, address=runtime.address if runtime.name == "cluster" else "local")


def _trial_capacity(
    options: SweepOptions, runtime: RuntimeOptions, device: str, threads: int
) -> tuple[dict[str, float], int]:
    """Return what a worker reserves, by resource, and the number of trials that fit at once.

    With sweep.workers=0, a trial reserves these resources itself. If nothing is reserved, the
    number of trials is `sweep.concurrent`, or else the number of this machine's CPUs.
    Raise `ValueError` if no trial fits.
    """
    resources = worker_resources(runtime, device, threads)
    nodes = cluster.node_resources()
    workers = options.workers or 1
    bundle = multiply(resources, options.seeds) if options.workers else resources
    bundles = worker_capacity(nodes, bundle)
    if bundles is None:
        return resources, options.concurrent or os.cpu_count() or 1
    if bundles >= workers:
        return resources, bundles // workers
    needs = format_resources(bundle)
    if options.workers:
        needs = f"{workers} workers of {needs} each"
        if options.seeds > 1:
            needs += f" ({options.seeds} seeds side by side)"
        advice = f"Set sweep.workers={bundles}"
    elif "GPU" in resources:
        advice = "Set device=cpu"
    else:
        advice = "Lower runtime.threads or runtime.cpus"
    available = {name: sum(node.get(name, 0.0) for node in nodes) for name in bundle}
    raise ValueError(
        f"a trial needs {needs}, but the cluster has {format_resources(available)}. {advice}"
    )


def _choose_metric(
    plan: SweepPlan, experiments: Sequence[Experiment], console: Console
) -> SweepPlan:
    """Return the plan with values for sweep.metric and sweep.mode.

    Unless the user set sweep.metric, take a validation score. If a run has no validation samples,
    take a test score and print a line about it.
    experiments: a few runs of the sweep.
    """
    options = plan.options
    specs = [experiment.spec for experiment in experiments]
    if options.metric is not None:
        mode = options.mode or _usual_mode(options.metric, specs[0].task.metrics)
        return replace(plan, options=replace(options, mode=mode))
    metric = specs[0].task.metric
    columns = [validation_column(spec) for spec in specs]
    name = columns[0]
    if name is None or None in columns:
        name = f"{metric.name}_global" if len(specs[0].data.central) else metric.name
        say(
            console,
            f"sweep.metric: the test score {name} ranks the trials, so the best score is too "
            "optimistic. Set partition.validation_fraction=0.1 to rank by validation samples.",
        )
    mode = options.mode or _usual_mode(name, specs[0].task.metrics)
    return replace(plan, options=replace(options, metric=name, mode=mode))


def _usual_mode(column: str, metrics: Sequence[MetricRule]) -> RankingMode:
    """Return "min" for a loss and for a metric whose lower score is better, else "max".

    column: a column of the history.
    metrics: the metrics of the run, which know whether a higher score is better.
    """
    if column.startswith(("loss", "train_loss")):
        return "min"
    for metric in metrics:
        prefixes = (f"{metric.name}_", f"{metric.name}.")
        is_score = column == metric.name or column.startswith(prefixes)
        if is_score and not metric.higher:
            return "min"
    return "max"


# --- the search ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class SweepSession:
    """A sweep in a locked folder, connected to Ray.

    experiments: a few runs, which were built to check the searched values.
    resources: what a worker reserves, by resource. With sweep.workers=0, a trial reserves this.
    capacity: the number of trials that fit on the cluster at once.
    quiet: True prints no line about the state of the trials.
    """

    plan: SweepPlan
    folder: Path
    experiments: Sequence[Experiment]
    resources: Resources
    capacity: int
    console: Console
    quiet: bool

    def run(self, allow: Sequence[str], since: float) -> SweepResult:
        """Run the trials that have not ended, write the results and return them.

        allow: the packages whose classes and options the runs may use.
        since: time.monotonic() at the start of the command.
        Raise `Interrupted` if the user stops the sweep.
        """
        options = self.plan.options
        points = self.plan.points() if options.search != "optuna" else []
        count = len(points) or self.plan.trials
        trials_at_once = max(1, min(self.capacity, options.concurrent or self.capacity, count))
        records = self._records(count)
        self._introduce(records, trials_at_once)
        records.begin()
        if options.minutes:
            records.deadline = time.monotonic() + 60 * options.minutes
        rounds = max(experiment.spec.settings.rounds for experiment in self.experiments)
        task = trial_task(records, self.experiments[0], self.resources, allow)
        status = "KILLED"
        try:
            with (
                StatusLine(self.console, self.quiet) as line,
                cluster.messages_written_to(self.folder) as messages,
                errors_as_refusals(),
            ):
                path = messages.path if messages else None
                search(self.plan, records, points, rounds, task, line, path)
            status = "FINISHED"
        except KeyboardInterrupt:
            how_to_continue = resume_hint("sweep", self.folder, allow)
            raise Interrupted(
                f"stopped after {records.ended} of {count} trials; {how_to_continue}"
            ) from None
        finally:
            numbers = {
                "wall_seconds": time.monotonic() - since,
                "work_seconds": sum(record.seconds for record in records.all.values()),
                # Nodes that join during the search can run more trials than fit at its start.
                "trials_at_once": max(trials_at_once, records.most_running),
            }
            files = report.write(records, numbers)
            records.finish(numbers, files, status)
        width = shutil.get_terminal_size(TERMINAL_SIZE).columns
        self._print(f"\n{report.table(records, width)}\n")
        self._print(_closing_line(records, numbers))
        tracking = self.experiments[0].execution.tracking
        if tracking.name == "mlflow" and not tracking.uri:
            place = shlex.quote(str(self.folder.parent))
            self._print(f"see the trials in MLflow with: raysim ui {place}")
        return collect_results(records, options.mode or "max")

    def _print(self, text: str) -> None:
        say(self.console, text)

    def _records(self, count: int) -> TrialRecords:
        tracking = self.experiments[0].execution.tracking
        return TrialRecords(
            self.plan,
            self.folder,
            str(self.plan.options.metric),
            count,
            self._print,
            tracked=tracking.name == "mlflow",
            uri=tracking.uri or "",
        )

    def _introduce(self, records: TrialRecords, trials_at_once: int) -> None:
        """Print the searched keys, the search algorithm, the resources, and warnings.

        records: the trials of the sweep.
        trials_at_once: the number of trials that run at once.
        """
        options = self.plan.options
        spec = self.experiments[0].spec
        scheduler = {
            "none": "",
            "asha": f", ASHA from round {options.grace}",
            "pbt": f", PBT every {options.interval} rounds",
        }[options.scheduler]
        seeds = f" x {options.seeds} seeds" if options.seeds > 1 else ""
        place = "each in a process"
        if options.workers:
            place = f"{options.workers} worker{'s' if options.workers > 1 else ''} each"
        reserved = format_resources(self.resources) or "nothing reserved"
        space = [f"{key}: {_describe(values)}" for key, values in self.plan.space.items()]
        lines = {
            "sweep": f"{records.total} trials{seeds}, {options.search}{scheduler}",
            "space": ", ".join(space),
            "run": f"{format_amount(spec.settings.rounds, 'round')} of {spec.data.title}; "
            f"{options.mode}imum of {records.metric}",
            "trials": f"{trials_at_once} at once, {place} of {reserved}, device {spec.device}",
            "folder": str(records.folder),
        }
        for key, text in lines.items():
            self._print(f"{key:<10}{text}")
        ended = sum(record.status in ENDED for record in records.all.values())
        if ended:
            self._print(f"continuing: {ended} of {records.total} trials have ended")
        texts = [text for experiment in self.experiments for text in experiment.warnings]
        for text in dict.fromkeys(texts):
            warn(self.console, text)
        self._report_wait()

    def _report_wait(self) -> None:
        """Print a line if the first trial must wait, because other runs use the cluster."""
        options = self.plan.options
        count = options.seeds * options.workers if options.workers else 1
        needs = multiply(self.resources, count)
        free = free_resources()
        left = {name: free.get(name, 0.0) for name in needs}
        if any(left[name] < amount for name, amount in needs.items()):
            self._print(
                f"waiting, because a trial needs {format_resources(needs)}, but other runs leave "
                f"only {format_resources(left)}"
            )


def _describe(values: ValueRange) -> str:
    if isinstance(values, Choice):
        return "|".join(value_label(value) for value in values.values)
    return f"{values.low:g} to {values.high:g}{' (log)' if values.log else ''}"


def _closing_line(records: TrialRecords, numbers: dict[str, float]) -> str:
    """Return the last line that a sweep prints.

    It has the sweep's duration, the command that trains the best setting again, and the results'
    folder. If no trial has a finite score, it names only the file with the errors.
    numbers: the values of "work_seconds", "wall_seconds" and "trials_at_once" in the summary.
    """
    best = records.best()
    if best is None:
        table = records.folder / report.TABLE
        return f"no trial has a finite score: see status and error in {table}"
    command = rerun_command(records.plan.node(best.point), records.folder / report.BEST)
    equal = records.count_equal(best)
    also = f" ({equal} other{'s' if equal > 1 else ''} scored the same)" if equal else ""
    count = int(numbers["trials_at_once"])
    work, wall = format_duration(numbers["work_seconds"]), format_duration(numbers["wall_seconds"])
    return (
        f"the sweep took {wall}, its trials together {work}, with {count} trial"
        f"{'s' if count > 1 else ''} at once; results are in {records.folder}; {command} trains "
        f"the best setting again{also}"
    )
