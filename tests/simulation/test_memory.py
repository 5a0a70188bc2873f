"""Test that a run's memory grows neither with rounds nor with clients that are never sampled."""

from __future__ import annotations

import functools
import gc
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import LOCAL, clients_of_sizes, coordinate, equal_clients, run_spec
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from raysim.api.declarations import Evaluation
from raysim.api.method import Method
from raysim.data.partition import CSR
from raysim.methods.fedasync import FedAsync
from raysim.methods.fedpac import FedPAC
from raysim.methods.groupdro import GroupDRO
from raysim.methods.scaffold import Scaffold
from raysim.models import Mlp
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round
from raysim.simulation.schedule import Buffered, Schedule, Synchronous


def held_bytes() -> int:
    """Return the bytes of all live tensors and arrays, each storage counted once."""
    gc.collect()
    finished_run: dict[int, int] = {}
    for thing in gc.get_objects():
        if _holds(type(thing)):
            finished_run[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(finished_run.values())


@functools.cache  # of a million things, a dozen kinds
def _holds(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) and not issubclass(
        kind, FakeTensor
    )  # a tracer's holds nothing


def held_after(coordinator: Coordinator, rounds: tuple[int, ...]) -> list[int]:
    """Return the bytes of all live tensors and arrays at the end of each round in `rounds`."""
    finished_run = []
    for event in coordinator.run():
        if isinstance(event, Round) and event.row["round"] in rounds:
            finished_run.append(held_bytes())
    return finished_run


@pytest.mark.parametrize(
    "schedule", [Synchronous(4), Buffered(concurrency=4, size=2)], ids=["rounds", "buffer"]
)
@pytest.mark.parametrize("methods", [(), (Scaffold(),)], ids=["stateless", "stateful"])
def test_memory_does_not_grow_with_rounds(methods: tuple[Method, ...], schedule: Schedule) -> None:
    study = run_spec(*methods, model=Mlp((64,)), data=equal_clients())
    coordinator = coordinate(study, schedule, rounds=90, evaluate=Evaluation(every=50))
    early, late = held_after(coordinator, (30, 90))
    assert coordinator.planner.participations.all(), "every client was seen"
    assert late <= early * 1.02


def test_run_of_a_method_without_client_state_stores_no_client_states() -> None:
    coordinator = coordinate(run_spec(data=equal_clients()), rounds=3)
    list(coordinator.run())
    assert coordinator.client_states._stored == {} and not set(
        coordinator.runtime.members[0].states.resident
    )  # type: ignore[attr-defined]


def test_clients_that_never_trained_take_no_memory() -> None:
    data = equal_clients(clients=50, samples=400)
    coordinator = coordinate(
        run_spec(Scaffold(), data=data), Synchronous(3), rounds=4, evaluate=Evaluation(every=10**9)
    )
    list(coordinator.run())
    seen = set(np.flatnonzero(coordinator.planner.participations).tolist())
    assert len(seen) <= 12
    assert (
        set(coordinator.runtime.members[0].states.resident)
        == seen
        == set(coordinator.client_states.committed_jobs)
    )  # type: ignore[attr-defined]
    assert len(coordinator.client_states._stored) == len(seen)


def test_version_that_no_job_uses_is_deleted_from_memory() -> None:
    coordinator = coordinate(
        run_spec(data=equal_clients()), Buffered(concurrency=4, size=2), rounds=30
    )
    held = [len(coordinator.versions) for _ in coordinator.run()]
    assert max(held) <= 4 + 1, "as many base versions as jobs under way, and the current one"
    assert np.isfinite(coordinator.server.vector.numpy()).all()


class Sizes(TorchDispatchMode):
    """A dispatch mode that records how many elements the largest result of an operation has.

    The maximum is over all operations of PyTorch inside the mode. Operations that change a tensor
    in place are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        # What is changed in place costs what is written into it, not what it is.
        if isinstance(out, torch.Tensor) and not func.__name__.split(".")[0].endswith("_"):
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize(
    "method", [(), (GroupDRO(),), (FedPAC(),), (Scaffold(),), (FedAsync(),)], ids=str
)
def test_memory_of_a_round_does_not_grow_with_clients_outside_it(
    method: tuple[Method, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = 40_000
    data = clients_of_sizes([3] * 4 + [1] * (clients - 4))
    tests = CSR(np.zeros(clients, np.int64), np.arange(clients + 1))
    data = replace(data, partition=replace(data.partition, test=tests))
    spec = run_spec(*method, data=data, local=replace(LOCAL, epochs=2))
    evaluate = Evaluation(clients=3)
    coordinator = coordinate(spec, Synchronous(3), rounds=3, evaluate=evaluate, weighting="samples")
    sizes = Sizes()
    finished_run: dict[str, list[int]] = {}

    def watch(owner: Any, name: str) -> None:
        call, peaks = getattr(owner, name), finished_run.setdefault(name, [])

        def measured(*args: Any) -> Any:
            first = not peaks  # which may make what is made once
            if not first:
                tracemalloc.start()
            with sizes:
                result = call(*args)
            peaks.append(0 if first else tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            return result

        monkeypatch.setattr(owner, name, measured)

    watch(coordinator.server, "step")
    watch(coordinator.server, "published")
    watch(coordinator, "_evaluate")
    watch(coordinator.evaluator, "columns")
    list(coordinator.run())
    assert coordinator.layout.shared <= sizes.most < clients
    for name, peaks in finished_run.items():
        assert len(peaks) >= 3
        assert max(peaks) < clients, (
            f"{name}: an array over the clients has a byte for each at least"
        )
