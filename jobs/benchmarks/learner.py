"""Measure what a learner costs a job, apart from the learner's own training.

    uv run python -m jobs.benchmarks.learner

The cost is the CPU time of a job whose `fit` returns the parameters unchanged, minus that of a job
whose training function does nothing. The time of two copies of the parameters is printed, too.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace

import numpy as np

from jobs.benchmarks.arguments import parser, read
from jobs.command import run
from raysim.api.declarations import Task
from raysim.api.learner import Learner, Parameters
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.experiment.build import build
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.training.run_spec import RunSpec
from raysim.training.worker import Worker

CLIENTS, SAMPLES, ROUNDS = 200, 60, 3
LIMIT_MS = 2.0  # of a job, without the two copies


class Idle(Learner):
    """A learner that returns the parameters that it received.

    arrays: the number of arrays into which the parameters are divided.
    floats: the number of parameters in all arrays together.
    """

    name = "idle"

    def __init__(self, arrays: int, floats: int):
        self.arrays = arrays
        self.floats = floats

    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        """Return the initial parameters: arrays of zeros."""
        size = self.floats // self.arrays
        return {f"array{index}": np.zeros(size, np.float32) for index in range(self.arrays)}

    def fit(
        self, parameters: Parameters, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Parameters, LocalResult | None]:
        """Return the received parameters unchanged, and None because there is nothing to report."""
        return parameters, None

    def predict(self, parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        """Return ten zeros for each sample as outputs."""
        return np.zeros((len(inputs), 10))


class Nothing(Idle):
    """A learner with the model parameters of `Idle`, whose training function does nothing."""

    name = "nothing"

    def setup(self, run: Setup) -> None:
        """Declare a training function that does nothing, in place of the learner's `fit`."""
        run.train(lambda job: None)
        run.without_gradients()
        run.skip("absorb")


def job_ms(method: Method) -> float:
    """Return the CPU time of one job in milliseconds: the mean over all jobs of a short run."""
    words = f"data=synthetic data.samples={CLIENTS * SAMPLES} data.test_samples=10"
    words += f" partition=iid partition.clients={CLIENTS} partition.test_fraction=0"
    words += f" schedule.cohort={CLIENTS} runtime=inprocess checkpoint.every=0 rounds={ROUNDS}"
    experiment = build(words, learner=method)
    spec: RunSpec = replace(experiment.spec, lanes=1)
    coordinator = Coordinator(spec, experiment.schedule, experiment.fleet, InProcess(Worker(spec)))
    before = time.process_time()
    for _ in coordinator.run():
        pass
    return 1000 * (time.process_time() - before) / (ROUNDS * CLIENTS)


def copies_ms(floats: int) -> float:
    """Return the CPU time for copying an array twice, in milliseconds.

    The result is the shortest of 20 measured times.
    floats: the number of float32 values in the array.
    """
    values = np.zeros(floats, np.float32)
    times = []
    for _ in range(20):
        before = time.process_time()
        values.copy()
        values.copy()
        times.append(time.process_time() - before)
    return 1000 * min(times)


def main() -> None:
    """Print, for each model size, the CPU time that a learner adds to a job.

    A learner copies the parameters twice. Raise ValueError if the added time without these two
    copies is above `LIMIT_MS` milliseconds.
    """
    values = read(parser(__doc__))
    results = []
    for arrays, floats in ((2, 650), (20, 100_000), (4, 1_000_000)):
        costs = []
        for _ in range(values.blocks):
            costs.append(job_ms(Idle(arrays, floats)) - job_ms(Nothing(arrays, floats)))
        cost, copies = statistics.median(costs), copies_ms(floats)
        beside = cost - copies
        results.append({"arrays": arrays, "floats": floats, "ms": cost, "copies_ms": copies})
        print(
            f"model of {arrays} arrays, {floats:,} parameters in total: a learner adds "
            f"{cost:.3f} ms of CPU time to each job. Two copies of the parameters take "
            f"{copies:.3f} ms of this. The remaining {beside:.3f} ms should be at most "
            f"{LIMIT_MS} ms",
            flush=True,
        )
    values.out.write_text(json.dumps(results, indent=1))
    worst = max(result["ms"] - result["copies_ms"] for result in results)
    if worst > LIMIT_MS:
        raise ValueError(
            f"a learner adds {worst:.2f} ms of CPU time to each job, but at most {LIMIT_MS} ms "
            "are allowed. The time for two copies of the parameters is already subtracted"
        )


if __name__ == "__main__":
    run(main)
