"""Where a run is carried out, as the configuration says, and the run itself, built and checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from raysim.api.setup import RoundWarning
from raysim.experiment.config_files import Node
from raysim.primitives.checks import between
from raysim.results.history import THRESHOLDS
from raysim.results.observers import Observer
from raysim.results.tracking import expand_uri
from raysim.runtime.placement import RayOptions
from raysim.simulation.fleet import Fleet
from raysim.simulation.schedule import Schedule
from raysim.training.run_spec import Precision, RunSpec

Rows: TypeAlias = list[dict[str, int | float | None]]


@dataclass(frozen=True)
class RuntimeOptions(RayOptions):
    """Where a run's workers live, and what each of them gets. lanes: clients trained at once; None: as was measured.

    graph: whether steps are recorded once and replayed; None: as was measured. precision: of products within a step.
    """

    name: Literal["inprocess", "local", "cluster"] = "local"
    threads: int = 1
    lanes: int | None = None
    graph: bool | None = None
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        between("runtime.threads", self.threads, 1, 1024)
        between("runtime.lanes", 1 if self.lanes is None else self.lanes, 1, 4096)
        if self.name == "cluster" and not self.address:
            raise ValueError(
                "runtime.address=null names no cluster: set it to auto, or to the address of its head node"
            )


@dataclass(frozen=True)
class Tracking:
    """Where metrics go besides the run's folder."""

    name: Literal["mlflow", "none"] = "mlflow"
    uri: str | None = None

    def __post_init__(self) -> None:
        expand_uri(self.uri or "")  # refused before anything starts


@dataclass(frozen=True)
class ExecutionOptions:
    """Where a run is carried out and what is kept of it: the keys that `RunSettings` lacks, and that name no class.

    out: the run's folder. resume: "latest", or a checkpoint's folder. thresholds: accuracies, for `rounds_to`. profile:
    whether it is measured where the wall time goes.
    """

    out: str | None = None
    resume: str | None = None
    device: str = "auto"
    profile: bool = False
    thresholds: list[float] = field(default_factory=lambda: list(THRESHOLDS))
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    tracking: Tracking = field(default_factory=Tracking)


@dataclass(frozen=True, repr=False)
class Experiment:
    """A run, built and checked; nothing has been written yet.

    spec holds what really runs: `method=centralized`, for example, has changed its data and its local steps already.
    """

    config: Node  # resolved, as stored in the run's folder
    spec: RunSpec
    schedule: Schedule
    fleet: Fleet
    execution: ExecutionOptions
    warnings: tuple[str, ...]
    observers: tuple[Observer, ...] = ()  # that the configuration names
    changes: tuple[str, ...] = ()  # settings that methods changed, a sentence each
    round_warnings: tuple[RoundWarning, ...] = ()  # of methods, asked after each round

    def __repr__(self) -> str:
        clients, rounds = len(self.spec.data.partition.train), self.spec.settings.rounds
        return f"Experiment({self.title}: {clients} clients, rounds={rounds}, {self.schedule!r})"

    @property
    def title(self) -> str:
        """Methods and data, for file names and plots: "fedbr+mixup-mnist"."""
        methods = "+".join(method.name for method in self.spec.methods) or "fedavg"
        return f"{methods}-{self.config['choices']['data']}"


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; the text says how to go on."""
