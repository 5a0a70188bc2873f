"""Test that attackers send what their papers say, and that robust rules withstand them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    LOCAL,
    NORMED_MLP,
    SEED,
    coordinate,
    run,
    run_spec,
    run_to_end,
    several_workers,
    tiny_data,
    with_settings,
)

from raysim.api.method import Method
from raysim.data.federated import federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.experiment.build import build
from raysim.methods.coordinate_median import CoordinateMedian
from raysim.methods.geometric_median import GeometricMedian
from raysim.methods.krum import Krum
from raysim.methods.norm_clipping import NormClipping
from raysim.methods.trimmed_mean import TrimmedMean
from raysim.primitives.errors import RefusedError
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.attack import Attack, largest_z, shifted_mean
from raysim.training.run_spec import Faults, declare_run
from textbook import attackers
from textbook.check import Row, check

DATA = tiny_data(clients=7, samples=120)


def seven(kind: Any, share: float = 0.3, normed: bool = False, **settings: Any) -> Row:
    """Return a comparison of an attacked run with its textbook.

    In each round of the run, all seven clients train.
    kind, share, settings: the arguments of `Attack`.
    normed: True: the model has BatchNorm.
    """
    study = {"data": DATA} | ({"model": NORMED_MLP} if normed else {})
    book = partial(attackers.attacked, kind=kind, share=share, **settings)
    return Row(book, list, study, {"attack": Attack(kind, share, **settings)}, Synchronous(7))


STALE: dict[str, Any] = {"schedule": Buffered(concurrency=5, size=4)}
ROWS = {
    "sign_flip": seven("sign_flip"),
    "sign_flip, longer, with BatchNorm": seven("sign_flip", 0.5, normed=True, scale=3.0),
    "scaled": seven("scaled", scale=4.0),
    "gaussian": seven("gaussian", sigma=0.1),
    "alie": seven("alie"),
    "alie of stale updates": replace(seven("alie", 0.3, z=1.5), **STALE),
}


@pytest.mark.parametrize("name", ROWS)
def test_attacked_run_equals_its_textbook_computation(name: str) -> None:
    check(ROWS[name])


def test_label_flip_changes_the_attackers_training_labels() -> None:
    source = Synthetic(samples=120, test_samples=20, classes=5)
    data = federate(source, IID(clients=6, test_fraction=0.2), SEED)
    spec = with_settings(run_spec(data=data), attack=Attack("label_flip", 0.34))
    truth = torch.from_numpy(data.open().labels)
    seen = spec.attackers.flip_labels(truth, classes=5)
    theirs = np.concatenate(
        [data.partition.train.rows(client) for client in spec.attackers.clients]
    )
    assert len(spec.attackers.clients) == 2 and len(theirs) == 32
    assert (seen != truth).nonzero().flatten().tolist() == sorted(
        row for row in theirs.tolist() if truth[row] != 2
    )
    assert (seen[theirs] == 4 - truth[theirs]).all()
    honest, attacked = run(run_spec(data=data)), run(spec)
    assert (
        attacked.bits != honest.bits
        and attacked.rows[0]["attackers"] is not None
        and "attackers" not in honest.rows[0]
    )


def test_attacked_run_has_same_bits_on_several_workers_and_after_resume(tmp_path: Any) -> None:
    spec = with_settings(run_spec(data=DATA), attack=Attack("gaussian", 0.5, sigma=0.1))
    whole = run(spec)
    assert run_to_end(coordinate(spec, runtime=several_workers(spec, 2))).bits == whole.bits
    run_to_end(coordinate(spec, rounds=1, checkpoint_every=1, folder=str(tmp_path)))
    later = run_to_end(
        coordinate(spec, resume=str(tmp_path / "checkpoints/round-000001"), folder=str(tmp_path))
    )
    assert later.bits == whole.bits and later.history == whole.history


@pytest.mark.parametrize(
    "rule",
    [CoordinateMedian(), TrimmedMean(0.3), Krum(2), GeometricMedian(50), NormClipping(1.0)],
    ids=lambda r: r.name,
)
def test_robust_rules_withstand_attacks_that_break_the_mean(rule: Method) -> None:
    def length(*methods: Method) -> float:
        spec = run_spec(*methods, data=DATA, local=replace(LOCAL, batch=8))
        spec = with_settings(spec, attack=Attack("scaled", 0.3, scale=1e6))
        return float(run(spec, Synchronous(7), rounds=1).coordinator.server.vector.norm())

    assert length(rule) < 1e2 < 1e4 < length()


def test_client_whose_attack_exceeds_the_norm_limit_counts_as_failed() -> None:
    spec = with_settings(run_spec(data=DATA), attack=Attack("scaled", 0.3, scale=1e6))
    attacked = run(spec, Synchronous(7), faults=Faults(0.3, norm=100.0))
    assert {failure.client for failure in attacked.failures} == {*spec.attackers.clients.tolist()}
    assert (
        "client" in attacked.failures[0].error and "faults.norm=100" in attacked.failures[0].error
    )
    assert [row["attackers"] for row in attacked.rows] == [
        0,
        0,
        0,
    ] and attacked.coordinator.server.vector.norm() < 100


def test_alie_equals_a_computation_by_hand() -> None:
    assert largest_z(50, 12) == pytest.approx(attackers.z_max(50, 12)) and largest_z(10, 1) == 0.0
    assert largest_z(4, 3) == 0.0 and 0 < largest_z(5, 3) < 1
    rows = [torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0])]
    assert shifted_mean(rows, 2.0).tolist() == [4.0, 0.0]


@pytest.mark.parametrize(
    ("attack", "size", "key"),
    [
        (Attack("scaled", 0.01, 2.0), 9, "attack.share"),
        (Attack("alie", 0.3), 2, "attack.kind"),
    ],
)
def test_attack_that_changes_nothing_is_refused(attack: Attack, size: int, key: str) -> None:
    spec = replace(with_settings(run_spec(data=DATA), attack=attack), size=size)
    with pytest.raises(ValueError, match=key):
        declare_run(spec)


def test_label_flip_is_refused_without_classes() -> None:
    with pytest.raises(RefusedError, match=r"attack\.kind=label_flip"):
        build(["data=diabetes", "model=mlp", "partition=iid", "attack.kind=label_flip"])


def test_label_flip_is_refused_if_clients_share_samples() -> None:
    partition = DATA.partition
    train = replace(partition.train, indices=np.zeros_like(partition.train.indices))
    data = replace(DATA, partition=replace(partition, train=train))
    with pytest.raises(ValueError, match=r"attack\.kind=label_flip"):
        declare_run(with_settings(run_spec(data=data), attack=Attack("label_flip", 0.3)))
