"""Measure the memory of a job, and compute how many workers can share a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from raysim.api.selection import Random
from raysim.api.topology import Star
from raysim.data.federated import FederatedData
from raysim.data.partition import CSR, Partition
from raysim.primitives.memory import peak_memory_bytes
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import Faults, RunSpec, StateBudget
from raysim.training.worker import Worker

# A process needs at most this much of a GPU's memory for CUDA's context and libraries.
MAX_CONTEXT_BYTES = 2**30
USABLE_SHARE = 0.95  # share of a GPU's memory that can be used, because allocators leave gaps


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a job and a client state need, and the memory for workers, in bytes.

    job: the peak memory of a worker that trains and scores one client per lane.
    room: the memory that all workers of the device together can use.
    state: the size of one client's state.
    """

    job: int
    room: int
    state: int = 0


def memory_use(device: str) -> tuple[int, int]:
    """Return the peak memory of this process, and the memory that workers can use, in bytes.

    On a GPU, the peak includes CUDA's context, and workers can use what other processes do not use.
    On a CPU, workers can use all memory of the machine.
    """
    if not device.startswith("cuda"):
        return peak_memory_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, total = torch.cuda.mem_get_info()
    untracked = total - free - torch.cuda.memory_reserved()
    context = min(untracked, MAX_CONTEXT_BYTES)
    return torch.cuda.max_memory_reserved() + context, total - untracked + context


def measure(spec: RunSpec, read: Callable[[str], tuple[int, int]] = memory_use) -> MemoryNeed:
    """Train and score the largest client in this process; return the measured memory.

    The result also has the memory that workers can use. With several lanes, each trains a copy of
    this client.
    read: maps a device to the peak memory of this process and the memory that workers can use, in
    bytes.
    """
    counts = spec.data.partition.train.counts
    largest = int(np.argmax(counts))
    copies = min(spec.lanes, len(counts))
    clients = [(largest + offset) % len(counts) for offset in range(copies)]
    settings = replace(
        spec.settings,
        rounds=2 if spec.graph else 1,  # a step is recorded at the latest in the second round
        evaluate=replace(spec.settings.evaluate, every=1),
        faults=Faults(1.0),  # clients may fail
        state=StateBudget(),  # client states stay in memory, where they are counted
    )
    data = restrict_data(spec.data, clients, spec.score_batch)
    trial = replace(spec, data=data, settings=settings, topology=Star(), selection=Random())
    runtime = InProcess(Worker(trial))
    trial_on_cpu = replace(trial, device="cpu")
    coordinator = Coordinator(trial_on_cpu, Synchronous(len(clients)), Ideal(), runtime)
    for _ in coordinator.run():
        pass
    state = math.ceil(coordinator.client_states.bytes / len(clients))
    return MemoryNeed(*read(spec.device), state)


def restrict_data(data: FederatedData, clients: Sequence[int], central: int) -> FederatedData:
    """Return a small copy of the data, to measure the memory of a job.

    clients: the clients that have samples in the copy. Each of them gets the training and the test
    samples of `clients[0]`.
    central: the largest number of samples of the central test set in the copy.
    """
    train = _repeat_samples(data.partition.train, clients)
    partition = Partition(train, _repeat_samples(data.partition.test, clients))
    return replace(data, partition=partition, central=data.central[:central])


def _repeat_samples(part: CSR, clients: Sequence[int]) -> CSR:
    if not len(part):
        return part
    rows = part.rows(clients[0])
    counts = np.zeros(len(part), np.int64)
    counts[list(clients)] = len(rows)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return CSR(np.tile(rows, len(clients)), offsets)


def workers_per_gpu(need: MemoryNeed, clients: int, gpus: int) -> int:
    """Return how many workers fit on a GPU next to the client states that the GPU stores.

    clients: the number of clients that have states.
    gpus: the number of GPUs, which store equal shares of the states.
    """
    states = math.ceil(clients / max(1, gpus)) * need.state
    return max(0, int((USABLE_SHARE * need.room - states) // max(1, need.job)))
