"""Federated averaging of scikit-learn's linear models.

Each client trains an estimator from the received coefficients; the server averages `coef_` and
`intercept_`.

Source: Pedregosa et al., "Scikit-learn: Machine Learning in Python" (JMLR 2011).

Choices
- A job calls `partial_fit` with all samples once for each epoch (`local.epochs`), or once with
  `local.steps`. The estimator's learning-rate schedule starts again in each job.
- An estimator without `partial_fit` is trained by one call of `fit`. If its class has the argument
  `warm_start` (LogisticRegression), `fit` starts from the received coefficients, and
  `options.max_iter` is the length of training. Otherwise (Ridge, LinearSVC) the server averages
  independent models.
- If a client has only two of more than two classes, `fit` trains the difference between their rows
  of `coef_`. The mean of the two rows does not change. A client with one class returns the received
  coefficients.
- `local.lr`, `local.batch` and the optimizer are not used.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysim.api.declarations import Task
from raysim.api.learner import Learner, Parameters
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.primitives.errors import suggest

EXAMPLES = ("SGDClassifier", "LogisticRegression", "Perceptron", "SGDRegressor", "Ridge")


def import_estimator(name: str) -> Any:
    """Import a class of scikit-learn.

    name: a class of `sklearn.linear_model`, or the full path of another class.
    Raises ValueError if there is no such class in scikit-learn.
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name or "sklearn.linear_model")
    except ImportError:
        module = None
    estimator = getattr(module, class_name, None)
    is_inside = (module_name or "sklearn").partition(".")[0] == "sklearn"
    if isinstance(estimator, type) and is_inside:
        return estimator
    raise ValueError(
        f"learner.estimator={name} is no class of scikit-learn: {suggest(name, EXAMPLES)}. Give a "
        "class of sklearn.linear_model, or a full path such as sklearn.svm.LinearSVC."
    )


@dataclass(frozen=True, repr=False)
class SklearnLinear(Learner):
    """A learner that trains a linear model of scikit-learn.

    estimator: a class of `sklearn.linear_model`, or the full path of another class of scikit-learn
    that has `coef_` and `intercept_` after training.
    options: arguments of the estimator's class, by name, such as alpha.

    Raises ValueError for any other estimator or argument.
    """

    name = "sklearn_linear"
    paper = "Pedregosa et al., JMLR 2011"

    estimator: str = "SGDClassifier"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import_estimator(self.estimator)
        try:
            model = self._make(0)
            _fit(model, np.eye(6), np.arange(6) % 2)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"learner.estimator={self.estimator} learner.options={self.options}: "
                f"{str(error).rstrip('.')}. Use arguments of this class, or another class."
            ) from None
        if not (hasattr(model, "coef_") and hasattr(model, "intercept_")):
            raise ValueError(
                f"learner.estimator={self.estimator} has no coef_ or no intercept_ after "
                "training. Use a linear model, or a learner of your own."
            )

    @property
    def is_classifier(self) -> bool:
        """True if the estimator predicts classes."""
        from sklearn.base import is_classifier

        return bool(is_classifier(self._make(0)))

    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        """Return zeros by name: "coef" [rows, features] and "intercept" [rows].

        There is one row for each class, but a single row for two classes or a regression.
        rng: has no effect.
        Raises ValueError if the estimator does not fit the kind of task.
        """
        kind = "classification" if self.is_classifier else "regression"
        if task.kind != kind or (kind == "regression" and task.num_classes != 1):
            raise ValueError(
                f"learner.estimator={self.estimator} needs data for {kind} with one target, but "
                f"this data is for {task.kind} with {task.num_classes} outputs. Choose another "
                "estimator."
            )
        rows = task.num_classes if task.num_classes > 2 else 1
        features = int(np.prod(task.shape))
        return {"coef": np.zeros((rows, features)), "intercept": np.zeros(rows)}

    def fit(
        self, parameters: Parameters, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Parameters, LocalResult]:
        """Train a client's coefficients; return them and the number of processed samples.

        parameters: "coef" [R, features] and "intercept" [R]. R is the number of classes; for two
        classes, or a regression, R is 1.
        inputs: the client's n samples, [n, ...].
        labels: the class of each sample, or its value for a regression, [n].
        """
        model = self._make(int(job.stream("estimator").integers(2**31 - 1)))
        rows = inputs.reshape(len(inputs), -1).astype(np.float64)
        coef, intercept = parameters["coef"], parameters["intercept"]
        is_classifier = self.is_classifier
        targets = labels if is_classifier else labels.reshape(len(labels)).astype(np.float64)
        if not hasattr(model, "partial_fit"):
            present = np.unique(targets) if is_classifier else np.arange(1)
            passes = _fit_present(model, rows, targets, present, coef, intercept)
            return parameters, LocalResult(samples=len(rows) * passes)
        arguments = {"classes": np.arange(job.task.num_classes)} if is_classifier else {}
        model.coef_ = coef if is_classifier else coef[0]
        model.intercept_ = intercept
        epochs = job.local.epochs or 1
        for _ in range(epochs):
            model.partial_fit(rows, targets, **arguments)
        trained = {
            "coef": np.reshape(model.coef_, coef.shape),
            "intercept": np.reshape(model.intercept_, intercept.shape),
        }
        return trained, LocalResult(samples=len(rows) * epochs)

    def predict(self, parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        """Return logits [n, classes] of a classifier, or the predictions [n, 1] of a regression.

        The logits are the estimator's decision values. For two classes with one decision value s,
        the logits are (0, s).
        inputs: n samples, [n, ...].
        """
        rows = inputs.reshape(len(inputs), -1)
        values = rows @ parameters["coef"].T + parameters["intercept"]
        if values.shape[1] > 1 or not self.is_classifier:
            return np.asarray(values)
        return np.concatenate([np.zeros_like(values), values], axis=1)

    def _make(self, seed: int) -> Any:
        estimator = import_estimator(self.estimator)
        model = estimator(**self.options)
        if "random_state" in model.get_params() and "random_state" not in self.options:
            model.set_params(random_state=seed)
        return model


def _fit(model: Any, rows: np.ndarray, targets: np.ndarray) -> None:
    """Call `model.fit`, and hide the warning of an estimator that has not converged.

    model: the estimator of scikit-learn.
    rows: the samples, [n, features].
    targets: the class of each sample, or its value for a regression, [n].
    """
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(rows, targets)


def _fit_present(
    model: Any,
    rows: np.ndarray,
    targets: np.ndarray,
    present: np.ndarray,
    coef: np.ndarray,
    intercept: np.ndarray,
) -> int:
    """Train an estimator by one call of `fit`; write the result into `coef` and `intercept`.

    Return the number of passes over the samples. It is 0 for a classifier if all samples have the
    same class.
    present: the classes in `targets`, ascending; [0] for a regression. Coefficients of other
    classes do not change.
    coef: the received coefficients, [C, features] for C > 2 classes, otherwise [1, features].
    """
    is_regression = len(present) == 1 and not hasattr(model, "decision_function")
    if len(present) == 1 and not is_regression:
        return 0
    if len(coef) == 1:
        places = np.zeros(1, np.int64)
        start, start_intercept = coef, intercept
    elif len(present) == 2:
        places = present
        start = coef[present[1:]] - coef[present[:1]]
        start_intercept = intercept[present[1:]] - intercept[present[:1]]
    else:
        places = present
        start, start_intercept = coef[present], intercept[present]
    if "warm_start" in model.get_params():
        model.set_params(warm_start=True)
        model.classes_ = present
        model.coef_, model.intercept_ = start.copy(), start_intercept.copy()
    _fit(model, rows, targets)
    trained = np.reshape(model.coef_, (-1, coef.shape[1]))
    trained_intercept = np.broadcast_to(np.reshape(model.intercept_, -1), len(trained))
    if len(trained) < len(places):  # one row for two classes of several
        trained = coef[places].mean(axis=0) + np.outer([-0.5, 0.5], trained[0])
        trained_intercept = intercept[places].mean() + np.array([-0.5, 0.5]) * trained_intercept[0]
    coef[places], intercept[places] = trained, trained_intercept
    iterations = getattr(model, "n_iter_", None)
    return 1 if iterations is None else int(np.max(iterations))
