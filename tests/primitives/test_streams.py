"""Test that all random numbers in raysim come from named random streams."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import raysim
from raysim.primitives.streams import stream, torch_seed

PACKAGE = Path(raysim.__file__).parent
NUMPY = {"Generator", "PCG64", "SeedSequence", "BitGenerator"}
TORCH = {
    "seed",
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
}
# Uses of global generators that are intended, by file.
DRAWERS = {
    # Inside a forward pass, as dropout; a job seeds torch's generator.
    "methods/fedsr.py": {"torch.randn", "torch.randn_like"},
    # Inputs for trying a network out, of a generator of their own.
    "models/split.py": {"torch.randn", "torch.randint"},
    # A part that draws from a global generator is found so.
    "conformance/parts.py": {"np.random.seed"},
    "conformance/learners.py": {"import random", "np.random.seed"},
    # Of a generator of its own, on the device.
    "commands/bench/gpu.py": {"torch.randperm"},
    # Values for trying a metric and a network out, of generators of their own.
    "api/metrics.py": {"torch.randn"},
    "models/packed.py": {"torch.randn"},
    # The seed of the initial values, from torch's generator as those of any model.
    "api/learner.py": {"np.random.default_rng", "torch.randint"},
    # The user's own training may draw from global generators; they are seeded and restored.
    "training/own_training.py": {
        "import random",
        "np.random.get_state",
        "np.random.seed",
        "np.random.set_state",
    },
}
# Calls that seed torch's generator, for dropout and initial values.
SEEDERS = {
    "simulation/network.py": 1,
    "training/trainer.py": 2,
    "training/own_training.py": 3,  # seed_torch, with a GPU or without, and its use
    "api/declare.py": 2,
    "models/classifier.py": 1,
    "conformance/parts.py": 1,
}


def test_random_stream_has_the_same_numbers_in_all_processes() -> None:
    # Python's own hash of a string would differ from one process to the next.
    assert stream(0, "cohort", 3).integers(1000, size=4).tolist() == [57, 924, 209, 607]
    assert torch_seed(0, "torch", 1, 2) == 8558902436788059806


def test_random_streams_with_different_names_differ() -> None:
    names = [
        (0, "a", 0),
        (1, "a", 0),
        (0, "b", 0),
        (0, "a", 1),
        (0, "c", 0, 0),
        (0, "c", 0, 1),
        (0, "c", 1, 0),
    ]
    draws = np.array([stream(*name).random(8) for name in names])
    assert len(np.unique(draws)) == draws.size


def test_draws_from_one_random_stream_do_not_change_another() -> None:
    first = stream(5, "x", 1)
    stream(5, "y", 1).random(100)
    assert first.random() == stream(5, "x", 1).random()


def sources() -> list[Path]:
    found = sorted(PACKAGE.rglob("*.py"))
    assert len(found) > 30
    return found


def dotted(node: ast.AST) -> str:
    """Return a chain of names as text, such as "a.b.c"; "" for any other expression."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def global_draws(tree: ast.AST) -> Iterator[str]:
    """Yield each use of a global random generator of NumPy, Python or torch, as source text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(
            alias.name.partition(".")[0] == "random" for alias in node.names
        ):
            yield "import random"
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module == "random" or (node.module == "numpy.random" and names - NUMPY):
                yield f"from {node.module}"
        name = dotted(node)
        module, _, leaf = name.rpartition(".")
        if module in ("np.random", "numpy.random") and leaf not in NUMPY:
            yield name
        if module == "torch" and leaf in TORCH:
            yield name


def seedings(tree: ast.AST) -> int:
    """Count the calls that seed torch's global generator, also through `seed_torch`."""
    called = [dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sum(
        name == "seed_torch" or (name.startswith("torch.") and name.endswith("manual_seed"))
        for name in called
    )


def test_package_uses_global_random_generators_in_listed_files_only() -> None:
    draws, seeds = {}, {}
    words = re.compile("|".join(["random", "manual_seed", *(rf"torch\.{name}" for name in TORCH)]))
    for path in sources():
        text = path.read_text()
        if not words.search(text):
            continue  # parsing all files takes a second
        tree = ast.parse(text)
        name = path.relative_to(PACKAGE).as_posix()
        draws[name] = set(global_draws(tree))
        seeds[name] = seedings(tree)
    assert {name: calls for name, calls in draws.items() if calls} == DRAWERS
    assert {name: count for name, count in seeds.items() if count} == SEEDERS


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "from random import choice",
        "np.random.rand(3)",
        "from numpy.random import default_rng",
        "torch.randn(2)",
        "np.random.seed(0)",
        "import random as r",
    ],
)
def test_search_finds_code_that_uses_a_global_random_generator(line: str) -> None:
    assert list(global_draws(ast.parse(line)))
