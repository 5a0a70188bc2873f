"""Compute the load of a job: the samples to process, and the floats that its client exchanges.

The load is known at the dispatch of the job. It depends on the client, the settings, the methods
and the sizes of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from raysim.api.declarations import FORWARD, Participation, RunFacts
from raysim.api.declare import Declarations
from raysim.api.messages import Update
from raysim.api.setup import MethodDeclaration, PlannedUpload, number_of_floats
from raysim.api.topology import Network
from raysim.simulation.costs import Costs
from raysim.simulation.fleet import Fleet
from raysim.simulation.network import make_network
from raysim.simulation.planner import Load, Planner
from raysim.simulation.schedule import Schedule
from raysim.training.run_spec import RunSpec, sample_flops
from raysim.vectors.layout import Layout

# A function from the full name of a tensor, "method.name", to its number of floats.
FloatsOf: TypeAlias = Callable[[str], int]
# A function from a client and the full name of a tensor to the number of floats that it receives.
SentFloats: TypeAlias = Callable[[int, str], int]


@dataclass(frozen=True)
class _Traffic:
    """A tensor that clients receive in addition to the model.

    floats: the number of floats of the tensor.
    when: function that returns True for a job whose client receives the tensor.
    """

    floats: int
    when: Callable[[Participation], bool]


@dataclass(frozen=True)
class VaryingTensors:
    """The tensors of one method whose sizes change from version to version.

    Sizes are numbers of floats, by the tensors' full names "method.name".
    sent, uploaded: the sizes in version 0 of tensors that the server sends, and that clients send.
    planned: for each tensor in `uploaded`, a function that returns the tensor's size. The argument
    is the total size of the tensors of `sent` that the client receives.
    """

    sent: Mapping[str, int]
    uploaded: Mapping[str, int]
    planned: Mapping[str, PlannedUpload]

    def received_floats(self, floats_of: FloatsOf) -> int:
        """Return the total number of floats of the tensors that a client receives.

        floats_of: function that returns the size in floats of a tensor. Its argument is the
        tensor's full name, "method.name".
        """
        return sum(map(floats_of, self.sent))

    def growth(self, floats_of: FloatsOf) -> tuple[int, int]:
        """Return how much larger than in version 0 a job's download and upload are, in floats.

        floats_of: returns the size in floats of a tensor that the client receives, by its full name
        "method.name".
        """
        received = self.received_floats(floats_of)
        down = received - sum(self.sent.values())
        up = sum(planned(received) for planned in self.planned.values())
        return down, up - sum(self.uploaded.values())

    def unplanned_floats(self, update: Update, floats_of: FloatsOf) -> int:
        """Return by how many floats an update is larger than planned; negative if it is smaller.

        Only the tensors in `planned` are counted.
        floats_of: returns the floats of a tensor in the base version, for the tensor's full name
        "method.name".
        """
        planned = sum(self.uploaded.values())
        if update.version:
            planned += self.growth(floats_of)[1]
        return sum(update.extras[name].size for name in self.planned) - planned


def varying_tensors(declarations: Declarations) -> list[VaryingTensors]:
    """Return the tensors whose sizes change from version to version.

    The result has one object for each method with such tensors.
    """
    layout = declarations.layout
    varying = []
    for declared in declarations.methods:
        sends = [send for send in declared.sends if send.varies]
        if not sends and not declared.planned_uploads:
            continue
        prefix = f"{declared.method}."
        sent = {prefix + send.name: number_of_floats(send.floats, layout) for send in sends}
        uploaded = {
            prefix + name: number_of_floats(declared.uploads[name], layout)
            for name in declared.planned_uploads
        }
        planned = {prefix + name: plan for name, plan in declared.planned_uploads.items()}
        varying.append(VaryingTensors(sent, uploaded, planned))
    return varying


class Loads:
    """A callable that computes the `Load` of a job: samples to process, floats received and sent.

    counts: int64 [clients], the number of training samples of each client.
    sent_floats: a function of a client and of a tensor's full name, "method.name". It returns how
    many floats of the tensor the client would receive now. If sent_floats is None, each tensor has
    the size that it had in version 0.
    """

    def __init__(
        self,
        spec: RunSpec,
        declarations: Declarations,
        counts: np.ndarray,
        sent_floats: SentFloats | None = None,
    ):
        layout = declarations.layout
        self._local, self._counts = spec.settings.local, counts
        self._costs = [hook for _, hook in declarations.hooks_of("cost")]
        self._down: list[_Traffic] = []
        self._omissions = [
            omission for declared in declarations.methods for omission in declared.omissions
        ]
        floats_up = declarations.floats_up
        for declared in declarations.methods:
            self._down += _downloads(declared, layout)
            for floats in declared.uploads.values():
                floats_up += number_of_floats(floats, layout)
        self._floats_down, self._floats_up = layout.shared, floats_up
        hooks = frozenset(hook for declared in declarations.methods for hook in declared.hooks)
        clients = int(np.count_nonzero(counts))
        self._run = RunFacts(spec.task, spec.settings.local, layout, clients, hooks)
        self._plain: dict[int, Load] = {}  # by samples: the loads to which no method adds anything
        self._sent_floats = sent_floats
        self._varying = varying_tensors(declarations)

    def __call__(self, client: int, version: int, earlier: int, accepted: int) -> Load:
        """Return the load of a client's next job: samples to process, floats received and sent.

        version: the base version of the job; 0 for an estimate before the run.
        earlier: the number of the client's earlier jobs.
        accepted: how many of these jobs were in an aggregation, with failed jobs.
        """
        samples = self._counts.item(client)
        load = self._plain.get(samples)
        if load is not None:
            return load
        trained = self._local.budget(samples)
        job = Participation(version, samples, trained, earlier, accepted, self._run, client)
        passed, down, up = trained, self._floats_down, self._floats_up
        for hook in self._costs:
            passed += hook(job)
        down += sum(traffic.floats for traffic in self._down if traffic.when(job))
        for omission in self._omissions:
            down -= omission.down(job)
            up -= omission.up(job)
        if self._sent_floats is not None and version:
            for varying in self._varying:
                more = varying.growth(functools.partial(self._sent_floats, client))
                down, up = down + more[0], up + more[1]
        load = Load(passed, down, up)
        if not (self._costs or self._down or self._omissions or self._varying):
            self._plain[samples] = load
        return load


def _downloads(declared: MethodDeclaration, layout: Layout) -> list[_Traffic]:
    """Return a `_Traffic` for each tensor that a method sends to clients with the model."""
    downloads = []
    for send in declared.sends:
        when = send.when
        if send.to == "once":
            when = functools.partial(_is_first, when)
        downloads.append(_Traffic(number_of_floats(send.floats, layout), when))
    return downloads


def _is_first(when: Callable[[Participation], bool], job: Participation) -> bool:
    return job.earlier_jobs == 0 and when(job)


class StepMessages:
    """The compressed changes between versions, which clients receive in place of the parameters.

    In its first job, a client receives the whole parameters. Later, it receives the changes since
    the base version of its last job, unless the whole parameters are smaller.

    words, parameters: the sizes of a change from one version to the next, and of the whole
    parameters, in 32-bit words.

    The attribute `received`, int32 [clients], has the base version of each client's last job. It is
    -1 for a client that has had no job.
    """

    def __init__(self, words: int, parameters: int, clients: int):
        self._words, self._parameters = words, parameters
        self.received = np.full(clients, -1, np.int32)

    def saved(self, client: int, version: int) -> int:
        """Return by how many floats compressed changes make a client's next download smaller.

        Call this once for each job, because it also records that the client has `version`.
        version: the base version of the client's next job.
        """
        previous = self.received.item(client)
        self.received[client] = version
        if previous < 0:
            return 0
        return self._parameters - min(self._parameters, (version - previous) * self._words)


class PeerLoads:
    """A callable that computes the `Load` of a job if clients exchange replicas without a server.

    loads: computes the load of a job in a run with a server.
    network: says when clients exchange, and how many floats.
    model: the floats of a replica.
    """

    def __init__(self, loads: Loads, network: Network, model: int):
        assert network.client_floats is not None, "only for replicas on clients"
        self._loads, self._every, self._model = loads, network.every, model
        self._floats = network.client_floats

    def __call__(self, client: int, version: int, earlier: int, accepted: int) -> Load:
        """Return the load of a client's next job: samples to process, floats received and sent.

        version: the base version of the job; 0 for an estimate before the run.
        earlier: the number of the client's earlier jobs.
        accepted: how many of these jobs were in an aggregation, with failed jobs.
        """
        load = self._loads(client, version, earlier, accepted)
        exchanges = (version + 1) % self._every == 0
        floats = self._floats.item(client) if exchanges else 0
        return Load(load.work, load.down - self._model + floats, load.up - self._model + floats)


class ChoiceLoads:
    """A callable that computes the `Load` of a job if clients choose their replica by its loss.

    A client receives all replicas and computes their losses. It trains the best one, and sends its
    number with the update.
    loads: computes the load of a job in a run with one replica.
    """

    def __init__(self, loads: Loads, declarations: Declarations, replicas: int, counts: np.ndarray):
        self._loads, self._replicas, self._counts = loads, replicas, counts
        layout = declarations.layout
        self._floats = layout.shared
        for declared in declarations.methods:
            for send in declared.sends:
                if send.to == "all":  # each replica has its own
                    self._floats += number_of_floats(send.floats, layout)

    def __call__(self, client: int, version: int, earlier: int, accepted: int) -> Load:
        """Return the load of a client's next job: samples to process, floats received and sent.

        version: the base version of the job; 0 for an estimate before the run.
        earlier: the number of the client's earlier jobs.
        accepted: how many of these jobs were in an aggregation, with failed jobs.
        """
        load = self._loads(client, version, earlier, accepted)
        passes = FORWARD * self._replicas * self._counts.item(client)
        down = load.down + (self._replicas - 1) * self._floats
        return Load(load.work + passes, down, load.up + 1)


def make_planner(
    spec: RunSpec,
    declarations: Declarations,
    schedule: Schedule,
    fleet: Fleet,
    network: Network | None = None,
    sent_floats: SentFloats | None = None,
) -> Planner:
    """Return the planner of a run that has not begun.

    network: the run's topology; None calls `make_network`.
    sent_floats: as in `Loads`.
    Raises ValueError if the selection measures losses, but the models that clients receive are
    compressed.
    """
    if network is None:
        network = make_network(spec, declarations, fleet)
    counts, seed = spec.data.partition.train.counts, spec.settings.seed
    devices = fleet.devices(seed, len(counts), functools.partial(sample_flops, spec))
    loads = Loads(spec, declarations, counts, sent_floats)
    load: Loads | PeerLoads | ChoiceLoads = loads
    if network.on_clients:
        load = PeerLoads(loads, network, declarations.layout.shared)
    elif network.chosen_by_loss:
        load = ChoiceLoads(loads, declarations, network.replicas, counts)
    messages = None
    if declarations.step_words is not None:
        if spec.selection.measures:
            raise ValueError(
                f"selection={type(spec.selection).__name__} measures losses of clients. For "
                "this, clients need the exact model of the server, but compression.direction "
                "compresses the models that clients receive. Set compression.direction=up, or "
                "choose another selection."
            )
        parameters = declarations.layout.trained
        messages = StepMessages(declarations.step_words, parameters, len(counts))
    fleet_costs = fleet.costs(seed, len(counts))
    costs = None
    if fleet_costs is not None:
        costs = Costs(fleet_costs, devices, np.flatnonzero(counts))
    return Planner(
        schedule,
        devices,
        seed,
        counts,
        load,
        fleet.patience,
        spec.selection,
        network,
        costs,
        messages,
        loads_vary=bool(varying_tensors(declarations)),
    )
