"""Ray itself: start, join and leave it; what its nodes have; room that is reserved on them."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysim.runtime.placement import (
    CLUSTERS,
    NoRoomError,
    RayOptions,
    Size,
    format_resources,
    worker_capacity,
)
from raysim.runtime.ray.failures import describe_failed_start

Say = Callable[[str], None]

GRACE = (
    2  # seconds in which a group that fits is there; longer means that others hold what it needs
)


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
        if address == "local":
            _ensure_token()
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address == "local" else None,
        )
    except Exception as error:  # Ray raises a bare one where its processes do not start in time
        raise ValueError(describe_failed_start(address, error)) from error
    if threading.current_thread() is threading.main_thread():
        # `ray job stop` is a Ctrl-C: Ray's own handler prints its stack and may abort.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    return True


def _ensure_token() -> None:
    """Give the cluster of this process a token, unless the user has one.

    Ray would write one into the home folder, where processes that start at the same moment replace each other's.
    """
    if any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    if not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def connection(options: RayOptions) -> Iterator[None]:
    """`connect`; in the end only what it started or joined is left."""
    mine = connect(options)
    try:
        yield
    finally:
        if mine:
            disconnect()


def cluster_address() -> str:
    """Of the connected cluster, for other processes that join it."""
    return str(ray.get_runtime_context().gcs_address)


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends."""
    ray.shutdown()


def start_local_nodes(count: int, cpus: int) -> Any:
    """Start so many Ray nodes in this machine, each of so many (declared) CPUs, to see what travels between nodes.

    `address` is where to connect; `shutdown()` ends them.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(count):
        cluster.add_node(num_cpus=cpus, include_dashboard=False)
    return cluster


def node_resources() -> list[dict[str, float]]:
    """What each living node has in all, the driver's own first."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: node["NodeID"] != ray.get_runtime_context().get_node_id())
    return [node["Resources"] for node in alive]


def has_gpus() -> bool:
    """Whether any node has one."""
    return any(node.get("GPU") for node in node_resources())


def run_bundles(size: Size) -> list[dict[str, float]]:
    """What a run reserves: next to nothing on this node for the coordinator, whose files lie here; then each worker."""
    here = next(
        name
        for name in node_resources()[0]
        if name.startswith("node:") and not name.startswith("node:__")
    )
    token = {here: 0.001}
    return [token, *(dict(size.each) or {"memory": 1} for _ in range(size.workers))]


# --- room -----------------------------------------------------------------------------------------------------------
@contextmanager
def reserve(
    asked: list[dict[str, float]], name: str, options: RayOptions, say: Say
) -> Iterator[PlacementGroup]:
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


def _await(
    group: PlacementGroup, asked: Sequence[Mapping[str, float]], options: RayOptions, say: Say
) -> None:
    """Until the group is there, in steps of seconds: an interrupt is heard between them."""
    since, told = time.monotonic(), False
    while not group.wait(1 if told else GRACE):
        each = asked[-1]  # of a worker
        if (
            places := worker_capacity(node_resources(), each, options.strategy)
        ) is not None and places < asked.count(each):
            raise NoRoomError(
                f"{asked.count(each)} x {format_resources(each)} are needed, and {places} fit: the cluster lost a node"
            )
        late = options.wait is not None and time.monotonic() - since >= options.wait
        if told and not late:
            continue
        needs: Counter[str] = Counter()
        for each in asked:
            needs.update(
                {name: amount for name, amount in each.items() if not name.startswith("node:")}
            )
        free = ray.available_resources()
        has = format_resources({name: free.get(name, 0.0) for name in needs})
        text = f"this needs {format_resources(needs)}, of which other runs leave {has}"
        if late:
            raise ValueError(
                f"{text}: try again later, lower runtime.workers, or set runtime.wait=null to wait for them"
            )
        say(
            f"waiting: {text} (Ctrl-C or `ray job stop` ends the wait; runtime.wait=SECONDS limits it)"
        )
        told = True


def bundle_options(
    group: PlacementGroup | None, index: int, each: Mapping[str, float]
) -> dict[str, Any]:
    """The options of a task or an actor that fills a bundle."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    arguments: dict[str, Any] = {key: each.get(name, 0) for name, key in named.items()}
    arguments["resources"] = {name: amount for name, amount in each.items() if name not in named}
    if group is not None:
        arguments["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        )
    return arguments
