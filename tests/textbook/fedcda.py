"""FedCDA: Wang et al. 2024, Algorithm 1, by exhaustive search on the models themselves (eq. 3 batch by batch, eq. 7-8).

Taken from its specification: F_n is the mean batch loss of the last epoch (of a step budget: its last tenth); batches
are as even as possible, the larger ones first, in an order of the server's stream; x is the uniform mean over all
clients seen. A client that arrives twice in a buffer is one participant with two more models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.plain import average, cross_entropy, detach, train, trainable
from textbook.servers import flatten
from textbook.world import Book, Params, World


@dataclass
class History:
    """A client's models, oldest first; its cache has the last K of them."""

    models: list[Params] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    selected: int = 0


def fedcda(
    world: World,
    memory: int,
    batches: int,
    smoothness: float,
    warmup_rounds: int,
    everybody: bool = False,
) -> Book:
    """Let participants choose, batch by batch, those of their last K models that minimise J.

    everybody: warm-up averages the newest model of each client seen, not only the participants'.
    """
    names, versions = trainable(world.start), [dict(world.start)]
    seen: dict[int, History] = {}
    ages: list[float] = []
    means: list[float] = []

    def objective(chosen: list[tuple[Tensor, float]]) -> float:
        w = torch.stack([model for model, _ in chosen])
        spread = (w - w.mean(0)).square().sum(1).mean()
        return sum(loss for _, loss in chosen) / len(chosen) + smoothness / 2 * float(spread)

    def entry(client: int, place: int) -> tuple[Tensor, float]:
        return flatten(seen[client].models[place], names), seen[client].losses[place]

    def choose(participants: list[int], version: int) -> None:
        order = [
            participants[k]
            for k in stream(world.seed, "fedcda.batches", version).permutation(len(participants))
        ]
        fixed = [
            entry(client, own.selected)
            for client, own in seen.items()
            if client not in participants
        ]
        size, larger = divmod(len(order), batches)
        for b in range(batches):
            batch, order = order[: size + (b < larger)], order[size + (b < larger) :]
            newest_first = [range(len(seen[c].models))[: -memory - 1 : -1] for c in batch]
            best = min(
                product(*newest_first),
                key=lambda places: objective(
                    fixed + [entry(c, k) for c, k in zip(batch, places, strict=True)]
                ),
            )
            for client, place in zip(batch, best, strict=True):
                seen[client].selected = place
                fixed.append(entry(client, place))

    for version, jobs in enumerate(world.rounds):
        trained: list[Params] = []
        for job in jobs:
            losses: list[float] = []

            def loss(
                p: Params, step: int, x: Tensor, y: Tensor, losses: list[float] = losses
            ) -> Tensor:
                found = cross_entropy(p, step, x, y)
                losses.append(float(found.detach()))
                return found

            trained.append(detach(train(world, job, versions[job.version], loss)))
            last = losses[-max(1, len(losses) // (world.local.epochs or 10)) :]
            own = seen.setdefault(job.client, History())
            own.models.append(trained[-1])
            own.losses.append(sum(last) / len(last))
            own.rounds.append(version)
            own.selected = len(own.models) - 1
            means.append(sum(losses) / len(losses))
        warm = version < warmup_rounds
        if not warm:
            choose(sorted({job.client for job in jobs}), version)
        averaged_ones = (
            trained
            if warm and not everybody
            else [own.models[own.selected] for own in seen.values()]
        )
        new = average(averaged_ones, [1.0] * len(averaged_ones))
        counters = [name for name in new if not new[name].is_floating_point()]
        versions.append(new | {n: torch.stack([y[n] for y in trained]).amax(0) for n in counters})
        ages.append(sum(version - own.rounds[own.selected] for own in seen.values()) / len(seen))

    return Book(versions[-1], server=_cache(world, seen, memory), columns={"fedcda.age": ages})


def _cache(world: World, seen: dict[int, History], memory: int) -> dict[str, Tensor]:
    """Return raysim's form: a ring for each client seen, with model k in place k mod K."""
    order = list(trainable(world.start))
    order += [
        name for name in world.start if name not in order and world.start[name].is_floating_point()
    ]
    width = sum(world.start[name].numel() for name in order)
    models = torch.zeros(len(seen), memory, width, dtype=torch.float64)
    losses, rounds = (
        torch.zeros(len(seen), memory, dtype=torch.float64),
        torch.zeros(len(seen), memory).long(),
    )
    for row, own in enumerate(seen.values()):
        for k, (model, loss, when) in enumerate(
            zip(own.models, own.losses, own.rounds, strict=True)
        ):
            models[row, k % memory], losses[row, k % memory] = flatten(model, order), loss
            rounds[row, k % memory] = when
    found = {"models": models, "losses": losses, "rounds": rounds}
    found["clients"] = torch.tensor(list(seen))
    found["pushes"] = torch.tensor([len(own.models) for own in seen.values()])
    found["selected"] = torch.tensor([own.selected % memory for own in seen.values()])
    return {f"fedcda.{name}": tensor for name, tensor in found.items()}
