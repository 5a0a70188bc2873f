"""Compute scores of whole sets of samples with a method's own function (`run.evaluate`).

The scores become columns of the history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from raysim.api.messages import ScoringTask, SetReport
from raysim.primitives.kinds import LOWER_IS_BETTER
from raysim.simulation.best_round import BestRounds
from raysim.simulation.events import Row
from raysim.simulation.score_columns import MAX_DOMAIN_COLUMNS
from raysim.training.run_spec import RunSpec

CLIENT, CENTRAL, VALIDATION = "client", "central", "validation"
# Domains have a prefix, because users of a data set may be called "client" or "central".
DOMAIN_PREFIX, CENTRAL_PREFIX = "domain:", f"{CENTRAL}:"


def is_higher_better(metric: str) -> bool:
    """Return False if a lower value of the metric is better, as for losses and errors."""
    words = metric.split("_")
    return metric not in LOWER_IS_BETTER and not {"loss", "error"} & set(words)


class ScoredSets(Protocol):
    """The clients whose models an evaluation scores, and their scores.

    clients, unseen: the scored clients that take part in the training, and those that never do.
    client_scores: for each score column of the history, pairs (client numbers, scores), two arrays
    of equal length. `SetScores` appends pairs.
    """

    clients: np.ndarray
    unseen: np.ndarray
    version: int
    client_scores: dict[str, list[tuple[np.ndarray, np.ndarray]]]


class SetScores:
    """The object that makes scoring tasks, and columns of the history from the workers' reports.

    A task scores one set of samples. The sets are each client's test and validation samples, the
    central test set, and each domain of the clients' test samples and of the central test set.
    """

    def __init__(self, spec: RunSpec):
        self.spec = spec
        self.metric = spec.task.metric.name
        partition, dataset = spec.data.partition, spec.data.open()
        self.tests, self.validation = partition.test, partition.validation
        self.domains, self.domain_names = dataset.domains, dataset.domain_names

    def tasks(self, client_tasks: Sequence[ScoringTask]) -> list[ScoringTask]:
        """Return the tasks with which workers score all sets of samples that are not empty.

        The sets are each client's test samples, each client's validation samples, the central test
        set, and the domains of clients' and central test samples.
        client_tasks: for each scored client, the task for its test samples.
        """
        tasks = [replace(task, name=CLIENT) for task in client_tasks if len(task.rows)]
        if self.validation is not None:
            for task in client_tasks:
                rows = self.validation.rows(task.client)
                if len(rows):
                    tasks.append(replace(task, name=VALIDATION, rows=rows))
        tested = [task.rows for task in client_tasks if len(task.rows)]
        if tested:
            tasks += self._domain_tasks(DOMAIN_PREFIX, np.concatenate(tested))
        central = self.spec.data.central
        if len(central):
            tasks.append(ScoringTask(-1, central, name=CENTRAL))
            tasks += self._domain_tasks(CENTRAL_PREFIX, central)
        return tasks

    def _domain_tasks(self, prefix: str, rows: np.ndarray) -> list[ScoringTask]:
        """Return the tasks that score some rows of the data set, one task for each domain.

        Return [] if there is a single domain, or more than `MAX_DOMAIN_COLUMNS`.

        prefix: the text before the domain in a task's name.
        """
        domains = self.domains[rows]
        present = np.unique(domains)
        if not 2 <= len(present) <= MAX_DOMAIN_COLUMNS:
            return []
        return [
            ScoringTask(-1, rows[domains == domain], name=f"{prefix}{self.domain_names[domain]}")
            for domain in present
        ]

    def columns(
        self, reports: Sequence[SetReport], scoring: ScoredSets, best: BestRounds | None
    ) -> Row:
        """Return the columns of the history that are computed from the workers' reports.

        The clients' scores are appended to `scoring.client_scores`.
        reports: a report for each task of `tasks`.
        best: this record of the best round is updated. None means that clients have no validation
        samples.
        """
        by_name: dict[str, list[SetReport]] = {}
        for report in reports:
            by_name.setdefault(report.name, []).append(report)
        row: Row = {f"{self.metric}_global": None, "loss_global": None}
        unseen = set(scoring.unseen.tolist())
        tested = by_name.pop(CLIENT, [])
        validated = by_name.pop(VALIDATION, [])
        for report in by_name.pop(CENTRAL, []):
            row |= {f"{name}_global": value for name, value in report.metrics.items()}
        trained = [report for report in tested if report.client not in unseen]
        row |= self._client_columns(trained, "", scoring)
        held_out = [report for report in tested if report.client in unseen]
        row |= self._client_columns(held_out, "_unseen", scoring)
        central_domains = []
        for name, (report,) in by_name.items():
            if name.startswith(CENTRAL_PREFIX):
                central_domains.append(report)
                continue
            domain = name.removeprefix(DOMAIN_PREFIX)
            row |= {f"{metric}.{domain}": value for metric, value in report.metrics.items()}
        for name, values in _by_metric(central_domains).items():
            row[f"{name}_worst_domain"] = _worst(name, list(values.values()))
        if validated and best is not None:
            row |= self._best_columns(validated, scoring, best, row)
        return row

    def _client_columns(
        self, reports: Sequence[SetReport], suffix: str, scoring: ScoredSets
    ) -> Row:
        """Return columns with each metric's mean and worst value over the clients.

        The clients' values are appended to the lists in `scoring.client_scores`.
        suffix: text after the metric in a column's name: "" or "_unseen".
        """
        row: Row = {}
        for name, values in _by_metric(reports).items():
            clients = np.array(sorted(values), np.int64)
            scores = np.array([values[client] for client in clients.tolist()])
            scoring.client_scores.setdefault(name, []).append((clients, scores))
            row[f"{name}{suffix}"] = float(scores.mean())
            row[f"{name}{suffix}_worst"] = _worst(name, scores)
        return row

    def _best_columns(
        self, reports: Sequence[SetReport], scoring: ScoredSets, best: BestRounds, row: Row
    ) -> Row:
        """Return columns on the validation score of this round and on the best round so far.

        The validation score is a mean over the clients. Return {} if there are no validation
        scores.

        best: the record of the best round of the shared model, which is updated.
        row: the columns of this round so far, with the score on the central test set.
        """
        values = _by_metric(reports).get(self.metric, {})
        if not values:
            return {}
        name = self.metric
        score = float(np.mean([values[client] for client in sorted(values)]))
        sign = 1 if is_higher_better(name) else -1
        best_round, central = best.take_shared(scoring.version, sign * score, row[f"{name}_global"])
        columns: Row = {f"{name}_validation": score, "best_round": best_round}
        if central is not None:
            columns[f"{name}_global_best"] = central
        return columns


def _by_metric(reports: Sequence[SetReport]) -> Mapping[str, dict[int, float]]:
    """Map the name of each metric to a dictionary with the metric's score from each report.

    The key of a score is the number of the scored client. Some reports score samples that do not
    belong to one client, such as the central test set. The key is then -1 - i for report i of
    `reports`.
    """
    values: dict[str, dict[int, float]] = {}
    for index, report in enumerate(reports):
        key = report.client if report.client >= 0 else -1 - index
        for name, value in report.metrics.items():
            values.setdefault(name, {})[key] = value
    return values


def _worst(metric: str, values: Sequence[float] | np.ndarray) -> float:
    return float(min(values) if is_higher_better(metric) else max(values))
