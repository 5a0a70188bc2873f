"""What a configuration says besides the objects it names, and the objects of one study, built and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from raysim.api.declarations import Local
from raysim.api.server_view import Weighting
from raysim.experiment.compose import Node
from raysim.primitives.checks import at_least, between
from raysim.results.history import THRESHOLDS
from raysim.runtime.placement import RayOptions
from raysim.simulation.coordinator import Settings
from raysim.simulation.evaluator import Evaluation
from raysim.simulation.fleet import Fleet
from raysim.simulation.schedule import Schedule
from raysim.training.host import Recipe

Rows: TypeAlias = list[dict[str, int | float | None]]


@dataclass(frozen=True)
class RuntimeOptions(RayOptions):
    """Where a run's hosts live, and what each of them gets."""

    name: Literal["inprocess", "local", "cluster"] = "local"
    threads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("runtime.threads", self.threads, 1)
        if self.name == "cluster" and not self.address:
            raise ValueError(
                "runtime.address=null names no cluster: set it to auto, or to the address of its head node"
            )


@dataclass(frozen=True)
class Tracking:
    """Where metrics go besides the run's folder."""

    name: Literal["mlflow", "none"] = "mlflow"
    uri: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """How often, in rounds; 0: never."""

    every: int = 10

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)


@dataclass(frozen=True)
class Faults:
    """Share of an aggregation's clients that may fail."""

    tolerate: float = 0.1

    def __post_init__(self) -> None:
        between("faults.tolerate", self.tolerate, 0, 1)


@dataclass(frozen=True)
class State:
    """How many GiB of clients' accepted private states stay in memory; those idle for longest lie on disk beyond it."""

    budget: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            at_least("state.budget", self.budget, 0)

    @property
    def bytes(self) -> float:
        """The budget; infinite if there is none."""
        return math.inf if self.budget is None else self.budget * 2**30


@dataclass(frozen=True)
class Study:
    """What a configuration says besides the objects it names."""

    seed: int = 0
    rounds: int = 60
    out: str | None = None
    resume: str | None = None
    device: str = "auto"
    weighting: Weighting | None = None
    summation: int = 5
    thresholds: list[float] = field(default_factory=lambda: list(THRESHOLDS))
    local: Local = field(default_factory=Local)
    evaluate: Evaluation = field(default_factory=Evaluation)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    tracking: Tracking = field(default_factory=Tracking)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    faults: Faults = field(default_factory=Faults)
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        at_least("rounds", self.rounds, 1)
        at_least("summation", self.summation, 1)


@dataclass(frozen=True)
class Experiment:
    """Everything a run needs, built and checked; nothing has been written yet."""

    config: Node  # resolved, as stored in the run's folder
    study: Study
    recipe: Recipe
    schedule: Schedule
    fleet: Fleet
    settings: Settings
    warnings: tuple[str, ...]

    @property
    def title(self) -> str:
        """Methods and data, for file names and plots: "fedbr+mixup-mnist"."""
        methods = "+".join(method.name for method in self.recipe.methods) or "fedavg"
        return f"{methods}-{self.config['choices']['data']}"


@dataclass(frozen=True)
class Result:
    """A finished run: where it lies, its summary, and its history (a row per aggregation)."""

    folder: Path
    summary: dict[str, Any]
    rows: Rows


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; the text says how to go on."""
