"""The runtime on Ray: hosts as actors, the coordinator as an actor, events streamed to the driver.

The only file besides the sweep that imports Ray.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

# The driver's environment is the workers' environment. Ray reads its authentication mode when it is imported: set
# later, this process and the cluster that it starts would disagree.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
if "ray" not in sys.modules:
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray

from raysim.coordinator import Coordinator, Settings
from raysim.events import Event, RunStopped
from raysim.fleet import Fleet
from raysim.host import Host, Recipe
from raysim.schedule import Schedule


@dataclass(frozen=True)
class RayOptions:
    """`runtime.*`: how many hosts, and what each of them gets. None: raysim picks what fits.

    address: "local" starts a cluster on this machine; "auto" or HOST:PORT joins one.
    """

    hosts: int | None = None
    cpus: float | None = None  # per host; the thread count unless given
    gpus: float | None = None  # per host
    address: str = "local"

    def __post_init__(self) -> None:
        if self.hosts is not None and self.hosts < 1:
            raise ValueError(f"runtime.hosts={self.hosts} must be at least 1")
        for key in ("cpus", "gpus"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"runtime.{key}={value} must not be negative")


class RayRuntime:
    """Hosts as actors of class `Host`, calls as actor tasks, values in the object store."""

    def __init__(self, actors: Sequence[Any]):
        self._actors, self.hosts = actors, len(actors)

    def put(self, value: object) -> ray.ObjectRef[Any]:
        """Into the object store, once; hosts of one node map the same memory."""
        return ray.put(value)

    def call(self, host: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        """An actor task; its results belong to the caller."""
        refs = getattr(self._actors[host], method).options(num_returns=returns).remote(*args)
        return [refs] if returns == 1 else list(refs)

    def get(self, ref: Any) -> Any:
        """Wait for a result; arrays in it are read-only views into the object store."""
        return ray.get(ref)

    def stop(self) -> None:
        """End the hosts."""
        for actor in self._actors:
            ray.kill(cast(Any, actor))


def start_hosts(recipe: Recipe, hosts: int, cpus: float = 1.0, gpus: float = 0.0) -> RayRuntime:
    """New hosts, starting side by side; cpus and gpus: what each of them reserves."""
    shared, actor = ray.put(recipe), ray.remote(num_cpus=cpus, num_gpus=gpus)(Host)
    return RayRuntime([actor.remote(shared, f"host-{index}") for index in range(hosts)])


class RayCoordinator:
    """The actor that runs a `Coordinator`; it makes every call to the hosts, so it owns what they return."""

    def __init__(self, recipe: Recipe, schedule: Schedule, fleet: Fleet, runtime: RayRuntime, settings: Settings):
        self._coordinator = Coordinator(replace(recipe, device="cpu"), schedule, fleet, runtime, settings)

    def events(self) -> Iterator[Event]:
        """The run's events, as they happen."""
        yield from self._coordinator.run()


def fit(options: RayOptions, recipe: Recipe, concurrency: int) -> tuple[int, float, float]:
    """Hosts, CPUs and GPUs per host: what was asked for if it is there, else what fits.

    Raises ValueError with the number that would fit.
    """
    cluster = ray.cluster_resources()
    gpus = options.gpus if options.gpus is not None else (1.0 if recipe.device.startswith("cuda") else 0.0)
    cpus = options.cpus if options.cpus is not None else float(recipe.threads)
    room = []
    for name, each, unit in (("CPU", cpus, "runtime.cpus"), ("GPU", gpus, "runtime.gpus")):
        if each:
            have = cluster.get(name, 0.0)
            fits = int(have / each + 1e-9)
            if (options.hosts or 1) > fits:
                lower = f"set runtime.hosts={fits}" if fits else f"lower {unit}, or use runtime=inprocess"
                raise ValueError(
                    f"runtime.hosts={options.hosts or 1} needs {options.hosts or 1} x {each:g} {name}, "
                    f"the cluster has {have:g}: {lower}"
                )
            room.append(fits)
    return options.hosts or max(1, min([concurrency, *room])), cpus, gpus


def connect(options: RayOptions) -> bool:
    """Start or join a cluster, unless this process already has one; whether it did."""
    if ray.is_initialized():
        return False
    try:
        host, _, port = options.address.rpartition(":")
        if host and port.isdigit():  # Ray would try for minutes
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(
            address=options.address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=False if options.address == "local" else None,
        )
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"runtime.address={options.address}: no Ray cluster could be reached or started there ({first}); "
            "start one with `ray start --head`, or use runtime=local"
        ) from error
    return True


def run(
    recipe: Recipe, schedule: Schedule, fleet: Fleet, settings: Settings, size: tuple[int, float, float]
) -> Iterator[Event]:
    """Run on the connected cluster; size: hosts, CPUs and GPUs per host. Errors arrive as they were raised."""
    runtime = start_hosts(recipe, *size)
    coordinator = ray.remote(num_cpus=0)(RayCoordinator).remote(recipe, schedule, fleet, runtime, settings)
    try:
        for ref in cast(Any, coordinator).events.options(num_returns="streaming").remote():
            yield ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (_lost(cause) if isinstance(cause, ray.exceptions.RayError) else cause) from None
    except ray.exceptions.RayActorError as error:
        raise _lost(error) from None
    finally:
        ray.kill(cast(Any, coordinator))
        runtime.stop()


def _lost(error: Exception) -> RunStopped:
    first = str(error).strip().splitlines()[0]
    return RunStopped(f"a process of the run died ({first}); resume=latest goes on from its last checkpoint")


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends."""
    ray.shutdown()
