"""HetLoRA: adapters whose ranks differ between clients, padded with zeros and averaged.

Source: Cho, Liu, Xu, Fahrezi and Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device
Foundation Models" (EMNLP 2024). A layer has the weight W0 + s B A. `raysim/models/lora.py` explains
W0 and s. Client i has the rank r_i:

    receive     the first r_i columns of B and rows of A
    train       the loss F_i + lam S_i,  S_i = sum over layers of |B[:, q:r_i]| |A[q:r_i, :]|
    prune       r_i <- max(1, q) if S_i is smaller after training than before
    aggregate   A and B, filled with zeros, by the weights p_i = |B_i A_i| / sum_j |B_j A_j|

with q = floor(gamma r_i) and Frobenius norms. |B_i A_i| is one norm over the products of all
layers. lam is the weight of the penalty S_i. The first q columns of B and rows of A have no
penalty. The aggregation is not exact: the product of the mean factors is not the mean of the
products.

Choices that the paper leaves open
- The paper has a single pair of matrices. With several layers, a client has one rank for all of
  them, and prunes all of them at once.
- lam = 0.001 and gamma = 0.99 by default.

Departures from the paper
- The scale s = alpha / model.lora.rank is the same for all clients, whatever their ranks.
- p_i multiplies the weight that the run and other methods give client i. This also applies to the
  head, which is trained and averaged.
- A client keeps its pruned rank as client state, and trains with this rank in later jobs. In the
  paper, the server then sends matrices of the pruned rank. Here virtual time and traffic always
  count the client's initial rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.lora_factors import (
    Ranks,
    check_ranks,
    declare_ranks,
    find_factors,
    needs_mask,
    rank_mask,
    require_adapters,
    require_sharing,
    truncate,
)
from raysim.primitives.checks import at_least, in_range

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup
    from raysim.vectors.layout import Layout


def product_norm(layout: Layout, vector: Tensor) -> float:
    """Return the square root of the sum over layers of |B A|^2, with Frobenius norms.

    B and A are the factors of a layer's adapter.
    vector: the parameters of a model, in the order of `layout`.
    """
    total = 0.0
    for factors in find_factors(layout):
        a, b = (factor.double() for factor in factors.matrices(vector))
        # |B A|^2 = trace((B'B) (A A')), without a product of the layer's size
        total += float(((b.T @ b) * (a @ a.T)).sum())
    return math.sqrt(max(total, 0.0))


def kept_rank(rank: int, gamma: float) -> int:
    """Return floor(gamma * rank): how many columns of B and rows of A a job does not prune."""
    return math.floor(gamma * rank)


def tail_sum(params: Tensor, tail: Tensor, layout: Layout) -> Tensor:
    """Return the sum over layers of |B_t| |A_t|, a penalty on parts of the adapters.

    B and A are the factors of a layer's adapter. B_t has the last columns of B, and A_t the last
    rows of A. `tail` selects these columns and rows. The norms are Frobenius norms.
    params: [layout.trained], the client's trained parameters.
    tail: [layout.trained], 1 for the entries of B_t and A_t, 0 for all other parameters.
    """
    total = params.new_zeros(())
    for factors in find_factors(layout):
        norms = [(params[at] * tail[at]).norm() for at in (factors.a, factors.b)]
        total = total + norms[0] * norms[1]
    return total


class HetLoRA(Method):
    """A method that averages adapters of different ranks, whose factors are padded with zeros.

    ranks: the initial ranks of the clients. None gives all clients model.lora.rank. From a list,
    each client draws its rank. A mapping has a rank for each kind of device in the fleet, such as
    {phone_low: 2, tablet: 8}.
    sparsity: True weighs each client by the norm of the product B A of its two factors; False
    leaves the weights as the run and other methods set them.
    lam: the weight of a penalty that makes the last columns of B and the last rows of A small. A
    client can then remove these columns and rows, and has a lower rank. 0 switches this off.
    gamma: in a job of a client of rank r, the first floor(gamma * r) columns of B and rows of A
    have no penalty, and are not removed. The first column and row are never removed.
    """

    name = "hetlora"
    paper = "Cho et al., EMNLP 2024"
    weighting = "uniform"

    def __init__(
        self, ranks: Ranks = None, sparsity: bool = True, lam: float = 1e-3, gamma: float = 0.99
    ):
        self.ranks = check_ranks("method.hetlora.ranks", ranks)
        self.sparsity = sparsity
        self.lam = at_least("method.hetlora.lam", lam, 0.0)
        self.gamma = in_range("method.hetlora.gamma", gamma, above=0, below=1)

    def setup(self, run: Setup) -> None:
        """Send clients their ranks; clients keep their pruned rank as client state.

        With ranks=None no ranks are sent, and with lam=0 no ranks are pruned.
        """
        adapters = require_adapters(run)
        require_sharing(run)
        declare_ranks(run, self.ranks, adapters).omit(run)
        run.excludes("fedcm", "it changes factors of ranks that a client does not have")
        run.corrects("mix")  # after the terms of other methods, which may move the ranks, too
        if self.ranks is None and not self.lam:
            run.skip("begin")
        if not self.lam:
            run.skip("end")
            if not needs_mask(run, self.ranks):
                run.skip("gradient")
        else:
            run.client_state("rank", lambda samples: torch.full((1,), -1))
        if not self.sparsity:
            run.skip("weigh")

    # --- a client's job -----------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Cut the received factors A and B to the client's rank r, and store their penalty.

        The penalty is the sum over layers of |B_t| |A_t|, with Frobenius norms. B_t has the columns
        q + 1 to r of B, and A_t the rows q + 1 to r of A. Here q is floor(gamma * r). After
        training, `end` compares the penalty of the trained factors with the stored penalty. With
        lam = 0, no penalty is computed.
        """
        rank = max(factors.rank for factors in find_factors(job.layout))
        if "rank" in job.received:
            rank = int(job.received["rank"])
        if self.lam and int(job.state["rank"]) > 0:
            rank = int(job.state["rank"])
        job.report["rank"] = float(rank)
        truncate(job, rank)
        if self.lam:
            job.scratch["rank"] = rank
            tail = job.scratch["mask"] - rank_mask(job, kept_rank(rank, self.gamma))
            job.scratch["tail"] = tail
            job.scratch["sum"] = tail_sum(job.start[: len(tail)], tail, job.layout)

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Add the gradient of lam times the penalty of the adapters.

        The penalty is the sum over layers of |B_t| |A_t|, with Frobenius norms. B_t has the columns
        q + 1 to r of B, and A_t the rows q + 1 to r of A. Here r is the client's rank, and q is
        floor(gamma * r). Then set the gradient to 0 for the rows of A and columns of B that the
        client does not have.
        grad: the gradient with respect to `job.params[at]`, changed in place.
        at: the positions of these parameters in the vector.
        """
        if self.lam:
            tail = job.scratch["tail"]
            for factors in find_factors(job.layout):
                a, b = (job.params[place] * tail[place] for place in (factors.a, factors.b))
                _add_norm_gradient(grad, at, factors.a, a, self.lam * b.norm())
                _add_norm_gradient(grad, at, factors.b, b, self.lam * a.norm())
        grad *= job.scratch["mask"][at]

    def end(self, job: LocalJob) -> None:
        """Lower the client's rank if training made the penalty of its adapters smaller.

        The penalty (`tail_sum`) is on the last columns of B and the last rows of A. The new rank is
        floor(gamma * old rank), but at least 1. In each adapter B A, all columns of B and all rows
        of A beyond the new rank become 0. The client state stores the client's rank, even if the
        rank is unchanged.
        """
        tail, rank = job.scratch["tail"], job.scratch["rank"]
        params = job.params[: len(tail)]
        if bool(tail_sum(params, tail, job.layout) < job.scratch["sum"]):
            rank = max(1, kept_rank(rank, self.gamma))
            params *= rank_mask(job, rank)
        job.state["rank"] = torch.tensor([rank])

    # --- an aggregation -----------------------------------------------------------------------
    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        """Multiply each update's weight by the norm of the client's products B A.

        The norm (`product_norm`) is over the adapters of all layers of the trained model. It is
        divided by its mean over the participants. If this mean is 0, the weights do not change.
        """
        norms = []
        for update, delta in zip(aggregation.updates, aggregation.deltas, strict=True):
            norms.append(product_norm(server.layout, aggregation.base(update) + delta))
        mean = sum(norms) / len(norms)
        if mean == 0:
            return aggregation  # no client has trained its adapters
        pairs = zip(aggregation.weights, norms, strict=True)
        return aggregation.with_weights([weight * norm / mean for weight, norm in pairs])


def _add_norm_gradient(
    grad: Tensor, at: slice, values_at: slice, values: Tensor, factor: Tensor
) -> None:
    """Add factor * values / |values|, the gradient of factor * |values|, to `grad`.

    `values` are the entries of one matrix of an adapter. `at` and `values_at` are slices of the
    vector, which has all parameters.
    grad: the gradient of the parameters in the slice `at`, changed in place.
    values_at: the slice with the entries of the matrix. If it is not completely inside `at`,
    nothing is added.
    values: the entries of the matrix, with 0 for the ranks that have no penalty.
    factor: a scalar tensor.
    """
    if at.start <= values_at.start and values_at.stop <= at.stop:
        unit = values / values.norm().clamp_min(torch.finfo(values.dtype).tiny)
        grad[values_at.start - at.start : values_at.stop - at.start] += factor * unit
