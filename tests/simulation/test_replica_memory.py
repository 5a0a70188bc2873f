"""Test that replicas are moved to disk if they need more memory than the budget allows.

The results of a run must be bit-identical with and without this budget.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Workers
from tiny_runs import coordinate, run, run_spec, run_to_end, several_workers, tiny_data

from raysim.api.declarations import Evaluation
from raysim.api.method import Method
from raysim.api.topology import Topology
from raysim.methods.fedbn import FedBN
from raysim.methods.fedopt import FedAdam
from raysim.methods.scaffold import Scaffold
from raysim.simulation import checkpoint, replicas, spill
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Saved
from raysim.simulation.schedule import Buffered, Immediate, Schedule, Synchronous
from raysim.simulation.spill import MappedFile
from raysim.simulation.topologies import Clustered, Gossip, Hierarchical
from raysim.training.run_spec import RunSpec

ROUNDS = 12
CASES: dict[str, tuple[Topology, Schedule, Callable[[], list[Method]]]] = {
    "pairs": (Gossip("ring", exchange="pairwise", mix="before"), Immediate(3), lambda: [FedBN()]),
    "neighbours": (Gossip("expander"), Synchronous(3), list),
    "complete": (Gossip("complete"), Synchronous(8), list),
    "edges": (Hierarchical(edges=3), Buffered(concurrency=2, size=1), lambda: [FedAdam()]),
    "edges that meet": (Hierarchical(edges=4, every=1), Synchronous(2), lambda: [Scaffold()]),
    "clusters": (Clustered("loss", clusters=3), Synchronous(2), list),
}


def spec(name: str) -> RunSpec:
    topology, _, make = CASES[name]
    return run_spec(*make(), data=tiny_data(clients=8), topology=topology)


def schedule(name: str) -> Schedule:
    return CASES[name][1]


def vector_bytes(coordinator: Coordinator) -> int:
    return coordinator.server.vector.nbytes


# --- a run ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", CASES)
def test_memory_budget_of_replicas_does_not_change_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "MEAN_REPLICAS", 2)
    settings: dict[str, Any] = {"rounds": ROUNDS, "evaluate": Evaluation(every=3)}
    whole = run(spec(name), schedule(name), **settings)
    for vectors, workers in ((0, 1), (2.5, 3)):
        settings["state_budget"] = vectors * vector_bytes(whole.coordinator)
        runtime = several_workers(spec(name), workers)
        result = run_to_end(coordinate(spec(name), schedule(name), runtime=runtime, **settings))
        assert result.bits == whole.bits and result.history == whole.history
        has_spilled = max(row["spilled_bytes"] or 0 for row in result.rows) > 0
        assert has_spilled != (name == "complete" and vectors > 1), "all share one vector"
    assert not max(row["spilled_bytes"] or 0 for row in whole.rows)


@pytest.mark.parametrize("name", CASES)
def test_replicas_on_disk_have_the_same_bits_on_ray(name: str, workers: Workers) -> None:
    settings: dict[str, Any] = {"rounds": ROUNDS, "evaluate": Evaluation(every=3)}
    whole = run(spec(name), schedule(name), **settings)
    runtime = workers.runtime(spec(name), 2)
    settings["state_budget"] = 2.5 * vector_bytes(whole.coordinator)
    result = run_to_end(coordinate(spec(name), schedule(name), runtime=runtime, **settings))
    assert result.bits == whole.bits and result.history == whole.history
    has_spilled = max(row["spilled_bytes"] or 0 for row in result.rows) > 0
    assert has_spilled != (name == "complete"), "all share one vector"


@pytest.mark.parametrize("name", ["pairs", "edges"])
@pytest.mark.parametrize(("before", "after"), [(math.inf, 0.0), (0.0, math.inf), (0.0, 0.0)])
def test_run_with_replicas_can_resume_with_another_memory_budget(
    name: str, before: float, after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SERVER_FILE_BYTES", 3000)  # several files
    whole = run(spec(name), schedule(name), rounds=ROUNDS)
    settings: dict[str, Any] = {"rounds": 6, "checkpoint_every": 6, "folder": str(tmp_path)}
    first = coordinate(spec(name), schedule(name), state_budget=before, **settings)
    saved = [event.path for event in first.run() if isinstance(event, Saved)]
    assert len(list(Path(saved[-1]).glob("server*"))) > 1
    settings |= {"rounds": ROUNDS, "resume": saved[-1]}
    second = coordinate(spec(name), schedule(name), state_budget=after, **settings)
    assert run_to_end(second).bits == whole.bits


def test_number_of_idle_replicas_in_memory_is_at_most_the_budget() -> None:
    most = 2
    budget = most * vector_bytes(coordinate(spec("pairs"), schedule("pairs")))
    coordinator = coordinate(
        spec("pairs"), schedule("pairs"), rounds=ROUNDS, state_budget=budget, checkpoint_every=1
    )
    servers, checks = coordinator.replicas.servers, 0
    for _ in coordinator.run():
        file = coordinator.replicas._memory._file
        if file is None:
            continue
        held = set(coordinator.versions.held_versions)
        in_memory = {
            replica: coordinator.replicas.numbers[replica]
            for replica, server in enumerate(servers)
            if not file.contains(server.vector.numpy())
        }
        idle = {number for number in in_memory.values() if number not in held}
        assert len(idle) <= most
        assert len(coordinator.versions) <= most + len(held)
        checks += 1
    assert checks


def test_server_state_of_idle_replicas_is_on_disk() -> None:
    coordinator = coordinate(spec("edges"), schedule("edges"), rounds=ROUNDS, state_budget=0.0)
    run_to_end(coordinator)
    file = coordinator.replicas._memory._file
    assert file is not None
    idle = [server for server in coordinator.replicas.servers if server.state]
    tensors = [tensor for server in idle for tensor in server.state.values() if tensor.nbytes]
    assert sum(file.contains(tensor.numpy()) for tensor in tensors) > len(tensors) / 2


# --- the file -------------------------------------------------------------------------------------
def test_array_in_a_memory_mapped_file_keeps_its_values_and_is_writable() -> None:
    file = MappedFile("", "arrays", resident=0)
    originals = [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.array(7),
        np.arange(10_000)[::2],
    ]
    moved = [file.move(array) for array in originals]
    moved[0][1, 1] = -1.0  # as a method may do with server state
    originals[0][1, 1] = -1.0
    for original, array in zip(originals, moved, strict=True):
        file.note_read(array.nbytes)  # removes the pages of the others
        assert file.contains(array) and not file.contains(original)
        assert array.dtype == original.dtype and array.shape == original.shape
        assert np.array_equal(array, original)


def test_memory_mapped_file_reuses_the_space_of_deleted_arrays() -> None:
    file = MappedFile("", "arrays", resident=0)
    first, second = file.move(np.full(1000, 1.0)), file.move(np.full(1000, 2.0))
    view = first[10:20]
    del first
    gc.collect()
    third = file.move(np.full(1000, 3.0))
    assert file.used == 3 * 8000
    assert view[0] == 1 and second[0] == 2 and third[0] == 3
    del view
    gc.collect()
    assert file.used == 2 * 8000
    end = file._end
    fourth = file.move(np.full(1000, 4.0))
    assert file._end == end and fourth[-1] == 4 and third[-1] == 3


def test_arrays_in_a_memory_mapped_file_are_unchanged_while_the_file_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spill, "SEGMENT_BYTES", 5000)
    file = MappedFile("", "arrays", resident=0)
    arrays = [file.move(np.full(size, size, np.float32)) for size in (300, 700, 900, 9000, 10)]
    assert len(file._segments) > 2
    for array in arrays:
        assert (array == len(array)).all() and file.contains(array)


def test_error_of_a_full_disk_says_that_the_file_contains_replicas(tmp_path: Path) -> None:
    file = MappedFile(tmp_path, "replicas", resident=0)
    file.move(np.ones(4))
    assert list(tmp_path.iterdir()) == []  # the file has no name
    file._file._file.close()
    file._file._file = open("/dev/full", "w+b", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left .* of replicas"):
        file.move(np.ones(4))
