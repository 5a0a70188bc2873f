"""Test that methods' functions handle rare inputs: equal, extreme and invalid numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from raysim.methods import fedavg, fedbn, fedbr, fedbss, fedbuff, feddecorr, groupdro, scaffold
from raysim.methods.delayed_nesterov import DelayedNesterov, delayed_nesterov_step
from raysim.methods.fedopt import FedAdagrad, FedAdam, FedYogi


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return reproducible normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rule", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_server_rule_refuses_a_first_moment_that_never_changes(rule: Any) -> None:
    with pytest.raises(ValueError, match=rf"^method\.{rule.name}\.beta1=1"):
        rule(beta1=1.0)


@pytest.mark.parametrize("rule", [FedAdam, FedYogi])
def test_constant_second_moment_is_refused_only_with_bias_correction(rule: Any) -> None:
    assert rule(beta2=1.0).beta2 == 1.0
    with pytest.raises(ValueError, match=rf"^method\.{rule.name}\.beta2=1"):
        rule(beta2=1.0, bias_correction=True)


class TestFedAvg:
    def test_weighted_sum_ignores_diverged_client_of_weight_zero(self) -> None:
        vectors = torch.stack([vector(1, 2), vector(math.nan, math.inf), vector(3, 6)])
        assert torch.equal(fedavg.weighted_average(vectors, vector(1, 0, 1)), vector(2, 4))

    @pytest.mark.parametrize("weights", [(0.0, 0.0), (2.0, -1.0), (1.0, math.nan), (1.0, math.inf)])
    def test_aggregation_weights_are_refused_if_any_is_negative_or_infinite_or_all_are_zero(
        self, weights: tuple[float, float]
    ) -> None:
        with pytest.raises(ValueError, match="weights"):
            fedavg.weight_total(vector(*weights))

    def test_weighted_sum_adds_rows_in_order(self) -> None:
        vectors = torch.tensor([[1e8], [1.0], [-1e8]], dtype=torch.float32)
        ones = torch.ones(3)
        assert fedavg.weighted_sum(vectors, ones).item() == 0.0
        assert fedavg.weighted_sum(vectors[[0, 2, 1]], ones).item() == 1.0


class TestScaffold:
    @pytest.mark.parametrize(
        ("lr", "num_steps", "momentum"), [(0.1, 0, 0.0), (0.1, 3, 1.0), (0.0, 3, 0.0)]
    )
    def test_scaffold_refuses_zero_steps_or_zero_learning_rate_or_momentum_of_one(
        self, lr: float, num_steps: int, momentum: float
    ) -> None:
        with pytest.raises(ValueError, match="scaffold"):
            scaffold.updated_control_variate(*random(4, 3).unbind(), lr, num_steps, momentum)


class TestDelayedNesterov:
    def test_settings_activation_and_every_are_refused_if_their_product_exceeds_1(self) -> None:
        with pytest.raises(ValueError, match=r"method\.delayed_nesterov\.activation=0\.26"):
            DelayedNesterov(every=4, activation=0.26)

    def test_delayed_nesterov_changes_its_momentum_every_second_update(self) -> None:
        state = {
            "params": vector(1, 0),
            "momentum_buffer": vector(0, 2),
            "sum_of_updates": vector(0, 0),
        }
        settings: dict[str, Any] = {
            "server_lr": 0.5,
            "momentum": 0.25,
            "every": 2,
            "activation": 0.125,
        }
        delta = vector(4, 8)
        first = delayed_nesterov_step(**state, delta=delta, step=1, **settings)
        # The step is 0.5 * (0.125 * 0.25 * m + delta / 2).
        assert torch.equal(first["params"], vector(2, 2.03125))
        assert torch.equal(first["momentum_buffer"], vector(0, 2))
        assert torch.equal(first["sum_of_updates"], delta)
        second = delayed_nesterov_step(**first, delta=delta, step=2, **settings)
        # m becomes 0.25 * m + (4 + 4, 8 + 8) / 2; the step is 0.5 * (0.875 * 0.25 * m + delta / 2).
        assert torch.equal(second["momentum_buffer"], vector(4, 8.5))
        assert torch.equal(second["params"], first["params"] + vector(1.4375, 2.9296875))
        assert torch.equal(second["sum_of_updates"], vector(0, 0))


class TestFedBN:
    def test_fedbn_accepts_model_that_is_one_normalisation_layer(self) -> None:
        split = fedbn.split_parameter_names(names=["weight", "bias"], norm_modules=[""])
        assert split == {"shared": [], "personal": ["weight", "bias"]}

    def test_fedbn_refuses_unknown_scope(self) -> None:
        with pytest.raises(ValueError, match="scope='statistic'"):
            fedbn.split_parameter_names(names=["fc.bias"], norm_modules=[], scope="statistic")


class TestFedBSS:
    def test_fedbss_includes_half_of_the_biased_samples_despite_a_rounding_error(self) -> None:
        half = fedbss.inclusion_fraction(epoch=5, total_epochs=10)
        assert half < 0.5
        assert fedbss.included_count(num_biased=2, fraction=half) == 1

    def test_fedbss_split_puts_samples_of_equal_loss_in_the_same_half(self) -> None:
        losses = vector(1.2, 0.1, 0.4, 0.4, 3.0, 0.2, 2.0, 0.9)
        uncertainties = vector(0.1, 0.2, 0.9, 0.9, 0.3, 0.5, 0.6, 0)
        split = fedbss.split_by_uncertainty(losses=losses, uncertainties=uncertainties)
        assert split["order"].tolist() == [1, 5, 2, 3, 7, 0, 6, 4]
        assert split["num_unbiased"] == 4

    def test_fedbss_split_puts_samples_with_infinite_or_nan_loss_last(self) -> None:
        losses = vector(math.nan, 2.0, -math.inf, 1.0, math.inf)
        uncertainties = vector(math.nan, 0.1, math.nan, 0.5, 0.2)
        split = fedbss.split_by_uncertainty(losses=losses, uncertainties=uncertainties)
        assert split["order"].tolist() == [3, 1, 0, 2, 4]
        assert split["num_unbiased"] == 1

    def test_fedbss_uncertainty_is_1_for_uniform_probabilities_and_0_for_a_certain_class(
        self,
    ) -> None:
        probabilities = torch.stack([vector(0.25, 0.25, 0.25, 0.25), vector(0, 1, 0, 0)])
        assert fedbss.uncertainty(probabilities=probabilities).tolist() == [1.0, 0.0]

    def test_fedbss_inclusion_fraction_refuses_epoch_0_and_unknown_formulas(self) -> None:
        with pytest.raises(ValueError, match="cosin"):
            fedbss.inclusion_fraction(epoch=1, total_epochs=2, kind="cosin")
        with pytest.raises(ValueError, match="epoch"):
            fedbss.inclusion_fraction(epoch=0, total_epochs=2)


class TestFedBR:
    def test_contrastive_loss_at_a_low_temperature_does_not_overflow(self) -> None:
        z = random(6, 4).float().requires_grad_()
        loss = fedbr.contrastive_loss(z, -z.detach(), z.detach(), 1e-3, 1e-3, "divide")
        loss.backward()
        assert loss.item() == pytest.approx(2000.0, rel=1e-5)
        assert z.grad is not None
        assert z.grad.isfinite().all()

    def test_contrastive_loss_has_a_finite_gradient_if_all_features_are_zero(self) -> None:
        z = torch.zeros(2, 3, requires_grad=True)
        fedbr.contrastive_loss(z, torch.ones(2, 3), torch.ones(2, 3), 2.0, 1.0).backward()
        assert z.grad is not None
        assert z.grad.isfinite().all()

    def test_contrastive_loss_refuses_impossible_temperatures(self) -> None:
        z = random(6, 4)
        with pytest.raises(ValueError, match="temperature"):
            fedbr.contrastive_loss(z, z, z, 2.0, 0.0, "divide")
        with pytest.raises(ValueError, match="temperature_mode"):
            fedbr.contrastive_loss(z, z, z, 2.0, 2.0, "times")

    def test_fedbr_pseudo_data_equal_the_proxy_averages_if_no_client_samples_are_mixed_in(
        self,
    ) -> None:
        means, no_samples = random(3, 2), torch.zeros(3, 0, dtype=torch.int64)
        labels = torch.tensor([0, 1, 2, 3])
        mixed = fedbr.mixture_pseudo_data(means, random(4, 2, seed=1), labels, no_samples, 4)
        assert torch.equal(mixed["inputs"], means)
        assert torch.equal(mixed["targets"], torch.full((3, 4), 0.25, dtype=torch.float64))


class TestFedBuff:
    def test_sample_weights_are_multiplied_by_staleness_weights(self) -> None:
        weights = fedbuff.arrival_weights(
            staleness=torch.tensor([0, 3]), sample_weights=torch.tensor([5, 8])
        )
        assert weights.tolist() == [5.0, 4.0]
        assert fedbuff.buffer_divisor(weights=weights, normalization="weights") == 9.0
        assert fedbuff.buffer_divisor(weights=weights) == 2.0
        assert fedbuff.buffer_divisor(weights=weights, normalization="none") == 1.0

    def test_fedbuff_refuses_an_unknown_normalization(self) -> None:
        with pytest.raises(ValueError, match="normalization='weight'"):
            fedbuff.buffer_divisor(weights=vector(1.0), normalization="weight")


class TestGroupDRO:
    @pytest.mark.parametrize("losses", [(1e5, 1e5, 1e5, 1e5), (1e5, 7e4, 5e4, 6e4), (1e5, 0, 3, 1)])
    def test_groupdro_weights_of_large_losses_are_finite(self, losses: tuple[float, ...]) -> None:
        weights = vector(0.1, 0.4, 0.2, 0.3)
        updated = groupdro.updated_weights(
            weights, vector(*losses), torch.tensor([2, 0, 3, 1]), 0.01
        )
        assert updated.isfinite().all()
        assert (updated > 0).all()
        assert updated.sum().item() == pytest.approx(1.0)


VARIANTS = ("authors", "paper", "fedbr")


class TestFedDecorr:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_feddecorr_of_constant_features_has_a_finite_gradient(self, variant: str) -> None:
        features = torch.zeros(7, 2, requires_grad=True)
        feddecorr.decorrelation_penalty(features, variant).backward()
        assert features.grad is not None
        assert features.grad.isfinite().all()

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_feddecorr_penalty_of_a_single_row_is_zero(self, variant: str) -> None:
        assert feddecorr.decorrelation_penalty(random(1, 4), variant) == 0

    def test_feddecorr_with_variant_fedbr_replaces_variances_below_a_minimum(self) -> None:
        # Centred (-a, 0, a): the variance is a squared, and 1e-16 where that is smaller.
        for a, deviation in ((1e-7, 1e-7), (1e-9, 1e-8)):
            penalty = feddecorr.decorrelation_penalty(vector(-a, 0, a)[:, None], "fedbr")
            expected = (2 * (a / (deviation + 1e-4)) ** 2 / 3) ** 2
            assert penalty.item() == pytest.approx(expected, rel=1e-9, abs=0)

    def test_feddecorr_refuses_unknown_variant(self) -> None:
        with pytest.raises(ValueError, match="variant='papers'"):
            feddecorr.decorrelation_penalty(random(7, 4), "papers")
