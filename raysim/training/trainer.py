"""Train one job: load its client, make its steps, and call the methods' hooks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.client_state import ClientState
from raysim.api.context import Batch, Context, Contribution, Plan, Stage
from raysim.api.declarations import Finetune, Local, Task
from raysim.api.declare import Declarations
from raysim.api.hook_checks import (
    DeclaredState,
    HookError,
    StateNames,
    check_draws,
    check_state,
    check_upload,
)
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.messages import Job
from raysim.api.state_values import UnstorableValueError, pack, unpack
from raysim.data.batches import Pipeline
from raysim.data.partition import CSR
from raysim.models.classifier import is_stochastic
from raysim.primitives.streams import stream, torch_seed
from raysim.training.batch_plan import BatchPlanner, layer_needing_two_rows, usual_batch_sizes
from raysim.training.client_data import ClientData, PreparedBatches
from raysim.training.client_vector import copy_client_state, load_vector
from raysim.training.frozen_networks import FrozenNetworks
from raysim.training.own_training import OwnTraining, seed_torch
from raysim.training.step import Step
from raysim.training.transfer import has_own_memory
from raysim.vectors.layout import Vector
from raysim.vectors.optimizer import LocalOptimizer

OPTIMIZER = "local.kept."  # prefix of the names of kept optimizers in client state
_TASK_STAGES: Sequence[Sequence[Stage]] = ((Stage(),),)


@dataclass
class RunningJob:
    """A job between `Trainer.begin` and `Trainer.end`.

    cycle: the stages of each training step; after the last entry the first one follows again.
    batches: the batches on which the job has not trained yet.
    losses: the task losses of the steps so far.
    initial_state: the names of the tensors in the client state when the job began.
    result: what a method that trains by itself (`run.train`) returned; else None.
    """

    ctx: Context
    cycle: Sequence[Sequence[Stage]]
    batches: Iterator[Batch]
    losses: list[Tensor] = field(default_factory=list)
    initial_state: Collection[str] = ()
    result: LocalResult | None = None

    @property
    def samples(self) -> int:
        """The number of rows on which the job trained, in all epochs."""
        if self.result is not None and self.result.samples is not None:
            return self.result.samples
        return len(self.ctx.plan.positions)

    @property
    def step_count(self) -> int:
        """The number of training steps in the whole job.

        It is the planned number, unless a user's training function has reported another number.
        """
        if self.result is not None and self.result.steps is not None:
            return self.result.steps
        return self.ctx.plan.steps

    def loss_rows(self) -> list[int]:
        """Return, for each loss in `losses`, the number of samples over which it is a mean.

        Each step with the task loss gives one loss. A user's training function gives at most one
        loss, for all samples of the job.
        """
        if self.result is not None:
            return [self.samples] if self.losses else []
        has_task = [any(stage.has_task_loss for stage in stages) for stages in self.cycle]
        sizes = enumerate(self.ctx.plan.sizes)
        return [size for index, size in sizes if has_task[index % len(has_task)]]


class Trainer:
    """A worker's networks, data and training step, which are used for one job at a time.

    vector: the networks' parameters and buffers, into which each job loads its model.
    inputs: the inputs of all samples of the data set, as it stores them.
    labels: their labels, which methods may have changed.
    partition: each client's rows of training samples.
    pipeline: the augmentation and normalisation of inputs.
    precision: the type of matrix products (autocast); None means the parameters' type.
    """

    def __init__(
        self,
        task: Task,
        vector: Vector,
        declarations: Declarations,
        local: Local,
        inputs: Tensor,
        labels: Tensor,
        partition: CSR,
        pipeline: Pipeline,
        seed: int,
        precision: torch.dtype | None = None,
    ):
        self.task, self.vector, self.local, self.seed = task, vector, local, seed
        self.declarations = declarations
        settings = local.settings(), local.clip, task.objective.loss, precision, local.rates
        self.step = Step(vector, declarations, *settings)
        self._finetuning_step = Step(vector, None, *settings)
        self.usual_sizes = usual_batch_sizes(partition.counts, local.batch)

        self.stager = declarations.declarer("stages")
        declared = declarations.declarer("train")
        self.own_training: OwnTraining | None = None
        if declared is not None and declared.train is not None:
            self.own_training = OwnTraining(declared.method, declared.train, vector)
        self.beginners = declarations.hooks_of("begin")
        self.preparers = declarations.hooks_of("prepare")
        self.finishers = declarations.hooks_of("end")
        self.state_names = StateNames(declarations)
        method_keeps = any(declared.keeps_optimizer for declared in declarations.methods)
        self.keeps_optimizer = local.keep_optimizer or method_keeps

        networks = vector.networks.values()
        self.modules = [module for network in networks for module in network.modules()]
        self.statistics_layers: Sequence[nn.Module] = [
            module for module in self.modules if getattr(module, "track_running_stats", False)
        ]
        self.is_stochastic = is_stochastic(*networks)
        self.needs_two_rows = bool(layer_needing_two_rows(declarations))
        batch_norm = nn.modules.batchnorm._BatchNorm
        has_batch_norm = any(isinstance(module, batch_norm) for module in self.modules)

        self.data = ClientData(task, inputs, labels, partition, pipeline, seed)
        self.partition, self.labels = partition, self.data.labels
        self.planner = BatchPlanner(
            local,
            seed,
            declarations.declarer("select"),
            has_batch_norm or self.needs_two_rows,
            self.needs_two_rows,
        )
        self.prepared = PreparedBatches(self.data, self.planner)
        self.frozen_networks = FrozenNetworks(vector)

    # --- the functions of `WorkerView`, for hooks --------------------------------------------
    def gather(
        self, rows: np.ndarray, generator: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return normalised inputs and labels of rows, augmented if there is a generator."""
        return self.data.gather(rows, generator)

    def client_samples(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a client's training samples in order, in batches of the size for evaluation."""
        return self.data.client_samples(client)

    def class_counts(self, client: int) -> Tensor:
        """Return how many training samples of each class a client has: int64 [C] on the CPU."""
        return self.data.class_counts(client)

    def frozen(self, ctx: Context, name: str, values: Tensor | None) -> Mapping[str, nn.Module]:
        """Return a frozen copy of each network by name, in eval mode and without gradients.

        name: a label for these copies. Later calls with the same label in a job return the same
        copies.
        values: [layout.total], the parameters and buffers. None means the model from which training
        started, with the client's personal parameters.
        """
        return self.frozen_networks.networks(ctx, name, values)

    def contribution(self, client: int) -> Contribution:
        """Return the view of a client that a method's `contribute` gets."""

        def gather() -> tuple[Tensor, Tensor]:
            inputs, labels = zip(*self.client_samples(client), strict=True)
            return torch.cat(inputs), torch.cat(labels)

        generator = stream(self.seed, "contribute", client)
        return Contribution(client, gather, generator, self.task.num_classes)

    # --- one job -----------------------------------------------------------------------------
    def train(self, *received: Any) -> Context:
        """Train one job; return its context, which has its results.

        The trained model is then in `vector`.
        received: the arguments of `begin`.
        """
        running = self.begin(*received)
        self.steps(running)
        self.end(running)
        return running.ctx

    def begin(
        self,
        job: Job,
        base: Tensor,
        counters: Tensor,
        download: Mapping[str, Tensor],
        state: ClientState[Tensor],
    ) -> RunningJob:
        """Load a client into the vector, plan its batches, and call `begin` and `prepare` hooks.

        base: [layout.shared], the received vector.
        counters: int64 [layout.shared_counters], the received integer buffers.
        download: further received tensors, by full name.
        """
        prepared = self.prepared.pop(job)
        rows = self.partition.rows(job.client)
        methods = DeclaredState(unpack(state.methods))
        ctx = self._context(job, len(rows), base, counters, download, methods)
        ctx.views = self.views(ctx)
        ctx.start = state
        self.load(base, counters, state)
        if self.is_stochastic:
            seed = torch_seed(self.seed, "torch", job.client, job.participation)
            seed_torch(seed, self.vector.data.device)
        # Hooks may have changed the mode of any part. Without methods only evaluation changes it.
        networks = self.vector.networks.values()
        if self.declarations.methods or not all(network.training for network in networks):
            self.set_training(True)
        if self.keeps_optimizer:
            ctx.optimizers.resume(_optimizer_state(ctx.state))

        for declared, begin in self.beginners:
            begin(ctx.view(declared.method))
        if self.beginners and self.vector.layout.personal:
            ctx.start = copy_client_state(self.vector, {})  # frozen networks use it, too
        if prepared is None:
            ctx.plan = self.planner.plan(ctx)
        else:
            ctx.plan = prepared[0]
        for declared, prepare in self.preparers:
            prepare(ctx.view(declared.method))
        self._draw(ctx)
        if prepared is None:
            keys = job.client, job.participation
            batches = self.data.batches(ctx.plan, rows, "augment", *keys)
        else:
            batches = iter(prepared[1])
        return RunningJob(
            ctx, self._cycle(ctx.plan), batches, initial_state=frozenset(unpack(state.methods))
        )

    def steps(self, running: RunningJob) -> None:
        """Make all steps of a job; afterwards the vector contains the trained model."""
        ctx, cycle = running.ctx, running.cycle
        if self.own_training is not None:
            running.result = self.own_training.train(ctx)
            self._record_own_training(running, running.result)
            return
        factors = self.local.step_factors(ctx.plan.steps)
        if factors:
            ctx.optimizers.mean_factor = sum(factors) / len(factors)
        for index, batch in enumerate(running.batches):
            ctx.step = index
            if factors:
                ctx.step_factor = factors[index]
            loss = self.step(ctx, batch, cycle[index % len(cycle)])
            if loss is not None:
                running.losses.append(loss)

    def _record_own_training(self, running: RunningJob, result: LocalResult) -> None:
        """Record the loss and the steps that a method with its own training reports."""
        if not isnan(result.loss):
            running.losses.append(self.vector.data.new_tensor(result.loss))
        optimizer = LocalOptimizer(self.local.settings())
        optimizer.steps = running.step_count
        trained = slice(0, self.vector.layout.trained)
        running.ctx.optimizers.put("own", optimizer, (trained,), 1.0)

    def end(self, running: RunningJob) -> None:
        """Call the methods' hooks `end` for a job that has made its steps.

        Afterwards `running.ctx` has the job's losses, its upload and its client state.
        """
        ctx = running.ctx
        ctx.losses = torch.stack(running.losses) if running.losses else torch.empty(0)
        for declared, end in self.finishers:
            end(ctx.view(declared.method))
        if self.finishers or self.preparers or self.beginners:
            check_state(ctx.state, running.initial_state, self.state_names)
        check_upload(ctx.upload, self.declarations)
        if ctx.state:
            try:
                ctx.state = pack(ctx.state)
            except UnstorableValueError as error:
                raise HookError(str(error)) from None
        if self.keeps_optimizer:
            buffers = ctx.optimizers.save()
            ctx.state |= {f"{OPTIMIZER}{key}": value for key, value in buffers.items()}

    def finetune(self, client: int, rows: np.ndarray, version: int, settings: Finetune) -> None:
        """Fine-tune the model in the trainer's vector with the task loss alone.

        Without rows, the model stays unchanged. It also stays unchanged with only one row if the
        whole model is trained and a layer such as BatchNorm needs two rows.
        client, version: the client and the scored version; they decide the random numbers.
        rows: the rows of the data set to train on.
        """
        samples = len(rows)
        if not samples or (samples == 1 and self.needs_two_rows and not settings.head):
            return
        plan = self.planner.plan_finetuning(samples, settings.epochs, client, version)
        if self.is_stochastic:
            seed = torch_seed(self.seed, "finetune.torch", client, version)
            seed_torch(seed, self.vector.data.device)
        job = Job(number=-1, client=client, participation=0, version=version)
        base, counters = self.vector.shared, self.vector.shared_counters
        ctx = self._context(job, samples, base, counters, {}, {})
        stage = Stage("finetune")
        if settings.head:
            stage = Stage("finetune", ("model.head",), modes={"model": False})
        self.set_training(True)
        for batch in self.data.batches(plan, rows, "finetune.augment", client, version):
            self._finetuning_step(ctx, batch, (stage,))

    # --- parts of a job ----------------------------------------------------------------------
    def set_training(self, mode: bool) -> None:
        """Put all networks into train (True) or eval mode."""
        for network in self.vector.networks.values():
            network.train(mode)

    def load(self, base: Tensor, counters: Tensor, state: ClientState[Tensor]) -> None:
        """Put a received vector and a client's personal part into the vector of this trainer.

        base: [layout.shared], the received vector.
        counters: int64 [layout.shared_counters], the received integer buffers.
        state: the client's state, with its personal part.
        """
        load_vector(self.vector, base, counters, state)

    def views(self, ctx: Context) -> dict[str, Any]:
        """Return the job as each method's hooks see it: a `LocalJob`, by the method's name."""
        methods = self.declarations.methods
        return {declared.method: LocalJob(ctx, declared.method) for declared in methods}

    def _context(
        self,
        job: Job,
        samples: int,
        base: Tensor,
        counters: Tensor,
        download: Mapping[str, Tensor],
        state: dict[str, Tensor],
    ) -> Context:
        return Context(
            trainer=self,
            seed=self.seed,
            client=job.client,
            participation=job.participation,
            version=job.version,
            samples=samples,
            rate=self.local.rate(job.version),
            vector=self.vector,
            received=base,
            received_counters=counters,
            base=base,
            download=download,
            state=state,
        )

    def _draw(self, ctx: Context) -> None:
        """Draw the random values that methods have declared, for all steps of the job."""
        draws: dict[str, Sequence[Any]] = {}
        for declared in self.declarations.methods:
            if not declared.draws:
                continue
            generator = ctx.stream(f"draws.{declared.method}")
            for name, draw in declared.draws.items():
                values = draw(ctx.view(declared.method), generator)
                values = check_draws(values, declared.method, name, ctx.plan.steps)
                draws[f"{declared.method}.{name}"] = self._draws_on_device(values)
        ctx.draws = draws

    def _draws_on_device(self, values: Sequence[Any]) -> Sequence[Any]:
        """Copy a job's random values of one kind to the device, so that no step waits for a copy.

        values: the value for each step. If one of them is not a tensor, all are returned unchanged.
        """
        device = self.vector.data.device
        is_tensors = all(isinstance(value, Tensor) for value in values)
        if not has_own_memory(device) or not values or not is_tensors:
            return values
        if len({(value.shape, value.dtype, value.device.type) for value in values}) > 1:
            return [value.to(device) for value in values]
        return torch.stack(list(values)).to(device).unbind()

    def _cycle(self, plan: Plan) -> Sequence[Sequence[Stage]]:
        """Return the stages of a job's steps: n entries, where step k uses entry k % n.

        plan: the batches of the job.
        """
        if self.stager is None or self.stager.stages is None:
            return _TASK_STAGES
        return self.stager.stages(plan)


def _optimizer_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers of optimizers that a client state contains, by name."""
    return {
        key.removeprefix(OPTIMIZER): value
        for key, value in state.items()
        if key.startswith(OPTIMIZER)
    }
