"""VHL: Tang et al. 2022 with the authors' noise generator.

All clients have the same virtual images. Each class has a random 8 x 8 image from N(0, 1). A
virtual image is the image of its class plus noise from N(0, 0.5^2). The virtual images are enlarged
bilinearly, and standardised per channel, all together.

C is the number of classes. If the head has extra outputs, virtual images of class c have the label
C + c. A prediction C + c counts as c. With Mixup, only the cross-entropy of real images uses the
mixed images, in a separate forward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.corrected import by_round
from textbook.plain import (
    RowMean,
    average,
    copy_for_training,
    features,
    gradients,
    head,
    logits,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def virtual_set(world: World, count: int) -> tuple[Tensor, Tensor]:
    """Return `count` virtual images and their labels 0, 1, ..., C - 1, 0, 1, ..."""
    random, (_, channels, *size) = stream(world.seed, "vhl.virtual"), world.central[0].shape
    means = random.standard_normal((world.classes, channels, 8, 8))
    noise = random.standard_normal((count, channels, 8, 8))
    labels = torch.arange(count) % world.classes
    coarse = torch.stack(
        [torch.from_numpy(means[y] + 0.5 * e) for y, e in zip(labels, noise, strict=True)]
    )
    images = F.interpolate(coarse, size=size, mode="bilinear", align_corners=False)
    flat = images.transpose(0, 1).flatten(1)  # a row a channel
    mean, deviation = flat.mean(1), flat.var(1, unbiased=False).sqrt()
    return (images - mean[:, None, None]) / deviation[:, None, None], labels


def view(image: Tensor, down: int, right: int, flip: int) -> Tensor:
    """Return a view of an image: padded by 4 pixels, cropped to the old size, maybe mirrored.

    image: [channels, height, width].
    down, right: the upper left corner of the crop in the padded image.
    flip: 1 mirrors the view.
    """
    height, width = image.shape[1:]
    cut = F.pad(image, (4, 4, 4, 4))[:, down : down + height, right : right + width]
    return cut.flip(2) if flip else cut


def contrast(h: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrastive loss of features h [B, F], computed row by row.

    Each row is pulled towards the other rows of its label.
    """
    u, total = h / h.norm(dim=1, keepdim=True).clamp(min=1e-12), torch.zeros((), dtype=h.dtype)
    for i in range(len(u)):
        others = torch.arange(len(u)) != i
        positive = labels[others] == labels[i]
        shares = (u[others] @ u[i] / temperature).log_softmax(0)
        total = total - shares[positive].sum() / max(int(positive.sum()), 1)
    return total / len(u)


def vhl(
    world: World,
    virtual: int,
    alpha: float = 1.0,
    gamma: float = 1.0,
    kappa: float = 0.1,
    temperature: float = 0.07,
    extra: bool = True,
    align_epochs: int = 5,
    mixup: bool = False,
) -> Book:
    """Compute a run of VHL: FedAvg with three more loss terms, which use virtual images.

    virtual: the number of virtual images.
    alpha: the weight of the virtual images' cross-entropy.
    gamma: the weight of a supervised contrastive loss of real and virtual images.
    kappa: the weight of a supervised contrastive loss of the virtual images alone.
    extra: True: the head has a second output for each class, which is used for virtual images.
    align_epochs: the number of first epochs of a job that use the contrastive losses.
    mixup: True: Mixup changes the real images.
    """
    images, classes = virtual_set(world, virtual)
    reported: list[RowMean] = []  # the real rows' cross-entropy, of each participation

    def client(job: Job, received: Params) -> Params:
        p, sgd, losses = copy_for_training(received), optimizer(world, job), RowMean()
        for step, ((x, y), draws) in enumerate(zip(job.batches, job.draws, strict=True)):
            epoch = step // (len(job.batches) // world.local.epochs) if world.local.epochs else 0
            rows, *views = draws["vhl.views"].tolist()
            x_v = torch.stack(
                [
                    view(images[row], *view_settings)
                    for row, *view_settings in zip(rows, *views, strict=True)
                ]
            )
            y_v, aligned = classes[rows], epoch < align_epochs
            if mixup:
                weight, order = draws["mixup.lam"], draws["mixup.permutation"]
                out = logits(p, weight * x + (1 - weight) * x[order])
                loss = weight * F.cross_entropy(out, y) + (1 - weight) * F.cross_entropy(
                    out, y[order]
                )
            joined = alpha > 0 or (aligned and gamma + kappa > 0)
            if joined or not mixup:
                h = features(p, torch.cat([x, x_v]) if joined else x)
            if not mixup:
                loss = F.cross_entropy(head(p, h[: len(x)]), y)
            losses.add(loss, x)
            if alpha:
                loss = loss + alpha * F.cross_entropy(
                    head(p, h[len(x) :]), y_v + (world.classes if extra else 0)
                )
            if aligned and gamma:
                both = torch.cat([h[: len(x)], h[len(x) :].detach()])
                loss = loss + gamma * contrast(both, torch.cat([y, y_v]), temperature)
            if aligned and kappa:
                loss = loss + kappa * contrast(h[len(x) :], y_v, temperature)
            sgd.step(p, gradients(loss, p, trainable(p)))
        reported.append(losses)
        return p

    x, accuracy = dict(world.start), []
    for jobs in world.rounds:
        x = average([client(job, x) for job in jobs], weights(world, jobs))
        best = logits(x, world.central[0], training=False).argmax(1) % world.classes
        accuracy.append((best == world.central[1]).double().mean().item())
    return Book(x, columns={"train_loss": by_round(world, reported), "accuracy_global": accuracy})
