"""Test FedCDA's search against brute force, its cache of models, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    BUFFER,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    Spy,
    clients_of_sizes,
    coordinate,
    equal_clients,
    make_server,
    run,
    run_spec,
)

from raysim.api.declarations import Task
from raysim.api.messages import PublishedVersion, Update
from raysim.methods.fedcda import (
    MAX_COMBINATIONS,
    FedCDA,
    greedy_selection,
    select_models,
    selection_objective,
)
from raysim.primitives.errors import RefusedError
from raysim.simulation.events import Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.simulation.server import Server
from raysim.vectors.layout import Layout

UNIFORM: dict[str, Any] = {"weighting": "uniform"}


def case(
    seed: int, clients: int = 4, memory: int = 3, fixed: int = 2, size: int = 5
) -> dict[str, Any]:
    """Return random arguments for FedCDA's selection of one model per client.

    clients: the number of clients for which a model is to be selected.
    memory: the largest number of models from which a client's model is selected.
    fixed: the number of further clients, whose models are already selected.
    size: the number of parameters of a model.
    """
    draw = np.random.default_rng(seed)
    return {
        "candidates": torch.from_numpy(10 + draw.standard_normal((clients, memory, size))),
        "candidate_losses": torch.from_numpy(draw.random((clients, memory))),
        "num_candidates": torch.from_numpy(draw.integers(1, memory + 1, clients)),
        "fixed_models": torch.from_numpy(10 + draw.standard_normal((fixed, size))),
        "fixed_losses": torch.from_numpy(draw.random(fixed)),
        "smoothness": 1.0,
    }


def objective(choice: Sequence[int], arguments: dict[str, Any]) -> float:
    """Return FedCDA's objective J by its definition.

    choice: for each client, the position of the chosen model among the client's candidates.
    arguments: the result of `case`.
    """
    rows = list(range(len(choice)))
    models = torch.cat([arguments["fixed_models"], arguments["candidates"][rows, list(choice)]])
    losses = torch.cat(
        [arguments["fixed_losses"], arguments["candidate_losses"][rows, list(choice)]]
    )
    return float(
        selection_objective(models=models, losses=losses, smoothness=arguments["smoothness"])
    )


def combinations(arguments: dict[str, Any]) -> list[tuple[int, ...]]:
    return list(
        itertools.product(*(range(count) for count in arguments["num_candidates"].tolist()))
    )


# --- the search ----------------------------------------------------------------------------


@pytest.mark.parametrize("smoothness", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("fixed", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_fedcda_search_finds_the_best_models_if_all_clients_are_in_one_batch(
    seed: int, fixed: int, smoothness: float
) -> None:
    arguments = case(seed, fixed=fixed) | {"smoothness": smoothness}
    best = min(combinations(arguments), key=lambda choice: objective(choice, arguments))
    assert select_models(**arguments).tolist() == list(best)


def test_fedcda_search_in_the_first_batch_of_clients_ignores_later_batches() -> None:
    arguments = case(1)
    first = {
        key: value[:2] if key.startswith(("cand", "num")) else value
        for key, value in arguments.items()
    }
    assert (
        greedy_selection(**arguments, num_batches=2).tolist()[:2] == select_models(**first).tolist()
    )


def test_fedcda_search_has_one_client_per_batch_if_there_are_more_batches_than_clients() -> None:
    arguments = case(2)
    alone, many = (greedy_selection(**arguments, num_batches=count).tolist() for count in (4, 9))
    assert alone == many


def test_fedcda_search_selects_the_first_of_equally_good_combinations() -> None:
    arguments = case(6)
    same = arguments["candidates"][:, :1].expand(4, 3, 5).clone()
    tied = arguments | {
        "candidates": same,
        "candidate_losses": torch.ones(4, 3).double(),
        "num_candidates": torch.full((4,), 3),
    }
    assert select_models(**tied).tolist() == [0, 0, 0, 0]
    tied["candidate_losses"][:, 0] += 1e-14
    assert select_models(**tied).tolist() == [0, 0, 0, 0], "within rounding"
    tied["candidate_losses"][:, 0] += 1e-6
    assert select_models(**tied).tolist() == [1, 1, 1, 1]


# --- the server -------------------------------------------------------------------------------

WIDTH = 4  # three parameters and a buffer


def server(method: FedCDA, counts: Sequence[int] = (10,) * 5) -> Server:
    layout = Layout((), (), WIDTH - 1, WIDTH, WIDTH, 0, 0)
    nothing = torch.empty(0, dtype=torch.int64)
    task = Task((1, 1, 1), 2, len(counts))
    return make_server(
        layout, torch.zeros(WIDTH), nothing, [method], np.array(counts), 0, task, "uniform"
    )


def step(
    at: Server,
    models: Sequence[tuple[int, Sequence[float]]],
    losses: dict[int, float] | None = None,
    base: int = -1,
) -> None:
    """Let the server aggregate updates of clients.

    models: for each update, the client and its trained model.
    losses: the uploaded losses by client; a missing loss is 0.
    base: the version from which the clients trained; -1 means the current one.
    """
    version = at.version if base < 0 else base
    origin = at.vector.numpy() if base < 0 else np.full(WIDTH, 100, np.float32)
    updates = [
        _update(number, client, version, model, origin, losses)
        for number, (client, model) in enumerate(models)
    ]
    bases = {version: PublishedVersion(version, origin, np.empty(0, np.int64))}
    at.step(updates, {}, [at.version - version] * len(updates), bases)


def _update(
    number: int,
    client: int,
    version: int,
    model: Sequence[float],
    origin: np.ndarray,
    losses: dict[int, float] | None,
) -> Update:
    loss = {"fedcda.loss": np.array([(losses or {}).get(client, 0.0)], np.float32)}
    delta = np.array(model, np.float32) - origin
    return Update(
        number, client, version, 10, 10, 1, 0.0, 0.0, np.empty(0, np.int64), loss, delta=delta
    )


def cached(at: Server, client: int) -> list[list[float]]:
    """Return a client's cached models, newest first."""
    state = {key.removeprefix("fedcda."): value for key, value in at.state.items()}
    row = state["clients"].tolist().index(client)
    memory, pushes = state["models"].shape[1], int(state["pushes"][row])
    return [
        state["models"][row, (pushes - 1 - back) % memory].tolist()
        for back in range(min(pushes, memory))
    ]


def model(value: float, buffer: float = 0.0) -> list[float]:
    return [value] * (WIDTH - 1) + [buffer]


def test_fedcda_cache_has_the_last_models_of_each_client() -> None:
    at = server(FedCDA(memory=2))
    step(at, [(3, model(1)), (1, model(2))])
    step(at, [(3, model(3))])
    step(at, [(3, model(4)), (0, model(5))])
    assert cached(at, 3) == [model(4), model(3)]
    assert cached(at, 1) == [model(2)] and cached(at, 0) == [model(5)]
    assert at.state["fedcda.clients"].tolist() == [3, 1, 0], (
        "a row each, in the order of first arrival"
    )


def test_fedcda_caches_the_trained_model_of_a_stale_client() -> None:
    at = server(FedCDA(warmup_rounds=1))
    step(at, [(0, model(1)), (1, model(3))])
    assert at.vector.tolist() == model(2)
    step(at, [(2, model(5))], base=0)
    assert cached(at, 2) == [model(5)]
    assert at.vector[0] == pytest.approx(3)
    warm = server(FedCDA())
    step(warm, [(0, model(1))])
    step(warm, [(1, model(5)), (2, model(6))], base=0)
    assert warm.vector[0] == pytest.approx(5.5)


def test_fedcda_counts_a_client_with_two_aggregated_updates_only_once() -> None:
    at = server(FedCDA(memory=3, batches=1, warmup_rounds=0))
    step(at, [(1, model(2)), (0, model(4)), (1, model(3))])
    assert cached(at, 1) == [model(3), model(2)]
    assert at.vector.tolist() == pytest.approx(model(3.5))


# --- the loss that a client sends -------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "epochs", "expected"),
    [(10, 5, 8.5), (10, 1, 4.5), (10, None, 9.0), (25, None, 23.5), (3, None, 2.0), (0, 2, 0.0)],
)
def test_fedcda_uploads_the_mean_loss_of_the_last_epoch(
    losses: int, epochs: int | None, expected: float
) -> None:
    local = SimpleNamespace(epochs=epochs)
    job: Any = SimpleNamespace(losses=torch.arange(float(losses)), local=local, upload={})
    FedCDA().end(job)
    assert job.upload["loss"].tolist() == [expected]


# --- runs -------------------------------------------------------------------------------------


def test_fedcda_in_warmup_equals_fedavg_exactly() -> None:
    settings: dict[str, Any] = {"fleet": Ideal()} | UNIFORM
    ended, fedavg = (
        run(run_spec(*methods, model=NORMED), Synchronous(6), **settings)
        for methods in ([FedCDA(warmup_rounds=3)], [])
    )
    assert ended.finished.model_sha256 == fedavg.finished.model_sha256


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_killed_fedcda_run_resumes_with_the_bits_of_an_uninterrupted_run(
    schedule: Any, place: Any, tmp_path: Path
) -> None:
    def study() -> Any:
        return run_spec(FedCDA(warmup_rounds=2, cache=place), model=NORMED_MLP)

    straight = run(study(), schedule, rounds=8)
    killed = coordinate(study(), schedule, rounds=8, checkpoint_every=2, folder=str(tmp_path))
    next(event for event in killed.run() if isinstance(event, Round) and event.row["round"] == 7)
    resumed = run(
        study(), schedule, rounds=8, resume=str(tmp_path / "checkpoints" / "round-000006")
    )
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)
    caches = straight.coordinator.server.state, resumed.coordinator.server.state
    assert caches[0].keys() == caches[1].keys()
    assert all(torch.equal(caches[0][name], caches[1][name]) for name in caches[0])
    on_disk = [state["fedcda.models"].untyped_storage().filename is not None for state in caches]
    assert on_disk == [place == "disk"] * 2


def test_fedcda_cached_models_survive_resume_and_absence_of_a_client(tmp_path: Path) -> None:
    data = equal_clients(clients=12)
    study = run_spec(FedCDA(warmup_rounds=0), data=data)
    run(study, Synchronous(3), rounds=3, checkpoint_every=3, folder=str(tmp_path))
    spy = Spy(study)
    resumed = coordinate(
        study,
        Synchronous(3),
        runtime=spy,
        rounds=4,
        resume=str(tmp_path / "checkpoints/round-000003"),
    )
    events = resumed.run()
    next(events)
    before = {
        client: cached(resumed.server, client)
        for client in resumed.server.state["fedcda.clients"].tolist()
    }
    list(events)
    busy = {update.client for update in spy.updates}
    assert len(busy) == 3 and set(before) - busy
    for client in before:
        after = cached(resumed.server, client)
        assert after[1:] == before[client][:2] if client in busy else after == before[client]


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [Synchronous(27), Buffered(concurrency=28, size=27)])
def test_fedcda_error_of_too_large_search_suggests_more_batches_with_fewer_clients(
    schedule: Any,
) -> None:
    data = clients_of_sizes((3,) * 28)  # 27 in an aggregation, 14 in a batch: 3 ** 14 combinations
    with pytest.raises(
        RefusedError, match=r"^method\.fedcda\.batches=2: .*method\.fedcda\.batches=3"
    ):
        coordinate(run_spec(FedCDA(batches=2), data=data), schedule)
    assert 3**9 <= MAX_COMBINATIONS < 3**14
    coordinate(run_spec(FedCDA(batches=3), data=data), schedule)
    coordinate(
        run_spec(FedCDA(batches=2), data=clients_of_sizes((3,) * 24)),
        Buffered(concurrency=24, size=24),
    )


def test_fedcda_accepts_as_many_combinations_as_the_limit_but_not_more() -> None:
    data = clients_of_sizes((3,) * 6)
    assert MAX_COMBINATIONS == 10**6
    coordinate(run_spec(FedCDA(memory=10, batches=1), data=data), Synchronous(6))
    with pytest.raises(RefusedError, match=r"^method\.fedcda\.batches=1: .*batches=2"):
        coordinate(run_spec(FedCDA(memory=11, batches=1), data=data), Synchronous(6))
    with pytest.raises(RefusedError, match=r"^method\.fedcda\.batches=1: .*batches=2"):
        coordinate(
            run_spec(FedCDA(memory=10, batches=1), data=clients_of_sizes((3,) * 12)),
            Synchronous(12),
        )


def test_error_about_a_too_large_fedcda_cache_suggests_a_setting_that_fits() -> None:
    counts = (10,) * 4 + (0,) * 7  # clients without samples never train
    all_three = 4 * 3 * WIDTH * 4 / 2**30
    server(FedCDA(budget=all_three), counts)
    with pytest.raises(ValueError, match=r"method\.fedcda\.budget.*memory=2"):
        server(FedCDA(budget=all_three * 0.99), counts)
    server(FedCDA(memory=2, budget=all_three * 0.99), counts)
    with pytest.raises(ValueError, match=r"method\.fedcda\.memory=1"):
        server(FedCDA(budget=all_three / 3), counts)
    with pytest.raises(ValueError, match=r"method\.fedcda\.budget="):
        server(FedCDA(budget=1e-12), counts)


def test_fedcda_refuses_to_weigh_updates_by_sample_count() -> None:
    with pytest.raises(ValueError, match=r"^weighting=samples"):
        coordinate(run_spec(FedCDA(), data=clients_of_sizes((3, 3, 3, 3))), weighting="samples")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"memory": 0}, "memory=0"),
        ({"batches": 0}, "batches=0"),
        ({"smoothness": -1.0}, "smoothness=-1.0"),
    ],
)
def test_fedcda_settings_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"method.fedcda.{text}"):
        FedCDA(**settings)
