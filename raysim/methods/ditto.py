"""Ditto: each client also trains a personal model, which is pulled to the received model.

Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization" (ICML 2021),
Algorithm 1. Client k's personal model v_k starts from the initial model. x^t is the received model,
F_k the client's loss, lr_v the learning rate of v_k, and lam the strength of the pull. Each step is

    v_k <- v_k - lr_v (grad F_k(v_k) + lam (v_k - x^t))

The client is scored with v_k. The shared model's score is `accuracy_shared`.

Departures from the paper
- A job first trains the shared model, then v_k for as many steps on other batches. v_k skips an
  epoch's last batch if it has one sample, unless all batches have one.
- F_k is the task loss without terms of other methods. The optimizer of v_k has the run's settings
  and starts again in each job. The pull is added before weight decay and momentum.
- There is no pull on BatchNorm's running statistics, nor on parameters that another method keeps on
  the client (FedBN).
- If v_k diverges, the job fails.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.declarations import Participation
from raysim.api.method import Method
from raysim.methods.fedprox import proximal_gradient
from raysim.primitives.checks import above, at_least
from raysim.vectors.optimizer import LocalOptimizer

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.setup import Setup
    from raysim.vectors.layout import Entry, Layout

PERSONAL, SHARED = "ditto.model", "model"


def _pairs(layout: Layout) -> list[tuple[Entry, Entry]]:
    """Pair each parameter of the personal model with the shared model's parameter of the same name.

    Return the positions of the two parameters in the vector, as (personal, shared).
    layout: the layout of the vector, which contains both models.
    """
    counterparts = {entry.path: entry for entry in layout.entries_in([SHARED])}
    return [(entry, counterparts[entry.path]) for entry in layout.entries_in([PERSONAL])]


class Ditto(Method):
    """A method in which each client also trains a personal model near the received model.

    lam: the weight of the pull to the received model; 0 is local training from the initial model.
    lr_factor: factor on local.lr for the personal model.
    """

    name = "ditto"
    paper = "Li et al., ICML 2021"

    def __init__(self, lam: float = 1.0, lr_factor: float = 1.0):
        self.lam = at_least("method.ditto.lam", lam, 0.0)
        self.lr_factor = above("method.ditto.lr_factor", lr_factor, 0.0)

    def setup(self, run: Setup) -> None:
        """Add the personal model, a private network with the initial values of the shared model."""
        run.needs("gradients")
        run.excludes(
            "local", "it pulls personal models to a shared model, but local training has none"
        )
        run.network("model", copy.deepcopy(run.model), private=True)

    def cost(self, job: Participation) -> float:
        """Return the cost of training the personal model, in trained samples.

        It is equal to the cost of training the shared model.
        """
        return job.trained_samples

    def end(self, job: LocalJob) -> None:
        """Train the personal model for as many steps as the shared model."""
        network = job.network("model").train()
        pairs = _pairs(job.layout)
        params = job.vector.tensors(personal for personal, _ in pairs)
        values = [job.params[entry.start : entry.stop].view(entry.shape) for entry, _ in pairs]
        optimizer = LocalOptimizer(job.local.settings())
        for inputs, labels in self._batches(job):
            loss = job.task.objective.loss(network(inputs), labels)
            grads = list(
                torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
            )
            for grad, value, (_, shared) in zip(grads, values, pairs, strict=True):
                if not shared.personal:
                    received = job.broadcast[shared.start : shared.stop].view(shared.shape)
                    grad.add_(proximal_gradient(value, received, self.lam))
            if job.local.clip:
                norm = torch.cat([grad.flatten() for grad in grads]).norm()
                torch._foreach_mul_(grads, (job.local.clip / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step(values, grads, job.rate * self.lr_factor)

    def _batches(self, job: LocalJob) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a batch for each step of the personal model; shuffle before each epoch."""
        rows, size = job.rows, job.local.batch
        order, augment = job.stream("batches"), job.stream("augment")
        left = rows[:0]
        for _ in range(job.plan.steps):
            if len(left) < min(2, size, len(rows)):
                left = order.permutation(rows)
            yield job.gather(left[:size], augment)
            left = left[size:]

    def personalise(self, client: PersonalModel) -> None:
        """Load the personal model into the scored model."""
        vector = client.vector
        tensors = vector.named(vector.data, vector.counters)
        for name, value in tensors.items():
            if name.startswith(f"{PERSONAL}."):
                path = name.removeprefix(f"{PERSONAL}.")
                tensors[f"{SHARED}.{path}"].copy_(value)
