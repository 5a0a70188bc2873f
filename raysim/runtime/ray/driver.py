"""A run on Ray: how many workers, its events, and what counts as lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from raysim.primitives.errors import first_line
from raysim.runtime import preflight
from raysim.runtime.placement import (
    RayOptions,
    Size,
    choose_size,
    format_bytes,
    gpu_share,
    size_in_group,
    worker_capacity,
    worker_resources,
)
from raysim.runtime.ray.actors import REVIVAL, ROOM, content_for, read_here
from raysim.runtime.ray.cluster import Say, bundle_options, node_resources, reserve
from raysim.runtime.ray.team import end_waiting, release_processes, start_processes
from raysim.simulation.events import Event, ProcessLostError, Started
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import START_TIMEOUT_S
from raysim.simulation.schedule import Schedule
from raysim.training.identity import are_equal
from raysim.training.run_spec import RunSpec

Measure = Callable[[RunSpec], preflight.MemoryNeed]

SILENCE = 60.0  # seconds after which somebody may wonder


# --- how many workers -------------------------------------------------------------------------------------------------
def plan_workers(
    options: RayOptions,
    spec: RunSpec,
    concurrency: int,
    say: Say = print,
    measure: Measure = preflight.measure,
) -> Size:
    """How many workers, and what each reserves: what was asked for if the cluster has it at all, else what fits.

    Inside a placement group (a trial of a search) the group decides. measure: stands in for the preflight. Raises
    ValueError with the number that would fit.
    """
    each = worker_resources(options, spec.device, spec.threads)
    if (group := ray.util.get_current_placement_group()) is not None:
        return size_in_group(options, group.bundle_specs, spec.device)
    cluster = node_resources()
    shared = spec.device == "cuda" and options.gpus is None
    if options.preflight if options.preflight is not None else shared:
        probe = {**each, "GPU": 1.0} if spec.device == "cuda" else each
        choose_size(replace(options, workers=1), probe, cluster, 1)
        need = _measured(options, spec, probe, say, measure)
        if spec.device == "cuda":
            each["GPU"] = _share(options, each, spec, concurrency, cluster, need, say)
        else:
            each["memory"] = need.job
            places = worker_capacity(cluster, {"memory": need.job}, options.strategy)
            say(
                f"a job needs {format_bytes(need.job)}: {places} workers fit into the cluster's memory"
            )
    return choose_size(options, each, cluster, concurrency)


def _measured(
    options: RayOptions, spec: RunSpec, each: Mapping[str, float], say: Say, measure: Measure
) -> preflight.MemoryNeed:
    """One job's memory, seen in a process that is given what a worker is given, and a whole GPU."""
    end_waiting()  # a whole GPU is asked for
    with reserve([dict(each)], "raysim-preflight", options, say) as group:
        task = ray.remote(max_retries=0)(_measure).options(**bundle_options(group, 0, each))
        try:
            return ray.get(task.remote(ray.put(spec), content_for(spec, group), measure))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise ValueError(
                f"the preflight died ({first_line(error)}): the largest client does not fit there; lower local.batch"
            ) from None


def _measure(
    spec: RunSpec, content: Sequence[ray.ObjectRef[Any]], measure: Measure
) -> preflight.MemoryNeed:
    return measure(read_here(spec, content))


def _share(
    options: RayOptions,
    each: Mapping[str, float],
    spec: RunSpec,
    concurrency: int,
    cluster: Sequence[Mapping[str, float]],
    need: preflight.MemoryNeed,
    say: Say,
) -> float:
    """The part of a GPU that a worker reserves: so small that workers find no more work or CPUs, or as jobs allow."""
    gpus = sum(int(node.get("GPU", 0.0)) for node in cluster)
    clients = int(np.count_nonzero(spec.data.partition.train.counts))
    fits = preflight.workers_per_gpu(need, clients, gpus)
    states = (
        f" and {format_bytes(clients * need.state)} of client states are kept" if need.state else ""
    )
    if not fits:
        raise ValueError(
            f"a job needs {format_bytes(need.job)}{states}, a GPU has {format_bytes(need.room)}: "
            "lower local.batch, or set device=cpu"
        )
    say(
        f"a job needs {format_bytes(need.job)}{states}: {fits} worker{'s fit' if fits > 1 else ' fits'} on a GPU"
    )
    if options.gpus is not None:
        if options.gpus < gpu_share(fits):
            raise ValueError(
                f"runtime.gpus={options.gpus:g} puts {int(1 / options.gpus)} workers on a GPU, of whose "
                f"{format_bytes(need.room)} each needs {format_bytes(need.job)}: "
                f"set runtime.gpus={gpu_share(fits):g} for {fits} workers"
            )
        return options.gpus
    rest = {name: amount for name, amount in each.items() if name != "GPU"}
    places = worker_capacity([node for node in cluster if node.get("GPU")], rest, options.strategy)
    wanted = options.workers or (concurrency if places is None else min(concurrency, places))
    return gpu_share(min(fits, max(1, -(-wanted // gpus))))


# --- the run --------------------------------------------------------------------------------------------------------
def run(
    spec: RunSpec,
    schedule: Schedule,
    fleet: Fleet,
    size: Size,
    options: RayOptions | None = None,
    say: Say = print,
    folder: str = "",
    resume: str = "",
) -> Iterator[Event]:
    """Run on the connected cluster, in a placement group of its own. Errors arrive as they were raised.

    folder, resume: see `Coordinator`.
    """
    options = options or RayOptions()
    team = start_processes(spec, (schedule, fleet), size, options, say, (folder, resume))
    well = False
    try:
        for part, more in (
            (team.coordinator.begin, START_TIMEOUT_S),
            (team.coordinator.events, REVIVAL),
        ):
            messages = part.options(num_returns="streaming").remote()
            for ref in _in_time(messages, spec.settings.faults.timeout, more, say):
                for event in ray.get(ref):
                    if isinstance(event, Started) and not are_equal(event.processes):
                        say(
                            "runtime.mixed=true: the processes of this run differ; the same bits are not promised"
                        )
                    yield event
        well = True
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise (_lost(cause) if isinstance(cause, ray.exceptions.RayError) else cause) from None
    except ray.exceptions.RayActorError as error:
        raise _lost(error) from None
    finally:
        release_processes(team, well)


def _in_time(messages: Any, timeout: float | None, more: float, say: Say) -> Iterator[Any]:
    """What a coordinator sends; it says every few seconds what it waits for, so one that is silent counts as dead.

    It cannot where it waits for Ray to start a worker, which is said for it. more: seconds beyond the timeout that the
    first of its messages may take.
    """
    patience, silent = math.inf if timeout is None else timeout + more, 0.0
    while silent < patience:
        if ray.wait(
            [messages], timeout=(step := min(SILENCE, patience - silent)), fetch_local=False
        )[0]:
            patience, silent = math.inf if timeout is None else timeout + REVIVAL, 0.0
            try:
                yield next(messages)
            except StopIteration:
                return
        elif (silent := silent + step) < patience:
            say(
                f"nothing was heard for {silent:g} s: workers start, or Ray has no room for one in the place of one "
                f"that died; without it the run goes back to its last checkpoint, after {ROOM} to {REVIVAL} s"
            )
    raise ProcessLostError(
        f"the coordinator has said nothing for {patience:g} s (faults.timeout, and what a new worker may take): it may "
        "have been stopped"
    )


def _lost(error: Exception) -> ProcessLostError:
    return ProcessLostError(f"a process of the run died ({first_line(error)})")
