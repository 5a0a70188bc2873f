"""Test that no training step makes Python wait for a value from the GPU.

The tests run on the CPU, and count the operations that would wait on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_conformance import TABLE
from tiny_runs import MLP, coordinate, equal_clients, run_spec
from torch.utils._python_dispatch import TorchDispatchMode

from raysim.api.declarations import Local
from raysim.commands.bench import gpu
from raysim.methods.lora_factors import LORA_METHODS
from raysim.runtime.inprocess import InProcess
from raysim.training.recorded_lanes import RecordedLanes
from raysim.training.worker import Worker

# Operations whose result a device has to hand to Python before anything else can happen.
WAITING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.is_nonzero.default,
)


class Counter(TorchDispatchMode):
    """A dispatch mode that records the operations for which the CPU would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # uint8 is the state of torch's generator, which is on the CPU.
        if func in WAITING and args[0].dtype != torch.uint8:
            self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def waits_of_recorded_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that is empty at first, and fills while a run computes recorded steps.

    It receives the name of each operation that would make the process wait for a GPU.
    """
    operations: list[str] = []
    compute = RecordedLanes.compute

    def watched(*args: Any) -> Any:
        with Counter() as counter:
            computed = compute(*args)
        operations.extend(counter.operations)
        return computed

    monkeypatch.setattr(RecordedLanes, "compute", watched)
    return operations


def most_waits(name: str) -> int:
    """Run two rounds of a method; return the largest number of waits in the steps of one job.

    A wait is an operation for which the CPU would wait if the device were a GPU.
    """
    methods = [TABLE[name].make()] if name in TABLE else []
    model = TABLE[name].model if name in ("inco", *LORA_METHODS) else MLP
    local = Local(batch=8, epochs=2)
    spec = run_spec(*methods, model=model, data=equal_clients(samples=60), local=local)
    worker = Worker(spec)
    counts: list[int] = []
    steps = worker.trainer.steps

    def watched(work: Any) -> None:
        with Counter() as counter:
            steps(work)
        counts.append(len(counter.operations))

    worker.trainer.steps = watched  # type: ignore[method-assign]
    for _ in coordinate(spec, runtime=InProcess(worker), rounds=2).run():
        pass
    return max(counts)


@pytest.mark.parametrize("name", ["fedavg", *TABLE])
def test_steps_of_a_job_never_wait_for_the_device(name: str) -> None:
    # Kept optimisers read once a job, for each stage, how many steps they have made.
    assert most_waits(name) == {"local": 1, "fraug": 3}.get(name, 0)


def test_counter_counts_operations_that_wait_for_the_device() -> None:
    with Counter() as counter:
        assert torch.ones(1).item() == 1 and bool(torch.ones(1) > 0)
    assert len(counter.operations) == 2


# `test_recorded_lanes.py` watches the recorded steps of every method on a linear network.
@pytest.mark.parametrize("name", ["dann", "fedbr", "fraug"])
def test_recorded_steps_with_convolutions_never_wait_for_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = gpu.check_spec(gpu.every_method().get(name), torch.float32, "cpu", gpu.CHECKED_MODES[-1])
    operations = waits_of_recorded_steps(monkeypatch)
    worker = Worker(spec)
    for _ in coordinate(spec, runtime=InProcess(worker), rounds=1).run():
        pass
    assert isinstance(worker.loop, RecordedLanes) and worker.loop.recordings and not operations
