"""What a run is between two aggregations: taken for a checkpoint, restored from one, and summed up in checksums.

Jobs under way are part of it as messages: after a resume they run again, from their base versions. The plan is what was
pulled of it, and the planner as it was after that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from raysim.api.messages import Job, Published
from raysim.api.private_state import flat
from raysim.simulation.checkpoint import Snapshot
from raysim.simulation.events import Row
from raysim.simulation.planner import Planner, Step
from raysim.simulation.private_states import PrivateStates
from raysim.simulation.schedule import PlannedJob
from raysim.simulation.server import Server


@dataclass(frozen=True)
class Plan:
    """The plan of a run: steps that were not made yet, and what is under way.

    sent: the last version of which the jobs are under way; jobs: all whose end was not reported; messages: by number,
    what the hosts of those are sent that may be aggregated.
    """

    planner: Planner
    steps: Sequence[Step]
    sent: int
    jobs: Collection[PlannedJob]
    messages: Mapping[int, Job]


def take(
    server: Server,
    plan: Plan,
    private: PrivateStates,
    published: Mapping[int, Published],
    rows: Sequence[Row],
    wall_seconds: float,
    best: Mapping[str, np.ndarray],
) -> Snapshot:
    """The run as it is now. published: by version, at least the base versions of jobs under way. best: see `best`."""
    arrays: dict[str, np.ndarray] = {
        "vector": server.vector.numpy(),
        "counters": server.counters.numpy(),
        "participations": plan.planner.participations,
        "taken": plan.planner.accepted,
        **{f"state/{name}": tensor.numpy() for name, tensor in server.state.items()},
        **{f"best/{name}": array for name, array in best.items()},
    }
    for version in {job.version for job in plan.messages.values()}:
        base = published[version]
        arrays |= {f"published/{version}/vector": base.vector, f"published/{version}/counters": base.counters}
        arrays |= {f"published/{version}/extras/{key}": value for key, value in base.extras.items()}
    for number, job in plan.messages.items():
        arrays |= {f"job/{number}/{key}": value for key, value in job.extras.items()}
    numbers = {
        "version": server.version,
        "planner": plan.planner.state(),
        "steps": [step.numbers() for step in plan.steps],
        "sent": plan.sent,
        "jobs": list(plan.jobs),
        "messages": [asdict(job) | {"extras": {}} for job in plan.messages.values()],
        "wall": wall_seconds,
        "rows": rows,
    }
    return Snapshot(numbers, arrays, private.named(), private.accepted_jobs)


def restore(
    snapshot: Snapshot, server: Server, planner: Planner, private: PrivateStates
) -> tuple[Plan, dict[int, Published]]:
    """Make a run that has not begun what it was at a snapshot. Returns its plan, and the base versions of its jobs."""
    numbers, arrays = snapshot.numbers, snapshot.server
    server.version = numbers["version"]
    server.vector, server.counters = torch.from_numpy(arrays["vector"]), torch.from_numpy(arrays["counters"])
    server.state = {name: torch.from_numpy(array) for name, array in _under(arrays, "state/").items()}
    planner.restore(numbers["planner"], arrays["participations"], arrays["taken"])
    messages = [Job(**each | {"extras": _under(arrays, f"job/{each['number']}/")}) for each in numbers["messages"]]
    jobs = [PlannedJob(*each) for each in numbers["jobs"]]
    steps = [Step.of(step) for step in numbers["steps"]]
    plan = Plan(planner, steps, numbers["sent"], jobs, {job.number: job for job in messages})
    private.restore(snapshot.jobs, snapshot.clients)
    return plan, {version: _published(arrays, version) for version in dict.fromkeys(job.version for job in messages)}


def best(snapshot: Snapshot) -> dict[str, np.ndarray]:
    """What evaluation knew of the best rounds."""
    return _under(snapshot.server, "best/")


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
    for client in sorted(private.accepted_jobs, key=lambda client: f"{client}/"):  # one at a time: some lie on disk
        for key, array in sorted(flat(private.accepted_state(client)).items()):
            digest.update(f"{client}/{key}".encode() + np.ascontiguousarray(array).tobytes())
    for name, tensor in sorted(server.state.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().data)  # as it lies: a cache may be larger than memory
    return digest.hexdigest()
