"""Make probes of random numbers for tests."""

from __future__ import annotations

import numpy as np

from raysim.api.messages import Probe


def make(
    client: int = 0,
    version: int = 3,
    seen: int = 2,
    rows: int = 4,
    classes: int = 3,
    features: int = 5,
) -> Probe:
    """Return a probe of random numbers.

    The received model's features depend only on `version`, as in a run.
    seen: the number of classes in the client's training data.
    rows: the number of test samples.
    features: the length of a feature vector.
    """
    local, shared = np.random.default_rng(100 + client), np.random.default_rng(version)
    outputs = local.random((rows, classes), np.float32)
    return Probe(
        client=client,
        version=version,
        labels=np.arange(rows) % classes,
        seen=np.arange(classes) < seen,
        accuracy=0.1 * client,
        features=local.normal(size=(rows, features)).astype(np.float32),
        received=shared.normal(size=(rows, features)).astype(np.float32),
        probabilities=outputs / outputs.sum(axis=1, keepdims=True),
    )
