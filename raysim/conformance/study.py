"""The tiny runs in which the checks try a user's method, model, selection or similar object."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from raysim.api.declarations import Local
from raysim.api.method import Method
from raysim.api.selection import Random, Selection
from raysim.api.topology import Star, Topology
from raysim.conformance.runs import BUFFER, NORMED_MLP, ROUNDS, SEED, run_spec
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import Dirichlet, Partitioner
from raysim.data.raw import Source
from raysim.data.sources import Synthetic
from raysim.models.classifier import ModelRecipe
from raysim.simulation.fleet import Fleet, Lognormal
from raysim.simulation.schedule import Schedule
from raysim.training.run_spec import RunSpec


@dataclass(frozen=True)
class Study:
    """A tiny run in which the checks try a user's object, such as a method.

    Set fields, such as `model` or `methods`, to test the object together with other objects. The
    checks repeat the run with each schedule in `schedules`.
    """

    methods: tuple[Method, ...] = ()
    model: ModelRecipe = NORMED_MLP
    data: Source = field(default_factory=lambda: Synthetic(samples=150, test_samples=20, classes=5))
    partition: Partitioner = field(
        default_factory=lambda: Dirichlet(clients=6, alpha=2.0, minimum=5)
    )
    fleet: Fleet = field(default_factory=Lognormal)
    selection: Selection = field(default_factory=Random)
    topology: Topology = field(default_factory=Star)
    schedules: tuple[Schedule, ...] = (ROUNDS, BUFFER)
    local: Local = field(default_factory=lambda: Local(lr=0.05, momentum=0.9, batch=8, epochs=2))

    @cached_property
    def federated(self) -> FederatedData:
        """The data, split over the clients."""
        return federate(self.data, self.partition, SEED)

    def spec(self, dtype: torch.dtype = torch.float32) -> RunSpec:
        """Return a run of three rounds, with copies of the methods.

        dtype: the type of the parameters and of the computation.
        """
        methods = copy.deepcopy(self.methods)
        return run_spec(
            *methods,
            model=self.model,
            local=self.local,
            data=self.federated,
            dtype=dtype,
            selection=self.selection,
            topology=self.topology,
        )

    def each(self) -> Iterator[tuple[Schedule, Fleet]]:
        """Yield the pair (schedule, fleet) for each of the schedules."""
        for schedule in self.schedules:
            yield schedule, self.fleet
