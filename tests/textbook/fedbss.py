"""FedBSS: Xu et al. 2025, eqs. (3) to (6) and Algorithm 1.

The uncertainty alpha_i of a sample is 1 minus the range of its class probabilities. A sample is
unbiased if its loss S_i is at most that of the most uncertain sample.

The textbook draws its own batches. If the number of steps is fixed, a job has `phases` parts in
place of epochs. With BatchNorm, a last batch of one sample is left out, unless it is the only
batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.plain import average, detach, is_buffer, logits, train
from textbook.world import Book, Job, Params, World

FRACTION = {
    "cosine": lambda e, last: (1 - math.cos(math.pi * e / last)) / 2,
    "linear": lambda e, last: e / last,
    "filter": lambda e, last: 0.0,
}
REPORTED = ("fedbss.biased_share", "fedbss.threshold", "fedbss.uncertainty")


def fedbss(
    world: World, warmup: int, kind: str = "cosine", refresh: int = 1, fraction_of: str = "samples"
) -> Book:
    """Compute a run of FedBSS: FedAvg with equal weights, and with selected samples.

    From version `warmup` on, epoch e of a job uses all unbiased samples (`split`) and a fraction
    a_e of the biased samples.
    kind: how a_e grows with e, a key of `FRACTION`. "all" always uses all samples.
    refresh: the client computes losses and uncertainties in its first job after the warm-up, and
    then in every `refresh`-th job.
    fraction_of: "samples", as described. "loss" uses all samples, and multiplies the losses of
    biased samples by a_e.
    """
    x, reports = dict(world.start), list[Tensor]()
    unknown = [torch.zeros(len(y), dtype=torch.float64) for _, y in world.data]
    cache = {i: [nothing, nothing, -1, 0] for i, nothing in enumerate(unknown)}
    for jobs in world.rounds:
        models, report = [], [torch.full((3,), torch.nan, dtype=torch.float64)]
        for job in jobs:
            samples = len(world.data[job.client][1])
            select = kind != "all" and job.version >= warmup
            order, unbiased = torch.arange(samples), samples
            if select:
                known = cache[job.client]
                if known[3] % refresh == 0:
                    known[:3] = *ranked(x, *world.data[job.client]), job.version
                known[3] += 1
                order, unbiased = split(known[0], known[1])
                told = [1 - unbiased / samples, known[0][order[unbiased - 1]], known[1].mean()]
                report.append(torch.tensor(told, dtype=torch.float64))
            weighted = fraction_of == "loss"
            chosen, parts = batches(world, job, order, samples if weighted else unbiased, kind)
            inputs, labels = world.data[job.client]
            drawn = [(inputs[rows], labels[rows]) for rows in chosen]
            biased = set(order[unbiased:].tolist())

            def loss(
                p: Params,
                step: int,
                x: Tensor,
                y: Tensor,
                chosen: list[np.ndarray] = chosen,
                parts: list[float] = parts,
                biased: set[int] = biased,
                weighted: bool = weighted,
            ) -> Tensor:
                each = -logits(p, x).log_softmax(1)[range(len(y)), y]
                share = parts[step] if weighted else 1.0
                return sum(
                    each[i] * (share if int(row) in biased else 1.0)
                    for i, row in enumerate(chosen[step])
                ) / len(y)

            models.append(detach(train(world, replace(job, batches=drawn), x, loss)))
        x = average(models, [1.0] * len(jobs))
        reports.append(torch.stack(report[1:] or report).mean(0))
    names = [f"fedbss.{name}" for name in ("losses", "uncertainties", "version", "count")]
    private = {
        i: dict(
            zip(
                names,
                [*cache[i][:2], *(torch.tensor([each]) for each in cache[i][2:])],
                strict=True,
            )
        )
        for i in {job.client for jobs in world.rounds for job in jobs}
    }
    columns = (
        dict(zip(REPORTED, torch.stack(reports).T.tolist(), strict=True)) if kind != "all" else {}
    )
    return Book(x, private, columns=columns)


def ranked(received: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses S_i (eq. 3) and the uncertainties alpha_i (eq. 4) of all samples.

    received: the received model, which is used in eval mode.
    x, y: the inputs and the labels of the samples.
    """
    p = logits(dict(received), x, False).softmax(1)
    return -p[range(len(y)), y].log(), 1 - (p.max(1).values - p.min(1).values)


def split(losses: Tensor, alphas: Tensor) -> tuple[Tensor, int]:
    """Return the order of a client's samples by loss, and the number of unbiased samples.

    The order has positions in the client's data, smallest loss first. A sample is unbiased if its
    loss is at most that of the sample with the largest uncertainty (eq. 5).
    alphas: the uncertainties.
    """
    order = torch.tensor(sorted(range(len(losses)), key=lambda i: float(losses[i])))
    border = max(order.tolist(), key=lambda i: float(alphas[i]))
    return order, int((losses <= losses[border]).sum())


def batches(
    world: World, job: Job, order: Tensor, unbiased: int, kind: str
) -> tuple[list[np.ndarray], list[float]]:
    """Draw the batches of a job; return each batch's samples and its fraction a_e.

    Epoch e uses the first `unbiased` samples of `order`, and the fraction a_e of all others (eq.
    6), rounded down. With a fixed number of steps, a job has phases in place of epochs.
    order: the positions of the client's samples, in ascending order of loss.
    unbiased: the number of samples that every epoch uses.
    kind: the formula of a_e, a key of `FRACTION`; any other text means "linear".
    """
    local, shares = world.local, list[float]()
    draw, found = stream(world.seed, "batches", job.client, job.turn), list[np.ndarray]()
    normed = any(is_buffer(name) for name in world.start)
    parts = local.epochs or min(local.phases, local.steps)
    for e in range(1, parts + 1):
        share = FRACTION.get(kind, FRACTION["linear"])(e, parts)
        some = unbiased + math.floor(share * (len(order) - unbiased) + 1e-9)
        positions, part = np.sort(order[:some].numpy()), list[np.ndarray]()
        goal = local.steps * e // parts - local.steps * (e - 1) // parts if local.steps else 1
        while len(part) < goal:
            shuffled = draw.permutation(positions)
            cut = [shuffled[i : i + local.batch] for i in range(0, some, local.batch)]
            part += cut[:-1] if normed and len(cut) > 1 and len(cut[-1]) == 1 else cut
        part = part[: goal if local.steps else None]
        found += part
        shares += [share] * len(part)
    return found, shares
