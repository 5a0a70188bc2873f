"""Store the frozen weights of a network in bfloat16; its layers compute as before.

A stored weight is read when a layer needs it: in the forward pass, and again in the backward pass.
So no more than one weight at a time exists in the type of the computation. The results are those of
the same layers with rounded weights, bit by bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from raysim.models.lora import Lora, find_adapters

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


class _ViewOfWeight(NamedTuple):
    """How to view a stored weight as a tensor that the backward pass needs."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class StoredLayer(nn.Module):
    """A layer whose frozen weight is stored in bfloat16.

    layer: the layer, which loses its weight. bits: the weight's bits, int16 of its shape; as
    integers they keep their type when the network gets another one. dtype: the type of the
    computation.
    """

    def __init__(self, layer: nn.Module, bits: nn.Parameter, dtype: torch.dtype):
        super().__init__()
        del layer.weight
        self.layer, self.bits, self.dtype = layer, bits, dtype

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer if this module has none of the name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    @property
    def stored(self) -> Tensor:
        """The weight as it is stored, bfloat16."""
        return self.bits.view(torch.bfloat16)

    @property
    def weight(self) -> Tensor:
        """A copy of the weight in the type of the computation."""
        return self.stored.to(self.dtype)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Call the layer with its weight."""
        is_table = isinstance(self.layer, nn.Embedding)  # a few of its rows are read
        is_autocast = torch.is_autocast_enabled(inputs[0].device.type)
        weight = self.stored if is_table or is_autocast else self.weight
        memory = weight.untyped_storage().data_ptr()

        def pack(saved: Tensor) -> Tensor | _ViewOfWeight:
            if is_table or is_autocast or saved.untyped_storage().data_ptr() != memory:
                return saved
            return _ViewOfWeight(saved.size(), saved.stride(), int(saved.storage_offset()))

        def unpack(packed: Tensor | _ViewOfWeight) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            return self.weight.as_strided(*packed)

        self.layer.weight = weight
        try:
            with saved_tensors_hooks(pack, unpack):
                outputs: Tensor = self.layer(*inputs)
        finally:
            del self.layer.weight
        return outputs.to(self.dtype) if is_table else outputs


def store_base(model: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Replace the layers of a model whose frozen weights are stored as `lora.base` says.

    These are linear layers, convolutions and embeddings. dtype: the type of the computation. Raise
    ValueError if a weight below an adapter is not frozen, or if no layer is left.
    """
    if lora.base == "float32":
        return
    for adapter in find_adapters(model):
        weight = getattr(model.get_submodule(f"{adapter.layer}.base_layer"), "weight", None)
        if not isinstance(weight, nn.Parameter):
            raise ValueError(
                f"model.lora.base={lora.base}: a method changes the weight of the layer "
                f"'{adapter.layer}', which is therefore not frozen. Set model.lora.base=float32, "
                "or leave the method out."
            )
    stored: dict[int, nn.Parameter] = {}  # by the weight, which layers may share
    layers: dict[int, StoredLayer] = {}
    for layer in list(_frozen_layers(model)):
        weight = layer.weight
        if id(weight) not in stored:
            bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.int16)
            stored[id(weight)] = nn.Parameter(bits, requires_grad=False)
        layers[id(layer)] = StoredLayer(layer, stored[id(weight)], dtype)
    if not layers:
        raise ValueError(
            f"model.lora.base={lora.base}: the model has no linear layer, convolution or embedding "
            "with a frozen weight. Set model.lora.base=float32."
        )
    for module in list(model.modules()):
        if isinstance(module, StoredLayer):
            continue
        for name, child in list(module.named_children()):
            if id(child) in layers:
                setattr(module, name, layers[id(child)])


def _frozen_layers(model: nn.Module) -> Iterator[Any]:
    """Yield the layers in `LAYERS` whose weight is frozen and used by no other kind of module.

    A class derived from `LAYERS` may use its weight in other ways, so it does not count.
    """
    transformers = sys.modules.get("transformers.pytorch_utils")
    types = LAYERS if transformers is None else (*LAYERS, transformers.Conv1D)
    candidates: list[Any] = []
    others: set[int] = set()  # parameters that other modules use
    for module in model.modules():
        is_candidate = type(module) in types and getattr(module, "max_norm", None) is None
        if is_candidate:
            candidates.append(module)
        for name, parameter in module.named_parameters(recurse=False):
            if not is_candidate or name != "weight":
                others.add(id(parameter))
    for layer in candidates:
        if not layer.weight.requires_grad and id(layer.weight) not in others:
            yield layer
