"""One mathematics: a function with test vectors is what runs, or what runs is held against it here.

Where speed asks for another form than the function's (in place, flat, fused), FORMS names the function and a check:
from a random generator to a pair, what the class makes of random float64 values and what the function says of them.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_conformance import TABLE
from test_vectors import functions_with_vectors
from torch import Tensor

import raysim
from raysim.methods import scaffold

Pair = tuple[Any, Any]


def normal(random: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape))


def job(**known: Any) -> Any:
    """A context of a hook that knows just this."""
    return SimpleNamespace(**known)


def corrected_gradient(random: np.random.Generator) -> Pair:
    grad, own, server = normal(random, 9), normal(random, 12), normal(random, 12)
    part = slice(2, 11)
    want = scaffold.corrected_gradient(grad.clone(), own[part], server[part])
    scaffold.Scaffold().gradient(
        job(state={"scaffold.control": own}, published={"scaffold.control": server}), grad, part
    )
    return grad, want


FORMS: dict[str, Callable[[np.random.Generator], Pair]] = {
    "raysim.methods.scaffold:corrected_gradient": corrected_gradient,
}


@pytest.mark.parametrize("name", FORMS)
def test_what_a_class_does_in_another_form_is_what_its_function_says(name: str) -> None:
    for seed in range(5):
        got, want = FORMS[name](np.random.default_rng(seed))
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_every_function_with_vectors_is_what_a_run_calls_or_has_a_form() -> None:
    named = functions_with_vectors()
    reached = {f"{module}:{function}" for module, function in reached_in_a_run()}
    assert not (missing := sorted(named - reached - set(FORMS))), f"a second implementation goes unchecked: {missing}"
    assert not (needless := sorted(set(FORMS) & reached)), f"a run calls these functions itself: {needless}"


def test_every_method_has_a_textbook() -> None:
    taught: set[str] = set()
    for path in sorted((Path(__file__).parents[1] / "textbook").glob("test_*.py")):
        rows = getattr(importlib.import_module(f"textbook.{path.stem}"), "ROWS", {})
        taught |= {method.name for row in rows.values() for method in row.methods()}
    assert set(TABLE) <= taught, f"without a textbook: {sorted(set(TABLE) - taught)}"


# --- who calls whom ------------------------------------------------------------------------------------------------

Function = tuple[str, str]  # module, and name at the top level of it


def reached_in_a_run() -> set[Function]:
    """Functions that classes of raysim and the command line call, themselves or through other functions."""
    calls: dict[Function, set[Function]] = {}
    found: set[Function] = {("raysim.cli", "main")}
    for module, tree in modules():
        names = known_names(module, tree)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                calls[module, node.name] = uses(node, names)
            elif isinstance(node, ast.ClassDef):
                found |= uses(node, names)
    waiting = list(found)
    while waiting:
        new = calls.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


@cache
def modules() -> list[tuple[str, ast.Module]]:
    root = Path(raysim.__file__).parent
    return [
        (".".join(("raysim", *path.relative_to(root).with_suffix("").parts)), ast.parse(path.read_text()))
        for path in sorted(root.rglob("*.py"))
    ]


def known_names(module: str, tree: ast.Module) -> dict[str, Function]:
    """Functions by the name that a module knows them by: its own, and those it imports."""
    own = {node.name: (module, node.name) for node in tree.body if isinstance(node, ast.FunctionDef)}
    return own | {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def uses(node: ast.AST, names: dict[str, Function]) -> set[Function]:
    return set(named(node, names))


def named(node: ast.AST, names: dict[str, Function]) -> Iterator[Function]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in names:
            yield names[inner.id]
