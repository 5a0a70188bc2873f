"""DANN's domains, the order of its steps, and what each of them trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import NOTHING, Spy, coordinate, ran, run, run_spec, setup, several, step_of, taking_part
from torch import Tensor, nn

from raysim.api.context import Batch, Context
from raysim.api.declarations import Local, Task
from raysim.api.hooked_method import HookedMethod
from raysim.api.messages import Job
from raysim.methods import dann
from raysim.methods.dann import DISCRIMINATOR, Dann
from raysim.simulation.schedule import Synchronous
from raysim.training.host import Host
from raysim.training.run_spec import build_networks
from raysim.vectors.layout import Vector
from raysim.vectors.optimizer import Optimizers

PLAIN = Local(lr=0.1, batch=8, epochs=2)
TASK = Task((1, 8, 8), 5, 6)


class Watch(HookedMethod):
    """Keeps the batches of every job, and the vector before each step and after the last."""

    name = "watch"
    paper = "a test"

    def __init__(self) -> None:
        self.batches: list[list[Batch]] = []
        self.vectors: list[list[Tensor]] = []
        self.jobs: list[Context] = []

    def receive(self, ctx: Context) -> None:
        self.jobs.append(ctx)
        self.batches.append([])
        self.vectors.append([])

    def transform(self, ctx: Context, batch: Batch) -> Batch:
        self.batches[-1].append(batch)
        self.vectors[-1].append(ctx.vector.data.clone())
        return batch

    def finish(self, ctx: Context) -> None:
        self.vectors[-1].append(ctx.vector.data.clone())

    def steps(self, job: int) -> Iterator[tuple[bool, bool]]:
        """(the model moved, the discriminator moved) of every step of a job."""
        layout = self.jobs[job].vector.layout
        parts = [[e for e in layout.entries if e.network == name] for name in ("model", DISCRIMINATOR)]
        for before, after in pairwise(self.vectors[job]):
            same = [all(torch.equal(before[e.start : e.stop], after[e.start : e.stop]) for e in part) for part in parts]
            yield not same[0], not same[1]


def train(host: Host, number: int = 0, client: int = 0, turn: int = 0) -> Context:
    """One participation from the initial values."""
    job = Job(number, client, turn, 0, -1, 1.0)
    networks, layout = build_networks(host.spec)
    base = Vector(networks, layout, torch.device("cpu"), torch.float32).shared
    return host.trainer.train(job, base, host.vector.counters[: layout.shared_counters].clone(), {}, NOTHING)


# --- domains ------------------------------------------------------------------------------------------------------


class Present(Dann):
    """Knows which participation is at work."""

    def receive(self, ctx: Context) -> None:
        self._now = (ctx.client, ctx.participation)


@pytest.mark.parametrize("mode", ["alternate", "grl"])
@pytest.mark.parametrize("hosts", [1, 3])
def test_the_domain_of_a_client_is_its_id_in_every_round_and_on_every_host(
    hosts: int, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, original = Present(0.5, width=4, mode=mode), dann.discriminator_loss
    labels: dict[tuple[int, int], list[int]] = {}

    def watched(domain_logits: Tensor, domain: Tensor) -> Tensor:
        assert domain_logits.shape[1] == 6, "an output for each client of the run, not of the cohort"
        labels.setdefault(method._now, []).append(int(domain))
        return original(domain_logits, domain)

    monkeypatch.setattr(dann, "discriminator_loss", watched)
    study = run_spec(method)
    found = ran(coordinate(study, Synchronous(4), runtime=several(study, hosts), rounds=4))
    assert not found.failures and max(turn for _, turn in labels) > 1
    assert {client for client, _ in labels} == set(range(6))
    assert all(set(given) == {client} for (client, _), given in labels.items())


def test_an_output_of_an_absent_client_is_only_pushed_down() -> None:
    study = run_spec(Dann(0.5, width=8), local=PLAIN)
    spy = Spy(study)
    found = ran(coordinate(study, Synchronous(2), runtime=spy, rounds=1))
    present = [job.client for job, _ in spy.sent]
    absent = [client for client in range(6) if client not in present]
    name = f"{DISCRIMINATOR}.4.bias"
    networks, layout = build_networks(study)
    initial = Vector(networks, layout, torch.device("cpu"), torch.float32)
    moved = found.tensors[name] - initial.parameters[name].detach().numpy()
    assert moved.shape == (6,) and len(absent) == 4
    assert (moved[absent] < 0).all() and (moved[present] > 0).all()


# --- the order of steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("ratio", [1, 2])
def test_a_step_trains_the_discriminator_or_the_rest_and_every_participation_begins_anew(
    ratio: int, momentum: float
) -> None:
    local = Local(lr=0.05, momentum=momentum, weight_decay=1e-3, batch=7, epochs=None, steps=7)
    watch = Watch()
    run(run_spec(Dann(0.5, width=8, discriminator_steps=ratio), watch, local=local), Synchronous(4), rounds=3)
    assert max(ctx.participation for ctx in watch.jobs) > 0 and 7 % (1 + ratio), (
        "a job ends amid a period, another follows"
    )
    first = {1: [False, True, False, True], 2: [True, False, True, True, False, True]}[ratio]
    for job in range(len(watch.jobs)):
        steps = list(watch.steps(job))
        assert [of_discriminator for _, of_discriminator in steps][: len(first)] == first[: len(steps)]
        for number, moved in enumerate(steps, start=1):
            adversary = number % (1 + ratio) < ratio
            assert moved == (not adversary, adversary), f"step {number}: the other network is left to the bit"


@pytest.mark.parametrize("ratio", [1, 2])
def test_at_weight_zero_the_model_is_fedavgs_on_the_generators_batches_and_the_discriminator_still_trains(
    ratio: int,
) -> None:
    local = Local(lr=0.05, momentum=0.9, weight_decay=1e-3, batch=4, epochs=2)
    watch = Watch()
    study = run_spec(Dann(0.0, width=8, discriminator_steps=ratio), watch, local=local)
    ctx = train(Host(study))
    mine = [b for k, b in enumerate(watch.batches[0], start=1) if k % (1 + ratio) >= ratio]
    assert 1 < len(mine) < len(watch.batches[0])
    host = Host(run_spec(local=local))
    step = step_of(host.vector, [], local.settings())
    alone = copy.copy(ctx)
    alone.vector, alone.optimizers = host.vector, Optimizers()
    for batch in mine:
        step(alone, batch, study.methods[0].stages(ctx.plan)[ratio - 1])  # type: ignore[arg-type]
    expected = dict(host.vector.networks["model"].named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in ctx.model.named_parameters())
    assert [adversary for _, adversary in watch.steps(0)].count(True) == len(watch.batches[0]) - len(mine)


def pair(study: Any) -> tuple[Any, Any]:
    networks, _ = build_networks(study)
    return networks["model"], networks[DISCRIMINATOR]


def agree(ctx: Context, model: Any, discriminator: Any) -> None:
    """The trained networks equal these."""
    for found, wanted in ((ctx.model, model), (ctx.networks[DISCRIMINATOR], discriminator)):
        for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


class Sgd:
    """By hand: buffer <- momentum * buffer + gradient, parameters <- parameters - lr * buffer."""

    def __init__(self, network: nn.Module, lr: float, momentum: float):
        self.parameters, self.lr, self.momentum = list(network.parameters()), lr, momentum
        self.buffers = [torch.zeros_like(p) for p in self.parameters]

    def step(self, loss: Tensor) -> None:
        grads = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            for parameter, buffer, grad in zip(self.parameters, self.buffers, grads, strict=True):
                buffer.mul_(self.momentum).add_(grad)
                parameter.sub_(self.lr * buffer)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("ratio", [1, 2])
def test_alternating_steps_are_those_of_two_optimisers(ratio: int, momentum: float) -> None:
    local = Local(lr=0.1, momentum=momentum, batch=4, epochs=2)
    watch = Watch()
    study = run_spec(Dann(0.3, width=8, discriminator_steps=ratio, rate=0.5), watch, local=local)
    ctx = train(Host(study), client=3)
    model, delta = pair(study)
    main, second = Sgd(model, 0.1, momentum), Sgd(delta, 0.05, momentum)
    for k, batch in enumerate(watch.batches[0], start=1):
        z = model.features(batch.inputs)
        domain = torch.full((len(z),), 3)
        if k % (1 + ratio) < ratio:
            second.step(F.cross_entropy(delta(z.detach()), domain))
        else:
            main.step(F.cross_entropy(model.head(z), batch.targets) - 0.3 * F.cross_entropy(delta(z), domain))
    agree(ctx, model, delta)


def test_gradient_reversal_is_the_generators_and_the_discriminators_step_in_one() -> None:
    watch = Watch()
    study = run_spec(Dann(0.3, width=8, mode="grl"), watch, local=PLAIN)
    ctx = train(Host(study), client=3)
    model, delta = pair(study)
    main, second = Sgd(model, 0.1, 0.0), Sgd(delta, 0.1, 0.0)
    for batch in watch.batches[0]:
        z = model.features(batch.inputs)
        adversary = dann.discriminator_loss(delta(z.detach()), 3)
        generator = dann.generator_loss(model.head(z), batch.targets, copy.deepcopy(delta)(z), 3, 0.3)
        second.step(adversary)
        main.step(generator)
    agree(ctx, model, delta)
    assert all(moved == (True, True) for moved in watch.steps(0))


def test_the_reported_loss_is_the_classifiers_alone() -> None:
    watch = Watch()
    study = run_spec(Dann(0.5, width=8), watch, local=PLAIN)
    ctx = train(Host(study))
    model, _ = pair(study)
    first = watch.batches[0][0]
    assert ctx.losses is not None and len(ctx.losses) == (len(watch.batches[0]) + 1) // 2
    assert torch.allclose(ctx.losses[0], F.cross_entropy(model(first.inputs), first.targets))


@pytest.mark.parametrize(
    ("settings", "saved"), [({}, 1 / 2), ({"discriminator_steps": 3}, 3 / 4), ({"mode": "grl"}, 0)], ids=str
)
def test_a_discriminator_step_saves_the_two_thirds_of_a_step_that_go_backwards(
    settings: dict[str, Any], saved: float
) -> None:
    assert Dann(**settings).cost(taking_part(None, 5, 30.0)).samples == pytest.approx(-30 * saved * 2 / 3)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_one_client_is_refused_and_two_with_the_narrowest_discriminator_are_not() -> None:
    with pytest.raises(ValueError, match=r"partition\.clients=1: use at least 2 clients"):
        Dann().check(setup(Task((1, 8, 8), 5, 1), PLAIN, {}))
    assert Dann(width=1).check(setup(Task((1, 8, 8), 5, 2), PLAIN, {})) == ()


@pytest.mark.parametrize("ratio", [1, 3])
def test_fewer_steps_than_a_period_are_refused_and_one_period_is_enough(ratio: int) -> None:
    method = Dann(discriminator_steps=ratio)
    with pytest.raises(ValueError, match=rf"local\.steps={ratio} .*set local\.steps={ratio + 1} or more"):
        method.check(setup(TASK, Local(epochs=None, steps=ratio), {}))
    assert method.check(setup(TASK, Local(epochs=None, steps=ratio + 1), {})) == ()
    assert Dann(mode="grl").check(setup(TASK, Local(epochs=None, steps=1), {})) == ()


@pytest.mark.parametrize("settings", [{"rate": 0.5}, {"discriminator_steps": 2}], ids=str)
def test_gradient_reversal_has_no_use_for_a_second_rate_or_other_steps(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"mode=grl trains both in one step"):
        Dann(mode="grl", **settings)


@pytest.mark.parametrize("settings", [{"lam": -0.1}, {"width": 0}, {"discriminator_steps": 0}, {"rate": 0.0}], ids=str)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.dann\.{key}="):
        Dann(**settings)
