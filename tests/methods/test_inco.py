"""InCo's mixing of one pair, which pairs our models have, and what it does to a run's mean update."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    BLOCKS,
    BUFFER,
    MLP,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    Ran,
    check_composition,
    declare_methods,
    run,
    run_spec,
    same,
)
from torch import Tensor

from raysim.api.method import Method
from raysim.api.server_view import Aggregation
from raysim.methods import inco
from raysim.methods.fedbn import FedBN
from raysim.methods.fedopt import FedAdam
from raysim.methods.fedprox import FedProx
from raysim.methods.inco import ALIGNS, GRANULARITIES, InCo
from raysim.methods.mixup import Mixup
from raysim.methods.scaffold import Scaffold
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


def by_hand(target: Tensor, source: Tensor, align: str = "always") -> Tensor:
    """The formula for one group of numbers."""
    length, length0, product = target.norm(), source.norm(), (target * source).sum()
    if align == "conflict" and product >= 0:
        return target
    theta = min((product.abs() / length0**2).item(), 5.0)
    return (target / length + theta * source / length0) * (length + length0) / 2


# --- one pair -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", ALIGNS)
def test_every_kernel_is_mixed_for_itself_or_the_tensor_as_a_whole(align: str) -> None:
    close(mixed(granularity="tensor", align=align), by_hand(TARGET, SOURCE, align))
    got = mixed(align=align)
    for o in range(4):
        for i in range(3):
            close(got[o, i], by_hand(TARGET[o, i], SOURCE[o, i], align))


def test_kernels_of_one_number_are_mixed_as_one_tensor() -> None:
    for shape in ((6, 5, 1, 1), (6, 5), (7,)):
        target, source = random(*shape), random(*shape, seed=1)
        assert torch.equal(mixed(target, source), mixed(target, source, granularity="tensor"))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_kernels_of_two_numbers_are_mixed_each_for_itself(granularity: str) -> None:
    target, source = random(3, 2, 1, 2), random(3, 2, 1, 2, seed=1)
    alike = torch.equal(
        mixed(target, source, granularity=granularity), mixed(target, source, granularity="tensor")
    )
    assert alike == (granularity == "tensor")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_source_of_zero_leaves_half_and_one_equal_to_the_target_doubles_it(
    granularity: str,
) -> None:
    # Half, for the length of the result is the mean of both lengths.
    close(mixed(source=torch.zeros(KERNELS), granularity=granularity), TARGET / 2)
    close(mixed(source=TARGET, granularity=granularity), 2 * TARGET)
    zero = torch.zeros(KERNELS)
    assert torch.equal(mixed(zero, zero, granularity=granularity), zero)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bound", [0.0, 0.2, 5.0])
def test_the_result_is_bounded_by_the_lengths_and_the_clamp(bound: float, granularity: str) -> None:
    source = random(*KERNELS, seed=2, scale=0.01)  # a short one, so that theta is clamped
    got = mixed(source=source, clamp_max=bound, granularity=granularity)
    shape = (12, 9) if granularity == "kernel" else (1, 108)
    length, target, short = (each.reshape(shape).norm(dim=1) for each in (got, TARGET, source))
    assert (length <= (1 + bound) * (target + short) / 2 + 1e-12).all()


def test_the_clip_bounds_every_number_and_changes_no_other() -> None:
    free, clipped = mixed(), mixed(value_clip=0.3)
    assert clipped.abs().max() == 0.3
    assert torch.equal(clipped, free.clamp(-0.3, 0.3)) and (clipped == free).any()
    assert mixed(source=TARGET, align="conflict", value_clip=0.3).abs().max() == 0.3


@pytest.mark.parametrize("align", ALIGNS)
def test_a_common_factor_passes_through(align: str) -> None:
    close(mixed(100 * TARGET, 100 * SOURCE, align=align), 100 * mixed(align=align))


def test_negating_the_source_negates_its_own_contribution() -> None:
    lengths = [each.flatten(2).norm(dim=2)[:, :, None, None] for each in (TARGET, SOURCE)]
    own = TARGET / lengths[0] * (lengths[0] + lengths[1]) / 2
    close(mixed(source=-SOURCE) - own, own - mixed())


def test_where_the_source_agrees_conflict_changes_nothing() -> None:
    got, product = mixed(align="conflict"), (TARGET * SOURCE).flatten(2).sum(dim=2)
    assert (product >= 0).any() and (product < 0).any()
    assert torch.equal(got[product >= 0], TARGET[product >= 0])
    assert torch.equal(got[product < 0], mixed()[product < 0])


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_permuted_channels_are_mixed_as_before(granularity: str) -> None:
    out, into = torch.tensor([2, 0, 3, 1]), torch.tensor([1, 2, 0])
    got = mixed(TARGET[out][:, into], SOURCE[out][:, into], granularity=granularity)
    close(got, mixed(granularity=granularity)[out][:, into], rtol=1e-12)


def test_what_lies_behind_the_rows_is_left_alone() -> None:
    """They are worked on 64 at a time, and 100 is no multiple."""
    rows, sources = random(128, 3).numpy(), random(128, 3, seed=1).numpy()
    before = rows.copy()
    inco.compiled(inco._mix)(rows[:100], sources[:100], 5.0, math.inf, 1e-7, False)
    assert np.array_equal(rows[100:], before[100:]) and not np.any(rows[:100] == before[:100])


def test_the_arguments_are_left_as_they_were() -> None:
    target, source = TARGET.clone(), SOURCE.clone()
    for align in ALIGNS:
        mixed(target, source, align=align, value_clip=0.01)
    assert torch.equal(target, TARGET) and torch.equal(source, SOURCE)


# --- which pairs there are ----------------------------------------------------------------------------------------


def paired(model: ModelRecipe, *methods: Method, shape: Shape = (3, 32, 32)) -> dict[str, str]:
    names = {
        name: list(value.shape) for name, value in model.build(shape, 10, 0).named_parameters()
    }
    return inco.source_parameters(names=list(names), shapes=list(names.values()))


def test_in_basic_blocks_both_convolutions_have_the_first_blocks_second_one() -> None:
    found = paired(ResNet(18))
    assert len(found) == 8
    for stage in range(1, 5):
        for conv in (1, 2):
            target, source = (
                f"extractor.layer{stage}.{at}.weight" for at in (f"1.conv{conv}", "0.conv2")
            )
            assert found[target] == source


def test_in_bottlenecks_the_last_two_convolutions_have_their_like() -> None:
    found = paired(ResNet(50))
    assert len(found) == 2 * (2 + 3 + 5 + 2)
    assert found["extractor.layer3.4.conv3.weight"] == "extractor.layer3.0.conv3.weight"
    assert found["extractor.layer3.4.conv2.weight"] == "extractor.layer3.0.conv2.weight"


@pytest.mark.parametrize("model", [NORMED, MLP, Cct7()], ids=["cnn", "mlp", "cct"])
def test_models_without_repeated_blocks_have_no_pairs_and_the_user_is_told(
    model: ModelRecipe,
) -> None:
    assert paired(model) == {}
    network = {"model": model.build((3, 32, 32), 10, 0)}
    (warning,) = declare_methods([InCo()], network, plan_layout(network)).warnings
    assert "method 'inco'" in warning
    blocks = {"model": BLOCKS.build((1, 8, 8), 5, 0)}
    assert not [*declare_methods([InCo()], blocks, plan_layout(blocks)).warnings]


def test_a_prefix_and_the_norms_of_a_transformer() -> None:
    names = [
        "net.blocks.3.norm1.weight",
        "net.blocks.3.norm2.weight",
        "net.blocks.3.norm2.bias",
        "norm2.weight",
    ]
    found = inco.source_parameters(names=names, shapes=[[8]] * 4)
    assert found == {"net.blocks.3.norm2.weight": "net.blocks.3.norm1.weight"}


def test_a_target_takes_no_source_of_another_shape_prefix_or_stage() -> None:
    names = [
        "a.layer1.1.conv1.weight",
        "b.layer1.0.conv1.weight",
        "a.layer2.0.conv1.weight",
        "a.layer1.0.conv2.weight",
    ]
    assert inco.source_parameters(names=names, shapes=[[4, 4, 3, 3]] * 3 + [[8, 4, 3, 3]]) == {}


# --- in a run -----------------------------------------------------------------------------------------------------


TARGETS = [f"extractor.layer1.1.conv{number}.weight" for number in (1, 2)]


class Watch(Method):
    """Keeps the mean update before and after InCo; one on either side of it."""

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
    """The other one."""


def watched(*methods: Method, **others: Any) -> tuple[Ran, Watch, Watch]:
    before, after = Watch("before"), After("after")
    study = run_spec(before, *methods, after, **({"model": BLOCKS} | others))
    found = run(study, ROUNDS, Ideal())
    assert not found.failures and len(before.directions) == 3
    return found, before, after


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_it_mixes_the_targets_of_a_runs_mean_update_and_nothing_else(granularity: Any) -> None:
    found, before, after = watched(InCo(granularity, value_clip=0.01))
    entries = {entry.path: entry for entry in found.coordinator.layout.entries if entry.parameter}
    for old, new in zip(before.directions, after.directions, strict=True):
        for path, entry in entries.items():
            one, other = (each[entry.start : entry.stop].view(entry.shape) for each in (old, new))
            if path in TARGETS:
                source = entries["extractor.layer1.0.conv2.weight"]
                settings = {"granularity": granularity, "value_clip": 0.01}
                origin = old[source.start : source.stop].view(source.shape)
                assert torch.equal(
                    other, inco.cross_layer_gradient(target=one, source=origin, **settings)
                )
                assert not torch.equal(one, other)
            else:
                assert torch.equal(one, other)
    assert before.weights == [[1.0] * 4] * 3, "uniform"


def test_personal_tensors_are_neither_targets_nor_sources() -> None:
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
    one, other = (each.directions[0][entry.start : entry.stop] for each in (before, after))
    return not torch.equal(one, other)


@pytest.mark.parametrize("model", [NORMED, NORMED_MLP], ids=["cnn", "mlp"])
def test_without_a_pair_it_is_uniform_fedavg_bit_for_bit(model: ModelRecipe) -> None:
    found, fedavg = (
        run(run_spec(*methods, model=model), fleet=Ideal(), weighting="uniform")
        for methods in ([InCo()], [])
    )
    assert found.finished.model_sha256 == fedavg.finished.model_sha256
    assert same(found.tensors, fedavg.tensors)
    asked = run(run_spec(InCo(), model=model), fleet=Ideal())
    assert asked.finished.model_sha256 == found.finished.model_sha256


def others() -> list[Any]:
    given = {
        "alone": [],
        "fedprox": [FedProx(0.1)],
        "scaffold": [Scaffold()],
        "fedbn": [FedBN()],
        "mixup": [Mixup()],
        "fedadam": [FedAdam()],
    }
    return [pytest.param(methods, id=name) for name, methods in given.items()]


@pytest.mark.parametrize("methods", others())
def test_it_trains_with_other_methods(methods: list[Method]) -> None:
    found = run(run_spec(InCo(), *methods, model=BLOCKS))
    plain = run(run_spec(*methods, model=BLOCKS), weighting="uniform")
    assert not found.failures and found.finished.model_sha256 != plain.finished.model_sha256
    variances = [value for name, value in found.tensors.items() if name.endswith("running_var")]
    assert all((value >= 0).all() for value in variances)
    assert all(np.isfinite(value).all() for value in found.tensors.values())


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_a_resumed_run_has_the_bits_and_the_history_of_a_straight_one(
    schedule: Any, tmp_path: Path
) -> None:
    study = run_spec(InCo(), model=BLOCKS)
    straight = run(study, schedule, rounds=5)
    run(study, schedule, rounds=5, checkpoint_every=3, folder=str(tmp_path))
    resumed = run(study, schedule, rounds=5, resume=str(tmp_path / "checkpoints" / "round-000003"))
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)


@pytest.mark.parametrize("name", ["fedcda", "fedasync"])
def test_methods_without_a_mean_update_are_refused(name: str) -> None:
    class Other(Method):
        paper = "a test"

    Other.name = name
    with pytest.raises(ValueError, match=f"method 'inco' does not combine with method '{name}'"):
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
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.inco\.{key}="):
        InCo(**settings)
