"""Test training losses that are given by name, as a user's function or as an object."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import CrossEntropyLoss
from torch.nn.functional import cross_entropy, huber_loss

import raysim
from raysim.api.losses import Focal, Huber, Smoothed
from raysim.experiment.config_files import load_yaml
from raysim.primitives.errors import RefusedError

SMALL: dict[str, Any] = {
    "data": "synthetic",
    "model": "mlp",
    "partition": {"clients": 4},
    "schedule": {"cohort": 2},
    "rounds": 2,
    "runtime": "inprocess",
    "tracking": "none",
    "quiet": True,
}
OWN = """
from torch.nn.functional import cross_entropy

def halved(outputs, labels, by: float = 2.0):
    return cross_entropy(outputs, labels, reduction="none") / by

def summed(outputs, labels):
    return cross_entropy(outputs, labels)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("ownlosses/conf/loss").mkdir(parents=True)
    Path("ownlosses/__init__.py").write_text(OWN)
    Path("ownlosses/conf/loss/halved.yaml").write_text("_target_: ownlosses.halved\nby: 2.0\n")


def test_losses_equal_those_of_pytorch() -> None:
    outputs, classes, values = torch.randn(6, 3), torch.arange(6) % 3, torch.randn(6, 3)
    assert torch.equal(
        Smoothed(0.2)(outputs, classes),
        cross_entropy(outputs, classes, reduction="none", label_smoothing=0.2),
    )
    assert torch.allclose(
        Huber(0.5)(outputs, values).mean(), huber_loss(outputs, values, delta=0.5)
    )
    usual, right = (
        cross_entropy(outputs, classes, reduction="none"),
        outputs.softmax(1)[range(6), classes],
    )
    assert torch.allclose(Focal(2.0)(outputs, classes), (1 - right) ** 2 * usual, atol=1e-6)


def test_custom_loss_is_used_in_training_and_in_scores_and_after_resume() -> None:
    """Train with half the loss at twice the learning rate, which gives the same model."""
    usual = raysim.run(**SMALL, local={"lr": 0.1}, out="usual")
    halved = importlib.import_module("ownlosses").halved
    half = SMALL | {"local": {"lr": 0.2}, "allow": ["ownlosses"]}
    by_word = raysim.run("loss=halved", **half | {"rounds": 1}, out="word")
    by_word = raysim.run("out=word resume=latest rounds=2", allow=["ownlosses"], quiet=True)
    by_object = raysim.run(**half, loss=halved, out="object")
    for run in (by_word, by_object):
        assert run.summary["model_sha256"] == usual.summary["model_sha256"]
        for key in ("train_loss", "loss_global"):
            wanted = [(row[key] or 0) / 2 for row in usual.rows]
            assert [row[key] for row in run.rows] == pytest.approx(wanted, rel=1e-6)
    assert load_yaml(Path("object/config.yaml"))["loss"] == {"_target_": "ownlosses.halved"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"loss": "huber"}, "loss=huber is for regression, but this data is for classification"),
        (
            {"loss": "focal", "methods": ["fedlc"]},
            "loss=focal .* 'fedlc'",
        ),
        (
            {"loss": cross_entropy},
            "loss=cross_entropy returns",
        ),
        ({"loss": Huber}, r"^loss=Huber is a class"),
        (
            {"loss": lambda outputs: outputs},
            "loss=<lambda> fails",
        ),
        (
            {"loss": lambda outputs, labels: None},
            "loss=<lambda> returns nothing",
        ),
        (
            {"loss": lambda outputs, labels: 0.5},
            "loss=<lambda> returns a float",
        ),
        ({"loss": CrossEntropyLoss()}, "loss=CrossEntropyLoss returns"),
        ({"loss": "focl"}, "loss=focl does not exist: did you mean focal"),
    ],
)
def test_unusable_loss_is_refused_in_one_line(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RefusedError, match=sentence) as refused:
        raysim.run(**SMALL, **given)
    assert "\n" not in str(refused.value)
