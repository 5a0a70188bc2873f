"""Test FedSR's network in training and in scoring, and its reference distributions."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from tiny_runs import (
    MLP,
    check_composition,
    run,
    run_spec,
)
from torch import Tensor, nn

from raysim.api.declarations import Task
from raysim.api.method import Method
from raysim.methods import fedsr
from raysim.methods.dann import Dann
from raysim.methods.fedbr import FedBR
from raysim.methods.fedsr import REFERENCE, FedSR, Gaussian, Reference
from raysim.models import Classifier, is_stochastic
from raysim.training.run_spec import build_networks, declare_run


def close(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    assert got.shape == want.shape and torch.allclose(got, want, rtol=tolerance, atol=tolerance), (
        f"{got} is not {want}"
    )


# --- the network ------------------------------------------------------------------------------
TASK = Task((1, 8, 8), 5, 6)
IMAGES = torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def network(**settings: Any) -> Gaussian:
    torch.manual_seed(0)
    return cast(Gaussian, FedSR(**settings).model(TASK, MLP.build(TASK.shape, TASK.num_classes, 0)))


def test_fedsr_draws_features_in_training_only() -> None:
    model = network(width=7)
    assert is_stochastic(model) and model.feature_dim == 7
    mean, std = model.moments(IMAGES)
    assert mean.shape == std.shape == (9, 7) and (std > 0).all()
    torch.manual_seed(3)
    noise = torch.randn(9, 7)
    torch.manual_seed(3)
    assert torch.equal(model.features(IMAGES), mean + std * noise)
    assert not torch.equal(model.features(IMAGES), model.features(IMAGES))
    assert torch.equal(model.eval().features(IMAGES), mean)


def test_fedsr_model_in_eval_mode_averages_the_softmax_over_stored_noise_vectors() -> None:
    model = network().eval()
    mean, std = model.moments(IMAGES)
    assert model.noise.shape == (20, 12)
    want = torch.stack([model.head(mean + std * eps).softmax(dim=1) for eps in model.noise]).mean(
        dim=0
    )
    assert torch.allclose(model(IMAGES).exp(), want, atol=1e-6)
    assert torch.allclose(model(IMAGES).exp().sum(dim=1), torch.ones(9), atol=1e-5)
    assert abs(model.noise.mean()) < 0.2 and abs(model.noise.std() - 1) < 0.2


def test_fedsr_model_in_eval_mode_draws_no_random_numbers_and_ignores_batch_size() -> None:
    model = network().eval()
    before = torch.get_rng_state()
    whole = model(IMAGES)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(torch.cat([model(image[None]) for image in IMAGES]), whole, atol=1e-6)


def test_fedsr_noise_is_equal_in_all_processes_and_not_sent() -> None:
    study = run_spec(FedSR(width=7))
    (one, layout), (two, _) = build_networks(study), build_networks(study)
    models = [cast(Gaussian, networks["model"]) for networks in (one, two)]
    assert torch.equal(models[0].noise, models[1].noise)
    assert all(
        torch.equal(a, b)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )
    assert layout.shared == sum(p.numel() for p in models[0].parameters())


def test_fedsr_reference_distribution_starts_with_mean_zero_and_deviation_one() -> None:
    networks = declare_run(run_spec(FedSR(width=7))).networks
    reference = cast(Reference, networks[REFERENCE])
    assert reference.mean.shape == reference.std.shape == (5, 7) and not reference.mean.any()
    assert (reference.std == 1).all() and reference.scale == 1


# --- in a run ---------------------------------------------------------------------------------


class Sure(FedSR):
    """A FedSR whose features have a standard deviation of 0, and so no noise."""

    def model(self, task: Task, model: nn.Module) -> nn.Module:
        made = cast(Gaussian, super().model(task, model))
        mapping = cast(nn.Linear, made.extractor[1])  # type: ignore[index]
        with torch.no_grad():
            mapping.weight[made.feature_dim :] = 0.0
            mapping.bias[made.feature_dim :] = -1e4
        return made


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, dim=1)[0]


class Mapped(Method):
    """A method that replaces the model by FedSR's network without noise, and does nothing else."""

    name = "fedsr"
    paper = "a test"

    def model(self, task: Task, model: nn.Module) -> nn.Module:
        made = cast(Gaussian, Sure().model(task, model))
        plain = Classifier(
            nn.Sequential(made.extractor, Half()), made.feature_dim, made.num_classes
        )
        plain.head = made.head
        return plain


def test_fedsr_without_penalties_and_noise_equals_fedavg() -> None:
    sure, fedavg = (run(run_spec(method)) for method in (Sure(0.0, 0.0), Mapped()))
    assert sure.finished.model_sha256 == fedavg.finished.model_sha256
    assert [row["train_loss"] for row in sure.rows] == [row["train_loss"] for row in fedavg.rows]
    assert sure.finished.model_sha256 != run(run_spec(FedSR(0.0, 0.0))).finished.model_sha256


def test_fedsr_number_of_draws_in_scoring_changes_the_scores_but_not_the_trained_model() -> None:
    few, many = (run(run_spec(FedSR(samples=count, share_reference=True))) for count in (1, 20))
    assert few.finished.model_sha256 == many.finished.model_sha256
    assert [row["loss_global"] for row in few.rows] != [row["loss_global"] for row in many.rows]


def test_fedsr_sends_its_reference_distributions_only_if_share_reference_is_true() -> None:
    own, shared = (run(run_spec(FedSR(share_reference=share)), rounds=2) for share in (False, True))
    layouts = own.coordinator.layout, shared.coordinator.layout
    assert layouts[0].personal == 2 * 5 * 12 + 1 and layouts[1].personal == 0
    assert layouts[1].shared == layouts[0].shared + 2 * 5 * 12 + 1
    assert shared.rows[-1]["accuracy_global"] is not None
    assert shared.tensors[f"{REFERENCE}.mean"].any()


def test_fedsr_without_probabilistic_adds_no_network_and_accepts_dann_and_fedbr() -> None:
    study = run_spec(FedSR(probabilistic=False))
    networks, layout = build_networks(study)
    assert (
        list(networks) == ["model"]
        and layout.personal == 0
        and not is_stochastic(networks["model"])
    )
    assert not isinstance(networks["model"], Gaussian)
    others: list[Method] = [
        Dann(0.5, width=8),
        FedBR(projection="code", pseudo_batch=4, samples_per_mean=3),
    ]
    for other in others:
        for method in (FedSR(probabilistic=False), FedSR(alpha_cmi=0.0)):
            check_composition([method, other])
            assert not run(run_spec(method, other), rounds=2).failures
        with pytest.raises(ValueError, match="'fedsr'"):
            check_composition([FedSR(), other])


def test_fedsr_mean_and_deviation_of_a_sample_do_not_depend_on_the_batch() -> None:
    model = network()
    features = model.features(torch.cat([IMAGES, IMAGES[:4]]))
    own, _ = features.split([9, 4])
    for got, want in zip(fedsr._moments(own), model.moments(IMAGES), strict=True):
        close(got, want, 1e-6)
    mean, std = fedsr._moments(model.eval().features(IMAGES))
    assert mean.shape == std.shape == (9, 12)


@pytest.mark.parametrize(
    "settings",
    [{"alpha_l2r": -0.1}, {"alpha_cmi": -0.1}, {"width": 0}, {"samples": 0}],
    ids=str,
)
def test_fedsr_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"^method\.fedsr\.{key}="):
        FedSR(**settings)
