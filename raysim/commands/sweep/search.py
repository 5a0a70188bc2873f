"""What a search is before it starts: its options, its space, and the configuration of every run as plain data.

All files are read and all choices composed here; afterwards `sweep.json` in the folder is the whole truth, so files
that change while a search goes on, or before it is continued, change nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from raysim.commands.sweep.space import (
    Choice,
    Interval,
    Point,
    Range,
    covering,
    distinct,
    grid,
    nearest,
    random_points,
)
from raysim.commands.sweep.words import sweeping
from raysim.experiment.compose import complete_draft, draft
from raysim.experiment.config_files import Node
from raysim.experiment.groups import find_groups
from raysim.experiment.instantiate import build_object, format_value
from raysim.experiment.many_runs import asked_to_continue, check_free, dated_folder, not_a_folder_of
from raysim.primitives.checks import above, at_least
from raysim.primitives.errors import Refused
from raysim.primitives.files import user_path
from raysim.primitives.streams import stream
from raysim.results.history import write_json

FILE = "sweep.json"
DEFAULT_TRIALS = 16
_TRIES = (
    20  # draws for each random setting, because a small space gives the same ones again and again
)
FREE = ("trials", "minutes", "concurrent")  # options that may change when a search is continued
NOT_SEARCHED = {
    "seed": "sweep.seeds=N repeats each setting under N seeds",
    "out": "each trial has a folder of its own",
    "resume": "each trial has a folder of its own",
    "runtime": "no result depends on it",
    "tracking": "no result depends on it",
    "checkpoint": "no result depends on it",
}


@dataclass(frozen=True)
class Options:
    """`sweep.*`: how to search, and what with.

    trials: how many settings (null: all of a grid, else 16). metric: a column of the history (null: accuracy_global
    where there is a central test set, else accuracy, or the error of values, of which the least is best), of which the
    last value counts. seeds: runs of each setting,
    whose mean counts. concurrent: trials at once (null: as many as fit). workers: of each trial's runs (0: they run in
    the trial's own process). grace, reduction: ASHA's first rung in rounds, and the part it lets through is
    1/reduction. interval: rounds between PBT's exchanges. minutes: after which no trial goes on.
    """

    name: str = "default"
    search: Literal["random", "grid", "optuna"] = "random"
    scheduler: Literal["none", "asha", "pbt"] = "none"
    trials: int | None = None
    metric: str | None = None
    mode: Literal["max", "min"] = "max"
    seeds: int = 1
    concurrent: int | None = None
    workers: int = 0
    grace: int = 5
    reduction: float = 3.0
    interval: int = 5
    minutes: float | None = None

    def __post_init__(self) -> None:
        for key, least in (
            ("trials", 1),
            ("seeds", 1),
            ("concurrent", 1),
            ("workers", 0),
            ("grace", 1),
            ("interval", 1),
        ):
            if (value := getattr(self, key)) is not None:
                at_least(f"sweep.{key}", value, least)
        above("sweep.reduction", self.reduction, 1, "3 lets a third of the trials through")
        if self.minutes is not None:
            above("sweep.minutes", self.minutes, 0)
        if self.scheduler == "pbt" and self.search == "optuna":
            raise ValueError(
                "sweep.scheduler=pbt changes values itself, so optuna has no say: set sweep.search=random"
            )


@dataclass(frozen=True)
class Search:
    """A search, composed and checked; plain data."""

    options: Options
    space: dict[str, Range]
    drafts: dict[str, Node]  # by the values of the groups that are searched over, as JSON
    inactive: dict[str, list[str]] = field(
        default_factory=dict
    )  # by the same: keys that these options do not have
    words: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """The first seed of each setting, and the search's own."""
        return int(next(iter(self.drafts.values()))["seed"])

    def setting(self, point: Mapping[str, object]) -> Point:
        """A point without the keys that its own choices do not have (moon's mu where moon is not chosen)."""
        inactive = self.inactive[self._draft(point)]
        return {key: value for key, value in point.items() if key not in inactive}

    def node(self, point: Mapping[str, object], seed: int | None = None) -> Node:
        """The resolved configuration of a run at a point; no file is read."""
        name = self._draft(point)
        values = {
            key: value for key, value in self.setting(point).items() if key not in json.loads(name)
        }
        return complete_draft(self.drafts[name], values | ({} if seed is None else {"seed": seed}))

    def seeds(self) -> range:
        """The seeds of each setting."""
        return range(self.seed, self.seed + self.options.seeds)

    def points(self) -> list[Point]:
        """The settings of a grid or a random search, known before it starts."""
        if self.options.search == "grid":
            points = distinct([self.setting(point) for point in grid(self.space)])
            if self.options.trials not in (None, len(points)):
                raise Refused(
                    f"sweep.trials={self.options.trials}, but this grid has {len(points)}: leave it out"
                )
            return points
        drawn = random_points(self.space, _TRIES * self.trials, stream(self.seed, "sweep"))
        return distinct([self.setting(point) for point in drawn])[: self.trials]

    @property
    def trials(self) -> int:
        """How many settings a random or an Optuna search looks at."""
        return self.options.trials or DEFAULT_TRIALS

    def samples(self) -> list[Point]:
        """A few points that show whether all values are allowed: each choice, and both ends of each range."""
        wide = covering(self.space)
        each = [
            point | json.loads(name)
            for point, name in zip(itertools.cycle(wide), self.drafts, strict=False)
        ]
        return distinct([self.setting(point) for point in [*wide, *each]])

    def within(self, point: Mapping[str, object]) -> Point:
        """A point whose values have left their ranges, put back."""
        return nearest(self.space, point)

    def _draft(self, point: Mapping[str, object]) -> str:
        return _name({key: point[key] for key in json.loads(next(iter(self.drafts)))})


def _name(choices: Mapping[str, object]) -> str:
    return json.dumps(choices, sort_keys=True)


def plan(words: Sequence[str], conf: Sequence[str] = ()) -> Search:
    """A new search from the command line's words. Raises Refused."""
    node, space, fixed = sweeping(words, conf)
    options = build_object(Options, node, "sweep")
    if not space:
        raise Refused(
            "this search has no space: choose one with sweep=NAME, or give a key several values, such as "
            "method.fedprox.mu=0.01,0.1,1 or local.lr='tag(log, interval(1e-3, 1))'"
        )
    known = find_groups([user_path(folder).absolute() for folder in conf]).files
    for key in space:
        if why := NOT_SEARCHED.get(key.partition(".")[0]):
            raise Refused(f"{key} is not searched over: {why}")
        if key in known and isinstance(space[key], Interval):
            raise Refused(f"{key} takes the name of an option: write {key}=a,b")
    chosen = {
        key: found.values
        for key, found in space.items()
        if key in known and isinstance(found, Choice)
    }
    keys = [key for key in space if key not in chosen]
    if options.scheduler == "pbt":
        _refuse_fixed(space, chosen)
    drafts, inactive = {}, {}
    for values in itertools.product(*chosen.values()):
        choices = dict(zip(chosen, values, strict=True))
        texts = [f"{key}={format_value(value)}" for key, value in choices.items()]
        drafts[_name(choices)], missing = draft([*fixed, *texts], conf, keys)
        inactive[_name(choices)] = list(missing)
        sentences = missing
    if never := [key for key in keys if all(key in missing for missing in inactive.values())]:
        raise Refused(sentences[never[0]])
    search = Search(options, space, drafts, inactive, tuple(words))
    if options.search != "optuna":
        search.points()
    return search


def _refuse_fixed(space: Mapping[str, Range], chosen: Mapping[str, object]) -> None:
    """What cannot change while a run goes on."""
    for key in space:
        if key in chosen or key.partition(".")[0] not in ("method", "local"):
            raise Refused(
                f"sweep.scheduler=pbt changes values while a run goes on, which {key} cannot: search over keys of "
                "method.* or local.*, or leave the scheduler out"
            )


# --- the folder -----------------------------------------------------------------------------------------------------
def _out(search: Search) -> str:
    """The folder that out= names, or ""."""
    return str(next(iter(search.drafts.values()))["out"] or "")


def folder_of(search: Search) -> Path:
    """Where a search writes: as out= says, else runs/<date>-sweep-<name>."""
    if out := _out(search):
        return user_path(out)
    return dated_folder(Path("runs"), f"sweep-{search.options.name}")


def store(search: Search, folder: Path) -> None:
    """Write sweep.json."""
    ranges = {
        key: {"kind": type(found).__name__, **asdict(found)} for key, found in search.space.items()
    }
    write_json(
        {**search.__dict__, "options": asdict(search.options), "space": ranges}, folder / FILE
    )


def load(folder: Path) -> Search:
    """Read sweep.json. Raises Refused where there is none, or a broken one."""
    try:
        stored: dict[str, Any] = json.loads((folder / FILE).read_text())
        space: dict[str, Range] = {}
        for key, values in stored["space"].items():
            kind = values.pop("kind")
            space[key] = (
                Interval(**values) if kind == "Interval" else Choice(tuple(values["values"]))
            )
        return Search(
            Options(**stored["options"]),
            space,
            stored["drafts"],
            stored["inactive"],
            tuple(stored["words"]),
        )
    except FileNotFoundError:
        raise not_a_folder_of("search", folder, FILE) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{folder / FILE} cannot be read ({error}): restore it, or start in a new folder"
        ) from error


def continued(folder: Path, words: Sequence[str]) -> Search:
    """The search of a folder, with more trials or time if asked; everything else is settled. Raises Refused."""
    search = load(folder)
    free = ("out", "resume", "runtime", "runtime.address", *(f"sweep.{key}" for key in FREE))
    for word in words:
        if word not in search.words and word.partition("=")[0] not in free:
            raise Refused(
                f"{word} cannot change a search that has begun: leave it out, or start one in a new folder"
            )
    node, *_ = sweeping(
        [word for word in words if word.startswith("sweep.") and word.partition("=")[0] in free]
    )
    options = asdict(search.options) | {key: value for key, value in node.items() if key in FREE}
    return replace(search, options=build_object(Options, options, "sweep"))


@dataclass(frozen=True)
class SweepRequest:
    """A search, the folder that it writes, and whether that folder holds a part of it already."""

    search: Search
    folder: Path
    known: bool
    words: tuple[str, ...]
    dated: bool = False  # whether the folder's name is the time of the start


def read_request(words: Sequence[str], conf: Sequence[str] = ()) -> SweepRequest:
    """What the words of `raysim sweep` mean. Raises Refused."""
    if asked_to_continue(words, "search"):
        out = dict(word.split("=", 1) for word in words if word.startswith("out="))["out"]
        folder = user_path(out)
        return SweepRequest(continued(folder, words), folder, True, tuple(words))
    search = plan(words, conf)
    check_free(folder := folder_of(search))
    return SweepRequest(search, folder, False, tuple(words), dated=not _out(search))
