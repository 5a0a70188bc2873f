"""Score the shared model and clients' own models on a worker."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.api.client_state import ClientState, StoredState, to_named_arrays
from raysim.api.declarations import Finetune
from raysim.api.hook_checks import check_metrics
from raysim.api.local_job import PersonalModel, ScoredModel
from raysim.api.messages import (
    PublishedVersion,
    ScoringReport,
    ScoringTask as ScoringTask,
    SetReport,
)
from raysim.api.metrics import ScoresOfRows
from raysim.api.objectives import mean_loss
from raysim.api.state_values import unpack
from raysim.training.broadcast import Broadcast, Receiver
from raysim.training.run_spec import RunSpec
from raysim.training.trainer import Trainer
from raysim.training.worker_states import WorkerStates


class Scorer:
    """The part of a worker that scores models, without side effects on training.

    Several functions have these arguments:

    task: says which model is scored (the shared model or a client's), and on which samples.
    sent: the client's state; None if it is on this worker, or if it is not needed.
    """

    def __init__(self, spec: RunSpec, trainer: Trainer, states: WorkerStates, receiver: Receiver):
        self.spec, self.trainer, self.states, self.receiver = spec, trainer, states, receiver
        self.vector, self.layout = trainer.vector, trainer.vector.layout
        self.personalisers = trainer.declarations.hooks_of("personalise")
        methods = trainer.declarations.methods
        self.loaders = [declared for declared in methods if declared.load is not None]
        self.set_scorer = trainer.declarations.declarer("evaluate")

    def evaluate(
        self,
        tasks: Sequence[ScoringTask],
        published: PublishedVersion,
        states: Sequence[StoredState | None],
    ) -> list[ScoringReport | SetReport]:
        """Return a report for each task: the scores and losses of its samples.

        If a method declares `run.evaluate`, a report has this method's scores instead.
        states: the client state of each task; None for a state on this worker. An empty sequence
        means that all states are on this worker.
        """
        broadcast = self.receiver.receive(published)
        self.trainer.set_training(False)
        reports: list[ScoringReport | SetReport] = []
        for index, task in enumerate(tasks):
            self._load(task, broadcast, states[index] if states else None)
            if task.finetune is not None:
                self._finetune(task.client, published.version, task.finetune)
                self.trainer.set_training(False)
            with torch.no_grad():
                if self.set_scorer is None:
                    reports.append(self._report(task))
                else:
                    state = states[index] if states else None
                    reports.append(self._report_set(task, self._scored(task, broadcast, state)))
        return reports

    def best_version(
        self, client: int, versions: Sequence[PublishedVersion], state: ClientState[Tensor]
    ) -> int:
        """Return the index of the version with the smallest loss on a client's training samples.

        The loss is the mean over all samples, in eval mode and without augmentation. The first of
        equal versions wins.
        """
        self.trainer.set_training(False)
        losses = []
        for published in versions:
            broadcast = self.receiver.receive(published)
            self.trainer.load(broadcast.base, broadcast.counters, state)
            losses.append(self._mean_loss(client))
        return losses.index(min(losses))

    def _mean_loss(self, client: int) -> float:
        model, objective = self.vector.networks["model"], self.trainer.task.objective
        losses = []
        with torch.no_grad():
            for inputs, labels in self.trainer.client_samples(client):
                losses.append(objective.losses(model(inputs), labels))
        return mean_loss(torch.cat(losses).cpu().numpy())

    def scored_tensors(
        self, task: ScoringTask, published: PublishedVersion, sent: StoredState | None
    ) -> dict[str, Tensor]:
        """Return all tensors of the model that a task scores, by full name, without scoring it.

        published: the version to score.
        sent: the client state, if the coordinator sent it with the task; otherwise None.
        """
        self._load(task, self.receiver.receive(published), sent)
        tensors = self.vector.named(self.vector.data, self.vector.counters)
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def client_tensors(self, task: ScoringTask, sent: StoredState | None) -> dict[str, np.ndarray]:
        """Return the client state of a scored client as NumPy arrays, by full name.

        Full names are, for example, "model.head.weight" or "method.name".
        sent: the client state, if the coordinator sent it with the task; otherwise None.
        """
        state = self.states.get(task.client, task.state, sent)
        return to_named_arrays(state.each(lambda tensor: tensor.cpu().numpy()), self.layout)

    def predictions(
        self, task: ScoringTask, published: PublishedVersion, sent: StoredState | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return labels [n] and the model's outputs [n, C] for a task's rows.

        published: the version whose model is used.
        sent: the client state, if the coordinator sent it with the task; otherwise None.
        """
        self.trainer.set_training(False)
        self._load(task, self.receiver.receive(published), sent)
        model = self.vector.networks["model"]
        labels, outputs = [], []
        with torch.no_grad():
            for inputs, targets in self.trainer.data.gather_parts(task.rows, self.spec.score_batch):
                labels.append(targets.cpu())
                outputs.append(model(inputs).cpu())
        return torch.cat(labels).numpy(), torch.cat(outputs).numpy()

    def _load(self, task: ScoringTask, broadcast: Broadcast, sent: StoredState | None) -> None:
        """Load the model that a task scores into the trainer's vector.

        The hooks `load` may change this model. The hooks `personalise` may change a client's model,
        unless `task.personalised` is False.

        task: a negative `task.client` means the shared model.
        sent: the client state, if the coordinator sent it; otherwise None.
        """
        state = self.states.initial
        if task.client >= 0:
            state = self.states.get(task.client, task.state, sent)
        self.trainer.load(broadcast.base, broadcast.counters, state)
        if self.loaders:
            scored = self._scored(task, broadcast, sent)
            for declared in self.loaders:
                assert declared.load is not None, "loaders declare it"
                declared.load(scored.of(declared.method))
        if task.client >= 0 and task.personalised:
            self._personalise(task, state)

    def _scored(
        self, task: ScoringTask, broadcast: Broadcast, sent: StoredState | None
    ) -> ScoredModel:
        """Return the argument of the hooks `load` and `evaluate`: a model, and samples to score.

        The caller must have loaded the model into the trainer's vector.

        broadcast: the scored version, for the tensors that methods send with it.
        sent: the client state, if the coordinator sent it; otherwise None.
        """
        values: Mapping[str, Any] = {}
        if task.client >= 0:
            values = unpack(self.states.get(task.client, task.state, sent).methods)
        model = PersonalModel(
            task.client,
            self.trainer.task,
            self.vector,
            values,
            {**broadcast.download, **self.receiver.tensors(task.extras)},
            functools.partial(self.trainer.client_samples, task.client),
            task.state >= 0,
        )
        return ScoredModel(model, task.rows, task.name, self.trainer.seed, self.trainer.data.gather)

    def _report_set(self, task: ScoringTask, scored: ScoredModel) -> SetReport:
        declared = self.set_scorer
        assert declared is not None and declared.evaluate is not None, "a method scores sets"
        metrics = declared.evaluate(scored.of(declared.method))
        return SetReport(task.client, task.name, check_metrics(metrics, declared.method))

    def _personalise(self, task: ScoringTask, state: ClientState[Tensor]) -> None:
        """Let the methods turn the vector into the client's own model."""
        client = PersonalModel(
            task.client,
            self.trainer.task,
            self.vector,
            unpack(state.methods),
            self.receiver.tensors(task.extras),
            functools.partial(self.trainer.client_samples, task.client),
            task.state >= 0,
        )
        with torch.no_grad():
            for declared, personalise in self.personalisers:
                personalise(client.of(declared.method))

    def _finetune(self, client: int, version: int, settings: Finetune) -> None:
        partition = self.spec.data.partition
        rows = partition.all_train.rows(client)
        if settings.samples == "all" and partition.spare is not None:
            rows = np.concatenate([rows, partition.spare.rows(client)])
        self.trainer.finetune(client, rows, version, settings)

    def _report(self, task: ScoringTask) -> ScoringReport:
        objective = self.trainer.task.objective
        reported_losses = objective.parts or objective.losses
        model = self.vector.networks["model"]
        scores, losses = ScoresOfRows(self.trainer.task.metrics), []
        for inputs, labels in self.trainer.data.gather_parts(task.rows, self.spec.score_batch):
            logits = model(inputs)
            losses.append(reported_losses(logits, labels))
            scores.add(logits, labels)
        return ScoringReport(task.client, scores.arrays(), torch.cat(losses).cpu().numpy())
