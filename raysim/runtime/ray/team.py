"""The processes of a run: they start side by side, and may stay for the runs that follow."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray
from ray.util.placement_group import PlacementGroup

from raysim.runtime.placement import RayOptions, Size
from raysim.runtime.ray.actors import (
    RayCoordinator,
    RayRuntime,
    RayWorker,
    actor_class,
    become_all,
    content_for,
    identify_process,
    start_workers_in,
)
from raysim.runtime.ray.cluster import Say, bundle_options, reserve, run_bundles
from raysim.simulation.fleet import Fleet
from raysim.simulation.schedule import Schedule
from raysim.training.identity import Participants
from raysim.training.run_spec import RunSpec

IDLE = 2  # seconds in which a process that has nothing left to do answers
Asked: TypeAlias = tuple[list[dict[str, float]], str]  # bundles and strategy


@dataclass(frozen=True)
class Team:
    """The processes of a run, and the bundles that they are in. end: ends them."""

    asked: Asked
    group: PlacementGroup
    workers: Sequence[Any]
    coordinator: Any
    end: Callable[[], None]

    @property
    def free(self) -> bool:
        """Whether all processes are there and have nothing left to do, such as jobs that no aggregation has taken."""
        answers = [worker.ready.remote() for worker in self.workers]
        with suppress(ray.exceptions.RayError):
            return bool(ray.get(answers, timeout=IDLE))
        return False


@dataclass
class _Stay:
    """Where the processes of a run wait for the next one."""

    name: str
    team: Team | None = None

    def take(self, asked: Asked) -> Team | None:
        """Processes that wait for a run of this size; others end."""
        if self.team and (
            self.team.asked != asked or ray.util.get_current_placement_group() is not None
        ):
            self.leave()
        team, self.team = self.team, None
        return team

    def leave(self) -> None:
        """End those that wait."""
        team, self.team = self.team, None
        if team is not None:
            team.end()


_stay: _Stay | None = None  # of this process, which has one Ray


@contextmanager
def keep_processes(name: str) -> Iterator[None]:
    """Runs of this process that follow each other work in the same processes, which start once: seconds for each run.

    A run whose workers are others in number or size gets new ones, and so does the one after a run that failed. name:
    of all the runs together, by which Ray's dashboard shows their processes. Inside another one it changes nothing.
    """
    global _stay
    if _stay is not None:
        yield
        return
    _stay = stay = _Stay(name)
    try:
        yield
    finally:
        _stay = None
        stay.leave()


def end_waiting() -> None:
    """End processes that wait for the next run: somebody needs all that they hold."""
    if _stay is not None:
        _stay.leave()


def release_processes(team: Team, well: bool) -> None:
    """A run has ended: its processes wait for the next one, if it went well and one may come; else they end."""
    if well and _stay is not None and _stay.team is None and team.free:
        _stay.team = team
    else:
        team.end()


def start_processes(
    spec: RunSpec,
    parts: tuple[Schedule, Fleet],
    size: Size,
    options: RayOptions,
    say: Say,
    places: tuple[str, str],
) -> Team:
    """Workers and coordinator of a run: those that wait for one, or new ones, which start side by side."""
    asked, shared = (run_bundles(size), options.strategy), ray.put(spec)
    name = f"{(_stay.name if _stay else Path(places[0]).name) or 'raysim'}-{uuid.uuid4().hex[:6]}"

    def workers(
        group: PlacementGroup, actors: Sequence[Any] = ()
    ) -> tuple[RayRuntime, tuple[Any, ...]]:
        content = content_for(spec, group)
        participants = Participants(identify_process("driver", spec.packages), options.mixed)
        of_run = participants, spec.packages, spec.device
        runtime = start_workers_in(
            group, size, name, options, RayWorker, shared, content, actors, *of_run
        )
        return runtime, (shared, *parts, runtime, *places, content)

    if _stay is not None and (team := _stay.take(asked)) is not None:
        try:
            runtime, needs = workers(team.group, team.workers)
            become_all([team.coordinator], [needs])
            return team
        except ray.exceptions.RayError:  # new ones say why, if it was not these
            team.end()
        except BaseException:
            team.end()
            raise
    with ExitStack() as stack:
        group = stack.enter_context(reserve(asked[0], name, options, say))
        runtime, needs = workers(group)
        stack.callback(runtime.stop)
        first = actor_class(RayCoordinator).options(
            name=f"{name}/coordinator", **bundle_options(group, 0, {})
        )
        coordinator = first.remote(*needs)
        stack.callback(ray.kill, coordinator)
        return Team(asked, group, runtime.actors, coordinator, stack.pop_all().close)
