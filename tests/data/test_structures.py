"""Test targets that are dictionaries of arrays, such as boxes, with a user's loss and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quick_runs import FAST
from tiny_runs import coordinate, run, run_spec, run_to_end, several_workers
from torch import Tensor, nn
from torch.utils.data import Dataset

import raysim
from raysim.api.declarations import Local
from raysim.api.structures import unpack_targets
from raysim.data.arrays import store_arrays
from raysim.data.federated import federate
from raysim.data.fields import pack_targets
from raysim.data.partition import IID
from raysim.models.split import CustomModel
from raysim.primitives.errors import RefusedError

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(60, 4)).astype(np.float32)
TARGETS = [
    {"boxes": RNG.random((row % 3, 4)).astype(np.float32), "kinds": np.arange(row % 3), "id": row}
    for row in range(60)
]


def outputs_of(num_classes: int) -> nn.Module:
    assert num_classes == 0
    return nn.Linear(4, 5)


def box_loss(outputs: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    assert len(outputs) == len(targets)
    return torch.stack(
        [(out[4] - len(t["boxes"])) ** 2 for out, t in zip(outputs, targets, strict=True)]
    )


def miscounted(outputs: Tensor, targets: list[dict[str, Tensor]]) -> float:
    counts = [len(target["boxes"]) for target in targets]
    return float(np.mean(outputs[:, 4].round().numpy() != counts))


class Padded:
    """A loss for a network that predicts the number of boxes of each sample.

    The loss of a sample is the squared error of this number. `collate` converts the targets of a
    batch to the true numbers of boxes.
    """

    def collate(self, targets: list[dict[str, Tensor]]) -> Tensor:
        return torch.tensor([len(target["boxes"]) for target in targets])

    def __call__(self, outputs: Tensor, counts: Tensor) -> Tensor:
        return (outputs[:, 4] - counts).square()


def test_structured_targets_are_stored_without_change() -> None:
    labels = pack_targets(TARGETS, "here")
    found = unpack_targets(torch.from_numpy(labels.values), labels.targets)
    for target, expected in zip(found, TARGETS, strict=True):
        assert torch.equal(target["boxes"], torch.from_numpy(expected["boxes"]))
        assert target["kinds"].dtype == torch.int64
        assert target["kinds"].tolist() == expected["kinds"].tolist()
        assert target["id"].tolist() == [expected["id"]]


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        ([{"a": [1.0]}, {"b": [1.0]}], "row 1 has b"),
        ([{"a": np.ones((2, 4))}, {"a": np.ones((1, 3))}], "a: row 1 has the shape"),
        ([{"a": [2**25]}], "a: integers"),
        ([{"a": ["x"]}], "a: .*type"),
    ],
)
def test_structured_targets_with_unequal_keys_or_shapes_are_refused(
    targets: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        pack_targets(targets, "here")


class Scenes(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> Any:
        return INPUTS[row], TARGETS[row]


@pytest.mark.parametrize("data", [(INPUTS, TARGETS), Scenes()], ids=["lists", "items"])
def test_structured_targets_are_trained_with_a_custom_loss(data: Any, tmp_path: Path) -> None:
    data = {"train": data, "test": (INPUTS[:20], TARGETS[:20])}
    metrics = [raysim.Metric(miscounted, higher=False, per="set")]
    settings = {**FAST, "rounds": 6, "local.lr": 0.05}
    result = raysim.run(
        **settings,
        model=outputs_of,
        loss=box_loss,
        data=data,
        metrics=metrics,
        out=tmp_path / "run",
        quiet=True,
    )
    rows = result.rows
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert 0 <= rows[-1]["miscounted_global"] <= 1 and rows[-1]["loss_global"] > 0


def test_custom_loss_receives_the_batch_from_the_collate_function_of_the_loss(
    tmp_path: Path,
) -> None:
    data = (INPUTS, TARGETS)
    both = [
        raysim.run(**FAST, model=outputs_of, loss=loss, data=data, out=tmp_path / name, quiet=True)
        for name, loss in (("list", box_loss), ("padded", Padded()))
    ]
    assert both[0].rows[-1]["sample_loss"] == pytest.approx(both[1].rows[-1]["sample_loss"])
    assert both[0].summary["metric"] == "sample_loss"


def test_structured_targets_are_bit_identical_on_one_and_two_workers() -> None:
    data = federate(store_arrays(((INPUTS, TARGETS), (INPUTS, TARGETS))), IID(clients=4), 0)
    spec = run_spec(
        model=CustomModel(outputs_of), data=data, local=Local(lr=0.05, batch=8), loss=box_loss
    )
    one = run(spec, rounds=3)
    two = run_to_end(coordinate(spec, rounds=3, runtime=several_workers(spec, 2)))
    assert one.bits == two.bits and one.history == two.history


@pytest.mark.parametrize(
    ("words", "parts", "text"),
    [
        ("", {"loss": None}, "loss=usual"),
        ("", {"model": "mlp"}, "model Mlp"),
        ("method=mixup", {}, "mixup"),
        ("method=fedlc", {}, "fedlc"),
        ("partition=shards", {}, "Shards"),
        ("evaluate.metric=accuracy", {}, r"evaluate\.metric=accuracy"),
        ("data.kind=regression", {}, r"data\.kind=regression"),
    ],
)
def test_settings_useless_for_structured_targets_are_refused(
    words: str, parts: Any, text: str
) -> None:
    settings = {key: value for key, value in FAST.items() if key not in words}
    arguments = {"model": outputs_of, "loss": box_loss, "data": (INPUTS, TARGETS), **parts}
    with pytest.raises(RefusedError, match=text):
        raysim.build(words, **settings, **arguments)
