"""The runtime on Ray: workers and coordinator are actors in a placement group of the run.

Only this package, `raysim sweep` and `raysim submit` import Ray.
"""

from __future__ import annotations

import os
import sys

# The driver's environment is the workers' environment. Ray reads its authentication mode when it is
# imported. If it were set later, this process and its cluster would disagree.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Ray would hold back repeated messages, and print them when this process leaves the cluster.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
if "ray" not in sys.modules:
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray sends objects up to this size within messages, and puts larger ones into its object store.
    # With its default (100 KiB) a round of the benchmark W2 takes 7 % longer.
    os.environ.setdefault("RAY_max_direct_call_object_size", str(1 << 20))

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
from raysim.runtime.ray.object_workers import object_workers
from raysim.runtime.ray.processes import keep_processes
from raysim.runtime.ray.ray_messages import messages_written_to

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
    "messages_written_to",
    "node_resources",
    "object_workers",
    "plan_workers",
    "ray",
    "reserve",
    "run",
    "run_bundles",
    "start_local_nodes",
    "start_workers",
    "start_workers_in",
]
