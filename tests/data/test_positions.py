"""Test samples that do not have exactly one label: how they are read, trained on and scored.

A sample may have a label for each position, such as a pixel, or no label, or an array of values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quick_runs
import torch
from PIL import Image
from sklearn.metrics import f1_score, jaccard_score
from tiny_runs import coordinate, run, run_spec, run_to_end, several_workers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import raysim
from raysim.api.declarations import Local
from raysim.api.objectives import OBJECTIVES
from raysim.data.arrays import store_arrays
from raysim.data.federated import FederatedData, data_warnings, federate
from raysim.data.labels import infer_kind, read_labels
from raysim.data.partition import IID
from raysim.models.split import CustomModel
from raysim.primitives.errors import RefusedError
from raysim.primitives.kinds import IGNORED

FAST = quick_runs.FAST | {"quiet": True}


def images(count: int = 60, ignore: int = 255) -> tuple[np.ndarray, np.ndarray]:
    """Return images, float32 [count, 1, 4, 4], and the class of each pixel, [count, 4, 4].

    ignore: the number that marks a pixel without a class. The first row of each image has it.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 1, 4, 4)).astype(np.float32)
    y = np.digitize(x[:, 0], [-0.5, 0.5])
    y[:, 0] = ignore
    return x, y


def pixels(input_shape: Any, num_classes: int) -> nn.Module:
    return nn.Conv2d(input_shape[0], num_classes, 3, padding=1)


def data() -> FederatedData:
    source = store_arrays((images(), images(20)), {"ignore": 255})
    return federate(source, IID(clients=4), 0)


# --- what the labels are ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (np.array([[0, 1], [1, 0]]), "multilabel"),
        (np.array([[0, 2], [1, 0]]), "positions"),
        (np.zeros((3, 2, 2), int), "positions"),
        (np.array([["noun", "verb"], ["verb", "noun"]]), "positions"),
        (np.zeros((3, 2, 2)), "regression"),
    ],
)
def test_kind_of_task_is_inferred_from_shape_of_labels(labels: np.ndarray, kind: str) -> None:
    assert infer_kind(labels) == kind
    assert read_labels(labels, None, None, "data").kind == kind


def test_ignored_label_value_becomes_the_ignore_index_of_pytorch() -> None:
    _, y = images(5)
    labels = read_labels(y[:, None], None, None, "data", 255)
    assert labels.values.shape == (5, 4, 4) and labels.names == ["0", "1", "2"]
    assert (labels.values[:, 0] == IGNORED).all() and (labels.values[:, 1:] == y[:, 1:]).all()
    text = read_labels(np.array([["a", "pad"], ["b", "a"]]), None, None, "data", "pad")
    assert text.names == ["a", "b"] and text.values.tolist() == [[0, IGNORED], [1, 0]]


def test_data_with_only_ignored_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.ignore=255"):
        read_labels(np.full((4, 3), 255), "positions", None, "data", 255)


# --- loss and scores ----------------------------------------------------------------------
def test_loss_with_one_label_per_position_equals_cross_entropy_of_pytorch() -> None:
    outputs, labels = torch.randn(6, 3, 4, 4), torch.from_numpy(images(6, IGNORED)[1])
    objective = OBJECTIVES["positions"]
    assert torch.allclose(objective.loss(outputs, labels), cross_entropy(outputs, labels))
    single = [cross_entropy(outputs[i : i + 1], labels[i : i + 1]) for i in range(6)]
    assert torch.allclose(objective.losses(outputs, labels), torch.stack(single))
    nothing = torch.full_like(labels, IGNORED)
    assert objective.loss(outputs, nothing) == 0
    own = objective.with_loss(lambda o, y: cross_entropy(o, y, reduction="none"))
    assert torch.allclose(own.loss(outputs, labels), cross_entropy(outputs, labels))
    assert torch.allclose(own.losses(outputs, labels), torch.stack(single))


@pytest.mark.parametrize("name", ["iou", "f1", "accuracy"])
def test_scores_with_one_label_per_position_equal_those_of_scikit_learn(name: str) -> None:
    outputs, labels = torch.randn(6, 4, 4, 4), torch.from_numpy(images(6, IGNORED)[1])
    metric = OBJECTIVES["positions"].metric(name)
    assert metric is not None and metric.rows is not None
    parts = [metric.rows(outputs[:2], labels[:2]), metric.rows(outputs[2:], labels[2:])]
    score = metric.summarise(torch.cat(parts).numpy())
    counted = labels != IGNORED
    truth, guess = labels[counted].numpy(), outputs.argmax(1)[counted].numpy()
    expected = {
        "iou": lambda: jaccard_score(truth, guess, average="macro"),
        "f1": lambda: f1_score(truth, guess, average="macro"),
        "accuracy": lambda: (truth == guess).mean(),
    }[name]()
    assert score == pytest.approx(expected)


def test_segmentation_model_learns_and_is_scored(tmp_path: Path) -> None:
    x, y = images(200)
    result = raysim.run(
        **{**FAST, "rounds": 15, "local.lr": 0.5},
        model=pixels,
        data=((x, y), images(40)),
        out=tmp_path / "run",
        **{"data.ignore": 255, "evaluate.metrics": "iou+accuracy+jaccard_index"},
    )
    last = result.rows[-1]
    assert last["accuracy_global"] > 0.8 > result.rows[0]["accuracy_global"] - 0.1
    assert last["jaccard_index_global"] == pytest.approx(last["iou_global"], abs=1e-6)
    central = result.predictions()
    counted = central.labels != IGNORED
    right = central.classes[counted] == central.labels[counted]
    assert last["accuracy_global"] == pytest.approx(right.mean())


def test_segmentation_is_bit_identical_on_three_workers_and_after_resume(tmp_path: Path) -> None:
    spec = run_spec(model=CustomModel(pixels), data=data(), local=Local(lr=0.2, batch=8))
    one = run(spec, rounds=4)
    three = run_to_end(coordinate(spec, rounds=4, runtime=several_workers(spec, 3)))
    assert one.history == three.history and one.bits == three.bits
    run(spec, rounds=4, checkpoint_every=2, folder=str(tmp_path))
    resumed = run(spec, rounds=4, resume=str(tmp_path / "checkpoints" / "round-000002"))
    assert resumed.history == one.history and resumed.bits == one.bits


def test_model_whose_outputs_are_images_is_trained_by_regression() -> None:
    x, _ = images()
    row = raysim.run(**FAST, model=lambda: nn.Conv2d(1, 1, 1), data=(x, x * 2)).rows[-1]
    assert row["mae"] is not None and np.isfinite(row["train_loss"])


@pytest.mark.parametrize("size", [4, 6, 16])
def test_setting_data_size_resizes_masks_like_pillow(size: int) -> None:
    generator = np.random.default_rng(2)
    x = generator.integers(256, size=(5, 1, 8, 12), dtype=np.uint8)
    y = generator.integers(3, size=(5, 8, 12))
    y[:, 0] = 255
    built = store_arrays((x, y), {"size": size, "ignore": 255}).build()
    assert built.inputs.shape == (5, 1, size, size) and built.labels.shape == (5, size, size)
    for mask, labels in zip(y, built.labels, strict=True):
        picture = Image.fromarray(mask.astype(np.uint8)).resize((size, size), resample=0)
        expected = np.asarray(picture).astype(int)
        assert np.where(labels == IGNORED, 255, labels).tolist() == expected.tolist()


def test_setting_data_size_resizes_images_and_masks_of_numpy_files(tmp_path: Path) -> None:
    x = np.random.default_rng(3).integers(256, size=(40, 1, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "train.npz", x=x, y=(x[:, 0] > 128).astype(int))
    words = f"data=numpy data.root={tmp_path} data.size=8 model=unet model.width=4"
    row = raysim.run(words, **FAST, out=tmp_path / "run").rows[-1]
    assert row["accuracy"] is not None and np.isfinite(row["train_loss"])


# --- samples without a label --------------------------------------------------------------
def test_losses_and_lists_of_predictions_exclude_samples_without_a_label(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(90, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    y[::3] = -100
    result = raysim.run(**FAST, model="mlp", data=(x, y), out=tmp_path / "run")
    assert result.experiment.spec.task.num_classes == 2
    rows = np.concatenate([result.predictions(client).labels for client in range(3)])
    assert len(rows) and (rows >= 0).all()
    assert result.summary["samples"] > 0 and np.isfinite(result.rows[-1]["train_loss"])
    partition = result.experiment.spec.data.partition
    labels = result.experiment.spec.data.open().labels
    assert (labels[partition.train.indices] == IGNORED).any()


def test_losses_skip_unlabelled_samples() -> None:
    from raysim.api.objectives import PARTLY_LABELLED

    outputs, labels = torch.randn(6, 3), torch.tensor([0, IGNORED, 2, 1, IGNORED, 0])
    assert torch.allclose(PARTLY_LABELLED.loss(outputs, labels), cross_entropy(outputs, labels))
    assert PARTLY_LABELLED.losses(outputs, labels)[1] == 0


# --- refusals -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("partition=dirichlet", "Dirichlet"),
        ("model=mlp", "the model Mlp"),
        ("method=fedlc", "fedlc"),
        ("method=mixup", "mixup"),
        ("data.kind=multilabel", "multilabel"),
        ("evaluate.metric=top5_accuracy", r"evaluate\.metric=top5_accuracy"),
        ("loss=huber", "loss=huber"),
    ],
)
def test_setting_that_does_not_support_one_label_per_pixel_is_refused(words: str, key: str) -> None:
    pytest.importorskip("torchmetrics")
    parts = {} if words.startswith("model") else {"model": pixels}
    settings = {key: value for key, value in FAST.items() if key != "quiet"}
    if words.startswith("partition="):
        del settings["partition"]
    with pytest.raises(RefusedError, match=key):
        raysim.build(words, **settings, **{"data.ignore": 255}, data=images(), **parts)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("data.augment=jitter+flip", r"data\.augment=\['flip'\]"),
        ("data.augment=resized_crop+crop", r"data\.augment="),
        ("data.augment=rotate", r"data\.augment="),
        ("data.rotation.per=client", r"data\.rotation\.per=client"),
        ("data.pool=2", r"data\.pool=2"),
    ],
)
def test_settings_that_move_labelled_pixels_are_refused(words: str, key: str) -> None:
    x = np.random.default_rng(4).integers(256, size=(40, 1, 8, 8), dtype=np.uint8)
    masks = (x[:, 0] > 128).astype(int)
    settings = {name: value for name, value in FAST.items() if name != "quiet"}
    raysim.build("data.augment=jitter+grey", **settings, model=pixels, data=(x, masks))
    with pytest.raises(RefusedError, match=key):
        raysim.build(words, **settings, model=pixels, data=(x, masks))


def test_error_of_class_scores_in_the_last_axis_suggests_movedim() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(1, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).movedim(1, -1)

    settings = {key: value for key, value in FAST.items() if key != "quiet"}
    with pytest.raises(RefusedError, match="movedim"):
        raysim.build(**settings, **{"data.ignore": 255}, data=images(), model=Last)


@pytest.mark.parametrize(("ignore", "count"), [(-100, 1), (255, 0)])
def test_label_255_as_a_class_gets_a_warning(ignore: int, count: int) -> None:
    source = store_arrays((images(), images(20)), {"ignore": ignore})
    warnings = [*data_warnings(federate(source, IID(clients=4), 0))]
    assert len(warnings) == count
    assert all("data.ignore=255" in text for text in warnings)
