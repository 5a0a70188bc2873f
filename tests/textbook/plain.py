"""Functions that most textbooks of methods need: the network, gradients, SGD, weighted means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.world import Book, Job, Params, World

EXTRACTOR, HEAD = "model.extractor", "model.head"


def features(p: Mapping[str, Tensor], x: Tensor, training: bool = True) -> Tensor:
    """Return the features [B, F]: flatten, linear, BatchNorm if there is one, ReLU.

    training: True: normalise with the statistics of the batch, and update the statistics in `p`.
    """
    hidden = F.linear(x.flatten(1), p[f"{EXTRACTOR}.1.weight"], p[f"{EXTRACTOR}.1.bias"])
    norm = f"{EXTRACTOR}.2"
    if f"{norm}.weight" in p:
        mean, var = p[f"{norm}.running_mean"], p[f"{norm}.running_var"]
        if training:
            p[f"{norm}.num_batches_tracked"].add_(1)
        hidden = F.batch_norm(hidden, mean, var, p[f"{norm}.weight"], p[f"{norm}.bias"], training)
    return hidden.relu()


def head(p: Mapping[str, Tensor], z: Tensor) -> Tensor:
    """Return the logits [B, C] that the head computes from features z [B, F].

    p: a model's tensors by name. The head's bias is added only if p contains it.
    """
    return F.linear(z, p[f"{HEAD}.weight"], p.get(f"{HEAD}.bias"))


def logits(p: Mapping[str, Tensor], x: Tensor, training: bool = True) -> Tensor:
    """Return the logits [B, C] of inputs."""
    return head(p, features(p, x, training))


def other_class_logits(z: Tensor, y: Tensor) -> Tensor:
    """Return the logits without the logit of the true class, as a new tensor [B, C - 1].

    z: the logits of B samples for C classes, [B, C].
    y: the true class of each sample, [B].
    """
    return z[F.one_hot(y, z.shape[1]) == 0].view(len(y), -1)


def is_buffer(name: str) -> bool:
    """Return whether a tensor of this name is a buffer of BatchNorm and not a parameter."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def trainable(p: Mapping[str, Tensor], prefix: str = "model") -> list[str]:
    """Return the names of the parameters of a network or module."""
    return [name for name in p if name.startswith(f"{prefix}.") and not is_buffer(name)]


def copy_for_training(p: Mapping[str, Tensor]) -> Params:
    """Return a copy whose parameters require a gradient."""
    return {
        name: t.clone().requires_grad_(t.is_floating_point() and not is_buffer(name))
        for name, t in detach(p).items()
    }


def detach(p: Mapping[str, Tensor]) -> Params:
    """Return the same values without gradients."""
    return {name: tensor.detach() for name, tensor in p.items()}


def gradients(loss: Tensor, p: Mapping[str, Tensor], names: Iterable[str]) -> Params:
    """Return the gradient of a loss, zero for parameters that it does not depend on."""
    names = list(names)
    parameters = [p[name] for name in names]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    result = {}
    for name, grad in zip(names, grads, strict=True):
        result[name] = torch.zeros_like(p[name]) if grad is None else grad
    return result


class Sgd:
    """SGD with momentum and weight decay as in PyTorch, and with gradient clipping, by hand.

    clip: the largest norm of all gradients as one vector. Larger gradients are scaled to this norm
    before weight decay is added. 0 scales none.
    """

    def __init__(
        self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, clip: float = 0.0
    ):
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.clip = clip
        self.buffers: Params = {}

    def step(self, p: Params, grads: Mapping[str, Tensor]) -> None:
        """Step the parameters that have a gradient."""
        if self.clip:
            norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
            factor = min(1.0, self.clip / (float(norm) + 1e-6))
            grads = {name: grad * factor for name, grad in grads.items()}
        for name, grad in grads.items():
            direction = grad + self.weight_decay * p[name].detach()
            if self.momentum:
                buffer = self.buffers.get(name, torch.zeros_like(direction))
                direction = self.momentum * buffer + direction
                self.buffers[name] = direction
            p[name].data -= self.lr * direction


def optimizer(world: World, job: Job, factor: float = 1.0) -> Sgd:
    """Return a new SGD optimizer for a job, with the settings of the run.

    Its learning rate is factor * local.lr * local.lr_decay^v, where v is the version that the job
    received.
    """
    local = world.local
    return Sgd(
        local.lr * local.lr_decay**job.version * factor,
        local.momentum,
        local.weight_decay,
        local.clip,
    )


def weights(world: World, jobs: Sequence[Job]) -> list[float]:
    """Return the weight of each job before normalisation.

    With `world.weighting` "samples", the weight is the job's number of samples. With "uniform",
    every weight is 1.
    """
    return [float(job.samples) if world.weighting == "samples" else 1.0 for job in jobs]


def mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of tensors with these weights; integer tensors give their maximum."""
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).amax(0)
    total = torch.zeros_like(tensors[0])
    for weight, tensor in zip(weights, tensors, strict=True):
        total = total + weight * tensor
    return total / sum(weights)


def average(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Params:
    """Return the weighted mean of models, tensor by tensor."""
    return {name: mean([model[name].detach() for model in models], weights) for name in models[0]}


def apply_mean_change(
    x: Params,
    jobs: Sequence[Job],
    models: Sequence[Params],
    received: Sequence[Params],
    weights: Sequence[float],
) -> Params:
    """Return x plus the weighted mean change of the models; buffers are averaged.

    models: the trained model of each job.
    received: all model versions so far. A model's change is its difference from the version that
    its job received.
    """
    changed = []
    for job, model in zip(jobs, models, strict=True):
        base = received[job.version]
        changed.append({name: x[name] + model[name].detach() - base[name] for name in trainable(x)})
    return {**average(models, weights), **average(changed, weights)}


class RowMean:
    """The mean loss over all samples in all batches on which a client trained.

    A sample counts once for each batch that contains it.
    """

    def __init__(self) -> None:
        self.total, self.rows = 0.0, 0

    def add(self, loss: Tensor, inputs: Tensor) -> None:
        """Add a batch.

        loss: the mean loss of the batch.
        inputs: the inputs of the batch, one for each sample.
        """
        self.total += len(inputs) * float(loss.detach())
        self.rows += len(inputs)


def row_mean(clients: Iterable[RowMean]) -> float:
    """Return the mean loss over all samples in all batches of a round.

    A sample counts once for each batch that contains it.
    clients: the mean loss of each client of the round.
    """
    clients = list(clients)
    return sum(client.total for client in clients) / sum(client.rows for client in clients)


# The loss of a batch: from (parameters, step, inputs, labels).
Loss = Callable[[Params, int, Tensor, Tensor], Tensor]


def cross_entropy(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of the network on a batch.

    step: not used.
    x: inputs [B, ...].
    y: classes [B].
    """
    return F.cross_entropy(logits(p, x), y)


def train(world: World, job: Job, received: Params, loss: Loss = cross_entropy) -> Params:
    """Train the received model on the batches of a job, and return the trained model."""
    p, sgd = copy_for_training(received), optimizer(world, job)
    for step, (x, y) in enumerate(job.batches):
        sgd.step(p, gradients(loss(p, step, x, y), p, trainable(p)))
    return p


def run_rounds(world: World, client: Callable[[Job, Params], Params]) -> Book:
    """Run FedAvg's rounds.

    client(job, received): the model that the client has trained from the received one.
    """
    x = dict(world.start)
    for jobs in world.rounds:
        x = average([client(job, x) for job in jobs], weights(world, jobs))
    return Book(x)


# A local loss in two parts: the one in the history's train_loss, and a term that is added to it.
Parts = Callable[[Params, int, Tensor, Tensor], tuple[Tensor, Tensor | float]]


def run_with_loss(
    world: World,
    losses: Callable[[Job, Params], Parts],
    trained: Callable[[Job, Params], None] = lambda job, p: None,
) -> Book:
    """Compute a run of FedAvg with a different local loss, and report only the task loss.

    The column train_loss has the mean task loss of each round, over all samples of all steps.
    losses(job, received): returns a function of a batch that computes the task loss and a penalty.
    trained(job, model): is called after each job.
    """
    seen: dict[tuple[int, int], RowMean] = {}

    def client(job: Job, received: Params) -> Params:
        parts, reported = losses(job, received), seen.setdefault((job.client, job.turn), RowMean())

        def loss(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
            task, term = parts(p, step, x, y)
            reported.add(task, x)
            return task + term

        p = train(world, job, received, loss)
        trained(job, p)
        return p

    book = run_rounds(world, client)
    means = [row_mean([seen[job.client, job.turn] for job in jobs]) for jobs in world.rounds]
    return replace(book, columns={"train_loss": means})
