"""Test the files of conf/data and conf/partition, and values that the user sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from raysim.data.domains import Domains
from raysim.data.sources import Cifar10, FashionMnist, Mnist, Stored
from raysim.experiment.compose import compose as compose_run
from raysim.experiment.instantiate import build_object, resolve
from raysim.primitives.files import conf_folder

FOLDER = Path(conf_folder())


def node(option: str, *overrides: str) -> dict:
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        config = compose(option, overrides=list(overrides))
    values: Any = OmegaConf.to_container(config)
    return values[option.partition("/")[0]]


def built(option: str, *overrides: str) -> object:
    values = node(option, *overrides)
    return build_object(resolve(values["_target_"], option), values, option.partition("/")[0])


def test_data_settings_can_be_overridden_one_by_one() -> None:
    mnist = built(
        "data/mnist", "data.root=x", "data.rotation.per=client", "data.rotation.angles=[0,90]"
    )
    assert isinstance(mnist, Mnist)
    assert (mnist.root, mnist.rotation.per, mnist.rotation.angles) == ("x", "client", [0.0, 90.0])
    assert mnist.rotation.interpolation == "nearest"


def test_mnist_and_cifar_options_have_the_preprocessing_of_their_papers() -> None:
    mnist, fashion, cifar = built("data/mnist"), built("data/fashion_mnist"), built("data/cifar10")
    assert (
        isinstance(mnist, Mnist)
        and isinstance(fashion, FashionMnist)
        and isinstance(cifar, Cifar10)
    )
    assert (mnist.mean, mnist.augment, fashion.mean, fashion.std) == (None, [], [0.5], [0.5])
    assert cifar.std == [0.247, 0.2435, 0.2616] and cifar.augment == ["crop", "flip"]


IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ("option", "size", "augment", "area"),
    [
        ("office_home", 224, ["resized_crop", "flip", "jitter", "grey"], [0.7, 1.0]),
        ("pacs", 224, ["resized_crop", "flip", "jitter", "grey"], [0.7, 1.0]),
        ("digit_domains", 32, ["resized_crop", "jitter", "grey"], [0.7, 1.0]),
        ("covid_fl", 384, ["resized_crop", "flip", "rotate"], [0.8, 1.2]),
    ],
)
def test_options_for_data_with_domains_have_the_preprocessing_of_their_papers(
    option: str, size: int, augment: list[str], area: list[float]
) -> None:
    source = built(f"data/{option}")
    assert isinstance(source, Stored | Domains)
    assert (source.size, source.channels, source.mean, source.std) == (size, 3, *IMAGENET)
    assert (source.augment, source.crop_area, source.jitter, source.grey) == (
        augment,
        area,
        0.3,
        0.1,
    )


def test_medical_and_domainnet_options_have_preprocessing_of_their_papers() -> None:
    retina, covid, ten = (built(f"data/{option}") for option in ("retina", "covid_fl", "domainnet"))
    assert isinstance(retina, Stored) and isinstance(covid, Stored) and isinstance(ten, Stored)
    assert (retina.crop_area, retina.rotate_degrees, covid.rotate_degrees) == (
        [0.6, 1.0],
        10.0,
        10.0,
    )
    assert (retina.mean, retina.std) == ([0.5007, 0.501, 0.5019], [0.0342, 0.0535, 0.0484])
    assert (
        ten.only
        and len(ten.only) == 10
        and (ten.size, ten.mean, ten.augment) == (256, None, ["flip", "rotate"])
    )


def test_option_pneumonia_mnist_reads_its_data_set(shared: Path) -> None:
    source = built("data/pneumonia_mnist", f"data.root={shared / 'data'}")
    assert isinstance(source, Stored) and source.build().class_names == ["normal", "pneumonia"]


def test_override_of_data_domains_decides_which_domains_are_read(shared: Path) -> None:
    source = built(
        "data/digit_domains", f"data.root={shared / 'data'}", "data.domains=[usps,digits]"
    )
    assert isinstance(source, Domains)
    assert source.build().domain_names == ["usps", "digits"] and source.build().shape == (3, 32, 32)


def test_error_of_wrong_data_setting_mentions_its_key() -> None:
    with pytest.raises(ValueError, match=r"data.rotation.per=row"):
        built("data/mnist", "data.rotation.per=row")
    with pytest.raises(ValueError, match=r"partition.clients=0"):
        built("partition/iid", "partition.clients=0")


@pytest.mark.parametrize(
    ("override", "option"),
    [("data=MNIST", "mnist"), ("data=CSV", "csv"), ("partition=IID", "iid"), ("model=MLP", "mlp")],
)
def test_option_with_wrong_capital_letters_gets_a_suggestion(override: str, option: str) -> None:
    with pytest.raises(ValueError, match=rf"^{override} .*did you mean {option}\?"):
        compose_run([override])
