"""Low-rank adapters (LoRA, Hu et al. 2022) by peft. Only they and the head are trained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from raysim.models.classifier import Classifier
from raysim.primitives.checks import above, at_least, in_range
from raysim.primitives.extras import import_optional


@dataclass(frozen=True)
class Lora:
    """The settings of low-rank adapters.

    rank: the rank of the adapters; 0 means no adapters, and all parameters are trained.
    alpha: the product of an adapter's matrices is scaled by alpha / rank.
    layers: names, or ends of names, of the layers that get an adapter; None takes every linear
    layer in front of the head.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    layers: list[str] | None = None

    def __post_init__(self) -> None:
        at_least("model.lora.rank", self.rank, 0)
        above("model.lora.alpha", self.alpha, 0)
        in_range("model.lora.dropout", self.dropout, least=0, below=1)


def with_adapters(model: Classifier, lora: Lora) -> Classifier:
    """Add adapters to the model's extractor and freeze the rest of it; return the model.

    A model that is not split gets adapters everywhere. Frozen parameters are built from the seed,
    or from a file, in every process. Raise ValueError without peft, or if no layer can have an
    adapter.
    """
    if lora.rank == 0:
        return model
    peft = import_optional("peft", f"model.lora.rank={lora.rank}")
    inner = model.get_submodule("extractor" if model.is_split else "net")
    linear_layers = [
        name for name, module in inner.named_modules() if isinstance(module, nn.Linear) and name
    ]
    layers = lora.layers or linear_layers
    if not layers:
        raise ValueError(
            f"model.lora.rank={lora.rank} finds no linear layer in front of the head. Set it to 0."
        )
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=layers
    )
    try:
        peft.inject_adapter_in_model(config, inner)
    except ValueError as error:
        raise ValueError(f"model.lora.layers={lora.layers}: {error}") from error
    return model
