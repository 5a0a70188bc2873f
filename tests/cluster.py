"""Host actors that serve one run after another, for tests of many tiny runs on Ray."""

from __future__ import annotations

from typing import Any

from raysim.runtime import ray as on_ray
from raysim.training.host import Host
from raysim.training.run_spec import RunSpec


class Reusable(Host):
    """A host that is built when a run moves in, not when its process starts."""

    def __init__(self) -> None:
        pass

    def move_in(self, spec: RunSpec, name: str) -> str:
        """Become the host of another run; nothing of the one before is left."""
        self.__dict__.clear()
        super().__init__(spec, name)
        return self.ready()


class Hosts:
    """Some such actors."""

    def __init__(self, count: int):
        actor = on_ray.ray.remote(num_cpus=0)(Reusable)
        self._actors: list[Any] = [actor.remote() for _ in range(count)]

    def runtime(self, spec: RunSpec, count: int) -> on_ray.RayRuntime:
        """The first `count` of them as the hosts of a run, whose coordinator may live in this process."""
        chosen, place = self._actors[:count], on_ray.ray.put(spec)
        ready = [host.move_in.remote(place, f"host-{index}") for index, host in enumerate(chosen)]
        assert on_ray.ray.get(ready) == [f"host-{index}" for index in range(count)]
        return on_ray.RayRuntime(count, chosen.__getitem__)

    def stop(self) -> None:
        """End their processes."""
        for actor in self._actors:
            on_ray.ray.kill(actor)
