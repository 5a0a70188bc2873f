"""FedGH's projections and those of FedLD's hierarchy, line by line, and what both do to a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import BUFFER, NORMED_MLP, ROUNDS, check_composition, make_server, run, run_spec
from torch import Tensor, nn

from raysim.api.declarations import Task
from raysim.api.messages import Update
from raysim.api.method import Method
from raysim.methods import fedgh
from raysim.methods.fedbn import FedBN
from raysim.methods.fedexp import FedExP
from raysim.methods.fedgh import FedGH, HierarchicalFedGH
from raysim.methods.fedopt import FedAdam
from raysim.methods.fedprox import FedProx
from raysim.methods.scaffold import Scaffold
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
WEIGHTS = torch.tensor([5.0, 1, 3, 2, 4, 2])


def harmonized(gradients: Tensor = GRADIENTS, **others: Any) -> Tensor:
    return fedgh.harmonized_gradients(gradients=gradients, **others)


def by_hand(gradients: Tensor, order: Sequence[Sequence[int]], conflict_test: str) -> list[Tensor]:
    """The formula on the vectors themselves: all states, from the first to the last."""
    running = gradients.clone()
    states = [running.clone()]
    for i, j in order:
        opposed = gradients[i] @ gradients[j] < 0
        new = running.clone()
        for own, other in ((i, j), (j, i)):
            inner = running[own] @ gradients[other]
            if opposed if conflict_test == "original" else inner < 0:
                new[own] = (
                    running[own] - inner / (gradients[other] @ gradients[other]) * gradients[other]
                )
        running = new
        states.append(running.clone())
    return states


PAIRS = [[i, j] for i in range(6) for j in range(i + 1, 6)]


# --- projections ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conflict_test", TESTS)
@pytest.mark.parametrize(
    "order", [PAIRS, PAIRS[::-1], PAIRS[7:] + PAIRS[:7]], ids=["forward", "backward", "turned"]
)
def test_coefficients_give_what_the_vectors_give(
    order: list[list[int]], conflict_test: str
) -> None:
    want = by_hand(GRADIENTS, order, conflict_test)[-1]
    close(harmonized(order=order, conflict_test=conflict_test), want)
    got = fedgh.harmonized_aggregate(
        gradients=GRADIENTS, weights=WEIGHTS, order=order, conflict_test=conflict_test
    )
    close(got, WEIGHTS.double() @ want / WEIGHTS.sum())


def test_pairs_come_in_lexicographic_order_unless_told() -> None:
    assert torch.equal(harmonized(), harmonized(order=PAIRS))
    assert not torch.allclose(harmonized(), harmonized(order=PAIRS[::-1]))


@pytest.mark.parametrize("conflict_test", TESTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_conflict_updates_and_their_mean_keep_their_bits(
    dtype: torch.dtype, conflict_test: str
) -> None:
    rows, weights = AGREEING.to(dtype), torch.tensor([5.0, 1, 3, 2, 4])
    assert torch.equal(harmonized(rows, conflict_test=conflict_test), rows)
    total = torch.zeros_like(rows[0])
    for row, weight in zip(rows, weights.tolist(), strict=True):
        total.add_(row, alpha=weight)
    got = fedgh.harmonized_aggregate(gradients=rows, weights=weights, conflict_test=conflict_test)
    assert torch.equal(got, total / 15)


def test_only_rows_with_a_conflict_change() -> None:
    rows = torch.tensor(
        [[1.0, 0, 0], [-1.0, 2, 0], [0, 0.1, 7]]
    ).double()  # the first two oppose each other
    got = harmonized(rows)
    assert torch.equal(got[2], rows[2]) and not torch.equal(got[:2], rows[:2])


@pytest.mark.parametrize("rows", [random(1, 5), random(5).expand(4, 5), torch.zeros(3, 5).double()])
def test_one_update_equal_ones_and_zeros_are_unchanged(rows: Tensor) -> None:
    for conflict_test in TESTS:
        assert torch.equal(harmonized(rows, conflict_test=conflict_test), rows)


def test_two_clients_in_conflict_end_orthogonal_to_what_the_other_was() -> None:
    rows = torch.stack([random(9), -random(9) + 0.8 * random(9, seed=1)])
    assert rows[0] @ rows[1] < 0
    for conflict_test in TESTS:
        got = harmonized(rows, conflict_test=conflict_test)
        assert abs(got[0] @ rows[1]) < 1e-12 and abs(got[1] @ rows[0]) < 1e-12
        assert (got.norm(dim=1) <= rows.norm(dim=1)).all()


def test_exactly_opposite_clients_cancel() -> None:
    for length in (7, 50_000):
        row = random(length).float()
        got = harmonized(torch.stack([row, -3 * row]))
        assert got.abs().max() < 1e-5
        mean = fedgh.harmonized_aggregate(
            gradients=torch.stack([row, -3 * row]), weights=torch.tensor([1.0, 4.0])
        )
        assert mean.abs().max() < 1e-5


def test_a_zero_update_conflicts_with_nobody() -> None:
    rows = torch.cat([GRADIENTS, torch.zeros(1, 4)])
    close(harmonized(rows)[:-1], harmonized())
    assert not harmonized(rows)[-1].any()


def test_asking_the_running_updates_norms_never_grow_and_used_directions_are_no_longer_opposed() -> (
    None
):
    states = by_hand(GRADIENTS, PAIRS, "current")
    for number, (i, j) in enumerate(PAIRS, 1):
        now = harmonized(order=PAIRS[:number], conflict_test="current")
        close(now, states[number])
        assert (now.norm(dim=1) <= states[number - 1].norm(dim=1) + 1e-12).all()
        assert now[i] @ GRADIENTS[j] >= -1e-12 and now[j] @ GRADIENTS[i] >= -1e-12


@pytest.mark.parametrize("conflict_test", TESTS)
def test_the_rule_is_odd_and_a_common_factor_passes_through(conflict_test: str) -> None:
    close(
        harmonized(-GRADIENTS, conflict_test=conflict_test),
        -harmonized(conflict_test=conflict_test),
    )
    close(
        harmonized(1e-3 * GRADIENTS, conflict_test=conflict_test),
        1e-3 * harmonized(conflict_test=conflict_test),
    )


def test_order_has_no_part_in_it_as_long_as_nobody_is_in_two_conflicts() -> None:
    rows = torch.zeros(4, 4).double()
    rows[:2, :2], rows[2:, 2:] = (
        torch.tensor([[1.0, 0], [-1, 2]]),
        torch.tensor([[1.0, 1], [0, -1]]),
    )
    pairs = [[i, j] for i in range(4) for j in range(i + 1, 4)]
    assert torch.equal(harmonized(rows), harmonized(rows, order=pairs[::-1]))


def test_an_unknown_conflict_test_is_refused_with_the_ones_that_exist() -> None:
    with pytest.raises(
        ValueError, match=r"conflict_test='running' does not exist.*'original'.*'current'"
    ):
        harmonized(conflict_test="running")


# --- the hierarchy --------------------------------------------------------------------------------------------------


def tree(gradients: Tensor, reference: Tensor, eps: float = 1e-7) -> Tensor:
    return fedgh.hierarchical_harmonized_gradient(gradients=gradients, reference=reference, eps=eps)


def tree_by_hand(gradients: Tensor, reference: Tensor, eps: float) -> Tensor:
    """The rule on the vectors themselves."""

    def off(a: Tensor, b: Tensor) -> Tensor:
        return a - (a @ b) / (b @ b + eps) * b

    items = list(gradients)
    while len(items) > 2:
        items.sort(key=lambda item: float(item @ reference), reverse=True)
        merged = []
        while len(items) > 1:
            a, b = items.pop(0), items.pop()
            merged.append(off(a, b) + off(b, a) if a @ b < 0 else a + b)
        items = merged + items
    if len(items) == 2 and items[0] @ items[1] < 0:
        overlap = items[0] @ items[1]
        first = items[0] - overlap / (items[1] @ items[1] + eps) * items[1]
        items = [first, items[1] - overlap / (first @ first + eps) * first]
    return torch.stack(items).sum(0) / len(gradients)


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 5, 6, 7, 11])
@pytest.mark.parametrize("eps", [1e-7, 0.5])
def test_the_hierarchy_is_the_one_on_the_vectors_themselves(clients: int, eps: float) -> None:
    for seed in range(5):
        rows, reference = random(clients, 3, seed=seed), random(3, seed=seed + 100)
        close(tree(rows, reference, eps), tree_by_hand(rows, reference, eps))


def test_the_last_two_of_seven_updates_are_taken_in_the_order_in_which_they_were_made() -> None:
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


def test_hierarchy_projects_the_last_pair_by_its_first_inner_product() -> None:
    first = torch.tensor([2.0, 0.0], dtype=torch.float64)
    second = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    # s = -2, |second|^2 = 2: first becomes [2, 0] + [-1, 1] = [1, 1], of squared length 2;
    # second becomes [-1, 1] + [1, 1] = [0, 2]. Computing s again (0) would leave it at [-1, 1].
    got = tree(torch.stack([first, second]), random(2), eps=1e-12)
    close(got, torch.tensor([0.5, 1.5], dtype=torch.float64))


@pytest.mark.parametrize("seed", range(3))
def test_without_a_conflict_the_hierarchy_is_the_mean_for_any_reference(seed: int) -> None:
    close(tree(AGREEING, random(8, seed=seed)), AGREEING.mean(0))


def test_a_conflict_shortens_the_sum_of_the_hierarchy() -> None:
    rows = torch.stack([random(9), -random(9) + 0.8 * random(9, seed=1)])
    assert (tree(rows, random(9, seed=2)) - rows.mean(0)).norm() > 0.05


# --- on the server --------------------------------------------------------------------------------------------------
LAYOUT = plan_layout({"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))})
COUNTS = np.array([7, 1, 13, 4, 9, 22, 3, 5])
DELTAS = np.random.default_rng(0).standard_normal((8, LAYOUT.shared)).astype(np.float32)
PARTS = [slice(entry.start, entry.stop) for entry in LAYOUT.entries if entry.stop <= LAYOUT.trained]


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
def test_pairs_are_ordered_by_client_whatever_the_order_of_arrival(conflict_test: Any) -> None:
    ordered = sorted(ARRIVED)
    weights = torch.from_numpy(COUNTS[ordered])
    want = fedgh.harmonized_aggregate(
        gradients=rows(ordered), weights=weights, conflict_test=conflict_test
    )
    for clients in (ARRIVED, ordered):
        close(step(server(FedGH(conflict_test=conflict_test)), clients).params.double(), want, 1e-5)


def test_a_random_order_is_drawn_from_the_servers_stream() -> None:
    found = [step(server(FedGH("random"), seed=seed), ARRIVED).params for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert not torch.equal(found[0], step(server(FedGH()), ARRIVED).params)
    turned = step(server(FedGH("random")), ARRIVED[::-1]).params
    close(turned.double(), found[0].double(), 1e-5)


def test_each_tensor_may_be_treated_for_itself() -> None:
    clients = sorted(ARRIVED)
    got = step(server(FedGH(granularity="tensor"), weighting="uniform"), clients).params.double()
    each = [
        fedgh.harmonized_aggregate(gradients=rows(clients, part), weights=torch.ones(5))
        for part in PARTS
    ]
    close(got, torch.cat(each), 1e-5)


def test_the_history_counts_conflicts_and_projections() -> None:
    products = rows(ARRIVED) @ rows(ARRIVED).T
    conflicts = int((products.triu(1) < 0).sum())
    assert conflicts > 0
    report = step(server(FedGH()), ARRIVED).report
    assert report == {"fedgh.conflicts": conflicts, "fedgh.projections": 2 * conflicts}
    report = step(server(FedGH(conflict_test="current")), ARRIVED).report
    assert 0 < report["fedgh.conflicts"] <= report["fedgh.projections"] <= 20
    assert set(step(server(FedGH()), ARRIVED, np.abs(DELTAS)).report.values()) == {0.0}


@pytest.mark.parametrize("granularity", ["model", "tensor"])
def test_without_a_conflict_the_server_does_what_fedavg_does_bit_for_bit(granularity: Any) -> None:
    agreeing = np.abs(DELTAS)
    found = step(server(FedGH(granularity=granularity)), list(range(8)), agreeing)
    assert torch.equal(found.params, step(server(), list(range(8)), agreeing).params)


def test_the_hierarchy_starts_from_the_mean_and_then_follows_a_slow_reference() -> None:
    target = server(HierarchicalFedGH(), weighting="uniform")
    first = step(target, ARRIVED).params.clone().double()
    close(first, rows(ARRIVED).mean(0), 1e-5)
    close(target.state["fedgh_hierarchical.reference"].double(), first, 1e-6)
    clients, others = [1, 2, 4, 6, 7], DELTAS[::-1].copy()
    second = step(target, clients, others).params.double() - first
    each = [tree(rows(clients, part, others), first[part]) for part in PARTS]
    close(second, torch.cat(each), 1e-4)
    close(target.state["fedgh_hierarchical.reference"].double(), 0.99 * first + 0.01 * second, 1e-5)
    assert target.report["fedgh_hierarchical.conflicts"] > 0


def test_weights_count_in_the_hierarchy_where_a_run_asks_for_them() -> None:
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


# --- in a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [FedGH, HierarchicalFedGH])
def test_it_composes_with_clients_methods_personal_parameters_and_a_server_optimiser(
    make: Any,
) -> None:
    for methods in ([make(), FedBN(), FedProx(0.1), Scaffold(), FedAdam()], [make(), FedExP()]):
        check_composition(methods)
        found = run(run_spec(*methods, model=NORMED_MLP), rounds=3)
        assert not found.failures
        assert all(f"{make.name}.conflicts" in row for row in found.rows)


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_rounds_without_a_conflict_are_fedavgs_and_others_are_not(schedule: Any) -> None:
    found, fedavg = (
        run(run_spec(*methods), schedule, rounds=5)
        for methods in ([FedGH(granularity="tensor")], [])
    )
    conflicts = [row["fedgh.conflicts"] for row in found.rows]
    assert any(conflicts)
    assert found.finished.model_sha256 != fedavg.finished.model_sha256
    early = next(number for number, count in enumerate(conflicts) if count)
    same = [
        a["train_loss"] == b["train_loss"] for a, b in zip(found.rows, fedavg.rows, strict=True)
    ]
    assert all(same[: early + 1]), "the first conflict shows in the round after it"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: FedGH("sorted"), "method.fedgh.order='sorted' does not exist"),  # type: ignore[arg-type]
        (lambda: FedGH(conflict_test="none"), "method.fedgh.conflict_test='none'"),  # type: ignore[arg-type]
        (lambda: FedGH(granularity="layer"), "method.fedgh.granularity='layer'"),  # type: ignore[arg-type]
        (lambda: HierarchicalFedGH(0.0), "method.fedgh_hierarchical.eps=0.0 must be above 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        make()
    assert says in str(refused.value)


# --- updates at right angles ------------------------------------------------------------------------------------------
def test_updates_at_right_angles_are_in_no_conflict_whatever_became_of_them_meanwhile() -> None:
    gradients = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    assert harmonized(gradients)[0].tolist() == [0.5, 0.5], (
        "the third is at right angles to the first as it came"
    )
    assert harmonized(gradients, conflict_test="current")[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("method", [FedGH, HierarchicalFedGH])
def test_updates_at_right_angles_count_as_no_conflict(method: type[Method]) -> None:
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
