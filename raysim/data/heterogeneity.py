"""Measure how much the clients of a split differ in labels and sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raysim.data.csr import Floats, Ints

SCALES = {  # the measures of `heterogeneity`, each with its meaning
    "label_entropy": "entropy of a client's labels, nats",
    "label_entropy_std": "its standard deviation over clients",
    "largest_share": "share of a client's most frequent class",
    "effective_classes": "e to the entropy",
    "divergence": "Jensen-Shannon divergence of a client's labels from all clients', bits",
    "size_variation": "standard deviation of the clients' sizes over their mean",
}


def heterogeneity(counts: Ints) -> dict[str, float]:
    """Return measures of how much clients differ in labels and sizes, by name.

    `SCALES` describes each measure. Clients without samples count only in "size_variation".
    counts: [N, C], how many training samples each of N clients has in each of C classes.
    """
    sizes = counts.sum(axis=1)
    filled = counts[sizes > 0]
    shares = filled / filled.sum(axis=1, keepdims=True)
    all_shares = counts.sum(axis=0) / counts.sum()
    entropies = entropy(filled)
    mixture_entropies = entropy((shares + all_shares) / 2)
    mean_entropies = (entropies + entropy(all_shares[None])) / 2
    divergence = (mixture_entropies - mean_entropies) / np.log(2)
    measures = {
        "label_entropy": entropies.mean(),
        "label_entropy_std": entropies.std(),
        "largest_share": shares.max(axis=1).mean(),
        "effective_classes": np.exp(entropies).mean(),
        "divergence": np.maximum(divergence, 0.0).mean(),
        "size_variation": sizes.std() / sizes.mean(),
    }
    return {name: float(value) for name, value in measures.items()}


def format_heterogeneity(measures: dict[str, float]) -> str:
    """Return the measures of `heterogeneity` as one line of text."""
    return (
        f"label entropy {measures['label_entropy']:.3f} ± {measures['label_entropy_std']:.3f} "
        f"nats, most frequent class {measures['largest_share']:.0%}, "
        f"{measures['effective_classes']:.2f} effective classes, Jensen-Shannon divergence "
        f"{measures['divergence']:.3f} bits (means over clients)"
    )


def entropy(weights: Ints | NDArray[np.floating]) -> Floats:
    """Return for each row the entropy of its distribution over classes, in nats, [N].

    weights: [N, C]. Row i has the distribution p_ij = weights_ij / sum_k weights_ik over C classes.
    """
    shares = weights / weights.sum(axis=1, keepdims=True)
    values: Floats = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    return values
