"""The few lines of FedAvg that most textbooks share: a network, a gradient, SGD, a weighted mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.world import Book, Job, Params, World

EXTRACTOR, HEAD = "model.extractor", "model.head"


def features(p: Mapping[str, Tensor], x: Tensor, training: bool = True) -> Tensor:
    """Flatten, linear, BatchNorm if there is one (its statistics in `p` move when training), ReLU: [B, F]."""
    hidden = F.linear(x.flatten(1), p[f"{EXTRACTOR}.1.weight"], p[f"{EXTRACTOR}.1.bias"])
    norm = f"{EXTRACTOR}.2"
    if f"{norm}.weight" in p:
        mean, var = p[f"{norm}.running_mean"], p[f"{norm}.running_var"]
        if training:
            p[f"{norm}.num_batches_tracked"].add_(1)
        hidden = F.batch_norm(hidden, mean, var, p[f"{norm}.weight"], p[f"{norm}.bias"], training)
    return hidden.relu()


def head(p: Mapping[str, Tensor], z: Tensor) -> Tensor:
    """Features [B, F] to logits [B, C]; the bias may be missing."""
    return F.linear(z, p[f"{HEAD}.weight"], p.get(f"{HEAD}.bias"))


def logits(p: Mapping[str, Tensor], x: Tensor, training: bool = True) -> Tensor:
    """Inputs to logits [B, C]."""
    return head(p, features(p, x, training))


def untrue(z: Tensor, y: Tensor) -> Tensor:
    """Of logits [B, C], those of the classes that are not the true one: [B, C - 1]."""
    return z[F.one_hot(y, z.shape[1]) == 0].view(len(y), -1)


def is_buffer(name: str) -> bool:
    """Whether a tensor of that name is a statistic and no parameter."""
    return name.rpartition(".")[2] in ("running_mean", "running_var", "num_batches_tracked")


def trainable(p: Mapping[str, Tensor], prefix: str = "model") -> list[str]:
    """Names of the parameters of a network or of a module in it."""
    return [name for name in p if name.startswith(f"{prefix}.") and not is_buffer(name)]


def copied(p: Mapping[str, Tensor]) -> Params:
    """A copy that can be trained."""
    return {
        name: t.clone().requires_grad_(t.is_floating_point() and not is_buffer(name))
        for name, t in detached(p).items()
    }


def detached(p: Mapping[str, Tensor]) -> Params:
    """The same values without history."""
    return {name: tensor.detach() for name, tensor in p.items()}


def gradients(loss: Tensor, p: Mapping[str, Tensor], names: Iterable[str]) -> Params:
    """The gradient of a loss, zero for parameters that it does not depend on."""
    names = list(names)
    found = torch.autograd.grad(
        loss, [p[name] for name in names], allow_unused=True, retain_graph=True
    )
    return {
        n: torch.zeros_like(p[n]) if g is None else g for n, g in zip(names, found, strict=True)
    }


class Sgd:
    """SGD with momentum and weight decay, as PyTorch defines it; the buffers start at zero.

    clip: the largest norm of all gradients together, weight decay not counted; 0 for any.
    """

    def __init__(
        self, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, clip: float = 0.0
    ):
        self.lr, self.momentum, self.weight_decay, self.clip = lr, momentum, weight_decay, clip
        self.buffers: Params = {}

    def step(self, p: Params, grads: Mapping[str, Tensor]) -> None:
        """Move the parameters that have a gradient."""
        if self.clip:
            norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
            grads = {
                name: grad * min(1.0, self.clip / (float(norm) + 1e-6))
                for name, grad in grads.items()
            }
        for name, grad in grads.items():
            direction = grad + self.weight_decay * p[name].detach()
            if self.momentum:
                direction = (
                    self.momentum * self.buffers.get(name, torch.zeros_like(direction)) + direction
                )
                self.buffers[name] = direction
            p[name].data -= self.lr * direction


def optimizer(world: World, job: Job, factor: float = 1.0) -> Sgd:
    """A job's own: the learning rate decays with the version that it received."""
    local = world.local
    return Sgd(
        local.lr * local.lr_decay**job.version * factor,
        local.momentum,
        local.weight_decay,
        local.clip,
    )


def weights(world: World, jobs: Sequence[Job]) -> list[float]:
    """By samples, or one each; not normalised."""
    return [float(job.samples) if world.weighting == "samples" else 1.0 for job in jobs]


def mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i a_i / sum_i w_i; the maximum of integers."""
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).amax(0)
    return sum(
        (w * t for w, t in zip(weights, tensors, strict=True)), torch.zeros_like(tensors[0])
    ) / sum(weights)


def averaged(models: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> Params:
    """The weighted mean of models, tensor by tensor."""
    return {name: mean([model[name].detach() for model in models], weights) for name in models[0]}


def moved(
    x: Params,
    jobs: Sequence[Job],
    models: Sequence[Params],
    received: Sequence[Params],
    weights: Sequence[float],
) -> Params:
    """x plus the mean of what models moved from what each had received, which may be stale; of buffers the mean."""
    pairs = zip(models, (received[job.version] for job in jobs), strict=True)
    changed = [
        {name: x[name] + p[name].detach() - base[name] for name in trainable(x)}
        for p, base in pairs
    ]
    return {**averaged(models, weights), **averaged(changed, weights)}


class RowMean:
    """The mean loss over the rows that a client trained on."""

    def __init__(self) -> None:
        self.total, self.rows = 0.0, 0

    def add(self, loss: Tensor, inputs: Tensor) -> None:
        """Add a batch's mean loss."""
        self.total += len(inputs) * float(loss.detach())
        self.rows += len(inputs)


def row_mean(clients: Iterable[RowMean]) -> float:
    """The mean loss over the rows of all clients of a round."""
    clients = list(clients)
    return sum(client.total for client in clients) / sum(client.rows for client in clients)


# What a client's training does to one batch: from (its parameters, the step, inputs, labels) to the loss.
Loss = Callable[[Params, int, Tensor, Tensor], Tensor]


def cross_entropy(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
    """The loss of FedAvg."""
    return F.cross_entropy(logits(p, x), y)


def train(world: World, job: Job, received: Params, loss: Loss = cross_entropy) -> Params:
    """The model of a client that descends on `loss` from what it received."""
    p, sgd = copied(received), optimizer(world, job)
    for step, (x, y) in enumerate(job.batches):
        sgd.step(p, gradients(loss(p, step, x, y), p, trainable(p)))
    return p


def federated(world: World, client: Callable[[Job, Params], Params]) -> Book:
    """FedAvg's rounds: every client trains as `client` says, from the model received, and the server averages."""
    x = dict(world.start)
    for jobs in world.rounds:
        x = averaged([client(job, x) for job in jobs], weights(world, jobs))
    return Book(x)


# A local loss in two parts: the one that the history shows as train_loss, and what is added to it.
Parts = Callable[[Params, int, Tensor, Tensor], tuple[Tensor, Tensor | float]]


def with_loss(
    world: World,
    losses: Callable[[Job, Params], Parts],
    trained: Callable[[Job, Params], None] = lambda job, p: None,
) -> Book:
    """FedAvg with another local loss: of a job and the model it received. trained: told of every model at its end.

    train_loss is the mean over all rows that the clients trained on.
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

    book = federated(world, client)
    means = [row_mean([seen[job.client, job.turn] for job in jobs]) for jobs in world.rounds]
    return replace(book, columns={"train_loss": means})
