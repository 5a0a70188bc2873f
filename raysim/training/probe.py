"""Measure how much local training biases the features and classifiers of clients.

The measures follow pictures in Guo, Tang and Lin, "FedBR" (ICML 2023): Figure 2 (features) and
Figure 3 (classifier). Table 6 has the accuracy of local models. The formulas of the measures are
raysim's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from raysim.api.messages import Bools, Probe, Reals
from raysim.data.partition import Floats, Ints
from raysim.primitives.checks import finite_values


def balanced_rows(labels: Ints, per_class: int, generator: np.random.Generator) -> Ints:
    """Return ascending positions in `labels`: `per_class` of each class, or all if it has fewer.

    The positions of a class are drawn without replacement.
    generator: the source of random numbers.
    """
    drawn = [np.empty(0, np.int64)]
    for label in np.unique(labels):
        positions = np.flatnonzero(labels == label)
        count = min(per_class, len(positions))
        drawn.append(generator.choice(positions, count, replace=False))
    return np.sort(np.concatenate(drawn))


def feature_distance(local: Reals, received: Reals) -> float:
    """Return the relative distance of the features: sum_i |l_i - r_i| / sum_i |r_i|.

    l_i, r_i: row i of `local` and `received`, [rows, features]. The result is 0 if both models have
    the same features. Otherwise it is nan if all received features are 0.
    """
    local, received = np.asarray(local, np.float64), np.asarray(received, np.float64)
    moved = float(np.linalg.norm(local - received, axis=1).mean())
    scale = float(np.linalg.norm(received, axis=1).mean())
    if not moved:
        return 0.0
    return moved / scale if scale else math.nan


def feature_similarity(local: Reals, received: Reals) -> float:
    """Return the mean cosine between a row of `local` and the same row of `received`.

    local, received: [rows, features], the features of two models. Equal models give exactly 1. A
    cosine counts as 1 if both rows are zero, and as 0 if only one row is zero.
    """
    local, received = np.asarray(local, np.float64), np.asarray(received, np.float64)
    local_squares, received_squares = (local * local).sum(axis=1), (received * received).sum(axis=1)
    lengths = np.sqrt(local_squares * received_squares)
    cosines = (local_squares == received_squares).astype(np.float64)  # where one row is zero
    np.divide((local * received).sum(axis=1), lengths, out=cosines, where=lengths != 0)
    return float(cosines.mean())


def feature_likeness(features: Reals, labels: Ints, seen: Bools) -> float | None:
    """Return the mean cosine between a row of a seen class and a row of an unseen class.

    None means that there is no such pair. A row of zeros has the cosine 0. Figure 2 of the FedBR
    paper shows this measure.
    features: [rows, features], from the local model.
    labels: [rows], the true classes.
    seen: bool [classes], True for classes in the client's training data.
    """
    features = np.asarray(features, np.float64)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = np.divide(features, lengths, out=np.zeros_like(features), where=lengths != 0)
    seen_rows, unseen_rows = unit[seen[labels]], unit[~seen[labels]]
    if not len(seen_rows) or not len(unseen_rows):
        return None
    return float((seen_rows @ unseen_rows.T).mean())


def unseen_probability(probabilities: Reals, labels: Ints, seen: Bools) -> float | None:
    """Return the mean probability that the local model gives to the true class of unseen rows.

    Unseen rows have classes that the client's training data does not have. Return None if there are
    none.
    probabilities: [rows, classes].
    labels: [rows], the true classes.
    seen: bool [classes], True for classes in the training data.
    """
    rows = np.flatnonzero(~seen[labels])
    if not len(rows):
        return None
    return float(probabilities[rows, labels[rows]].mean(dtype=np.float64))


def seen_share(probabilities: Reals, labels: Ints, seen: Bools) -> float | None:
    """Return the mean probability of all seen classes together, over rows of unseen classes.

    None means that there are no such rows.
    probabilities: [rows, classes], the outputs of the local model after softmax.
    labels: [rows], the true classes.
    seen: bool [classes], True for classes in the client's training data.
    """
    output = output_distribution(probabilities, labels, seen)
    return None if output is None else float(output[seen].sum())


def output_distribution(probabilities: Reals, labels: Ints, seen: Bools) -> Floats | None:
    """Return the mean probability of each class [C] over rows of unseen classes.

    None means that there are no such rows. Figure 3 of the FedBR paper shows this mean.
    probabilities: [rows, classes], the outputs of the local model after softmax.
    labels: [rows], the true classes.
    seen: bool [classes], True for classes in the client's training data.
    """
    rows = ~seen[labels]
    if not rows.any():
        return None
    return np.asarray(probabilities[rows].mean(axis=0, dtype=np.float64))


def _mean(values: Sequence[float | None], counts: Sequence[int]) -> float | None:
    """Return the mean of the finite values, weighted by `counts`; None without finite values.

    counts: for each value, the number of rows that it was computed from.
    """
    pairs = [
        (value, count)
        for value, count in zip(values, counts, strict=True)
        if value is not None and math.isfinite(value)
    ]
    total = sum(count for _, count in pairs)
    if not total:
        return None
    return math.fsum(value * count for value, count in pairs) / total


def summarise_probes(probes: Sequence[Probe]) -> dict[str, float | None]:
    """Return columns of a history row: means of the probes' measures over all probed clients.

    A client has u probed samples of classes that its training data lacks, and s of other classes.
    Its weight in a mean is:
    - u for "unseen_probability" and "seen_share",
    - u * s for "feature_likeness",
    - u + s for all other means.

    "local_accuracy_worst" is not a mean, but the lowest accuracy of a client. Infinite and nan
    values are left out. A column is None if no value is left.
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
