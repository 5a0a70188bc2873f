"""Score models on the workers: which models, on which rows, and which columns of the history result.

Four views of a client's model, each a report under its own name: `shared` (the vector that is averaged), its own
(`personalise` and the personal part), `finetuned` (its own, adapted to its data first), and its own on the central test
set (`common`). And the loss decomposition of the FedLD paper, for any method.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal, TypeAlias

import numpy as np

from raysim.api.declare import Declarations
from raysim.api.messages import Published, Report, Task, Update
from raysim.data.partition import CSR
from raysim.methods.loss_decomposition import loss_decomposition
from raysim.primitives.streams import stream
from raysim.simulation.best_round import BestRounds
from raysim.simulation.calls import Call, WorkerCalls
from raysim.simulation.client_states import ClientStates, StateUse
from raysim.simulation.events import ClientScores, Row
from raysim.simulation.runtime import Ref, Runtime
from raysim.simulation.server import Server
from raysim.training.run_spec import RunSpec, evaluation_of

View: TypeAlias = Literal["shared", "own", "finetuned", "common"]
DOMAINS = 20  # most domains that get a column each


@dataclass
class Scoring:
    """Reports under way, by view; and the decomposition's, by model."""

    clients: np.ndarray = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # of those that are trained
    unseen: np.ndarray = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # of those that never are
    reports: dict[View, list[Call]] = field(default_factory=dict)
    members: tuple[int, ...] = ()  # clients of the decomposition
    models: list[list[Call]] = field(
        default_factory=list
    )  # of each member's local model, and of the next shared one
    version: int = 0
    # By the column that holds the mean: clients with tests and the score of each, once it was read.
    each: dict[str, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)

    @property
    def calls(self) -> list[Call]:
        """All that it waits for."""
        return [call for calls in (*self.reports.values(), *self.models) for call in calls]


class Evaluator:
    """Sends tasks to workers, and makes columns of what comes back."""

    def __init__(
        self,
        spec: RunSpec,
        declarations: Declarations,
        runtime: Runtime,
        calls: WorkerCalls,
        client_states: ClientStates,
    ):
        self.spec, self.layout, self.runtime = spec, (layout := declarations.layout), runtime
        self.evaluation = evaluation_of(spec, declarations)
        self.rounds = spec.settings.rounds
        self.calls, self.client_states = calls, client_states
        stays = any(
            e.personal and e.network == "model" for e in (*layout.entries, *layout.counters)
        )
        self.complete = not stays  # whether the shared part alone is a model
        self.personal = stays or bool(
            declarations.filling("personalise")
        )  # whether every client has its own model
        self.tests = spec.data.partition.test
        self._counts = (
            self.tests.counts
        )  # int64 [clients] test samples; made once, for they are as many as the clients
        self.validation = spec.data.partition.validation
        self._validated = (
            np.zeros_like(self._counts) if self.validation is None else self.validation.counts
        )
        unseen = spec.data.partition.unseen
        self.unseen = np.empty(0, np.int64) if unseen is None else unseen
        self._scored = np.setdiff1d(np.flatnonzero(self._counts + self._validated), self.unseen)
        self._scored_unseen = self.unseen[self._counts[self.unseen] > 0]
        self.best = None if self.validation is None else BestRounds(self.tests)
        dataset = spec.data.open()
        self.domains, self.names = dataset.domains, dataset.domain_names
        self.metric = spec.task.metric
        if self.evaluation.common and not (self.personal and len(spec.data.central)):
            raise ValueError(
                "evaluate.common=true scores the clients' own models on the central test set, but this run has "
                f"{'no such set' if self.personal else 'one model for all'}: set evaluate.common=false"
            )

    # --- asking --------------------------------------------------------------------------------------------------
    def score(self, server: Server, published: Ref) -> Scoring:
        """Start scoring the server's version."""
        version = server.version
        clients = self._drawn(self._scored, server, "evaluate")
        unseen = self._drawn(self._scored_unseen, server, "evaluate.unseen")
        found = Scoring(clients, unseen, version=version)
        central = self.spec.data.central
        if self.complete:
            size = self.spec.score_batch  # one model for all: whole batches across clients
            tests = self._rows(self.tests, clients), self._rows(self.tests, unseen)
            parts = *tests, central, self._validates("shared", clients)
            tasks = [
                Task(-1, rows[i : i + size]) for rows in parts for i in range(0, len(rows), size)
            ]
            self._send("shared", tasks, published, found)
        single: list[Task] = []
        if self.personal or self._tunes(version):
            for client in (*clients.tolist(), *unseen.tolist()):
                state, extras = self.client_states.accepted_job(client), server.sent_to(client)
                single.append(Task(client, self.tests.rows(client), state, extras))
        if self.personal:
            own = [
                replace(t, rows=np.concatenate((t.rows, self._validates("own", [t.client]))))
                for t in single
            ]
            self._send("own", own if self.best else single, published, found)
        if self._tunes(version):
            tuned = [
                replace(task, finetune=self.evaluation.finetune)
                for task in single
                if len(task.rows)
            ]
            self._send("finetuned", tuned, published, found)
        if self.evaluation.common:
            self._send("common", [replace(task, rows=central) for task in single], published, found)
        return found

    def _drawn(self, clients: np.ndarray, server: Server, purpose: str) -> np.ndarray:
        """Draw as many of the clients as `evaluate.clients` asks for, ascending; all where there are no more."""
        count = self.evaluation.clients
        if count == "all" or count >= len(clients):
            return clients
        return np.sort(server.stream(purpose).choice(clients, size=count, replace=False))

    @staticmethod
    def _rows(part: CSR, clients: Iterable[int]) -> np.ndarray:
        """All rows of some clients, one client after another."""
        return np.concatenate([part.indices[:0], *(part.rows(int(client)) for client in clients)])

    def _validates(self, view: View, clients: Iterable[int]) -> np.ndarray:
        """Validation rows of these clients, in the view that has the models that clients use."""
        if self.validation is None or view != ("own" if self.personal else "shared"):
            return np.empty(0, np.int64)
        return self._rows(self.validation, clients)

    def _tunes(self, version: int) -> bool:
        how = self.evaluation.finetune
        return how.epochs > 0 and (version == self.rounds or not how.last)

    def _send(self, view: View, tasks: Sequence[Task], published: Ref, found: Scoring) -> None:
        found.reports[view] = self._calls(tasks, published)

    def _calls(self, tasks: Sequence[Task], published: Ref) -> list[Call]:
        """To the workers that hold the clients' states, the rest evenly."""
        shares: dict[int, list[Task]] = {}
        for index, task in enumerate(tasks):
            place = self.client_states.place(task.client)
            worker = place[0] if place is not None else index * self.runtime.workers // len(tasks)
            shares.setdefault(worker, []).append(task)
        stateful = any(task.client >= 0 for task in tasks) and self.client_states.stateful
        calls: list[Call] = []
        parts = [
            [(worker, own[part]) for part in self._parts(own)]
            for worker, own in sorted(shares.items())
        ]
        for wave in zip_longest(*parts):
            for call in calls:  # of states that lie on disk, no more is read before those are back
                self.calls.wait(call)
            for worker, own in filter(None, wave):
                states = [StateUse(task.client, task.state) for task in own] if stateful else []
                calls.append(self.calls.call(worker, "evaluate", own, published, states=states))
        return calls

    def _parts(self, tasks: Sequence[Task]) -> Iterator[slice]:
        return self.client_states.parts([task.client for task in tasks])

    def decompose(
        self, updates: Sequence[Update], bases: Mapping[int, Published], after: Published
    ) -> Scoring:
        """Start scoring every participant's local model, and the next shared one, on every participant's samples.

        The personal part is everywhere that of the client whose samples they are.
        """
        tasks = []
        for update in updates:
            rows = self.spec.data.partition.train.rows(update.client)
            if len(rows) > (most := self.evaluation.decompose_rows):
                rows = np.sort(
                    stream(self.spec.settings.seed, "decompose", update.client).choice(
                        rows, most, replace=False
                    )
                )
            tasks.append(
                Task(
                    update.client,
                    rows,
                    self.client_states.accepted_job(update.client),
                    personalised=False,
                )
            )
        found = Scoring(members=tuple(update.client for update in updates))
        for update in updates:
            base = bases[update.version]
            assert update.delta is not None, "a decomposition asks for single updates"
            local = Published(
                base.version, base.vector + update.delta, update.counters, mark=f"job {update.job}"
            )
            found.models.append(self._calls(tasks, self.runtime.put(local)))
        found.models.append(self._calls(tasks, self.runtime.put(replace(after, mark="next"))))
        return found

    # --- reading -------------------------------------------------------------------------------------------------
    def columns(self, found: Scoring) -> Row:
        """What the history says; waits for the reports."""
        reports = {view: self._gathered(refs) for view, refs in found.reports.items()}
        row: Row = {}
        if (shared := reports.get("shared")) is not None:
            row |= self._shared_columns(shared, found)
        row |= self._own_columns(reports.get("own", []), "", found)
        row |= self._own_columns(reports.get("finetuned", []), "_finetuned", found)
        if common := reports.get("common"):
            row |= self._common_columns(common, found)
        if found.models:
            row |= self._decomposed(found)
        return row

    def _shared_columns(self, reports: Sequence[Report], found: Scoring) -> Row:
        """The shared model's scores: on the clients' tests, those of unseen clients, and the central test set."""
        scores = (
            np.concatenate([report.scores for report in reports])
            if reports
            else np.empty(0, np.bool_)
        )
        losses = np.concatenate([report.losses for report in reports]) if reports else np.empty(0)
        sizes = [
            self._counts[found.clients].sum(),
            self._counts[found.unseen].sum(),
            len(self.spec.data.central),
        ]
        ends = np.cumsum(sizes, dtype=np.int64)
        tested, unseen, central, validated = np.split(scores, ends)
        suffix, name = "_shared" if self.personal else "", self.metric.name
        row = self._clients(suffix, tested, found.clients, found)
        row |= self._unseen(suffix, unseen, found)
        row[f"{name}_global"] = self.metric.summarise(central) if len(central) else None
        row["loss_global"] = (
            float(losses[ends[1] : ends[2]].mean(dtype=np.float64)) if len(central) else None
        )
        row |= self._worst_domain(central)
        if self.best and not self.personal:
            row |= self._best(found, tested, validated)
            row |= self._best_shared(found.version, row)
        return row

    def _own_columns(self, reports: Sequence[Report], suffix: str, found: Scoring) -> Row:
        """The scores of the clients' own models; those of a client's tests come first, then of its validation."""
        if not reports:
            return {}
        tested: dict[int, np.ndarray] = {}
        validated: dict[int, np.ndarray] = {}
        for report in sorted(reports, key=lambda report: report.client):
            size = self._counts[report.client]
            tested[report.client], validated[report.client] = (
                report.scores[:size],
                report.scores[size:],
            )
        kept = next(iter(tested.values()))[:0]  # what is kept of no row

        def joined(scores: Mapping[int, np.ndarray], clients: np.ndarray) -> np.ndarray:
            own = [scores[client] for client in clients.tolist() if client in scores]
            return np.concatenate([kept, *own])

        row = self._clients(suffix, joined(tested, found.clients), found.clients, found)
        row |= self._unseen(suffix, joined(tested, found.unseen), found)
        if self.best and not suffix:
            row |= self._best(
                found, joined(tested, found.clients), joined(validated, found.clients)
            )
        return row

    def _common_columns(self, reports: Sequence[Report], found: Scoring) -> Row:
        """The mean score of clients' own models on the central test set."""
        scores = {report.client: self.metric.summarise(report.scores) for report in reports}
        row: Row = {}
        for clients, suffix in ((found.clients, "_common"), (found.unseen, "_unseen_common")):
            if own := [scores[client] for client in clients.tolist()]:
                row[f"{self.metric.name}{suffix}"] = float(np.mean(own))
        return row

    def scores(self, found: Sequence[Scoring]) -> ClientScores | None:
        """Of single clients with tests, as `columns` read them last; None where none was scored."""
        last = next((scoring for scoring in reversed(found) if scoring.each), None)
        if last is None:
            return None
        clients = np.sort(np.concatenate([last.clients, last.unseen]))
        clients = clients[self._counts[clients] > 0]
        columns: dict[str, np.ndarray] = {}
        for name, parts in last.each.items():
            columns[name] = np.full(len(clients), np.nan)
            for own, values in parts:
                columns[name][np.searchsorted(clients, own)] = values
        return ClientScores(clients, columns)

    def _gathered(self, calls: Sequence[Call]) -> list[Report]:
        return [report for call in calls for report in self.calls.wait(call)]

    def _clients(self, suffix: str, scores: np.ndarray, clients: np.ndarray, found: Scoring) -> Row:
        """Scores on the clients' own tests: mean over clients, the worst, and each domain's."""
        clients = clients[self._counts[clients] > 0]
        if not len(clients):
            return {}
        name = f"{self.metric.name}{suffix}"
        row = self._mean_and_worst(name, self._each(name, scores, clients, found))
        domains = self.domains[np.concatenate([self.tests.rows(c) for c in clients.tolist()])]
        present = np.unique(domains)
        if 2 <= len(present) <= DOMAINS:
            row |= {
                f"{name}.{self.names[d]}": self.metric.summarise(scores[domains == d])
                for d in present
            }
        return row

    def _unseen(self, suffix: str, scores: np.ndarray, found: Scoring) -> Row:
        """Scores on the tests of clients that are never trained: mean over clients, and the worst."""
        if not len(found.unseen):
            return {}
        each = self._each(f"{self.metric.name}{suffix}", scores, found.unseen, found)
        return self._mean_and_worst(f"{self.metric.name}_unseen{suffix}", each)

    def _each(
        self, name: str, scores: np.ndarray, clients: np.ndarray, found: Scoring
    ) -> np.ndarray:
        """The score of each client, whose test rows come one client after another; noted under a column's name."""
        ends = np.cumsum(self._counts[clients], dtype=np.int64)[:-1]
        each = np.array([self.metric.summarise(part) for part in np.split(scores, ends)])
        found.each.setdefault(name, []).append((clients, each))
        return each

    def _mean_and_worst(self, name: str, each: np.ndarray) -> Row:
        return {name: float(each.mean()), f"{name}_worst": self._worst(each)}

    def _worst(self, values: Sequence[float] | np.ndarray) -> float:
        return float(min(values) if self.metric.higher else max(values))

    def _best(self, found: Scoring, tested: np.ndarray, validated: np.ndarray) -> Row:
        """Validation scores, and the tests of each client in the round in which its own was best."""
        if self.best is None or self.validation is None or not len(found.clients):
            return {}
        sizes, name = self._validated[found.clients], self.metric.name
        ends, sign = np.cumsum(sizes)[:-1], 1 if self.metric.higher else -1
        each = np.array(
            [
                self.metric.summarise(part) if len(part) else np.nan
                for part in np.split(validated, ends)
            ]
        )
        highest, scores = self.best.take(found.clients, sign * each, tested)
        row = self._clients("_best", scores, found.clients, found)
        if sizes.any():
            row |= {f"{name}_validation": float(np.nanmean(each))}
            row |= {f"{name}_validation_best": float(np.nanmean(sign * highest))}
        return row

    def _best_shared(self, version: int, row: Row) -> Row:
        """The one model of all clients in the round in which their mean validation score was best."""
        name, sign = self.metric.name, 1 if self.metric.higher else -1
        if self.best is None or (validation := row.get(f"{name}_validation")) is None:
            return {}
        best, central = self.best.take_shared(version, sign * validation, row[f"{name}_global"])
        return {"best_round": best} | ({} if central is None else {f"{name}_global_best": central})

    def _worst_domain(self, scores: np.ndarray) -> Row:
        """The worst score over the domains (or angles) of the central test set, where it has several."""
        if not len(scores):
            return {}
        domains = self.domains[self.spec.data.central]
        present = np.unique(domains)
        if len(present) < 2:
            return {}
        worst = self._worst(
            [self.metric.summarise(scores[domains == domain]) for domain in present]
        )
        return {f"{self.metric.name}_worst_domain": worst}

    def _decomposed(self, found: Scoring) -> Row:
        """FedLD eq. 2, the shares of participants by their samples."""
        place = {client: index for index, client in enumerate(found.members)}
        table = np.empty((len(found.models), len(found.members)))
        for row, refs in zip(table, found.models, strict=True):
            for report in self._gathered(refs):
                row[place[report.client]] = report.losses.mean(dtype=np.float64)
        weights = np.array(
            [len(self.spec.data.partition.train.rows(client)) for client in found.members]
        )
        terms = loss_decomposition(loss_matrix=table[:-1], global_losses=table[-1], weights=weights)
        signed = ("global_loss", "local_loss", "distribution_shift", "aggregation")
        return {f"decomposition.{name}": float(terms[name]) for name in signed}
