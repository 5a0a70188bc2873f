"""Compare local training with a plain loop: rates of modules, schedules in a job, and Muon.

The learning rate of a module is the run's learning rate times the module's factor in `local.rates`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import run, run_spec
from torch import Tensor, nn
from torch.optim import lr_scheduler

from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.simulation.schedule import Synchronous
from raysim.training.lanes import LanesError
from raysim.training.run_spec import build_model, declare_run
from raysim.training.worker import Worker

LOCAL: dict[str, Any] = {"epochs": None, "steps": 4, "batch": 8, "lr": 0.1}


class Recorder(Method):
    """A method that records the batches of client 0 and the parameters that the client trained."""

    name = "recorder"

    def __init__(self) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []
        self.trained = torch.empty(0)
        self.moves: list[Any] = []

    def batch(self, job: LocalJob, batch: Any) -> Any:
        if job.client == 0:
            self.batches.append((batch.inputs.clone(), batch.targets.clone()))
        return batch

    def end(self, job: LocalJob) -> None:
        if job.client == 0:
            self.trained = job.params.clone()
            self.moves = list(job.moves())


def trained(local: Local) -> tuple[Recorder, list[Tensor]]:
    """Run one round; return the recorder, and the parameters that client 0 trained.

    local: the local settings of the run.
    """
    recorder = Recorder()
    spec = run_spec(recorder, local=local)
    finished = run(spec, Synchronous(6), rounds=1)
    assert not finished.failures, finished.failures[0].error
    layout = finished.coordinator.layout
    return recorder, [
        recorder.trained[entry.start : entry.stop].view(entry.shape) for entry in layout.entries
    ]


def plain_loop(
    recorder: Recorder, make_optimizers: Any, factors: list[float] | None = None
) -> list[Tensor]:
    """Train on the recorded batches in a loop of PyTorch alone, and return the parameters.

    make_optimizers(model): optimizers of torch.optim. Each step uses all of them.
    factors: for each step, the factor of all learning rates; None means 1.
    """
    model: Any = build_model(run_spec()).train()
    optimizers = make_optimizers(model)
    rates = [group["lr"] for each in optimizers for group in each.param_groups]
    for step, (inputs, targets) in enumerate(recorder.batches):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        places = [group for each in optimizers for group in each.param_groups]
        for group, rate in zip(places, rates, strict=True):
            group["lr"] = rate * (1 if factors is None else factors[step])
        for optimizer in optimizers:
            optimizer.step()
    return [param.detach() for param in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def body_and_head(model: Any) -> tuple[list[Any], list[Any]]:
    head = [*model.head.parameters()]
    return [each for each in model.parameters() if all(each is not one for one in head)], head


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_learning_rates_of_modules_equal_parameter_groups_of_torch(kind: Any) -> None:
    recorder, ours = trained(Local(optimizer=kind, rates={"head": 0.5, "body": 2.0}, **LOCAL))
    optimizer: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}

    def make_optimizers(model: Any) -> Any:
        body, head = body_and_head(model)
        parts = [{"params": body, "lr": 0.2}, {"params": head, "lr": 0.05}]
        settings = {} if kind == "sgd" else {"weight_decay": 0.0}
        return [optimizer[kind](parts, foreach=False, **settings)]

    assert same(ours, plain_loop(recorder, make_optimizers))


def test_rate_of_a_module_overrides_the_rate_of_the_model_part_that_contains_it() -> None:
    recorder, ours = trained(Local(rates={"head": 0.5, "model.head": 0.0}, **LOCAL))
    start = [param.detach() for param in build_model(run_spec()).parameters()]
    assert torch.equal(ours[-1], start[-1]) and torch.equal(ours[-2], start[-2])
    assert not torch.equal(ours[0], start[0])
    assert {rate for _, _, rate in recorder.moves} == {0.1, 0.0}


def test_doubling_the_rate_of_all_modules_equals_doubling_the_learning_rate() -> None:
    _, ours = trained(Local(rates={"head": 2.0, "body": 2.0}, **LOCAL))
    _, larger = trained(Local(**{**LOCAL, "lr": 0.2}))
    assert same(ours, larger)


def test_muon_equals_muon_of_torch_for_matrices_and_adamw_for_other_tensors() -> None:
    recorder, ours = trained(Local(optimizer="muon", weight_decay=0.01, **LOCAL))

    def make_optimizers(model: Any) -> Any:
        matrices = [each for each in model.parameters() if each.ndim == 2]
        vectors = [each for each in model.parameters() if each.ndim < 2]
        return [
            torch.optim.Muon(matrices, lr=0.1, weight_decay=0.01),
            torch.optim.AdamW(vectors, lr=0.1, weight_decay=0.01, foreach=False),
        ]

    assert same(ours, plain_loop(recorder, make_optimizers))


def test_muon_with_clipping_orthogonalises_matrices() -> None:
    _, plain = trained(Local(optimizer="muon", **LOCAL))
    _, clipped = trained(Local(optimizer="muon", clip=1e6, **LOCAL))
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(plain, clipped, strict=True))


class TestSchedulesOverSteps:
    @pytest.mark.parametrize(
        ("settings", "make"),
        [
            ({"schedule": "cosine"}, lambda it: lr_scheduler.CosineAnnealingLR(it, 4)),
            (
                {"schedule": "linear", "final_lr": 0.05},
                lambda it: lr_scheduler.LinearLR(it, 1.0, 0.5, 4),
            ),
            (
                {"schedule": "step", "drop_every": 2, "drop_factor": 0.5},
                lambda it: lr_scheduler.StepLR(it, 2, 0.5),
            ),
        ],
        ids=["cosine", "linear", "step"],
    )
    def test_schedule_factors_equal_those_of_torch(
        self, settings: dict[str, Any], make: Any
    ) -> None:
        factors = Local(schedule_over="steps", **settings, **LOCAL).step_factors(4)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        scheduler = make(optimizer)
        for factor in factors or ():
            assert 0.1 * factor == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
            optimizer.step()
            scheduler.step()

    def test_optimizer_steps_use_learning_rates_that_change_at_every_step(self) -> None:
        local = Local(schedule="linear", schedule_over="steps", warmup_steps=1, **LOCAL)
        recorder, ours = trained(local)
        factors = local.step_factors(4)
        assert factors == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3])

        def make_optimizers(model: Any) -> Any:
            return [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)]

        expected = plain_loop(recorder, make_optimizers, factors)
        assert all(torch.allclose(a, b, atol=1e-8) for a, b in zip(ours, expected, strict=True))
        ((_, steps, rate),) = recorder.moves
        assert steps * rate == pytest.approx(0.1 * sum(factors or ()))

    def test_warmup_over_steps_does_not_change_the_schedule_over_rounds(self) -> None:
        local = Local(schedule="step", drop_every=1, warmup_steps=2, **LOCAL)
        assert local.rate(1) == pytest.approx(0.01)
        assert local.step_factors(4) == pytest.approx([1 / 3, 2 / 3, 1, 1])
        assert Local(**LOCAL).step_factors(4) is None


class TestRefusals:
    def test_rate_of_adapters_is_refused_if_the_model_has_none(self) -> None:
        with pytest.raises(ValueError, match=r"local\.rates\.adapters"):
            declare_run(run_spec(local=Local(rates={"adapters": 2.0})))

    def test_negative_learning_rate_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"local\.rates\.head"):
            Local(rates={"head": -1.0})

    @pytest.mark.parametrize(
        "settings", [{"optimizer": "muon"}, {"rates": {"head": 2.0}}, {"warmup_steps": 2}], ids=str
    )
    def test_lanes_error_contains_the_unsupported_local_setting(
        self, settings: dict[str, Any]
    ) -> None:
        with pytest.raises(LanesError, match=r"local\.|warmup_steps"):
            Worker(run_spec(local=Local(**settings), lanes=2))
