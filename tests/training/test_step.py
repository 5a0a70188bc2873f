"""Test the step: optimizers against PyTorch, clipping, stages, the order of corrections."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from timm.optim import Lion
from tiny_runs import NORMED, declare_methods, method_views, run_spec
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Outputs, Stage
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.api.objectives import OBJECTIVES
from raysim.api.setup import Setup
from raysim.training.step import Step, gradients
from raysim.training.worker import Worker
from raysim.vectors.layout import Vector, plan_layout
from raysim.vectors.optimizer import LocalOptimizer, Optimizers, OptimizerSettings, orthogonalized

SHAPES = ((3, 4), (4,), (2, 4), (2,))


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def by_torch(
    optimizer: type[torch.optim.Optimizer], steps: int = 5, **settings: Any
) -> list[Tensor]:
    params = [nn.Parameter(value) for value in values(0)]
    steps_ = optimizer(params, lr=0.1, **settings)
    for step in range(1, steps + 1):
        for param, grad in zip(params, values(step), strict=True):
            param.grad = grad
        steps_.step()
    return [param.detach() for param in params]


def by_us(settings: OptimizerSettings, flat: bool, steps: int = 5) -> list[Tensor]:
    ours, params = LocalOptimizer(settings), values(0)
    whole = [torch.cat([value.flatten() for value in params])]
    for step in range(1, steps + 1):
        if flat:
            ours.step(whole, [torch.cat([grad.flatten() for grad in values(step)])], 0.1)
        else:
            ours.step(params, values(step), 0.1)
    if flat:
        params = [
            part.view(shape)
            for part, shape in zip(whole[0].split([12, 4, 8, 2]), SHAPES, strict=True)
        ]
    return params


@pytest.mark.parametrize("flat", [False, True], ids=["on views", "on one flat tensor"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.05},
        {"momentum": 0.9, "weight_decay": 0.05},
        {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True},
        {"momentum": 0.5, "nesterov": True},
    ],
    ids=str,
)
def test_sgd_equals_pytorch_bit_for_bit(settings: dict[str, Any], flat: bool) -> None:
    ours = by_us(OptimizerSettings(**settings), flat)
    assert all(
        torch.equal(one, other)
        for one, other in zip(ours, by_torch(torch.optim.SGD, **settings), strict=True)
    )


@pytest.mark.parametrize("flat", [False, True], ids=["on views", "on one flat tensor"])
@pytest.mark.parametrize("decay", [0.0, 0.05])
@pytest.mark.parametrize("kind", ["adam", "adamw", "lion"])
def test_adam_equals_pytorch_and_lion_equals_timm_bit_for_bit(
    kind: Literal["adam", "adamw", "lion"], decay: float, flat: bool
) -> None:
    ours = by_us(OptimizerSettings(kind, weight_decay=decay), flat)
    reference: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "lion": Lion}[kind]
    theirs = by_torch(reference, weight_decay=decay, foreach=False)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_muon_equals_pytorch_bit_for_bit() -> None:
    shapes, rates = ((6, 4), (4, 6), (5, 5)), (0.02, 0.1, 0.1)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    ours, theirs = [value.clone() for value in start], [nn.Parameter(value) for value in start]
    mine = LocalOptimizer(OptimizerSettings("muon", weight_decay=0.1))
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)
    for rate in rates:
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        reference.param_groups[0]["lr"] = rate
        reference.step()
        mine.step(ours, grads, rate)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_orthogonalization_does_not_change_the_original_matrix() -> None:
    matrix = torch.randn((4, 3), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    before = matrix.clone()
    orthogonalized(matrix)
    assert torch.equal(matrix, before)


# --- the step on a small network ------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extractor, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def features(self, inputs: Tensor) -> Tensor:
        return self.extractor(inputs).tanh()


def net(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


X = torch.linspace(-1, 1, 15).reshape(5, 3)
Y = torch.tensor([0, 1, 1, 0, 1])


def at_work(
    methods: Sequence[Method],
    optimizer: OptimizerSettings,
    clip: float = 0.0,
    personal: Sequence[str] = (),
    **networks: nn.Module,
) -> tuple[Step, Context]:
    nets = {"model": net(), **networks}
    vector = Vector(nets, plan_layout(nets, personal), torch.device("cpu"), torch.float32)
    task = SimpleNamespace(num_classes=2, objective=OBJECTIVES["classification"])
    trainer: Any = SimpleNamespace(statistics_layers=[], task=task)
    ctx = Context(
        trainer=trainer,
        seed=0,
        client=0,
        participation=0,
        version=0,
        samples=5,
        rate=0.1,
        vector=vector,
        received=vector.shared,
        received_counters=vector.shared_counters,
        base=vector.shared.clone(),
        download={},
        state={},
    )
    declarations = declare_methods(methods, nets, vector.layout)
    ctx.views = method_views(ctx, declarations)
    return Step(vector, declarations, optimizer, clip), ctx


BATCH = Batch(X, Y, X, Y)


def plain(steps: int, clip: float = 0.0, **settings: Any) -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.head(model.features(X)), Y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


class Idle(Method):
    """A method with a `gradient` hook that changes nothing.

    With such a hook, raysim puts the gradient of all parameters into one flat vector.
    """

    name = "idle"

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        pass


@pytest.mark.parametrize("methods", [[], [Idle()]], ids=["without a correction", "with one"])
def test_step_equals_a_step_of_pytorch(methods: list[Method]) -> None:
    step, ctx = at_work(methods, OptimizerSettings(momentum=0.9, weight_decay=0.01))
    for _ in range(4):
        loss = step(ctx, BATCH, (Stage(),))
    expected = plain(4, momentum=0.9, weight_decay=0.01)
    assert all(torch.equal(value, expected[name]) for name, value in ctx.model.state_dict().items())
    assert not loss.requires_grad


@pytest.mark.parametrize("methods", [[], [Idle()]], ids=["without a correction", "with one"])
def test_stage_may_train_modules_that_are_not_adjacent(methods: list[Method]) -> None:
    others = {"other.first": nn.Linear(2, 2), "other.second": nn.Linear(2, 2)}
    step, ctx = at_work(methods, OptimizerSettings(), **others)
    step(ctx, BATCH, (Stage("part", ("model.head", "other.second")),))
    before, trained = net().state_dict(), plain(1)
    for name, value in ctx.model.state_dict().items():
        expected = trained if name.startswith("head") else before
        assert torch.equal(value, expected[name]), name


def test_job_starts_without_momentum() -> None:
    step, ctx = at_work([], OptimizerSettings(momentum=0.9))
    step(ctx, BATCH, (Stage(),))
    ctx.vector.shared.copy_(ctx.base)
    ctx.optimizers = Optimizers()
    step(ctx, BATCH, (Stage(),))
    expected = plain(1)
    assert all(torch.equal(value, expected[name]) for name, value in ctx.model.state_dict().items())


@pytest.mark.parametrize(("clip", "cuts"), [(0.05, True), (100.0, False)])
def test_clipping_uses_the_norm_of_the_whole_gradient(clip: float, cuts: bool) -> None:
    step, ctx = at_work([], OptimizerSettings(), clip)
    for _ in range(3):
        step(ctx, BATCH, (Stage(),))
    expected, free = plain(3, clip), plain(3)
    for name, value in ctx.model.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-7)
        assert torch.allclose(value, free[name], rtol=1e-6, atol=1e-7) != cuts


# --- stages ---------------------------------------------------------------------------------------


class TwoStages(Method):
    """A method whose steps have two stages, of which the second trains the model.

    The first maximises the output of an extra network at twice the learning rate.
    """

    name = "two"

    def setup(self, run: Setup) -> None:
        run.stages(self.stages)

    @property
    def stages(self) -> tuple[Stage, ...]:
        modes = {"model": False}
        rise = Stage("rise", ("two.extra",), self.height, ascend=True, rate=2.0, modes=modes)
        return rise, Stage(modes={"model": True})

    @staticmethod
    def height(job: LocalJob, out: Outputs) -> Tensor:
        height: Tensor = job.network("extra")(out.features.detach()).mean()
        return height


def test_stage_can_train_another_network_by_ascent_with_another_learning_rate() -> None:
    method, extra = TwoStages(), nn.Linear(4, 1)
    start = {name: value.clone() for name, value in extra.state_dict().items()}
    step, ctx = at_work([method], OptimizerSettings(), **{"two.extra": extra})
    features = net().features(X).detach()
    step(ctx, BATCH, method.stages)
    # The mean of w.z + b rises along the mean of z, and along 1.
    assert torch.allclose(extra.weight, start["weight"] + 0.2 * features.mean(0), atol=1e-7)
    assert torch.allclose(extra.bias, start["bias"] + 0.2, atol=1e-7)
    expected = plain(1)
    assert all(torch.equal(value, expected[name]) for name, value in ctx.model.state_dict().items())
    assert ctx.model.training
    layout = ctx.vector.layout
    assert ctx.optimizers.movements() == [
        (slice(layout.trained - 5, layout.trained), 1, 2.0),
        (slice(0, layout.trained - 5), 1, 1.0),
    ]


def test_loss_term_of_a_method_is_not_in_the_reported_loss() -> None:
    class Pull(Method):
        name = "pull"

        def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
            return loss + 0.5 * job.model.head.bias.square().sum()

    method = TwoStages()
    step, ctx = at_work([method, Pull()], OptimizerSettings(), **{"two.extra": nn.Linear(4, 1)})
    loss = step(ctx, BATCH, method.stages)
    model = net()
    task = nn.functional.cross_entropy(model.head(model.features(X)), Y)
    assert torch.equal(loss, task.detach())
    (grad,) = torch.autograd.grad(task, [model.head.bias])
    assert torch.allclose(
        ctx.model.head.bias, model.head.bias - 0.1 * (grad + model.head.bias), atol=1e-7
    )


@pytest.mark.parametrize(
    ("value", "shape"),
    [(torch.ones(4), r"\[4\]"), (torch.ones(4, 2), r"\[4, 2\]"), (None, "nothing")],
)
def test_loss_hook_must_return_a_scalar(value: Any, shape: str) -> None:
    hooks = {"name": "mine", "loss": lambda self, job, out, loss: value}
    method = type("Mine", (Method,), hooks)()
    step, ctx = at_work([method], OptimizerSettings())
    with pytest.raises(ValueError, match=f"method 'mine' .*{shape} .*loss"):
        step(ctx, BATCH, (Stage(),))


def test_stage_without_parameters_is_refused() -> None:
    step, ctx = at_work([], OptimizerSettings())
    with pytest.raises(ValueError, match="ghost"):
        step(ctx, BATCH, (Stage(trains=("ghost",)),))


# --- corrections ----------------------------------------------------------------------------------


def correcting(kind: Any, log: list[tuple[str, slice]]) -> Method:
    class Correcting(Method):
        name = kind

        def setup(self, run: Setup) -> None:
            run.corrects(kind)

        def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
            log.append((kind, at))
            assert len(grad) == at.stop - at.start

    return Correcting()


@pytest.mark.parametrize(
    "order", list(itertools.permutations(("add", "shift", "mix"))), ids="-".join
)
def test_step_makes_gradient_corrections_in_the_order_add_shift_mix(
    order: tuple[str, ...],
) -> None:
    log: list[tuple[str, slice]] = []
    step, ctx = at_work([correcting(kind, log) for kind in order], OptimizerSettings())
    step(ctx, BATCH, (Stage(),))
    assert log == [(kind, slice(0, 26)) for kind in ("add", "shift", "mix")]


def test_gradient_corrections_receive_shared_parameters_only() -> None:
    log: list[tuple[str, slice]] = []
    step, ctx = at_work(
        [correcting("add", log)],
        OptimizerSettings(),
        personal=("model.head.weight", "model.head.bias"),
    )
    before = ctx.vector.personal.clone()
    step(ctx, BATCH, (Stage(),))
    assert log == [("add", slice(0, 16))]
    assert not torch.equal(ctx.vector.personal, before), "the personal part is trained all the same"


# --- what methods see -----------------------------------------------------------------------------


def test_features_are_computed_once_for_all_methods() -> None:
    asked = []

    class Asking(Method):
        name = "asking"

        def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
            return loss + 0.0 * out.features.sum()

    step, ctx = at_work([Asking(), Asking()], OptimizerSettings())
    ctx.model.extractor.register_forward_hook(lambda *_: asked.append(1))
    step(ctx, BATCH, (Stage(),))
    assert len(asked) == 1


def test_batchnorm_statistics_do_not_change_inside_keep_statistics_context() -> None:
    worker = Worker(run_spec(model=NORMED))
    inputs, _ = worker.trainer.gather(worker.trainer.partition.rows(0))
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
    before = worker.vector.shared.clone()
    with ctx.keep_statistics():
        kept = ctx.model.train()(inputs)
    assert torch.equal(worker.vector.shared, before)
    moved = ctx.model(inputs)
    assert not torch.equal(worker.vector.shared, before)
    assert torch.equal(kept, moved), "both normalise with the batch itself"


def test_unused_parameter_has_zero_gradient() -> None:
    used, unused = torch.tensor([2.0, 3.0], requires_grad=True), torch.ones(3, requires_grad=True)
    first, second = gradients(used.square().sum(), [used, unused])
    assert first.tolist() == [4.0, 6.0] and second.tolist() == [0.0, 0.0, 0.0]


def test_flattened_gradients_of_equal_size_use_the_same_memory() -> None:
    step, _ = at_work((), OptimizerSettings())
    sizes, places = (3, 5, 3), []
    for size in sizes:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error"
            )  # a result that does not fit is made room for, with a warning
            flat = step._flatten([torch.ones(size - 1), torch.zeros(1)])
        assert flat.tolist() == [1.0] * (size - 1) + [0.0]
        places.append(flat.data_ptr())
    assert places[0] == places[2] != places[1], "a CUDA graph may hold them"
