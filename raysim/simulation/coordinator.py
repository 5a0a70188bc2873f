"""The event loop of a run: look ahead, dispatch, collect, aggregate, evaluate, checkpoint; the same for every schedule.

The planner decides every order, on virtual time, and is asked for steps that lie ahead. So hosts get a job as soon as
the vector it starts from exists and it is known that an aggregation will take it; what is lost or discarded is never
trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from raysim.api.composition import owners
from raysim.api.messages import Failure, Probe, Published, SingleUpdate, Update
from raysim.primitives.memory import peak_memory
from raysim.primitives.streams import stream
from raysim.simulation import checkpoint, snapshot
from raysim.simulation.checkpoint import Checkpoints
from raysim.simulation.dispatcher import Dispatcher, InFlightJob
from raysim.simulation.evaluator import Evaluator, Scoring
from raysim.simulation.events import Event, Finished, JobEnd, Round, Row, Saved, Started, TooManyFailures, Waiting
from raysim.simulation.fleet import Fleet
from raysim.simulation.history_row import RowWriter
from raysim.simulation.load import make_planner
from raysim.simulation.planner import Deserted, Step
from raysim.simulation.private_states import PrivateStates
from raysim.simulation.profile import Profile
from raysim.simulation.runtime import Runtime
from raysim.simulation.schedule import Schedule
from raysim.simulation.server import Server, asked_weighting
from raysim.simulation.under_way import UnderWay
from raysim.simulation.versions import Versions
from raysim.training.determinism import make_deterministic
from raysim.training.probe import balanced_rows
from raysim.training.run_spec import RunSpec, build_networks
from raysim.vectors.layout import Vector


@dataclass
class _Pending:
    """A round whose evaluation may still run."""

    row: Row
    failures: tuple[Failure, ...]
    probes: tuple[Probe, ...]
    jobs: tuple[JobEnd, ...]
    scoring: list[Scoring] = field(default_factory=list)


class Coordinator:
    """One run. `run()` yields its events and ends with `Finished`.

    folder: where model and checkpoints go; "": nowhere, and no checkpoint is written. resume: a checkpoint's address.
    """

    def __init__(
        self,
        spec: RunSpec,
        schedule: Schedule,
        fleet: Fleet,
        runtime: Runtime,
        folder: str = "",
        resume: str = "",
    ):
        self.profile = Profile(runtime) if spec.profile else None
        runtime = runtime if self.profile is None else self.profile.runtime
        self.spec, self.runtime = spec, runtime
        self.settings, self.folder, self.resume = (settings := spec.settings), folder, resume
        self._checkpoint_every = settings.checkpoint.every if folder else 0
        self._checkpoints = Checkpoints(settings.checkpoint.place(folder), settings.checkpoint.keep, resume)
        make_deterministic(spec.threads)
        networks, self.layout = build_networks(spec)
        self.initial = Vector(networks, self.layout, torch.device("cpu"), spec.dtype)
        self.counts = spec.data.partition.train.counts
        self.server = Server(
            self.layout,
            self.initial.shared.clone(),
            self.initial.counters[: self.layout.shared_counters].clone(),
            spec.methods,
            self.counts,
            spec.settings.seed,
            spec.task,
            settings.weighting or asked_weighting(spec.methods),
            settings.summation,
            schedule.size,
        )
        self.attackers = spec.attackers
        self.server.needs_single_updates |= self.attackers.attack.on_updates
        stateful = self.layout.has_personal or bool(owners(spec.methods, "state")) or settings.local.keep_optimizer
        self.private = PrivateStates(runtime, self.layout, stateful, settings.state.bytes, folder)
        self.planner = make_planner(spec, self.layout, schedule, fleet)
        if settings.evaluate.probe and not len(spec.data.central):
            raise ValueError(
                f"evaluate.probe={settings.evaluate.probe} looks at local models on the central test set, of "
                "which the data has none: set evaluate.probe=0"
            )
        self.dispatcher = Dispatcher(
            runtime, settings.summation, self.layout.shared, self.private, settings.faults.timeout or math.inf
        )
        self.evaluator = Evaluator(spec, self.layout, runtime, self.dispatcher, self.private)
        pooled = any(method.pools for method in spec.methods)
        self.history = RowWriter(self.dispatcher, self.private, pooled, spec.dtype.itemsize, spec.task.metric.name)
        self.rows: list[Row] = []
        self.versions = Versions(runtime)
        self.under_way = UnderWay(self.planner, self.server, self.dispatcher, settings)
        self._pending: list[_Pending] = []

    # --- the loop ------------------------------------------------------------------------------------------------
    def run(self) -> Iterator[Event]:
        """Run to the last round. Raises TooManyFailures or Deserted after writing a checkpoint."""
        self.history.start()
        if self.profile:
            self.profile.watch(
                (
                    (self.server, "step", "sums"),
                    (self.evaluator, "score", "evaluation"),
                    (self.evaluator, "columns", "evaluation"),
                    (self, "_save", "saving"),
                    (self, "_finish", "saving"),
                )
            )
        self.dispatcher.greet()
        if self.resume:
            self.restore()
        else:
            self._contribute()
            self.under_way.plan()  # what no fleet or schedule can do is refused before anything is written
        self._hand_out()
        self.under_way.offer()
        yield Started(list(self.rows))
        self._publish()
        while self.server.version < self.settings.rounds:
            try:
                step = self.under_way.next_step()
            except Deserted:
                yield from self._report()
                if self._checkpoint_every:
                    yield self._save()
                raise
            taken = self.under_way.taken(step)
            self._submit(taken)
            yield from self._report()
            self.under_way.look_ahead()
            yield from self.dispatcher.awaited(job.call for job in taken if job.call is not None)
            pending = self._aggregate(step, taken)
            self._publish()
            self._evaluate(pending)
            version, every = self.server.version, self._checkpoint_every
            if every and version % every == 0 and version < self.settings.rounds:
                yield from self._report()
                yield self._save()
        yield from self._report()
        if self._checkpoint_every:
            yield self._save()
        finished = self._finish()
        if self.profile:
            yield self.profile.take()
        yield finished

    # --- before round 0 ------------------------------------------------------------------------------------------
    def _contribute(self) -> None:
        """Collect what clients send before round 0, and let the methods assemble it."""
        methods = owners(self.spec.methods, "contribute")
        if not methods:
            return
        shares = np.array_split(self.planner.eligible, self.runtime.hosts)
        calls = [self.dispatcher.call(host, "contribute", share.tolist()) for host, share in enumerate(shares)]
        parts = [part for call in calls for part in self.dispatcher.wait(call)]
        self.planner.contributed(sum(array.size for part in parts for array in part.values()))
        for method in methods:
            method.assemble({key: [part[key] for part in parts] for key in parts[0]}, self.server)

    def _hand_out(self) -> None:
        """Give every host what its clients receive once, and what is probed."""
        once = self.server.sent_once()
        if once or self.settings.evaluate.probe:
            self.dispatcher.keep(self.runtime.put(once), self._probed())

    def _probed(self) -> np.ndarray:
        """Rows of the central test set, as many of each class."""
        central, rows = self.spec.data.central, self.settings.evaluate.probe_rows
        labels = self.spec.data.open().groups()[0][central]
        each = max(1, rows // max(1, len(np.unique(labels))))
        return central[balanced_rows(labels, each, stream(self.spec.settings.seed, "probe"))]

    # --- one round -----------------------------------------------------------------------------------------------
    def _publish(self) -> None:
        """Store the current version for all hosts; forget versions that no job needs."""
        version = self.server.version
        if version not in self.versions.refs:
            self.versions.publish(self.server.published())
        for old in (version - 1, *self.under_way.freed()):
            if old in self.versions.refs and old != version and not self.under_way.needs(old):
                self.versions.drop(old)

    def _submit(self, taken: Sequence[InFlightJob]) -> None:
        """Give hosts the jobs of the next aggregation, and then others that are under way."""
        summable = self.server.summable and not self.settings.evaluate.decomposes(self.server.version + 1)
        self.dispatcher.submit(taken, self.versions.refs, summable)

    def _aggregate(self, step: Step, taken: Sequence[InFlightJob]) -> _Pending:
        """Wait for the updates of these jobs, and make the next version of them."""
        results = self.dispatcher.floats
        outcomes, sums = self.dispatcher.collect(taken)
        store_bytes = self.history.store_bytes(self.versions.nbytes, results)
        if self.attackers.attack.on_updates:
            outcomes = self.attackers.poisoned(outcomes, self.layout.trained, self.server.version)
        failures = tuple(outcome for outcome in outcomes if isinstance(outcome, Failure))
        if len(failures) > self.settings.faults.tolerate * len(taken):
            raise self._too_many(failures, taken)
        updates = [outcome if isinstance(outcome, Update) else None for outcome in outcomes]
        self.server.step(updates, sums, [job.staleness for job in taken], self.versions)
        self.private.accept([job.message for job in taken])
        present = [update for update in updates if update is not None]
        scoring = []
        if present and self.settings.evaluate.decomposes(self.server.version):
            singles = [update for update in present if isinstance(update, SingleUpdate)]
            scoring.append(self.evaluator.decompose(singles, self.versions, self.server.published()))
        row = self.history.row(self.server, step, outcomes, store_bytes)
        if self.settings.attack.kind != "none":
            row["attackers"] = self.attackers.among([update.client for update in present])
        probes = tuple(update.probe for update in present if update.probe is not None)
        return _Pending(row, failures, probes, self.under_way.made(step, outcomes), scoring)

    def _too_many(self, failures: tuple[Failure, ...], taken: Sequence[InFlightJob]) -> TooManyFailures:
        share = len(failures) / len(taken)
        text = (
            f"{len(failures)} of {len(taken)} clients failed in round {self.server.version + 1}, first: "
            f"{f'method {failures[0].method!r}, ' if failures[0].method else ''}{failures[0].error}"
        )
        if share < 1:  # nobody is left to go on with
            text += (
                f". faults.tolerate={self.settings.faults.tolerate} allows fewer; set it to {share:g} to leave them "
                "out and go on"
            )
        if self.folder:
            text += f"; resume continues from {self._save().path}"
        return TooManyFailures(f"{text}\n{failures[0].traceback}".rstrip("\n"))

    def _evaluate(self, pending: _Pending) -> None:
        """Start scoring the current version; hosts do it before they train the next."""
        self._pending.append(pending)
        version = self.server.version
        if not self.settings.evaluate.evaluates(version, self.settings.rounds):
            return
        ref = self.versions.refs[version]
        if (scored := self.server.scored()) is not self.server.vector:
            published = Published(version, scored.numpy(), self.server.counters.numpy(), mark="scored")
            ref = self.runtime.put(published)
        pending.scoring.append(self.evaluator.score(self.server, ref))

    def _report(self) -> Iterator[Round | Waiting]:
        """Complete the rows of scored rounds."""
        for pending in self._pending:
            for scoring in pending.scoring:
                yield from self.dispatcher.awaited(scoring.calls)
                pending.row |= self.evaluator.columns(scoring)
            self.rows.append(pending.row)
            scores = self.evaluator.scores(pending.scoring)
            yield Round(pending.row, pending.failures, pending.probes, pending.jobs, scores)
        self._pending = []

    # --- checkpoints and the end ---------------------------------------------------------------------------------
    def _save(self) -> Saved:
        """Write a checkpoint."""
        best = self.evaluator.best.state() if self.evaluator.best else {}
        plan, seconds = self.under_way.state(), self.history.wall_seconds
        now = snapshot.take(self.server, plan, self.private, self.versions, self.rows, seconds, best)
        return Saved(self.server.version, self._checkpoints.write(self.server.version, now))

    def restore(self) -> None:
        """Be where the checkpoint `resume` is."""
        earlier = checkpoint.read(self.resume)
        plan, bases = snapshot.restore(earlier, self.server, self.planner, self.private)
        for base in bases.values():
            self.versions.publish(base)
        self.under_way.restore(plan)
        self.rows = earlier.numbers["rows"]
        self.history.resume(earlier.numbers["wall"])
        if self.evaluator.best:
            self.evaluator.best.restore(snapshot.best(earlier))

    def _finish(self) -> Finished:
        """Write the shared model; the checksums of all that the run ended at."""
        if self.folder:
            shared = self.initial.named(self.server.vector, self.server.counters)
            tensors = {name: tensor.numpy() for name, tensor in shared.items()}
            checkpoint.save_model(tensors, Path(self.folder) / "model.safetensors")
        model, state = snapshot.model_sha256(self.server), snapshot.state_sha256(self.server, self.private)
        return Finished(model, state, peak_memory(), self.under_way.unfinished())
