"""Add low-rank adapters (LoRA, Hu et al. 2022) with the package peft.

A layer has a frozen weight W0 [m, n] and two trained matrices, A [r, n] and B [m, r]. It uses the
weight W0 + s B A with s = alpha / r.

At first B is 0 and A random; in an embedding, A is 0 and B random. In a convolution, n is the
number of input channels times the size of a window.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import Tensor, nn

from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.errors import suggest
from raysim.primitives.extras import import_optional

BaseType: TypeAlias = Literal["float32", "bfloat16", "nf4"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Parts of the names of an adapter's factors, and of the layer that it adapts (peft).
ADAPTER, ADAPTED = ".lora_", ".base_layer."


@dataclass(frozen=True)
class Lora:
    """The settings of low-rank adapters.

    rank: the rank r. 0 means no adapters, and all parameters are trained.
    alpha: the product of an adapter's matrices is multiplied by alpha / r.
    dropout: the dropout rate of an adapter's inputs.
    layers: names, or ends of names, of the layers that get an adapter. None means every linear
    layer in front of the head or, without such layers, every convolution. None leaves out layers
    narrower than r, a language model's output layer and grouped convolutions.
    base: the storage type of frozen weights; the computation is in the type of the run. "nf4"
    stores 4 bits for each number, but embeddings in bfloat16.
    """

    rank: int = 0
    alpha: float = 16.0
    dropout: float = 0.0
    layers: list[str] | None = None
    base: BaseType = "float32"

    def __post_init__(self) -> None:
        at_least("model.lora.rank", self.rank, 0)
        above("model.lora.alpha", self.alpha, 0)
        in_range("model.lora.dropout", self.dropout, least=0, below=1)
        one_of("model.lora.base", self.base, get_args(BaseType))
        if self.base != "float32" and not self.rank:
            raise ValueError(
                f"model.lora.base={self.base}: this is the storage type of frozen weights, but "
                "model.lora.rank=0 adds no adapters, so no weight is frozen. Set model.lora.rank "
                "above 0, or model.lora.base=float32."
            )


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer.

    layer, a, b: the names of the layer and of its parameters A and B.
    scaling: the factor of the product of A and B.
    is_embedding: True for an embedding: A starts at 0, B at random values.
    """

    layer: str
    a: str
    b: str
    scaling: float
    is_embedding: bool


def find_adapters(model: nn.Module) -> tuple[Adapter, ...]:
    """Return the adapters of a model, in the order of its modules.

    The adapters were added by `with_adapters`, or by the user with peft.
    """
    tuners = sys.modules.get("peft.tuners.lora")
    if tuners is None:
        return ()  # peft was never imported, so no module is an adapter
    adapters = []
    for name, module in model.named_modules():
        if not isinstance(module, tuners.LoraLayer):
            continue
        for adapter, scaling in module.scaling.items():
            if adapter in module.lora_embedding_A:
                a, b = f"lora_embedding_A.{adapter}", f"lora_embedding_B.{adapter}"
            else:
                a, b = f"lora_A.{adapter}.weight", f"lora_B.{adapter}.weight"
            is_embedding = adapter in module.lora_embedding_A
            adapters.append(
                Adapter(name, f"{name}.{a}", f"{name}.{b}", float(scaling), is_embedding)
            )
    return tuple(adapters)


def with_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    """Add adapters to the layers in front of a model's head; return the model.

    With rank 0, the model does not change.
    Only the adapters and a separate head are trained. All other parameters are frozen and do not
    travel between server and clients.
    Raise ValueError if peft is missing, or a layer cannot have an adapter of this rank.
    """
    if lora.rank == 0:
        return model
    peft = import_optional("peft", f"model.lora.rank={lora.rank}")
    is_split = getattr(model, "is_split", True)
    inner = model.get_submodule("extractor" if is_split else "net")
    place = " in front of its head" if is_split else ""
    choose = _usual_layers if lora.layers is None else _named_layers
    names = choose(inner, lora, place)
    # A pattern of full names: peft would take a list as ends of names.
    pattern = "|".join(re.escape(name) for name in names)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=pattern
    )
    try:
        with warnings.catch_warnings():
            # peft transposes the factors of layers of GPT-2, and says so
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            peft.inject_adapter_in_model(config, inner)
    except ValueError as error:
        raise ValueError(
            f"model.lora.layers={lora.layers}: peft cannot add adapters ({error}). Name other "
            "layers."
        ) from error
    return model


def _linear_types() -> tuple[type[nn.Module], ...]:
    """Return the classes of linear layers, among them Conv1D of transformers (for GPT-2)."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    return (nn.Linear,) if transformers is None else (nn.Linear, transformers.Conv1D)


def _usual_layers(inner: nn.Module, lora: Lora, place: str) -> list[str]:
    """Return the names of the layers that get an adapter if `model.lora.layers` is null.

    inner: the model without its separate head, if it has one.
    place: words for the error, such as " in front of its head".
    """
    output_layers = _output_layers(inner)
    modules = []
    for name, module in inner.named_modules():
        if name and not any(module is layer for layer in output_layers):
            modules.append((name, module))
    linear = [name for name, module in modules if isinstance(module, _linear_types())]
    convolutions = [
        name for name, module in modules if isinstance(module, CONVOLUTIONS) and module.groups == 1
    ]
    candidates = linear or convolutions
    if not candidates:
        raise ValueError(
            f"model.lora.rank={lora.rank}: the model has no linear layer or ungrouped "
            f"convolution{place}. By default, only such layers get adapters. Set "
            "model.lora.rank=0, or name layers of another type, such as embeddings, in "
            "model.lora.layers."
        )
    widths = {name: _width(inner.get_submodule(name)) for name in candidates}
    names = [name for name in candidates if widths[name] >= lora.rank]
    if not names:
        raise ValueError(
            f"model.lora.rank={lora.rank}: none of the layers that get adapters by default has "
            f"that many inputs and outputs. Set it to at most {max(widths.values())}, or name "
            "other layers in model.lora.layers."
        )
    return names


def _output_layers(inner: nn.Module) -> list[object]:
    """Return the layers that turn features into logits of tokens.

    They often share the weight of the token embedding.
    """
    finders = [getattr(module, "get_output_embeddings", None) for module in inner.modules()]
    return [find() for find in finders if callable(find)]


def _named_layers(inner: nn.Module, lora: Lora, place: str) -> list[str]:
    """Return the full names of the layers that `model.lora.layers` selects.

    An entry selects all layers whose name is the entry, or ends with "." and the entry.
    inner: the model, without a separate head.
    place: words for the error that say where the layers must be, such as " in front of its head".
    Raises ValueError if an entry selects no layer, if there is no entry, or if a layer has fewer
    inputs or outputs than the rank.
    """
    all_names = [name for name, _ in inner.named_modules() if name]
    names: list[str] = []
    for layer in lora.layers or ():
        matches = [name for name in all_names if name == layer or name.endswith(f".{layer}")]
        if not matches:
            with_matrix = [
                name for name in all_names if _width(inner.get_submodule(name)) < sys.maxsize
            ]
            raise ValueError(
                f"model.lora.layers={lora.layers}: the model has no layer '{layer}'{place}. "
                f"{_advice(layer, with_matrix)}"
            )
        names += matches
    if not names:
        raise ValueError(
            "model.lora.layers=[] names no layer. Name one, or set model.lora.layers=null."
        )
    for name in names:
        width = _width(inner.get_submodule(name))
        if width is not None and width < lora.rank:
            raise ValueError(
                f"model.lora.rank={lora.rank}: the layer '{name}' has only {width} inputs or "
                f"outputs. Set it to at most {width}, or leave the layer out of model.lora.layers."
            )
    return list(dict.fromkeys(names))


def _advice(layer: str, names: Iterable[str]) -> str:
    ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
    return f"Name another one: {suggest(layer, sorted(ends))}."


def _width(layer: nn.Module) -> int:
    """Return the largest useful rank of an adapter: the smaller dimension of the layer's weight."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        return sys.maxsize  # unknown here; peft checks the rank
    return min(len(weight), weight[0].numel())
