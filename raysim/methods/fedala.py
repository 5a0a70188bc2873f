"""FedALA: each client learns, for each parameter, how much of the received model to take.

Source: Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning" (AAAI
2023), Algorithm 1. x is the received model, y' the model that the client trained last, and L the
client's loss. W has a weight for each parameter of the model's last p layers (the setting
`layers`), at first 1; eta is the learning rate of W:

    theta = y' + (x - y') W
    W <- clip(W - eta (dL/dtheta) (x - y'), 0, 1)

A client's first job trains from x. Each later job first learns W on a share of the client's
samples, and then trains from theta in the last p layers and from x elsewhere.

When a client learns W for the first time, it makes passes until the losses of the last ten passes
have a standard deviation below 0.1. Each later job makes one pass.

Departures from the paper
- A layer is a module with parameters that travel. With p = 1 only the head is mixed.
- W is learnt in eval mode and without augmentation. Each job draws the samples again.
- The loss of a pass is that of its last batch. The first learning makes 11 to 100 passes; virtual
  time counts 100.
- Clients are scored with theta for the current x. Clients without W are scored with x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from raysim.api.declarations import Participation
from raysim.api.method import Method
from raysim.primitives.checks import above, at_least, in_range

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.setup import Setup
    from raysim.vectors.layout import Entry, Layout

MAX_PASSES = 100
COMPARED_PASSES = 10
CONVERGED_DEVIATION = 0.1


def mixed(old: Tensor, new: Tensor, weights: Tensor) -> Tensor:
    """Return old + (new - old) * weights: a mixture of last and received parameters.

    old: the parameters that the client trained last.
    new: the parameters that the client received now.
    weights: a mixing weight for each parameter.
    """
    return old + (new - old) * weights


def updated_weights(
    weights: Tensor, gradient: Tensor, old: Tensor, new: Tensor, rate: float
) -> Tensor:
    """Return the mixing weights after one gradient step, clipped to [0, 1].

    weights: a mixing weight for each parameter.
    gradient: the loss's gradient with respect to the mixed parameters.
    old: the client's last parameters.
    new: the received parameters.
    """
    return (weights - rate * gradient * (new - old)).clamp(0, 1)


def has_converged(losses: Sequence[float]) -> bool:
    """Return True if the mixing weights have converged.

    They have converged if there are at least eleven losses, and the last ten of these have a
    standard deviation below 0.1.
    losses: the loss of each pass so far.
    """
    if len(losses) <= COMPARED_PASSES:
        return False
    return float(np.std(losses[-COMPARED_PASSES:])) < CONVERGED_DEVIATION


def top_entries(layout: Layout, layers: int) -> list[Entry]:
    """Return the positions of the shared parameters in the model's last layers.

    layout: the positions of all tensors in the vector.
    layers: the number of last layers; 1 is only the head.
    """
    entries = [entry for entry in layout.entries_in(["model"]) if not entry.personal]
    modules = list(dict.fromkeys(entry.path.rpartition(".")[0] for entry in entries))
    top = modules[-layers:]
    return [entry for entry in entries if entry.path.rpartition(".")[0] in top]


def parts_of(vector: Tensor, entries: Sequence[Entry]) -> Tensor:
    """Return a flat copy of the values that some tensors have in a vector.

    entries: the positions of these tensors.
    """
    parts = [vector[entry.start : entry.stop] for entry in entries]
    return torch.cat(parts) if parts else vector[:0].clone()


def write_parts(vector: Tensor, entries: Sequence[Entry], values: Tensor) -> None:
    """Write the values of some tensors into a vector, in place.

    entries: the positions of these tensors.
    values: the values as one flat vector, as `parts_of` returns them.
    """
    sizes = [entry.stop - entry.start for entry in entries]
    for entry, part in zip(entries, values.split(sizes), strict=True):
        vector[entry.start : entry.stop] = part


class FedALA(Method):
    """A method in which each client learns how much of the received model it uses.

    layers: the number of top layers with learnt mixing weights.
    share: the share of the client's samples on which the weights are learnt.
    rate: the learning rate of the weights.
    """

    name = "fedala"
    paper = "Zhang et al., AAAI 2023"

    def __init__(self, layers: int = 1, share: float = 0.8, rate: float = 1.0):
        self.layers = at_least("method.fedala.layers", layers, 1)
        self.share = in_range("method.fedala.share", share, above=0, most=1)
        self.rate = above("method.fedala.rate", rate, 0.0)

    def setup(self, run: Setup) -> None:
        """Declare the client state: the trained top layers and their mixing weights.

        Both are empty before the client's first job.
        """
        run.needs("gradients")
        run.client_state("trained", lambda samples: torch.empty(0))
        run.client_state("weights", lambda samples: torch.empty(0))

    def cost(self, job: Participation) -> float:
        """Return the cost of learning the mixing weights, in trained samples.

        A client's first job costs nothing. The cost of the second job is an upper bound, because
        the number of passes is not known before.
        """
        if not job.earlier_jobs:
            return 0.0
        # Until two jobs of the client were aggregated, its next job may be the second one.
        passes = 1 if job.aggregated_jobs > 1 else MAX_PASSES
        return passes * self._subset_size(job.samples)

    def begin(self, job: LocalJob) -> None:
        """Learn the mixing weights and start from the mixture, if the client has trained before."""
        old = job.state["trained"]
        if not len(old):
            return
        entries = top_entries(job.layout, self.layers)
        new = parts_of(job.params, entries)
        weights = self._learn_weights(job, entries, old, new)
        start = job.start.clone()
        write_parts(start, entries, mixed(old, new, weights))
        job.start = start
        job.state["weights"] = weights

    def end(self, job: LocalJob) -> None:
        """Store the trained top layers in the client state."""
        job.state["trained"] = parts_of(job.params, top_entries(job.layout, self.layers))

    def personalise(self, client: PersonalModel) -> None:
        """Load the mixture of the current version and the client's last model for scoring.

        Nothing changes for a client that has no mixing weights yet.
        """
        weights = client.state["weights"]
        if not len(weights):
            return
        vector = client.vector
        entries = top_entries(vector.layout, self.layers)
        new = parts_of(vector.data, entries)
        write_parts(vector.data, entries, mixed(client.state["trained"], new, weights))

    def _learn_weights(
        self, job: LocalJob, entries: Sequence[Entry], old: Tensor, new: Tensor
    ) -> Tensor:
        """Train the mixing weights on a part of the client's samples; return the weights.

        entries: the positions of the top layers' parameters.
        old, new: the values of these parameters: those that the client trained last, and the
        received ones.
        """
        weights: Tensor = job.state["weights"]
        is_first_time = not len(weights)
        if is_first_time:
            weights = torch.ones_like(old)
        batches = self._batches(job)
        losses: list[float] = []
        job.model.eval()
        for _ in range(MAX_PASSES if is_first_time else 1):
            for inputs, labels in batches:
                top = mixed(old, new, weights).requires_grad_()
                loss = self._loss(job, entries, top, inputs, labels)
                (gradient,) = torch.autograd.grad(loss, top)
                weights = updated_weights(weights, gradient, old, new, self.rate)
            losses.append(float(loss.detach()))
            if has_converged(losses):
                break
        job.model.train()
        return weights

    @staticmethod
    def _loss(
        job: LocalJob, entries: Sequence[Entry], top: Tensor, inputs: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the loss of a batch when `top` replaces the top layers of the received model.

        entries: the positions of the top layers' parameters.
        top: these parameters in one flat vector, in the order of `entries`.
        """
        parts = top.split([entry.stop - entry.start for entry in entries])
        tensors = {
            entry.path: part.view(entry.shape) for entry, part in zip(entries, parts, strict=True)
        }
        outputs = functional_call(job.model, tensors, (inputs,))
        loss: Tensor = job.task.objective.loss(outputs, labels)
        return loss

    def _batches(self, job: LocalJob) -> list[tuple[Tensor, Tensor]]:
        """Return the batches that train the mixing weights; all passes use the same ones."""
        order = job.stream("subset").permutation(job.rows)
        rows = order[: self._subset_size(len(order))]
        size = job.local.batch
        return [job.gather(rows[first : first + size]) for first in range(0, len(rows), size)]

    def _subset_size(self, samples: int) -> int:
        return max(1, int(self.share * samples))
