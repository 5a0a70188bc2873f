"""Make copies of a run's networks, and load values into them. The copies are not trained.

A method uses such a copy, for example, to compute the outputs of the received model in each step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from raysim.api.context import Context
from raysim.training.client_vector import load_vector
from raysim.training.frozen_weights import frozen_parameters
from raysim.vectors.layout import Vector


class FrozenNetworks:
    """Named copies of a run's networks, in eval mode and without gradients, for methods.

    Each job loads values into a copy, for example those of the received model.

    vector: the vector of the networks that are trained.
    """

    def __init__(self, vector: Vector):
        self._trained = vector
        self._vectors: dict[str, Vector] = {}
        self._owners: dict[str, Context] = {}  # by copy: the job for which it was loaded last

    def networks(self, ctx: Context, name: str, values: Tensor | None) -> Mapping[str, nn.Module]:
        """Return a frozen copy of all neural networks of the run, by network name.

        name: the name of the copy, which the method has chosen.
        values: [layout.total], loaded once per job. None loads the model from which training
        started.
        """
        if self._owners.get(name) is not ctx:
            # Tensors that are made in inference mode cannot be changed outside of it.
            with torch.inference_mode(False):
                self._load(ctx, name, values)
        return self._vectors[name].networks

    def vector(self, name: str) -> Vector:
        """Return the vector of a frozen copy of the networks, with the last loaded values.

        name: the name that a method has chosen for the copy. A copy with a new name is made.
        """
        if name not in self._vectors:
            trained = self._trained
            # Weights that nobody trains are the same in all copies.
            same = {id(p): p for _, p in frozen_parameters(trained.networks)}
            networks = {}
            for key, network in trained.networks.items():
                networks[key] = copy.deepcopy(network, dict(same)).eval()
            vector = Vector(networks, trained.layout, trained.data.device, trained.data.dtype)
            for parameter in vector.parameters.values():
                parameter.requires_grad_(False)
            self._vectors[name] = vector
        return self._vectors[name]

    def _load(self, ctx: Context, name: str, values: Tensor | None) -> None:
        vector = self.vector(name)
        if values is None:
            counters = self._trained.counters[: self._trained.layout.shared_counters]
            load_vector(vector, ctx.base, counters, ctx.start)
        else:
            vector.data.copy_(values)
        self._owners[name] = ctx
