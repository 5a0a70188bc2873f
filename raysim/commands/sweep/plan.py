"""Plan a sweep: its options, its search space, and the configuration of every run.

All files are read before the sweep starts. Later changes of files have no effect. A continued sweep
is planned again from its sweep.yaml. This module imports no torch, so that it refuses wrong
overrides at once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from raysim.commands.sweep.overrides import sort_overrides
from raysim.commands.sweep.space import (
    Choice,
    Interval,
    Point,
    ValueRange,
    corner_points,
    distinct_points,
    grid_points,
    random_points,
)
from raysim.experiment import run_table
from raysim.experiment.compose import complete_draft, draft
from raysim.experiment.config_files import Node
from raysim.experiment.groups import find_groups
from raysim.experiment.instantiate import build_object, format_value
from raysim.experiment.many_runs import check_free, dated_folder, local_folder
from raysim.primitives.checks import above, at_least
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import user_path
from raysim.primitives.streams import stream

RankingMode: TypeAlias = Literal["max", "min"]

DEFAULT_TRIALS = 16
DRAWS_PER_TRIAL = 20  # because draws from a small space are often equal
# these may change when a sweep is continued
CHANGEABLE_OPTIONS = ("trials", "minutes", "concurrent")
CHANGEABLE_GROUPS = (
    "out",
    "resume",
    "runtime",
    "tracking",
    "checkpoint",
)  # no result depends on it
WHY_NOT_SEARCHED = {
    "seed": "sweep.seeds=N repeats each setting with N seeds",
    "out": "each run has its own folder",
    "resume": "each run has its own folder",
    "runtime": "no result depends on it",
    "tracking": "no result depends on it",
    "checkpoint": "no result depends on it",
}


@dataclass(frozen=True)
class SweepOptions:
    """The settings `sweep.*`: how to search, and with which resources.

    A trial is one value for each searched key.

    search: "random" draws trials, "grid" tries all combinations, "optuna" learns from earlier
    trials.
    scheduler: "asha" stops worse trials early (asynchronous successive halving). "pbt" replaces
    worse trials by changed copies of better ones (population-based training).
    trials: the number of trials; null means all combinations with search="grid", else 16.
    metric: the history column whose last value ranks the trials. null takes the main metric on
    validation samples; if there are none, on the central test set; if there is none, on the
    clients' test sets.
    mode: "max" if a higher metric is better, else "min"; null decides by the metric.
    seeds: the number of runs of each trial. Trials are compared by the means over their runs.
    concurrent: the number of trials at a time; null means as many as fit.
    workers: the number of workers of each run; 0 trains in the process of the trial.
    grace: the round of the first decision of "asha".
    reduction: the factor by which each decision of "asha" divides the number of trials.
    interval: the rounds between two exchanges of "pbt".
    minutes: the time limit of the sweep; null sets none.
    """

    name: str = "default"
    search: Literal["random", "grid", "optuna"] = "random"
    scheduler: Literal["none", "asha", "pbt"] = "none"
    trials: int | None = None
    metric: str | None = None
    mode: RankingMode | None = None
    seeds: int = 1
    concurrent: int | None = None
    workers: int = 0
    grace: int = 5
    reduction: float = 3.0
    interval: int = 5
    minutes: float | None = None

    def __post_init__(self) -> None:
        least_values = {
            "trials": 1,
            "seeds": 1,
            "concurrent": 1,
            "workers": 0,
            "grace": 1,
            "interval": 1,
        }
        for key, least in least_values.items():
            value = getattr(self, key)
            if value is not None:
                at_least(f"sweep.{key}", value, least)
        above("sweep.reduction", self.reduction, 1, "3 lets a third of the trials through")
        if self.minutes is not None:
            above("sweep.minutes", self.minutes, 0)
        if self.scheduler == "pbt" and self.search == "optuna":
            raise ValueError(
                "sweep.search=optuna cannot be used with sweep.scheduler=pbt, because pbt "
                "changes the values itself. Set sweep.search=random."
            )


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep with the configurations of its runs, as plain data.

    A draft is the configuration of one combination of searched options, such as method=fedavg. Its
    name is this combination as JSON text.

    space: the values to search, for each searched key.
    inactive: for each draft, the searched keys that it does not have, such as method.fedprox.mu
    with method=fedavg.
    overrides: the overrides of the command.
    """

    options: SweepOptions
    space: dict[str, ValueRange]
    drafts: dict[str, Node]
    inactive: dict[str, list[str]] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """Return the seed of each trial's first run, which the search algorithm also uses."""
        return int(self._first_draft()["seed"])

    @property
    def out(self) -> str:
        """Return the folder that out= sets; "" without out=."""
        return str(self._first_draft()["out"] or "")

    def setting(self, point: Mapping[str, object]) -> Point:
        """Leave out the searched keys that do not exist in the configuration of a trial.

        For example, a trial with method=fedavg has no key method.fedprox.mu.
        point: the trial's value for each searched key.
        """
        inactive = self.inactive[self._draft_name(point)]
        return {key: value for key, value in point.items() if key not in inactive}

    def node(self, point: Mapping[str, object], seed: int | None = None) -> Node:
        """Return the complete configuration of a run, as nested dictionaries. No file is read.

        point: the values of the searched keys.
        seed: the seed of the run; None takes the first seed.
        """
        name = self._draft_name(point)
        chosen = json.loads(name)
        values = self.setting(point)
        values = {key: value for key, value in values.items() if key not in chosen}
        if seed is not None:
            values["seed"] = seed
        return complete_draft(self.drafts[name], values)

    def seeds(self) -> range:
        """Return the seeds with which each setting is run."""
        return range(self.seed, self.seed + self.options.seeds)

    def points(self) -> list[Point]:
        """Return the settings of a grid or a random search, each of them once.

        A random search in a small space may have fewer than `trials` settings.
        Raise `RefusedError` for a grid with an interval, or if sweep.trials is not the size of the
        grid.
        """
        if self.options.search == "grid":
            points = distinct_points([self.setting(point) for point in grid_points(self.space)])
            if self.options.trials not in (None, len(points)):
                raise RefusedError(
                    f"sweep.trials={self.options.trials}: a grid runs all of its trials, which are "
                    f"{len(points)} here. Leave sweep.trials out."
                )
            return points
        count = DRAWS_PER_TRIAL * self.trials
        drawn = random_points(self.space, count, stream(self.seed, "sweep"))
        return distinct_points([self.setting(point) for point in drawn])[: self.trials]

    @property
    def trials(self) -> int:
        """Return the number of settings that a random or an Optuna search tries.

        A grid search tries all combinations and does not use this number.
        """
        return self.options.trials or DEFAULT_TRIALS

    def samples(self) -> list[Point]:
        """Return a few settings that together contain all searched values, to check them first.

        Each listed value, each end of an interval, and each combination of options occurs in one of
        them.
        """
        corners = corner_points(self.space)
        points = list(corners)
        for corner, name in zip(itertools.cycle(corners), self.drafts, strict=False):
            points.append(corner | json.loads(name))
        settings = [self.setting(point) for point in points]
        # These settings lack a corner's value if its key does not exist with their options.
        occurring = {_name({key: value}) for point in settings for key, value in point.items()}
        for corner, name in itertools.product(corners, self.drafts):
            setting = self.setting(corner | json.loads(name))
            values = {_name({key: value}) for key, value in setting.items()}
            if not values <= occurring:
                settings.append(setting)
                occurring |= values
        return distinct_points(settings)

    def fingerprint(self) -> str:
        """Return a checksum of everything that the trials depend on.

        A continued sweep compares it, to notice changed files.
        """
        options = {
            key: value
            for key, value in asdict(self.options).items()
            if key not in CHANGEABLE_OPTIONS
        }
        drafts = {}
        for name, node in self.drafts.items():
            ignored = ("choices", *CHANGEABLE_GROUPS)
            drafts[name] = {key: value for key, value in node.items() if key not in ignored}
        space = {key: repr(values) for key, values in self.space.items()}
        text = json.dumps([options, space, drafts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _first_draft(self) -> Node:
        return next(iter(self.drafts.values()))

    def _draft_name(self, point: Mapping[str, object]) -> str:
        groups_searched = json.loads(next(iter(self.drafts)))
        return _name({key: point[key] for key in groups_searched})


def _name(chosen: Mapping[str, object]) -> str:
    return json.dumps(chosen, sort_keys=True)


def plan(overrides: Sequence[str], conf: Sequence[str] = ()) -> SweepPlan:
    """Return the sweep that the overrides describe.

    conf: the user's own folders of options.
    Raise `RefusedError` if the sweep is impossible.
    """
    parsed = sort_overrides(overrides, conf)
    space = parsed.space
    options = build_object(SweepOptions, parsed.options, "sweep")
    if not space:
        raise RefusedError(
            "sweep: no key has several values, so there is nothing to search. Choose a search "
            "space with sweep=NAME, or give a key several values, such as "
            "method.fedprox.mu=0.01,0.1,1 or local.lr='tag(log, interval(1e-3, 1))'."
        )
    group_names = find_groups([user_path(folder).absolute() for folder in conf]).files
    _check_space(space, set(group_names))
    chosen = {
        key: values.values
        for key, values in space.items()
        if key in group_names and isinstance(values, Choice)
    }
    keys = [key for key in space if key not in chosen]
    if options.scheduler == "pbt":
        _check_changeable(space, set(chosen))
    drafts: dict[str, Node] = {}
    inactive: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for combination in itertools.product(*chosen.values()):
        choices = dict(zip(chosen, combination, strict=True))
        texts = [f"{key}={format_value(value)}" for key, value in choices.items()]
        name = _name(choices)
        drafts[name], reasons = draft([*parsed.fixed, *texts], conf, keys)
        inactive[name] = list(reasons)
    for key in keys:
        if all(key in missing for missing in inactive.values()):
            raise RefusedError(reasons[key])
    result = SweepPlan(options, space, drafts, inactive, tuple(overrides))
    if options.search != "optuna":
        result.points()  # refuses a grid with an interval
    return result


def _check_space(space: Mapping[str, ValueRange], group_names: set[str]) -> None:
    for key, values in space.items():
        reason = WHY_NOT_SEARCHED.get(key.partition(".")[0])
        if reason:
            raise RefusedError(f"{key} cannot be searched: {reason}. Give it one value.")
        if key in group_names and isinstance(values, Interval):
            raise RefusedError(
                f"{key} cannot be searched in an interval of numbers, because its values are names "
                f"of options. Write a list of options, {key}=a,b."
            )


def _check_changeable(space: Mapping[str, ValueRange], option_keys: set[str]) -> None:
    """Raise `RefusedError` if population-based training (PBT) cannot search one of the keys.

    PBT changes values during a run. It can change only the keys `method.*` and `local.*`, and no
    options.
    option_keys: the searched keys whose values are names of options, such as "method".
    """
    for key in space:
        if key in option_keys or key.partition(".")[0] not in ("method", "local"):
            raise RefusedError(
                f"{key}: sweep.scheduler=pbt changes values during a run, but this key cannot "
                "change then. Search keys of method.* or local.*, or leave the scheduler out."
            )


# --- the folder ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class SweepRequest:
    """A sweep and its folder.

    conf: the user's own folders of options.
    is_new: if the folder exists, True refuses it and False continues the sweep in it.
    is_dated: True if the user gave no `out=`, so that the folder's name has the time of the start.
    """

    plan: SweepPlan
    folder: Path
    conf: tuple[str, ...] = ()
    is_new: bool = False
    is_dated: bool = False


def read_request(overrides: Sequence[str], conf: Sequence[str] = ()) -> SweepRequest:
    """Return the sweep and the folder that the overrides describe.

    conf: the user's own folders of options.
    Raise `RefusedError` if the sweep is impossible. Without resume=latest, also raise it if the
    folder exists. With it, raise it if the folder has files, but no sweep to continue.
    """
    conf = tuple(str(user_path(root).absolute()) for root in conf)
    values = dict(override.partition("=")[::2] for override in overrides)
    has_resume = "resume" in values
    folder = local_folder(values.get("out", ""))
    if has_resume and run_table.is_continued(overrides, "sweep", folder):
        return _continue_sweep(folder, overrides, conf)
    overrides = [override for override in overrides if override != "resume=latest"]
    sweep_plan = plan(overrides, conf)
    if sweep_plan.out:
        folder = local_folder(sweep_plan.out)
    else:
        folder = dated_folder(Path("runs"), f"sweep-{sweep_plan.options.name}")
    if not has_resume:
        check_free(folder)
    is_dated = not sweep_plan.out
    return SweepRequest(sweep_plan, folder, conf, is_new=not has_resume, is_dated=is_dated)


def _continue_sweep(folder: Path, overrides: Sequence[str], conf: tuple[str, ...]) -> SweepRequest:
    """Return the sweep that is stored in a folder, with the changes that overrides make.

    For example, an override may add trials.

    conf: the user's own folders of options; () takes the stored ones.
    Raise `RefusedError` if an override changes a value that cannot change in a sweep, or if a
    configuration file or raysim has changed since the sweep began.
    """
    stored = run_table.load_plan(folder, "sweep")
    merged = {override.partition("=")[0]: override for override in stored["overrides"]}
    changeable = (*CHANGEABLE_GROUPS, *(f"sweep.{option}" for option in CHANGEABLE_OPTIONS))
    for override in overrides:
        key = override.partition("=")[0]
        is_changeable = key in changeable or key in ("runtime.address", "tracking.uri")
        if override not in stored["overrides"] and not is_changeable:
            raise RefusedError(
                f"{override}: this setting cannot change in a sweep that has begun. Leave it out, "
                "or start a sweep in a new folder."
            )
        if key not in ("out", "resume"):
            merged[key] = override
    conf = conf or tuple(stored["conf"])
    sweep_plan = plan(list(merged.values()), conf)
    if sweep_plan.fingerprint() != stored.get("fingerprint"):
        raise RefusedError(
            f"out={folder}: the configuration files, or raysim itself, have changed since this "
            "sweep began, so its trials would not be comparable. Restore them, or start a sweep "
            "in a new folder."
        )
    return SweepRequest(sweep_plan, folder, conf)


def store(request: SweepRequest, folder: Path) -> None:
    """Write sweep.yaml into a folder."""
    sweep_plan = request.plan
    overrides = []
    for override in sweep_plan.overrides:
        if override.partition("=")[0] not in ("out", "resume"):
            overrides.append(override)
    facts = {"fingerprint": sweep_plan.fingerprint()}
    run_table.store_plan(folder, "sweep", overrides, request.conf, facts)
