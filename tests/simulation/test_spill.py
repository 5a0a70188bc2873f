"""Test that client states above a memory budget are on disk, with the same bits and less memory."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Workers
from tiny_runs import (
    NORMED,
    NORMED_MLP,
    coordinate,
    run,
    run_spec,
    run_to_end,
    several_workers,
    tiny_data,
)

from raysim import cli
from raysim.api.declarations import Evaluation, Local
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbss import FedBSS
from raysim.methods.scaffold import Scaffold
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Saved
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.simulation.spill import SpillFile
from raysim.training.run_spec import RunSpec, StateBudget

SCHEDULES = {"rounds": Synchronous(2), "buffer": Buffered(concurrency=3, size=2)}
METHODS: dict[str, Any] = {
    "fedbn": FedBN,
    "fedbss": lambda: FedBSS(warmup_rounds=1, refresh=2),
    "scaffold": Scaffold,
}
ROUNDS = 8


def study(name: str) -> Any:
    return run_spec(
        METHODS[name](),
        model=NORMED,
        local=Local(lr=0.05, batch=8, epochs=2),
        data=tiny_data(clients=6),
    )


def size(name: str) -> float:
    """Return the approximate bytes of one client's state under the method with this name."""
    result = run(study(name), SCHEDULES["rounds"], rounds=1)
    return result.coordinator.client_states.bytes / 2


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schedule", "states"),
    [
        ("fedbn", "rounds", 0),
        ("fedbss", "buffer", 2.5),
        ("scaffold", "rounds", 2.5),
        ("scaffold", "buffer", 0),
    ],
)
def test_memory_budget_of_client_states_does_not_change_bits(
    name: str, schedule: str, states: float, workers: Workers
) -> None:
    whole = run(study(name), SCHEDULES[schedule], rounds=ROUNDS)
    settings: dict[str, Any] = {"rounds": ROUNDS, "state_budget": states * size(name)}
    for runtime in (None, several_workers(study(name), 3), workers.runtime(study(name), 2)):
        result = run_to_end(
            coordinate(study(name), SCHEDULES[schedule], runtime=runtime, **settings)
        )
        assert result.bits == whole.bits and result.history == whole.history
        assert max(row["spilled_bytes"] for row in result.rows) > 0  # type: ignore[type-var]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_budget_limits_client_states_except_those_of_jobs_in_flight(schedule: str) -> None:
    most, each = 2, size("scaffold")
    runtime = several_workers(study("scaffold"), 2)
    coordinator = coordinate(
        study("scaffold"),
        SCHEDULES[schedule],
        runtime=runtime,
        rounds=ROUNDS,
        state_budget=most * each,
    )
    for _ in coordinator.run():
        newest, accepted = (
            coordinator.client_states._newest_states,
            coordinator.client_states.committed_jobs,
        )
        at_work = {client for client, (_, last) in newest.items() if accepted.get(client) != last}
        resident = [client for worker in runtime.members for client in worker.states.resident]
        assert len(resident) == len(set(resident)), "a client that moved leaves nothing behind"
        assert len(set(resident) - at_work) <= most
        stored = {
            client
            for client, number in accepted.items()
            if number in coordinator.client_states._stored
        }
        assert len(stored - at_work) <= most
    spilled = coordinator.rows[-1]["spilled_bytes"]
    assert spilled is not None and spilled >= each, "and the others are somewhere"


def test_state_of_each_client_is_on_only_one_worker() -> None:
    runtime = several_workers(study("fedbn"), 3)
    run_to_end(coordinate(study("fedbn"), SCHEDULES["buffer"], runtime=runtime, rounds=20))
    resident = [client for worker in runtime.members for client in worker.states.resident]
    assert sorted(resident) == sorted(set(resident)) and len(resident) > 3


@pytest.mark.parametrize("states", [0, 1.5])
def test_clients_with_spilled_states_are_scored(states: float) -> None:
    settings: dict[str, Any] = {"rounds": 6, "evaluate": Evaluation(every=2, common=True)}
    whole = run(study("fedbn"), SCHEDULES["rounds"], **settings)
    budget = states * size("fedbn")
    runtime = several_workers(study("fedbn"), 3)
    result = run_to_end(
        coordinate(
            study("fedbn"), SCHEDULES["rounds"], runtime=runtime, state_budget=budget, **settings
        )
    )
    assert result.history == whole.history and result.bits == whole.bits


@pytest.mark.parametrize(("before", "after"), [(math.inf, 0.0), (0.0, math.inf), (0.0, 0.0)])
def test_resumed_run_may_have_another_budget_for_client_states(
    before: float, after: float, tmp_path: Path
) -> None:
    whole = run(study("scaffold"), SCHEDULES["buffer"], rounds=ROUNDS)
    first = coordinate(
        study("scaffold"),
        SCHEDULES["buffer"],
        rounds=4,
        checkpoint_every=4,
        folder=str(tmp_path),
        state_budget=before,
    )
    saved = [event.path for event in first.run() if isinstance(event, Saved)]
    second = coordinate(
        study("scaffold"),
        SCHEDULES["buffer"],
        rounds=ROUNDS,
        resume=saved[-1],
        folder=str(tmp_path),
        state_budget=after,
    )
    assert run_to_end(second).bits == whole.bits
    assert isinstance(second, Coordinator) and not [
        p for p in tmp_path.iterdir() if p.name.startswith("tmp")
    ]


def test_state_budget_is_in_gib_and_cannot_be_negative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert StateBudget(0.5).bytes == 2**29 and StateBudget().bytes == math.inf
    words = [
        "run",
        "runtime=inprocess",
        "tracking=none",
        "rounds=1",
        f"out={tmp_path / 'run'}",
        "--quiet",
    ]
    with pytest.raises(SystemExit, match="2"):
        cli.main([*words, "state.budget=-1"])
    assert "state.budget=-1" in capsys.readouterr().err


# --- the file -------------------------------------------------------------------------------------


def test_spilled_arrays_are_read_back_unchanged() -> None:
    spill = SpillFile()
    rng = np.random.default_rng(0)
    written: dict[int, dict[str, np.ndarray]] = {}
    for turn in range(30):
        client = int(rng.integers(5))
        written[client] = {
            "weights": rng.standard_normal((3, int(rng.integers(1, 9))), dtype=np.float32),
            "rank": rng.integers(0, 9, size=turn),
            "seen": rng.random(5) < 0.5,
            "count": np.array(turn),
            "none": np.empty((0, 4)),
        }
        spill.write(client, written[client])
        for each, arrays in written.items():
            result = spill.read(each)
            assert list(result) == list(arrays)
            for key, array in arrays.items():
                assert (
                    result[key].dtype == array.dtype
                    and np.array_equal(result[key], array)
                    and array.shape == result[key].shape
                )
                assert not result[key].flags.writeable or not result[key].size


def test_spilled_client_states_are_stored_in_few_files() -> None:
    spill = SpillFile()
    before = len(os.listdir("/proc/self/fd"))
    held = []
    for client in range(300):
        spill.write(client, {"x": np.full(100, client)})
        held.append(spill.read(client)["x"])  # a map of its own for each would be a file for each
    assert len(os.listdir("/proc/self/fd")) - before < 20
    assert [int(array[-1]) for array in held] == list(range(300))


def test_spilled_state_may_be_empty() -> None:
    spill = SpillFile()
    spill.write(3, {"none": np.empty(0, np.float32)})
    assert spill.read(3)["none"].shape == (0,)


def test_new_spilled_client_state_overwrites_the_earlier_one(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path)
    for _ in range(10):
        spill.write(0, {"x": np.ones(1000, np.float32)})
    assert spill._end < 2 * 4096
    assert list(tmp_path.iterdir()) == [], (
        "the file has no name: nothing is left, however the process ends"
    )


def test_error_of_a_full_disk_says_that_the_file_contains_client_states() -> None:
    spill = SpillFile()
    spill._file._file.close()
    spill._file._file = open("/dev/full", "w+b", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left .* of client states"):
        spill.write(0, {"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("workers", [2, 3])
def test_client_with_state_on_disk_can_move_to_other_worker(workers: int) -> None:
    # It comes back before its last job is aggregated, and another worker has time first.
    def study() -> RunSpec:
        return run_spec(Scaffold(), model=NORMED_MLP, data=tiny_data(clients=6))

    settings = {"rounds": 12, "evaluate": Evaluation(every=99)}
    schedule = Buffered(concurrency=4, size=4)
    whole = run(study(), schedule, **settings)
    spilled = coordinate(
        study(),
        schedule,
        runtime=several_workers(study(), workers),
        **settings,
        state_budget=0.0,
    )
    assert run_to_end(spilled).bits == whole.bits
