"""Start the runtime that a run's settings choose, and yield its events."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from raysim.experiment.recorder import say
from raysim.experiment.run_folder import Place
from raysim.experiment.settings import Experiment
from raysim.results.observers import PrintLine
from raysim.runtime.placement import NoRoomError, RayOptions, listen_on_loopback
from raysim.simulation.events import Event

if TYPE_CHECKING:
    from rich.console import Console

# A cluster that loses more nodes while a run starts is not stable enough to start it.
MAX_LOST_NODES = 3


def runtime_events(
    experiment: Experiment, place: Place, console: Console, show_wait: PrintLine
) -> Generator[Event, None, None]:
    """Start the runtime of a run, and yield the run's events.

    place: the folder of the run, and the checkpoint that it continues from.
    console: prints messages about the Ray cluster.
    show_wait: shows a text such as "waiting for the workers".
    """
    if experiment.execution.runtime.name != "inprocess":
        yield from _ray_events(experiment, place, console, show_wait)
        return
    from raysim.runtime import inprocess

    yield from inprocess.run(
        experiment.spec,
        experiment.schedule,
        experiment.fleet,
        str(place.folder.absolute()),
        place.resume,
    )


def _ray_events(
    experiment: Experiment, place: Place, console: Console, show_wait: PrintLine
) -> Iterator[Event]:
    show_wait("waiting for Ray")
    options, spec = experiment.execution.runtime, experiment.spec
    listen_on_loopback(options)
    from raysim.runtime import ray

    def print_line(text: str) -> None:
        say(console, f"{'':<10}{text}")

    def events(options: RayOptions) -> Iterator[Event]:
        workers = ray.plan_workers(options, spec, experiment.schedule.concurrency, print_line)
        if options.workers is None:
            print_line(f"{workers} fit")
        if experiment.execution.device == "auto" and spec.device == "cpu" and ray.has_gpus():
            print_line(
                "device=auto is the CPU because this process sees no GPU, "
                "but the cluster has some: set device=cuda"
            )
        show_wait("waiting for the workers")
        yield from ray.run(
            spec,
            experiment.schedule,
            experiment.fleet,
            workers,
            options,
            print_line,
            str(place.folder.absolute()),
            place.resume,
        )

    with ray.connection(options):
        for losses in itertools.count(1):
            try:
                yield from events(options)
                return
            except NoRoomError as error:  # before anything has started
                can_shrink = options.workers is None or place.is_restart
                if not can_shrink or losses > MAX_LOST_NODES:
                    raise
                print_line(f"{error} The run starts with as many workers as fit")
                options = replace(options, workers=None)
