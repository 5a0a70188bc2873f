"""Test how FedPAC weighs the clients' heads, its two phases, and what it refuses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    MLP,
    NORMED_MLP,
    SEED,
    FinishedRun,
    Spy,
    coordinate,
    declare_methods,
    participation_facts,
    run,
    run_spec,
    run_to_end,
    tiny_data,
)
from torch import Tensor, nn

from raysim.api.client_state import ClientState
from raysim.api.context import Batch, Context, Plan, Stage
from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob, PersonalModel
from raysim.api.messages import Job
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.api.setup import Setup
from raysim.data.federated import FederatedData
from raysim.data.partition import CSR, Partition
from raysim.methods import fedpac
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedpac import (
    FedPAC,
    classifier_combination_weights,
    head_steps,
    local_statistics,
)
from raysim.methods.local import LocalTraining
from raysim.simulation.fleet import Ideal
from raysim.simulation.load import Loads
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.client_vector import copy_client_state
from raysim.training.run_spec import build_networks, declare_run
from raysim.training.worker import Worker
from raysim.vectors.layout import Vector, plan_layout

TWO = Local(lr=0.02, momentum=0.5, weight_decay=1e-3, batch=8, epochs=3)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return reproducible normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    assert got.shape == want.shape and torch.allclose(got, want, rtol=tolerance, atol=tolerance), (
        f"{got} is not {want}"
    )


# --- statistics and prototypes ----------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_fedpac_variance_is_never_negative(
    seed: int,
) -> None:
    features, labels = random(6, 4, seed=seed), torch.tensor([0, 1, 1, 2, 2, 2])
    one, ten = (
        local_statistics(features=f, labels=labels, num_classes=3)
        for f in (features, 10 * features)
    )
    assert 0 < one["variance"] == pytest.approx(ten["variance"] / 100, rel=1e-12)
    close(10 * one["weighted_means"], ten["weighted_means"])
    same = features[seed].expand(5, 4)  # nothing varies, and rounding must not make it negative
    assert (
        0
        <= local_statistics(features=same, labels=labels[:1].expand(5), num_classes=3)["variance"]
        < 1e-14
    )


# --- the mixture ------------------------------------------------------------------------------


def quadratic(variances: Tensor, weighted: Tensor, client: int) -> Tensor:
    """Return the matrix P of FedPAC's quadratic program for one client, from its definition.

    variances: [m], the variances V of all m clients.
    weighted: [m, C, D], for each client and class: the mean features of the client's samples of the
    class, multiplied by the fraction of the client's samples that belong to the class.
    """
    difference = (weighted[client] - weighted).flatten(1)
    return torch.diag(variances) + difference @ difference.T


def case(seed: int, clients: int, kind: str = "plain") -> tuple[Tensor, Tensor]:
    """Return random variances V [clients] and features h [clients, 3, 5] for `quadratic`.

    kind: "near", "plain" and "far" give h with a small, medium and large spread. "mixed" gives
    spreads and variances of very different sizes. "twins" gives pairs of clients with equal h, and
    some V are 0.
    """
    draw = np.random.default_rng(seed)
    spread = {"plain": 0.3, "near": 0.01, "far": 30.0, "twins": 0.3, "mixed": 1.0}[kind]
    weighted = torch.from_numpy(5 + spread * draw.standard_normal((clients, 3, 5)))
    variances = torch.from_numpy(draw.uniform(0.05, 1.0, clients))
    if (
        kind == "twins"
    ):  # columns that depend on each other, and clients that know themselves exactly
        weighted[1::2] = weighted[::2][: clients // 2]
        variances[1::3] = 0.0
    if kind == "mixed":
        weighted = 5 + (weighted - 5) * torch.logspace(-4, 2, clients).double()[:, None, None]
        variances = variances * torch.logspace(2, -6, clients).double()
    return variances, weighted


KINDS = ["plain", "near", "far", "twins", "mixed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clients", [1, 2, 5, 20])
@pytest.mark.parametrize("seed", range(3))
def test_fedpac_head_weights_minimise_their_objective_on_the_simplex(
    seed: int, clients: int, kind: str
) -> None:
    variances, weighted = case(seed, clients, kind)
    for client in range(clients):
        P = quadratic(variances, weighted, client)
        a = classifier_combination_weights(
            variances=variances, weighted_means=weighted, client=client, min_weight=0.0
        )
        assert (a >= 0).all() and float(a.sum()) == pytest.approx(1, abs=1e-12)
        value, slope = a @ P @ a, P @ a
        # P a >= a'Pa everywhere, with equality where a > 0: nothing is gained by moving weight. Up
        # to rounding in P.
        scale = float(P.diagonal()[a > 0].max()) * 1e-9
        assert (slope >= value - scale).all()
        assert ((slope - value).abs()[a > 1e-9] <= scale).all()


def test_fedpac_combination_weights_ignore_a_constant_added_to_all_class_means() -> None:
    weighted = torch.randint(-9, 10, (4, 3, 5), generator=torch.Generator().manual_seed(0)).double()
    for client in range(4):
        settings = {"variances": torch.tensor([10.0, 20.0, 40.0, 80.0]).double(), "client": client}
        near = classifier_combination_weights(weighted_means=weighted, **settings)
        far = classifier_combination_weights(weighted_means=weighted + 2.0**40, **settings)
        close(far, near)
        assert (near > 0).sum() > 1


def test_fedpac_client_with_distant_class_means_has_no_weight() -> None:
    weighted = random(3, 2, 4) * 0.01
    weighted[1] += 100
    a = classifier_combination_weights(
        variances=torch.full((3,), 0.1), weighted_means=weighted, client=0
    )
    assert a[1] == 0 and a[0] > 0 and a[2] > 0
    alone = classifier_combination_weights(
        variances=torch.ones(3), weighted_means=weighted, client=1
    )
    assert alone.tolist() == [0, 1, 0]
    for variance in (0.0, 0.3):
        one = classifier_combination_weights(
            variances=torch.tensor([variance]), weighted_means=weighted[:1], client=0
        )
        assert one.tolist() == [1.0]


@pytest.mark.parametrize("variances", [(0.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)], ids=str)
def test_fedpac_client_uses_only_its_own_head_if_its_feature_variance_is_zero(
    variances: tuple[float, ...],
) -> None:
    zero = torch.zeros(4, 2, 3)
    for client in np.flatnonzero(np.array(variances) == 0).tolist():
        a = classifier_combination_weights(
            variances=torch.tensor(variances), weighted_means=zero, client=client
        )
        assert a.tolist() == F.one_hot(torch.tensor(client), 4).tolist()


def test_fedpac_sets_combination_weights_below_min_weight_to_zero() -> None:
    variances = torch.tensor([0.1, 0.1, 0.1, 10.0, 400.0]).double()
    given: dict[str, Any] = {
        "variances": variances,
        "weighted_means": torch.zeros(5, 1, 1),
        "client": 0,
    }
    full, cut = (classifier_combination_weights(**given, min_weight=least) for least in (0.0, 1e-3))
    assert 0 < full[4] < 1e-3 < full[3] and cut[4] == 0
    close(cut[:4], full[:4] / full[:4].sum())
    close(
        classifier_combination_weights(**given, min_weight=0.9), full
    )  # else nothing would be left


def test_fedpac_sets_a_combination_weight_equal_to_min_weight_to_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = torch.tensor([0.75, 0.25]).double()
    monkeypatch.setattr(fedpac, "_simplex_minimum", lambda *arguments: exact)
    settings: dict[str, Any] = {"variances": torch.ones(2), "weighted_means": torch.zeros(2, 1, 1)}
    for least, weights in ((0.25, [1.0, 0.0]), (0.2, [0.75, 0.25])):
        mixture = classifier_combination_weights(**settings, client=0, min_weight=least)
        assert mixture.tolist() == weights


# --- the phases -------------------------------------------------------------------------------


class Watch(Method):
    """A method that stores each job's batches, and the model before each step and at the end."""

    name = "watch"
    paper = "a test"

    def __init__(self) -> None:
        self.batches: list[list[Batch]] = []
        self.seen: list[list[Mapping[str, Tensor]]] = []
        self.jobs: list[LocalJob] = []
        # In which modes hooks of later methods find the model before and after training.
        self.modes: set[bool] = set()

    def begin(self, job: LocalJob) -> None:
        self.jobs.append(job)
        self.modes |= {module.training for module in job.model.modules()}
        self.batches.append([])
        self.seen.append([])

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        self.batches[-1].append(batch)
        self.seen[-1].append(copy.deepcopy(job.model.state_dict()))
        return batch

    def end(self, job: LocalJob) -> None:
        self.modes |= {module.training for module in job.model.modules()}
        self.seen[-1].append(copy.deepcopy(job.model.state_dict()))

    def steps(self, job: int) -> Iterator[tuple[bool, bool]]:
        """Yield, for each step of a job, whether the head moved and whether the extractor did."""
        for before, after in pairwise(self.seen[job]):
            moved = {name for name in before if not torch.equal(before[name], after[name])}
            heads = {name for name in moved if name.startswith("head.")}
            yield bool(heads), bool(moved - heads)


def train(
    worker: Worker,
    client: int = 0,
    turn: int = 0,
    state: ClientState[Tensor] | None = None,
    download: Mapping[str, Tensor] | None = None,
) -> Context:
    """Train one job of a client from the initial model.

    turn: the number of earlier jobs of this client.
    state: the client state before the job; None means the initial state.
    download: what the server sends for the method, by name.
    """
    networks, layout = build_networks(worker.spec)
    initial = Vector(networks, layout, torch.device("cpu"), torch.float32)
    counters = initial.counters[: layout.shared_counters]
    state = state or copy_client_state(initial, {})
    return worker.trainer.train(
        Job(0, client, turn, 0, -1, 1.0), initial.shared, counters, dict(download or {}), state
    )


def prototypes(present: Sequence[bool] = (True, False, True, True, False)) -> dict[str, Tensor]:
    """Return prototypes of some classes, as a server sends them.

    present: for each class, whether it has a prototype.
    """
    return {"fedpac.prototypes": random(5, 12).float(), "fedpac.present": torch.tensor(present)}


@pytest.mark.parametrize(
    ("sizes", "samples", "epochs", "expected"),
    [
        ([8, 8, 4] * 3, 20, 1, 3),
        ([8, 8, 4] * 3, 20, 2, 6),
        ([8, 8, 1] * 2, 17, 1, 3),
        ([8, 8] * 3, 17, 1, 2),  # the last sample of an epoch is dropped
        ([5] * 2, 5, 1, 1),
        ([1] * 4, 1, 1, 1),
        ([8] * 6, 8000, 1, 3),  # a budget of steps: half of them
        ([8] * 9, 8000, 2, 6),
        ([8] * 40, 20, 1, 3),
        ([8, 2, 8, 8, 4], 20, 1, 2),  # a first epoch of some samples only: at most half
        ([8], 20, 1, 0),
    ],
)
def test_fedpac_trains_the_head_for_head_epochs_and_then_the_extractor(
    sizes: list[int], samples: int, epochs: int, expected: int
) -> None:
    assert head_steps(sizes, samples, epochs) == expected
    plan = Plan(np.zeros(sum(sizes), np.int64), tuple(sizes), samples)
    names = [stage.name for (stage,) in FedPAC(head_epochs=epochs)._stages(plan)]
    assert names == ["fedpac.head"] * expected + ["fedpac.extractor"] * (len(sizes) - expected)


@pytest.mark.parametrize("others", [[], [FedBSS(warmup_rounds=0)]], ids=["alone", "with FedBSS"])
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_fedpac_trains_only_the_head_first_and_only_the_extractor_later(
    first: bool, epochs: int, others: list[Method]
) -> None:
    watch, method = Watch(), FedPAC(head_epochs=epochs)
    methods = [method, *others] if first else [*others, method]
    ended = run(run_spec(*methods, watch, model=NORMED_MLP, local=TWO), rounds=3)
    assert not ended.failures and watch.modes == {True}
    for number, job in enumerate(watch.jobs):
        many = head_steps(job.plan.sizes, job.samples, epochs)
        if not others:
            assert many * 3 == job.plan.steps * epochs, "so many of three epochs"
        phases = [(True, False)] * many + [(False, True)] * (job.plan.steps - many)
        assert list(watch.steps(number)) == phases


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_fedpac_phases_have_separate_optimizers(lam: float) -> None:
    watch = Watch()
    study = run_spec(FedPAC(lam, head_lr_factor=5.0), watch, model=NORMED_MLP, local=TWO)
    ctx = train(Worker(study), client=3, download=prototypes())
    model: Any = build_networks(study)[0]["model"]
    inputs, labels = next(ctx.data())
    local = local_statistics(
        features=model.eval().features(inputs).detach(), labels=labels, num_classes=5
    )
    known = torch.tensor([True, False, True, True, False])
    assert (local["class_counts"] > 0)[~known].any(), "a class falls back on the client's own mean"
    targets = torch.where(known[:, None], random(5, 12), local["class_means"]).float()
    many = len(watch.batches[0]) // 3
    head = torch.optim.SGD(model.head.parameters(), 0.1, 0.5, weight_decay=1e-3)
    for batch in watch.batches[0][:many]:
        head.zero_grad()
        F.cross_entropy(model(batch.inputs), batch.targets).backward()
        head.step()
    model.train()
    body = torch.optim.SGD(model.extractor.parameters(), 0.02, 0.5, weight_decay=1e-3)
    for batch in watch.batches[0][many:]:
        body.zero_grad()
        z = model.features(batch.inputs)
        loss = F.cross_entropy(model.head(z), batch.targets)
        (loss + lam * (z - targets[batch.targets]).square().mean()).backward()
        body.step()
    for name, value in ctx.model.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-4, atol=1e-5), name
    assert (
        int(ctx.model.state_dict()["extractor.2.num_batches_tracked"])
        == len(watch.batches[0]) - many
    )


def test_fedpac_job_starts_from_the_received_head_and_uploads_the_trained_head() -> None:
    watch = Watch()
    study = run_spec(FedPAC(), watch, model=MLP, local=TWO)
    worker = Worker(study)
    sent = random(5 * 12 + 5).float()
    stale: ClientState[Tensor] = ClientState(torch.zeros(65), torch.zeros(0, dtype=torch.int64), {})
    ctx = train(worker, download={"fedpac.head": sent}, state=stale)
    first, last = watch.seen[0][0], watch.seen[0][-1]
    assert torch.equal(torch.cat([first["head.weight"].flatten(), first["head.bias"]]), sent)
    trained = torch.cat([last["head.weight"].flatten(), last["head.bias"]])
    assert torch.equal(ctx.upload["fedpac.head"], trained) and not torch.equal(trained, sent)
    assert torch.equal(worker.vector.personal, trained)


def test_fedpac_alignment_loss_of_a_mixup_sample_is_a_mean_over_its_two_labels() -> None:
    method = FedPAC(2.0)
    features = random(4, 12, seed=3).float()
    labels, partners = torch.tensor([0, 1, 2, 3]), torch.tensor([3, 0, 4, 1])
    sent = prototypes([True] * 5)
    job: Any = SimpleNamespace(
        stage=Stage("fedpac.extractor"),
        received={name.removeprefix("fedpac."): value for name, value in sent.items()},
        scratch={"prototypes": torch.zeros(5, 12), "present": torch.zeros(5, dtype=torch.bool)},
    )
    inputs, zero = torch.zeros(4), torch.zeros(())

    def term(batch: Batch) -> Tensor:
        out: Any = SimpleNamespace(features=features, batch=batch)
        return method.loss(job, out, zero)

    pair = labels, partners, torch.tensor(0.3, dtype=torch.float64)
    mixed = Batch(inputs, torch.zeros(4, 5), inputs, labels, pair)
    one, two = (term(Batch(inputs, y, inputs, y)) for y in (labels, partners))
    close(term(mixed), 0.3 * one + 0.7 * two, 1e-6)
    assert term(mixed).dtype == torch.float32
    job.stage = Stage("fedpac.head")
    assert term(mixed) is zero


def test_fedpac_aligns_nothing_in_the_first_round() -> None:
    one, other, later, unaligned = (
        run(run_spec(FedPAC(lam), local=TWO), fleet=Ideal(), rounds=rounds).finished.model_sha256
        for lam, rounds in ((1.0, 1), (0.0, 1), (1.0, 2), (0.0, 2))
    )
    assert one == other and later != unaligned


# --- the heads --------------------------------------------------------------------------------


class Alternation(Method):
    """A method that trains in FedPAC's two phases, and changes nothing else.

    In the first of a job's three epochs, it trains the client's private head. In the other two, it
    trains the extractor.
    """

    name = "alternation"
    paper = "a test"

    def setup(self, run: Setup) -> None:
        run.private_parameters(["model.head.weight", "model.head.bias"])
        run.stages(self._stages)

    def _stages(self, plan: Plan) -> Sequence[Sequence[Stage]]:
        epoch = plan.steps // 3
        head, body = Stage("head", ("model.head",), rate=10.0), Stage("body", ("model.extractor",))
        return [[head]] * epoch + [[body]] * (2 * epoch)

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        job.model.extractor.train(job.step >= job.plan.steps // 3)
        return batch


@pytest.mark.parametrize("model", [MLP, NORMED_MLP], ids=["mlp", "with BatchNorm"])
@pytest.mark.parametrize(
    "schedule", [Synchronous(4), Buffered(concurrency=4, size=1)], ids=["rounds", "one by one"]
)
def test_fedpac_equals_alternating_training_if_alignment_and_mixing_are_both_off(
    schedule: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identity(variances: Tensor, points: Tensor, client: int, min_weight: float) -> Tensor:
        return F.one_hot(torch.tensor(client), len(variances)).double()

    def finished(method: Method) -> tuple[FinishedRun, dict[int, Tensor]]:
        watch = Watch()
        ended = run(run_spec(method, watch, model=model, local=TWO), schedule, Ideal(), rounds=6)
        heads = [copy.deepcopy(seen[-1]["head.weight"]) for seen in watch.seen]
        return ended, {job.client: head for job, head in zip(watch.jobs, heads, strict=True)}

    mixed, _ = finished(FedPAC(0.0))
    plain, heads = finished(Alternation())
    monkeypatch.setattr(fedpac, "_mixture", identity)
    same, own = finished(FedPAC(0.0))
    assert same.finished.model_sha256 == plain.finished.model_sha256
    assert (same.finished.model_sha256 != mixed.finished.model_sha256) == isinstance(
        schedule, Synchronous
    )
    assert [row["train_loss"] for row in same.rows] == [row["train_loss"] for row in plain.rows]
    assert own.keys() == heads.keys() and all(
        torch.equal(own[client], heads[client]) for client in own
    )


def test_fedpac_uses_only_the_later_of_two_buffered_updates_of_a_client() -> None:
    study = run_spec(FedPAC(), local=TWO)
    worker = Worker(study)
    updates = []
    for number, client in enumerate([1, 4, 1]):
        ctx = train(worker, client=client, turn=number)
        extras = {name: value.numpy() for name, value in ctx.upload.items()}
        updates.append(SimpleNamespace(client=client, extras=extras))

    def sent_after(arrived: list[Any]) -> dict[str, np.ndarray]:
        server, count = coordinate(study).server, len(arrived)
        aggregation = Aggregation(arrived, [], [1.0] * count, [0] * count, {}, method="fedpac")
        FedPAC().absorb(aggregation, ServerView(server, "fedpac"))
        sent = {str(client): server.sent_to(client)["fedpac.head"] for client in (1, 4)}
        return sent | {"prototypes": server.state["fedpac.prototypes"].numpy()}

    twice, once = sent_after(updates), sent_after([updates[2], updates[1]])
    assert all(np.array_equal(twice[key], once[key]) for key in twice)


def test_fedpac_personal_model_has_the_head_from_the_server_if_one_was_sent() -> None:
    study = run_spec(FedPAC(), local=TWO)
    worker = Worker(study)
    before, head = worker.vector.data.clone(), random(65).float()
    for sent in ({}, {"fedpac.head": head}):
        data = functools.partial(worker.trainer.client_samples, 0)
        client = PersonalModel(0, study.task, worker.vector, {}, sent, data, bool(sent), "fedpac")
        study.methods[0].personalise(client)
        assert torch.equal(worker.vector.shared, before[:-65])
        assert torch.equal(worker.vector.personal, head if sent else before[-65:])


# --- classes that nobody has ------------------------------------------------------------------


def sorted_data() -> FederatedData:
    """Return four clients with the classes {0}, {0, 1}, {2, 3} and {4}."""
    data = tiny_data()
    rows = data.partition.train.indices
    labels = data.open().labels[rows]
    parts = [rows[np.isin(labels, own)] for own in ([0], [0, 1], [2, 3], [4])]
    parts[0], parts[1] = parts[0][::2], np.setdiff1d(parts[1], parts[0][::2])
    train = CSR(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))
    return replace(
        data, partition=Partition(train, CSR(np.empty(0, np.int64), np.zeros(5, np.int64)))
    )


def test_fedpac_class_without_participants_has_no_prototype() -> None:
    study = run_spec(FedPAC(), local=TWO, data=sorted_data())
    spy = Spy(study)
    ended = run_to_end(coordinate(study, Synchronous(1), Ideal(), spy, rounds=8))
    assert not ended.failures and all(np.isfinite(row["train_loss"]) for row in ended.rows)  # type: ignore[arg-type]
    held = [{0}, {0, 1}, {2, 3}, {4}]
    cohorts = [job.client for job, _ in spy.sent]
    assert set(cohorts) == set(range(4))
    assert "fedpac.prototypes" not in spy.sent[0][1].extras
    for earlier, (_, published) in zip(cohorts, spy.sent[1:], strict=False):
        present = published.extras["fedpac.present"]
        assert set(np.flatnonzero(present)) == held[earlier], (
            "prototypes are the last participants'"
        )
        assert not published.extras["fedpac.prototypes"][~present].any()


# --- costs and refusals -----------------------------------------------------------------------


def test_fedpac_costs_two_more_forward_passes_but_fewer_backward_passes() -> None:
    spec = run_spec(FedPAC(), local=TWO)
    cost = FedPAC().cost(participation_facts(spec, 30, 90))
    assert cost == pytest.approx(2 * 30 / 3 - 30 * 2 / 3)
    # Of 45 samples the head has two thirds, not 60.
    short = FedPAC(head_epochs=2).cost(participation_facts(spec, 30, 45))
    assert short == pytest.approx(2 * 30 / 3 - 30 * 2 / 3)


def test_fedpac_traffic_includes_heads_and_class_prototypes() -> None:
    spec = run_spec(FedPAC(), local=TWO)
    declarations, counts = declare_run(spec), spec.data.partition.train.counts
    loads, shared = Loads(spec, declarations, counts), declarations.layout.shared
    extractor = MLP.build((1, 8, 8), 5, SEED).extractor
    assert shared == sum(parameter.numel() for parameter in extractor.parameters())

    first = loads(0, version=0, earlier=0, accepted=0)
    assert (first.up - shared, first.down - shared) == (65 + 2 * 5 * 12 + 5 + 1, 0)
    second = loads(0, version=1, earlier=0, accepted=0)
    assert second.down - shared == 5 * 12 + 5
    third = loads(0, version=1, earlier=2, accepted=1)
    assert third.down - shared == 5 * 12 + 5 + 65


@pytest.mark.parametrize("head", [nn.Sequential(nn.Linear(12, 5)), nn.Conv2d(1, 5, 1)], ids=str)
def test_fedpac_refuses_head_that_is_not_linear(head: nn.Module) -> None:
    model = MLP.build((1, 8, 8), 5, 0)
    model.head = head  # type: ignore[assignment]
    networks = {"model": model}
    with pytest.raises(ValueError, match=rf"^model: .*{type(head).__name__}"):
        declare_methods([FedPAC()], networks, plan_layout(networks), local=TWO)


@pytest.mark.parametrize("key", ["epochs", "steps"])
def test_fedpac_is_refused_if_no_local_epoch_or_step_trains_the_extractor(key: str) -> None:
    def declare(budget: int) -> None:
        local: Any = {"epochs": None, key: budget}
        declare_run(run_spec(FedPAC(head_epochs=2), local=Local(**local)))

    for budget in (1, 2):
        with pytest.raises(ValueError, match=rf"^local\.{key}\b"):
            declare(budget)
    declare(3)


@pytest.mark.parametrize(
    "settings",
    [{"lam": -1}, {"head_epochs": 0}, {"head_lr_factor": 0}, {"min_weight": 1.5}],
    ids=str,
)
def test_fedpac_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"^method\.fedpac\.{key}="):
        FedPAC(**settings)


def test_fedpac_cannot_be_combined_with_the_method_named_local() -> None:
    with pytest.raises(ValueError, match=r"'fedpac'.*'local'"):
        declare_run(run_spec(LocalTraining(), FedPAC(), local=TWO))


@pytest.mark.parametrize("seed", [2235, 2447, 3417])
def test_fedpac_weights_minimise_their_objective_at_extreme_variances(
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    variances = torch.from_numpy(draw.permutation(np.logspace(-6, 2, 20)))
    weighted = torch.from_numpy(
        draw.standard_normal((20, 4)) * draw.permutation(np.logspace(-2, 2, 20))[:, None]
    )
    client = int(variances.argmax())
    a = classifier_combination_weights(
        variances=variances, weighted_means=weighted[:, None], client=client, min_weight=0.0
    )
    slope = quadratic(variances, weighted[:, None], client) @ a
    assert float(slope.min()) == pytest.approx(float(a @ slope), rel=1e-3)
