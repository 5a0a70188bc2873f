"""Test lanes that train with batched matrix products.

The result equals that of training one client after another, up to rounding. The bits of a client's
result do not depend on the clients in the other lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    BUFFER,
    MLP,
    NORMED,
    NORMED_MLP,
    coordinate,
    equal_clients,
    run,
    run_spec,
    run_to_end,
    several_workers,
)
from torch import nn

from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.api.messages import Job, Update
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.methods.ditto import Ditto
from raysim.methods.fedopt import FedAdam
from raysim.methods.fedprox import FedProx
from raysim.methods.local import LocalTraining
from raysim.methods.scaffold import Scaffold
from raysim.models import Lora, Mlp
from raysim.models.classifier import Classifier, ModelRecipe, Shape
from raysim.models.split import WholeNetwork
from raysim.primitives.errors import RefusedError
from raysim.training.batched_lanes import linear_chain
from raysim.training.run_spec import RunSpec, declare_run
from raysim.training.step_mode import check_step_mode, default_lanes
from raysim.training.worker import Worker
from raysim.vectors.tree_sum import weighted_sum

EXACT = 1e-9  # float64 from end to end: what is left is the order in which products are summed
EPOCHS = Local(lr=0.05, momentum=0.5, batch=8, epochs=2)
# Every local option, for all kinds of lanes.
LOCALS = {
    "nesterov": Local(
        lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, batch=8, epochs=2, lr_decay=0.7
    ),
    "adam": Local(lr=0.01, optimizer="adam", batch=8, epochs=2, lr_decay=0.7),
    "clip": Local(lr=0.05, momentum=0.5, clip=0.1, batch=8, epochs=1),
    "no full batch": Local(lr=0.05, batch=64, epochs=2),
    "steps": Local(lr=0.05, batch=8, epochs=None, steps=7, sampling="replacement"),
    "kept momentum": Local(lr=0.05, momentum=0.9, batch=8, epochs=1, keep_optimizer=True),
    "kept adam": Local(lr=0.01, optimizer="adam", batch=8, epochs=1, keep_optimizer=True),
}


def study(*methods: Method, **others: Any) -> RunSpec:
    return run_spec(*methods, **({"model": MLP, "local": EPOCHS, "dtype": torch.float64} | others))


def assert_as_in_loop(spec: RunSpec, lanes: int = 3, **settings: Any) -> None:
    """Assert that a run with several lanes has the results of a run with one lane, up to rounding.

    lanes: the number of lanes.
    settings: arguments of `run`.
    """
    loop, batched = (run(replace(spec, lanes=count), **settings) for count in (1, lanes))
    for ended in (loop, batched):
        assert not ended.failures, ended.failures[0].error
    for one, other in ((loop.tensors, batched.tensors), (loop.private, batched.private)):
        assert one.keys() == other.keys()
        for name, values in one.items():
            np.testing.assert_allclose(other[name], values, rtol=EXACT, atol=EXACT, err_msg=name)
    for row, expected in zip(batched.history, loop.history, strict=True):
        assert row.keys() == expected.keys()
        for key, value in expected.items():
            one, other = (np.nan if number is None else number for number in (value, row[key]))
            np.testing.assert_allclose(other, one, rtol=EXACT, atol=EXACT, err_msg=key)


class TestNumbers:
    @pytest.mark.parametrize("local", LOCALS.values(), ids=LOCALS)
    def test_batched_lanes_equal_single_clients_for_every_local_setting(self, local: Local) -> None:
        assert_as_in_loop(study(local=local), rounds=4)

    @pytest.mark.parametrize(
        "methods", [(FedAdam(),), (LocalTraining(),)], ids=["server", "personal"]
    )
    def test_batched_lanes_equal_single_clients_with_method_fedadam_or_local(
        self, methods: Sequence[Method]
    ) -> None:
        assert_as_in_loop(study(*methods), rounds=4)

    @pytest.mark.parametrize("lanes", [2, 5, 10])
    def test_batched_lanes_equal_single_clients_for_any_number_of_lanes(self, lanes: int) -> None:
        assert_as_in_loop(study(), lanes=lanes, rounds=2)

    def test_bfloat16_lanes_store_their_parameters_in_float32(self) -> None:
        fine, coarse = (
            run(study(lanes=3, dtype=torch.float32, precision=kind), rounds=2)
            for kind in ("float32", "bfloat16")
        )
        assert coarse.bits != fine.bits and not coarse.failures
        for name, values in coarse.tensors.items():
            assert values.dtype == np.float32
            np.testing.assert_allclose(values, fine.tensors[name], atol=0.1)


def trained(spec: RunSpec, jobs: Sequence[Job]) -> dict[int, np.ndarray]:
    """Train jobs in one call of a new worker; return the update of each client, [d]."""
    answer = Worker(spec).train(jobs, [], 1, coordinate(spec).server.published())
    assert not isinstance(answer, tuple)
    deltas: dict[int, np.ndarray] = {}
    for update in answer.updates:
        assert isinstance(update, Update) and update.delta is not None
        deltas[update.client] = update.delta
    return deltas


def jobs_of(count: int) -> list[Job]:
    return [
        Job(number, client, 0, 0, -1, 1.0 + number) for number, client in enumerate(range(count))
    ]


class TestBits:
    @pytest.mark.parametrize(
        "local", [EPOCHS, Local(lr=0.01, optimizer="adam", batch=8)], ids=["sgd", "adam"]
    )
    def test_lane_does_not_depend_on_clients_of_other_lanes(self, local: Local) -> None:
        spec, jobs = study(lanes=3, dtype=torch.float32, local=local), jobs_of(6)
        together = trained(spec, jobs)
        for some in (jobs[::-1], [jobs[4], jobs[1]], jobs[2:3]):
            for client, delta in trained(spec, some).items():
                assert np.array_equal(delta, together[client]), [job.client for job in some]

    def test_lanes_are_bit_identical_on_three_workers_and_after_resume(
        self, tmp_path: Path
    ) -> None:
        def spec() -> RunSpec:
            return study(lanes=3, dtype=torch.float32)

        straight = run(spec(), BUFFER, rounds=6)
        workers = run_to_end(
            coordinate(spec(), BUFFER, runtime=several_workers(spec(), 3), rounds=6)
        )
        assert (workers.bits, workers.history) == (straight.bits, straight.history)
        run(spec(), BUFFER, rounds=6, checkpoint_every=3, folder=str(tmp_path))
        resumed = run(
            spec(), BUFFER, rounds=6, resume=str(tmp_path / "checkpoints" / "round-000003")
        )
        assert (resumed.bits, resumed.history) == (straight.bits, straight.history)

    def test_sum_of_updates_does_not_depend_on_the_lane_that_finishes_first(self) -> None:
        spec, jobs = study(lanes=3, dtype=torch.float32), jobs_of(6)
        single = trained(spec, jobs)
        published = coordinate(spec).server.published()
        result = Worker(spec).train(jobs, [tuple(range(6))], 1, published)
        assert not isinstance(result, tuple)
        (total,) = result.sums.values()
        rows = [single[job.client] for job in jobs]
        expected = weighted_sum(rows, [job.weight for job in jobs])
        assert np.array_equal(total, expected.numpy())


class Failing(Method):
    """A method that raises for one client, before or after its training."""

    name = "failing"

    def __init__(self, hook: str):
        self.hook = hook

    def begin(self, job: LocalJob) -> None:
        self._fail(job, "begin")

    def end(self, job: LocalJob) -> None:
        self._fail(job, "end")

    def _fail(self, ctx: LocalJob, hook: str) -> None:
        if hook == self.hook and ctx.client == 2:
            raise RuntimeError("no data today")


@pytest.mark.parametrize("hook", ["begin", "end"])
def test_client_that_fails_does_not_change_other_lanes(hook: str) -> None:
    loop, lanes = (
        run(study(Failing(hook), lanes=count), rounds=3, tolerate=1.0) for count in (1, 3)
    )
    assert (
        [failure.client for failure in lanes.failures]
        == [failure.client for failure in loop.failures]
        != []
    )
    for name, values in loop.tensors.items():
        np.testing.assert_allclose(
            lanes.tensors[name], values, rtol=EXACT, atol=EXACT, err_msg=name
        )


class Dropping(ModelRecipe):
    """A linear network with dropout."""

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        size = int(np.prod(input_shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 12), nn.ReLU(), nn.Dropout(0.5)), 12


class OwnTraining(Method):
    """A method that declares its own training function."""

    name = "own"

    def setup(self, run: Setup) -> None:
        run.train(lambda job: None)


class TestQualification:
    @pytest.mark.parametrize(
        "model",
        [
            Mlp((5, 4)).build((1, 2, 3), 3, 0),
            Classifier(
                nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(6, 4), nn.GELU())), 4, 3
            ),
            WholeNetwork(nn.Sequential(nn.Flatten(), nn.Linear(6, 3, bias=False)), 3),
        ],
        ids=["mlp", "nested", "logistic regression"],
    )
    def test_chains_of_linear_layers_train_in_batched_lanes(self, model: nn.Module) -> None:
        layers = linear_chain({"model": model}, 3)
        assert layers is not None
        x = torch.randn(2, 1, 2, 3)
        assert torch.equal(nn.Sequential(*layers)(x), model(x))

    def test_networks_other_than_chains_of_linear_layers_do_not_train_in_batched_lanes(
        self,
    ) -> None:
        linear = nn.Linear(4, 4)
        others = [
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)),
            nn.Sequential(linear, linear),
            nn.Sequential(nn.Flatten(0), nn.Linear(4, 4)),
            nn.Sequential(nn.ReLU()),
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)),
        ]
        assert [linear_chain({"model": WholeNetwork(net, 4)}, 1) for net in others] == [None] * len(
            others
        )
        whole = WholeNetwork(nn.Linear(4, 4), 4)
        assert linear_chain({"model": whole}, 1) is not None
        assert linear_chain({"model": whole}, 2) is None, (
            "rows of an input would be its own samples"
        )
        assert linear_chain({"model": whole, "other": nn.Linear(1, 1)}, 1) is None
        assert linear_chain({"model": linear}, 1) is None, "its forward pass is unknown"

    @pytest.mark.parametrize(
        "spec",
        [
            study(FedProx(0.1), lanes=3),
            study(Scaffold(), lanes=3),
            study(model=NORMED_MLP, lanes=3),
            study(model=Dropping(), lanes=3),
            study(model=NORMED, lanes=3),
        ],
        ids=["fedprox", "scaffold", "batch norm", "dropout", "convolutions"],
    )
    def test_error_mentions_key_runtime_lanes_if_a_run_cannot_use_several_lanes(
        self, spec: RunSpec
    ) -> None:
        with pytest.raises(RefusedError, match=r"^runtime\.lanes=3: .*runtime\.lanes=1"):
            Worker(spec)

    def test_error_of_batched_lanes_mentions_the_unsuitable_method_or_device(self) -> None:
        with pytest.raises(RefusedError, match="method 'fedprox'"):
            Worker(study(FedProx(0.1), lanes=2))
        with pytest.raises(RefusedError, match="method 'ditto' adds a network"):
            Worker(study(Ditto(), lanes=2))
        if find_spec("peft") is not None:
            with pytest.raises(RefusedError, match=r"adapters \(model\.lora\.rank\)"):
                Worker(study(model=Mlp((8,), lora=Lora(rank=2)), lanes=2))
        spec = study(lanes=2, device="cuda")
        with pytest.raises(RefusedError, match=r"device=cuda.*runtime\.graph=true"):
            check_step_mode(spec, declare_run(spec))

    def test_error_of_lanes_does_not_suggest_recording_of_an_own_training_loop(self) -> None:
        spec = study(OwnTraining(), lanes=2, device="cuda")
        with pytest.raises(RefusedError, match=r"^runtime\.lanes=2: method 'own'") as refused:
            check_step_mode(spec, declare_run(spec))
        assert "runtime.graph=true" not in str(refused.value)


def usual(*methods: Method, concurrency: int = 40, **others: Any) -> int:
    spec = run_spec(*methods, **({"data": equal_clients(6, 240), "local": Local(batch=8)} | others))
    return default_lanes(spec, declare_run(spec), concurrency)


class TestUsualLanes:
    def test_small_linear_networks_train_in_several_lanes_by_default(self) -> None:
        assert [usual(concurrency=count) for count in (10, 20, 39, 40, 1000)] == [1, 5, 5, 10, 10]
        assert usual(FedAdam()) == 10, "the server's step is no part of a client's"

    def test_run_uses_one_lane_if_batched_lanes_would_not_speed_it_up(self) -> None:
        assert usual(Scaffold()) == 1
        assert usual(model=NORMED) == 1, "convolutions"
        assert usual(model=Mlp((1200, 1200))) == 1, "a large network"
        assert usual(model=Dropping()) == 1, "draws"
        assert usual(local=Local(batch=64)) == 1, "no full batches"
        assert usual(device="cuda") == 1

    def test_gpu_with_recorded_steps_uses_up_to_ten_lanes(self) -> None:
        gpu: dict[str, Any] = {"device": "cuda", "graph": True}
        assert [usual(concurrency=count, **gpu) for count in (1, 4, 10, 1000)] == [1, 4, 10, 10]
        assert usual(model=NORMED, **gpu) == 10 and usual(Scaffold(), **gpu) == 10
        assert usual(model=Mlp((20_000, 1000)), **gpu) == 1, "a large network fills a GPU by itself"
