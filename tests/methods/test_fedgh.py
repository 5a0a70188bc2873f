"""Test edge cases of FedGH's projections and of FedLD's hierarchical variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_server
from torch import Tensor, nn

from raysim.api.declarations import Task
from raysim.api.messages import Update
from raysim.api.method import Method
from raysim.methods import fedgh
from raysim.methods.fedgh import FedGH, HierarchicalFedGH
from raysim.simulation.server import Server
from raysim.vectors.layout import plan_layout

TESTS = ("original", "current")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    assert got.shape == want.shape and torch.allclose(got, want, rtol=tolerance, atol=tolerance), (
        f"{got} is not {want}"
    )


GRADIENTS = random(6, 4)  # many conflicts: six directions in four dimensions
AGREEING = random(5, 8).abs()


def harmonized(gradients: Tensor = GRADIENTS, **others: Any) -> Tensor:
    return fedgh.harmonized_gradients(gradients=gradients, **others)


# --- projections ------------------------------------------------------------------------------


def test_fedgh_result_is_zero_for_two_opposite_updates() -> None:
    for length in (7, 50_000):
        row = random(length).float()
        got = harmonized(torch.stack([row, -3 * row]))
        assert got.abs().max() < 1e-5
        mean = fedgh.harmonized_aggregate(
            gradients=torch.stack([row, -3 * row]), weights=torch.tensor([1.0, 4.0])
        )
        assert mean.abs().max() < 1e-5


def test_fedgh_finds_no_conflict_with_an_update_of_zeros() -> None:
    rows = torch.cat([GRADIENTS, torch.zeros(1, 4)])
    close(harmonized(rows)[:-1], harmonized())
    assert not harmonized(rows)[-1].any()


def test_fedgh_refuses_an_unknown_value_of_setting_conflict_test() -> None:
    with pytest.raises(ValueError, match="conflict_test='running'"):
        harmonized(conflict_test="running")


# --- the hierarchy ----------------------------------------------------------------------------


def tree(gradients: Tensor, reference: Tensor, eps: float = 1e-7) -> Tensor:
    return fedgh.hierarchical_harmonized_gradient(gradients=gradients, reference=reference, eps=eps)


def test_method_fedgh_hierarchical_does_not_sort_the_last_two_sums_of_updates() -> None:
    """The last two sums keep their order.

    The updates and the earlier sums are sorted by their inner product with `reference`.
    """
    rows, reference = random(7, 3, seed=29), random(3, seed=129)

    def off(a: Tensor, b: Tensor) -> Tensor:
        return a - (a @ b) / (b @ b + 1e-7) * b

    def meet(a: Tensor, b: Tensor) -> Tensor:
        return off(a, b) + off(b, a) if a @ b < 0 else a + b

    def by_score(items: list[Tensor]) -> list[Tensor]:
        return sorted(items, key=lambda item: -float(item @ reference))

    def root(first: Tensor, second: Tensor) -> Tensor:
        overlap = first @ second
        changed = first - overlap / (second @ second + 1e-7) * second
        return (changed + second - overlap / (changed @ changed + 1e-7) * changed) / 7

    a, b, c, d, e, f, g = by_score(list(rows))
    p, q, r, s = by_score([meet(a, g), meet(b, f), meet(c, e), d])
    first, second = meet(p, s), meet(q, r)
    assert first @ second < 0 and second @ reference > first @ reference
    close(tree(rows, reference), root(first, second))
    assert (tree(rows, reference) - root(second, first)).norm() > 0.01


def test_method_fedgh_hierarchical_uses_the_same_scalar_product_in_both_final_projections() -> None:
    first = torch.tensor([2.0, 0.0], dtype=torch.float64)
    second = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    # s = -2, |second|^2 = 2: first becomes [2, 0] + [-1, 1] = [1, 1], of squared length 2;
    # second becomes [-1, 1] + [1, 1] = [0, 2]. Computing s again (0) would leave it at [-1, 1].
    got = tree(torch.stack([first, second]), random(2), eps=1e-12)
    close(got, torch.tensor([0.5, 1.5], dtype=torch.float64))


# --- on the server ----------------------------------------------------------------------------
LAYOUT = plan_layout({"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))})
COUNTS = np.array([7, 1, 13, 4, 9, 22, 3, 5])
DELTAS = np.random.default_rng(0).standard_normal((8, LAYOUT.shared)).astype(np.float32)


def server(*methods: Method, weighting: Any = "samples", seed: int = 0) -> Server:
    start, counter = torch.zeros(LAYOUT.shared), torch.zeros(1, dtype=torch.int64)
    return make_server(
        LAYOUT, start, counter, methods, COUNTS, seed, Task((1, 2, 2), 3, 8), weighting
    )


def step(target: Server, clients: Sequence[int], deltas: np.ndarray = DELTAS) -> Server:
    version = target.version
    updates = [
        Update(c, c, version, 9, 9, 1, 0.5, 0.0, np.array([c]), delta=deltas[c]) for c in clients
    ]
    target.step(updates, {}, [0] * len(updates), {})
    return target


def rows(
    clients: Sequence[int], part: slice = slice(0, LAYOUT.trained), deltas: np.ndarray = DELTAS
) -> Tensor:
    return torch.from_numpy(deltas[list(clients)][:, part]).double()


ARRIVED = [5, 2, 7, 0, 3]


@pytest.mark.parametrize("conflict_test", TESTS)
def test_fedgh_pairs_do_not_depend_on_order_of_arrival(conflict_test: Any) -> None:
    arrived, ordered = (
        step(server(FedGH(conflict_test=conflict_test)), clients).params.double()
        for clients in (ARRIVED, sorted(ARRIVED))
    )
    close(arrived, ordered, 1e-5)


def test_fedgh_random_order_depends_on_the_seed_but_not_on_the_arrivals() -> None:
    params = [step(server(FedGH("random"), seed=seed), ARRIVED).params for seed in (0, 0, 1)]
    assert torch.equal(params[0], params[1]) and not torch.equal(params[0], params[2])
    assert not torch.equal(params[0], step(server(FedGH()), ARRIVED).params)
    turned = step(server(FedGH("random")), ARRIVED[::-1]).params
    close(turned.double(), params[0].double(), 1e-5)


@pytest.mark.parametrize("granularity", ["model", "tensor"])
def test_fedgh_without_conflicts_equals_fedavg_exactly(granularity: Any) -> None:
    agreeing = np.abs(DELTAS)
    params = step(server(FedGH(granularity=granularity)), list(range(8)), agreeing)
    assert torch.equal(params.params, step(server(), list(range(8)), agreeing).params)


def test_method_fedgh_hierarchical_equals_the_weighted_mean_if_no_updates_conflict() -> None:
    agreeing = np.abs(DELTAS)
    target = step(server(HierarchicalFedGH()), ARRIVED, agreeing)
    before = target.params.clone()
    step(target, ARRIVED, agreeing)
    weights = torch.from_numpy(COUNTS[ARRIVED]).double()
    close(
        (target.params - before).double(),
        weights @ rows(ARRIVED, deltas=agreeing) / weights.sum(),
        1e-5,
    )


# --- in a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FedGH("sorted"), "method.fedgh.order='sorted'"),  # type: ignore[arg-type]
        (lambda: FedGH(conflict_test="none"), "method.fedgh.conflict_test='none'"),  # type: ignore[arg-type]
        (lambda: FedGH(granularity="layer"), "method.fedgh.granularity='layer'"),  # type: ignore[arg-type]
        (lambda: HierarchicalFedGH(0.0), "method.fedgh_hierarchical.eps=0.0"),
    ],
)
def test_fedgh_settings_out_of_range_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        make()
    assert says in str(refused.value)


# --- updates at right angles ------------------------------------------------------------------
def test_fedgh_never_projects_two_updates_that_arrived_orthogonal_to_each_other() -> None:
    gradients = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    assert harmonized(gradients)[0].tolist() == [0.5, 0.5], (
        "the third is at right angles to the first as it came"
    )
    assert harmonized(gradients, conflict_test="current")[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("method", [FedGH, HierarchicalFedGH])
def test_fedgh_counts_no_conflicts_of_orthogonal_updates(method: type[Method]) -> None:
    deltas = np.zeros_like(DELTAS)
    deltas[0, 0] = deltas[1, 1] = 1.0
    target = server(method(), weighting="uniform")
    for _ in range(2):
        step(target, [0, 1], deltas)
    assert (
        target.report[f"{method.name}.conflicts"]
        == target.report[f"{method.name}.projections"]
        == 0.0
    )
