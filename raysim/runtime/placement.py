"""What a worker reserves, and how many workers fit on the nodes of a cluster: arithmetic, without Ray."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from raysim.primitives.checks import at_least

Resources: TypeAlias = Mapping[
    str, float
]  # CPU, GPU, memory in bytes, and whatever a cluster's nodes declare

GIB = 2**30
STEPS = 10_000  # Ray counts resources in steps of 0.0001
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": no process of Ray listens beyond loopback, on any system
KEYS = {
    "CPU": "runtime.cpus",
    "GPU": "runtime.gpus",
}  # what to lower; else it is a key of runtime.resources


@dataclass(frozen=True)
class RayOptions:
    """`runtime.*`: how many workers, what each of them gets, and where. None: raysim picks what fits.

    address: "local" or None starts a cluster on this machine; "auto" or HOST:PORT joins one. resources: of each worker,
    besides CPUs and GPUs. strategy: PACK fills one node after another, SPREAD alternates, STRICT_PACK stays on one.
    wait: seconds to queue behind other runs; None: for ever. preflight: whether one job's memory is measured first;
    None: where that decides how many workers share a GPU. combine: whether nodes add up what their workers have summed
    before it travels, which changes no bit; None: for models of a MiB and more. mixed: whether processes may differ in
    what bits depend on.
    """

    workers: int | None = None
    cpus: float | None = None  # per worker; the thread count unless given
    gpus: float | None = None  # per worker
    resources: dict[str, float] = field(default_factory=dict)
    address: str | None = None
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK"] = "PACK"
    wait: float | None = None
    preflight: bool | None = None
    combine: bool | None = None
    mixed: bool = False

    @property
    def combine_from(self) -> float:
        """Floats of a model from which on nodes add up."""
        return {None: 1 << 18, True: 0, False: math.inf}[self.combine]

    def __post_init__(self) -> None:
        if self.workers is not None:
            at_least("runtime.workers", self.workers, 1)
        amounts = {"cpus": self.cpus, "gpus": self.gpus, "wait": self.wait}
        for key, value in {
            **amounts,
            **{f"resources.{name}": each for name, each in self.resources.items()},
        }.items():
            if value is not None:
                at_least(f"runtime.{key}", value, 0)
        for name in self.resources:
            if name in ("CPU", "GPU"):
                raise ValueError(
                    f"runtime.resources.{name} has a key of its own: set {KEYS[name]} instead"
                )
        if self.gpus is not None and self.gpus > 1 and self.gpus % 1:
            raise ValueError(
                f"runtime.gpus={self.gpus:g} is neither a share of one GPU nor a whole number: "
                f"set it to 1 or {math.ceil(self.gpus)}"
            )


def listen_on_loopback(options: RayOptions) -> None:
    """Keep a Ray that this process will start for itself from listening on the network.

    Ray reads what says so when it is imported; in a process that has imported it already it listens on all interfaces.
    """
    if options.address in (None, "local") and "ray" not in sys.modules:
        os.environ.setdefault(CLUSTERS, "0")


@dataclass(frozen=True)
class Size:
    """So many workers, and what each of them reserves (nothing that is 0)."""

    workers: int
    each: Resources

    def __str__(self) -> str:
        noun = "worker" if self.workers == 1 else "workers"
        return f"{self.workers} {noun} of {format_resources(self.each) or 'nothing reserved'}"


def worker_resources(options: RayOptions, device: str, threads: int) -> dict[str, float]:
    """What a worker reserves; a whole GPU where the device is one and no share was asked for."""
    if device.startswith("cuda:"):
        raise ValueError(
            f"device={device} names one GPU, but on Ray every worker is given its own: set device=cuda"
        )
    if device == "cuda" and options.gpus == 0:
        raise ValueError(
            "runtime.gpus=0 hides every GPU from the workers, which train on device=cuda: set runtime.gpus=null"
        )
    gpus = options.gpus if options.gpus is not None else float(device == "cuda")
    cpus = options.cpus if options.cpus is not None else float(threads)
    return {
        name: each for name, each in {"CPU": cpus, "GPU": gpus, **options.resources}.items() if each
    }


def gpu_share(workers: int) -> float:
    """The largest part of a GPU, in Ray's steps, of which so many fit on one."""
    return STEPS // workers / STEPS


def node_capacity(node: Resources, each: Resources) -> int | None:
    """How many workers fit on an empty node; None: any number. A share of a GPU lies on one GPU."""
    places = []
    for name, amount in each.items():
        have = node.get(name, 0.0)
        if name == "GPU" and amount < 1:
            places.append(int(have + 1e-9) * _times(1.0, amount))
        else:
            places.append(_times(have, amount))
    return min(places, default=None)


def _times(have: float, each: float) -> int:
    return round(have * STEPS) // max(1, round(each * STEPS))


def worker_capacity(
    nodes: Sequence[Resources], each: Resources, strategy: str = "PACK"
) -> int | None:
    """How many workers fit on all nodes together; None: any number."""
    rooms = [places for node in nodes if (places := node_capacity(node, each)) is not None]
    if not rooms:
        return None if not each else 0
    return max(rooms) if strategy == "STRICT_PACK" else sum(rooms)


class NoRoomError(ValueError):
    """The cluster has less in all than the workers need that were asked for."""


def choose_size(
    options: RayOptions, each: Resources, nodes: Sequence[Resources], most: int
) -> Size:
    """The workers that were asked for, else as many as fit and find work (most: clients at work at once).

    Raises ValueError with the resource, what was asked, what each node has, and the number that would fit.
    """
    places = worker_capacity(nodes, each, options.strategy)
    workers = options.workers or 1
    if places is not None and workers > places:
        raise NoRoomError(_too_many(options, each, nodes, workers, places))
    return Size(options.workers or (most if places is None else max(1, min(most, places))), each)


def _too_many(
    options: RayOptions, each: Resources, nodes: Sequence[Resources], workers: int, places: int
) -> str:
    alone = {
        name: worker_capacity(nodes, {name: amount}, options.strategy) or 0
        for name, amount in each.items()
    }
    short = min(alone, key=alone.__getitem__)
    key = KEYS.get(short, f"runtime.resources.{short}")
    strict = (
        " on one node (runtime.strategy=STRICT_PACK)" if options.strategy == "STRICT_PACK" else ""
    )
    advice = f"set runtime.workers={places}" if places else f"lower {key}, or use runtime=inprocess"
    if not any(node.get(short) for node in nodes):  # fewer of it would be too many, too
        start = "start nodes with GPUs, or set device=cpu"
        advice = (
            start
            if short == "GPU"
            else f"start nodes that declare {short} (ray start --resources), or leave {key} out"
        )
    if short == "memory" and not places:
        advice = "make local.batch or the model smaller, or find larger nodes"
    return (
        f"too little {short}: runtime.workers={workers} needs {workers} x {format_resources(each)}{strict}, "
        f"the cluster has {_described(nodes, each)}: {advice}"
    )


def _described(nodes: Sequence[Resources], each: Resources) -> str:
    """What each node has of the named resources, equal nodes together."""
    kinds = Counter(
        format_resources({name: node.get(name, 0.0) for name in each}) for node in nodes
    )
    phrases = [
        f"{count} nodes of {kind} each" if count > 1 else f"a node of {kind}"
        for kind, count in kinds.items()
    ]
    return " and ".join(phrases) or "no node"


def format_resources(each: Resources) -> str:
    """Resources as a person says them: "1 CPU and 0.25 GPU", memory in GiB."""
    phrases = [
        f"{format_bytes(v)} of memory" if name == "memory" else f"{v:g} {name}"
        for name, v in each.items()
    ]
    return " and ".join(phrases)


def format_bytes(size: float) -> str:
    """Bytes as a person says them: "1.3 GiB", "310 MiB"."""
    return f"{size / GIB:.2g} GiB" if 0.95 * GIB <= size < 10 * GIB else _far_from_gib(size)


def _far_from_gib(size: float) -> str:
    return f"{size / GIB:.0f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def size_in_group(options: RayOptions, bundles: Sequence[Resources], device: str) -> Size:
    """The workers of a trial whose placement group exists: bundle 0 is the trial's own, the others are for workers.

    Raises ValueError where fewer or smaller bundles are there than were asked for.
    """
    worker_bundles, workers = bundles[1:], options.workers or 1
    if len(worker_bundles) < workers:
        raise ValueError(
            f"runtime.workers={workers} needs as many bundles beside the first in this process's placement group, "
            f"which has {len(worker_bundles)}: make the group larger, or lower runtime.workers"
        )
    least = {
        name: min(bundle.get(name, 0.0) for bundle in worker_bundles)
        for bundle in worker_bundles
        for name in bundle
    }
    if device == "cuda" and not least.get("GPU"):
        raise ValueError(
            "device=cuda needs a GPU in every bundle for workers of this process's placement group"
        )
    explicit = {"CPU": options.cpus or 0.0, "GPU": options.gpus or 0.0, **options.resources}
    for name, amount in explicit.items():
        if amount > least.get(name, 0.0) + 0.5 / STEPS:
            key = KEYS.get(name, f"runtime.resources.{name}")
            raise ValueError(
                f"{key}={amount:g} is more than the {least.get(name, 0.0):g} {name} of a bundle in this process's "
                f"placement group: lower {key}, or make the bundles larger"
            )
    return Size(
        options.workers or len(worker_bundles),
        {name: amount for name, amount in least.items() if amount},
    )
