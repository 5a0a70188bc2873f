"""Test VHL's contrastive loss in extreme cases, its virtual set, its scores and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    MLP,
    NORMED,
    NORMED_MLP,
    check_composition,
    coordinate,
    participation_facts,
    run,
    run_spec,
    tiny_data,
)
from torch import Tensor

from raysim.api.declarations import Evaluation, Local
from raysim.api.server_view import ServerView
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.methods.vhl import (
    Doubled,
    Vhl,
    shifted,
    supervised_contrastive_loss,
    virtual_images,
)
from raysim.simulation.events import Round
from raysim.training.run_spec import RunSpec, build_networks, declare_run
from raysim.training.worker import Worker

SMALL: dict[str, Any] = {"virtual_batch": 6, "virtual": 20}
NONE: dict[str, Any] = SMALL | {"alpha": 0.0, "gamma": 0.0, "kappa": 0.0}
CLASSES = 5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def contrast(features: Tensor, labels: Tensor, temperature: float = 0.07) -> Tensor:
    return supervised_contrastive_loss(features, labels, temperature, temperature)


# --- the losses -------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], [2, 2], [1]])
def test_vhl_contrast_loss_is_0_if_classes_of_samples_are_all_equal_or_all_different(
    labels: list[int],
) -> None:
    features = random(len(labels), 3).requires_grad_()
    value = contrast(features, torch.tensor(labels))
    assert value == 0
    assert torch.equal(torch.autograd.grad(value, features)[0], torch.zeros_like(features))


def test_vhl_contrast_loss_at_a_low_temperature_is_finite() -> None:
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 1e-4], [0.0, 0.0]], requires_grad=True)
    value = contrast(opposite, torch.tensor([0, 0, 1, 1]), 0.001)
    assert value > 100 and torch.isfinite(value)
    assert torch.isfinite(torch.autograd.grad(value, opposite)[0]).all()


# --- the virtual set --------------------------------------------------------------------------


def virtual_set(method: Vhl, study: RunSpec) -> tuple[Tensor, Tensor]:
    server = ServerView(coordinate(study).server, "vhl")
    return method.inputs(server), method.labels(server)


def test_vhl_virtual_images_depend_only_on_the_seed_and_the_data() -> None:
    method = Vhl(**SMALL)
    first, again = (virtual_set(method, run_spec(method, model=model)) for model in (MLP, NORMED))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    other, _ = virtual_set(method, run_spec(method, seed=4))
    assert not torch.equal(first[0], other)


def test_vhl_virtual_images_are_standardised_and_have_balanced_classes() -> None:
    method = Vhl(virtual=33, virtual_batch=6)
    images, labels = virtual_set(method, run_spec(method))
    assert images.shape == (33, *tiny_data().open().shape) and images.dtype == torch.float32
    assert torch.bincount(labels).tolist() == [7, 7, 7, 6, 6]
    assert images.mean().item() == pytest.approx(0, abs=1e-6)
    assert images.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_vhl_virtual_images_are_noise_around_the_mean_of_their_class() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 2
    images = virtual_images(
        torch.randn(2, 3, 8, 8, generator=generator),
        torch.randn(400, 3, 8, 8, generator=generator),
        labels,
        (8, 8),
    )
    between = torch.stack([images[labels == c].mean(0) for c in (0, 1)])
    inside = images - between[labels]
    assert inside.std(dim=(0, 2, 3)).tolist() == pytest.approx(3 * [(0.25 / 1.25) ** 0.5], rel=0.2)
    assert images.mean(dim=(0, 2, 3)).abs().max() < 1e-6
    wide = virtual_images(random(1, 1, 2, 2), random(1, 1, 2, 2), labels[:1], (4, 6))
    assert wide.shape == (1, 1, 4, 6)


def test_padded_image_cropped_at_its_centre_is_unchanged() -> None:
    images = random(3, 2, 4, 5)
    middle, zeros, ones = (
        torch.full((3,), 2),
        torch.zeros(3, dtype=torch.int64),
        torch.ones(3, dtype=torch.int64),
    )
    assert torch.equal(shifted(images, middle, middle, zeros, 2), images)
    assert torch.equal(shifted(images, middle, middle, ones, 2), images.flip(3))
    corner = shifted(images, zeros, 2 * middle, torch.tensor([0, 1, 0]), 2)
    expected = F.pad(images, (2, 2, 2, 2))[:, :, 0:4, 4:9]
    assert torch.equal(corner[0], expected[0]) and torch.equal(corner[1], expected[1].flip(2))


def views(method: Vhl) -> Tensor:
    """Return the random numbers that choose and change virtual images, int64 [40, 4, batch].

    In each of 40 steps, an image has four numbers: its index in the virtual set, two crop offsets
    in pixels, and 1 for a flip.
    """
    job: Any = SimpleNamespace(plan=SimpleNamespace(steps=40))
    return torch.stack(list(method.draw_views(job, np.random.default_rng(0))))


def test_vhl_step_draws_images_without_replacement_and_crops_them() -> None:
    drawn = views(Vhl(**SMALL))
    assert drawn.shape == (40, 4, 6) and drawn.dtype == torch.int64
    rows, offsets, flips = drawn[:, 0], drawn[:, 1:3], drawn[:, 3]
    assert all(len(set(step)) == 6 for step in rows.tolist())
    assert set(rows.unique().tolist()) == set(range(20))
    assert set(offsets.unique().tolist()) == set(range(9))
    assert set(flips.unique().tolist()) == {0, 1}
    fewer = views(Vhl(virtual_batch=20, virtual=20))
    assert sorted(fewer[0][0].tolist()) == list(range(20))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (
            {"virtual_batch": 32, "virtual": 20},
            r"virtual_batch=32: .*virtual_batch=20 ",
        ),
        ({"virtual_batch": 2, "virtual": 4}, r"virtual=4: .*virtual=5 "),
    ],
)
def test_vhl_with_too_few_virtual_images_is_refused(settings: dict[str, int], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^method\.vhl\.{key}"):
        declare_run(run_spec(Vhl(**settings)))
    declare_run(run_spec(Vhl(**(NONE | settings))))
    declare_run(run_spec(Vhl(virtual_batch=5, virtual=5)))


# --- scores -----------------------------------------------------------------------------------


def test_vhl_with_label_mode_extra_doubles_the_number_of_model_outputs() -> None:
    extra, shared = (
        build_networks(run_spec(Vhl(**SMALL, label_mode=mode)))[0]["model"]  # type: ignore[arg-type]
        for mode in ("extra", "shared")
    )
    assert (extra.num_classes, shared.num_classes) == (2 * CLASSES, CLASSES)
    assert isinstance(extra, Doubled) and not isinstance(shared, Doubled)


def test_vhl_model_in_eval_mode_returns_larger_of_two_outputs_per_class() -> None:
    model = Doubled(torch.nn.Identity(), 4, 4)
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(4))
        model.head.bias.zero_()
    logits = torch.tensor([[1.0, 2.0, 9.0, 0.0], [3.0, 2.0, 1.0, 4.0]])
    assert torch.equal(model(logits), logits)
    assert model.eval()(logits).tolist() == [[9.0, 2.0], [3.0, 4.0]]


def test_vhl_evaluation_uses_the_larger_output_if_a_class_has_two_outputs() -> None:
    study = run_spec(Vhl(**SMALL))
    ended = run(study, rounds=1)
    worker = Worker(study)
    worker.vector.shared.copy_(ended.coordinator.server.vector)
    worker.trainer.set_training(False)
    inputs, labels = worker.trainer.gather(study.data.central)
    model: Any = worker.vector.networks["model"]
    with torch.no_grad():
        logits = model.head(model.features(inputs)).unflatten(1, (2, CLASSES)).amax(dim=1)
    assert ended.rows[-1]["accuracy_global"] == (logits.argmax(1) == labels).double().mean().item()
    loss = F.cross_entropy(logits, labels).item()
    assert ended.rows[-1]["loss_global"] == pytest.approx(loss, rel=1e-5)


def test_vhl_probes_store_probabilities_of_real_classes_only() -> None:
    evaluate = Evaluation(probe=1, probe_rows=20)
    events = coordinate(run_spec(Vhl(**SMALL)), rounds=1, evaluate=evaluate).run()
    probes = [probe for event in events if isinstance(event, Round) for probe in event.probes]
    assert probes and all(probe.probabilities.shape[1] == CLASSES for probe in probes)


# --- with other methods -----------------------------------------------------------------------


def test_vhl_with_mixup_does_not_depend_on_order_of_methods() -> None:
    first, second = (
        run(run_spec(*methods, model=NORMED_MLP), rounds=2)
        for methods in ([Vhl(**SMALL), Mixup()], [Mixup(), Vhl(**SMALL)])
    )
    assert not first.failures and first.finished.model_sha256 == second.finished.model_sha256


def test_vhl_refuses_methods_that_replace_the_model() -> None:
    with pytest.raises(ValueError, match=r"'vhl'.*'moon'"):
        check_composition([Vhl(), Moon()])


@pytest.mark.parametrize(
    ("settings", "local", "samples"),
    [
        ({}, Local(epochs=2, batch=32), 2 * 3 * 6),  # 70 samples are 3 batches
        ({"virtual_batch": 20}, Local(epochs=2, batch=32), 2 * 3 * 20),
        ({"align_epochs": 1}, Local(epochs=2, batch=32), 2 * 3 * 6),
        ({"align_epochs": 1, "alpha": 0.0}, Local(epochs=2, batch=32), 3 * 6),
        ({"align_epochs": 0, "alpha": 0.0}, Local(epochs=2, batch=32), 0),
        ({"align_epochs": 0, "alpha": 0.0}, Local(epochs=None, steps=5), 5 * 6),
        (NONE, Local(epochs=2), 0),
    ],
)
def test_cost_of_vhl_is_the_number_of_virtual_images(
    settings: dict[str, Any], local: Local, samples: int
) -> None:
    vhl = Vhl(**{**SMALL, **settings})
    facts = participation_facts(run_spec(vhl, local=local), 70, local.budget(70))
    assert vhl.cost(facts) == samples


@pytest.mark.parametrize(
    ("settings", "local", "real"),
    [
        ({}, Local(epochs=2, batch=32), 2 * 70),
        ({"align_epochs": 1, "alpha": 0.0}, Local(epochs=2, batch=32), 70),
        ({}, Local(epochs=None, steps=5, batch=32), 5 * 32),
    ],
)
def test_cost_of_vhl_adds_real_images_if_mixup_changes_inputs(
    settings: dict[str, Any], local: Local, real: int
) -> None:
    vhl = Vhl(**{**SMALL, **settings})
    costs = []
    for methods in ([vhl], [vhl, Mixup()], [Mixup(), vhl]):
        facts = participation_facts(run_spec(*methods, local=local), 70, local.budget(70))
        costs.append(vhl.cost(facts))
    assert costs[1:] == [costs[0] + real] * 2


@pytest.mark.parametrize(
    "setting",
    [
        {"alpha": -1},
        {"gamma": -1},
        {"kappa": -1},
        {"temperature": 0},
        {"virtual_batch": 0},
        {"virtual": 0},
        {"align_epochs": -1},
    ],
    ids=str,
)
def test_vhl_settings_out_of_range_are_refused(setting: dict[str, Any]) -> None:
    (key,) = setting
    with pytest.raises(ValueError, match=rf"^method\.vhl\.{key}="):
        Vhl(**setting)
