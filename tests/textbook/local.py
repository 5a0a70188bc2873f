"""Local training: each client trains a model of its own, and nothing is averaged."""

from __future__ import annotations

from typing import Any

import torch

from textbook.plain import copy_for_training, cross_entropy, detach, gradients, trainable
from textbook.world import Book, Params, World


def local(world: World, keep: bool = False) -> Book:
    """Train each client's own model, which starts from the initial model of the run.

    keep: True: a client has one optimizer for all its jobs. False: each job has a new optimizer.
    """
    models = {client: copy_for_training(world.start) for client in range(world.clients)}
    optimizers = dict[int, Optimizer]()
    for job in (job for jobs in world.rounds for job in jobs):
        p = models[job.client]
        if not keep or job.client not in optimizers:
            optimizers[job.client] = Optimizer(world.local)
        for step, (x, y) in enumerate(job.batches):
            grads = gradients(cross_entropy(p, step, x, y), p, trainable(p))
            optimizers[job.client].step(
                p, grads, world.local.lr * world.local.lr_decay**job.version
            )
    private = {client: detach(models[client]) for client in optimizers}
    for client, optimizer in optimizers.items() if keep else ():
        private[client] |= {
            f"local.kept.task/{name}": value for name, value in optimizer.kept().items()
        }
    return Book({}, private, own={client: detach(model) for client, model in models.items()})


class Optimizer:
    """SGD as PyTorch defines it, Adam (Kingma and Ba 2015, Algorithm 1) or AdamW.

    Adam and AdamW have their default constants.
    """

    def __init__(self, settings: Any):
        self.settings, self.steps = settings, 0
        self.first, self.second = Params(), Params()

    def step(self, p: Params, grads: Params, rate: float) -> None:
        """Change the parameters p by their gradients.

        rate: the learning rate.
        """
        settings = self.settings
        self.steps += 1
        for name, grad in grads.items():
            if settings.optimizer == "adamw":
                p[name].data *= 1 - rate * settings.weight_decay
                g = grad
            else:
                g = grad + settings.weight_decay * p[name].detach()
            m = self.first.get(name, torch.zeros_like(g))
            if settings.optimizer in ("adam", "adamw"):
                v = self.second.get(name, torch.zeros_like(g))
                m = 0.9 * m + 0.1 * g
                v = 0.999 * v + 0.001 * g**2
                self.second[name] = v
                g = m / (1 - 0.9**self.steps) / ((v / (1 - 0.999**self.steps)).sqrt() + 1e-8)
            else:
                m = settings.momentum * m + g
                g = g + settings.momentum * m if settings.nesterov else m
            self.first[name] = m
            p[name].data -= rate * g

    def kept(self) -> Params:
        """Return the state of the optimizer: the number of steps, and each moment as one vector."""
        buffers = {"first": self.first, "second": self.second}
        flat = {
            name: torch.cat([t.flatten() for t in parts.values()])
            for name, parts in buffers.items()
            if parts
        }
        return {"steps": torch.tensor([self.steps]), **flat}
