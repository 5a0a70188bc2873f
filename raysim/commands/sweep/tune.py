"""`raysim sweep`: a search on Ray Tune, one process per trial, its results kept by this process alone.

Tune decides when a trial starts, stops or takes over another's state; what it knows is never read back from a file.
A search that is continued asks for the same trials again: those that had ended answer with what they had reported, so
searcher and scheduler learn of them, and the others go on from their checkpoints.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.results.progress import format_duration
from raysim.runtime import (
    ray as cluster,  # first: it says how Ray is to be used before Ray is imported
)

# isort: split
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from raysim.commands.sweep import trial
from raysim.commands.sweep.records import ENDED, Records, Watch
from raysim.commands.sweep.results import SweepResult, collect_results
from raysim.commands.sweep.search import Options, Search, SweepRequest, read_request, store
from raysim.commands.sweep.space import Choice, Point, Space, nearest
from raysim.experiment.many_runs import how_to_go_on, join_ray, last_score, new_folder, value_label
from raysim.experiment.run_folder import check_writable
from raysim.experiment.settings import Experiment, Interrupted, RuntimeOptions
from raysim.primitives.errors import Refused, errors_as_refusals, first_line
from raysim.primitives.files import lock_folder
from raysim.primitives.output import lossy_output
from raysim.primitives.streams import stream
from raysim.results.rerun import rerun_command
from raysim.runtime.placement import (
    RayOptions,
    Resources,
    Size,
    format_resources,
    worker_capacity,
    worker_resources,
)
from raysim.simulation import checkpoint
from raysim.simulation.events import Event
from raysim.training.identity import Participants

if TYPE_CHECKING:
    from rich.console import Console

_HERE = (
    os.getcwd()
)  # Tune moves a trial's process elsewhere, where relative paths of the configuration mean nothing
TUNE = ".tune"  # what Tune writes while it runs; removed in the end
ENVIRONMENT = {  # what Tune's documentation lists; no argument of Tune's says the same
    "RAY_AIR_NEW_OUTPUT": "0",  # the other one prints a table whatever it is told
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # results are ours to write
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # nobody reads Tune's own state
    "TUNE_WARN_THRESHOLD_S": "3600",
}


# --- a trial, in a process of its own -------------------------------------------------------------------------------
class SweepTrial(tune.Trainable):
    """What Tune drives: a step is what comes before the next measurement."""

    _trial: trial.Trial | None = None

    def setup(  # type: ignore[override]  # `with_parameters` gives the others
        self, config: dict[str, Any], search: Search, plan: Mapping[str, Any]
    ) -> None:
        """Keep what all trials share; nothing runs before the first step."""
        self._search, self._plan = search, plan
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial."""
        os.chdir(_HERE)
        self.cleanup()
        self.config = new_config
        self._replayed = 0
        self._setting, self._replay = new_config["trial"]["setting"], new_config["trial"]["replay"]
        return True

    def step(self) -> dict[str, Any]:
        """A measurement: its round, the metric, all rows since the one before, seconds of work."""
        metric = self._plan["metric"]
        if self._replay:
            self._replayed += 1
            number, value = self._replay[self._replayed - 1]
            return {"round": number, metric: value, "done": self._replayed == len(self._replay)}
        since = time.monotonic()
        try:
            if self._trial is None:
                self._trial = self._started()
                since = time.monotonic()
            rows = self._trial.advance()
        except (
            Exception
        ) as error:  # told as a result, so that this process lives on for the next trial
            worst = float("-inf") if self._search.options.mode == "max" else float("inf")
            self.cleanup()
            return {"round": 0, metric: worst, "error": first_line(error), "done": True}
        value, _ = last_score(rows, metric)
        done, seconds = self._trial.finished, time.monotonic() - since
        if done:
            self.cleanup()
        return {
            "round": rows[-1]["round"],
            metric: value,
            "rows": rows,
            "seconds": seconds,
            "whole": done,
            "done": done,
        }

    def _started(self) -> trial.Trial:
        self._check_equal()
        seeds = self._search.seeds()
        nodes = [
            self._search.node(self._setting, seed) | {"device": self._plan["device"]}
            for seed in seeds
        ]
        every = self._search.options.interval if self._search.options.scheduler == "pbt" else None
        runs = trial.prepared(nodes, self._folder, self._plan["allow"], every)
        experiments, folders = (
            [experiment for experiment, _, _ in runs],
            [folder for _, folder, _ in runs],
        )
        streams = [self._events(*each) for each in runs]
        return trial.Trial(experiments, folders, streams, self._plan["metric"])

    def _check_equal(self) -> None:
        """Raise UnequalWorkersError if this process would compute other bits than the one that searches."""
        here = cluster.identify_process(f"trial {int(self._folder.name)}", self._plan["packages"])
        Participants(self._plan["driver"], self._plan["mixed"]).add(here)

    def _events(self, experiment: Experiment, folder: Path, resume: str) -> Iterator[Event]:
        workers, parts = (
            self._search.options.workers,
            (experiment.spec, experiment.schedule, experiment.fleet),
        )
        if not workers:
            from raysim.runtime import inprocess

            return inprocess.run(*parts, str(folder), resume)
        size, options = Size(workers, self._plan["each"]), RayOptions(mixed=self._plan["mixed"])
        return cluster.run(
            *parts, size, options, say=lambda text: None, folder=str(folder), resume=resume
        )

    @property
    def _folder(self) -> Path:
        """Tune's name for the trial is its number, which stays when another's state is taken over."""
        return Path(self._plan["folder"]) / Path(self.logdir).name

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """For a trial that takes over this one's state."""
        if self._trial is not None:
            self._trial.save()
        for index, own in enumerate(self._checkpoints()):
            for path in checkpoint.list_complete(own)[-1:]:
                checkpoint.copy(path, Path(checkpoint_dir) / str(index))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Another's state takes the place of this trial's own."""
        self.cleanup()
        for index, own in enumerate(self._checkpoints()):
            shutil.rmtree(own, ignore_errors=True)
            if (source := Path(str(checkpoint_dir)) / str(index)).is_dir():
                shutil.copytree(source, own)

    def _checkpoints(self) -> list[Path]:
        """Where each seed's run keeps them."""
        return [
            folder / "checkpoints" for folder in trial.folders(self._folder, self._search.seeds())
        ]

    def cleanup(self) -> None:
        """Stop the runs, which end early where the trial does."""
        if self._trial is not None:
            self._trial.close()
        self._trial = None


# --- what Tune is told ----------------------------------------------------------------------------------------------
class Listener(tune.Callback):
    """Hands what Tune hears of the trials to the records."""

    def __init__(self, records: Records, watch: Watch):
        self._records, self._watch = records, watch

    def __getstate__(self) -> dict[str, Any]:
        """Tune stores what it is given; nobody reads that."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial runs; again, where it had run before."""
        self._records.started(_number(trial), trial.config["trial"]["setting"])
        self._watch.show(self._records.status())

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """A measurement."""
        if "error" in result:
            self._records.failed(_number(trial), result["error"])
        elif "rows" in result:
            setting = trial.config["trial"]["setting"]
            self._records.measured(
                _number(trial), setting, result["rows"], result["seconds"], result["whole"]
            )
        self._watch.show(self._records.status())

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial ended, at its own end or before."""
        self._records.ended(_number(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """A trial's process died too often."""
        self._records.failed(
            _number(trial), "its process died again and again, perhaps for want of memory"
        )
        self._records.ended(_number(trial))


def _number(trial: Any) -> int:
    return int(Path(trial.path).name)


def _trial_plan(
    records: Records, experiment: Experiment, each: Resources, allow: Sequence[str]
) -> dict[str, Any]:
    """Return what all trials share; they are told in their processes."""
    spec = experiment.spec
    return {
        "metric": records.metric,
        "device": spec.device,
        "allow": tuple(allow),
        "each": dict(each),
        "folder": str(records.folder.absolute() / "trials"),
        "mixed": experiment.execution.runtime.mixed,
        "packages": spec.packages,
        "driver": cluster.identify_process("driver", spec.packages),
    }


def _trainable(search: Search, plan: Mapping[str, Any]) -> Any:
    each = plan["each"]
    trial_bundle: dict[str, float] = (
        {"memory": 1} if search.options.workers else dict(each)
    )  # a byte: next to nothing
    workers = [_times(each, search.options.seeds)] * search.options.workers
    group = tune.PlacementGroupFactory([trial_bundle, *workers])
    return tune.with_resources(tune.with_parameters(SweepTrial, search=search, plan=plan), group)


def _times(each: Resources, seeds: int) -> dict[str, float]:
    """Each seed's runs have workers of their own, side by side."""
    return {name: amount * seeds for name, amount in each.items()}


def _config(number: int, setting: Point, replay: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """What a trial is told. replay: what it had reported, if it had ended."""
    return {"number": number, "setting": setting, "replay": list(replay)}


def _scheduler(search: Search, rounds: int) -> TrialScheduler | None:
    options = search.options
    if options.scheduler == "asha":
        return ASHAScheduler(
            time_attr="round",
            max_t=rounds,
            grace_period=min(options.grace, rounds),
            reduction_factor=options.reduction,
        )
    if options.scheduler == "pbt":
        generator = stream(search.seed, "sweep-mutations")
        mutations = {
            key: list(found.values)
            if isinstance(found, Choice)
            else lambda found=found: found.draw(generator)
            for key, found in search.space.items()
        }

        def explored(config: dict[str, Any]) -> dict[str, Any]:
            inner = config["trial"]
            return config | {
                "trial": inner | {"setting": search.within(inner["setting"]), "replay": []}
            }

        return PopulationBasedTraining(
            time_attr="round",
            perturbation_interval=options.interval,
            hyperparam_mutations={"trial": {"setting": mutations}},
            custom_explore_fn=explored,
        )
    return None


def _searcher(search: Search, records: Records) -> Searcher | None:
    """Optuna's, which is asked again for the settings that it had suggested before."""
    if search.options.search != "optuna":
        return None
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    before = list(records.all.values())
    told_before = {record.number: records.measurements(record.number) for record in before}

    class Numbering(OptunaSearch):
        """Counts what it suggests, and gives it the form of a trial."""

        count = 0

        def suggest(self, trial_id: str) -> dict[str, Any] | None:
            """The next setting."""
            point = _decoded(search.space, super().suggest(trial_id) or {})
            number = before[self.count].number if self.count < len(before) else self.count
            self.count += 1
            return {"trial": _config(number, point, told_before.get(number, ()))}

    sampler = optuna.samplers.TPESampler(
        seed=search.seed, constant_liar=True, n_startup_trials=min(10, max(3, search.trials // 3))
    )
    points = [_encoded(search.space, record.point) for record in before]
    return Numbering(
        _distributions(search.space),
        records.metric,
        search.options.mode,
        points_to_evaluate=points,
        sampler=sampler,
    )


def _distributions(space: Space) -> dict[str, Any]:
    """Optuna's own; lists go by their index, because it takes no lists as values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    distributions: dict[str, Any] = {}
    for key, each in space.items():
        if isinstance(each, Choice):
            distributions[key] = CategoricalDistribution(list(range(len(each.values))))
        elif each.whole:
            distributions[key] = IntDistribution(int(each.low), int(each.high), log=each.log)
        else:
            distributions[key] = FloatDistribution(each.low, each.high, log=each.log)
    return distributions


def _decoded(space: Space, params: Mapping[str, Any]) -> Point:
    named = {
        key: each.values[params[key]] if isinstance(each, Choice) else params[key]
        for key, each in space.items()
    }
    return nearest(space, named)


def _encoded(space: Space, point: Point) -> dict[str, Any]:
    return {
        k: each.values.index(point[k]) if isinstance(each, Choice) else point[k]
        for k, each in space.items()
    }


# --- the search -----------------------------------------------------------------------------------------------------
def sweep(
    words: str | Sequence[str] | SweepRequest,
    *,
    quiet: bool = False,
    allow: Sequence[str] = (),
    console: Console | None = None,
) -> SweepResult:
    """Search to the end, as `raysim sweep` does; return the trials: `result.get_best_result().config`, `.metrics`.

    words: those after `raysim sweep` on the command line, in one text or a list.
    Raises Refused (nothing was written), Interrupted.
    """
    from rich.console import Console

    since = time.monotonic()
    console = console or Console(quiet=quiet)
    words = shlex.split(words) if isinstance(words, str) else words
    request = words if isinstance(words, SweepRequest) else read_request(words)
    search, folder = request.search, request.folder
    experiments = _checked(search, allow)
    spec = experiments[0].spec
    check_writable(folder, spec.settings.checkpoint)
    options = _cluster_options(experiments[0].execution.runtime, request.words)
    with ExitStack() as session:
        session.enter_context(lossy_output(sys.stdout, sys.stderr, console.file))
        join_ray(options, session)
        with errors_as_refusals():
            each, slots = _room(search.options, options, spec.device, spec.threads)
            if request.known:
                session.enter_context(lock_folder(folder))
            else:
                folder = session.enter_context(new_folder(folder, request.dated))
                store(search, folder)
        return _search(search, folder, experiments, each, slots, allow, console, quiet, since)


def _checked(search: Search, allow: Sequence[str]) -> list[Experiment]:
    """A few of the runs, built; raises Refused for values that no run can have, before anything starts."""
    from raysim.experiment.execute import build

    if search.options.search == "optuna" and importlib.util.find_spec("optuna") is None:
        raise Refused(
            "sweep.search=optuna needs Optuna: pip install optuna, or set sweep.search=random"
        )
    experiments = [build(search.node(point), allow) for point in search.samples()]
    if experiments[0].spec.settings.checkpoint.folder:
        raise Refused(
            "checkpoint.folder is for one run: leave it out, each trial has its own in the folder of the search"
        )
    return experiments


def _cluster_options(runtime: RuntimeOptions, words: Sequence[str]) -> RuntimeOptions:
    """Where the trials run: a cluster that is joined, else one of this machine's own."""
    address = next(
        (word.partition("=")[2] for word in words if word.startswith("runtime.address=")),
        runtime.address,
    )
    return replace(runtime, address=address if runtime.name == "cluster" else "local")


def _room(
    options: Options, runtime: RuntimeOptions, device: str, threads: int
) -> tuple[dict[str, float], int]:
    """What a worker (or a trial without workers) reserves, and how many trials fit at once; refuses what never fits."""
    each = worker_resources(runtime, device, threads)
    nodes, workers = cluster.node_resources(), options.workers or 1
    bundle = _times(each, options.seeds) if options.workers else each
    places = worker_capacity(nodes, bundle)
    has = format_resources({name: sum(node.get(name, 0.0) for node in nodes) for name in bundle})
    if places is None:
        return each, options.concurrent or os.cpu_count() or 1
    if places < workers:
        needs = (
            f"{workers} workers of {format_resources(bundle)} each"
            if options.workers
            else format_resources(bundle)
        )
        why = (
            f" ({options.seeds} seeds side by side)"
            if options.workers and options.seeds > 1
            else ""
        )
        advice = "set sweep.workers=0" if not places else f"set sweep.workers={places}"
        if not options.workers:
            advice = (
                "lower runtime.threads or runtime.cpus" if "GPU" not in each else "set device=cpu"
            )
        raise ValueError(f"a trial needs {needs}{why}, the cluster has {has}: {advice}")
    return each, places // workers


def _search(
    search: Search,
    folder: Path,
    experiments: Sequence[Experiment],
    each: Resources,
    slots: int,
    allow: Sequence[str],
    console: Console,
    quiet: bool,
    since: float,
) -> SweepResult:
    from raysim.commands.sweep import report as sweep_report
    from raysim.experiment.recorder import say, warn

    spec, tracking = experiments[0].spec, experiments[0].execution.tracking
    rounds = max(experiment.spec.settings.rounds for experiment in experiments)
    options = search.options
    usual = spec.task.metric
    metric = options.metric or (f"{usual.name}_global" if len(spec.data.central) else usual.name)
    if options.metric is None and not usual.higher:
        options = replace(options, mode="min")
        search = replace(search, options=options)
    points = search.points() if options.search != "optuna" else []
    count = len(points) or search.trials
    slots = max(1, min(slots, options.concurrent or slots, count))
    tracked = tracking.name == "mlflow"

    def tell(text: str) -> None:
        say(console, text)

    records = Records(search, folder, metric, count, tell, tracked, tracking.uri or "")
    _introduce(search, records, experiments, each, slots, tell)
    for text in dict.fromkeys(text for experiment in experiments for text in experiment.warnings):
        warn(console, text)
    needs = _times(each, options.seeds * options.workers if options.workers else 1)
    free = ray.available_resources()
    if any(free.get(name, 0.0) < amount for name, amount in needs.items()):
        left = format_resources({name: free.get(name, 0.0) for name in needs})
        tell(f"waiting: a trial needs {format_resources(needs)}, of which other runs leave {left}")
    records.begin()
    if options.minutes:
        records.deadline = time.monotonic() + 60 * options.minutes
    status = "KILLED"
    try:
        with Watch(console, quiet) as watch, errors_as_refusals():
            _tune(
                search,
                records,
                points,
                rounds,
                _trial_plan(records, experiments[0], each, allow),
                watch,
            )
        status = "FINISHED"
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped after {sum(record.status != 'running' for record in records.all.values())} of {count} trials: "
            f"{how_to_go_on('sweep', folder, allow)}"
        ) from None
    finally:
        work, wall = (
            sum(record.seconds for record in records.all.values()),
            time.monotonic() - since,
        )
        numbers = {"wall_seconds": wall, "work_seconds": work, "trials_at_once": slots}
        files = sweep_report.write(records, numbers)
        records.finish(numbers, files, status)
    tell(f"\n{sweep_report.table(records, shutil.get_terminal_size((120, 24)).columns)}\n")
    tell(_closing(records, work, wall, slots))
    return collect_results(records, options.mode)


def _introduce(
    search: Search,
    records: Records,
    experiments: Sequence[Experiment],
    each: Resources,
    slots: int,
    tell: Callable[[str], None],
) -> None:
    """A few lines: what is searched, how, on what."""
    options, spec = search.options, experiments[0].spec
    scheduler = {
        "asha": f", ASHA from round {options.grace}",
        "pbt": f", PBT every {options.interval} rounds",
    }
    seeds = f" x {options.seeds} seeds" if options.seeds > 1 else ""
    where = f"{options.workers} workers each" if options.workers else "each in a process"
    lines = {
        "sweep": f"{records.total} trials{seeds}, {options.search}{scheduler.get(options.scheduler, '')}",
        "space": ", ".join(f"{key}: {_described(found)}" for key, found in search.space.items()),
        "run": f"{spec.settings.rounds} rounds of {spec.data.title}; {options.mode}imum of {records.metric}",
        "trials": f"{slots} at once, {where} of {format_resources(each) or 'nothing reserved'}, device {spec.device}",
        "folder": str(records.folder),
    }
    for key, text in lines.items():
        tell(f"{key:<10}{text}")
    if over := sum(record.status in ENDED for record in records.all.values()):
        tell(f"continuing: {over} of {records.total} trials have ended")


def _described(found: Any) -> str:
    if isinstance(found, Choice):
        return "|".join(value_label(value) for value in found.values)
    return f"{found.low:g} to {found.high:g}{' (log)' if found.log else ''}"


def _tune(
    search: Search,
    records: Records,
    points: Sequence[Point],
    rounds: int,
    plan: Mapping[str, Any],
    watch: Watch,
) -> None:
    """Hand it all to Tune, and wait."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    for name in ("ray.tune", "ray.air", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options = search.options
    current = [
        records.all[n].point if n in records.all else point for n, point in enumerate(points)
    ]  # PBT's change
    configs = [
        _config(number, point, records.measurements(number)) for number, point in enumerate(current)
    ]
    space = {} if options.search == "optuna" else {"trial": tune.grid_search(configs)}
    scratch = records.folder.absolute() / TUNE
    shutil.rmtree(scratch, ignore_errors=True)
    tuner = tune.Tuner(
        _trainable(search, plan),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=records.metric,
            mode=options.mode,
            search_alg=_searcher(search, records),
            scheduler=_scheduler(search, rounds),
            num_samples=search.trials if options.search == "optuna" else 1,
            max_concurrent_trials=options.concurrent,
            time_budget_s=60 * options.minutes if options.minutes else None,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: f"{trial.config['trial']['number']:04d}",
        ),
        run_config=tune.RunConfig(
            name=TUNE,
            storage_path=str(records.folder.absolute()),
            callbacks=[Listener(records, watch)],
            failure_config=tune.FailureConfig(
                max_failures=2
            ),  # a process that died starts again at its checkpoint
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _closing(records: Records, work: float, wall: float, slots: int) -> str:
    best = records.best()
    if best is None:
        return f"no trial has a score: the reasons are in {records.folder / 'trials.csv'}"
    again = rerun_command(records.search.node(best.point), records.folder / "best.yaml")
    others = records.as_good(best)
    alike = f" ({others} other{'s' if others > 1 else ''} scored the same)" if others else ""
    return (
        f"{format_duration(work)} of work in {format_duration(wall)}, {slots} trial{'s' if slots > 1 else ''} at once; "
        f"{again} trains the best{alike}; results are in {records.folder}"
    )
