"""Classes have the same defaults as their files in `conf`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from raysim import methods
from raysim.api.method import Method
from raysim.experiment.config_files import load_yaml
from raysim.experiment.instantiate import TARGET, import_target
from raysim.primitives.files import conf_folder

GROUPS = ("method", "partition", "schedule", "fleet", "loss", "model", "learner")
FILES = [path for group in GROUPS for path in sorted((conf_folder() / group).glob("*.yaml"))]


def values(path: Path) -> dict[str, Any]:
    """Return the values of a file and of the files in its list of defaults."""
    node = load_yaml(path)
    before = [each for each in node.pop("defaults", []) if each != "_self_"]
    found: dict[str, Any] = {}
    for name in before:
        found |= values(path.parent / f"{name}.yaml")
    return found | node


def objects(node: Any) -> Iterator[dict[str, Any]]:
    """Yield the nodes that name a class."""
    if isinstance(node, dict):
        if TARGET in node:
            yield node
        for value in node.values():
            yield from objects(value)


def parameters(target: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class's constructor."""
    found: Any = import_target(target, "conf")
    return inspect.signature(found).parameters


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_class_defaults_equal_those_of_its_file(path: Path) -> None:
    for node in objects(values(path)):
        for name, parameter in parameters(node[TARGET]).items():
            default = (
                list(parameter.default)
                if isinstance(parameter.default, tuple)
                else parameter.default
            )
            simple = default is None or isinstance(
                default, (str, int, float, list)
            )  # not made by a function
            if simple and name in node and "${" not in str(node[name]):
                assert node[name] == default, name


def test_function_defaults_equal_those_of_the_class() -> None:
    """Compare the defaults, except for None, which means a missing value."""
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
def test_server_step_defaults_equal_those_of_the_method(name: str) -> None:
    method = parameters(f"raysim.methods.fedopt.Fed{name.capitalize()}")
    step = parameters(f"raysim.methods.fedopt.fed{name}_step")
    shared = {key for key in ("beta1", "beta2", "tau") if key in step}
    assert shared >= {"beta1", "tau"}
    assert {key: step[key].default for key in shared} == {
        key: method[key].default for key in shared
    }
