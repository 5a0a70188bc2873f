"""Ditto: beside the shared model every client trains a personal one, which is drawn to what it received.

Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through Personalization" (ICML 2021), Algorithm 1.
The shared model trains as the other methods of the list say; client k's own model v_k starts from the initial model x^0
and makes S steps in each participation, on batches of its own:

    v_k <- v_k - lr_v (grad F_k(v_k) + lam (v_k - x^t))

The client is scored with v_k, and the shared model as `accuracy_shared`.

Choices where the source is silent
- v_k trains after the shared model, with x^t as it was received. F_k is the cross-entropy alone, without the terms of
  other methods. The optimiser is the run's (momentum, weight decay, clipping), new in each participation; the pull
  enters before weight decay and momentum.
- S is the number of steps that the shared model makes. The batches are shuffled passes over the client's samples; a
  rest of one sample is left out, for BatchNorm knows no variance of it.
- The pull covers the parameters that travel. BatchNorm's running statistics are v_k's own; what another method keeps on
  the client (FedBN) is not pulled. A client that never trained has v_k = x^0.
- Where v_k diverges the participation counts as failed, as any result that is not finite.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from raysim.api.declarations import Cost, Network, Participation, Task
from raysim.api.hooked_method import HookedMethod
from raysim.methods.fedprox import proximal_gradient
from raysim.primitives.checks import above, at_least
from raysim.vectors.optimizer import LocalOptimizer

if TYPE_CHECKING:
    from raysim.api.context import Context, Own
    from raysim.vectors.layout import Entry, Layout

PERSONAL, SHARED = "ditto.model", "model"


def _trained(layout: Layout) -> list[tuple[Entry, Entry]]:
    """The personal model's parameters, each with its counterpart in the shared model."""
    counterparts = {entry.path: entry for entry in layout.within([SHARED])}
    return [(entry, counterparts[entry.path]) for entry in layout.within([PERSONAL])]


class Ditto(HookedMethod):
    """lam weighs the pull; 0 is local training from the initial model. lr_factor: on local.lr, for v_k."""

    name = "ditto"
    paper = "Li et al., ICML 2021"
    excludes: ClassVar[Mapping[str, str]] = {
        "local": "it draws personal models to a shared one, and local training shares none"
    }

    def __init__(self, lam: float = 1.0, lr_factor: float = 1.0):
        self.lam = at_least("method.ditto.lam", lam, 0.0)
        self.lr_factor = above("method.ditto.lr_factor", lr_factor, 0.0)

    def networks(self, task: Task, model: nn.Module) -> Mapping[str, Network]:
        """v_k, with the initial values of the model."""
        return {PERSONAL: Network(copy.deepcopy(model), personal=True)}

    def cost(self, job: Participation) -> Cost:
        """The personal model's steps, as many as the shared one's."""
        return Cost(samples=job.trained)

    def finish(self, ctx: Context) -> None:
        """S steps of the personal model, which lies in the vector's personal part."""
        network, local = ctx.networks[PERSONAL].train(), ctx.trainer.local
        pairs, optimizer = _trained(ctx.vector.layout), LocalOptimizer(local.settings())
        params = ctx.vector.tensors(own for own, _ in pairs)
        values = [ctx.vector.data[own.start : own.stop].view(own.shape) for own, _ in pairs]
        for inputs, labels in self._batches(ctx):
            loss = ctx.trainer.task.objective.loss(network(inputs), labels)
            grads = list(torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True))
            for grad, value, (_, shared) in zip(grads, values, pairs, strict=True):
                if not shared.personal:
                    received = ctx.received[shared.start : shared.stop].view(shared.shape)
                    grad.add_(proximal_gradient(value, received, self.lam))
            if local.clip:
                norm = torch.cat([grad.flatten() for grad in grads]).norm()
                torch._foreach_mul_(grads, (local.clip / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step(values, grads, ctx.rate * self.lr_factor)

    def _batches(self, ctx: Context) -> Iterator[tuple[Tensor, Tensor]]:
        """S batches of the client's samples, shuffled anew in every pass."""
        assert ctx.plan is not None, "a job has a plan before it ends"
        rows, size = ctx.trainer.partition.rows(ctx.client), ctx.trainer.local.batch
        order, augment = ctx.stream("ditto.batches"), ctx.stream("ditto.augment")
        left = rows[:0]
        for _ in range(ctx.plan.steps):
            if len(left) < min(2, size, len(rows)):
                left = order.permutation(rows)
            yield ctx.trainer.gather(left[:size], augment)
            left = left[size:]

    def personalise(self, own: Own) -> None:
        """Score v_k."""
        tensors = own.vector.named(own.vector.data, own.vector.counters)
        for name, value in tensors.items():
            if name.startswith(f"{PERSONAL}."):
                tensors[f"{SHARED}.{name.removeprefix(f'{PERSONAL}.')}"].copy_(value)
