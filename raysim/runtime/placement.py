"""Compute which resources a worker reserves, and how many workers fit on a cluster.

This module does not import Ray.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from raysim.primitives.checks import at_least

# Amounts by name: CPU, GPU, memory in bytes, and resources that the cluster's nodes declare.
Resources: TypeAlias = Mapping[str, float]

MIB, GIB = 2**20, 2**30
RESOURCE_STEPS = 10_000  # Ray counts resources in steps of 0.0001
# Ray's variable; "0": Ray's processes listen on the loopback interface only, on every system.
RAY_CLUSTERS_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# The key that sets a resource; other resources are keys of runtime.resources.
RESOURCE_KEYS = {"CPU": "runtime.cpus", "GPU": "runtime.gpus"}


@dataclass(frozen=True)
class RayOptions:
    """The settings `runtime.*`: the number of workers, their resources, and where they are.

    workers: None lets raysim choose.
    cpus, gpus: the CPUs and GPUs of each worker. cpus=None reserves a CPU for each of its threads;
    gpus=None lets raysim choose.
    resources: other resources of each worker, by name.
    address: "local" or None starts a cluster on this machine; "auto" or HOST:PORT joins a cluster.
    strategy: PACK fills one node after another, SPREAD alternates between nodes, STRICT_PACK uses
    one node only.
    wait: the most seconds to wait for resources of other runs, or for new nodes if the cluster is
    too small. None waits for other runs without a limit, but not for new nodes.
    preflight: True measures the memory of one job before the run. None does so only on GPUs with
    gpus=None, to choose how many workers share a GPU. A sweep never measures.
    combine: True lets each node add up the sums of its workers; False sends every sum to the
    coordinator. None means True for models of at least 262,144 floats. Results are bit-identical.
    mixed: True allows processes with different hardware or software. A repetition may then not be
    bit-identical.
    """

    workers: int | None = None
    cpus: float | None = None
    gpus: float | None = None
    resources: dict[str, float] = field(default_factory=dict)
    address: str | None = None
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK"] = "PACK"
    wait: float | None = None
    preflight: bool | None = None
    combine: bool | None = None
    mixed: bool = False

    @property
    def combine_from(self) -> float:
        """The smallest model, as a number of floats, for which nodes add up updates.

        For a model of at least this size, each node adds up its workers' sums. For a smaller model,
        workers send their sums to the coordinator. 0 means every model, infinity no model.
        """
        if self.combine is None:
            return 1 << 18
        return 0 if self.combine else math.inf

    def __post_init__(self) -> None:
        if self.workers is not None:
            at_least("runtime.workers", self.workers, 1)
        amounts = {"cpus": self.cpus, "gpus": self.gpus, "wait": self.wait}
        for name, amount in self.resources.items():
            amounts[f"resources.{name}"] = amount
        for key, value in amounts.items():
            if value is not None:
                at_least(f"runtime.{key}", value, 0)
        for name in self.resources:
            if name in RESOURCE_KEYS:
                raise ValueError(
                    f"runtime.resources.{name} cannot be set here. Set {RESOURCE_KEYS[name]} "
                    "instead."
                )
        if self.gpus is not None and self.gpus > 1 and self.gpus % 1:
            raise ValueError(
                f"runtime.gpus={self.gpus:g} is neither a share of one GPU nor a whole number. "
                f"Set it to 1 or {math.ceil(self.gpus)}."
            )


def listen_on_loopback(options: RayOptions) -> None:
    """Make Ray clusters that this process starts later unreachable for other machines.

    Call this before Ray is imported; otherwise the cluster listens on all interfaces, not only on
    loopback.
    options: the settings `runtime.*`. Nothing changes if `address` names an existing cluster.
    """
    if options.address in (None, "local") and "ray" not in sys.modules:
        os.environ.setdefault(RAY_CLUSTERS_VARIABLE, "0")


@dataclass(frozen=True)
class Size:
    """The number of workers of a run, and the resources that each of them reserves.

    per_worker: amounts by the name of the resource; amounts of 0 are left out.
    """

    workers: int
    per_worker: Resources

    def __str__(self) -> str:
        noun = "worker" if self.workers == 1 else "workers"
        return f"{self.workers} {noun} of {format_resources(self.per_worker) or 'nothing reserved'}"


class NoRoomError(ValueError):
    """The error if the nodes of a cluster have too few resources for the workers."""


# --- workers --------------------------------------------------------------------------------
def worker_resources(options: RayOptions, device: str, threads: int) -> dict[str, float]:
    """Return the resources that each worker reserves.

    A worker on the device "cuda" reserves a whole GPU, unless `runtime.gpus` is set. Every worker
    reserves one CPU per thread, unless `runtime.cpus` is set.
    Raises ValueError if the device does not fit the options.
    """
    if device.startswith("cuda:"):
        raise ValueError(
            f"device={device} names one GPU, and Ray assigns a GPU to every worker. Set "
            "device=cuda."
        )
    if device == "cuda" and options.gpus == 0:
        raise ValueError(
            "runtime.gpus=0 hides every GPU from the workers, which train on device=cuda. Set "
            "runtime.gpus=null."
        )
    gpus = options.gpus if options.gpus is not None else float(device == "cuda")
    cpus = options.cpus if options.cpus is not None else float(threads)
    resources = {"CPU": cpus, "GPU": gpus, **options.resources}
    return {name: amount for name, amount in resources.items() if amount}


def gpu_share(workers: int) -> float:
    """Return the share of a GPU for each worker if `workers` workers use the same GPU.

    This is 1 / workers, rounded down to a multiple of 0.0001, the smallest step of Ray's resources.
    """
    return RESOURCE_STEPS // workers / RESOURCE_STEPS


def node_capacity(node: Resources, per_worker: Resources) -> int | None:
    """Return how many workers fit on an empty node; None means any number.

    A worker's share of a GPU must be on one GPU.
    node: all resources of the node.
    per_worker: the resources that a worker reserves.
    """
    capacities = []
    for name, amount in per_worker.items():
        available = node.get(name, 0.0)
        if name == "GPU" and amount < 1:
            capacities.append(int(available + 1e-9) * _times(1.0, amount))
        else:
            capacities.append(_times(available, amount))
    return min(capacities, default=None)


def _times(available: float, amount: float) -> int:
    return round(available * RESOURCE_STEPS) // max(1, round(amount * RESOURCE_STEPS))


def worker_capacity(
    nodes: Sequence[Resources], per_worker: Resources, strategy: str = "PACK"
) -> int | None:
    """Return how many workers fit on nodes that are empty; None means any number.

    per_worker: the resources that a worker reserves.
    strategy: with STRICT_PACK all workers must fit on one node; PACK and SPREAD use all nodes.
    """
    if not per_worker:
        return None
    capacities = [node_capacity(node, per_worker) or 0 for node in nodes]
    if strategy == "STRICT_PACK":
        return max(capacities, default=0)
    return sum(capacities)


def choose_size(
    options: RayOptions, per_worker: Resources, nodes: Sequence[Resources], most: int
) -> Size:
    """Return the number of workers and their resources.

    If `runtime.workers` is null, the number is what fits on the nodes, but not above `most`.
    most: the number of clients in flight at once. It has no effect if `runtime.workers` is set.
    Raises NoRoomError if fewer workers fit than `runtime.workers`, or if not even one fits.
    """
    capacity = worker_capacity(nodes, per_worker, options.strategy)
    requested = options.workers or 1
    if capacity is not None and requested > capacity:
        raise NoRoomError(_describe_shortage(options, per_worker, nodes, requested, capacity))
    if options.workers:
        return Size(options.workers, per_worker)
    if capacity is None:
        return Size(most, per_worker)
    return Size(max(1, min(most, capacity)), per_worker)


def limit_by_memory(
    size: Size, options: RayOptions, nodes: Sequence[Resources], worker_bytes: int
) -> Size:
    """Reduce the number of workers to what the nodes' memory allows, but at least one.

    A node that declares no memory does not limit the number. With the strategy STRICT_PACK, all
    workers are on one node.
    size: the planned number of workers, and each worker's resources.
    """
    known = [{"memory": float(sys.maxsize), **node} for node in nodes]
    capacity = worker_capacity(known, {**size.per_worker, "memory": worker_bytes}, options.strategy)
    if capacity is None or capacity >= size.workers:
        return size
    return Size(max(1, capacity), size.per_worker)


def _describe_shortage(
    options: RayOptions,
    per_worker: Resources,
    nodes: Sequence[Resources],
    workers: int,
    capacity: int,
) -> str:
    """Describe which resource is scarcest, and what to change.

    If there is enough of each resource, but not on the same nodes, say that.
    workers, capacity: the requested number of workers and the number that fits.
    """
    capacities = {
        name: worker_capacity(nodes, {name: amount}, options.strategy) or 0
        for name, amount in per_worker.items()
    }
    scarce = min(capacities, key=capacities.__getitem__)
    key = RESOURCE_KEYS.get(scarce, f"runtime.resources.{scarce}")
    is_strict = options.strategy == "STRICT_PACK"
    place = " on one node (runtime.strategy=STRICT_PACK)" if is_strict else ""
    is_missing = not any(node.get(scarce) for node in nodes)
    shortage = f"too little {scarce}"
    is_apart = capacities[scarce] >= workers
    if is_apart:
        shortage = "not enough of these resources on the same nodes"
    if is_apart and not capacity:
        advice = "Start nodes that have all of them, or use runtime=inprocess."
    elif scarce == "memory" and not capacity:
        advice = "Use a smaller local.batch or model, or larger nodes."
    elif is_missing and scarce == "GPU":
        advice = "Start nodes with GPUs, or set device=cpu."
    elif is_missing:
        advice = f"Start nodes that declare {scarce} (ray start --resources), or leave {key} out."
    elif capacity:
        advice = f"Set runtime.workers={capacity}."
    else:
        advice = f"Lower {key}, or use runtime=inprocess."
    subject = f"runtime.workers={workers} needs {workers} x"
    if workers == 1:  # also if runtime.workers is not set
        subject = "a worker of this run needs"
    return (
        f"{subject} {format_resources(per_worker)}{place}, but "
        f"the cluster has {_describe_nodes(nodes, per_worker)}: {shortage}. {advice}"
    )


def _describe_nodes(nodes: Sequence[Resources], per_worker: Resources) -> str:
    """Describe nodes as a text such as "2 nodes of 8 CPU each and a node of 4 CPU".

    nodes: the resources of each node. The text names only resources that are in `per_worker`, which
    a worker reserves.
    """
    kinds = Counter(
        format_resources({name: node.get(name, 0.0) for name in per_worker}) for node in nodes
    )
    phrases = [
        f"{count} nodes of {kind} each" if count > 1 else f"a node of {kind}"
        for kind, count in kinds.items()
    ]
    return " and ".join(phrases) or "no node"


def size_in_group(options: RayOptions, bundles: Sequence[Resources], device: str) -> Size:
    """Return the number of workers and their resources in a trial of a sweep.

    bundles: the trial's placement group: the first bundle is for the trial itself, all others are
    for workers.
    device: with "cuda", each worker's bundle must have a GPU.
    Raises ValueError if there are fewer or smaller bundles than the options request.
    """
    worker_bundles, workers = bundles[1:], options.workers or 1
    if len(worker_bundles) < workers:
        available = len(worker_bundles)
        rest = "none is"
        if available:
            rest = f"only {available} {'is' if available == 1 else 'are'}"
        fewer = f", or set runtime.workers={available}" if available else ""
        raise ValueError(
            f"runtime.workers={workers}: each worker needs a bundle of the trial's placement "
            f"group. The first bundle is for the trial itself, and {rest} left for workers. "
            f"Add {workers - available} to the group{fewer}."
        )
    names = [name for bundle in worker_bundles for name in bundle]
    least = {name: min(bundle.get(name, 0.0) for bundle in worker_bundles) for name in names}
    if device == "cuda" and not least.get("GPU"):
        raise ValueError(
            "device=cuda: every bundle of this process's placement group, except the first, "
            "needs a GPU, but at least one has none. Give each of these bundles a GPU, or set "
            "device=cpu."
        )
    requested = {"CPU": options.cpus or 0.0, "GPU": options.gpus or 0.0, **options.resources}
    for name, amount in requested.items():
        if amount > least.get(name, 0.0) + 0.5 / RESOURCE_STEPS:
            key = RESOURCE_KEYS.get(name, f"runtime.resources.{name}")
            raise ValueError(
                f"{key}={amount:g} is more than the {least.get(name, 0.0):g} {name} of a bundle in "
                f"this process's placement group. Decrease {key}, or make the bundles larger."
            )
    per_worker = {name: amount for name, amount in least.items() if amount}
    return Size(options.workers or len(worker_bundles), per_worker)


# --- texts ----------------------------------------------------------------------------------
def format_resources(resources: Resources) -> str:
    """Format resources as a text such as "1 CPU and 0.25 GPU"; memory is in GiB."""
    phrases = []
    for name, amount in resources.items():
        if name == "memory":
            phrases.append(f"{format_bytes(amount)} of memory")
        else:
            phrases.append(f"{amount:g} {name}")
    return " and ".join(phrases)


def format_bytes(size: float) -> str:
    """Format a number of bytes as a text such as "1.3 GiB" or "310 MiB"."""
    if 0.95 * GIB <= size < 10 * GIB:
        return f"{size / GIB:.2g} GiB"
    if size >= GIB:
        return f"{size / GIB:.0f} GiB"
    return f"{size / MIB:.0f} MiB"
