"""Test the methods for low-rank adapters against their textbooks.

Also test which methods average adapters exactly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny_runs import run, run_spec
from torch import Tensor

from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.api.setup import Setup
from raysim.methods.fedsa_lora import FedSALoRA
from raysim.methods.ffa_lora import FFALoRA
from raysim.methods.flexlora import FlexLoRA, split_product
from raysim.methods.flora import FLoRA
from raysim.methods.hetlora import HetLoRA
from raysim.models import Lora, Mlp
from raysim.models.lora import find_adapters
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.worker import Worker
from textbook.check import LOCAL, Row, check
from textbook.lora import factor_mean, fedsa, flexlora, flora, hetlora

RANK, ALPHA = 2, 3.0
SCALING = ALPHA / RANK
MODEL: dict[str, Any] = {"model": Mlp((6,), Lora(RANK, ALPHA))}
WIDE: dict[str, Any] = {"model": Mlp((6,), Lora(3, 3 * SCALING))}
FEW: dict[str, Any] = {"schedule": Synchronous(1), "run": {"rounds": 2}}


def frozen(worker: Worker) -> dict[str, Tensor]:
    """Return the model's frozen parameters by full name."""
    parameters = worker.vector.networks["model"].named_parameters()
    return {f"model.{name}": p.detach() for name, p in parameters if not p.requires_grad}


ROWS = {
    "fedavg": Row(partial(factor_mean, scaling=SCALING), lambda: [], MODEL, drawn=frozen),
    "ffa_lora": Row(
        partial(factor_mean, scaling=SCALING), lambda: [FFALoRA()], MODEL, drawn=frozen
    ),
    "fedsa_lora": Row(partial(fedsa, scaling=SCALING), lambda: [FedSALoRA()], MODEL, drawn=frozen),
    "fedsa_lora, some never train": Row(
        partial(fedsa, scaling=SCALING), lambda: [FedSALoRA()], MODEL, drawn=frozen, **FEW
    ),
    "flexlora": Row(
        partial(flexlora, scaling=SCALING, ranks=[RANK]), lambda: [FlexLoRA()], MODEL, drawn=frozen
    ),
    "flexlora, several ranks, stale updates": Row(
        partial(flexlora, scaling=SCALING, ranks=[1, 3]),
        lambda: [FlexLoRA([1, 3])],
        WIDE,
        {"rounds": 5},
        Buffered(concurrency=3, size=2),
        frozen,
    ),
    "hetlora": Row(
        partial(hetlora, scaling=SCALING, ranks=[1, 3], lam=0.1, gamma=0.9),
        lambda: [HetLoRA([1, 3], lam=0.1, gamma=0.9)],
        WIDE,
        {"rounds": 5},
        drawn=frozen,
    ),
    "hetlora, all ranks": Row(
        partial(hetlora, scaling=SCALING, ranks=[3], lam=0.5, gamma=0.5),
        lambda: [HetLoRA(lam=0.5, gamma=0.5)],
        WIDE,
        drawn=frozen,
    ),
    "flora": Row(
        partial(flora, scaling=SCALING, ranks=[RANK]), lambda: [FLoRA()], MODEL, drawn=frozen
    ),
    "flora, several ranks": Row(
        partial(flora, scaling=SCALING, ranks=[1, 2, 3]),
        lambda: [FLoRA([1, 2, 3])],
        WIDE,
        drawn=frozen,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_lora_method_equals_its_textbook_computation(name: str) -> None:
    check(ROWS[name])


# --- which means are exact ------------------------------------------------------------------------
class Witness(Method):
    """A method that measures how far the server's aggregation is from an exact average.

    W_old, W_new: the adapter layer's matrix before and after the aggregation. W_mean: the weighted
    mean of the clients' matrices. The method reports |W_new - W_mean| / |W_mean - W_old|.
    """

    name = "witness"
    paper = "a test"

    def setup(self, run: Setup) -> None:
        (adapter,) = find_adapters(run.model)
        a = run.model.get_parameter(adapter.a).detach().double()
        run.read_updates()
        run.server_state("a", lambda server: a)

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        total = sum(aggregation.weights)
        expected = torch.zeros(())
        for update, delta, weight in zip(
            aggregation.updates, aggregation.deltas, aggregation.weights, strict=True
        ):
            layer = self._weight(aggregation.base(update) + delta, server)
            expected = expected + weight / total * layer
        server.report["gap"] = float((self._weight(server.vector, server) - expected).norm())
        self_norm = expected - self._weight(aggregation.base(aggregation.updates[0]), server)
        server.report["gap"] /= float(self_norm.norm())

    @staticmethod
    def _weight(vector: Tensor, server: ServerView) -> Tensor:
        """Return the matrix W + SCALING B A of the layer that has an adapter.

        A frozen W is left out. If A is frozen, the initial A is used.
        vector: the shared vector, which contains the trained tensors.
        """
        tensors = {
            entry.path.rpartition("extractor.1.")[2]: vector[entry.start : entry.stop].view(
                entry.shape
            )
            for entry in server.layout.entries
            if entry.stop <= len(vector)
        }
        a = tensors.get("lora_A.default.weight", server.state["a"])
        product = SCALING * tensors["lora_B.default.weight"] @ a
        return product + tensors.get("base_layer.weight", 0.0)


@pytest.mark.parametrize(
    ("methods", "least", "most"),
    [
        ([], 1e-3, 1.0),
        ([HetLoRA(sparsity=False)], 1e-3, 1.0),
        ([FFALoRA()], 0.0, 1e-12),
        ([FLoRA()], 0.0, 1e-12),
        ([FlexLoRA()], 1e-3, 1.0),  # four products of rank 1 have no mean of rank 1
    ],
    ids=["fedavg", "hetlora", "ffa_lora", "flora", "flexlora"],
)
def test_only_ffa_lora_and_flora_average_products_exactly(
    methods: list[Method], least: float, most: float
) -> None:
    model = Mlp((6,), Lora(1, SCALING))
    spec = run_spec(*methods, Witness(), model=model, local=LOCAL, dtype=torch.float64)
    ended = run(spec, Synchronous(4), rounds=2, weighting="samples")
    assert all(least <= row["witness.gap"] <= most for row in ended.rows)


def test_flexlora_split_is_the_best_low_rank_approximation() -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    right = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    values = torch.linalg.svdvals(left @ right)
    for rank in (2, 3, 4):
        b, a = split_product(left, right, torch.zeros(rank, 7, dtype=torch.float64))
        assert b.shape == (9, rank) and a.shape == (rank, 7)
        dropped = values[rank:].norm()
        assert float((left @ right - b @ a).norm()) == pytest.approx(float(dropped), abs=1e-12)


def test_flexlora_keeps_rows_of_matrix_a_if_the_product_has_a_smaller_rank() -> None:
    column, row = torch.ones(5, 1).double(), torch.arange(1.0, 5.0).double().unsqueeze(0)
    left, right = torch.cat([column, 2 * column], 1), torch.cat([row, row])
    old_a = torch.full((2, 4), 7.0, dtype=torch.float64)
    b, a = split_product(left, right, old_a)
    torch.testing.assert_close(b @ a, 3 * column @ row)
    assert torch.equal(a[1], old_a[1]) and not b[:, 1].any()
