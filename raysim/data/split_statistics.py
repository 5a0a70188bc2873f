"""Describe a split by numbers: sizes, classes per client and heterogeneity."""

from __future__ import annotations

import numpy as np

from raysim.data.csr import Ints
from raysim.data.federated import FederatedData
from raysim.data.heterogeneity import entropy, heterogeneity


def class_counts(data: FederatedData) -> Ints:
    """Return how many training samples each of N clients has in each of C classes, [N, C].

    Unseen clients are included. Samples without a label are one more class. For data without
    classes, the result is [N, 1].
    """
    train = data.partition.all_train
    groups, names = data.open().groups()
    cells = train.owners * len(names) + groups[train.indices]
    counts = np.bincount(cells, minlength=len(train) * len(names))
    return counts.reshape(len(train), len(names))


def statistics(data: FederatedData) -> dict[str, object]:
    """Return numbers that describe the split, by name.

    "sizes", "test_sizes" and "classes_per_client" have the smallest, the median and the largest
    number of a client's training samples, test samples and classes. Clients without samples do not
    count for the classes. "unused" is the number of training rows that no client uses.
    "pooled_entropy" is the entropy of all clients' labels together, in nats. "counts" and
    "heterogeneity" are the results of `class_counts` and `heterogeneity`.
    """
    counts = class_counts(data)
    sizes = counts.sum(axis=1)
    filled = counts[sizes > 0]
    partition, train_rows = data.partition, data.open().train_rows
    used_rows = sum(int((part.indices < train_rows).sum()) for part in partition.parts_of_clients())
    return {
        "clients": len(sizes),
        "empty_clients": int((sizes == 0).sum()),
        "unseen_clients": 0 if partition.unseen is None else len(partition.unseen),
        "samples": int(sizes.sum()),
        "unused": train_rows - used_rows,
        "central_test": len(data.central),
        "sizes": _range(sizes),
        "test_sizes": _range(partition.test.counts),
        "classes_per_client": _range((filled > 0).sum(axis=1)),
        "heterogeneity": heterogeneity(counts),
        "pooled_entropy": float(entropy(counts.sum(axis=0, keepdims=True))[0]),
        "counts": counts,
    }


def _range(values: Ints) -> dict[str, float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}
