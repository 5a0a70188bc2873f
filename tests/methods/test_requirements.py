"""Test what methods require of a run, and the errors for runs that do not meet a requirement."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from test_conformance import TABLE, declared
from tiny_runs import LOCAL, clients_of_sizes, run_spec, with_settings
from torch import Tensor, nn

from raysim.api.method import Method
from raysim.commands.bench.gpu import every_method
from raysim.data.federated import federate
from raysim.data.partition import Natural
from raysim.data.sources import Markov
from raysim.methods.afl import AFL, MAX_CLIENTS
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fednova import FedNova
from raysim.methods.fedsa_lora import FedSALoRA
from raysim.methods.ffa_lora import FFALoRA
from raysim.methods.flexlora import FlexLoRA
from raysim.methods.flora import FLoRA
from raysim.methods.scaffold import Scaffold
from raysim.models import Lora, Transformer
from raysim.models.split import CustomModel
from raysim.training.run_spec import RunSpec, declare_run

ADAM = replace(LOCAL, optimizer="adam", momentum=0.0)
LAYERS = "model.lora.layers: "


class Plain(nn.Module):
    """A classifier of 8 x 8 images with two layers in front of its head."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x.flatten(1))))  # type: ignore[no-any-return]


class Tied(Plain):
    """A classifier whose first two layers share their weight; the third has its own."""

    def __init__(self, num_classes: int):
        super().__init__(num_classes)
        self.second.weight = self.first.weight
        self.third = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.third(x.flatten(1)))


class Grouped(nn.Module):
    """A classifier of 8 x 8 images with a grouped convolution."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.spread = nn.Conv2d(1, 4, 3, padding=1)
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4 * 64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.grouped(self.spread(x)).flatten(1)
        return self.head(features)  # type: ignore[no-any-return]


def adapted(network: Callable[[int], nn.Module], layer: str) -> CustomModel:
    """Return a `CustomModel` in which one layer of the network has a LoRA adapter.

    network: a function that returns the network for a number of classes.
    layer: the name of the layer.
    """
    return CustomModel(network, head="head", lora=Lora(rank=2, layers=[layer]))


def adapted_embedding(method: Method) -> RunSpec:
    """Return a run on tokens in which the embedding has an adapter."""
    source = Markov(users=5, samples=20, test_samples=4, vocabulary=6, length=6, shortest=3)
    model = Transformer(width=8, blocks=1, lora=Lora(rank=2, layers=["embedding"]))
    return run_spec(method, model=model, data=federate(source, Natural(), 0))


# For each row: the run, and the start of its error, which is the key to change.
REFUSED: dict[str, tuple[Callable[[], RunSpec], str]] = {
    "fednova with Adam": (lambda: run_spec(FedNova(), local=ADAM), "local.optimizer=adam: "),
    "scaffold with Adam": (lambda: run_spec(Scaffold(), local=ADAM), "local.optimizer=adam: "),
    "fedbuff with weights of samples": (
        lambda: with_settings(run_spec(FedBuff()), weighting="samples"),
        "weighting=samples ",
    ),
    "afl with too many clients": (
        lambda: run_spec(AFL(), data=clients_of_sizes([1] * (MAX_CLIENTS + 1))),
        "method.afl: ",
    ),
    "fedsa_lora with an embedding": (lambda: adapted_embedding(FedSALoRA()), LAYERS),
    "ffa_lora with an embedding": (lambda: adapted_embedding(FFALoRA()), LAYERS),
    "flora with an embedding": (lambda: adapted_embedding(FLoRA()), LAYERS),
    "flora with a shared weight": (lambda: run_spec(FLoRA(), model=adapted(Tied, "first")), LAYERS),
    "flora with a grouped convolution": (
        lambda: run_spec(FLoRA(), model=adapted(Grouped, "grouped")),
        LAYERS,
    ),
    "flexlora with a grouped convolution": (
        lambda: run_spec(FlexLoRA(), model=adapted(Grouped, "grouped")),
        LAYERS,
    ),
}


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd")
@pytest.mark.parametrize("row", REFUSED)
def test_run_is_refused_if_it_lacks_what_its_method_requires(row: str) -> None:
    make_spec, start = REFUSED[row]
    with pytest.raises(ValueError, match=f"^{re.escape(start)}"):
        declare_run(make_spec())


@pytest.mark.parametrize(
    ("layers", "shared", "advice"),
    [
        (["first"], "extractor.second.weight", "Name another layer."),
        (["second"], "extractor.first.weight", "Name another layer."),
        (["first", "third"], "extractor.second.weight", "model.lora.layers=third"),
    ],
)
def test_flora_error_for_a_shared_weight_names_the_other_layer_and_the_layers_to_keep(
    layers: list[str], shared: str, advice: str
) -> None:
    model = CustomModel(Tied, head="head", lora=Lora(rank=2, layers=layers))
    with pytest.raises(ValueError) as error:
        declare_run(run_spec(FLoRA(), model=model))
    assert f"shares its weight with {shared}, but" in str(error.value)
    assert str(error.value).endswith(advice)


@pytest.mark.parametrize("method", [FlexLoRA(), FLoRA()], ids=lambda method: method.name)
def test_flexlora_and_flora_accept_a_layer_with_neither_tied_weights_nor_conv_groups(
    method: Method,
) -> None:
    for network, layer in ((Grouped, "spread"), (Plain, "first")):
        declare_run(run_spec(method, model=adapted(network, layer)))


def test_only_seven_listed_methods_shift_or_mix_gradients() -> None:
    corrections = {name: declared(name).correction for name in TABLE}
    shifting = {name for name, kind in corrections.items() if kind == "shift"}
    mixing = {name for name, kind in corrections.items() if kind == "mix"}
    assert shifting == {"scaffold", "feddyn", "fedspeed"}
    assert mixing == {"fedcm", "flexlora", "flora", "hetlora"}


def options_of_methods() -> list[tuple[type[Method], str, tuple[str, ...]]]:
    """Return every argument of a method whose annotation is a `Literal` of allowed strings.

    Each item has the method, the name of the argument and the allowed strings.
    """
    options = []
    for method in every_method().values():
        for argument, kind in get_type_hints(method.__init__).items():
            if get_origin(kind) is Literal:
                options.append((method, argument, get_args(kind)))
    return options


@pytest.mark.parametrize(("method", "argument", "choices"), options_of_methods())
def test_error_of_an_unknown_argument_value_lists_the_allowed_values(
    method: type[Method], argument: str, choices: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as error:
        method(**{argument: "unknown"})
    message = str(error.value)
    assert f"{argument}='unknown'" in message
    assert message.endswith(f"use one of {', '.join(map(repr, choices))}")
