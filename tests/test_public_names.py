"""raysim uses the public names of other packages and leaves their modules as they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
EXCEPTIONS = {  # by file; to be empty one day, and nothing may be added
    "runtime/ray/cluster.py": {
        "import of ray._private.node",
        "import of ray._private.parameter",
        "assignment to node.start_api_server",
        "assignment to parameter.RayParams",
    },
    "training/across.py": {"import of torch.utils._pytree"},
    "training/lane_step.py": {"import of torch.utils._pytree"},
    "training/tape.py": {"import of torch.utils._python_dispatch.TorchDispatchMode", "import of torch.utils._pytree"},
}


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
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and (module := imported_module(node.value)):
            for target in targets(node):
                names[dotted(target)] = module
    return {name: origin for name, origin in names.items() if not origin.startswith(("raysim.", "__future__"))}


def imported_module(node: ast.AST | None) -> str:
    """Return the module that an expression such as `import_module("ray")` names, else ""."""
    for call in ast.walk(node) if node is not None else ():
        is_import = isinstance(call, ast.Call) and dotted(call.func).endswith(("import_module", "__import__"))
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


def violations(text: str) -> Iterator[str]:
    """Return what a file does that it must not."""
    tree = ast.parse(text)
    names = imported_names(tree)
    for origin in names.values():
        if is_private_module(origin):
            yield f"import of {origin}"
    for node in ast.walk(tree):
        path = dotted(node) if isinstance(node, ast.Attribute) else ""
        if path.partition(".")[0] in names and {"_internal", "_private"} & {*path.split(".")}:
            yield f"use of {path}"
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
def test_private_names_and_assignments_are_found(text: str) -> None:
    assert list(violations(text))


@pytest.mark.parametrize(
    "text",
    [
        "import ray\nx = ray.get\nx.y = 1",
        "from raysim.results import _own",
        "class A:\n    def f(self):\n        self.x = 1",
    ],
)
def test_own_names_are_not_found(text: str) -> None:
    assert not list(violations(text))


@pytest.mark.parametrize("path", sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")))
def test_file_uses_public_names_only(path: str) -> None:
    found = set(violations((PACKAGE / path).read_text()))
    assert not found - EXCEPTIONS.get(path, set())
