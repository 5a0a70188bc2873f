"""Notice nodes that do not answer, leave the cluster or join it.

Ray declares a node dead only after a minute without an answer. Until then Ray may start processes
on this node.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import ray

from raysim.runtime.placement import Resources
from raysim.simulation.runtime import LostNode

PROBE_INTERVAL_S = 3.0
PROBE_TIMEOUT_S = 3.0
MAX_PROBES = 32  # nodes that are asked at the same time
# What a client of HTTP/2 sends first: the preface, and empty settings (RFC 9113, section 3.4). A
# raylet's server answers, and every other server does so, too, or closes the connection.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
NODE_LABEL = "ray.io/node-id"  # of every node
DRAINING = "DRAINING"  # the status of a node that will leave the cluster


def is_answering(node: Mapping[str, Any], timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Return True if a node's raylet (Ray's process on the node) answers.

    node: an entry of `ray.nodes()`.
    timeout_s: the most seconds to wait for the answer.
    """
    address = (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
    try:
        with socket.create_connection(address, timeout=timeout_s) as connection:
            connection.sendall(PREFACE)
            connection.recv(1)
            return True
    except ConnectionResetError:
        return True
    except OSError:
        return False


def probe(nodes: Sequence[Mapping[str, Any]], timeout_s: float = PROBE_TIMEOUT_S) -> list[bool]:
    """Return a bool for each node: True if it answers.

    This has nothing to do with probes of clients' models (`evaluate.probe`).
    nodes: entries of `ray.nodes()`.
    timeout_s: the most seconds to wait for an answer.
    """
    if not nodes:
        return []
    with ThreadPoolExecutor(min(len(nodes), MAX_PROBES)) as pool:
        return list(pool.map(lambda node: is_answering(node, timeout_s), nodes))


def living_nodes() -> list[Mapping[str, Any]]:
    """Return the entries of `ray.nodes()` for nodes that Ray declares alive and that answer.

    The first entry is the node of this process.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    this_node = ray.get_runtime_context().get_node_id()
    alive.sort(key=lambda node: node["NodeID"] != this_node)
    answers = [True, *probe(alive[1:])]  # this process is on the first one
    return [node for node, answer in zip(alive, answers, strict=False) if answer]


def avoid_silent_nodes(bundles: int) -> list[dict[str, str]] | None:
    """Return Ray's label selectors that keep bundles away from nodes that do not answer.

    Return None if all nodes answer.
    bundles: the number of bundles; the result has a selector for each of them.
    """
    living = {node["NodeID"] for node in living_nodes()}
    silent = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    silent = [node for node in silent if node not in living]
    if not silent:
        return None
    return [{NODE_LABEL: f"!in({','.join(silent)})"} for _ in range(bundles)]


class ClusterState(NamedTuple):
    """What the head of a cluster knows about its nodes, which are named by Ray's identifiers.

    draining: the nodes that will leave, such as spot instances after their notice.
    free: the unreserved resources of each node.
    has_demand: True if a task, an actor or a placement group waits for resources.
    """

    draining: Collection[str] = ()
    free: Mapping[str, Resources] = MappingProxyType({})
    has_demand: bool = False


def cluster_state(address: str) -> ClusterState:
    """Return what the head of a cluster knows about its nodes.

    The result is empty if the installed version of Ray cannot report this.
    address: the address of the cluster's head.
    """
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status
    except ImportError:
        return ClusterState()
    status = get_cluster_status(address)
    nodes = [*status.active_nodes, *status.idle_nodes]
    draining = {str(node.node_id) for node in nodes if node.node_status == DRAINING}
    free = {}
    for node in nodes:
        usage = node.resource_usage.usage if node.resource_usage else ()
        free[str(node.node_id)] = {use.resource_name: use.total - use.used for use in usage}
    demands = status.resource_demands
    has_demand = bool(demands.placement_group_demand or demands.ray_task_actor_demand)
    return ClusterState(draining, free, has_demand)


def free_resources() -> list[Resources]:
    """Return the unreserved resources of each node that answers; [] if they are unknown."""
    with suppress(Exception):  # then it is unknown
        free = cluster_state(str(ray.get_runtime_context().gcs_address)).free
        return [free[node["NodeID"]] for node in living_nodes() if node["NodeID"] in free]
    return []


class NodeWatch:
    """A thread that asks every few seconds whether the nodes of a cluster answer.

    The attribute `lost` maps Ray's identifier of each lost node to a `LostNode`. A node is lost if
    it does not answer for `timeout_s` seconds, or if Ray declares it dead or draining. If
    `timeout_s` is infinity, no node is asked.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.lost: Mapping[str, LostNode] = {}
        self._own_node = str(ray.get_runtime_context().get_node_id())
        self._usable: Sequence[Mapping[str, Any]] = ()
        # By node: seconds without an answer. Only time in which this process asked counts.
        self._silent_s: dict[str, float] = {}
        self._state = ClusterState()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raysim-nodes", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        address = str(ray.get_runtime_context().gcs_address)
        while not self._has_ended.is_set():
            # Without an answer of the cluster's head nothing new is known.
            with suppress(Exception):
                self._look(address)
            self._has_ended.wait(PROBE_INTERVAL_S)

    def _look(self, address: str) -> None:
        since = time.monotonic()
        nodes = ray.nodes()
        alive = [node for node in nodes if node["Alive"]]
        if math.isfinite(self.timeout_s):
            # This process is on its own node, which therefore is not lost.
            other_nodes = [node for node in alive if node["NodeID"] != self._own_node]
            answers = probe(other_nodes)
            round_s = time.monotonic() - since + PROBE_INTERVAL_S
            for node, answer in zip(other_nodes, answers, strict=True):
                silent_s = self._silent_s.get(node["NodeID"], 0.0) + round_s
                self._silent_s[node["NodeID"]] = 0.0 if answer else silent_s
        with suppress(Exception):  # then it is unknown
            self._state = cluster_state(address)
        lost = {node["NodeID"]: self._find_reason(node) for node in nodes}
        self.lost = {name: reason for name, reason in lost.items() if reason is not None}
        self._usable = [
            node
            for node in alive
            if node["NodeID"] not in self.lost and not self._silent_s.get(node["NodeID"])
        ]

    def _find_reason(self, node: Mapping[str, Any]) -> LostNode | None:
        name = node["NodeID"]
        if not node["Alive"]:
            return LostNode("was declared dead by Ray")
        silent_s = self._silent_s.get(name, 0.0)
        if silent_s >= self.timeout_s:
            return LostNode(f"has not answered for {silent_s:.0f} s (faults.node_timeout)")
        if name in self._state.draining:
            return LostNode("will leave the cluster (Ray drains it)", is_reachable=True)
        return None

    def is_silent(self, node: str) -> bool:
        """Return True if a node did not answer the last time it was asked."""
        return self._silent_s.get(node, 0.0) > 0

    def usable_nodes(self) -> Sequence[Mapping[str, Any]]:
        """Return the `ray.nodes()` entries of nodes that are alive, answer and will not leave."""
        return self._usable

    def free_resources(self, node: str) -> Resources:
        """Return the unreserved resources of a node, as amounts by name; {} if unknown.

        Also return {} while a task, an actor or a placement group of the cluster waits for
        resources, because Ray may give it the resources of this node.
        """
        state = self._state
        return {} if state.has_demand else state.free.get(node, {})

    def stop(self) -> None:
        """Tell the thread to end; it ends a little later."""
        self._has_ended.set()
