"""What a step asks a device to wait for: nothing, so that a GPU may run ahead of Python. Counted on the CPU as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_conformance import TABLE
from tiny_runs import MLP, coordinate, equal_clients, run_spec
from torch.utils._python_dispatch import TorchDispatchMode

from raysim.api.declarations import Local
from raysim.commands.bench import gpu
from raysim.runtime.inprocess import InProcess
from raysim.training.recorded_lanes import RecordedLanes
from raysim.training.worker import Worker

# Operations whose result a device has to hand to Python before anything else can happen.
WAITING = (
    *(
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    ),
    *(
        torch.ops.aten.masked_select.default,
        torch.ops.aten._unique2.default,
        torch.ops.aten.is_nonzero.default,
    ),
)

DRAWS, LACKS = (
    ("fedsr",),
    ("dp_fedavg",),
)  # what is not recorded, and what needs a package of its own
CONVOLVED = [name for name in ("fedavg", *gpu.every_method()) if name not in (*DRAWS, *LACKS)]


class Counter(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in WAITING and args[0].dtype != torch.uint8
        ):  # where torch's generator stands is known on the CPU
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def waits(name: str) -> int:
    """The most that the steps of one job wait for, in three rounds."""
    methods = [TABLE[name].make()] if name in TABLE else []
    model = TABLE[name].model if name == "inco" else MLP
    asked = run_spec(*methods, model=model, data=equal_clients(), local=Local(batch=8, epochs=2))
    worker = Worker(asked)
    found: list[int] = []
    steps = worker.trainer.steps

    def watched(work: Any) -> None:
        with Counter() as counter:
            steps(work)
        found.append(len(counter.found))

    worker.trainer.steps = watched  # type: ignore[method-assign]
    for _ in coordinate(asked, runtime=InProcess(worker), rounds=3).run():
        pass
    return max(found)


@pytest.mark.parametrize("name", ["fedavg", *TABLE])
def test_the_steps_of_a_job_wait_for_no_value(name: str) -> None:
    # Kept optimisers read once a job, for each stage, how many steps they have made.
    assert waits(name) == {"local": 1, "fraug": 3}.get(name, 0)


def test_a_step_that_waits_is_counted() -> None:
    with Counter() as counter:
        assert torch.ones(1).item() == 1 and bool(torch.ones(1) > 0)
    assert len(counter.found) == 2


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("dann", "fedbr", "fraug") else pytest.mark.slow)
        for name in CONVOLVED
    ],
)
def test_what_a_graph_records_of_a_network_with_convolutions_waits_for_no_value(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = gpu._checked(gpu.every_method().get(name), torch.float32, "cpu", gpu.CHECKED[-1])
    found: list[str] = []
    compute = RecordedLanes.compute

    def watched(*args: Any) -> Any:
        with Counter() as counter:
            computed = compute(*args)
        found.extend(counter.found)
        return computed

    monkeypatch.setattr(RecordedLanes, "compute", watched)
    worker = Worker(asked)
    for _ in coordinate(asked, runtime=InProcess(worker), rounds=1).run():
        pass
    assert isinstance(worker.loop, RecordedLanes) and worker.loop.recordings and not found
