"""Test that classes have the same defaults as their files in `conf`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from raysim import methods
from raysim.api.method import Method
from raysim.data.partition import Partitioner
from raysim.data.sources import Source
from raysim.experiment.config_files import load_yaml
from raysim.experiment.instantiate import (
    MISSING,
    TARGET,
    build_object,
    defaults,
    import_target,
    resolve,
)
from raysim.primitives.files import conf_folder

GROUPS = ("method", "partition", "schedule", "fleet", "loss", "model", "learner")
# The files of options, which name every setting of a class.
OPTIONS = {
    group: [
        f"{group}/{path.stem}"
        for path in sorted((conf_folder() / group).glob("*.yaml"))
        if not path.name.startswith("_")
    ]
    for group in ("method", "schedule", "fleet", "data", "partition", "model")
}
# Settings that the file of a data set may give another value than its class.
OF_DATA_SETS = {
    "mean",
    "std",
    "augment",
    "only",
    "name",
    "size",
    "channels",
    "domains",
    "crop_area",
    "rotate_degrees",
}


def merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return `first` with the values of `second` added. Nested dictionaries are merged, too.

    If both dictionaries have a key, the result has the value from `second`.
    """
    merged = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def values(path: Path) -> dict[str, Any]:
    """Return the values of a file and of the files in its list of defaults."""
    node = load_yaml(path)
    included = [name for name in node.pop("defaults", []) if name != "_self_"]
    merged: dict[str, Any] = {}
    for name in included:
        merged = merge(merged, values(path.parent / f"{name}.yaml"))
    return merge(merged, node)


def option_parts(option: str) -> dict[str, dict[str, Any]]:
    """Return the settings in the file of an option.

    For the group "method", the keys are "method.NAME" for each method in the file. Otherwise the
    only key is the group's name.
    option: the file's path below `conf`, without ending.
    """
    group = option.partition("/")[0]
    node = values(conf_folder() / f"{option}.yaml")
    if group != "method":
        return {group: node}
    return {f"method.{name}": part for name, part in node.items()}


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the mappings that name a class in `_target_`, at any depth of a configuration."""
    if isinstance(node, dict):
        if TARGET in node:
            yield node
        for value in node.values():
            yield from objects(value)


def parameters(target: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class's constructor."""
    found: Any = import_target(target, "conf")
    return inspect.signature(found).parameters


@pytest.mark.parametrize("group", OPTIONS)
def test_option_files_contain_exactly_the_keys_of_their_python_classes(group: str) -> None:
    for option in OPTIONS[group]:
        for path, part in option_parts(option).items():
            cls = resolve(part[TARGET], path)
            assert {*part} - {TARGET} == {*defaults(cls)}, option
            if group == "method":
                assert issubclass(cls, Method)
                assert path == f"method.{cls.name}"


@pytest.mark.parametrize("group", [group for group in OPTIONS if group != "model"])
def test_option_files_contain_the_defaults_of_their_python_classes(group: str) -> None:
    for option in OPTIONS[group]:
        check_defaults(option)


def check_defaults(option: str) -> None:
    """Compare the values in an option's file with the defaults of the classes that it names."""
    for path, part in option_parts(option).items():
        for key, default in defaults(resolve(part[TARGET], path)).items():
            value = part[key]
            if isinstance(value, dict):
                value = {name: each for name, each in value.items() if name != TARGET}
            if value == "${rounds}":
                value = None  # the run gives it
            if path == "data" and key in OF_DATA_SETS:
                continue
            if path == "partition" and default == MISSING:
                continue
            assert value == default, (option, key)


@pytest.mark.parametrize(("group", "base"), [("data", Source), ("partition", Partitioner)])
def test_object_of_every_option_file_can_be_built(group: str, base: type) -> None:
    for option in OPTIONS[group]:
        node = option_parts(option)[group]
        part = build_object(resolve(node[TARGET], group), node, group)
        assert isinstance(part, base), option


# One option for each way in which files include others.
@pytest.mark.parametrize(
    "option",
    [
        "data/cifar10",
        "data/digits",
        "data/pacs",
        "partition/iid",
        "partition/natural",
        "fleet/lognormal",
        "model/timm",
        "model/transformer",
    ],
)
def test_hydra_without_raysim_composes_an_option_from_its_configuration_file(option: str) -> None:
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        composed = OmegaConf.to_container(hydra.compose(option))
    assert composed == {option.partition("/")[0]: values(conf_folder() / f"{option}.yaml")}


@pytest.mark.parametrize("group", GROUPS)
def test_each_object_in_a_configuration_file_has_the_defaults_of_its_class(group: str) -> None:
    for path in sorted((conf_folder() / group).glob("*.yaml")):
        for node in objects(values(path)):
            check_node(node, path)


def check_node(node: Mapping[str, Any], path: Path) -> None:
    """Check that values in a configuration file equal the defaults of a class's arguments.

    node: a mapping from the file. Its entry `_target_` names the class.
    path: the path of the file, for the error message.
    """
    for name, parameter in parameters(node[TARGET]).items():
        default = parameter.default
        if isinstance(default, tuple):
            default = list(default)
        # Other defaults are made by a function.
        is_simple = default is None or isinstance(default, (str, int, float, list))
        if is_simple and name in node and "${" not in str(node[name]):
            is_empty = default is None and node[name] == {}
            assert is_empty or node[name] == default, (path, name)


def test_functions_of_a_method_have_the_same_defaults_as_its_class() -> None:
    """Compare the default of each function argument with the class argument of the same name.

    A function's default of None is not compared.
    """
    found = 0
    for module in (
        importlib.import_module(f"raysim.methods.{each.name}")
        for each in pkgutil.iter_modules(methods.__path__)
    ):
        own = [
            each
            for each in vars(module).values()
            if getattr(each, "__module__", "") == module.__name__
        ]
        classes = [each for each in own if inspect.isclass(each) and issubclass(each, Method)]
        for function in filter(inspect.isfunction, own):
            for name, parameter in inspect.signature(function).parameters.items():
                theirs = [
                    given[name].default
                    for each in classes
                    if name in (given := inspect.signature(each).parameters)
                ]
                if theirs and parameter.default not in (parameter.empty, None):
                    assert parameter.default in theirs, (
                        f"{module.__name__}.{function.__name__}({name}=...)"
                    )
                    found += 1
    assert found > 40


@pytest.mark.parametrize("name", ["adagrad", "adam", "yogi"])
def test_function_for_the_server_step_has_the_defaults_of_its_method_class(name: str) -> None:
    method = parameters(f"raysim.methods.fedopt.Fed{name.capitalize()}")
    step = parameters(f"raysim.methods.fedopt.fed{name}_step")
    shared = {key for key in ("beta1", "beta2", "tau") if key in step}
    assert shared >= {"beta1", "tau"}
    assert {key: step[key].default for key in shared} == {
        key: method[key].default for key in shared
    }
