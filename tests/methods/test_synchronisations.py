"""What a step asks a device to wait for: nothing, so that a GPU may run ahead of Python. Counted on the CPU as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_conformance import TABLE
from tiny_runs import MLP, coordinate, even, run_spec
from torch.utils._python_dispatch import TorchDispatchMode

from raysim.api.declarations import Local
from raysim.runtime.inprocess import InProcess
from raysim.training.host import Host

# Operations whose result a device has to hand to Python before anything else can happen.
WAITING = (
    *(torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default),
    *(torch.ops.aten.masked_select.default, torch.ops.aten._unique2.default, torch.ops.aten.is_nonzero.default),
)


class Counter(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING and args[0].dtype != torch.uint8:  # where torch's generator stands is known on the CPU
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def waits(name: str) -> int:
    """The most that the steps of one job wait for, in three rounds."""
    methods = [TABLE[name].make()] if name in TABLE else []
    asked = run_spec(*methods, model=MLP if name != "inco" else TABLE[name].model, data=even(), local=Local(batch=8))
    host = Host(asked)
    found: list[int] = []
    steps = host.trainer.steps

    def watched(work: Any) -> None:
        with Counter() as counter:
            steps(work)
        found.append(len(counter.found))

    host.trainer.steps = watched  # type: ignore[method-assign]
    for _ in coordinate(asked, runtime=InProcess(host), rounds=3).run():
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
