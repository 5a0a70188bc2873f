"""FedLD's penalties and its principal gradients by their definition, and its parts in a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    BUFFER,
    LOCAL,
    NORMED_MLP,
    ROUNDS,
    check_composition,
    make_server,
    run,
    run_spec,
    same,
)
from torch import Tensor, nn

from raysim.api.declarations import Task
from raysim.api.messages import Update
from raysim.api.method import Method
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.experiment.instantiate import TARGET, build_object, defaults, resolve
from raysim.methods import fedld
from raysim.methods.fedbn import FedBN
from raysim.methods.fedexp import FedExP
from raysim.methods.fedld import DampedMargin, MarginControl, PrincipalGradient
from raysim.methods.fedopt import FedAdam
from raysim.methods.fedprox import FedProx
from raysim.methods.mixup import Mixup
from raysim.methods.scaffold import Scaffold
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.simulation.server import Server
from raysim.vectors.layout import plan_layout

KINDS = ("marg_log", "batch_softmax", "logit_l2", "threshold")
NORMALIZATIONS = ("l2", "sum", "none")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, tolerance: float = 1e-9) -> None:
    assert got.shape == want.shape and torch.allclose(got, want, rtol=tolerance, atol=tolerance), (
        f"{got} is not {want}"
    )


# --- the penalties --------------------------------------------------------------------------------------------------
LOGITS, LABELS = 2 * random(6, 4), torch.tensor([0, 3, 1, 1, 2, 0])


def penalty(kind: str, logits: Tensor = LOGITS, lam: float = 1.0, threshold: float = 0.0) -> Tensor:
    return fedld.margin_control_penalty(
        logits=logits, lam=lam, kind=kind, labels=LABELS, threshold=threshold
    )


@pytest.mark.parametrize("kind", KINDS)
def test_without_weight_there_is_no_penalty(kind: str) -> None:
    assert penalty(kind, lam=0.0) == 0.0
    close(penalty(kind, lam=0.3), 0.3 * penalty(kind))


def test_logits_of_zero_cost_nothing_but_under_the_softmax() -> None:
    costs = {kind: penalty(kind, torch.zeros(6, 4)).item() for kind in KINDS}
    assert costs.pop("batch_softmax") == pytest.approx(math.log(1 + 6 * 4 / 16))
    assert set(costs.values()) == {0.0}


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_squares_cost_at_least_their_logarithm(scale: float) -> None:
    assert penalty("logit_l2", scale * LOGITS) >= penalty("marg_log", scale * LOGITS) > 0


def test_only_margins_above_the_threshold_cost() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0], [0.0, 1.5, 1.0], [2.0, 0.0, 9.0]], requires_grad=True)
    labels = torch.tensor([0, 1, 0])
    assert fedld.margins(logits, labels).tolist() == [2.0, 0.5, -7.0]
    cost = fedld.margin_control_penalty(
        logits=logits, lam=1.0, kind="threshold", labels=labels, threshold=1.0
    )
    assert cost.item() == pytest.approx(1 / 3)
    cost.backward()
    assert logits.grad is not None and logits.grad[0].tolist() == pytest.approx(
        [2 / 3, -2 / 3, 0.0]
    )
    assert not logits.grad[1:].any()


def test_an_unknown_kind_is_refused_with_the_ones_that_exist() -> None:
    with pytest.raises(ValueError, match=r"kind='log' does not exist.*'marg_log'"):
        penalty("log")


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_for_two_classes_the_damped_loss_is_the_log_loss_of_a_damped_margin(
    temperature: float,
) -> None:
    logits, labels = LOGITS[:, :2], LABELS % 2
    rho = fedld.margins(logits, labels)
    want = F.softplus(-rho * (1 - torch.sigmoid(rho / temperature))).mean()
    close(fedld.damped_margin_loss(logits=logits, labels=labels, temperature=temperature), want)


def test_gradients_flow_through_the_damping_factor() -> None:
    def loss(logits: Tensor) -> Tensor:
        return fedld.damped_margin_loss(logits=logits, labels=LABELS, temperature=2.0)

    logits = LOGITS.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(logits), logits)
    step = 1e-6 * random(6, 4, seed=1)
    close((loss(LOGITS + step) - loss(LOGITS - step)) / 2, (grad * step).sum(), 1e-12)


# --- principal gradients --------------------------------------------------------------------------------------------
GRADIENTS, WEIGHTS = (
    random(5, 12) * torch.tensor([3.0, 1.0, 0.5, 2.0, 1.5])[:, None],
    torch.tensor([5.0, 1, 3, 2, 4]),
)


def revised(gradients: Tensor = GRADIENTS, components: int = 4, **others: Any) -> Tensor:
    return fedld.revise_gradients(gradients=gradients, num_components=components, **others)


def aggregate(
    gradients: Tensor = GRADIENTS, components: int = 4, weights: Tensor = WEIGHTS, **others: Any
) -> Tensor:
    return fedld.principal_gradient_aggregate(
        gradients=gradients, weights=weights, num_components=components, **others
    )


def by_hand(gradients: Tensor, components: int, normalization: str) -> Tensor:
    """Eq. 4 to 7 one after the other, on the directions themselves."""
    _, singular, directions = torch.linalg.svd(gradients, full_matrices=False)
    values = singular.square() / len(gradients)
    kept = values[:components]
    shares = {"l2": kept / kept.norm(), "sum": kept / values.sum(), "none": torch.ones_like(kept)}[
        normalization
    ]
    total = torch.zeros_like(gradients)
    for direction, share in zip(directions, shares, strict=False):
        oriented = direction * torch.sign(direction @ gradients.mean(0))
        projected = (gradients @ oriented)[:, None] * oriented
        total += (
            share
            * projected
            / projected.norm(dim=1, keepdim=True)
            * gradients.norm(dim=1, keepdim=True)
        )
    return total


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("components", [1, 3, 5])
def test_revised_updates_are_those_of_the_papers_equations(
    components: int, normalization: str
) -> None:
    close(
        revised(components=components, normalization=normalization),
        by_hand(GRADIENTS, components, normalization),
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_the_aggregate_is_the_weighted_mean_of_the_revised_updates(normalization: str) -> None:
    want = WEIGHTS.double() @ revised(normalization=normalization) / WEIGHTS.sum()
    close(aggregate(normalization=normalization), want)
    close(aggregate(normalization=normalization, weights=7 * WEIGHTS), want)


@pytest.mark.parametrize("components", [1, 4, 5])
def test_updates_keep_their_length_and_never_turn_against_themselves(components: int) -> None:
    got = revised(components=components)
    close(got.norm(dim=1), GRADIENTS.norm(dim=1))
    assert ((got * GRADIENTS).sum(dim=1) >= 0).all()


def test_other_normalisations_stretch_by_the_root_of_the_components_and_shrink_by_their_share() -> (
    None
):
    values = torch.linalg.svdvals(GRADIENTS).square()
    close(revised(normalization="none").norm(dim=1), 2 * GRADIENTS.norm(dim=1))
    shrunk = values[:4].norm() / values.sum()
    close(revised(normalization="sum").norm(dim=1), shrunk * GRADIENTS.norm(dim=1))


@pytest.mark.parametrize("components", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_identical_updates_pass_through_unchanged(components: int, dtype: torch.dtype) -> None:
    row = random(30).to(dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    close(aggregate(row.expand(4, 30), components, torch.tensor([1.0, 5, 2, 2])), row, tolerance)
    close(revised(row.expand(4, 30), components), row.expand(4, 30), tolerance)


def test_a_single_update_is_returned_bit_for_bit() -> None:
    for scale in (1e-6, 1.0, 3e5):
        row = scale * random(1, 50).float()
        assert torch.equal(revised(row, 1), row)
        assert torch.equal(aggregate(row, 1, torch.ones(1)), row[0])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_updates_of_zero_give_zero(normalization: str) -> None:
    zeros = torch.zeros(4, 6)
    assert torch.equal(revised(zeros, 3, normalization=normalization), zeros)
    assert torch.equal(aggregate(zeros, 3, torch.ones(4), normalization=normalization), zeros[0])
    one = torch.cat([GRADIENTS, torch.zeros(1, 12)])
    assert not revised(one, normalization=normalization)[-1].any(), (
        "nor does a single one become noise"
    )


def test_an_update_across_all_kept_directions_vanishes_instead_of_becoming_noise() -> None:
    rows = torch.tensor([[3.0, 0, 0], [2.0, 0, 0], [0, 1.0, 0]]).double()
    assert torch.equal(
        revised(rows, 1), torch.tensor([[3.0, 0, 0], [2.0, 0, 0], [0, 0, 0]]).double()
    )


def test_the_rule_is_odd_and_a_common_factor_passes_through() -> None:
    close(aggregate(-GRADIENTS), -aggregate())
    close(aggregate(1e-4 * GRADIENTS), 1e-4 * aggregate(), 1e-12)
    close(aggregate(1e6 * GRADIENTS) / 1e6, aggregate())


def test_permuted_clients_and_rotated_coordinates_change_nothing_else() -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    close(revised(GRADIENTS[order]), revised()[order])
    close(aggregate(GRADIENTS[order], weights=WEIGHTS[order]), aggregate())
    rotation = torch.linalg.qr(random(12, 12, seed=3)).Q
    close(aggregate(GRADIENTS @ rotation), aggregate() @ rotation)


def test_the_result_lies_in_the_span_of_the_updates() -> None:
    basis = torch.linalg.qr(GRADIENTS.T).Q
    close(basis @ (basis.T @ aggregate()), aggregate())


def test_keeping_every_component_is_not_fedavg_though_the_projections_add_up() -> None:
    _, _, directions = torch.linalg.svd(GRADIENTS, full_matrices=False)
    close((GRADIENTS @ directions.T) @ directions, GRADIENTS)
    assert (aggregate(components=5, weights=torch.ones(5)) - GRADIENTS.mean(0)).norm() > 0.1


def test_a_client_of_weight_zero_turns_directions_but_adds_no_update() -> None:
    weights = torch.tensor([5.0, 0, 3, 2, 4])
    close(aggregate(weights=weights), weights.double() @ revised() / 14)


# --- on the server --------------------------------------------------------------------------------------------------
LAYOUT = plan_layout({"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))})
COUNTS = np.array([7, 1, 13, 4, 9, 22, 3, 5])
DELTAS = np.random.default_rng(0).standard_normal((8, LAYOUT.shared)).astype(np.float32)


def step(clients: list[int], *methods: Method, weighting: Any = "samples") -> Server:
    start, counter = torch.zeros(LAYOUT.shared), torch.zeros(1, dtype=torch.int64)
    server = make_server(
        LAYOUT, start, counter, methods, COUNTS, 0, Task((1, 2, 2), 3, 8), weighting
    )
    updates = [Update(c, c, 0, 9, 9, 1, 0.5, 0.0, np.array([c]), delta=DELTAS[c]) for c in clients]
    server.step(updates, {}, [0] * len(updates), {})
    return server


def rows(clients: list[int], part: slice = slice(0, LAYOUT.trained)) -> Tensor:
    return torch.from_numpy(DELTAS[clients][:, part]).double()


@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4, 5, 6, 7], [5, 2], [1, 6, 3]])
def test_the_server_steps_along_the_aggregate_of_the_updates_that_arrived(
    clients: list[int],
) -> None:
    components = fedld.num_principal_components(num_clients=len(clients), fraction=0.8)
    want = aggregate(rows(clients), components, torch.from_numpy(COUNTS[clients]))
    close(step(clients, PrincipalGradient()).params.double(), want, 1e-5)


def test_each_tensor_may_be_treated_for_itself() -> None:
    clients = [0, 2, 4, 5, 7]
    got = step(
        clients, PrincipalGradient(granularity="tensor"), weighting="uniform"
    ).params.double()
    parts = [slice(e.start, e.stop) for e in LAYOUT.entries if e.stop <= LAYOUT.trained]
    close(
        got, torch.cat([aggregate(rows(clients, part), 4, torch.ones(5)) for part in parts]), 1e-5
    )


def test_the_order_of_arrival_changes_nothing_but_rounding() -> None:
    found = [
        step(clients, PrincipalGradient()).params for clients in ([0, 2, 4, 5, 7], [7, 4, 0, 5, 2])
    ]
    close(*found, 1e-5)


def test_a_single_participant_gives_the_bits_of_fedavg() -> None:
    assert torch.equal(step([4], PrincipalGradient()).vector, step([4]).vector)


def test_tensors_of_one_number_are_averaged() -> None:
    values = torch.tensor([[1.0], [-2.0], [4.0]]).double()
    close(aggregate(values, 2, torch.tensor([1.0, 1, 2])), torch.tensor([7 / 4]).double())


# --- in a run -------------------------------------------------------------------------------------------------------


def test_the_two_parts_compose_with_each_other_and_with_the_rest_of_the_server() -> None:
    methods = [MarginControl(), PrincipalGradient(), FedBN(), FedProx(0.1), Scaffold(), FedAdam()]
    for each in (methods, [MarginControl(), PrincipalGradient(), FedExP()]):
        check_composition(each)
        found = run(run_spec(*each, model=NORMED_MLP), rounds=2)
        assert not found.failures and math.isfinite(found.rows[-1]["train_loss"] or math.nan)


def test_each_part_alone_and_both_are_four_different_runs() -> None:
    lists: list[list[Method]] = [
        [],
        [MarginControl(0.3)],
        [PrincipalGradient()],
        [MarginControl(0.3), PrincipalGradient()],
    ]
    assert len({run(run_spec(*methods)).finished.model_sha256 for methods in lists}) == 4


@pytest.mark.parametrize("methods", [[MarginControl(1.0, "threshold")], [DampedMargin()]])
def test_labels_that_mixup_made_soft_have_a_margin_too(methods: list[Method]) -> None:
    found = run(run_spec(Mixup(), *methods), rounds=2)
    assert not found.failures
    assert found.finished.model_sha256 != run(run_spec(Mixup()), rounds=2).finished.model_sha256


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_margin_control_makes_logits_smaller(kind: Any) -> None:
    free, held = (
        run(run_spec(MarginControl(lam, kind), local=LOCAL), rounds=6) for lam in (0.0, 0.5)
    )

    def size(found: Any) -> float:
        return float(np.linalg.norm(found.tensors["model.head.weight"]))

    assert size(held) < size(free)


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_with_one_client_at_a_time_the_server_does_what_fedavg_does(schedule: Any) -> None:
    alone = Synchronous(1)
    found, fedavg = (
        run(run_spec(*methods), alone, fleet=Ideal()) for methods in ([PrincipalGradient()], [])
    )
    assert same(found.tensors, fedavg.tensors)
    assert not same(
        run(run_spec(PrincipalGradient()), schedule).tensors, run(run_spec(), schedule).tensors
    )


# --- configuration --------------------------------------------------------------------------------------------------


def test_one_name_gives_both_parts_and_each_has_a_name_of_its_own() -> None:
    for option, parts in (
        ("fedld", ["fedld_margin", "fedld_principal"]),
        ("fedld_margin", ["fedld_margin"]),
        ("fedld_principal", ["fedld_principal"]),
        ("fedld_damped", ["fedld_damped"]),
    ):
        nodes = to_dict(compose([f"method=[{option}]"]))["method"]
        assert list(nodes) == parts
        for name, node in nodes.items():
            cls = resolve(node[TARGET], name)
            assert build_object(cls, node, f"method.{name}").name == name  # type: ignore[attr-defined]
            assert {key: node[key] for key in node if key != TARGET} == defaults(cls)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MarginControl(-1.0), "method.fedld_margin.lam=-1.0 must be at least 0"),
        (lambda: MarginControl(kind="log"), "method.fedld_margin.kind='log' does not exist"),  # type: ignore[arg-type]
        (
            lambda: MarginControl(threshold=1.0),
            "threshold=1.0 has no part in kind=marg_log: set kind=threshold",
        ),
        (lambda: DampedMargin(0.0), "method.fedld_damped.temperature=0.0 must be above 0"),
        (
            lambda: PrincipalGradient(0.0),
            "method.fedld_principal.fraction=0.0 must be above 0 and at most 1",
        ),
        (lambda: PrincipalGradient(tol=-1.0), "method.fedld_principal.tol=-1.0 must be at least 0"),
        (lambda: PrincipalGradient(granularity="layer"), "granularity='layer' does not exist"),  # type: ignore[arg-type]
    ],
)
def test_settings_without_a_meaning_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        make()
    assert says in str(refused.value)


@pytest.mark.parametrize("function", [revised, aggregate])
def test_an_unknown_normalization_is_refused_with_the_ones_that_exist(
    function: Callable[..., Tensor],
) -> None:
    with pytest.raises(
        ValueError, match="normalization='l1' does not exist: use one of 'l2', 'sum', 'none'"
    ):
        function(normalization="l1")
