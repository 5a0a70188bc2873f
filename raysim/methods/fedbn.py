"""FedBN: FedAvg in which every client keeps its own normalisation layers.

Source: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization"
(ICLR 2021), Algorithm 1. scope="statistics" is SiloBN (Andreux et al. 2020): only the running
statistics stay on the client.

Departures from the paper's released code
- Normalisation layers are found by the type of the module. The released code takes all tensors
  whose name contains "bn", as name_rule="bn" does, and so misses the ``downsample.1`` of a ResNet.
- The released code weights all clients equally, as weighting=uniform does.
- BatchNorm's counters of batches stay on the client if the running statistics stay there.
- If a client never trained, the tensors that it keeps have the initial values, as in the released
  code. With ``reestimate``, the client's running statistics are computed from the client's samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from raysim.api.method import Method
from raysim.primitives.checks import one_of

if TYPE_CHECKING:
    from raysim.api.local_job import PersonalModel
    from raysim.api.setup import Setup

Scope: TypeAlias = Literal["all", "statistics", "affine", "none"]
KeptLayers: TypeAlias = Literal["batch", "all"]

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
AFFINE = ("weight", "bias")
SCOPES = {"all": AFFINE + STATISTICS, "statistics": STATISTICS, "affine": AFFINE, "none": ()}


def split_parameter_names(
    *, names: list[str], norm_modules: list[str], scope: str = "all"
) -> dict[str, list[str]]:
    """Split tensor names into those that are "shared" and those that are "personal".

    names: the names of all tensors, such as "bn1.weight".
    norm_modules: the names of the normalisation layers, such as "bn1".
    scope: which tensors of these layers are personal. "statistics" selects the running statistics,
    "affine" the scales and offsets, "all" both, and "none" nothing.
    Raises ValueError for another scope.
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
    """Replace BatchNorm's running statistics by the mean of the batches' statistics.

    Each batch has its size as its weight. Batches of one sample are left out. If no batch has more
    samples, the statistics do not change.
    model: the network, which is run on the batches.
    layers: the BatchNorm layers whose statistics change. They are in train mode meanwhile; the mode
    of all other layers does not change.
    batches: the inputs and labels of each batch.
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
                    layer.training = True
                    layer.momentum = len(inputs) / seen  # type: ignore[assignment]
                model(inputs)
    finally:
        for layer, training, momentum in before:
            layer.training, layer.momentum = training, momentum


BATCHNORM = (nn.modules.batchnorm._BatchNorm,)
NORMS = (*BATCHNORM, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)


def batchnorm_names(network: str, module: nn.Module) -> list[str]:
    """Return the full names of all parameters and buffers of a network's BatchNorm layers.

    network: the name of the network, with which the full names begin.
    """
    names = []
    for path, layer in module.named_modules():
        if isinstance(layer, BATCHNORM):
            names += [f"{network}.{path}.{name}" for name in layer.state_dict()]
    return names


class FedBN(Method):
    """FedAvg in which every client keeps its own normalisation layers.

    layers: "batch" keeps BatchNorm layers on the client, "all" every normalisation layer.
    scope: the tensors of these layers that stay on the client. "statistics" keeps the running
    statistics, "affine" the scales and offsets, "all" both, and "none" nothing.
    name_rule: None finds the layers by their type. A text selects, in place of `layers`, the
    tensors whose name contains the text.
    reestimate: the BatchNorm statistics with which a client is scored before its first job. True
    computes them from the client's samples in every evaluation. False takes the initial model's
    statistics.
    """

    name = "fedbn"
    paper = "Li et al., ICLR 2021"

    def __init__(
        self,
        scope: Scope = "all",
        layers: KeptLayers = "batch",
        name_rule: str | None = None,
        reestimate: bool = False,
    ):
        split_parameter_names(names=[], norm_modules=[], scope=scope)
        if name_rule == "":
            raise ValueError(
                "method.fedbn.name_rule is empty, and would select every tensor. Set it to a text "
                "such as bn."
            )
        if name_rule is not None and layers != "batch":
            raise ValueError(
                f"method.fedbn.name_rule={name_rule} and method.fedbn.layers={layers} both select "
                "layers. Set method.fedbn.layers=batch or method.fedbn.name_rule=null."
            )
        if reestimate and scope not in ("all", "statistics"):
            raise ValueError(
                "method.fedbn.reestimate=true needs BatchNorm statistics that stay on the clients, "
                f"but with method.fedbn.scope={scope} clients send them to the server. Set "
                "method.fedbn.scope=all or method.fedbn.scope=statistics."
            )
        self.scope = scope
        self.layers = one_of("method.fedbn.layers", layers, get_args(KeptLayers))
        self.name_rule, self.reestimate = name_rule, reestimate

    def setup(self, run: Setup) -> None:
        """Declare tensors of normalisation layers as personal; warn if none is selected."""
        if not self.reestimate:
            run.skip("personalise")
        if self.scope == "none":
            return
        run.private_parameters(self._private_names)
        if self._private_names(run.networks):
            return
        if self.name_rule is not None:
            run.warn(
                f"method.fedbn.name_rule={self.name_rule}: no name of a tensor contains this text, "
                f"among the tensors that method.fedbn.scope={self.scope} selects. So the run "
                "equals FedAvg. Set method.fedbn.name_rule=null to find BatchNorm layers by their "
                "type."
            )
        else:
            kind = "BatchNorm" if self.layers == "batch" else "normalisation layer"
            run.warn(
                f"method 'fedbn' finds no {kind} among the tensors that "
                f"method.fedbn.scope={self.scope} selects, so the run equals FedAvg. Choose a "
                "model with BatchNorm, such as model=small_cnn model.norm=batch."
            )

    def _private_names(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """Return the names of the tensors that stay on the client.

        networks: the networks of the run, by name; only "model" is searched for normalisation
        layers.
        """
        model = networks["model"]
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        if self.name_rule is not None:
            private = [name for name in names if self.name_rule in name and self._in_scope(name)]
        else:
            kinds = BATCHNORM if self.layers == "batch" else NORMS
            norms = [path for path, module in model.named_modules() if isinstance(module, kinds)]
            split = split_parameter_names(names=names, norm_modules=norms, scope=self.scope)
            private = split["personal"]
        return [f"model.{name}" for name in private]

    def _in_scope(self, name: str) -> bool:
        return self.scope == "all" or name.rpartition(".")[2] in SCOPES[self.scope]

    def personalise(self, client: PersonalModel) -> None:
        """Compute BatchNorm statistics from the samples of a client that never trained.

        The computed statistics replace the initial ones in the client's model before it is scored.
        The model of a client that has trained does not change.
        """
        if client.trained:
            return
        networks = client.vector.networks
        private = set(self._private_names(networks))
        layers = [
            module
            for path, module in networks["model"].named_modules()
            if f"model.{path}.running_var" in private
        ]
        reestimate_statistics(model=networks["model"], layers=layers, batches=client.data())
