"""Test the Gram matrix and the weighted sum of updates: their bits, and the memory they need."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_server
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raysim.api.declarations import Task
from raysim.api.messages import Update
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedgh import FedGH, HierarchicalFedGH
from raysim.methods.fedld import PrincipalGradient
from raysim.methods.recombination import recombine
from raysim.simulation.server import Server
from raysim.vectors import blocks, gram as module
from raysim.vectors.gram import gram_matrix, linear_combination, stretches
from raysim.vectors.layout import Layout, plan_layout

LAYOUT = plan_layout({"model": nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))})


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def server(*methods: Method, layout: Layout = LAYOUT, clients: int = 12, **settings: Any) -> Server:
    start, counters = (
        torch.zeros(layout.shared),
        torch.zeros(layout.shared_counters, dtype=torch.int64),
    )
    counts = np.arange(1, clients + 1)
    return make_server(
        layout, start, counters, methods, counts, 0, Task((1, 2, 2), 3, clients), **settings
    )


def view(target: Server) -> ServerView:
    return ServerView(target, "test")


def updates(rows: Tensor, version: int = 0) -> list[Update]:
    counters = np.ones(LAYOUT.shared_counters, np.int64)
    return [
        Update(i, i, version, i + 1, i + 1, 1, 0.5, 0.0, counters, delta=row.numpy())
        for i, row in enumerate(rows)
    ]


def given(rows: Tensor, weights: Sequence[float], divisor: float = 0.0) -> Aggregation:
    """Return an aggregation of updates.

    rows: [n, layout.shared], an update in each row.
    weights: [n], the weight of each update.
    divisor: the number by which the weighted sum is divided; 0 divides by the sum of the weights.
    """
    aggregation = Aggregation(updates(rows), list(rows), weights, [0] * len(rows), {})
    return aggregation.with_weights(weights, lambda weights: divisor) if divisor else aggregation


@contextmanager
def use_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `raysim.vectors.blocks` use this number of threads inside a `with` statement."""
    blocks._pool.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "num_threads", lambda: threads)
        yield
    blocks._pool.cache_clear()


def unchanged(products: Tensor) -> Tensor:
    return torch.eye(len(products), dtype=torch.float64)


# --- the matrix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 32, 70])
@pytest.mark.parametrize("length", [1, 100, 8191, 8192, 50_001])
def test_gram_matrix_is_symmetric_and_close_to_float64(length: int, count: int) -> None:
    rows = normal(count, length).pow(3)
    got, exact = gram_matrix(rows.unbind()), rows.double() @ rows.double().T
    assert got.dtype == torch.float64 and torch.equal(got, got.T)
    norms = exact.diagonal().sqrt()
    gap = (got - exact).abs() / (norms[:, None] * norms)
    assert gap.max() < (1e-14 if length < 8192 else 1e-6)


def test_gram_matrix_of_float64_is_exact_at_any_length() -> None:
    rows = normal(4, 50_001).double()
    assert torch.allclose(gram_matrix(rows.unbind()), rows @ rows.T, rtol=1e-13, atol=1e-10)


def test_gram_matrix_of_empty_vectors_is_zero() -> None:
    assert torch.equal(gram_matrix([torch.empty(0)] * 3), torch.zeros(3, 3, dtype=torch.float64))
    assert len(linear_combination([torch.empty(0)] * 3, [1.0] * 3)) == 0


@pytest.mark.parametrize("length", [100_003, 400_000])
def test_gram_matrix_does_not_depend_on_threads(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = normal(21, length).unbind()
    with use_threads(1, monkeypatch):
        alone = gram_matrix(rows)
    with use_threads(3, monkeypatch):
        assert torch.equal(gram_matrix(rows), alone)


# --- the sum --------------------------------------------------------------------------------------


def test_mixing_updates_with_the_identity_matrix_gives_weighted_mean() -> None:
    target, rows = server(), normal(12, LAYOUT.shared)
    weights = [target.weight(client) for client in range(12)]
    got = recombine(given(rows, weights), view(target), "model", unchanged)
    target.step(updates(rows), {}, [0] * 12, {})
    assert torch.equal(got, target.params), "from zero"


@pytest.mark.parametrize("threads", [1, 3])
def test_weighted_sum_computed_in_blocks_equals_a_pairwise_sum_exactly(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, weights = normal(7, 600_001).unbind(), [0.1, 3.0, 1 / 3, 7.0, 0.7, 1.0, -2.0]
    a, b, c, d, e, f, g = (row * weight for row, weight in zip(rows, weights, strict=True))
    with use_threads(threads, monkeypatch):
        got = linear_combination(rows, weights)
    assert torch.equal(got, ((a + b) + (c + d)) + ((e + f) + g))


def test_recombined_update_equals_weights_times_mixture_times_updates() -> None:
    rows, mixture = normal(3, LAYOUT.shared), normal(3, 3, seed=1).double()
    got = recombine(
        given(rows, [1.0, 2.0, 4.0], 8.0), view(server()), "model", lambda products: mixture
    )
    want = torch.tensor([1.0, 2.0, 4.0]).double() @ mixture @ rows.double()[:, : LAYOUT.trained] / 8
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-6)


def test_gram_matrix_can_be_computed_for_each_tensor() -> None:
    rows, seen = normal(3, LAYOUT.shared), []

    def note(products: Tensor) -> Tensor:
        seen.append(products)
        return unchanged(products)

    recombine(given(rows, [1.0] * 3), view(server()), "tensor", note)
    parts = stretches(LAYOUT, "tensor")
    assert [part.stop - part.start for part in parts] == [12, 3, 3, 3], "and none of the buffers"
    for products, part in zip(seen, parts, strict=True):
        own = rows[:, part].double()
        assert torch.allclose(products, own @ own.T)


# --- in a step of the server ----------------------------------------------------------------------

RULES = (PrincipalGradient, FedGH, HierarchicalFedGH)


@pytest.mark.parametrize("rule", RULES)
def test_float_buffers_are_averaged_if_a_method_combines_updates(
    rule: Callable[[], Method],
) -> None:
    rows = normal(12, LAYOUT.shared)
    plain, other = server(weighting="uniform"), server(rule(), weighting="uniform")
    for target in (plain, other):
        target.step(updates(rows), {}, [0] * 12, {})
        target.step(updates(rows.flip(1), version=1), {}, [0] * 12, {})
    assert not torch.equal(plain.params, other.params)
    assert torch.equal(plain.vector[LAYOUT.trained :], other.vector[LAYOUT.trained :]), (
        "to the bit, in groups of five"
    )


@pytest.mark.parametrize("rule", RULES)
def test_fedbuff_scales_the_step_of_a_method_that_combines_updates(
    rule: Callable[[], Method],
) -> None:
    rows = normal(5, LAYOUT.shared)
    plain, buffered = (
        server(rule(), *others, weighting="uniform") for others in ((), (FedBuff(),))
    )
    plain.step(updates(rows), {}, [0] * 5, {})
    buffered.step(
        updates(rows), {}, [3] * 5, {}
    )  # all equally stale: weights (1 + 3)^-1/2, over their number
    assert torch.allclose(buffered.params, plain.params / 2, rtol=1e-5, atol=1e-6)


class Sizes(TorchFunctionMode):
    """A mode that records the number of entries of the largest tensor that any call makes."""

    largest = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.largest = max(self.largest, found.numel())
        return found


@pytest.mark.parametrize("rule", RULES)
def test_gram_matrix_needs_no_second_copy_of_the_updates(
    rule: Callable[[], Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", module._PART)
    size, clients = 12 * 8192 + 100, 24
    layout = plan_layout({"model": nn.ParameterDict({"w": nn.Parameter(torch.zeros(size))})})
    rows, target = normal(clients, size), server(layout=layout, clients=clients)
    method = rule()
    aggregation = given(rows, [1.0] * clients)
    with Sizes() as sizes, use_threads(1, monkeypatch):
        method.combine(aggregation, view(target))
        tracemalloc.start()  # sees what NumPy takes
        method.combine(aggregation, view(target))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert sizes.largest == size
    assert peak < rows.nbytes / 4
