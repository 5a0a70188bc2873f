"""Test copies between a device and CPU memory. A CPU plays the device."""

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
from raysim.api.messages import Job, PublishedVersion
from raysim.api.method import Method
from raysim.methods.ditto import Ditto
from raysim.methods.fedpac import FedPAC
from raysim.methods.moon import Moon
from raysim.methods.scaffold import Scaffold
from raysim.training import trainer, transfer
from raysim.training.resident import ResidentStates
from raysim.training.run_spec import StateBudget
from raysim.training.transfer import to_device
from raysim.training.worker import Worker

CPU = torch.device("cpu")
WAITS = {getattr(Tensor, name) for name in ("item", "tolist", "__float__", "__int__", "__bool__")}
JOBS = [Job(number, client, 0, 0, -1, 1.0) for number, client in enumerate(range(4))]


class CallCounter(TorchFunctionMode):
    """A PyTorch mode that counts calls that wait for a device or copy from a device.

    count["waits"]: the number of calls such as `Tensor.item`.
    count["copies"]: the number of calls of `Tensor.cpu`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count["waits"] += func in WAITS
        self.count["copies"] += func is Tensor.cpu
        return func(*args, **(kwargs or {}))


def count_calls(*methods: Method, is_summed: bool = True) -> tuple[Counter[str], Any]:
    """Train four clients in one worker; return the counted calls and the worker's result.

    `CallCounter` counts the calls.
    is_summed: True lets the worker return sums of two updates, False single updates.
    """
    spec = run_spec(*methods, model=MLP, data=equal_clients(), local=Local(batch=8))
    worker, coordinator = Worker(spec), coordinate(spec)
    published = coordinator.server.published()
    states = [None] * len(JOBS) if coordinator.client_states.stateful else []
    groups = [(0, 1), (2, 3)] if is_summed else []
    with CallCounter() as counter:
        result = worker.train(JOBS, groups, 1, published, *states)
    return counter.count, result


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device that has memory apart from the main memory."""
    for module in (transfer, trainer):
        monkeypatch.setattr(module, "has_own_memory", lambda device: True)


class TestCopiesAndWaits:
    @pytest.mark.usefixtures("own_memory")
    def test_device_copies_sums_of_updates_instead_of_single_updates(self) -> None:
        assert count_calls()[0] == {"waits": 4, "copies": 2}

    @pytest.mark.usefixtures("own_memory")
    def test_update_that_is_not_summed_is_copied_from_the_device_once(self) -> None:
        assert count_calls(is_summed=False)[0] == {"waits": 4, "copies": 4}

    @pytest.mark.usefixtures("own_memory")
    @pytest.mark.parametrize(
        ("method", "uploads"),
        [(Scaffold(), 1), (Moon(out=8), 0), (Ditto(), 0)],
        ids=["scaffold", "moon", "ditto"],
    )
    def test_client_state_is_copied_from_the_device_once_when_it_is_first_read(
        self, method: Method, uploads: int
    ) -> None:
        count, result = count_calls(method, is_summed=False)
        assert count == {"waits": 4, "copies": 4 * (1 + uploads)}
        handle = result[1]
        with CallCounter() as counter:
            arrays = handle.read()
        assert counter.count["copies"] >= 2 and isinstance(arrays.personal, np.ndarray)
        with CallCounter() as counter:
            assert handle.read() is arrays
        assert not counter.count["copies"], "it was copied before"

    @pytest.mark.parametrize(
        "methods", [(), (Scaffold(),), (FedPAC(),)], ids=["fedavg", "scaffold", "fedpac"]
    )
    def test_training_is_bit_identical_on_the_cpu_and_a_device_with_separate_memory(
        self, methods: tuple[Method, ...], request: pytest.FixtureRequest
    ) -> None:
        local = replace(LOCAL, epochs=2)
        on_cpu = run(run_spec(*methods, local=local), rounds=2)
        request.getfixturevalue("own_memory")
        on_device = run(run_spec(*methods, local=local), rounds=2)
        assert (on_device.bits, on_device.history) == (on_cpu.bits, on_cpu.history)

    def test_worker_objects_in_one_process_share_the_data(self) -> None:
        first, second = Worker(run_spec()).trainer, Worker(run_spec()).trainer
        assert first.data.inputs is second.data.inputs and first.labels is second.labels

    def test_published_vector_is_not_copied_on_a_cpu(self) -> None:
        vector = np.arange(4, dtype=np.float32)
        published = PublishedVersion(0, vector, np.empty(0, np.int64))
        assert to_device(published.vector, CPU).data_ptr() == vector.ctypes.data

    def test_tensor_made_in_inference_mode_can_be_used_in_training(self) -> None:
        # On a GPU a received version stays on the device for training and scoring.
        with torch.inference_mode():
            tensor = to_device(np.ones(2, np.float32), CPU)
        assert not tensor.is_inference()


class TestResidentStates:
    @staticmethod
    def state(value: float) -> ClientState[Tensor]:
        """Return a state of 108 bytes."""
        return ClientState(torch.full((25,), value), torch.zeros(1, dtype=torch.int64), {})

    def test_client_state_is_on_the_device_only_if_it_was_used_recently(self) -> None:
        resident = ResidentStates(CPU, budget=2 * 108)
        handles = {
            client: resident.put(client, client, self.state(float(client))) for client in range(3)
        }

        def on_device() -> set[int]:
            return {client for client in handles if handles[client].state is not None}

        assert on_device() == {1, 2} and sorted(resident) == [0, 1, 2]
        returned = resident.get(0, 0)
        assert returned is not None and returned.personal.tolist() == [0.0] * 25
        assert on_device() == {0, 2}
        assert handles[1].read().personal.tolist() == [1.0] * 25 and handles[1].size == 108
        assert resident.get(1, 7) is None, "the state of another job"
        resident.drop(1)
        assert resident.get(1, 1) is None and sorted(resident) == [0, 2]

    def test_state_budget_on_a_device_changes_no_bit(self) -> None:
        spec = run_spec(Scaffold())
        settings = replace(spec.settings, state=StateBudget(device=1e-9))
        assert run(replace(spec, settings=settings), rounds=3).bits == run(spec, rounds=3).bits
