"""A client at work: its plan of batches, and the one local-training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.client_state import ClientState
from raysim.api.context import Batch, Context, Contribution, Plan, Stage
from raysim.api.declarations import Finetune, Local, Task
from raysim.api.declare import Declarations
from raysim.api.local_job import LocalJob
from raysim.api.messages import Job
from raysim.api.mistakes import (
    State,
    StateNames,
    check_state,
    check_upload,
    one_for_each_step,
)
from raysim.api.setup import Declared
from raysim.api.state_values import pack, unpack
from raysim.data.batches import Pipeline
from raysim.data.partition import CSR
from raysim.models.classifier import is_stochastic
from raysim.models.single_rows import refusing_layer
from raysim.primitives.streams import stream, torch_seed
from raysim.training.step import Step
from raysim.training.transfer import apart, up
from raysim.vectors.layout import Vector

OPTIMIZER = "local.kept."  # private entries of `local.keep_optimizer`

# Floats that are gathered and normalised at once: enough to amortise the calls, small enough for the cache.
_CHUNK = 1 << 20


def _cut(order: np.ndarray, batch: int, drop_single: bool) -> list[np.ndarray]:
    """Consecutive batches; a last one of a single sample is dropped if asked and if there is another."""
    parts = [order[i : i + batch] for i in range(0, len(order), batch)]
    if drop_single and len(parts) > 1 and len(parts[-1]) == 1:
        parts.pop()
    return parts


def make_plan(
    local: Local,
    samples: int,
    chosen: Sequence[np.ndarray],
    generator: np.random.Generator,
    drop_single: bool,
) -> Plan:
    """Shuffle and cut. `chosen` holds the ascending positions of each epoch (or phase)."""
    batches: list[np.ndarray] = []
    for index, positions in enumerate(chosen):
        if local.epochs is not None:
            goal = -(-len(positions) // local.batch)
        else:  # phase `index` of the step budget, as even as possible
            goal = local.steps * (index + 1) // len(chosen) - local.steps * index // len(chosen)  # type: ignore[operator]
        part: list[np.ndarray] = []
        while len(part) < goal:
            if local.sampling == "replacement":
                part.append(
                    positions[
                        generator.integers(len(positions), size=min(local.batch, len(positions)))
                    ]
                )
            else:
                part += _cut(generator.permutation(positions), local.batch, drop_single)
                if local.epochs is not None:
                    break
        batches += part[:goal]
    return Plan(np.concatenate(batches), tuple(map(len, batches)), samples)


def layer_needing_two_rows(declarations: Declarations) -> str:
    """Return the layer of a model that cannot train on a batch of one row; "" if there is none.

    A method that adds rows to each batch makes it fit.
    """
    if any(each.adds_rows for each in declarations.methods):
        return ""
    return refusing_layer(declarations.networks["model"], declarations.task.example)


def _usual_sizes(counts: np.ndarray, batch: int) -> frozenset[int]:
    """The sizes of batches that many clients have at once: full ones, and what is left over on most of the clients."""
    rests = np.bincount(counts[counts > 0] % batch, minlength=1)
    common = int(rests.argmax())
    return frozenset({batch} | ({common} if common and 2 * rests[common] > rests.sum() else set()))


@dataclass
class RunningJob:
    """One client at work: what hooks see of it, its cycle of iterations, its batches to come, its losses so far."""

    ctx: Context
    cycle: Sequence[Sequence[Stage]]
    batches: Iterator[Batch]
    losses: list[Tensor] = field(default_factory=list)  # of iterations with the task
    kept: Collection[str] = ()  # names of the client state that it began with

    def loss_rows(self) -> list[int]:
        """Return the number of rows behind each loss: the batch sizes of the iterations with the task loss."""
        has_task = [any(stage.task for stage in stages) for stages in self.cycle]
        sizes = enumerate(self.ctx.plan.sizes)
        return [size for index, size in sizes if has_task[index % len(has_task)]]


class Trainer:
    """The networks, the data and the loop of one worker; trains one client after another.

    inputs [n, ...] (images: uint8 [n, c, h, w]) and labels: as stored, on the device. partition: client to training
    rows. precision: see `Step`.
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
        self.inputs, self.partition, self.pipeline = inputs, partition, pipeline
        self.labels = labels.to(task.dtype) if labels.is_floating_point() else labels
        settings = local.settings(), local.clip, task.objective.loss, precision
        self.step = Step(vector, declarations, *settings)
        self.tuner = Step(vector, None, *settings)
        self.selector = declarations.one("select")
        self.stager = declarations.one("stages")
        self.beginners = declarations.filling("begin")
        self.preparers = declarations.filling("prepare")
        self.finishers = declarations.filling("end")
        self.keepers = StateNames(declarations)
        asked = any(each.keeps_optimizer for each in declarations.methods)
        self.keeps = local.keep_optimizer or asked
        modules = self.modules = [
            m for network in vector.networks.values() for m in network.modules()
        ]
        self.needs_two_rows = bool(layer_needing_two_rows(declarations))
        batchnorm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules)
        self.drops_single = batchnorm or self.needs_two_rows
        self.statistics_layers: Sequence[nn.Module] = [
            m for m in modules if getattr(m, "track_running_stats", False)
        ]
        self.stochastic = is_stochastic(*vector.networks.values())
        self._ahead: dict[int, tuple[Plan, list[Batch]]] = {}  # by job
        self._frozen: dict[str, tuple[Vector, Context | None]] = {}
        self._row = int(np.prod(task.shape))
        self.usual_sizes = _usual_sizes(partition.counts, local.batch)

    # --- data ----------------------------------------------------------------------------------------------------
    def gather(
        self, rows: np.ndarray, generator: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Normalised inputs (augmented if a generator is given) and labels of some rows of the data set."""
        index = up(rows, self.inputs.device)
        stored = self.inputs.index_select(0, index)
        if generator is not None:
            stored = self.pipeline.augment_images(stored, generator)
        return self.pipeline.normalise(stored, self.task.dtype), self.labels.index_select(0, index)

    def in_parts(self, rows: np.ndarray, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised inputs and labels of rows of the data set, in order, so many at a time."""
        for start in range(0, len(rows), size):
            yield self.gather(rows[start : start + size])

    def client_samples(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's own training samples, in order, in batches fit for evaluation."""
        return self.in_parts(self.partition.rows(client), max(1, min(1024, _CHUNK // self._row)))

    def class_counts(self, client: int) -> Tensor:
        """See `Context.class_counts`."""
        rows = torch.from_numpy(self.partition.rows(client)).to(self.labels.device)
        return torch.bincount(
            self.labels.index_select(0, rows).cpu(), minlength=self.task.num_classes
        )

    def _batches(self, plan: Plan, rows: np.ndarray, purpose: str, *keys: int) -> Iterator[Batch]:
        """The plan's batches of these rows, augmented on a stream; several are gathered and normalised at once."""
        rows = rows[plan.positions]
        generator = stream(self.seed, purpose, *keys) if self.pipeline.augment else None
        start = first = 0
        while first < plan.steps:
            last, stop = first, start
            while last < plan.steps and (
                last == first or (stop - start + plan.sizes[last]) * self._row <= _CHUNK
            ):
                stop += plan.sizes[last]
                last += 1
            inputs, labels = self.gather(rows[start:stop], generator)
            sizes = plan.sizes[first:last]
            for x, y in zip(inputs.split(sizes), labels.split(sizes), strict=True):
                yield Batch(x, y, x, y)
            start, first = stop, last

    def prepared(self, job: Job) -> bool:
        """Whether `look_ahead` got to this job."""
        return job.number in self._ahead

    def look_ahead(self, jobs: Sequence[Job]) -> None:
        """Plan and gather the first of these jobs, and as many after it as fit into a chunk, all at once.

        Small jobs spend more on the calls than on the data. Nothing is prepared where a method or an augmentation
        needs to see the job first, or where one job fills a chunk.
        """
        if self.selector is not None or self.pipeline.augment:
            return
        fitting, room = 0, _CHUNK / self._row
        jobs = [job for job in jobs if not self.prepared(job)]
        for job in jobs:
            room -= self.local.budget(len(self.partition.rows(job.client)))
            if room < 0:
                break
            fitting += 1
        if fitting < 2:
            return
        plans: list[tuple[int, Plan]] = []
        rows: list[np.ndarray] = []
        for job in jobs[:fitting]:
            own = self.partition.rows(job.client)
            plan = self._plan_all(len(own), job.client, job.participation)
            plans.append((job.number, plan))
            rows.append(own[plan.positions])
        inputs, labels = self.gather(np.concatenate(rows))
        sizes = [size for _, plan in plans for size in plan.sizes]
        batches = iter(
            [
                Batch(x, y, x, y)
                for x, y in zip(inputs.split(sizes), labels.split(sizes), strict=True)
            ]
        )
        self._ahead |= {
            number: (plan, [next(batches) for _ in plan.sizes]) for number, plan in plans
        }

    def contribution(self, client: int) -> Contribution:
        """What `contribute` sees."""

        def gather() -> tuple[Tensor, Tensor]:
            inputs, labels = zip(*self.client_samples(client), strict=True)
            return torch.cat(inputs), torch.cat(labels)

        return Contribution(
            client, gather, stream(self.seed, "contribute", client), self.task.num_classes
        )

    def training(self, mode: bool) -> None:
        """All networks into train or eval mode."""
        for network in self.vector.networks.values():
            network.train(mode)

    # --- one participation ---------------------------------------------------------------------------------------
    def frozen(self, ctx: Context, name: str, values: Tensor | None) -> Mapping[str, nn.Module]:
        """See `Context.frozen`; the networks are made on first demand and reused by later jobs."""
        known = self._frozen.get(name)
        if known is not None and known[1] is ctx:
            return known[0].networks
        with torch.inference_mode(
            False
        ):  # tensors made or loaded in that mode could never be loaded again
            return self._load_frozen(ctx, name, values).networks

    def second(self, name: str) -> Vector:
        """A second set of networks in eval mode, without gradients; their values are whatever was loaded last."""
        if name not in self._frozen:
            networks = {
                key: copy.deepcopy(module).eval() for key, module in self.vector.networks.items()
            }
            second = Vector(
                networks, self.vector.layout, self.vector.data.device, self.vector.data.dtype
            )
            for parameter in second.parameters.values():
                parameter.requires_grad_(False)
            self._frozen[name] = (second, None)
        return self._frozen[name][0]

    def _load_frozen(self, ctx: Context, name: str, values: Tensor | None) -> Vector:
        vector = self.second(name)
        if values is None:
            load_vector(
                vector,
                ctx.base,
                self.vector.counters[: self.vector.layout.shared_counters],
                ctx.start,
            )
        else:
            vector.data.copy_(values)
        self._frozen[name] = (vector, ctx)
        return vector

    def _placed(self, values: Sequence[Any]) -> Sequence[Any]:
        """Draws of a job on the device, at once: a copy in a step would be waited for."""
        device = self.vector.data.device
        if (
            not apart(device)
            or not values
            or not all(isinstance(value, Tensor) for value in values)
        ):
            return values
        if len({(value.shape, value.dtype, value.device.type) for value in values}) > 1:
            return [value.to(device) for value in values]
        return torch.stack(list(values)).to(device).unbind()

    def load(self, base: Tensor, counters: Tensor, state: ClientState[Tensor]) -> None:
        """Let the vector be what a client starts from."""
        load_vector(self.vector, base, counters, state)

    def begin(
        self,
        job: Job,
        base: Tensor,
        counters: Tensor,
        download: Mapping[str, Tensor],
        state: ClientState[Tensor],
    ) -> RunningJob:
        """Load what a client received and keeps, let the methods receive it, and plan its batches.

        base: [layout.shared] the received vector. Errors of hooks propagate.
        """
        prepared = self._ahead.pop(job.number, None)
        samples = len(self.partition.rows(job.client))
        rate = self.local.rate(job.version)
        ctx = Context(
            self,
            self.seed,
            job.client,
            job.participation,
            job.version,
            samples,
            rate,
            self.vector,
            base,
            counters,
            base,
            download,
            State(unpack(state.methods)),
        )
        ctx.views = self.views(ctx)
        ctx.start = state
        self.load(base, counters, state)
        if self.stochastic:
            torch.manual_seed(torch_seed(self.seed, "torch", job.client, job.participation))
        if self.declarations.methods or not all(
            network.training for network in self.vector.networks.values()
        ):
            self.training(
                True
            )  # hooks may have changed the mode of any part; without methods only evaluation does
        if self.keeps:
            ctx.optimizers.resume(
                {
                    k.removeprefix(OPTIMIZER): v
                    for k, v in ctx.state.items()
                    if k.startswith(OPTIMIZER)
                }
            )
        for declared, begin in self.beginners:
            begin(ctx.view(declared.method))
        if (
            self.beginners and self.vector.layout.personal
        ):  # frozen networks start from what training starts from
            ctx.start = copy_client_state(self.vector, {})
        plan = ctx.plan = prepared[0] if prepared else self._plan(ctx)
        for declared, prepare in self.preparers:
            prepare(ctx.view(declared.method))
        self._draw(ctx)
        batches = (
            iter(prepared[1])
            if prepared
            else self._batches(
                plan, self.partition.rows(job.client), "augment", job.client, job.participation
            )
        )
        return RunningJob(
            ctx,
            self._cycle(plan),
            batches,
            kept=set(unpack(state.methods)),
        )

    def views(self, ctx: Context) -> dict[str, Any]:
        """Return what the hooks of each method see of a job."""
        return {each.method: LocalJob(ctx, each.method) for each in self.declarations.methods}

    def _draw(self, ctx: Context) -> None:
        """Draw the random tensors that methods declared, and let them prepare their steps."""
        draws: dict[str, Sequence[Tensor]] = {}
        for each in self.declarations.methods:
            if not each.draws:
                continue
            generator = ctx.stream(f"draws.{each.method}")
            for name, draw in each.draws.items():
                values = draw(ctx.view(each.method), generator)
                values = one_for_each_step(values, each.method, name, ctx.plan.steps)
                draws[f"{each.method}.{name}"] = self._placed(values)
        ctx.draws = draws

    def _cycle(self, plan: Plan) -> Sequence[Sequence[Stage]]:
        """Return the stages of each step, over and over."""
        if self.stager is None or self.stager.stages is None:
            return ((Stage(),),)
        return self.stager.stages(plan)

    def end(self, work: RunningJob) -> None:
        """Let the methods finish: afterwards the context holds upload, losses and what they keep."""
        ctx = work.ctx
        ctx.losses = torch.stack(work.losses) if work.losses else torch.empty(0)
        for declared, end in self.finishers:
            end(ctx.view(declared.method))
        if self.finishers or self.preparers or self.beginners:
            check_state(ctx.state, work.kept, self.keepers)
        check_upload(ctx.upload, self.declarations)
        if ctx.state:
            ctx.state = pack(ctx.state)
        if self.keeps:
            ctx.state |= {
                f"{OPTIMIZER}{key}": value for key, value in ctx.optimizers.save().items()
            }

    def steps(self, work: RunningJob) -> None:
        """All iterations of a client, one batch each; afterwards the vector holds y."""
        ctx, cycle = work.ctx, work.cycle
        for index, batch in enumerate(work.batches):
            ctx.step = index
            loss = self.step(ctx, batch, cycle[index % len(cycle)])
            if loss is not None:
                work.losses.append(loss)

    def train(self, *received: Any) -> Context:
        """Train one client, from what `begin` takes. Errors of hooks and of the model propagate."""
        work = self.begin(*received)
        self.steps(work)
        self.end(work)
        return work.ctx

    def adapt(self, client: int, rows: np.ndarray, version: int, how: Finetune) -> None:
        """Fine-tune what lies in the vector on rows of the data set: cross-entropy alone, on streams of its own."""
        samples = len(rows)
        if not samples or (samples == 1 and self.needs_two_rows and not how.head):
            return
        local = replace(self.local, epochs=how.epochs, steps=None)
        order = stream(self.seed, "finetune", client, version)
        plan = make_plan(
            local, samples, [np.arange(samples)] * how.epochs, order, self.drops_single
        )
        if self.stochastic:
            torch.manual_seed(torch_seed(self.seed, "finetune.torch", client, version))
        rate = self.local.rate(version)
        base, counters = self.vector.shared, self.vector.shared_counters
        ctx = Context(
            self,
            self.seed,
            client,
            0,
            version,
            samples,
            rate,
            self.vector,
            base,
            counters,
            base,
            {},
            {},
        )
        stage = (
            Stage("finetune", ("model.head",), modes={"model": False})
            if how.head
            else Stage("finetune")
        )
        self.training(True)
        for batch in self._batches(plan, rows, "finetune.augment", client, version):
            self.tuner(ctx, batch, (stage,))

    def _plan(self, ctx: Context) -> Plan:
        if self.selector is not None and (chosen := self._selected(self.selector, ctx)):
            generator = stream(self.seed, "batches", ctx.client, ctx.participation)
            return make_plan(self.local, ctx.samples, chosen, generator, self.drops_single)
        return self._plan_all(ctx.samples, ctx.client, ctx.participation)

    def _plan_all(self, samples: int, client: int, participation: int) -> Plan:
        """All samples in every epoch."""
        chosen = [np.arange(samples)] * (self.local.epochs or 1)
        return make_plan(
            self.local,
            samples,
            chosen,
            stream(self.seed, "batches", client, participation),
            self.drops_single,
        )

    def _selected(self, selector: Declared, ctx: Context) -> list[np.ndarray]:
        """What a method selects for each epoch (or phase); nothing if it takes all samples.

        Ascending, so that the shuffle depends on what was selected and not on how it was ranked. Parts of one sample
        are left out where the model cannot train on it.
        """
        parts = self.local.epochs or min(self.local.phases, self.local.steps or 1)
        chosen: list[np.ndarray] = []
        for part in range(1, parts + 1):
            assert selector.select is not None, "only a method that selects is asked"
            positions = selector.select(ctx.view(selector.method), part, parts)
            if positions is None:
                break
            chosen.append(np.sort(positions))
        if 0 < len(chosen) < parts:
            raise ValueError(
                f"method '{selector.method}' selected samples for {len(chosen)} of {parts} epochs: `select` returns "
                "positions for all epochs of a job, or None for all"
            )
        fitting = (
            [positions for positions in chosen if len(positions) > 1]
            if self.needs_two_rows
            else chosen
        )
        if chosen and not fitting:
            raise ValueError(
                f"method '{selector.method}' selected one sample for every epoch, on which the model cannot train. "
                "Let `select` return two positions or more, or set model.norm=group."
            )
        return fitting


@dataclass(frozen=True)
class Clients:
    """The clients that a loop trains, each known by its place among `numbers`, those of their jobs.

    ready: whether a client may begin yet. begin: what it starts with. end: what is done with what it ends with, while
    the trainer's vector is its own. fail: what is done where it raised an error.
    """

    numbers: Sequence[int]
    ready: Callable[[int], bool]
    begin: Callable[[int], RunningJob]
    end: Callable[[int, RunningJob], None]
    fail: Callable[[int, BaseException], None]


class OneByOne:
    """Trains one client after another: the loop that all else is compared with."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Places among jobs of these numbers, in the order in which they will begin."""
        return range(len(numbers))

    def train(self, clients: Clients) -> None:
        """Train them in order, in which each is ready at its turn."""
        for index in range(len(clients.numbers)):
            try:
                work = clients.begin(index)
                self.trainer.steps(work)
                self.trainer.end(work)
                clients.end(index, work)
            except (Exception, SystemExit) as error:  # a client must not take the others down
                clients.fail(index, error)


def load_vector(vector: Vector, base: Tensor, counters: Tensor, state: ClientState[Tensor]) -> None:
    """Put a received prefix and a client's personal suffix into a vector."""
    vector.shared.copy_(base)
    if len(counters):
        vector.counters[: len(counters)].copy_(counters)
    if vector.layout.has_personal:
        vector.personal.copy_(state.personal)
        vector.counters[len(counters) :].copy_(state.counters)


def copy_client_state(vector: Vector, methods: Mapping[str, Tensor]) -> ClientState[Tensor]:
    """A client's state: a copy of the vector's personal suffix, and what methods keep."""
    counters = vector.counters[vector.layout.shared_counters :]
    return ClientState(vector.personal.clone(), counters.clone(), methods)
