"""Test FedLC's losses for extreme class counts and for clients with one class, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    NORMED_MLP,
    check_composition,
    coordinate,
    run,
    run_spec,
    run_to_end,
    same_arrays,
    tiny_data,
)
from torch import Tensor

from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.data.partition import CSR, Partition
from raysim.methods import fedlc
from raysim.methods.fedlc import Denominator, FedLC
from raysim.methods.fedmix import FedMix
from raysim.methods.fedrs import FedRS
from raysim.methods.vhl import Vhl
from raysim.simulation.fleet import Ideal

COUNTS, LABELS = torch.tensor([40, 0, 3, 700, 0]), torch.tensor([0, 2, 2, 3, 3, 0, 3])
EVEN, ANY = torch.full((5,), 30), torch.tensor([0, 1, 2, 3, 4, 4, 1])
ONE, SAME = torch.tensor([0, 0, 40, 0, 0]), torch.full((7,), 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOGITS = random(7, 5)


def loss(
    logits: Tensor,
    labels: Tensor = LABELS,
    counts: Tensor = COUNTS,
    tau: float = 1.0,
    **others: Any,
) -> Tensor:
    return fedlc.calibrated_cross_entropy(
        logits=logits, labels=labels, class_counts=counts, tau=tau, **others
    )


def gradient(function: Callable[[Tensor], Tensor], logits: Tensor = LOGITS) -> Tensor:
    ended: Tensor = torch.func.grad(function)(logits)
    return ended


# --- margins ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_fedlc_margin_of_a_missing_class_is_infinite_if_minimum_sample_count_is_zero(
    tau: float,
) -> None:
    zero = torch.tensor([0, 5])
    assert fedlc.calibration_margins(class_counts=zero, tau=tau)[0] == torch.inf
    assert fedlc.calibration_margins(class_counts=zero, tau=tau, count_floor=1.0)[0] == tau


# --- both losses ------------------------------------------------------------------------------


@pytest.mark.parametrize("denominator", get_args(Denominator))
def test_fedlc_gradient_of_missing_classes_is_zero(
    denominator: str,
) -> None:
    ended = gradient(lambda z: loss(z, denominator=denominator))
    missing = COUNTS == 0
    assert torch.equal(ended[:, missing], torch.zeros(7, 2, dtype=torch.float64))
    assert (ended[:, ~missing] != 0).all()
    assert torch.allclose(ended.sum(dim=1), torch.zeros(7, dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("denominator", get_args(Denominator))
def test_fedlc_loss_and_gradient_are_zero_for_a_client_of_one_class(
    denominator: str, dtype: torch.dtype
) -> None:
    logits = LOGITS.to(dtype).repeat(40, 1)
    labels = SAME.repeat(40)
    assert loss(logits, labels, ONE, denominator=denominator).item() == 0.0
    ended = gradient(lambda z: loss(z, labels, ONE, denominator=denominator), logits)
    assert torch.equal(ended, torch.zeros_like(ended))


@pytest.mark.parametrize("denominator", get_args(Denominator))
def test_fedlc_loss_of_large_logits_is_finite(denominator: str) -> None:
    for sign in (1e4, -1e4):
        logits = (sign * LOGITS).float()
        assert loss(logits, denominator=denominator).isfinite()
        assert gradient(lambda z: loss(z, denominator=denominator), logits).isfinite().all()


def test_fedlc_loss_of_soft_targets_is_finite() -> None:
    targets = 0.3 * F.one_hot(LABELS, 5).double() + 0.7 * F.one_hot(LABELS.flip(0), 5).double()
    margins = fedlc.calibration_margins(class_counts=COUNTS, tau=1.0)

    def soft(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits - fedlc.shifts(margins, logits.dtype), targets)

    wanted = 0.3 * loss(LOGITS) + 0.7 * loss(LOGITS, LABELS.flip(0))
    assert soft(LOGITS).item() == pytest.approx(wanted.item(), rel=1e-12)
    assert torch.equal(gradient(soft)[:, COUNTS == 0], torch.zeros(7, 2, dtype=torch.float64))
    assert soft(LOGITS.float()).isfinite()


# --- in a run ---------------------------------------------------------------------------------


def partitioned(*classes: set[int]) -> Any:
    """Return the samples of `tiny_data`, divided among new clients.

    classes: for each new client, the classes of its samples.
    """
    data = tiny_data()
    rows, labels = np.sort(data.partition.train.indices), data.open().labels
    parts = [rows[np.isin(labels[rows], sorted(own))] for own in classes]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    tests = CSR(np.empty(0, np.int64), np.zeros_like(offsets))
    return replace(data, partition=Partition(CSR(np.concatenate(parts), offsets), tests))


SKEWED = partitioned({0, 1}, {1, 2, 3}, {4, 0}, {2, 3, 4})


def test_fedlc_does_not_train_clients_of_one_class_and_reports_how_many() -> None:
    plain = Local(lr=0.5, momentum=0.9, batch=8)
    for denominator in get_args(Denominator):
        study = run_spec(
            FedLC(denominator=denominator), data=partitioned({0}, {1}, {2}, {3}), local=plain
        )  # type: ignore[arg-type]
        coordinator = coordinate(study)
        before = coordinator.server.vector.clone()
        ended = run_to_end(coordinator)
        assert torch.equal(ended.coordinator.server.vector, before)
        assert [row["fedlc.one_class"] for row in ended.rows] == [1.0] * 3
        assert [row["train_loss"] for row in ended.rows] == [0.0] * 3
    mixed = run(
        run_spec(FedLC(), data=partitioned({0}, {1, 2}, {3, 4}, {1, 4}), local=plain), rounds=1
    )
    assert mixed.rows[0]["fedlc.one_class"] == 0.25


def test_fedlc_without_margins_equals_fedavg_exactly() -> None:
    zero, fedavg = (
        run(run_spec(*methods, data=SKEWED, model=NORMED_MLP), fleet=Ideal())
        for methods in ([FedLC(0.0, count_floor=1.0)], [])
    )
    assert zero.finished.model_sha256 == fedavg.finished.model_sha256
    assert same_arrays(zero.tensors, fedavg.tensors)
    assert (
        run(run_spec(FedLC(0.0), data=SKEWED, model=NORMED_MLP)).finished.model_sha256
        != zero.finished.model_sha256
    )


def test_fedlc_margins_are_zero_for_the_virtual_classes_that_vhl_adds() -> None:
    class Watched(FedLC):
        def begin(self, job: LocalJob) -> None:
            super().begin(job)
            shifts.append(job.scratch["shifts"])

    shifts: list[Tensor] = []
    assert not run(run_spec(Watched(), Vhl(virtual_batch=4, virtual=10))).failures
    assert shifts
    for shift in shifts:
        assert shift.shape == (10,)
        assert shift[:5].any()
        assert not shift[5:].any()


@pytest.mark.parametrize("other", [FedRS(), FedMix()], ids=lambda method: method.name)
def test_fedlc_refuses_methods_that_replace_the_loss(other: Method) -> None:
    with pytest.raises(ValueError, match=f"method 'fedlc' .*method '{other.name}'"):
        check_composition([FedLC(), other])


@pytest.mark.parametrize(
    "settings", [{"tau": -0.1}, {"denominator": "other"}, {"count_floor": -1.0}], ids=str
)
def test_fedlc_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedlc\.{key}="):
        FedLC(**settings)


def test_fedlc_margin_is_large_but_finite_if_count_floor_is_tiny() -> None:
    margins = fedlc.calibration_margins(class_counts=torch.tensor([0]), tau=1.0, count_floor=1e-299)
    assert margins.item() == pytest.approx(10**74.75)
