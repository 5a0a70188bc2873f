"""Test what hooks may read and declare, with small methods that exist only in this file."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import NORMED, NORMED_MLP, ROUNDS, run, run_spec
from torch import Tensor

from raysim.api.context import Outputs, Stage
from raysim.api.declarations import Local, Participation
from raysim.api.local_job import LocalJob, PersonalModel
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.api.setup import Setup
from raysim.methods.fedbss import FedBSS

LOCAL = Local(lr=0.05, lr_decay=0.5, batch=8, epochs=2)


class Recorder(Method):
    """A method that stores what its hooks can read."""

    name = "recorder"

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.counters: list[tuple[Tensor, Tensor]] = []
        self.rates: list[tuple[float, float]] = []
        self.kinds: set[str] = set()
        self.settings: list[Local] = []

    def setup(self, run: Setup) -> None:
        run.client_state("steps", lambda samples: 0)
        run.upload("counter", 1)

    def cost(self, job: Participation) -> float:
        self.settings.append(job.run.local)
        return 0.0

    def begin(self, job: LocalJob) -> None:
        self.events.append(("begin", job.client))

    def prepare(self, job: LocalJob) -> None:
        self.events.append(("prepare", job.client))
        job.state["steps"] = job.plan.steps
        job.scratch["factor"] = job.params.new_tensor(0.0)

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        return loss + job.scratch["factor"]

    def end(self, job: LocalJob) -> None:
        assert job.state["steps"] == job.plan.steps
        self.counters.append((job.broadcast_counters.clone(), job.vector.shared_counters.clone()))
        self.rates.append((job.rate, job.local.rate(job.version)))
        job.upload["counter"] = job.broadcast_counters[:1]

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        self.settings.append(server.local)
        received = [int(counter) for counter in aggregation.uploads("counter")]
        before = [
            int(aggregation.bases[update.version].counters[0]) for update in aggregation.updates
        ]
        assert received == before

    def personalise(self, client: PersonalModel) -> None:
        self.kinds.add(client.task.kind)


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    method = Recorder()
    assert not run(run_spec(method, model=NORMED, local=LOCAL), ROUNDS, rounds=3).failures
    return method


def test_hook_prepare_is_called_after_hook_begin_for_every_job(recorder: Recorder) -> None:
    begun, prepared = recorder.events[::2], recorder.events[1::2]
    assert [client for _, client in begun] == [client for _, client in prepared]
    assert {name for name, _ in begun} == {"begin"}
    assert {name for name, _ in prepared} == {"prepare"}


def test_hook_named_prepare_gets_batches_of_only_the_selected_samples() -> None:
    class Positions(Method):
        name = "positions"

        def prepare(self, job: LocalJob) -> None:
            sizes.append((len(job.plan.positions), job.samples))

    sizes: list[tuple[int, int]] = []
    run(run_spec(FedBSS(0), Positions(), local=LOCAL), ROUNDS, rounds=1)
    assert any(planned < 2 * samples for planned, samples in sizes)


def test_hook_sees_batchnorm_counters_before_and_after_training(recorder: Recorder) -> None:
    assert all(len(received) > 0 for received, _ in recorder.counters)
    assert all(torch.all(trained > received) for received, trained in recorder.counters)


def test_hooks_get_the_local_settings_and_learning_rate(recorder: Recorder) -> None:
    # Of the plan and of the server.
    assert len(recorder.settings) >= 2
    assert all(settings == LOCAL for settings in recorder.settings)
    assert all(rate == expected for rate, expected in recorder.rates)
    assert LOCAL.rate(2) == 0.05 * 0.5**2


def test_hook_personalise_can_read_the_kind_of_task(recorder: Recorder) -> None:
    assert recorder.kinds == {"classification"}


# --- fixed parameters -------------------------------------------------------------------------


class FixedHead(Method):
    """A method that fixes the head's parameters.

    trains: the networks or modules that its only stage trains, such as "model.extractor".
    """

    name = "fixed_head"

    def __init__(self, *trains: str):
        self.trains = trains

    def setup(self, run: Setup) -> None:
        run.fixed_parameters(["model.head.weight", "model.head.bias"])
        run.stages([Stage(trains=self.trains)])


def test_fixed_parameters_are_neither_changed_nor_sent() -> None:
    result = run(run_spec(FixedHead("model.extractor"), model=NORMED_MLP), ROUNDS, rounds=2)
    layout = result.coordinator.layout
    personal = {entry.name for entry in layout.entries if entry.personal}
    assert personal == {"model.head.weight", "model.head.bias"}
    assert not result.coordinator.client_states.stateful


def test_job_fails_if_a_stage_trains_a_fixed_parameter() -> None:
    failed = run(run_spec(FixedHead("model")), ROUNDS, rounds=1, tolerate=1.0).failures
    assert failed and all("'fixed_head'" in failure.error for failure in failed)
    assert all("model.head.weight" in failure.error for failure in failed)
