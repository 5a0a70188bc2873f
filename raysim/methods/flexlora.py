"""FlexLoRA: average the products of the adapters' factors, and split the mean again.

Source: Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and
Client Resources" (NeurIPS 2024), Algorithm 1. Client i has the weight p_i; its adapter of a layer
has the factors B_i and A_i. With r = model.lora.rank and U S V' a singular value decomposition:

    P = sum_i p_i B_i A_i,    P = U S V'
    B <- the first r columns of U S,    A <- the first r rows of V'

Client i of rank r_i receives the first r_i columns of B and rows of A.

Departures from the paper
- With stale updates, P = B A + sum_i p_i (B_i A_i - B_i^0 A_i^0). B A is the server's current
  product; client i received the factors B_i^0 and A_i^0.
- The scale of an adapter, model.lora.alpha / model.lora.rank, is the same for all ranks.
- A separate head of the model is trained and averaged, too.
- If P has a rank k below r, rows k + 1 to r of A do not change. Columns k + 1 to r of B become 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.lora_factors import (
    Factors,
    Ranks,
    check_ranks,
    declare_ranks,
    find_factors,
    mean_delta,
    require_adapters,
    require_products,
    require_sharing,
    skip_rank_hooks,
    truncate,
)

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


# The largest rounding error of shares, and of singular values relative to the largest one.
ROUNDING = 1e-12


def split_product(left: Tensor, right: Tensor, old_a: Tensor) -> tuple[Tensor, Tensor]:
    """Return B [m, r] and A [r, n]; B A is the matrix of rank r that is nearest to left @ right.

    Each row of A has the norm 1 and belongs to a singular value, in descending order. If left @
    right has a rank k below r, the last r - k columns of B are 0, and the last r - k rows of A are
    those of `old_a`.

    left: [m, R], with R >= r.
    right: [R, n].
    old_a: [r, n], the current factor A.
    """
    rank = len(old_a)
    if left.shape[1] < min(len(left), right.shape[1]):
        # The product of smaller matrices has the same singular values.
        q_left, r_left = torch.linalg.qr(left)
        q_right, r_right = torch.linalg.qr(right.T)
        u, values, v = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
        u, v = q_left @ u, v @ q_right.T
    else:
        u, values, v = torch.linalg.svd(left @ right, full_matrices=False)
    u, values, v = u[:, :rank], values[:rank], v[:rank]
    largest = u.gather(0, u.abs().argmax(0, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(u)
    b, a = u * signs * values, v * signs.T
    is_empty = values <= ROUNDING * values.max()
    return b.masked_fill(is_empty, 0.0), torch.where(is_empty.unsqueeze(1), old_a, a)


class FlexLoRA(Method):
    """A method that averages the products of adapters' factors, and splits the mean into factors.

    ranks: the ranks of the clients' adapters. None gives all clients model.lora.rank. From a list,
    each client draws its rank. A mapping has a rank for each kind of device, such as {phone_low: 2,
    tablet: 8}.
    """

    name = "flexlora"
    paper = "Bai et al., NeurIPS 2024"

    def __init__(self, ranks: Ranks = None):
        self.ranks = check_ranks("method.flexlora.ranks", ranks)

    def setup(self, run: Setup) -> None:
        """Send clients their ranks; refuse a model without adapters."""
        adapters = require_adapters(run)
        require_products(run, adapters)
        require_sharing(run)
        run.owns("step")  # new factors are not a step that another rule could scale
        run.corrects("mix")  # after the terms of other methods
        declare_ranks(run, self.ranks, adapters).omit(run)
        skip_rank_hooks(run, self.ranks)

    # --- a client's job -----------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Start from the received factors, reduced to the client's rank."""
        truncate(job, int(job.received["rank"]))

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Set the gradient to 0 for the rows of A and columns of B that the client does not have.

        grad: the gradient with respect to `job.params[at]`, changed in place.
        """
        grad *= job.scratch["mask"][at]

    # --- an aggregation -----------------------------------------------------------------------
    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the changes of all trained parameters, [layout.trained].

        The server splits the mean product of the clients' factors into the new factors. All other
        parameters change by the mean update.
        """
        direction = mean_delta(aggregation, server)
        models = _shares_of_models(aggregation, server)
        for factors in find_factors(server.layout):
            old_a, old_b = factors.matrices(server.vector)
            b, a = _split_mean(factors, models, old_a)
            direction[factors.a] = (a.to(old_a) - old_a).flatten()
            direction[factors.b] = (b.to(old_b) - old_b).flatten()
        return direction


def _shares_of_models(aggregation: Aggregation, server: ServerView) -> list[tuple[Tensor, float]]:
    """Return the models from which the clients' mean product is computed.

    Each entry is the vector of a model, and a coefficient. In each layer, the mean product is the
    sum over the entries of coefficient * B A, with the factors B and A from the vector.
    """
    # With p_i the weight of client i, divided by the sum of weights, the coefficients are p_i for
    # the model that client i trained, -p_i for the model that it received, and 1 for the current
    # model. Without stale updates, the coefficients of received and current models cancel.
    received: dict[int, float] = {}
    trained = []
    for update, delta, weight in zip(
        aggregation.updates, aggregation.deltas, aggregation.weights, strict=True
    ):
        share = weight / aggregation.divisor
        trained.append((aggregation.base(update) + delta, share))
        received[update.version] = received.get(update.version, 0.0) + share
    current = 1.0
    bases = []
    for version, share in received.items():
        base = torch.from_numpy(aggregation.bases[version].vector)
        if torch.equal(base, server.vector):
            current -= share
        else:
            bases.append((base, -share))
    if abs(current) > ROUNDING:
        bases.append((server.vector, current))
    return trained + bases


def _split_mean(
    factors: Factors, models: Sequence[tuple[Tensor, float]], old_a: Tensor
) -> tuple[Tensor, Tensor]:
    """Return new factors B [m, r] and A [r, n] of a layer, in float64.

    B A is the matrix of rank r that is nearest to the clients' mean product.
    models: models and their coefficients, from `_shares_of_models`.
    old_a: [r, n], the current factor A. If the mean has a rank k below r, the last r - k rows of
    the new A are those of `old_a`.
    """
    left, right = [], []
    for vector, share in models:
        a, b = factors.matrices(vector)
        left.append(share * b.double())
        right.append(a.double())
    return split_product(torch.cat(left, 1), torch.cat(right), old_a.double())
