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
    identify_process,
    start_workers,
    start_workers_in,
)
from raysim.runtime.ray.cluster import (
    cluster_address,
    connect,
    connection,
    disconnect,
    has_gpus,
    node_resources,
    reserve,
    run_bundles,
    start_local_nodes,
)
from raysim.runtime.ray.driver import plan_workers, run
from raysim.runtime.ray.team import keep_processes

__all__ = [
    "RayCoordinator",
    "RayOptions",
    "RayRuntime",
    "RayWorker",
    "Size",
    "cluster_address",
    "connect",
    "connection",
    "disconnect",
    "has_gpus",
    "identify_process",
    "keep_processes",
    "node_resources",
    "plan_workers",
    "ray",
    "reserve",
    "run",
    "run_bundles",
    "start_local_nodes",
    "start_workers",
    "start_workers_in",
]
