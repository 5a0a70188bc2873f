"""Read a method's docstrings and hooks from its source file, without importing it.

`raysim methods` lists about 70 methods. Importing their classes would take most of its time.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "raysim"
ROOT = Path(__file__).parents[1]
METHOD = "Method"  # the class that all methods extend
UNLISTED_HOOKS = ("settings",)  # it only names the settings that a method needs


@dataclass(frozen=True)
class MethodSource:
    """The facts about a method's class that its source file shows.

    module_text, class_text: the docstrings.
    paper: the class attribute `paper`.
    hooks: the hooks that the class overrides.
    is_alone: True if the file has no other method.
    """

    module_text: str
    class_text: str
    paper: str
    hooks: Sequence[str]
    is_alone: bool


def read_method(target: str) -> MethodSource | None:
    """Read docstrings, paper and hooks of a method's class from its file, without importing it.

    target: the class with its module, such as "raysim.methods.fedprox.FedProx".
    Return None if the class is outside raysim, has several base classes, or has a base class except
    `Method` in another file.
    """
    module, _, name = target.rpartition(".")
    path = _source_file(module)
    if path is None:
        return None
    tree = _parse(path)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    lineages = {other: _lineage(other, classes) for other in classes}
    lineage = lineages.get(name)
    if lineage is None:
        return None
    defined = {member.name for node in lineage for member in _functions(node)}
    papers = [text for node in lineage for text in _constants(node, "paper")]
    methods = [other for other, nodes in lineages.items() if nodes is not None]
    return MethodSource(
        _docstring(tree),
        _docstring(classes[name]),
        papers[0] if papers else "",
        [hook for hook in hook_order() if hook in defined],
        methods == [name],
    )


def read_module(module: str, constant: str) -> tuple[str, str]:
    """Return the docstring of a module of raysim, and the text that one of its variables holds.

    The module is not imported. Its file must assign the text as a literal.
    constant: the name of the variable.
    """
    path = _source_file(module)
    assert path is not None, module
    tree = _parse(path)
    return _docstring(tree), next(_constants(tree, constant))


@functools.cache
def hook_order() -> list[str]:
    """Return the names of a method's hooks, in the order of `raysim.Method`."""
    tree = _parse(ROOT / "api" / "method.py")
    (base,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == METHOD)
    names = [member.name for member in _functions(base)]
    return [name for name in names if not name.startswith("_") and name not in UNLISTED_HOOKS]


def _source_file(module: str) -> Path | None:
    package, *parts = module.split(".")
    path = ROOT.joinpath(*parts).with_suffix(".py")
    return path if package == PACKAGE and parts and path.is_file() else None


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(importlib.util.decode_source(path.read_bytes()))


def _lineage(name: str, classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef] | None:
    """Return a class and its base classes up to `Method`; None if a base is not in `classes`.

    name: the name of the class.
    classes: the classes of the file, by name.
    """
    lineage = []
    while name != METHOD:
        node = classes.get(name)
        if node is None or len(node.bases) != 1 or not isinstance(node.bases[0], ast.Name):
            return None
        lineage.append(node)
        name = node.bases[0].id
    return lineage


def _functions(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            yield member


def _constants(node: ast.ClassDef | ast.Module, name: str) -> Iterator[str]:
    """Yield the texts that a module or a class assigns to the variable `name`.

    node: the syntax tree of the module or class.
    """
    for statement in node.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            continue
        targets = [target.id for target in statement.targets if isinstance(target, ast.Name)]
        if name in targets:
            yield str(statement.value.value)


def _docstring(node: ast.ClassDef | ast.Module) -> str:
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
