"""FedBN: FedAvg in which every client keeps its own normalisation layers.

Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (ICLR
2021), Algorithm 1. ``scope`` also gives SiloBN (Andreux et al. 2020: only the running statistics stay), its converse,
and FedAvg.

Choices where the sources differ or are silent
- A layer is a normalisation layer by its module type, not because "bn" occurs in its name: the name rule of the
  released code misses a ResNet's ``downsample.1`` and catches ``bn1_projection``.
- Models are weighed as the run says; the released code weighs uniformly (its clients are of equal size).
- Counters of batches are personal with the statistics; where they are shared they take the maximum over the clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from torch import nn

from raysim.methods.method import Method, Task

if TYPE_CHECKING:
    from raysim.client import Local

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
AFFINE = ("weight", "bias")
SCOPES = {"all": AFFINE + STATISTICS, "statistics": STATISTICS, "affine": AFFINE, "none": ()}


def split_parameter_names(*, names: list[str], norm_modules: list[str], scope: str = "all") -> dict[str, list[str]]:
    """Which entries of a model travel: {"shared": [...], "personal": [...]}, each in the order of ``names``.

    Personal is what belongs to one of ``norm_modules`` (the text before the last dot) and to the ``scope``: "all",
    "statistics", "affine" or "none". Raises ValueError for another scope.
    """
    if scope not in SCOPES:
        nearest = get_close_matches(scope, SCOPES, n=1, cutoff=0.0)[0]
        raise ValueError(f"method.fedbn.scope={scope!r} is none of {', '.join(SCOPES)}; did you mean {nearest!r}?")
    layers, entries = set(norm_modules), SCOPES[scope]
    split: dict[str, list[str]] = {"shared": [], "personal": []}
    for name in names:
        layer, _, entry = name.rpartition(".")
        split["personal" if layer in layers and entry in entries else "shared"].append(name)
    return split


_BATCH = (nn.modules.batchnorm._BatchNorm,)
_ALL = (*_BATCH, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


class FedBN(Method):
    """layers: "batch" keeps BatchNorm on the client, "all" every normalisation layer of the model."""

    name = "fedbn"
    paper = "Li et al., ICLR 2021"

    def __init__(
        self,
        scope: Literal["all", "statistics", "affine", "none"] = "all",
        layers: Literal["batch", "all"] = "batch",
    ):
        split_parameter_names(names=[], norm_modules=[], scope=scope)
        self.scope, self.layers = scope, layers

    def personal(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """Entries of the model's normalisation layers, by the layers' type."""
        model, kinds = networks["model"], _BATCH if self.layers == "batch" else _ALL
        norms = [f"model.{name}" for name, module in model.named_modules() if isinstance(module, kinds)]
        names = [f"model.{name}" for name, tensor in (*model.named_parameters(), *model.named_buffers())]
        return split_parameter_names(names=names, norm_modules=norms, scope=self.scope)["personal"]

    def check(self, task: Task, local: Local, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """Without such layers it is FedAvg."""
        if self.scope != "none" and not self.personal(networks):
            return ("method 'fedbn' finds no BatchNorm in the model and runs as FedAvg: choose a model.norm=batch",)
        return ()
