"""Score models on the workers, and make columns of the history from the scores.

A client's own model has the client's personal parameters, if there are any. A method may change the
own model (hook `personalise`). A client can be scored in up to four views:

- `shared`: the shared model on the client's samples.
- `own`: the client's own model on the client's samples.
- `finetuned`: the own model after fine-tuning it on the client's data.
- `common`: the own model on the central test set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Literal, TypeAlias

import numpy as np

from raysim.api.declare import Declarations
from raysim.api.messages import PublishedVersion, ScoringReport, ScoringTask, SetReport, Update
from raysim.api.metrics import row_functions
from raysim.api.objectives import mean_loss
from raysim.data.partition import CSR
from raysim.methods.loss_decomposition import loss_decomposition
from raysim.primitives.streams import stream
from raysim.simulation.best_round import BestRounds
from raysim.simulation.calls import Call, WorkerCalls
from raysim.simulation.client_states import ClientStates, StateUse
from raysim.simulation.events import ClientScores, Row
from raysim.simulation.replicas import Replicas
from raysim.simulation.runtime import Ref, Runtime
from raysim.simulation.score_columns import ScoreColumns, mean_score
from raysim.simulation.server import Server
from raysim.simulation.set_scores import SetScores
from raysim.simulation.versions import Versions
from raysim.training.run_spec import RunSpec, evaluation_of

View: TypeAlias = Literal["shared", "own", "finetuned", "common", "sets", "mean"]
# A function that returns a reference to a published version in the runtime's store. Tasks that
# score the same version have the same function. It is called when tasks are sent, so that versions
# on disk are read one by one.
VersionLoader: TypeAlias = Callable[[], Ref]
_NO_ROWS = np.empty(0, np.int64)


def _no_clients() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass
class Scoring:
    """The calls that score models of one version, and the clients whose models are scored.

    clients, unseen: the scored clients that take part in the training, and those that never do.
    reports: the calls of each view. The module's docstring describes four views. "mean" scores the
    mean of all replicas, and "sets" is a method's own scoring.
    members: the clients whose local models the loss decomposition compares.
    models: a list of calls for each of these local models, and a last list for the next shared
    model.
    replicas: for each scored replica, the calls that score it on the central test set.
    client_scores: by column, pairs of an array of clients and an array of their scores.
    """

    clients: np.ndarray = field(default_factory=_no_clients)
    unseen: np.ndarray = field(default_factory=_no_clients)
    reports: dict[View, list[Call]] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    models: list[list[Call]] = field(default_factory=list)
    replicas: list[list[Call]] = field(default_factory=list)
    version: int = 0
    client_scores: dict[str, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)

    @property
    def calls(self) -> list[Call]:
        """All calls to workers that this scoring has started."""
        lists = (*self.reports.values(), *self.models, *self.replicas)
        return [call for calls in lists for call in calls]


class Evaluator:
    """The object that lets workers score models, and makes columns of the history from the scores.

    declarations: what the methods declare, such as the parts of the model that stay with clients.
    client_states: the client states. They contain the values of these parts.
    """

    def __init__(
        self,
        spec: RunSpec,
        declarations: Declarations,
        runtime: Runtime,
        calls: WorkerCalls,
        client_states: ClientStates,
    ):
        self.spec, self.layout, self.runtime = spec, declarations.layout, runtime
        self.evaluation = evaluation_of(spec, declarations)
        self.rounds = spec.settings.rounds
        self.calls, self.client_states = calls, client_states
        entries = (*self.layout.entries, *self.layout.counters)
        has_private = any(entry.personal and entry.network == "model" for entry in entries)
        # Whether the shared part alone is a model, and whether each client has its own model.
        self.complete = not has_private
        self.personal = has_private or bool(declarations.hooks_of("personalise"))
        partition = spec.data.partition
        self.tests, self.validation = partition.test, partition.validation
        # int64 [clients] test and validation samples; made once, for a million clients.
        self._test_counts = self.tests.counts
        self._validation_counts = np.zeros_like(self._test_counts)
        if self.validation is not None:
            self._validation_counts = self.validation.counts
        self.unseen = _no_clients() if partition.unseen is None else partition.unseen
        has_samples = np.flatnonzero(self._test_counts + self._validation_counts)
        self._scored = np.setdiff1d(has_samples, self.unseen)
        self._scored_unseen = self.unseen[self._test_counts[self.unseen] > 0]
        self.best = None if self.validation is None else BestRounds(self.tests)
        self.score_columns = self._make_columns()
        self._check_common()
        self.sets = SetScores(spec) if declarations.declarer("evaluate") else None

    def _make_columns(self) -> list[ScoreColumns]:
        """Return, for each metric, the object that makes its columns; the main metric is first."""
        metrics = self.spec.task.metrics
        functions = row_functions(metrics)
        columns = []
        for index, metric in enumerate(metrics):
            columns.append(
                ScoreColumns(
                    metric,
                    functions.index(metric.rows),
                    self.spec.data,
                    self.personal,
                    self._test_counts,
                    self._validation_counts,
                    None if index else self.best,
                )
            )
        return columns

    def _check_common(self) -> None:
        if not self.evaluation.common:
            return
        if not self.personal:
            raise ValueError(
                "evaluate.common=true scores each client's personal model on the central test "
                "set, but the clients of this run have no personal models. Set "
                "evaluate.common=false."
            )
        if not len(self.spec.data.central):
            raise ValueError(
                "evaluate.common=true scores models on the central test set, but this data has no "
                "central test set. Set evaluate.common=false."
            )

    # --- tasks ------------------------------------------------------------------------------------
    def score(self, server: Server, published: Ref) -> Scoring:
        """Start scoring the server's current version.

        published: a reference to this version in the runtime's store.
        """
        scoring = self._begin(server.version)
        clients, unseen = scoring.clients, scoring.unseen
        if self.sets is not None:
            single = [self._client_task(client, server) for client in clients.tolist()]
            single += [self._client_task(client, server) for client in unseen.tolist()]
            scoring.reports["sets"] = self._start(self.sets.tasks(single), published)
            return scoring
        if self.complete:
            tasks = self._shared_tasks(clients, unseen)
            scoring.reports["shared"] = self._start(tasks, published)
        has_finetuning = self._has_finetuning(server.version)
        single = []
        if self.personal or has_finetuning:
            single = [self._client_task(client, server) for client in clients.tolist()]
            single += [self._client_task(client, server) for client in unseen.tolist()]
        if self.personal:
            own_tasks = (
                single if self.best is None else [self._with_validation(task) for task in single]
            )
            scoring.reports["own"] = self._start(own_tasks, published)
        if has_finetuning:
            finetune = self.evaluation.finetune
            finetuned = [replace(task, finetune=finetune) for task in single if len(task.rows)]
            scoring.reports["finetuned"] = self._start(finetuned, published)
        if self.evaluation.common:
            common = [replace(task, rows=self.spec.data.central) for task in single]
            scoring.reports["common"] = self._start(common, published)
        return scoring

    def score_replicas(self, replicas: Replicas, versions: Versions, mean: Ref) -> Scoring:
        """Start scoring each client with the replica that serves the client.

        If there is a central test set and no parameter is personal, some models are also scored on
        it. They are each replica that serves a scored client, and the mean of all replicas.
        mean: a reference to the mean of all replicas.
        """
        scoring = self._begin(replicas.version)
        clients = [*scoring.clients.tolist(), *scoring.unseen.tolist()]
        replica_of = self._replicas_of(clients, replicas, versions)
        scored = set(replica_of.values()) or {0}
        loaders = {
            replica: partial(self._scored_ref, replicas, replica, versions)
            for replica in sorted(scored)
        }
        tasks = [
            self._client_task(client, replicas.servers[replica_of[client]]) for client in clients
        ]
        task_loaders = [loaders[replica_of[client]] for client in clients]
        if replicas.network.moves_clients:
            served = np.array([replica_of[client] for client in clients], np.float64)
            scoring.client_scores["replica"] = [(np.array(clients, np.int64), served)]
        own_tasks = tasks if self.best is None else [self._with_validation(task) for task in tasks]
        scoring.reports["own"] = self._start_each(own_tasks, task_loaders)
        if self._has_finetuning(replicas.version):
            tuned = [
                (replace(task, finetune=self.evaluation.finetune), loader)
                for task, loader in zip(tasks, task_loaders, strict=True)
                if len(task.rows)
            ]
            tuned_tasks = [task for task, _ in tuned]
            tuned_loaders = [loader for _, loader in tuned]
            scoring.reports["finetuned"] = self._start_each(tuned_tasks, tuned_loaders)
        if self.evaluation.common:
            common = [replace(task, rows=self.spec.data.central) for task in tasks]
            scoring.reports["common"] = self._start_each(common, task_loaders)
        if self.complete and len(self.spec.data.central):
            central = self._batches(self.spec.data.central)
            scoring.reports["mean"] = self._start(central, mean)
            scoring.replicas = self._score_centrally(central, list(loaders.values()), replicas)
        return scoring

    def _score_centrally(
        self,
        central_tasks: Sequence[ScoringTask],
        loaders: Sequence[VersionLoader],
        replicas: Replicas,
    ) -> list[list[Call]]:
        """Start scoring several versions on the central test set; return the calls of each version.

        central_tasks: the tasks that score one version.
        loaders: for each version, a function that returns a reference to it.
        """
        calls: list[list[Call]] = []
        workers = self.calls.active
        for index, loader in enumerate(loaders):
            if replicas.bytes_on_disk and index >= len(workers):
                # A version on disk is read only after previous versions are scored.
                self.calls.wait(calls[index - len(workers)][0])
            worker = workers[index % len(workers)]
            calls.append([self.calls.call(worker, "evaluate", central_tasks, loader())])
        return calls

    def _replicas_of(
        self, clients: Sequence[int], replicas: Replicas, versions: Versions
    ) -> dict[int, int]:
        """Choose the replica with which each client is scored; return the replicas by client.

        If clients choose their replica by its loss, compute the losses on the workers, and wait.
        versions: the published versions of the replicas.
        """
        if not replicas.network.chosen_by_loss:
            return {client: replicas.replica_of(client) for client in clients}
        train = self.spec.data.partition.all_train
        choosing = [client for client in clients if len(train.rows(client))]
        replica_of = dict.fromkeys(clients, 0)
        if choosing:
            losses = self.replica_losses(choosing, None, replicas, versions)
            replica_of |= zip(choosing, losses.argmin(axis=0).tolist(), strict=True)
        return replica_of

    def replica_losses(
        self, clients: Sequence[int], samples: int | None, replicas: Replicas, versions: Versions
    ) -> np.ndarray:
        """Return the mean loss of every replica for each client, float64 [replicas, clients].

        samples: the most training samples of each client that the loss is computed on. If a client
        has more, this number is drawn, again for each aggregation. None uses all samples.
        """
        calls: list[list[Call]] = []
        for number in replicas.numbers:
            loaders = [partial(versions.ref, number)] * len(clients)
            calls.append(self._start_losses(clients, samples, replicas.version, loaders))
        return np.stack([self._collect_losses(clients, started) for started in calls])

    def _scored_ref(self, replicas: Replicas, replica: int, versions: Versions) -> Ref:
        """Return a reference to the vector with which a replica is scored; store it if necessary.

        This vector is usually the replica's published version, which is stored already. A method
        may declare another vector, such as an average of versions.
        """
        server, number = replicas.servers[replica], replicas.numbers[replica]
        scored = server.scored()
        if scored is server.vector:
            return versions.ref(number)
        version, counters = server.version, server.counters.numpy()
        mark = f"scored {replica}"
        published = PublishedVersion(version, scored.numpy(), counters, mark=mark, number=number)
        return self.runtime.put(published)

    def _begin(self, version: int) -> Scoring:
        """Draw the clients to score with a version; return a new scoring of these clients.

        The caller starts the calls to workers, and adds them to the scoring.
        version: the number of the scored version.
        """
        clients = self._sample(self._scored, version, "evaluate")
        unseen = self._sample(self._scored_unseen, version, "evaluate.unseen")
        return Scoring(clients, unseen, version=version)

    def _sample(self, clients: np.ndarray, version: int, purpose: str) -> np.ndarray:
        """Draw `evaluate.clients` of these clients; return them ascending.

        Return all of them if `evaluate.clients` is "all", or if there are not more of them.
        version: the scored version. Each version has a draw of its own.
        purpose: the name of the random stream.
        """
        count = self.evaluation.clients
        if count == "all" or count >= len(clients):
            return clients
        generator = stream(self.spec.settings.seed, purpose, version)
        return np.sort(generator.choice(clients, size=count, replace=False))

    def _shared_tasks(self, clients: np.ndarray, unseen: np.ndarray) -> list[ScoringTask]:
        """Return the tasks that score the shared model; each task is one batch of samples.

        Their order is: test samples of clients, test samples of unseen clients, the central test
        set, validation samples. If clients have personal models, there are no tasks for validation
        samples.
        """
        parts = [
            self._rows(self.tests, clients),
            self._rows(self.tests, unseen),
            self.spec.data.central,
            _NO_ROWS if self.personal else self._validation_rows(clients),
        ]
        return [task for rows in parts for task in self._batches(rows)]

    def _batches(self, rows: np.ndarray) -> list[ScoringTask]:
        """Return tasks that score rows with the shared model, one task for each batch."""
        size = self.spec.score_batch
        return [ScoringTask(-1, rows[start : start + size]) for start in range(0, len(rows), size)]

    def _client_task(self, client: int, server: Server) -> ScoringTask:
        state = self.client_states.committed_job(client)
        return ScoringTask(client, self.tests.rows(client), state, server.sent_to(client))

    def _with_validation(self, task: ScoringTask) -> ScoringTask:
        return replace(task, rows=np.concatenate((task.rows, self._validation_rows([task.client]))))

    @staticmethod
    def _rows(client_rows: CSR, clients: Iterable[int]) -> np.ndarray:
        """Join the rows of some clients into one array, one client after another.

        client_rows: for each client the rows of its samples in the data set, for example of its
        test samples.
        """
        return np.concatenate(
            [client_rows.indices[:0], *(client_rows.rows(int(client)) for client in clients)]
        )

    def _validation_rows(self, clients: Iterable[int]) -> np.ndarray:
        if self.validation is None:
            return _NO_ROWS
        return self._rows(self.validation, clients)

    def _has_finetuning(self, version: int) -> bool:
        finetune = self.evaluation.finetune
        return finetune.epochs > 0 and (version == self.rounds or not finetune.last)

    def _start(self, tasks: Sequence[ScoringTask], published: Ref) -> list[Call]:
        """Start the calls for tasks that score the same version.

        A client's task goes to the worker that has the client's state.
        published: a reference to the version.
        """
        return self._start_each(tasks, [lambda: published] * len(tasks))

    def _start_each(
        self, tasks: Sequence[ScoringTask], loaders: Sequence[VersionLoader]
    ) -> list[Call]:
        """Start the calls for tasks that may score different versions.

        A client's task goes to the worker that has the client's state.
        loaders: for each task, a function that returns a reference to the version.
        """
        # By worker: consecutive tasks with one version.
        tasks_of_worker: dict[int, list[tuple[VersionLoader, list[ScoringTask]]]] = {}
        workers = self.calls.active
        for index, (task, loader) in enumerate(zip(tasks, loaders, strict=True)):
            newest = self.client_states.newest_state(task.client)
            worker = workers[index * len(workers) // len(tasks)]
            if newest is not None and newest[0] in workers:
                worker = newest[0]
            parts = tasks_of_worker.setdefault(worker, [])
            if not parts or parts[-1][0] is not loader:
                parts.append((loader, []))
            parts[-1][1].append(task)
        has_states = self.client_states.stateful and any(task.client >= 0 for task in tasks)
        chunks = [
            self._chunks(worker, tasks_of_worker[worker]) for worker in sorted(tasks_of_worker)
        ]
        calls: list[Call] = []
        for wave in zip_longest(*chunks):
            # States on disk are read only after all calls of the previous wave are answered.
            for call in calls:
                self.calls.wait(call)
            for chunk in wave:
                if chunk is None:
                    continue
                worker, members, loader = chunk
                states = []
                if has_states:
                    states = [StateUse(task.client, task.state) for task in members]
                call = self.calls.call(worker, "evaluate", members, loader(), states=states)
                calls.append(call)
        return calls

    def _chunks(
        self, worker: int, parts: Sequence[tuple[VersionLoader, Sequence[ScoringTask]]]
    ) -> list[tuple[int, Sequence[ScoringTask], VersionLoader]]:
        """Divide a worker's scoring tasks into calls.

        The client states of a task may be on disk. The tasks are divided so that each call reads
        few bytes of client states from disk.
        parts: for each version, the function that loads it, and the tasks that score it.
        """
        chunks: list[tuple[int, Sequence[ScoringTask], VersionLoader]] = []
        for loader, tasks in parts:
            reads = self.client_states.split_reads([task.client for task in tasks])
            chunks += [(worker, tasks[read], loader) for read in reads]
        return chunks

    def losses(
        self,
        clients: Sequence[int],
        samples: int | None,
        version: int,
        loaders: Sequence[VersionLoader],
    ) -> np.ndarray:
        """Return the mean loss of a model on each client's training samples, float64 [clients].

        samples: the largest number of samples of a client that are used. They are drawn from the
        samples of a client that has more. None uses all samples.
        version: the number of aggregations so far. It only decides which samples are drawn.
        loaders: for each client, a function that returns a reference to the model version.
        """
        calls = self._start_losses(clients, samples, version, loaders)
        return self._collect_losses(clients, calls)

    def _start_losses(
        self,
        clients: Sequence[int],
        samples: int | None,
        version: int,
        loaders: Sequence[VersionLoader],
    ) -> list[Call]:
        tasks = [self._loss_task(client, samples, version) for client in clients]
        return self._start_each(tasks, loaders)

    def _collect_losses(self, clients: Sequence[int], calls: Sequence[Call]) -> np.ndarray:
        reports = self._collect(calls)
        loss_of = {report.client: mean_loss(report.losses) for report in reports}
        return np.array([loss_of[client] for client in clients], np.float64)

    def _loss_task(self, client: int, samples: int | None, version: int) -> ScoringTask:
        rows = self.spec.data.partition.all_train.rows(client)
        if samples is not None and samples < len(rows):
            generator = stream(self.spec.settings.seed, "selection.loss", client, version)
            rows = np.sort(generator.choice(rows, samples, replace=False))
        state = self.client_states.committed_job(client)
        return ScoringTask(client, rows, state, personalised=False)

    def decompose(
        self,
        updates: Sequence[Update],
        bases: Mapping[int, PublishedVersion],
        after: PublishedVersion,
    ) -> Scoring:
        """Start scoring the local model of each participant, and the next shared model.

        Each model is scored on at most `evaluate.decompose_rows` training samples of every
        participant, with this participant's personal parameters.
        bases: the base versions of the updates, by number.
        """
        tasks = [self._training_task(update.client) for update in updates]
        scoring = Scoring(members=tuple(update.client for update in updates))
        for update in updates:
            base = bases[update.version]
            assert update.delta is not None, "a decomposition needs single updates"
            vector, mark = base.vector + update.delta, f"job {update.job}"
            local = PublishedVersion(base.version, vector, update.counters, mark=mark)
            scoring.models.append(self._start(tasks, self.runtime.put(local)))
        after = replace(after, mark="next")
        scoring.models.append(self._start(tasks, self.runtime.put(after)))
        return scoring

    def _training_task(self, client: int) -> ScoringTask:
        rows, most = self.spec.data.partition.train.rows(client), self.evaluation.decompose_rows
        if len(rows) > most:
            generator = stream(self.spec.settings.seed, "decompose", client)
            rows = np.sort(generator.choice(rows, most, replace=False))
        return ScoringTask(
            client, rows, self.client_states.committed_job(client), personalised=False
        )

    # --- columns ----------------------------------------------------------------------------------
    def columns(self, scoring: Scoring) -> Row:
        """Return the columns that a scoring adds to a row of the history.

        Wait until the workers have answered all calls of the scoring. The scores of single clients
        are stored in `scoring.client_scores`.
        """
        if self.sets is not None:
            set_reports: list[SetReport] = []
            for call in scoring.reports["sets"]:
                set_reports += self.calls.wait(call)
            return self.sets.columns(set_reports, scoring, self.best)
        reports = {view: self._collect(calls) for view, calls in scoring.reports.items()}
        row: Row = {}
        if "shared" in reports:
            row |= self._shared_columns(reports["shared"], scoring)
        row |= self._own_columns(reports.get("own", []), "", scoring)
        row |= self._own_columns(reports.get("finetuned", []), "_finetuned", scoring)
        if reports.get("common"):
            row |= self._common_columns(reports["common"], scoring)
        if "mean" in reports:
            row |= self._replica_columns(reports["mean"], scoring, row)
        if scoring.models:
            row |= self._decomposition_columns(scoring)
        return row

    def _collect(self, calls: Sequence[Call]) -> list[ScoringReport]:
        return [report for call in calls for report in self.calls.wait(call)]

    def _shared_columns(self, reports: Sequence[ScoringReport], scoring: Scoring) -> Row:
        """Return the columns with scores of the shared model.

        The scores of the best round are added if there are validation samples and no personal
        models.
        reports: a report for each task that `_shared_tasks` returned, in the same order.
        """
        sizes = [
            self._test_counts[scoring.clients].sum(),
            self._test_counts[scoring.unseen].sum(),
            len(self.spec.data.central),
        ]
        ends = np.cumsum(sizes, dtype=np.int64)
        row: Row = {}
        for columns in self.score_columns:
            scores = np.empty(0, np.bool_)
            if reports:
                scores = np.concatenate([report.scores[columns.values_index] for report in reports])
            row |= columns.shared(np.split(scores, ends), scoring)
        row["loss_global"] = None
        if sizes[2]:
            losses = np.concatenate([report.losses for report in reports])
            row["loss_global"] = mean_loss(losses[ends[1] : ends[2]])
        return row

    def _own_columns(self, reports: Sequence[ScoringReport], suffix: str, scoring: Scoring) -> Row:
        """Return the columns with scores of the clients' own models; store each client's scores.

        reports: each report has the scores of a client's test samples. With the suffix "", it also
        has the scores of the client's validation samples, if there are any.
        suffix: the end of the columns' names: "_finetuned" for fine-tuned models, else "".
        """
        row: Row = {}
        if not reports:
            return row
        ordered = sorted(reports, key=lambda report: report.client)
        for columns in self.score_columns:
            tested: dict[int, np.ndarray] = {}
            validated: dict[int, np.ndarray] = {}
            for report in ordered:
                size, scores = self._test_counts[report.client], report.scores[columns.values_index]
                tested[report.client] = scores[:size]
                validated[report.client] = scores[size:]
            row |= columns.own(tested, validated, suffix, scoring)
        return row

    def _replica_columns(self, mean: Sequence[ScoringReport], scoring: Scoring, own: Row) -> Row:
        """Return columns with the scores of replicas, and of their mean, on the central test set.

        mean: the workers' reports on the mean of all replicas.
        own: the columns with the scores of the clients' own models.
        """
        losses = np.concatenate([report.losses for report in mean])
        row: Row = {"loss_global": mean_loss(losses)}
        reports_of_each = [self._collect(calls) for calls in scoring.replicas]
        for columns in self.score_columns:
            of_mean = np.concatenate([report.scores[columns.values_index] for report in mean])
            of_each = [
                np.concatenate([report.scores[columns.values_index] for report in reports])
                for reports in reports_of_each
            ]
            row |= columns.replicas(of_mean, of_each, scoring, own)
        return row

    def _common_columns(self, reports: Sequence[ScoringReport], scoring: Scoring) -> Row:
        """Return columns such as `accuracy_common`, the mean score of the clients' own models.

        All models are scored on the central test set. Unseen clients have separate columns, such as
        `accuracy_unseen_common`.
        reports: one report for each client.
        """
        row: Row = {}
        for columns in self.score_columns:
            scores = {
                report.client: columns.metric.summarise(report.scores[columns.values_index])
                for report in reports
            }
            for clients, suffix in (
                (scoring.clients, "_common"),
                (scoring.unseen, "_unseen_common"),
            ):
                if len(clients):
                    values = np.array([scores[client] for client in clients.tolist()])
                    row[f"{columns.metric.name}{suffix}"] = mean_score(values)
        return row

    def scores(self, scorings: Sequence[Scoring]) -> ClientScores | None:
        """Return the score of each client in the last scoring that has scores of single clients.

        Return None if there is no such scoring. Call `columns` with each scoring first, because
        `columns` stores these scores.
        """
        scored = [scoring for scoring in scorings if scoring.client_scores]
        if not scored:
            return None
        last = scored[-1]
        clients = np.sort(np.concatenate([last.clients, last.unseen]))
        clients = clients[self._test_counts[clients] > 0]
        columns: dict[str, np.ndarray] = {}
        for name, parts in last.client_scores.items():
            columns[name] = np.full(len(clients), np.nan)
            for members, values in parts:
                columns[name][np.searchsorted(clients, members)] = values
        return ClientScores(clients, columns)

    def _decomposition_columns(self, scoring: Scoring) -> Row:
        """Return the columns with the loss decomposition of the FedLD paper (equation 2).

            global_loss        = sum_j p_j g_j
            local_loss         = sum_i p_i L_ii
            distribution_shift = sum_ij p_i p_j L_ij - local_loss
            aggregation        = global_loss - sum_ij p_i p_j L_ij

        On client j's samples, L_ij is the loss of client i's local model, and g_j that of the next
        shared model. p_i is the share of client i in the participants' training samples.
        """
        column = {client: index for index, client in enumerate(scoring.members)}
        table = np.empty((len(scoring.models), len(scoring.members)))
        for losses, calls in zip(table, scoring.models, strict=True):
            for report in self._collect(calls):
                losses[column[report.client]] = mean_loss(report.losses)
        train = self.spec.data.partition.train
        weights = np.array([len(train.rows(client)) for client in scoring.members])
        terms = loss_decomposition(loss_matrix=table[:-1], global_losses=table[-1], weights=weights)
        signed = ("global_loss", "local_loss", "distribution_shift", "aggregation")
        return {f"decomposition.{name}": float(terms[name]) for name in signed}
