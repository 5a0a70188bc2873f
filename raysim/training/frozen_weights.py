"""The frozen weights of a run with adapters: one copy for all processes of a node.

No process changes them. If a method changes a weight, this weight must be a trainable parameter or
a buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from raysim.models.lora import ADAPTED, ADAPTER

# The name of `base_sha256` in the header of a file with adapters.
BASE = "raysim.base_sha256"


@dataclass(frozen=True, eq=False)
class FrozenWeights:
    """The frozen parameters of a run's networks.

    arrays: maps the full name of each frozen parameter, such as "model.head.weight", to its values.
    sha256: the checksum of these weights (`base_sha256`), which is written into files of adapters.
    """

    arrays: Mapping[str, np.ndarray]
    sha256: str

    def put_into(self, networks: Mapping[str, nn.Module]) -> None:
        """Make the networks use the arrays of this object as frozen parameters, without copies.

        networks: the neural networks of the run, by name. Each frozen parameter of these networks
        must have an array.
        """
        for name, parameter in frozen_parameters(networks):
            parameter.data = torch.from_numpy(self.arrays[name])


def frozen_parameters(networks: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters that are not trained (`requires_grad` is False), each with its name.

    The name is "network.path", such as "model.head.weight".
    """
    for network, module in networks.items():
        for path, parameter in module.named_parameters():
            if not parameter.requires_grad:
                yield f"{network}.{path}", parameter


def collect_arrays(networks: Mapping[str, nn.Module], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Return all frozen (untrained) parameters of the networks as NumPy arrays, by full name.

    A full name is "network.path", such as "model.head.weight".
    dtype: the type of the returned floating-point parameters; integer parameters keep their type.
    """
    arrays = {}
    for name, parameter in frozen_parameters(networks):
        values = parameter.detach()
        if values.is_floating_point():
            values = values.to(dtype)
        arrays[name] = values.numpy()
    return arrays


def base_sha256(model: nn.Module) -> str:
    """Return a checksum of the frozen weights of a model.

    The weights of adapters are left out. The checksum does not depend on which layers have an
    adapter.
    """
    digest = hashlib.sha256()
    values = {}
    for path, parameter in model.named_parameters():
        if not parameter.requires_grad and ADAPTER not in path:
            values[path.replace(ADAPTED, ".")] = parameter.detach().float().contiguous()
    for path in sorted(values):
        digest.update(path.encode())
        digest.update(values[path].numpy().data)
    return digest.hexdigest()
