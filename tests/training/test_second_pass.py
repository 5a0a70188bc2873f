"""Test the second pass over a batch, which a method may request.

It must start from the same state as the first pass, and must not change the results of later steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_step import BATCH, X, Y, at_work, net
from tiny_runs import NORMED, ShiftedGradient, method_views, run_spec
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Outputs, Stage
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.methods.fedprox import FedProx
from raysim.training.worker import Worker
from raysim.vectors.optimizer import OptimizerSettings


@pytest.mark.parametrize("take", [True, False])
def test_second_gradient_does_not_change_batchnorm_statistics(take: bool) -> None:
    worker = Worker(run_spec(ShiftedGradient(0.05, take), model=NORMED))
    inputs, labels = worker.trainer.gather(worker.trainer.partition.rows(0))
    ctx = context(worker)
    model = ctx.model.train()
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        model.features(inputs)
    expected, moved = {n: b.clone() for n, b in model.named_buffers()}, expected
    assert any(not torch.equal(expected[name], moved[name]) for name in expected)
    for name, buffer in model.named_buffers():
        buffer.copy_(moved[name])
    worker.trainer.step(ctx, Batch(inputs, labels, inputs, labels), (Stage(),))
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())


def context(worker: Worker) -> Context:
    ctx = Context(
        trainer=worker.trainer,
        seed=0,
        client=0,
        participation=0,
        version=0,
        samples=5,
        rate=0.1,
        vector=worker.vector,
        received=worker.vector.shared,
        received_counters=worker.vector.shared_counters,
        base=worker.vector.shared.clone(),
        download={},
        state={},
    )
    ctx.views = method_views(ctx, worker.declarations)
    return ctx


def test_second_gradient_uses_shifted_values_of_shared_and_personal_parameters() -> None:
    asking = ShiftedGradient(0.25)
    step, ctx = at_work(
        [asking], OptimizerSettings(), personal=("model.extractor.weight", "model.extractor.bias")
    )
    step(ctx, BATCH, (Stage(),))
    step(ctx, BATCH, (Stage("head", ("model.head",)),))
    (_, params, _, there), (_, head, _, _) = asking.seen
    assert len(params) == 26 and len(head) == 10
    moved = net()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.25)
    loss = nn.functional.cross_entropy(moved.head(moved.features(X)), Y)
    # The shared part comes first: the head, then the extractor.
    grads = torch.autograd.grad(loss, [*moved.head.parameters(), *moved.extractor.parameters()])
    assert torch.equal(there, torch.cat([grad.flatten() for grad in grads]))


def test_perturb_hook_is_called_before_the_gradient_hook_and_decay_and_clipping() -> None:
    class Ones(Method):
        name = "ones"

        def perturb(self, job: LocalJob, params: Tensor, grad: Tensor, gradient_at: Any) -> Tensor:
            return torch.ones_like(grad)

    class Halving(Method):
        name = "halving"

        def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
            assert torch.equal(grad, torch.ones_like(grad))
            grad.mul_(0.5)

    step, ctx = at_work([Halving(), Ones()], OptimizerSettings(weight_decay=0.1))
    before = ctx.vector.shared.clone()
    step(ctx, BATCH, (Stage(),))
    assert torch.allclose(ctx.vector.shared, before - 0.1 * (0.5 + 0.1 * before), atol=1e-7)
    step, ctx = at_work([Ones()], OptimizerSettings(), clip=1.0)
    before = ctx.vector.shared.clone()
    step(ctx, BATCH, (Stage(),))
    assert torch.allclose((before - ctx.vector.shared).norm(), torch.tensor(0.1), atol=1e-6)


def test_first_and_second_gradient_of_a_step_include_the_loss_term_of_a_method() -> None:
    class Pull(Method):
        name = "pull"

        def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
            return loss + 0.5 * job.model.head.bias.square().sum()

    pulled, free = ShiftedGradient(0.5), ShiftedGradient(0.5)
    for methods in ([pulled, Pull()], [free]):
        step, ctx = at_work(methods, OptimizerSettings())
        step(ctx, BATCH, (Stage(),))
    (_, params, here, there), (_, _, here_free, there_free) = pulled.seen[0], free.seen[0]
    assert torch.allclose((here - here_free)[-2:], params[-2:], atol=1e-6)
    assert torch.allclose((there - there_free)[-2:], params[-2:] + 0.5, atol=1e-6)


def test_gradient_ascent_stage_passes_the_negated_gradient_to_methods() -> None:
    asking = ShiftedGradient()
    step, ctx = at_work([asking], OptimizerSettings())
    loss = nn.functional.cross_entropy(ctx.model.head(ctx.model.features(X)), Y)
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(-loss, list(ctx.model.parameters()))]
    )
    step(ctx, BATCH, (Stage("rise", ascend=True),))
    ((_, _, here, there),) = asking.seen
    assert torch.equal(here, expected) and torch.equal(there, expected)


def test_perturb_hook_is_called_only_in_stages_with_the_task_loss() -> None:
    class Ones(Method):
        name = "ones"

        def perturb(self, job: LocalJob, params: Tensor, grad: Tensor, gradient_at: Any) -> Tensor:
            stages.append(job.stage.name)
            return torch.ones_like(grad)

    stages: list[str] = []
    step, ctx = at_work([Ones()], OptimizerSettings())
    before = ctx.model.head.bias.detach().clone()
    other = Stage("other", ("model.head",), lambda job, out: 2 * job.model.head.bias.sum())
    step(ctx, BATCH, (other, Stage(trains=("model.extractor",))))
    assert stages == ["task"]
    assert torch.allclose(ctx.model.head.bias, before - 0.1 * 2.0)


def test_second_gradient_does_not_change_the_client_state() -> None:
    class Counting(Method):
        """A method whose loss hook changes the client state each time it is called."""

        name = "counting"

        def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
            job.state["sum"] = job.state["sum"] + out.logits.detach().sum()
            return loss + job.state["sum"] * job.model.head.bias.sum()

    step, ctx = at_work([ShiftedGradient(0.1), Counting()], OptimizerSettings())
    ctx.state["counting.sum"] = torch.zeros(())
    logits = ctx.model.head(ctx.model.features(X)).detach()
    step(ctx, BATCH, (Stage(),))
    assert torch.equal(ctx.state["counting.sum"], logits.sum())


def test_parameters_are_restored_if_the_second_gradient_fails() -> None:
    class Failing(Method):
        name = "failing"

        def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
            if not torch.equal(job.model.head.bias, net().head.bias):
                raise RuntimeError("elsewhere")
            return loss

    step, ctx = at_work([ShiftedGradient(0.1), Failing()], OptimizerSettings())
    before = ctx.vector.data.clone()
    with pytest.raises(RuntimeError, match="elsewhere"):
        step(ctx, BATCH, (Stage(),))
    assert torch.equal(ctx.vector.data, before)


def test_step_without_the_perturb_hook_computes_one_gradient() -> None:
    step, ctx = at_work([FedProx(0.0)], OptimizerSettings())
    passes: list[int] = []
    ctx.model.extractor.register_forward_hook(lambda *_: passes.append(1))
    step(ctx, BATCH, (Stage(),))
    assert step.hooks.perturb is None and len(passes) == 1
