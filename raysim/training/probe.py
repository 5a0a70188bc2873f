"""How biased local training leaves the clients' models: measures of feature and classifier bias.

Guo, Tang and Lin, "FedBR" (ICML 2023): Figure 2 (features), Figure 3 (classifier) and Table 6 (accuracy of local
models). A local model is probed before averaging, beside the model that its client received, on
balanced rows of the central test set. The paper shows pictures; the numbers for features and classifier are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from raysim.api.messages import Bools, Probe, Reals
from raysim.data.partition import Floats, Ints
from raysim.primitives.checks import finite_values


def balanced_rows(labels: Ints, per_class: int, generator: np.random.Generator) -> Ints:
    """Positions, ascending: of every class that occurs, `per_class` drawn without replacement, or all it has."""
    positions = (np.flatnonzero(labels == label) for label in np.unique(labels))
    drawn = [generator.choice(rows, min(per_class, len(rows)), replace=False) for rows in positions]
    return np.sort(np.concatenate([np.empty(0, np.int64), *drawn]))


def feature_distance(local: Reals, received: Reals) -> float:
    """Mean over rows of |local - received|, in units of the mean |received|; nan where every received row is zero.

    Features that did not move have the distance 0, zero or not.
    """
    local, received = np.asarray(local, np.float64), np.asarray(received, np.float64)
    moved, scale = (float(np.linalg.norm(x, axis=1).mean()) for x in (local - received, received))
    return moved / scale if scale else math.nan if moved else 0.0


def feature_similarity(local: Reals, received: Reals) -> float:
    """Mean row-wise cosine; exactly 1 for identical features. A zero row is like a zero row alone."""
    local, received = np.asarray(local, np.float64), np.asarray(received, np.float64)
    squares = (local * local).sum(axis=1), (received * received).sum(axis=1)
    lengths = np.sqrt(squares[0] * squares[1])
    cosines = (squares[0] == squares[1]).astype(np.float64)  # for zero rows: both are zero, or one
    np.divide((local * received).sum(axis=1), lengths, out=cosines, where=lengths != 0)
    return float(cosines.mean())


def feature_likeness(features: Reals, labels: Ints, seen: Bools) -> float | None:
    """Mean cosine between rows of seen and rows of unseen classes: how alike one model makes what its client knows and
    what it does not (Figure 2); None without either."""
    features = np.asarray(features, np.float64)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = np.divide(features, lengths, out=np.zeros_like(features), where=lengths != 0)
    known_rows, unknown = unit[seen[labels]], unit[~seen[labels]]
    return float((known_rows @ unknown.T).mean()) if len(known_rows) and len(unknown) else None


def unseen_probability(probabilities: Reals, labels: Ints, seen: Bools) -> float | None:
    """Mean probability of the true class over the rows of classes that the client has not seen; None without such."""
    rows = np.flatnonzero(~seen[labels])
    return float(probabilities[rows, labels[rows]].mean(dtype=np.float64)) if len(rows) else None


def seen_share(probabilities: Reals, labels: Ints, seen: Bools) -> float | None:
    """Mean probability of all seen classes together over the rows of unseen ones: 0 is right, 1 is full bias."""
    output = output_distribution(probabilities, labels, seen)
    return None if output is None else float(output[seen].sum())


def output_distribution(probabilities: Reals, labels: Ints, seen: Bools) -> Floats | None:
    """Mean output [C] over the rows of classes that the client has not seen (Figure 3); None without such rows."""
    rows = ~seen[labels]
    return np.asarray(probabilities[rows].mean(axis=0, dtype=np.float64)) if rows.any() else None


def _mean(values: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """Return the mean of the known values, each weighted by the rows that it was computed on; None without any."""
    pairs = [
        (v, count)
        for v, count in zip(values, counts, strict=True)
        if v is not None and math.isfinite(v)
    ]
    total = sum(count for _, count in pairs)
    return math.fsum(value * count for value, count in pairs) / total if total else None


def summarise_probes(probes: Sequence[Probe]) -> dict[str, float | None]:
    """Return the columns of a history row: means over the rows of all probed clients, and the worst client's accuracy.

    The clients share the central rows of accuracy and features. Rows of unseen classes differ in number from client to
    client, and so do the pairs of a seen and an unseen row. A column is None where no client has a value.
    """
    accuracies = [probe.accuracy for probe in probes]
    distances = [feature_distance(p.features, p.received) for p in probes]
    similarities = [feature_similarity(p.features, p.received) for p in probes]
    likenesses = [feature_likeness(p.features, p.labels, p.seen) for p in probes]
    probabilities = [unseen_probability(p.probabilities, p.labels, p.seen) for p in probes]
    shares = [seen_share(p.probabilities, p.labels, p.seen) for p in probes]
    rows = [len(probe.labels) for probe in probes]
    unseen = [int(np.count_nonzero(~probe.seen[probe.labels])) for probe in probes]
    pairs = [count * (total - count) for count, total in zip(unseen, rows, strict=True)]
    return {
        "local_accuracy": _mean(accuracies, rows),
        "local_accuracy_worst": min(finite_values(accuracies), default=None),
        "feature_distance": _mean(distances, rows),
        "feature_similarity": _mean(similarities, rows),
        "feature_likeness": _mean(likenesses, pairs),
        "unseen_probability": _mean(probabilities, unseen),
        "seen_share": _mean(shares, unseen),
    }
