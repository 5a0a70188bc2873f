"""The runtime without processes: one worker as a plain object; calls run at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Event
from raysim.simulation.fleet import Fleet
from raysim.simulation.schedule import Schedule
from raysim.training.determinism import openblas_threads
from raysim.training.resident import StateHandle
from raysim.training.run_spec import RunSpec
from raysim.training.worker import Worker


class InProcess:
    """Workers in this process, one unless others are given."""

    is_in_process = True

    def __init__(self, *members: Any):
        self.members, self.workers = members, len(members)
        self.nodes: Sequence[int] = (0,) * len(members)
        self.combine_from = 0.0

    def put(self, value: object) -> object:
        """The value itself."""
        return value

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        """Run it now."""
        result = getattr(self.members[worker], method)(*map(self.get, args))
        return [result] if returns == 1 else list(result)

    def get(self, ref: Any) -> Any:
        """The value itself; client states, which nobody needed so far, are copied from their device now."""
        return ref.read() if isinstance(ref, StateHandle) else ref

    def ready(self, refs: Sequence[Any], seconds: float) -> int:
        """All are there."""
        return 0

    def revive(self, worker: int) -> None:
        """It dies with this process, never before."""


@contextmanager
def preserve_torch_settings() -> Iterator[None]:
    """Afterwards the threads of torch and NumPy and torch's determinism, which workers pin, are as they were."""
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    products = openblas_threads().limit(limits=None)
    try:
        yield
    finally:
        products.restore_original_limits()
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)


def run(
    spec: RunSpec, schedule: Schedule, fleet: Fleet, folder: str = "", resume: str = ""
) -> Iterator[Event]:
    """Run in this process; afterwards the process is as it was.

    folder, resume: see `Coordinator`.
    """
    with preserve_torch_settings():
        yield from Coordinator(spec, schedule, fleet, InProcess(Worker(spec)), folder, resume).run()
