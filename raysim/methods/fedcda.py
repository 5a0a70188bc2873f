"""FedCDA: choose one of each client's last K models; their mean is the next version.

Source: Wang et al., "FedCDA: Federated Learning with Cross-rounds Divergence-aware Aggregation"
(ICLR 2024), eqs. (3), (7) and (8), Algorithm 1. K is the setting `memory`. The participants are
divided at random into groups (the setting `batches`). For one group after another, the server
chooses a cached model w_n for each client n of the group. Clients that do not participate keep
their last w_n. F_n is the loss of w_n, and L the setting `smoothness`. The choice of a group
minimises

    J = mean F_n(w_n) + (L/2) mean |w_n - w_bar|^2          w_bar: the mean of the models w_n

The means leave out the clients of later groups. At the end, the next version is the mean of w_n
over all clients.

Departures from the paper
- Clients without an update so far are left out.
- F_n is the mean training loss in a job's last epoch. With local.steps, it is the mean over the
  last tenth of the steps.
- BatchNorm's statistics are averaged with their model, but are not part of the norm.
- The model of a stale client is its base version plus its update.
- Weights of other methods have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

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
from raysim.primitives.checks import at_least, between, one_of
from raysim.primitives.errors import RefusedError
from raysim.vectors.blocks import split_range
from raysim.vectors.gram import linear_combination
from raysim.vectors.row_store import GIB, CachePlace, check_budget

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

WarmupRule: TypeAlias = Literal["fedavg", "selected"]

# Combinations that a batch may try; their tables take at most 100 MB.
MAX_COMBINATIONS = 1_000_000
_BLOCK = 1 << 16  # entries of a model that are converted to float64 at once
# Objectives with a smaller relative difference count as equal: the first combination is used.
_TIE = 1e-12


# --- the mathematics ------------------------------------------------------------------------------
def divergence(*, models: Tensor) -> Tensor:
    """Return the mean squared distance of `models` [M, D] to their mean."""
    return (models - models.mean(0)).square().sum(1).mean()


# The method computes the same without these functions, which state the rule on plain tensors.
def selection_objective(*, models: Tensor, losses: Tensor, smoothness: float) -> Tensor:
    """Return FedCDA's objective for M models: mean loss + smoothness / 2 * divergence.

    The divergence is the mean squared distance of the models to their mean.
    models: [M, D].
    losses: [M], the loss of each model.
    """
    return losses.mean() + smoothness / 2 * divergence(models=models)


def cross_round_aggregate(*, models: Tensor) -> Tensor:
    """Return the uniform mean of the selected models, [D]; it is computed in float64.

    models: [N, D]. The result has the dtype of `models`.
    """
    selection = _Selection(torch.zeros_like(models[0]), models.shape[1])
    for model in models:
        selection.add(model, 0.0)
    return selection.mean().to(models.dtype)


def select_models(
    *,
    candidates: Tensor,
    candidate_losses: Tensor,
    num_candidates: Tensor,
    fixed_models: Tensor,
    fixed_losses: Tensor,
    smoothness: float,
) -> Tensor:
    """Choose a cached model for each of B clients; return the index of each model: int64 [B].

    The chosen models, together with `fixed_models`, minimise `selection_objective`. Of several such
    choices, the lexicographically first one is returned.

    candidates: [B, K, D], up to K cached models of each client, newest first.
    candidate_losses: [B, K], their losses.
    num_candidates: int64 [B], the number of cached models of each client.
    fixed_models: [F, D], the models of other clients; F may be 0.
    fixed_losses: [F], the losses of the fixed models.
    smoothness: the weight L of the divergence.
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
    """Choose a cached model for each of P clients; return the index of each model: int64 [P].

    The clients are divided into groups. `select_models` chooses the models of one group after
    another. For later groups, the models of earlier groups are fixed.
    num_batches: the number of groups.
    All other arguments are those of `select_models`, whose docstring has their shapes; its number
    of clients B is P here.
    """
    selection = _Selection(candidates[0, 0], candidates.shape[2])
    for model, loss in zip(fixed_models, fixed_losses.tolist(), strict=True):
        selection.add(model, loss)
    models, losses = [], []
    client_losses = candidate_losses.tolist()
    for client, count in enumerate(num_candidates.tolist()):
        models.append(candidates[client, :count].unbind())
        losses.append(client_losses[client][:count])
    return torch.tensor(selection.extend(models, losses, smoothness, num_batches))


class _Selection:
    """The models that are chosen so far.

    The object stores their number and three sums in float64: the sum of the losses, the sum of the
    models and the sum of the squared norms.
    centre: a vector [D] near the models. It is subtracted from each model, because sums of small
    numbers have smaller rounding errors.
    trained: the number of trainable parameters, which come first. Norms use only these parameters.
    """

    def __init__(self, centre: Tensor, trained: int):
        self.centre = centre
        self.trained = trained
        self.count = 0
        self.loss = 0.0
        self.square = 0.0
        self.total = torch.zeros(len(centre), dtype=torch.float64)

    def mean(self) -> Tensor:
        """Return the mean of the chosen models, minus the vector `centre`: float64 [D]."""
        return self.total / self.count

    def add(self, model: Tensor, loss: float) -> None:
        """Add a model [D] and its loss to the chosen models."""
        self.count += 1
        self.loss += loss
        for block in split_range(0, self.trained, _BLOCK):
            difference = model[block].double() - self.centre[block]
            self.total[block] += difference
            self.square += float(difference.dot(difference))
        for block in split_range(self.trained, len(model), _BLOCK):
            self.total[block] += model[block].double() - self.centre[block]

    def extend(
        self,
        models: Sequence[Sequence[Tensor]],
        losses: Sequence[Sequence[float]],
        smoothness: float,
        num_batches: int,
    ) -> list[int]:
        """Choose one model for each client, and add the chosen models to this selection.

        models: the cached models of each client.
        losses: the losses of the cached models.
        num_batches: the number of client groups, which choose one after another.
        Return the position of each client's chosen model.
        """
        choices: list[int] = []
        for batch in np.array_split(np.arange(len(models)), num_batches):
            if not len(batch):
                continue
            clients = slice(int(batch[0]), int(batch[-1]) + 1)
            choice = self._search(models[clients], losses[clients], smoothness)
            for client, index in zip(batch.tolist(), choice, strict=True):
                self.add(models[client][index], losses[client][index])
            choices += choice
        return choices

    def _search(
        self,
        models: Sequence[Sequence[Tensor]],
        losses: Sequence[Sequence[float]],
        smoothness: float,
    ) -> list[int]:
        """Choose a cached model for each client; return its position in the client's list.

        The choice minimises the objective, which is computed from the newly chosen models and the
        models that are already in this selection. Of several such choices, the lexicographically
        first one is returned.
        models, losses: the cached models of each client, and their losses.
        """
        all_models = [model for candidates in models for model in candidates]
        gram, products = self._gram(all_models)
        loss = torch.tensor([self.loss], dtype=torch.float64)
        square = torch.tensor([self.square], dtype=torch.float64)
        # |sum of the set|^2 for each combination, and its products with the remaining candidates.
        norm = self.total[: self.trained].square().sum()[None]
        cross = products[None]
        for client_losses in losses:
            count = len(client_losses)
            norms = gram.diagonal()[:count]
            loss = (loss[:, None] + torch.tensor(client_losses, dtype=torch.float64)).flatten()
            square = (square[:, None] + norms).flatten()
            norm = (norm[:, None] + 2 * cross[:, :count] + norms).flatten()
            cross = (cross[:, None, count:] + gram[:count, count:]).flatten(0, 1)
            gram = gram[count:, count:]
        total = self.count + len(models)
        objective = loss / total + smoothness / 2 * (square / total - norm / total**2)
        best = objective.min()
        first = int((objective <= best + _TIE * best.abs()).nonzero()[0])
        sizes = [len(client_losses) for client_losses in losses]
        return [int(index) for index in np.unravel_index(first, sizes)]

    def _gram(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the inner products of T candidate models, as [T, T] and [T].

        The first tensor has all pairs of candidates. The second one pairs each candidate with the
        sum of the chosen models. `self.centre` is first subtracted from all models.
        """
        gram = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        products = torch.zeros(len(rows), dtype=torch.float64)
        for block in split_range(0, self.trained, _BLOCK):
            differences = torch.stack([row[block] for row in rows]).double() - self.centre[block]
            gram.addmm_(differences, differences.T)
            products.addmv_(differences, self.total[block])
        return gram, products


def _check_search(memory: int, batches: int, participants: int) -> None:
    """Raise `RefusedError` if the clients of a group have too many combinations of models.

    memory: the number of cached models of a client.
    batches: the number of groups of participants.
    """
    clients = -(-participants // batches)
    combinations = memory**clients
    if combinations <= MAX_COMBINATIONS:
        return
    largest_batch = 0
    while memory ** (largest_batch + 1) <= MAX_COMBINATIONS:
        largest_batch += 1
    raise RefusedError(
        f"method.fedcda.batches={batches}: with this number of client groups, a group has up "
        f"to {clients} clients with {memory} stored models each. This makes {combinations:.2g} "
        f"combinations of models; at most {MAX_COMBINATIONS} are allowed. For smaller groups, set "
        f"method.fedcda.batches={-(-participants // largest_batch)}."
    )


# The reasons why other methods cannot be combined with FedCDA.
_TAKES_A_STEP = "it makes its own step, but FedCDA sets the model to a mean of cached models"
_WEIGHS = "FedCDA gives all clients the same weight"
_CHANGES_MEAN = "it changes a mean update, but FedCDA sets the model to a mean of cached models"


class FedCDA(Method):
    """A server rule that caches the last models of every client and chooses among them.

    The choice minimises the mean loss of the chosen models, plus L / 2 times their mean squared
    distance to their mean.

    memory: the number of cached models per client.
    batches: the number of groups of participants. The server chooses the models of one group after
    another.
    smoothness: the factor L on the distances.
    warmup_rounds: the number of rounds at the start in which no models are chosen.
    warmup: the average in these rounds. "fedavg" takes the models of the participants, "selected"
    the newest models of all clients.
    cache: where models are stored, "disk" or "memory".
    budget: the largest size of the cache, in GiB.
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
        warmup: WarmupRule = "fedavg",
        cache: CachePlace = "disk",
        budget: float = 8.0,
    ):
        self.memory = int(between("method.fedcda.memory", memory, 1, MAX_COMBINATIONS))
        self.batches = int(at_least("method.fedcda.batches", batches, 1))
        self.smoothness = at_least("method.fedcda.smoothness", smoothness, 0.0)
        self.warmup_rounds = int(at_least("method.fedcda.warmup_rounds", warmup_rounds, 0))
        self.warmup = one_of("method.fedcda.warmup", warmup, get_args(WarmupRule))
        self.cache = one_of("method.fedcda.cache", cache, get_args(CachePlace))
        self.budget = at_least("method.fedcda.budget", budget, 0.0)

    # --- before the run -----------------------------------------------------------------------
    def setup(self, run: Setup) -> None:
        """Declare the server state: a ring buffer with each client's last models.

        With each model, the server stores its loss and its round.
        """
        refuse_sample_weights(run)
        for other in (
            "fedavgm",
            "fedadagrad",
            "fedadam",
            "fedyogi",
            "fedexp",
            "fedasync",
            "fadas",
            "delayed_nesterov",
            "streaming_diloco",
        ):
            run.excludes(other, _TAKES_A_STEP)
        for other in ("fedbuff", "groupdro"):
            run.excludes(other, _WEIGHS)
        run.excludes("inco", _CHANGES_MEAN)
        run.upload("loss", 1)
        declare_rows(run, self._models_shape, self.cache, "models")
        for name in ("pushes", "selected"):
            run.server_state(name, lambda server: torch.empty(0, dtype=torch.int64))
        memory = self.memory
        run.server_state("losses", lambda server: torch.empty(0, memory, dtype=torch.float64))
        run.server_state("rounds", lambda server: torch.empty(0, memory, dtype=torch.int64))

    def _models_shape(self, server: ServerView) -> tuple[int, ...]:
        """Return the shape of a client's cached models: (number of models, floats in a model).

        Raise an error if the cache needs more than `budget` GiB, or if a group of participants has
        too many combinations of cached models.
        """
        clients, model_bytes = most_rows(server), server.vector.nbytes
        fitting = int(self.budget * GIB // max(1, clients * model_bytes))
        remedy = f"method.fedcda.memory={fitting}" if fitting else ""
        what = f"stored models (method.fedcda.memory={self.memory})"
        check_budget("method.fedcda", clients, self.memory * model_bytes, self.budget, what, remedy)
        _check_search(self.memory, self.batches, min(clients, server.max_updates))
        return self.memory, len(server.vector)

    # --- a client's job -----------------------------------------------------------------------
    def end(self, job: LocalJob) -> None:
        """Upload the mean loss of the job's last epoch.

        With local.steps, it is the mean loss of the last tenth of the steps.
        """
        losses = job.losses
        if not len(losses):
            job.upload["loss"] = losses.new_zeros(1)
            return
        steps = max(1, len(losses) // (job.local.epochs or 10))
        job.upload["loss"] = losses[-steps:].mean(0, keepdim=True)

    # --- an aggregation -----------------------------------------------------------------------
    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the mean of the selected models minus the current version.

        The result has all shared parameters and floating-point buffers, as one vector. In the
        warm-up rounds with warmup="fedavg", the mean is over the participants' models instead.
        """
        state = server.state
        rows = rows_of(aggregation, server, self.cache, "models")
        for name in ("pushes", "selected", "losses", "rounds"):
            state[name] = padded(state[name], len(state["clients"]))
        losses = aggregation.uploads("loss")
        for number, row in enumerate(rows):
            place = self._push(row, float(losses[number]), server)
            base = aggregation.base(aggregation.updates[number])
            torch.add(base, aggregation.deltas[number], out=place)

        is_warmup = server.version < self.warmup_rounds
        if is_warmup and self.warmup == "fedavg":
            direction = _mean_movement(aggregation, server)
        else:
            choosing_rows = [] if is_warmup else rows
            direction = self._select(choosing_rows, server).to(server.vector.dtype)

        all_rows = torch.arange(len(state["clients"]))
        ages = server.version - state["rounds"][all_rows, state["selected"]]
        server.report["age"] = float(ages.double().mean())
        return direction

    def _push(self, row: int, loss: float, server: ServerView) -> Tensor:
        """Make a client's new model the chosen one; if its cache is full, replace the oldest model.

        Return the vector of the cache into which the caller must write the new model.
        row: the client's row in the cache.
        """
        state = server.state
        place = int(state["pushes"][row]) % self.memory
        state["pushes"][row] += 1
        state["selected"][row] = place
        state["losses"][row, place] = loss
        state["rounds"][row, place] = server.version
        return state["models"][row, place]

    def _select(self, participants: Sequence[int], server: ServerView) -> Tensor:
        """Choose a model for each participant; return the step to the mean of all chosen models.

        The step is float64 and has all shared tensors.
        participants: the participants' rows in the server's cache. All other clients keep the
        models that they chose before.
        """
        state = server.state
        models, losses, selected = state["models"], state["losses"], state["selected"]
        clients = state["clients"].tolist()
        rows = sorted(set(participants), key=lambda row: clients[row])
        rows = [rows[index] for index in server.stream("batches").permutation(len(rows))]

        selection = _Selection(server.vector, server.layout.trained)
        choosing = set(rows)
        for row in range(len(models)):
            if row not in choosing:
                place = int(selected[row])
                selection.add(models[row, place], float(losses[row, place]))

        places, row_models, row_losses = [], [], []
        for row in rows:
            newest_first = _newest_first(int(state["pushes"][row]), self.memory)
            places.append(newest_first)
            row_models.append([models[row, place] for place in newest_first])
            row_losses.append([float(losses[row, place]) for place in newest_first])
        choices = selection.extend(row_models, row_losses, self.smoothness, self.batches)
        for row, newest_first, choice in zip(rows, places, choices, strict=True):
            selected[row] = newest_first[choice]
        return selection.mean()


def _newest_first(pushes: int, memory: int) -> list[int]:
    """Return the positions of a ring buffer that hold models; the newest model comes first.

    pushes: the number of models that were stored so far.
    memory: the length of the ring buffer.
    """
    return [(pushes - 1 - back) % memory for back in range(min(pushes, memory))]


def _mean_movement(aggregation: Aggregation, server: ServerView) -> Tensor:
    """Return the mean of the participants' models minus the current version.

    If no update is stale, the result is bit-identical to FedAvg's step with equal weights.
    """
    movements = []
    for update, delta in zip(aggregation.updates, aggregation.deltas, strict=True):
        if update.version == server.version:
            movements.append(delta)
        else:
            movements.append(delta + (aggregation.base(update) - server.vector))
    total = linear_combination(movements, [1.0] * len(movements))
    return total.div_(float(len(movements)))
