"""Test training by a function that a method declares with `run.train`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import BUFFER, LOCAL, ROUNDS, run, run_spec, several_workers
from torch import nn
from torch.utils.data import DataLoader

from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.api.setup import Setup
from raysim.api.state_values import UnstorableValueError
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedopt import FedAvgM
from raysim.methods.fedprox import FedProx
from raysim.simulation.schedule import Schedule
from raysim.training.client_data import PreparedBatches


class PlainSgd(Method):
    """A method with its own training loop, on the batches that raysim would use."""

    name = "plain_sgd"

    def setup(self, run: Setup) -> None:
        run.train(self.train_client)

    def train_client(self, job: LocalJob) -> LocalResult:
        inputs, labels = job.tensors()
        local = job.local
        optimizer = torch.optim.SGD(
            job.model.parameters(),
            lr=job.rate,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
        )
        total = 0.0
        start = 0
        for size in job.plan.sizes:
            rows = torch.from_numpy(job.plan.positions[start : start + size])
            start += size
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(job.model(inputs[rows]), labels[rows])
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * size
        return LocalResult(loss=total / start, samples=start, steps=len(job.plan.sizes))


def test_own_training_loop_equals_raysims_steps() -> None:
    usual, own = run(run_spec(), rounds=3), run(run_spec(PlainSgd()), rounds=3)
    torch.testing.assert_close(
        own.coordinator.server.vector, usual.coordinator.server.vector, rtol=1e-5, atol=1e-6
    )
    for usual_row, own_row in zip(usual.rows, own.rows, strict=True):
        assert own_row["train_loss"] == pytest.approx(usual_row["train_loss"], rel=1e-4)


class Moves(Method):
    """A method that stores `update.moves` of each update in a list.

    `update.moves` has (start, stop, rates) for each trained range of the shared parameters. `rates`
    is the sum of the learning rates of all optimizer steps on this range.
    """

    name = "moves"

    def __init__(self) -> None:
        self.moves: list[Any] = []

    def setup(self, run: Setup) -> None:
        run.read_updates()

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        self.moves += [update.moves for update in aggregation.updates]


def test_own_training_loop_reports_steps_and_learning_rate() -> None:
    usual, own = Moves(), Moves()
    run(run_spec(usual), rounds=2)
    run(run_spec(PlainSgd(), own), rounds=2)
    assert own.moves == usual.moves


def test_own_training_loop_gathers_no_batches_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("batches were gathered that nobody trains on")

    expected = run(run_spec(PlainSgd()), rounds=2)
    monkeypatch.setattr(PreparedBatches, "prepare", fail)
    assert run(run_spec(PlainSgd()), rounds=2).bits == expected.bits


class Drawing(Method):
    """A method that trains with global random generators, and counts the jobs of each client."""

    name = "drawing"

    def setup(self, run: Setup) -> None:
        run.client_state("jobs", lambda samples: 0)
        run.upload("noise", 1)
        run.train(self.train_client)

    def train_client(self, job: LocalJob) -> LocalResult:
        job.state["jobs"] += 1
        loader = DataLoader(job.dataset(), batch_size=8, shuffle=True)
        optimizer = torch.optim.Adam(job.model.parameters(), lr=0.01)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(job.model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        noise = random.random() + float(torch.rand(()))
        noise += float(np.random.rand())  # noqa: NPY002
        job.upload["noise"] = torch.tensor([noise])
        return LocalResult(metrics={"noise": noise})


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_own_training_loop_gives_the_same_bits_on_two_workers(schedule: Schedule) -> None:
    spec = run_spec(Drawing(), FedBuff()) if schedule is BUFFER else run_spec(Drawing())
    one = run(spec, schedule, rounds=4)
    two = run(spec, schedule, runtime=several_workers(spec, 2), rounds=4)
    assert one.bits == two.bits
    noise = [row["drawing.noise"] for row in one.rows]
    assert len({value for value in noise if value is not None}) > 1


def _numpy_state() -> list[int]:
    return list(np.random.get_state()[1])  # type: ignore[arg-type]  # noqa: NPY002


def test_own_training_loop_restores_global_random_generators() -> None:
    states = random.getstate(), _numpy_state(), torch.get_rng_state().tolist()
    run(run_spec(Drawing()), rounds=1)
    later = random.getstate(), _numpy_state(), torch.get_rng_state().tolist()
    assert later == states


def test_own_training_loop_can_be_combined_with_server_methods() -> None:
    plain = run(run_spec(PlainSgd()), rounds=2)
    with_momentum = run(run_spec(PlainSgd(), FedAvgM()), rounds=2)
    assert plain.bits != with_momentum.bits


def test_own_training_loop_and_fedprox_raise_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match=r"'fedprox'.*'plain_sgd'"):
        run(run_spec(PlainSgd(), FedProx(0.1)), rounds=1)


class OptimizerKeeping(PlainSgd):
    """A method that trains by itself, and declares that raysim's optimizer is kept."""

    def setup(self, run: Setup) -> None:
        super().setup(run)
        run.keep_optimizer()


def test_own_training_loop_cannot_keep_the_optimizer_of_raysim() -> None:
    with pytest.raises(ValueError, match=r"'plain_sgd' .*run\.train.*run\.keep_optimizer"):
        run(run_spec(OptimizerKeeping()), rounds=1)


@pytest.mark.parametrize(
    ("setting", "value"), [("warmup_steps", 2), ("keep_optimizer", True), ("rates", {"head": 2.0})]
)
def test_own_training_loop_refuses_settings_that_only_raysims_steps_use(
    setting: str, value: object
) -> None:
    local = replace(LOCAL, **{setting: value})
    with pytest.raises(ValueError, match=rf"local\.{setting}=.*'plain_sgd'"):
        run(run_spec(PlainSgd(), local=local), rounds=1)


FAILING_CLIENT = 0


class Replacing(Method):
    """A method whose training function adds 1 to each tensor, or makes a mistake for one client.

    how: "assign" puts new tensors into the model. The mistakes are "shape" (changes a tensor's
    shape), "result" (returns a wrong type) and "error" (raises SystemExit).
    """

    name = "replacing"

    def __init__(self, how: str = "assign"):
        self.how = how

    def setup(self, run: Setup) -> None:
        run.train(self.train_client)

    def train_client(self, job: LocalJob) -> Any:
        weights = {name: value + 1 for name, value in job.model.state_dict().items()}
        if self.how != "assign" and job.client != FAILING_CLIENT:
            return None
        if self.how == "assign":
            job.model.load_state_dict(weights, assign=True)
        elif self.how == "shape":
            parameter = next(job.model.parameters())
            parameter.data = parameter.data.flatten()[:1]
        elif self.how == "result":
            return {"loss": 1.0}
        elif self.how == "error":
            raise SystemExit(3)
        return None


def test_own_training_loop_may_replace_the_models_tensors() -> None:
    before, after = run(run_spec(Replacing()), rounds=1), run(run_spec(Replacing()), rounds=2)
    difference = after.coordinator.server.vector - before.coordinator.server.vector
    torch.testing.assert_close(difference, torch.ones_like(difference))


@pytest.mark.parametrize(
    ("how", "text"), [("shape", "shape"), ("result", "LocalResult"), ("error", "SystemExit")]
)
def test_error_in_an_own_training_loop_fails_only_the_client_with_the_error(
    how: str, text: str
) -> None:
    result = run(run_spec(Replacing(how)), rounds=1, tolerate=1.0)
    (failure,) = result.failures
    assert (failure.client, failure.method) == (FAILING_CLIENT, "replacing")
    assert text in failure.error
    assert result.rows[0]["failures"] == 1 and result.rows[0]["clients"] > 0


class Forgetful(PlainSgd):
    """A method that declares a client state whose initial value is None, which is refused."""

    def setup(self, run: Setup) -> None:
        super().setup(run)
        run.client_state("jobs", lambda samples: None)


def test_error_of_a_wrong_initial_client_state_contains_the_name_of_the_state() -> None:
    with pytest.raises(UnstorableValueError, match=r"plain_sgd\.jobs"):
        run(run_spec(Forgetful()), rounds=1)


@pytest.mark.parametrize("metrics", [{"score": float("nan")}])
def test_local_result_refuses_nan_metrics_and_a_negative_number_of_samples(
    metrics: dict[str, float],
) -> None:
    with pytest.raises(ValueError, match="metrics"):
        LocalResult(metrics=metrics)
    with pytest.raises(ValueError, match=r"LocalResult\.samples"):
        LocalResult(samples=-1)
