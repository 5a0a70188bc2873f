"""The files of conf/data and conf/partition: every option of a class, under its own name, with the class's checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from raysim.building import build, resolve
from raysim.config import conf_folder
from raysim.data.partition import Partitioner
from raysim.data.sources import Cifar10, FashionMnist, Mnist, Source

FOLDER = Path(conf_folder())
OPTIONS = sorted(
    f"{group}/{path.stem}"
    for group in ("data", "partition")
    for path in (FOLDER / group).glob("*.yaml")
    if not path.name.startswith("_")
)


def node(option: str, *overrides: str) -> dict:
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        config = compose(option, overrides=list(overrides))
    return OmegaConf.to_container(config)[option.partition("/")[0]]  # type: ignore[index,call-overload,return-value]


def built(option: str, *overrides: str) -> object:
    values = node(option, *overrides)
    return build(resolve(values["_target_"], option), values, option.partition("/")[0])


@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_names_every_setting_of_its_class(option: str) -> None:
    thing = built(option)
    assert isinstance(thing, Source if option.startswith("data/") else Partitioner)
    assert {field.name for field in dataclasses.fields(thing)} == set(node(option)) - {"_target_"}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_file_says_the_same_as_the_constructor_except_for_papers_values(option: str) -> None:
    thing = built(option)
    for field in dataclasses.fields(thing):  # type: ignore[arg-type]
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is not dataclasses.MISSING and field.name not in ("mean", "std", "augment"):
            assert getattr(thing, field.name) == default, field.name


def test_options_can_be_overridden_one_by_one() -> None:
    mnist = built("data/mnist", "data.root=x", "data.rotation.per=client", "data.rotation.angles=[0,90]")
    assert isinstance(mnist, Mnist)
    assert (mnist.root, mnist.rotation.per, mnist.rotation.angles) == ("x", "client", [0.0, 90.0])
    assert mnist.rotation.interpolation == "nearest"


def test_the_papers_pipelines_are_the_defaults_of_their_data_sets() -> None:
    mnist, fashion, cifar = built("data/mnist"), built("data/fashion_mnist"), built("data/cifar10")
    assert isinstance(mnist, Mnist) and isinstance(fashion, FashionMnist) and isinstance(cifar, Cifar10)
    assert (mnist.mean, mnist.augment, fashion.mean, fashion.std) == (None, [], [0.5], [0.5])
    assert cifar.std == [0.247, 0.2435, 0.2616] and cifar.augment == ["crop", "flip"]


def test_a_wrong_value_is_refused_with_its_key() -> None:
    with pytest.raises(ValueError, match=r"data.rotation.per=row"):
        built("data/mnist", "data.rotation.per=row")
    with pytest.raises(ValueError, match=r"partition.clients=0"):
        built("partition/iid", "partition.clients=0")
