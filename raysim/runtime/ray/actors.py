"""The processes of a run as actors: workers, the coordinator, and how it reaches the workers."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from ray.util.placement_group import PlacementGroup

from raysim.api.messages import PublishedVersion
from raysim.data.dataset import copy_to_cache
from raysim.primitives.errors import first_line
from raysim.runtime.placement import RayOptions, Size
from raysim.runtime.ray.cluster import bundle_options
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import (
    Event,
    Finished,
    ProcessLostError,
    Round,
    RunStoppedError,
    Started,
)
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import START_TIMEOUT_S, WorkerDiedError
from raysim.simulation.schedule import Schedule
from raysim.training.identity import Identity, Participants, UnequalWorkersError, identify
from raysim.training.run_spec import RunSpec
from raysim.training.worker import Worker

INLINE = (
    1 << 16
)  # bytes that cost less to send with every call than to store once, which takes half a millisecond
TOGETHER = 0.1  # seconds in which finished rounds are collected for one message to the driver
REVIVAL = 300  # seconds for a new worker in the place of a dead one
ROOM = 30  # seconds between two looks whether there is room for it at all: Ray may learn late that a node is gone


def content_for(spec: RunSpec, group: PlacementGroup | None) -> list[ray.ObjectRef[Any]]:
    """The data set's file as bytes in the object store, where a bundle lies on another node than this process."""
    if group is None:
        return []
    used = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    if used <= {ray.get_runtime_context().get_node_id()}:
        return []
    return [ray.put(np.fromfile(spec.data.dataset_path, np.uint8))]


def read_here(spec: RunSpec, content: Sequence[ray.ObjectRef[Any]]) -> RunSpec:
    """The same run, its data set read from this node: the first process that misses it writes it, others map it."""
    path = spec.data.dataset_path
    if not content or path.exists():
        return spec
    local_path = copy_to_cache(path.name, lambda: ray.get(content[0]))
    return replace(spec, data=replace(spec.data, dataset_path=local_path))


class RayWorker(Worker):
    """A worker as an actor."""

    def __init__(self, spec: RunSpec, name: str, content: Sequence[ray.ObjectRef[Any]] = ()):
        super().__init__(read_here(spec, content), name)

    def identity(self) -> Identity:
        """Return what the bits depend on that this worker computes."""
        return identify_process(self.name, self.spec.packages, self.spec.device)


def identify_process(name: str, packages: Sequence[str] = (), device: str = "") -> Identity:
    """Return the identity of this process, with the address of its node."""
    return identify(name, packages, device, f"{platform.node()} ({ray.util.get_node_ip_address()})")


@functools.cache
def actor_class(kind: type) -> Any:
    """A process that holds such an object, until it holds another; what the object offers is what the actor does.

    Ray calls the functions of a class, and would pass by what a profile puts on an object.
    """

    def __init__(self: Any, *args: Any) -> None:
        self.held = kind(*args)

    def become(self: Any, *args: Any) -> None:
        """Hold one that is made of this; nothing of the one before is left, on a GPU neither."""
        self.held = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.held = kind(*args)

    def through(name: str) -> Callable[..., Any]:
        def generate(self: Any, *args: Any) -> Iterator[Any]:
            yield from getattr(self.held, name)(*args)

        if inspect.isgeneratorfunction(getattr(kind, name)):  # Ray wants to see that
            return generate
        return lambda self, *args: getattr(self.held, name)(*args)

    offered = [
        name for name, value in inspect.getmembers(kind, callable) if not name.startswith("_")
    ]
    content = {"__init__": __init__, "become": become} | {name: through(name) for name in offered}
    return ray.remote(type(kind.__name__, (), content))


class RayCoordinator:
    """The actor that runs a `Coordinator`; it makes every call to the workers, so it owns what they return."""

    def __init__(
        self,
        spec: RunSpec,
        schedule: Schedule,
        fleet: Fleet,
        runtime: RayRuntime,
        folder: str,
        resume: str,
        content: Sequence[ray.ObjectRef[Any]] = (),
    ):
        here = replace(read_here(spec, content), device="cpu")
        self._patience = START_TIMEOUT_S + (spec.settings.faults.timeout or math.inf)
        self._packages, self._runtime = spec.packages, runtime
        self._events = Coordinator(here, schedule, fleet, runtime, folder, resume).run()

    def begin(self) -> Iterator[list[Event]]:
        """The run's events up to its start: whoever asks for those after it has made the run's folder.

        Workers are ready at the start. Raises UnequalWorkersError if one computes other bits than the driver.
        """
        for event in self._events:
            if not isinstance(event, Started):
                yield [event]
                continue
            yield [replace(event, processes=self._meet_workers())]
            return

    def _meet_workers(self) -> tuple[Identity, ...]:
        """Wait until all workers are ready, and compare them with this process and the driver."""
        participants = self._runtime.participants
        if participants is None:
            return ()
        self._runtime.meet_workers(self._patience, identify_process("coordinator", self._packages))
        return tuple(participants.all)

    def events(self) -> Iterator[list[Event]]:
        """The others, as they happen; rounds that follow each other at once in one message."""
        batch: list[Event] = []
        since = time.monotonic()
        try:
            for event in self._events:
                if isinstance(event, Finished) and self._runtime.participants is not None:
                    event = replace(event, processes=tuple(self._runtime.participants.all))
                batch.append(event)
                if not isinstance(event, Round) or time.monotonic() - since > TOGETHER:
                    yield batch
                    batch, since = [], time.monotonic()
        except Exception:
            yield batch
            raise


class RayRuntime:
    """Workers as actors of class `Worker`, calls as actor tasks, values in the object store.

    start: makes the actor of a worker, given its number. nodes, combine_from: see `Runtime`. actors: those of the
    workers, where they are there already. participants: compares each worker that is ready with the driver;
    None: no comparison.
    identify: starts a task that identifies the place of a worker, given its number, after its process died.
    """

    is_in_process = False

    def __init__(
        self,
        workers: int,
        start: Callable[[int], Any],
        nodes: Sequence[int] = (),
        combine_from: float = math.inf,
        actors: Sequence[Any] = (),
        participants: Participants | None = None,
        identify: Callable[[int], ray.ObjectRef[Identity]] | None = None,
    ):
        self.participants, self._identify = participants, identify
        self.workers, self._make, self.combine_from = workers, start, combine_from
        self.nodes = nodes or (0,) * workers
        self.actors = list(actors) or [start(worker) for worker in range(workers)]
        self._methods: dict[
            tuple[int, str, int], Any
        ] = {}  # what is called, by worker, name and number of results

    def put(self, value: object) -> object:
        """Into the object store, once; workers of one node map the same memory. A small model travels in each call."""
        return (
            value
            if isinstance(value, PublishedVersion) and value.nbytes <= INLINE
            else ray.put(value)
        )

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        """An actor task; its results belong to the caller."""
        if (task := self._methods.get((worker, method, returns))) is None:
            task = getattr(self.actors[worker], method).options(num_returns=returns)
            self._methods[worker, method, returns] = task
        refs = task.remote(*args)
        return [refs] if returns == 1 else list(refs)

    def get(self, ref: Any) -> Any:
        """Wait for a result; arrays in it are read-only views into the object store."""
        if not isinstance(ref, ray.ObjectRef):
            return ref
        try:
            return ray.get(ref)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise WorkerDiedError(first_line(error)) from None

    def ready(self, refs: Sequence[Any], seconds: float) -> int | None:
        """The first that is there, in the order of `refs`."""
        timeout = None if math.isinf(seconds) else seconds
        found, _ = ray.wait(list(refs), num_returns=1, timeout=timeout, fetch_local=False)
        return refs.index(found[0]) if found else None

    def revive(self, worker: int) -> None:
        """Another actor in the same bundle; Ray moves the bundle where its node is gone and another one has room."""
        ray.kill(self.actors[worker])  # it may only have been out of reach
        self.actors[worker] = self._make(worker)
        self._methods.clear()
        actor = self.actors[worker]
        ready = actor.ready.remote() if self.participants is None else actor.identity.remote()
        for _ in range(REVIVAL // ROOM):
            if ray.wait([ready], timeout=ROOM)[0]:
                self._meet_replacement(worker, ready)
                return
            if _roomless():
                break
        raise ProcessLostError(
            f"worker {worker} died and no other one started in its place: its node may be gone"
        )

    def meet_workers(self, patience_s: float, *others: Identity) -> None:
        """Wait until all workers are ready, and compare them and other processes of the run with the driver.

        Raises UnequalWorkersError, or ProcessLostError.
        """
        assert self.participants is not None, "only then is there anything to compare"
        answers = [actor.identity.remote() for actor in self.actors]
        timeout = None if math.isinf(patience_s) else patience_s
        _, late = ray.wait(answers, num_returns=len(answers), timeout=timeout, fetch_local=False)
        if late:
            names = ", ".join(f"worker-{answers.index(answer)}" for answer in late)
            raise ProcessLostError(f"{names} did not start within {patience_s:g} s")
        identities = [self._identity(worker, answer) for worker, answer in enumerate(answers)]
        self.participants.add(
            *others, *(identity for identity in identities if identity is not None)
        )

    def _meet_replacement(self, worker: int, answer: ray.ObjectRef[Any]) -> None:
        """Compare a worker in the place of a dead one. Raises RunStoppedError if it computes other bits."""
        if self.participants is None or (identity := self._identity(worker, answer)) is None:
            return
        try:
            self.participants.add(identity)
        except UnequalWorkersError as error:
            raise RunStoppedError(
                f"worker {worker} died, and its replacement differs. {error} Then use resume=latest"
            ) from None

    def _identity(self, worker: int, answer: ray.ObjectRef[Any]) -> Identity | None:
        """Return a worker's identity; of one that died before it answered, that of its place. None: unknown.

        A worker whose copy of raysim or of a library is another one may fail before it can answer.
        """
        with suppress(ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):
            identity: Identity = ray.get(answer)
            return identity
        if self._identify is None:
            return None
        try:
            return ray.get(self._identify(worker), timeout=REVIVAL)
        except ray.exceptions.RayTaskError as error:
            return Identity(
                f"worker-{worker}", "its node", {"raysim": f"cannot be loaded: {first_line(error)}"}
            )
        except ray.exceptions.RayError:
            return None

    def stop(self) -> None:
        """End the workers."""
        for actor in self.actors:
            ray.kill(actor)


def _roomless() -> bool:
    """Whether bundles of this run are still on a node that is gone, because no other has room for them."""
    if (group := ray.util.get_current_placement_group()) is None:
        return False
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return not alive.issuperset(
        ray.util.placement_group_table(group)["bundles_to_node_id"].values()
    )


def start_workers(
    spec: RunSpec, workers: int, kind: type = RayWorker, actors: Sequence[Any] = (), cpus: float = 1
) -> RayRuntime:
    """Workers outside any placement group, starting side by side; or these actors, which become them."""
    actor, shared = actor_class(kind).options(num_cpus=cpus), ray.put(spec)
    become_all(actors, [(shared, f"worker-{index}") for index in range(workers)])
    return RayRuntime(workers, lambda index: actor.remote(shared, f"worker-{index}"), actors=actors)


def start_workers_in(
    group: PlacementGroup,
    size: Size,
    name: str,
    options: RayOptions,
    kind: type,
    spec: RunSpec | ray.ObjectRef[RunSpec],
    content: Sequence[ray.ObjectRef[Any]] = (),
    actors: Sequence[Any] = (),
    participants: Participants | None = None,
    packages: Sequence[str] = (),
    device: str = "",
) -> RayRuntime:
    """Workers of a class in the bundles of a group, starting side by side; or actors that are there and become them.

    What they are built from stays in the object store, for workers that take the place of dead ones. participants: see
    `RayRuntime`. packages, device: of the run, for `identify`.
    """
    shared = spec if isinstance(spec, ray.ObjectRef) else ray.put(spec)
    actor = actor_class(kind)
    become_all(actors, [(shared, f"worker-{index}", content) for index in range(size.workers)])

    def start(index: int) -> Any:
        place = bundle_options(group, index + 1, size.each)
        return actor.options(name=f"{name}/worker-{index}", **place).remote(
            shared, f"worker-{index}", content
        )

    def identify_place(index: int) -> ray.ObjectRef[Identity]:
        task: Any = ray.remote(max_retries=0)(identify_process).options(
            **bundle_options(group, index + 1, size.each)
        )
        identity: ray.ObjectRef[Identity] = task.remote(f"worker-{index}", packages, device)
        return identity

    nodes = _nodes(group)[1 : size.workers + 1]
    return RayRuntime(
        size.workers, start, nodes, options.combine_from, actors, participants, identify_place
    )


def become_all(actors: Sequence[Any], parts: Sequence[tuple[Any, ...]]) -> None:
    """Have actors that are there, if any, hold something else, side by side. Raises what went wrong with the first."""
    pairs = zip(actors, parts, strict=bool(actors))
    ray.get([actor.become.remote(*each) for actor, each in pairs], timeout=START_TIMEOUT_S)


def _nodes(group: PlacementGroup) -> list[int]:
    """Of each bundle its node, by number; that of the first bundle is 0."""
    places = ray.util.placement_group_table(group)["bundles_to_node_id"]
    numbers: dict[str, int] = {}
    return [numbers.setdefault(places[index], len(numbers)) for index in range(len(places))]
