"""Test that each method runs by its name alone, and sets the other settings that it needs."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tiny_runs import coordinate, run_to_end

import raysim
from raysim.api.declarations import Local
from raysim.api.method import Method
from raysim.commands.sweep.plan import plan
from raysim.experiment.build import build
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict, to_yaml
from raysim.experiment.describe import overview
from raysim.experiment.execute import run
from raysim.experiment.groups import find_groups, load_option
from raysim.experiment.settings import Experiment
from raysim.methods.fedpac import FedPAC
from raysim.methods.fedrep import FedRep
from raysim.methods.lora_factors import LORA_METHODS
from raysim.primitives.errors import RefusedError

IN_PROCESS = ["runtime=inprocess", "tracking=none", "device=cpu"]
SMALL = [
    *IN_PROCESS,
    "partition.fraction=0.25",
    "rounds=1",
    "schedule.cohort=2",
    "evaluate.clients=2",
    "checkpoint.every=0",
]


def plan_lines(experiment: Experiment) -> list[str]:
    """Return the lines of the run's printed plan that show which settings a method has changed."""
    lines = overview(experiment, Path("folder")).splitlines()
    return [line for line in lines if line.startswith("settings ")]


METHOD_FILES = find_groups().files["method"]


@functools.cache
def every_method() -> dict[str, Any]:
    """Return the configuration of a small run that has all methods.

    All calls return the same dictionary. A test must copy the dictionary before changing it.
    """
    return to_dict(compose([*SMALL, f"method={'+'.join(METHOD_FILES)}"]))


@pytest.mark.parametrize("name", METHOD_FILES)
def test_every_method_trains_without_further_settings(name: str) -> None:
    config = copy.deepcopy(every_method())
    own_keys = load_option(METHOD_FILES[name], "method")
    config["method"] = {key: config["method"][key] for key in own_keys}
    if name in LORA_METHODS:  # their error for a model without adapters names this key
        config["model"]["lora"]["rank"] = 2
    config["choices"]["method"] = [name]
    experiment = build(config)
    coordinator = coordinate(experiment.spec, experiment.schedule, experiment.fleet)
    finished = run_to_end(coordinator)
    assert len(finished.rows) == 1
    assert not finished.failures


# Methods with many columns, with client states of several kinds, and with warnings.
@pytest.mark.parametrize("name", ["fedpac", "dp_fedavg"])
def test_method_without_further_settings_finishes_its_run(name: str, tmp_path: Path) -> None:
    result = run([*SMALL, f"method={name}", f"out={tmp_path / name}"], quiet=True)
    assert result.summary["rounds"] == 1
    assert result.summary["failures_total"] == 0


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["method=fedrep"], "epochs", 11),
        (["method=fedrep", "method.fedrep.head_epochs=3"], "epochs", 4),
        (["method=fedprox+fedrep+mixup"], "epochs", 11),
        (["method=fedpac", "method.fedpac.head_epochs=5"], "epochs", 6),
        (["experiment=fedbr/cifar10", "method=fedrep", "data=digits", "model=mlp"], "steps", 50),
    ],
)
def test_method_chosen_by_name_sets_the_local_settings_that_it_requires(
    overrides: list[str], key: str, value: int
) -> None:
    experiment = build([*IN_PROCESS, *overrides])
    assert getattr(experiment.spec.settings.local, key) == value
    assert experiment.config["local"][key] == value


def test_plan_shows_settings_only_if_a_method_has_changed_them() -> None:
    (line,) = plan_lines(build([*IN_PROCESS, "method=fedrep"]))
    assert all(part in line for part in ("local.epochs=11", "'fedrep'", "2"))
    assert plan_lines(build([*IN_PROCESS, "method=fedprox"])) == []
    assert plan_lines(build([*IN_PROCESS, "method=fedrep", "local.epochs=11"])) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["method=fedrep", "local.epochs=2"], "local.epochs"),
        (["method=fedrep", "local.steps=1"], "local.steps"),
        (["method=fedpac", "local.epochs=1"], "local.epochs"),
        (["method=fedpac", "local.steps=1"], "local.steps"),
        (["method=dann", "local.steps=1"], "local.steps"),
        (["method=scaffold", "local.optimizer=adam"], "local.optimizer"),
        (["method=fedcm", "local.optimizer=adam"], "local.optimizer"),
        (["method=fraug", "local.batch=1"], "local.batch"),
    ],
)
def test_override_that_contradicts_the_method_is_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(RefusedError, match=key.replace(".", r"\.")):
        build([*IN_PROCESS, *overrides])


PYTHON: list[dict[str, Any]] = [{"local": {"epochs": 2}}, {"local.epochs": 2}]


@pytest.mark.parametrize("settings", PYTHON)
def test_argument_local_epochs_is_refused_if_it_contradicts_the_method(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(RefusedError, match=r"local\.epochs"):
        build(IN_PROCESS, methods=[FedRep()], **settings)


def test_method_passed_as_object_sets_the_local_settings_that_it_requires() -> None:
    experiment = build(IN_PROCESS, methods=[FedPAC(head_epochs=4)])
    assert experiment.spec.settings.local.epochs == 5
    assert build(IN_PROCESS, methods=[FedRep("joint")]).spec.settings.local.epochs == 2


def test_composed_configuration_is_refused_if_user_values_contradict_the_method() -> None:
    assert build(compose([*IN_PROCESS, "method=fedrep"])).spec.settings.local.epochs == 11
    with pytest.raises(RefusedError, match=r"local\.epochs"):
        build(compose([*IN_PROCESS, "method=fedrep", "local.epochs=3"]))
    with pytest.raises(RefusedError, match=r"local\.epochs"):
        build(to_dict(compose([*IN_PROCESS, "method=fedrep"], settings={"local.epochs": 3})))


def test_method_changes_no_setting_if_the_configuration_does_not_list_user_keys() -> None:
    config = to_dict(compose([*IN_PROCESS, "method=fedrep"]))
    del config["choices"]["_set_"]
    with pytest.raises(RefusedError, match=r"local\.epochs"):
        build(config)


def test_stored_configuration_does_not_list_which_keys_the_user_has_set() -> None:
    config = compose([*IN_PROCESS, "method=fedrep", "seed=3"])
    experiment = build(config)
    stored = OmegaConf.create(to_yaml(to_dict(config)))
    assert "_set_" not in stored.choices
    assert "_set_" not in experiment.config["choices"]


def test_stored_configuration_keeps_local_epochs_unless_head_epochs_are_overridden(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(build([*IN_PROCESS, "method=fedrep"]).config))
    again = build(compose((), (), path))
    assert again.spec.settings.local.epochs == 11
    assert plan_lines(again) == []
    changed = build(compose(["method.fedrep.head_epochs=2"], (), path))
    assert changed.spec.settings.local.epochs == 3


def test_sweep_over_a_key_that_the_method_sets_is_refused() -> None:
    search = plan([*IN_PROCESS, "method=fedrep", "local.lr=0.1,0.2", "sweep.search=grid"])
    assert [build(search.node(point)).spec.settings.local.epochs for point in search.points()] == [
        11,
        11,
    ]
    search = plan([*IN_PROCESS, "method=fedrep", "local.epochs=2,11", "sweep.search=grid"])
    with pytest.raises(RefusedError, match=r"local\.epochs"):
        build(search.node(search.points()[0]))


class Demanding(Method):
    """A method that changes one setting of the run.

    key: the key of the setting.
    value: the value that the method sets.
    """

    name = "demanding"

    def __init__(self, key: str, value: object):
        self.key = key
        self.value = value

    def settings(self, local: Local) -> dict[str, object]:
        return {self.key: self.value}


def test_method_can_require_a_value_of_any_configuration_key() -> None:
    experiment = build(IN_PROCESS, methods=[Demanding("schedule.cohort", 4)])
    assert experiment.schedule.size == 4
    assert raysim.build(IN_PROCESS, methods=[Demanding("rounds", 3)]).spec.settings.rounds == 3


@pytest.mark.parametrize("key", ["local.speed", "nothing", "locals.lr"])
def test_method_that_requires_a_key_that_does_not_exist_is_refused(key: str) -> None:
    with pytest.raises(RefusedError, match=key.replace(".", r"\.")):
        build(IN_PROCESS, methods=[Demanding(key, 4)])
