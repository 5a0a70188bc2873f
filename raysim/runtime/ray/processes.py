"""Start the processes of a run, and keep them for the next runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray
from ray.util.placement_group import PlacementGroup

from raysim.runtime.placement import RayOptions, Resources, Size
from raysim.runtime.ray.actors import (
    RayCoordinator,
    RayRuntime,
    RayWorker,
    actor_class,
    become_all,
    identify_process,
    start_workers_in,
    store_dataset,
)
from raysim.runtime.ray.cluster import Say, bundle_options, reserve, run_bundles
from raysim.simulation.fleet import Fleet
from raysim.simulation.schedule import Schedule
from raysim.training.identity import Participants
from raysim.training.run_spec import RunSpec, share_frozen_weights

IDLE_TIMEOUT_S = 2  # an idle process answers within this time
Request: TypeAlias = tuple[list[dict[str, float]], str]  # bundles and strategy


@dataclass(frozen=True)
class RunProcesses:
    """The processes of a run, with their placement group.

    request: the bundles and the strategy of the placement group, as they were requested.
    workers, coordinator: the actors.
    end: function that ends the processes.
    """

    request: Request
    group: PlacementGroup
    workers: Sequence[Any]
    coordinator: Any
    end: Callable[[], None]

    @property
    def are_idle(self) -> bool:
        """True if all workers are alive and have answered all calls."""
        answers = [worker.ready.remote() for worker in self.workers]
        with suppress(ray.exceptions.RayError):
            return bool(ray.get(answers, timeout=IDLE_TIMEOUT_S))
        return False


def is_inside_trial() -> bool:
    """Return True inside a trial of a sweep.

    The placement group of the trial then decides on the number of workers.
    """
    return ray.util.get_current_placement_group() is not None


@dataclass
class _WaitingProcesses:
    """The workers and the coordinator of an ended run, which are kept for the driver's next run.

    name: the beginning of the names of these processes in Ray.
    processes: the kept processes; None if there are none.
    """

    name: str
    processes: RunProcesses | None = None

    def take(self, request: Request) -> RunProcesses | None:
        """Return the kept processes if they fit a request; otherwise end them and return None.

        request: the bundles and the strategy that the next run needs. The kept processes fit if
        they were started with an equal request.
        """
        if self.processes is not None and (self.processes.request != request or is_inside_trial()):
            self.end()
        processes, self.processes = self.processes, None
        return processes

    def end(self) -> None:
        """End the processes that are kept for the next run, if there are any."""
        processes, self.processes = self.processes, None
        if processes is not None:
            processes.end()


_waiting: _WaitingProcesses | None = None  # of this process, which has one Ray cluster


@contextmanager
def keep_processes(name: str) -> Iterator[None]:
    """Let all runs in this context use the same processes, which saves seconds for each run.

    A run gets new processes after a failed run, or if it needs other resources. An inner context
    has no effect.
    name: the beginning of the names of the processes in Ray's dashboard.
    """
    global _waiting
    if _waiting is not None:
        yield
        return
    _waiting = waiting = _WaitingProcesses(name)
    try:
        yield
    finally:
        _waiting = None
        waiting.end()


def end_waiting() -> None:
    """End the processes that are kept for the next run, because their resources are needed."""
    if _waiting is not None:
        _waiting.end()


def waiting_workers(per_worker: Resources) -> int:
    """Return how many idle workers with these resources are kept for the driver's next run.

    per_worker: the resources that each worker reserves.
    """
    if _waiting is None or _waiting.processes is None:
        return 0
    bundles, _ = _waiting.processes.request
    return bundles.count(dict(per_worker))


def release_processes(processes: RunProcesses, has_succeeded: bool) -> None:
    """Keep the processes of a run for the next run, or end them.

    The processes are kept if the run has succeeded, all its workers are idle, the context
    `keep_processes` is active, and no other processes are kept already.
    """
    can_wait = _waiting is not None and _waiting.processes is None
    if has_succeeded and can_wait and processes.are_idle:
        assert _waiting is not None, "checked above"
        _waiting.processes = processes
    else:
        processes.end()


def start_processes(
    spec: RunSpec,
    schedule_and_fleet: tuple[Schedule, Fleet],
    size: Size,
    options: RayOptions,
    say: Say,
    folder: str,
    resume: str,
) -> RunProcesses:
    """Return the workers and the coordinator of a run.

    Processes that were kept after an earlier run are used if they fit.
    folder: where the model is written, and the checkpoints unless `checkpoint.folder` is set; ""
    writes none.
    resume: the address of the checkpoint to continue from; "" starts a new run.
    """
    spec = share_frozen_weights(spec)
    request, shared = (run_bundles(size), options.strategy), ray.put(spec)
    base_name = _waiting.name if _waiting else Path(folder).name
    name = f"{base_name or 'raysim'}-{uuid.uuid4().hex[:6]}"

    def make_runtime(
        group: PlacementGroup, actors: Sequence[Any] = ()
    ) -> tuple[RayRuntime, tuple[Any, ...]]:
        """Return the runtime of all workers, and the arguments that make a `RayCoordinator`.

        actors: running actors that become the workers; () starts new actors.
        """
        content = store_dataset(spec, group)
        runtime = start_workers_in(
            group,
            size,
            name,
            options,
            RayWorker,
            shared,
            content,
            actors,
            Participants(identify_process("driver", spec.packages), options.mixed),
            spec.packages,
            spec.device,
            0 if is_inside_trial() else options.workers or schedule_and_fleet[0].concurrency,
        )
        return runtime, (shared, *schedule_and_fleet, runtime, folder, resume, content)

    waiting = None if _waiting is None else _waiting.take(request)
    if waiting is not None:
        try:
            _, arguments = make_runtime(waiting.group, waiting.workers)
            become_all([waiting.coordinator], [arguments])
            return waiting
        except ray.exceptions.RayError:
            waiting.end()  # new processes fail as well, if the cause was not in these ones
        except BaseException:
            waiting.end()
            raise
    with ExitStack() as stack:
        group = stack.enter_context(reserve(request[0], name, options, say))
        runtime, arguments = make_runtime(group)
        stack.callback(runtime.stop)
        coordinator_class = actor_class(RayCoordinator).options(
            name=f"{name}/coordinator", **bundle_options(group, 0, {})
        )
        coordinator = coordinator_class.remote(*arguments)
        stack.callback(ray.kill, coordinator)
        return RunProcesses(request, group, runtime.actors, coordinator, stack.pop_all().close)
