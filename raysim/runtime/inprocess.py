"""The runtime with a single process: its workers are plain objects of this process.

A call of a worker's method is executed before `InProcess.call` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Event
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import LostNode, WorkerDiedError
from raysim.simulation.schedule import Schedule
from raysim.training.determinism import openblas_threads
from raysim.training.resident import StateHandle
from raysim.training.run_spec import RunSpec, share_frozen_weights
from raysim.training.worker import Worker
from raysim.vectors.tree_sum import add_up


class InProcess:
    """A `Runtime` that does all the work of a run in the run's own process.

    members: one or more objects whose methods train and score clients, usually a single `Worker`.
    """

    is_in_process = True

    def __init__(self, *members: Any):
        self.members, self.workers = members, len(members)
        self.nodes: Sequence[int] = (0,) * len(members)
        self.combine_from = 0.0

    def node_name(self, worker: int) -> str:
        """Return "", because all workers are in this process."""
        return ""

    def put(self, value: object) -> object:
        """Return the value itself."""
        return value

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        """Call a method of a worker now; return a list of the values that it returns.

        args: the arguments of the method, or references to them.
        returns: the number of values that the method returns.
        """
        result = getattr(self.members[worker], method)(*map(self.get, args))
        return [result] if returns == 1 else list(result)

    def add_up(self, node: int, parts: Sequence[range], refs: Sequence[Any]) -> Any:
        """Return the total of several sums of updates.

        node: is ignored, because all workers are in this process.
        parts: for each sum, the range of updates that it contains, by position in the order of
        aggregation. Each range is a subtree of the summation tree (`tree_sum`).
        refs: the sums.
        """
        return add_up(parts, *refs)

    def get(self, ref: Any) -> Any:
        """Return the value that a reference stands for; in this process this is `ref` itself.

        If `ref` stands for a client state (`StateHandle`), return a copy of the state on the CPU.
        """
        return ref.read() if isinstance(ref, StateHandle) else ref

    def ready(self, refs: Sequence[Any], seconds: float) -> int:
        """Return 0 without waiting: every value exists already, and 0 is the first one's index."""
        return 0

    def revive(self, worker: int) -> None:
        """Do nothing, because a worker in this process ends only with the process."""

    def explain_death(self, worker: int, death: WorkerDiedError) -> str:
        """Return the message of `death`.

        No call leads to this method, because a worker in this process dies only with the process.
        """
        return str(death)

    def silent_node_timeout(self, worker: int) -> float | None:
        """Return None, because a worker in this process is never silent."""
        return None

    def stacks(self, worker: int) -> str:
        """Return "", because this runtime never waits for a worker.

        Other runtimes return the call stacks of a worker that does not answer.
        """
        return ""

    def find_lost_workers(self) -> Mapping[int, LostNode]:
        """Return {}: no worker can be lost, because all workers are in the run's own process."""
        return {}

    def release(self, worker: int, may_return: bool = True) -> None:
        """Do nothing, because a worker in this process is never lost."""

    def take_new_workers(self) -> Sequence[int]:
        """Return (): no worker can join a run whose workers are all in its own process."""
        return ()

    def take_notices(self) -> Sequence[str]:
        """Return (), because all workers of this runtime exist from the start of the run.

        A notice is a sentence about a worker that could not join a run.
        """
        return ()


@contextmanager
def preserve_torch_settings() -> Iterator[None]:
    """When the context ends, restore settings of torch and NumPy that workers change.

    These are the numbers of threads, and whether torch uses only deterministic algorithms.
    """
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    numpy_threads = openblas_threads().limit(limits=None)
    try:
        yield
    finally:
        numpy_threads.restore_original_limits()
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)


def run(
    spec: RunSpec, schedule: Schedule, fleet: Fleet, folder: str = "", resume: str = ""
) -> Iterator[Event]:
    """Run in this process; yield the events of the run.

    Afterwards the settings of torch and NumPy are as before.
    folder: where the model is written, and the checkpoints unless `checkpoint.folder` is set; ""
    writes none.
    resume: the address of the checkpoint to continue from; "" starts a new run.
    """
    with preserve_torch_settings():
        spec = share_frozen_weights(spec)
        runtime = InProcess(Worker(spec))
        yield from Coordinator(spec, schedule, fleet, runtime, folder, resume).run()
