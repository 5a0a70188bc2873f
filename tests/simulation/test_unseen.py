"""Test unseen clients: they are never trained, and scored in separate columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny_runs import (
    LOCAL,
    NORMED_MLP,
    SEED,
    FinishedRun,
    coordinate,
    run,
    run_spec,
    run_to_end,
    several_workers,
)

import raysim
from raysim.api.declarations import Evaluation, Finetune
from raysim.api.messages import ScoringTask
from raysim.api.method import Method
from raysim.data.federated import FederatedData, federate, hold_out_clients, pool_clients
from raysim.data.partition import CSR, IID, Partition
from raysim.data.sources import Synthetic
from raysim.experiment.build import build
from raysim.methods.ditto import Ditto
from raysim.methods.fedbn import FedBN
from raysim.methods.feddyn import FedDyn
from raysim.methods.fedpac import FedPAC
from raysim.methods.fedrep import FedRep
from raysim.methods.partialfed import PartialFed
from raysim.methods.pfedavg import PFedAvg
from raysim.methods.scaffold import Scaffold
from raysim.primitives.errors import RefusedError
from raysim.simulation.schedule import Buffered, Immediate, Schedule, Synchronous
from raysim.training.run_spec import RunSpec

CLIENTS = 8
PERSONAL = [FedBN, lambda: FedRep("joint"), PFedAvg, Ditto, FedPAC, PartialFed]
COMMON = [
    "data=synthetic",
    "partition=iid",
    "partition.clients=10",
    "schedule.cohort=4",
    "runtime=inprocess",
]
COMMON += ["tracking=none", "rounds=2", "model=mlp"]


def whole(validation: float = 0.0) -> FederatedData:
    """Return the data of all clients, seen and unseen, each with its own test samples.

    validation: the share of each client's samples that are validation samples.
    """
    source = Synthetic(samples=240, test_samples=20, classes=5)
    return federate(
        source, IID(clients=CLIENTS, test_fraction=0.25, validation_fraction=validation), SEED
    )


def study(*methods: Method, share: float = 0.25, validation: float = 0.0, **others: Any) -> RunSpec:
    """Return a run in which some clients are unseen.

    share: the fraction of clients that are unseen. By default two clients are unseen.
    validation: the share of each client's samples that are validation samples.
    others: further arguments of `run_spec`.
    """
    data = hold_out_clients(whole(validation), share, SEED)
    return run_spec(*methods, model=NORMED_MLP, data=data, **others)


def unseen_of(finished_run: FinishedRun | RunSpec) -> list[int]:
    spec = finished_run if isinstance(finished_run, RunSpec) else finished_run.coordinator.spec
    return spec.data.partition.unseen.tolist()  # type: ignore[union-attr]


def scores_by_hand(finished_run: FinishedRun, clients: list[int]) -> list[float]:
    """Return the test scores of these clients' final models, each loaded separately."""
    coordinator = finished_run.coordinator
    worker: Any = coordinator.runtime.members[0]  # type: ignore[attr-defined]
    server, private = coordinator.server, coordinator.client_states
    scores = []
    for client in clients:
        rows = coordinator.spec.data.partition.test.rows(client)
        own = client if coordinator.evaluator.personal else -1
        task = ScoringTask(
            own, rows, private.committed_job(client), server.sent_to(client) if own >= 0 else {}
        )
        labels, outputs = worker.predictions(task, server.published(), private.state(client))
        scores.append(float((outputs.argmax(1) == labels).mean()))
    return scores


# --- who they are ---------------------------------------------------------------------------------
def test_unseen_clients_depend_on_the_seed() -> None:
    one, same, other = (
        hold_out_clients(whole(), 0.25, seed).partition.unseen for seed in (1, 1, 2)
    )
    assert one is not None and same is not None and other is not None
    assert len(one) == 2 and one.tolist() == same.tolist() != other.tolist()


def test_unseen_clients_have_no_training_and_validation_samples() -> None:
    before, after = whole(0.2).partition, hold_out_clients(whole(0.2), 0.25, SEED).partition
    for client in range(CLIENTS):
        is_unseen = client in after.unseen  # type: ignore[operator]
        assert after.all_train.rows(client).tolist() == before.train.rows(client).tolist()
        assert after.train.rows(client).tolist() == (
            [] if is_unseen else before.train.rows(client).tolist()
        )
        assert after.test.rows(client).tolist() == before.test.rows(client).tolist()
        assert after.validation is not None and before.validation is not None
        kept = [] if is_unseen else before.validation.rows(client).tolist()
        assert after.validation.rows(client).tolist() == kept


@pytest.mark.parametrize("share", [0.01, 0.99, 0.05])
def test_unseen_share_that_selects_no_or_all_clients_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"^evaluate\.unseen="):
        hold_out_clients(whole(), share, SEED)


@pytest.mark.parametrize(
    "word", ["evaluate.unseen=1", "evaluate.unseen=-0.1", "evaluate.unseen=many"]
)
def test_invalid_value_of_setting_evaluate_unseen_is_refused(word: str) -> None:
    with pytest.raises(RefusedError, match=r"evaluate\.unseen"):
        build([*COMMON, word])


def test_unseen_clients_without_test_samples_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"^evaluate\.unseen=0\.2"):
        build([*COMMON, "evaluate.unseen=0.2", "partition.test_fraction=0"])


def test_unseen_clients_are_refused_if_clients_share_samples() -> None:
    data = whole()
    everything = np.tile(data.partition.train.indices, CLIENTS)
    train = CSR(everything, np.arange(CLIENTS + 1) * len(data.partition.train.indices))
    with pytest.raises(ValueError, match=r"^evaluate\.unseen=0\.25: clients share samples"):
        hold_out_clients(replace(data, partition=Partition(train, data.partition.test)), 0.25, SEED)


def test_cohort_larger_than_the_number_of_trained_clients_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"schedule\.cohort=4"):
        build([*COMMON, "evaluate.unseen=0.8"])


# --- what they score ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "schedule", [Synchronous(4), Buffered(concurrency=4, size=2), Immediate(3)]
)
def test_unseen_clients_are_scored_and_never_trained(schedule: Schedule) -> None:
    finished_run = run(study(), schedule)
    unseen = unseen_of(finished_run)
    assert not {*unseen} & {*finished_run.participations}
    scores, row = scores_by_hand(finished_run, unseen), finished_run.rows[-1]
    assert row["accuracy_unseen"] == pytest.approx(np.mean(scores))
    assert row["accuracy_unseen_worst"] == min(scores)
    others = [client for client in range(CLIENTS) if client not in unseen]
    assert row["accuracy"] == pytest.approx(np.mean(scores_by_hand(finished_run, others)))


@pytest.mark.parametrize("make", PERSONAL)
def test_unseen_clients_are_scored_with_initial_personal_models(make: Any) -> None:
    finished_run = run(study(make(), local=replace(LOCAL, epochs=2)), Synchronous(4))
    assert not finished_run.failures
    unseen = unseen_of(finished_run)
    assert not {*unseen} & {*finished_run.coordinator.client_states.committed_jobs}
    scores = scores_by_hand(finished_run, unseen)
    assert finished_run.rows[-1]["accuracy_unseen"] == pytest.approx(np.mean(scores))


def test_unseen_client_is_scored_with_the_initial_head() -> None:
    finished_run = run(study(FedRep("joint")), Synchronous(4))
    coordinator = finished_run.coordinator
    worker: Any = coordinator.runtime.members[0]  # type: ignore[attr-defined]
    task = ScoringTask(unseen_of(finished_run)[0], np.empty(0, np.int64))
    own = worker.scored_tensors(task, coordinator.server.published(), None)
    start = coordinator.initial.named(coordinator.initial.data, coordinator.initial.counters)
    assert torch.equal(own["model.head.weight"], start["model.head.weight"])
    assert not torch.equal(own["model.extractor.1.weight"], start["model.extractor.1.weight"])


def test_history_has_all_columns_of_scores_for_unseen_clients() -> None:
    evaluate = Evaluation(finetune=Finetune(1), common=True)
    row = run(study(PFedAvg(), share=0.25), evaluate=evaluate).rows[-1]
    for suffix in ("", "_worst", "_shared", "_finetuned", "_common"):
        assert row[f"accuracy_unseen{suffix}"] is not None, suffix


def test_finetuning_uses_samples_of_unseen_clients() -> None:
    evaluate = Evaluation(finetune=Finetune(30))
    local = replace(run_spec().settings.local, lr=0.5)
    row = run(study(local=local), rounds=1, evaluate=evaluate).rows[-1]
    assert row["accuracy_unseen_finetuned"] > row["accuracy_unseen"]  # type: ignore[operator]


def test_number_of_unseen_clients_that_are_scored_can_be_limited() -> None:
    finished_run = run(study(share=0.5), evaluate=Evaluation(clients=2))
    scores = {round(score, 9) for score in scores_by_hand(finished_run, unseen_of(finished_run))}
    pairs = {round((a + b) / 2, 6) for a in scores for b in scores}
    assert round(float(finished_run.rows[-1]["accuracy_unseen"] or 0), 6) in pairs


def test_best_rounds_ignore_unseen_clients() -> None:
    finished_run = run(study(FedBN(), validation=0.2), rounds=4)
    assert (
        finished_run.rows[-1]["accuracy_best"] is not None
        and finished_run.rows[-1]["accuracy_validation"] is not None
    )
    best = finished_run.coordinator.evaluator.best
    assert best is not None
    assert np.isinf(best.state()["validation"][unseen_of(finished_run)]).all()


def test_centralized_training_leaves_out_samples_of_unseen_clients() -> None:
    data = pool_clients(hold_out_clients(whole(), 0.25, SEED))
    trained = {*data.partition.train.indices.tolist()}
    rows = [
        whole().partition.train.rows(client).tolist() for client in data.partition.unseen.tolist()
    ]  # type: ignore[union-attr]
    assert not trained & {row for own in rows for row in own}
    finished_run = build([*COMMON, "method=centralized", "evaluate.unseen=0.2"])
    ended = run_to_end(coordinate(finished_run.spec, finished_run.schedule, finished_run.fleet))
    assert ended.rows[-1]["accuracy_unseen"] is not None


@pytest.mark.parametrize("method", [Scaffold, lambda: FedDyn(0.1)])
def test_methods_see_a_population_without_the_unseen_clients(method: Any) -> None:
    finished_run = run(study(method()))
    assert finished_run.coordinator.server.population == CLIENTS - 2
    # The same clients without the unseen ones are the same federation.
    data = finished_run.coordinator.spec.data
    alone = replace(data, partition=replace(data.partition, unseen=None, with_unseen=None))
    assert run(run_spec(method(), model=NORMED_MLP, data=alone)).bits != finished_run.bits


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (
            ["method=fedbr", "method.fedbr.means_per_client=4", "method.fedbr.pseudo_batch=30"],
            "pseudo_batch",
        ),
        (["method=fedmix", "method.fedmix.means=4", "local.batch=30"], "method.fedmix.means"),
    ],
)
def test_batch_of_sample_means_is_refused_if_too_many_clients_are_unseen(
    words: list[str], key: str
) -> None:
    words = [*COMMON, *words]
    build(words)
    with pytest.raises(RefusedError, match=key):
        build([*words, "evaluate.unseen=0.5"])


# --- the same bits --------------------------------------------------------------------------------
@pytest.mark.parametrize("methods", [[], [FedBN()], [PFedAvg()]])
def test_scores_of_unseen_clients_do_not_depend_on_number_of_workers(methods: list[Method]) -> None:
    spec = study(*methods)
    one = run(spec)
    three = run_to_end(coordinate(spec, runtime=several_workers(spec, 3)))
    assert one.history == three.history and one.bits == three.bits


@pytest.mark.parametrize("schedule", [Synchronous(4), Buffered(concurrency=4, size=2)])
def test_unseen_clients_are_the_same_after_resume(schedule: Schedule, tmp_path: Path) -> None:
    spec = study(FedBN())
    straight = run(spec, schedule, rounds=6)
    run(spec, schedule, rounds=6, checkpoint_every=3, folder=str(tmp_path))
    resumed = run(spec, schedule, rounds=6, resume=str(tmp_path / "checkpoints" / "round-000003"))
    assert resumed.history == straight.history and resumed.bits == straight.bits


# --- from the command line ------------------------------------------------------------------------
def test_summary_and_table_of_clients_include_unseen_clients(tmp_path: Path) -> None:
    words = [*COMMON, "evaluate.unseen=0.3", f"out={tmp_path / 'run'}"]
    result = raysim.run(words, quiet=True)
    assert result.summary["accuracy_unseen"] == result.rows[-1]["accuracy_unseen"]
    assert result.summary["split"]["unseen_clients"] == 3
    clients = result.clients
    assert clients["unseen"].sum() == 3 and clients["samples"].min() > 0
    assert clients["accuracy"][clients["unseen"]].mean() == pytest.approx(
        result.summary["accuracy_unseen"]
    )
    assert clients["accuracy"][~clients["unseen"]].mean() == pytest.approx(
        result.summary["accuracy"]
    )
    assert {*pq.read_table(tmp_path / "run" / "jobs.parquet")["client"].to_pylist()} <= {
        *clients.index[~clients["unseen"]]
    }


def test_resume_is_refused_if_the_share_of_unseen_clients_has_changed(tmp_path: Path) -> None:
    words = [*COMMON, "evaluate.unseen=0.3", f"out={tmp_path / 'run'}"]
    raysim.run(words, quiet=True)
    other = [*COMMON, "evaluate.unseen=0.2", f"out={tmp_path / 'run'}", "resume=latest"]
    with pytest.raises(RefusedError, match=r"^evaluate\.unseen=0\.2"):
        raysim.run(other, quiet=True)
