"""Run objects of any class as Ray actors, in place of raysim's workers and coordinator."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from raysim.runtime.placement import RayOptions, choose_size, worker_resources
from raysim.runtime.ray.actors import RayRuntime, actor_class
from raysim.runtime.ray.cluster import (
    Say,
    bundle_options,
    connection,
    node_resources,
    reserve,
    run_bundles,
)


@contextmanager
def object_workers(
    kind: type, spec: object, options: RayOptions, device: str, threads: int, most: int, say: Say
) -> Iterator[RayRuntime]:
    """Start Ray actors, each with one object `kind(spec)`; end them when the context ends.

    Yield the runtime with which the caller calls methods of these objects.
    kind: a class with a method `ready`.
    options: if `runtime.workers` is None, as many actors start as fit on the nodes.
    device: the device of each actor, such as "cuda".
    most: the largest number of actors.
    Raises ValueError if Ray does not start or the cluster is too small.
    """
    with connection(options):
        per_worker = worker_resources(options, device, threads)
        size = choose_size(options, per_worker, node_resources(), most)
        shared = ray.put(spec)
        name = f"raysim-{uuid.uuid4().hex[:6]}"
        with reserve(run_bundles(size), name, options, say) as group:

            def start(index: int) -> Any:
                resources = bundle_options(group, index + 1, size.per_worker)
                return actor_class(kind).options(**resources).remote(shared)

            runtime = RayRuntime(size.workers, start)
            try:
                yield runtime
            finally:
                runtime.stop()
