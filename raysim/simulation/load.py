"""The load of a job. It is known at dispatch, from the settings and the methods alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raysim.api.declarations import FORWARD, Participation, RunFacts
from raysim.api.declare import Declarations
from raysim.api.setup import MethodDeclaration, number_of_floats
from raysim.api.topology import Network
from raysim.simulation.costs import Costs
from raysim.simulation.fleet import Fleet
from raysim.simulation.network import make_network
from raysim.simulation.planner import Load, Planner
from raysim.simulation.schedule import Schedule
from raysim.training.run_spec import RunSpec, sample_flops
from raysim.vectors.layout import Layout


@dataclass(frozen=True)
class _Traffic:
    """Floats that some jobs receive in addition to the model."""

    floats: int
    when: Callable[[Participation], bool]


class Loads:
    """A function that returns the load of a job: samples to process, floats received and sent.

    A forward pass without a backward pass counts as a part of a sample (`FORWARD`). counts: int64
    [clients], the training samples of each client.
    """

    def __init__(self, spec: RunSpec, declarations: Declarations, counts: np.ndarray):
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
        self._plain: dict[int, Load] = {}  # by samples, where no method adds anything

    def __call__(self, client: int, version: int, earlier: int, accepted: int) -> Load:
        """Return the load of a client's next job, which starts from this version.

        earlier, accepted: the client's earlier jobs, and those of them that were accepted.
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
        load = Load(passed, down, up)
        if not (self._costs or self._down or self._omissions):
            self._plain[samples] = load
        return load


def _downloads(declared: MethodDeclaration, layout: Layout) -> list[_Traffic]:
    """Return the tensors that a method sends with the model."""
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
    """The messages with the compressed steps of the server, and the version that each client has.

    A client receives the messages of all versions since its last job, or the parameters if these
    are smaller. received: int32 [clients], the version of a client's last job; -1 without one.
    """

    def __init__(self, words: int, parameters: int, clients: int):
        self._words, self._parameters = words, parameters
        self.received = np.full(clients, -1, np.int32)

    def saved(self, client: int, version: int) -> int:
        """Return the floats that a client does not receive now, and that it has this version."""
        previous = self.received.item(client)
        self.received[client] = version
        if previous < 0:
            return 0
        return self._parameters - min(self._parameters, (version - previous) * self._words)


class PeerLoads:
    """A function that returns the load of a job if every client has a replica of its own.

    Instead of receiving and sending the model, a client receives and sends the floats of its
    exchange. model: the floats of a replica.
    """

    def __init__(self, loads: Loads, network: Network, model: int):
        assert network.client_floats is not None, "only for replicas on clients"
        self._loads, self._every, self._model = loads, network.every, model
        self._floats = network.client_floats

    def __call__(self, client: int, version: int, earlier: int, accepted: int) -> Load:
        """Return the load of a client's next job; see `Loads`."""
        load = self._loads(client, version, earlier, accepted)
        exchanges = (version + 1) % self._every == 0
        floats = self._floats.item(client) if exchanges else 0
        return Load(load.work, load.down - self._model + floats, load.up - self._model + floats)


class ChoiceLoads:
    """A function that returns the load of a job if each client chooses its replica by the loss.

    A client receives all replicas, computes the loss of each on its training samples, and sends one
    number more: its choice.
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
        """Return the load of a client's next job; see `Loads`."""
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
) -> Planner:
    """Return the planner of a run, at its start. network: None makes the one of the topology."""
    if network is None:
        network = make_network(spec, declarations, fleet)
    counts, seed = spec.data.partition.train.counts, spec.settings.seed
    devices = fleet.devices(seed, len(counts), functools.partial(sample_flops, spec))
    loads = Loads(spec, declarations, counts)
    load: Loads | PeerLoads | ChoiceLoads = loads
    if network.on_clients:
        load = PeerLoads(loads, network, declarations.layout.shared)
    elif network.chosen_by_loss:
        load = ChoiceLoads(loads, declarations, network.replicas, counts)
    messages = None
    if declarations.step_words is not None:
        if spec.selection.measures:
            raise ValueError(
                f"selection={type(spec.selection).__name__}: it measures losses before it "
                "dispatches, which counts whole models, and compression.direction compresses what "
                "clients receive. Set compression.direction=up, or choose another selection."
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
    )
