"""k-means over clients: each client moves the centers, the server averages the centers.

A client trains scikit-learn's `MiniBatchKMeans` from the received centers. The server weights each
center by the client's number of samples in the cluster.
With `epochs=0`, a client sends the means of its samples in each received cluster. With
weighting=samples, a round is then one step of Lloyd's algorithm on all samples of its clients.

Source: Sculley, "Web-scale k-means clustering" (WWW 2010), and Lloyd, "Least squares quantization
in PCM" (IEEE Trans. Inf. Theory 1982).

Choices
- If a method changes the weight of an update, the counts of its client change by the same factor.
- A batch has at least as many samples as there are clusters. A client with fewer samples makes one
  step of Lloyd's algorithm.
- The initial centers are drawn from a normal distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysim.api.declarations import Task
from raysim.api.learner import EvaluationData, Learner, LearnerUpdate
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.primitives.checks import above, at_least


@dataclass(frozen=True, repr=False)
class SklearnKMeans(Learner):
    """A learner that finds clusters with scikit-learn's `MiniBatchKMeans`.

    clusters: the number of clusters.
    epochs: the passes over the client's samples in a job; 0 makes one step of Lloyd's algorithm.
    spread: the standard deviation of the initial centers.

    Raises ValueError for a value out of range.
    """

    name = "sklearn_kmeans"
    paper = "Sculley, WWW 2010"

    clusters: int = 10
    epochs: int = 1
    spread: float = 1.0

    def __post_init__(self) -> None:
        at_least("learner.clusters", self.clusters, 1)
        at_least("learner.epochs", self.epochs, 0)
        above("learner.spread", self.spread, 0.0)

    def initial(self, task: Task, rng: np.random.Generator) -> bytes:
        """Return random centers, each with the count 0, as bytes.

        task: its `shape` gives the number of features.
        rng: the random generator that draws the centers.
        """
        centers = rng.normal(0.0, self.spread, (self.clusters, int(np.prod(task.shape))))
        return self._to_bytes(centers, np.zeros(self.clusters))

    def fit(
        self, parameters: bytes, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[bytes, LocalResult]:
        """Return a client's new centers and counts, and the number of processed samples.

        A count is the number of the client's samples in a cluster.
        parameters: the received centers and counts, as bytes. The counts are not used.
        inputs: the client's samples, [n, ...].
        labels: the client's labels, which are not used.
        """
        rows = inputs.reshape(len(inputs), -1).astype(np.float64)
        received, _ = self.centers(parameters)
        moved = self._train(received, rows, job.local.batch, job.stream("estimator"))
        nearest = _distances(rows, moved).argmin(axis=1)
        counts = np.bincount(nearest, minlength=self.clusters)
        if self.epochs == 0 or len(rows) < self.clusters:
            sums = np.zeros_like(received)
            np.add.at(sums, nearest, rows)
            moved = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], received)
        metrics = {"inertia": float(_distances(rows, received).min(axis=1).mean())}
        result = LocalResult(samples=len(rows) * max(1, self.epochs), metrics=metrics)
        return self._to_bytes(moved, counts), result

    def aggregate(self, parameters: bytes, updates: Sequence[LearnerUpdate]) -> bytes:
        """Return the mean of the clients' centers, weighted by the samples in each cluster.

        The mean center of cluster k is sum_i w_i n_ik c_ik / sum_i w_i n_ik. Client i has the
        center c_ik and n_ik samples in the cluster. w_i is the weight of the client's update,
        divided by the client's number of samples. A cluster without samples keeps its center.
        """
        received, _ = self.centers(parameters)
        sums, totals = np.zeros_like(received), np.zeros(self.clusters)
        for update in updates:
            centers, counts = self.centers(update.parameters)
            weights = counts * (update.weight / update.samples)
            sums += weights[:, None] * centers
            totals += weights
        has_samples = totals > 0
        received[has_samples] = sums[has_samples] / totals[has_samples][:, None]
        return self._to_bytes(received, totals)

    def evaluate(self, parameters: bytes, data: EvaluationData) -> Mapping[str, float]:
        """Return the scores "inertia_error" and "purity" of the centers.

        "inertia_error" is the mean squared distance of a sample to the nearest center. "purity" is
        the share of samples whose label is the most frequent one in their cluster.
        parameters: the centers and cluster sizes, as bytes.
        """
        inputs, labels = data.arrays()
        distances = _distances(inputs.reshape(len(inputs), -1), self.centers(parameters)[0])
        nearest = distances.argmin(axis=1)
        in_majority = 0
        for cluster in np.unique(nearest):
            _, counts = np.unique(labels[nearest == cluster], return_counts=True)
            in_majority += int(counts.max())
        inertia = float(distances.min(axis=1).mean())
        return {"inertia_error": inertia, "purity": in_majority / len(labels)}

    def centers(self, parameters: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Return the centers [clusters, features] and the counts [clusters] in `parameters`."""
        table = np.frombuffer(parameters, np.float64).reshape(self.clusters, -1)
        return table[:, 1:].copy(), table[:, 0].copy()

    def _to_bytes(self, centers: np.ndarray, counts: np.ndarray) -> bytes:
        return np.column_stack([counts, centers]).astype(np.float64).tobytes()

    def _train(
        self, start: np.ndarray, rows: np.ndarray, batch: int, generator: np.random.Generator
    ) -> np.ndarray:
        if self.epochs == 0 or len(rows) < self.clusters:
            return start
        from sklearn.cluster import MiniBatchKMeans

        seed = int(generator.integers(2**31 - 1))
        model: Any = MiniBatchKMeans(self.clusters, init=start, n_init=1, random_state=seed)
        batch = max(batch, self.clusters)
        for _ in range(self.epochs):
            shuffled = rows[generator.permutation(len(rows))]
            for first in range(0, len(rows), batch):
                model.partial_fit(shuffled[first : first + batch])
        return np.asarray(model.cluster_centers_)


def _distances(rows: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the squared distance of each row [n, d] to each point [k, d], float [n, k]."""
    squares = (rows**2).sum(axis=1)[:, None] + (points**2).sum(axis=1)[None]
    return np.asarray(np.maximum(squares - 2 * rows @ points.T, 0.0))
