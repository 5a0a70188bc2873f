"""Many clients at once: the same numbers as one after another, and bits that no neighbour changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_conformance import EPOCHS, TABLE
from tiny_runs import BUFFER, MLP, NORMED, NORMED_MLP, coordinate, even, ran, run, run_spec, several
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Outputs
from raysim.api.declarations import Download, Local
from raysim.api.messages import Job, Update
from raysim.api.method import Method
from raysim.api.server_view import Server
from raysim.conformance.agreement import EXACT, in_lanes
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbr import FedBR
from raysim.methods.fedprox import FedProx
from raysim.methods.fedsam import FedSAM
from raysim.models import Mlp
from raysim.models.classifier import ModelRecipe, Shape
from raysim.training.host import Host
from raysim.training.lane import NotInLanes
from raysim.training.lane_step import after, stacked_given
from raysim.training.lanes import uses_graph, usual_lanes
from raysim.training.run_spec import build_networks
from raysim.training.tape import Tape

QUICK = ("fedbr", "moon", "fedmix", "vhl", "fraug", "fedpac", "dann", "fedsam", "scaffold", "fedbss", "local")


def study(*methods: Method, **others: Any) -> Any:
    return run_spec(*methods, **({"model": NORMED_MLP, "local": EPOCHS, "dtype": torch.float64} | others))


def assert_alike(study: Any, **settings: Any) -> None:
    """The run ends at the same numbers in a loop and in lanes."""
    in_lanes(lambda: study, **settings)


def quick_and_slow(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick_and_slow(["fedavg", *TABLE]))
def test_a_method_ends_at_the_same_numbers_in_lanes_and_in_a_loop(name: str) -> None:
    methods = [TABLE[name].make()] if name in TABLE else []
    assert_alike(study(*methods, **({"model": TABLE[name].model} if name in TABLE else {})), rounds=3)


@pytest.mark.parametrize(
    "local",
    [
        Local(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, batch=8, epochs=2),
        Local(lr=0.01, optimizer="adam", batch=8, epochs=2),
        Local(lr=0.05, momentum=0.5, clip=0.1, batch=8, epochs=1),
        Local(lr=0.05, batch=64, epochs=2),  # no client has a full batch
        Local(lr=0.05, batch=8, epochs=None, steps=7, sampling="replacement"),
    ],
    ids=["nesterov", "adam", "clipped", "small clients", "steps"],
)
def test_every_local_option_means_the_same(local: Local) -> None:
    assert_alike(study(local=local, model=MLP), rounds=3)
    assert_alike(study(TABLE["scaffold"].make(), local=local, model=MLP), rounds=3)


class Dropping(ModelRecipe):
    """Dropout of both kinds of layout, and noise."""

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        """See `ModelRecipe`."""
        size = int(np.prod(input_shape))
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(size, 12), nn.ReLU(), nn.Dropout(0.5)), 12


@pytest.mark.parametrize(
    "methods",
    [(), (FedSAM(0.1),), (FedBR(projection="code", pseudo_batch=4, samples_per_mean=3),), (TABLE["fedsr"].make(),)],
    ids=["fedavg", "fedsam", "fedbr", "fedsr"],
)
def test_every_client_draws_the_dropout_that_it_draws_in_a_loop(methods: tuple[Method, ...]) -> None:
    assert_alike(study(*methods, model=Dropping()), rounds=2)


# --- bits -----------------------------------------------------------------------------------------------------------


def trained(recipe_: Any, jobs: Sequence[Job]) -> dict[int, np.ndarray]:
    """Each client's delta, from one call to a fresh host."""
    host = Host(recipe_)
    coordinator = coordinate(recipe_)
    published = coordinator.server.published()
    sent = [None] * len(jobs) if coordinator.private.stateful else []
    found = host.train(jobs, [], 1, published, *sent)
    updates = (found[0] if isinstance(found, tuple) else found).updates
    assert all(isinstance(update, Update) and update.delta is not None for update in updates)
    return {update.client: update.delta for update in updates}


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedntd", "fedsam", "mixup", "fraug"])
def test_a_clients_bits_do_not_depend_on_its_neighbours(name: str) -> None:
    asked = study(*([TABLE[name].make()] if name in TABLE else []), lanes=3, dtype=torch.float32)
    jobs = [Job(number, client, 0, 0, -1, 1.0) for number, client in enumerate(range(6))]
    together = trained(asked, jobs)
    for others in (jobs[::-1], [jobs[4], jobs[1]], jobs[2:3]):
        for client, delta in trained(asked, others).items():
            assert np.array_equal(delta, together[client]), f"client {client} among {[j.client for j in others]}"


def test_with_whole_vectors_in_every_row_a_clients_bits_do_not_depend_on_its_lane_either() -> None:
    asked = run_spec(model=Mlp((32,)), local=Local(lr=0.05, batch=16), data=even(6, 192), lanes=3)
    jobs = [Job(number, client, 0, 0, -1, 1.0) for number, client in enumerate(range(6))]
    together, moved = trained(asked, jobs), trained(asked, [job._replace(number=job.number + 2) for job in jobs])
    assert all(np.array_equal(moved[client], together[client]) for client in range(6))


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fraug"])
def test_runs_in_lanes_end_alike_on_one_host_and_on_three_and_resumed(name: str, tmp_path: Path) -> None:
    def asked() -> Any:
        return study(*([TABLE[name].make()] if name in TABLE else []), lanes=3, dtype=torch.float32)

    straight = run(asked(), BUFFER, rounds=6)
    hosts = ran(coordinate(asked(), BUFFER, runtime=several(asked(), 3), rounds=6))
    assert (hosts.bits, hosts.history) == (straight.bits, straight.history)
    run(asked(), BUFFER, rounds=6, checkpoint_every=3, folder=str(tmp_path))
    resumed = run(asked(), BUFFER, rounds=6, resume=str(tmp_path / "checkpoints" / "round-000003"))
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)


def test_sums_are_folded_in_the_order_of_the_group_whoever_ends_first() -> None:
    asked = study(lanes=3, dtype=torch.float32)
    jobs = [Job(number, client, 0, 0, -1, 1.0 + number) for number, client in enumerate(range(6))]
    single = trained(asked, jobs)
    coordinator = coordinate(asked)
    (total,) = Host(asked).train(jobs, [tuple(range(6))], 1, coordinator.server.published()).sums.values()  # type: ignore[union-attr]
    expected = single[0] * np.float32(1.0)
    for job in jobs[1:]:
        expected = torch.from_numpy(expected).add_(torch.from_numpy(single[job.client]), alpha=job.weight).numpy()
    assert np.array_equal(total, expected)


# --- what cannot be ---------------------------------------------------------------------------------------------------


class Asking(Method):
    """Looks at a number in the middle of a step."""

    name = "asking"

    def term(self, ctx: Context, out: Outputs, batch: Any) -> Tensor:
        return out.logits.sum() * (0.0 if out.logits.max().item() > 0 else 1.0)


class Reporting(Method):
    """Writes a column of the history in the middle of a step."""

    name = "reporting"

    def term(self, ctx: Context, out: Outputs, batch: Any) -> Tensor:
        ctx.report["reporting.step"] = 1.0
        return out.logits.sum() * 0.0


@pytest.mark.parametrize("method", [Asking(), Reporting()], ids=lambda method: method.name)
def test_a_method_that_cannot_train_in_lanes_says_so_by_name(method: Method) -> None:
    assert not run(study(method), rounds=1).failures
    with pytest.raises(NotInLanes, match=rf"runtime.lanes=3: method '{method.name}' .*set runtime.lanes=1"):
        run(study(method, lanes=3), rounds=1)


class Failing(Method):
    """Raises for one client, before or after its training."""

    name = "failing"

    def __init__(self, hook: str):
        self.hook = hook

    def receive(self, ctx: Context) -> None:
        self._look(ctx, "receive")

    def finish(self, ctx: Context) -> None:
        self._look(ctx, "finish")

    def _look(self, ctx: Context, hook: str) -> None:
        if hook == self.hook and ctx.client == 2:
            raise RuntimeError("no data today")


@pytest.mark.parametrize("hook", ["receive", "finish"])
def test_a_client_that_fails_leaves_the_others_alone(hook: str) -> None:
    loop, lanes = (run(study(Failing(hook), lanes=count), rounds=3, tolerate=1.0) for count in (1, 3))
    assert [failure.client for failure in lanes.failures] == [failure.client for failure in loop.failures] != []
    for name, values in loop.tensors.items():
        np.testing.assert_allclose(lanes.tensors[name], values, rtol=EXACT, atol=EXACT, err_msg=name)


# --- how many ---------------------------------------------------------------------------------------------------------


def usual(*methods: Method, concurrency: int = 40, **others: Any) -> int:
    asked = run_spec(*methods, **({"data": even(6, 240), "local": Local(batch=8)} | others))
    return usual_lanes(asked, build_networks(asked)[0], concurrency)


def test_lanes_are_used_unasked_for_small_linear_networks_with_many_clients_under_way() -> None:
    assert [usual(concurrency=count) for count in (10, 20, 39, 40, 1000)] == [1, 5, 5, 10, 10]
    assert usual(TABLE["fedadam"].make()) == 10, "the server's step is no part of a client's"


def test_lanes_are_not_used_unasked_where_they_were_not_measured_to_pay() -> None:
    assert usual(TABLE["scaffold"].make()) == 1
    assert usual(model=NORMED) == 1, "convolutions"
    assert usual(model=Mlp((1200, 1200))) == 1, "a large network"
    assert usual(model=Dropping()) == 1, "draws"
    assert usual(local=Local(batch=64)) == 1, "no full batches"
    assert usual(device="cuda") == 1


def recorded(*methods: Method, asked: bool | None = None, **others: Any) -> bool:
    spec = run_spec(*methods, **others)
    return uses_graph(spec, build_networks(spec)[0], asked)


def test_on_a_gpu_steps_are_recorded_unasked_and_as_many_lanes_as_there_are_clients_up_to_ten() -> None:
    gpu = {"device": "cuda"}
    assert recorded(**gpu) and recorded(TABLE["fedbr"].make(), **gpu) and not recorded()
    assert not recorded(asked=False, **gpu) and recorded(asked=True)
    assert [usual(concurrency=count, graph=True, **gpu) for count in (1, 4, 10, 1000)] == [1, 4, 10, 10]
    assert usual(model=NORMED, graph=True, **gpu) == 10 and usual(TABLE["scaffold"].make(), graph=True, **gpu) == 10
    assert usual(model=Mlp((20_000, 1000)), graph=True, **gpu) == 1, "a large network fills a GPU by itself"


def test_what_others_wrote_and_what_draws_is_not_recorded_unasked() -> None:
    assert not recorded(model=Dropping(), device="cuda"), "draws"
    assert not recorded(Leaning(), device="cuda"), "a method of another package"
    assert not recorded(loss=own_loss, device="cuda")
    with pytest.raises(ValueError, match="draws random numbers"):
        recorded(model=Dropping(), asked=True)


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_modes_that_are_set_later_come_later() -> None:
    before = {"model": True, "model.extractor": False, "fedbr.projector": True}
    assert list(after(before, {"model": False}).items()) == [
        ("model.extractor", False), ("fedbr.projector", True), ("model", False),
    ]  # fmt: skip


def test_clients_in_lanes_may_start_from_different_vectors() -> None:
    assert_alike(study(TABLE["partialfed"].make(), FedProx(0.5), model=TABLE["partialfed"].model), rounds=3)


class Leaning(Method):
    """A pull of a strength that everybody is sent, towards a point that each client is sent for itself."""

    name = "leaning"
    paper = "a test"

    def send(self, server: Server) -> Download:
        """See `Method`."""
        return Download(
            version=lambda: {"leaning.strength": torch.full((1,), 0.3)},
            client=lambda client: {"leaning.point": torch.full((1,), client / 4)},
        )

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """See `Method`."""
        strength, point = (ctx.download[f"leaning.{name}"].to(out.logits) for name in ("strength", "point"))
        return (strength * (out.logits - point).square()).mean()


def test_clients_in_lanes_may_be_sent_different_things() -> None:
    assert_alike(study(Leaning(), model=MLP), rounds=3)


def test_frozen_networks_of_clients_in_lanes_have_personal_layers_of_their_own() -> None:
    assert_alike(study(FedBN(), TABLE["fedntd"].make(), model=NORMED_MLP), rounds=3)


def tapes_after(calls: int) -> tuple[Any, list[bool]]:
    """The loop of a host that trained so many times in lanes, and whether each of its tapes may be played."""
    asked = study(lanes=3, model=NORMED_MLP)
    host, published = Host(asked), coordinate(asked).server.published()
    for call in range(calls):
        host.train([Job(3 * call + client, client, call, 0, -1, 1.0) for client in range(3)], [], 1, published)
    loop: Any = host.loop
    return loop, [trusted for _, trusted in loop.tapes.values()]


def test_steps_are_played_once_their_tape_has_shown_the_same_bits() -> None:
    loop, trusted = tapes_after(2)
    assert loop.plain and any(trusted)


def test_a_tape_that_leaves_other_statistics_is_never_played(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Tape.play

    def play(tape: Tape, inputs: Sequence[Tensor]) -> list[Tensor]:
        found = whole(tape, inputs)
        inputs[-1].add_(1)  # how many batches BatchNorm has seen
        return found

    monkeypatch.setattr(Tape, "play", play)
    loop, trusted = tapes_after(2)
    assert trusted and not loop.plain and not any(trusted)


def test_a_second_pass_of_a_later_stage_computes_everything_anew() -> None:
    fedbr = FedBR(projection="code", pseudo_batch=4, samples_per_mean=3)
    assert_alike(study(FedSAM(0.5), fedbr, model=MLP), rounds=2)


def test_a_download_is_shared_by_lanes_only_where_all_have_the_same_one() -> None:
    """Three clients, of whom each has something of its own besides, and the last one an older version."""
    new, old = torch.ones(2), torch.zeros(2)
    base = torch.zeros(2)
    lanes: Any = SimpleNamespace(
        asked=SimpleNamespace(entries=[("download", "direction")]),
        shape=lambda lane, table, key: (2,),
        stacked=lambda table, key, rows, active: torch.stack([lane.ctx.download[key] for lane in active]),
        clients=lambda rows, active: torch.tensor(rows),
    )

    def given(*directions: Tensor) -> tuple[Any, dict[str, Tensor]]:
        own = [{"direction": each, "own": torch.tensor(number)} for number, each in enumerate(directions)]
        active: Any = [SimpleNamespace(ctx=SimpleNamespace(download=each, base=base)) for each in own]
        return stacked_given(lanes, range(len(active)), active)

    asked, common = given(new, new, new)
    assert common == {"direction": new} and not asked["download"]
    asked, common = given(new, new, old)
    assert not common and asked["download"]["direction"].tolist() == [[1, 1], [1, 1], [0, 0]]
