"""Test frozen weights that are stored with fewer bits.

The outputs equal those of rounded weights. No decoded copy of a weight is kept.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from tiny_runs import run_spec
from torch import Tensor, nn

from raysim.methods.flora import FLoRA
from raysim.models import Gpt, Lora, Mlp, SmallCnn, Transformer
from raysim.models.stored_weights import (
    NF4_LEVELS,
    FourBitWeight,
    HalfWeight,
    StoredLayer,
    store_base,
)
from raysim.primitives.kinds import Tokens
from raysim.training.run_spec import declare_run

RANK = 2


def stored(layer: Any, kind: type[HalfWeight | FourBitWeight] = HalfWeight) -> StoredLayer:
    return StoredLayer(copy.deepcopy(layer), kind(layer.weight), torch.float32)


def round_to_four_bits(weight: Tensor) -> Tensor:
    """Round each entry to the nearest value that NF4 can store.

    In a block of 64 entries, NF4 can store 16 values: its levels from -1 to 1, times the largest
    absolute entry of the block.
    """
    levels = torch.tensor(NF4_LEVELS)
    blocks = []
    for block in weight.detach().flatten().split(64):
        distances = (block[:, None] - block.abs().max() * levels).abs()
        blocks.append(levels[distances.argmin(1)] * block.abs().max())
    return torch.cat(blocks).view(weight.shape)


def rounded(layer: Any, kind: type[HalfWeight | FourBitWeight] = HalfWeight) -> Any:
    weight = layer.weight.detach()
    is_half = kind is HalfWeight
    layer.weight.data = weight.bfloat16().float() if is_half else round_to_four_bits(weight)
    return layer


def outputs_and_gradient(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    start = inputs.clone().requires_grad_()
    outputs = layer(start)
    outputs.sin().sum().backward()
    assert start.grad is not None
    return outputs.detach(), start.grad


@pytest.mark.parametrize("kind", [HalfWeight, FourBitWeight])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(7, 5), (3, 7)),
        (nn.Linear(70, 5), (3, 70)),
        (nn.Linear(7, 5, bias=False), (2, 3, 7)),
        (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6)),
        (nn.Conv1d(2, 4, 3, groups=2), (2, 2, 9)),
    ],
    ids=str,
)
def test_layer_stored_in_few_bits_equals_a_layer_with_rounded_weights(
    layer: Any, shape: tuple[int, ...], kind: type[HalfWeight | FourBitWeight]
) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layer = copy.deepcopy(layer).requires_grad_(False)
    kept = stored(layer, kind)
    expected = outputs_and_gradient(rounded(layer, kind), inputs)
    for value, other in zip(outputs_and_gradient(kept, inputs), expected, strict=True):
        assert torch.equal(value, other)
    assert torch.equal(kept.weight, layer.weight)
    assert "weight" not in vars(kept.layer)  # nothing is left of the decoded weight


def test_four_bit_levels_are_quantiles_of_the_normal_distribution() -> None:
    """Compare raysim's levels of NF4 with those of the released code.

    They are quantiles, divided by the largest one. Its probability is 1 - (1/32 + 1/30) / 2. In the
    paper's Equation 4, the largest level would be infinite.
    """
    most = 1 - (1 / 32 + 1 / 30) / 2
    above = torch.special.ndtri(torch.linspace(most, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(most, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([below, torch.zeros(1), above]).sort().values / above.max()
    torch.testing.assert_close(levels, torch.tensor(NF4_LEVELS).double(), atol=2e-7, rtol=0)


@pytest.mark.parametrize("size", [1, 63, 64, 129])
def test_four_bit_weight_needs_36_bytes_for_64_values(size: int) -> None:
    weight = FourBitWeight(torch.zeros(size))
    blocks = -(-size // 64)
    assert sum(p.numel() * p.element_size() for p in weight.parameters()) == 36 * blocks
    assert torch.equal(weight.decode(torch.float64), torch.zeros(size, dtype=torch.float64))


def test_embedding_stored_in_few_bits_returns_rounded_rows() -> None:
    layer = nn.Embedding(11, 4).requires_grad_(False)
    tokens = torch.tensor([[1, 10], [0, 1]])
    kept = stored(layer)
    assert torch.equal(kept(tokens), rounded(layer)(tokens))
    assert kept(tokens).dtype == torch.float32


@pytest.mark.parametrize("kind", [HalfWeight, FourBitWeight])
def test_backward_pass_decodes_the_stored_weight_again(
    kind: type[HalfWeight | FourBitWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    usual = kind.decode

    def decode(self: Any, dtype: torch.dtype) -> Tensor:
        reads.append(dtype)
        return usual(self, dtype)

    monkeypatch.setattr(kind, "decode", decode)
    outputs = stored(nn.Linear(7, 5), kind)(torch.randn(3, 7, requires_grad=True))
    assert len(reads) == 1
    outputs.sum().backward()
    assert len(reads) == 2


@pytest.mark.parametrize("kind", [HalfWeight, FourBitWeight])
def test_layer_stored_in_few_bits_equals_a_layer_with_rounded_weights_if_both_use_autocast(
    kind: type[HalfWeight | FourBitWeight],
) -> None:
    layer, inputs = nn.Linear(7, 5).requires_grad_(False), torch.randn(3, 7)
    kept = stored(layer, kind)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kept(inputs), rounded(layer, kind)(inputs))


def test_decoding_a_bfloat16_weight_to_bfloat16_copies_nothing() -> None:
    weight = HalfWeight(torch.randn(3, 4))
    assert weight.decode(torch.bfloat16).data_ptr() == weight.bits.data_ptr()


@pytest.mark.parametrize("base", ["bfloat16", "nf4"])
@pytest.mark.parametrize(
    ("recipe", "shape", "tokens", "count", "tables"),
    [
        (Mlp((6,)), (1, 8, 8), None, 1, 0),
        (SmallCnn(), (1, 8, 8), None, 3, 0),
        (Gpt(width=8, heads=2, blocks=1), (5,), Tokens(11), 5, 1),
        (Transformer(width=8, blocks=1), (5,), Tokens(11), 5, 1),
    ],
    ids=str,
)
def test_models_with_adapters_store_rounded_base_weights(
    recipe: Any,
    shape: tuple[int, ...],
    tokens: Tokens | None,
    count: int,
    tables: int,
    base: Literal["bfloat16", "nf4"],
) -> None:
    lora = Lora(RANK, base=base)
    model = replace(recipe, lora=lora).build(shape, 11, 0, tokens)
    inputs = torch.randn(2, *shape) if tokens is None else torch.randint(11, (2, *shape))
    expected = copy.deepcopy(model)
    for parameter in expected.parameters():
        if not parameter.requires_grad and parameter.ndim > 1:
            is_half = base == "bfloat16"
            data = parameter.data
            parameter.data = data.bfloat16().float() if is_half else round_to_four_bits(data)
    store_base(model, lora, torch.float32)
    kinds = [type(module) for module in model.modules()]  # names each module once
    halves = kinds.count(HalfWeight)
    assert (halves, halves + kinds.count(FourBitWeight)) == (
        count if base == "bfloat16" else tables,
        count,
    )
    if not isinstance(recipe, (Gpt, Transformer)):  # their positions stay as they are
        for training in (True, False):
            assert torch.equal(model.train(training)(inputs), expected.train(training)(inputs))
    assert torch.isfinite(model.eval()(inputs)).all()


@pytest.mark.parametrize("base", ["bfloat16", "nf4"])
def test_lora_base_dtype_is_refused_if_rank_is_zero(base: Literal["bfloat16", "nf4"]) -> None:
    with pytest.raises(ValueError, match=rf"model\.lora\.base={base}"):
        Lora(0, base=base)
    with pytest.raises(ValueError, match=r"model\.lora\.base"):
        Lora(2, base="int3")  # type: ignore[arg-type]


def test_method_that_changes_base_weights_is_refused_if_base_weights_are_rounded() -> None:
    spec = run_spec(FLoRA(), model=Mlp((6,), Lora(RANK, base="bfloat16")))
    with pytest.raises(ValueError, match=r"model\.lora\.base=bfloat16"):
        declare_run(spec)
