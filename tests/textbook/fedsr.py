"""FedSR: Nguyen, Torr and Lim 2022; FedL2R is its variant without noise.

As in the authors' code, the loss contains the mean norm of the representation, and references stay
on clients by default. The score of a class is the log of its mean probability over several draws of
noise. All inputs have the same draws.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from raysim.primitives.streams import torch_seed
from textbook.corrected import by_round
from textbook.plain import (
    RowMean,
    average,
    copy_for_training,
    features,
    gradients,
    head,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World

REFERENCE = "fedsr.reference"


def mapped(p: Params, x: Tensor, training: bool = True) -> Tensor:
    """Return the outputs of the linear layer that FedSR adds to the extractor.

    Without noise (FedL2R), the outputs are the representations z [B, Z]. With noise they are [B, 2
    Z]: the means of z, then numbers whose softplus is the standard deviation of z.
    """
    first = "model.extractor.0."
    inner = {
        name.replace(first, "model.extractor."): t
        for name, t in p.items()
        if name.startswith(first)
    }
    h = features(inner, x, training)
    return F.linear(h, p["model.extractor.1.weight"], p["model.extractor.1.bias"])


def score(world: World, p: Params, probabilistic: bool) -> tuple[float, float]:
    """Return accuracy and mean loss on the central test set.

    A class's probability is the mean over the noise draws in world.drawn["noise"]. The loss is the
    negative log of the label's probability.
    probabilistic: False uses no noise.
    """
    (x, y), out = world.central, mapped(p, world.central[0], training=False)
    if probabilistic:
        mean, raw = out.chunk(2, dim=1)
        noise = world.drawn["noise"].double()
        chances = torch.stack(
            [head(p, mean + F.softplus(raw) * eps).softmax(1) for eps in noise]
        ).mean(0)
    else:
        chances = head(p, out).softmax(1)
    return (chances.argmax(1) == y).double().mean().item(), -chances[
        range(len(x)), y
    ].log().mean().item()


def first_reference(world: World) -> Params:
    """Return the initial references of all classes, and the initial value 1 of "scale".

    A class's reference is a normal distribution with mean 0 and standard deviation softplus(1).
    "scale" multiplies the features z in the Kullback-Leibler divergence.
    """
    size = world.classes, world.start["model.head.weight"].shape[1]
    values = {"mean": torch.zeros(size), "std": torch.ones(size), "scale": torch.ones(())}
    return {f"{REFERENCE}.{name}": value.double() for name, value in values.items()}


def fedsr(
    world: World,
    alpha_l2r: float,
    alpha_cmi: float,
    probabilistic: bool = True,
    share_reference: bool = False,
) -> Book:
    """Compute a run of FedSR, which is FedAvg with two penalties in the local loss.

    The representation z of an input is normally distributed. Each class has a reference, which is a
    learned normal distribution.
    alpha_l2r: the weight of the mean norm of z.
    alpha_cmi: the weight of the KL divergence of c z from the reference of the input's class. c is
    a learned number.
    probabilistic: False computes FedL2R, without noise and KL divergence.
    share_reference: True averages the references and c on the server.
    """
    reference = first_reference(world) if probabilistic and alpha_cmi else {}
    private = {i: {} if share_reference else reference for i in range(world.clients)}
    losses: list[RowMean] = []

    def client(job: Job, received: Params) -> Params:
        p, sgd, seen = (
            copy_for_training(received | private[job.client]),
            optimizer(world, job),
            RowMean(),
        )
        names = trainable(p) + trainable(p, REFERENCE)
        random = torch.Generator().manual_seed(
            torch_seed(world.seed, "torch", job.client, job.turn)
        )
        for x, y in job.batches:
            z = mapped(p, x)
            if probabilistic:
                mean, raw = z.chunk(2, dim=1)
                std = F.softplus(raw)
                z = mean + std * torch.randn(mean.shape, generator=random, dtype=mean.dtype)
            task = F.cross_entropy(head(p, z), y)
            loss = task + alpha_l2r * z.square().sum(1).sqrt().mean()
            if reference:
                scale, centre, spread = (
                    p[f"{REFERENCE}.{name}"] for name in ("scale", "mean", "std")
                )
                posterior, wanted = (
                    Normal(scale * mean, scale * std),
                    Normal(centre[y], F.softplus(spread)[y]),
                )
                loss = loss + alpha_cmi * kl_divergence(posterior, wanted).sum(1).mean()
            seen.add(task, x)
            sgd.step(p, gradients(loss, p, names))
        private[job.client] = {name: p[name].detach() for name in private[job.client]}
        losses.append(seen)
        return {name: tensor for name, tensor in p.items() if name not in private[job.client]}

    x = {name: value for name, value in world.start.items() if not name.startswith(REFERENCE)}
    x |= reference if share_reference else {}
    columns = {"accuracy_global": [], "loss_global": []}
    for jobs in world.rounds:
        x = average([client(job, x) for job in jobs], weights(world, jobs))
        accuracy, loss = score(world, x, probabilistic)
        columns["accuracy_global"].append(accuracy)
        columns["loss_global"].append(loss)
    took_part = {job.client for jobs in world.rounds for job in jobs}
    return Book(
        x,
        {i: private[i] for i in took_part},
        columns=columns | {"train_loss": by_round(world, losses)},
    )
