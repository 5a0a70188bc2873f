"""A worker: trains and evaluates many clients on one device, and keeps their client state there."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, nan
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from raysim.api.client_state import ClientState, StoredState, named
from raysim.api.composition import STEP_HOOKS, failing_method_name
from raysim.api.context import Context
from raysim.api.declarations import Finetune
from raysim.api.local_job import PersonalModel
from raysim.api.messages import (
    Arrays,
    Failure,
    Job,
    Probe,
    Published,
    Report,
    Task as Score,
    TrainingResult,
    Update,
)
from raysim.api.mistakes import check_report, said, traced
from raysim.api.state_values import pack, unpack
from raysim.models import Classifier
from raysim.primitives.spans import Spans
from raysim.primitives.streams import stream
from raysim.training.attack import check_norm
from raysim.training.batched_lanes import BatchedLanes
from raysim.training.combiner import Combiner
from raysim.training.determinism import allow_tf32, make_deterministic
from raysim.training.lanes import LaneLoop
from raysim.training.probe import balanced_rows
from raysim.training.profile import WorkerTrack, gpu_utilization, watch_worker
from raysim.training.recorded_lanes import RecordedLanes
from raysim.training.resident import ResidentStates, StateHandle
from raysim.training.run_spec import RunSpec, declare_run
from raysim.training.step_mode import check_step_mode
from raysim.training.trainer import (
    Clients,
    OneByOne,
    RunningJob,
    Trainer,
    copy_client_state,
    load_vector,
)
from raysim.training.transfer import Copies, numbers, on_device, up
from raysim.vectors.layout import Vector
from raysim.vectors.optimizer import widest

_NO_COUNTERS = np.empty(0, np.int64)
PROBE_FEATURES = 200  # rows whose features a probe keeps


class Worker(Combiner):
    """Many clients on one device. It keeps each client's state, tagged with the job that made it."""

    def __init__(self, spec: RunSpec, name: str = "worker-0"):
        make_deterministic(spec.threads)
        self.spec, self.name = spec, name
        self.device = torch.device(spec.device)
        declarations = self.declarations = declare_run(spec)
        self.layout = declarations.layout
        check_step_mode(spec, declarations)
        self.vector = Vector(declarations.networks, self.layout, self.device, spec.dtype)
        self._initial = copy_client_state(
            self.vector, {}
        )  # of a client that never trained; methods add theirs
        inputs, labels = on_device(spec.data.open(), self.device)
        for declared in declarations.methods:
            if declared.change_labels is not None:
                labels = declared.change_labels(labels)
        self.trainer = Trainer(
            spec.task,
            self.vector,
            declarations,
            spec.settings.local,
            inputs,
            labels,
            spec.data.partition.all_train,
            spec.data.pipeline,
            spec.settings.seed,
            spec.autocast,
        )
        self.loop = self._make_loop()
        self._stateful = [each for each in declarations.methods if each.keeps_client_state]
        self._personalisers = declarations.filling("personalise")
        self._reports_moves = declarations.reads_updates
        self._resident = ResidentStates(self.device, spec.settings.state.device_bytes)
        self._copies = Copies(self.device)
        self._received: tuple[tuple[int, str], Tensor, Tensor, dict[str, Tensor]] | None = None
        self._constants: dict[str, Tensor] = {}
        self._probed = np.empty(0, np.int64)
        self._busy = 0.0  # seconds of work since it last said so
        self.spans: Spans | None = None
        if spec.profile:
            self.spans = watch_worker(self, self.trainer, self.loop, self.device)

    def _make_loop(self) -> OneByOne | LaneLoop[Any]:
        """Return the loop that trains clients: one after another, in lanes, or from recordings."""
        if self.spec.graph:
            return RecordedLanes(self.trainer, self.spec.lanes)
        return (
            BatchedLanes(self.trainer, self.spec.lanes)
            if self.spec.lanes > 1
            else OneByOne(self.trainer)
        )

    def ready(self) -> str:
        """Its name, once it can work."""
        return self.name

    def store_constants(self, constants: Arrays, probed: np.ndarray) -> None:
        """What every client receives once, and the rows of the data set that local models are probed on."""
        self._constants = {key: up(value, self.device) for key, value in constants.items()}
        self._probed = probed

    def release(self, clients: Sequence[int]) -> None:
        """Forget the client states of clients that are elsewhere now."""
        for client in clients:
            self._resident.drop(client)

    def profile(self) -> WorkerTrack:
        """Where the time of its calls went, those since it was last asked."""
        assert self.spans is not None, "only a run with profile=true asks"
        calls = [(span.start, span.stop) for span in self.spans.calls]
        return WorkerTrack(self.spans.take(self.name), calls)

    # --- before round 0 ------------------------------------------------------------------------------------------
    def contribute(self, clients: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """What these clients send before round 0, by full name."""
        parts = []
        for client in clients:
            seen = self.trainer.contribution(client)
            part: dict[str, np.ndarray] = {}
            for declared in self.declarations.methods:
                if declared.contribute is None:
                    continue
                for name, array in declared.contribute(seen).items():
                    part[f"{declared.method}.{name}"] = array
            parts.append(part)
        return parts

    # --- training ------------------------------------------------------------------------------------------------
    def train(
        self,
        jobs: Sequence[Job],
        groups: Sequence[tuple[int, ...]],
        versions: int,
        *values: Published | StoredState | None,
    ) -> TrainingResult | tuple[TrainingResult | StateHandle, ...]:
        """Train the jobs in order.

        Returns a `TrainingResult`; in stateful runs a tuple of it and the client state that each job left.

        groups: numbers of jobs, consecutive here, whose deltas are summed on this worker.
        values: what was published, in so many versions, that the jobs start from; then, in stateful runs, for each job
        the state to start from, or None if it is resident.
        """
        since = time.perf_counter()
        bases = {each.version: each for each in cast("tuple[Published, ...]", values[:versions])}
        states = cast("tuple[StoredState | None, ...]", values[versions:])
        sums, ends = _Sums(jobs, groups), dict[int, tuple[Update | Failure, StateHandle | None]]()
        for version in sorted(bases):  # a client's earlier jobs started from earlier ones
            own = [index for index, job in enumerate(jobs) if job.version == version]
            sent = [states[index] for index in own] if states else []
            trained_here = self._train(
                [jobs[index] for index in own], self._receive(bases[version]), sent, sums
            )
            ends |= dict(zip(own, trained_here, strict=True))
        updates = tuple(ends[index][0] for index in range(len(jobs)))
        totals = {group: self._copied(total) for group, total in sums.totals.items()}
        self._arrive()
        after = [left for index in range(len(jobs)) if (left := ends[index][1]) is not None]
        busy, self._busy = self._busy + time.perf_counter() - since, 0.0
        sizes = tuple(left.size for left in after)
        result = TrainingResult(
            updates, totals, self.name, busy, sizes, gpu_utilization(self.device)
        )
        return (result, *after) if states else result

    def _train(
        self,
        jobs: Sequence[Job],
        received: tuple[Tensor, Tensor, dict[str, Tensor]],
        states: Sequence[StoredState | None],
        sums: _Sums,
    ) -> list[tuple[Update | Failure, StateHandle | None]]:
        """Train jobs of one version. Returns the update of each, and in stateful runs the client state it left."""
        ends: dict[int, tuple[Update | Failure, StateHandle | None]] = {}
        starts: dict[int, tuple[float, ClientState[Tensor]]] = {}
        numbers = [job.number for job in jobs]
        order, unfinished = self.loop.order(numbers), set(numbers)

        def ready(index: int) -> bool:
            """Whether no other job of this call has to end first."""
            return jobs[index].state not in unfinished

        def begin(index: int) -> RunningJob:
            job = jobs[index]
            state = self._state(job.client, job.state, states[index] if states else None)
            starts[index] = time.perf_counter(), state
            if not self.trainer.prepared(job):
                self.trainer.look_ahead([jobs[other] for other in order[order.index(index) :]])
            return self.trainer.begin(job, *self._with_extras(job, received), state)

        def end(index: int, work: RunningJob) -> None:
            seconds = (time.perf_counter() - starts[index][0]) / self.spec.lanes
            settle(
                index,
                *self._update(jobs[index], work, received[0], starts[index][1], seconds, sums),
            )

        def fail(index: int, error: BaseException) -> None:
            settle(index, self._failure(jobs[index], error), starts[index][1])

        def settle(index: int, update: Update | Failure, state: ClientState[Tensor]) -> None:
            job = jobs[index]
            unfinished.remove(job.number)
            is_summed = isinstance(update, Update) and update.delta is None
            self._add(sums, job, self.vector.shared if is_summed else None)
            ends[index] = (
                update,
                self._resident.put(job.client, job.number, state) if states else None,
            )

        with allow_tf32(self.spec.precision == "tf32"):
            self.loop.train(Clients(numbers, ready, begin, end, fail))
        return [ends[index] for index in range(len(jobs))]

    def _with_extras(
        self, job: Job, received: tuple[Tensor, Tensor, dict[str, Tensor]]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """What the job's client receives: the broadcast, and what is for it alone."""
        base, counters, download = received
        if job.extras:
            download = {
                **download,
                **{key: up(value, self.device) for key, value in job.extras.items()},
            }
        return base, counters, download

    def _receive(self, published: Published) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The broadcast as tensors on the device; on a CPU views of the very array that was published."""
        key = (published.version, published.mark)
        if self._received is None or self._received[0] != key or self.device.type == "cpu":
            download = {
                key: up(value, self.device) for key, value in published.extras.items()
            } | self._constants
            base, counters = up(published.vector, self.device), up(published.counters, self.device)
            self._received = (key, base, counters, download)
        return self._received[1:]

    def _state(self, client: int, number: int, sent: StoredState | None) -> ClientState[Tensor]:
        """The client state that job `number` left: resident, or as sent, or (number -1) the initial one."""
        if number < 0:
            if not self._stateful:
                return self._initial
            samples = len(self.spec.data.partition.all_train.rows(client))
            methods: dict[str, Tensor] = {}
            for declared in self._stateful:
                values = declared.client_states(samples)
                methods |= {
                    name: self._own_kind(name, tensor) for name, tensor in pack(values).items()
                }
            return ClientState(self._initial.personal, self._initial.counters, methods)
        if (resident := self._resident.get(client, number)) is not None:
            return resident
        assert sent is not None, (
            f"client {client}: the state of job {number} is neither on {self.name} nor sent"
        )
        return sent.each(lambda array: up(array, self.device))

    def _own_kind(self, name: str, value: Tensor) -> Tensor:
        """Return initial state on the device, with floats in the dtype of the run."""
        is_number = name.endswith("#float")
        changes = value.is_floating_point() and not is_number
        return value.to(self.device, self.vector.data.dtype if changes else value.dtype)

    def _update(
        self,
        job: Job,
        work: RunningJob,
        base: Tensor,
        state: ClientState[Tensor],
        seconds: float,
        sums: _Sums,
    ) -> tuple[Update, ClientState[Tensor]]:
        """Return the update of a job and the client state it leaves.

        The delta stays in the vector's shared part. The update has a copy, unless it belongs to a sum.
        """
        ctx = work.ctx
        plan, loss_rows = ctx.plan, work.loss_rows()
        check_report(ctx.report, "job")
        probe = self._probe(ctx) if job.probe else None
        delta = self.vector.shared.sub_(base)
        loss = self._checked(job, ctx.losses, loss_rows, delta, ctx.upload)
        update = Update(
            job=job.number,
            client=job.client,
            version=job.version,
            samples=plan.samples,
            trained=len(plan.positions),
            steps=plan.steps,
            loss=loss,
            seconds=seconds,
            counters=self._counters(),
            extras={key: self._copied(value) for key, value in ctx.upload.items()},
            moves=self._moves(ctx),
            report=ctx.report,
            probe=probe,
            loss_rows=sum(loss_rows),
            delta=None if job.number in sums.member else self._copied(delta.clone()),
        )
        # Without personal parameters two copies of nothing would take 5 us a job.
        left = (
            copy_client_state(self.vector, ctx.state)
            if self.layout.has_personal
            else ClientState(state.personal, state.counters, ctx.state)
        )
        return update, left

    def _checked(
        self,
        job: Job,
        losses: Tensor,
        loss_rows: Sequence[int],
        delta: Tensor,
        upload: Mapping[str, Tensor],
    ) -> float:
        """Return the mean loss over the rows.

        Raises NotFiniteError or ValueError for what must not be added up; waits for the device once.
        """
        # A finite norm, or sum, has finite terms. Personal entries too: the client's next job would start from them.
        trained = self.layout.trained
        norm, rest = torch.linalg.vector_norm(delta[:trained]), self.vector.data[trained:]
        asked = [
            mean_over_rows(losses, loss_rows),
            norm,
            rest.sum(),
            *(value.sum() for value in upload.values()),
        ]
        loss, length, others, *sums = numbers(asked)
        finite = isfinite(length) and isfinite(others)
        if (len(losses) and not isfinite(loss)) or not (
            finite or bool(self.vector.data.isfinite().all())
        ):
            raise NotFiniteError(self._diverged(losses, job))
        check_norm(length, self.spec.settings.faults.norm)
        for (key, value), total in zip(upload.items(), sums, strict=True):
            if not (isfinite(total) or bool(value.isfinite().all())):
                raise NotFiniteError(
                    f"the upload {key} is not finite; lower local.lr or set local.clip", key
                )
        return loss

    # What a profile tells apart.
    def _copied(self, value: Tensor) -> np.ndarray:
        return self._copies.take(value)

    def _arrive(self) -> None:
        self._copies.wait()

    @staticmethod
    def _add(sums: _Sums, job: Job, delta: Tensor | None) -> None:
        sums.add(job, delta)

    def _failure(self, job: Job, error: BaseException) -> Failure:
        where = f"{self.spec.data.label(job.client)}, version {job.version}, worker {self.name}"
        text = f"{where}: {said(error)}"
        name = error.method if isinstance(error, NotFiniteError) else failing_method_name(error)
        return Failure(job.number, job.client, job.version, self.name, name, text, traced(error))

    def _moves(self, ctx: Context) -> tuple[tuple[int, int, float], ...]:
        """For methods that read single updates."""
        if not self._reports_moves:
            return ()
        moved = ctx.optimizers.movements()
        return tuple(
            (part.start, part.stop, steps * factor * ctx.rate) for part, steps, factor in moved
        )

    def _probe(self, ctx: Context) -> Probe:
        """The local model beside the received one on the probed rows, scored in eval mode."""
        self.trainer.training(False)
        received = cast("Classifier", ctx.frozen()["model"])
        labels, scores, columns = [], [], []
        with torch.inference_mode():
            for inputs, own in self.trainer.in_parts(self._probed, self.spec.score_batch):
                scores.append(ctx.model(inputs))
                labels.append(own)
                columns.append((ctx.model.features(inputs), received.features(inputs)))
        truth, score = torch.cat(labels), torch.cat(scores)
        each = max(1, PROBE_FEATURES // self.spec.task.num_classes)
        some = balanced_rows(
            truth.cpu().numpy(), each, stream(self.spec.settings.seed, "probe.features")
        )
        local, base = (
            torch.cat(column).cpu().float().numpy()[some] for column in zip(*columns, strict=True)
        )
        return Probe(
            client=ctx.client,
            version=ctx.version,
            labels=truth.cpu().numpy()[some],
            seen=(ctx.class_counts() > 0).numpy(),
            accuracy=float((score.argmax(1) == truth).double().mean()),
            features=local,
            received=base,
            probabilities=score.softmax(1).cpu().float().numpy()[some],
        )

    def _counters(self) -> np.ndarray:
        """The shared integer buffers as trained; without any, one object for all, which is pickled once per call."""
        if not self.layout.shared_counters:
            return _NO_COUNTERS
        return self._copied(self.vector.counters[: self.layout.shared_counters].clone())

    def _diverged(self, losses: Tensor, job: Job) -> str:
        bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        rate = self.spec.settings.local.rate(job.version)
        at = (
            f"the loss is not finite from step {bad[0] + 1} of {len(losses)}"
            if bad
            else "the parameters are not finite"
        )
        if (
            bad and bad[0] == 0 and job.version == 0
        ):  # nothing has moved yet, so that no rate is to blame
            filling = [
                f"method '{each.method}'"
                for each in self.declarations.methods
                if any(each.has_hook(hook) for hook in STEP_HOOKS)
            ]
            parts = ["the loss", "the data", *filling]
            return (
                f"{at}, before anything was learnt: look at {', '.join(parts[:-1])} or {parts[-1]}"
            )
        theirs = {m.name for m in self.spec.methods if not type(m).__module__.startswith("raysim.")}
        look = "".join(
            f", or look at method '{each.method}', which writes gradients"
            for each in self.declarations.methods
            if each.method in theirs and ("gradient" in each.hooks or "perturb" in each.hooks)
        )
        return f"{at} (learning rate {rate:g}); lower local.lr or set local.clip{look}"

    # --- scoring -------------------------------------------------------------------------------------------------
    def evaluate(
        self, tasks: Sequence[Score], published: Published, *states: StoredState | None
    ) -> list[Report]:
        """Score rows with the shared model or a client's own. Touches no stream of training and no statistics of it."""
        since = time.perf_counter()
        received = self._receive(published)
        self.trainer.training(False)
        reports: list[Report] = []
        for index, task in enumerate(tasks):
            self._load(task, received, states[index] if states else None)
            if task.finetune is not None:
                self._finetune(task.client, published.version, task.finetune)
                self.trainer.training(False)
            with torch.no_grad():
                reports.append(self._report(task))
        self._busy += time.perf_counter() - since
        return reports

    def scored_tensors(
        self, task: Score, published: Published, sent: StoredState | None = None
    ) -> dict[str, Tensor]:
        """Every tensor, by full name, of the networks that would be scored."""
        self._load(task, self._receive(published), sent)
        return {
            key: value.clone()
            for key, value in self.vector.named(self.vector.data, self.vector.counters).items()
        }

    def client_tensors(self, task: Score, sent: StoredState | None = None) -> dict[str, np.ndarray]:
        """What a client keeps to itself, by full name."""
        return named(
            self._state(task.client, task.state, sent).each(lambda value: value.cpu().numpy()),
            self.layout,
        )

    def predictions(
        self, task: Score, published: Published, sent: StoredState | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Labels [n] and scores [n, C] of a task's rows."""
        self.trainer.training(False)
        self._load(task, self._receive(published), sent)
        model, labels, scores = self.vector.networks["model"], [], []
        with torch.no_grad():
            for inputs, own in self.trainer.in_parts(task.rows, self.spec.score_batch):
                labels.append(own.cpu())
                scores.append(model(inputs).cpu())
        return torch.cat(labels).numpy(), torch.cat(scores).numpy()

    @property
    def personalises(self) -> bool:
        """Whether a method makes every client a model of its own to be scored."""
        return bool(self._personalisers)

    def _load(
        self,
        task: Score,
        received: tuple[Tensor, Tensor, dict[str, Tensor]],
        sent: StoredState | None,
    ) -> None:
        """Make the vector the model that a task scores."""
        state = self._initial if task.client < 0 else self._state(task.client, task.state, sent)
        load_vector(self.vector, received[0], received[1], state)
        if task.client >= 0 and task.personalised:
            self._personalise(task, state)

    def _personalise(self, task: Score, state: ClientState[Tensor]) -> None:
        """Make the vector the client's own model."""
        download = {key: up(value, self.device) for key, value in task.extras.items()}
        trained, kept = task.state >= 0, unpack(state.methods)
        data = functools.partial(self.trainer.client_samples, task.client)
        client = PersonalModel(
            task.client, self.trainer.task, self.vector, kept, download, data, trained
        )
        with torch.no_grad():
            for declared, personalise in self._personalisers:
                personalise(client.of(declared.method))

    def _finetune(self, client: int, version: int, how: Finetune) -> None:
        partition = self.spec.data.partition
        rows = partition.all_train.rows(client)
        if how.samples == "all" and partition.spare is not None:
            rows = np.concatenate([rows, partition.spare.rows(client)])
        self.trainer.adapt(client, rows, version, how)

    def _outputs(self, task: Score) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and labels of a task's rows, so many at a time."""
        model = self.vector.networks["model"]
        for inputs, labels in self.trainer.in_parts(task.rows, self.spec.score_batch):
            yield model(inputs), labels

    def _report(self, task: Score) -> Report:
        learnt = self.trainer.task
        scores, losses = [], []
        for logits, labels in self._outputs(task):
            losses.append(learnt.objective.losses(logits, labels))
            scores.append(learnt.metric.rows(logits, labels))
        return Report(task.client, torch.cat(scores).cpu().numpy(), torch.cat(losses).cpu().numpy())


def mean_over_rows(losses: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the mean of batches' mean losses, each weighted by its number of rows; nan without a batch."""
    if not rows:
        return losses.new_full((), nan)
    weights = up(np.array(rows, np.int64), losses.device)
    wide = widest(losses.device)
    return torch.dot(losses.to(wide), weights.to(wide)) / sum(rows)


class _Sums:
    """Unnormalised sums of deltas, one for each group of jobs, folded in the groups' order, as the server would."""

    def __init__(self, jobs: Sequence[Job], groups: Sequence[tuple[int, ...]]):
        self.member = {number: group for group in groups for number in group}
        self._weights = {job.number: job.weight for job in jobs}
        self.totals: dict[tuple[int, ...], Tensor] = {}  # on the device
        self._due = {group: iter(group) for group in groups}
        self._next = {group: next(due) for group, due in self._due.items()}
        self._early: dict[int, Tensor | None] = {}  # copies of deltas whose turn has not come

    def add(self, job: Job, delta: Tensor | None) -> None:
        """The delta of a job, None if it failed; nothing happens where the job is in no group."""
        group = self.member.get(job.number)
        if group is None:
            return
        if job.number != self._next[group]:
            self._early[job.number] = None if delta is None else delta.clone()
            return
        self._fold(group, job.number, delta)
        while (number := next(self._due[group], -1)) in self._early:
            self._fold(group, number, self._early.pop(number))
        self._next[group] = number

    def _fold(self, group: tuple[int, ...], number: int, delta: Tensor | None) -> None:
        if delta is None:
            return
        if group in self.totals:
            self.totals[group].add_(delta, alpha=self._weights[number])
        else:
            self.totals[group] = delta * self._weights[number]


class NotFiniteError(FloatingPointError):
    """What a client would send or keep is not finite; `entry` is the full name of an upload, which names its method."""

    def __init__(self, text: str, entry: str = ""):
        super().__init__(text)
        self.method = entry.partition(".")[0]
