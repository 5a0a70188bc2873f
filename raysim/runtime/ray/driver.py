"""Run on Ray: choose the number of workers, and pass on the events of the coordinator."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.autoscaler.sdk import request_resources

from raysim.primitives.errors import first_line
from raysim.primitives.stacks import read_stacks, write_stacks
from raysim.runtime import preflight
from raysim.runtime.placement import (
    NoRoomError,
    RayOptions,
    Size,
    choose_size,
    format_bytes,
    gpu_share,
    limit_by_memory,
    size_in_group,
    worker_capacity,
    worker_resources,
)
from raysim.runtime.ray.actors import (
    NODE_CHECK_S,
    REPLACEMENT_TIMEOUT_S,
    ROOM_CHECK_S,
    store_dataset,
    with_local_dataset,
    worker_bytes,
)
from raysim.runtime.ray.cluster import Say, bundle_options, node_resources, reserve
from raysim.runtime.ray.node_watch import free_resources
from raysim.runtime.ray.processes import (
    end_waiting,
    release_processes,
    start_processes,
    waiting_workers,
)
from raysim.runtime.ray.ray_messages import MessageFile, messages_written_to
from raysim.simulation.events import Event, Notice, ProcessLostError, Started
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import START_TIMEOUT_S
from raysim.simulation.schedule import Schedule
from raysim.training.identity import are_equal
from raysim.training.run_spec import RunSpec, build_networks

Measure = Callable[[RunSpec], preflight.MemoryNeed]

CREATION_FAILURE = "error raised in its creation task"  # in the text of Ray's error
SILENCE_WARNING_S = 60.0  # after this time without a message, a line is printed


# --- the number of workers ------------------------------------------------------------------
def plan_workers(
    options: RayOptions,
    spec: RunSpec,
    concurrency: int,
    say: Say = print,
    measure: Measure = preflight.measure,
) -> Size:
    """Choose the number of workers and their resources; wait for nodes if there are too few.

    Wait up to `runtime.wait` seconds for new nodes, and ask Ray's autoscaler for them. Do not
    wait if `runtime.wait` is null, or if the cluster is only on this machine.
    Raises NoRoomError if the cluster is still too small.
    """
    wait_s = options.wait or 0.0
    if options.address in (None, "local"):
        wait_s = 0.0  # no node will join
    end = time.monotonic() + wait_s
    is_waiting = False
    try:
        while True:
            try:
                return plan_now(options, spec, concurrency, say, measure)
            except NoRoomError as error:
                if time.monotonic() >= end:
                    raise
                if not is_waiting:
                    is_waiting = True
                    say(f"waiting up to {wait_s:g} s until enough nodes have joined: {error}")
                    per_worker = worker_resources(options, spec.device, spec.threads)
                    request_resources(bundles=[per_worker] * (options.workers or 1))
            time.sleep(NODE_CHECK_S)
    finally:
        if is_waiting:
            request_resources(bundles=[])


def plan_now(
    options: RayOptions, spec: RunSpec, concurrency: int, say: Say, measure: Measure
) -> Size:
    """Choose the number of workers, and the resources that each of them reserves.

    If `runtime.workers` is null, as many workers start as fit on the nodes, but at most
    `concurrency`. In a cluster that raysim has joined, only resources that other runs leave free
    count. Inside a trial of a sweep, the trial's placement group decides about the number.

    concurrency: the number of clients in flight at once.
    measure: trains one job and returns the memory that it needs.
    Raises ValueError if the cluster is too small.
    """
    per_worker = worker_resources(options, spec.device, spec.threads)
    group = ray.util.get_current_placement_group()
    if group is not None:
        return size_in_group(options, group.bundle_specs, spec.device)
    cluster = node_resources()
    needs_preflight = options.preflight
    if needs_preflight is None:  # it decides how many workers share a GPU
        needs_preflight = spec.device == "cuda" and options.gpus is None
    if needs_preflight:
        measured = {**per_worker, "GPU": 1.0} if spec.device == "cuda" else per_worker
        choose_size(replace(options, workers=1), measured, cluster, 1)  # raises if it does not fit
        need = _measure_remotely(options, spec, measured, say, measure)
        if spec.device == "cuda":
            per_worker["GPU"] = _choose_gpu_share(
                options, per_worker, spec, concurrency, cluster, need, say
            )
        else:
            per_worker["memory"] = need.job
            capacity = worker_capacity(cluster, {"memory": need.job}, options.strategy)
            workers = "1 worker" if capacity == 1 else f"{capacity} workers"
            say(
                f"a job needs {format_bytes(need.job)} of memory, so the cluster has room for "
                f"{workers}"
            )
    size = choose_size(options, per_worker, cluster, concurrency)
    # One worker always starts, so the model's size is needed only for more workers.
    if options.workers is None and not needs_preflight and size.workers > 1:
        size = _limit_by_memory(size, options, spec, cluster, say)
    if options.workers is None and options.address not in (None, "local"):
        size = _limit_by_other_runs(size, options, say)
    return size


def _limit_by_other_runs(size: Size, options: RayOptions, say: Say) -> Size:
    """Reduce the number of workers to what fits next to other runs on the cluster.

    If no worker fits, do not reduce the number; the run then waits until all its workers fit.
    size: the planned number of workers, and each worker's resources.
    """
    free = worker_capacity(free_resources(), size.per_worker, options.strategy)
    if free is None:
        return size
    count = free + waiting_workers(size.per_worker)
    if not 0 < count < size.workers:
        return size
    say(
        f"only {count} of {size.workers} possible workers start now, because other runs use the "
        "cluster; the others join when those runs end"
    )
    return replace(size, workers=count)


def _limit_by_memory(
    size: Size,
    options: RayOptions,
    spec: RunSpec,
    cluster: Sequence[Mapping[str, float]],
    say: Say,
) -> Size:
    """Reduce the number of workers to what the memory of the nodes allows, but at least one.

    size: the planned number of workers, and each worker's resources.
    spec: the run, whose model decides how much memory a worker needs.
    """
    need = worker_bytes(build_networks(spec)[1].total, spec.dtype.itemsize)
    limited = limit_by_memory(size, options, cluster, need)
    if limited != size:
        say(
            f"only {limited.workers} of {size.workers} possible workers start, because each worker "
            f"needs about {format_bytes(need)} of its node's memory; set runtime.workers to start "
            "another number"
        )
    return limited


def _measure_remotely(
    options: RayOptions, spec: RunSpec, per_worker: Mapping[str, float], say: Say, measure: Measure
) -> preflight.MemoryNeed:
    """Measure the memory of one job, in a process that reserves the resources of a worker.

    say: function that tells the user what the measurement waits for.
    measure: function that trains one job and returns the memory that it needs.
    """
    end_waiting()  # the preflight needs a whole GPU
    with reserve([dict(per_worker)], "raysim-preflight", options, say) as group:
        task = ray.remote(max_retries=0)(_measure).options(**bundle_options(group, 0, per_worker))
        try:
            return ray.get(task.remote(ray.put(spec), store_dataset(spec, group), measure))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise ValueError(
                f"local.batch={spec.settings.local.batch}: raysim trains one job to measure its "
                f"memory, and the process of this job died ({first_line(error)}). Probably the job "
                "of the client with the most samples does not fit into memory. Decrease "
                "local.batch."
            ) from None


def _measure(
    spec: RunSpec, content: Sequence[ray.ObjectRef[Any]], measure: Measure
) -> preflight.MemoryNeed:
    return measure(with_local_dataset(spec, content))


def _choose_gpu_share(
    options: RayOptions,
    per_worker: Mapping[str, float],
    spec: RunSpec,
    concurrency: int,
    cluster: Sequence[Mapping[str, float]],
    need: preflight.MemoryNeed,
    say: Say,
) -> float:
    """Return the share of a GPU that each worker reserves.

    If `runtime.gpus` is null, the share is 1 / n. n is the number of workers for which a GPU has
    memory, or less if the run needs fewer workers.
    concurrency: the number of clients in flight.
    need: the memory of a job.
    Raises ValueError if no worker fits, or if `runtime.gpus` is too small.
    """
    gpus = sum(int(node.get("GPU", 0.0)) for node in cluster)
    clients = int(np.count_nonzero(spec.data.partition.train.counts))
    fitting = preflight.workers_per_gpu(need, clients, gpus)
    job, room = format_bytes(need.job), format_bytes(need.room)
    states = ""
    if need.state:
        states = f", and client states need {format_bytes(clients * need.state)}"
    if not fitting:
        raise ValueError(
            f"device=cuda: a job needs {job} of memory{states}, but on a GPU only {room} can be "
            "used. Decrease local.batch, or set device=cpu."
        )
    workers = "1 worker" if fitting == 1 else f"{fitting} workers"
    say(f"a job needs {job} of memory{states}, so a GPU has room for {workers}")
    if options.gpus is not None:
        if options.gpus < gpu_share(fitting):
            raise ValueError(
                f"runtime.gpus={options.gpus:g} puts {int(1 / options.gpus)} workers on a GPU, on "
                f"which they can use {room} of memory together, but each needs {job}{states}. Set "
                f"runtime.gpus={gpu_share(fitting):g} for {workers} on a GPU."
            )
        return options.gpus
    other = {name: amount for name, amount in per_worker.items() if name != "GPU"}
    gpu_nodes = [node for node in cluster if node.get("GPU")]
    capacity = worker_capacity(gpu_nodes, other, options.strategy)
    useful = concurrency if capacity is None else min(concurrency, capacity)
    per_gpu = -(-(options.workers or useful) // gpus)
    return gpu_share(min(fitting, max(1, per_gpu)))


# --- the run --------------------------------------------------------------------------------
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
    """Run on the connected cluster, in a placement group of the run; yield the run's events.

    options: the settings `runtime.*`; None uses their defaults.
    folder: the folder for the model, and for the checkpoints unless `checkpoint.folder` is set. ""
    writes no model and no checkpoints.
    resume: the address of the checkpoint to continue from; "" starts a new run.

    Raises the coordinator's errors. Raises ProcessLostError in two cases: the coordinator is lost
    or silent for too long, or the run cannot continue after the death of a worker.
    """
    options = options or RayOptions()
    processes = start_processes(spec, (schedule, fleet), size, options, say, folder, resume)
    coordinator = processes.coordinator
    stack_source = coordinator.stack_source.remote()
    has_begun = has_succeeded = False
    ray_messages: MessageFile | None = None
    open_files = ExitStack()

    def write_coordinator_stacks() -> Path | None:
        """Write the call stacks of the coordinator's threads into a file; return the file's path.

        Return None if they cannot be read, for example because the coordinator is starting.
        """
        if not ray.wait([stack_source], timeout=0)[0]:
            return None
        text = read_stacks(ray.get(stack_source))
        # The folder of a run is used from its start on.
        place = Path(folder) if has_begun else Path(tempfile.mkdtemp(prefix="raysim-"))
        return write_stacks(place, "coordinator", text) if text else None

    try:
        for method, extra_s in (
            (coordinator.begin, START_TIMEOUT_S),
            (coordinator.events, REPLACEMENT_TIMEOUT_S),
        ):
            messages = method.options(num_returns="streaming").remote()
            timeout_s = spec.settings.faults.timeout
            for ref in _receive(messages, timeout_s, extra_s, say, write_coordinator_stacks):
                for event in ray.get(ref):
                    if isinstance(event, Notice):
                        say(event.text)
                        continue
                    if isinstance(event, Started) and not are_equal(event.processes):
                        say(
                            "the processes of this run have different hardware or software, which "
                            "runtime.mixed=true allows. A repetition of the run may not be "
                            "bit-identical."
                        )
                    yield event
                    if folder and not has_begun:
                        has_begun = True
                        ray_messages = open_files.enter_context(messages_written_to(Path(folder)))
                if ray_messages is not None and not ray_messages.is_empty:
                    say(f"Ray's own messages are in {ray_messages.path}")
                    ray_messages = None  # a run says it once
        has_succeeded = True
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ray.exceptions.RayError):
            raise _process_lost(cause) from None
        raise cause from None
    except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
        raise _process_lost(error) from None
    finally:
        with open_files:
            release_processes(processes, has_succeeded)


def _receive(
    messages: Any,
    timeout: float | None,
    extra_s: float,
    say: Say,
    write_coordinator_stacks: Callable[[], Path | None] = lambda: None,
) -> Iterator[Any]:
    """Yield the coordinator's messages; print a warning if none comes for a long time.

    timeout: the most seconds to wait for a message, without extra time; None waits forever.
    extra_s: the extra seconds for the first message. Each later message has the extra time
    `REPLACEMENT_TIMEOUT_S`.
    write_coordinator_stacks: writes the coordinator's call stacks into a file. It returns the
    file's path, or None without stacks.
    Raises ProcessLostError if no message comes in time.
    """
    limit_s = math.inf if timeout is None else timeout + extra_s
    silent_s = 0.0
    while silent_s < limit_s:
        wait_s = min(SILENCE_WARNING_S, limit_s - silent_s)
        if ray.wait([messages], timeout=wait_s, fetch_local=False)[0]:
            limit_s = math.inf if timeout is None else timeout + REPLACEMENT_TIMEOUT_S
            silent_s = 0.0
            try:
                yield next(messages)
            except StopIteration:
                return
            continue
        silent_s += wait_s
        if silent_s < limit_s:
            stacks = write_coordinator_stacks()
            place = f" See what its threads execute: {stacks}" if stacks else ""
            say(
                f"no message from the coordinator for {silent_s:g} s. Workers may still be "
                "starting, or a worker died and Ray has no room to replace it. If a worker died, "
                f"the run restarts by itself after {ROOM_CHECK_S} to {REPLACEMENT_TIMEOUT_S} s."
                f"{place}"
            )
    raise ProcessLostError(
        f"faults.timeout={timeout:g}: the coordinator sent no message for {limit_s:g} s. This "
        "limit is faults.timeout plus the time to start or replace a worker. The coordinator's "
        "process may be stopped or overloaded. If it is only slow, increase faults.timeout"
    )


def _process_lost(error: Exception) -> ProcessLostError:
    text = str(error)
    if CREATION_FAILURE in text:  # followed by a traceback
        reason = text.strip().splitlines()[-1]
        advice = ""
        if reason.startswith("ModuleNotFoundError"):
            advice = ". Install the module on all nodes, or send it with `raysim submit --with`"
        return ProcessLostError(f"a process of the run did not start ({reason}){advice}")
    return ProcessLostError(f"a process of the run died ({first_line(error)})")
