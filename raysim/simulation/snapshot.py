"""What a run is between two aggregations: taken for a checkpoint, restored from one, and summed up in checksums.

Jobs under way are part of it as jobs: after a resume they run again, from their base versions.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from raysim.api.messages import Job, Published
from raysim.simulation.checkpoint import Snapshot
from raysim.simulation.dispatcher import InFlightJob
from raysim.simulation.events import Row
from raysim.simulation.planner import Planner
from raysim.simulation.private_states import PrivateStates
from raysim.simulation.server import Server

_STORED = {"participation": "turn"}  # fields of `Job` that have another name in checkpoints


def take(
    server: Server,
    planner: Planner,
    private: PrivateStates,
    published: Mapping[int, Published],
    rows: Sequence[Row],
    wall_seconds: float,
) -> Snapshot:
    """The run as it is now. published: by version, at least the base versions of jobs under way."""
    arrays: dict[str, np.ndarray] = {
        "vector": server.vector.numpy(),
        "counters": server.counters.numpy(),
        **{f"state/{name}": tensor.numpy() for name, tensor in server.state.items()},
    }
    for version in {job.version for job in planner.in_flight.values()}:
        base = published[version]
        arrays |= {f"published/{version}/vector": base.vector, f"published/{version}/counters": base.counters}
        arrays |= {f"published/{version}/extras/{key}": value for key, value in base.extras.items()}
    for number, job in planner.in_flight.items():
        arrays |= {f"job/{number}/{key}": value for key, value in job.message.extras.items()}
    numbers = {
        "version": server.version,
        "now": planner.now,
        "draw": planner.cohorts,
        "number": planner.dispatched,
        "turns": list(planner.participations.items()),
        "arrived": planner.arrived,
        "floats": planner.floats,
        "wall": wall_seconds,
        "accepted": list(private.accepted_jobs.items()),
        "flights": [_numbers(job) for job in planner.in_flight.values()],
        "rows": rows,
    }
    return Snapshot(numbers, arrays, private.named())


def restore(snapshot: Snapshot, server: Server, planner: Planner, private: PrivateStates) -> dict[int, Published]:
    """Make a run that has not begun what it was at a snapshot. Returns the base versions of jobs under way."""
    numbers, arrays = snapshot.numbers, snapshot.server
    server.version = numbers["version"]
    server.vector, server.counters = torch.from_numpy(arrays["vector"]), torch.from_numpy(arrays["counters"])
    server.state = {name: torch.from_numpy(array) for name, array in _under(arrays, "state/").items()}
    planner.now, planner.cohorts, planner.dispatched = numbers["now"], numbers["draw"], numbers["number"]
    planner.participations = dict(map(tuple, numbers["turns"]))
    planner.arrived, planner.floats = numbers["arrived"], numbers["floats"]
    jobs = [_job(entry, _under(arrays, f"job/{entry['number']}/")) for entry in numbers["flights"]]
    planner.in_flight = {job.number: job for job in jobs}
    planner.running = [(job.finish, job.client, job.number) for job in jobs if job.number not in planner.arrived]
    heapq.heapify(planner.running)
    private.restore(dict(map(tuple, numbers["accepted"])), snapshot.clients, [job.message for job in jobs])
    return {version: _published(arrays, version) for version in dict.fromkeys(job.version for job in jobs)}


def _numbers(job: InFlightJob) -> dict[str, Any]:
    """A job under way as JSON, without its arrays."""
    own = {"finish": job.finish, "work": job.work, "up": job.up, "staleness": job.staleness}
    message = asdict(job.message) | {"extras": {}}
    return own | {_STORED.get(name, name): value for name, value in message.items()}


def _job(entry: Mapping[str, Any], extras: Mapping[str, np.ndarray]) -> InFlightJob:
    """The job of which `_numbers` made this entry."""
    names = ("number", "client", "participation", "version", "state", "weight", "probe")
    message = Job(**{name: entry[_STORED.get(name, name)] for name in names}, extras=extras)
    return InFlightJob(message, entry["finish"], entry["work"], entry["up"], staleness=entry["staleness"])


def _published(arrays: Mapping[str, np.ndarray], version: int) -> Published:
    parts = _under(arrays, f"published/{version}/")
    return Published(version, parts["vector"], parts["counters"], _under(parts, "extras/"))


def _under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The entries below a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


# --- checksums --------------------------------------------------------------------------------------------------------
def model_sha256(server: Server) -> str:
    """Of the shared model."""
    return hashlib.sha256(server.vector.numpy().tobytes() + server.counters.numpy().tobytes()).hexdigest()


def state_sha256(server: Server, private: PrivateStates) -> str:
    """Of the accepted private states, and of what methods keep on the server."""
    digest = hashlib.sha256()
    for key, array in sorted(private.flat().items()):
        digest.update(key.encode() + np.ascontiguousarray(array).tobytes())
    for name, tensor in sorted(server.state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().data)  # as it lies: a cache may be larger than memory
    return digest.hexdigest()
