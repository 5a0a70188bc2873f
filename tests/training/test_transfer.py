"""What a job copies from its device and waits for; counted on a CPU that is treated as if it were apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import LOCAL, MLP, coordinate, equal_clients, run, run_spec
from torch import Tensor
from torch.overrides import TorchFunctionMode

from raysim.api.client_state import ClientState
from raysim.api.declarations import Local
from raysim.api.messages import Job, Published
from raysim.api.method import Method
from raysim.methods.ditto import Ditto
from raysim.methods.fedpac import FedPAC
from raysim.methods.moon import Moon
from raysim.methods.scaffold import Scaffold
from raysim.training import trainer, transfer
from raysim.training.resident import ResidentStates
from raysim.training.transfer import up
from raysim.training.worker import Worker

WAITS = {getattr(Tensor, name) for name in ("item", "tolist", "__float__", "__int__", "__bool__")}
JOBS = [Job(number, client, 0, 0, -1, 1.0) for number, client in enumerate(range(4))]


class Seen(TorchFunctionMode):
    """Counts calls that wait for a device, and copies down from it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count["waits"] += func in WAITS
        self.count["copies"] += func is Tensor.cpu
        return func(*args, **(kwargs or {}))


def seen(*methods: Method, groups: bool = True) -> tuple[Counter[str], Any]:
    """What a call that trains four clients asks of the device."""
    spec = run_spec(*methods, model=MLP, data=equal_clients(), local=Local(batch=8))
    worker, coordinator = Worker(spec), coordinate(spec)
    published = coordinator.server.published()
    states = [None] * len(JOBS) if coordinator.client_states.stateful else []
    with Seen() as counter:
        found = worker.train(JOBS, [(0, 1), (2, 3)] if groups else [], 1, published, *states)
    return counter.count, found


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (transfer, trainer):
        monkeypatch.setattr(module, "apart", lambda device: True)


@pytest.mark.usefixtures("apart")
def test_a_summed_job_waits_once_and_only_its_groups_sum_comes_down() -> None:
    assert seen()[0] == {"waits": 4, "copies": 2}


@pytest.mark.usefixtures("apart")
def test_single_updates_come_down_once_each() -> None:
    assert seen(groups=False)[0] == {"waits": 4, "copies": 4}


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("method", "uploads"),
    [(Scaffold(), 1), (Moon(out=8), 0), (Ditto(), 0)],
    ids=["scaffold", "moon", "ditto"],
)
def test_what_a_client_keeps_stays_where_it_is_until_somebody_needs_it(
    method: Method, uploads: int
) -> None:
    count, found = seen(method, groups=False)
    assert count == {"waits": 4, "copies": 4 * (1 + uploads)}
    with Seen() as counter:
        arrays = found[1].read()
    assert counter.count["copies"] >= 2 and isinstance(arrays.personal, np.ndarray)
    with Seen() as counter:
        assert found[1].read() is arrays
    assert not counter.count["copies"], "copied once"


@pytest.mark.parametrize(
    "methods", [(), (Scaffold(),), (FedPAC(),)], ids=["fedavg", "scaffold", "fedpac"]
)
def test_a_device_that_is_apart_changes_no_bit(
    methods: tuple[Method, ...], request: pytest.FixtureRequest
) -> None:
    local = replace(LOCAL, epochs=2)
    here = run(run_spec(*methods, local=local), rounds=2)
    request.getfixturevalue("apart")
    there = run(run_spec(*methods, local=local), rounds=2)
    assert (there.bits, there.history) == (here.bits, here.history)


def test_workers_of_one_process_share_one_copy_of_the_data() -> None:
    one, other = Worker(run_spec()), Worker(run_spec())
    assert one.trainer.inputs is other.trainer.inputs and one.trainer.labels is other.trainer.labels


# --- client states -------------------------------------------------------------------------------------------------
def state(value: float) -> ClientState[Tensor]:
    """100 bytes and 8."""
    return ClientState(torch.full((25,), value), torch.zeros(1, dtype=torch.int64), {})


def test_states_that_were_idle_for_longest_leave_the_device_and_come_back() -> None:
    resident = ResidentStates(torch.device("cpu"), 2 * 108)
    left = {client: resident.put(client, client, state(float(client))) for client in range(3)}
    near = {client for client in left if left[client].state is not None}
    assert near == {1, 2} and sorted(resident) == [0, 1, 2]
    back = resident.get(0, 0)
    assert back is not None and back.personal.tolist() == [0.0] * 25
    assert {client for client in left if left[client].state is not None} == {0, 2}
    assert left[1].read().personal.tolist() == [1.0] * 25 and left[1].size == 108
    assert resident.get(1, 7) is None, "the state of another job"
    resident.drop(1)
    assert resident.get(1, 1) is None and sorted(resident) == [0, 2]


def test_a_budget_of_the_device_changes_no_bit() -> None:
    from dataclasses import replace

    from raysim.training.run_spec import StateBudget

    asked = run_spec(Scaffold())
    tight = replace(asked, settings=replace(asked.settings, state=StateBudget(device=1e-9)))
    assert run(tight, rounds=3).bits == run(asked, rounds=3).bits


def test_a_published_vector_is_read_where_it_lies() -> None:
    vector = np.arange(4, dtype=np.float32)
    published = Published(0, vector, np.empty(0, np.int64))
    assert transfer.up(published.vector, torch.device("cpu")).data_ptr() == vector.ctypes.data


def test_what_is_asked_for_while_scoring_may_be_trained_on_later() -> None:
    # On a GPU what was received is kept on the device, whoever asked for it first.
    with torch.inference_mode():
        value = up(np.ones(2, np.float32), torch.device("cpu"))
    assert not value.is_inference()
