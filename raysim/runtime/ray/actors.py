"""Run workers and the coordinator as Ray actors, and let the coordinator call workers."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.api.messages import PublishedVersion
from raysim.data.dataset import copy_to_cache
from raysim.primitives.errors import first_line
from raysim.primitives.memory import MemoryState, memory_state
from raysim.primitives.stacks import StackSource, open_stack_source, read_stacks
from raysim.runtime.placement import RayOptions, Size, format_bytes
from raysim.runtime.ray.cluster import bundle_options
from raysim.runtime.ray.node_watch import PROBE_INTERVAL_S, NodeWatch, probe
from raysim.runtime.ray.recruiter import Growth, Recruiter, WorkerPlace
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
from raysim.simulation.runtime import START_TIMEOUT_S, LostNode, WorkerDiedError
from raysim.simulation.schedule import Schedule
from raysim.training.identity import Identity, Participants, UnequalWorkersError, identify
from raysim.training.run_spec import RunSpec
from raysim.training.worker import Worker
from raysim.vectors.tree_sum import add_up

# A small model is cheaper to send with every call than to store once, which takes about 2 ms. So it
# is sent if the copies for all workers have at most this many bytes.
MAX_INLINE_BYTES = 1 << 20
# The variable with the size of the largest object that Ray sends within messages, and its default.
INLINE_VARIABLE, INLINE_BYTES = "RAY_max_direct_call_object_size", 100 * 1024
BATCH_S = 0.1  # seconds in which finished rounds are collected for one message to the driver
REPLACEMENT_TIMEOUT_S = 300  # for a worker that replaces a dead one to start
# Seconds between two checks whether a new worker has room. Ray may learn late that a node is lost.
ROOM_CHECK_S = 30
# The errors that Ray raises for a value that is lost with its process or node.
LOSSES = (
    ray.exceptions.RayActorError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)
MEMORY_TIMEOUT_S = 20.0  # for a process on the node of a dead worker to read its memory
NODE_CHECK_S = 1.0  # between two checks for lost nodes while the coordinator waits
# The resident memory of a worker before its first job: Python, torch and Ray. Measured: 380 MiB.
PROCESS_BYTES = 400 * 2**20
# Vectors of the model's size in a job: received and current model, gradient, momentum, update and
# a spare one for methods.
MODEL_COPIES = 6


def worker_bytes(model_floats: int, itemsize: int) -> int:
    """Return the memory in bytes that a worker needs.

    model_floats: the number of floats of the model.
    itemsize: the bytes of a float.
    """
    return PROCESS_BYTES + MODEL_COPIES * model_floats * itemsize


def store_dataset(spec: RunSpec, group: PlacementGroup | None) -> list[ray.ObjectRef[Any]]:
    """Put the content of the data set's file into the object store, for other nodes.

    Return a list with a reference to the content; or [] if the run has no other node.
    group: the placement group of the run; None if all processes are on this node.
    """
    if group is None:
        return []
    nodes = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    if nodes <= {ray.get_runtime_context().get_node_id()}:
        return []
    return [ray.put(np.fromfile(spec.data.dataset_path, np.uint8))]


def with_local_dataset(spec: RunSpec, content: Sequence[ray.ObjectRef[Any]]) -> RunSpec:
    """Return the run; its data set's path is changed to a path that exists on this node.

    If the path does not exist, the node's first process writes the file for all its processes.
    content: a list with a reference to the content of the file. It is [] if all processes of the
    run are on one node; the run is then returned unchanged.
    """
    path = spec.data.dataset_path
    if not content or path.exists():
        return spec
    local_path = copy_to_cache(path.name, lambda: ray.get(content[0]))
    return replace(spec, data=replace(spec.data, dataset_path=local_path))


class RayWorker(Worker):
    """A worker in a Ray actor.

    name: the name of the worker in messages, such as "worker-3".
    content: a list with a reference to the content of the data set's file, for a node without this
    file; [] if all processes are on one node.
    """

    def __init__(self, spec: RunSpec, name: str, content: Sequence[ray.ObjectRef[Any]] = ()):
        super().__init__(with_local_dataset(spec, content), name)

    def identity(self) -> Identity:
        """Return the hardware and software of this process, on which its results' bits depend."""
        return identify_process(self.name, self.spec.packages, self.spec.device)


def identify_process(name: str, packages: Sequence[str] = (), device: str = "") -> Identity:
    """Return the identity of this process: its name, its node, its hardware and its software.

    name: the name in messages, such as "worker-3".
    packages: further packages whose versions are part of the identity.
    device: the device of the training, such as "cuda"; "" means none.
    """
    return identify(name, packages, device, f"{platform.node()} ({ray.util.get_node_ip_address()})")


@functools.cache
def actor_class(kind: type) -> Any:
    """Return a class of Ray actors, each of which holds an object of the class `kind`.

    An actor has the object's public methods. The method `become` replaces the object by a new one.
    """

    def __init__(self: Any, *args: Any) -> None:
        self.held = kind(*args)

    def become(self: Any, *args: Any) -> None:
        """Replace the actor's object by a new one, after freeing the memory of the old one.

        args: the arguments with which the class of the object is called.
        """
        self.held = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.held = kind(*args)

    def delegate(name: str) -> Callable[..., Any]:
        def generate(self: Any, *args: Any) -> Iterator[Any]:
            yield from getattr(self.held, name)(*args)

        if inspect.isgeneratorfunction(getattr(kind, name)):  # Ray needs a generator function
            return generate
        return lambda self, *args: getattr(self.held, name)(*args)

    def stack_source(self: Any) -> StackSource | None:
        """Return what other processes on this node use to read this process's call stacks.

        Return None if the operating system does not allow it.
        """
        return open_stack_source()

    content: dict[str, Any] = {
        "__init__": __init__,
        "become": become,
        "stack_source": stack_source,
        "memory_state": lambda self: memory_state(),
    }
    for name, _ in inspect.getmembers(kind, callable):
        if not name.startswith("_"):
            content[name] = delegate(name)
    # It does not inherit from `kind`: `profile=true` replaces methods of the object by methods that
    # measure their time, and Ray would call the inherited methods instead.
    return ray.remote(type(kind.__name__, (), content))


class NodeAdder:
    """A process that adds up the sums of a node's workers, even while these workers train."""

    def add_up(self, parts: Sequence[range], *sums: np.ndarray | None) -> np.ndarray | None:
        """Return the total of some sums of updates; None if all sums are None.

        parts: for each sum, the range of updates that it contains, by position in the order of
        aggregation. Each range is a subtree of the summation tree (`tree_sum`).
        sums: None in place of a sum if all its jobs failed.
        """
        return add_up(parts, *sums)


# The coordinator itself calls the workers, so that Ray regards it as the owner of their results.
class RayCoordinator:
    """The actor that runs a `Coordinator`.

    folder: where the model is written, and the checkpoints unless `checkpoint.folder` is set; ""
    writes none.
    resume: the address of the checkpoint to continue from; "" starts a new run.
    content: a list with a reference to the content of the data set's file; [] if all processes of
    the run are on one node.
    """

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
        local_spec = replace(with_local_dataset(spec, content), device="cpu")
        self._start_timeout_s = START_TIMEOUT_S + (spec.settings.faults.timeout or math.inf)
        self._packages, self._runtime = spec.packages, runtime
        coordinator = Coordinator(local_spec, schedule, fleet, runtime, folder, resume)
        runtime.watch_nodes(
            spec.settings.faults.node_timeout or math.inf,
            worker_bytes(coordinator.layout.total, spec.dtype.itemsize),
            local_spec.data.dataset_path,
        )
        self._events = coordinator.run()

    def begin(self) -> Iterator[list[Event]]:
        """Yield the events of the run up to `Started`, when all workers are ready.

        Make the run's folder before you call `events`, which yields the later events.
        Raises UnequalWorkersError if a worker's results would not be bit-identical to the driver's,
        unless `runtime.mixed=true`.
        """
        for event in self._events:
            if not isinstance(event, Started):
                yield [event]
                continue
            yield [replace(event, processes=self._meet_workers())]
            return

    def _meet_workers(self) -> tuple[Identity, ...]:
        """Wait until all workers are ready; return the identities of all processes.

        Raises UnequalWorkersError if results of a worker would not be bit-identical to results of
        the driver, unless `runtime.mixed=true`. The driver is the process that the user started.
        """
        participants = self._runtime.participants
        if participants is None:
            return ()
        coordinator = identify_process("coordinator", self._packages)
        self._runtime.meet_workers(self._start_timeout_s, coordinator)
        return tuple(participants.all)

    def events(self) -> Iterator[list[Event]]:
        """Yield the events after `Started`, in lists.

        Rounds that follow each other quickly are sent in one list.
        """
        batch: list[Event] = []
        since = time.monotonic()
        try:
            for event in self._events:
                if isinstance(event, Finished) and self._runtime.participants is not None:
                    event = replace(event, processes=tuple(self._runtime.participants.all))
                batch.append(event)
                if not isinstance(event, Round) or time.monotonic() - since > BATCH_S:
                    yield batch
                    batch, since = [], time.monotonic()
        except WorkerDiedError as error:
            yield batch
            raise ProcessLostError(str(error)) from error
        except Exception:
            yield batch
            raise
        finally:
            self._runtime.stop_watch()


class RayRuntime:
    """A `Runtime` whose workers are Ray actors and whose values are in Ray's object store.

    start: starts the actor of a worker, by number.
    node_ids: Ray's identifier of each worker's node.
    coordinator_node: Ray's identifier of the coordinator's node, which has the number 0.
    combine_from: if the model has at least this number of floats, each node adds up the sums of its
    workers.
    actors: the running actors of the workers; if it is empty, `start` starts them.
    participants: the identities of the run's processes, for a comparison with new workers; None
    compares nothing.
    identify: called if a worker dies before it reports its identity. It starts another process in
    the worker's bundle, and returns a reference to the identity of this process. None leaves the
    identity unknown.
    growth: the facts that decide which workers are started during the run; None starts none.
    """

    is_in_process = False

    def __init__(
        self,
        workers: int,
        start: Callable[[int], Any],
        node_ids: Sequence[str] = (),
        coordinator_node: str = "",
        combine_from: float = math.inf,
        actors: Sequence[Any] = (),
        participants: Participants | None = None,
        identify: Callable[[int], ray.ObjectRef[Identity]] | None = None,
        growth: Growth | None = None,
    ):
        self.participants, self._identify, self._growth = participants, identify, growth
        self._adders: dict[int, Any] = {}  # by node, the actors that add up sums
        self.workers, self._make, self.combine_from = workers, start, combine_from
        self._first_workers = workers
        limit = int(os.environ.get(INLINE_VARIABLE, INLINE_BYTES))
        self._inline_bytes = 0.9 * limit  # a message also has other content
        self._node_ids = list(node_ids) or [coordinator_node] * workers
        self._node_numbers = {coordinator_node: 0}
        self.nodes = [self._number_of(node) for node in self._node_ids]
        self._released: set[int] = set()
        self._ended: set[int] = set()  # released workers that are never started again
        self._watch: NodeWatch | None = None
        self._recruiter: Recruiter | None = None
        self._places: dict[int, WorkerPlace] = {}  # of workers that the recruiter started
        self._notices: list[str] = []
        self._next_recruiting = 0.0
        self.actors = list(actors) or [start(worker) for worker in range(workers)]
        # By worker: the process that writes its call stacks, and call stacks that were requested.
        self._stack_sources = {
            worker: actor.stack_source.remote() for worker, actor in enumerate(self.actors)
        }
        self._stacks: dict[int, ray.ObjectRef[str]] = {}
        # By worker: the memory of its node when the worker started.
        self._first_memory = {
            worker: actor.memory_state.remote() for worker, actor in enumerate(self.actors)
        }
        # Methods of actors by worker, name and number of results.
        self._methods: dict[tuple[int, str, int], Any] = {}

    def node_name(self, worker: int) -> str:
        """Return name and address of a worker's node; "" if they are not known yet."""
        if self.participants is None:
            return ""
        for identity in reversed(self.participants.joined):  # replacements come last
            if identity.name == f"worker-{worker}":
                return identity.node
        return ""

    def put(self, value: object) -> object:
        """Put a value into Ray's object store; return a reference to the value.

        All workers of a node share one copy. If `value` is a version of a small model, it is not
        stored. Return the version itself, which is then sent with each call.
        """
        if isinstance(value, PublishedVersion):
            is_small = value.nbytes * len(self.actors) <= MAX_INLINE_BYTES
            if is_small and value.nbytes <= self._inline_bytes:
                return value
        return ray.put(value)

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        """Start a method of a worker; return a reference for each returned value.

        args: the arguments of the method, or references to them.
        returns: the number of values that the method returns.
        """
        if method == "train_apart":
            self._adder(self.nodes[worker])  # it starts while the worker trains
        task = self._methods.get((worker, method, returns))
        if task is None:
            task = getattr(self.actors[worker], method).options(num_returns=returns)
            self._methods[worker, method, returns] = task
        refs = task.remote(*args)
        return [refs] if returns == 1 else list(refs)

    def add_up(self, node: int, parts: Sequence[range], refs: Sequence[Any]) -> Any:
        """Let a process of the node add up sums of updates; return a reference to the total.

        parts: for each sum, the range of updates that it contains, by position in the order of
        aggregation. Each range is a subtree of the summation tree (`tree_sum`).
        refs: references to the sums.
        """
        return self._adder(node).add_up.remote(parts, *refs)

    def _adder(self, node: int) -> Any:
        """Return the actor that adds up sums of updates on a node; start it if there is none."""
        if node not in self._adders:
            names = {number: name for name, number in self._node_numbers.items()}
            place = NodeAffinitySchedulingStrategy(names[node], soft=False)
            # It works now and then, also while workers train, so it reserves nothing.
            options = {"num_cpus": 0, "scheduling_strategy": place}
            self._adders[node] = actor_class(NodeAdder).options(**options).remote()
        return self._adders[node]

    def get(self, ref: Any) -> Any:
        """Wait for a value; its arrays are read-only and share the memory of the object store.

        Raises WorkerDiedError if the value or a node is lost.
        """
        if not isinstance(ref, ray.ObjectRef):
            return ref
        try:
            while self._watch is not None:
                # At the end of its time `ray.get` drops what has arrived, `ray.wait` keeps it.
                if ray.wait([ref], timeout=NODE_CHECK_S)[0]:
                    break
                unreachable = self._unreachable_workers()
                if unreachable:
                    workers = ", ".join(f"worker {worker}" for worker in unreachable)
                    raise WorkerDiedError(f"a node is lost, and with it {workers}")
            return ray.get(ref)
        except LOSSES as error:
            raise WorkerDiedError(first_line(error)) from None

    def ready(self, refs: Sequence[Any], seconds: float) -> int | None:
        """Wait until at least one value exists or is lost; return its index in `refs`.

        Return None if this does not happen within `seconds` seconds, or as soon as a node is lost.
        refs: references to the values.
        """
        end = time.monotonic() + seconds
        while True:
            left_s = max(0.0, end - time.monotonic())
            wait_s = left_s if self._watch is None else min(left_s, NODE_CHECK_S)
            timeout = None if math.isinf(wait_s) else wait_s
            existing, _ = ray.wait(list(refs), num_returns=1, timeout=timeout, fetch_local=False)
            if existing:
                return refs.index(existing[0])
            if left_s <= wait_s or self._unreachable_workers():
                return None

    # --- nodes that leave or join ---------------------------------------------------------------
    def _number_of(self, node: str) -> int:
        return self._node_numbers.setdefault(node, len(self._node_numbers))

    def watch_nodes(self, timeout_s: float, worker_bytes: int, dataset_path: Path) -> None:
        """Start to watch the nodes: notice lost nodes, and start workers on new nodes.

        If the run never starts further workers, do nothing.
        timeout_s: a node without an answer for this time counts as lost; infinity means never.
        dataset_path: the data set's file on this node, which is copied to nodes without it.
        """
        if self._growth is not None:
            self._watch = NodeWatch(timeout_s)
            self._recruiter = Recruiter(self._growth, self._watch, worker_bytes, dataset_path)

    def stop_watch(self) -> None:
        """Stop what `watch_nodes` started."""
        if self._watch is not None and self._recruiter is not None:
            self._watch.stop()
            self._recruiter.stop()

    def silent_node_timeout(self, worker: int) -> float | None:
        """Return how many seconds the node of a worker may be silent before it counts as lost.

        Return None if the node is not silent, that is if it answers.
        """
        if self._watch is None or not self._watch.is_silent(self._node_ids[worker]):
            return None
        return self._watch.timeout_s

    def stacks(self, worker: int) -> str:
        """Return the call stacks of a worker's threads as text; "" if they are not known yet.

        A call does not wait. It starts to read the call stacks on the worker's node, and a later
        call returns them.
        """
        text = ""
        request = self._stacks.get(worker)
        if request is not None:
            if not ray.wait([request], timeout=0)[0]:
                return ""
            with suppress(ray.exceptions.RayError):
                text = ray.get(request)
        if not ray.wait([self._stack_sources[worker]], timeout=0)[0]:
            return text  # it has not started
        node = self._node_ids[worker] or ray.get_runtime_context().get_node_id()
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        task: Any = ray.remote(num_cpus=0, max_retries=0)(read_stacks)
        task = task.options(scheduling_strategy=place)
        self._stacks[worker] = task.remote(self._stack_sources[worker])
        return text

    def find_lost_workers(self) -> Mapping[int, LostNode]:
        """Return the workers whose node is lost or leaves the cluster, each with its node.

        Released workers are left out.
        """
        if self._watch is None or not self._watch.lost:
            return {}
        lost = self._watch.lost
        return {
            worker: lost[node]
            for worker, node in enumerate(self._node_ids)
            if node in lost and worker not in self._released
        }

    def _unreachable_workers(self) -> list[int]:
        lost = self.find_lost_workers()
        return [worker for worker, node in lost.items() if not node.is_reachable]

    def release(self, worker: int, may_return: bool = True) -> None:
        """End a worker that is not used any more; it may be unreachable.

        may_return: False means that the worker is never started again.
        """
        ray.kill(self.actors[worker])
        self._adders.pop(self.nodes[worker], None)
        self._released.add(worker)
        if not may_return:
            self._ended.add(worker)

    def take_new_workers(self) -> Sequence[int]:
        """Return the workers that became ready since the last call; start more if there is room."""
        recruiter = self._recruiter
        if recruiter is None:
            return ()
        joined = [
            worker for worker, identity in recruiter.take_ready() if self._admit(worker, identity)
        ]
        self._released.difference_update(joined)
        if time.monotonic() < self._next_recruiting:
            return joined
        self._next_recruiting = time.monotonic() + PROBE_INTERVAL_S
        free = sorted(self._released - self._ended)
        free = [worker for worker in free if worker < self._first_workers]
        # An ended worker leaves no room for another one.
        active = self.workers - len(self._released) + len(self._ended)
        for number, place in recruiter.find_places(free, active):
            self._start_at(number, place, recruiter)
        return joined

    def _start_at(self, number: int, place: WorkerPlace, recruiter: Recruiter) -> None:
        """Start a worker at a place of the cluster.

        number: the number of the lost worker to replace, or -1 for a new worker.
        recruiter: the object that starts the actor, and later reports that the worker is ready.
        """
        worker = self.workers if number < 0 else number
        actor = recruiter.start(worker, place)
        self._places[worker] = place
        if number < 0:
            self.workers += 1
            self.actors.append(actor)
            self._node_ids.append(place.node)
            self.nodes.append(self._number_of(place.node))
            self._released.add(worker)  # until it is ready
        else:
            self.actors[worker] = actor
            self._node_ids[worker] = place.node
            self.nodes[worker] = self._number_of(place.node)
        self._forget_process(worker)

    def _admit(self, worker: int, identity: Identity) -> bool:
        """Compare a new worker with the driver; end the worker and return False if they differ.

        Worker and driver differ if their results would not be bit-identical, and `runtime.mixed` is
        False.
        identity: the hardware and software of the worker's process.
        """
        try:
            if self.participants is not None:
                self.participants.add(identity)
        except UnequalWorkersError as error:
            ray.kill(self.actors[worker])
            self._notices.append(f"worker {worker} does not join the run: {error}")
            return False
        return True

    def take_notices(self) -> Sequence[str]:
        """Return sentences about workers that failed to join since the last call."""
        notices, self._notices = self._notices, []
        if self._recruiter is not None:
            notices += self._recruiter.notices
            self._recruiter.notices = []
        return notices

    # --- workers that die -----------------------------------------------------------------------
    def _forget_process(self, worker: int) -> None:
        """Remove what is stored about a worker's old process, after a new process replaced it.

        Ask the new process for its `StackSource` and for the memory state of the node.
        """
        self._methods.clear()
        self._stack_sources[worker] = self.actors[worker].stack_source.remote()
        self._stacks.pop(worker, None)
        self._first_memory[worker] = self.actors[worker].memory_state.remote()

    def explain_death(self, worker: int, death: WorkerDiedError) -> str:
        """Return why a worker died, as text without a full stop.

        If the kernel of the worker's node ended a process because memory ran out, the text says so.
        Otherwise it is the text of `death`.
        """
        text = str(death).rstrip(".")
        first = self._first_memory[worker]
        if not ray.wait([first], timeout=0)[0]:  # it died at its start
            return text
        now = self._read_memory(self._node_ids[worker])
        with suppress(ray.exceptions.RayError):
            if now is not None and now.kills > ray.get(first).kills:
                size = f", which has {format_bytes(now.total_bytes)}"
                place = (
                    f"memory ran out on its node{size if math.isfinite(now.total_bytes) else ''}"
                )
                return f"{place}, so that the kernel ended a process"
        return text

    def _read_memory(self, node: str) -> MemoryState | None:
        """Return the state of a node's memory; None if the node does not answer.

        node: Ray's identifier of the node.
        """
        entries = [entry for entry in ray.nodes() if entry["NodeID"] == node and entry["Alive"]]
        if not entries or not all(probe(entries)):
            return None
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        task: Any = ray.remote(num_cpus=0, max_retries=0)(memory_state)
        state = task.options(scheduling_strategy=place).remote()
        if not ray.wait([state], timeout=MEMORY_TIMEOUT_S)[0]:
            ray.cancel(state, force=True)
            return None
        with suppress(ray.exceptions.RayError):
            known: MemoryState = ray.get(state)
            return known
        return None

    def revive(self, worker: int) -> None:
        """Start another actor at the place of a worker that died.

        Raises WorkerDiedError if the worker's node is lost, ProcessLostError if the new actor does
        not start.
        Raises RunStoppedError if the new actor's results would not be bit-identical to the
        driver's, unless `runtime.mixed=true`.
        """
        ray.kill(self.actors[worker])  # it may be alive, but unreachable
        if self._recruiter is not None and worker in self._places:
            self.actors[worker] = self._recruiter.restart(worker, self._places[worker])
        else:
            self.actors[worker] = self._make(worker)
        self._forget_process(worker)
        self._adders.pop(self.nodes[worker], None)  # it may be lost with the node
        actor = self.actors[worker]
        ready = actor.ready.remote() if self.participants is None else actor.identity.remote()
        if not self._wait_in_place(worker, ready):
            raise ProcessLostError(
                f"worker {worker} died, and no new process started in its place. Its node may be "
                "lost: run `ray status` to see which nodes the cluster has"
            )
        self._meet_replacement(worker, ready)

    def _wait_in_place(self, worker: int, ref: ray.ObjectRef[Any]) -> bool:
        """Wait for the result of a process in a worker's bundle; return True if the result exists.

        Return False after `REPLACEMENT_TIMEOUT_S` seconds, or once Ray says that a node with a
        bundle of this run is dead.
        Raises WorkerDiedError if `watch_nodes` finds that this worker's node is lost.
        """
        for second in range(1, REPLACEMENT_TIMEOUT_S + 1):
            if ray.wait([ref], timeout=1)[0]:
                return True
            if worker in self.find_lost_workers():
                raise WorkerDiedError(f"the node of worker {worker} is lost")
            if second % ROOM_CHECK_S == 0 and _has_lost_bundle():
                break
        return False

    def meet_workers(self, timeout_s: float, *processes: Identity) -> None:
        """Wait until all workers are ready, and compare their identities with the driver's.

        processes: the identities of other processes of the run, which are compared, too.
        Raises ProcessLostError if a worker does not start in time.
        Raises UnequalWorkersError if results of a process would not be bit-identical to the
        driver's, unless `runtime.mixed=true`.
        """
        assert self.participants is not None, "a runtime without participants compares nothing"
        answers = [actor.identity.remote() for actor in self.actors]
        timeout = None if math.isinf(timeout_s) else timeout_s
        _, late = ray.wait(answers, num_returns=len(answers), timeout=timeout, fetch_local=False)
        if late:
            workers = ", ".join(f"worker {answers.index(answer)}" for answer in late)
            raise ProcessLostError(
                f"{workers} did not start within {timeout_s:g} s. Read Ray's logs, which each node "
                "has in /tmp/ray/session_latest/logs"
            )
        identities = [self._identity(worker, answer) for worker, answer in enumerate(answers)]
        known = [identity for identity in identities if identity is not None]
        self.participants.add(*processes, *known)

    def _meet_replacement(self, worker: int, answer: ray.ObjectRef[Any]) -> None:
        """Compare the identity of a worker that replaces a dead one with the driver's identity.

        answer: a reference to the new worker's identity.
        Raises RunStoppedError if the results would not be bit-identical, unless
        `runtime.mixed=true`.
        Raises WorkerDiedError if the worker is lost with its node.
        """
        if self.participants is None:
            return
        identity = self._identity(worker, answer)
        if identity is None:
            if worker in self.find_lost_workers():
                raise WorkerDiedError(f"the node of worker {worker} is lost")
            return
        try:
            self.participants.add(identity)
        except UnequalWorkersError as error:
            raise RunStoppedError(
                f"worker {worker} died, and the results of its replacement would differ in the "
                f"last bits. {error} To continue the run, use resume=latest."
            ) from None

    def _identity(self, worker: int, answer: ray.ObjectRef[Any]) -> Identity | None:
        """Return the identity of a worker's process; None if it cannot be found out.

        If the worker dies before it answers, another process in the worker's bundle reports the
        identity.
        answer: a reference to the identity that the worker itself reports.
        """
        with suppress(ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError):
            identity: Identity = ray.get(answer)
            return identity
        if self._identify is None or worker >= self._first_workers:
            return None
        report = self._identify(worker)
        try:
            return ray.get(report) if self._wait_in_place(worker, report) else None
        except WorkerDiedError:  # the node is lost as well
            return None
        except ray.exceptions.RayTaskError as error:
            facts = {"raysim": f"cannot be loaded: {first_line(error)}"}
            return Identity(f"worker-{worker}", "its node", facts)
        except ray.exceptions.RayError:
            return None

    def stop(self) -> None:
        """End all actors."""
        for actor in [*self.actors, *self._adders.values()]:
            ray.kill(actor)
        self._adders.clear()


def _has_lost_bundle() -> bool:
    """Return True if a bundle of this run is on a lost node.

    Ray moves such a bundle as soon as another node has room for it.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return False
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"].values()
    return not alive.issuperset(nodes)


def start_workers(
    spec: RunSpec, workers: int, kind: type = RayWorker, actors: Sequence[Any] = (), cpus: float = 1
) -> RayRuntime:
    """Start workers outside any placement group, all at the same time.

    kind: the class of the workers.
    actors: running actors that become the workers; without any, new actors are started.
    cpus: the CPUs that each worker reserves.
    """
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
    most: int = 0,
) -> RayRuntime:
    """Start workers in the bundles of a placement group, all at the same time.

    group: bundle 0 belongs to the coordinator, bundle 1 to worker 0, and so on.
    spec: the run, which stays in the object store for workers that replace dead ones.
    content: a list with a reference to the bytes of the data set's file; [] if all processes of the
    run are on one node.
    actors: running actors that become the workers; without any, new actors are started.
    participants: as in `RayRuntime`.
    packages, device: an identity includes the versions of these packages, and this device, such as
    "cuda"; "" means none.
    most: the largest number of workers at a time; 0 if no workers may start later in the run.
    """
    shared = spec if isinstance(spec, ray.ObjectRef) else ray.put(spec)
    actor = actor_class(kind)
    become_all(actors, [(shared, f"worker-{index}", content) for index in range(size.workers)])

    def start(index: int) -> Any:
        worker = f"worker-{index}"
        resources = bundle_options(group, index + 1, size.per_worker)
        return actor.options(name=f"{name}/{worker}", **resources).remote(shared, worker, content)

    def start_at(index: int, place: WorkerPlace, content: Sequence[ray.ObjectRef[Any]]) -> Any:
        worker = f"worker-{index}"
        resources = bundle_options(place.group, place.bundle, size.per_worker)
        # A lost worker may still have the name.
        actor_name = f"{name}/{worker}-{uuid.uuid4().hex[:6]}"
        return actor.options(name=actor_name, **resources).remote(shared, worker, content)

    def identify_place(index: int) -> ray.ObjectRef[Identity]:
        task: Any = ray.remote(max_retries=0)(identify_process).options(
            **bundle_options(group, index + 1, size.per_worker)
        )
        identity: ray.ObjectRef[Identity] = task.remote(f"worker-{index}", packages, device)
        return identity

    coordinator_node, *nodes = bundle_nodes(group)
    return RayRuntime(
        size.workers,
        start,
        nodes[: size.workers],
        coordinator_node,
        options.combine_from,
        actors,
        participants,
        identify_place,
        Growth(group, size.per_worker, most, options, start_at, content) if most else None,
    )


def become_all(actors: Sequence[Any], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Replace the object in each actor by a new object of the same class; wait for all actors.

    Raise the error of the first actor that fails.
    arguments: the arguments for the constructor of each actor's object.
    """
    pairs = zip(actors, arguments, strict=bool(actors))
    calls = [actor.become.remote(*its_arguments) for actor, its_arguments in pairs]
    ray.get(calls, timeout=START_TIMEOUT_S)


def bundle_nodes(group: PlacementGroup) -> list[str]:
    """Return Ray's identifier of each bundle's node; the first bundle is the coordinator's."""
    node_ids = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [node_ids[index] for index in range(len(node_ids))]
