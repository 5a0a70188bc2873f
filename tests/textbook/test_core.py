"""Test FedAvg, the virtual clock, checkpoints and scores against computations by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import NORMED_MLP, SEED, FinishedRun, run, run_spec, tiny_data, untrained_run
from torch import Tensor

from raysim.api.declarations import Evaluation, Finetune
from raysim.api.local_job import PersonalModel
from raysim.api.messages import Job
from raysim.api.method import Method
from raysim.data.federated import federate
from raysim.data.partition import Dirichlet
from raysim.data.sources import Synthetic
from raysim.methods.fedbn import FedBN
from raysim.primitives.streams import stream
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.schedule import Buffered, Synchronous
from textbook.check import LOCAL, Row, check
from textbook.clock import Aggregated, lognormal_seconds, timetable
from textbook.core import core
from textbook.pfedavg import tuned
from textbook.plain import is_buffer, logits
from textbook.world import Params, World

ADAM = replace(LOCAL, optimizer="adam", lr=0.02, momentum=0.0)
STEPS = replace(LOCAL, epochs=None, steps=5)


def trained(normed: bool = False, **local: Any) -> dict[str, Any]:
    """Return the arguments `local` and `model` of `tiny_runs.run_spec`.

    normed: True: `model` is a network with BatchNorm. False: `model` is left out.
    local: the settings of local training that differ from `LOCAL`.
    """
    return {"local": replace(LOCAL, **local)} | ({"model": NORMED_MLP} if normed else {})


def late(**changes: Any) -> dict[str, Any]:
    """Return the arguments `schedule` and `run` of `Row` for a run with stale updates.

    All four clients always have a job in flight, and an aggregation uses two updates.
    changes: further settings of the run.
    """
    return {"schedule": Buffered(concurrency=4, size=2), "run": {"rounds": 6} | changes}


ROWS = {
    "plain descent": Row(core, list, trained(momentum=0.0, weight_decay=0.0, lr_decay=1.0)),
    "weight decay alone": Row(core, list, trained(momentum=0.0, weight_decay=0.3)),
    "rate that falls": Row(core, list, trained(lr_decay=0.3)),
    "nesterov": Row(core, list, trained(nesterov=True)),
    "adam": Row(core, list, {"local": ADAM}),
    "adamw": Row(core, list, {"local": replace(ADAM, optimizer="adamw", weight_decay=0.1)}),
    "adam with weight decay": Row(core, list, {"local": replace(ADAM, weight_decay=0.3)}),
    "adam, clipped": Row(core, list, {"local": replace(ADAM, clip=0.2)}),
    "clipped": Row(core, list, trained(clip=0.2)),
    "clipped now and then": Row(core, list, trained(clip=1.6, weight_decay=0.3)),
    "clipped, nesterov, BatchNorm": Row(core, list, trained(True, clip=0.2, nesterov=True)),
    "steps": Row(core, list, {"local": STEPS}),
    "steps with BatchNorm": Row(
        core, list, {"local": replace(STEPS, batch=3), "model": NORMED_MLP}
    ),
    "steps with replacement": Row(core, list, {"local": replace(STEPS, sampling="replacement")}),
    "epochs with replacement": Row(core, list, trained(sampling="replacement")),
    "batches larger than a client": Row(
        core, list, {"local": replace(STEPS, batch=30, sampling="replacement")}
    ),
    "one batch a pass": Row(core, list, trained(batch=1000)),
    "uniform weights": Row(core, list, trained(True), {"weighting": "uniform"}),
    "BatchNorm that has seen more batches of some": Row(core, list, trained(True, batch=3)),
    "late": Row(core, list, trained(), **late()),
    "late, a rate that falls": Row(core, list, trained(lr_decay=0.5), **late()),
    "late, BatchNorm": Row(core, list, trained(True, batch=3), **late()),
    "late, BatchNorm, uniform weights": Row(core, list, trained(True), **late(weighting="uniform")),
    "late, one by one": Row(core, list, trained(True), schedule=Buffered(3, 1), run={"rounds": 7}),
}


@pytest.mark.parametrize("name", ROWS)
def test_training_without_methods_equals_its_textbook_computation(name: str) -> None:
    check(ROWS[name])


def test_buffered_run_compared_with_the_textbook_has_stale_updates() -> None:
    ended = run(
        run_spec(data=tiny_data(clients=4, samples=38), local=LOCAL),
        Buffered(4, 2),
        Ideal(),
        rounds=6,
    )
    assert sum(row["staleness"] > 0 for row in ended.rows) > 2  # type: ignore[operator, misc]


# --- the clock --------------------------------------------------------------------------------

COUNTS = [20, 0, 35, 20, 8, 50, 20, 41]
FLOATS = 64 + 1 + 5 + 5  # an Mlp of one unit on 8 x 8 pixels in 5 classes
SLOW = Lognormal(
    speed=50.0, sigma=0.7, bandwidth_down=900.0, bandwidth_up=300.0, bandwidth_sigma=0.4
)


def slow(client: int) -> float:
    return lognormal_seconds(
        SEED, len(COUNTS), client, COUNTS[client], FLOATS, 50.0, 900.0, 300.0, 0.7, 0.4
    )


def ideal(client: int) -> float:
    return COUNTS[client] / 10


def expected(schedule: Synchronous | Buffered, fleet: str, rounds: int) -> list[Aggregated]:
    seconds = ideal if fleet == "ideal" else slow
    kind = isinstance(schedule, Synchronous)
    return timetable(SEED, COUNTS, rounds, seconds, schedule.concurrency, schedule.size, kind)


FLEETS = {"ideal": Ideal(speed=10.0), "lognormal": SLOW}
SCHEDULES = [
    Synchronous(3),
    Synchronous(7),
    Buffered(4, 2),
    Buffered(7, 3),
    Buffered(3, 1),
    Buffered(5, 5),
    Buffered(3, 5),
    Buffered(1, 9),
]


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_cohorts_and_staleness_equal_a_computation_by_hand(schedule: Any, fleet: str) -> None:
    coordinator, ledger, runtime = untrained_run(COUNTS, schedule, FLEETS[fleet], rounds=12)
    events = [*coordinator.run()]
    wanted = expected(schedule, fleet, 12)
    assert ledger.cohorts == [[job.client for job in aggregation.taken] for aggregation in wanted]
    assert ledger.staleness == [
        [job.staleness for job in aggregation.taken] for aggregation in wanted
    ]
    known = [
        job
        for aggregation in wanted
        for job in (*aggregation.taken, *aggregation.waiting, *aggregation.running)
    ]
    jobs = {
        job.number: (job.client, job.turn, job.version, float(COUNTS[job.client])) for job in known
    }
    ran = [
        (job.number, (job.client, job.participation, job.version, job.weight))
        for job in runtime.jobs
    ]
    assert (
        dict(ran) == {number: jobs[number] for number, _ in ran} and len(ran) >= 12 * schedule.size
    )
    assert len(events) > 12
    for row, aggregation in zip(coordinator.rows, wanted, strict=True):
        assert row["virtual_seconds"] == pytest.approx(aggregation.time_s, rel=1e-12)
        assert (row["floats_down"], row["floats_up"]) == (
            FLOATS * aggregation.sent,
            FLOATS * aggregation.arrivals,
        )
        assert (row["clients"], row["failures"]) == (schedule.size, 0)
        assert row["samples"] == sum(COUNTS[job.client] for job in aggregation.taken)
        assert row["staleness"] == pytest.approx(
            np.mean([job.staleness for job in aggregation.taken])
        )


def test_planner_draws_the_clients_of_the_textbook_if_most_clients_are_busy() -> None:
    counts = [5 + client % 7 for client in range(40)]
    coordinator, ledger, _ = untrained_run(counts, Buffered(39, 1), Ideal(speed=10.0), rounds=80)
    [*coordinator.run()]
    wanted = timetable(SEED, counts, 80, lambda client: counts[client] / 10, 39, 1, False)
    assert ledger.cohorts == [[job.client for job in aggregation.taken] for aggregation in wanted]


def test_round_lasts_as_long_as_its_slowest_client() -> None:
    fleet = Lognormal(
        speed=10.0, sigma=0.0, bandwidth_down=100.0, bandwidth_up=50.0, bandwidth_sigma=0.0
    )
    coordinator, ledger, _ = untrained_run([20, 50, 30], Synchronous(3), fleet, rounds=2)
    [*coordinator.run()]
    # 75 floats are 300 bytes: 3 s down, 6 s up; 2, 5 and 3 s of training.
    assert ledger.cohorts == [[0, 2, 1]] * 2
    assert [row["virtual_seconds"] for row in coordinator.rows] == pytest.approx([14.0, 28.0])


def test_jobs_that_end_at_the_same_time_are_aggregated_in_client_order() -> None:
    coordinator, ledger, _ = untrained_run(
        [20, 10, 20, 10, 20], Buffered(5, 2), Ideal(speed=10.0), rounds=3
    )
    [*coordinator.run()]
    # 1 and 3 after a second; both begin again and are back after two, when 0, 2 and 4 are: five in
    # the order of ids.
    assert ledger.cohorts == [[1, 3], [0, 1], [2, 3]]
    assert ledger.staleness == [[0, 0], [1, 0], [2, 1]]
    assert [row["virtual_seconds"] for row in coordinator.rows] == [1.0, 2.0, 2.0]


def test_job_duration_follows_from_the_samples_of_its_epochs_or_steps() -> None:
    for local, seconds in (
        (replace(LOCAL, epochs=3), [6.0, 1.5]),
        (STEPS, [4.0, 2.5]),
        (replace(STEPS, batch=30), [10.0, 2.5]),
    ):
        data = tiny_data(clients=4, samples=70)
        counts = data.partition.train.counts
        fleet = Ideal(speed=10.0)
        for samples, wanted in zip((20, 5), seconds, strict=True):
            devices = fleet.devices(0, 1, lambda: 1.0)
            assert devices.trip(0, 0, 0.0, local.budget(samples), 0, 0).finish == pytest.approx(
                wanted
            )
        ended = run(run_spec(data=data, local=local), Synchronous(4), fleet, rounds=1)
        most = max(
            n * local.epochs if local.epochs else local.steps * min(local.batch, n)
            for n in counts.tolist()
        )  # type: ignore[operator]
        assert ended.rows[0]["virtual_seconds"] == pytest.approx(most / 10)


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("schedule", [Synchronous(3), Buffered(4, 2), Buffered(7, 3)], ids=repr)
def test_checkpoint_has_the_planner_state_computed_by_hand(
    schedule: Any, fleet: str, tmp_path: Path
) -> None:
    settings = {"rounds": 10, "checkpoint_every": 4, "folder": str(tmp_path)}
    coordinator, _, _ = untrained_run(COUNTS, schedule, FLEETS[fleet], **settings)
    [*coordinator.run()]
    wanted = expected(schedule, fleet, 10)
    folders = tmp_path / "checkpoints"
    assert sorted(path.name for path in folders.iterdir()) == ["round-000008", "round-000010"]
    for version in (8, 10):
        numbers = json.loads((folders / f"round-{version:06d}/run.json").read_text())
        aggregation = wanted[version - 1]
        assert numbers["version"] == version
        assert numbers["rows"][-1]["virtual_seconds"] == pytest.approx(
            aggregation.time_s, rel=1e-12
        )
        assert [row["round"] for row in numbers["rows"]] == list(range(1, version + 1))
        going = sorted((*aggregation.waiting, *aggregation.running), key=lambda job: job.number)
        rows = [(state, Job(*values)) for state, values in numbers["jobs"]]
        planned = {job.number: job for _, job in rows}
        assert {job.number for state, job in rows if state in ("dispatched", "in flight")} == {
            job.number for job in going
        }
        for job in going:
            mine = planned[job.number]
            assert (mine.client, mine.participation, mine.version) == (
                job.client,
                job.turn,
                job.version,
            )
            assert mine.finish == pytest.approx(job.finish, rel=1e-12)
            assert (mine.work, mine.down, mine.up) == (COUNTS[job.client], FLOATS, FLOATS)
        if version == 10:  # the plan ends with the run
            plan = numbers["planner"]
            assert (plan["cohorts"], plan["dispatched"]) == (aggregation.cohorts, aggregation.sent)
            assert [job[0] for job in plan["sites"][0]["arrived"]] == [
                job.number for job in aggregation.waiting
            ]


# --- evaluation -------------------------------------------------------------------------------

SPREAD = federate(
    Synthetic(samples=160, test_samples=45, classes=5, domains=3, mean=[0.5], std=[0.3], noise=4.0),
    Dirichlet(clients=4, alpha=1.0, minimum=8, test_fraction=0.4),
    SEED,
)
EVERYTHING = Evaluation(finetune=Finetune(2))


class Opposite(Method):
    """A method that scores each client with the negated shared parameters."""

    name = "opposite"
    paper = "a test"

    def personalise(self, client: PersonalModel) -> None:
        client.vector.shared[: client.vector.layout.trained].neg_()


def samples(rows: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return inputs, labels and domains of some samples; the inputs are normalised by hand.

    rows: the positions of the samples in the data set `SPREAD`.
    """
    source = SPREAD.open()
    inputs = (torch.from_numpy(source.inputs[rows]).double() / 255 - 0.5) / 0.3
    return inputs, torch.from_numpy(source.labels[rows]), source.domains[rows]


def hits(model: Mapping[str, Tensor], rows: np.ndarray) -> np.ndarray:
    inputs, labels, _ = samples(rows)
    return (logits(model, inputs, False).argmax(1) == labels).numpy()


def own_columns(models: Mapping[int, Mapping[str, Tensor]], suffix: str = "") -> dict[str, float]:
    """Return the scores of clients' models on their test samples: mean, worst, and by domain.

    suffix: the end of the columns' names.
    """
    tests = SPREAD.partition.test
    right = {client: hits(model, tests.rows(client)) for client, model in models.items()}
    aggregation = [values.mean() for values in right.values()]
    domains = np.concatenate([samples(tests.rows(client))[2] for client in models])
    whole = np.concatenate(list(right.values()))
    ended = {
        f"accuracy{suffix}": np.mean(aggregation),
        f"accuracy{suffix}_worst": np.min(aggregation),
    }
    return ended | {f"accuracy{suffix}.domain {d}": whole[domains == d].mean() for d in range(3)}


def central_columns(model: Mapping[str, Tensor]) -> dict[str, float]:
    inputs, labels, domains = samples(SPREAD.central)
    right = hits(model, SPREAD.central)
    return {
        "accuracy_global": right.mean(),
        "loss_global": float(F.cross_entropy(logits(model, inputs, False), labels)),
        "accuracy_worst_domain": min(right[domains == d].mean() for d in range(3)),
    }


def columns(ended: FinishedRun) -> dict[str, Any]:
    """Return those columns of the last row that have scores."""
    row = ended.rows[-1]
    return {k: v for k, v in row.items() if k.startswith(("accuracy", "loss_")) and v is not None}


def scored(
    *methods: Method, evaluate: Evaluation = EVERYTHING, **others: Any
) -> tuple[FinishedRun, dict[int, Params]]:
    """Return a finished run, and the final model of each client with its personal tensors."""
    study = run_spec(
        *methods, model=NORMED_MLP, data=SPREAD, local=LOCAL, dtype=torch.float64, **others
    )
    ended = run(study, Synchronous(2), rounds=3, evaluate=evaluate)
    layout, coordinator = ended.coordinator.layout, ended.coordinator
    states = dict(coordinator.client_states.committed())
    start = coordinator.initial
    models = {}
    for client in range(4):
        data, counters = start.data.clone(), start.counters.clone()
        data[: layout.shared] = coordinator.server.vector
        counters[: layout.shared_counters] = coordinator.server.counters
        if client in states:
            data[layout.shared :] = torch.tensor(states[client].personal)
            counters[layout.shared_counters :] = torch.tensor(states[client].counters)
        models[client] = start.named(data, counters)
    return ended, models


def adapted(models: Mapping[int, Params], epochs: int) -> dict[int, Params]:
    data = [samples(SPREAD.partition.train.rows(client))[:2] for client in range(4)]
    world = World(SEED, 4, 5, (), data, data[0], {}, frozenset(), LOCAL, "samples")
    with torch.enable_grad():
        return {
            client: tuned(world, model, client, 3, epochs, False)
            for client, model in models.items()
        }


def test_shared_model_is_scored_on_client_and_central_samples() -> None:
    ended, models = scored()
    wanted = (
        own_columns(models)
        | central_columns(models[0])
        | own_columns(adapted(models, 2), "_finetuned")
    )
    assert columns(ended) == pytest.approx(wanted, rel=1e-9)
    assert len(set(wanted.values())) > 8, "or columns could be taken for one another"


def test_personal_models_are_scored_on_client_and_central_samples() -> None:
    ended, models = scored(FedBN(), evaluate=replace(EVERYTHING, common=True))
    common = np.mean([hits(model, SPREAD.central).mean() for model in models.values()])
    wanted = (
        own_columns(models)
        | {"accuracy_common": common}
        | own_columns(adapted(models, 2), "_finetuned")
    )
    assert columns(ended) == pytest.approx(wanted, rel=1e-9)


def test_personalising_method_scores_personal_and_shared_models() -> None:
    ended, models = scored(Opposite(), evaluate=Evaluation(common=True))
    shared = models[0]
    turned = {name: t if is_buffer(name) else -t for name, t in shared.items()}
    common = hits(turned, SPREAD.central).mean()
    personal_columns = own_columns(dict.fromkeys(models, turned))
    wanted = (
        personal_columns
        | own_columns(models, "_shared")
        | central_columns(shared)
        | {"accuracy_common": common}
    )
    assert columns(ended) == pytest.approx(wanted, rel=1e-9)


def test_evaluation_scores_only_the_drawn_clients() -> None:
    ended, models = scored(evaluate=Evaluation(clients=2, every=2))
    drawn = sorted(stream(SEED, "evaluate", 3).choice(4, size=2, replace=False).tolist())
    wanted = own_columns({client: models[client] for client in drawn}) | central_columns(models[0])
    assert columns(ended) == pytest.approx(wanted, rel=1e-9)
    assert [row["accuracy"] is None for row in ended.rows] == [True, False, False]
    assert [row["loss_global"] is None for row in ended.rows] == [True, False, False]
