"""FedCDA: average, over all clients, those of their last K models that lie close to each other.

Wang, Xu, Li, Xu, Li and Zhang, "FedCDA: Federated Learning with Cross-rounds Divergence-aware Aggregation" (ICLR 2024),
eq. 3, 7 and 8, Algorithm 1. The participants, in random order, are cut into B batches; each batch in turn chooses one
cached model per client so as to minimise, over the set S of all chosen models and those of absent clients,

    J = mean F_n(w_n) + (L/2) mean |w_n - w_bar|^2          the mean of all selected models is the next x

Choices where the paper is silent
- A client counts once it has been seen; with fewer than K models it chooses among those it has.
- F_n is the mean of the batch losses of the last of the local epochs (of a step budget: its last tenth), as it was when
  the model was trained. Of a client whose iterations never had the task loss it is 0.
- Warm-up models enter the cache, and the newest is the selected one; x is FedAvg's mean over the participants.
- Batches are as even as possible, the larger ones first; later batches are not in S yet.
- Floating buffers belong to their model: same selection, same mean, but they are no part of a norm.
- What counts is the model, not its change: a stale client contributes its base plus its change. A client that arrives
  twice in a buffer is one participant with two more models. Weights of other methods do not enter.

The search is bounded: at most LIMIT combinations per batch, each a few additions on a Gram matrix. Besides, an
aggregation reads one model of every client seen, and all models of its participants: 0.6 s for 100 clients, 10
participants and 2.3 million parameters on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.client_rows import (
    declare_rows,
    most_rows,
    padded,
    refuse_sample_weights,
    rows_of,
)
from raysim.primitives.checks import at_least, between
from raysim.primitives.errors import Refused
from raysim.vectors.blocks import parts
from raysim.vectors.row_store import GIB, check_budget

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

LIMIT = 1_000_000  # combinations that a batch may try; their tables take at most 100 MB
_PART = 1 << 16  # entries of a model that are in float64 at once
_TIE = 1e-12  # relative difference of objectives below which the first choice counts


def divergence(*, models: Tensor) -> Tensor:
    """Mean squared distance of ``models`` [M, D] to their mean."""
    return (models - models.mean(0)).square().sum(1).mean()


def selection_objective(*, models: Tensor, losses: Tensor, smoothness: float) -> Tensor:
    """J of a choice: ``models`` [M, D] with ``losses`` [M]."""
    return losses.mean() + smoothness / 2 * divergence(models=models)


def cross_round_aggregate(*, models: Tensor) -> Tensor:
    """The uniform mean of the selected ``models`` [N, D] -> [D], added up in float64."""
    chosen = _Chosen(torch.zeros_like(models[0]), models.shape[1])
    for model in models:
        chosen.add(model, 0.0)
    return chosen.mean().to(models.dtype)


def select_models(
    *,
    candidates: Tensor,
    candidate_losses: Tensor,
    num_candidates: Tensor,
    fixed_models: Tensor,
    fixed_losses: Tensor,
    smoothness: float,
) -> Tensor:
    """The choice int64 [B] that minimises J over all combinations; of equal ones the lexicographically first.

    ``candidates`` [B, K, D] with ``candidate_losses`` [B, K], newest first, of which the first ``num_candidates`` int64
    [B] of each client count; ``fixed_models`` [F, D] with ``fixed_losses`` [F] are in the set already (F may be 0).
    """
    return greedy_selection(
        candidates=candidates,
        candidate_losses=candidate_losses,
        num_candidates=num_candidates,
        fixed_models=fixed_models,
        fixed_losses=fixed_losses,
        smoothness=smoothness,
        num_batches=1,
    )


def greedy_selection(
    *,
    candidates: Tensor,
    candidate_losses: Tensor,
    num_candidates: Tensor,
    fixed_models: Tensor,
    fixed_losses: Tensor,
    smoothness: float,
    num_batches: int,
) -> Tensor:
    """The choices int64 [P] of clients in the given order, in ``num_batches`` batches, each as in ``select_models``."""
    chosen = _Chosen(candidates[0, 0], candidates.shape[2])
    for model, loss in zip(fixed_models, fixed_losses.tolist(), strict=True):
        chosen.add(model, loss)
    counts = num_candidates.tolist()
    models = [row[:count].unbind() for row, count in zip(candidates, counts, strict=True)]
    losses = [row[:count] for row, count in zip(candidate_losses.tolist(), counts, strict=True)]
    return torch.tensor(chosen.extend(models, losses, smoothness, num_batches))


class _Chosen:
    """The models chosen so far, as sums in float64: their number, losses, differences to a centre, squared norms.

    J is the same around any centre; around one in their midst little of it cancels. Of a model [D] only the first
    `trained` entries enter norms.
    """

    def __init__(self, centre: Tensor, trained: int):
        self.centre, self.trained = centre, trained
        self.count, self.loss, self.square = 0, 0.0, 0.0
        self.total = torch.zeros(len(centre), dtype=torch.float64)

    def mean(self) -> Tensor:
        """[D] float64, relative to the centre."""
        return self.total / self.count

    def add(self, model: Tensor, loss: float) -> None:
        """Put a model [D] into the set."""
        self.count += 1
        self.loss += loss
        for part in parts(0, self.trained, _PART):
            difference = model[part].double() - self.centre[part]
            self.total[part] += difference
            self.square += float(difference.dot(difference))
        for part in parts(self.trained, len(model), _PART):
            self.total[part] += model[part].double() - self.centre[part]

    def extend(
        self,
        models: Sequence[Sequence[Tensor]],
        losses: Sequence[Sequence[float]],
        smoothness: float,
        batches: int,
    ) -> list[int]:
        """Choose one of each client's models, batch by batch, and put it into the set."""
        choices: list[int] = []
        for batch in np.array_split(np.arange(len(models)), batches):
            if not len(batch):
                continue
            part = slice(int(batch[0]), int(batch[-1]) + 1)
            choice = self._search(models[part], losses[part], smoothness)
            for candidates, candidate_losses, index in zip(
                models[part], losses[part], choice, strict=True
            ):
                self.add(candidates[index], candidate_losses[index])
            choices += choice
        return choices

    def _search(
        self,
        models: Sequence[Sequence[Tensor]],
        losses: Sequence[Sequence[float]],
        smoothness: float,
    ) -> list[int]:
        """The best of all combinations; they grow client by client, the first client's choice being the slowest."""
        gram, products = self._gram([model for candidates in models for model in candidates])
        loss, square = (
            torch.tensor([value], dtype=torch.float64) for value in (self.loss, self.square)
        )
        norm = (
            self.total[: self.trained].square().sum()[None]
        )  # |sum of S|^2 of each combination so far
        cross = products[None]  # its products with the candidates of the clients to come
        for client_losses in losses:
            many, norms = len(client_losses), gram.diagonal()[: len(client_losses)]
            loss = (loss[:, None] + torch.tensor(client_losses, dtype=torch.float64)).flatten()
            square = (square[:, None] + norms).flatten()
            norm = (norm[:, None] + 2 * cross[:, :many] + norms).flatten()
            cross = (cross[:, None, many:] + gram[:many, many:]).flatten(0, 1)
            gram = gram[many:, many:]
        count = self.count + len(models)
        objective = loss / count + smoothness / 2 * (square / count - norm / count**2)
        best = objective.min()
        first = int((objective <= best + _TIE * best.abs()).nonzero()[0])
        return [
            int(index)
            for index in np.unravel_index(first, [len(client_losses) for client_losses in losses])
        ]

    def _gram(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Inner products of the models [T, T], and with the sum of the set [T]."""
        gram, products = (
            torch.zeros(len(rows), len(rows), dtype=torch.float64),
            torch.zeros(len(rows)).double(),
        )
        for part in parts(0, self.trained, _PART):
            block = torch.stack([row[part] for row in rows]).double() - self.centre[part]
            gram.addmm_(block, block.T)
            products.addmv_(block, self.total[part])
        return gram, products


def _check_search(memory: int, batches: int, participants: int) -> None:
    """Refuse a search of more than LIMIT combinations, with the number of batches that would do."""
    if (combinations := memory ** -(-participants // batches)) > LIMIT:
        most = next(size for size in range(participants) if memory ** (size + 1) > LIMIT)
        raise Refused(
            f"method.fedcda.batches={batches} makes {combinations:.2g} combinations of {memory} models of "
            f"{-(-participants // batches)} clients to try, more than {LIMIT}: set it to {-(-participants // most)}"
        )


_SETS = "it makes its own step, and FedCDA sets the model to a mean of cached ones"
_WEIGHS = "its weights have no part in FedCDA's mean, in which all clients count alike"


class FedCDA(Method):
    """A cache of every client's last models on the server, and the choice among them.

    memory: K. batches: B. smoothness: L. warmup: what the first rounds average, the participants' models ("fedavg") or
    the newest of every client seen ("selected"). cache: where models are kept; budget: how much they may take, in GiB.
    """

    name = "fedcda"
    paper = "Wang et al., ICLR 2024"
    weighting = "uniform"

    def __init__(
        self,
        memory: int = 3,
        batches: int = 3,
        smoothness: float = 1.0,
        warmup_rounds: int = 50,
        warmup: Literal["fedavg", "selected"] = "fedavg",
        cache: Literal["disk", "memory"] = "disk",
        budget: float = 8.0,
    ):
        self.memory = int(between("method.fedcda.memory", memory, 1, LIMIT))
        self.batches = int(at_least("method.fedcda.batches", batches, 1))
        self.smoothness = at_least("method.fedcda.smoothness", smoothness, 0.0)
        self.warmup_rounds = int(at_least("method.fedcda.warmup_rounds", warmup_rounds, 0))
        self.warmup, self.cache = warmup, cache
        self.budget = at_least("method.fedcda.budget", budget, 0.0)

    def setup(self, run: Setup) -> None:
        """Keep, for each client seen, its last models (a ring) with their losses and rounds."""
        refuse_sample_weights(run)
        for other in ("fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedexp", "fedasync", "fadas"):
            run.excludes(other, _SETS)
        for other in ("fedbuff", "groupdro"):
            run.excludes(other, _WEIGHS)
        run.excludes(
            "inco", "it changes a mean update, and FedCDA sets the model to a mean of cached ones"
        )
        run.upload("loss", 1)
        declare_rows(run, self._shape, self.cache, "models")
        for name in ("pushes", "selected"):
            run.server_state(name, lambda server: torch.empty(0, dtype=torch.int64))
        memory = self.memory
        run.server_state("losses", lambda server: torch.empty(0, memory, dtype=torch.float64))
        run.server_state("rounds", lambda server: torch.empty(0, memory, dtype=torch.int64))

    def _shape(self, server: ServerView) -> tuple[int, ...]:
        """Return the shape of a client's models, if all of them fit and can be searched."""
        clients, size = most_rows(server), server.vector.nbytes
        fits = int(self.budget * GIB // max(1, clients * size))
        fewer = f"method.fedcda.memory={fits}" if fits else ""
        what = f"models (memory={self.memory})"
        check_budget("method.fedcda", clients, self.memory * size, self.budget, what, fewer)
        _check_search(self.memory, self.batches, min(clients, server.size))
        return self.memory, len(server.vector)

    def end(self, job: LocalJob) -> None:
        """Upload F_n, the mean loss of the last epoch.

        Of epochs that differ in length (FedBSS) the last is taken to have the mean length.
        """
        losses = job.losses
        last = losses[-max(1, len(losses) // (job.local.epochs or 10)) :]
        job.upload["loss"] = last.mean(0, keepdim=True) if len(last) else losses.new_zeros(1)

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """From x to the mean of the selected models, buffers included."""
        state, rows = server.state, rows_of(aggregation, server, self.cache, "models")
        for name in ("pushes", "selected", "losses", "rounds"):
            state[name] = padded(state[name], len(state["clients"]))
        losses = aggregation.uploads("loss")
        for row, update, delta, loss in zip(
            rows, aggregation.updates, aggregation.deltas, losses, strict=True
        ):
            place = self._pushed(row, float(loss), server)
            torch.add(aggregation.base(update), delta, out=place)
        warm = server.version < self.warmup_rounds
        if warm and self.warmup == "fedavg":
            direction = _mean_movement(aggregation, server)
        else:
            direction = self._select([] if warm else rows, server).to(server.vector.dtype)
        places = torch.arange(len(state["clients"])), state["selected"]
        ages = server.version - state["rounds"][places]
        server.report["age"] = float(ages.double().mean())
        return direction

    def _pushed(self, row: int, loss: float, server: ServerView) -> Tensor:
        """The place [layout.shared] of the client's oldest model, for this one, which is the selected one for now."""
        state = server.state
        place = int(state["pushes"][row]) % self.memory
        state["pushes"][row] += 1
        state["selected"][row] = place
        state["losses"][row, place] = loss
        state["rounds"][row, place] = server.version
        return state["models"][row, place]

    def _select(self, participants: Sequence[int], server: ServerView) -> Tensor:
        """Let these rows' clients choose anew: [layout.shared] float64 from x to the mean of all selected models."""
        state = server.state
        models, losses, selected = (state[name] for name in ("models", "losses", "selected"))
        rows = sorted(set(participants), key=state["clients"].tolist().__getitem__)
        rows = [rows[index] for index in server.stream("batches").permutation(len(rows))]
        chosen, choosing = _Chosen(server.vector, server.layout.trained), set(rows)
        for row in range(len(models)):
            if row not in choosing:
                place = int(selected[row])
                chosen.add(models[row, place], float(losses[row, place]))
        places = [_newest_first(int(state["pushes"][row]), self.memory) for row in rows]
        choices = chosen.extend(
            [
                [models[row, place] for place in newest]
                for row, newest in zip(rows, places, strict=True)
            ],
            [
                [float(losses[row, place]) for place in newest]
                for row, newest in zip(rows, places, strict=True)
            ],
            self.smoothness,
            self.batches,
        )
        for row, newest, choice in zip(rows, places, choices, strict=True):
            selected[row] = newest[choice]
        return chosen.mean()


def _newest_first(pushes: int, memory: int) -> list[int]:
    """The places of a ring that hold something."""
    return [(pushes - 1 - back) % memory for back in range(min(pushes, memory))]


def _mean_movement(aggregation: Aggregation, server: ServerView) -> Tensor:
    """FedAvg's direction with equal weights, in its order and groups, to the mean of the participants' models."""
    movements = []
    for update, delta in zip(aggregation.updates, aggregation.deltas, strict=True):
        stale = update.version != server.version
        movements.append(delta + (aggregation.base(update) - server.vector) if stale else delta)
    groups = [
        movements[start : start + server.group] for start in range(0, len(movements), server.group)
    ]
    return _sum([_sum(group) for group in groups]).div_(float(len(movements)))


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """In their order."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total
