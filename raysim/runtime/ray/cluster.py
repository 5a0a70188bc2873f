"""Start, join and leave a Ray cluster, and reserve resources on its nodes."""

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
    RAY_CLUSTERS_VARIABLE,
    NoRoomError,
    RayOptions,
    Size,
    format_resources,
    worker_capacity,
)
from raysim.runtime.ray.failures import describe_failed_start
from raysim.runtime.ray.node_watch import avoid_silent_nodes, living_nodes
from raysim.runtime.ray.ray_messages import separate_messages

Say = Callable[[str], None]

# A placement group that takes longer than this usually waits for resources of other runs.
QUICK_PLACEMENT_S = 2


def connect(options: RayOptions) -> bool:
    """Start or join a Ray cluster; return False if this process is already connected.

    Raises ValueError, which gives the reason, if Ray does not start or cannot be joined.
    """
    if ray.is_initialized():
        return False
    address = options.address or "local"
    if (
        address != "local"
        and os.environ.get(RAY_CLUSTERS_VARIABLE) == "0"
        and not address.startswith("127.")
    ):
        raise ValueError(
            f"runtime.address={address}: the environment variable {RAY_CLUSTERS_VARIABLE}=0 "
            "restricts Ray to this machine. Remove the variable. If an earlier call of raysim in "
            "this Python process set it, start a new process."
        )
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # Ray would try for minutes to reach it
            socket.create_connection((host, int(port)), timeout=5).close()
        if address == "local":
            _ensure_token()
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if address == "local" else None,
        )
    except Exception as error:  # Ray raises this class if its processes do not start in time
        raise ValueError(describe_failed_start(address, error)) from error
    if threading.current_thread() is threading.main_thread():
        # `ray job stop` acts like Ctrl-C: Ray's own handler would print its stack and may abort.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    return True


def _ensure_token() -> None:
    """Set an authentication token for the cluster that this process starts, if there is none.

    Without a token, Ray would write one into the home folder. Processes that start at the same time
    would overwrite each other's tokens there.
    """
    if any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    if not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def connection(options: RayOptions) -> Iterator[None]:
    """Connect to a cluster; at the end of the context, disconnect.

    If this process was already connected, it stays connected, also at the end of the context.
    Raises the errors of `connect`.
    """
    if not connect(options):
        yield
        return
    with separate_messages():
        try:
            yield
        finally:
            disconnect()


def cluster_address() -> str:
    """Return the address under which other processes join the connected cluster."""
    return str(ray.get_runtime_context().gcs_address)


def disconnect() -> None:
    """Leave the cluster; if `connect` started it, the cluster ends."""
    ray.shutdown()


def start_local_nodes(count: int, cpus: int) -> Any:
    """Start a cluster of several Ray nodes on this machine, to test traffic between nodes.

    Return an object that has the attribute `address`, and the method `shutdown()`, which ends the
    cluster.
    cpus: the CPUs that each node declares.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(count):
        cluster.add_node(num_cpus=cpus, include_dashboard=False)
    return cluster


def node_resources() -> list[dict[str, float]]:
    """Return all resources of each node that answers, whether they are in use or not.

    The first entry is for the node of this process.
    """
    return [node["Resources"] for node in living_nodes()]


def has_gpus() -> bool:
    """Return True if at least one node of the connected cluster has a GPU."""
    return any(node.get("GPU") for node in node_resources())


def run_bundles(size: Size) -> list[dict[str, float]]:
    """Return the bundles that a run reserves: first the coordinator's, then one per worker.

    The coordinator's bundle contains a resource that only the node of this process has, because the
    run's files are on this node.
    """
    this_node = next(
        name
        for name in node_resources()[0]
        if name.startswith("node:") and not name.startswith("node:__")
    )
    workers = [dict(size.per_worker) or {"memory": 1} for _ in range(size.workers)]
    return [{this_node: 0.001}, *workers]


# --- resources ------------------------------------------------------------------------------
@contextmanager
def reserve(
    bundles: list[dict[str, float]], name: str, options: RayOptions, say: Say
) -> Iterator[PlacementGroup]:
    """Wait until Ray has reserved a run's resources; release them at the end of the context.

    Inside a trial of a sweep, yield the placement group of the trial, and do not release it.
    bundles: the resources to reserve.
    Raises ValueError after `options.wait` seconds, and NoRoomError if the cluster becomes too
    small.
    """
    outer = ray.util.get_current_placement_group()
    if outer is not None:
        yield outer
        return
    group = ray.util.placement_group(
        bundles,
        strategy=options.strategy,
        name=name,
        bundle_label_selector=avoid_silent_nodes(len(bundles)),
    )
    try:
        _wait_for(group, bundles, options, say)
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _wait_for(
    group: PlacementGroup, bundles: Sequence[Mapping[str, float]], options: RayOptions, say: Say
) -> None:
    """Wait until Ray has reserved the resources of a placement group.

    Raises ValueError after `options.wait` seconds, and NoRoomError if the cluster becomes too
    small.
    """
    since, has_said = time.monotonic(), False
    while not group.wait(1 if has_said else QUICK_PLACEMENT_S):
        _check_capacity(bundles, options)
        is_late = options.wait is not None and time.monotonic() - since >= options.wait
        if has_said and not is_late:
            continue
        needs = _total_resources(bundles)
        free = ray.available_resources()
        available = format_resources({name: free.get(name, 0.0) for name in needs})
        text = f"this run needs {format_resources(needs)}"
        if all(free.get(name, 0.0) >= amount for name, amount in needs.items()):
            text += f". The cluster has {available} free, but Ray has not reserved them yet"
        else:
            text += f", but other runs leave only {available}"
        if is_late:
            fewer = "decrease runtime.workers, " if bundles.count(bundles[-1]) > 1 else ""
            raise ValueError(
                f"runtime.wait={options.wait:g}: {text}. Try again later, {fewer}or set "
                "runtime.wait=null to wait without a limit."
            )
        say(
            f"waiting: {text} (Ctrl-C or `ray job stop` ends the run; runtime.wait=SECONDS limits "
            "the wait)"
        )
        has_said = True


def _check_capacity(bundles: Sequence[Mapping[str, float]], options: RayOptions) -> None:
    """Raise NoRoomError if the cluster has become too small for the workers.

    bundles: the bundles of the run: first the coordinator's, then an equal one for each worker.
    options: the settings `runtime.*`.
    """
    worker = bundles[-1]
    workers = bundles.count(worker)
    capacity = worker_capacity(node_resources(), worker, options.strategy)
    if capacity is not None and capacity < workers:
        needs = format_resources(worker)
        room = f"room for only {capacity} of them" if capacity else "no room for one"
        fewer = f", or set runtime.workers={capacity}" if capacity else ""
        raise NoRoomError(
            f"runtime.workers={workers}: each worker needs {needs}, but the cluster lost a node "
            f"and now has {room}. Start a node with {needs}{fewer}."
        )


def _total_resources(bundles: Sequence[Mapping[str, float]]) -> Counter[str]:
    """Return the sum of the bundles' resources, without Ray's `node:ADDRESS` resources."""
    total: Counter[str] = Counter()
    for bundle in bundles:
        for name, amount in bundle.items():
            if not name.startswith("node:"):
                total[name] += amount  # type: ignore[assignment]
    return total


def bundle_options(
    group: PlacementGroup | None, index: int, resources: Mapping[str, float]
) -> dict[str, Any]:
    """Return Ray's options for a task or actor that uses all resources of a bundle.

    group: the placement group; None means no group.
    index: the position of the bundle in the group.
    resources: the resources of the bundle.
    """
    arguments = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {
        argument: resources.get(name, 0) for name, argument in arguments.items()
    }
    options["resources"] = {name: resources[name] for name in resources if name not in arguments}
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        )
    return options
