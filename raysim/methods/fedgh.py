"""FedGH: where two clients' updates oppose each other, remove from both what lies along the other, then average.

Zhang, Sun and Chen, "Tackling the Non-IID Issue in Heterogeneous Federated Learning by Gradient Harmonization" (IEEE
SPL 2024). For each pair (i, j) in turn that conflicts, with G the updates as they came and g the running ones,

    g_i <- g_i - <g_i, G_j> / |G_j|^2 G_j        g_j <- g_j - <g_j, G_i> / |G_i|^2 G_i

All g stay in the span of G: a matrix of coefficients and the Gram matrix suffice, and one weighted sum at the end.

"fedgh_hierarchical" is another algorithm, which FedLD's code runs and tables under the name FedGH: per tensor, with r a
running mean of past aggregates, sort by <g, r>, let the first meet the last, the second the last but one, ...; a pair
that conflicts is projected as above, each on what the other was; its sum takes its place; again, until two are left.
(The FedGH with a global header for heterogeneous models is a third, unrelated one.)

Choices where the paper is silent, and where it and the code disagree
- No code of the authors exists, and the listing was not at hand: pairs (0, 1), (0, 2), ... by client id, and an
  inner product of the original updates below 0 as conflict. In "current" each line asks its own running numerator, as
  PCGrad does, and never removes what agrees. Order and test matter once an update is in two conflicts; the history
  counts conflicts and projections.
- Lengths are not restored: updates shrink. One vector per client, of trainable parameters, unless per tensor.
- The hierarchy's last two are not sorted (code): a is the sum that was made first, b the other. With s = <a, b> from
  before either changed, a <- a - s / (|b|^2 + eps) b, then b <- b - s / (|a|^2 + eps) a with the new a. The code
  does not compute s again. If a and b are almost opposite, the new a is short and b can grow: at most by
  |s| / (2 sqrt(eps)). Two alone stay in the order of acceptance.
- The hierarchy is uniform (code) unless weighting or another method says otherwise: an update then counts with its
  weight over the mean weight, in sums and in eps alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.fedavg import weight_total, weighted_sum
from raysim.methods.recombination import parameters_of, recombined
from raysim.primitives.checks import above, one_of
from raysim.vectors.gram import GRANULARITIES, Granularity, combination, gram, stretches

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

ConflictTest: TypeAlias = Literal["original", "current"]
Order: TypeAlias = Literal["lexicographic", "random"]
Pairs: TypeAlias = Sequence[Sequence[int]]


@dataclass
class _Tally:
    """Pairs that conflicted, and projections made."""

    conflicts: int = 0
    projections: int = 0


def _harmonized(
    products: np.ndarray, order: Pairs | None, conflict_test: str, tally: _Tally
) -> np.ndarray:
    """Coefficients float64 [m, m] of the harmonised updates (rows) in the original ones, of their Gram matrix."""
    one_of("method.fedgh.conflict_test", conflict_test, get_args(ConflictTest))
    mixture = np.eye(len(products))
    pairs = combinations(range(len(products)), 2) if order is None else order
    current = conflict_test == "current"
    for i, j in pairs:
        if not current and not products[i, j] < 0:
            continue
        made = 0
        for changed_row, other in ((i, j), (j, i)):
            inner = mixture[changed_row] @ products[other]
            if products[other, other] > 0 and (inner < 0 or not current):
                mixture[changed_row, other] -= inner / products[other, other]
                made += 1
        tally.conflicts += made > 0
        tally.projections += made
    return mixture


def harmonized_gradients(
    *, gradients: Tensor, order: Pairs | None = None, conflict_test: str = "original"
) -> Tensor:
    """The harmonised rows of ``gradients`` [m, d] -> [m, d]; rows without a conflict keep their bits.

    ``order``: pairs [i, j], by default (0, 1), (0, 2), ..., (1, 2), ...; ``conflict_test``: "original" or "current".
    """
    mixture = _harmonized(gram(gradients.unbind()).numpy(), order, conflict_test, _Tally())
    return torch.from_numpy(mixture).to(gradients.dtype) @ gradients


def harmonized_aggregate(
    *,
    gradients: Tensor,
    weights: Tensor,
    order: Pairs | None = None,
    conflict_test: str = "original",
) -> Tensor:
    """The weighted mean of ``harmonized_gradients`` without forming them: ``gradients`` [m, d], ``weights`` [m] -> [d].

    ValueError for weights without a mean.
    """
    mixture = _harmonized(gram(gradients.unbind()).numpy(), order, conflict_test, _Tally())
    return weighted_sum(gradients, weights.double() @ torch.from_numpy(mixture)) / weight_total(
        weights
    )


class FedGH(Method):
    """order: of the pairs. conflict_test: of updates as they came, or line by line of the running ones."""

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
        one_of("method.fedgh.granularity", granularity, GRANULARITIES)
        self.order, self.conflict_test, self.granularity = order, conflict_test, granularity

    def setup(self, run: Setup) -> None:
        """Warn of aggregations of one update: a conflict takes two."""
        run.warn_if_single("no updates are in conflict")

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """The weighted mean of the harmonised updates; without a conflict FedAvg's, bit for bit."""
        updates = aggregation.updates
        places = sorted(
            range(len(updates)), key=lambda index: (updates[index].client, updates[index].job)
        )
        pairs = list(combinations(places, 2))
        if self.order == "random":
            pairs = [pairs[index] for index in server.stream("order").permutation(len(pairs))]
        tally = _Tally()

        def change(products: Tensor) -> Tensor:
            return torch.from_numpy(_harmonized(products.numpy(), pairs, self.conflict_test, tally))

        direction = recombined(aggregation, server, self.granularity, change)
        _report(server, tally)
        return direction


def _report(server: ServerView, tally: _Tally) -> None:
    """Columns of the history."""
    server.report["conflicts"] = float(tally.conflicts)
    server.report["projections"] = float(tally.projections)


# --- FedLD's FedGH --------------------------------------------------------------------------------------------------
def _tree(products: np.ndarray, factors: np.ndarray, eps: float, tally: _Tally) -> np.ndarray:
    """Coefficients float64 [m] of the sum at the root, in m updates that count with ``factors`` [m] each.

    products: the Gram matrix [m + 1, m + 1] of the updates and of r, which is last.
    """
    inside, towards = products[:-1, :-1], products[:-1, -1]

    def inner(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ inside @ b)

    def subtract(a: np.ndarray, overlap: float, direction: np.ndarray) -> np.ndarray:
        """Return ``a`` minus ``direction`` times the overlap over the direction's squared length."""
        factor = overlap / (inner(direction, direction) + eps)
        changed: np.ndarray = a - factor * direction
        return changed

    def meet(a: np.ndarray, b: np.ndarray, is_last_pair: bool) -> np.ndarray:
        """Return the sum of the two updates, which are projected first if they conflict."""
        overlap = inner(a, b)
        if overlap < 0:
            tally.conflicts += 1
            tally.projections += 2
            changed_a = subtract(a, overlap, b)
            # The last pair keeps the overlap from before either changed, as the released code does.
            changed_b = subtract(b, overlap, changed_a if is_last_pair else a)
            a, b = changed_a, changed_b
        total: np.ndarray = a + b
        return total

    items = list(np.diag(factors))
    while len(items) > 1:
        if len(items) > 2:
            items.sort(key=lambda item: float(item @ towards), reverse=True)
        half = len(items) // 2
        pairs = zip(items[:half], items[: -half - 1 : -1], strict=True)
        items = [meet(a, b, len(items) == 2) for a, b in pairs] + items[half : len(items) - half]
    root: np.ndarray = items[0]
    return root


def hierarchical_harmonized_gradient(
    *, gradients: Tensor, reference: Tensor, eps: float = 1e-7
) -> Tensor:
    """FedLD's FedGH of one tensor: ``gradients`` [m, d], r ``reference`` [d], ``eps`` added to divisors -> [d]."""
    products = gram([*gradients.unbind(), reference]).numpy()
    coefficients = _tree(products, np.ones(len(gradients)), eps, _Tally())
    return weighted_sum(gradients, torch.from_numpy(coefficients)) / len(gradients)


_KEPT = 0.99  # of the running mean, at every aggregation
REFERENCE = "reference"


class HierarchicalFedGH(Method):
    """Harmonises pair by pair, per tensor, sorted by past aggregates; eps keeps divisors away from 0."""

    name = "fedgh_hierarchical"
    paper = "Zeng et al., MICCAI 2024 (code)"
    weighting = "uniform"

    def __init__(self, eps: float = 1e-7):
        self.eps = above(
            "method.fedgh_hierarchical.eps", eps, 0.0, "it keeps the divisors away from 0"
        )

    def setup(self, run: Setup) -> None:
        """Warn of aggregations of one update: a conflict takes two."""
        run.warn_if_single("no updates are in conflict")

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """The mean in the first round, which r starts from; then the root of every tensor's tree."""
        rows, weights = parameters_of(aggregation, server), aggregation.weights
        tally, reference = _Tally(), server.state.get(REFERENCE)
        if reference is None:
            direction = combination(rows, weights, server.group)
        else:
            mean = sum(weights) / len(weights)
            factors = np.array(weights) / mean
            direction = torch.empty_like(reference)
            for part in stretches(server.layout, "tensor"):
                blocks = [row[part] for row in rows]
                coefficients = _tree(
                    gram([*blocks, reference[part]]).numpy(), factors, self.eps, tally
                )
                direction[part] = combination(blocks, (coefficients * mean).tolist(), server.group)
        direction.div_(aggregation.divisor)
        new = (
            direction.clone() if reference is None else _KEPT * reference + (1 - _KEPT) * direction
        )
        server.state[REFERENCE] = new
        _report(server, tally)
        return direction
