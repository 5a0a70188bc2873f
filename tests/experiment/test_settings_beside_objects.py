"""Test overrides of the groups `data` and `model` if a Python object replaces the group's option.

Such an override must have an effect, or an error must name its key.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysim
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.experiment.build import build
from raysim.experiment.compose import compose
from raysim.experiment.config_files import load_yaml
from raysim.experiment.settings import Experiment
from raysim.methods.fedprox import FedProx
from raysim.models import Mlp
from raysim.primitives.errors import RefusedError
from raysim.simulation.fleet import Lognormal
from raysim.simulation.schedule import Synchronous

RNG = np.random.default_rng(0)
NUMBERS = RNG.standard_normal((60, 4)).astype(np.float32)
IMAGES = RNG.integers(0, 256, (60, 8, 8), dtype=np.uint8)
CLASSES = np.arange(60) % 3
LISTS = [list(range(0, 30)), list(range(30, 60))]
WORDS = ["runtime=inprocess", "tracking=none", "rounds=1", "local.epochs=1", "schedule.cohort=2"]
PARTS: dict[str, Any] = {
    "data": (NUMBERS, CLASSES),
    "model": Mlp((8,)),
    "partition": IID(clients=3),
}


class Wide(nn.Module):
    """A network of a user, which has the setting `width`."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(4, width))
        self.fc = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.fc(self.body(x).relu())
        return outputs


def square(outputs: torch.Tensor, labels: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Return a loss for each sample."""
    return scale * (outputs - nn.functional.one_hot(labels, 3)).square().sum(1)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def built(*words: str, **parts: Any) -> Experiment:
    chosen = {key: part for key, part in (PARTS | parts).items() if part is not None}
    schedule = [
        word for word in WORDS if not ("schedule" in parts and word.startswith("schedule."))
    ]
    return build([*schedule, *words], **chosen)


class TestArrays:
    def test_label_noise_setting_applies_to_arrays_passed_as_data(self) -> None:
        noisy = built("data.label_noise=0.5").spec.data
        train = noisy.partition.train.indices
        wrong = np.count_nonzero(noisy.open().labels[train] != CLASSES[train])
        assert wrong == sum(int(0.5 * size) for size in noisy.partition.train.counts)

    def test_setting_data_only_selects_classes_of_arrays(self) -> None:
        data = built("data.only=[2,0]").spec.data.open()
        assert data.class_names == ["2", "0"]
        assert len(data) == 40
        assert np.array_equal(data.inputs[data.labels == 0], NUMBERS[CLASSES == 2])

    def test_mean_and_std_settings_apply_to_arrays_passed_as_data(self) -> None:
        data = built("data.mean=[1,2,3,4]", "data.std=[2,2,2,4]").spec.data
        inputs = torch.from_numpy(data.open().inputs.copy())
        expected = (inputs - torch.tensor([1.0, 2, 3, 4])) / torch.tensor([2.0, 2, 2, 4])
        assert torch.equal(data.pipeline.normalise(inputs), expected)

    def test_image_settings_apply_to_arrays_of_images(self) -> None:
        words = [
            "data.size=4",
            "data.channels=3",
            "data.augment=[flip]",
            "data.rotation.per=client",
        ]
        data = built(*words, data=(IMAGES, CLASSES)).spec.data
        assert data.open().shape == (3, 4, 4)
        assert data.pipeline.augment == ("flip",)
        assert "rotation=per client" in data.title

    def test_data_setting_can_be_an_override_or_a_keyword_argument(self) -> None:
        one = built("data.label_noise=0.5").spec.data.open()
        other = built(**{"data.label_noise": 0.5}).spec.data.open()
        assert np.array_equal(one.labels, other.labels)

    def test_settings_of_passed_arrays_are_stored_and_used_on_resume(self) -> None:
        words = [*WORDS, "data.label_noise=0.5", "out=run"]
        raysim.run(words, **PARTS, quiet=True)
        assert load_yaml(Path("run/config.yaml"))["data"]["label_noise"] == 0.5
        more = ["out=run", "resume=latest", "rounds=2"]
        again = raysim.run(more, data=PARTS["data"], quiet=True)
        assert again.experiment.config["data"]["label_noise"] == 0.5
        assert again.summary["rounds"] == 2

    def test_error_mentions_the_key_of_a_wrong_data_setting(self) -> None:
        with pytest.raises(RefusedError, match=r"^data\.label_noise=2"):
            built("data.label_noise=2")
        with pytest.raises(RefusedError, match=r"^data\.rotation\.per=twice"):
            built("data.rotation.per=twice", data=(IMAGES, CLASSES))


class TestPartitionAsListsOfRows:
    def test_fractions_of_test_and_validation_samples_are_applied(self) -> None:
        assert not len(
            built("partition.test_fraction=0", partition=LISTS).spec.data.partition.test.indices
        )
        partition = built(
            "partition.validation_fraction=0.5", "partition.test_fraction=0", partition=LISTS
        )
        assert partition.spec.data.partition.train.counts.tolist() == [15, 15]

    def test_partition_fraction_is_applied(self) -> None:
        data = built(
            "partition.fraction=0.5", **{"partition.test_fraction": 0}, partition=LISTS
        ).spec.data
        assert data.partition.train.counts.tolist() == [15, 15]

    def test_resumed_run_uses_the_stored_test_fraction(self) -> None:
        raysim.run(
            [*WORDS, "partition.test_fraction=0", "out=run"],
            **PARTS | {"partition": LISTS},
            quiet=True,
        )
        again = raysim.run(["out=run", "resume=latest", "rounds=2"], partition=LISTS, quiet=True)
        assert again.experiment.config["partition"]["test_fraction"] == 0


class TestNetworks:
    def test_arguments_of_a_passed_model_class_can_be_set_by_overrides(self) -> None:
        experiment = built("model.width=7", model=Wide)
        assert experiment.spec.model.options == {"width": 7}  # type: ignore[attr-defined]
        assert experiment.config["model"]["width"] == 7

    def test_override_of_an_argument_set_by_functools_partial_is_refused(self) -> None:
        with pytest.raises(RefusedError, match=r"^model\.width:"):
            built("model.width=7", model=functools.partial(Wide, width=6))

    def test_setting_model_head_applies_to_a_network_passed_as_object(self) -> None:
        recipe = built("model.head=fc", model=Wide()).spec.model
        assert recipe.head == "fc"  # type: ignore[attr-defined]
        with pytest.raises(RefusedError, match=r"model\.head=body\.1"):
            built("model.head=body.1", model=Wide())

    def test_load_applies_stored_model_settings_to_a_passed_network(self) -> None:
        raysim.run([*WORDS, "model.head=fc", "out=run"], **PARTS | {"model": Wide()}, quiet=True)
        loaded = raysim.load("run", model=Wide())
        assert loaded.experiment.spec.model.head == "fc"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("data.root=here", {}),
        ("data.test_fraction=0.5", {}),
        ("data.digest=00", {}),
        ("data=digits", {}),
        ("data.samples=7", {"data": Synthetic()}),
        ("data.label_noise=0.5", {"data": Synthetic()}),
        ("partition.clients=7", {}),
        ("partition.alpha=7", {}),
        ("partition=iid", {}),
        ("partition.clients=7", {"partition": LISTS}),
        ("partition.file=rows.json", {"partition": LISTS}),
        ("partition=listed", {"partition": LISTS}),
        ("model.norm=batch", {"model": Wide()}),
        ("model.width=3", {"model": Wide()}),
        ("model.norm=batch", {"model": Wide}),
        ("model.widths=[3]", {}),
        ("model=cnn", {}),
        ("schedule.cohort=3", {"schedule": Synchronous(2)}),
        ("schedule=buffered", {"schedule": Synchronous(2)}),
        ("fleet.sigma=3", {"fleet": Lognormal()}),
        ("fleet=ideal", {"fleet": Lognormal()}),
        ("loss.scale=3", {"loss": square}),
        ("loss=focal", {"loss": square}),
        ("method.fedprox.mu=3", {"methods": [FedProx()]}),
        ("method=fedprox", {"methods": [FedProx()]}),
    ],
)
def test_error_of_setting_without_effect_mentions_its_key(word: str, parts: dict[str, Any]) -> None:
    key, _, value = word.partition("=")
    with pytest.raises(RefusedError, match=f"^{key}[=: ]"):
        built(word, **parts)
    arguments: dict[str, Any] = {key: value}
    if key not in PARTS | parts:
        with pytest.raises(RefusedError, match=f"^{key}[=: ]"):
            built(**parts, **arguments)


def test_object_replaces_the_data_option_of_a_composed_configuration() -> None:
    whole = compose([*WORDS, "partition=iid", "partition.clients=3", "model=mlp"])
    assert build(whole, data=PARTS["data"]).config["choices"]["data"] == "arrays"


def test_overrides_of_other_groups_apply_if_the_model_is_a_python_object() -> None:
    experiment = built(
        "local.lr=0.5",
        "method=fedbn",
        methods=None,
        model=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)),
    )
    assert experiment.spec.settings.local.lr == 0.5
    assert [method.name for method in experiment.spec.methods] == ["fedbn"]
