"""Test FedRS's head without a bias, its loss with labels from Mixup, and what it refuses."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    NORMED_MLP,
    BiasFreeMlp,
    check_composition,
    run,
    run_spec,
    same_arrays,
    tiny_data,
)
from torch import Tensor

from raysim.api.context import Outputs
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.data.partition import CSR, Partition
from raysim.methods import fedrs
from raysim.methods.fedbn import FedBN
from raysim.methods.fedlc import FedLC
from raysim.methods.fedmix import FedMix
from raysim.methods.fedprox import FedProx
from raysim.methods.fedrs import FedRS, ScaleKind
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.methods.scaffold import Scaffold
from raysim.simulation.fleet import Ideal
from raysim.training.run_spec import build_networks

COUNTS, LABELS = torch.tensor([40, 0, 3, 700, 0]), torch.tensor([0, 2, 2, 3, 3, 0, 3])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOGITS = random(7, 5)


def loss(logits: Tensor, counts: Tensor = COUNTS, alpha: float = 0.3, **others: Any) -> Tensor:
    return fedrs.restricted_softmax_cross_entropy(
        logits=logits, labels=LABELS, class_counts=counts, alpha=alpha, **others
    )


# --- the head ---------------------------------------------------------------------------------


def test_fedrs_removes_the_bias_of_the_head_but_not_its_weights() -> None:
    (with_bias, _), (without, layout) = (
        build_networks(run_spec(*m, model=NORMED_MLP)) for m in ([], [FedRS()])
    )
    before, after = with_bias["model"].state_dict(), without["model"].state_dict()
    assert set(before) - set(after) == {"head.bias"}
    assert all(torch.equal(value, before[key]) for key, value in after.items())
    assert "model.head.bias" not in {entry.name for entry in layout.entries}


def test_fedrs_with_alpha_1_equals_fedavg_of_a_model_whose_head_has_no_bias() -> None:
    one, fedavg, half = (
        run(run_spec(*methods, model=model, data=skewed()), fleet=Ideal())
        for methods, model in (
            ([FedRS(1.0)], NORMED_MLP),
            ([], BiasFreeMlp()),
            ([FedRS()], NORMED_MLP),
        )
    )
    assert one.finished.model_sha256 == fedavg.finished.model_sha256 != half.finished.model_sha256
    assert same_arrays(one.tensors, fedavg.tensors)


# --- in a run ---------------------------------------------------------------------------------


@functools.cache
def skewed() -> Any:
    """Return the samples of `tiny_data`, divided among four new clients.

    Each client has only two or three of the five classes.
    """
    data = tiny_data()
    rows, labels = np.sort(data.partition.train.indices), data.open().labels
    parts = [rows[np.isin(labels[rows], own)] for own in ([0, 1], [1, 2, 3], [4, 0], [2, 3, 4])]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    tests = CSR(np.empty(0, np.int64), np.zeros_like(offsets))
    return replace(data, partition=Partition(CSR(np.concatenate(parts), offsets), tests))


@pytest.mark.parametrize("kind", get_args(ScaleKind))
def test_fedrs_loss_of_mixed_labels_uses_scaled_logits(kind: Any) -> None:
    trained = set()

    class Watched(FedRS):
        def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
            changed = super().loss(job, out, loss)
            labels = skewed().open().labels[skewed().partition.train.rows(job.client)]
            counts = torch.from_numpy(np.bincount(labels, minlength=5))
            scales = fedrs.class_scales(class_counts=counts, alpha=0.3, kind=kind)
            first, second, share = out.batch.pair  # type: ignore[misc]
            first_loss, second_loss = (
                F.cross_entropy(out.logits * scales.float(), targets) for targets in (first, second)
            )
            mixed = share * first_loss + (1 - share) * second_loss
            assert torch.allclose(changed, mixed.float(), rtol=1e-5)
            trained.add(job.client)
            return changed

    result = run(run_spec(Watched(0.3, kind), Mixup(5.0), data=skewed()), rounds=2)
    assert not result.failures and trained == {0, 1, 2, 3}


def others() -> list[Any]:
    given = {
        "alone": [],
        "fedprox": [FedProx(0.1)],
        "scaffold": [Scaffold()],
        "fedbn": [FedBN()],
        "mixup": [Mixup()],
    }
    return [pytest.param(methods, id=name) for name, methods in given.items()]


def test_fedrs_does_not_scale_outputs_that_are_not_classes() -> None:
    job: Any = SimpleNamespace(
        class_counts=lambda: COUNTS, num_classes=7, params=LOGITS, scratch={}
    )
    FedRS(0.3).begin(job)
    assert job.scratch["scales"].tolist() == [1, 0.3, 1, 1, 0.3, 1, 1]


@pytest.mark.parametrize("other", [Moon(), FedLC(), FedMix()], ids=lambda method: method.name)
def test_fedrs_refuses_moon_fedlc_and_fedmix(other: Method) -> None:
    with pytest.raises(ValueError, match=f"method 'fedrs' .*method '{other.name}'"):
        check_composition([FedRS(), other])


@pytest.mark.parametrize(
    "settings", [{"alpha": -0.1}, {"alpha": 1.1}, {"kind": "relativ"}], ids=str
)
def test_fedrs_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedrs\.{key}="):
        FedRS(**settings)
