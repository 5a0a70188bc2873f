"""Test that every key in an error message exists, and that the user can set this key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import raysim
from raysim.data.federated import federate
from raysim.data.partition import Dirichlet, Domain
from raysim.data.raw import Raw, Source
from raysim.data.sources import Synthetic
from raysim.experiment.build import build
from raysim.experiment.compose import compose
from raysim.primitives.errors import RefusedError

WORDS = ["runtime=inprocess", "tracking=none", "rounds=1", "local.epochs=1", "schedule.cohort=2"]
INPUTS = np.random.default_rng(0).standard_normal((30, 4)).astype(np.float32)
DATA = (INPUTS, np.arange(30) % 3)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(*words: str, **parts: Any) -> str:
    with pytest.raises(RefusedError) as error:
        build([*WORDS, *words], **parts)
    return str(error.value)


class TestUnknownKeys:
    def test_error_of_unknown_key_says_that_the_chosen_option_has_no_settings(self) -> None:
        sentence = refused("loss.gamma=2")
        assert "loss=usual has no settings" in sentence
        assert "loss=focal" in sentence

    def test_error_of_unknown_key_says_that_the_chosen_method_has_no_settings(self) -> None:
        assert "method.scaffold has no settings" in refused(
            "method=scaffold", "method.scaffold.mu=1"
        )

    def test_error_of_unknown_key_suggests_options_that_have_the_key(self) -> None:
        assert "partition=shards has it" in refused(
            "partition=iid", "partition.shards_per_client=2"
        )

    def test_resume_checks_overrides_against_the_stored_options(self) -> None:
        raysim.run([*WORDS, "out=run", "data=synthetic", "model=mlp", "method=fedprox"], quiet=True)
        resumed = ["out=run", "resume=latest"]
        assert compose([*resumed, "method.fedprox.mu=0.5"]).method.fedprox.mu == 0.5
        with pytest.raises(RefusedError, match="data=synthetic has"):
            compose([*resumed, "data.wrong=1"])

    def test_resume_refuses_model_norm_if_the_stored_model_has_no_such_key(self) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        raysim.run(
            [*WORDS, "out=run"], model=model, data=DATA, partition={"clients": 3}, quiet=True
        )
        with pytest.raises(RefusedError, match=r"model\.norm .*model=sequential has"):
            compose(["out=run", "resume=latest", "model.norm=batch"])


class TestPartitions:
    def test_error_of_data_without_users_mentions_only_existing_keys(self) -> None:
        sentence = refused("partition=natural", data=DATA)
        assert set(re.findall(r"\b(?:data|partition)\.\w+", sentence)) == {"partition.column"}

    def test_error_about_users_with_few_samples_mentions_key_partition_minimum(self) -> None:
        users = np.arange(30)
        sentence = refused("partition=natural", data=(*DATA, users))
        assert "partition.minimum=2" in sentence
        assert "partition.clients" not in sentence

    def test_error_of_too_many_clients_mentions_partition_clients(self) -> None:
        sentence = refused(
            "partition=natural", "partition.clients=9", data=(*DATA, np.arange(30) % 3)
        )
        assert sentence.startswith("partition.clients=9")

    def test_error_of_dirichlet_split_omits_partition_minimum_if_it_is_not_set(self) -> None:
        with pytest.raises(ValueError, match=r"^partition\.alpha=") as error:
            federate(Synthetic(samples=40), Dirichlet(30, 0.01), 0)
        assert "partition.minimum=1 " not in str(error.value)

    def test_error_of_a_partition_passed_as_lists_mentions_no_file(self) -> None:
        for lists in ([], [["a"]], [[0.5]]):
            sentence = refused(data=DATA, partition=lists)
            assert sentence.startswith("partition")
            assert "JSON" not in sentence


class Empty(Source):
    """A source without training rows."""

    def read(self) -> Raw:
        return Raw(INPUTS, DATA[1], 0, ["a", "b", "c"])


class TestData:
    def test_error_omits_the_setting_data_root_if_the_source_has_no_root(self) -> None:
        sentence = refused(data=Empty())
        assert "Empty" in sentence
        assert "data.root" not in sentence

    def test_error_of_missing_test_samples_mentions_only_existing_keys(self) -> None:
        with pytest.raises(ValueError, match=r"^partition\.test_fraction=null") as error:
            federate(Synthetic(samples=40, test_samples=0), Domain(test_fraction=None), 0)
        assert "data.test_fraction" not in str(error.value)

    def test_warning_of_a_run_without_scores_mentions_only_existing_keys(self) -> None:
        lists = [list(range(0, 3)), list(range(3, 6))]
        warnings = build([*WORDS, "model=mlp"], data=DATA, partition=lists).warnings
        assert any("nothing will be scored" in text for text in warnings)
        assert not any("partition.clients" in text for text in warnings)


def test_batchnorm_warning_for_a_custom_network_suggests_model_small_cnn() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    warnings = build(
        [*WORDS, "method=fedbn"], data=DATA, model=network, partition={"clients": 3}
    ).warnings
    (sentence,) = (text for text in warnings if "method 'fedbn'" in text)
    assert "model=small_cnn" in sentence, "model.norm is a key of models of this kind only"
