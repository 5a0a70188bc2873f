"""FedBR: Guo, Tang and Lin 2023, eqs. (2)-(7) and Algorithms 1-3.

The similarities in eqs. (5) and (6) are divided by temperatures in the paper, and multiplied by
them in the released code. Paper and code leave some questions open. This textbook makes these
choices:
- A batch has B rows. Row j of the pseudo-data is compared with row (j mod B) of the batch.
- The received extractor is in eval mode.
- Pseudo-data do not change BatchNorm's statistics.
- The projector has the momentum and weight decay of the model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.corrected import Correct, alone, by_round
from textbook.plain import (
    RowMean,
    copy_for_training,
    detach,
    features,
    gradients,
    head,
    is_buffer,
    optimizer,
    trainable,
)
from textbook.world import Book, Job, Params, World

PROJECTOR = "fedbr.projector"
Pseudo = Callable[[int], Tensor]  # by version


def projected(p: Params, z: Tensor) -> Tensor:
    """Return the projector's outputs for features z: three linear layers with ReLU between them.

    Without a projector, z is returned.
    """
    for layer in (0, 2, 4) if f"{PROJECTOR}.0.weight" in p else ():
        z = F.linear(
            z.relu() if layer else z,
            p[f"{PROJECTOR}.{layer}.weight"],
            p[f"{PROJECTOR}.{layer}.bias"],
        )
    return z


def contrast(p: Params, z_p: Tensor, z_g: Tensor, z: Tensor, kappa: tuple[float, float]) -> Tensor:
    """Return FedBR's contrastive loss, as a mean over the R rows of the pseudo-data.

    Row j of z_p is pulled to row j of z_g, and pushed away from row (j mod B) of z. If there is a
    projector, its outputs for these features are compared.
    p: the tensors of all modules.
    z_p, z_g: [R, F], features of the pseudo-data from the trained and from the received extractor.
    z: [B, F], the features of the batch.
    kappa: the factors on the cosines with z_g and with z.
    """
    z_p, z_g, z = (
        projected(p, each) for each in (z_p, z_g, z[[j % len(z) for j in range(len(z_p))]])
    )

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))

    f1, f2 = (kappa[0] * cosine(z_p, z_g)).exp(), (kappa[1] * cosine(z_p, z)).exp()
    return -(f1 / (f1 + f2)).log().mean()


def cross_entropy(logits: Tensor, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits with rows of class probabilities, both [B, C]."""
    return -(rows * logits.log_softmax(1)).sum(1).mean()


def class_chances(labels: Tensor) -> np.ndarray:
    """Return each sample's probability of being drawn if all classes are equally likely.

    Only classes in `labels` count. Samples of the same class have the same probability, and all
    probabilities add up to 1.
    """
    classes = labels.tolist()
    return np.array([1 / classes.count(label) for label in classes]) / len(set(classes))


def means(world: World, size: int, count: int, sources: str) -> Tensor:
    """Return the pseudo-data of all clients (FedBR, Algorithm 2), `size` rows per client.

    A row is the mean input of `count` random training samples of the client.
    sources: with "classes", all classes of a client are equally likely; otherwise all samples.
    """
    pool = []
    for client, (inputs, labels) in enumerate(world.data):
        random = stream(world.seed, "contribute", client)
        if sources == "classes":
            places = random.choice(len(inputs), size=(size, count), p=class_chances(labels))
        else:
            places = random.integers(len(inputs), size=(size, count))
        pool += [torch.stack([inputs[i] for i in row]).mean(0) for row in places]
    return torch.stack(pool)


def drawn(world: World, pool: Tensor, size: int, sources: str) -> Pseudo:
    """Return a function that draws `size` different rows from a pool of pseudo-data.

    The function gets the number of a version, which seeds the draw.
    pool: equally many rows of each client.
    sources: with "unbalanced", a client's rows are drawn in proportion to its number of samples.
    """
    counts = np.array([len(labels) for _, labels in world.data], float)
    each = len(pool) // len(counts)
    chances = np.repeat(counts / counts.sum() / each, each) if sources == "unbalanced" else None
    return lambda version: pool[
        stream(world.seed, "fedbr.pseudo", version).choice(
            len(pool), size=size, replace=False, p=chances
        )
    ]


def fresh(world: World, size: int, count: int, sources: str) -> Pseudo:
    """Return a function that makes new pseudo-data from the clients' raw samples.

    The function gets a model version, which seeds the draw. It returns `size` rows, each the mean
    of `count` random samples of a random client.
    sources: "balanced" draws clients and samples uniformly. "unbalanced" draws clients in
    proportion to their samples. "classes" draws clients and their classes uniformly.
    """
    counts = np.array([len(labels) for _, labels in world.data], float)
    chances = (
        counts / counts.sum() if sources == "unbalanced" else np.full(len(counts), 1 / len(counts))
    )

    def pseudo(version: int) -> Tensor:
        random = stream(world.seed, "fedbr.fresh", version)
        clients = random.choice(len(counts), size=size, p=chances)
        rows = []
        for client in clients:
            inputs, labels = world.data[client]
            within = class_chances(labels) if sources == "classes" else None
            rows.append(inputs[random.choice(len(inputs), size=count, p=within)].mean(0))
        return torch.stack(rows)

    return pseudo


def proxies(world: World, size: int, count: int, sources: str) -> Pseudo:
    """Return a function that makes `size` rows of pseudo-data from public images.

    The function gets the number of a version, which seeds the draw. A row is the mean of `count`
    random images (FedBR, Algorithm 3).
    sources: with "unbalanced", all images are equally likely; otherwise all classes.
    """
    images, labels = world.drawn["proxy"]
    chances = None
    if sources != "unbalanced":
        chances = class_chances(labels)

    def pseudo(version: int) -> Tensor:
        places = stream(world.seed, "fedbr.pseudo", version).choice(
            len(labels), size=(size, count), p=chances
        )
        return torch.stack([images[row].mean(0) for row in places])

    return pseudo


def fedbr(
    world: World,
    lam: float,
    mu: float,
    pseudo_batch: int = 4,
    samples_per_mean: int = 3,
    tau1: float = 2.0,
    tau2: float = 2.0,
    temperature_mode: str = "multiply",
    max_step: bool = True,
    pseudo: str = "rsm",
    pseudo_refresh: str = "round",
    means_per_client: int | None = None,
    sources: str = "balanced",
    mix_samples: int = 0,
    global_features: str = "step",
    mixup: bool = False,
    rounds: Callable[..., Book] = alone,
) -> Book:
    """Compute a run of FedBR, whose jobs make up to two optimizer steps on each batch.

    The max step changes the projector to increase the loss of `contrast`. The min step changes
    extractor and classifier to decrease all losses. Without a projector, or with max_step=False,
    there is only the min step. The server averages all modules. All other arguments are settings of
    raysim's class `FedBR`.
    lam, mu: the weights of the pseudo-data's cross-entropy and of `contrast`.
    pseudo: how pseudo-data are made: `drawn` ("rsm"), `fresh` ("fresh") or `proxies` ("mixture").
    mixup: True first mixes the rows of each batch in pairs.
    rounds: the function of `textbook.corrected` that makes the rounds, such as `with_scaffold`.
    """
    kappa = (tau1, tau2) if temperature_mode == "multiply" else (1 / tau1, 1 / tau2)
    pool = (
        means(world, means_per_client or pseudo_batch, samples_per_mean, sources)
        if pseudo == "rsm"
        else None
    )
    if pool is not None:
        of_version = drawn(world, pool, pseudo_batch, sources)
    else:
        of_version = (fresh if pseudo == "fresh" else proxies)(
            world, pseudo_batch, samples_per_mean, sources
        )
    if pseudo_refresh == "once":
        pool = of_version(0)

    reported: list[RowMean] = []  # the local loss alone, of each participation

    def client(job: Job, received: Params, correct: Correct) -> Params:
        p, base = copy_for_training(received), detach(received)
        gen, disc, uniform = optimizer(world, job), optimizer(world, job), 1 / world.classes
        d_p = pool if pseudo_refresh == "once" else of_version(job.version)
        losses, z_g = RowMean(), None
        model, theta = trainable(p), [name for name in p if name.startswith(PROJECTOR)]
        for (x, labels), draws in zip(job.batches, job.draws, strict=True):
            y = F.one_hot(labels, world.classes).double()
            if mixup:
                weight, order = draws["mixup.lam"], draws["mixup.permutation"]
                x, y = weight * x + (1 - weight) * x[order], weight * y + (1 - weight) * y[order]
            x_p, q = d_p, torch.full((len(d_p), world.classes), uniform, dtype=x.dtype)
            if mix_samples:  # eq. (4)
                chosen = draws["fedbr.mix"]
                x_p = torch.stack(
                    [
                        (a + sum(x[k] for k in ks)) / (1 + len(ks))
                        for a, ks in zip(x_p, chosen, strict=True)
                    ]
                )
                q = torch.stack(
                    [
                        (a + sum(y[k] for k in ks)) / (1 + len(ks))
                        for a, ks in zip(q, chosen, strict=True)
                    ]
                )
            z, z_p = (
                features(p, x),
                features(p | {n: t.clone() for n, t in p.items() if is_buffer(n)}, x_p),
            )
            if z_g is None or global_features == "step":
                z_g = features(base, x_p, training=False)
            if theta and max_step:
                uphill = -contrast(p, z_p.detach(), z_g, z.detach(), kappa)
                disc.step(p, correct(p, gradients(uphill, p, theta)))
            local = cross_entropy(head(p, z), y)
            loss = (
                local + lam * cross_entropy(head(p, z_p), q) + mu * contrast(p, z_p, z_g, z, kappa)
            )
            losses.add(local, x)
            gen.step(p, correct(p, gradients(loss, p, model)))
        reported.append(losses)
        return p

    book = rounds(world, client)
    book.columns = {"train_loss": by_round(world, reported)}
    book.server = dict(book.server) | ({} if pool is None else {"fedbr.pool": pool})
    return book
