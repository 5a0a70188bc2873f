"""A learner: a model without PyTorch, the mean image of each class."""

from __future__ import annotations

import numpy as np

from raysim import Learner, LocalResult
from raysim.api.declarations import Task
from raysim.api.learner import Parameters
from raysim.api.local_job import LocalJob
from raysim.primitives.checks import in_range


class MyLearner(Learner):
    """A learner that predicts the class whose mean image is nearest.

    A job moves each mean image towards the average of the client's images of this class. The server
    averages the mean images of all jobs.
    share: the fraction of the way to the client's average, above 0 and at most 1.
    """

    name = "mypackage"

    def __init__(self, share: float = 0.5):
        self.share = in_range("learner.share", share, above=0, most=1)

    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        """Return the initial mean images: a dictionary of arrays, whose shapes never change.

        task: describes the data, such as the shape of an input and the number of classes.
        rng: the random generator for initial values; not used here.
        """
        return {"means": np.zeros((task.num_classes, int(np.prod(task.shape))))}

    def fit(
        self, parameters: Parameters, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Parameters, LocalResult]:
        """Train on a client's samples; return the new mean images, and numbers for the history.

        parameters: a copy of the mean images that the client received.
        inputs, labels: the client's samples, [n, ...] and [n].
        """
        means = parameters["means"]
        rows = inputs.reshape(len(inputs), -1)
        for label in np.unique(labels):
            means[label] += self.share * (rows[labels == label].mean(axis=0) - means[label])
        return {"means": means}, LocalResult(samples=len(rows))

    def predict(self, parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        """Return outputs [n, C] for inputs [n, ...].

        The class with the largest output is the prediction. C is the number of classes.
        parameters: the model to score, in the format of `initial`: {"means": one mean image per
        class}.
        """
        rows = inputs.reshape(len(inputs), 1, -1)
        outputs: np.ndarray = -((rows - parameters["means"]) ** 2).sum(axis=2)
        return outputs
