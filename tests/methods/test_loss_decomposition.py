"""The loss decomposition's identity, and what makes a part of it vanish."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.methods.loss_decomposition import loss_decomposition

RNG = np.random.default_rng(0)
MATRIX, AFTER, WEIGHTS = RNG.random((5, 5)) * 3, RNG.random(5) * 3, np.array([3.0, 1, 7, 2, 2])


def parts(
    matrix: np.ndarray = MATRIX, after: np.ndarray = AFTER, weights: np.ndarray = WEIGHTS
) -> dict[str, float]:
    return loss_decomposition(loss_matrix=matrix, global_losses=after, weights=weights)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clients", [1, 2, 6])
def test_the_signed_parts_add_up_to_the_global_loss(clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = parts(
        rng.normal(size=(clients, clients)), rng.normal(size=clients), rng.random(clients) + 0.1
    )
    total = found["local_loss"] + found["distribution_shift"] + found["aggregation"]
    assert total == pytest.approx(found["global_loss"], abs=1e-14)
    assert found["distribution_shift_loss"] == abs(found["distribution_shift"])
    assert found["aggregation_loss"] == abs(found["aggregation"])


def test_each_part_is_the_papers_sum() -> None:
    share = WEIGHTS / WEIGHTS.sum()
    shift = sum(
        share[i] * share[j] * (MATRIX[i, j] - MATRIX[i, i]) for i in range(5) for j in range(5)
    )  # a row is a model, a column whose data
    aggregation = sum(share[i] * (share @ AFTER - share @ MATRIX[i]) for i in range(5))
    found = parts()
    assert found["local_loss"] == pytest.approx(sum(share[i] * MATRIX[i, i] for i in range(5)))
    assert found["distribution_shift"] == pytest.approx(shift)
    assert found["aggregation"] == pytest.approx(aggregation)


@pytest.mark.parametrize("weights", [WEIGHTS, np.ones(5), np.array([1.0, 0, 0, 0, 9])])
def test_identical_models_leave_nothing_but_the_local_loss(weights: np.ndarray) -> None:
    found = parts(np.tile(AFTER, (5, 1)), AFTER, weights)
    assert found["distribution_shift"] == pytest.approx(0, abs=1e-14)
    assert found["aggregation"] == pytest.approx(0, abs=1e-14)
    assert found["local_loss"] == pytest.approx(found["global_loss"])


def test_one_client_has_no_shift_and_all_change_is_aggregation() -> None:
    found = parts(np.array([[0.25]]), np.array([1.5]), np.array([3.0]))
    assert (found["distribution_shift"], found["aggregation"]) == (0.0, 1.25)


def test_permuted_clients_and_scaled_weights_change_nothing() -> None:
    order = np.array([4, 2, 0, 1, 3])
    assert parts(MATRIX[np.ix_(order, order)], AFTER[order], WEIGHTS[order]) == pytest.approx(
        parts()
    )
    assert parts(weights=0.01 * WEIGHTS) == pytest.approx(parts())
