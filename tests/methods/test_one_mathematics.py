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
from asynchronous_forms import ASYNCHRONOUS_FORMS
from server_forms import SERVER_FORMS
from test_conformance import TABLE
from test_vectors import functions_with_vectors
from torch import Tensor

import raysim
from raysim.api.composition import owner
from raysim.api.context import Batch, Stage
from raysim.api.declarations import Local, Task
from raysim.api.messages import Update
from raysim.api.objectives import OBJECTIVES
from raysim.api.server_view import Aggregation
from raysim.data import corruption, federated, partition
from raysim.methods import dann, fedavg, fedcm, fedlc, fedld, fedpac, fedprox, fedrs, mixup, scaffold
from raysim.primitives.streams import stream
from raysim.simulation.server import Server
from raysim.training.step import Step
from raysim.vectors.layout import Layout

Pair = tuple[Any, Any]


def normal(random: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape))


def job(**known: Any) -> Any:
    """A context of a hook that knows just this."""
    return SimpleNamespace(**known)


def step_of(method: Any = None) -> Any:
    """A step's part of a method in the loss of a classification, or of none; as `Step` has it."""
    owners = {name: method and owner([method], name) for name in ("loss", "logits")}
    return job(usual_loss=OBJECTIVES["classification"].loss, **owners)


def corrected_gradient(random: np.random.Generator) -> Pair:
    grad, own, server = normal(random, 9), normal(random, 12), normal(random, 12)
    part = slice(2, 11)
    want = scaffold.corrected_gradient(grad.clone(), own[part], server[part])
    scaffold.Scaffold().gradient(
        job(state={"scaffold.control": own}, download={"scaffold.control": server}), grad, part
    )
    return grad, want


def weighted_average(random: np.random.Generator) -> Pair:
    start, trained, weights = normal(random, 9), normal(random, 7, 9), torch.from_numpy(random.integers(1, 50, size=7))
    updates = [
        Update(k, k, 0, int(n), int(n), 1, 0.0, 0.0, np.empty(0, np.int64), delta=(y - start).numpy())
        for k, (y, n) in enumerate(zip(trained, weights, strict=True))
    ]
    layout = Layout((), (), 6, 9, 9, 0, 0)  # three of nine numbers are buffers
    server = Server(layout, start, torch.empty(0), (), weights.numpy(), 0, Task((1, 8, 8), 5, 7), group=3)
    server.step(updates, {}, [0] * 7, {})
    return server.vector, fedavg.weighted_average(trained, weights)


def proximal_term(random: np.random.Generator) -> Pair:
    grad, base, params = normal(random, 9), normal(random, 12), normal(random, 12).requires_grad_()
    part = slice(2, 11)
    (slope,) = torch.autograd.grad(fedprox.proximal_term(params[part], base[part], 0.3), params)
    want = grad + slope[part]
    ctx = job(stage=Stage(), vector=job(data=params.detach()), base=base)
    fedprox.FedProx(0.3).gradient(ctx, grad, part)
    return grad, want


def update_direction(random: np.random.Generator) -> Pair:
    grad, params, direction, decay = normal(random, 9), normal(random, 12), normal(random, 12), 0.2
    part = slice(2, 11)
    want = fedcm.update_direction(grad + decay * params[part], direction[part], 0.3)
    local = Local(weight_decay=decay)
    ctx = job(
        version=1,
        download={"fedcm.direction": direction},
        vector=job(data=params),
        trainer=job(local=local),
    )
    fedcm.FedCM(0.3).gradient(ctx, grad, part)
    return grad + decay * params[part], want  # which the optimizer adds


def server_direction(random: np.random.Generator) -> Pair:
    start, trained, weights = normal(random, 9), normal(random, 4, 9), random.uniform(1, 5, size=4)
    steps, server = torch.from_numpy(random.integers(1, 9, size=4)), job(params=start, state={})
    updates = [job(moves=((0, 4, 0.1 * k), (4, 9, 0.1 * k))) for k in steps.tolist()]
    fedcm.FedCM().absorb(Aggregation(updates, list(trained - start), weights.tolist(), [0] * 4, {}), server)
    want = fedcm.server_direction(start, trained, 0.1, steps, torch.from_numpy(weights))
    return server.state["fedcm.direction"], want


COUNTS = torch.tensor([40, 0, 3, 700, 1])


def trained_on(method: Any, random: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels that the client has, and the loss that a step of it makes of them."""
    z, y = normal(random, 7, 5), torch.from_numpy(random.choice([0, 2, 3, 4], size=7))
    ctx = job(class_counts=lambda: COUNTS, num_classes=5, vector=job(data=z), kept={}, report={})
    method.receive(ctx)
    return z, y, Step.task_loss(step_of(method), ctx, job(logits=z), Batch(z, y, z, y))


def calibrated_cross_entropy(random: np.random.Generator) -> Pair:
    got, want = [], []
    for denominator, floor in (("all", 0.0), ("others", 0.0), ("all", 2.0), ("others", 2.0)):
        z, y, loss = trained_on(fedlc.FedLC(1.3, denominator, floor), random)  # type: ignore[arg-type]
        got.append(loss)
        want.append(
            fedlc.calibrated_cross_entropy(
                logits=z, labels=y, class_counts=COUNTS, tau=1.3, denominator=denominator, count_floor=floor
            )
        )
    return got, want


def restricted_softmax_cross_entropy(random: np.random.Generator) -> Pair:
    got, want = [], []
    for kind in fedrs.KINDS:
        z, y, loss = trained_on(fedrs.FedRS(0.3, kind), random)  # type: ignore[arg-type]
        got.append(loss)
        want.append(
            fedrs.restricted_softmax_cross_entropy(logits=z, labels=y, class_counts=COUNTS, alpha=0.3, kind=kind)
        )
    return got, want


def damped_margin_loss(random: np.random.Generator) -> Pair:
    method = fedld.DampedMargin(0.7)
    z, y, loss = trained_on(method, random)
    return loss, fedld.damped_margin_loss(logits=z, labels=y, temperature=0.7)


def mixed_loss(random: np.random.Generator) -> Pair:
    x, z, y = normal(random, 7, 3), normal(random, 7, 5), torch.from_numpy(random.integers(5, size=7))
    drawn = {"mixup.lam": torch.tensor(random.uniform()), "mixup.permutation": torch.from_numpy(random.permutation(7))}
    ctx = job(drawn=drawn.__getitem__, num_classes=5)
    batch = mixup.Mixup().transform(ctx, Batch(x, y, x, y))
    loss = Step.task_loss(step_of(), ctx, job(logits=z), batch)
    return loss, mixup.mixed_loss(z, y, *drawn.values())


def local_statistics(random: np.random.Generator) -> Pair:
    features, labels = normal(random, 9, 4), torch.from_numpy(random.choice([0, 2, 3], size=9))
    sent: dict[str, Tensor] = {}
    ctx = job(
        download={},
        kept=sent,
        upload=sent,
        vector=job(data=features),
        trainer=job(task=job(num_classes=5)),
        model=job(eval=lambda: None, train=lambda: None, features=lambda inputs: inputs),
        data=lambda: zip(features.split(4), labels.split(4), strict=True),
    )
    fedpac.FedPAC().receive(ctx)
    got = {
        "class_means": sent["fedpac.local"],
        "weighted_means": sent["fedpac.weighted_means"],
        "class_counts": sent["fedpac.class_counts"],
        "variance": float(sent["fedpac.variance"]),
    }
    want = fedpac.local_statistics(features=features, labels=labels, num_classes=5)
    return got, {name: want[name] for name in got}


def classifier_combination_weights(random: np.random.Generator) -> Pair:
    variances, weighted = torch.from_numpy(random.uniform(1, 5, size=4)), normal(random, 4, 5, 3)
    heads = torch.eye(4, dtype=torch.float64)  # so a mixture of heads is its weights
    updates = [
        job(
            client=i,
            extras={
                "fedpac.class_means": weighted[i].numpy(),
                "fedpac.class_counts": np.ones(5, np.int64),
                "fedpac.variance": variances[i : i + 1].numpy(),
                "fedpac.weighted_means": weighted[i].numpy(),
                "fedpac.head": heads[i].numpy(),
            },
        )
        for i in range(4)
    ]
    state = {"fedpac.heads": torch.empty(4, 4, dtype=torch.float64)[:0], "fedpac.rows": torch.full((6,), -1)}
    server = job(state=state, report={}, counts=np.array([1, 1, 1, 1, 0, 0]), able=4)
    fedpac.FedPAC(min_weight=0.1).absorb(Aggregation(updates, [], [1.0] * 4, [0] * 4, {}), server)
    want = [
        fedpac.classifier_combination_weights(
            variances=variances, weighted_means=weighted, client=client, min_weight=0.1
        )
        for client in range(4)
    ]
    return state["fedpac.heads"], torch.stack(want)


def satisfies_minimum(random: np.random.Generator) -> Pair:
    draws = iter(drawn := [random.integers(0, 30, size=4) for _ in range(999)])
    found = partition._redrawn(lambda: next(draws), lambda counts: counts, 12, 1.0, 4)  # type: ignore
    met = [partition.satisfies_minimum(offsets=np.cumsum([0, *counts]), minimum=12) for counts in drawn]
    return found, drawn[met.index(True)]


def generator_loss(random: np.random.Generator) -> Pair:
    z, weight, logits, y = normal(random, 7, 6), normal(random, 6, 4), normal(random, 7, 5), random.integers(5, size=7)
    ctx, out = job(networks={dann.DISCRIMINATOR: lambda z: z @ weight}, client=2), job(features=z, logits=logits)
    got, want = [], []
    for targets in (torch.from_numpy(y), normal(random, 7, 5).softmax(1)):
        batch = Batch(z, targets, z, targets)
        got.append(Step.task_loss(step_of(), ctx, out, batch) + dann.Dann(0.3).term(ctx, out, batch))
        want.append(dann.generator_loss(logits, targets, z @ weight, 2, 0.3))
    return got, want


ANGLES = [0.0, 30.0, 75.0]


def turned(per: Any, seed: int) -> tuple[Any, Tensor]:
    """Clients of 2, 1 and 4 training samples, and the angle of each sample of a data set that is made for them."""
    empty = partition.CSR(np.empty(0, np.int64), np.zeros(4, np.int64))
    parts = partition.Partition(partition.CSR(np.array([5, 0, 3, 6, 1, 2, 4]), np.array([0, 2, 3, 7])), empty)
    source, clean = job(rotation=corruption.Rotation(per=per, angles=ANGLES[: 2 + seed % 2])), range(7)
    _, turns = federated._turns(source, SizedRows(clean), parts, seed)  # type: ignore[arg-type]
    return parts, torch.tensor(source.rotation.angles, dtype=torch.float64)[torch.from_numpy(turns)]


class SizedRows(list[int]):
    """Training samples alone."""

    @property
    def train_rows(self) -> int:
        return len(self)


def client_rotation_angles(random: np.random.Generator) -> Pair:
    seed = int(random.integers(99))
    parts, got = turned("client", seed)
    angles = corruption.client_rotation_angles(num_clients=3, angles=ANGLES[: 2 + seed % 2])
    want = np.empty(7)
    want[parts.train.indices] = angles[parts.train.owners]
    return got, torch.from_numpy(want)


def image_rotation_angles(random: np.random.Generator) -> Pair:
    seed = int(random.integers(99))
    parts, got = turned("image", seed)
    draw, angles = stream(seed, "rotation"), ANGLES[: 2 + seed % 2]
    shares, uniforms = draw.dirichlet(np.ones(len(angles)), size=3), draw.random(7)
    want, rows = np.empty(7), parts.train.indices
    want[rows] = corruption.image_rotation_angles(
        probabilities=shares[parts.train.owners], uniforms=uniforms[rows], angles=angles
    )
    return got, torch.from_numpy(want)


FORMS: dict[str, Callable[[np.random.Generator], Pair]] = {
    "raysim.data.corruption:client_rotation_angles": client_rotation_angles,
    "raysim.data.corruption:image_rotation_angles": image_rotation_angles,
    "raysim.data.partition:satisfies_minimum": satisfies_minimum,
    "raysim.methods.dann:generator_loss": generator_loss,
    "raysim.methods.fedavg:weighted_average": weighted_average,
    "raysim.methods.fedcm:server_direction": server_direction,
    "raysim.methods.fedcm:update_direction": update_direction,
    "raysim.methods.fedlc:calibrated_cross_entropy": calibrated_cross_entropy,
    "raysim.methods.fedld:damped_margin_loss": damped_margin_loss,
    "raysim.methods.fedpac:classifier_combination_weights": classifier_combination_weights,
    "raysim.methods.fedpac:local_statistics": local_statistics,
    "raysim.methods.fedprox:proximal_term": proximal_term,
    "raysim.methods.fedrs:restricted_softmax_cross_entropy": restricted_softmax_cross_entropy,
    "raysim.methods.mixup:mixed_loss": mixed_loss,
    "raysim.methods.scaffold:corrected_gradient": corrected_gradient,
    **ASYNCHRONOUS_FORMS,
    **SERVER_FORMS,
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
