"""IFCA: keep k models on the server; each client trains the one with the least loss on its data.

Clients with similar data end up with the same model, which is averaged over them alone.

Source: Ghosh, Chung, Yin and Ramchandran, "An Efficient Framework for Clustered Federated
Learning" (NeurIPS 2020), Algorithm 1, with model averaging. Client i receives all k models:

    j_i = argmin_j of the loss of model j on client i's training samples
    client i trains model j_i
    model j <- mean of the models that were trained for it, by samples; unchanged if there is none

A client is scored with the model that has the least loss on its training samples.

Departures from the paper
- Losses are measured in eval mode, without augmentation; of equal losses the first model counts.
- Model 0 is the run's model. The others are copies of it whose layers draw new initial values, by
  PyTorch's rule for each layer, because equal models would stay equal.
- The k models lie in the one vector that travels, so that k models are sent and k uploaded; the
  paper uploads one. The other k - 1 are unchanged in an update.
- The shared model's score is that of model 0.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from raysim.api.declarations import FORWARD, Participation
from raysim.api.method import Method
from raysim.primitives.checks import at_least

if TYPE_CHECKING:
    from raysim.api.declarations import Task
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup
    from raysim.vectors.layout import Entry

# Methods that keep values for each parameter of "model", which here is another model in each job.
PER_PARAMETER = ("scaffold", "fedcm", "feddyn", "fedspeed", "moon", "pfedme", "fedala", "ditto")


def draw_again(model: nn.Module) -> nn.Module:
    """Return a copy of the model with new initial values.

    Raises ValueError if a layer has no rule for them.
    """
    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if not any(True for _ in layer.parameters(recurse=False)):
            continue
        if not hasattr(layer, "reset_parameters"):
            raise ValueError(
                f"model: method 'ifca' cannot draw initial values of {name or 'the model'} "
                f"({type(layer).__name__}), which has no reset_parameters. Choose another model."
            )
        layer.reset_parameters()
    return model


def mean_loss(model: nn.Module, task: Task, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss over all samples, in eval mode."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        losses = [task.objective.losses(model(inputs), labels) for inputs, labels in batches]
    model.train(was_training)
    return float(torch.cat(losses).double().mean())


def copy_network(
    values: Tensor, entries: Sequence[Entry], source: str, target: str, origin: Tensor
) -> None:
    """Copy a network's entries of the vector `origin` to another network's entries of `values`."""
    targets = {entry.path: entry for entry in entries if entry.network == target}
    for entry in entries:
        if entry.network == source and entry.path in targets:
            to = targets[entry.path]
            values[to.start : to.stop] = origin[entry.start : entry.stop]


class IFCA(Method):
    """A method with k models, of which each client trains the one that fits its data best.

    clusters: k, the number of models.
    """

    name = "ifca"
    paper = "Ghosh et al., NeurIPS 2020"

    def __init__(self, clusters: int = 2):
        self.clusters = at_least("method.ifca.clusters", clusters, 1)

    @property
    def _names(self) -> list[str]:
        """Return the names of the k networks."""
        return ["model", *(f"ifca.model{number}" for number in range(1, self.clusters))]

    # --- before the run -----------------------------------------------------------------------
    def setup(self, run: Setup) -> None:
        """Add k - 1 models; with one, the run is FedAvg."""
        for other in PER_PARAMETER:
            run.excludes(
                other, "it keeps values for one model, and clients train one of several models"
            )
        run.needs_whole_model("clients train one of several models")
        if self.clusters == 1:
            run.skip("cost", "begin", "end", "combine", "personalise")
            return
        for number in range(1, self.clusters):
            run.network(f"model{number}", draw_again(run.model))
        run.upload("cluster", 1)
        self._task = run.task

    def cost(self, job: Participation) -> float:
        """Return the forward passes of all models."""
        return FORWARD * self.clusters * job.samples

    # --- a client's job -----------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Choose the model with the smallest loss, and copy it to the place that is trained."""
        losses = [mean_loss(job.networks[name], job.task, job.data()) for name in self._names]
        cluster = losses.index(min(losses))
        job.upload["cluster"] = job.params.new_tensor([cluster])
        job.scratch["counters"] = job.vector.counters.clone()
        if cluster == 0:
            return
        name, layout = self._names[cluster], job.layout
        start = job.start.clone()
        copy_network(start, layout.entries, name, "model", job.start)
        job.start = start
        counters = job.scratch["counters"]
        copy_network(job.vector.counters, layout.counters, name, "model", counters)

    def end(self, job: LocalJob) -> None:
        """Move the trained model to its own place, and model 0 back to the received one."""
        cluster = int(job.upload["cluster"])
        if cluster == 0:
            return
        name, layout, counters = self._names[cluster], job.layout, job.vector.counters
        copy_network(job.params, layout.entries, "model", name, job.params)
        copy_network(job.params, layout.entries, "model", "model", job.broadcast)
        copy_network(counters, layout.counters, "model", name, counters)
        copy_network(counters, layout.counters, "model", "model", job.scratch["counters"])

    def personalise(self, client: PersonalModel) -> None:
        """Load the model with the least loss on the client's training samples."""
        vector = client.vector
        losses = [
            mean_loss(vector.networks[name], self._task, client.data()) for name in self._names
        ]
        name = self._names[losses.index(min(losses))]
        copy_network(vector.data, vector.layout.entries, name, "model", vector.data)
        copy_network(vector.counters, vector.layout.counters, name, "model", vector.counters)

    # --- an aggregation -----------------------------------------------------------------------
    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Average each model over the clients that chose it."""
        clusters = [int(cluster) for cluster in aggregation.uploads("cluster")]
        for number in range(self.clusters):
            server.report[f"share_{number}"] = clusters.count(number) / len(clusters)
        numbers = {name: number for number, name in enumerate(self._names)}
        direction = torch.zeros_like(server.vector)
        for entry in server.layout.entries:
            # None: a network that all clients train.
            index = numbers.get(entry.network)
            is_trained = [index is None or cluster == index for cluster in clusters]
            change = _mean_change(entry, aggregation, server, is_trained)
            direction[entry.start : entry.stop] = change
        return direction


def _mean_change(
    entry: Entry, aggregation: Aggregation, server: ServerView, is_trained: Sequence[bool]
) -> Tensor:
    """Return the weighted mean change of one tensor in the updates that trained it, else 0."""
    at = slice(entry.start, entry.stop)
    total, divisor = torch.zeros_like(server.vector[at]), 0.0
    for number, update in enumerate(aggregation.updates):
        if not is_trained[number]:
            continue
        change = aggregation.deltas[number][at]
        # Statistics are averaged as values, because a stale change may not fit.
        if not entry.parameter:
            change = change + aggregation.base(update)[at] - server.vector[at]
        total += aggregation.weights[number] * change
        divisor += aggregation.weights[number]
    if not divisor:
        return total
    return total / divisor
