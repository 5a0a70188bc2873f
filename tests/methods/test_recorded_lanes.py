"""Recorded steps: `Step` on tensors that stay where they are, for every method.

On a CPU a recording computes the step again in place of replaying a CUDA graph. Like a graph it
knows the client only by what was copied in, and cannot read a value: a Python number that should
have been a tensor shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_batched_lanes import Dropping, Failing, trained
from test_conformance import EPOCHS, TABLE
from tiny_runs import BUFFER, MLP, NORMED_MLP, Ran, coordinate, ran, run, run_spec, several
from torch import Tensor, float64

from raysim.api.context import Outputs, Stage
from raysim.api.declarations import Local
from raysim.api.messages import Job
from raysim.api.method import Method
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbr import FedBR
from raysim.methods.fedprox import FedProx
from raysim.methods.fedsam import FedSAM
from raysim.methods.mixup import Mixup
from raysim.models import SmallCnn
from raysim.primitives.errors import Refused
from raysim.training import recorded_lanes
from raysim.training.lanes import LanesError
from raysim.training.recorded_lanes import RecordedLanes, modes_after
from raysim.training.run_spec import RunSpec, build_networks
from raysim.training.step_mode import uses_graph
from raysim.training.worker import Worker

NEAR = 1e-8  # in float64, of the loop: a rate that is a tensor is multiplied with another rounding
DRAWING = "fedsr"
QUICK = (
    "scaffold",
    "groupdro",
    "dann",
    "fedmix",
    "fedpac",
    "moon",
    "fedbss",
    "local",
    "fedbr",
    "vhl",
)


def study(*methods: Method | str, **others: Any) -> RunSpec:
    """A run in three recorded lanes, of methods or of a row of the conformance table."""
    model = NORMED_MLP
    parts: list[Method] = []
    for method in methods:
        row = TABLE.get(method) if isinstance(method, str) else None
        parts += [method] if isinstance(method, Method) else [row.make()] if row else []
        model = row.model if row else model
    return run_spec(
        *parts, **({"model": model, "local": EPOCHS, "lanes": 3, "graph": True} | others)
    )


def loop_of(ended: Ran) -> RecordedLanes:
    loop = ended.coordinator.runtime.members[0].loop  # type: ignore[attr-defined]
    assert isinstance(loop, RecordedLanes)
    return loop


def assert_near(ended: Ran, expected: Ran) -> None:
    assert not ended.failures, ended.failures[0].error
    for one, other in ((expected.tensors, ended.tensors), (expected.private, ended.private)):
        assert one.keys() == other.keys()
        for name, values in one.items():
            np.testing.assert_allclose(other[name], values, rtol=NEAR, atol=NEAR, err_msg=name)


def assert_as_in_loop(spec: RunSpec, **settings: Any) -> Ran:
    """The recorded run ends at the loop's numbers, with the same history."""
    spec = replace(spec, dtype=float64)
    ended, expected = run(spec, **settings), run(replace(spec, lanes=1, graph=False), **settings)
    assert_near(ended, expected)
    assert [row.keys() for row in ended.history] == [row.keys() for row in expected.history]
    return ended


def quick_and_slow(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


class TestNumbers:
    @pytest.mark.parametrize(
        "name", quick_and_slow([name for name in ("fedavg", *TABLE) if name != DRAWING])
    )
    def test_every_method_ends_where_the_loop_ends(self, name: str) -> None:
        ended = assert_as_in_loop(study(name), rounds=3)
        assert 0 < len(loop_of(ended).recordings) <= 32, (
            "few kinds of iterations, whatever the number of rounds"
        )

    @pytest.mark.parametrize(
        "local",
        [
            Local(
                lr=0.05,
                momentum=0.9,
                nesterov=True,
                weight_decay=0.01,
                batch=8,
                epochs=2,
                lr_decay=0.7,
            ),
            Local(lr=0.01, optimizer="adam", batch=8, epochs=2, lr_decay=0.7),
            Local(lr=0.05, momentum=0.5, clip=0.1, batch=8, epochs=1),
            Local(lr=0.05, batch=8, epochs=None, steps=7, sampling="replacement"),
            Local(lr=0.05, momentum=0.9, batch=8, epochs=1, keep_optimizer=True),
            Local(lr=0.01, optimizer="adam", batch=8, epochs=1, keep_optimizer=True),
        ],
        ids=["nesterov", "adam", "clip", "steps", "kept momentum", "kept adam"],
    )
    @pytest.mark.parametrize("lanes", [1, 3])
    def test_rates_and_counts_of_steps_are_inputs(self, local: Local, lanes: int) -> None:
        ended = assert_as_in_loop(study(local=local, lanes=lanes), rounds=4)
        assert 1 <= len(loop_of(ended).recordings) <= 8, (
            "one for each size of a batch and each lane, whatever the rate"
        )

    def test_convolutions_and_batch_norm_end_where_the_loop_ends(self) -> None:
        assert_as_in_loop(study("fedbr", model=SmallCnn(norm="batch")), rounds=2)

    def test_a_second_pass_of_a_later_stage_is_recorded(self) -> None:
        fedbr = FedBR(projection="code", pseudo_batch=4, samples_per_mean=3)
        assert_as_in_loop(study(FedSAM(0.5), fedbr, model=MLP), rounds=2)

    def test_frozen_networks_have_the_clients_personal_layers(self) -> None:
        assert_as_in_loop(study(FedBN(), TABLE["fedntd"].make()), rounds=3)

    def test_clients_may_start_from_different_vectors(self) -> None:
        assert_as_in_loop(
            study(TABLE["partialfed"].make(), FedProx(0.5), model=TABLE["partialfed"].model),
            rounds=3,
        )

    def test_clients_may_be_sent_different_things(self) -> None:
        assert_as_in_loop(study(Leaning(), model=MLP), rounds=3)

    @pytest.mark.parametrize("name", quick_and_slow(["fedavg", *TABLE]))
    def test_products_in_bfloat16_train_a_float32_vector(self, name: str) -> None:
        ways = [{"lanes": 1, "graph": False}, {"lanes": 3, "graph": True}]
        coarse = [
            run(study(name, precision="bfloat16", **way), rounds=2)
            for way in ways
            if name != DRAWING
        ]
        fine = run(study(name, lanes=1, graph=False), rounds=2)
        for ended in coarse:
            assert not ended.failures, ended.failures[0].error
            assert ended.bits != fine.bits
            for key, values in ended.tensors.items():
                assert values.dtype == fine.tensors[key].dtype and np.isfinite(values).all()

    def test_a_hook_sees_the_same_in_bfloat16(self) -> None:
        assert not run(run_spec(Mixup(), precision="bfloat16"), rounds=1).failures


class Leaning(Method):
    """A pull towards a point that each client is sent, of a strength that all are sent."""

    name = "leaning"
    paper = "a test"

    def setup(self, run: Any) -> None:
        run.send("strength", lambda server: torch.full((1,), 0.3), 1)
        run.send_to_client("point", lambda client, server: torch.full((1,), client / 4), 1)

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        strength, point = (job.received[name].to(out.logits) for name in ("strength", "point"))
        return loss + (strength * (out.logits - point).square()).mean()


class TestBits:
    @pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedsam", "mixup"])
    def test_no_other_client_changes_a_clients_bits(self, name: str) -> None:
        spec = study(name)
        jobs = [Job(number, client, 0, 0, -1, 1.0) for number, client in enumerate(range(6))]
        together = trained(spec, jobs)
        for some in (jobs[::-1], [jobs[4], jobs[1]], jobs[2:3]):
            for client, delta in trained(spec, some).items():
                assert np.array_equal(delta, together[client]), [job.client for job in some]

    @pytest.mark.parametrize("name", ["scaffold", pytest.param("fraug", marks=pytest.mark.slow)])
    def test_two_workers_change_no_bit(self, name: str) -> None:
        here = run(study(name), BUFFER, rounds=5)
        there = ran(coordinate(study(name), BUFFER, runtime=several(study(name), 2), rounds=5))
        assert (there.bits, there.history) == (here.bits, here.history)

    @pytest.mark.parametrize("name", ["fedavg", "scaffold", "dann"])
    def test_computing_without_recording_changes_no_bit(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replayed = run(study(name), rounds=3)
        monkeypatch.setattr(RecordedLanes, "_is_recorded", lambda loop, lane: False)
        computed = run(study(name), rounds=3)
        assert not loop_of(computed).recordings and computed.bits == replayed.bits

    def test_dropping_recordings_changes_no_bit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = run(study("moon"), rounds=3)
        monkeypatch.setattr(recorded_lanes, "MAX_RECORDINGS", 1)
        dropped = run(study("moon"), rounds=3)
        assert len(loop_of(dropped).recordings) == 1 and dropped.bits == kept.bits


class TestInputs:
    """What is copied into a recording, and what decides which one is replayed."""

    def test_only_what_a_step_reads_is_an_input(self) -> None:
        loop = loop_of(run(study("scaffold"), rounds=3))
        assert list(loop.reads.entries) == [
            ("state", "scaffold.control"),
            ("download", "scaffold.control"),
        ]
        assert not loop.reads.facts

    def test_what_all_lanes_share_is_copied_once(self) -> None:
        loop = loop_of(run(study("scaffold"), rounds=3))
        together = next(
            recording for recording in loop.recordings.values() if len(recording._lanes) == 3
        )
        owners = {(table, owner) for owner, table, _ in together._inputs}
        assert ("download", recorded_lanes.SHARED) in owners and (
            "rate",
            recorded_lanes.SHARED,
        ) in owners
        assert {owner for table, owner in owners if table == "state"} == {0, 1, 2}

    def test_a_python_value_that_is_read_decides_the_recording(self) -> None:
        loop = loop_of(run(study(Ramping()), rounds=4))
        assert list(loop.reads.facts) == ["version"]
        assert_as_in_loop(study(Ramping()), rounds=4)

    def test_a_client_number_that_is_read_decides_the_recording(self) -> None:
        assert_as_in_loop(study(Numbered()), rounds=4)

    def test_an_entry_that_comes_later_in_a_job_decides_the_recording(self) -> None:
        assert_as_in_loop(study(Remembering()), rounds=3)

    def test_an_entry_that_the_step_writes_itself_is_no_input(self) -> None:
        loop = loop_of(run(study("fedmix"), rounds=2))
        assert not [entry for entry in loop.reads.entries if entry[0] == "kept"]


class Ramping(Method):
    """A term that grows with the version."""

    name = "ramping"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        return loss + 0.01 * job.version * out.logits.square().mean()


class Numbered(Method):
    """A term that depends on the client's number."""

    name = "numbered"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        return loss + 0.01 * job.client * out.logits.square().mean()


class Remembering(Method):
    """Pulls the mean output to that of the job's first batch."""

    name = "remembering"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        mean = out.logits.mean(0)
        if "mean" not in job.scratch:
            job.scratch["mean"] = mean.detach()
        return loss + 0.1 * (mean - job.scratch["mean"]).square().sum()


# --- what cannot be recorded -----------------------------------------------------------------


class Asking(Method):
    """Reads a value in the middle of a step."""

    name = "asking"

    def __init__(self, read: Callable[[Tensor], Any]):
        self.read = read

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        return loss + out.logits.sum() * (0.0 if self.read(out.logits.detach().max()) else 1e-9)


def nonzeros(value: Tensor) -> int:
    return len(value.nonzero())


class Reporting(Method):
    """Writes a column of the history in the middle of a step."""

    name = "reporting"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        job.report["step"] = 1.0
        return loss + out.logits.sum() * 0.0


class Returning(Method):
    """Returns nothing from a hook."""

    name = "returning"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Any:
        return None


class Undeclaring(Method):
    """Reads state that it has not declared."""

    name = "undeclaring"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        return loss + job.state["x"].sum()


class TestRefusals:
    @pytest.mark.parametrize(
        "read", [Tensor.item, bool, float, int, Tensor.tolist, Tensor.numpy, nonzeros]
    )
    def test_a_method_that_reads_a_value_is_named(self, read: Callable[[Tensor], Any]) -> None:
        assert not run(study(Asking(read), lanes=1, graph=False), rounds=1).failures
        with pytest.raises(
            LanesError, match=r"^runtime\.graph=true: .*'asking'.*runtime\.graph=false"
        ):
            run(study(Asking(read)), rounds=1)

    def test_a_method_that_reports_in_a_step_is_named(self) -> None:
        with pytest.raises(LanesError, match=r"^runtime\.graph=true: method 'reporting'"):
            run(study(Reporting()), rounds=1)

    @pytest.mark.parametrize("method", [Returning(), Undeclaring()], ids=lambda method: method.name)
    def test_a_mistake_of_a_hook_is_not_said_to_need_a_loop(self, method: Method) -> None:
        with pytest.raises(Refused, match=method.name) as refused:
            run(study(method), rounds=1)
        assert not isinstance(refused.value, LanesError)

    def test_a_model_that_draws_is_refused(self) -> None:
        with pytest.raises(
            Refused, match=r"^runtime\.graph=true: the model draws.*runtime\.graph=false"
        ):
            Worker(study(model=Dropping()))


@pytest.mark.parametrize("hook", ["begin", "end"])
def test_a_client_that_fails_leaves_the_others_alone(hook: str) -> None:
    ways = [{"lanes": 1, "graph": False}, {"lanes": 3, "graph": True}]
    loop, lanes = (
        run(study(Failing(hook), dtype=float64, **way), rounds=3, tolerate=1.0) for way in ways
    )
    assert (
        [failure.client for failure in lanes.failures]
        == [failure.client for failure in loop.failures]
        != []
    )
    for name, values in loop.tensors.items():
        np.testing.assert_allclose(lanes.tensors[name], values, rtol=NEAR, atol=NEAR, err_msg=name)


def test_modes_that_are_set_later_win() -> None:
    before = {"model": True, "model.extractor": False, "fedbr.projector": True}
    after = modes_after(before, [Stage(modes={"model": False})])
    assert list(after.items()) == [
        ("model.extractor", False),
        ("fedbr.projector", True),
        ("model", False),
    ]


def recorded(*methods: Method, asked: bool | None = None, **others: Any) -> bool:
    spec = run_spec(*methods, **others)
    return uses_graph(spec, build_networks(spec)[0], asked)


class TestUsual:
    def test_built_in_parts_are_recorded_on_a_gpu(self) -> None:
        assert (
            recorded(device="cuda")
            and recorded(TABLE["fedbr"].make(), device="cuda")
            and not recorded()
        )
        assert not recorded(asked=False, device="cuda") and recorded(asked=True)

    def test_parts_of_others_and_draws_are_not_recorded(self) -> None:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

        assert not recorded(model=Dropping(), device="cuda")
        assert not recorded(Leaning(), device="cuda")
        assert not recorded(loss=loss, device="cuda")
