"""Worker actors that serve many tiny runs on Ray, one after another."""

from __future__ import annotations

from typing import Any

from raysim.runtime import ray as on_ray
from raysim.training.run_spec import RunSpec


class Workers:
    """Ray actors that serve as the workers of several runs, one run after another.

    count: the number of actors. The first call of `runtime` starts them.
    """

    def __init__(self, count: int):
        self._count = count
        self._actors: list[Any] = []

    def runtime(self, spec: RunSpec, count: int) -> on_ray.RayRuntime:
        """Return a runtime whose workers are the first `count` actors.

        spec: the run that these actors serve from now on.
        """
        if not self._actors:
            self._actors = on_ray.start_workers(spec, self._count, cpus=0).actors
        return on_ray.start_workers(spec, count, actors=self._actors[:count], cpus=0)

    def stop(self) -> None:
        """End the processes of the actors."""
        for actor in self._actors:
            on_ray.ray.kill(actor)
