"""VHL: its losses by their definition, the virtual set, and its part in a step and in a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    BUFFER,
    LOCAL,
    MLP,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    Spy,
    check_composition,
    coordinate,
    ran,
    run,
    run_spec,
    same,
    setup,
    several,
    taking_part,
    tiny,
)
from torch import Tensor

from raysim.api.context import Batch, Context, Outputs
from raysim.api.declarations import Local, Task
from raysim.api.method import Method
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbr import FedBR
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.fedmix import FedMix
from raysim.methods.fedntd import FedNTD
from raysim.methods.fedprox import FedProx
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.methods.scaffold import Scaffold
from raysim.methods.vhl import Vhl, alignment_loss, shifted, supervised_contrastive_loss, virtual_images
from raysim.simulation.fleet import Ideal
from raysim.training.host import Host
from raysim.training.run_spec import RunSpec, build_networks

SMALL: dict[str, Any] = {"virtual_batch": 6, "virtual": 20}
NONE: dict[str, Any] = SMALL | {"alpha": 0.0, "gamma": 0.0, "kappa": 0.0}
CLASSES = 5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def contrast(features: Tensor, labels: Tensor, temperature: float = 0.07) -> Tensor:
    return supervised_contrastive_loss(features, labels, temperature, temperature)


# --- the losses -----------------------------------------------------------------------------------------------------


def by_definition(features: Tensor, labels: list[int], temperature: float) -> Tensor:
    """SC with a loop per row and a term per pair."""
    rows = features / features.norm(dim=1, keepdim=True)
    total = torch.zeros((), dtype=features.dtype)
    for i, own in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        whole = sum(torch.exp(own @ rows[j] / temperature) for j in others)
        positive = [j for j in others if labels[j] == labels[i]]
        for j in positive:
            total = total - torch.log(torch.exp(own @ rows[j] / temperature) / whole) / len(positive)
    return total / len(rows)


def test_the_contrast_is_that_of_its_definition() -> None:
    features, labels = random(6, 4), [0, 1, 0, 2, 1, 0]
    expected = by_definition(features, labels, 0.5)
    torch.testing.assert_close(contrast(features, torch.tensor(labels), 0.5), expected)
    twice = supervised_contrastive_loss(features, torch.tensor(labels), 0.5, 0.25)
    torch.testing.assert_close(twice, 2 * expected)


def test_the_gradient_of_the_contrast_is_that_of_its_definition() -> None:
    features, labels = random(6, 4).requires_grad_(), [0, 1, 0, 2, 1, 0]
    gradients = [
        torch.autograd.grad(value, features)[0]
        for value in (contrast(features, torch.tensor(labels), 0.5), by_definition(features, labels, 0.5))
    ]
    torch.testing.assert_close(*gradients)


def test_the_contrast_does_not_depend_on_the_length_of_features_nor_on_their_order() -> None:
    features, labels = random(7, 3), torch.tensor([0, 1, 0, 2, 1, 0, 3])
    order, lengths = torch.tensor([3, 0, 6, 2, 5, 1, 4]), torch.tensor([0.1, 2, 3, 0.5, 1, 7, 4]).unsqueeze(1)
    expected = contrast(features, labels)
    torch.testing.assert_close(contrast(lengths * features, labels), expected)
    torch.testing.assert_close(contrast(1e-10 * lengths * features, labels), expected)
    torch.testing.assert_close(contrast(features[order], labels[order]), expected)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [2, 2], [1]])
def test_the_contrast_is_zero_without_positives_and_without_negatives(labels: list[int]) -> None:
    features = random(len(labels), 3).requires_grad_()
    value = contrast(features, torch.tensor(labels))
    assert value == 0
    assert torch.equal(torch.autograd.grad(value, features)[0], torch.zeros_like(features))


def test_the_contrast_is_finite_in_float32_at_a_low_temperature() -> None:
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 1e-4], [0.0, 0.0]], requires_grad=True)
    value = contrast(opposite, torch.tensor([0, 0, 1, 1]), 0.001)
    assert value > 100 and torch.isfinite(value)
    assert torch.isfinite(torch.autograd.grad(value, opposite)[0]).all()


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_alignment_moves_virtual_features_by_their_own_contrast_only(weight: float) -> None:
    real, virtual = random(4, 3).requires_grad_(), random(6, 3, seed=1).requires_grad_()
    labels, own = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 2, 0, 1, 2])
    value = alignment_loss(real, labels, virtual, own, 0.5, 1.0, weight)
    moved, pulled = torch.autograd.grad(value, [virtual, real])
    torch.testing.assert_close(moved, weight * torch.autograd.grad(contrast(virtual, own, 0.5), virtual)[0])
    assert pulled.abs().sum() > 0


def test_without_a_class_in_common_real_rows_have_only_real_positives() -> None:
    real, virtual, labels, own = random(4, 3), random(3, 3, seed=1), [5, 5, 6, 7], [0, 1, 0]
    both = torch.cat([real, virtual])
    value = alignment_loss(real, torch.tensor(labels), virtual, torch.tensor(own), 0.5, 1.0, 0.0)
    torch.testing.assert_close(value, by_definition(both, [*labels, *own], 0.5))
    torch.testing.assert_close(value, by_definition(both, [5, 5, 6, 7, 10, 11, 10], 0.5))


def test_real_features_come_closer_to_the_virtual_ones_of_their_class() -> None:
    virtual, own = F.normalize(random(4, 3, seed=1)), torch.tensor([0, 1, 2, 3])
    real = random(1, 3).requires_grad_()
    value = alignment_loss(real, torch.tensor([2]), virtual, own, 0.5, 1.0, 0.0)
    (gradient,) = torch.autograd.grad(value, real)
    closer = F.cosine_similarity(real - 0.1 * gradient, virtual[2:3])
    assert closer > F.cosine_similarity(real, virtual[2:3])


# --- the virtual set ------------------------------------------------------------------------------------------------


def constants(method: Method, study: RunSpec) -> dict[str, Tensor]:
    once = method.send(coordinate(study).server).once
    assert once is not None
    return dict(once())


def test_the_virtual_set_depends_on_the_seed_and_the_data_alone() -> None:
    method = Vhl(**SMALL)
    first, again = (constants(method, run_spec(method, model=model)) for model in (MLP, NORMED))
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = constants(method, run_spec(method, seed=4))
    assert not torch.equal(first["vhl.inputs"], other["vhl.inputs"])


def test_the_virtual_set_has_standardised_images_as_evenly_of_all_classes_as_can_be() -> None:
    method = Vhl(virtual=33, batch=6)
    found = constants(method, run_spec(method))
    images, labels = found["vhl.inputs"], found["vhl.labels"]
    assert images.shape == (33, *tiny().open().shape) and images.dtype == torch.float32
    assert torch.bincount(labels).tolist() == [7, 7, 7, 6, 6]
    assert images.mean().item() == pytest.approx(0, abs=1e-6)
    assert images.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_virtual_images_scatter_around_the_mean_of_their_class() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    images = virtual_images(
        torch.randn(2, 3, 8, 8, generator=generator), torch.randn(400, 3, 8, 8, generator=generator), labels, (8, 8)
    )
    between = torch.stack([images[labels == c].mean(0) for c in (0, 1)])
    inside = images - between[labels]
    assert inside.std(dim=(0, 2, 3)).tolist() == pytest.approx(3 * [(0.25 / 1.25) ** 0.5], rel=0.2)
    assert images.mean(dim=(0, 2, 3)).abs().max() < 1e-6
    wide = virtual_images(random(1, 1, 2, 2), random(1, 1, 2, 2), labels[:1], (4, 6))
    assert wide.shape == (1, 1, 4, 6)


def test_a_crop_in_the_middle_is_the_image_and_a_flip_its_mirror() -> None:
    images = random(3, 2, 4, 5)
    middle, zeros, ones = torch.full((3,), 2), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    assert torch.equal(shifted(images, middle, middle, zeros, 2), images)
    assert torch.equal(shifted(images, middle, middle, ones, 2), images.flip(3))
    corner = shifted(images, zeros, 2 * middle, torch.tensor([0, 1, 0]), 2)
    expected = F.pad(images, (2, 2, 2, 2))[:, :, 0:4, 4:9]
    assert torch.equal(corner[0], expected[0]) and torch.equal(corner[1], expected[1].flip(2))


class Plan:
    steps = 40


def test_a_step_draws_different_virtual_images_and_all_offsets() -> None:
    drawn = torch.stack(list(Vhl(**SMALL).draws(Plan(), np.random.default_rng(0))["vhl.views"]))  # type: ignore[arg-type]
    assert drawn.shape == (40, 4, 6) and drawn.dtype == torch.int64
    rows, offsets, flips = drawn[:, 0], drawn[:, 1:3], drawn[:, 3]
    assert all(len(set(step)) == 6 for step in rows.tolist()) and set(rows.unique().tolist()) == set(range(20))
    assert set(offsets.unique().tolist()) == set(range(9)) and set(flips.unique().tolist()) == {0, 1}
    fewer = Vhl(virtual_batch=20, virtual=20).draws(Plan(), np.random.default_rng(0))["vhl.views"]  # type: ignore[arg-type]
    assert sorted(fewer[0][0].tolist()) == list(range(20))


def test_every_client_has_the_same_virtual_set_and_is_sent_it_once() -> None:
    study = run_spec(Vhl(**SMALL))
    spy = Spy(study)
    found = ran(coordinate(study, runtime=spy, rounds=5))
    once = sum(array.size for array in spy.kept.values())
    assert once == 20 * (int(np.prod(study.task.shape)) + 1)
    jobs, clients = len(spy.sent), len({job.client for job, _ in spy.sent})
    assert clients < jobs
    assert found.rows[-1]["floats_down"] == jobs * found.coordinator.layout.shared + clients * once
    assert not any(published.extras for _, published in spy.sent)


def test_the_virtual_set_is_the_same_after_a_resume(tmp_path: Any) -> None:
    study = run_spec(Vhl(**SMALL))
    spies = [Spy(study), Spy(study)]
    ran(coordinate(study, runtime=spies[0], rounds=4, checkpoint_every=2, folder=str(tmp_path)))
    ran(coordinate(study, runtime=spies[1], rounds=4, resume=str(tmp_path / "checkpoints" / "round-000002")))
    assert spies[0].kept and same(spies[0].kept, spies[1].kept)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"virtual_batch": 32, "virtual": 20}, r"method\.vhl\.virtual_batch=32 .* set method\.vhl\.virtual_batch=20 or less"),
        ({"virtual_batch": 2, "virtual": 4}, r"method\.vhl\.virtual=4 .* 5 classes: set method\.vhl\.virtual=5 or more"),
    ],
)
def test_a_virtual_set_that_is_too_small_is_refused(settings: dict[str, int], message: str) -> None:
    task = Task((1, 8, 8), CLASSES, clients=6)
    with pytest.raises(ValueError, match=message):
        Vhl(**settings).check(setup(task, LOCAL, {}))
    assert not Vhl(**(NONE | settings)).check(setup(task, LOCAL, {}))
    assert not Vhl(virtual_batch=5, virtual=5).check(setup(task, LOCAL, {}))


# --- the step -------------------------------------------------------------------------------------------------------


def test_extra_labels_have_outputs_of_their_own_and_predictions_are_folded() -> None:
    assert build_networks(run_spec(Vhl(**SMALL)))[0]["model"].num_classes == 2 * CLASSES
    assert build_networks(run_spec(Vhl(**SMALL, label_mode="shared")))[0]["model"].num_classes == CLASSES
    logits = torch.tensor([[1.0, 2.0, 9.0, 0.0], [3.0, 2.0, 1.0, 4.0]])
    assert Vhl().predict(logits).tolist() == [[9.0, 2.0], [3.0, 4.0]]
    assert Vhl(label_mode="shared").predict(logits) is logits
    best = logits.argmax(1)
    assert torch.equal(Vhl().predict(logits).argmax(1), best % 2)


class Watched(Vhl):
    """Writes down what every step forwarded and added."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._seen: list[dict[str, Any]] = []

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        total = super().term(ctx, out, batch)
        expected = out.logits.new_zeros(())
        aligned = self._aligns(ctx)
        if self._joins(ctx):
            labels = ctx.download["vhl.labels"][ctx.drawn("vhl.views")[0]]
            both = torch.cat([batch.raw_inputs, self._images(ctx)])
            real, virtual = ctx.model.features(both).split([len(batch.inputs), self.batch])
            shift = CLASSES if self.label_mode == "extra" else 0
            expected = self.alpha * F.cross_entropy(ctx.model.head(virtual), labels + shift)
            if aligned:
                weights = (self.temperature, self.gamma, self.kappa)
                expected = expected + alignment_loss(real, batch.raw_targets, virtual, labels, *weights)
        self._seen.append({"step": ctx.step, "steps": ctx.plan.steps, "aligned": aligned,  # type: ignore[union-attr]
                           "batch": batch, "total": total.detach(), "expected": expected.detach()})  # fmt: skip
        return total


@pytest.mark.parametrize("mixup", [False, True])
@pytest.mark.parametrize("label_mode", ["extra", "shared"])
def test_a_step_adds_the_terms_of_the_unmixed_batch_beside_its_virtual_one(label_mode: Any, mixup: bool) -> None:
    method = Watched(**SMALL, alpha=0.5, gamma=0.7, kappa=0.2, temperature=0.3, label_mode=label_mode)
    methods: list[Method] = [method, *([Mixup()] if mixup else [])]
    check_composition(methods)
    assert not run(run_spec(*methods, model=NORMED_MLP), rounds=1).failures
    assert method._seen
    for seen in method._seen:
        torch.testing.assert_close(seen["total"], seen["expected"], rtol=1e-4, atol=1e-5)
        assert seen["total"] > 0.1
        assert (seen["batch"].inputs is not seen["batch"].raw_inputs) == mixup
        if mixup:
            assert seen["batch"].targets.shape[1] == (2 * CLASSES if label_mode == "extra" else CLASSES)


def test_features_are_aligned_in_the_first_epochs_only() -> None:
    method = Watched(**SMALL, align_epochs=2)
    run(run_spec(method, local=Local(lr=0.05, batch=8, epochs=3)), rounds=1)
    assert {seen["aligned"] for seen in method._seen} == {True, False}
    assert all(seen["aligned"] == (seen["step"] < seen["steps"] * 2 / 3) for seen in method._seen)
    for seen in method._seen:
        torch.testing.assert_close(seen["total"], seen["expected"], rtol=1e-4, atol=1e-5)


def test_a_budget_of_steps_aligns_in_all_of_them() -> None:
    method = Watched(**SMALL, align_epochs=1)
    run(run_spec(method, local=Local(lr=0.05, batch=8, epochs=None, steps=20)), rounds=1)
    assert all(seen["aligned"] for seen in method._seen)


def test_without_virtual_cross_entropy_later_epochs_are_those_of_plain_training() -> None:
    method = Watched(**SMALL, alpha=0.0, align_epochs=0)
    found = run(run_spec(method, model=NORMED), fleet=Ideal())
    plain = run(run_spec(Vhl(**NONE), model=NORMED), fleet=Ideal())
    assert found.finished.model_sha256 == plain.finished.model_sha256
    assert all(seen["total"] == 0 for seen in method._seen)


def test_batchnorm_sees_real_and_virtual_rows_together() -> None:
    class Weightless(Vhl):
        """Forwards the virtual rows and ignores them."""

        def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
            return out.logits.new_zeros(())

    joined = run(run_spec(Weightless(**SMALL, label_mode="shared"), model=NORMED), rounds=1, fleet=Ideal())
    alone = run(run_spec(model=NORMED), rounds=1, fleet=Ideal())
    means = [name for name in joined.tensors if name.endswith("running_mean")]
    assert means and not any(np.array_equal(joined.tensors[name], alone.tensors[name]) for name in means)


# --- in a run -------------------------------------------------------------------------------------------------------


def test_with_all_weights_zero_and_shared_labels_it_is_fedavg_bit_for_bit() -> None:
    study = run_spec(Vhl(**NONE, label_mode="shared"), model=NORMED)
    spy = Spy(study)
    found = ran(coordinate(study, fleet=Ideal(), runtime=spy))
    fedavg = run(run_spec(model=NORMED), fleet=Ideal())
    assert found.bits == fedavg.bits and found.history == fedavg.history
    assert not spy.kept


VARIANTS: dict[str, Any] = {
    "extra": {},
    "shared": {"label_mode": "shared"},
    "alpha": {"gamma": 0.0, "kappa": 0.0},
    "gamma": {"alpha": 0.0, "kappa": 0.0},
    "kappa": {"alpha": 0.0, "gamma": 0.0},
}


def test_every_term_changes_what_is_learnt() -> None:
    found = {name: run(run_spec(Vhl(**SMALL, **options))) for name, options in VARIANTS.items()}
    assert not any(each.failures for each in found.values())
    assert len({each.bits for each in found.values()}) == len(VARIANTS)


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
@pytest.mark.parametrize("partner", [None, Mixup, FedBN])
def test_a_resumed_run_ends_in_the_bits_of_a_straight_one(partner: Any, schedule: Any, tmp_path: Any) -> None:
    study = run_spec(Vhl(**SMALL), *([partner()] if partner else []), model=NORMED)
    straight = run(study, schedule, rounds=4, checkpoint_every=2, folder=str(tmp_path))
    resumed = run(study, schedule, rounds=4, resume=str(tmp_path / "checkpoints" / "round-000002"))
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)


def test_several_hosts_end_in_the_same_bits() -> None:
    study = run_spec(Vhl(**SMALL), model=NORMED)
    assert run(study).bits == ran(coordinate(study, runtime=several(study, 2))).bits


PARTNERS: dict[str, Any] = {
    "fedprox": FedProx,
    "scaffold": Scaffold,
    "fedbn": FedBN,
    "feddecorr": FedDecorr,
    "fedntd": FedNTD,
    "fedbr": lambda: FedBR(projection="code", pseudo_batch=4, samples_per_mean=3),
    "fedmix": lambda: FedMix(means=4, samples_per_mean=3),
}


@pytest.mark.parametrize("partner", PARTNERS)
def test_it_combines_with_other_methods(partner: str) -> None:
    methods: list[Method] = [Vhl(**SMALL), PARTNERS[partner]()]
    check_composition(methods)
    found = run(run_spec(*methods, model=NORMED), rounds=2)
    alone = run(run_spec(methods[0], model=NORMED), rounds=2)
    assert not found.failures and found.finished.model_sha256 != alone.finished.model_sha256


def test_it_does_not_combine_with_another_that_replaces_the_model() -> None:
    with pytest.raises(ValueError, match="method 'vhl' and method 'moon' both replace the model"):
        check_composition([Vhl(), Moon()])


def test_evaluation_folds_the_extra_outputs() -> None:
    study = run_spec(Vhl(**SMALL))
    found = run(study, rounds=1)
    host = Host(study)
    host.vector.shared.copy_(found.coordinator.server.vector)
    host.trainer.training(False)
    inputs, labels = host.trainer.gather(study.data.central)
    with torch.no_grad():
        logits = host.vector.networks["model"](inputs)
    assert logits.shape[1] == 2 * CLASSES
    right = (logits.argmax(1) % CLASSES == labels).double().mean().item()
    assert found.rows[-1]["accuracy_global"] == right


def test_virtual_samples_are_counted_as_work_and_a_changed_batch_once_more() -> None:
    for methods, expected in (([Vhl()], 20), ([Vhl(), Mixup()], 40), ([Vhl(**NONE)], 0)):
        assert methods[0].cost(taking_part(run_spec(*methods), 5, 20.0)).samples == expected


@pytest.mark.parametrize(
    "setting", [{"alpha": -1}, {"gamma": -1}, {"kappa": -1}, {"temperature": 0}, {"batch": 0}, {"virtual": 0}], ids=str
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    (key,) = setting
    with pytest.raises(ValueError, match=f"method.vhl.{key}="):
        Vhl(**setting)
