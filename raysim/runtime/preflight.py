"""What a worker needs: the largest client trained where workers will live; how many workers then share a device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from raysim.data.federated import FederatedData
from raysim.data.partition import CSR, Partition
from raysim.primitives.memory import peak_memory_bytes
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import Faults, RunSpec, StateBudget
from raysim.training.worker import Worker

CONTEXT = (
    2**30
)  # most bytes of a GPU that a process takes besides torch's tensors: CUDA's own context and libraries
USABLE = 0.95  # of a GPU; allocators leave gaps


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes: what a worker took at its peak, what its device has for such workers, what client state a client left."""

    job: int
    room: int
    state: int = 0


def memory_use(device: str) -> tuple[int, int]:
    """Two numbers of bytes: what this process took at its peak, and what its device has for processes like it.

    On a GPU, the peak is torch's tensors and CUDA's context, and the room is the whole GPU without what other processes
    hold there now. On a CPU, the peak is the largest resident size of this process, and the room is all of the
    machine's memory, whether in use or not.
    """
    if not device.startswith("cuda"):
        return peak_memory_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free, total = torch.cuda.mem_get_info()
    beside = total - free - torch.cuda.memory_reserved()
    context = min(beside, CONTEXT)
    return torch.cuda.max_memory_reserved() + context, total - beside + context


def measure(spec: RunSpec, read: Callable[[str], tuple[int, int]] = memory_use) -> MemoryNeed:
    """Train the largest client, as often at once as a worker trains clients, and score it, alone in this process."""
    counts = spec.data.partition.train.counts
    largest = int(np.argmax(counts))
    clients = [(largest + place) % len(counts) for place in range(min(spec.lanes, len(counts)))]
    # Clients may fail, and client states stay in memory, where they are counted. What is recorded is so when a step of
    # its kind comes again, in the second round at last.
    rounds = 2 if spec.graph else 1
    evaluate = replace(spec.settings.evaluate, every=1)
    settings = replace(
        spec.settings, rounds=rounds, evaluate=evaluate, faults=Faults(1.0), state=StateBudget()
    )
    alone = replace(spec, data=only(spec.data, clients, spec.score_batch), settings=settings)
    runtime = InProcess(Worker(alone))
    coordinator = Coordinator(
        replace(alone, device="cpu"), Synchronous(len(clients)), Ideal(), runtime
    )
    for _ in coordinator.run():
        pass
    return MemoryNeed(*read(spec.device), math.ceil(coordinator.client_states.bytes / len(clients)))


def only(data: FederatedData, clients: Sequence[int], central: int) -> FederatedData:
    """The same clients, of which these have the samples of the first of them and all others none, and the first rows of
    the central test set."""
    parts = Partition(_only(data.partition.train, clients), _only(data.partition.test, clients))
    return replace(data, partition=parts, central=data.central[:central])


def _only(part: CSR, clients: Sequence[int]) -> CSR:
    if not len(part):
        return part
    rows, counts = part.rows(clients[0]), np.zeros(len(part), np.int64)
    counts[list(clients)] = len(rows)
    return CSR(np.tile(rows, len(clients)), np.concatenate([[0], np.cumsum(counts)]))


def workers_per_gpu(need: MemoryNeed, clients: int, gpus: int) -> int:
    """How many jobs fit on a GPU at once, beside the client states of the clients whose workers are there."""
    states = math.ceil(clients / max(1, gpus)) * need.state
    return max(0, int((USABLE * need.room - states) // max(1, need.job)))
