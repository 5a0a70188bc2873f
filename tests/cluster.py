"""Worker actors that serve one run after another, for tests of many tiny runs on Ray."""

from __future__ import annotations

from typing import Any

from raysim.runtime import ray as on_ray
from raysim.training.run_spec import RunSpec


class Workers:
    """Some such actors."""

    def __init__(self, count: int):
        self._count = count
        self._actors: list[Any] = []

    def runtime(self, spec: RunSpec, count: int) -> on_ray.RayRuntime:
        """The first `count` of them as the workers of a run, whose coordinator may live in this process."""
        if not self._actors:
            self._actors = on_ray.start_workers(spec, self._count, cpus=0).actors
        return on_ray.start_workers(spec, count, actors=self._actors[:count], cpus=0)

    def stop(self) -> None:
        """End their processes."""
        for actor in self._actors:
            on_ray.ray.kill(actor)
