"""Test how third-party networks are split into extractor and head, and how they get adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from tiny_runs import run, run_spec
from torch import Tensor, nn

import raysim.models
from raysim.experiment.instantiate import resolve
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.fedprox import FedProx
from raysim.models import (
    Cct7,
    CustomModel,
    Gpt,
    Lora,
    Mlp,
    MnistCnn,
    ModelRecipe,
    ResNet,
    SmallCnn,
    Timm,
    Torchvision,
    Transformer,
    Vgg11,
    split_network,
)
from raysim.models.lora import find_adapters
from raysim.models.split import SplitNetwork, WholeNetwork
from raysim.primitives.errors import RefusedError
from raysim.primitives.kinds import Tokens

SHAPE = (1, 8, 8)


class Two(nn.Module):
    """A network with a body, a head named fc, and a layer that is never called."""

    def __init__(self, num_classes: int = 5, width: int = 7, after: bool = False):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.fc = nn.Linear(width, num_classes)
        self.unused = nn.Linear(2, 2)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.body(x))
        return out.sigmoid() if self.after else out


def inputs() -> Tensor:
    return torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(0))


def test_splitting_a_network_at_a_named_layer_does_not_change_outputs() -> None:
    net, x = Two(), inputs()
    expected = net(x)
    model = split_network(net, 5, x, head="fc")
    assert isinstance(model, SplitNetwork) and model.feature_dim == 7 and model.num_classes == 5
    assert torch.equal(model(x), expected) and torch.equal(model.head(model.features(x)), expected)
    assert "fc.weight" not in dict(model.named_parameters()) and model.training
    assert (
        torch.equal(model.whole()(x), expected)
        and model.whole().state_dict().keys() == Two().state_dict().keys()
    )


def test_network_without_named_head_is_split_at_last_layer() -> None:
    x = inputs()
    model = split_network(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 5)), 5, x
    )
    assert isinstance(model, SplitNetwork) and model.feature_dim == 4


def test_network_with_operation_after_head_is_not_split() -> None:
    net, x = Two(after=True), inputs()
    expected = net(x)
    model = split_network(net, 5, x)
    assert isinstance(model, WholeNetwork) and torch.equal(model(x), expected)
    with pytest.raises(ValueError, match=r"model\.head=fc .*Two"):
        split_network(net, 5, x, head="fc")


@pytest.mark.parametrize(
    ("net", "head", "value"),
    [
        (Two, "body", r"model\.head=body .*body\.1, fc, unused"),
        (
            lambda: Two(4),
            None,
            r"Two .*\[3, 4\].*\[3, 5\]",
        ),
        (
            lambda: nn.Linear(9, 5),
            None,
            r"Linear .*\[1, 8, 8\] .*torch\.float32",
        ),
        (
            lambda: Two().double(),
            None,
            r"Two .*model\.float\(\)",
        ),
    ],
)
def test_network_with_wrong_head_inputs_or_outputs_is_rejected(
    net: Callable[[], nn.Module], head: str | None, value: str
):
    with pytest.raises(ValueError, match=value):
        split_network(net(), 5, inputs(), head)


def test_network_whose_output_has_only_the_batch_dimension_is_rejected() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0))
    with pytest.raises(ValueError, match="squeeze"):
        split_network(net, 1, inputs())


class Scaled(nn.Module):
    """A network that changes the outputs of its last linear layer.

    after: the module that changes the outputs. None: the outputs are multiplied by a trained
    factor.
    """

    def __init__(self, after: nn.Module | None = None):
        super().__init__()
        self.body, self.fc = (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.BatchNorm1d(7)),
            nn.Linear(7, 5),
        )
        self.scale, self.after = nn.Parameter(torch.ones(1)), after

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.body(x))
        return self.after(out) if self.after else out * self.scale


@pytest.mark.parametrize(
    "after",
    [None, nn.Dropout(0.5), nn.Sequential(nn.Identity(), nn.Dropout(0.1)), nn.PReLU(init=1.0)],
)
def test_network_that_scales_outputs_of_the_head_is_not_split(
    after: nn.Module | None,
) -> None:
    net, x, drawn = Scaled(after), inputs(), torch.get_rng_state()
    statistics = net.body[2].running_mean.clone()
    model = split_network(net, 5, x)
    assert isinstance(model, WholeNetwork) and model.training
    assert torch.equal(torch.get_rng_state(), drawn) and torch.equal(
        net.body[2].running_mean, statistics
    )
    assert int(net.body[2].num_batches_tracked) == 0
    with pytest.raises(ValueError, match=r"model\.head=fc .*Scaled"):
        split_network(Scaled(after), 5, x, head="fc")


def test_network_is_split_if_the_layers_after_its_head_do_not_change_the_output() -> None:
    assert isinstance(
        split_network(Scaled(nn.Sequential(nn.Identity(), nn.Dropout(0.0))), 5, inputs()),
        SplitNetwork,
    )


def test_model_function_of_a_user_gets_its_arguments_and_depends_on_the_seed() -> None:
    def make(num_classes: int, input_shape: tuple[int, ...], width: int) -> nn.Module:
        assert input_shape == SHAPE
        return Two(num_classes, width)

    recipe = CustomModel(make, {"width": 6}, head="fc")
    first, again, other = (recipe.build(SHAPE, 5, seed) for seed in (1, 1, 2))
    assert first.feature_dim == 6
    assert torch.equal(first.head.weight, again.head.weight) and not torch.equal(
        first.head.weight, other.head.weight
    )


def test_training_starts_from_the_weights_of_a_custom_network() -> None:
    net = Two()
    model = CustomModel(net).build(SHAPE, 5, 1)
    assert isinstance(model, WholeNetwork)  # its last linear layer is another one
    assert (
        torch.equal(model.get_parameter("net.fc.weight"), net.fc.weight)
        and model.get_submodule("net") is not net
    )


def test_network_that_cannot_be_split_trains_but_has_no_features() -> None:
    whole = CustomModel(lambda: Two(after=True))
    assert run(run_spec(FedProx(), model=whole)).finished.model_sha256
    with pytest.raises(
        ValueError,
        match=r"method 'feddecorr' .*model\.head",
    ):
        run(run_spec(FedDecorr(), model=whole))
    assert run(run_spec(FedDecorr(), model=CustomModel(Two, head="fc"))).rows[-1]["failures"] == 0


class Bare(ModelRecipe):
    """A recipe whose network has no features and no head."""

    def build(
        self, input_shape: Any, num_classes: int, seed: int, tokens: Tokens | None = None
    ) -> Any:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, num_classes))


def test_method_that_needs_features_trains_the_network_of_a_custom_model_class() -> None:
    rows = run(run_spec(FedDecorr(), model=Bare())).rows
    assert not rows[-1]["failures"]
    assert rows[-1]["loss_global"] < rows[0]["loss_global"]  # type: ignore[operator]


def test_custom_network_learns() -> None:
    spec = run_spec(model=CustomModel(Two, head="fc"))
    rows = run(spec, rounds=6).rows
    assert rows[-1]["loss_global"] < rows[0]["loss_global"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        (Torchvision("squeezenet1_1"), (3, 32, 32)),  # its head is a convolution
        (Torchvision("resnet18"), (3, 32, 32)),
        (Timm("test_resnet"), (1, 32, 32)),
    ],
)
def test_timm_and_torchvision_networks_with_a_linear_head_are_split(
    recipe: Any, shape: tuple[int, ...]
) -> None:
    model = recipe.build(shape, 4, 0)
    assert model(torch.randn(2, *shape)).shape == (2, 4) and model.is_split == (
        recipe.name != "squeezenet1_1"
    )


def test_unknown_name_of_a_network_gets_a_suggestion() -> None:
    with pytest.raises(
        ValueError,
        match=r"model\.name=resnet19 .*mean resnet18",
    ):
        Torchvision("resnet19").build((3, 32, 32), 4, 0)
    with pytest.raises(ValueError, match=r"model\.name=resnet10x .*mean resnet10t"):
        Timm("resnet10x").build((3, 32, 32), 4, 0)


def test_error_of_a_missing_package_contains_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"model\.name=resnet10t .*\[timm\]"):
        Timm("resnet10t").build((3, 32, 32), 4, 0)


def test_error_for_the_old_name_of_a_python_class_contains_the_new_name() -> None:
    with pytest.raises(AttributeError, match="CustomModel"):
        raysim.models.Own  # noqa: B018
    with pytest.raises(RefusedError, match="HuggingFaceModel"):
        resolve("raysim.models.zoo.HuggingFace", "model")


# ---- adapters ------------------------------------------------------------------------------------
def test_only_adapters_and_head_are_trained() -> None:
    recipe = Transformer(lora=Lora(rank=2))
    model, again = (recipe.build((6,), 3, 5, Tokens(11)) for _ in range(2))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name or name.startswith("head.") for name in trained)
    assert {"head.weight", "head.bias"} < trained
    state = again.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    plain = Transformer().build((6,), 3, 5, Tokens(11))
    x = torch.randint(11, (4, 6))
    assert torch.equal(plain.extractor(x), model.extractor(x))  # adapters start as nothing


def test_error_about_a_functools_partial_with_a_missing_argument_names_its_class() -> None:
    recipe = CustomModel(functools.partial(nn.Linear, 3))
    with pytest.raises(ValueError, match=r"Linear.* cannot be called .*'out_features'"):
        recipe.build((3,), 2, 0)


def test_only_adapters_of_a_custom_network_are_sent() -> None:
    spec = run_spec(model=CustomModel(Two, head="fc", lora=Lora(rank=2, layers=["body.1"])))
    ended = run(spec)
    # 2 x (64 + 7) of the adapter, 7 x 5 + 5 of the head
    assert ended.coordinator.layout.shared == 2 * (64 + 7) + 40
    assert any(ended.tensors[name].any() for name in ended.tensors if "lora_B" in name)


def test_adapters_of_layers_that_do_not_exist_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"model\.lora\.layers=\['nowhere'\].* are 0, 2, embedding, out, qkv"
    ):
        Transformer(lora=Lora(rank=2, layers=["nowhere"])).build((6,), 3, 5, Tokens(11))


def test_error_for_an_adapter_of_the_head_names_the_layers_in_front_of_it() -> None:
    lora = Lora(rank=2, layers=["head"])
    with pytest.raises(ValueError, match="has no layer 'head' in front of its head"):
        Mlp((8,), lora).build((1, 8, 8), 4, 0)
    with pytest.raises(ValueError, match=r"has no layer 'nowhere'\. "):
        recipe = Gpt(width=8, heads=2, blocks=1, lora=replace(lora, layers=["nowhere"]))
        recipe.build((5,), 11, 0, Tokens(11))


@pytest.mark.parametrize(
    ("recipe", "lora"),
    [
        (Mlp((8,)), Lora(rank=9)),  # no layer is as large
        (Mlp((8,)), Lora(rank=9, layers=["1"])),  # nor is the one that is named
        (MnistCnn(), Lora(rank=200)),
    ],
)
def test_adapter_rank_above_the_size_of_the_layers_is_rejected(
    recipe: ModelRecipe, lora: Lora
) -> None:
    with pytest.raises(ValueError, match=r"model\.lora\.rank"):
        replace(recipe, lora=lora).build((1, 8, 8), 4, 0)


def test_layers_smaller_than_the_rank_get_no_adapter() -> None:
    model = Mlp((8, 3), Lora(rank=4)).build((1, 8, 8), 4, 0)
    assert [adapter.layer for adapter in find_adapters(model)] == ["extractor.1"]


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_gets_adapters_in_all_layers_but_the_output_layer(tied: bool) -> None:
    recipe = Gpt(width=8, heads=2, blocks=1, tied=tied, lora=Lora(rank=2))
    model = recipe.build((5,), 11, 0, Tokens(11))
    layers = [adapter.layer.rpartition(".")[2] for adapter in find_adapters(model)]
    assert layers == ["qkv", "out", "up", "down"]
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    named = replace(recipe, lora=Lora(rank=2, layers=["qkv", "head"]))
    assert len(find_adapters(named.build((5,), 11, 0, Tokens(11)))) == 2


@pytest.mark.parametrize(
    ("recipe", "count"),
    [(Mlp(), 1), (SmallCnn(), 1), (MnistCnn(), 4), (ResNet(18), 20), (Vgg11(), 8), (Cct7(), 28)],
)
def test_built_in_networks_can_have_adapters(recipe: ModelRecipe, count: int) -> None:
    shape = (3, 32, 32)
    plain, adapted = (replace(recipe, lora=Lora(rank)).build(shape, 4, 0).eval() for rank in (0, 2))
    adapters = find_adapters(adapted)
    assert len(adapters) == count
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    factors = {name for adapter in adapters for name in (adapter.a, adapter.b)}
    assert trained == factors | {"head.weight", "head.bias"}
    x = torch.randn(2, *shape)
    assert torch.equal(plain(x), adapted(x))  # B starts at 0


def test_adapters_of_a_custom_peft_network_are_found() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 4))
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["1"]), net)
    model = CustomModel(net, head="3").build((1, 8, 8), 4, 0)
    assert [adapter.layer for adapter in find_adapters(model)] == ["extractor.1"]
