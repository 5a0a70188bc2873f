"""Federated averaging of scikit-learn's linear models.

Each client continues the training of an estimator with `partial_fit` from the received
coefficients; the server averages `coef_` and `intercept_` as it averages the weights of a network.

Source: Pedregosa et al., "Scikit-learn: Machine Learning in Python" (JMLR 2011), for the
estimators; the aggregation is that of FedAvg (McMahan et al., AISTATS 2017).

Choices
- An epoch of a job is one call of `partial_fit` over the client's samples (`local.epochs`).
  `local.lr`, `local.batch` and the optimizer are not used: the estimator has settings of its own.
- The estimator's count of updates, on which its learning-rate schedule depends, starts anew with
  each job.
- For two classes scikit-learn keeps one row of coefficients; its decision value s becomes the
  logits (0, s).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysim.api.declarations import Task
from raysim.api.learner import Learner, Parameters
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.primitives.checks import one_of

ESTIMATORS = ("SGDClassifier", "Perceptron", "PassiveAggressiveClassifier", "SGDRegressor")


@dataclass(frozen=True, repr=False)
class SklearnLinear(Learner):
    """A learner that trains a linear model of scikit-learn.

    estimator: a class of `sklearn.linear_model`. options: the arguments of the class. Raises
    ValueError for another estimator, and for arguments that it does not have.
    """

    name = "sklearn_linear"
    paper = "Pedregosa et al., JMLR 2011"

    estimator: str = "SGDClassifier"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("learner.estimator", self.estimator, ESTIMATORS)
        try:
            self._make(0)
        except TypeError as error:
            raise ValueError(
                f"learner.options={self.options}: {error}. Use arguments of {self.estimator}."
            ) from None

    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        """Return zeros: coef_ [rows, features] and intercept_ [rows]."""
        is_regression = self.estimator.endswith("Regressor")
        kind = "regression" if is_regression else "classification"
        if task.kind != kind or (is_regression and task.num_classes != 1):
            raise ValueError(
                f"learner.estimator={self.estimator}: needs data for {kind} with "
                f"one target, and this data is for {task.kind}. Choose another estimator."
            )
        rows = task.num_classes if task.num_classes > 2 else 1
        features = int(np.prod(task.shape))
        return {"coef": np.zeros((rows, features)), "intercept": np.zeros(rows)}

    def fit(
        self, parameters: Parameters, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Parameters, LocalResult]:
        """Call `partial_fit` once for each epoch."""
        seed = int(job.stream("estimator").integers(2**31 - 1))
        model = self._make(seed)
        rows = inputs.reshape(len(inputs), -1).astype(np.float64)
        is_classifier = not self.estimator.endswith("Regressor")
        targets = labels if is_classifier else labels.reshape(len(labels)).astype(np.float64)
        arguments = {"classes": np.arange(job.task.num_classes)} if is_classifier else {}
        coef, intercept = parameters["coef"], parameters["intercept"]
        model.coef_ = coef if is_classifier else coef[0]
        model.intercept_ = intercept
        for _ in range(job.local.epochs or 1):
            model.partial_fit(rows, targets, **arguments)
        trained = {
            "coef": np.reshape(model.coef_, coef.shape),
            "intercept": np.reshape(model.intercept_, intercept.shape),
        }
        return trained, LocalResult(samples=len(rows) * (job.local.epochs or 1))

    def predict(self, parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        """Return decision values as logits [n, C], or predictions [n, 1] of a regression."""
        rows = inputs.reshape(len(inputs), -1)
        values = rows @ parameters["coef"].T + parameters["intercept"]
        if self.estimator.endswith("Regressor") or values.shape[1] > 1:
            return np.asarray(values)
        return np.concatenate([np.zeros_like(values), values], axis=1)

    def _make(self, seed: int) -> Any:
        module = importlib.import_module("sklearn.linear_model")
        return getattr(module, self.estimator)(random_state=seed, **self.options)
