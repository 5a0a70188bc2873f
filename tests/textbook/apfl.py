"""APFL: Deng et al. 2020, Algorithm 1: FedAvg, with a second model of each client.

w: the client's copy of the shared model. v: the model that stays on the client. m = alpha v + (1 -
alpha) w: the model that is scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textbook.plain import (
    average,
    copy_for_training,
    cross_entropy,
    detach,
    gradients,
    is_buffer,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def mixture(v: Params, w: Params, alpha: float) -> Params:
    """Return m = alpha v + (1 - alpha) w, whose parameters require a gradient.

    BatchNorm's statistics are the tensors of v themselves, so a forward pass of m updates them in
    v.
    """
    mixed = {}
    for name, tensor in v.items():
        if is_buffer(name):
            mixed[name] = tensor
        else:
            mixed[name] = (alpha * tensor + (1 - alpha) * w[name]).detach().requires_grad_()
    return mixed


def apfl(world: World, alpha: float, adaptive: bool = True) -> Book:
    """Compute a run of APFL: FedAvg on a model w, and a model v that stays on each client.

    v is trained through the mixture alpha v + (1 - alpha) w, whose gradient is computed before w
    changes.
    alpha: the first alpha of every client.
    adaptive: True begins each job with a gradient step on the client's alpha.
    """
    x = {name: tensor for name, tensor in world.start.items() if not name.startswith("apfl.")}
    v = {client: copy_for_training(x) for client in range(world.clients)}
    alphas = dict.fromkeys(v, alpha)

    def client(job: Job) -> Params:
        w, own = copy_for_training(x), v[job.client]
        own_sgd, shared_sgd = optimizer(world, job), optimizer(world, job)
        if adaptive:
            before = alphas[job.client]
            m = mixture({name: tensor.clone() for name, tensor in own.items()}, w, before)
            slope = gradients(cross_entropy(m, 0, *job.batches[0]), m, trainable(m))
            inner = sum(
                float(((own[name] - w[name]).detach() * grad).sum()) for name, grad in slope.items()
            )
            alphas[job.client] = min(1.0, max(0.0, before - shared_sgd.lr * inner))
        share = alphas[job.client]
        for inputs, labels in job.batches:
            m = mixture(own, w, share)
            of_mixture = gradients(cross_entropy(m, 0, inputs, labels), m, trainable(m))
            of_shared = gradients(cross_entropy(w, 0, inputs, labels), w, trainable(w))
            own_sgd.step(own, {name: share * grad for name, grad in of_mixture.items()})
            shared_sgd.step(w, of_shared)
        return detach(w)

    for jobs in world.rounds:
        x = average([client(job) for job in jobs], weights(world, jobs))
    private: dict[int, dict[str, Tensor]] = {}
    for i in {job.client for jobs in world.rounds for job in jobs}:
        private[i] = {f"apfl.{name}": tensor for name, tensor in detach(v[i]).items()}
        private[i]["apfl.alpha#float"] = torch.tensor(alphas[i], dtype=torch.float64)
    own_models = {i: detach(mixture(v[i], x, alphas[i])) for i in v}
    return Book(x, private, own=own_models)
