"""The runtime on Ray: a placement group per run, hosts and coordinator as actors in it, events to the driver.

The only file besides the sweep that imports Ray.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

# The driver's environment is the workers' environment. Ray reads its authentication mode when it is imported: set
# later, this process and the cluster that it starts would disagree.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
if "ray" not in sys.modules:
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import numpy as np
import ray
import torch
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysim.api.messages import Published
from raysim.data.dataset import copied
from raysim.primitives.errors import first_line
from raysim.runtime import preflight
from raysim.runtime.placement import (
    CLUSTERS,
    NoRoom,
    RayOptions,
    Size,
    amounts,
    demand,
    fitting,
    gib,
    share,
    total,
    within,
)
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.dispatcher import START
from raysim.simulation.events import Event, ProcessLost, Round, Started
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import HostDied
from raysim.simulation.schedule import Schedule
from raysim.training.host import Host
from raysim.training.run_spec import RunSpec

__all__ = [
    "RayCoordinator",
    "RayHost",
    "RayOptions",
    "RayRuntime",
    "Size",
    "connect",
    "connected",
    "disconnect",
    "fit",
    "run",
    "start_hosts",
    "staying",
]

Say = Callable[[str], None]
Measure = Callable[[RunSpec], preflight.Need]

INLINE = 1 << 16  # bytes that cost less to send with every call than to store once, which takes half a millisecond
GRACE = 2  # seconds in which a group that fits is there; longer means that others hold what it needs
TOGETHER = 0.1  # seconds in which finished rounds are collected for one message to the driver
REVIVAL = 300  # seconds for a new host in the place of a dead one
ROOM = 30  # seconds between two looks whether there is room for it at all: Ray may learn late that a node is gone
SILENCE = 60.0  # seconds after which somebody may wonder


# --- the cluster ----------------------------------------------------------------------------------------------------
def connect(options: RayOptions) -> bool:
    """Start or join a cluster, unless this process already has one; whether it did."""
    if ray.is_initialized():
        return False
    address = options.address or "local"
    if address != "local" and os.environ.get(CLUSTERS) == "0" and not address.startswith("127."):
        raise ValueError(
            f"runtime.address={address}: this process, or {CLUSTERS}=0, keeps Ray to this machine: start a new process"
        )
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=5).close()
        with _nothing_besides() if address == "local" else nullcontext():
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=False if address == "local" else None,
            )
    except Exception as error:  # Ray raises a bare one where its processes do not start in time
        raise ValueError(
            f"runtime.address={address}: no Ray cluster could be reached or started there ({first_line(error)}); "
            "start one with `ray start --head`, or use runtime=local"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # `ray job stop` is a Ctrl-C: Ray's own handler prints its stack and may abort.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    return True


@contextmanager
def _nothing_besides() -> Iterator[None]:
    """Let Ray start without the processes that watch clusters: two of six seconds on two cores.

    They are its autoscaler, the one that forwards what workers print, and what is left of its dashboard when that is
    off. `ray start` has options against the first two, `ray.init` has none. Where Ray's insides are others than in the
    versions that this was written for, all of them are started.
    """
    parameter: Any = import_module("ray._private.parameter")
    node: Any = import_module("ray._private.node").Node
    options, serve = parameter.RayParams, getattr(node, "start_api_server", None)
    without = {"no_monitor": True, "include_log_monitor": False}
    if serve is None or not without.keys() <= inspect.signature(options).parameters.keys():
        yield
        return
    parameter.RayParams = functools.partial(options, **without)
    node.start_api_server = lambda *_, **__: None
    try:
        yield
    finally:
        parameter.RayParams, node.start_api_server = options, serve


@contextmanager
def connected(options: RayOptions) -> Iterator[None]:
    """`connect`; in the end only what it started or joined is left."""
    mine = connect(options)
    try:
        yield
    finally:
        if mine:
            disconnect()


def address() -> str:
    """Of the connected cluster, for other processes that join it."""
    return str(ray.get_runtime_context().gcs_address)


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends."""
    _wake()
    ray.shutdown()


def _wake() -> None:
    """Let processes of this one that somebody stopped go on: Ray would wait for its raylet for ever."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # it has ended meanwhile
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state == "T" and int(parent) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGCONT)


def nodes_here(count: int, cpus: int) -> Any:
    """Start so many Ray nodes in this machine, each of so many (declared) CPUs, to see what travels between nodes.

    `address` is where to connect; `shutdown()` ends them.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(count):
        cluster.add_node(num_cpus=cpus, include_dashboard=False)
    return cluster


def nodes() -> list[dict[str, float]]:
    """What each living node has in all, the driver's own first."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: node["NodeID"] != ray.get_runtime_context().get_node_id())
    return [node["Resources"] for node in alive]


def has_gpus() -> bool:
    """Whether any node has one."""
    return any(node.get("GPU") for node in nodes())


def bundles(size: Size) -> list[dict[str, float]]:
    """What a run reserves: next to nothing on this node for the coordinator, whose files lie here; then each host."""
    here = next(name for name in nodes()[0] if name.startswith("node:") and not name.startswith("node:__"))
    token = {here: 0.001}
    return [token, *(dict(size.each) or {"memory": 1} for _ in range(size.hosts))]


# --- how many hosts -------------------------------------------------------------------------------------------------
def fit(
    options: RayOptions,
    spec: RunSpec,
    concurrency: int,
    say: Say = print,
    measure: Measure = preflight.measure,
) -> Size:
    """How many hosts, and what each reserves: what was asked for if the cluster has it at all, else what fits.

    Inside a placement group (a trial of a search) the group decides. measure: stands in for the preflight. Raises
    ValueError with the number that would fit.
    """
    each = demand(options, spec.device, spec.threads)
    if (group := ray.util.get_current_placement_group()) is not None:
        return within(options, group.bundle_specs, spec.device)
    cluster = nodes()
    shared = spec.device == "cuda" and options.gpus is None
    if options.preflight if options.preflight is not None else shared:
        probe = {**each, "GPU": 1.0} if spec.device == "cuda" else each
        fitting(replace(options, hosts=1), probe, cluster, 1)
        need = _measured(options, spec, probe, say, measure)
        if spec.device == "cuda":
            each["GPU"] = _share(options, each, spec, concurrency, cluster, need, say)
        else:
            each["memory"] = need.job
            places = total(cluster, {"memory": need.job}, options.strategy)
            say(f"a job needs {gib(need.job)}: {places} hosts fit into the cluster's memory")
    return fitting(options, each, cluster, concurrency)


def _measured(
    options: RayOptions, spec: RunSpec, each: Mapping[str, float], say: Say, measure: Measure
) -> preflight.Need:
    """One job's memory, seen in a process that is given what a host is given, and a whole GPU."""
    if _stay is not None:  # a whole GPU is asked for
        _stay.leave()
    with placed([dict(each)], "raysim-preflight", options, say) as group:
        task = ray.remote(max_retries=0)(_measure).options(**_within(group, 0, each))
        try:
            return ray.get(task.remote(ray.put(spec), _content(spec, group), measure))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise ValueError(
                f"the preflight died ({first_line(error)}): the largest client does not fit there; lower local.batch"
            ) from None


def _measure(spec: RunSpec, content: Sequence[ray.ObjectRef[Any]], measure: Measure) -> preflight.Need:
    return measure(_here(spec, content))


def _share(
    options: RayOptions,
    each: Mapping[str, float],
    spec: RunSpec,
    concurrency: int,
    cluster: Sequence[Mapping[str, float]],
    need: preflight.Need,
    say: Say,
) -> float:
    """The part of a GPU that a host reserves: so small that hosts find no more work or CPUs, or as jobs allow."""
    gpus = sum(int(node.get("GPU", 0.0)) for node in cluster)
    clients = int(np.count_nonzero(spec.data.partition.train.counts))
    fits = preflight.hosts_per_gpu(need, clients, gpus)
    states = f" and {gib(clients * need.state)} of private states are kept" if need.state else ""
    if not fits:
        raise ValueError(
            f"a job needs {gib(need.job)}{states}, a GPU has {gib(need.room)}: lower local.batch, or set device=cpu"
        )
    say(f"a job needs {gib(need.job)}{states}: {fits} host{'s fit' if fits > 1 else ' fits'} on a GPU")
    if options.gpus is not None:
        if options.gpus < share(fits):
            raise ValueError(
                f"runtime.gpus={options.gpus:g} puts {int(1 / options.gpus)} hosts on a GPU, of whose "
                f"{gib(need.room)} each needs {gib(need.job)}: set runtime.gpus={share(fits):g} for {fits} hosts"
            )
        return options.gpus
    rest = {name: amount for name, amount in each.items() if name != "GPU"}
    places = total([node for node in cluster if node.get("GPU")], rest, options.strategy)
    wanted = options.hosts or (concurrency if places is None else min(concurrency, places))
    return share(min(fits, max(1, -(-wanted // gpus))))


# --- placement ------------------------------------------------------------------------------------------------------
@contextmanager
def placed(asked: list[dict[str, float]], name: str, options: RayOptions, say: Say) -> Iterator[PlacementGroup]:
    """A placement group, waited for and removed in the end; inside another one (a trial) that one, left as it is.

    Raises ValueError when others still hold what it needs after `options.wait` seconds. Ray removes it as well when
    this process dies.
    """
    if (outer := ray.util.get_current_placement_group()) is not None:
        yield outer
        return
    group = ray.util.placement_group(asked, strategy=options.strategy, name=name)
    try:
        _await(group, asked, options, say)
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _await(group: PlacementGroup, asked: Sequence[Mapping[str, float]], options: RayOptions, say: Say) -> None:
    """Until the group is there, in steps of seconds: an interrupt is heard between them."""
    since, told = time.monotonic(), False
    while not group.wait(1 if told else GRACE):
        each = asked[-1]  # of a host
        if (places := total(nodes(), each, options.strategy)) is not None and places < asked.count(each):
            raise NoRoom(f"{asked.count(each)} x {amounts(each)} are needed, and {places} fit: the cluster lost a node")
        late = options.wait is not None and time.monotonic() - since >= options.wait
        if told and not late:
            continue
        needs: Counter[str] = Counter()
        for each in asked:
            needs.update({name: amount for name, amount in each.items() if not name.startswith("node:")})
        free = ray.available_resources()
        has = amounts({name: free.get(name, 0.0) for name in needs})
        text = f"this needs {amounts(needs)}, of which other runs leave {has}"
        if late:
            raise ValueError(f"{text}: try again later, lower runtime.hosts, or set runtime.wait=null to wait for them")
        say(f"waiting: {text} (Ctrl-C or `ray job stop` ends the wait; runtime.wait=SECONDS limits it)")
        told = True


def _within(group: PlacementGroup | None, index: int, each: Mapping[str, float]) -> dict[str, Any]:
    """The options of a task or an actor that fills a bundle."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    arguments: dict[str, Any] = {key: each.get(name, 0) for name, key in named.items()}
    arguments["resources"] = {name: amount for name, amount in each.items() if name not in named}
    if group is not None:
        arguments["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return arguments


# --- actors ---------------------------------------------------------------------------------------------------------
def _content(spec: RunSpec, group: PlacementGroup | None) -> list[ray.ObjectRef[Any]]:
    """The data set's file as bytes in the object store, where a bundle lies on another node than this process."""
    if group is None:
        return []
    used = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    if used <= {ray.get_runtime_context().get_node_id()}:
        return []
    return [ray.put(np.fromfile(spec.data.dataset_path, np.uint8))]


def _here(spec: RunSpec, content: Sequence[ray.ObjectRef[Any]]) -> RunSpec:
    """The same run, its data set read from this node: the first process that misses it writes it, others map it."""
    path = spec.data.dataset_path
    if not content or path.exists():
        return spec
    local_path = copied(path.name, lambda: ray.get(content[0]))
    return replace(spec, data=replace(spec.data, dataset_path=local_path))


class RayHost(Host):
    """A host as an actor."""

    def __init__(self, spec: RunSpec, name: str, content: Sequence[ray.ObjectRef[Any]] = ()):
        super().__init__(_here(spec, content), name)


@functools.cache
def _actor_class(kind: type) -> Any:
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
        here = replace(_here(spec, content), device="cpu")
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
    actor, shared = _actor_class(kind).options(num_cpus=cpus), ray.put(spec)
    _become(actors, [(shared, f"host-{index}") for index in range(hosts)])
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
    actor = _actor_class(kind)
    _become(actors, [(shared, f"host-{index}", content) for index in range(size.hosts)])

    def start(index: int) -> Any:
        place = _within(group, index + 1, size.each)
        return actor.options(name=f"{name}/host-{index}", **place).remote(shared, f"host-{index}", content)

    return RayRuntime(size.hosts, start, _nodes(group)[1 : size.hosts + 1], options.combine_from, actors)


def _become(actors: Sequence[Any], parts: Sequence[tuple[Any, ...]]) -> None:
    """Have actors that are there hold something else, side by side. Raises what went wrong with the first."""
    ray.get([actor.become.remote(*each) for actor, each in zip(actors, parts, strict=False)], timeout=START)


def _nodes(group: PlacementGroup) -> list[int]:
    """Of each bundle its node, by number; that of the first bundle is 0."""
    places = ray.util.placement_group_table(group)["bundles_to_node_id"]
    numbers: dict[str, int] = {}
    return [numbers.setdefault(places[index], len(numbers)) for index in range(len(places))]


@dataclass(frozen=True)
class _Team:
    """The processes of a run, and the bundles that they are in. end: ends them."""

    asked: tuple[list[dict[str, float]], str]
    group: PlacementGroup
    hosts: Sequence[Any]
    coordinator: Any
    end: Callable[[], None]


@dataclass
class _Stay:
    """Where the processes of a run wait for the next one."""

    name: str
    team: _Team | None = None

    def leave(self) -> None:
        """End those that wait."""
        team, self.team = self.team, None
        if team is not None:
            team.end()


_stay: _Stay | None = None


@contextmanager
def staying(name: str) -> Iterator[None]:
    """Runs of this process that follow each other work in the same processes, which start once: seconds for each run.

    A run whose hosts are others in number or size gets new ones, and so does the one after a run that failed. name: of
    all the runs together, by which Ray's dashboard shows their processes. Inside another one it changes nothing.
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


def _taken_over(asked: tuple[list[dict[str, float]], str]) -> _Team | None:
    """Processes that wait for a run of this size; others end."""
    if _stay is None or _stay.team is None:
        return None
    if _stay.team.asked != asked or ray.util.get_current_placement_group() is not None:
        _stay.leave()
        return None
    team, _stay.team = _stay.team, None
    return team


def _free(team: _Team) -> bool:
    """Whether all processes are there and have nothing left to do, such as jobs that no aggregation has taken."""
    answers = [host.ready.remote() for host in team.hosts]
    with suppress(ray.exceptions.RayError):
        return bool(ray.get(answers, timeout=GRACE))
    return False


# --- the run --------------------------------------------------------------------------------------------------------
def run(
    spec: RunSpec,
    schedule: Schedule,
    fleet: Fleet,
    size: Size,
    options: RayOptions | None = None,
    say: Say = print,
    folder: str = "",
    resume: str = "",
) -> Iterator[Event]:
    """Run on the connected cluster, in a placement group of its own. Errors arrive as they were raised.

    folder, resume: see `Coordinator`.
    """
    options = options or RayOptions()
    team = _team(spec, (schedule, fleet), size, options, say, (folder, resume))
    well = False
    try:
        for part, more in ((team.coordinator.begin, START), (team.coordinator.events, REVIVAL)):
            messages = part.options(num_returns="streaming").remote()
            for ref in _in_time(messages, spec.settings.faults.timeout, more, say):
                yield from ray.get(ref)
        well = True
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (_lost(cause) if isinstance(cause, ray.exceptions.RayError) else cause) from None
    except ray.exceptions.RayActorError as error:
        raise _lost(error) from None
    finally:
        if well and _stay is not None and _stay.team is None and _free(team):
            _stay.team = team
        else:
            team.end()


def _team(
    spec: RunSpec,
    parts: tuple[Schedule, Fleet],
    size: Size,
    options: RayOptions,
    say: Say,
    places: tuple[str, str],
) -> _Team:
    """Hosts and coordinator of a run: those that wait for one, or new ones, which start side by side."""
    asked, shared = (bundles(size), options.strategy), ray.put(spec)
    name = f"{(_stay.name if _stay else Path(places[0]).name) or 'raysim'}-{uuid.uuid4().hex[:6]}"

    def hosts(group: PlacementGroup, actors: Sequence[Any] = ()) -> tuple[RayRuntime, tuple[Any, ...]]:
        content = _content(spec, group)
        runtime = hosts_in(group, size, name, options, RayHost, shared, content, actors)
        return runtime, (shared, *parts, runtime, *places, content)

    if (team := _taken_over(asked)) is not None:
        try:
            runtime, needs = hosts(team.group, team.hosts)
            _become([team.coordinator], [needs])
            return team
        except ray.exceptions.RayError:  # new ones say why, if it was not these
            team.end()
        except BaseException:
            team.end()
            raise
    with ExitStack() as stack:
        group = stack.enter_context(placed(asked[0], name, options, say))
        runtime, needs = hosts(group)
        stack.callback(runtime.stop)
        first = _actor_class(RayCoordinator).options(name=f"{name}/coordinator", **_within(group, 0, {}))
        coordinator = first.remote(*needs)
        stack.callback(ray.kill, coordinator)
        return _Team(asked, group, runtime.actors, coordinator, stack.pop_all().close)


def _in_time(messages: Any, timeout: float | None, more: float, say: Say) -> Iterator[Any]:
    """What a coordinator sends; it says every few seconds what it waits for, so one that is silent counts as dead.

    It cannot where it waits for Ray to start a host, which is said for it. more: seconds beyond the timeout that the
    first of its messages may take.
    """
    patience, silent = math.inf if timeout is None else timeout + more, 0.0
    while silent < patience:
        if ray.wait([messages], timeout=(step := min(SILENCE, patience - silent)), fetch_local=False)[0]:
            patience, silent = math.inf if timeout is None else timeout + REVIVAL, 0.0
            try:
                yield next(messages)
            except StopIteration:
                return
        elif (silent := silent + step) < patience:
            say(
                f"nothing was heard for {silent:g} s: hosts start, or Ray has no room for one in the place of one that "
                f"died; without it the run goes back to its last checkpoint, after {ROOM} to {REVIVAL} s"
            )
    raise ProcessLost(
        f"the coordinator has said nothing for {patience:g} s (faults.timeout, and what a new host may take): it may "
        "have been stopped"
    )


def _lost(error: Exception) -> ProcessLost:
    return ProcessLost(f"a process of the run died ({first_line(error)})")
