"""LoRA (Hu et al. 2022) on the network of `textbook.plain`, and how servers average its factors.

W0, b: the hidden layer's frozen weight and bias. A [r, inputs], B [outputs, r]: the factors of rank
r. s: the scaling of B A. P: the product B A at the server. p_i: a client's normalised weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.plain import (
    EXTRACTOR,
    Loss,
    apply_mean_change,
    average,
    detach,
    head,
    mean,
    run_rounds,
    train,
    weights,
)
from textbook.world import Book, Params, World

LAYER = f"{EXTRACTOR}.1"
A, B = f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_B.default.weight"
WEIGHT, BIAS = f"{LAYER}.base_layer.weight", f"{LAYER}.base_layer.bias"


def adapted_loss(frozen: Mapping[str, Tensor], scaling: float) -> Loss:
    """Return the cross-entropy of a network whose hidden layer computes W0 x + b + s B (A x).

    frozen: the tensors that are not trained, W0 and b among them.
    scaling: s.
    """

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
        values = {**frozen, **p}
        inputs = x.flatten(1)
        product = scaling * values[B] @ values[A]
        hidden = F.linear(inputs, values[WEIGHT] + product, values[BIAS])
        return F.cross_entropy(head(values, hidden.relu()), y)

    return loss


def factor_mean(world: World, scaling: float) -> Book:
    """Compute a run of FedIT (Zhang et al. 2024) or FFA-LoRA, which average all trained tensors.

    `world.start` has the trained tensors: the head, B, and for FedIT also A. `world.drawn` has the
    frozen tensors.
    scaling: the scaling of the product B A.
    """
    loss = adapted_loss(world.drawn, scaling)
    return run_rounds(world, lambda job, x: train(world, job, x, loss))


def fedsa(world: World, scaling: float) -> Book:
    """Compute a run of FedSA-LoRA (Guo et al. 2025): clients keep their factors B.

    The server averages the factor A and the head.
    scaling: the scaling of the product B A.
    """
    loss = adapted_loss(world.drawn, scaling)
    shared = {name: value for name, value in world.start.items() if name != B}
    own: dict[int, Params] = {}

    def factor(client: int) -> Params:
        return own.get(client, {B: torch.zeros_like(world.start[B])})

    for jobs in world.rounds:
        models = [detach(train(world, job, shared | factor(job.client), loss)) for job in jobs]
        for job, model in zip(jobs, models, strict=True):
            own[job.client] = {B: model.pop(B)}
        shared = average(models, weights(world, jobs))
    clients = range(world.clients)
    return Book(shared, own, own={client: shared | factor(client) for client in clients})


# --- products and ranks ---------------------------------------------------------------------------
def drawn_ranks(world: World, ranks: Sequence[int]) -> list[int]:
    """Return the rank of each client, drawn with equal probability."""
    places = stream(world.seed, "lora.ranks").integers(len(ranks), size=world.clients)
    return [ranks[place] for place in places]


def cut(x: Mapping[str, Tensor], rank: int) -> Params:
    """Return a copy of a model whose LoRA factors are cut to rank `rank`.

    The rows of A [r, inputs] and the columns of B [outputs, r] from index `rank` on become 0.
    """
    a, b = x[A].clone(), x[B].clone()
    a[rank:], b[:, rank:] = 0.0, 0.0
    return {**x, A: a, B: b}


def nearest(product: Tensor, old_a: Tensor) -> Params:
    """Return factors B and A of rank r whose product is the best approximation of a matrix.

    If the matrix has a smaller rank k, only the first k rows of A and columns of B are computed.
    The other rows of A are those of old_a, and the other columns of B are 0. A computed row of A
    has the norm 1.
    product: [outputs, inputs], the matrix.
    old_a: [r, inputs], the earlier A.
    """
    u, values, v = torch.linalg.svd(product)
    a, b = old_a.clone(), torch.zeros(len(u), len(old_a), dtype=product.dtype)
    for place in range(min(len(old_a), int(torch.linalg.matrix_rank(product, rtol=1e-12)))):
        sign = u[u[:, place].abs().argmax(), place].sign()
        a[place], b[:, place] = sign * v[place], sign * values[place] * u[:, place]
    return {A: a, B: b}


def flexlora(world: World, scaling: float, ranks: Sequence[int]) -> Book:
    """Compute a run of FlexLoRA, whose server averages the products of LoRA factors.

    Client i receives the server's factors, cut to the client's rank, and trains them to B_i and
    A_i. P_i is the product of the uncut factors in the client's base version. The server adds the
    weighted mean of all B_i A_i - P_i to the product of its factors. The server's new factors
    approximate the result (`nearest`).
    scaling: the factor on B A in the layer.
    ranks: the ranks that clients may have.
    """
    loss, versions = adapted_loss(world.drawn, scaling), [dict(world.start)]
    of_client = drawn_ranks(world, ranks)
    for jobs in world.rounds:
        x, w = versions[-1], weights(world, jobs)
        received = [versions[job.version] for job in jobs]
        models = [
            detach(train(world, job, cut(base, of_client[job.client]), loss))
            for job, base in zip(jobs, received, strict=True)
        ]
        product = x[B] @ x[A]
        for model, base, weight in zip(models, received, w, strict=True):
            product = product + weight / sum(w) * (model[B] @ model[A] - base[B] @ base[A])
        following = apply_mean_change(x, jobs, models, versions, w)
        versions.append({**following, **nearest(product, x[A])})
    return Book(versions[-1])


def with_term(task: Loss, term: Callable[[Params], Tensor], lam: float) -> Loss:
    """Return the loss `task` plus lam times a penalty.

    term(parameters): the penalty, which does not depend on the batch.
    """
    return lambda p, step, x, y: task(p, step, x, y) + lam * term(p)


def hetlora(world: World, scaling: float, ranks: Sequence[int], lam: float, gamma: float) -> Book:
    """Compute a run of HetLoRA: clients train LoRA factors of several ranks (Cho et al. 2024).

    The server fills smaller factors with zeros, and averages all factors. The weight of client i is
    |B_i A_i|, times its number of samples if the run weighs by samples.

    q is gamma times a client's rank, rounded down. B' is the client's B without its first q
    columns, and A' is its A without its first q rows. The loss contains lam |B'| |A'|. If a job
    makes |B'| |A'| smaller, the client drops B' and A' after the job; a rank is at least 1.
    scaling: the factor on B A in the layer.
    ranks: the ranks with which clients may start.
    """
    x, start = dict(world.start), drawn_ranks(world, ranks)
    rank: dict[int, int] = {}
    columns: dict[str, list[float]] = {"hetlora.rank": []}

    def term(p: Mapping[str, Tensor], rank: int) -> Tensor:
        last = slice(math.floor(gamma * rank), rank)
        return torch.linalg.matrix_norm(p[B][:, last]) * torch.linalg.matrix_norm(p[A][last])

    for jobs in world.rounds:
        models, norms, had = [], [], []
        for job in jobs:
            r = rank.get(job.client, start[job.client])
            had.append(float(r))
            received, task = cut(x, r), adapted_loss(world.drawn, scaling)
            model = detach(train(world, job, received, with_term(task, partial(term, rank=r), lam)))
            if term(model, r) < term(received, r):
                r = max(1, math.floor(gamma * r))
                model = cut(model, r)
            rank[job.client] = r
            models.append(model)
            norms.append(float((model[B] @ model[A]).norm()))
        columns["hetlora.rank"].append(sum(had) / len(had))
        w = weights(world, jobs)
        x = average(models, [weight * norm for weight, norm in zip(w, norms, strict=True)])
    private = {client: {"hetlora.rank": torch.tensor([r])} for client, r in rank.items()}
    return Book(x, private, columns=columns)


def flora(world: World, scaling: float, ranks: Sequence[int]) -> Book:
    """Compute a run of FLoRA, whose server adds products of LoRA factors to the frozen weight.

    The rule is from Wang et al. 2024. The server computes the weighted mean of the clients'
    products B A, and adds `scaling` times this mean to the frozen weight. Then it draws a new A and
    sets B to 0.
    ranks: the ranks that clients may have. Clients get factors cut to their ranks.
    """
    x, of_client = dict(world.start), drawn_ranks(world, ranks)
    for version, jobs in enumerate(world.rounds):
        weight, w = x.pop(WEIGHT), weights(world, jobs)
        loss = adapted_loss({**world.drawn, WEIGHT: weight}, scaling)
        models = [detach(train(world, job, cut(x, of_client[job.client]), loss)) for job in jobs]
        products = [model[B] @ model[A] for model in models]
        bound = 1 / math.sqrt(x[A].shape[1])
        draw = stream(world.seed, "flora.a", version).uniform(-bound, bound, x[A].shape)
        x = average(models, w)
        x |= {A: torch.from_numpy(draw), B: torch.zeros_like(x[B])}
        x[WEIGHT] = weight + scaling * mean(products, w)
    return Book(x, server={"flora.scalings": torch.tensor([scaling], dtype=torch.float64)})
