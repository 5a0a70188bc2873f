"""HetLoRA: adapters whose ranks differ between clients, padded with zeros and averaged.

Source: Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models"
(EMNLP 2024). A layer's adapter has the product B A. Client i has the rank r_i and the loss F_i.
With q = floor(gamma r_i) and Frobenius norms:

    receive     the first r_i columns of B and rows of A
    train       the loss F_i + lam S_i,  S_i = sum over layers of |B[:, q:r_i]| |A[q:r_i, :]|
    prune       r_i <- max(1, q) if training has decreased S_i
    aggregate   A and B, filled with zeros, by the weights p_i = |B_i A_i| / sum_j |B_j A_j|

|B_i A_i| is one norm over all layers.

Choices that the paper leaves open
- All layers of a client have the same rank, and are pruned together.
- The defaults are lam = 0.001 and gamma = 0.99.

Departures from the paper
- The scale of an adapter, model.lora.alpha / model.lora.rank, is the same for all ranks.
- p_i multiplies the weight that client i has without HetLoRA. The head is averaged with the same
  weights.
- The pruned rank is client state. Virtual time and traffic count the initial rank.
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
    """Return HetLoRA's penalty: the sum over layers of |B_t| |A_t|, with Frobenius norms.

    B_t has the last columns of B, and A_t the last rows of A.
    params: [layout.trained], the client's parameters.
    tail: [layout.trained], 1 for the entries of B_t and A_t, otherwise 0.
    """
    total = params.new_zeros(())
    for factors in find_factors(layout):
        norms = [(params[at] * tail[at]).norm() for at in (factors.a, factors.b)]
        total = total + norms[0] * norms[1]
    return total


class HetLoRA(Method):
    """A method that averages adapters of different ranks, padded with zeros.

    ranks: the initial ranks of the clients. From a list, each client draws its rank. A mapping has
    a rank for each kind of device, such as {phone_low: 2, tablet: 8}. None gives all clients
    model.lora.rank.
    sparsity: True multiplies a client's weight by the norm of its products B A.
    lam: the weight of a penalty on the columns of B and rows of A that may be pruned. If training
    lowers the penalty, the client removes these columns and rows. 0 means no penalty and no
    pruning.
    gamma: the fraction of a client's rank, rounded down, that penalty and pruning spare. At least
    one column and one row are never removed.
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
        """Cut the received factors to the client's rank; store their penalty (`tail_sum`).

        With lam = 0, no penalty is computed.
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
        """Add the gradient of lam times the penalty of the adapters (`tail_sum`).

        Then set the gradient to 0 for the ranks that the client does not have.
        grad: the gradient with respect to `job.params[at]`, changed in place.
        """
        if self.lam:
            tail = job.scratch["tail"]
            for factors in find_factors(job.layout):
                a, b = (job.params[place] * tail[place] for place in (factors.a, factors.b))
                _add_norm_gradient(grad, at, factors.a, a, self.lam * b.norm())
                _add_norm_gradient(grad, at, factors.b, b, self.lam * a.norm())
        grad *= job.scratch["mask"][at]

    def end(self, job: LocalJob) -> None:
        """Lower the client's rank if training made the penalty (`tail_sum`) smaller.

        The new rank is max(1, floor(gamma * rank)). Rows of A and columns of B after the new rank
        become 0. The client state stores the rank, whether it is lower or not.
        """
        tail, rank = job.scratch["tail"], job.scratch["rank"]
        params = job.params[: len(tail)]
        if bool(tail_sum(params, tail, job.layout) < job.scratch["sum"]):
            rank = max(1, kept_rank(rank, self.gamma))
            params *= rank_mask(job, rank)
        job.state["rank"] = torch.tensor([rank])

    # --- an aggregation -----------------------------------------------------------------------
    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        """Multiply each update's weight by a norm of the client's trained adapters.

        `product_norm` computes one norm for each client, from the products B A of all adapters.
        These norms are divided by their mean over the participants. If this mean is 0, the weights
        do not change.
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
    """Add the gradient of factor * |values| to `grad`, in place.

    grad: the gradient with respect to the parameters in the slice `at` of the vector.
    values: some of the vector's parameters.
    values_at: the slice of the vector that has `values`. If it is not inside `at`, nothing is
    added.
    """
    if at.start <= values_at.start and values_at.stop <= at.stop:
        unit = values / values.norm().clamp_min(torch.finfo(values.dtype).tiny)
        grad[values_at.start - at.start : values_at.stop - at.start] += factor * unit
