"""FedCDA: the search against brute force, the cache of client models, and the mean of what is selected."""

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
    ran,
    run,
    run_spec,
    tiny,
)
from torch import Tensor

from raysim.api.declarations import Task
from raysim.api.messages import Published, Update
from raysim.methods.fedcda import (
    LIMIT,
    FedCDA,
    cross_round_aggregate,
    divergence,
    greedy_selection,
    select_models,
    selection_objective,
)
from raysim.primitives.errors import Refused
from raysim.simulation.events import Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.simulation.server import Server
from raysim.vectors.layout import Layout

UNIFORM: dict[str, Any] = {"weighting": "uniform"}


def case(
    seed: int, clients: int = 4, memory: int = 3, fixed: int = 2, size: int = 5
) -> dict[str, Any]:
    """Random arguments of a selection, around a model far from zero."""
    draw = np.random.default_rng(seed)
    return {
        "candidates": torch.from_numpy(10 + draw.standard_normal((clients, memory, size))),
        "candidate_losses": torch.from_numpy(draw.random((clients, memory))),
        "num_candidates": torch.from_numpy(draw.integers(1, memory + 1, clients)),
        "fixed_models": torch.from_numpy(10 + draw.standard_normal((fixed, size))),
        "fixed_losses": torch.from_numpy(draw.random(fixed)),
        "smoothness": 1.0,
    }


def objective(choice: Sequence[int], given: dict[str, Any]) -> float:
    """J of a choice, straight from its definition."""
    rows = list(range(len(choice)))
    models = torch.cat([given["fixed_models"], given["candidates"][rows, list(choice)]])
    losses = torch.cat([given["fixed_losses"], given["candidate_losses"][rows, list(choice)]])
    return float(selection_objective(models=models, losses=losses, smoothness=given["smoothness"]))


def combinations(given: dict[str, Any]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(count) for count in given["num_candidates"].tolist())))


# --- the search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothness", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("fixed", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_one_batch_finds_the_best_of_all_combinations(
    seed: int, fixed: int, smoothness: float
) -> None:
    given = case(seed, fixed=fixed) | {"smoothness": smoothness}
    best = min(combinations(given), key=lambda choice: objective(choice, given))
    assert select_models(**given).tolist() == list(best)


def test_more_batches_never_beat_one_and_sometimes_lose() -> None:
    gaps = []
    for seed in range(8):
        given = case(seed)
        one, three = (
            objective(greedy_selection(**given, num_batches=many).tolist(), given)
            for many in (1, 3)
        )
        gaps.append(three - one)
    assert min(gaps) >= -1e-12 and max(gaps) > 1e-3


def test_a_batch_does_not_see_the_later_ones() -> None:
    given = case(1)
    first = {
        key: value[:2] if key.startswith(("cand", "num")) else value for key, value in given.items()
    }
    assert greedy_selection(**given, num_batches=2).tolist()[:2] == select_models(**first).tolist()


def test_more_batches_than_clients_are_a_batch_each() -> None:
    given = case(2)
    alone, many = (greedy_selection(**given, num_batches=count).tolist() for count in (4, 9))
    assert alone == many


def test_the_choice_is_the_same_for_shifted_models_and_shifted_losses() -> None:
    given = case(3)
    choice = select_models(**given).tolist()
    shift = torch.linspace(-30, 50, 5)
    moved = given | {key: given[key] + shift for key in ("candidates", "fixed_models")}
    dearer = given | {key: given[key] + 7 for key in ("candidate_losses", "fixed_losses")}
    assert select_models(**moved).tolist() == select_models(**dearer).tolist() == choice


def test_permuted_clients_choose_alike() -> None:
    given = case(4)
    order = [2, 0, 3, 1]
    permuted = {
        key: value[order] if key.startswith(("cand", "num")) else value
        for key, value in given.items()
    }
    assert select_models(**permuted).tolist() == select_models(**given)[order].tolist()


def test_without_smoothness_each_client_takes_its_lowest_loss() -> None:
    given = case(5) | {"smoothness": 0.0, "num_candidates": torch.full((4,), 3)}
    expected = given["candidate_losses"].argmin(1).tolist()
    assert (
        select_models(**given).tolist()
        == greedy_selection(**given, num_batches=3).tolist()
        == expected
    )


def test_of_equal_combinations_the_first_is_chosen() -> None:
    given = case(6)
    same = given["candidates"][:, :1].expand(4, 3, 5).clone()
    tied = given | {
        "candidates": same,
        "candidate_losses": torch.ones(4, 3).double(),
        "num_candidates": torch.full((4,), 3),
    }
    assert select_models(**tied).tolist() == [0, 0, 0, 0]
    tied["candidate_losses"][:, 0] += 1e-14
    assert select_models(**tied).tolist() == [0, 0, 0, 0], "within rounding"
    tied["candidate_losses"][:, 0] += 1e-6
    assert select_models(**tied).tolist() == [1, 1, 1, 1]


def test_the_divergence_is_zero_for_equal_models_only() -> None:
    models = torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    assert float(divergence(models=models)) == 1.0
    assert float(divergence(models=models[[0, 0]])) == 0.0
    assert cross_round_aggregate(models=models).tolist() == [2.0, 2.0]


# --- the server -----------------------------------------------------------------------------------------------------

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
    """An aggregation of (client, model) pairs; base: the version that they were trained from, the current one if -1."""
    version = at.version if base < 0 else base
    origin = at.vector.numpy() if base < 0 else np.full(WIDTH, 100, np.float32)
    updates = [
        _update(number, client, version, model, origin, losses)
        for number, (client, model) in enumerate(models)
    ]
    bases = {version: Published(version, origin, np.empty(0, np.int64))}
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
    """A client's models, newest first."""
    state = {key.removeprefix("fedcda."): value for key, value in at.state.items()}
    row = state["clients"].tolist().index(client)
    memory, pushes = state["models"].shape[1], int(state["pushes"][row])
    return [
        state["models"][row, (pushes - 1 - back) % memory].tolist()
        for back in range(min(pushes, memory))
    ]


def selected(at: Server) -> Tensor:
    """The selected model of every client seen."""
    models = at.state["fedcda.models"]
    return models[torch.arange(len(models)), at.state["fedcda.selected"]]


def model(value: float, buffer: float = 0.0) -> list[float]:
    return [value] * (WIDTH - 1) + [buffer]


def test_a_cache_holds_the_last_models_newest_first_and_that_of_an_absent_client_stays() -> None:
    at = server(FedCDA(memory=2))
    step(at, [(3, model(1)), (1, model(2))])
    step(at, [(3, model(3))])
    step(at, [(3, model(4)), (0, model(5))])
    assert cached(at, 3) == [model(4), model(3)]
    assert cached(at, 1) == [model(2)] and cached(at, 0) == [model(5)]
    assert at.state["fedcda.clients"].tolist() == [3, 1, 0], (
        "a row each, in the order of first arrival"
    )


def test_everybody_seen_counts_with_the_selected_model_and_nobody_else() -> None:
    at = server(FedCDA(memory=2, batches=1, warmup_rounds=0))
    step(at, [(0, model(1)), (1, model(1.5))])
    step(at, [(2, model(9)), (3, model(1))])
    step(at, [(2, model(2))])
    assert selected(at)[:, 0].tolist() == [1, 1.5, 2, 1]
    assert at.vector[0] == pytest.approx(5.5 / 4)
    step(at, [(2, model(20))])
    assert selected(at)[2, 0] == 2, "the older model is the closer one"
    step(at, [(2, model(21))], losses={2: -1e6})
    assert selected(at)[2, 0] == 21, "and a low loss makes up for distance"


def test_buffers_go_with_their_model_and_are_no_part_of_the_distance() -> None:
    at = server(FedCDA(memory=2, batches=1, warmup_rounds=1))
    step(at, [(0, model(1, 500)), (1, model(1, 0))])
    step(at, [(0, model(3, 0))])
    assert selected(at).tolist() == [model(1, 500), model(1, 0)]
    assert at.vector.tolist() == model(1, 250)


def test_a_stale_client_contributes_the_model_it_trained() -> None:
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


def test_a_client_that_arrives_twice_is_one_participant_with_two_more_models() -> None:
    at = server(FedCDA(memory=3, batches=1, warmup_rounds=0))
    step(at, [(1, model(2)), (0, model(4)), (1, model(3))])
    assert cached(at, 1) == [model(3), model(2)]
    assert at.vector.tolist() == pytest.approx(model(3.5))


def test_warm_up_averages_the_participants_or_everybodys_newest_model() -> None:
    fedavg, newest = server(FedCDA()), server(FedCDA(warmup="selected"))
    for at in (fedavg, newest):
        step(at, [(0, model(1)), (1, model(3))])
        step(at, [(1, model(8))])
    assert fedavg.vector.tolist() == model(8)
    assert newest.vector.tolist() == model(4.5)


def test_the_report_has_the_mean_age_of_the_selected_models() -> None:
    at = server(FedCDA(memory=2, batches=1, warmup_rounds=0))
    step(at, [(0, model(1)), (1, model(1))])
    assert at.report == {"fedcda.age": 0.0}
    step(at, [(2, model(1))])
    step(at, [(2, model(50))])
    assert at.report == {"fedcda.age": (2 + 2 + 1) / 3}


# --- the loss that a client sends -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "epochs", "expected"),
    [(10, 5, 8.5), (10, 1, 4.5), (10, None, 9.0), (25, None, 23.5), (3, None, 2.0), (0, 2, 0.0)],
)
def test_a_client_sends_the_mean_loss_of_its_last_epoch_or_last_tenth_of_steps(
    losses: int, epochs: int | None, expected: float
) -> None:
    local = SimpleNamespace(epochs=epochs)
    job: Any = SimpleNamespace(losses=torch.arange(float(losses)), local=local, upload={})
    FedCDA().end(job)
    assert job.upload["loss"].tolist() == [expected]


# --- runs -----------------------------------------------------------------------------------------------------------


def test_with_one_model_each_and_every_client_in_every_round_it_is_uniform_fedavg() -> None:
    everybody = Synchronous(6)
    settings: dict[str, Any] = {"schedule": everybody, "fleet": Ideal()} | UNIFORM
    found = run(run_spec(FedCDA(memory=1, warmup_rounds=0), model=NORMED), **settings)
    fedavg = run(run_spec(model=NORMED), **settings)
    for name, values in found.tensors.items():  # sums in float64 there, in float32 here
        np.testing.assert_allclose(values, fedavg.tensors[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("group", [2, 5])
def test_a_warm_up_as_long_as_the_run_is_uniform_fedavg_bit_for_bit(group: int) -> None:
    settings: dict[str, Any] = {"fleet": Ideal(), "summation": group} | UNIFORM
    found, fedavg = (
        run(run_spec(*methods, model=NORMED), Synchronous(6), **settings)
        for methods in ([FedCDA(warmup_rounds=3)], [])
    )
    assert found.finished.model_sha256 == fedavg.finished.model_sha256


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_a_killed_run_resumes_to_the_same_bits_and_caches(
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


def test_a_cache_survives_a_resume_and_rounds_in_which_its_client_sits_out(tmp_path: Path) -> None:
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


def test_the_model_is_the_mean_of_the_selected_ones_and_the_selection_is_the_best() -> None:
    found = run(
        run_spec(FedCDA(batches=1, warmup_rounds=1), model=NORMED_MLP), Synchronous(3), rounds=6
    )
    at = found.coordinator.server
    state, trained = at.state, found.coordinator.layout.trained
    np.testing.assert_allclose(at.vector, selected(at).double().mean(0), rtol=1e-5, atol=1e-6)
    busy = (state["fedcda.rounds"].amax(1) == 5).nonzero().flatten().tolist()
    idle = [row for row in range(len(state["fedcda.clients"])) if row not in busy]
    assert len(busy) == 3 and idle

    def value(places: Sequence[int]) -> float:
        chosen = state["fedcda.selected"].clone()
        chosen[busy] = torch.tensor(places)
        every = torch.arange(len(chosen))
        models, losses = (
            state["fedcda.models"][every, chosen],
            state["fedcda.losses"][every, chosen],
        )
        return float(
            selection_objective(models=models[:, :trained].double(), losses=losses, smoothness=1.0)
        )

    kept = [range(min(3, int(state["fedcda.pushes"][row]))) for row in busy]
    values = [value(places) for places in itertools.product(*kept)]
    assert len(values) > 1
    assert value(state["fedcda.selected"][busy].tolist()) == pytest.approx(min(values), rel=1e-12)


def test_a_buffered_schedule_caches_what_clients_trained_from_older_versions() -> None:
    study = run_spec(FedCDA(memory=2, warmup_rounds=2))
    spy = Spy(study)
    found = ran(coordinate(study, Buffered(concurrency=5, size=2), runtime=spy, rounds=9))
    published = {job.number: published for job, published in spy.sent}
    assert max(row["staleness"] or 0 for row in found.rows) > 0
    assert max(row["fedcda.age"] or 0 for row in found.rows) > 0
    at = found.coordinator.server
    running = found.in_flight
    for client in at.state["fedcda.clients"].tolist():
        mine = [
            update
            for update in spy.updates
            if update.client == client and update.job not in running
        ]
        models = [published[update.job].vector + update.delta for update in mine]
        assert cached(at, client) == [trained.tolist() for trained in models[:-3:-1]]


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [Synchronous(27), Buffered(concurrency=28, size=27)])
def test_a_search_without_bound_is_refused_before_the_start_with_batches_that_would_do(
    schedule: Any,
) -> None:
    data = clients_of_sizes((3,) * 28)  # 27 in an aggregation, 14 in a batch: 3 ** 14 combinations
    with pytest.raises(
        Refused, match=r"method.fedcda.batches=2 makes 4.8e\+06 combinations .* set it to 3"
    ):
        coordinate(run_spec(FedCDA(batches=2), data=data), schedule)
    assert 3**9 <= LIMIT < 3**14
    coordinate(run_spec(FedCDA(batches=3), data=data), schedule)
    coordinate(
        run_spec(FedCDA(batches=2), data=clients_of_sizes((3,) * 24)),
        Buffered(concurrency=24, size=24),
    )


def test_a_search_of_exactly_the_limit_is_taken() -> None:
    data = clients_of_sizes((3,) * 6)
    assert LIMIT == 10**6
    coordinate(run_spec(FedCDA(memory=10, batches=1), data=data), Synchronous(6))
    with pytest.raises(Refused, match=r"combinations of 11 models of 6 clients .* set it to 2"):
        coordinate(run_spec(FedCDA(memory=11, batches=1), data=data), Synchronous(6))
    with pytest.raises(Refused, match=r"combinations of 10 models of 12 clients .* set it to 2"):
        coordinate(
            run_spec(FedCDA(memory=10, batches=1), data=clients_of_sizes((3,) * 12)),
            Synchronous(12),
        )


def test_a_cache_that_may_outgrow_its_budget_is_refused_with_what_fits() -> None:
    counts = (10,) * 4 + (0,) * 7  # clients without samples never train
    all_three = 4 * 3 * WIDTH * 4 / 2**30
    server(FedCDA(budget=all_three), counts)
    with pytest.raises(
        ValueError, match=r"memory=3\) of 4 clients, more than method.fedcda.budget.*memory=2, or"
    ):
        server(FedCDA(budget=all_three * 0.99), counts)
    server(FedCDA(memory=2, budget=all_three * 0.99), counts)
    with pytest.raises(ValueError, match=r"set method.fedcda.memory=1, or"):
        server(FedCDA(budget=all_three / 3), counts)
    with pytest.raises(ValueError, match=r"budget=1e-12: set method.fedcda.budget="):
        server(FedCDA(budget=1e-12), counts)


def test_weights_by_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="weighting=samples has no effect on method 'fedcda'"):
        coordinate(run_spec(FedCDA(), data=clients_of_sizes((3, 3, 3, 3))), weighting="samples")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"memory": 0}, "memory=0"),
        ({"batches": 0}, "batches=0"),
        ({"smoothness": -1.0}, "smoothness=-1.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"method.fedcda.{text}"):
        FedCDA(**settings)


def test_a_study_keeps_one_cache_for_each_client_with_samples_that_was_seen() -> None:
    found = run(run_spec(FedCDA(), data=tiny()), rounds=2)
    state = found.coordinator.server.state
    assert set(state["fedcda.clients"].tolist()) == set(found.participations)
    assert len(state["fedcda.models"]) == len(found.participations) <= 6
