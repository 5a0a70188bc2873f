"""Define the settings of a run's execution, and `Experiment`, which has all objects of a run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from raysim.api.setup import RoundWarning
from raysim.api.topology import Network, one_replica
from raysim.experiment.config_files import Node
from raysim.primitives.checks import between
from raysim.results.history import THRESHOLDS
from raysim.results.mlflow_server import expand_uri
from raysim.results.observers import Observer
from raysim.runtime.placement import RayOptions
from raysim.simulation.fleet import Fleet
from raysim.simulation.schedule import Schedule
from raysim.training.run_spec import Precision, RunSpec

Rows: TypeAlias = list[dict[str, int | float | None]]


@dataclass(frozen=True)
class RuntimeOptions(RayOptions):
    """The settings of a run's workers: where they run, and their resources.

    name: "inprocess" runs one worker in this process. "local" runs workers with Ray on this
    machine, and "cluster" on a Ray cluster.
    threads: the number of CPU threads of each worker.
    lanes: the number of clients that a worker trains at the same time. None chooses by our
    measurements of speed.
    graph: True records each training step once and replays the recording, False does not. None
    chooses by our measurements of speed.
    precision: the format of matrix products in training: "float32", "tf32" (on a GPU) or
    "bfloat16". Parameters are always float32.
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
                "runtime.address=null does not name a cluster. Set it to auto, or to the address "
                "of a head node."
            )


@dataclass(frozen=True)
class Tracking:
    """The settings of `tracking`.

    name: "mlflow" stores the run for MLflow, "none" does not.
    uri: an MLflow server or database, which gets each row during the run. With None, the run is
    stored only in its folder, for `raysim ui`.
    """

    name: Literal["mlflow", "none"] = "mlflow"
    uri: str | None = None

    def __post_init__(self) -> None:
        expand_uri(self.uri or "")  # a wrong address is refused before the run starts


@dataclass(frozen=True)
class ExecutionOptions:
    """The settings of a run's execution, and of the files that it writes.

    out: the run's folder; None makes a dated folder in the folder runs.
    resume: "latest", or a checkpoint's folder or URL; None starts a new run.
    device: the device of each worker: "auto", "cpu", "cuda", a GPU such as "cuda:1", or "mps".
    profile: True measures how the wall time is spent.
    thresholds: values of the main metric. For each value, `rounds_to` in the summary has the first
    round that reaches it.
    tracking: whether and where the run is stored for MLflow.
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
    """All objects of a run, after their checks and before the run writes any file.

    config: the configuration, as the run's folder stores it.
    spec: the settings after the changes that methods made.
    warnings: texts that are printed before the run starts.
    observers: the observers that the configuration names.
    changes: a sentence for each setting that methods changed.
    round_warnings: functions by which methods check each finished round.
    network: the server's models, and the clients of each model.
    late_planning: why aggregations are planned one at a time, or "".
    url: the URL to which the run's folder is sent, or "".
    """

    config: Node
    spec: RunSpec
    schedule: Schedule
    fleet: Fleet
    execution: ExecutionOptions
    warnings: tuple[str, ...]
    observers: tuple[Observer, ...] = ()
    changes: tuple[str, ...] = ()
    round_warnings: tuple[RoundWarning, ...] = ()
    network: Network = field(default_factory=functools.partial(one_replica, 1))
    late_planning: str = ""
    url: str = ""

    def __repr__(self) -> str:
        clients, rounds = len(self.spec.data.partition.train), self.spec.settings.rounds
        return f"Experiment({self.title}: {clients} clients, rounds={rounds}, {self.schedule!r})"

    @property
    def title(self) -> str:
        """Return methods and data for file names and plots: "fedbr+mixup-mnist"."""
        methods = "+".join(method.name for method in self.spec.methods) or "fedavg"
        return f"{methods}-{self.config['choices']['data']}"


class Interrupted(KeyboardInterrupt):
    """The error of a run, study or sweep that the user stopped; it says how to continue."""
