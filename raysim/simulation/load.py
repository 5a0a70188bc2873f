"""What a job asks of its client: known at dispatch, from the settings and the methods alone."""

from __future__ import annotations

import functools

import numpy as np

from raysim.api.composition import SLOTS, owners
from raysim.api.declarations import Participation, RunFacts
from raysim.simulation.fleet import Fleet
from raysim.simulation.planner import Load, Planner
from raysim.simulation.schedule import Schedule
from raysim.training.run_spec import RunSpec, sample_flops
from raysim.vectors.layout import Layout


class Loads:
    """The load of each job of a run. counts: int64 [clients] training samples."""

    def __init__(self, spec: RunSpec, layout: Layout, counts: np.ndarray):
        self._local, self._counts, self._shared = spec.settings.local, counts, layout.shared
        self._costers = owners(spec.methods, "cost")
        filled = frozenset(slot for slot in SLOTS if owners(spec.methods, slot))
        self._run = RunFacts(spec.task, layout, int(np.count_nonzero(counts)), filled)
        self._plain: dict[int, Load] = {}  # by samples, where no method adds anything

    def __call__(self, client: int, version: int, earlier: int, accepted: int) -> Load:
        """Of a client's next job. earlier, accepted: see `Participation`."""
        samples = self._counts.item(client)
        if (load := self._plain.get(samples)) is None:
            trained = self._local.budget(samples)
            job = Participation(version, samples, trained, earlier, accepted, self._run)
            costs = [method.cost(job) for method in self._costers]
            load = Load(
                trained + sum(cost.samples for cost in costs),
                self._shared + sum(cost.down for cost in costs),
                self._shared + sum(cost.up for cost in costs),
            )
            if not self._costers:
                self._plain[samples] = load
        return load


def make_planner(spec: RunSpec, layout: Layout, schedule: Schedule, fleet: Fleet) -> Planner:
    """The planner of a run, at its start."""
    counts, seed = spec.data.partition.train.counts, spec.settings.seed
    devices = fleet.devices(seed, len(counts), functools.partial(sample_flops, spec))
    return Planner(schedule, devices, seed, counts, Loads(spec, layout, counts), fleet.patience)
