"""Start workers during a run.

There are three occasions: a worker is lost, a node joins the cluster, or resources become free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup

from raysim.primitives.errors import first_line
from raysim.runtime.placement import RayOptions, Resources, Size, limit_by_memory, node_capacity
from raysim.runtime.ray.node_watch import NODE_LABEL, NodeWatch
from raysim.training.identity import Identity

# A worker that has not started by then is given up: another run may use its node.
ROOM_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class WorkerPlace:
    """A place where a worker can start.

    node: Ray's identifier of the node.
    group: the placement group that reserves the worker's resources.
    bundle: the index of the worker's bundle in this group.
    """

    node: str
    group: PlacementGroup
    bundle: int


@dataclass(frozen=True)
class Growth:
    """The facts of a run that decide how `Recruiter` starts workers.

    group: the placement group of the workers that the run began with.
    per_worker: the resources that a worker reserves.
    most: the largest number of workers of the run.
    start: starts a worker's actor, from the worker's number, its place, and `content`.
    content: a list with a reference to the stored data set's file; [] if it is not stored yet.
    """

    group: PlacementGroup
    per_worker: Resources
    most: int
    options: RayOptions
    start: Callable[[int, WorkerPlace, Sequence[ray.ObjectRef[Any]]], Any]
    content: Sequence[ray.ObjectRef[Any]]


@dataclass
class _Recruit:
    """A worker that was started and is not ready yet.

    place: where the worker was started.
    answer: a reference to the worker's identity. The identity exists once the worker is ready.
    since: the time of the start, in seconds of `time.monotonic`.
    """

    worker: int
    place: WorkerPlace
    actor: Any
    answer: ray.ObjectRef[Identity]
    since: float


class Recruiter:
    """The object that starts workers during a run.

    growth: the facts of the run that decide how many workers start, and how.
    watch: the object that knows which nodes are usable.
    dataset_path: the data set's file on this node, which is copied to nodes without it.
    """

    def __init__(self, growth: Growth, watch: NodeWatch, worker_bytes: int, dataset_path: Path):
        self._growth, self._watch, self._worker_bytes = growth, watch, worker_bytes
        self._content, self._dataset_path = growth.content, dataset_path
        self._starting: list[_Recruit] = []
        self._groups: list[PlacementGroup] = []  # placement groups of workers on nodes that joined
        nodes = ray.util.placement_group_table(growth.group)["bundles_to_node_id"]
        # On these nodes a worker starts only on resources that other programs do not use.
        self._known_nodes = {node["NodeID"] for node in ray.nodes()} | set(nodes.values())
        self._free_before: Mapping[str, int] = {}  # by node: free places at the last look
        self._full_nodes: set[str] = set()  # nodes on which a worker could not start
        self.notices: list[str] = []

    def find_places(
        self, free_workers: Sequence[int], active: int
    ) -> list[tuple[int, WorkerPlace]]:
        """Return the workers that can be started now, as pairs (number, `WorkerPlace`).

        A lost worker keeps its number and its bundle. A new worker has the number -1; this function
        reserves resources for it.
        free_workers: the lost workers whose bundles may be used again.
        active: the number of workers that count towards `Growth.most`.
        """
        usable = {node["NodeID"]: node for node in self._watch.usable_nodes()}
        starting = {recruit.worker for recruit in self._starting}
        room = self._growth.most - active - len(self._starting)
        places: list[tuple[int, WorkerPlace]] = []
        if set(free_workers) - starting and room > 0:
            nodes = ray.util.placement_group_table(self._growth.group)["bundles_to_node_id"]
            for worker in free_workers:
                node = nodes.get(worker + 1, "")
                if worker not in starting and node in usable and len(places) < room:
                    places.append((worker, WorkerPlace(node, self._growth.group, worker + 1)))
        free: dict[str, int] = {}
        for name, node in usable.items():
            if name in self._full_nodes:
                continue
            count = self._capacity(node["Resources"])
            if name in self._known_nodes:
                # A place must be free twice in a row, because another program may be about to use
                # it.
                free[name] = self._free_places(node)
                count = min(free[name], self._free_before.get(name, 0))
            count = min(count, room - len(places))
            if count > 0:
                self._known_nodes.add(name)
                free[name] = 0  # at the next look these places may still seem to be free
            places += [(-1, self._reserve(name)) for _ in range(count)]
        self._free_before = free
        return places

    def _free_places(self, node: Mapping[str, Any]) -> int:
        """Return how many more workers fit on a node.

        node: an entry of `ray.nodes()`.
        """
        per_worker = self._growth.per_worker
        free = node_capacity(self._watch.free_resources(node["NodeID"]), per_worker)
        total = node_capacity(node["Resources"], per_worker)
        if free is None or total is None:  # workers reserve nothing, so all have started
            return 0
        # Each program on the node is assumed to need as much memory as a worker.
        return max(0, min(free, self._capacity(node["Resources"]) - (total - free)))

    def _capacity(self, node: Resources) -> int:
        """Return how many workers fit on a node if it is empty.

        Too little memory does not reduce the number below 1.
        node: the resources of the node.
        """
        growth = self._growth
        count = node_capacity(node, growth.per_worker)
        count = growth.most if count is None else min(count, growth.most)
        if not count:
            return 0
        size = Size(count, growth.per_worker)
        return limit_by_memory(size, growth.options, [node], self._worker_bytes).workers

    def _reserve(self, node: str) -> WorkerPlace:
        bundle = dict(self._growth.per_worker) or {"memory": 1}
        group = ray.util.placement_group([bundle], bundle_label_selector=[{NODE_LABEL: node}])
        self._groups.append(group)
        return WorkerPlace(node, group, 0)

    def start(self, worker: int, place: WorkerPlace) -> Any:
        """Start a worker, and return its actor without waiting until it is ready.

        Once the worker is ready, the next `take_ready` returns the worker's number.
        worker: the number of a new worker, or of a lost worker.
        """
        actor = self.restart(worker, place)
        answer = actor.identity.remote()
        self._starting.append(_Recruit(worker, place, actor, answer, time.monotonic()))
        return actor

    def restart(self, worker: int, place: WorkerPlace) -> Any:
        """Start a worker again at the place where it died; return its actor."""
        if not self._content:
            self._content = [ray.put(np.fromfile(self._dataset_path, np.uint8))]
        return self._growth.start(worker, place, self._content)

    def take_ready(self) -> list[tuple[int, Identity]]:
        """Return the started workers that have become ready, each with its identity.

        A worker that cannot start is stopped, and a sentence about it is added to `notices`.
        """
        if not self._starting:
            return []
        answers = [recruit.answer for recruit in self._starting]
        existing, _ = ray.wait(answers, num_returns=len(answers), timeout=0)
        ready: list[tuple[int, Identity]] = []
        for recruit in list(self._starting):
            if recruit.answer in existing:
                self._starting.remove(recruit)
                try:
                    ready.append((recruit.worker, ray.get(recruit.answer)))
                except ray.exceptions.RayError as error:
                    self._give_up(recruit, first_line(error))
            elif recruit.place.node in self._watch.lost:
                self._starting.remove(recruit)
                self._give_up(recruit, f"its node {self._watch.lost[recruit.place.node].reason}")
            elif time.monotonic() - recruit.since > ROOM_TIMEOUT_S:
                self._starting.remove(recruit)
                self._give_up(recruit, f"it was not ready after {ROOM_TIMEOUT_S:g} s")
        return ready

    def _give_up(self, recruit: _Recruit, reason: str) -> None:
        ray.kill(recruit.actor)
        self.notices.append(f"worker {recruit.worker} does not join the run: {reason}")
        if recruit.place.group is not self._growth.group:
            self._full_nodes.add(recruit.place.node)
            ray.util.remove_placement_group(recruit.place.group)

    def stop(self) -> None:
        """End the workers that are starting, and release all resources that were reserved."""
        for recruit in self._starting:
            ray.kill(recruit.actor)
        for group in self._groups:
            with suppress(ray.exceptions.RayError):
                ray.util.remove_placement_group(group)
