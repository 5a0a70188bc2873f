"""FedGH: remove the conflicts between clients' updates before they are averaged.

Source: Zhang et al., "Tackling the Non-IID Issue in Heterogeneous Federated Learning by Gradient
Harmonization" (IEEE SPL 2024). G_i is the update of client i, and g_i starts as G_i. For each pair
(i, j) with a negative <G_i, G_j>, one pair after another,

    g_i <- g_i - <g_i, G_j> / |G_j|^2 G_j        g_j <- g_j - <g_j, G_i> / |G_i|^2 G_i

The result is the weighted mean of all g_i.

"fedgh_hierarchical" is what the code of FedLD (Zeng et al., MICCAI 2024) calls FedGH. r is a
running mean of past aggregates. For each tensor of the model, the server sorts the updates g by <g,
r>. It pairs the first with the last, the second with the last but one, and so on. If the inner
product of a pair is negative, it removes from each update the projection on its partner. The sum of
each pair replaces the pair. This repeats until one vector is left, which is divided by the number
of updates.

Choices, and departures from the paper
- The authors have published no code. The pairs are tested in the order (0, 1), (0, 2), ... by
  client number.
- conflict_test="current" tests changed updates, as in PCGrad: the first formula applies if <g_i,
  G_j> is negative, the second if <g_j, G_i> is negative.
- A changed update is not scaled back to its original length.
- "fedgh_hierarchical" multiplies each update by its weight, divided by the mean weight, before the
  first sorting.
- "fedgh_hierarchical" treats the last pair (a, b) as FedLD's code does. With s the original <a, b>,
  first a <- a - s / (|b|^2 + eps) b. Then b <- b - s / (|a|^2 + eps) a, with the changed a.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.fedavg import weight_total, weighted_sum
from raysim.methods.recombination import parameters_of, recombine
from raysim.primitives.checks import above, one_of
from raysim.vectors.gram import (
    Granularity,
    gram_matrix,
    linear_combination,
    stretches,
)

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

ConflictTest: TypeAlias = Literal["original", "current"]
Order: TypeAlias = Literal["lexicographic", "random"]
Pairs: TypeAlias = Iterable[Sequence[int]]


@dataclass
class _ConflictCounts:
    """The numbers of conflicts and projections in an aggregation, for the history.

    conflicts: the number of pairs of updates that are in conflict.
    projections: the number of projections that were removed from updates of such pairs.
    """

    conflicts: int = 0
    projections: int = 0

    def report(self, server: ServerView) -> None:
        """Write the numbers of conflicts and projections into the history's row."""
        server.report["conflicts"] = float(self.conflicts)
        server.report["projections"] = float(self.projections)


# --- FedGH --------------------------------------------------------------------------------------
def _harmonize(
    products: np.ndarray, pairs: Pairs | None, conflict_test: str, counts: _ConflictCounts
) -> np.ndarray:
    """Remove the conflicts between m updates; return coefficients c of the changed updates.

    c is float64 [m, m]: the changed update i is the sum over j of c_ij times the original update j.
    products: the Gram matrix [m, m] of the original updates.
    pairs: the pairs (i, j) to test for conflicts, in order; None takes all pairs.
    conflict_test: "original" tests the original updates, "current" the changed ones.
    counts: counters to which the conflicts and projections are added.
    """
    one_of("method.fedgh.conflict_test", conflict_test, get_args(ConflictTest))
    if pairs is None:
        pairs = combinations(range(len(products)), 2)
    coefficients = np.eye(len(products))
    is_current = conflict_test == "current"
    for i, j in pairs:
        if not is_current and not products[i, j] < 0:
            continue
        projections = 0
        for row, other in ((i, j), (j, i)):
            inner = coefficients[row] @ products[other]
            if products[other, other] > 0 and (inner < 0 or not is_current):
                coefficients[row, other] -= inner / products[other, other]
                projections += 1
        counts.conflicts += projections > 0
        counts.projections += projections
    return coefficients


# The method computes the same without these functions, which state the rule on plain tensors.
def harmonized_gradients(
    *, gradients: Tensor, order: Pairs | None = None, conflict_test: str = "original"
) -> Tensor:
    """Remove the conflicts between updates; return the changed updates [m, d].

    gradients: [m, d], the original updates.
    order: the pairs [i, j] to test, in this order; None means (0, 1), (0, 2), ..., (1, 2), ...
    conflict_test: "original" tests the original updates, "current" the changed ones.
    """
    products = gram_matrix(gradients.unbind()).numpy()
    coefficients = _harmonize(products, order, conflict_test, _ConflictCounts())
    return torch.from_numpy(coefficients).to(gradients.dtype) @ gradients


def harmonized_aggregate(
    *,
    gradients: Tensor,
    weights: Tensor,
    order: Pairs | None = None,
    conflict_test: str = "original",
) -> Tensor:
    """Remove the conflicts between updates; return the weighted mean [d] of the changed updates.

    gradients: [m, d], the original updates.
    weights: [m], the weight of each changed update.
    order, conflict_test: the arguments of `harmonized_gradients`.
    Raises ValueError unless the weights are finite and at least 0, and one of them is positive.
    """
    products = gram_matrix(gradients.unbind()).numpy()
    coefficients = _harmonize(products, order, conflict_test, _ConflictCounts())
    mixed = weights.double() @ torch.from_numpy(coefficients)
    return weighted_sum(gradients, mixed) / weight_total(weights)


class FedGH(Method):
    """A server rule that removes conflicts between updates before they are averaged.

    order: "lexicographic" takes the pairs (0, 1), (0, 2), ... by client number, "random" takes a
    random order.
    conflict_test: "original" tests the original updates for conflicts, "current" the changed ones.
    granularity: "model" tests and changes whole updates, "tensor" each tensor separately.
    """

    name = "fedgh"
    paper = "Zhang et al., IEEE SPL 2024"

    def __init__(
        self,
        order: Order = "lexicographic",
        conflict_test: ConflictTest = "original",
        granularity: Granularity = "model",
    ):
        one_of("method.fedgh.order", order, get_args(Order))
        one_of("method.fedgh.conflict_test", conflict_test, get_args(ConflictTest))
        one_of("method.fedgh.granularity", granularity, get_args(Granularity))
        self.order = order
        self.conflict_test = conflict_test
        self.granularity = granularity

    def setup(self, run: Setup) -> None:
        """Warn if every aggregation has only one update, which cannot conflict with another."""
        run.warn_if_single("no updates are in conflict")

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Remove the conflicts between updates; return the weighted mean of the changed updates.

        If no updates conflict, the result is bit-identical to FedAvg's mean.
        """
        updates = aggregation.updates
        by_client = sorted(
            range(len(updates)), key=lambda number: (updates[number].client, updates[number].job)
        )
        pairs = list(combinations(by_client, 2))
        if self.order == "random":
            pairs = [pairs[index] for index in server.stream("order").permutation(len(pairs))]
        counts = _ConflictCounts()

        def coefficients(products: Tensor) -> Tensor:
            changed = _harmonize(products.numpy(), pairs, self.conflict_test, counts)
            return torch.from_numpy(changed)

        direction = recombine(aggregation, server, self.granularity, coefficients)
        counts.report(server)
        return direction


# --- FedLD's FedGH ------------------------------------------------------------------------------
def _harmonize_in_tree(
    products: np.ndarray, factors: np.ndarray, eps: float, counts: _ConflictCounts
) -> np.ndarray:
    """Add up m updates in pairs, then the sums in pairs, until one sum is left.

    First remove the conflict within each pair ("fedgh_hierarchical" in the module's docstring).
    Return the coefficient of each update in the last sum, float64 [m].
    products: [m + 1, m + 1], the inner products of the m updates and the running mean r.
    factors: [m], the factor by which each update is multiplied at first.
    eps: added to squared norms, so that no division is by 0.
    counts: counters to which the conflicts and projections are added.
    """
    inside, towards = products[:-1, :-1], products[:-1, -1]

    def inner(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ inside @ b)

    def subtract(a: np.ndarray, overlap: float, direction: np.ndarray) -> np.ndarray:
        """Return the vector a - overlap / (|direction|^2 + eps) direction.

        a, direction: a pair of vectors. Each vector is a weighted sum of the m updates, and its
        array has the m weights.
        overlap: the inner product of the pair, before either vector was changed.
        """
        factor = overlap / (inner(direction, direction) + eps)
        changed: np.ndarray = a - factor * direction
        return changed

    def join_pair(a: np.ndarray, b: np.ndarray, is_last_pair: bool) -> np.ndarray:
        """Return the vector a + b; if <a, b> is negative, first remove the conflict.

        a, b: each vector is a weighted sum of the m updates, and its array has the m weights. The
        result is such an array, too.
        is_last_pair: True if only `a` and `b` are left. The formula for `b` then uses the changed
        `a`.
        """
        overlap = inner(a, b)
        if overlap < 0:
            counts.conflicts += 1
            counts.projections += 2
            changed_a = subtract(a, overlap, b)
            # As in the released code, the last pair uses the overlap from before the changes.
            changed_b = subtract(b, overlap, changed_a if is_last_pair else a)
            a, b = changed_a, changed_b
        total: np.ndarray = a + b
        return total

    rows = list(np.diag(factors))
    while len(rows) > 1:
        is_last_pair = len(rows) == 2
        if not is_last_pair:
            rows.sort(key=lambda row: float(row @ towards), reverse=True)
        half = len(rows) // 2
        middle = rows[half : len(rows) - half]
        pairs = zip(rows[:half], rows[: -half - 1 : -1], strict=True)
        rows = [join_pair(a, b, is_last_pair) for a, b in pairs] + middle
    root: np.ndarray = rows[0]
    return root


# The method computes the same without these functions, which state the rule on plain tensors.
def hierarchical_harmonized_gradient(
    *, gradients: Tensor, reference: Tensor, eps: float = 1e-7
) -> Tensor:
    """Add up m updates in pairs, then the sums in pairs; return the last sum divided by m, [d].

    The module's docstring describes the pairs, and how conflicts are removed
    ("fedgh_hierarchical").
    gradients: [m, d], the updates of one tensor of the model.
    reference: [d], the running mean r of past aggregates.
    eps: a small number that is added to squared norms.
    """
    products = gram_matrix([*gradients.unbind(), reference]).numpy()
    factors = np.ones(len(gradients))
    coefficients = _harmonize_in_tree(products, factors, eps, _ConflictCounts())
    return weighted_sum(gradients, torch.from_numpy(coefficients)) / len(gradients)


# The share of the running mean that each aggregation keeps.
_MOMENTUM = 0.99


class HierarchicalFedGH(Method):
    """A server rule that adds up clients' updates in pairs, and removes conflicts within pairs.

    Two updates conflict if their inner product is negative. The projection of each update on its
    partner is then removed. The sums are paired again until one sum is left.
    eps: a small number that is added to squared norms, so that no division is by 0.
    """

    name = "fedgh_hierarchical"
    paper = "Zeng et al., MICCAI 2024 (code)"
    weighting = "uniform"

    def __init__(self, eps: float = 1e-7):
        self.eps = above(
            "method.fedgh_hierarchical.eps", eps, 0.0, "it keeps the divisors away from 0"
        )

    def setup(self, run: Setup) -> None:
        """Warn if every aggregation has only one update, which cannot conflict with another."""
        run.warn_if_single("no updates are in conflict")

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the mean update after conflicts between clients' updates are removed.

        The first aggregation of a run returns the plain weighted mean, because no running mean
        exists yet. The sum of the updates is divided by `aggregation.divisor`.
        """
        counts = _ConflictCounts()
        reference = server.state.get("reference")
        if reference is None:
            rows = parameters_of(aggregation, server)
            direction = linear_combination(rows, aggregation.weights)
            direction.div_(aggregation.divisor)
            server.state["reference"] = direction.clone()
        else:
            direction = self._harmonize_tensors(aggregation, server, reference, counts)
            direction.div_(aggregation.divisor)
            server.state["reference"] = _MOMENTUM * reference + (1 - _MOMENTUM) * direction
        counts.report(server)
        return direction

    def _harmonize_tensors(
        self,
        aggregation: Aggregation,
        server: ServerView,
        reference: Tensor,
        counts: _ConflictCounts,
    ) -> Tensor:
        """Return the sum of the clients' updates after their conflicts are removed, [d].

        Each tensor of the model is treated separately.
        reference: the running mean of earlier aggregates, [d], which decides the pairs.
        """
        rows, weights = parameters_of(aggregation, server), aggregation.weights
        mean_weight = sum(weights) / len(weights)
        factors = np.array(weights) / mean_weight
        direction = torch.empty_like(reference)
        for part in stretches(server.layout, "tensor"):
            blocks = [row[part] for row in rows]
            products = gram_matrix([*blocks, reference[part]]).numpy()
            coefficients = _harmonize_in_tree(products, factors, self.eps, counts)
            mixed = (coefficients * mean_weight).tolist()
            direction[part] = linear_combination(blocks, mixed)
        return direction
