"""Test InCo's mixing in extreme cases, which layers of a model it pairs, and what it refuses."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tiny_runs import (
    BLOCKS,
    MLP,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    FinishedRun,
    check_composition,
    declare_methods,
    run,
    run_spec,
    same_arrays,
)
from torch import Tensor

from raysim.api.method import Method
from raysim.api.server_view import Aggregation
from raysim.methods import inco
from raysim.methods.inco import AlignmentRule, Granularity, InCo
from raysim.models import ModelRecipe
from raysim.models.cct import Cct7
from raysim.models.classifier import Shape
from raysim.models.resnet import ResNet
from raysim.simulation.fleet import Ideal
from raysim.training.run_spec import build_networks
from raysim.vectors.layout import plan_layout


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


KERNELS = (4, 3, 3, 3)
TARGET, SOURCE = random(*KERNELS), random(*KERNELS, seed=1)


def mixed(
    target: Tensor = TARGET, source: Tensor = SOURCE, value_clip: float | None = None, **others: Any
) -> Tensor:
    return inco.cross_layer_gradient(target=target, source=source, value_clip=value_clip, **others)


def close(got: Tensor, want: Tensor, rtol: float = 1e-5) -> None:
    assert got.shape == want.shape and torch.allclose(got, want, rtol=rtol, atol=1e-7)


# --- one pair ---------------------------------------------------------------------------------


def test_inco_mixes_1x1_kernels_of_a_tensor_together_even_if_granularity_is_kernel() -> None:
    """InCo also mixes matrices and vectors as a whole, because they have no kernels."""
    for shape in ((6, 5, 1, 1), (6, 5), (7,)):
        target, source = random(*shape), random(*shape, seed=1)
        assert torch.equal(mixed(target, source), mixed(target, source, granularity="tensor"))


@pytest.mark.parametrize("granularity", get_args(Granularity))
def test_inco_mixes_each_1x2_kernel_separately_only_if_granularity_is_kernel(
    granularity: str,
) -> None:
    target, source = random(3, 2, 1, 2), random(3, 2, 1, 2, seed=1)
    alike = torch.equal(
        mixed(target, source, granularity=granularity), mixed(target, source, granularity="tensor")
    )
    assert alike == (granularity == "tensor")


@pytest.mark.parametrize("granularity", get_args(Granularity))
def test_inco_halves_a_gradient_if_its_source_is_zero_and_doubles_it_if_it_equals_its_source(
    granularity: str,
) -> None:
    # The result is a sum of two directions, times the mean of both norms. For a source of zero, the
    # sum is one direction and the mean is half of the norm. For an equal source, the sum doubles.
    close(mixed(source=torch.zeros(KERNELS), granularity=granularity), TARGET / 2)
    close(mixed(source=TARGET, granularity=granularity), 2 * TARGET)
    zero = torch.zeros(KERNELS)
    assert torch.equal(mixed(zero, zero, granularity=granularity), zero)


def test_compiled_inco_function_changes_the_rows_that_it_gets_and_no_others() -> None:
    """Rows are mixed in blocks of 64, so 100 rows are a full block and a block of 36 rows."""
    rows, sources = random(128, 3).numpy(), random(128, 3, seed=1).numpy()
    before = rows.copy()
    inco.compile_function(inco._mix)(rows[:100], sources[:100], 5.0, math.inf, 1e-7, False)
    assert np.array_equal(rows[100:], before[100:]) and not np.any(rows[:100] == before[:100])


def test_inco_mixing_does_not_change_its_arguments() -> None:
    target, source = TARGET.clone(), SOURCE.clone()
    for align in get_args(AlignmentRule):
        mixed(target, source, align=align, value_clip=0.01)
    assert torch.equal(target, TARGET) and torch.equal(source, SOURCE)


# --- which pairs there are --------------------------------------------------------------------


def paired(model: ModelRecipe, *methods: Method, shape: Shape = (3, 32, 32)) -> dict[str, str]:
    names = {
        name: list(value.shape) for name, value in model.build(shape, 10, 0).named_parameters()
    }
    return inco.source_parameters(names=list(names), shapes=list(names.values()))


def test_inco_mixes_conv2_of_block_0_into_both_convolutions_of_a_later_basic_block() -> None:
    ended = paired(ResNet(18))
    assert len(ended) == 8
    for stage in range(1, 5):
        for conv in (1, 2):
            target, source = (
                f"extractor.layer{stage}.{at}.weight" for at in (f"1.conv{conv}", "0.conv2")
            )
            assert ended[target] == source


def test_inco_mixes_conv2_and_conv3_of_block_0_into_the_same_layers_of_a_later_bottleneck() -> None:
    ended = paired(ResNet(50))
    assert len(ended) == 2 * (2 + 3 + 5 + 2)
    assert ended["extractor.layer3.4.conv3.weight"] == "extractor.layer3.0.conv3.weight"
    assert ended["extractor.layer3.4.conv2.weight"] == "extractor.layer3.0.conv2.weight"


@pytest.mark.parametrize("model", [NORMED, MLP, Cct7()], ids=["cnn", "mlp", "cct"])
def test_inco_warns_of_model_without_pairs_of_blocks(
    model: ModelRecipe,
) -> None:
    assert paired(model) == {}
    network = {"model": model.build((3, 32, 32), 10, 0)}
    (warning,) = declare_methods([InCo()], network, plan_layout(network)).warnings
    assert "method 'inco'" in warning
    blocks = {"model": BLOCKS.build((1, 8, 8), 5, 0)}
    assert not [*declare_methods([InCo()], blocks, plan_layout(blocks)).warnings]


def test_inco_mixes_norm1_into_norm2_of_the_same_transformer_block() -> None:
    names = [
        "net.blocks.3.norm1.weight",
        "net.blocks.3.norm2.weight",
        "net.blocks.3.norm2.bias",
        "norm2.weight",
    ]
    ended = inco.source_parameters(names=names, shapes=[[8]] * 4)
    assert ended == {"net.blocks.3.norm2.weight": "net.blocks.3.norm1.weight"}


def test_inco_pairs_layers_only_if_shape_and_name_prefix_and_resnet_stage_are_equal() -> None:
    names = [
        "a.layer1.1.conv1.weight",
        "b.layer1.0.conv1.weight",
        "a.layer2.0.conv1.weight",
        "a.layer1.0.conv2.weight",
    ]
    assert inco.source_parameters(names=names, shapes=[[4, 4, 3, 3]] * 3 + [[8, 4, 3, 3]]) == {}


# --- in a run ---------------------------------------------------------------------------------


TARGETS = [f"extractor.layer1.1.conv{number}.weight" for number in (1, 2)]


class Watch(Method):
    """A method that stores each round's mean update and the weights of its updates.

    In the list of methods, one `Watch` stands before InCo and another one after it.
    name: the name of the method.
    """

    name = "watch"
    paper = "a test"

    def __init__(self, name: str):
        self.directions: list[Tensor] = []
        self.weights: list[list[float]] = []
        type(self).name = name

    def step(self, direction: Tensor, aggregation: Aggregation, server: Any) -> Tensor:
        self.directions.append(direction.clone())
        return direction

    def absorb(self, aggregation: Aggregation, server: Any) -> None:
        self.weights.append(list(aggregation.weights))


class After(Watch):
    """The same method as `Watch`, in a class of its own.

    A run refuses two methods of the same name, and the name is an attribute of the class.
    """


def watched(*methods: Method, **others: Any) -> tuple[FinishedRun, Watch, Watch]:
    before, after = Watch("before"), After("after")
    study = run_spec(before, *methods, after, **({"model": BLOCKS} | others))
    ended = run(study, ROUNDS, Ideal())
    assert not ended.failures and len(before.directions) == 3
    return ended, before, after


def test_inco_does_not_use_personal_tensors() -> None:
    class Keep(Method):
        name, paper = "keep", "a test"

        def setup(self, run: Any) -> None:
            run.private_parameters([f"model.{self.kept}"])

        def __init__(self, kept: str):
            self.kept = kept

    _, before, after = watched(InCo(), Keep("extractor.layer1.0.conv2.weight"))
    # What is left as a source: the first block's conv1, of conv1.
    layout = build_networks(run_spec(Keep("extractor.layer1.0.conv2.weight"), model=BLOCKS))[1]
    moved = {
        entry.path for entry in layout.entries if entry.parameter and _differs(before, after, entry)
    }
    assert moved == {TARGETS[0]}
    _, before, after = watched(InCo(), Keep(TARGETS[0]))
    layout = build_networks(run_spec(Keep(TARGETS[0]), model=BLOCKS))[1]
    moved = {
        entry.path for entry in layout.entries if entry.parameter and _differs(before, after, entry)
    }
    assert moved == {TARGETS[1]}


def _differs(before: Watch, after: Watch, entry: Any) -> bool:
    one, other = (watch.directions[0][entry.start : entry.stop] for watch in (before, after))
    return not torch.equal(one, other)


@pytest.mark.parametrize("model", [NORMED, NORMED_MLP], ids=["cnn", "mlp"])
def test_inco_without_pairs_of_blocks_equals_fedavg(model: ModelRecipe) -> None:
    ended, fedavg = (
        run(run_spec(*methods, model=model), fleet=Ideal(), weighting="uniform")
        for methods in ([InCo()], [])
    )
    assert ended.finished.model_sha256 == fedavg.finished.model_sha256
    assert same_arrays(ended.tensors, fedavg.tensors)
    by_default = run(run_spec(InCo(), model=model), fleet=Ideal())
    assert by_default.finished.model_sha256 == ended.finished.model_sha256


@pytest.mark.parametrize("name", ["fedcda", "fedasync"])
def test_inco_refuses_methods_that_do_not_average_updates(name: str) -> None:
    class Other(Method):
        paper = "a test"

    Other.name = name
    with pytest.raises(ValueError, match=f"'inco'.*'{name}'"):
        check_composition([InCo(), Other()])


@pytest.mark.parametrize(
    "settings",
    [
        {"granularity": "kernels"},
        {"align": "never"},
        {"clamp_max": -1.0},
        {"value_clip": 0.0},
        {"eps": 0.0},
    ],
    ids=str,
)
def test_inco_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.inco\.{key}="):
        InCo(**settings)
