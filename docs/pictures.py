"""Draw the pictures of the page docs/asynchrony.md: `uv run python docs/pictures.py`.

The planner simulates schedules and fleets on the virtual clock, as before every run; nothing is
trained.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim.results.theme import LIGHT, page_theme
from raysim.simulation.device_classes import DeviceClasses
from raysim.simulation.fleet import Devices, Fleet, Ideal, Lognormal
from raysim.simulation.planner import Load, PlannedAggregation, Planner
from raysim.simulation.schedule import (
    Buffered,
    Deadline,
    Immediate,
    Oversample,
    Schedule,
    Synchronous,
    Tiered,
)

FOLDER = Path(__file__).parent / "pictures"
SEED, CLIENTS, SAMPLES, FLOATS = 4, 8, 100, 100_000
FLOPS = 2e6  # per sample, forward and backward
SCALE = ("#3b8fc4", "#8f7fd0", "#d9669a", "#f08a24")  # fresh to stale
SCHEDULES: dict[str, Schedule] = {
    "synchronous, cohort 5: wait for the slowest client": Synchronous(5),
    "oversample, 4 of 6: the last two updates are not used": Oversample(4, 1.5),
    "deadline, 5 for 2 s, late=stale: late updates join a later round": Deadline(5, 2.0),
    "buffered, 5 in flight, 3 per aggregation: no waiting": Buffered(5, 3),
    "immediate, 5 in flight: aggregate every single update": Immediate(5),
    "tiered, 2 tiers of 2: separate rounds for fast and slow clients": Tiered(2, 2),
}


def devices(fleet: Fleet, clients: int) -> Devices:
    """Return the devices of a number of clients."""
    return fleet.devices(SEED, clients, lambda: FLOPS)


def plan(schedule: Schedule, fleet: Fleet, clients: int, until: float) -> list[PlannedAggregation]:
    """Return a run's planned aggregations, up to the first one at or after a virtual second."""
    counts = np.full(clients, SAMPLES)
    load = Load(SAMPLES, FLOATS, FLOATS)
    planner = Planner(
        schedule, devices(fleet, clients), SEED, counts, lambda *_: load, fleet.patience
    )
    steps: list[PlannedAggregation] = []
    while not steps or steps[-1].now < until:
        steps.append(planner.next_aggregation())
    return steps


def bars(ax: Axes, steps: list[PlannedAggregation], until: float) -> None:
    """Draw a bar for each job and a line for each aggregation.

    The colour of a bar shows the staleness of the update; it is grey if no update was aggregated.
    """
    jobs = {job.number: job for step in steps for job in step.dispatched}
    stale = {job.number: step.version - job.version for step in steps for job in step.aggregated}
    gone = {job.number for step in steps for job in step.discarded}
    for number, job in jobs.items():
        unused = number in gone or number not in stale
        colour = "#c9ced3" if unused else SCALE[min(stale[number], len(SCALE) - 1)]
        ax.barh(
            job.client,
            job.finish - job.start,
            left=job.start,
            height=0.72,
            color=colour,
            edgecolor="white",
        )
    for step in steps:
        ax.axvline(step.now, color="#22262a", linewidth=0.9, alpha=0.6)
    ax.set(xlim=(0, until), ylim=(CLIENTS - 0.4, -0.6), yticks=range(CLIENTS))


def schedules() -> Figure:
    """Draw the same eight clients under six schedules."""
    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    fleet, until = Lognormal(speed=100.0, sigma=0.7), 14.0
    for ax, (title, schedule) in zip(
        figure.subplots(3, 2, sharex=True).flat, SCHEDULES.items(), strict=True
    ):
        bars(ax, plan(schedule, fleet, CLIENTS, until), until)
        ax.set_title(title, fontsize=11, loc="left")
    for ax in figure.axes[-2:]:
        ax.set_xlabel("virtual seconds")
    for ax in figure.axes[::2]:
        ax.set_ylabel("client")
    names = (
        "fresh",
        "1 aggregation late",
        "2 late",
        "3 or more late",
        "not used, or still in flight",
    )
    handles = [
        matplotlib.patches.Patch(color=colour, label=name)
        for colour, name in zip((*SCALE, "#c9ced3"), names, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def fleets() -> Figure:
    """Draw the duration of jobs in three fleets, and when clients are available."""
    figure = Figure(figsize=(12, 4), dpi=100, layout="constrained")
    left, *rasters = figure.subplots(1, 3)
    kinds: dict[str, Fleet] = {
        "ideal": Ideal(),
        "lognormal": Lognormal(),
        "devices": DeviceClasses(),
    }
    for colour, (name, fleet) in zip(LIGHT, kinds.items(), strict=False):
        seconds = np.sort(devices(fleet, 2000).seconds(np.full(2000, SAMPLES), FLOATS, FLOATS))
        left.plot(seconds, np.linspace(0, 1, len(seconds)), color=colour, label=f"fleet={name}")
    left.set(
        xscale="log",
        xlabel="virtual seconds of a job",
        ylabel="share of clients",
        title="speed of the clients",
    )
    left.xaxis.set_major_formatter("{x:g}")
    left.grid(True)
    left.legend()
    times = {"diurnal": Ideal(availability="diurnal", hours=8.0)}
    times["markov"] = Ideal(availability="markov", on=3600.0, off=7200.0)
    hours = np.linspace(0, 48, 481)
    for ax, (name, fleet) in zip(rasters, times.items(), strict=True):
        fleet_devices = devices(fleet, 30)
        available = np.zeros((30, len(hours)))
        for client in range(30):
            available[client] = [
                fleet_devices.presence.available(client, 3600 * hour) for hour in hours
            ]
        ax.pcolormesh(
            hours,
            range(30),
            available,
            cmap="Blues",
            vmin=0,
            vmax=1.4,
            shading="nearest",
        )
        ax.set(
            xlabel="hours",
            ylabel="client",
            title=f"fleet.availability={name}",
            xticks=range(0, 49, 12),
        )
    return figure


def staleness() -> Figure:
    """Draw how more clients in flight make aggregations more frequent and updates staler."""
    figure = Figure(figsize=(12, 4), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = (5, 10, 20, 40, 80)
    for colour, sigma in zip(LIGHT, (0.25, 0.5, 1.0), strict=False):
        pace, late = [], []
        for size in sizes:
            steps = plan(Buffered(size, 5), Lognormal(speed=100.0, sigma=sigma), 400, 120.0)[20:]
            pace.append(len(steps) / (steps[-1].now - steps[0].now))
            late.append(
                np.percentile([staleness for step in steps for staleness in step.staleness], 90)
            )
        left.plot(sizes, pace, "o-", color=colour, label=f"fleet.sigma={sigma}")
        right.plot(sizes, late, "o-", color=colour)
    left.set(ylabel="aggregations per virtual second", title="schedule=buffered schedule.size=5")
    right.plot(sizes, [size / 5 - 1 for size in sizes], "k--", label="the mean in every fleet")
    right.set(ylabel="staleness, 90th percentile", title="staleness of the updates")
    for ax in (left, right):
        ax.set(xlabel="clients in flight (schedule.concurrency)")
        ax.grid(True)
    left.legend()
    right.legend()
    return figure


def main() -> None:
    """Write the pictures schedules.png, fleets.png and staleness.png into docs/pictures."""
    for draw in (schedules, fleets, staleness):
        with matplotlib.rc_context(page_theme(False)):
            draw().savefig(FOLDER / f"{draw.__name__}.png")


if __name__ == "__main__":
    main()
