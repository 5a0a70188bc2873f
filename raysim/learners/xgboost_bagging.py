"""Gradient boosting over clients: each client adds trees, the server joins all trees.

A client continues boosting the received ensemble and returns only its new trees. The server
multiplies the leaves of these trees by the weight of the client's update, and appends them to the
ensemble.

Source: Chen and Guestrin, "XGBoost: A scalable tree boosting system" (KDD 2016).

Departures from the examples of Flower and NVFlare ("bagging")
- A client's weight is its share of the samples by default. So a round adds the mean of the clients'
  predictions. Flower appends the trees unchanged, which adds the sum of the clients' predictions.
  NVFlare divides the learning rate by the number of clients.

Choices
- `local.lr`, `local.batch`, `local.epochs` and the optimizer are not used.
- The initial prediction is `base_score`: 0.5, unless `options` sets it. An estimate would differ
  from client to client.
- XGBoost runs with one thread and a seed for each job, so that a run is bit-identical.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysim.api.declarations import Task
from raysim.api.learner import Learner, LearnerUpdate
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.primitives.checks import above, at_least
from raysim.primitives.extras import import_optional

NODE_BYTES = 90  # bytes of a node in XGBoost's JSON, measured with trees of depth 4


@dataclass(frozen=True, repr=False)
class XGBoostBagging(Learner):
    """A learner that trains boosted trees with XGBoost.

    trees: the number of trees that a job adds. With more than two classes, a job adds this number
    for each class.
    depth: the largest depth of a tree.
    rate: the factor on each leaf (XGBoost's eta).
    options: other parameters of XGBoost, such as subsample.

    Raises ValueError if a value is out of range or XGBoost is missing.
    """

    name = "xgboost"
    paper = "Chen and Guestrin, KDD 2016"

    trees: int = 1
    depth: int = 4
    rate: float = 0.3
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least("learner.trees", self.trees, 1)
        at_least("learner.depth", self.depth, 1)
        above("learner.rate", self.rate, 0.0)
        import_optional("xgboost", "learner=xgboost")

    def initial(self, task: Task, rng: np.random.Generator) -> bytes:
        """Return an ensemble without trees, as XGBoost's JSON.

        Raises ValueError if the task has several targets.
        """
        import xgboost

        if task.kind == "multilabel" or (task.kind == "regression" and task.num_classes > 1):
            raise ValueError(
                f"learner=xgboost needs one target, and this data is for {task.kind} with "
                f"{task.num_classes} targets. Choose other data or another learner."
            )
        rows = np.zeros((2, int(np.prod(task.shape))), np.float32)
        samples = xgboost.DMatrix(rows, label=np.arange(2), nthread=1)
        return _save(xgboost.train(self._parameters(task, 0), samples, num_boost_round=0))

    def upload_bytes(self, task: Task, received: int) -> int:
        """Return an upper bound for the size of the trees that a job adds, in bytes.

        The bound assumes that every tree has all nodes down to `depth`.
        received: has no effect.
        """
        classes = task.num_classes if task.num_classes > 2 else 1
        nodes: int = 2 ** (self.depth + 1)
        return self.trees * classes * nodes * NODE_BYTES

    def fit(
        self, parameters: bytes, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[bytes, LocalResult]:
        """Continue boosting on the client's samples; return only the new trees.

        The second result has the number of processed samples.
        parameters: the received ensemble, as XGBoost's JSON.
        inputs: the client's samples, [n, ...].
        labels: the classes, or the values of a regression, [n].
        """
        import xgboost

        seed = int(job.stream("trees").integers(2**31 - 1))
        booster = xgboost.Booster(self._parameters(job.task, seed))
        booster.load_model(bytearray(parameters))
        booster.set_param(self._parameters(job.task, seed))
        rows = inputs.reshape(len(inputs), -1)
        samples = xgboost.DMatrix(rows, label=labels.reshape(len(labels)), nthread=1)
        first = booster.num_boosted_rounds()
        for iteration in range(first, first + self.trees):
            booster.update(samples, iteration)
        return _save(booster[first:]), LocalResult(samples=len(rows) * self.trees, steps=self.trees)

    def aggregate(self, parameters: bytes, updates: Sequence[LearnerUpdate]) -> bytes:
        """Return the ensemble with the new trees of all clients, as XGBoost's JSON.

        The leaves of new trees are multiplied by the weight of the client's update.
        parameters: the current ensemble, as XGBoost's JSON.
        """
        ensemble = json.loads(parameters)
        model = _model(ensemble)
        for update in updates:
            added = _model(json.loads(update.parameters))
            first = len(model["trees"])
            for number, tree in enumerate(added["trees"]):
                _scale_leaves(tree, update.weight)
                tree["id"] = first + number
                model["trees"].append(tree)
            model["tree_info"] += added["tree_info"]
            model["iteration_indptr"] += [first + end for end in added["iteration_indptr"][1:]]
        model["gbtree_model_param"]["num_trees"] = str(len(model["trees"]))
        return json.dumps(ensemble, separators=(",", ":")).encode()

    def predict(self, parameters: bytes, inputs: np.ndarray) -> np.ndarray:
        """Return XGBoost's raw predictions: logits [n, classes], or values [n, 1] for a regression.

        For two classes with one prediction s, the logits are (0, s).
        parameters: the ensemble, as XGBoost's JSON.
        inputs: n samples, [n, ...].
        """
        import xgboost

        booster = xgboost.Booster({"nthread": 1})
        booster.load_model(bytearray(parameters))
        samples = xgboost.DMatrix(inputs.reshape(len(inputs), -1), nthread=1)
        margins = booster.predict(samples, output_margin=True)
        if margins.ndim == 2:
            return np.asarray(margins)
        objective = json.loads(parameters)["learner"]["objective"]["name"]
        if objective == "binary:logistic":
            return np.stack([np.zeros_like(margins), margins], axis=1)
        return np.asarray(margins[:, None])

    def _parameters(self, task: Task, seed: int) -> dict[str, Any]:
        values: dict[str, Any] = {"objective": "reg:squarederror"}
        if task.kind == "classification" and task.num_classes == 2:
            values = {"objective": "binary:logistic"}
        elif task.kind == "classification":
            values = {"objective": "multi:softprob", "num_class": task.num_classes}
        values |= {"max_depth": self.depth, "eta": self.rate, "base_score": 0.5}
        return values | {"seed": seed, "nthread": 1, "verbosity": 0} | self.options


def _save(booster: Any) -> bytes:
    return bytes(booster.save_raw("json"))


def _model(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trees in a saved XGBoost model, and their settings.

    saved: the model's JSON, parsed.
    """
    model: dict[str, Any] = saved["learner"]["gradient_booster"]["model"]
    return model


def _scale_leaves(tree: dict[str, Any], factor: float) -> None:
    """Multiply the predictions of a tree by a factor, in place.

    In XGBoost's JSON, "base_weights" has a prediction for each node. "split_conditions" has a
    number for each node: for a leaf its prediction, for a split its threshold, which stays
    unchanged.
    """
    for node, child in enumerate(tree["left_children"]):
        if child == -1:
            tree["split_conditions"][node] *= factor
        tree["base_weights"][node] *= factor
