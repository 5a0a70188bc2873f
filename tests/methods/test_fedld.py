"""Test edge cases of FedLD's penalties and principal gradients, and which settings are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tiny_runs import (
    make_server,
    run,
    run_spec,
)
from torch import Tensor, nn

from raysim.api.declarations import Task
from raysim.api.messages import Update
from raysim.api.method import Method
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.experiment.instantiate import TARGET, build_object, defaults, resolve
from raysim.methods import fedld
from raysim.methods.fedld import DampedMargin, MarginControl, PrincipalGradient
from raysim.methods.mixup import Mixup
from raysim.simulation.server import Server
from raysim.vectors.layout import plan_layout


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    assert got.shape == want.shape and torch.allclose(got, want, rtol=tolerance, atol=tolerance), (
        f"{got} is not {want}"
    )


# --- the penalties ----------------------------------------------------------------------------
LOGITS, LABELS = 2 * random(6, 4), torch.tensor([0, 3, 1, 1, 2, 0])


def penalty(kind: str, logits: Tensor = LOGITS, lam: float = 1.0, threshold: float = 0.0) -> Tensor:
    return fedld.margin_control_penalty(
        logits=logits, lam=lam, kind=kind, labels=LABELS, threshold=threshold
    )


def test_fedld_refuses_unknown_kind_of_penalty() -> None:
    with pytest.raises(ValueError, match="kind='log'"):
        penalty("log")


# --- principal gradients ----------------------------------------------------------------------
GRADIENTS, WEIGHTS = (
    random(5, 12) * torch.tensor([3.0, 1.0, 0.5, 2.0, 1.5])[:, None],
    torch.tensor([5.0, 1, 3, 2, 4]),
)


def revised(gradients: Tensor = GRADIENTS, components: int = 4, **others: Any) -> Tensor:
    return fedld.revise_gradients(gradients=gradients, num_components=components, **others)


def aggregate(
    gradients: Tensor = GRADIENTS, components: int = 4, weights: Tensor = WEIGHTS, **others: Any
) -> Tensor:
    return fedld.principal_gradient_aggregate(
        gradients=gradients, weights=weights, num_components=components, **others
    )


@pytest.mark.parametrize("components", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fedld_does_not_change_updates_that_are_all_identical(
    components: int, dtype: torch.dtype
) -> None:
    row = random(30).to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    close(aggregate(row.expand(4, 30), components, torch.tensor([1.0, 5, 2, 2])), row, tolerance)
    close(revised(row.expand(4, 30), components), row.expand(4, 30), tolerance)


def test_fedld_returns_a_single_update_bit_for_bit() -> None:
    for scale in (1e-6, 1.0, 3e5):
        row = scale * random(1, 50).float()
        assert torch.equal(revised(row, 1), row)
        assert torch.equal(aggregate(row, 1, torch.ones(1)), row[0])


@pytest.mark.parametrize("normalization", get_args(fedld.Normalization))
def test_fedld_returns_zero_for_updates_of_zero(normalization: str) -> None:
    zeros = torch.zeros(4, 6)
    assert torch.equal(revised(zeros, 3, normalization=normalization), zeros)
    assert torch.equal(aggregate(zeros, 3, torch.ones(4), normalization=normalization), zeros[0])
    one = torch.cat([GRADIENTS, torch.zeros(1, 12)])
    assert not revised(one, normalization=normalization)[-1].any(), (
        "nor does a single one become noise"
    )


def test_fedld_removes_update_outside_principal_directions() -> None:
    rows = torch.tensor([[3.0, 0, 0], [2.0, 0, 0], [0, 1.0, 0]]).double()
    assert torch.equal(
        revised(rows, 1), torch.tensor([[3.0, 0, 0], [2.0, 0, 0], [0, 0, 0]]).double()
    )


# --- on the server ----------------------------------------------------------------------------
LAYOUT = plan_layout({"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))})
COUNTS = np.array([7, 1, 13, 4, 9, 22, 3, 5])
DELTAS = np.random.default_rng(0).standard_normal((8, LAYOUT.shared)).astype(np.float32)


def step(clients: list[int], *methods: Method, weighting: Any = "samples") -> Server:
    start, counter = torch.zeros(LAYOUT.shared), torch.zeros(1, dtype=torch.int64)
    server = make_server(
        LAYOUT, start, counter, methods, COUNTS, 0, Task((1, 2, 2), 3, 8), weighting
    )
    updates = [Update(c, c, 0, 9, 9, 1, 0.5, 0.0, np.array([c]), delta=DELTAS[c]) for c in clients]
    server.step(updates, {}, [0] * len(updates), {})
    return server


def test_fedld_with_one_participant_equals_fedavg_exactly() -> None:
    assert torch.equal(step([4], PrincipalGradient()).vector, step([4]).vector)


def test_fedld_averages_tensors_of_one_entry_and_does_not_project_them() -> None:
    values = torch.tensor([[1.0], [-2.0], [4.0]]).double()
    close(aggregate(values, 2, torch.tensor([1.0, 1, 2])), torch.tensor([7 / 4]).double())


# --- in a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("methods", [[MarginControl(1.0, "threshold")], [DampedMargin()]])
def test_fedld_margin_loss_accepts_soft_labels(methods: list[Method]) -> None:
    ended = run(run_spec(Mixup(), *methods), rounds=2)
    assert not ended.failures
    assert ended.finished.model_sha256 != run(run_spec(Mixup()), rounds=2).finished.model_sha256


# --- configuration ----------------------------------------------------------------------------


def test_fedld_options_select_methods_and_use_the_defaults_of_their_classes() -> None:
    for option, parts in (
        ("fedld", ["fedld_margin", "fedld_principal"]),
        ("fedld_margin", ["fedld_margin"]),
        ("fedld_principal", ["fedld_principal"]),
        ("fedld_damped", ["fedld_damped"]),
    ):
        nodes = to_dict(compose([f"method=[{option}]"]))["method"]
        assert list(nodes) == parts
        for name, node in nodes.items():
            cls = resolve(node[TARGET], name)
            assert build_object(cls, node, f"method.{name}").name == name  # type: ignore[attr-defined]
            assert {key: node[key] for key in node if key != TARGET} == defaults(cls)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MarginControl(-1.0), "method.fedld_margin.lam=-1.0"),
        (lambda: MarginControl(kind="log"), "method.fedld_margin.kind='log'"),  # type: ignore[arg-type]
        (
            lambda: MarginControl(threshold=1.0),
            "method.fedld_margin.threshold=1.0",
        ),
        (lambda: DampedMargin(0.0), "method.fedld_damped.temperature=0.0"),
        (
            lambda: PrincipalGradient(0.0),
            "method.fedld_principal.fraction=0.0",
        ),
        (lambda: PrincipalGradient(tol=-1.0), "method.fedld_principal.tol=-1.0"),
        (
            lambda: PrincipalGradient(granularity="layer"),
            "method.fedld_principal.granularity='layer'",
        ),  # type: ignore[arg-type]
    ],
)
def test_fedld_settings_out_of_range_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        make()
    assert says in str(refused.value)


@pytest.mark.parametrize("function", [revised, aggregate])
def test_fedld_refuses_unknown_normalization(
    function: Callable[..., Tensor],
) -> None:
    with pytest.raises(ValueError, match="normalization='l1'"):
        function(normalization="l1")


def test_fedld_aggregate_has_a_larger_norm_than_the_mean_of_the_updates() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        updates = torch.randn(5, 1000, generator=generator) + torch.randn(
            1, 1000, generator=generator
        )
        revised = fedld.principal_gradient_aggregate(
            gradients=updates, weights=torch.ones(5), num_components=4
        )
        ratio = float(revised.norm() / updates.mean(0).norm())
        assert 1.2 < ratio < 1.3
