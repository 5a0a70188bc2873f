"""The loss after an aggregation as three parts: local loss, distribution shift, aggregation (FedLD's eq. 2).

Zeng, Guo, Wang, Wang, Zhou and Qu (MICCAI 2024), eq. 1 and 2; a read-only probe, no training method. The paper calls
the absolute values of the last two parts "losses"; the identity holds for the signed ones, so both are returned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def loss_decomposition(
    *, loss_matrix: ArrayLike, global_losses: ArrayLike, weights: ArrayLike
) -> dict[str, float]:
    """Of local models' losses [m, m] (row: model, column: whose data) and the shared model's [m].

    weights [m] need not sum to 1. local_loss + distribution_shift + aggregation = global_loss, but for rounding.
    """
    table = np.asarray(loss_matrix, dtype=np.float64)
    share = np.asarray(weights, dtype=np.float64)
    share = share / share.sum()
    after = float(share @ np.asarray(global_losses, dtype=np.float64))
    local = float(share @ table.diagonal())
    everywhere = float(share @ table @ share)
    shift, aggregation = everywhere - local, after - everywhere
    return {
        "global_loss": after,
        "local_loss": local,
        "distribution_shift": shift,
        "aggregation": aggregation,
        "distribution_shift_loss": abs(shift),
        "aggregation_loss": abs(aggregation),
    }
