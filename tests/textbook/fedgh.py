"""Two algorithms called FedGH: `fedgh` (Zhang et al. 2024) and `hierarchical` (FedLD's code).

G_i: client i's update before any projection. g_i: this update after the projections so far. r: the
direction by which `hierarchical` sorts updates. Two updates conflict if their dot product is
negative.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.servers import Cohort, run_server_rule, slices
from textbook.world import Book, World


def fedgh(
    world: World,
    order: str = "lexicographic",
    conflict_test: str = "original",
    tensor: bool = False,
) -> Book:
    """Compute a run of FedAvg in which the server changes updates that conflict.

    In each pair of updates a and b, a loses its projection on the original b if a conflicts with b.
    The same holds for b and the original a.
    order: the order of the pairs: by client number ("lexicographic") or permuted ("random").
    conflict_test: a conflicts with b if the dot product of a and the original b is negative.
    "original" uses the original a, and "current" uses a after its projections so far.
    tensor: True treats each tensor of the parameters separately.
    """
    counts: dict[str, list[float]] = {"fedgh.conflicts": [], "fedgh.projections": []}
    parts = slices(world) if tensor else [slice(None)]

    def harmonized(original: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
        g = original.clone()
        for i, j in pairs:
            lines = [(i, j), (j, i)]
            if conflict_test == "original":
                made = lines if original[i] @ original[j] < 0 else []
            else:
                made = [(a, b) for a, b in lines if g[a] @ original[b] < 0]
            for a, b in made:
                g[a] = g[a] - (g[a] @ original[b]) / (original[b] @ original[b]) * original[b]
            counts["fedgh.conflicts"][-1] += bool(made)
            counts["fedgh.projections"][-1] += len(made)
        return g

    def rule(at: Cohort) -> Tensor:
        for values in counts.values():
            values.append(0.0)
        pairs = list(
            combinations(sorted(range(len(at.jobs)), key=lambda place: at.jobs[place].client), 2)
        )
        if order == "random":
            pairs = [
                pairs[k]
                for k in stream(world.seed, "fedgh.order", at.version).permutation(len(pairs))
            ]
        g = torch.cat([harmonized(at.changes[:, part], pairs) for part in parts], dim=1)
        return at.x + at.weights @ g / at.weights.sum()

    return replace(run_server_rule(world, rule), columns=counts)


def hierarchical(world: World, eps: float = 1e-7) -> Book:
    """Compute a run in which the server adds up updates in pairs, until at most two are left.

    In the first round, the server's step is the mean update. In later rounds, each tensor is
    treated separately:

    1. The vectors are sorted by their dot product with a reference r. The first and the last vector
       form a pair, then the second and the last but one, and so on.
    2. Each pair is replaced by its sum. If the dot product of a pair is negative (a conflict), each
       vector first loses its projection on the other one.
    3. Steps 1 and 2 are repeated until at most two vectors are left. If these vectors a and b
       conflict, a becomes a' = a - <a, b> / |b|^2 b, and b becomes b - <a, b> / |a'|^2 a'.
    4. The step is the sum of the vectors that are left, divided by the number of updates.

    r is the mean update of the first round. Each later round changes it to 0.99 r + 0.01 times the
    step.
    eps: is added to the squared norms by which projections are divided.
    """
    r: Tensor | None = None
    name = "fedgh_hierarchical"
    conflicts: list[float] = []

    def off(a: Tensor, b: Tensor) -> Tensor:
        return a - (a @ b) / (b @ b + eps) * b

    def root(changes: Tensor, r: Tensor) -> Tensor:
        g = list(changes)
        while len(g) > 2:
            g.sort(key=lambda update: float(update @ r), reverse=True)
            made = []
            while len(g) > 1:
                a, b = g.pop(0), g.pop()
                conflicts[-1] += bool(a @ b < 0)
                made.append(off(a, b) + off(b, a) if a @ b < 0 else a + b)
            g = made + g
        if len(g) == 2 and g[0] @ g[1] < 0:
            conflicts[-1] += 1
            overlap = g[0] @ g[1]  # from before either changes, for both lines
            g[0] = g[0] - overlap / (g[1] @ g[1] + eps) * g[1]
            g[1] = g[1] - overlap / (g[0] @ g[0] + eps) * g[0]
        return sum(g) / len(changes)

    def rule(at: Cohort) -> Tensor:
        nonlocal r
        conflicts.append(0.0)
        if r is None:
            r = direction = at.changes.mean(0)
        else:
            direction = torch.cat([root(at.changes[:, part], r[part]) for part in slices(world)])
            r = 0.99 * r + 0.01 * direction
        return at.x + direction

    book = run_server_rule(world, rule)
    columns = {
        f"{name}.conflicts": conflicts,
        f"{name}.projections": [2 * count for count in conflicts],
    }
    return replace(book, server={f"{name}.reference": r}, columns=columns)
