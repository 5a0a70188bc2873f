"""Frozen weights in bfloat16: layers compute as with rounded weights, and hold one copy."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import run_spec
from torch import Tensor, nn

from raysim.methods.flora import FLoRA
from raysim.models import Gpt, Lora, Mlp, SmallCnn, Transformer
from raysim.models.stored_weights import StoredLayer, store_base
from raysim.primitives.kinds import Tokens
from raysim.training.run_spec import declare_run

RANK = 2


def stored(layer: Any) -> StoredLayer:
    bits = layer.weight.detach().to(torch.bfloat16).view(torch.int16)
    return StoredLayer(copy.deepcopy(layer), nn.Parameter(bits, requires_grad=False), torch.float32)


def rounded(layer: Any) -> Any:
    layer.weight.data = layer.weight.detach().to(torch.bfloat16).float()
    return layer


def outputs_and_gradient(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    start = inputs.clone().requires_grad_()
    outputs = layer(start)
    outputs.sin().sum().backward()
    assert start.grad is not None
    return outputs.detach(), start.grad


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(7, 5), (3, 7)),
        (nn.Linear(7, 5, bias=False), (2, 3, 7)),
        (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 6, 6)),
        (nn.Conv1d(2, 4, 3, groups=2), (2, 2, 9)),
    ],
    ids=str,
)
def test_stored_layer_equals_a_rounded_layer_exactly(layer: Any, shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layer.requires_grad_(False)
    kept = stored(layer)
    expected = outputs_and_gradient(rounded(layer), inputs)
    for value, other in zip(outputs_and_gradient(kept, inputs), expected, strict=True):
        assert torch.equal(value, other)
    assert torch.equal(kept.weight, layer.weight)
    assert "weight" not in vars(kept.layer)  # nothing is left of the decoded weight


def test_stored_embedding_returns_rounded_rows() -> None:
    layer = nn.Embedding(11, 4).requires_grad_(False)
    tokens = torch.tensor([[1, 10], [0, 1]])
    kept = stored(layer)
    assert torch.equal(kept(tokens), rounded(layer)(tokens))
    assert kept(tokens).dtype == torch.float32


def test_backward_pass_of_frozen_layer_reads_the_stored_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = []
    usual = StoredLayer.weight.fget
    assert usual is not None

    def read(self: StoredLayer) -> Tensor:
        reads.append(1)
        weight: Tensor = usual(self)
        return weight

    monkeypatch.setattr(StoredLayer, "weight", property(read))
    outputs = stored(nn.Linear(7, 5))(torch.randn(3, 7, requires_grad=True))
    assert len(reads) == 1
    outputs.sum().backward()
    assert len(reads) == 2


def test_autocast_uses_the_stored_weight_itself() -> None:
    layer, inputs = nn.Linear(7, 5).requires_grad_(False), torch.randn(3, 7)
    kept = stored(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kept(inputs), rounded(layer)(inputs))


@pytest.mark.parametrize(
    ("recipe", "shape", "tokens", "count"),
    [
        (Mlp((6,)), (1, 8, 8), None, 1),
        (SmallCnn(), (1, 8, 8), None, 3),
        (Gpt(width=8, heads=2, blocks=1), (5,), Tokens(11), 5),
        (Transformer(width=8, blocks=1), (5,), Tokens(11), 5),
    ],
    ids=str,
)
def test_models_with_adapters_store_rounded_base_weights(
    recipe: Any, shape: tuple[int, ...], tokens: Tokens | None, count: int
) -> None:
    lora = Lora(RANK, base="bfloat16")
    model = replace(recipe, lora=lora).build(shape, 11, 0, tokens)
    inputs = torch.randn(2, *shape) if tokens is None else torch.randint(11, (2, *shape))
    expected = copy.deepcopy(model)
    for parameter in expected.parameters():
        if not parameter.requires_grad and parameter.ndim > 1:
            parameter.data = parameter.data.to(torch.bfloat16).float()
    store_base(model, lora, torch.float32)
    weights = {id(p): p for p in model.parameters() if p.dtype == torch.int16}
    assert len(weights) == count
    if not isinstance(recipe, (Gpt, Transformer)):  # their positions stay as they are
        for training in (True, False):
            assert torch.equal(model.train(training)(inputs), expected.train(training)(inputs))
    assert torch.isfinite(model.eval()(inputs)).all()


def test_lora_base_is_refused_without_adapters() -> None:
    with pytest.raises(ValueError, match=r"model\.lora\.base=bfloat16"):
        Lora(0, base="bfloat16")
    with pytest.raises(ValueError, match=r"model\.lora\.base"):
        Lora(2, base="int3")  # type: ignore[arg-type]


def test_lora_base_that_a_method_changes_is_refused() -> None:
    spec = run_spec(FLoRA(), model=Mlp((6,), Lora(RANK, base="bfloat16")))
    with pytest.raises(ValueError, match=r"model\.lora\.base=bfloat16"):
        declare_run(spec)
