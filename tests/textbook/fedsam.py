"""FedSAM: Qu et al. 2022, Algorithm 1; FedASAM: Caldarola et al. 2022; MoFedSAM: FedSAM with FedCM.

F: the loss of a batch. p: the parameters. g: the gradient of F at p. e: a small move uphill, which
follows from g. A step uses the gradient at p + e, where F is higher. Only the computation of g
updates BatchNorm's statistics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textbook.plain import (
    average,
    copy_for_training,
    cross_entropy,
    gradients,
    mean,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def uphill(p: Params, x: Tensor, y: Tensor, rho: float, eta: float | None) -> Params:
    """Return the gradient of a batch's loss at p + e, where the loss is higher than at p.

    Let g be the gradient at p.
    eta: None (FedSAM): e = rho g / ||g||. A number (FedASAM): e = rho t^2 g / ||t g||, elementwise,
    with t = |p| + eta.
    """
    names = trainable(p)
    g = gradients(cross_entropy(p, 0, x, y), p, names)
    scale = {n: torch.ones_like(g[n]) if eta is None else p[n].detach().abs() + eta for n in names}
    norm = torch.stack([(scale[n] * g[n]).square().sum() for n in names]).sum().sqrt()
    moved = copy_for_training(
        p | {n: p[n].detach() + rho * scale[n] ** 2 * g[n] / norm for n in names}
    )
    return gradients(cross_entropy(moved, 0, x, y), moved, names)


def fedsam(world: World, rho: float, eta: float | None = None, mu: float = 0.0) -> Book:
    """Compute a run of FedSAM: FedAvg with local gradients from a point of higher loss.

    rho, eta: arguments of `uphill`.
    mu: the weight of FedProx's gradient mu (p - x), for parameters p and received parameters x.
    """
    shared = {name: tensor for name, tensor in world.start.items() if name not in world.personal}
    personal = {
        client: {name: world.start[name] for name in world.personal}
        for client in range(world.clients)
    }

    def client(job: Job) -> Params:
        p, sgd = copy_for_training(shared | personal[job.client]), optimizer(world, job)
        for x, y in job.batches:
            grads = uphill(p, x, y, rho, eta)
            for name in trainable(shared):
                grads[name] = grads[name] + mu * (p[name].detach() - shared[name])
            sgd.step(p, grads)
        return {name: tensor.detach() for name, tensor in p.items()}

    for jobs in world.rounds:
        models = [client(job) for job in jobs]
        personal |= {
            job.client: {n: y[n] for n in world.personal}
            for job, y in zip(jobs, models, strict=True)
        }
        shared = average([{name: y[name] for name in shared} for y in models], weights(world, jobs))
    took_part = {job.client for jobs in world.rounds for job in jobs}
    private = {i: personal[i] for i in took_part} if world.personal else {}
    return Book(shared, private, own={i: shared | personal[i] for i in personal})


def mofedsam(world: World, rho: float, beta: float) -> Book:
    """Compute a run of MoFedSAM: FedSAM's gradients, mixed with FedCM's server direction.

    The direction is the weighted mean of (x - y) / (eta K) over the clients of the last round. x
    and y are the received and trained parameters, eta the learning rate, and K the number of steps.
    rho: an argument of `uphill`.
    beta: the weight of the gradient, which includes weight decay. The weight of the direction is
    1 - beta.
    """
    x, names = dict(world.start), trainable(world.start)
    direction = {name: torch.zeros_like(x[name]) for name in names}

    def client(job: Job) -> tuple[Params, Params]:
        p, sgd = copy_for_training(x), optimizer(world, job)
        decay, sgd.weight_decay = sgd.weight_decay, 0.0
        for batch in job.batches:
            g = uphill(p, *batch, rho, None)
            sgd.step(
                p,
                {
                    n: beta * (g[n] + decay * p[n].detach()) + (1 - beta) * direction[n]
                    for n in names
                },
            )
        return p, {n: (x[n] - p[n].detach()) / (sgd.lr * len(job.batches)) for n in names}

    for jobs in world.rounds:
        trained, shares = [client(job) for job in jobs], weights(world, jobs)
        direction = {n: mean([moved[n] for _, moved in trained], shares) for n in names}
        x = average([p for p, _ in trained], shares)
    return Book(x, server={"fedcm.direction": torch.cat([direction[n].flatten() for n in names])})
