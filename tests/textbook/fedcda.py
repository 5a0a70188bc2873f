"""FedCDA: Wang et al. 2024, Algorithm 1, by trying all combinations of models.

The server caches the last models of each client, and selects one of them, w_n for client n. The
shared model x is the mean of all w_n. The selection minimises (eqs. 3, 7 and 8)

    J = mean of F_n + L / 2 times the mean of |w_n - x|^2.

L is the smoothness. F_n is the mean batch loss at the end of the job that trained w_n: in its last
epoch or, with a fixed number of steps, in its last tenth of the steps.

An aggregation selects models only for its own clients, for one random group ("batch" in the paper)
after another. J includes the selected models of all other clients.
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
    """All models that a client has sent, oldest first.

    losses: for each model, the mean batch loss in the last epoch of training.
    rounds: for each model, the number of aggregations before the model arrived.
    selected: the position of the model that is averaged into the shared model.
    """

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
    """Compute a run of FedCDA, whose server averages one cached model of each client.

    memory: the number of models in a client's cache.
    batches: the number of groups of clients for which models are selected one after another.
    smoothness: the weight of the models' distances from their mean, in the objective.
    warmup_rounds: the number of first aggregations that select the newest model of each client.
    everybody: True: these aggregations average over all clients that have sent a model. False: they
    average over the clients whose updates arrive.
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
            entry(client, history.selected)
            for client, history in seen.items()
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
                result = cross_entropy(p, step, x, y)
                losses.append(float(result.detach()))
                return result

            trained.append(detach(train(world, job, versions[job.version], loss)))
            last = losses[-max(1, len(losses) // (world.local.epochs or 10)) :]
            history = seen.setdefault(job.client, History())
            history.models.append(trained[-1])
            history.losses.append(sum(last) / len(last))
            history.rounds.append(version)
            history.selected = len(history.models) - 1
            means.append(sum(losses) / len(losses))
        warm = version < warmup_rounds
        if not warm:
            choose(sorted({job.client for job in jobs}), version)
        averaged_ones = (
            trained
            if warm and not everybody
            else [history.models[history.selected] for history in seen.values()]
        )
        new = average(averaged_ones, [1.0] * len(averaged_ones))
        counters = [name for name in new if not new[name].is_floating_point()]
        versions.append(new | {n: torch.stack([y[n] for y in trained]).amax(0) for n in counters})
        ages.append(
            sum(version - history.rounds[history.selected] for history in seen.values()) / len(seen)
        )

    return Book(versions[-1], server=_cache(world, seen, memory), columns={"fedcda.age": ages})


def _cache(world: World, seen: dict[int, History], memory: int) -> dict[str, Tensor]:
    """Return FedCDA's server state: cached models of clients, with their losses.

    seen: the sent models by client, for the clients that have sent one.
    "fedcda.models" is [len(seen), memory, d]. A client's model k = 0, 1, ... is at k mod `memory`
    in the second dimension.
    """
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
    for row, history in enumerate(seen.values()):
        for k, (model, loss, when) in enumerate(
            zip(history.models, history.losses, history.rounds, strict=True)
        ):
            models[row, k % memory], losses[row, k % memory] = flatten(model, order), loss
            rounds[row, k % memory] = when
    result = {"models": models, "losses": losses, "rounds": rounds}
    result["clients"] = torch.tensor(list(seen))
    result["pushes"] = torch.tensor([len(history.models) for history in seen.values()])
    result["selected"] = torch.tensor([history.selected % memory for history in seen.values()])
    return {f"fedcda.{name}": tensor for name, tensor in result.items()}
