"""Loss decomposition: measure three parts of the loss after an aggregation.

Source: Zeng et al., "Tackling Data Heterogeneity in Federated Learning via Loss Decomposition"
(MICCAI 2024), eqs. (1) and (2).

Departures from the paper
- "distribution_shift" and "aggregation" may be negative, so that the parts add up to the loss.
  "distribution_shift_loss" and "aggregation_loss" are the paper's absolute values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def loss_decomposition(
    *, loss_matrix: ArrayLike, global_losses: ArrayLike, weights: ArrayLike
) -> dict[str, float]:
    """Return the shared model's loss, and three parts that add up to this loss.

    L is `loss_matrix`, g is `global_losses`, and p is `weights` divided by their sum. The result
    has these entries:

        global_loss        = sum_j p_j g_j
        local_loss         = sum_i p_i L_ii
        distribution_shift = sum_ij p_i p_j L_ij - local_loss
        aggregation        = global_loss - sum_ij p_i p_j L_ij

    Two more entries, "distribution_shift_loss" and "aggregation_loss", are the absolute values of
    distribution_shift and aggregation.

    loss_matrix: [m, m]; L_ij is the loss of client i's local model on client j's data.
    global_losses: [m], the shared model's losses on the clients' data.
    weights: [m], with any sum.
    """
    losses = np.asarray(loss_matrix, dtype=np.float64)
    p = np.asarray(weights, dtype=np.float64)
    p = p / p.sum()
    global_loss = float(p @ np.asarray(global_losses, dtype=np.float64))
    local = float(p @ losses.diagonal())
    on_all_data = float(p @ losses @ p)
    shift = on_all_data - local
    aggregation = global_loss - on_all_data
    return {
        "global_loss": global_loss,
        "local_loss": local,
        "distribution_shift": shift,
        "aggregation": aggregation,
        "distribution_shift_loss": abs(shift),
        "aggregation_loss": abs(aggregation),
    }
