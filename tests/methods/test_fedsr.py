"""FedSR's penalties, its stochastic network in training and in scoring, and where its references live."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    BUFFER,
    LOCAL,
    MLP,
    NORMED_MLP,
    ROUNDS,
    check_composition,
    run,
    run_spec,
)
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from raysim.api.declarations import Task
from raysim.api.method import Method
from raysim.methods import fedsr
from raysim.methods.dann import Dann
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbr import FedBR
from raysim.methods.fedopt import FedAdam
from raysim.methods.fedsr import REFERENCE, FedSR, Gaussian, Reference
from raysim.methods.mixup import Mixup
from raysim.models import Classifier, is_stochastic
from raysim.training.run_spec import build_networks, declare_run


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    assert got.shape == want.shape and torch.allclose(got, want, rtol=tolerance, atol=tolerance), (
        f"{got} is not {want}"
    )


# --- the penalties --------------------------------------------------------------------------------------------------
MEAN, STD, LABELS = random(6, 4), random(6, 4, seed=1).abs() + 0.1, torch.tensor([0, 2, 1, 1, 2, 0])
CENTRES, SPREADS = random(3, 4, seed=2), random(3, 4, seed=3)


def information(
    mean: Tensor = MEAN, std: Tensor = STD, scale: Any = 1.0, spreads: Tensor = SPREADS
) -> Tensor:
    return fedsr.conditional_information_penalty(
        mean=mean,
        std=std,
        labels=LABELS,
        reference_mean=CENTRES,
        reference_std_raw=spreads,
        scale=scale,
    )


def test_the_norm_penalty_is_the_mean_length_and_grows_linearly() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert fedsr.representation_norm_penalty(representations=rows) == 3.0
    assert fedsr.representation_norm_penalty(representations=7 * rows) == 21.0


@pytest.mark.parametrize("scale", [1.0, 0.3, torch.tensor(1.7).double()])
def test_the_information_penalty_is_the_divergence_of_two_gaussians(scale: Any) -> None:
    reference = Normal(CENTRES[LABELS], F.softplus(SPREADS)[LABELS])
    want = kl_divergence(Normal(scale * MEAN, scale * STD), reference).sum(dim=1).mean()
    close(information(scale=scale), want)
    assert want > 0


def test_it_is_zero_where_both_gaussians_are_the_same_and_nowhere_near() -> None:
    mean, std = CENTRES[LABELS] / 1.5, F.softplus(SPREADS)[LABELS] / 1.5
    close(information(mean, std, 1.5), torch.zeros(()).double())
    for moved in ((mean + 1e-3, std), (mean, std * 1.001), (mean, std / 1.001)):
        assert information(*moved, 1.5) > 1e-7


# --- the network ----------------------------------------------------------------------------------------------------
TASK = Task((1, 8, 8), 5, 6)
IMAGES = torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def network(**settings: Any) -> Gaussian:
    torch.manual_seed(0)
    return cast(Gaussian, FedSR(**settings).model(TASK, MLP.build(TASK.shape, TASK.num_classes, 0)))


def test_representations_are_drawn_in_training_and_means_elsewhere() -> None:
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


def test_scores_are_the_log_of_the_mean_softmax_over_twenty_draws() -> None:
    model = network().eval()
    mean, std = model.moments(IMAGES)
    assert model.noise.shape == (20, 12)
    want = torch.stack([model.head(mean + std * eps).softmax(dim=1) for eps in model.noise]).mean(
        dim=0
    )
    assert torch.allclose(model(IMAGES).exp(), want, atol=1e-6)
    assert torch.allclose(model(IMAGES).exp().sum(dim=1), torch.ones(9), atol=1e-5)
    assert abs(model.noise.mean()) < 0.2 and abs(model.noise.std() - 1) < 0.2


def test_scoring_draws_nothing_and_does_not_depend_on_the_batch() -> None:
    model = network().eval()
    before = torch.get_rng_state()
    whole = model(IMAGES)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.allclose(torch.cat([model(image[None]) for image in IMAGES]), whole, atol=1e-6)


def test_every_process_makes_the_same_network_with_the_same_noise_which_does_not_travel() -> None:
    study = run_spec(FedSR(width=7))
    (one, layout), (two, _) = build_networks(study), build_networks(study)
    models = [cast(Gaussian, networks["model"]) for networks in (one, two)]
    assert torch.equal(models[0].noise, models[1].noise)
    assert all(
        torch.equal(a, b)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )
    assert layout.shared == sum(p.numel() for p in models[0].parameters())


def test_gradients_reach_both_halves_through_the_sample() -> None:
    model = network()
    fedsr.representation_norm_penalty(representations=model.features(IMAGES)).backward()
    grad = model.extractor[1].weight.grad  # type: ignore[union-attr, index]
    assert grad is not None and all(half.any() for half in grad.chunk(2))  # type: ignore[operator, union-attr]


def test_references_start_at_zero_with_raw_deviation_and_scale_one() -> None:
    networks = declare_run(run_spec(FedSR(width=7))).networks
    reference = cast(Reference, networks[REFERENCE])
    assert reference.mean.shape == reference.std.shape == (5, 7) and not reference.mean.any()
    assert (reference.std == 1).all() and reference.scale == 1


# --- in a run -------------------------------------------------------------------------------------------------------


class Sure(FedSR):
    """With deviations of 0."""

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
    """Only the network of `Sure`, without anything stochastic in it."""

    name = "fedsr"
    paper = "a test"

    def model(self, task: Task, model: nn.Module) -> nn.Module:
        made = cast(Gaussian, Sure().model(task, model))
        plain = Classifier(
            nn.Sequential(made.extractor, Half()), made.feature_dim, made.num_classes
        )
        plain.head = made.head
        return plain


def test_without_weights_and_deviations_it_is_fedavg_on_the_same_network_bit_for_bit() -> None:
    sure, fedavg = (run(run_spec(method)) for method in (Sure(0.0, 0.0), Mapped()))
    assert sure.finished.model_sha256 == fedavg.finished.model_sha256
    assert [row["train_loss"] for row in sure.rows] == [row["train_loss"] for row in fedavg.rows]
    assert sure.finished.model_sha256 != run(run_spec(FedSR(0.0, 0.0))).finished.model_sha256


def test_the_number_of_samples_changes_scores_alone() -> None:
    few, many = (run(run_spec(FedSR(samples=count, share_reference=True))) for count in (1, 20))
    assert few.finished.model_sha256 == many.finished.model_sha256
    assert [row["loss_global"] for row in few.rows] != [row["loss_global"] for row in many.rows]


def test_a_larger_norm_penalty_gives_shorter_representations() -> None:
    def length(alpha: float) -> float:
        study = run_spec(FedSR(alpha, 0.0), local=LOCAL)
        found = run(study, rounds=6)
        model = cast(Gaussian, build_networks(study)[0]["model"]).eval()
        model.load_state_dict(
            {name.removeprefix("model."): torch.from_numpy(v) for name, v in found.tensors.items()}
        )
        images = torch.from_numpy(study.data.open().inputs[:50]).float() / 255
        return model.features(images).norm(dim=1).mean().item()

    assert length(1.0) < 0.7 * length(0.0)


def test_shared_references_travel_with_the_model_and_leave_one_model_for_all() -> None:
    own, shared = (run(run_spec(FedSR(share_reference=share)), rounds=2) for share in (False, True))
    layouts = own.coordinator.layout, shared.coordinator.layout
    assert layouts[0].personal == 2 * 5 * 12 + 1 and layouts[1].personal == 0
    assert layouts[1].shared == layouts[0].shared + 2 * 5 * 12 + 1
    assert shared.rows[-1]["accuracy_global"] is not None
    assert shared.tensors[f"{REFERENCE}.mean"].any()


def test_fedl2r_is_deterministic_has_no_reference_and_leaves_the_stages_to_others() -> None:
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
        with pytest.raises(ValueError, match="both decide the stages"):
            check_composition([FedSR(), other])


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_it_composes_with_soft_labels_batch_norm_and_a_server_optimiser(schedule: Any) -> None:
    found = run(
        run_spec(FedSR(), Mixup(), FedBN(), FedAdam(), model=NORMED_MLP), schedule, rounds=3
    )
    assert not found.failures and math.isfinite(found.rows[-1]["train_loss"] or math.nan)


def test_the_penalties_find_the_moments_of_a_batch_that_is_part_of_a_larger_pass() -> None:
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
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"^method\.fedsr\.{key}="):
        FedSR(**settings)
