"""Test that raysim uses only public names of other packages and changes none of their modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "raysim"
SETTINGS = {  # that are documented as attributes to assign to
    "sys.unraisablehook",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cudnn.allow_tf32",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.utils.deterministic.fill_uninitialized_memory",
}
# Of these libraries no name with a leading underscore is used, whatever it is.
STRICT = ("ray", "hydra", "omegaconf", "mlflow")
# Objects of raysim whose attributes the files that import Ray assign to.
OWN_OBJECTS = {"self", "_waiting", "records"}


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Map the names that a file imports from other packages to where they come from."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and (
            module := imported_module(node.value)
        ):
            for target in targets(node):
                names[dotted(target)] = module
    return {
        name: origin
        for name, origin in names.items()
        if not origin.startswith(("raysim.", "__future__"))
    }


def imported_module(node: ast.AST | None) -> str:
    """Return the module that an expression such as `import_module("ray")` names, else ""."""
    for call in ast.walk(node) if node is not None else ():
        is_import = isinstance(call, ast.Call) and dotted(call.func).endswith(
            ("import_module", "__import__")
        )
        if isinstance(call, ast.Call) and is_import and isinstance(call.args[0], ast.Constant):
            return str(call.args[0].value)
    return ""


def dotted(node: ast.AST) -> str:
    """Return "a.b.c" for a chain of attributes of a name, else ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return ""


def targets(node: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to or deletes."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        found: list[ast.expr] = []
        for target in node.targets:
            found += target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        return found
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    if isinstance(node, ast.Call) and dotted(node.func) in ("setattr", "delattr"):
        return [ast.Attribute(node.args[0], "?")]
    return []


def is_private_module(name: str) -> bool:
    """Whether a part of a module's or a name's path begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def uses_private_part(names: Mapping[str, str], path: str) -> bool:
    """Whether the attribute `path` of an imported name is private to the package that it comes
    from.
    """
    first, _, rest = path.partition(".")
    if names[first].partition(".")[0] in STRICT:
        return is_private_module(rest)
    return bool({"_internal", "_private"} & {*rest.split(".")})


def names_private_module(value: object) -> bool:
    """Whether a text is the dotted path of a private module or name of one of the `STRICT`
    libraries.
    """
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        return False
    return value.partition(".")[0] in STRICT and is_private_module(value)


def imports_ray(text: str) -> bool:
    """Whether a file imports Ray, at its head or in a function."""
    return any(
        origin.partition(".")[0] == "ray" for origin in imported_names(ast.parse(text)).values()
    )


def violations(text: str) -> Iterator[str]:
    """Return what a file does that it must not."""
    tree = ast.parse(text)
    names = imported_names(tree)
    for origin in names.values():
        if is_private_module(origin):
            yield f"import of {origin}"
    for node in ast.walk(tree):
        path = dotted(node) if isinstance(node, ast.Attribute) else ""
        if path.partition(".")[0] in names and uses_private_part(names, path):
            yield f"use of {path}"
        if isinstance(node, ast.Constant) and names_private_module(node.value):
            yield f"name {node.value}"
        for target in targets(node):
            path = dotted(target) if isinstance(target, ast.Attribute) else ""
            if path.partition(".")[0] in names and path not in SETTINGS:
                yield f"assignment to {path}"


@pytest.mark.parametrize(
    "text",
    [
        "import ray._private.node",
        "from hydra._internal import config_repository",
        "from hydra._internal.defaults_list import create_defaults_list as f",
        "def f():\n    from ray._private import node",
        "import ray\nray._private.node.x()",
        "import ray\nray.tune._x",
        "import ray\nray._raylet",
        "from ray import tune\ntune._x()",
        "node = import_module('ray._private')",
        "import ray\nray.get = 1",
        "import torch\ntorch.nn.Linear.forward = None",
        "from ray.util import client\nclient.x, y = 1, 2",
        "import ray\ndel ray.get",
        "import ray\nray.x += 1",
        "import ray\nsetattr(ray, 'get', 1)",
        "import importlib\nnode = importlib.import_module('ray._private.node').Node",
        "from importlib import import_module\nnode = import_module('ray.node')\nnode.x = 1",
    ],
)
def test_name_checker_finds_private_names_and_assignments(text: str) -> None:
    assert list(violations(text))


@pytest.mark.parametrize(
    "text",
    [
        "import ray\nx = ray.get\nx.y = 1",
        "import ray\nray.__version__",
        "text = 'ray._private is private'",
        "from raysim.results import _own",
        "class A:\n    def f(self):\n        self.x = 1",
    ],
)
def test_name_checker_accepts_names_of_the_package(text: str) -> None:
    assert not list(violations(text))


def test_package_uses_only_public_names_of_libraries() -> None:
    problems = []
    for path in PACKAGE.rglob("*.py"):
        names = violations(path.read_text())
        problems += [f"{path.relative_to(PACKAGE)}: {name}" for name in names]
    assert problems == []


def test_package_sets_no_attributes_of_ray_objects() -> None:
    on_ray = 0
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if "ray" not in text or not imports_ray(text):
            continue
        on_ray += 1
        for node in ast.walk(ast.parse(text)):
            for target in targets(node):
                if isinstance(target, ast.Attribute):
                    owner = ast.unparse(target).partition(".")[0]
                    assert owner in OWN_OBJECTS, f"{path}: {ast.unparse(target)}"
    assert on_ray > 5
