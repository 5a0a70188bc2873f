"""Test that a run has the same bits in one process and on Ray, with any number of workers.

A run that is interrupted and resumed has these bits, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import Workers
from tiny_runs import (
    MLP,
    NORMED,
    NORMED_MLP,
    SEED,
    FinishedRun,
    coordinate,
    equal_clients,
    run,
    run_spec,
    run_to_end,
    several_workers,
    tiny_data,
    with_settings,
)

from raysim.api.declarations import Evaluation, Local
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedopt import FedAdam
from raysim.methods.mixup import Mixup
from raysim.methods.scaffold import Scaffold
from raysim.simulation.events import Finished, Round
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.schedule import Buffered, Synchronous

LOCAL = Local(lr=0.05, momentum=0.9, batch=8, epochs=2)
SCHEDULES = {"rounds": Synchronous(6), "buffer": Buffered(concurrency=6, size=3)}
# Methods and schedules of runs on Ray; the conformance table runs every method on two workers.
STUDIES: dict[tuple[str, str], list[Any]] = {
    ("fedavg", "rounds"): [],
    ("fedavg", "buffer"): [],
    ("scaffold", "rounds"): [Scaffold()],
    ("fedbss", "buffer"): [FedBSS(warmup_rounds=2)],
    ("fedbn, fedbuff, mixup and fedadam", "buffer"): [FedBN(), FedBuff(), Mixup(), FedAdam()],
}
ROUNDS = 5


def study(methods: list[Any]) -> Any:
    return run_spec(*methods, model=NORMED, local=LOCAL, data=tiny_data(clients=8, samples=160))


@pytest.mark.parametrize(("name", "schedule_name"), STUDIES)
def test_run_has_the_same_bits_in_process_and_on_ray(
    name: str, schedule_name: str, workers: Workers
) -> None:
    methods, schedule = STUDIES[name, schedule_name], SCHEDULES[schedule_name]
    expected = run(study(methods), schedule, rounds=ROUNDS)
    if any(method.name == "fedbss" for method in methods):
        assert any(job_version >= 2 for job_version in _ranked(expected)), (
            "a study past its warm-up"
        )
    for count in (1, 2):
        runtime = workers.runtime(study(methods), count)
        actual = run_to_end(coordinate(study(methods), schedule, runtime=runtime, rounds=ROUNDS))
        assert actual.bits == expected.bits, f"on {count} worker(s)"
        assert actual.history == expected.history
        assert not actual.failures
    assert expected.history[-1]["failures"] == 0


def test_run_has_the_same_bits_if_workers_return_sums_of_updates(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"data": equal_clients(), "model": NORMED, "local": LOCAL}
    expected = run(run_spec(**settings), SCHEDULES["rounds"], rounds=3)
    runtime = workers.runtime(run_spec(**settings), 2)
    summing: set[tuple[int, int]] = set()
    call = runtime.call

    def watched(worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        if method == "train":
            summing.update((worker, len(group)) for group in args[1])
        return call(worker, method, *args, returns=returns)

    monkeypatch.setattr(runtime, "call", watched)
    actual = run_to_end(
        coordinate(run_spec(**settings), SCHEDULES["rounds"], runtime=runtime, rounds=3)
    )
    # The tree of six jobs has parts of four and of two; both are split for equal work.
    assert summing == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert (actual.bits, actual.history) == (expected.bits, expected.history)


@pytest.mark.parametrize(
    ("methods", "graph"), [([], False), ([Scaffold()], True)], ids=["lanes", "recorded"]
)
def test_run_with_lanes_has_the_same_bits_on_ray_and_after_resume(
    methods: list[Any], graph: bool, workers: Workers, tmp_path: Path
) -> None:
    def lanes_study() -> Any:
        return run_spec(*methods, model=MLP, lanes=3, graph=graph)

    def on_ray(**how: Any) -> FinishedRun:
        return run_to_end(
            coordinate(
                lanes_study(),
                Synchronous(6),
                Ideal(),
                workers.runtime(lanes_study(), 2),
                rounds=4,
                **how,
            )
        )

    expected = run(lanes_study(), Synchronous(6), Ideal(), rounds=4)
    actual = on_ray(checkpoint_every=2, folder=str(tmp_path))
    assert (actual.bits, actual.history) == (expected.bits, expected.history)
    resumed = on_ray(resume=str(tmp_path / "checkpoints" / "round-000002"))
    assert (resumed.bits, resumed.history) == (expected.bits, expected.history)
    assert (
        expected.bits != run(run_spec(*methods, model=MLP), Synchronous(6), Ideal(), rounds=4).bits
    ), "a loop's"


def _ranked(result: FinishedRun) -> list[int]:
    """Return, for each client, the version with which FedBSS last ranked the client's samples.

    The versions are in the client states at the end of the run.
    """
    states = result.private
    return [int(value[0]) for key, value in states.items() if key.endswith("fedbss.version")]


def test_run_has_the_same_bits_if_the_coordinator_is_an_actor(ray_session: None) -> None:
    from raysim.runtime import ray as on_ray

    methods: list[Any] = [
        Scaffold(),
        FedBN(),
    ]  # a buffer, and two workers: see tests of placement and of deaths
    how = with_settings(study(methods), rounds=ROUNDS), SCHEDULES["rounds"], Lognormal()
    events = list(on_ray.run(*how, on_ray.Size(1, {"CPU": 0.5})))
    expected = run(study(methods), SCHEDULES["rounds"], rounds=ROUNDS)
    assert isinstance(events[-1], Finished)
    assert (events[-1].model_sha256, events[-1].state_sha256) == expected.bits
    rows = [event.row for event in events if isinstance(event, Round)]
    assert [row["virtual_seconds"] for row in rows] == [
        row["virtual_seconds"] for row in expected.rows
    ]
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in expected.rows]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "size", [2, 5], ids=["clients sit out", "clients return before the buffer is full"]
)
@pytest.mark.parametrize("methods", [[], [Scaffold(), FedBN()]], ids=["stateless", "stateful"])
def test_run_has_the_same_bits_with_several_workers_and_after_resume(
    methods: list[Any], size: int, count: int, tmp_path: Path
) -> None:
    schedule, settings = (
        Buffered(concurrency=5, size=size),
        {"rounds": 8, "evaluate": Evaluation(every=3)},
    )

    def small() -> Any:
        return run_spec(*methods, model=NORMED_MLP)

    straight = run(small(), schedule, **settings)
    runtime = several_workers(small(), count)
    actual = run_to_end(
        coordinate(
            small(), schedule, runtime=runtime, **settings, checkpoint_every=5, folder=str(tmp_path)
        )
    )
    assert (actual.bits, actual.history) == (straight.bits, straight.history)
    saved = str(tmp_path / "checkpoints" / "round-000005")
    resumed = run_to_end(
        coordinate(
            small(), schedule, runtime=several_workers(small(), 4 - count), **settings, resume=saved
        )
    )
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)


def test_bits_of_a_run_depend_on_the_seed() -> None:
    bits = {run(run_spec(model=MLP, seed=seed), rounds=1).bits for seed in (SEED, SEED, SEED + 1)}
    assert len(bits) == 2


def test_state_checksum_depends_on_client_state_and_server_state() -> None:
    empty = run(run_spec(model=NORMED), rounds=1).finished.state_sha256
    for methods in ([FedBN()], [FedBSS()], [FedAdam()], [Scaffold()]):
        assert run(run_spec(*methods, model=NORMED), rounds=1).finished.state_sha256 != empty


@pytest.mark.parametrize("cohort", [3, 10, 24])
def test_sums_of_updates_have_the_same_bits_for_1_to_8_workers(cohort: int) -> None:
    study, schedule = run_spec(data=equal_clients(clients=30, samples=600)), Synchronous(cohort)
    alone = run(study, schedule, Ideal()).bits
    for workers in (1, 2, 3, 5, 8):
        runtime = several_workers(study, workers)
        assert run_to_end(coordinate(study, schedule, Ideal(), runtime)).bits == alone
