"""Prepare a run before its first aggregation.

Clients send arrays from which methods make server state. Workers receive tensors that methods send
once, and the rows of the samples for probes.
"""

from __future__ import annotations

import numpy as np

from raysim.api.declare import Declarations
from raysim.primitives.streams import stream
from raysim.simulation.calls import WorkerCalls
from raysim.simulation.planner import Planner
from raysim.simulation.replicas import Replicas
from raysim.simulation.runtime import Runtime
from raysim.training.probe import balanced_rows
from raysim.training.run_spec import RunSpec


def check_probe(spec: RunSpec) -> None:
    """Raise ValueError if `evaluate.probe` is set, but the data has no central test set.

    A probe scores the model that a client has just trained; it needs the central test set.
    """
    if spec.settings.evaluate.probe and not len(spec.data.central):
        raise ValueError(
            f"evaluate.probe={spec.settings.evaluate.probe} scores local models on the central "
            "test set, but this data has no central test set. Set evaluate.probe=0."
        )


def collect_contributions(
    declarations: Declarations, replicas: Replicas, planner: Planner, calls: WorkerCalls
) -> None:
    """Collect the arrays that clients send before round 0, and give them to the methods.

    Each client with samples sends its arrays once, and the planner counts this traffic. The methods
    make the server state from them.
    """
    methods = [declared for declared in declarations.methods if declared.assemble is not None]
    if not methods:
        return
    workers = calls.active
    shares = np.array_split(planner.eligible, len(workers))
    started = [
        calls.call(worker, "contribute", clients.tolist())
        for worker, clients in zip(workers, shares, strict=True)
    ]
    parts = [part for call in started for part in calls.wait(call)]
    planner.count_contributions(sum(array.size for part in parts for array in part.values()))
    for declared in methods:
        replicas.assemble(declared, parts)


def send_constants(spec: RunSpec, replicas: Replicas, runtime: Runtime, calls: WorkerCalls) -> None:
    """Send every worker the tensors and sample rows that do not change during a run.

    The tensors are those that a method sends to each client only once (`run.send`). The rows are
    the test samples for probes (`evaluate.probe`). A run that has neither sends nothing.
    """
    constants = replicas.first.sent_once()
    if constants or spec.settings.evaluate.probe:
        calls.store_constants(runtime.put(constants), _probed_rows(spec))


def _probed_rows(spec: RunSpec) -> np.ndarray:
    """Draw samples of the central test set for probes, equally many of each class.

    Return their rows in the data set. There are about `evaluate.probe_rows` of them, or fewer if a
    class has too few samples.
    """
    central, rows = spec.data.central, spec.settings.evaluate.probe_rows
    labels = spec.data.open().groups()[0][central]
    rows_per_class = max(1, rows // max(1, len(np.unique(labels))))
    return central[balanced_rows(labels, rows_per_class, stream(spec.settings.seed, "probe"))]
