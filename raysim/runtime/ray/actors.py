"""The processes of a run as actors: hosts, the coordinator, and how it reaches the hosts."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from ray.util.placement_group import PlacementGroup

from raysim.api.messages import Published
from raysim.data.dataset import copied
from raysim.primitives.errors import first_line
from raysim.runtime.placement import RayOptions, Size
from raysim.runtime.ray.cluster import filling
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Event, ProcessLost, Round, Started
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import START_TIMEOUT_S, HostDied
from raysim.simulation.schedule import Schedule
from raysim.training.host import Host
from raysim.training.run_spec import RunSpec

INLINE = 1 << 16  # bytes that cost less to send with every call than to store once, which takes half a millisecond
TOGETHER = 0.1  # seconds in which finished rounds are collected for one message to the driver
REVIVAL = 300  # seconds for a new host in the place of a dead one
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
    local_path = copied(path.name, lambda: ray.get(content[0]))
    return replace(spec, data=replace(spec.data, dataset_path=local_path))


class RayHost(Host):
    """A host as an actor."""

    def __init__(self, spec: RunSpec, name: str, content: Sequence[ray.ObjectRef[Any]] = ()):
        super().__init__(read_here(spec, content), name)


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

    offered = [name for name, value in inspect.getmembers(kind, callable) if not name.startswith("_")]
    content = {"__init__": __init__, "become": become} | {name: through(name) for name in offered}
    return ray.remote(type(kind.__name__, (), content))


class RayCoordinator:
    """The actor that runs a `Coordinator`; it makes every call to the hosts, so it owns what they return."""

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
        self._events = Coordinator(here, schedule, fleet, runtime, folder, resume).run()

    def begin(self) -> Iterator[list[Event]]:
        """The run's events up to its start: whoever asks for those after it has made the run's folder."""
        for event in self._events:
            yield [event]
            if isinstance(event, Started):
                return

    def events(self) -> Iterator[list[Event]]:
        """The others, as they happen; rounds that follow each other at once in one message."""
        batch: list[Event] = []
        since = time.monotonic()
        try:
            for event in self._events:
                batch.append(event)
                if not isinstance(event, Round) or time.monotonic() - since > TOGETHER:
                    yield batch
                    batch, since = [], time.monotonic()
        except Exception:
            yield batch
            raise


class RayRuntime:
    """Hosts as actors of class `Host`, calls as actor tasks, values in the object store.

    start: makes the actor of a host, given its number. nodes, combine_from: see `Runtime`. actors: those of the hosts,
    where they are there already.
    """

    at_once = False

    def __init__(
        self,
        hosts: int,
        start: Callable[[int], Any],
        nodes: Sequence[int] = (),
        combine_from: float = math.inf,
        actors: Sequence[Any] = (),
    ):
        self.hosts, self._make, self.combine_from = hosts, start, combine_from
        self.nodes = nodes or (0,) * hosts
        self.actors = list(actors) or [start(host) for host in range(hosts)]
        self._methods: dict[tuple[int, str, int], Any] = {}  # what is called, by host, name and number of results

    def put(self, value: object) -> object:
        """Into the object store, once; hosts of one node map the same memory. A small model travels in each call."""
        return value if isinstance(value, Published) and value.nbytes <= INLINE else ray.put(value)

    def call(self, host: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        """An actor task; its results belong to the caller."""
        if (task := self._methods.get((host, method, returns))) is None:
            task = getattr(self.actors[host], method).options(num_returns=returns)
            self._methods[host, method, returns] = task
        refs = task.remote(*args)
        return [refs] if returns == 1 else list(refs)

    def get(self, ref: Any) -> Any:
        """Wait for a result; arrays in it are read-only views into the object store."""
        if not isinstance(ref, ray.ObjectRef):
            return ref
        try:
            return ray.get(ref)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise HostDied(first_line(error)) from None

    def ready(self, refs: Sequence[Any], seconds: float) -> int | None:
        """The first that is there, in the order of `refs`."""
        timeout = None if math.isinf(seconds) else seconds
        found, _ = ray.wait(list(refs), num_returns=1, timeout=timeout, fetch_local=False)
        return refs.index(found[0]) if found else None

    def revive(self, host: int) -> None:
        """Another actor in the same bundle; Ray moves the bundle where its node is gone and another one has room."""
        ray.kill(self.actors[host])  # it may only have been out of reach
        self.actors[host] = self._make(host)
        self._methods.clear()
        ready = [self.actors[host].ready.remote()]
        for _ in range(REVIVAL // ROOM):
            if ray.wait(ready, timeout=ROOM)[0]:
                return
            if _roomless():
                break
        raise ProcessLost(f"host {host} died and no other one started in its place: its node may be gone")

    def stop(self) -> None:
        """End the hosts."""
        for actor in self.actors:
            ray.kill(actor)


def _roomless() -> bool:
    """Whether bundles of this run are still on a node that is gone, because no other has room for them."""
    if (group := ray.util.get_current_placement_group()) is None:
        return False
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return not alive.issuperset(ray.util.placement_group_table(group)["bundles_to_node_id"].values())


def start_hosts(
    spec: RunSpec, hosts: int, kind: type = RayHost, actors: Sequence[Any] = (), cpus: float = 1
) -> RayRuntime:
    """Hosts outside any placement group, starting side by side; or these actors, which become them."""
    actor, shared = actor_class(kind).options(num_cpus=cpus), ray.put(spec)
    become_all(actors, [(shared, f"host-{index}") for index in range(hosts)])
    return RayRuntime(hosts, lambda index: actor.remote(shared, f"host-{index}"), actors=actors)


def hosts_in(
    group: PlacementGroup,
    size: Size,
    name: str,
    options: RayOptions,
    kind: type,
    spec: RunSpec | ray.ObjectRef[RunSpec],
    content: Sequence[ray.ObjectRef[Any]] = (),
    actors: Sequence[Any] = (),
) -> RayRuntime:
    """Hosts of a class in the bundles of a group, starting side by side; or actors that are there and become them.

    What they are built from stays in the object store, for hosts that take the place of dead ones.
    """
    shared = spec if isinstance(spec, ray.ObjectRef) else ray.put(spec)
    actor = actor_class(kind)
    become_all(actors, [(shared, f"host-{index}", content) for index in range(size.hosts)])

    def start(index: int) -> Any:
        place = filling(group, index + 1, size.each)
        return actor.options(name=f"{name}/host-{index}", **place).remote(shared, f"host-{index}", content)

    return RayRuntime(size.hosts, start, _nodes(group)[1 : size.hosts + 1], options.combine_from, actors)


def become_all(actors: Sequence[Any], parts: Sequence[tuple[Any, ...]]) -> None:
    """Have actors that are there, if any, hold something else, side by side. Raises what went wrong with the first."""
    pairs = zip(actors, parts, strict=bool(actors))
    ray.get([actor.become.remote(*each) for actor, each in pairs], timeout=START_TIMEOUT_S)


def _nodes(group: PlacementGroup) -> list[int]:
    """Of each bundle its node, by number; that of the first bundle is 0."""
    places = ray.util.placement_group_table(group)["bundles_to_node_id"]
    numbers: dict[str, int] = {}
    return [numbers.setdefault(places[index], len(numbers)) for index in range(len(places))]
