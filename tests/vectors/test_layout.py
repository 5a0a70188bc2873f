"""Test the flat vector: order, views, what is sent and what stays on clients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raysim.vectors.layout import Vector, plan_layout


def networks() -> dict[str, nn.Module]:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    return {"model": model, "extra": nn.Linear(2, 1)}


BN = (
    "model.1.weight",
    "model.1.bias",
    "model.1.running_mean",
    "model.1.running_var",
    "model.1.num_batches_tracked",
)


def flat(nets: dict[str, nn.Module], *personal: str) -> Vector:
    return Vector(nets, plan_layout(nets, personal), torch.device("cpu"), torch.float32)


def test_shared_tensors_come_before_personal_ones() -> None:
    layout = plan_layout(
        networks(), ("model.1.weight", "model.1.running_var", "model.1.num_batches_tracked")
    )
    assert [(entry.name, entry.start, entry.stop) for entry in layout.entries] == [
        ("model.0.weight", 0, 6),
        ("model.0.bias", 6, 8),
        ("model.1.bias", 8, 10),
        ("model.2.weight", 10, 14),
        ("extra.weight", 14, 16),
        ("extra.bias", 16, 17),
        ("model.1.running_mean", 17, 19),
        ("model.1.weight", 19, 21),
        ("model.1.running_var", 21, 23),
    ]
    assert (layout.trained, layout.shared, layout.total, layout.personal) == (17, 19, 23, 4)
    assert (layout.shared_counters, layout.total_counters) == (0, 1)


def test_integer_buffers_are_in_a_separate_vector() -> None:
    layout = plan_layout(networks())
    assert [entry.name for entry in layout.counters] == ["model.1.num_batches_tracked"]
    assert (layout.shared_counters, layout.total_counters, layout.personal) == (1, 1, 0)


def test_layout_of_only_personal_tensors_has_no_shared_parameters() -> None:
    nets = {"model": nn.Linear(2, 2)}
    layout = plan_layout(nets, ("model.weight", "model.bias"))
    assert (layout.trained, layout.shared, layout.total) == (0, 0, 6)


def test_unknown_personal_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.9\.weight"):
        plan_layout(networks(), ("model.9.weight",))


def test_layout_leaves_out_frozen_parameters() -> None:
    nets = networks()
    nets["model"][0].weight.requires_grad_(False)  # type: ignore[index]
    assert "model.0.weight" not in {entry.name for entry in plan_layout(nets).entries}


def test_network_has_the_same_parameters_after_it_is_stored_in_a_vector() -> None:
    nets = networks()
    before = {name: value.clone() for name, value in nets["model"].state_dict().items()}
    vector = flat(nets, *BN)
    named = vector.named(vector.data, vector.counters)
    assert all(torch.equal(named[f"model.{name}"], value) for name, value in before.items())
    assert all(
        torch.equal(value, before[name]) for name, value in nets["model"].state_dict().items()
    )


def test_change_of_the_vector_changes_the_modules_and_vice_versa() -> None:
    nets = networks()
    vector = flat(nets)
    vector.data.fill_(0.5)
    assert all((value == 0.5).all() for value in nets["model"].parameters())
    assert (nets["model"][1].running_var == 0.5).all()  # type: ignore[index]
    nets["model"].train()(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    named = vector.named(vector.data, vector.counters)
    assert not (named["model.1.running_mean"] == 0.5).any()
    assert named["model.1.num_batches_tracked"] == 1


def test_backward_pass_works_on_views_of_the_vector() -> None:
    nets = networks()
    vector = flat(nets)
    loss = nets["model"](torch.ones(4, 3)).square().sum()
    (grad,) = torch.autograd.grad(loss, vector.tensors(vector.layout.entries_in(["model.2"])))
    assert grad.shape == (2, 2)


def test_vector_starts_with_the_shared_parameters() -> None:
    vector = flat(networks(), *BN)
    assert len(vector.shared) == vector.layout.shared == 15
    assert len(vector.personal) == vector.layout.personal == 8
    vector.personal.zero_()
    assert vector.data[15:].abs().sum() == 0
    assert "model.1.weight" not in vector.named(vector.shared, vector.counters[:0])


def test_layout_finds_tensors_of_a_network_or_module() -> None:
    layout = plan_layout(
        {"model": nn.ModuleDict({"head": nn.Linear(1, 1), "header": nn.Linear(1, 1)})}
    )
    assert [entry.name for entry in layout.entries_in(["model.head"])] == [
        "model.head.weight",
        "model.head.bias",
    ]
    assert len(layout.entries_in(["model"])) == 4


def test_contiguous_slices_never_mix_shared_and_personal_tensors() -> None:
    nets = {
        "model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    }  # without buffers both parts touch
    layout = plan_layout(nets, ("model.1.weight", "model.1.bias"))
    assert layout.stretches(layout.entries_in(["model"])) == (slice(0, 6), slice(6, 9))
    assert layout.stretches([layout.entries[0], layout.entries[3]]) == (slice(0, 4), slice(8, 9))


def test_vector_supports_double_precision() -> None:
    nets = networks()
    vector = Vector(nets, plan_layout(nets), torch.device("cpu"), torch.float64)
    assert vector.data.dtype == nets["extra"].weight.dtype == torch.float64


def test_layout_has_no_frozen_parameter_even_if_it_is_declared_personal() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    layout = plan_layout({"model": model}, ["model.bias"])
    assert [entry.name for entry in layout.entries] == ["model.weight"] and not layout.personal


def test_layout_leaves_out_buffers_that_are_not_saved() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("angles", torch.arange(3.0), persistent=False)
    model.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
    layout = plan_layout({"model": model}, ["model.angles"])
    assert [entry.name for entry in layout.entries] == ["model.weight", "model.bias"]
    assert layout.counters == () and layout.personal == 0
    vector = Vector({"model": model}, layout, torch.device("cpu"), torch.float64)
    assert vector.data.shape == (6,) and model.get_buffer("angles").tolist() == [0.0, 1.0, 2.0]
