"""Test how models are scored.

The tests include fine-tuned models, models with personal layers, and a model that is trained on the
pooled samples of all clients. `evaluate.decompose` divides the global loss into parts, which are
tested, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    LOCAL,
    NORMED_MLP,
    SEED,
    NormedMlp,
    coordinate,
    equal_clients,
    run,
    run_spec,
    run_to_end,
    several_workers,
)
from torch import Tensor, nn

from raysim.api.declarations import Evaluation, Finetune, Local
from raysim.api.local_job import PersonalModel
from raysim.api.method import Method
from raysim.api.server_view import ServerView
from raysim.api.setup import Setup
from raysim.data.federated import FederatedData, federate, pool_clients
from raysim.data.partition import CSR, IID, Domain
from raysim.data.sources import Synthetic, Tabular
from raysim.experiment.build import build
from raysim.methods.fedbn import FedBN
from raysim.models.classifier import Shape
from raysim.primitives.errors import RefusedError
from raysim.runtime.inprocess import InProcess
from raysim.simulation.best_round import BestRounds
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.worker import Worker

ALL = Evaluation(finetune=Finetune(2), decompose=1)


def data_with_tests(clients: int = 4) -> FederatedData:
    """Return data in which each client has its own test samples.

    clients: the number of clients.
    """
    source = Synthetic(samples=120, test_samples=20, classes=5)
    return federate(source, IID(clients=clients, test_fraction=0.2), SEED)


class Zeroed(Method):
    """A method that scores each client with a model whose shared parameters are all 0.

    The shared model itself is scored with its own parameters.
    """

    name = "zeroed"
    paper = "a test"

    def personalise(self, client: PersonalModel) -> None:
        client.vector.shared.zero_()


@dataclass(frozen=True)
class Dropping(NormedMlp):
    """A network with dropout."""

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        """Return the usual extractor with dropout."""
        network, features = super().extractor(input_shape)
        return nn.Sequential(network, nn.Dropout(0.5)), features


class Pooled(Method):
    """A method that trains one model on the samples of all clients."""

    name = "centralized"
    paper = "a test"
    pools = True


@pytest.mark.parametrize("schedule", [Synchronous(3), Buffered(concurrency=3, size=2)])
@pytest.mark.parametrize("methods", [(), (FedBN(),)])
def test_evaluation_does_not_change_training(methods: tuple[Method, ...], schedule: Any) -> None:
    study = run_spec(*methods, model=NORMED_MLP, data=data_with_tests())
    plain, watched = run(study, schedule), run(study, schedule, evaluate=ALL)
    assert plain.bits == watched.bits
    assert all(row["accuracy_finetuned"] is not None for row in watched.rows)


def test_evaluation_does_not_change_training_if_the_model_has_dropout_layers() -> None:
    study = run_spec(model=Dropping(), data=data_with_tests())
    assert run(study).bits == run(study, evaluate=ALL).bits


@pytest.mark.parametrize("methods", [(), (FedBN(),), (Zeroed(),)])
def test_evaluation_has_the_same_bits_on_three_workers(
    methods: tuple[Method, ...],
) -> None:
    study = run_spec(*methods, model=NORMED_MLP, data=data_with_tests())
    one = run(study, evaluate=ALL)
    three = run_to_end(coordinate(study, runtime=several_workers(study, 3), evaluate=ALL))
    assert one.history == three.history and one.bits == three.bits


def test_run_with_personal_layers_has_no_central_score() -> None:
    plain = run(run_spec(data=data_with_tests())).rows[-1]
    normed = run(run_spec(FedBN(), model=NORMED_MLP, data=data_with_tests())).rows[-1]
    assert plain["accuracy_global"] is not None and "accuracy_shared" not in plain
    assert (
        normed["accuracy"] is not None
        and normed["accuracy_global"] is None
        and "accuracy_shared" not in normed
    )


def test_run_with_personal_models_also_scores_the_shared_model() -> None:
    both, plain = (
        run(run_spec(Zeroed(), data=data_with_tests())),
        run(run_spec(data=data_with_tests())),
    )
    assert both.bits == plain.bits
    for own, shared in zip(both.rows, plain.rows, strict=True):
        assert (
            own["accuracy_shared"] == shared["accuracy"]
            and own["accuracy_global"] == shared["accuracy_global"]
        )
        assert own["accuracy"] != shared["accuracy"]


def test_fine_tuning_the_head_does_not_change_the_extractor() -> None:
    seen: list[dict[str, Tensor]] = []
    study = run_spec(model=NORMED_MLP, data=data_with_tests())
    worker = several_workers(study, 1).members[0]
    for head in (True, False):
        before = worker.vector.data.clone()
        worker.trainer.finetune(0, study.data.partition.train.rows(0), 1, Finetune(1, head=head))
        moved = {
            entry.path: worker.vector.data[entry.start : entry.stop]
            != before[entry.start : entry.stop]
            for entry in worker.layout.entries
            if entry.start is not None
        }
        seen.append({path: changed.any() for path, changed in moved.items()})
    assert {path for path, moved in seen[0].items() if moved} == {"head.weight", "head.bias"}
    assert all(
        seen[1][path] for path in seen[1] if path.startswith("extractor") and "weight" in path
    )


def test_dropout_in_fine_tuning_depends_on_client_and_version_only() -> None:
    study = run_spec(model=Dropping(), data=data_with_tests())
    worker = several_workers(study, 1).members[0]
    start, result = worker.vector.data.clone(), dict[tuple[int, int, int], Tensor]()
    rows = study.data.partition.train.rows(0)
    for before, client, version in ((0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2)):
        worker.vector.data.copy_(start)
        torch.manual_seed(before)
        worker.trainer.finetune(client, rows, version, Finetune(1))
        result[before, client, version] = worker.vector.data.clone()
    assert torch.equal(result[0, 0, 1], result[1, 0, 1])
    assert not torch.equal(result[0, 0, 1], result[0, 1, 1]) and not torch.equal(
        result[0, 0, 1], result[0, 0, 2]
    )


def test_finetuning_can_also_use_samples_left_out_of_training() -> None:
    source = Synthetic(samples=120, test_samples=20, classes=5)
    data = federate(source, IID(clients=4, test_fraction=0.2, fraction=0.25), SEED)
    whole = federate(source, IID(clients=4, test_fraction=0.2), SEED).partition.train
    assert data.partition.spare is not None
    for client in range(4):
        kept, left = data.partition.train.rows(client), data.partition.spare.rows(client)
        assert np.array_equal(np.sort(np.concatenate([kept, left])), np.sort(whole.rows(client)))
    own, every = (
        run(run_spec(data=data), evaluate=Evaluation(finetune=Finetune(3, samples=samples)))  # type: ignore[arg-type]
        for samples in ("own", "all")
    )
    assert own.bits == every.bits
    assert [row["accuracy_finetuned"] for row in own.rows] != [
        row["accuracy_finetuned"] for row in every.rows
    ]


def test_data_without_central_samples_have_no_central_score() -> None:
    data = replace(data_with_tests(), central=np.empty(0, np.int64))
    row = run(run_spec(data=data)).rows[-1]
    assert row["accuracy"] is not None
    assert row["accuracy_global"] is None and row["loss_global"] is None


def test_evaluation_can_fine_tune_in_the_last_round_only() -> None:
    rows = run(
        run_spec(data=data_with_tests()), evaluate=Evaluation(finetune=Finetune(1, last=True))
    ).rows
    assert ["accuracy_finetuned" in row for row in rows] == [False, False, True]


def test_key_evaluate_common_is_refused_if_a_run_has_no_personal_models() -> None:
    rows = run(
        run_spec(FedBN(), model=NORMED_MLP, data=data_with_tests()),
        evaluate=Evaluation(common=True),
    ).rows
    assert all(0 <= row["accuracy_common"] <= 1 for row in rows)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"evaluate\.common=true"):
        coordinate(run_spec(data=data_with_tests()), evaluate=Evaluation(common=True))


def decomposed(rows: list[Any]) -> list[dict[str, float]]:
    return [
        {k.partition(".")[2]: v for k, v in row.items() if k.startswith("decomposition.")}
        for row in rows
    ]


def test_parts_of_the_loss_decomposition_sum_to_the_global_loss() -> None:
    study = run_spec(data=data_with_tests(), local=replace(LOCAL, lr=0.2))
    result = run(study, Synchronous(4), evaluate=Evaluation(decompose=2), rounds=4)
    parts = decomposed(result.rows)
    assert [bool(part) for part in parts] == [False, True, False, True]
    for part in parts[1::2]:
        total = part["local_loss"] + part["distribution_shift"] + part["aggregation"]
        assert total == pytest.approx(part["global_loss"], abs=1e-12)
    assert parts[1]["distribution_shift"] > 0  # a local model fits its own samples better
    worker = several_workers(study, 1).members[0]
    worker.vector.shared.copy_(result.coordinator.server.vector)
    worker.trainer.set_training(False)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                worker.vector.networks["model"](x), y, reduction="sum"
            )
            for client in range(4)
            for x, y in worker.trainer.client_samples(client)
        ]
    samples = len(study.data.partition.train.indices)
    assert parts[3]["global_loss"] == pytest.approx(float(sum(losses)) / samples, rel=1e-5)


def test_loss_decomposition_ignores_the_hook_personalise_of_a_method() -> None:
    asked: dict[str, Any] = {"rounds": 2, "evaluate": Evaluation(decompose=1)}
    plain, zeroed = (
        decomposed(run(run_spec(*methods, data=data_with_tests()), Synchronous(3), **asked).rows)
        for methods in ((), (Zeroed(),))
    )
    assert plain == zeroed and all(plain)


def test_losses_from_distribution_shift_and_from_aggregation_are_0_if_one_client_trains() -> None:
    (part, *_) = decomposed(
        run(run_spec(data=data_with_tests()), Synchronous(1), evaluate=Evaluation(decompose=1)).rows
    )
    assert part["distribution_shift"] == 0.0 and part["aggregation"] == pytest.approx(0.0, abs=1e-6)


def test_history_has_a_column_for_each_domain() -> None:
    source = Synthetic(samples=120, test_samples=20, classes=5, domains=3)
    data = federate(source, Domain(test_fraction=0.2), SEED)
    row: Mapping[str, Any] = run(run_spec(data=data), Synchronous(3)).rows[-1]
    names = data.open().domain_names
    assert [row[f"accuracy.{name}"] for name in names] and row["accuracy"] == pytest.approx(
        np.mean([row[f"accuracy.{name}"] for name in names])
    )


@pytest.mark.parametrize(("domains", "columns"), [(20, 20), (21, 0)])
def test_history_has_domain_columns_only_if_domains_are_few(domains: int, columns: int) -> None:
    source = Synthetic(samples=210, test_samples=20, classes=5, domains=domains)
    data = federate(source, Domain(test_fraction=0.2), SEED)
    row = run(run_spec(data=data), Synchronous(3), rounds=1).rows[-1]
    assert len([name for name in row if name.startswith("accuracy.")]) == columns


def validated(clients: int = 4, seed: int = SEED) -> FederatedData:
    source = Synthetic(samples=160, test_samples=20, classes=5, domains=2)
    return federate(source, IID(clients=clients, test_fraction=0.2, validation_fraction=0.2), seed)


class Drift(Method):
    """A method that makes the score of version 3 bad: a model of zeros is scored in its place."""

    name = "drift"
    paper = "a test"

    def setup(self, run: Setup) -> None:
        run.scores(self.drift)

    def drift(self, server: ServerView) -> Tensor:
        return torch.zeros_like(server.vector) if server.version == 3 else server.vector


@pytest.mark.parametrize("methods", [(), (FedBN(),)], ids=["one model", "own models"])
def test_history_has_the_client_score_of_the_best_round_so_far(methods: tuple[Method, ...]) -> None:
    data = validated()
    assert data.partition.validation is not None
    plain = replace(data, partition=replace(data.partition, validation=None))
    watched = run(run_spec(*methods, model=NORMED_MLP, data=data), rounds=8)
    unwatched = run(run_spec(*methods, model=NORMED_MLP, data=plain), rounds=8)
    assert watched.bits == unwatched.bits
    for row, other in zip(watched.rows, unwatched.rows, strict=True):
        assert {key: row[key] for key in other if "seconds" not in key and "busy" not in key} == {
            key: value for key, value in other.items() if "seconds" not in key and "busy" not in key
        }
    best = [float(row["accuracy_validation_best"] or 0) for row in watched.rows]
    assert best == sorted(best) and best[0] == watched.rows[0]["accuracy_validation"]
    assert watched.rows[0]["accuracy_best"] == watched.rows[0]["accuracy"]
    assert {"accuracy_best_worst", "accuracy_best.domain 0"} <= watched.rows[-1].keys()
    assert ("accuracy_global_best" in watched.rows[-1]) == (not methods)


def test_best_round_does_not_change_after_a_worse_round() -> None:
    rows = run(run_spec(Drift(), data=validated(), local=replace(LOCAL, batch=8)), rounds=3).rows
    assert rows[2]["accuracy_validation"] < rows[1]["accuracy_validation"]  # type: ignore[operator]
    assert rows[2]["best_round"] == rows[1]["best_round"] < 3
    assert (
        rows[2]["accuracy_global_best"]
        == rows[1]["accuracy_global_best"]
        != rows[2]["accuracy_global"]
    )


@pytest.mark.parametrize("methods", [(), (FedBN(),)], ids=["one model", "own models"])
def test_best_round_of_a_regression_has_the_lowest_error(methods: tuple[Method, ...]) -> None:
    data = federate(
        Tabular("diabetes"), IID(clients=4, test_fraction=0.2, validation_fraction=0.2), 0
    )
    rows = run(
        run_spec(*methods, model=NORMED_MLP, data=data, local=Local(lr=0.05, batch=8)), rounds=6
    ).rows
    name = "mae" if "mae_validation" in rows[0] else "mse"
    told = [float(row[f"{name}_validation"] or 0) for row in rows]
    best = [float(row[f"{name}_validation_best"] or 0) for row in rows]
    assert best == sorted(best, reverse=True) and best[0] == told[0]
    assert rows[0][f"{name}_best"] == pytest.approx(rows[0][name], rel=1e-6) and rows[0][name] != 1
    if methods:
        return
    for number, row in enumerate(rows, start=1):
        first = int(np.argmin(told[:number]))
        assert (
            row["best_round"] == 1 + first
            and row[f"{name}_global_best"] == rows[first][f"{name}_global"]
        )


@pytest.mark.parametrize("methods", [(), (FedBN(),)], ids=["one model", "own models"])
def test_history_has_validation_accuracy_even_if_clients_have_no_test_samples(
    methods: tuple[Method, ...],
) -> None:
    data = federate(
        Synthetic(samples=120, test_samples=20, classes=5),
        IID(4, test_fraction=0, validation_fraction=0.2),
        0,
    )
    row = run(run_spec(*methods, model=NORMED_MLP, data=data), rounds=2).rows[-1]
    assert (
        row["accuracy"] is None
        and "accuracy_best" not in row
        and row["accuracy_validation"] is not None
    )
    assert methods or row["accuracy_global_best"] is not None


def test_resumed_run_keeps_the_best_validation_scores(tmp_path: Path) -> None:
    study = run_spec(FedBN(), model=NORMED_MLP, data=validated())
    straight = run(study, rounds=6)
    run(study, rounds=6, checkpoint_every=3, folder=str(tmp_path))
    resumed = run(study, rounds=6, resume=str(tmp_path / "checkpoints" / "round-000003"))
    assert resumed.history == straight.history and resumed.bits == straight.bits


def test_best_round_is_the_first_of_equal_ones() -> None:
    best = BestRounds(CSR(np.arange(5), np.array([0, 2, 2, 5])))
    everyone = np.array([0, 2])
    right, wrong = np.ones(5, np.bool_), np.zeros(5, np.bool_)
    assert best.take(everyone, np.array([0.5, 0.5]), right)[1].tolist() == [True] * 5
    validation, hits = best.take(everyone, np.array([0.5, 0.6]), wrong)
    assert validation.tolist() == [0.5, 0.6] and hits.tolist() == [True, True, False, False, False]
    assert best.take(np.array([2]), np.array([0.6]), right[2:])[1].tolist() == [False] * 3
    nothing = np.array([np.nan])
    for hit in (wrong, right):  # without validation samples: the last round
        assert best.take(np.array([0]), nothing, hit[:2])[1].tolist() == hit[:2].tolist()
    assert best.take_shared(4, 0.5, 0.25) == (4, 0.25)
    assert best.take_shared(5, 0.5, 0.75) == (4, 0.25)
    assert best.take_shared(6, 0.75, None) == (6, None)


def test_centralized_model_is_scored_on_test_samples_of_clients() -> None:
    data = pool_clients(data_with_tests())
    assert np.array_equal(
        data.partition.train.rows(0), np.sort(data_with_tests().partition.train.indices)
    )
    result = run(run_spec(Pooled(), data=data), Synchronous(1))
    assert result.rows[-1]["floats_up"] is None and result.rows[-1]["floats_down"] is None
    assert (
        result.coordinator.evaluator.tests.counts.all() and result.rows[-1]["accuracy"] is not None
    )
    with pytest.raises(ValueError, match=r"evaluate\.finetune\.epochs"):
        run(run_spec(Pooled(), data=data), evaluate=Evaluation(finetune=Finetune(1)))


def test_centralized_round_trains_on_as_many_samples_as_a_cohort() -> None:
    common = [
        "data=synthetic",
        "partition=iid",
        "partition.clients=4",
        "method=[centralized]",
        "runtime=inprocess",
    ]
    whole = build([*common, "schedule.cohort=4", "local.epochs=3"]).spec.settings.local
    half = build([*common, "schedule.cohort=2", "local.epochs=4"]).spec.settings.local
    odd = build([*common, "schedule.cohort=2", "local.epochs=1", "local.batch=10"]).spec
    steps = build(
        [*common, "schedule.cohort=2", "local.epochs=null", "local.steps=5"]
    ).spec.settings.local
    assert (whole.epochs, half.epochs, steps.steps) == (3, 2, 10)
    assert odd.settings.local.steps == round(len(odd.data.partition.train.indices) / 20)
    with pytest.raises(RefusedError, match="schedule=synchronous"):
        build([*common, "schedule=buffered"])


def test_centralized_training_with_one_client_equals_fedavg() -> None:
    mixed = equal_clients(clients=1).partition
    ordered = replace(mixed, train=replace(mixed.train, indices=np.sort(mixed.train.indices)))
    alone = run(run_spec(data=replace(equal_clients(clients=1), partition=ordered)), Synchronous(1))
    assert (
        run(run_spec(Pooled(), data=pool_clients(equal_clients(clients=1))), Synchronous(1)).bits
        == alone.bits
    )


def test_score_of_the_worst_domain_needs_at_least_two_domains() -> None:
    for domains in (1, 3):
        source = Synthetic(samples=120, test_samples=20, classes=5, domains=domains)
        row = run(run_spec(data=federate(source, IID(clients=4), SEED)), rounds=1).rows[-1]
        worst = float(row.get("accuracy_worst_domain") or 0)
        assert ("accuracy_worst_domain" in row) == (domains > 1) and worst <= float(
            row["accuracy_global"] or 0
        )


def test_worst_domain_score_is_the_lowest_mean_of_a_domain() -> None:
    evaluator = coordinate(
        run_spec(data=federate(Synthetic(samples=40, domains=3), IID(clients=4), SEED))
    ).evaluator
    columns = evaluator.score_columns[0]
    domains = columns.domains[columns.central]
    hits = np.where(domains == 0, 0.5, np.where(domains == 1, 0.25, 1.0))
    assert columns._worst_domain(hits) == {"accuracy_worst_domain": 0.25}


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("every", 1),
        ("clients", 1),
        ("probe", 0),
        ("probe_rows", 1),
        ("decompose", 0),
        ("decompose_rows", 1),
    ],
)
def test_evaluation_settings_below_their_minimum_are_refused(key: str, least: int) -> None:
    assert getattr(Evaluation(**{key: least}), key) == least  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"evaluate.{key}={least - 1} "):
        Evaluation(**{key: least - 1})  # type: ignore[arg-type]


def test_evaluation_has_equal_scores_with_client_states_on_disk() -> None:
    study = run_spec(FedBN(), model=NORMED_MLP, data=data_with_tests(clients=1))
    kept, on_disk = (run(study, Synchronous(1), state_budget=budget) for budget in (math.inf, 0.0))
    assert "accuracy" in kept.history[-1] and on_disk.rows[-1]["spilled_bytes"]
    assert kept.history == on_disk.history


def test_evaluation_of_a_shared_model_sends_no_client_states() -> None:
    asked: list[int] = []

    class Watched(InProcess):
        def call(self, worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
            if method == "evaluate":
                asked.extend(task.client for task in args[0])
            return super().call(worker, method, *args, returns=returns)

    study = run_spec(data=data_with_tests())
    runtime: Any = Watched(Worker(study))
    run_to_end(coordinate(study, runtime=runtime, rounds=1))
    assert set(asked) == {-1}
