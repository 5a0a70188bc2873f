"""The runtime on Ray: a placement group per run, workers and coordinator as actors in it, events to the driver.

The only place besides the sweep and the job server's client that imports Ray.

cluster   Ray itself: start or join it, what its nodes have, room that is reserved
actors    the processes: workers, the coordinator, and how it reaches the workers
failures  why Ray did not start, or could not be joined
team      the processes of a run, which the next run may take over
driver    a run: how many workers, its events, what counts as lost
"""

from __future__ import annotations

import os
import sys

# The driver's environment is the workers' environment. Ray reads its authentication mode when it is imported: set
# later, this process and the cluster that it starts would disagree.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
if "ray" not in sys.modules:
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray

from raysim.runtime.placement import RayOptions, Size
from raysim.runtime.ray.actors import (
    RayCoordinator,
    RayRuntime,
    RayWorker,
    identify_here,
    start_workers,
    workers_in,
)
from raysim.runtime.ray.cluster import (
    address,
    bundles,
    connect,
    connected,
    disconnect,
    has_gpus,
    nodes,
    nodes_here,
    placed,
)
from raysim.runtime.ray.driver import fit, run
from raysim.runtime.ray.team import staying

__all__ = [
    "RayCoordinator",
    "RayOptions",
    "RayRuntime",
    "RayWorker",
    "Size",
    "address",
    "bundles",
    "connect",
    "connected",
    "disconnect",
    "fit",
    "has_gpus",
    "identify_here",
    "nodes",
    "nodes_here",
    "placed",
    "ray",
    "run",
    "start_workers",
    "staying",
    "workers_in",
]
