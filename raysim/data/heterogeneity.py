"""How unlike the clients of a split are, in a few numbers that a result has to be read with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raysim.data.partition import Floats, Ints

SCALES = {  # the numbers of `heterogeneity`, each with what it says
    "label_entropy": "entropy of a client's labels, nats",
    "label_entropy_std": "its standard deviation over clients",
    "largest_share": "share of a client's commonest class",
    "effective_classes": "e to the entropy",
    "divergence": "Jensen-Shannon divergence of a client's labels from all clients', bits",
    "size_variation": "standard deviation of the clients' sizes over their mean",
}


def heterogeneity(counts: Ints) -> dict[str, float]:
    """Means over clients with samples, of training samples of each client and class [N, C]; `SCALES` says of what.

    The divergence is 0 where every client has the labels of all together, and nears 1 where no two share a class. It
    compares labels alone, not how images of one class differ between clients.
    """
    sizes = counts.sum(axis=1)
    filled = counts[sizes > 0]
    shares = filled / filled.sum(axis=1, keepdims=True)
    everyone = counts.sum(axis=0) / counts.sum()
    own = entropy(filled)
    middle = entropy((shares + everyone) / 2)
    divergence = (middle - (own + entropy(everyone[None])) / 2) / np.log(2)
    numbers = {
        "label_entropy": own.mean(),
        "label_entropy_std": own.std(),
        "largest_share": shares.max(axis=1).mean(),
        "effective_classes": np.exp(own).mean(),
        "divergence": np.maximum(divergence, 0.0).mean(),
        "size_variation": sizes.std() / sizes.mean(),
    }
    return {name: float(value) for name, value in numbers.items()}


def format_heterogeneity(numbers: dict[str, float]) -> str:
    """The numbers of `heterogeneity` as a line for a person."""
    return (
        f"label entropy {numbers['label_entropy']:.3f} ± {numbers['label_entropy_std']:.3f} nats, commonest class "
        f"{numbers['largest_share']:.0%}, {numbers['effective_classes']:.2f} effective classes, Jensen-Shannon "
        f"divergence {numbers['divergence']:.3f} bits (means over clients)"
    )


def entropy(weights: Ints | NDArray[np.floating]) -> Floats:
    """Of each row of weights [N, C], in nats."""
    shares = weights / weights.sum(axis=1, keepdims=True)
    values: Floats = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    return values
