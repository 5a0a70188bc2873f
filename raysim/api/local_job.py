"""Define what a method's hooks see: a client's training job, and a model that is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from raysim.api.context import Context, Plan, Stage
from raysim.api.declarations import Local, Task
from raysim.api.entries import Entries
from raysim.data.partition import CSR
from raysim.vectors.layout import Layout, Vector

if TYPE_CHECKING:
    from raysim.models import Classifier


class LocalJob:
    """A client's local training, as one method sees it: the argument of the hooks of a job.

    Names are short: `job.state["control"]` of SCAFFOLD is stored as "scaffold.control". An
    undeclared name in `state` or `upload` raises HookError.

    state: the client state (`Setup.client_state`). Assign new values; never change tensors in
    place.
    received: the tensors that came with the model (`Setup.send`).
    upload: the tensors that the client sends with its update (`Setup.upload`). Assign them in the
    hook `end`.
    report: numbers for the history, which the client does not send. `job.report["gap"] = 0.1` of
    SCAFFOLD fills the column "scaffold.gap".
    scratch: values that the method needs until the end of this job.

    Recorded steps (`runtime.graph`) read values of `state`, `scratch` and `drawn` as follows.
    - Tensors and floats may differ between jobs. A hook of a batch reads a float as a scalar
      tensor, so do not compare it or use it in `if`.
    - For each different other value, such as True or an integer, a step is recorded. The same holds
      for `client`, `participation`, `version`, `samples`, `step` and `plan`.
    So compute a weight that depends on the version in `begin`, and store it in `scratch` as a
    float: `job.scratch["weight"] = min(1.0, job.version / 100)`.
    """

    __slots__ = ("context", "method", "received", "report", "scratch", "state", "upload")

    def __init__(self, context: Context, method: str):
        self.context = context
        self.method = method
        self.state: Entries[Any] = Entries(context, "state", method)
        self.received: Entries[Tensor] = Entries(context, "download", method)
        self.upload: Entries[Tensor] = Entries(context, "upload", method)
        self.report: Entries[float] = Entries(context, "report", method)
        self.scratch: Entries[Any] = Entries(context, "kept", method)

    # --- which job ----------------------------------------------------------------------------
    @property
    def client(self) -> int:
        """The number of the client."""
        return self.context.client

    @property
    def participation(self) -> int:
        """The number of this client's jobs that were dispatched before this one."""
        return self.context.participation

    @property
    def version(self) -> int:
        """The number of the version that the client received: how many aggregations made it."""
        return self.context.version

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.context.seed

    @property
    def samples(self) -> int:
        """The number of the client's training samples."""
        return self.context.samples

    @property
    def rate(self) -> float:
        """The learning rate of this job, `local.rate(version)`.

        The factors `Stage.rate`, `local.rates` and `Local.step_factors` are not included.
        """
        return self.context.rate

    @property
    def plan(self) -> Plan:
        """The batches of this job; available from the hook `prepare` on."""
        return self.context.plan

    @property
    def step(self) -> int:
        """The number of the current batch, from 0."""
        return self.context.step

    @property
    def stage(self) -> Stage:
        """The stage of the current optimizer step; each batch has one or more stages."""
        return self.context.stage

    @property
    def losses(self) -> Tensor:
        """The task loss [n] of the n steps that have one, without the terms of methods.

        It is available in the hook `end`. With a function from `Setup.train`, it is the loss that
        this function returned, and empty if that loss is unknown.
        """
        return self.context.losses

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return `scratch[name]`; compute it at the first use in this job."""
        if name not in self.scratch:
            self.scratch[name] = compute()
        value: Tensor = self.scratch[name]
        return value

    # --- the run ------------------------------------------------------------------------------
    @property
    def task(self) -> Task:
        """The learning task: shapes, classes, loss and metrics."""
        return self.context.trainer.task

    @property
    def local(self) -> Local:
        """The settings `local.*`."""
        return self.context.trainer.local

    @property
    def layout(self) -> Layout:
        """The position of each tensor in the flat vector."""
        return self.context.vector.layout

    @property
    def partition(self) -> CSR:
        """The positions of all clients' training samples in the data set.

        `job.partition.rows(k)` returns the positions of client k's samples, int64 [n]. A real
        client could not know the positions of other clients' samples.
        """
        return self.context.trainer.partition

    @property
    def num_classes(self) -> int:
        """The number of the model's outputs: the task's classes and those that a method adds."""
        return self.context.num_classes

    # --- the model ----------------------------------------------------------------------------
    @property
    def vector(self) -> Vector:
        """The object that holds all networks in one flat vector; `job.params` is the vector."""
        return self.context.vector

    @property
    def params(self) -> Tensor:
        """The flat vector [layout.total] that this job trains; shared parameters come first."""
        return self.context.vector.data

    @property
    def start(self) -> Tensor:
        """The vector [layout.shared] from which the training of this job starts.

        By default it is the received version, `job.broadcast`. In the hook `begin`, a method can
        assign another vector, which is loaded into the model at once.
        """
        return self.context.base

    @start.setter
    def start(self, vector: Tensor) -> None:
        self.context.base = vector
        self.context.vector.shared.copy_(vector)

    @property
    def broadcast(self) -> Tensor:
        """The version [layout.shared] that the client received; the update is relative to it."""
        return self.context.received

    @property
    def broadcast_counters(self) -> Tensor:
        """The integer buffers, int64 [layout.shared_counters], that the client received."""
        return self.context.received_counters

    @property
    def model(self) -> Classifier:
        """The model that this job trains."""
        return self.context.model

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """All networks that this job trains, by full name.

        The full name of the model is "model". If the method "fedbr" has added a network with the
        name "projector", its full name is "fedbr.projector".
        """
        return self.context.networks

    def network(self, name: str) -> nn.Module:
        """Return the network that this method declared with `name`."""
        return self.context.networks[f"{self.method}.{name}"]

    def frozen(
        self, name: str = "received", values: Tensor | None = None
    ) -> Mapping[str, nn.Module]:
        """Return copies of all `networks` by name, in eval mode and without gradients.

        name: a name of your choice. Calls of a job with the same name return the same copies.
        values: the vector [layout.total] to load, always the same for a name. None means the
        parameters from which training started.
        """
        return self.context.frozen(name, values)

    def moves(self) -> Iterator[tuple[slice, int, float]]:
        """Yield (slice, steps, rate) for each range of parameters that an optimizer has trained.

        `slice` is a contiguous range of the shared parameters in the flat vector. `steps` is the
        number of optimizer steps on it so far. `rate` is their learning rate, with the mean of
        `Local.step_factors` over all steps of the job.
        """
        for part, steps, factor in self.context.optimizers.movements():
            yield part, steps, self.rate * factor

    def keep_statistics(self) -> AbstractContextManager[None]:
        """Do not update BatchNorm's running statistics in forward passes inside `with`."""
        return self.context.keep_statistics()

    # --- data and random numbers --------------------------------------------------------------
    def data(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (inputs, labels) of the client's training samples, without augmentation."""
        return self.context.data()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return all training samples of the client: normalised inputs [n, ...], and labels.

        Labels are classes [n], or [n, ...] if the task is not classification.
        """
        return self.gather(self.rows)

    def dataset(self) -> TensorDataset:
        """Return the client's training samples as a data set for `torch.utils.data.DataLoader`."""
        return TensorDataset(*self.tensors())

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the client's training samples as NumPy arrays: normalised inputs, labels."""
        inputs, labels = self.tensors()
        return inputs.cpu().numpy(), labels.cpu().numpy()

    def torch_generator(self, purpose: str) -> torch.Generator:
        """Return a new torch generator (CPU) for one purpose of the method in this job.

        Generators of the same purpose draw the same numbers.
        purpose: a name for the use of the numbers, such as "shuffle".
        """
        seed = int(self.stream(purpose).integers(2**63 - 1))
        return torch.Generator().manual_seed(seed)

    @property
    def rows(self) -> np.ndarray:
        """The positions of the client's samples in the data set: int64 [samples]."""
        return self.context.trainer.partition.rows(self.context.client)

    def gather(
        self, rows: np.ndarray, generator: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return normalised inputs [n, ...] and labels of some samples.

        rows: int64 [n], the positions of the samples in the data set.
        generator: draws the random augmentation of the inputs; None does not augment them.
        """
        return self.context.trainer.gather(rows, generator)

    def labels_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the labels of some samples as an array; no inputs are read.

        rows: int64 [n], the positions of the samples in the data set.
        """
        labels = self.context.trainer.labels
        return labels.index_select(0, torch.from_numpy(rows).to(labels.device)).cpu().numpy()

    def class_counts(self) -> Tensor:
        """Return how many training samples of each class the client has: int64 [C] on the CPU."""
        return self.context.class_counts()

    def stream(self, purpose: str) -> np.random.Generator:
        """Return a new random generator for a purpose of the method in this job.

        Calls with the same purpose return generators that draw the same numbers.
        purpose: a name for the use of the numbers, such as "shuffle".
        """
        return self.context.stream(f"{self.method}.{purpose}")

    def drawn(self, name: str) -> Any:
        """Return the random value for the current step, which `Setup.draw` declared.

        name: the name that the method passed to `Setup.draw`.
        """
        return self.context.drawn(f"{self.method}.{name}")

    def input_gradient(self, loss: Tensor, inputs: Tensor) -> Tensor:
        """Return the gradient of the scalar `loss` with respect to `inputs`.

        The result is differentiable, so a loss may contain it.
        """
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return gradient


class PersonalModel:
    """A client's model that is about to be scored: the argument of the hook `personalise`.

    The hook turns `vector`, the shared and personal parameters, into the client's personalised
    model, in place.

    state: the method's client state after the client's last aggregated job, or the initial state.
    received: the tensors of `Setup.send_to_client`.
    data: a function without arguments that yields batches (inputs, labels) of the client's training
    samples.
    trained: True if an aggregation has contained a job of the client, even a failed one. It is
    always False in a run without client states, personal parameters and kept optimizers.
    """

    def __init__(
        self,
        client: int,
        task: Task,
        vector: Vector,
        state: Mapping[str, Any],
        received: Mapping[str, Tensor],
        data: Callable[[], Iterator[tuple[Tensor, Tensor]]],
        trained: bool,
        method: str = "",
    ):
        self.client = client
        self.task = task
        self.vector = vector
        self.data = data
        self.trained = trained
        self.all_state = state
        self.all_received = received
        self.state: Entries[Any] = Entries(self, "all_state", method)
        self.received: Entries[Tensor] = Entries(self, "all_received", method)

    def of(self, method: str) -> PersonalModel:
        """Return a copy for another method, with that method's entries in `state` and `received`.

        method: the name of the method for which the copy is made.
        """
        return PersonalModel(
            self.client,
            self.task,
            self.vector,
            self.all_state,
            self.all_received,
            self.data,
            self.trained,
            method,
        )


class ScoredModel(PersonalModel):
    """A model and the samples to score it on.

    Functions for `Setup.evaluate` and `Setup.load_model` get it as their argument.

    client: the number of the client; -1 for the shared model.
    rows: the samples, int64 positions in the data set.
    name: the set of samples: "client", "central" or "validation". "domain:NAME" is a domain of the
    clients' test samples, and "central:NAME" a domain of the central test set.
    state: the method's client state, by short name; empty for the shared model.
    received: the method's tensors of `Setup.send` and `Setup.send_to_client`, by short name.
    """

    def __init__(
        self,
        model: PersonalModel,
        rows: np.ndarray,
        name: str,
        seed: int,
        gather: Callable[[np.ndarray], tuple[Tensor, Tensor]],
        method: str = "",
    ):
        super().__init__(
            model.client,
            model.task,
            model.vector,
            model.all_state,
            model.all_received,
            model.data,
            model.trained,
            method,
        )
        self.rows = rows
        self.name = name
        self.seed = seed
        self._gather = gather

    def of(self, method: str) -> ScoredModel:
        """Return a copy for another method, with that method's entries in `state` and `received`.

        method: the name of the method for which the copy is made.
        """
        return ScoredModel(self, self.rows, self.name, self.seed, self._gather, method)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the samples: normalised inputs [n, ...], and labels.

        Labels are classes [n], or [n, ...] if the task is not classification.
        """
        return self._gather(self.rows)
