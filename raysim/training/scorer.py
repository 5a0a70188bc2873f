"""Score the shared model and the clients' own models on a worker."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raysim.api.client_state import ClientState, StoredState, to_named_arrays
from raysim.api.declarations import Finetune
from raysim.api.local_job import PersonalModel
from raysim.api.messages import PublishedVersion, ScoringReport, ScoringTask as ScoringTask
from raysim.api.state_values import unpack
from raysim.training.broadcast import Broadcast, Receiver
from raysim.training.run_spec import RunSpec
from raysim.training.trainer import Trainer
from raysim.training.worker_states import WorkerStates


class Scorer:
    """A scorer of models. It uses no random stream of training and changes no statistics."""

    def __init__(self, spec: RunSpec, trainer: Trainer, states: WorkerStates, receiver: Receiver):
        self.spec, self.trainer, self.states, self.receiver = spec, trainer, states, receiver
        self.vector, self.layout = trainer.vector, trainer.vector.layout
        self.personalisers = trainer.declarations.hooks_of("personalise")

    def evaluate(
        self,
        tasks: Sequence[ScoringTask],
        published: PublishedVersion,
        states: Sequence[StoredState | None],
    ) -> list[ScoringReport]:
        """Return the scores and losses of each task's rows.

        states: client states that are sent, one per task; empty if all are resident.
        """
        broadcast = self.receiver.receive(published)
        self.trainer.set_training(False)
        reports: list[ScoringReport] = []
        for index, task in enumerate(tasks):
            self._load(task, broadcast, states[index] if states else None)
            if task.finetune is not None:
                self._finetune(task.client, published.version, task.finetune)
                self.trainer.set_training(False)
            with torch.no_grad():
                reports.append(self._report(task))
        return reports

    def scored_tensors(
        self, task: ScoringTask, published: PublishedVersion, sent: StoredState | None
    ) -> dict[str, Tensor]:
        """Return every tensor of the networks that a task would score, by full name."""
        self._load(task, self.receiver.receive(published), sent)
        tensors = self.vector.named(self.vector.data, self.vector.counters)
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def client_tensors(self, task: ScoringTask, sent: StoredState | None) -> dict[str, np.ndarray]:
        """Return the client state of a task's client, by full name."""
        state = self.states.get(task.client, task.state, sent)
        return to_named_arrays(state.each(lambda tensor: tensor.cpu().numpy()), self.layout)

    def predictions(
        self, task: ScoringTask, published: PublishedVersion, sent: StoredState | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return labels [n] and outputs [n, C] of a task's rows."""
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
        """Load the model that a task scores into the vector."""
        state = self.states.initial
        if task.client >= 0:
            state = self.states.get(task.client, task.state, sent)
        self.trainer.load(broadcast.base, broadcast.counters, state)
        if task.client >= 0 and task.personalised:
            self._personalise(task, state)

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
        objective, metric = self.trainer.task.objective, self.trainer.task.metric
        model = self.vector.networks["model"]
        scores, losses = [], []
        for inputs, labels in self.trainer.data.gather_parts(task.rows, self.spec.score_batch):
            logits = model(inputs)
            losses.append(objective.losses(logits, labels))
            scores.append(metric.rows(logits, labels))
        return ScoringReport(
            task.client, torch.cat(scores).cpu().numpy(), torch.cat(losses).cpu().numpy()
        )
