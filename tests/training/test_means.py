"""Test that the training loss is a mean over rows. The expected mean is computed by hand.

The learning rate is so small that the model does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import LOCAL, FinishedRun, run_spec, run_to_end, several_workers, tiny_data
from torch import Tensor
from torch.nn.functional import cross_entropy

from raysim.api.context import Outputs, Plan, Stage
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.data.federated import FederatedData
from raysim.data.partition import CSR, Partition
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.fleet import Lognormal
from raysim.simulation.schedule import Buffered, Schedule, Synchronous
from raysim.training.run_spec import RunSpec
from raysim.training.updates import sum_over_rows
from raysim.training.worker import Worker

STILL = replace(LOCAL, lr=1e-30, momentum=0.0, weight_decay=0.0, batch=11)
ENDS = (12, 30, 47, 59)  # 12, 18, 17 and 12 rows: with batches of 11 the last one is small


class Recording(Method):
    """A method that records which samples are in which batches of each job.

    plans: `job.plan` of each job. The keys are (client, index of the job among the client's jobs).
    """

    name = "recording"
    paper = "a test"

    def __init__(self) -> None:
        self.plans: dict[tuple[int, int], Plan] = {}

    def end(self, job: LocalJob) -> None:
        self.plans[job.client, job.participation] = job.plan


class Alternating(Recording):
    """A method whose every second step has another loss.

    This loss must not count as the training loss.
    """

    def setup(self, run: Setup) -> None:
        run.stages(lambda plan: [(Stage(),), (Stage("other", loss=self.other),)])

    def other(self, job: LocalJob, out: Outputs) -> Tensor:
        return 100 + out.logits.square().mean()


class Single(Recording):
    """A method that needs single updates, so that no worker sums them."""

    def setup(self, run: Setup) -> None:
        run.read_updates()


def unequal() -> FederatedData:
    """Return four clients of unequal sizes, without test samples of their own."""
    rows = tiny_data().partition.train.indices[: ENDS[-1]]
    nothing = CSR(np.empty(0, np.int64), np.zeros(len(ENDS) + 1, np.int64))
    return replace(tiny_data(), partition=Partition(CSR(rows, np.array([0, *ENDS])), nothing))


def initial_losses(spec: RunSpec) -> Mapping[int, Tensor]:
    """Return for each client the losses [samples] of its training samples before any training."""
    worker = Worker(spec)
    worker.trainer.set_training(False)
    found = {}
    for client in range(len(ENDS)):
        inputs, labels = worker.trainer.gather(spec.data.partition.train.rows(client))
        with torch.no_grad():
            found[client] = cross_entropy(
                worker.vector.networks["model"](inputs), labels, reduction="none"
            ).double()
    return found


def train(
    method: Recording, schedule: Schedule, workers: int = 1, **others: Any
) -> tuple[RunSpec, FinishedRun]:
    """Run three rounds on the four clients of `unequal`; return the run's spec and the run.

    workers: the number of workers.
    others: further arguments of `run_spec`, such as lanes=3.
    """
    spec = run_spec(method, data=unequal(), local=STILL, **others)
    runtime = several_workers(spec, workers) if workers > 1 else InProcess(Worker(spec))
    return spec, run_to_end(Coordinator(spec, schedule, Lognormal(), runtime))


def aggregated(found: FinishedRun) -> list[list[tuple[int, int]]]:
    """Return for each round its updates as (client, number of the client's job) pairs."""
    jobs = [job for job in found.jobs if job.fate == "aggregated"]
    return [
        [(job.client, job.participation) for job in jobs if job.round == row["round"]]
        for row in found.rows
    ]


@pytest.mark.parametrize(
    "schedule", [Synchronous(4), Synchronous(3), Buffered(concurrency=4, size=2)]
)
@pytest.mark.parametrize("method", [Recording, Alternating, Single])
@pytest.mark.parametrize("way", [{}, {"lanes": 3}, {"lanes": 2, "graph": True}, {"workers": 2}])
def test_train_loss_is_the_mean_over_trained_samples(
    schedule: Schedule, method: type[Recording], way: Mapping[str, Any]
) -> None:
    watch = method()
    if way.get("lanes", 1) > 1 and method is Alternating:
        way = {**way, "graph": True}  # batched products have no stages
    spec, found = train(watch, schedule, **way)
    losses = initial_losses(spec)
    for row, jobs in zip(found.rows, aggregated(found), strict=True):
        assert row["train_loss"] == pytest.approx(by_hand(losses, jobs, watch), rel=1e-6)


def by_hand(
    losses: Mapping[int, Tensor], jobs: Sequence[tuple[int, int]], watch: Recording
) -> float:
    """Return the mean task loss over all samples that some jobs train on.

    A sample counts as often as a job trains on it. Steps with another loss are left out.
    losses: the losses of each client's samples.
    jobs: pairs of a client and the job's index.
    """
    seen = []
    for client, turn in jobs:
        plan = watch.plans[client, turn]
        batches = np.split(plan.positions, np.cumsum(plan.sizes)[:-1])
        chosen = batches[::2] if isinstance(watch, Alternating) else batches
        seen.append(losses[client][torch.from_numpy(np.concatenate(chosen))])
    return float(torch.cat(seen).mean())


def test_sum_over_rows_adds_batch_means_multiplied_by_batch_sizes() -> None:
    assert float(sum_over_rows(torch.tensor([1.0, 4.0]), [11, 1])) == 15
    assert float(sum_over_rows(torch.empty(0), [])) == 0
