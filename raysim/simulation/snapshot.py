"""Store and restore a run's state between two aggregations, and compute its checksums.

The state includes the planner's state and the jobs in flight. When a run is resumed, these jobs are
trained again from their base versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from raysim.api.client_state import to_flat_arrays
from raysim.api.messages import Job, PublishedVersion
from raysim.simulation.best_model import BestModel
from raysim.simulation.best_round import BestRounds
from raysim.simulation.checkpoint import Snapshot
from raysim.simulation.client_states import ClientStates
from raysim.simulation.history_row import RowWriter
from raysim.simulation.jobs import JobRow, JobState, JobTable
from raysim.simulation.planner import PlannedAggregation, Planner
from raysim.simulation.replicas import Replicas
from raysim.simulation.server import Server
from raysim.simulation.versions import Versions


class _ServerArrays(Mapping[str, np.ndarray]):
    """The arrays of a snapshot by name; a replica's vector is read from disk when accessed.

    replica_of: the replica of each vector, by the vector's name.
    note_read: function that is called with a replica before its vector is read.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        replica_of: Mapping[str, int],
        note_read: Callable[[int], Server],
    ):
        self._arrays, self._replica_of, self._note_read = arrays, replica_of, note_read

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._replica_of:
            self._note_read(self._replica_of[name])
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


@dataclass(frozen=True)
class RunState:
    """The parts of a run that change; a checkpoint stores all of them.

    replicas: the models and the server state.
    planner: virtual time and the plan so far.
    jobs, versions: the jobs in flight, and their base versions.
    best: the best rounds of the clients; None without validation samples.
    """

    replicas: Replicas
    planner: Planner
    jobs: JobTable
    client_states: ClientStates
    versions: Versions
    history: RowWriter
    best: BestRounds | None
    best_model: BestModel


def take(run: RunState) -> Snapshot:
    """Return a snapshot of the run's current state."""
    replicas, planner, versions, history = run.replicas, run.planner, run.versions, run.history
    best = run.best.state() if run.best else {}
    best_model = run.best_model.state(replicas.first.vector)
    arrays: dict[str, np.ndarray] = {
        "participations": planner.participations,
        "taken": planner.accepted,
        **{f"selection/{name}": array for name, array in planner.selection_arrays().items()},
        **{f"topology/{name}": array for name, array in replicas.arrays().items()},
        **{f"best/{name}": array for name, array in best.items()},
        **{f"best_model/{name}": array for name, array in best_model.items()},
    }
    if planner.received is not None:
        arrays["received"] = planner.received
    replica_of: dict[str, int] = {}  # by name of a vector: its replica
    for replica, server in enumerate(replicas.servers):
        prefix = _prefix(replica)
        arrays |= {
            f"{prefix}vector": server.vector.numpy(),
            f"{prefix}counters": server.counters.numpy(),
            **{f"{prefix}state/{name}": tensor.numpy() for name, tensor in server.state.items()},
        }
        replica_of[f"{prefix}vector"] = replica
    for row in run.jobs.rows:
        arrays |= {f"job/{row.job.number}/{key}": array for key, array in row.job.extras.items()}
    for version in versions.held_versions:
        base = versions[version]
        arrays |= {
            f"published/{version}/vector": base.vector,
            f"published/{version}/counters": base.counters,
            f"published/{version}/version": np.array(base.version),
        }
        arrays |= {f"published/{version}/extras/{key}": value for key, value in base.extras.items()}
    numbers = {
        "version": replicas.version,
        "replicas": replicas.numbers,
        "replica_versions": [server.version for server in replicas.servers],
        "planner": planner.state(),
        "aggregations": [aggregation.to_json() for aggregation in run.jobs.aggregations],
        "jobs": [[row.state.value, row.job._replace(extras={})] for row in run.jobs.rows],
        "bases": versions.held_versions,
        "wall": history.wall_seconds,
        "rows": history.rows,
    }
    return Snapshot(
        numbers,
        _ServerArrays(arrays, replica_of, replicas.read),
        run.client_states.named_tensors(),
        run.client_states.committed_jobs,
    )


def restore(snapshot: Snapshot, run: RunState) -> None:
    """Put a run that has not begun into the state of a snapshot."""
    numbers, arrays, server = snapshot.numbers, snapshot.server, run.replicas.first
    for replica, version in enumerate(numbers["replica_versions"]):
        _restore_server(run.replicas.servers[replica], version, arrays, _prefix(replica))
    run.replicas.restore(numbers["version"], numbers["replicas"], _with_prefix(arrays, "topology/"))
    run.planner.restore(
        numbers["planner"],
        arrays["participations"],
        arrays["taken"],
        _with_prefix(arrays, "selection/"),
        arrays.get("received"),
    )
    run.versions.restore(_published(arrays, version) for version in numbers["bases"])
    rows = []
    for state, values in numbers["jobs"]:
        job = Job.from_json(values)
        extras = _with_prefix(arrays, f"job/{job.number}/")
        rows.append(JobRow(job._replace(extras=extras), JobState(state)))
    run.jobs.restore(map(PlannedAggregation.from_json, numbers["aggregations"]), rows)
    run.client_states.restore(snapshot.jobs, snapshot.clients)
    run.history.resume(numbers["wall"], numbers["rows"])
    if run.best:
        run.best.restore(_with_prefix(arrays, "best/"))
    run.best_model.restore(_with_prefix(arrays, "best_model/"), server.vector, server.counters)


def _prefix(replica: int) -> str:
    """Return the prefix of the names of a replica's arrays; "" for the first replica."""
    return f"replica/{replica}/" if replica else ""


def _restore_server(
    server: Server, version: int, arrays: Mapping[str, np.ndarray], prefix: str
) -> None:
    server.version = version
    server.vector = torch.from_numpy(arrays[f"{prefix}vector"])
    server.counters = torch.from_numpy(arrays[f"{prefix}counters"])
    server.state = {
        name: torch.from_numpy(array)
        for name, array in _with_prefix(arrays, f"{prefix}state/").items()
    }


def _published(arrays: Mapping[str, np.ndarray], number: int) -> PublishedVersion:
    parts = _with_prefix(arrays, f"published/{number}/")
    extras = _with_prefix(parts, "extras/")
    version = int(parts["version"])
    return PublishedVersion(version, parts["vector"], parts["counters"], extras, number=number)


def _with_prefix(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin with a prefix, by their names without the prefix."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays[name] for name in names}


# --- checksums ------------------------------------------------------------------------------------
def model_sha256(replicas: Replicas) -> str:
    """Return the SHA-256 of the shared model; of all replicas together if there are several."""
    digest = hashlib.sha256()
    for replica in range(len(replicas.servers)):
        server = replicas.read(replica)
        digest.update(server.vector.numpy().tobytes() + server.counters.numpy().tobytes())
    return digest.hexdigest()


def state_sha256(replicas: Replicas, client_states: ClientStates) -> str:
    """Return the SHA-256 of all committed client states and of the server state."""
    digest = hashlib.sha256()
    for client in sorted(
        client_states.committed_jobs, key=lambda client: f"{client}/"
    ):  # one at a time, because some are on disk
        for key, array in sorted(to_flat_arrays(client_states.committed_state(client)).items()):
            digest.update(f"{client}/{key}".encode() + np.ascontiguousarray(array).tobytes())
    for replica in range(len(replicas.servers)):
        for name, tensor in sorted(replicas.read(replica).state.items()):
            digest.update(name.encode())
            # Without a copy: a cache may be larger than memory.
            digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
