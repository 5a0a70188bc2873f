"""FedBR's pseudo-data from every source, its two steps, and what it refuses; a step's arithmetic is in the trace."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tiny_runs import (
    BUFFER,
    NORMED,
    NOTHING,
    ROUNDS,
    Ran,
    Spy,
    coordinate,
    ran,
    run,
    run_spec,
    setup,
    several,
    taking_part,
    tiny,
)
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Contribution, Outputs
from raysim.api.declarations import Local, Task
from raysim.api.hooked_method import HookedMethod
from raysim.api.messages import Job
from raysim.data.partition import CSR
from raysim.data.sources import Source, Synthetic
from raysim.experiment.instantiate import build
from raysim.methods import fedbr
from raysim.methods.fedbr import PROJECTOR, PSEUDO, FedBR, rows_by_samples
from raysim.methods.mixup import Mixup
from raysim.primitives.errors import Refused
from raysim.primitives.streams import stream
from raysim.simulation.schedule import Synchronous
from raysim.training.host import Host
from raysim.vectors.layout import Vector

TASK = Task((1, 8, 8), 5, 6)
LOCAL = Local(lr=0.05, momentum=0.9, batch=8, epochs=2)
PIXELS = 64
PROXY = Synthetic(samples=40, test_samples=20, classes=7, seed=9, mean=[0.2], std=[0.6])


def small(**settings: Any) -> FedBR:
    return FedBR(**{"projection": "code", "pseudo_batch": 4, "samples_per_mean": 3} | settings)


def mixture(cls: type[FedBR] = FedBR, **settings: Any) -> FedBR:
    return cls(
        **{"projection": "code", "pseudo_batch": 4, "samples_per_mean": 3, "pseudo": "mixture", "proxy": PROXY}
        | settings
    )


class Watch(HookedMethod):
    """Keeps the context of every job and the pseudo-data that it started with."""

    name = "watch"
    paper = "a test"

    def __init__(self) -> None:
        self.jobs: list[Context] = []
        self.pseudo: list[Tensor] = []

    def receive(self, ctx: Context) -> None:
        self.jobs.append(ctx)
        self.pseudo.append((ctx.kept.get(PSEUDO) if PSEUDO in ctx.kept else ctx.download[PSEUDO]).clone())

    def by_version(self) -> dict[int, list[Tensor]]:
        """The pseudo-data of all jobs of a version."""
        found: dict[int, list[Tensor]] = {}
        for ctx, pseudo in zip(self.jobs, self.pseudo, strict=True):
            found.setdefault(ctx.version, []).append(pseudo)
        return found


def watched(method: FedBR, schedule: Any = ROUNDS, **settings: Any) -> tuple[Watch, Ran, Spy]:
    watch = Watch()
    study = run_spec(method, watch, local=LOCAL)
    spy = Spy(study)
    return watch, ran(coordinate(study, schedule, runtime=spy, **settings)), spy


def on_hosts(method: FedBR, count: int) -> Watch:
    """Three rounds on so many hosts."""
    watch = Watch()
    study = run_spec(method, watch, local=LOCAL)
    assert not ran(coordinate(study, runtime=several(study, count), rounds=3)).failures
    assert set(watch.by_version()) == {0, 1, 2}
    return watch


# --- where pseudo-data come from ----------------------------------------------------------------------------------

KINDS: dict[str, Callable[..., FedBR]] = {"rsm": small, "mixture": mixture}


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_once_they_are_the_same_tensor_in_all_rounds_and_on_all_hosts(kind: str, hosts: int) -> None:
    watch = on_hosts(KINDS[kind](pseudo_refresh="once"), hosts)
    assert all(torch.equal(pseudo, watch.pseudo[0]) for pseudo in watch.pseudo)
    assert watch.pseudo[0].shape == (4, 1, 8, 8) and len(watch.pseudo[0].unique(dim=0)) == 4


@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("kind", [*KINDS, "fresh"])
def test_drawn_every_round_they_are_new_in_each_and_the_same_for_all_its_clients(kind: str, hosts: int) -> None:
    versions = on_hosts(small(fresh=True) if kind == "fresh" else KINDS[kind](), hosts).by_version()
    for pseudo in versions.values():
        assert len(pseudo) == 4 and all(torch.equal(each, pseudo[0]) for each in pseudo)
    assert len({pseudo[0].numpy().tobytes() for pseudo in versions.values()}) == 3


def test_rows_of_a_round_are_different_means_of_the_pool() -> None:
    watch, found, _ = watched(small(means_per_client=2), rounds=3)
    pool = found.coordinator.server.state["fedbr.pool"]
    assert pool.shape == (12, 1, 8, 8)
    for pseudo in watch.pseudo:
        places = [(pool == row).flatten(1).all(dim=1).nonzero().item() for row in pseudo]
        assert len(set(places)) == 4, "without replacement"


def normalised(source: Source, rows: Any) -> Tensor:
    """Images of a source as its own constants make them."""
    assert source.mean and source.std
    images = torch.from_numpy(source.build().inputs[rows].copy()).float() / 255
    return (images - source.mean[0]) / source.std[0]


def test_proxy_means_are_of_training_images_in_the_proxys_own_normalisation() -> None:
    watch, _, _ = watched(mixture(samples_per_mean=1, pseudo_batch=30), rounds=2)
    images = normalised(PROXY, slice(0, 40))
    for pseudo in watch.pseudo:
        apart = (pseudo.unsqueeze(1) - images).flatten(2).abs().amax(dim=2)
        assert apart.min(dim=1).values.max() < 1e-5
    assert PROXY.mean != list(tiny().pipeline.mean or ()), "the data's constants would not do"


def test_proxy_means_are_means_of_so_many_images() -> None:
    server: Any = SimpleNamespace(stream=lambda purpose: stream(0, purpose, 0), task=TASK)
    wide, narrow = (mixture(samples_per_mean=count, pseudo_batch=64)._drawn(server) for count in (100, 1))
    centre = normalised(PROXY, slice(0, 40)).mean(dim=0)
    assert (wide - centre).abs().mean() < 0.2 * (narrow - centre).abs().mean()


def test_without_normalisation_a_proxy_is_only_scaled() -> None:
    server: Any = SimpleNamespace(stream=lambda purpose: stream(0, purpose, 0), task=TASK)
    means = mixture(proxy=Synthetic(samples=40, classes=7))._drawn(server)
    assert means.min() >= 0 and means.max() <= 1 and means.dtype == torch.float32


def test_fresh_means_of_single_samples_are_samples_of_the_clients() -> None:
    watch, _, _ = watched(small(fresh=True, samples_per_mean=1, pseudo_batch=20), rounds=2)
    trainer = watch.jobs[0].trainer
    inputs, _ = trainer.gather(trainer.partition.indices)
    for pseudo in watch.pseudo:
        assert all((inputs == row).flatten(1).all(dim=1).any() for row in pseudo)


# --- what they cost -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", ["round", "once"])
@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_mixture_uploads_no_data_and_its_means_are_counted_whenever_they_are_new(schedule: Any, refresh: Any) -> None:
    _, found, spy = watched(mixture(pseudo_refresh=refresh), schedule, rounds=5)
    shared, jobs = found.coordinator.layout.shared, found.coordinator.planner.dispatched
    clients = len(found.participations)
    assert not any(spy.contributed) and clients < jobs
    assert found.rows[-1]["floats_up"] == (jobs - len(found.coordinator.planner.running)) * shared
    times = jobs if refresh == "round" else clients
    assert found.rows[-1]["floats_down"] == jobs * shared + times * 4 * PIXELS


def test_fresh_means_upload_nothing_and_are_counted_for_every_client() -> None:
    _, found, spy = watched(small(fresh=True), rounds=3)
    shared, jobs = found.coordinator.layout.shared, len(spy.sent)
    assert not any(spy.contributed)
    assert found.rows[-1]["floats_up"] == jobs * shared
    assert found.rows[-1]["floats_down"] == jobs * (shared + 4 * PIXELS)


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        (small(lam=0.0, mu=0.0), 0),
        (small(), 1),
        (mixture(), 1 + 1 / 3),
        (mixture(mix_samples=0), 1),
        (mixture(mu=0.0), 1),
        (mixture(global_features="round"), 1),
    ],
    ids=["off", "means", "mixture", "unmixed", "no contrast", "once a round"],
)
def test_a_step_costs_a_pass_over_pseudo_data_and_a_forward_of_the_received_model_where_these_change(
    method: FedBR, passes: float
) -> None:
    assert method.cost(taking_part(None, 5, 30.0)).samples == pytest.approx(30 * passes)


# --- sources ------------------------------------------------------------------------------------------------------

DRAWS = 1500
COUNTS = np.array([1, 0, 2, 7])
ENDS = np.array([0.1, 0.3, 1.0])  # of those that have samples


def near(found: Sequence[int] | np.ndarray, size: int, wanted: Sequence[float]) -> None:
    """The frequencies of these numbers, four standard deviations wide."""
    shares = np.bincount(np.asarray(found), minlength=size) / len(found)
    assert np.abs(shares - wanted).max() < 4 * np.sqrt(0.25 / len(found)), shares


@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    each=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_rows_by_samples_are_what_numpy_draws(counts: list[int], each: int, seed: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts) * each))
    shares = np.array(counts) / sum(counts)
    wanted = stream(seed, "pool").choice(len(counts) * each, size, replace=False, p=np.repeat(shares / each, each))
    assert rows_by_samples(np.cumsum(shares), each, size, stream(seed, "pool")).tolist() == wanted.tolist()


def test_rows_by_samples_cost_nothing_for_those_that_are_not_drawn() -> None:
    ends, generator = np.linspace(0, 1, 100_001)[1:], stream(0, "pool")
    tracemalloc.start()
    rows_by_samples(ends, 64, 64, generator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(ends), "an array over the clients has a byte for each at least"


@pytest.mark.parametrize(
    ("sources", "wanted"), [("balanced", [1 / 3, 0, 1 / 3, 1 / 3]), ("unbalanced", [0.1, 0, 0.2, 0.7])]
)
def test_means_of_the_pool_come_from_clients_alike_or_by_their_samples(sources: Any, wanted: list[float]) -> None:
    method = FedBR(pseudo_batch=1, means_per_client=2, sources=sources)
    pool = torch.tensor([0, 0, 2, 2, 3, 3])  # a client without samples sends none
    server: Any = SimpleNamespace(sample_ends=ENDS, state={"fedbr.pool": pool})
    found = []
    for version in range(DRAWS):
        server.stream = lambda purpose, version=version: stream(0, purpose, version)
        found.append(int(method._drawn(server)))
    near(found, 4, wanted)


@pytest.mark.parametrize(
    ("sources", "wanted"), [("balanced", [1 / 3, 0, 1 / 3, 1 / 3]), ("unbalanced", [0.1, 0, 0.2, 0.7])]
)
def test_fresh_means_come_from_clients_alike_or_by_their_samples(sources: Any, wanted: list[float]) -> None:
    method = FedBR(pseudo_batch=DRAWS, samples_per_mean=1, sources=sources, fresh=True)
    clients = [np.full(count, client) for client, count in enumerate(COUNTS)]
    trainer = SimpleNamespace(
        partition=CSR(np.concatenate(clients), np.concatenate([[0], np.cumsum(COUNTS)])),
        gather=lambda rows: (torch.from_numpy(rows).float().reshape(-1, 1), None),
    )
    ctx: Any = SimpleNamespace(seed=0, version=3, trainer=trainer, kept={})
    method.receive(ctx)
    near(ctx.kept[PSEUDO].flatten().long().numpy(), 4, wanted)


@pytest.mark.parametrize(
    ("sources", "wanted"),
    [
        ("balanced", [1 / 3, 0, 1 / 3, 1 / 3]),
        ("classes", [1 / 3, 0, 1 / 3, 1 / 3]),
        ("unbalanced", [0.1, 0, 0.2, 0.7]),
    ],
)
def test_proxy_images_come_from_classes_alike_or_by_their_number(
    sources: Any, wanted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.repeat(np.arange(4), COUNTS)
    images = np.concatenate([labels, [99]]).astype(np.uint8).reshape(-1, 1, 1, 1)  # the last is a test image
    dataset = SimpleNamespace(labels=np.append(labels, 1), inputs=images, train_rows=len(labels))
    monkeypatch.setattr(fedbr, "_public", lambda method: (method.proxy, dataset))
    server: Any = SimpleNamespace(stream=lambda purpose: stream(0, purpose, 0), task=TASK)
    method = mixture(pseudo_batch=DRAWS, samples_per_mean=1, sources=sources, proxy=Synthetic())
    near((method._drawn(server) * 255).round().long().flatten().numpy(), 4, wanted)


SKEWED = torch.tensor([0] * 8 + [2] * 2 + [4] * 40)  # 50 samples of three of five classes


@pytest.mark.parametrize(
    ("sources", "wanted"),
    [("balanced", [0.16, 0, 0.04, 0, 0.8]), ("classes", [1 / 3, 0, 1 / 3, 0, 1 / 3])],
)
def test_samples_of_a_pooled_mean_come_from_classes_alike_if_asked(sources: Any, wanted: list[float]) -> None:
    method = FedBR(means_per_client=DRAWS, samples_per_mean=1, sources=sources)
    inputs = SKEWED.float().reshape(-1, 1)
    client = Contribution(0, lambda: (inputs, SKEWED), stream(0, "contribute", 0), 5)
    pool = method.contribute(client)["fedbr.pool"]
    near(pool.ravel().astype(int), 5, wanted)


@pytest.mark.parametrize(
    ("sources", "wanted"),
    [("balanced", [0.16, 0, 0.04, 0, 0.8]), ("classes", [1 / 3, 0, 1 / 3, 0, 1 / 3])],
)
def test_samples_of_a_fresh_mean_come_from_classes_alike_if_asked(sources: Any, wanted: list[float]) -> None:
    method = FedBR(pseudo_batch=DRAWS, samples_per_mean=1, sources=sources, fresh=True)
    trainer = SimpleNamespace(
        partition=CSR(np.arange(50), np.array([0, 50])),
        labels=SKEWED,
        gather=lambda rows: (SKEWED[rows].float().reshape(-1, 1), None),
    )
    ctx: Any = SimpleNamespace(seed=0, version=3, trainer=trainer, kept={})
    method.receive(ctx)
    near(ctx.kept[PSEUDO].flatten().long().numpy(), 5, wanted)


def test_means_by_classes_come_from_clients_alike() -> None:
    def drawn(sources: Any) -> Tensor:
        server: Any = SimpleNamespace(sample_ends=ENDS, state={"fedbr.pool": torch.arange(6)})
        server.stream = lambda purpose: stream(0, purpose, 0)
        return FedBR(pseudo_batch=4, means_per_client=2, sources=sources)._drawn(server)

    assert torch.equal(drawn("classes"), drawn("balanced"))
    assert not torch.equal(drawn("classes"), drawn("unbalanced"))


def test_unknown_sources_are_refused() -> None:
    with pytest.raises(ValueError, match=r"method\.fedbr\.sources"):
        FedBR(sources="labels")  # type: ignore[arg-type]


# --- Mixture ------------------------------------------------------------------------------------------------------


class Mixing(FedBR):
    """Keeps, for every step, the batch and the pseudo-data that were made of it."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._seen: list[tuple[Context, int, Batch, Tensor, Tensor | None]] = []

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        term = super().term(ctx, out, batch)
        self._seen.append((ctx, ctx.step, batch, *self._mixed(ctx, out)))
        return term


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mixup", ["none", "before", "after"])
def test_every_step_mixes_the_means_with_samples_and_labels_of_its_batch_as_mixup_left_it(
    mixup: str, count: int
) -> None:
    method: Any = mixture(Mixing, mix_samples=count)
    methods = {"none": [method], "before": [Mixup(2.0), method], "after": [method, Mixup(2.0)]}[mixup]
    found = run(run_spec(*methods, local=LOCAL), ROUNDS, rounds=2)
    assert not found.failures and max(step for _, step, *_ in method._seen) > 5
    for ctx, step, batch, inputs, targets in method._seen:
        chosen = ctx.draws["fedbr.mix"][step]
        assert chosen.shape == (4, count) and chosen.max() < len(batch.inputs)
        labels = batch.targets if mixup != "none" else torch.eye(5)[batch.targets]
        assert labels.shape == (len(batch.inputs), 5)
        x = (ctx.download[PSEUDO] + batch.inputs[chosen].sum(dim=1)) / (count + 1)
        assert torch.allclose(inputs, x, atol=1e-6)
        y = (torch.full((4, 5), 0.2) + labels[chosen].sum(dim=1)) / (count + 1)
        assert targets is not None and torch.allclose(targets, y, atol=1e-6)
        assert torch.allclose(targets.sum(dim=1), torch.ones(4))
    first = [seen[0].draws["fedbr.mix"][0] for seen in method._seen if seen[1] == 0]
    assert len({each.numpy().tobytes() for each in first}) > 1, "clients draw for themselves"


def test_mixing_no_samples_leaves_the_means_and_uniform_targets() -> None:
    method: Any = mixture(Mixing, mix_samples=0)
    run(run_spec(method, local=LOCAL), ROUNDS, rounds=2)
    for ctx, _, _, inputs, targets in method._seen:
        assert torch.equal(inputs, ctx.download[PSEUDO]) and targets is None
        assert "fedbr.mix" not in ctx.draws


def global_features(setting: Any) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """For every step: its number, and its global features beside those of its own and of the first pseudo-data."""

    class Watched(FedBR):
        def _contrast(self, ctx: Context, out: Outputs, pseudo: Tensor, real: Tensor) -> Tensor:
            inputs = self._mixed(ctx, out)[0]
            self._first = inputs if ctx.step == 0 else self._first
            networks: dict[str, nn.Module] = {key: copy.deepcopy(net).eval() for key, net in ctx.networks.items()}
            Vector(networks, ctx.vector.layout, torch.device("cpu"), torch.float32).shared.copy_(ctx.base)
            received: Any = networks["model"]
            with torch.no_grad():
                now, first = received.features(inputs), received.features(self._first)
            seen.append((ctx.step, self._global_features(ctx, out), now, first))
            return super()._contrast(ctx, out, pseudo, real)

    seen: list[tuple[int, Tensor, Tensor, Tensor]] = []
    run(run_spec(mixture(Watched, global_features=setting), local=LOCAL, model=NORMED), Synchronous(2), rounds=1)
    return seen


@pytest.mark.parametrize("setting", ["step", "round"])
def test_global_features_are_of_the_steps_own_pseudo_data_or_of_the_jobs_first(setting: str) -> None:
    seen = global_features(setting)
    assert max(step for step, *_ in seen) > 3
    for _, found, now, first in seen:
        assert not found.requires_grad
        assert torch.allclose(found, now if setting == "step" else first, rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(now, first, atol=1e-2) for _, _, now, first in seen)


# --- the two steps ------------------------------------------------------------------------------------------------


class Stepwise(FedBR):
    """Keeps the vector before the max step, between the steps and after the min step, and the contrast around it."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._vectors: list[Tensor] = []
        self._contrasts: list[tuple[Tensor, Tensor]] = []

    def transform(self, ctx: Context, batch: Batch) -> Batch:
        self._vectors.append(ctx.vector.data.clone())
        return batch

    def projected_contrast(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        self._low = super().projected_contrast(ctx, out, batch)
        return self._low

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        self._vectors.append(ctx.vector.data.clone())
        with torch.no_grad():
            high = self._contrast(ctx, out, self._pseudo_features(ctx, out), out.features)
        self._contrasts.append((self._low.detach(), high))
        return super().term(ctx, out, batch)

    def finish(self, ctx: Context) -> None:
        self._vectors.append(ctx.vector.data.clone())


@pytest.mark.parametrize("pseudo", ["rsm", "mixture"])
def test_the_max_step_raises_the_contrast_and_moves_the_projector_alone_the_min_step_all_else(pseudo: Any) -> None:
    proxy = {"proxy": PROXY} if pseudo == "mixture" else {}
    method = Stepwise(projection="code", pseudo_batch=4, samples_per_mean=3, pseudo=pseudo, **proxy)
    study = run_spec(method, local=Local(lr=0.01, weight_decay=1e-3, batch=8, epochs=5))
    host = Host(study)
    base, empty = host.vector.shared.clone(), host.vector.counters[:0]
    data = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    host.trainer.train(Job(0, 1, 0, 0, -1, 1.0), base, empty, {PSEUDO: data}, NOTHING)
    theta = next(entry.start for entry in host.layout.entries if entry.network == PROJECTOR)
    starts, between, ends = method._vectors[:-1:2], method._vectors[1::2], method._vectors[2::2]
    assert len(starts) == len(between) == len(ends) > 5
    for before, middle, after in zip(starts, between, ends, strict=True):
        assert torch.equal(before[:theta], middle[:theta]) and not torch.equal(before[theta:], middle[theta:])
        assert torch.equal(middle[theta:], after[theta:]) and not torch.equal(middle[:theta], after[:theta])
    assert all(high > low for low, high in method._contrasts)


def test_without_the_max_step_the_projector_stays_as_received_in_all_rounds() -> None:
    def theta(**settings: Any) -> tuple[Tensor, Tensor]:
        found = run(run_spec(small(**settings), local=LOCAL), rounds=3)
        start = next(entry.start for entry in found.coordinator.layout.entries if entry.network == PROJECTOR)
        trained = found.coordinator.layout.trained
        return found.coordinator.initial.shared[start:trained], found.coordinator.server.vector[start:trained]

    before, after = theta(max_step=False)
    assert len(after) > 100 and torch.equal(before, after)
    before, after = theta()
    assert not torch.equal(before, after)


def test_pseudo_data_are_no_part_of_the_running_statistics() -> None:
    class Look(HookedMethod):
        name, paper = "look", "a test"

        def finish(self, ctx: Context) -> None:
            assert ctx.plan is not None
            rows.append((ctx.plan.steps, ctx.vector.counters.unique().tolist()))

    rows: list[tuple[int, list[int]]] = []
    found = run(run_spec(mixture(), Look(), local=LOCAL, model=NORMED), rounds=1)
    assert not found.failures and all(counted == [steps] for steps, counted in rows)


def test_a_batch_smaller_than_the_pseudo_batch_is_met_again_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, original = set(), fedbr.contrastive_loss

    def watch(z_p: Tensor, z_g: Tensor, z: Tensor, *rest: Any) -> Tensor:
        assert len(z_p) == len(z_g) == len(z) == 6
        rows.add(next((size for size in range(1, 6) if torch.equal(z[size:], z[:-size])), 6))
        return original(z_p, z_g, z, *rest)

    monkeypatch.setattr(fedbr, "contrastive_loss", watch)
    found = run(run_spec(small(pseudo_batch=6), local=Local(lr=0.05, batch=4)), rounds=1)
    assert not found.failures and 4 in rows and len(rows) > 1


# --- switches, and what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "adds"),
    [({"mu": 0.0}, False), ({"projection": "none"}, False), ({"lam": 0.0}, True), ({"max_step": False}, True)],
    ids=str,
)
def test_the_projector_exists_only_where_something_is_projected(settings: dict[str, Any], adds: bool) -> None:
    found = run(run_spec(small(**settings), local=LOCAL), rounds=2)
    assert not found.failures
    assert any(name.startswith(PROJECTOR) for name in found.tensors) == adds


@pytest.mark.parametrize(
    ("projection", "sizes"), [("paper", [(256, 12), (256, 256), (128, 256)]), ("code", [(24, 12), (24, 24), (12, 24)])]
)
def test_the_projectors_widths_are_the_papers_or_the_codes(projection: Any, sizes: list[tuple[int, int]]) -> None:
    found = run(run_spec(small(projection=projection), local=LOCAL), rounds=1)
    assert [found.tensors[f"{PROJECTOR}.{layer}.weight"].shape for layer in (0, 2, 4)] == sizes


def test_the_default_weights_and_temperatures_are_the_papers() -> None:
    method = FedBR()
    assert (method.lam, method.mu, method.tau1, method.tau2) == (1.0, 0.5, 2.0, 2.0)


def test_a_pool_smaller_than_a_batch_is_refused_and_one_as_large_is_not() -> None:
    with pytest.raises(ValueError, match=r"pseudo_batch=13 is more than the pool of 6 clients x means_per_client=2"):
        FedBR(pseudo_batch=13, means_per_client=2).check(setup(TASK, LOCAL, {}))
    assert FedBR(pseudo_batch=12, means_per_client=2).check(setup(TASK, LOCAL, {})) == ()
    assert FedBR(pseudo_batch=13).check(setup(TASK, LOCAL, {})) == ()


@pytest.mark.parametrize("shape", [[1, 4, 4], [3, 8, 8]], ids=str)
def test_a_proxy_set_of_other_images_is_refused_with_the_settings_that_would_fit(shape: list[int]) -> None:
    proxy = Synthetic(samples=10, test_samples=5, shape=shape)
    sizes = " x ".join(map(str, shape))
    match = rf"has images of {sizes} .* the data has 1 x 8 x 8: set .*proxy\.size=8 and .*proxy\.channels=1"
    with pytest.raises(ValueError, match=match):
        mixture(proxy=proxy).check(setup(TASK, LOCAL, {}))
    fitting = Synthetic(samples=10, test_samples=5, shape=shape, size=8, channels=1)
    assert mixture(proxy=fitting).check(setup(TASK, LOCAL, {})) == ()


@pytest.mark.parametrize("proxy", [None, Source()], ids=["none", "a source of nothing"])
def test_mixture_without_a_proxy_set_is_refused(proxy: Source | None) -> None:
    with pytest.raises(ValueError, match=r"pseudo=mixture needs a public set: set method\.fedbr\.proxy"):
        FedBR(pseudo="mixture", proxy=proxy)


@pytest.mark.parametrize(
    "settings", [{"pseudo_refresh": "once"}, {"pseudo": "mixture", "proxy": PROXY}], ids=["once", "mixture"]
)
def test_fresh_means_are_refused_where_they_have_no_meaning(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"fresh=true draws means of clients' data every round"):
        FedBR(fresh=True, **settings)


@pytest.mark.parametrize(
    "settings",
    [{"lam": -1.0}, {"mu": -1.0}, {"pseudo_batch": 0}, {"samples_per_mean": 0}, {"means_per_client": 0},
     {"mix_samples": -1}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedbr\.{key}="):
        FedBR(**settings)


# --- a proxy in a configuration -----------------------------------------------------------------------------------

NODE = {"_target_": "raysim.methods.fedbr.FedBR", "pseudo": "mixture"}


def test_a_configuration_names_the_proxy_set_as_it_names_the_data() -> None:
    proxy = {"_target_": "raysim.data.sources.Synthetic", "samples": 40, "classes": 7, "mean": [0.2], "std": [0.6]}
    method = build(FedBR, NODE | {"proxy": proxy}, "method.fedbr")
    assert method.proxy == Synthetic(samples=40, classes=7, mean=[0.2], std=[0.6])
    assert build(FedBR, {}, "method.fedbr").proxy is None


@pytest.mark.parametrize(
    "proxy",
    [
        {"_target_": "raysim.models.Mlp"},
        {"_target_": "raysim.methods.fedprox.FedProx"},
        {"_target_": "raysim.data.sources.Nonsense"},
        {"_target_": "raysim.data.sources.Synthetic", "sample": 40},
        {"_target_": "raysim.data.sources.Synthetic", "samples": 0},
        {"samples": 40},
        "Cifar100",
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_data_source_is_refused_as_a_proxy_set(proxy: Any) -> None:
    with pytest.raises(Refused, match=r"method\.fedbr\.proxy"):
        build(FedBR, NODE | {"proxy": proxy}, "method.fedbr")
