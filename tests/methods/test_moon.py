"""Test MOON with weight 0, with Mixup and with BatchNorm, and the cost of its frozen models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_runs import NORMED, ROUNDS, method_state, participation_facts, run, run_spec
from torch import Tensor, nn

from raysim.api.context import Outputs
from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.api.messages import Job
from raysim.api.method import Method
from raysim.methods import moon
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.training.worker import Worker
from raysim.vectors.layout import Vector

PREVIOUS = "moon.previous"


def test_moon_with_weight_zero_equals_fedavg_with_the_network_of_moon() -> None:
    class Headed(Method):
        """A method that uses MOON's network and changes nothing else."""

        name = "moon"

        def model(self, task: Any, model: nn.Module) -> nn.Module:
            return Moon(width=5, out=8).model(task, model)

    methods = (Moon(0.0, width=5, out=8), Headed(), Moon(1, out=8))
    zero, fedavg, weighed = (run(run_spec(method)) for method in methods)
    hashes = [result.finished.model_sha256 for result in (zero, fedavg, weighed)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert zero.tensors["model.head.weight"].shape == (5, 8)
    assert not any(key.endswith(PREVIOUS) for key in zero.private)


def model_of(job: LocalJob, values: Tensor) -> Any:
    """Return a copy of the model with the values of a flat vector, in eval mode."""
    networks = {name: copy.deepcopy(network).eval() for name, network in job.networks.items()}
    vector = Vector(networks, job.layout, torch.device("cpu"), torch.float32)
    vector.data[: len(values)].copy_(values)
    return networks["model"]


def test_moon_with_mixup_gives_mixed_inputs_to_all_models() -> None:
    counts = []

    class Watched(Moon):
        def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
            changed = super().loss(job, out, loss)
            previous = list(job.state["previous"])
            if not previous:
                assert changed is loss
                return changed
            counts.append(len(previous))
            inputs = out.batch.inputs
            assert not torch.equal(inputs, out.batch.raw_inputs)
            models = [model_of(job, values) for values in (job.start, *previous)]
            with torch.no_grad():
                received, *others = (model.features(inputs) for model in models)
            contrast = moon.model_contrastive_loss(out.features, received, torch.stack(others), 0.4)
            assert torch.allclose(changed - loss, 0.7 * contrast, rtol=1e-5, atol=1e-6)
            return changed

    methods = [Watched(0.7, 0.4, out=8, previous=2), Mixup(5.0)]
    run(run_spec(*methods, model=NORMED), ROUNDS, rounds=4)
    assert set(counts) == {1, 2}


def test_moon_frozen_models_do_not_update_batchnorm_statistics() -> None:
    steps = []

    class Look(Method):
        name, paper = "look", "a test"

        def begin(self, job: LocalJob) -> None:
            job.scratch["before"] = job.vector.counters.clone()

        def end(self, job: LocalJob) -> None:
            passes = job.vector.counters - job.scratch["before"]
            assert (passes == job.plan.steps).all()
            steps.append(job.plan.steps)

    run(run_spec(Moon(out=8), Look(), model=NORMED), ROUNDS, rounds=3)
    assert max(steps) > 2


def test_moon_changes_no_step_if_both_frozen_models_are_equal() -> None:
    local = Local(lr=0.5, epochs=None, steps=1, batch=8)

    def trained(mu: float, shift: float) -> Tensor:
        worker = Worker(run_spec(Moon(mu, out=8), local=local))
        base = worker.vector.shared.clone()
        noise = torch.randn(len(base), generator=torch.Generator().manual_seed(0))
        state = method_state({PREVIOUS: (base + shift * noise).unsqueeze(0)})
        worker.trainer.train(Job(0, 0, 1, 0, -1, 1.0), base, worker.vector.counters[:0], {}, state)
        return worker.vector.data.clone()

    plain = trained(0.0, 0.0)
    assert torch.allclose(trained(10.0, 0.0), plain, rtol=0, atol=1e-6)
    assert not torch.allclose(trained(10.0, 0.1), plain, rtol=0, atol=1e-3)


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{"mu": -1.0}, {"temperature": 0.0}, {"width": 0}, {"out": 0}, {"previous": 0}],
    ids=str,
)
def test_error_of_moon_setting_out_of_range_mentions_its_key(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.moon\.{key}="):
        Moon(**settings)


def test_moon_costs_a_forward_pass_of_each_frozen_model() -> None:
    def passes(mu: float, earlier: int) -> float:
        return Moon(mu, previous=2).cost(participation_facts(None, 5, 30.0, earlier)) / 10

    assert [passes(1.0, earlier) for earlier in range(4)] == [0.0, 2.0, 3.0, 3.0]
    assert passes(0.0, 3) == 0.0
