"""Test recorded steps with every method except FedSR, whose model draws random numbers.

The tests find methods that use a Python number, and not a tensor, for a value that differs between
clients. On a CPU, a replay runs the Python code again. The code gets tensors with current values,
but Python numbers from the time of the recording. So such a method has a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_batched_lanes import LOCALS, Dropping, Failing, trained
from test_conformance import EPOCHS, TABLE
from test_synchronisations import waits_of_recorded_steps
from tiny_runs import (
    BUFFER,
    MLP,
    NORMED_MLP,
    FinishedRun,
    coordinate,
    equal_clients,
    run,
    run_spec,
    run_to_end,
    several_workers,
    tiny_data,
)
from torch import Tensor, float64

from raysim.api.context import Outputs, Stage
from raysim.api.declarations import Local
from raysim.api.messages import Job
from raysim.api.method import Method
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbr import FedBR
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedcm import FedCM
from raysim.methods.fedprox import FedProx
from raysim.methods.fedsam import FedSAM
from raysim.methods.fraug import FRAug
from raysim.methods.mixup import Mixup
from raysim.methods.vhl import Vhl
from raysim.models import SmallCnn
from raysim.primitives.errors import RefusedError
from raysim.training import recorded_lanes
from raysim.training.lanes import LanesError
from raysim.training.recorded_lanes import RecordedLanes, modes_after
from raysim.training.run_spec import RunSpec, build_networks
from raysim.training.step_mode import uses_graph
from raysim.training.worker import Worker

NEAR = 1e-8  # in float64, of the loop: a rate that is a tensor is multiplied with another rounding
NEAR_OF_ADAM = 1e-6
# Without a full batch nothing is recorded.
RECORDED = {name: local for name, local in LOCALS.items() if name != "no full batch"}
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
    """Return a run in three lanes with recorded steps.

    methods: methods, or names of rows in the conformance table. A row gives a method and the run's
    model.
    others: further arguments of `run_spec`.
    """
    model = NORMED_MLP
    parts: list[Method] = []
    for method in methods:
        row = TABLE.get(method) if isinstance(method, str) else None
        parts += [method] if isinstance(method, Method) else [row.make()] if row else []
        model = row.model if row else model
    settings = {"model": model, "local": EPOCHS, "lanes": 3, "graph": True}
    return run_spec(*parts, **(settings | {"data": tiny_data(samples=92)} | others))


def loop_of(ended: FinishedRun) -> RecordedLanes:
    loop = ended.coordinator.runtime.members[0].loop  # type: ignore[attr-defined]
    assert isinstance(loop, RecordedLanes)
    return loop


def assert_near(ended: FinishedRun, expected: FinishedRun, near: float = NEAR) -> None:
    assert not ended.failures, ended.failures[0].error
    for one, other in ((expected.tensors, ended.tensors), (expected.private, ended.private)):
        assert one.keys() == other.keys()
        for name, values in one.items():
            np.testing.assert_allclose(other[name], values, rtol=near, atol=near, err_msg=name)


def assert_as_in_loop(spec: RunSpec, **settings: Any) -> FinishedRun:
    """Assert that recorded steps have the results of ordinary steps; return the recorded run.

    The ordinary run has one lane. Models and client states must be equal up to rounding, and
    histories must have the same columns.

    spec: the run with recorded steps. Its dtype is replaced by float64.
    settings: arguments of the function `run`.
    """
    spec = replace(spec, dtype=float64)
    ended, expected = run(spec, **settings), run(replace(spec, lanes=1, graph=False), **settings)
    # Adam divides a gradient near 0 by its own size, so a difference in rounding grows.
    is_adam = spec.settings.local.optimizer in ("adam", "adamw")
    assert_near(ended, expected, NEAR_OF_ADAM if is_adam else NEAR)
    assert [row.keys() for row in ended.history] == [row.keys() for row in expected.history]
    return ended


def quick_and_slow(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


class TestNumbers:
    @pytest.mark.parametrize(
        "name", quick_and_slow([name for name in ("fedavg", *TABLE) if name != DRAWING])
    )
    def test_recorded_lanes_of_each_method_equal_unrecorded_training(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        operations = waits_of_recorded_steps(monkeypatch)
        ended = assert_as_in_loop(study(name), rounds=3)
        assert not operations, "a GPU cannot run ahead of Python"
        assert 0 < len(loop_of(ended).recordings) <= 32, (
            "few kinds of iterations, whatever the number of rounds"
        )

    @pytest.mark.parametrize("local", RECORDED.values(), ids=RECORDED)
    @pytest.mark.parametrize("lanes", [1, 3])
    def test_one_recording_is_used_for_all_learning_rates_and_numbers_of_steps(
        self, local: Local, lanes: int
    ) -> None:
        ended = assert_as_in_loop(study(local=local, lanes=lanes), rounds=4)
        assert 1 <= len(loop_of(ended).recordings) <= 8, (
            "one for each size of a batch and each lane, whatever the rate"
        )

    def test_recorded_steps_use_the_sample_weights_of_each_batch(self) -> None:
        method = FedBSS(1, fraction_of="loss")
        assert_as_in_loop(study(method, local=EPOCHS), rounds=3)

    def test_recorded_fraug_training_is_correct_if_its_metrics_are_per_class(self) -> None:
        method = FRAug(3, noise_dim=4, generator_metric="mmd_classes", rtnet_metric="mmd_classes")
        assert_as_in_loop(study(method, model=NORMED_MLP), rounds=2)

    def test_recorded_steps_with_convolutions_equal_unrecorded_steps(self) -> None:
        assert_as_in_loop(study("fedbr", model=SmallCnn(norm="batch")), rounds=2)

    def test_fedsam_in_a_step_with_several_stages_can_be_recorded(self) -> None:
        fedbr = FedBR(projection="code", pseudo_batch=4, samples_per_mean=3)
        assert_as_in_loop(study(FedSAM(0.5), fedbr, model=MLP), rounds=2)

    def test_frozen_model_copy_has_personal_layers_if_steps_are_recorded(self) -> None:
        assert_as_in_loop(study(FedBN(), TABLE["fedntd"].make()), rounds=3)

    def test_recorded_training_is_correct_if_lanes_start_from_different_models(self) -> None:
        assert_as_in_loop(
            study(TABLE["partialfed"].make(), FedProx(0.5), model=TABLE["partialfed"].model),
            rounds=3,
        )

    def test_recorded_step_can_use_different_tensors_from_the_server_in_each_lane(self) -> None:
        assert_as_in_loop(study(Leaning(), model=MLP), rounds=3)

    @pytest.mark.parametrize(
        "name", quick_and_slow([name for name in ("fedavg", *TABLE) if name != DRAWING])
    )
    def test_recorded_bfloat16_training_leaves_parameters_in_float32(self, name: str) -> None:
        def in_loop(precision: str) -> FinishedRun:
            return run(study(name, precision=precision, lanes=1, graph=False), rounds=2)

        coarse = [run(study(name, precision="bfloat16"), rounds=2)]
        if name in QUICK:
            coarse.append(in_loop("bfloat16"))
            fine = in_loop("float32")
            assert all(ended.bits != fine.bits for ended in coarse)
        for ended in coarse:
            assert not ended.failures, ended.failures[0].error
            for values in ended.tensors.values():
                assert values.dtype in (np.float32, np.int64) and np.isfinite(values).all()

    def test_recorded_mixup_trains_in_bfloat16(self) -> None:
        assert not run(run_spec(Mixup(), precision="bfloat16"), rounds=1).failures


class Leaning(Method):
    """A method that pulls the outputs of client c towards c / 4.

    The server sends the number c / 4 to client c, and the strength of the pull to all clients.
    """

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
    def test_recorded_lane_does_not_depend_on_other_lanes(self, name: str) -> None:
        spec = study(name)
        jobs = [Job(number, client, 0, 0, -1, 1.0) for number, client in enumerate(range(6))]
        together = trained(spec, jobs)
        for some in (jobs[::-1], [jobs[4], jobs[1]], jobs[2:3]):
            for client, delta in trained(spec, some).items():
                assert np.array_equal(delta, together[client]), [job.client for job in some]

    @pytest.mark.parametrize("name", ["scaffold", pytest.param("fraug", marks=pytest.mark.slow)])
    def test_recorded_lanes_have_the_same_bits_on_two_workers(self, name: str) -> None:
        one_worker = run(study(name), BUFFER, rounds=5)
        two_workers = run_to_end(
            coordinate(study(name), BUFFER, runtime=several_workers(study(name), 2), rounds=5)
        )
        assert two_workers.bits == one_worker.bits
        assert two_workers.history == one_worker.history

    @pytest.mark.parametrize("name", ["fedavg", "scaffold", "dann"])
    def test_recorded_and_unrecorded_steps_have_the_same_bits(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replayed = run(study(name), rounds=3)
        monkeypatch.setattr(RecordedLanes, "_is_recorded", lambda loop, lane: False)
        computed = run(study(name), rounds=3)
        assert not loop_of(computed).recordings and computed.bits == replayed.bits

    def test_dropped_recordings_do_not_change_the_bits_of_training(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        complete = run(study("moon"), rounds=3)
        monkeypatch.setattr(recorded_lanes, "MAX_RECORDINGS", 1)
        dropped = run(study("moon"), rounds=3)
        assert len(loop_of(dropped).recordings) == 1 and dropped.bits == complete.bits


class TestInputs:
    """Test which tensors and Python values raysim finds as the inputs of a recorded step."""

    def test_inputs_of_recording_are_the_tensors_that_a_step_reads(self) -> None:
        loop = loop_of(run(study("scaffold"), rounds=3))
        assert list(loop.reads.entries) == [
            ("state", "scaffold.control"),
            ("download", "scaffold.control"),
        ]
        assert not loop.reads.facts

    def test_recording_copies_an_input_only_once_if_all_lanes_share_it(self) -> None:
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

    def test_recorder_lists_the_python_values_that_a_step_reads(self) -> None:
        loop = loop_of(run(study(Ramping()), rounds=4))
        assert list(loop.reads.facts) == ["version"]
        assert_as_in_loop(study(Ramping()), rounds=4)

    def test_recorded_step_can_use_the_client_number_of_each_lane(self) -> None:
        assert_as_in_loop(study(Numbered()), rounds=4)

    def test_recorded_steps_can_use_a_tensor_stored_by_the_first_step_of_a_job(self) -> None:
        assert_as_in_loop(study(Remembering()), rounds=3)

    def test_value_that_a_step_only_writes_is_not_an_input_of_its_recording(self) -> None:
        loop = loop_of(run(study("fedmix"), rounds=2))
        assert not [entry for entry in loop.reads.entries if entry[0] == "kept"]


FRAUG = {"rounds": 9, "noise_dim": 4, "gamma": 0.5}
# Methods with a weight or a decision that depends on the version or on the step.
SCHEDULED: dict[str, Callable[[], Method]] = {
    "floats and booleans": lambda: Scheduled(),
    "fraug": lambda: FRAug(**FRAUG),
    "fraug, ramps of Laine and Aila": lambda: FRAug(
        **FRAUG, ramp="laine_aila", prototype_ramp=True
    ),
    "fraug, reciprocal ramp": lambda: FRAug(**FRAUG, ramp="reciprocal"),
    "fraug without RTNet": lambda: FRAug(**FRAUG, use_rtnet=False, residual=0.5),
    "fedcm with a first plain round": lambda: FedCM(0.3, warm_start=True),
    "vhl": lambda: Vhl(virtual=20, virtual_batch=5, align_epochs=1),
}


class TestWeightsThatChange:
    """Test recorded steps of methods whose weights or decisions change during a run."""

    @pytest.mark.parametrize("name", SCHEDULED)
    def test_number_of_recordings_does_not_grow_with_the_number_of_rounds(self, name: str) -> None:
        spec = study(SCHEDULED[name](), data=equal_clients(samples=90), lanes=1)
        loops = [loop_of(run(spec, rounds=rounds)) for rounds in (4, 9)]
        assert not loops[1].reads.facts
        few, many = (len(loop.recordings) for loop in loops)
        assert 0 < few == many

    @pytest.mark.parametrize("name", SCHEDULED)
    def test_recorded_steps_use_the_weights_of_their_round(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = study(SCHEDULED[name]())
        assert_as_in_loop(spec, rounds=2)  # rounding errors of FRAug grow fast
        replayed = run(spec, rounds=4)
        monkeypatch.setattr(RecordedLanes, "_is_recorded", lambda loop, lane: False)
        assert run(spec, rounds=4).bits == replayed.bits

    @pytest.mark.parametrize("lanes", [1, 3])
    def test_floats_of_client_state_differ_between_lanes(self, lanes: int) -> None:
        assert_as_in_loop(study(Counting(), lanes=lanes), rounds=6)

    def test_second_gradient_of_a_recorded_step_uses_the_weights_of_its_round(self) -> None:
        assert_as_in_loop(study(Scheduled(), FedSAM(0.5)), rounds=4)


class Scheduled(Method):
    """A method with a loss term whose weight grows with the version, but only in even versions."""

    name = "scheduled"

    def begin(self, job: Any) -> None:
        job.scratch["weight"] = 0.01 * job.version
        job.scratch["is_even"] = job.version % 2 == 0

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        if not job.scratch["is_even"]:
            return loss
        return loss + job.scratch["weight"] * out.logits.square().mean()


class Counting(Method):
    """A method with a loss term whose weight grows with each job of the client."""

    name = "counting"

    def setup(self, run: Any) -> None:
        run.client_state("weight", lambda samples: 0.0)

    def begin(self, job: Any) -> None:
        job.state["weight"] = job.state["weight"] + 0.01

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        return loss + job.state["weight"] * out.logits.square().mean()


class Ramping(Method):
    """A method with a loss term that grows with the version."""

    name = "ramping"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        return loss + 0.01 * job.version * out.logits.square().mean()


class Numbered(Method):
    """A method with a loss term that depends on the client's number."""

    name = "numbered"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        return loss + 0.01 * job.client * out.logits.square().mean()


class Remembering(Method):
    """A method that pulls the mean output of each batch to that of the job's first batch."""

    name = "remembering"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        mean = out.logits.mean(0)
        if "mean" not in job.scratch:
            job.scratch["mean"] = mean.detach()
        return loss + 0.1 * (mean - job.scratch["mean"]).square().sum()


# --- what cannot be recorded -----------------------------------------------------------------


class Asking(Method):
    """A method whose loss needs the value of a tensor in Python, so no step can be recorded.

    read: the function that reads the value, such as `Tensor.item`.
    """

    name = "asking"

    def __init__(self, read: Callable[[Tensor], Any]):
        self.read = read

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        return loss + out.logits.sum() * (0.0 if self.read(out.logits.detach().max()) else 1e-9)


def nonzeros(value: Tensor) -> int:
    return len(value.nonzero())


class Reporting(Method):
    """A method that writes a column of the history in the middle of a step."""

    name = "reporting"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        job.report["step"] = 1.0
        return loss + out.logits.sum() * 0.0


class Listing(Method):
    """A method that reads a list in a step.

    is_written: True if the step also writes the list.
    """

    name = "listing"

    def __init__(self, is_written: bool):
        self.is_written = is_written

    def begin(self, job: Any) -> None:
        job.scratch["weights"] = [0.0, 1.0]

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        if self.is_written:
            job.scratch["weights"] = [0.0, 2.0]
        return loss + job.scratch["weights"][0] * out.logits.sum()


class Returning(Method):
    """A method with a hook that returns nothing."""

    name = "returning"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Any:
        return None


class Undeclaring(Method):
    """A method that reads client state which it has not declared."""

    name = "undeclaring"

    def loss(self, job: Any, out: Outputs, loss: Tensor) -> Tensor:
        return loss + job.state["x"].sum()


class TestRefusals:
    @pytest.mark.parametrize(
        "read", [Tensor.item, bool, float, int, Tensor.tolist, Tensor.numpy, nonzeros]
    )
    def test_error_says_which_method_reads_tensor_values_in_a_recording(
        self, read: Callable[[Tensor], Any]
    ) -> None:
        assert not run(study(Asking(read), lanes=1, graph=False), rounds=1).failures
        with pytest.raises(
            LanesError, match=r"^runtime\.graph=true: .*'asking'.*runtime\.graph=false"
        ):
            run(study(Asking(read)), rounds=1)

    def test_error_says_which_method_writes_a_report_in_a_recorded_step(self) -> None:
        with pytest.raises(LanesError, match=r"^runtime\.graph=true: method 'reporting'"):
            run(study(Reporting()), rounds=1)

    @pytest.mark.parametrize("is_written", [False, True])
    def test_error_says_which_method_uses_a_list_in_a_recorded_step(self, is_written: bool) -> None:
        assert not run(study(Listing(is_written), lanes=1, graph=False), rounds=1).failures
        with pytest.raises(LanesError, match=r"^runtime\.graph=true: method 'listing'.*weights"):
            run(study(Listing(is_written)), rounds=1)

    @pytest.mark.parametrize("method", [Returning(), Undeclaring()], ids=lambda method: method.name)
    def test_invalid_hook_raises_an_error_about_its_method_and_no_lanes_error(
        self, method: Method
    ) -> None:
        """A `LanesError` would advise to turn recording off, which does not help here."""
        with pytest.raises(RefusedError, match=method.name) as refused:
            run(study(method), rounds=1)
        assert not isinstance(refused.value, LanesError)

    def test_recorded_step_is_refused_if_the_model_draws_random_numbers(self) -> None:
        with pytest.raises(
            RefusedError, match=r"^runtime\.graph=true: the model draws.*runtime\.graph=false"
        ):
            Worker(study(model=Dropping()))


@pytest.mark.parametrize("hook", ["begin", "end"])
def test_recorded_lane_that_fails_does_not_change_other_lanes(hook: str) -> None:
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


def test_network_moves_to_the_end_of_the_list_of_modes_when_its_mode_is_set() -> None:
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
    def test_runs_with_only_built_in_code_are_recorded_on_a_gpu_by_default(self) -> None:
        assert (
            recorded(device="cuda")
            and recorded(TABLE["fedbr"].make(), device="cuda")
            and not recorded()
        )
        assert not recorded(asked=False, device="cuda") and recorded(asked=True)

    def test_steps_with_user_code_or_dropout_are_not_recorded_by_default(self) -> None:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

        assert not recorded(model=Dropping(), device="cuda")
        assert not recorded(Leaning(), device="cuda")
        assert not recorded(loss=loss, device="cuda")
