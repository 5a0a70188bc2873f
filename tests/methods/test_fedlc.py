"""FedLC's margins and its two losses, clients with one class, and other methods next to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    NORMED_MLP,
    check_composition,
    coordinate,
    ran,
    run,
    run_spec,
    same,
    tiny,
)
from torch import Tensor

from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.data.partition import CSR, Partition
from raysim.methods import fedlc
from raysim.methods.fedbn import FedBN
from raysim.methods.fedlc import DENOMINATORS, FedLC
from raysim.methods.fedmix import FedMix
from raysim.methods.fedprox import FedProx
from raysim.methods.fedrs import FedRS
from raysim.methods.mixup import Mixup
from raysim.methods.scaffold import Scaffold
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
    found: Tensor = torch.func.grad(function)(logits)
    return found


# --- margins ------------------------------------------------------------------------------------------------------


def test_a_margin_falls_with_the_fourth_root_of_the_count() -> None:
    margins = fedlc.calibration_margins(class_counts=torch.tensor([1, 16, 81, 0]), tau=3.0)
    assert margins.tolist() == pytest.approx([3.0, 1.5, 1.0, torch.inf])


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_a_missing_class_has_no_finite_margin_unless_counts_have_a_floor(tau: float) -> None:
    zero = torch.tensor([0, 5])
    assert fedlc.calibration_margins(class_counts=zero, tau=tau)[0] == torch.inf
    assert fedlc.calibration_margins(class_counts=zero, tau=tau, count_floor=1.0)[0] == tau


# --- both losses --------------------------------------------------------------------------------------------------


def test_without_margins_or_with_equal_ones_it_is_the_cross_entropy() -> None:
    wanted = F.cross_entropy(LOGITS, ANY)
    assert torch.equal(loss(LOGITS, ANY, torch.tensor([1, 2, 3, 4, 5]), tau=0.0), wanted)
    for tau in (0.1, 1.0, 20.0):
        assert loss(LOGITS, ANY, EVEN, tau).item() == pytest.approx(wanted.item(), rel=1e-12)


def test_the_loss_over_all_classes_by_its_pairwise_form() -> None:
    margins = fedlc.calibration_margins(class_counts=COUNTS, tau=0.7)
    present = COUNTS > 0
    rows = []
    for z, y in zip(LOGITS, LABELS, strict=True):
        keep = present.clone()
        keep[y] = False
        rows.append(torch.log1p((z[keep] - z[y] + margins[y] - margins[keep]).exp().sum()))
    assert loss(LOGITS, tau=0.7).item() == pytest.approx(torch.stack(rows).mean().item(), rel=1e-12)


def test_the_printed_loss_follows_from_the_other_sample_by_sample() -> None:
    for z, y in zip(LOGITS, LABELS, strict=True):
        one = (z.unsqueeze(0), y.unsqueeze(0))
        assert loss(*one, denominator="others").item() == pytest.approx(
            loss(*one).expm1().log().item(), rel=1e-9
        )


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_a_constant_added_to_a_samples_logits_changes_nothing(denominator: str) -> None:
    moved = loss(LOGITS + random(7, 1, seed=1), denominator=denominator)
    assert moved.item() == pytest.approx(loss(LOGITS, denominator=denominator).item(), rel=1e-12)


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_no_gradient_reaches_missing_classes_and_that_of_a_sample_sums_to_zero(
    denominator: str,
) -> None:
    found = gradient(lambda z: loss(z, denominator=denominator))
    missing = COUNTS == 0
    assert torch.equal(found[:, missing], torch.zeros(7, 2, dtype=torch.float64))
    assert (found[:, ~missing] != 0).all()
    assert torch.allclose(found.sum(dim=1), torch.zeros(7, dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_the_loss_rises_with_the_true_classs_margin_and_falls_with_the_others(
    denominator: str,
) -> None:
    logits, label = LOGITS[:1], torch.tensor([2])

    def at(*counts: int) -> float:
        return loss(logits, label, torch.tensor(counts), denominator=denominator).item()

    base = at(20, 20, 20, 20, 20)
    assert at(20, 20, 5, 20, 20) > base > at(20, 20, 80, 20, 20)
    assert at(5, 20, 20, 20, 20) < base < at(80, 20, 20, 20, 20)


def test_a_tiny_floor_agrees_with_leaving_classes_out() -> None:
    assert loss(LOGITS, count_floor=1e-8).item() == pytest.approx(loss(LOGITS).item(), abs=1e-6)
    assert loss(LOGITS, count_floor=1.0) > loss(LOGITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_a_client_with_one_class_has_loss_and_gradient_zero(
    denominator: str, dtype: torch.dtype
) -> None:
    logits = LOGITS.to(dtype).repeat(40, 1)
    labels = SAME.repeat(40)
    assert loss(logits, labels, ONE, denominator=denominator).item() == 0.0
    found = gradient(lambda z: loss(z, labels, ONE, denominator=denominator), logits)
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_large_logits_in_float32_stay_finite(denominator: str) -> None:
    for sign in (1e4, -1e4):
        logits = (sign * LOGITS).float()
        assert loss(logits, denominator=denominator).isfinite()
        assert gradient(lambda z: loss(z, denominator=denominator), logits).isfinite().all()


def test_soft_targets_of_present_classes_have_a_finite_loss_and_gradient() -> None:
    targets = 0.3 * F.one_hot(LABELS, 5).double() + 0.7 * F.one_hot(LABELS.flip(0), 5).double()
    margins = fedlc.calibration_margins(class_counts=COUNTS, tau=1.0)

    def soft(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits - fedlc.shifts(margins, logits.dtype), targets)

    wanted = 0.3 * loss(LOGITS) + 0.7 * loss(LOGITS, LABELS.flip(0))
    assert soft(LOGITS).item() == pytest.approx(wanted.item(), rel=1e-12)
    assert torch.equal(gradient(soft)[:, COUNTS == 0], torch.zeros(7, 2, dtype=torch.float64))
    assert soft(LOGITS.float()).isfinite()


# --- in a run -----------------------------------------------------------------------------------------------------


def partitioned(*classes: set[int]) -> Any:
    """The tiny data on a client for each set of classes, which has all training samples of them."""
    data = tiny()
    rows, labels = np.sort(data.partition.train.indices), data.open().labels
    parts = [rows[np.isin(labels[rows], sorted(own))] for own in classes]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    tests = CSR(np.empty(0, np.int64), np.zeros_like(offsets))
    return replace(data, partition=Partition(CSR(np.concatenate(parts), offsets), tests))


SKEWED = partitioned({0, 1}, {1, 2, 3}, {4, 0}, {2, 3, 4})


def test_a_client_with_one_class_sends_what_it_received_and_is_counted() -> None:
    plain = Local(lr=0.5, momentum=0.9, batch=8)
    for denominator in DENOMINATORS:
        study = run_spec(
            FedLC(denominator=denominator), data=partitioned({0}, {1}, {2}, {3}), local=plain
        )  # type: ignore[arg-type]
        coordinator = coordinate(study)
        before = coordinator.server.vector.clone()
        found = ran(coordinator)
        assert torch.equal(found.coordinator.server.vector, before)
        assert [row["fedlc.one_class"] for row in found.rows] == [1.0] * 3
        assert [row["train_loss"] for row in found.rows] == [0.0] * 3
    mixed = run(
        run_spec(FedLC(), data=partitioned({0}, {1, 2}, {3, 4}, {1, 4}), local=plain), rounds=1
    )
    assert mixed.rows[0]["fedlc.one_class"] == 0.25


def test_without_margins_and_exclusion_it_is_fedavg_bit_for_bit() -> None:
    zero, fedavg = (
        run(run_spec(*methods, data=SKEWED, model=NORMED_MLP), fleet=Ideal())
        for methods in ([FedLC(0.0, count_floor=1.0)], [])
    )
    assert zero.finished.model_sha256 == fedavg.finished.model_sha256
    assert same(zero.tensors, fedavg.tensors)
    assert (
        run(run_spec(FedLC(0.0), data=SKEWED, model=NORMED_MLP)).finished.model_sha256
        != zero.finished.model_sha256
    )


def test_output_without_class_has_no_margin() -> None:
    class Watched(FedLC):
        def begin(self, job: LocalJob) -> None:
            super().begin(job)
            shifts.append(job.scratch["shifts"])

    shifts: list[Tensor] = []
    assert not run(run_spec(Watched(), Vhl(virtual_batch=4, virtual=10))).failures
    assert shifts
    for each in shifts:
        assert each.shape == (10,) and each[:5].any() and not each[5:].any()


def others() -> list[Any]:
    given = {
        "alone": [],
        "fedprox": [FedProx(0.1)],
        "scaffold": [Scaffold()],
        "fedbn": [FedBN()],
        "mixup": [Mixup()],
    }
    return [pytest.param(methods, id=name) for name, methods in given.items()]


@pytest.mark.parametrize("methods", others())
@pytest.mark.parametrize("settings", [{}, {"denominator": "others"}, {"count_floor": 1.0}], ids=str)
def test_it_trains_with_other_methods_where_clients_lack_classes(
    settings: Any, methods: list[Method]
) -> None:
    found = run(run_spec(FedLC(**settings), *methods, data=SKEWED, model=NORMED_MLP))
    fedavg = run(run_spec(*methods, data=SKEWED, model=NORMED_MLP))
    assert not found.failures and found.finished.model_sha256 != fedavg.finished.model_sha256


@pytest.mark.parametrize("other", [FedRS(), FedMix()], ids=lambda method: method.name)
def test_methods_that_change_the_same_loss_are_refused(other: Method) -> None:
    with pytest.raises(ValueError, match=f"method 'fedlc' .*method '{other.name}'"):
        check_composition([FedLC(), other])


@pytest.mark.parametrize(
    "settings", [{"tau": -0.1}, {"denominator": "other"}, {"count_floor": -1.0}], ids=str
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedlc\.{key}="):
        FedLC(**settings)


def test_a_floor_of_the_counts_bounds_the_margin_however_small_it_is() -> None:
    margins = fedlc.calibration_margins(class_counts=torch.tensor([0]), tau=1.0, count_floor=1e-299)
    assert margins.item() == pytest.approx(10**74.75)
