"""Make the columns of the history for one metric, from the scores of single samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from raysim.api.objectives import MetricRule
from raysim.data.federated import FederatedData
from raysim.simulation.best_round import BestRounds
from raysim.simulation.events import Row

MAX_DOMAIN_COLUMNS = 20  # domains that get a column each


def mean_score(values: np.ndarray) -> float:
    """Return the mean of all scores that are not nan; nan if every score is nan.

    The score of a set may be undefined (nan). An example is the area under the ROC curve of samples
    of one class.
    """
    is_defined = ~np.isnan(values)
    if is_defined.all():
        return float(values.mean())
    return float(values[is_defined].mean()) if is_defined.any() else math.nan


class ScoredClients(Protocol):
    """The clients whose models are scored in a round, and their scores.

    clients, unseen: the scored clients that take part in the training, and those that never do.
    client_scores: for each column, pairs of client numbers and scores. `ScoreColumns` appends
    pairs.
    """

    clients: np.ndarray
    unseen: np.ndarray
    version: int
    client_scores: dict[str, list[tuple[np.ndarray, np.ndarray]]]


class ScoreColumns:
    """The object that makes the columns of the history for one metric.

    A metric computes a value for each sample. `metric.summarise` makes a score from several values.

    values_index: the index of this metric's values in `ScoringReport.scores`.
    personal: True if each client is scored with a model of its own.
    test_counts, validation_counts: int64 [clients], the number of samples of each client.
    best: the best rounds so far, by validation scores. None without validation samples, and for all
    metrics but the main metric (the first of `evaluate.metrics`).
    """

    def __init__(
        self,
        metric: MetricRule,
        values_index: int,
        data: FederatedData,
        personal: bool,
        test_counts: np.ndarray,
        validation_counts: np.ndarray,
        best: BestRounds | None,
    ):
        self.metric, self.values_index, self.personal, self.best = (
            metric,
            values_index,
            personal,
            best,
        )
        self.tests, self.central = data.partition.test, data.central
        self.has_validation = data.partition.validation is not None
        dataset = data.open()
        self.domains, self.domain_names = dataset.domains, dataset.domain_names
        self._test_counts, self._validation_counts = test_counts, validation_counts

    def shared(self, parts: Sequence[np.ndarray], scoring: ScoredClients) -> Row:
        """Return the columns with the scores of the shared model.

        parts: the metric's value of each sample, in four arrays: test samples of clients, test
        samples of unseen clients, the central test set, validation samples of clients.
        scoring: the clients' scores are added to its `client_scores`.
        """
        tested, unseen, central, validated = parts
        suffix, name = "_shared" if self.personal else "", self.metric.name
        row = self._client_columns(suffix, tested, scoring.clients, scoring)
        row |= self._unseen_columns(suffix, unseen, scoring)
        row[f"{name}_global"] = self.metric.summarise(central) if len(central) else None
        row |= self._worst_domain(central)
        if self.has_validation and not self.personal:
            row |= self._best_columns(scoring, tested, validated)
            row |= self._best_shared_columns(scoring.version, row)
        return row

    def own(
        self,
        tested: Mapping[int, np.ndarray],
        validated: Mapping[int, np.ndarray],
        suffix: str,
        scoring: ScoredClients,
    ) -> Row:
        """Return columns with scores of personal models; each client has a model of its own.

        The columns have the mean and the worst test score, over trained clients and over unseen
        clients. If suffix="" and clients have validation samples, `_best_columns` adds further
        columns.
        tested: for each client, the metric's values for the client's test samples.
        validated: the same for the client's validation samples.
        suffix: the end of the columns' names, "_finetuned" or "".
        """
        clients = scoring.clients
        row = self._client_columns(suffix, _join(tested, clients), clients, scoring)
        row |= self._unseen_columns(suffix, _join(tested, scoring.unseen), scoring)
        if self.has_validation and not suffix:
            values = _join(validated, clients)
            row |= self._best_columns(scoring, _join(tested, clients), values)
        return row

    def replicas(
        self,
        mean: np.ndarray,
        replicas: Sequence[np.ndarray],
        scoring: ScoredClients,
        own: Row,
    ) -> Row:
        """Return columns with the scores of replicas on the central test set.

        The columns are:
        - the score of the mean of all replicas,
        - if the set has several domains, the score of this mean in its worst domain,
        - the average and the worst of the replicas' scores.

        For the main metric, if clients have validation samples, two columns follow: the number of
        the best round, and the score of the mean of all replicas in this round. In the best round,
        the clients' models had the best mean validation score.

        mean, replicas: the metric's value for each test sample, from the mean of all replicas and
        from each replica.
        own: the columns with scores of the clients' models.
        """
        name = self.metric.name
        values = np.array([self.metric.summarise(scores) for scores in replicas])
        row: Row = {f"{name}_global": self.metric.summarise(mean), **self._worst_domain(mean)}
        row |= self._mean_and_worst(f"{name}_replicas", values)
        if self.has_validation:
            row |= self._best_shared_columns(scoring.version, own | row)
        return row

    def _client_columns(
        self, suffix: str, values: np.ndarray, clients: np.ndarray, scoring: ScoredClients
    ) -> Row:
        """Return columns with the mean and the worst of the clients' test scores.

        If there are 2 to `MAX_DOMAIN_COLUMNS` domains, add the score of each domain. Each client's
        score is added to `scoring.client_scores`.

        suffix: the end of the columns' names, such as "_best".
        values: the metric's value for each test sample, one client after another.
        """
        clients = clients[self._test_counts[clients] > 0]
        if not len(clients):
            return {}
        name = f"{self.metric.name}{suffix}"
        row = self._mean_and_worst(name, self._score_clients(name, values, clients, scoring))
        rows = np.concatenate([self.tests.rows(client) for client in clients.tolist()])
        domains = self.domains[rows]
        present = np.unique(domains)
        if 2 <= len(present) <= MAX_DOMAIN_COLUMNS:
            for domain in present:
                score = self.metric.summarise(values[domains == domain])
                row[f"{name}.{self.domain_names[domain]}"] = score
        return row

    def _unseen_columns(self, suffix: str, values: np.ndarray, scoring: ScoredClients) -> Row:
        """Return columns with the mean and the worst of the unseen clients' test scores.

        Return {} if no unseen client is scored.
        values: the metric's value for each test sample, one client after another.
        scoring: the score of each unseen client is added to its `client_scores`.
        """
        if not len(scoring.unseen):
            return {}
        name = f"{self.metric.name}{suffix}"
        scores = self._score_clients(name, values, scoring.unseen, scoring)
        return self._mean_and_worst(f"{self.metric.name}_unseen{suffix}", scores)

    def _score_clients(
        self, name: str, values: np.ndarray, clients: np.ndarray, scoring: ScoredClients
    ) -> np.ndarray:
        """Return the score of each client, and append the scores to `scoring.client_scores[name]`.

        values: the metric's value for each test sample, one client after another, in the order of
        `clients`.
        """
        ends = np.cumsum(self._test_counts[clients], dtype=np.int64)[:-1]
        scores = np.array([self.metric.summarise(part) for part in np.split(values, ends)])
        scoring.client_scores.setdefault(name, []).append((clients, scores))
        return scores

    def _mean_and_worst(self, name: str, values: np.ndarray) -> Row:
        return {name: mean_score(values), f"{name}_worst": self._worst(values)}

    def _worst(self, values: Sequence[float] | np.ndarray) -> float:
        defined = [value for value in values if not math.isnan(value)]
        if not defined:
            return math.nan
        return float(min(defined) if self.metric.higher else max(defined))

    def _best_columns(
        self, scoring: ScoredClients, tested: np.ndarray, validated: np.ndarray
    ) -> Row:
        """Return columns with test scores from best rounds, and columns with validation scores.

        A client's best round is the one with its best validation score so far. The columns are:
        - the columns of `_client_columns`, with each client's test score from its best round,
        - the clients' mean validation score in this round,
        - the clients' mean validation score in their best rounds.

        If the metric is not the main metric, there is only the validation score of this round.

        tested, validated: the metric's value for each test or validation sample, one client after
        another.
        """
        sizes, name = self._validation_counts[scoring.clients], self.metric.name
        if not len(scoring.clients):
            return {}
        parts = np.split(validated, np.cumsum(sizes)[:-1])
        values = np.array([self.metric.summarise(part) if len(part) else np.nan for part in parts])
        if self.best is None:  # not the main metric
            return {f"{name}_validation": mean_score(values)} if sizes.any() else {}
        sign = 1 if self.metric.higher else -1
        highest, scores = self.best.take(scoring.clients, sign * values, tested)
        row = self._client_columns("_best", scores, scoring.clients, scoring)
        if sizes.any():
            row[f"{name}_validation"] = float(np.nanmean(values))
            row[f"{name}_validation_best"] = float(np.nanmean(sign * highest))
        return row

    def _best_shared_columns(self, version: int, row: Row) -> Row:
        """Return columns about the shared model's best round so far: its number and a test score.

        The best round has the best mean validation score. Return {} if this round has no validation
        score, or if the metric of these columns is not the main metric.

        version: the number of the scored version.
        row: the columns of this round.
        """
        name, sign = self.metric.name, 1 if self.metric.higher else -1
        validation = row.get(f"{name}_validation")
        if self.best is None or validation is None:
            return {}
        best, central = self.best.take_shared(version, sign * validation, row[f"{name}_global"])
        columns: Row = {"best_round": best}
        if central is not None:
            columns[f"{name}_global_best"] = central
        return columns

    def _worst_domain(self, values: np.ndarray) -> Row:
        """Return a column with the worst score over the domains of the central test set.

        Return {} if there is a single domain, or no central test set.

        values: the metric's value for each sample of this set.
        """
        if not len(values):
            return {}
        domains = self.domains[self.central]
        present = np.unique(domains)
        if len(present) < 2:
            return {}
        scores = [self.metric.summarise(values[domains == domain]) for domain in present]
        return {f"{self.metric.name}_worst_domain": self._worst(scores)}


def _join(values: Mapping[int, np.ndarray], clients: np.ndarray) -> np.ndarray:
    """Join the values of some clients into one array; a client without values is left out.

    values: for each client the metric's value for each of its samples.
    clients: the clients, in the order of the result.
    """
    empty = next(iter(values.values()))[:0]  # has the shape and dtype of the values
    parts = [values[client] for client in clients.tolist() if client in values]
    return np.concatenate([empty, *parts])
