"""Test that raysim uses only public names of other packages and changes none of their modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
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
# Assignments that look like a patch of another package, and are none, by file.
ALLOWED = {
    "cli.py": {"overrides.completer"},  # argcomplete's documentation asks for it
    "conformance/learners.py": {"learner.?"},  # an object of raysim whose calls are counted
    "conformance/runs.py": {"coordinator.planner.next_aggregation"},  # an object of raysim
    "primitives/spans.py": {"owner.?"},  # objects of raysim whose time is measured
    # numba has no public way to find stored machine code by the text of the function.
    "vectors/blocks.py": {"fast._cache"},
}
FRAMES = {"inspect.currentframe", "inspect.stack", "sys._getframe"}
# Objects of raysim whose attributes the files that import Ray assign to.
OWN_OBJECTS = {"self", "_waiting", "records"}


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Map the imported names of a file to dotted paths, such as "np" to "numpy".

    Imports from raysim are left out. A variable that is assigned `import_module("ray")` counts as
    an imported name.

    tree: the syntax tree of the file.
    """
    names = {}
    nodes = [*ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes:
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
    """Return the expressions that a statement assigns to or deletes."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        found: list[ast.expr] = []
        for target in node.targets:
            found += target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        return found
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    setters = ("setattr", "delattr", "object.__setattr__", "object.__delattr__")
    if isinstance(node, ast.Call) and dotted(node.func) in setters:
        return [ast.Attribute(node.args[0], "?")]
    return []


def is_private_module(name: str) -> bool:
    """Return whether a dotted path has a private part, which begins with a single underscore.

    name: the path of a module, or of a name in a module.
    """
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def uses_private_part(names: Mapping[str, str], path: str) -> bool:
    """Return True if a path, such as "ray.util._helper", contains a private name of a library.

    In packages of `STRICT`, names with a single leading underscore are private. In other packages,
    only "_internal" and "_private" are private.

    names: the full path of each imported name.
    path: begins with an imported name, which is not checked itself.
    """
    first, _, rest = path.partition(".")
    if names[first].partition(".")[0] in STRICT:
        return is_private_module(rest)
    return bool({"_internal", "_private"} & {*rest.split(".")})


def names_private_module(value: object) -> bool:
    """Return whether a value is the dotted path of a private module of a library in `STRICT`.

    Values that are no strings, and strings that are no dotted paths, give False.
    """
    if not isinstance(value, str) or not all(part.isidentifier() for part in value.split(".")):
        return False
    return value.partition(".")[0] in STRICT and is_private_module(value)


def imports_ray(tree: ast.AST) -> bool:
    """Return whether a file imports Ray, at its head or in a function.

    tree: the syntax tree of the file.
    """
    return any(origin.partition(".")[0] == "ray" for origin in imported_names(tree).values())


class Scopes:
    """The variables of a source file that refer to objects of other packages.

    Variables get objects from imports, assignments, `for` loops, and calls in the same file.

    tree: the syntax tree of the file.
    names: maps each imported name to its dotted path, such as "numpy.linalg".
    """

    def __init__(self, tree: ast.AST, names: Mapping[str, str]):
        self.names = names
        self.scopes: dict[ast.AST, tuple[ast.AST, ...]] = {}  # of each node, the innermost first
        self.functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self.origins: dict[tuple[ast.AST, str], str] = {}  # by the scope of a variable and its name
        self._enter(tree, (tree,))
        kinds = (ast.Assign, ast.NamedExpr, ast.AnnAssign, ast.For, ast.comprehension, ast.Call)
        bindings = [node for node in self.scopes if isinstance(node, kinds)]
        count = -1
        while count < len(self.origins):  # an object may pass through several variables
            count = len(self.origins)
            for node in bindings:
                self._follow(node)

    def _enter(self, node: ast.AST, scopes: tuple[ast.AST, ...]) -> None:
        self.scopes[node] = scopes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions.setdefault(node.name, []).append(node)
            scopes = (node, *scopes)
        for child in ast.iter_child_nodes(node):
            self._enter(child, scopes)

    def origin(self, node: ast.AST) -> str:
        """Return the dotted path of an imported object, such as "numpy.linalg.norm".

        node: an expression. The result is "" if it does not name an imported object.
        """
        name, _, rest = dotted(node).partition(".")
        if not name:
            return ""
        scopes = self.scopes[node]
        found = next((self.origins[s, name] for s in scopes if (s, name) in self.origins), None)
        found = found or self.names.get(name, "")
        return f"{found}.{rest}" if found and rest else found

    def _follow(self, node: ast.AST) -> None:
        scope = self.scopes[node][0]
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(scope, target, node.value)
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
            self._bind(scope, node.target, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            for value in getattr(node.iter, "elts", []):
                self._bind(scope, node.target, value)
        elif isinstance(node, ast.Call):
            self._pass_arguments(node)

    def _bind(self, scope: ast.AST, target: ast.AST, value: ast.AST) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part, part_value in zip(target.elts, getattr(value, "elts", ()), strict=False):
                self._bind(scope, part, part_value)
        elif isinstance(target, ast.Name) and (origin := self.origin(value)):
            self.origins.setdefault((scope, target.id), origin)

    def _pass_arguments(self, call: ast.Call) -> None:
        called = getattr(call.func, "attr", getattr(call.func, "id", ""))
        for function in self.functions.get(called, ()):
            names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
            if names[:1] == ["self"] or names[:1] == ["cls"]:
                names = names[1:]
            given = [*zip(names, call.args, strict=False)]
            given += [(word.arg, word.value) for word in call.keywords if word.arg]
            for name, value in given:
                if origin := self.origin(value):
                    self.origins.setdefault((function, name), origin)


def is_own(node: ast.AST, tree: ast.AST) -> bool:
    """Return whether an expression certainly is an object of a class that the file defines.

    True for `self`, for `cls`, and for a variable to which the file assigns only new instances of
    these classes. Also true for the attributes of all these.
    """
    if not isinstance(node, ast.Name):
        return isinstance(node, ast.Attribute) and is_own(node.value, tree)
    if node.id in ("self", "cls"):
        return True
    classes = {part.name for part in ast.walk(tree) if isinstance(part, ast.ClassDef)} | {"cls"}
    made = [
        assigned.value
        for assigned in ast.walk(tree)
        if isinstance(assigned, ast.Assign) and node.id in map(dotted, assigned.targets)
    ]
    return bool(made) and all(
        isinstance(value, ast.Call) and dotted(value.func) in classes for value in made
    )


def patches(tree: ast.AST, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the source text of each assignment that may change an object of another package.

    tree: the syntax tree of the file.
    names: maps each imported name to its dotted path, such as "numpy.linalg".
    """
    scopes = Scopes(tree, names)
    functions = {*scopes.functions}
    for node in scopes.scopes:
        value = getattr(node, "value", None)
        is_function = (
            isinstance(value, ast.Lambda) or dotted(value) in functions if value else False
        )
        for target in targets(node):
            if isinstance(target, ast.Attribute):
                owner = scopes.origin(target.value) if target.value in scopes.scopes else ""
                path = f"{owner}.{target.attr}" if owner else ""
                if path and path not in SETTINGS:
                    yield ast.unparse(target)
                is_hidden = target.attr.startswith("_") or target.attr == "?"
                if (is_hidden or is_function) and not owner and not is_own(target.value, tree):
                    yield ast.unparse(target)
            if isinstance(target, ast.Subscript) and is_namespace(target.value, tree):
                yield ast.unparse(target)
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if (
            is_method
            and node.func.attr in ("update", "pop", "setdefault", "clear")
            and is_namespace(node.func.value, tree)
        ):
            yield ast.unparse(node.func)


def is_namespace(node: ast.AST, tree: ast.AST) -> bool:
    """Return whether an expression is a dictionary that holds the names of another package.

    True for `sys.modules`. Also true for `vars(x)` and `x.__dict__`, unless x certainly is an
    object of a class that the file defines.
    """
    if isinstance(node, ast.Call) and dotted(node.func) == "vars" and node.args:
        return not is_own(node.args[0], tree)
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return not is_own(node.value, tree)
    return dotted(node) == "sys.modules"


def violations(text: str, allowed: Set[str] = frozenset()) -> Iterator[str]:
    """Yield each use of a private name of another package in a source text.

    Each change of another package's object is yielded, too.
    allowed: accepted assignments, such as "module.attribute".
    """
    tree = ast.parse(text)
    names = imported_names(tree)
    for origin in names.values():
        if is_private_module(origin):
            yield f"import of {origin}"
        if origin == "unittest.mock" or origin.startswith("unittest.mock."):
            yield f"import of {origin}"
    for node in ast.walk(tree):
        path = dotted(node) if isinstance(node, ast.Attribute) else ""
        first, _, rest = path.partition(".")
        if first in names and uses_private_part(names, path):
            yield f"use of {path}"
        full_path = dotted(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""
        first, _, rest = full_path.partition(".")
        if f"{names.get(first, first)}.{rest}".rstrip(".") in FRAMES:
            yield f"use of {full_path}"
        if isinstance(node, ast.Constant) and names_private_module(node.value):
            yield f"name {node.value}"
    for assignment in patches(tree, names):
        if assignment not in allowed:
            yield f"assignment to {assignment}"


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
        "import ray\nx = ray.get\nx.y = 1",
        "from ray.tune import A\ndef f(kind):\n    kind.run = 1\nf(A)",
        "from ray.tune import A\ndef f(*, kind):\n    g(kind)\ndef g(k):\n    k.run = 1\nf(kind=A)",
        "from ray.tune import A, B\nfor kind in (A, B):\n    kind.run = 1",
        "from ray import tune\nclass C:\n    def f(self, t):\n        t.x = 1\nC().f(tune)",
        "def f(kind):\n    kind.__init__ = None",
        "def f(thing):\n    def g():\n        pass\n    thing.run = g",
        "def f(thing):\n    thing.run = lambda: 1",
        "def f(thing, name):\n    setattr(thing, name, 1)",
        "def f(thing):\n    object.__setattr__(thing, 'x', 1)",
        "def f(thing):\n    vars(thing)['run'] = 1",
        "def f(thing):\n    thing.__dict__.update(run=1)",
        "import sys\nsys.modules['ray'] = None",
        "from unittest import mock",
        "from unittest.mock import patch",
        "import inspect\ninspect.currentframe()",
        "from inspect import stack\nstack()",
        "import sys\nsys._getframe(1)",
    ],
)
def test_checker_finds_private_names_and_assignments_to_foreign_attributes(text: str) -> None:
    assert list(violations(text))


@pytest.mark.parametrize(
    "text",
    [
        "import ray\nray.__version__",
        "import ray\nx = ray.get()\nx.y = 1",
        "from torch import nn\ndef f(layer):\n    layer.training = True\ndef g(a):\n    return nn",
        "from torch.backends import cudnn\ncudnn.benchmark = False",
        "from ray import A\ndef f(kind):\n    kind = 1\ndef g(kind):\n    kind.x = 1\nf(A)",
        "class A:\n    def f(self):\n        self.__dict__.update(x=1)\n        self._y = f",
        "class A:\n    @classmethod\n    def f(cls):\n        a = cls()\n        a._x = 1",
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
        name = path.relative_to(PACKAGE).as_posix()
        problems += [
            f"{name}: {one}" for one in violations(path.read_text(), ALLOWED.get(name, set()))
        ]
    assert problems == []


def test_package_does_not_change_attributes_of_objects_from_ray() -> None:
    on_ray = 0
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if not re.search(r"\bray\b", text):  # not "raysim" or "array"
            continue
        tree = ast.parse(text)
        if not imports_ray(tree):
            continue
        on_ray += 1
        for node in ast.walk(tree):
            for target in targets(node):
                if isinstance(target, ast.Attribute):
                    owner = ast.unparse(target).partition(".")[0]
                    assert owner in OWN_OBJECTS, f"{path}: {ast.unparse(target)}"
    assert on_ray > 5
