"""FedPAC of Xu et al. 2023, with an exact solution of its quadratic program.

Client i of a round gets a mixture of all heads of the round. The weights w_j are at least 0, have
the sum 1, and minimise the sum of all w_j w_k P_jk. P_jk is <h_i - h_j, h_i - h_k>, plus V_j on the
diagonal (`statistics` computes h_j and V_j). The textbook solves this for every subset of the
clients, and takes the best solution.

A job first trains the head, with the extractor in eval mode, and then the extractor. Each of the
two stages has a new optimizer.
"""

from __future__ import annotations

from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import (
    average,
    copy_for_training,
    detach,
    features,
    gradients,
    head,
    is_buffer,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World

HEAD = ("model.head.weight", "model.head.bias")


def means(p: Params, x: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean features of each class [C, D], and the number of samples of each class [C].

    The mean of a class without samples is 0.
    x, y: inputs and classes of the samples.
    classes: C.
    """
    z = features(dict(p), x, False)
    of_class = [z[y == k] for k in range(classes)]
    return torch.stack([rows.sum(0) / max(len(rows), 1) for rows in of_class]), torch.tensor(
        [len(e) for e in of_class]
    )


def statistics(p: Params, x: Tensor, y: Tensor, classes: int) -> tuple[float, Tensor]:
    """Return a client's feature variance V, and the weighted class means h of its features.

    h, [classes, D]: for each class, the mean features, times the fraction of samples of this class.
    V is (mean |z|^2 - |h|^2) / n for n samples with features z.
    p: the parameters that compute the features, in eval mode.
    """
    z, (mu, counts) = features(dict(p), x, False), means(p, x, y, classes)
    pi = counts.double() / len(y)
    h = pi[:, None] * mu
    square = sum(pi[k] * z[y == k].square().sum(1).mean() for k in range(classes) if counts[k])
    return float((square - h.square().sum()) / len(y)), h


def mixture(variances: list[float], h: list[Tensor], i: int, least: float) -> Tensor:
    """Return the weights that mix the participants' heads into the head of participant i.

    The weights w_j are at least 0, have the sum 1, and minimise the sum of w_j w_k P_jk (see the
    module).
    variances, h: the results of `statistics` for each participant.
    least: weights of at most `least` become 0, and larger ones are scaled to the sum 1. If no
    weight is larger, all stay.
    """
    m = len(h)
    p = torch.stack(
        [torch.stack([((h[i] - h[j]) * (h[i] - h[k])).sum() for k in range(m)]) for j in range(m)]
    )
    p = p + torch.diag(torch.tensor(variances, dtype=torch.float64))
    best, value = torch.zeros(m).double(), float("inf")
    for support in (list(s) for size in range(1, m + 1) for s in combinations(range(m), size)):
        part = torch.linalg.solve(p[support][:, support], torch.ones(len(support)).double())
        part = part / part.sum()
        if (part >= 0).all() and float(part @ p[support][:, support] @ part) < value:
            value, best = float(part @ p[support][:, support] @ part), torch.zeros(m).double()
            best[support] = part
    cut = torch.where(best > least, best, 0.0)
    return cut / cut.sum() if cut.any() else best


def fedpac(
    world: World, lam: float = 1.0, head_epochs: int = 1, factor: float = 10.0, least: float = 1e-3
) -> Book:
    """Compute a run of FedPAC, whose clients share the extractor and get mixtures of heads.

    The server also averages the mean features of each class (prototypes).
    lam: the weight of the loss that pulls features to their prototypes.
    head_epochs: the number h of passes over the samples that train the head, in at most h / (h + 1)
    of the job's steps.
    factor: the learning rate of the head, divided by that of the run.
    least: weights of heads up to this value become 0.
    """
    x = {name: tensor for name, tensor in world.start.items() if name not in HEAD}
    first = {name: world.start[name] for name in HEAD}
    heads, trained, shares = (
        dict[int, Params](),
        dict[int, Params](),
        list[float](),
    )  # heads: mixtures, as they came
    prototypes, present = torch.zeros(0), torch.zeros(0)

    def client(job: Job) -> Params:
        p, data = copy_for_training(x | heads.get(job.client, first)), world.data[job.client]
        mu, counts = means(p, *data, world.classes)
        mu = mu.detach()

        def alignment(z: Tensor, y: Tensor) -> Tensor:
            targets = z.detach().clone()
            for b, k in enumerate(y.tolist()):
                targets[b] = prototypes[k] if present[k] else mu[k] if counts[k] else z[b].detach()
            return (z - targets).square().sum() / z.numel()

        step_of, batches = head_steps(job, head_epochs), job.batches
        sgd = optimizer(world, job, factor)
        for inputs, labels in batches[:step_of]:
            loss = F.cross_entropy(head(p, features(p, inputs, False)), labels)
            sgd.step(p, gradients(loss, p, HEAD))
        sgd = optimizer(world, job)
        for inputs, labels in batches[step_of:]:
            z = features(p, inputs)
            loss = F.cross_entropy(head(p, z), labels)
            if len(prototypes):
                loss = loss + lam * alignment(z, labels)
            sgd.step(p, gradients(loss, p, trainable(p, "model.extractor")))
        return detach(p)

    def head_steps(job: Job, h: int) -> int:
        local, n = world.local, len(world.data[job.client][1])
        dropped = (
            n % local.batch == 1
            and n > local.batch
            and any(is_buffer(name) for name in world.start)
        )
        once = -(-n // local.batch) - dropped
        return min(h * once, len(job.batches) * h // (h + 1))

    for jobs in world.rounds:
        models = [client(job) for job in jobs]
        measured = [statistics(x, *world.data[job.client], world.classes) for job in jobs]
        counted = [
            means(y, *world.data[job.client], world.classes)
            for job, y in zip(jobs, models, strict=True)
        ]
        total = sum(counts for _, counts in counted)
        prototypes = (
            sum(mu * counts[:, None] for mu, counts in counted) / total.clamp(min=1)[:, None]
        )
        present = total > 0
        alphas = [
            mixture([v for v, _ in measured], [h for _, h in measured], i, least)
            for i in range(len(jobs))
        ]
        shares.append(float(sum(alpha[i] for i, alpha in enumerate(alphas)) / len(jobs)))
        for job, alpha, y in zip(jobs, alphas, models, strict=True):
            heads[job.client] = {
                n: sum(a * other[n] for a, other in zip(alpha, models, strict=True)) for n in HEAD
            }
            trained[job.client] = {name: y[name] for name in HEAD}
        x = average([{name: y[name] for name in x} for y in models], weights(world, jobs))

    flat = torch.stack([torch.cat([h[name].flatten() for name in HEAD]) for h in heads.values()])
    server = {
        "prototypes": prototypes,
        "present": present,
        "heads": flat,
        "clients": torch.tensor(list(heads)),
    }
    models = {i: x | heads.get(i, first) for i in range(world.clients)}
    return Book(
        x,
        trained,
        {f"fedpac.{n}": t for n, t in server.items()},
        {"fedpac.own_weight": shares},
        models,
    )
