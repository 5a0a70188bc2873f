"""Store the frozen weights of a network in bfloat16 or in 4 bits, to save memory.

A layer converts its weight in each pass, so only one converted weight exists at a time.

The 4-bit type is NF4 of Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (NeurIPS
2023). Each block of 64 entries has a scale: the largest absolute value. An entry is stored as one
of 16 levels, which are quantiles of the normal distribution. Its value is the scale times the
level.

Departures from the paper
- Scales are stored in float32, not in 8 bits (double quantization).
- Embeddings, and weights that a layer shares with an embedding, are stored in bfloat16.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from raysim.models.lora import Lora, find_adapters

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
NF4_BLOCK = 64  # entries that share a scale
# The paper's Appendix E.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class _ViewOfWeight(NamedTuple):
    """The arguments of `Tensor.as_strided` that make a layer's weight from the stored values."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class HalfWeight(nn.Module):
    """A frozen weight that is stored in bfloat16.

    Its parameter has the weight's bits as int16, in the weight's shape. Integers keep their type if
    the network is converted to another type.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.int16)
        self.bits = nn.Parameter(bits, requires_grad=False)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in the type `dtype`; dtype=torch.bfloat16 makes no copy."""
        return self.bits.view(torch.bfloat16).to(dtype)


class FourBitWeight(nn.Module):
    """A frozen weight with 4 bits for each entry, and a float32 scale for each 64 entries.

    The types of the two parameters stay if the network is converted to another type.

    - `codes`, uint8 [blocks, 32]: each byte has the codes of two entries.
    - `scales`, int32 [blocks]: the bits of the scales.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        self.shape = weight.shape
        values = weight.detach().float().flatten()
        blocks = F.pad(values, (0, -len(values) % NF4_BLOCK)).view(-1, NF4_BLOCK)
        scales = blocks.abs().amax(1)
        divisors = torch.where(scales > 0, scales, 1.0)
        levels = torch.tensor(NF4_LEVELS, device=weight.device)
        bounds = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(blocks / divisors[:, None], bounds, out_int32=True)
        pairs = codes[:, ::2] + 16 * codes[:, 1::2]
        self.codes = nn.Parameter(pairs.to(torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(scales.view(torch.int32), requires_grad=False)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return a copy of the weight in the type `dtype`."""
        # 8 bytes at a time are copied from the table: three times as fast as F.embedding.
        pairs = _nf4_pairs(self.codes.device).index_select(0, self.codes.flatten().int())
        blocks = pairs.view(torch.float32).view(-1, NF4_BLOCK)
        blocks *= self.scales.view(torch.float32)[:, None]
        return blocks.flatten()[: self.shape.numel()].view(self.shape).to(dtype)


@cache
def _nf4_pairs(device: torch.device) -> Tensor:
    """Return a table that decodes a byte with two 4-bit codes: int64 [256].

    Each entry has the bits of two float32 numbers: the NF4 level of the byte's lower 4 bits, then
    the level of the byte's upper 4 bits.
    """
    levels = torch.tensor(NF4_LEVELS, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([levels[byte % 16], levels[byte // 16]], 1).view(torch.int64).flatten()


class StoredLayer(nn.Module):
    """A layer whose frozen weight is stored in fewer bits.

    layer: the layer, which loses its weight.
    stored: the module that stores the weight. Layers that share a weight share such a module.
    dtype: the type of the computation.
    """

    def __init__(self, layer: nn.Module, stored: HalfWeight | FourBitWeight, dtype: torch.dtype):
        super().__init__()
        del layer.weight
        self.layer, self.stored, self.dtype = layer, stored, dtype

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped layer if `StoredLayer` itself does not have it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    @property
    def weight(self) -> Tensor:
        """The weight in the type of the computation; do not change it in place."""
        weight: Tensor = self.stored.decode(self.dtype)
        return weight

    def forward(self, *inputs: Tensor) -> Tensor:
        """Decode the weight, and return the layer's outputs for the inputs."""
        is_table = isinstance(self.layer, nn.Embedding)  # a few of its rows are read
        is_autocast = torch.is_autocast_enabled(inputs[0].device.type)
        dtype = torch.bfloat16 if is_table or is_autocast else self.dtype
        weight = self.stored.decode(dtype)
        memory = weight.untyped_storage().data_ptr()

        def pack(saved: Tensor) -> Tensor | _ViewOfWeight:
            if saved.untyped_storage().data_ptr() != memory:
                return saved
            return _ViewOfWeight(saved.size(), saved.stride(), int(saved.storage_offset()))

        def unpack(packed: Tensor | _ViewOfWeight) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            return self.stored.decode(dtype).as_strided(*packed)

        self.layer.weight = weight
        try:
            with saved_tensors_hooks(pack, unpack):
                outputs: Tensor = self.layer(*inputs)
        finally:
            del self.layer.weight
        return outputs.to(self.dtype) if is_table else outputs


def store_base(model: nn.Module, lora: Lora, dtype: torch.dtype) -> None:
    """Store the frozen weights of a model in the type `lora.base`; change the model in place.

    With "nf4", embeddings are stored in bfloat16. With "float32" nothing changes. Otherwise, raise
    ValueError if the model has no weight to store. Also raise ValueError if the weight of a layer
    with an adapter is not a parameter.
    dtype: the type of the computation.
    """
    if lora.base == "float32":
        return
    for adapter in find_adapters(model):
        weight = getattr(model.get_submodule(f"{adapter.layer}.base_layer"), "weight", None)
        if not isinstance(weight, nn.Parameter):
            raise ValueError(
                f"model.lora.base={lora.base} is only for frozen weights, but a method of this run "
                f"changes the weight of the layer '{adapter.layer}'. (Of raysim's methods, only "
                "'flora' does this.) Set model.lora.base=float32, or remove this method."
            )
    frozen = list(_frozen_layers(model))
    tables = {id(layer.weight) for layer in frozen if isinstance(layer, nn.Embedding)}
    stored: dict[int, HalfWeight | FourBitWeight] = {}  # by the weight, which layers may share
    layers: dict[int, StoredLayer] = {}
    for layer in frozen:
        key = id(layer.weight)
        if key not in stored:
            is_half = lora.base == "bfloat16" or key in tables
            stored[key] = HalfWeight(layer.weight) if is_half else FourBitWeight(layer.weight)
        layers[id(layer)] = StoredLayer(layer, stored[key], dtype)
    if not layers:
        raise ValueError(
            f"model.lora.base={lora.base}: this type is only for frozen weights of linear layers, "
            "convolutions and embeddings, and the model has no such weight. Set "
            "model.lora.base=float32."
        )
    for module in list(model.modules()):
        if isinstance(module, StoredLayer):
            continue
        for name, child in list(module.named_children()):
            if id(child) in layers:
                module.register_module(name, layers[id(child)])


def _frozen_layers(model: nn.Module) -> Iterator[Any]:
    """Yield the linear, convolution and embedding layers whose weight is frozen.

    Leave out instances of subclasses, which may use the weight differently, and embeddings with
    `max_norm`, which change the weight. Also leave out a layer that shares the weight with a module
    of another type.
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
