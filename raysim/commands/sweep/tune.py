"""Search with Ray Tune; each trial is a process.

Tune decides when a trial starts, stops, or continues from another trial's checkpoint.

A continued sweep gives Tune all trials again. Trials that had ended report their stored results to
the search algorithm and the scheduler. All other trials continue from their checkpoints.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# before Ray, because it sets variables that Ray reads at import
from raysim.runtime import ray as cluster

# isort: split
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from raysim.commands.sweep import trial
from raysim.commands.sweep.plan import SweepPlan
from raysim.commands.sweep.records import StatusLine, TrialRecords
from raysim.commands.sweep.space import Choice, Point, Space, ValueRange, clip_point
from raysim.experiment.many_runs import last_score
from raysim.experiment.settings import Experiment
from raysim.primitives.errors import first_line
from raysim.primitives.files import LOCK_FILE, make_folder
from raysim.primitives.streams import stream
from raysim.runtime.placement import RayOptions, Resources, Size
from raysim.simulation import checkpoint
from raysim.simulation.events import Event, ProcessLostError
from raysim.training.identity import Identity, Participants

# Tune changes a trial's working directory, so that the user's relative paths would be wrong.
_START_FOLDER = os.getcwd()
TUNE = ".tune"  # the folder that Tune writes while it runs; removed in the end
MAX_TRIAL_DEATHS = 3  # after so many losses of a process a trial has failed
ORIGIN = "run"  # the file in Tune's checkpoint that names the checkpoint's trial
TRIAL_PROCESS_BYTES = 1.0  # Tune requires a resource even for a process that only waits
ENVIRONMENT = {  # options that Tune reads only from environment variables
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints a table in any case
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # this process writes the results
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # Tune's own state is never read
    "TUNE_WARN_THRESHOLD_S": "3600",
}


# --- a trial, in its own process ----------------------------------------------------------------
@dataclass(frozen=True)
class TrialTask:
    """The settings that all trials of a sweep share.

    resources: what a worker reserves, by resource. With sweep.workers=0, a trial's process reserves
    this.
    allow: packages that the configurations may use.
    packages: packages whose files must be the same in all processes.
    driver: the identity of the process that runs the sweep.
    mixed: `runtime.mixed`. False requires that each trial's process promises the same bits as
    `driver`.
    """

    folder: str
    metric: str
    device: str
    resources: Resources
    allow: tuple[str, ...]
    packages: tuple[str, ...]
    driver: Identity
    mixed: bool


class SweepTrial(tune.Trainable):
    """A trial of a sweep, in the form of the class `Trainable` that Tune requires.

    Each call of `step` trains until the next measurement of the metric.
    """

    _trial: trial.Trial | None = None

    def setup(  # type: ignore[override]  # `with_parameters` adds the others
        self, config: dict[str, Any], plan: SweepPlan, task: TrialTask
    ) -> None:
        """Store the settings of the trial; nothing is trained before the first call of `step`.

        config: the dictionary that `_trial_config` made for this trial.
        plan: the sweep.
        task: further settings that all trials of the sweep share.
        """
        self._plan = plan
        self._task = task
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Use this process for another trial, or for this trial with other values.

        new_config: the dictionary that `_trial_config` made for the trial.
        Return True, which tells Tune that the process was reused.
        """
        os.chdir(_START_FOLDER)
        self.cleanup()
        self.config = new_config
        self._point = new_config["trial"]["point"]
        self._replay = new_config["trial"]["replay"]
        self._replayed = 0
        return True

    def step(self) -> dict[str, Any]:
        """Train the trial until its next measurement; return a report for Tune and the sweep.

        A failed trial reports its error and the worst possible metric. In a continued sweep, a
        trial that had ended before trains nothing: each call returns one stored measurement.
        Raise `RunFailedError` if a process of the run is lost, so that Tune starts the trial again.
        """
        metric = self._task.metric
        if self._replay:
            number, value = self._replay[self._replayed]
            self._replayed += 1
            return {"round": number, metric: value, "done": self._replayed == len(self._replay)}
        since = time.monotonic()
        try:
            if self._trial is None:
                self._trial = self._open_trial()
                since = time.monotonic()
            rows = self._trial.advance()
        # reported as a result, so that this process can run the next trial
        except Exception as error:
            worst = float("-inf") if self._plan.options.mode == "max" else float("inf")
            self.cleanup()
            if isinstance(error.__cause__, ProcessLostError):
                raise  # Tune starts the trial again
            return {"round": 0, metric: worst, "error": first_line(error), "done": True}
        value, _ = last_score(rows, metric)
        is_done = self._trial.is_finished
        seconds = time.monotonic() - since
        if is_done:
            self.cleanup()
        return {
            "round": rows[-1]["round"],
            metric: value,
            "rows": rows,
            "seconds": seconds,
            "is_complete": is_done,
            "done": is_done,
        }

    def _open_trial(self) -> trial.Trial:
        self._check_equal()
        options = self._plan.options
        is_pbt = options.scheduler == "pbt"
        configs = []
        for seed in self._plan.seeds():
            config = self._plan.node(self._point, seed) | {"device": self._task.device}
            if is_pbt:  # exchanges between trials need a checkpoint after each interval
                config["checkpoint"] = {**config["checkpoint"], "every": options.interval}
            configs.append(config)
        return trial.open_trial(
            self._number,
            configs,
            self._task.metric,
            self._start_events,
            folder=Path(self._task.folder),
            allow=self._task.allow,
            accepts_changes=is_pbt,
        )

    def _check_equal(self) -> None:
        """Raise `UnequalWorkersError` if this trial may compute other bits than the sweep process.

        The CPUs, libraries, code and environment variables of the two processes are compared. With
        `runtime.mixed=true`, all differences are accepted.
        """
        name = f"trial {self._number}"
        identity = cluster.identify_process(name, self._task.packages)
        Participants(self._task.driver, self._task.mixed).add(identity)

    def _start_events(self, experiment: Experiment, folder: Path, resume: str) -> Iterator[Event]:
        parts = (experiment.spec, experiment.schedule, experiment.fleet)
        workers = self._plan.options.workers
        if not workers:
            from raysim.runtime import inprocess

            return inprocess.run(*parts, str(folder), resume)
        size = Size(workers, self._task.resources)
        options = RayOptions(mixed=self._task.mixed)
        return cluster.run(*parts, size, options, _print_nothing, str(folder), resume)

    @property
    def _number(self) -> int:
        """Return the trial's number, which is the name of Tune's folder for the trial."""
        return int(Path(self.logdir).name)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the last checkpoint of each run, so that another trial can continue from the copies.

        checkpoint_dir: the empty folder that Tune provides for the copies.
        """
        if self._trial is not None:
            self._trial.write_due_checkpoint()
        folder = Path(checkpoint_dir)
        (folder / ORIGIN).write_text(str(self._number))
        for index, run_folder in enumerate(self._run_folders()):
            for path in checkpoint.list_complete(run_folder / "checkpoints")[-1:]:
                checkpoint.copy(path, folder / str(index))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Prepare the runs of this trial to continue from a checkpoint of Tune.

        A checkpoint of another trial replaces the files of this trial's runs. A checkpoint of this
        trial changes no files.
        checkpoint_dir: the folder that `save_checkpoint` filled.
        """
        self.cleanup()
        folder = Path(str(checkpoint_dir))
        if (folder / ORIGIN).read_text() == str(self._number):
            return
        for index, run_folder in enumerate(self._run_folders()):
            make_folder(run_folder)
            for path in run_folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != LOCK_FILE:
                    path.unlink()
            source = folder / str(index)
            if source.is_dir():
                shutil.copytree(source, run_folder / "checkpoints")

    def _run_folders(self) -> list[Path]:
        return trial.run_folders(Path(self._task.folder), self._number, self._plan.seeds())

    def cleanup(self) -> None:
        """Stop the runs of the trial."""
        if self._trial is not None:
            self._trial.close()
        self._trial = None


def _print_nothing(text: str) -> None:
    """Ignore a line of a run, because the process of the sweep prints the state of all trials."""


# --- the search as Tune describes it ------------------------------------------------------------
class Listener(tune.Callback):
    """A Tune callback that passes Tune's reports on trials to the records.

    ray_messages: the file with Ray's messages; its path is printed if a trial loses a process.
    """

    def __init__(self, records: TrialRecords, status: StatusLine, ray_messages: Path | None = None):
        self._records = records
        self._status = status
        self._ray_messages = ray_messages

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty dictionary, because nothing reads the callbacks that Tune stores."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record a trial that starts, or starts again."""
        self._records.start(_number(trial), trial.config["trial"]["point"])
        self._status.show(self._records.status())

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Record a measurement or a failure of a trial.

        result: the report of `SweepTrial.step`. In a continued sweep, a report without the keys
        "rows" and "error" repeats a measurement that is already recorded. It is ignored.
        """
        number = _number(trial)
        if "error" in result:
            self._records.fail(number, result["error"])
        elif "rows" in result:
            point = trial.config["trial"]["point"]
            rows, seconds = result["rows"], result["seconds"]
            self._records.add_rows(number, point, rows, seconds, result["is_complete"])
        self._status.show(self._records.status())

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Report that a trial lost its own process or a worker, and will start again."""
        messages = f". Ray's own messages: {self._ray_messages}" if self._ray_messages else ""
        self._records.report_restart(_number(trial), messages)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record the end of a trial, which can be before the last round."""
        self._records.end(_number(trial))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record the failure of a trial that was interrupted too often."""
        self._records.fail(
            _number(trial),
            f"it was interrupted {MAX_TRIAL_DEATHS} times, perhaps by losing a process because of "
            f"missing memory (see {self._records.folder / 'logs'})",
        )
        self._records.end(_number(trial))


def _number(tune_trial: Any) -> int:
    return int(Path(tune_trial.path).name)


def trial_task(
    records: TrialRecords, experiment: Experiment, resources: Resources, allow: Sequence[str]
) -> TrialTask:
    """Return the settings that the processes of all trials need.

    experiment: any run of the sweep, because all have the same device and packages.
    resources: what a worker reserves, by resource. With sweep.workers=0, a trial's process reserves
    this.
    allow: packages that the configurations may use.
    """
    spec = experiment.spec
    return TrialTask(
        folder=str(records.folder.absolute()),
        metric=records.metric,
        device=spec.device,
        resources=dict(resources),
        allow=tuple(allow),
        packages=tuple(spec.packages),
        driver=cluster.identify_process("driver", spec.packages),
        mixed=experiment.execution.runtime.mixed,
    )


def _trainable(plan: SweepPlan, task: TrialTask) -> Any:
    """Return the class that Tune runs for each trial, with the resources that a trial reserves.

    plan: the sweep.
    task: the settings that all trials share.
    """
    workers = plan.options.workers
    trial_bundle = {"memory": TRIAL_PROCESS_BYTES} if workers else dict(task.resources)
    worker_bundles = [multiply(task.resources, plan.options.seeds)] * workers
    group = tune.PlacementGroupFactory([trial_bundle, *worker_bundles])
    return tune.with_resources(tune.with_parameters(SweepTrial, plan=plan, task=task), group)


def multiply(resources: Resources, count: int) -> dict[str, float]:
    """Return the resources of `count` workers.

    resources: the resources of one worker, by name, such as {"CPU": 2.0}.
    """
    return {name: amount * count for name, amount in resources.items()}


def _trial_config(number: int, point: Point, replay: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Return the dictionary that Tune gives to a trial.

    number: the trial's number.
    point: the values of the searched keys.
    replay: the measurements (round, metric) that the trial reports again because it ended in an
    earlier session; else [].
    """
    return {"number": number, "point": point, "replay": list(replay)}


def _scheduler(plan: SweepPlan, rounds: int) -> TrialScheduler | None:
    options = plan.options
    if options.scheduler == "asha":
        return ASHAScheduler(
            time_attr="round",
            max_t=rounds,
            grace_period=min(options.grace, rounds),
            reduction_factor=options.reduction,
        )
    if options.scheduler == "pbt":
        return _population_based_training(plan)
    return None


def _population_based_training(plan: SweepPlan) -> PopulationBasedTraining:
    generator = stream(plan.seed, "sweep-mutations")

    def mutation(values: ValueRange) -> list[object] | Callable[[], object]:
        if isinstance(values, Choice):
            return list(values.values)
        return lambda: values.draw(generator)

    def explore(config: dict[str, Any]) -> dict[str, Any]:
        point = clip_point(plan.space, config["trial"]["point"])
        return config | {"trial": config["trial"] | {"point": point, "replay": []}}

    mutations = {key: mutation(values) for key, values in plan.space.items()}
    return PopulationBasedTraining(
        time_attr="round",
        perturbation_interval=plan.options.interval,
        hyperparam_mutations={"trial": {"point": mutations}},
        custom_explore_fn=explore,
    )


def _searcher(plan: SweepPlan, records: TrialRecords) -> Searcher | None:
    """Return the Optuna search of a sweep; None if the sweep is a grid or a random search."""
    if plan.options.search != "optuna":
        return None
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    earlier = list(records.all.values())
    replays = {record.number: records.measurements(record.number) for record in earlier}

    class NumberedSearch(OptunaSearch):
        """An Optuna search that numbers its suggestions and returns them as configs of trials."""

        count = 0

        def suggest(self, trial_id: str) -> dict[str, Any] | None:
            """Return the config of the next trial.

            The trials of earlier sessions come first, and keep their numbers.
            trial_id: Tune's name of the trial.
            """
            point = _decode(plan.space, super().suggest(trial_id) or {})
            number = earlier[self.count].number if self.count < len(earlier) else self.count
            self.count += 1
            return {"trial": _trial_config(number, point, replays.get(number, ()))}

    sampler = optuna.samplers.TPESampler(
        seed=plan.seed, constant_liar=True, n_startup_trials=min(10, max(3, plan.trials // 3))
    )
    return NumberedSearch(
        _distributions(plan.space),
        records.metric,
        plan.options.mode,
        points_to_evaluate=[_encode(plan.space, record.point) for record in earlier],
        sampler=sampler,
    )


def _distributions(space: Space) -> dict[str, Any]:
    """Return the search space as Optuna's distributions.

    Values of a list are represented by their index, because Optuna accepts only plain values.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    distributions: dict[str, Any] = {}
    for key, values in space.items():
        if isinstance(values, Choice):
            distributions[key] = CategoricalDistribution(list(range(len(values.values))))
        elif values.whole:
            low, high = int(values.low), int(values.high)
            distributions[key] = IntDistribution(low, high, log=values.log)
        else:
            distributions[key] = FloatDistribution(values.low, values.high, log=values.log)
    return distributions


def _decode(space: Space, params: Mapping[str, Any]) -> Point:
    """Return the setting that Optuna's parameters describe.

    space: the list or the interval of each searched key.
    params: for a key with a list, the index of the value; for a key with an interval, the value.
    """
    point: Point = {}
    for key, values in space.items():
        point[key] = values.values[params[key]] if isinstance(values, Choice) else params[key]
    return clip_point(space, point)


def _encode(space: Space, point: Point) -> dict[str, Any]:
    """Return the values with which Optuna stores a setting, by key.

    For a key that is searched in a list, this is the index of the setting's value in the list. For
    a key that is searched in an interval, it is the value.
    point: the setting.
    """
    params = {}
    for key, values in space.items():
        value = point[key]
        params[key] = values.values.index(value) if isinstance(values, Choice) else value
    return params


def free_resources() -> dict[str, float]:
    """Return the free resources of the Ray cluster, by name, such as {"CPU": 2.0}."""
    return dict(ray.available_resources())


# --- the search ---------------------------------------------------------------------------------
def search(
    plan: SweepPlan,
    records: TrialRecords,
    points: Sequence[Point],
    rounds: int,
    task: TrialTask,
    status: StatusLine,
    ray_messages: Path | None = None,
) -> None:
    """Execute all trials with Tune, and wait for their end.

    points: the settings of a grid or a random search; empty with Optuna.
    rounds: the rounds of the longest run, for the scheduler ASHA.
    ray_messages: the file with Ray's messages, or None; its path is printed if a trial loses a
    process.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    for name in ("ray.tune", "ray.air", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options = plan.options
    scratch = records.folder.absolute() / TUNE
    shutil.rmtree(scratch, ignore_errors=True)
    tuner = tune.Tuner(
        _trainable(plan, task),
        param_space=_param_space(plan, records, points),
        tune_config=tune.TuneConfig(
            metric=records.metric,
            mode=options.mode,
            search_alg=_searcher(plan, records),
            scheduler=_scheduler(plan, rounds),
            num_samples=plan.trials if options.search == "optuna" else 1,
            max_concurrent_trials=options.concurrent,
            time_budget_s=60 * options.minutes if options.minutes else None,
            reuse_actors=True,
            trial_dirname_creator=lambda trial: f"{trial.config['trial']['number']:04d}",
        ),
        run_config=tune.RunConfig(
            name=TUNE,
            storage_path=str(records.folder.absolute()),
            callbacks=[Listener(records, status, ray_messages)],
            # If a trial loses a process, it is started again and continues at its checkpoint.
            failure_config=tune.FailureConfig(max_failures=MAX_TRIAL_DEATHS - 1),
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _param_space(plan: SweepPlan, records: TrialRecords, points: Sequence[Point]) -> dict[str, Any]:
    if plan.options.search == "optuna":
        return {}
    configs = []
    for number, point in enumerate(points):
        if number in records.all:  # PBT may have changed it in an earlier session
            point = records.all[number].point
        configs.append(_trial_config(number, point, records.measurements(number)))
    return {"trial": tune.grid_search(configs)}
