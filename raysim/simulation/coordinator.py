"""The loop of a run: plan, dispatch, collect, aggregate, evaluate, save.

Before a job is trained, the planner decides whether the job is lost or discarded. Therefore lost
and discarded jobs are not trained.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from raysim.api.messages import Failure, Job, PublishedVersion, Update
from raysim.simulation.best_model import BestModel, best_criterion
from raysim.simulation.calls import WorkerCalls
from raysim.simulation.client_states import make_client_states
from raysim.simulation.dispatcher import Dispatcher
from raysim.simulation.evaluator import Evaluator
from raysim.simulation.events import Event, Row, Started
from raysim.simulation.failures import check_failures
from raysim.simulation.fleet import Fleet
from raysim.simulation.history_row import RowWriter
from raysim.simulation.jobs import JobTable
from raysim.simulation.load import make_planner, varying_tensors
from raysim.simulation.network import make_network, make_replicas
from raysim.simulation.network_bytes import CountingRuntime
from raysim.simulation.planner import NoClientsLeftError, PlannedAggregation
from raysim.simulation.preparation import check_probe, collect_contributions, send_constants
from raysim.simulation.profile import Profile
from raysim.simulation.round_reports import PendingRound, RoundReports
from raysim.simulation.runtime import Runtime
from raysim.simulation.saving import RunSaver
from raysim.simulation.schedule import Schedule
from raysim.simulation.server import Server
from raysim.simulation.snapshot import RunState
from raysim.simulation.versions import Versions
from raysim.training.determinism import make_deterministic
from raysim.training.run_spec import RunSpec, declare_run
from raysim.vectors.layout import Vector


class Coordinator:
    """The coordinator of one run.

    `run()` yields the events of the run; the last one is `Finished`.
    folder: where the model is written, and the checkpoints unless `checkpoint.folder` is set; ""
    writes none.
    resume: the address of the checkpoint to continue from; "" starts a new run.
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
        if self.profile:
            runtime = self.profile.runtime
        settings = spec.settings
        self.spec, self.settings = spec, settings
        check_probe(spec)
        make_deterministic(spec.threads)
        declarations = declare_run(spec)
        self.declarations, self.layout = declarations, declarations.layout
        network_columns: Callable[[], Row] = dict
        if not runtime.is_in_process:
            runtime = CountingRuntime(runtime, self.layout.shared * spec.dtype.itemsize)
            network_columns = runtime.columns
        self.runtime = runtime
        self.initial = Vector(declarations.networks, self.layout, torch.device("cpu"), spec.dtype)
        self.counts = spec.data.partition.train.counts
        network = make_network(spec, declarations, fleet)
        self.replicas = make_replicas(
            spec, declarations, self.initial, schedule.size, network, folder
        )
        self.client_states = make_client_states(spec, declarations, runtime, folder)
        self.versions = Versions(runtime)
        self.planner = make_planner(spec, declarations, schedule, fleet, network, self._sent_floats)
        self._varying = varying_tensors(declarations)
        self.calls = WorkerCalls(runtime, self.client_states, settings.faults.timeout or math.inf)
        self.dispatcher = Dispatcher(
            self.calls,
            runtime,
            self.client_states,
            self.versions,
            self.layout.shared,
            has_lanes=spec.lanes > 1,
        )
        self.jobs = JobTable(self.planner, self.replicas, self.versions, self.dispatcher, settings)
        self.evaluator = Evaluator(spec, declarations, runtime, self.calls, self.client_states)
        self.planner.measure_with(self._measure_losses)
        self.history = RowWriter(
            spec,
            declarations,
            self.calls,
            self.dispatcher,
            self.client_states,
            network_columns,
        )
        best_model = BestModel(best_criterion(spec))
        self.reports = RoundReports(self.evaluator, self.calls, self.history, best_model)
        state = RunState(
            replicas=self.replicas,
            planner=self.planner,
            jobs=self.jobs,
            client_states=self.client_states,
            versions=self.versions,
            history=self.history,
            best=self.evaluator.best,
            best_model=best_model,
        )
        base = "" if spec.frozen is None else spec.frozen.sha256
        self.saver = RunSaver(state, self.initial, settings, folder, resume, base)

    @property
    def server(self) -> Server:
        """The server of the first replica, which is the only replica in most topologies."""
        return self.replicas.first

    @property
    def rows(self) -> list[Row]:
        """The rows of the history, up to the last reported round."""
        return self.history.rows

    def run(self) -> Iterator[Event]:
        """Run to the last round; yield the events of the run.

        Raises TooManyFailuresError; before that, a checkpoint is written if the run has a folder.
        Raises NoClientsLeftError; before that, a checkpoint is written if the run has planned an
        aggregation and writes checkpoints.
        """
        self.history.start()
        if self.profile:
            self.profile.watch(self.replicas, self.evaluator, self.saver)
        self.calls.call_all()
        is_resumed = self.saver.restore()
        if not is_resumed:
            collect_contributions(self.declarations, self.replicas, self.planner, self.calls)
        send_constants(self.spec, self.replicas, self.runtime, self.calls)
        self._publish()  # a selection may measure losses of this version
        if not is_resumed:
            # This comes before anything is written, because it raises for an impossible fleet or
            # schedule.
            self.jobs.plan()
        self.jobs.resume()
        yield Started(list(self.rows))
        while self.replicas.version < self.settings.rounds:
            yield from self._run_round()
        yield from self._report_and_save(self.saver.writes_checkpoints)
        finished = self.saver.finish()
        if self.profile:
            yield self.profile.take()
        yield finished

    def _run_round(self) -> Iterator[Event]:
        """Train the jobs of the next aggregation, then aggregate their updates.

        Meanwhile workers score the previous version.
        """
        yield from self.calls.update_workers()
        try:
            aggregation = self.jobs.next_aggregation()
        except NoClientsLeftError:
            yield from self._report_and_save(self.saver.writes_checkpoints)
            raise
        jobs = self.jobs.jobs_of(aggregation)
        self.dispatcher.submit(jobs, aggregation.version)
        yield from self.reports.report()
        self.jobs.look_ahead()
        yield from self.calls.wait_with_events(self.dispatcher.calls_of(jobs))
        pending = self._aggregate(aggregation, jobs)
        self._publish()
        self._evaluate(pending)
        self.reports.add(pending)
        if self.saver.is_due:
            yield from self._report_and_save(True)

    def _publish(self) -> None:
        """Store the current version of each changed replica for all workers."""
        self.replicas.publish(self.versions)

    def _measure_losses(self, clients: Sequence[int], samples: int | None) -> np.ndarray:
        """Return the mean loss that each client's replica has on the client's training samples.

        If clients choose their replica by the loss, return the smallest loss over all replicas.
        samples: the most samples of each client that the loss is computed on; None uses all.
        """
        replicas = self.replicas
        if replicas.network.chosen_by_loss:
            losses = self.evaluator.replica_losses(clients, samples, replicas, self.versions)
            smallest: np.ndarray = losses.min(axis=0)
            return smallest
        numbers = [replicas.numbers[replicas.replica_of(client)] for client in clients]
        source_of = {number: partial(self.versions.ref, number) for number in numbers}
        sources = [source_of[number] for number in numbers]
        return self.evaluator.losses(clients, samples, replicas.version, sources)

    def _sent_floats(self, client: int, name: str) -> int:
        """Return the size in floats of a tensor that a method sends to a client.

        The tensor is sent with the current version of the replica that serves the client. Return 0
        if this version has no such tensor.
        name: the full name of the tensor, "method.name".
        """
        number = self.replicas.numbers[self.replicas.replica_of(client)]
        return self.versions.extra_floats(number, name)

    def _count_unplanned(
        self,
        aggregation: PlannedAggregation,
        jobs: Sequence[Job],
        results: Sequence[Update | Failure],
    ) -> None:
        """Correct the traffic in the plan of an aggregation: use the real sizes of the updates.

        aggregation: the plan to correct.
        jobs: the jobs of the aggregation.
        results: an update or a failure for each job.
        """
        floats = 0
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Update):
                floats_of = functools.partial(self.versions.extra_floats, job.base)
                floats += sum(
                    varying.unplanned_floats(result, floats_of) for varying in self._varying
                )
        self.planner.count_unplanned(aggregation, floats)

    def _aggregate(self, aggregation: PlannedAggregation, jobs: Sequence[Job]) -> PendingRound:
        """Collect the updates of these jobs, and aggregate them into the next version.

        Return this aggregation's row of the history, its failures, its probes and its ended jobs.
        The scores follow later.
        """
        result_floats = self.dispatcher.pending_floats
        results, sums = self.dispatcher.collect(jobs)
        store_bytes = self.history.store_bytes(self.versions.nbytes, result_floats)
        jobs = self.replicas.assign(jobs, results)
        results = self.replicas.receive(jobs, results)
        updates = [result for result in results if isinstance(result, Update)]
        failures = tuple(result for result in results if isinstance(result, Failure))
        check_failures(
            failures, len(jobs), aggregation.version, self.settings.faults.tolerate, self.saver
        )
        places = [result if isinstance(result, Update) else None for result in results]
        self.replicas.step(aggregation, jobs, places, sums, self.versions)
        self.client_states.commit(jobs)
        self.planner.report(updates)
        if self._varying:
            self._count_unplanned(aggregation, jobs, results)
        scorings = []
        if updates and self.settings.evaluate.decomposes(self.replicas.version):
            scorings.append(
                self.evaluator.decompose(updates, self.versions, self.server.published())
            )
        row = self.history.row(self.replicas, aggregation, updates, failures, store_bytes)
        probes = tuple(update.probe for update in updates if update.probe is not None)
        return PendingRound(row, failures, probes, self.jobs.end(aggregation, results), scorings)

    def _evaluate(self, pending: PendingRound) -> None:
        """Start scoring the current version, unless this round is not scored.

        Call this before jobs start from this version. Workers then score the version before they
        train these jobs.
        pending: the finished round, to which the scores belong.
        """
        replicas, version = self.replicas, self.replicas.version
        if not self.settings.evaluate.evaluates(version, self.settings.rounds):
            return
        vector, counters = pending.scored = replicas.scored()
        number = replicas.numbers[0]
        if vector is self.server.vector:
            ref = self.versions.ref(number)
        else:
            published = PublishedVersion(
                version, vector.numpy(), counters.numpy(), mark="scored", number=number
            )
            ref = self.runtime.put(published)
        if replicas.is_single:
            pending.scorings.append(self.evaluator.score(self.server, ref))
            return
        pending.row["consensus_distance"] = replicas.consensus_distance()
        pending.scorings.append(self.evaluator.score_replicas(replicas, self.versions, ref))

    def _report_and_save(self, writes_checkpoint: bool) -> Iterator[Event]:
        """Report the finished rounds, then write a checkpoint if `writes_checkpoint` is True."""
        yield from self.reports.report()
        if writes_checkpoint:
            yield self.saver.save()
