"""FedBN: FedAvg in which every client keeps its own normalisation layers.

Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (ICLR
2021), Algorithm 1. ``scope`` also gives SiloBN (Andreux et al. 2020: only the running statistics stay), its converse,
and FedAvg.

Choices where the sources differ or are silent
- A layer is a normalisation layer by its module type, not because "bn" occurs in its name: the name rule of the
  released code misses a ResNet's ``downsample.1`` and catches ``bn1_projection``. name_rule="bn" replicates it.
- Models are weighed as the run says; the released code weighs uniformly (its clients are of equal size), which is
  weighting=uniform of the run.
- Counters of batches are personal with the statistics; where they are shared they take the maximum over the clients.
- A client that never trained has the initial model's layers, as in the released code. ``reestimate`` gives it
  statistics of its own: those of its training samples under the shared model, from one pass in train mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from raysim.api.hooked_method import HookedMethod
from raysim.primitives.checks import one_of

if TYPE_CHECKING:
    from raysim.api.context import Own
    from raysim.api.hooked_method import OldSetup as Setup

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
AFFINE = ("weight", "bias")
SCOPES = {"all": AFFINE + STATISTICS, "statistics": STATISTICS, "affine": AFFINE, "none": ()}


def split_parameter_names(*, names: list[str], norm_modules: list[str], scope: str = "all") -> dict[str, list[str]]:
    """Which entries of a model travel: {"shared": [...], "personal": [...]}, each in the order of ``names``.

    Personal is what belongs to one of ``norm_modules`` (the text before the last dot) and to the ``scope``: "all",
    "statistics", "affine" or "none". Raises ValueError for another scope.
    """
    one_of("method.fedbn.scope", scope, SCOPES)
    layers, entries = set(norm_modules), SCOPES[scope]
    split: dict[str, list[str]] = {"shared": [], "personal": []}
    for name in names:
        layer, _, entry = name.rpartition(".")
        split["personal" if layer in layers and entry in entries else "shared"].append(name)
    return split


def reestimate_statistics(
    *, model: nn.Module, layers: Sequence[nn.Module], batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Running statistics of ``layers``, in place: the mean of what the batches show them, weighed by their sizes.

    These layers normalise with each batch meanwhile, the others as they did; modes and momenta are as before
    afterwards. Batches of one sample have no variance and are left out.
    """
    before = [(layer, layer.training, layer.momentum) for layer in layers]
    seen = 0
    try:
        with torch.no_grad():
            for inputs, _ in batches:
                if len(inputs) < 2:
                    continue
                seen += len(inputs)
                for layer in layers:
                    layer.training, layer.momentum = True, len(inputs) / seen  # type: ignore[assignment]
                model(inputs)
    finally:
        for layer, training, momentum in before:
            layer.training, layer.momentum = training, momentum


BATCHNORM = (nn.modules.batchnorm._BatchNorm,)
NORMS = (*BATCHNORM, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


class FedBN(HookedMethod):
    """layers: "batch" keeps BatchNorm on the client, "all" every normalisation layer of the model.

    name_rule: keep what has this text in its name instead. reestimate: see above; a pass for each such client in every
    evaluation.
    """

    name = "fedbn"
    paper = "Li et al., ICLR 2021"

    def __init__(
        self,
        scope: Literal["all", "statistics", "affine", "none"] = "all",
        layers: Literal["batch", "all"] = "batch",
        name_rule: str | None = None,
        reestimate: bool = False,
    ):
        split_parameter_names(names=[], norm_modules=[], scope=scope)
        if name_rule == "":
            raise ValueError("method.fedbn.name_rule is empty, which is in every name: set it to a text such as bn")
        if name_rule is not None and layers != "batch":
            raise ValueError(
                f"method.fedbn.name_rule={name_rule} takes the place of layers={layers}: set layers=batch or "
                "name_rule=null"
            )
        if reestimate and scope not in ("all", "statistics"):
            raise ValueError(
                f"method.fedbn.reestimate=true needs statistics of the client's own, which scope={scope} shares: set "
                "scope=all or scope=statistics"
            )
        self.scope, self.layers, self.name_rule, self.reestimate = scope, layers, name_rule, reestimate

    @property
    def idle(self) -> frozenset[str]:
        """Re-estimation, unless asked for; with scope "none" everything."""
        shared = {"personal"} if self.scope == "none" else set()
        return frozenset(shared if self.reestimate else {*shared, "personalise"})

    def personal(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """Entries of the model's normalisation layers, by the layers' type or by their names."""
        model, kinds = networks["model"], BATCHNORM if self.layers == "batch" else NORMS
        names = [name for name, tensor in (*model.named_parameters(), *model.named_buffers())]
        if self.name_rule is not None:
            personal = [name for name in names if self.name_rule in name and self._in_scope(name)]
        else:
            norms = [name for name, module in model.named_modules() if isinstance(module, kinds)]
            personal = split_parameter_names(names=names, norm_modules=norms, scope=self.scope)["personal"]
        return [f"model.{name}" for name in personal]

    def _in_scope(self, name: str) -> bool:
        return self.scope == "all" or name.rpartition(".")[2] in SCOPES[self.scope]

    def check(self, setup: Setup) -> Sequence[str]:
        """Without such layers it is FedAvg."""
        if self.scope == "none" or self.personal(setup.networks):
            return ()
        if self.name_rule is not None:
            return (
                f"method 'fedbn' finds no {self.name_rule!r} in the names of the model and runs as FedAvg: "
                "set method.fedbn.name_rule=null",
            )
        return (
            "method 'fedbn' finds no BatchNorm in the model and runs as FedAvg: choose a model that has some, such as "
            "model=resnet18, or model=small_cnn with model.norm=batch",
        )

    def personalise(self, own: Own) -> None:
        """Statistics of its own for a client that never trained."""
        if own.trained:
            return
        stays, model = set(self.personal(own.vector.networks)), own.vector.networks["model"]
        layers = [module for path, module in model.named_modules() if f"model.{path}.running_var" in stays]
        reestimate_statistics(model=model, layers=layers, batches=own.data())
