"""FedCM's direction against explicit loops: what a step follows, and what the server reads off the movement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import BUFFER, MLP, NORMED, NOTHING, ROUNDS, SEED, Ran, run, run_spec, setup, tiny
from torch import Tensor

from raysim.api.context import Batch, Context
from raysim.api.declarations import Local, Task
from raysim.api.hooked_method import HookedMethod
from raysim.api.messages import Job
from raysim.api.method import Method
from raysim.api.server_view import Aggregation
from raysim.methods.dann import DISCRIMINATOR, Dann
from raysim.methods.fedbr import PROJECTOR, FedBR
from raysim.methods.fedcm import FedCM
from raysim.methods.fedopt import FedAvgM
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Schedule, Synchronous
from raysim.training.host import Host

DIRECTION = "fedcm.direction"
ALL = Synchronous(6)
WHOLE = Local(lr=0.5, epochs=None, steps=1, batch=1000)  # one step on all of a client's samples


class Watch(HookedMethod):
    """Keeps the batches of all jobs, and what the server had and made at every aggregation."""

    name = "watch"
    paper = "a test"
    needs_single_updates = True

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.updates: list[list[Any]] = []
        self.weights: list[list[float]] = []
        self.directions: list[Tensor] = []

    def transform(self, ctx: Context, batch: Batch) -> Batch:
        self.batches.append(batch)
        return batch

    def absorb(self, aggregation: Aggregation, server: Any) -> None:
        self.updates.append(list(aggregation.updates))
        self.weights.append(list(aggregation.weights))
        self.directions.append(server.state[DIRECTION])


def after(*methods: Method, local: Local, model: Any = MLP, **settings: Any) -> tuple[Watch, Ran]:
    """What happened in a run, and its result."""
    watch = Watch()
    return watch, run(run_spec(*methods, watch, local=local, model=model), **settings)


# --- the first round, and full participation ----------------------------------------------------------------------


def moved(*methods: Method, local: Local, **settings: Any) -> np.ndarray:
    found = run(run_spec(*methods, local=local), weighting="uniform", fleet=Ideal(), rounds=1, **settings)
    start = found.coordinator.initial.shared.numpy()
    difference: np.ndarray = found.coordinator.server.vector.numpy() - start
    return difference


@pytest.mark.parametrize("alpha", [0.1, 0.5])
def test_one_plain_step_of_the_first_round_moves_alpha_times_as_far(alpha: float) -> None:
    local = Local(lr=0.5, epochs=None, steps=1, batch=8)
    fedavg = moved(local=local)
    assert np.abs(fedavg).max() > 0.01
    np.testing.assert_allclose(moved(FedCM(alpha), local=local), alpha * fedavg, rtol=0, atol=1e-7)


def test_with_a_warm_start_only_the_first_round_is_plain() -> None:
    local = Local(lr=0.1, epochs=1, batch=8)
    watch, found = after(FedCM(0.25, warm_start=True), local=local, rounds=2)
    plain, _ = after(FedCM(1.0), local=local, rounds=2)
    assert torch.equal(watch.directions[0], plain.directions[0]) and watch.directions[0].abs().max() > 0.01
    assert not torch.allclose(watch.directions[1], plain.directions[1], rtol=0, atol=1e-3)
    assert not found.failures


def gradient(model: torch.nn.Module, data: Any, client: int) -> Tensor:
    """Of the mean loss over all of a client's samples, as one vector."""
    dataset, rows = data.open(), data.partition.train.rows(client)
    inputs = data.pipeline.normalise(torch.from_numpy(dataset.inputs[rows]))
    loss = F.cross_entropy(model(inputs), torch.from_numpy(dataset.labels[rows]))
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_with_all_clients_and_one_step_each_it_is_heavy_ball_on_the_server(weighting: Any) -> None:
    watch, found = after(FedCM(0.3), local=WHOLE, schedule=ALL, rounds=4, weighting=weighting)
    data = tiny()
    model = MLP.build(data.open().shape, data.open().num_classes, SEED)
    parameters = list(model.parameters())
    counts = data.partition.train.counts if weighting == "samples" else np.ones(6)
    v = torch.zeros(sum(p.numel() for p in parameters))
    for turn in range(4):
        mean = sum(share * gradient(model, data, client) for client, share in enumerate(counts / counts.sum()))
        v = 0.3 * mean + 0.7 * v
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(parameters) - 0.5 * v, parameters)
        assert torch.allclose(watch.directions[turn], v, rtol=0, atol=2e-6)
    final = torch.nn.utils.parameters_to_vector(parameters)
    assert torch.allclose(found.coordinator.server.vector, final, rtol=0, atol=2e-6)


# --- the local step -----------------------------------------------------------------------------------------------


def one_job(watch: Watch, local: Local) -> tuple[Tensor, Tensor]:
    """What one participation with alpha = 0.2 makes of the initial model, and the direction that it was given."""
    host = Host(run_spec(FedCM(0.2), watch, local=local))
    direction = random(host.layout.trained)
    base, job = host.vector.shared.clone(), Job(0, 2, 0, 0, -1, 1.0)
    ctx = host.trainer.train(job, base, host.vector.counters[:0], {DIRECTION: direction}, NOTHING)
    return ctx.vector.shared.clone(), direction


def random(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("momentum", ["none", "plain", "nesterov"])
def test_weight_decay_belongs_to_the_gradient_and_momentum_sees_the_mix(momentum: str, decay: float) -> None:
    beta = 0.0 if momentum == "none" else 0.9
    local = Local(lr=0.05, momentum=beta, nesterov=momentum == "nesterov", weight_decay=decay, batch=4, epochs=2)
    watch = Watch()
    found, direction = one_job(watch, local)
    y, model = explicit_start()
    buffer = torch.zeros_like(y)
    for batch in watch.batches:
        g = batch_gradient(model, y, batch) + decay * y
        v = 0.2 * g + 0.8 * direction
        buffer = beta * buffer + v
        y = y - 0.05 * (v + beta * buffer if momentum == "nesterov" else buffer)
    assert len(watch.batches) > 4
    assert torch.allclose(found, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("clip", [0.05, 3.0])
def test_clipping_comes_after_the_mix(clip: float) -> None:
    watch = Watch()
    found, direction = one_job(watch, Local(lr=0.05, clip=clip, batch=4))
    y, model = explicit_start()
    for batch in watch.batches:
        v = 0.2 * batch_gradient(model, y, batch) + 0.8 * direction
        assert v.norm() > clip
        y = y - 0.05 * v * clip / v.norm()
    assert torch.allclose(found, y, rtol=0, atol=1e-6)


def explicit_start() -> tuple[Tensor, torch.nn.Module]:
    model = MLP.build(tiny().open().shape, tiny().open().num_classes, SEED)
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), model


def batch_gradient(model: torch.nn.Module, y: Tensor, batch: Batch) -> Tensor:
    torch.nn.utils.vector_to_parameters(y, model.parameters())
    loss = F.cross_entropy(model(batch.inputs), batch.targets)
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))])


# --- the direction of the server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [MLP, NORMED], ids=["mlp", "cnn with BatchNorm"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_movement_is_divided_by_the_steps_and_the_rate_of_the_round_that_moved(
    schedule: Schedule, decay: float, model: Any
) -> None:
    local = Local(lr=0.1, lr_decay=decay, batch=8, epochs=2)
    watch, found = after(FedCM(), local=local, model=model, schedule=schedule, rounds=5)
    trained = found.coordinator.layout.trained
    assert found.coordinator.server.state[DIRECTION].shape == (trained,)
    for updates, weights, direction in zip(watch.updates, watch.weights, watch.directions, strict=True):
        expected = np.zeros(trained)
        for update, weight in zip(updates, weights, strict=True):
            rate = 0.1 * decay**update.version
            expected -= weight / sum(weights) * update.delta[:trained].astype(float) / (rate * update.steps)
        np.testing.assert_allclose(direction.numpy(), expected, rtol=1e-4, atol=1e-6)
    late = {turn - update.version for turn, updates in enumerate(watch.updates) for update in updates}
    assert late == {0} if schedule is ROUNDS else max(late) > 0


def test_the_servers_own_step_is_no_part_of_the_direction() -> None:
    local = Local(lr=0.1, batch=8)
    one, other = (after(FedCM(), FedAvgM(rate, 0.0), local=local, rounds=1)[0].directions[0] for rate in (1.0, 0.3))
    assert torch.equal(one, other)


def part_of(found: Ran, network: str) -> slice:
    entries = [entry for entry in found.coordinator.layout.entries if entry.network == network]
    return slice(entries[0].start, entries[-1].stop)


def mean_movement(watch: Watch, part: slice, divisors: Sequence[float]) -> np.ndarray:
    """Of the first aggregation: minus the mean over the clients of delta / divisor."""
    rows = [
        -update.delta[part].astype(float) / divisor for update, divisor in zip(watch.updates[0], divisors, strict=True)
    ]
    mean: np.ndarray = np.mean(rows, axis=0)
    return mean


@pytest.mark.parametrize("ratio", [1, 2])
def test_with_dann_each_network_is_divided_by_its_own_steps_and_rate(ratio: int) -> None:
    method = Dann(0.5, width=8, discriminator_steps=ratio, rate=0.25)
    local = Local(lr=0.1, batch=4, epochs=1)
    watch, found = after(method, FedCM(), local=local, schedule=ALL, rounds=2)
    totals = [update.steps for update in watch.updates[0]]
    adversary = [sum(k % (1 + ratio) < ratio for k in range(1, total + 1)) for total in totals]
    own = [total - steps for total, steps in zip(totals, adversary, strict=True)]
    assert len(set(totals)) > 1 and adversary != own
    direction = watch.directions[0].numpy()
    for network, steps, rate in (("model", own, 0.1), (DISCRIMINATOR, adversary, 0.025)):
        part = part_of(found, network)
        wanted = mean_movement(watch, part, [rate * count for count in steps])
        assert np.abs(wanted).max() > 1e-3
        np.testing.assert_allclose(direction[part], wanted, rtol=1e-4, atol=1e-6)


def small_fedbr(**settings: Any) -> FedBR:
    return FedBR(projection="code", pseudo_batch=4, samples_per_mean=3, **settings)


def test_with_fedbr_the_projector_has_a_direction_of_its_own() -> None:
    local = Local(lr=0.1, batch=4, epochs=1)
    watch, found = after(small_fedbr(), FedCM(), local=local, schedule=ALL, rounds=2)
    divisors = [0.1 * update.steps for update in watch.updates[0]]  # either network steps once an iteration
    for network in ("model", PROJECTOR):
        part = part_of(found, network)
        wanted = mean_movement(watch, part, divisors)
        assert np.abs(wanted).max() > 1e-4
        np.testing.assert_allclose(watch.directions[0].numpy()[part], wanted, rtol=1e-4, atol=1e-6)


def test_fedbrs_projector_follows_its_direction_with_the_sign_of_its_movement() -> None:
    local = Local(lr=0.1, epochs=None, steps=1, batch=8)
    host = Host(run_spec(small_fedbr(), local=local))
    start = next(entry.start for entry in host.layout.entries if entry.network == PROJECTOR)
    part = slice(start, host.layout.trained)
    pseudo = random(4 * 64).reshape(4, 1, 8, 8)

    def projector(direction: Tensor, alpha: float) -> Tensor:
        mixing = Host(run_spec(small_fedbr(), FedCM(alpha), local=local))
        base, job = mixing.vector.shared.clone(), Job(0, 2, 0, 0, -1, 1.0)
        download = {DIRECTION: direction, "fedbr.pseudo": pseudo}
        ctx = mixing.trainer.train(job, base, mixing.vector.counters[:0], download, NOTHING)
        return (ctx.vector.shared - base)[part]

    zero, direction = torch.zeros(host.layout.trained), random(host.layout.trained)
    plain, still, mixed = projector(zero, 1.0), projector(zero, 0.25), projector(direction, 0.25)
    assert plain.abs().max() > 1e-5
    assert torch.allclose(still, 0.25 * plain, rtol=0, atol=1e-7)
    assert torch.allclose(mixed - still, -0.1 * 0.75 * direction[part], rtol=0, atol=1e-6)


# --- what is refused ----------------------------------------------------------------------------------------------


def test_adam_is_refused() -> None:
    task = Task((1, 8, 8), 5, 6)
    with pytest.raises(ValueError, match=r"'fedcm' needs SGD, not local\.optimizer=adam"):
        FedCM().check(setup(task, Local(optimizer="adam"), {}))
    assert FedCM().check(setup(task, replace(WHOLE, momentum=0.9), {})) == ()


@pytest.mark.parametrize("alpha", [-0.1, 1.01])
def test_a_mixing_weight_outside_zero_and_one_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"method\.fedcm\.alpha="):
        FedCM(alpha)
