"""What the specifications promise of the methods' pure functions, on tensors small enough to check by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.methods import (
    dann,
    fedavg,
    fedbn,
    fedbr,
    fedbss,
    fedbuff,
    fedcm,
    feddecorr,
    fedntd,
    fedopt,
    fedprox,
    groupdro,
    mixup,
    moon,
    scaffold,
)


def tensor(*values: float) -> Tensor:
    """A float64 vector."""
    return torch.tensor(values, dtype=torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    """Reproducible normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor | float | None, want: Tensor | float) -> None:
    """Equal in shape, and in value up to rounding in float64."""
    got, want = (torch.as_tensor(value, dtype=torch.float64) for value in (got, want))
    assert got.shape == want.shape and torch.allclose(got, want, rtol=1e-12, atol=1e-12), (
        f"{got} is not {want}"
    )


class TestFedAvg:
    def test_a_common_factor_of_the_weights_changes_nothing(self) -> None:
        vectors, weights = random(4, 5), tensor(1, 2, 3, 4)
        assert torch.equal(
            fedavg.weighted_average(vectors, weights), fedavg.weighted_average(vectors, 8 * weights)
        )

    def test_a_client_of_weight_zero_has_no_influence_even_if_it_diverged(self) -> None:
        vectors = torch.stack([tensor(1, 2), tensor(math.nan, math.inf), tensor(3, 6)])
        assert torch.equal(fedavg.weighted_average(vectors, tensor(1, 0, 1)), tensor(2, 4))

    def test_identical_clients_return_their_common_state(self) -> None:
        close(fedavg.weighted_average(random(5).expand(7, 5), torch.arange(1, 8)), random(5))

    def test_the_result_keeps_the_dtype_whatever_that_of_the_weights(self) -> None:
        vectors = torch.ones(2, 3, dtype=torch.float32)
        assert fedavg.weighted_average(vectors, tensor(0.1, 0.2)).dtype == torch.float32
        assert fedavg.weighted_average(vectors, torch.tensor([1, 2])).dtype == torch.float32

    def test_the_inputs_are_left_as_they_were(self) -> None:
        vectors = random(3, 4)
        before = vectors.clone()
        fedavg.weighted_average(vectors, tensor(1, 1, 1))
        assert torch.equal(vectors, before)

    @pytest.mark.parametrize("weights", [(0.0, 0.0), (2.0, -1.0), (1.0, math.nan), (1.0, math.inf)])
    def test_weights_without_a_mean_are_refused(self, weights: tuple[float, float]) -> None:
        with pytest.raises(ValueError, match="cannot weigh a mean"):
            fedavg.weighted_average(random(2, 3), tensor(*weights))

    def test_the_sum_is_folded_in_row_order(self) -> None:
        vectors = torch.tensor([[1e8], [1.0], [-1e8]], dtype=torch.float32)
        ones = torch.ones(3)
        assert fedavg.weighted_sum(vectors, ones).item() == 0.0
        assert fedavg.weighted_sum(vectors[[0, 2, 1]], ones).item() == 1.0


class TestFedProx:
    def test_the_gradient_of_the_term_is_the_proximal_gradient(self) -> None:
        params, anchor = random(6).requires_grad_(), random(6, seed=1)
        fedprox.proximal_term(params, anchor, 0.3).backward()
        close(params.grad, fedprox.proximal_gradient(params.detach(), anchor, 0.3))

    def test_at_the_received_model_the_gradient_is_exactly_zero(self) -> None:
        assert torch.equal(
            fedprox.proximal_gradient(random(6), random(6), 10.0),
            torch.zeros(6, dtype=torch.float64),
        )

    def test_no_gradient_reaches_the_received_model(self) -> None:
        params, anchor = random(3).requires_grad_(), random(3, seed=1).requires_grad_()
        fedprox.proximal_term(params, anchor, 1.0).backward()
        assert anchor.grad is None

    def test_half_precision_vectors_are_compared_in_float32(self) -> None:
        params = torch.full((1000,), 1.0, dtype=torch.bfloat16)
        term = fedprox.proximal_term(params, torch.zeros_like(params), 2.0)
        assert term.dtype == torch.float32 and term.item() == 1000.0

    def test_gradient_descent_ends_between_the_optimum_and_the_anchor(self) -> None:
        optimum, anchor, mu = tensor(2, -4), tensor(1, 1), 3.0
        w = anchor.clone()
        for _ in range(200):
            w = w - 0.2 * (w - optimum + fedprox.proximal_gradient(w, anchor, mu))
        close(w, (optimum + mu * anchor) / (1 + mu))


class TestScaffold:
    @staticmethod
    def trained(
        start: Tensor, gradient: Tensor, lr: float, num_steps: int, momentum: float
    ) -> Tensor:
        params, buffer = start, torch.zeros_like(start)
        for _ in range(num_steps):
            buffer = momentum * buffer + gradient
            params = params - lr * buffer
        return params

    @pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
    @pytest.mark.parametrize("num_steps", [1, 2, 30])
    def test_a_constant_gradient_is_its_own_control_variate(
        self, num_steps: int, momentum: float
    ) -> None:
        start, gradient, zero = random(4), random(4, seed=1), torch.zeros(4, dtype=torch.float64)
        local = self.trained(start, gradient, 0.1, num_steps, momentum)
        close(
            scaffold.updated_control_variate(zero, zero, start, local, 0.1, num_steps, momentum),
            gradient,
        )

    def test_one_plain_step_makes_the_batch_gradient_the_control_variate(self) -> None:
        start, gradient, client, server = (
            random(4),
            random(4, seed=1),
            random(4, seed=2),
            random(4, seed=3),
        )
        local = start - 0.1 * scaffold.corrected_gradient(gradient, client, server)
        close(scaffold.updated_control_variate(client, server, start, local, 0.1, 1), gradient)

    def test_without_momentum_every_step_counts_once(self) -> None:
        assert scaffold.effective_steps(50, 0.0) == 50.0
        assert scaffold.effective_steps(1, 0.9) == 1.0

    def test_equal_control_variates_leave_the_gradient(self) -> None:
        assert torch.equal(
            scaffold.corrected_gradient(tensor(1, 2), tensor(0, 0), tensor(0, 0)), tensor(1, 2)
        )

    def test_the_server_keeps_the_mean_over_all_clients_while_some_are_idle(self) -> None:
        controls, server = (
            torch.zeros(5, 3, dtype=torch.float64),
            torch.zeros(3, dtype=torch.float64),
        )
        for turn, cohort in enumerate(([0, 3], [1], [0, 1, 4])):
            fresh = random(len(cohort), 3, seed=turn)
            server = scaffold.server_control_variate(server, fresh - controls[cohort], 5)
            controls[cohort] = fresh
            close(server, controls.mean(dim=0))

    def test_quadratic_clients_stay_at_the_global_minimum(self) -> None:
        h, a = tensor(1, 4), tensor(0, 1)
        minimum = (h * a).sum() / h.sum()
        controls = h * (minimum - a)
        y = minimum.repeat(2)
        for _ in range(10):
            y = y - 0.05 * scaffold.corrected_gradient(h * (y - a), controls, tensor(0, 0))
        close(y, minimum.repeat(2))

    @pytest.mark.parametrize(
        ("lr", "num_steps", "momentum"), [(0.1, 0, 0.0), (0.1, 3, 1.0), (0.0, 3, 0.0)]
    )
    def test_a_client_that_cannot_have_moved_is_refused(
        self, lr: float, num_steps: int, momentum: float
    ) -> None:
        with pytest.raises(ValueError, match="scaffold"):
            scaffold.updated_control_variate(*random(4, 3).unbind(), lr, num_steps, momentum)


class TestFedBN:
    names: ClassVar = ["bn1_projection.weight", "layer.1.weight", "layer.1.running_mean", "fc.bias"]

    def test_only_the_scope_of_a_normalisation_layer_is_personal(self) -> None:
        def personal(scope: str) -> list[str]:
            split = fedbn.split_parameter_names(
                names=self.names, norm_modules=["layer.1"], scope=scope
            )
            assert sorted(split["shared"] + split["personal"]) == sorted(self.names)
            return split["personal"]

        assert personal("all") == ["layer.1.weight", "layer.1.running_mean"]
        assert personal("affine") == ["layer.1.weight"]
        assert personal("statistics") == ["layer.1.running_mean"]
        assert personal("none") == []

    def test_a_model_that_is_itself_a_normalisation_layer_is_personal(self) -> None:
        split = fedbn.split_parameter_names(names=["weight", "bias"], norm_modules=[""])
        assert split == {"shared": [], "personal": ["weight", "bias"]}

    def test_an_unknown_scope_is_refused_with_the_nearest_name(self) -> None:
        with pytest.raises(ValueError, match="did you mean 'statistics'"):
            fedbn.split_parameter_names(names=self.names, norm_modules=[], scope="statistic")


class TestMixup:
    inputs, labels, permutation = (
        random(5, 2, 3),
        torch.tensor([0, 2, 1, 1, 0]),
        torch.tensor([3, 0, 4, 2, 1]),
    )

    def test_lambda_one_is_the_plain_batch_bit_for_bit(self) -> None:
        batch = mixup.mixed_batch(self.inputs, self.labels, 3, 1.0, self.permutation)
        assert torch.equal(batch["inputs"], self.inputs)
        assert torch.equal(batch["targets"], F.one_hot(self.labels, 3).double())
        logits = random(5, 3, seed=1)
        loss = mixup.mixed_loss(logits, self.labels, 1.0, self.permutation)
        assert torch.equal(loss, F.cross_entropy(logits, self.labels))

    def test_the_identity_permutation_leaves_the_batch(self) -> None:
        batch = mixup.mixed_batch(self.inputs, self.labels, 3, 0.3, torch.arange(5))
        close(batch["inputs"], self.inputs)

    def test_lambda_zero_is_the_batch_in_the_order_of_its_partners(self) -> None:
        batch = mixup.mixed_batch(self.inputs, self.labels, 3, 0.0, self.permutation)
        assert torch.equal(batch["inputs"], self.inputs[self.permutation])
        logits = random(5, 3, seed=1)
        loss = mixup.mixed_loss(logits[self.permutation], self.labels, 0.0, self.permutation)
        close(loss, F.cross_entropy(logits, self.labels))

    @pytest.mark.parametrize("lam", [0.2, torch.tensor(0.7, dtype=torch.float64)])
    def test_the_loss_is_the_cross_entropy_with_the_mixed_targets(
        self, lam: float | Tensor
    ) -> None:
        logits = random(5, 3, seed=1)
        targets = mixup.mixed_batch(self.inputs, self.labels, 3, lam, self.permutation)["targets"]
        close(
            mixup.mixed_loss(logits, self.labels, lam, self.permutation),
            F.cross_entropy(logits, targets),
        )

    def test_targets_sum_to_one_and_inputs_stay_between_the_pair(self) -> None:
        batch = mixup.mixed_batch(self.inputs, self.labels, 3, 0.35, self.permutation)
        close(batch["targets"].sum(dim=1), torch.ones(5))
        pair = torch.stack([self.inputs, self.inputs[self.permutation]])
        assert (batch["inputs"] >= pair.amin(0) - 1e-12).all() and (
            batch["inputs"] <= pair.amax(0) + 1e-12
        ).all()

    def test_soft_labels_are_mixed_like_hard_ones(self) -> None:
        hard = mixup.mixed_batch(self.inputs, self.labels, 3, 0.35, self.permutation)
        soft = mixup.mixed_batch(
            self.inputs, F.one_hot(self.labels, 3).double(), 3, 0.35, self.permutation
        )
        assert torch.equal(hard["targets"], soft["targets"])


class TestFedBSS:
    losses, uncertainties = (
        tensor(1.2, 0.1, 0.4, 0.4, 3.0, 0.2, 2.0, 0.9),
        tensor(0.1, 0.2, 0.9, 0.9, 0.3, 0.5, 0.6, 0),
    )

    def chosen(
        self, epoch: int, total: int, kind: str = "cosine", losses: Tensor | None = None
    ) -> list[int]:
        chosen: list[int] = fedbss.selected_indices(
            losses=self.losses if losses is None else losses,
            uncertainties=self.uncertainties,
            epoch=epoch,
            total_epochs=total,
            kind=kind,
        ).tolist()
        return chosen

    def test_inclusion_rises_to_one_and_both_ramps_have_the_same_sum(self) -> None:
        ramps = {
            kind: [
                fedbss.inclusion_fraction(epoch=e, total_epochs=10, kind=kind) for e in range(1, 11)
            ]
            for kind in fedbss.KINDS
        }
        for kind in ("cosine", "linear"):
            assert (
                all(a < b for a, b in zip(ramps[kind], ramps[kind][1:], strict=False))
                and ramps[kind][-1] == 1.0
            )
            assert sum(ramps[kind]) == pytest.approx(11 / 2, abs=1e-12)
        assert all(a < b for a, b in zip(ramps["cosine"][:4], ramps["linear"][:4], strict=True))
        assert all(a > b for a, b in zip(ramps["cosine"][5:9], ramps["linear"][5:9], strict=True))
        assert set(ramps["filter"]) == {0.0} and set(ramps["all"]) == {1.0}

    def test_half_of_two_samples_is_one(self) -> None:
        half = fedbss.inclusion_fraction(epoch=5, total_epochs=10)
        assert half < 0.5 and fedbss.included_count(num_biased=2, fraction=half) == 1

    @pytest.mark.parametrize("kind", ["cosine", "linear"])
    def test_every_epoch_extends_the_one_before_until_all_are_in(self, kind: str) -> None:
        epochs = [self.chosen(epoch, 7, kind) for epoch in range(1, 8)]
        for earlier, later in pairwise(epochs):
            assert later[: len(earlier)] == earlier and earlier[0] == 1
        assert sorted(epochs[-1]) == list(range(8)) and len(epochs[0]) < 8

    def test_every_selected_loss_is_at_most_every_other(self) -> None:
        inside = self.chosen(3, 7)
        outside = sorted(set(range(8)) - set(inside))
        assert self.losses[inside].max() <= self.losses[outside].min()

    def test_a_constant_added_to_all_losses_changes_nothing(self) -> None:
        assert self.chosen(3, 7, losses=self.losses + 1.0) == self.chosen(3, 7)

    def test_renaming_samples_only_renames_the_selection(self) -> None:
        losses = tensor(1.2, 0.1, 0.4, 0.5, 3.0, 0.2, 2.0, 0.9)
        names = torch.tensor([5, 2, 7, 0, 1, 6, 4, 3])
        chosen = fedbss.selected_indices(
            losses=losses, uncertainties=self.uncertainties, epoch=3, total_epochs=7
        )
        renamed = fedbss.selected_indices(
            losses=losses[names], uncertainties=self.uncertainties[names], epoch=3, total_epochs=7
        )
        assert torch.equal(names[renamed], chosen)

    def test_ties_take_the_first_border_and_all_samples_of_its_loss(self) -> None:
        split = fedbss.split_by_uncertainty(losses=self.losses, uncertainties=self.uncertainties)
        assert split["order"].tolist() == [1, 5, 2, 3, 7, 0, 6, 4] and split["num_unbiased"] == 4

    def test_losses_that_are_not_finite_sort_last(self) -> None:
        losses, doubts = (
            tensor(math.nan, 2.0, -math.inf, 1.0, math.inf),
            tensor(math.nan, 0.1, math.nan, 0.5, 0.2),
        )
        split = fedbss.split_by_uncertainty(losses=losses, uncertainties=doubts)
        assert split["order"].tolist() == [3, 1, 0, 2, 4] and split["num_unbiased"] == 1

    def test_uncertainty_is_one_for_uniform_and_zero_for_certain_predictions(self) -> None:
        probabilities = torch.stack([tensor(0.25, 0.25, 0.25, 0.25), tensor(0, 1, 0, 0)])
        assert fedbss.uncertainty(probabilities=probabilities).tolist() == [1.0, 0.0]

    def test_uncertainty_lies_between_zero_and_one_and_ignores_the_order_of_classes(self) -> None:
        probabilities = (5 * random(50, 4)).softmax(dim=1)
        values = fedbss.uncertainty(probabilities=probabilities)
        assert values.min() >= 0 and values.max() <= 1
        assert torch.equal(values, fedbss.uncertainty(probabilities=probabilities[:, [2, 0, 3, 1]]))

    def test_with_two_classes_uncertainty_is_one_minus_their_difference(self) -> None:
        probabilities = random(9, 2).softmax(dim=1)
        close(
            fedbss.uncertainty(probabilities=probabilities),
            1 - (probabilities[:, 0] - probabilities[:, 1]).abs(),
        )

    def test_unknown_kinds_and_epochs_are_refused(self) -> None:
        with pytest.raises(ValueError, match="did you mean 'cosine'"):
            fedbss.inclusion_fraction(epoch=1, total_epochs=2, kind="cosin")
        with pytest.raises(ValueError, match="epoch 0 of 2"):
            fedbss.inclusion_fraction(epoch=0, total_epochs=2)


class TestFedBR:
    local_pseudo, global_pseudo, local = random(3, 6, 4).unbind()

    def loss(self, *temperatures: float, mode: str = "multiply") -> Tensor:
        return fedbr.contrastive_loss(
            self.local_pseudo, self.global_pseudo, self.local, *temperatures, mode
        )

    def test_equal_local_and_global_features_pull_no_longer(self) -> None:
        z = random(6, 4).requires_grad_()
        positive_only = fedbr.contrastive_loss(z, z.detach(), self.local, 2.0, 0.0)
        positive_only.backward()
        close(z.grad, torch.zeros(6, 4))
        close(positive_only.detach(), math.log1p(math.exp(-2.0)))

    def test_temperature_zero_leaves_only_the_attraction(self) -> None:
        other = fedbr.contrastive_loss(
            self.local_pseudo, self.global_pseudo, random(6, 4, seed=9), 2.0, 0.0
        )
        assert torch.equal(self.loss(2.0, 0.0), other)
        assert math.log1p(math.exp(-2.0)) <= other.item() <= math.log1p(math.exp(2.0))

    def test_identical_positives_and_negatives_cost_log_two(self) -> None:
        loss = fedbr.contrastive_loss(self.local_pseudo, self.local, self.local, 2.0, 2.0)
        close(loss, math.log(2.0))

    def test_dividing_is_multiplying_by_the_inverse(self) -> None:
        close(self.loss(0.5, 4.0, mode="divide"), self.loss(2.0, 0.25))

    def test_the_length_of_embeddings_does_not_matter(self) -> None:
        scaled = fedbr.contrastive_loss(
            3 * self.local_pseudo, 0.1 * self.global_pseudo, 7 * self.local, 2.0, 1.0
        )
        close(scaled, self.loss(2.0, 1.0))

    def test_small_temperatures_do_not_overflow(self) -> None:
        z = self.local_pseudo.float().requires_grad_()
        loss = fedbr.contrastive_loss(z, -z.detach(), z.detach(), 1e-3, 1e-3, "divide")
        loss.backward()
        assert (
            loss.item() == pytest.approx(2000.0, rel=1e-5)
            and z.grad is not None
            and z.grad.isfinite().all()
        )

    def test_a_dead_embedding_has_a_finite_gradient(self) -> None:
        z = torch.zeros(2, 3, requires_grad=True)
        fedbr.contrastive_loss(z, torch.ones(2, 3), torch.ones(2, 3), 2.0, 1.0).backward()
        assert z.grad is not None and z.grad.isfinite().all()

    def test_wrong_temperatures_are_refused(self) -> None:
        with pytest.raises(ValueError, match="divide by a temperature"):
            self.loss(2.0, 0.0, mode="divide")
        with pytest.raises(ValueError, match="temperature_mode"):
            self.loss(2.0, 2.0, mode="times")

    def test_uniform_targets_cost_at_least_log_of_the_classes(self) -> None:
        assert fedbr.pseudo_label_loss(random(6, 5)).item() > math.log(5)
        close(fedbr.pseudo_label_loss(random(6, 1).expand(6, 5)), math.log(5))

    def test_the_gradient_of_the_uniform_loss_is_the_distance_from_uniform(self) -> None:
        logits = random(6, 5).requires_grad_()
        fedbr.pseudo_label_loss(logits).backward()
        close(logits.grad, (logits.detach().softmax(dim=1) - 1 / 5) / 6)

    def test_no_targets_means_uniform_targets(self) -> None:
        uniform = torch.full((6, 5), 0.2, dtype=torch.float64)
        close(fedbr.pseudo_label_loss(random(6, 5), uniform), fedbr.pseudo_label_loss(random(6, 5)))

    def test_the_mean_of_one_sample_is_the_sample(self) -> None:
        inputs, indices = random(4, 2, 3), torch.tensor([[2], [0], [2]])
        assert torch.equal(fedbr.random_sample_mean(inputs, indices), inputs[[2, 0, 2]])

    def test_mixing_no_samples_returns_the_means_with_uniform_targets(self) -> None:
        means, none = random(3, 2), torch.zeros(3, 0, dtype=torch.int64)
        mixed = fedbr.mixture_pseudo_data(
            means, random(4, 2, seed=1), torch.tensor([0, 1, 2, 3]), none, 4
        )
        assert torch.equal(mixed["inputs"], means)
        assert torch.equal(mixed["targets"], torch.full((3, 4), 0.25, dtype=torch.float64))

    @pytest.mark.parametrize("per_mean", [0, 1, 3])
    def test_mixed_targets_sum_to_one(self, per_mean: int) -> None:
        indices = torch.arange(2 * per_mean).reshape(2, per_mean) % 4
        soft = random(4, 5, seed=2).softmax(dim=1)
        for labels in (torch.tensor([4, 1, 0, 1]), soft):
            mixed = fedbr.mixture_pseudo_data(
                random(2, 3), random(4, 3, seed=1), labels, indices, 5
            )
            close(mixed["targets"].sum(dim=1), torch.ones(2))


class TestFedBuff:
    deltas, staleness = random(4, 3), torch.tensor([0, 3, 8, 0])

    def test_without_an_exponent_the_buffer_is_averaged(self) -> None:
        direction = fedbuff.buffered_aggregate(
            deltas=self.deltas, staleness=self.staleness, exponent=0.0
        )
        close(direction, self.deltas.mean(dim=0))

    def test_equal_staleness_shrinks_the_mean_only_when_counting(self) -> None:
        equal = torch.full((4,), 3)
        close(
            fedbuff.buffered_aggregate(deltas=self.deltas, staleness=equal),
            self.deltas.mean(dim=0) / 2,
        )
        normalised = fedbuff.buffered_aggregate(
            deltas=self.deltas, staleness=equal, normalization="weights"
        )
        close(normalised, self.deltas.mean(dim=0))

    def test_a_buffer_of_one_is_the_update_times_its_weight(self) -> None:
        one = fedbuff.buffered_aggregate(deltas=self.deltas[:1], staleness=torch.tensor([8]))
        close(one, self.deltas[0] / 3)

    def test_the_direction_is_linear_and_ignores_the_order(self) -> None:
        def direction(deltas: Tensor, staleness: Tensor) -> Tensor:
            return fedbuff.buffered_aggregate(deltas=deltas, staleness=staleness)

        other = random(4, 3, seed=1)
        both = direction(self.deltas, self.staleness) + 2 * direction(other, self.staleness)
        close(direction(self.deltas + 2 * other, self.staleness), both)
        turned = torch.tensor([2, 0, 3, 1])
        close(
            direction(self.deltas[turned], self.staleness[turned]),
            direction(self.deltas, self.staleness),
        )

    def test_no_server_rate_leaves_the_model(self) -> None:
        params = random(3, seed=2)
        step = fedbuff.buffered_step(
            params=params, deltas=self.deltas, staleness=self.staleness, server_lr=0.0
        )
        assert torch.equal(step, params)

    def test_a_synchronous_buffer_is_fedavg_bit_for_bit(self) -> None:
        params, deltas = random(3, seed=2).float(), self.deltas.float()
        step = fedbuff.buffered_step(
            params=params, deltas=deltas, staleness=torch.zeros(4, dtype=torch.int64), server_lr=1
        )
        assert torch.equal(step, params + fedavg.weighted_average(deltas, torch.ones(4)))

    def test_sample_weights_multiply_those_of_staleness(self) -> None:
        weights = fedbuff.arrival_weights(
            staleness=torch.tensor([0, 3]), sample_weights=torch.tensor([5, 8])
        )
        assert weights.tolist() == [5.0, 4.0]
        assert fedbuff.buffer_divisor(weights=weights, normalization="weights") == 9.0
        assert fedbuff.buffer_divisor(weights=weights) == 2.0
        assert fedbuff.buffer_divisor(weights=weights, normalization="none") == 1.0

    def test_an_unknown_normalization_is_refused_with_the_nearest_name(self) -> None:
        with pytest.raises(ValueError, match="did you mean 'weights'"):
            fedbuff.buffered_aggregate(
                deltas=self.deltas, staleness=self.staleness, normalization="weight"
            )


ADAPTIVE: list[Callable[..., dict[str, Tensor]]] = [
    fedopt.fedadagrad_step,
    fedopt.fedadam_step,
    fedopt.fedyogi_step,
]


class TestFedOpt:
    params, delta = random(6).float(), random(6, seed=1).float()
    zero = torch.zeros(6)

    def adaptive(
        self, rule: Callable[..., dict[str, Tensor]], delta: Tensor, v: Tensor, **more: float
    ) -> dict[str, Tensor]:
        settings = {"server_lr": 0.1, "beta1": 0.9, "tau": 1e-3} | more
        return rule(
            params=self.params, delta=delta, first_moment=self.zero, second_moment=v, **settings
        )

    @pytest.mark.parametrize("nesterov", [False, True])
    def test_without_momentum_and_at_rate_one_it_is_fedavg_bit_for_bit(
        self, nesterov: bool
    ) -> None:
        step = fedopt.fedavgm_step(
            params=self.params,
            delta=self.delta,
            momentum_buffer=self.zero,
            server_lr=1.0,
            momentum=0.0,
            nesterov=nesterov,
        )
        assert torch.equal(step["params"], self.params + self.delta)

    @pytest.mark.parametrize("rule", ADAPTIVE)
    def test_without_movement_the_model_stays(self, rule: Callable[..., dict[str, Tensor]]) -> None:
        v = torch.full((6,), 0.5)
        step = self.adaptive(rule, self.zero, v)
        assert torch.equal(step["params"], self.params)
        kept = 0.99 if rule is fedopt.fedadam_step else 1.0
        assert torch.equal(step["second_moment"], kept * v)

    def test_moments_decay_without_movement(self) -> None:
        ones = torch.ones(6)
        step = fedopt.fedadam_step(
            params=self.params,
            delta=self.zero,
            first_moment=ones,
            second_moment=ones,
            server_lr=0.1,
        )
        assert torch.equal(step["first_moment"], 0.9 * ones)
        momentum = fedopt.fedavgm_step(
            params=self.params, delta=self.zero, momentum_buffer=ones, server_lr=0.1, momentum=0.5
        )
        assert torch.equal(momentum["momentum_buffer"], 0.5 * ones)

    def test_adam_and_yogi_agree_bit_for_bit_from_an_empty_second_moment(self) -> None:
        adam, yogi = (self.adaptive(rule, self.delta, self.zero) for rule in ADAPTIVE[1:])
        assert all(torch.equal(adam[key], yogi[key]) for key in adam)

    def test_yogi_moves_slowly_and_never_below_zero(self) -> None:
        v = random(6, seed=2).float().square()
        for turn in range(5):
            delta = random(6, seed=turn).float()
            new = self.adaptive(fedopt.fedyogi_step, delta, v)["second_moment"]
            assert ((new - v).abs() <= 0.01 * delta.square() + 1e-6).all() and (new >= 0).all()
            v = new

    @pytest.mark.parametrize("rule", ADAPTIVE)
    def test_the_first_step_follows_the_update_and_is_bounded(
        self, rule: Callable[..., dict[str, Tensor]]
    ) -> None:
        moved = self.adaptive(rule, self.delta, torch.full((6,), 1e-6))["params"] - self.params
        assert torch.equal(moved.sign(), self.delta.sign())
        assert (moved.abs() <= 0.1 * 0.1 * self.delta.abs() / 1e-3 + 1e-6).all()

    @pytest.mark.parametrize("rule", ADAPTIVE)
    def test_coordinates_are_independent_and_inputs_are_left_alone(
        self, rule: Callable[..., dict[str, Tensor]]
    ) -> None:
        order, v = torch.tensor([4, 1, 5, 0, 3, 2]), random(6, seed=3).float().square()
        inputs = {
            "params": self.params,
            "delta": self.delta,
            "first_moment": self.zero,
            "second_moment": v,
        }
        before = {key: value.clone() for key, value in inputs.items()}
        straight = rule(**inputs, server_lr=0.1)
        turned = rule(**{key: value[order] for key, value in inputs.items()}, server_lr=0.1)
        assert all(torch.equal(straight[key][order], turned[key]) for key in straight)
        assert all(torch.equal(inputs[key], before[key]) for key in inputs)

    @pytest.mark.parametrize("rule", ADAPTIVE[1:])
    def test_bias_correction_only_scales_the_rate(
        self, rule: Callable[..., dict[str, Tensor]]
    ) -> None:
        v = torch.full((6,), 0.04)
        plain = self.adaptive(
            rule, self.delta, v, server_lr=0.1 * math.sqrt(1 - 0.99**3) / (1 - 0.9**3)
        )
        assert torch.equal(self.adaptive(rule, self.delta, v, step=3)["params"], plain["params"])


class TestMoon:
    z, received, previous = random(5, 4), random(5, 4, seed=1), random(3, 5, 4, seed=2)

    def loss(self, previous: Tensor, temperature: float = 0.5) -> Tensor:
        return moon.model_contrastive_loss(self.z, self.received, previous, temperature)

    def test_without_a_previous_model_there_is_no_contrast(self) -> None:
        z = self.z.clone().requires_grad_()
        loss = moon.model_contrastive_loss(
            z, self.received, torch.empty(0, 5, 4, dtype=torch.float64), 0.5
        )
        close(loss, 0.0)
        assert not loss.requires_grad

    def test_a_previous_model_equal_to_the_received_one_costs_log_two_and_pulls_nowhere(
        self,
    ) -> None:
        z = self.z.clone().requires_grad_()
        loss = moon.model_contrastive_loss(z, self.received, self.received.unsqueeze(0), 0.5)
        loss.backward()
        close(loss.detach(), math.log(2))
        close(z.grad, torch.zeros(5, 4))

    def test_the_length_of_representations_does_not_matter(self) -> None:
        lengths = random(3, 5, 1, seed=3).exp()
        scaled = moon.model_contrastive_loss(
            0.1 * self.z, 7 * self.received, lengths * self.previous, 0.5
        )
        close(scaled, self.loss(self.previous))

    @pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
    @pytest.mark.parametrize("count", [1, 3])
    def test_the_loss_lies_between_its_two_extremes(self, count: int, temperature: float) -> None:
        def extreme(sign: float) -> Tensor:
            return moon.model_contrastive_loss(
                self.z, sign * self.z, -sign * self.z.expand(count, 5, 4), temperature
            )

        least, most = (math.log1p(count * math.exp(sign * 2 / temperature)) for sign in (-1, 1))
        close(extreme(1.0), least)
        close(extreme(-1.0), most)
        assert 0 < least < self.loss(self.previous[:count], temperature).item() < most

    def test_every_previous_model_counts_even_an_identical_one(self) -> None:
        once, twice = (self.loss(self.previous[:1].expand(count, 5, 4)) for count in (1, 2))
        a, b = (
            F.cosine_similarity(self.z, other, dim=1) / 0.5
            for other in (self.received, self.previous[0])
        )
        close(once, -(a.exp() / (a.exp() + b.exp())).log().mean())
        close(twice, -(a.exp() / (a.exp() + 2 * b.exp())).log().mean())
        assert twice > once

    def test_the_order_of_previous_models_does_not_matter(self) -> None:
        close(self.loss(self.previous[[2, 0, 1]]), self.loss(self.previous))


class TestDann:
    labels = torch.tensor([0, 2, 1, 2, 0])

    def test_the_generator_climbs_where_the_discriminator_descends(self) -> None:
        domains = random(5, 4).requires_grad_()
        (down,) = torch.autograd.grad(dann.discriminator_loss(domains, 2), domains)
        loss = dann.generator_loss(random(5, 3, seed=1), self.labels, domains, 2, 0.3)
        (up,) = torch.autograd.grad(loss, domains)
        close(up, -0.3 * down)

    def test_a_single_domain_costs_nothing(self) -> None:
        domains = random(5, 1).requires_grad_()
        loss = dann.discriminator_loss(domains, 0)
        loss.backward()
        close(loss.detach(), 0.0)
        close(domains.grad, torch.zeros(5, 1))

    @pytest.mark.parametrize("clients", [2, 7])
    def test_a_discriminator_that_cannot_tell_costs_the_log_of_the_clients(
        self, clients: int
    ) -> None:
        for domain in range(clients):
            close(
                dann.discriminator_loss(random(5, 1).expand(5, clients), domain), math.log(clients)
            )

    def test_the_generators_own_part_is_the_cross_entropy_of_hard_or_soft_labels(self) -> None:
        logits, domains = random(5, 3), random(5, 4, seed=1)
        adversary = 0.7 * dann.discriminator_loss(domains, 1)
        loss = dann.generator_loss(logits, self.labels, domains, 1, 0.7)
        close(loss, F.cross_entropy(logits, self.labels) - adversary)
        soft = F.one_hot(self.labels, 3).double()
        close(dann.generator_loss(logits, soft, domains, 1, 0.7), loss)
        close(
            dann.generator_loss(logits, self.labels, domains, 1, 0.0),
            F.cross_entropy(logits, self.labels),
        )

    @pytest.mark.parametrize("ratio", [1, 2, 5])
    def test_a_period_has_as_many_discriminator_steps_as_asked_for(self, ratio: int) -> None:
        for start in (1, 2, 17):
            period = [
                dann.is_discriminator_step(step, ratio) for step in range(start, start + 1 + ratio)
            ]
            assert sum(period) == ratio
        assert not dann.is_discriminator_step(ratio, ratio), (
            "the one generator step of the first period"
        )

    def test_one_to_one_begins_with_the_generator(self) -> None:
        assert [dann.is_discriminator_step(step, 1) for step in range(1, 7)] == [False, True] * 3


class TestGroupDRO:
    weights = tensor(0.1, 0.4, 0.2, 0.3)

    def test_equal_losses_of_all_clients_change_no_weight(self) -> None:
        close(
            groupdro.updated_weights(self.weights, tensor(2, 2, 2, 2), torch.arange(4), 0.5),
            self.weights,
        )

    def test_a_constant_added_to_all_losses_changes_no_weight(self) -> None:
        losses = tensor(0.5, 3, 1, 0)
        moved = groupdro.updated_weights(self.weights, losses + 40, torch.arange(4), 0.5)
        close(moved, groupdro.updated_weights(self.weights, losses, torch.arange(4), 0.5))

    def test_ratios_grow_with_the_exponential_of_the_difference_in_loss(self) -> None:
        losses, clients = tensor(2.5, 0.5), torch.tensor([3, 1])
        moved = groupdro.updated_weights(self.weights, losses, clients, 0.7)
        own = tensor(0, 0.5, 0, 2.5)  # an idle client is as one without a loss
        growth = (moved / moved[0]) / (self.weights / self.weights[0])
        close(growth, (0.7 * (own - own[0])).exp())

    def test_a_step_size_of_zero_only_normalises(self) -> None:
        close(
            groupdro.updated_weights(5 * self.weights, tensor(9, 1), torch.tensor([0, 2]), 0.0),
            self.weights,
        )

    @pytest.mark.parametrize(
        "losses",
        [(1e5, 1e5, 1e5, 1e5), (1e5, 99_999, 99_990, 99_995), (1e5, 7e4, 5e4, 6e4), (1e5, 0, 3, 1)],
        ids=str,
    )
    def test_weights_stay_finite_and_positive_under_enormous_losses(
        self, losses: tuple[float, ...]
    ) -> None:
        clients = torch.tensor([2, 0, 3, 1])
        moved = groupdro.updated_weights(self.weights, tensor(*losses), clients, 0.01)
        assert moved.isfinite().all()
        close(moved.sum(), 1.0)
        wanted = (self.weights[clients].log() + 0.01 * tensor(*losses)).softmax(dim=0)
        close(groupdro.aggregation_weights(moved, clients), wanted)
        assert (moved > 0).all()

    def test_the_order_of_the_participants_does_not_matter(self) -> None:
        losses, clients, turned = tensor(1, 4, 2), torch.tensor([3, 0, 2]), torch.tensor([2, 0, 1])
        one = groupdro.updated_weights(self.weights, losses, clients, 0.3)
        other = groupdro.updated_weights(self.weights, losses[turned], clients[turned], 0.3)
        assert torch.equal(one, other)
        chosen = groupdro.aggregation_weights(one, clients)
        close(groupdro.aggregation_weights(one, clients[turned]), chosen[turned])
        close(chosen.sum(), 1.0)

    def test_a_single_participant_has_all_the_weight(self) -> None:
        for client in range(4):
            assert groupdro.aggregation_weights(self.weights, torch.tensor([client])).tolist() == [
                1.0
            ]

    def test_the_inputs_are_left_as_they_were(self) -> None:
        before = self.weights.clone()
        groupdro.updated_weights(self.weights, tensor(1, 2), torch.tensor([0, 1]), 1.0)
        assert torch.equal(self.weights, before)


class TestFedCM:
    x, gradient, direction = random(6), random(6, seed=1), random(6, seed=2)

    def trained(
        self, gradient: Tensor, direction: Tensor, num_steps: list[int], alpha: float, lr: float
    ) -> Tensor:
        """Clients that took so many plain steps along one and the same mix."""
        v = fedcm.update_direction(gradient, direction, alpha)
        return torch.stack([self.x - lr * steps * v for steps in num_steps])

    def test_the_mix_lies_between_gradient_and_direction(self) -> None:
        assert torch.equal(
            fedcm.update_direction(self.gradient, self.direction, 1.0), self.gradient
        )
        assert torch.equal(
            fedcm.update_direction(self.gradient, self.direction, 0.0), self.direction
        )
        close(
            fedcm.update_direction(self.gradient, self.direction, 0.1),
            0.1 * self.gradient + 0.9 * self.direction,
        )

    def test_under_a_constant_gradient_the_direction_goes_to_it_geometrically(self) -> None:
        delta, steps, weights = torch.zeros(6, dtype=torch.float64), [3, 1, 7], tensor(1, 1, 2)
        for turn in range(1, 9):
            clients = self.trained(self.gradient, delta, steps, 0.25, 0.1)
            delta = fedcm.server_direction(self.x, clients, 0.1, torch.tensor(steps), weights)
            close(delta, (1 - 0.75**turn) * self.gradient)

    def test_a_direction_equal_to_the_gradient_is_a_fixed_point_and_steps_are_those_of_sgd(
        self,
    ) -> None:
        close(fedcm.update_direction(self.gradient, self.gradient, 0.1), self.gradient)
        clients = self.trained(self.gradient, self.gradient, [2, 5], 0.1, 0.1)
        close(clients, torch.stack([self.x - 0.1 * steps * self.gradient for steps in (2, 5)]))
        close(
            fedcm.server_direction(self.x, clients, 0.1, torch.tensor([2, 5]), tensor(1, 1)),
            self.gradient,
        )

    def test_clients_that_did_not_move_give_no_direction(self) -> None:
        delta = fedcm.server_direction(
            self.x, self.x.expand(3, 6), 0.1, torch.tensor([1, 2, 3]), tensor(1, 2, 3)
        )
        assert torch.equal(delta, torch.zeros(6, dtype=torch.float64))

    def test_the_direction_is_the_movement_per_step_and_rate(self) -> None:
        clients, steps, weights = random(3, 6, seed=3), torch.tensor([1, 2, 3]), tensor(1, 2, 3)
        delta = fedcm.server_direction(self.x, clients, 0.1, steps, weights)
        close(fedcm.server_direction(self.x, clients, 0.4, steps, weights), delta / 4)
        close(fedcm.server_direction(self.x, clients, 0.1, 2 * steps, weights), delta / 2)
        close(fedcm.server_direction(self.x, clients, 0.1, steps, 5 * weights), delta)
        own = (self.x - clients) / (0.1 * steps.double().unsqueeze(1))
        close(delta, (own[0] + 2 * own[1] + 3 * own[2]) / 6)


VARIANTS = ["authors", "paper", "fedbr"]


class TestFedDecorr:
    features = random(7, 4)
    # Columns with mean 0 that are orthogonal to each other.
    uncorrelated = torch.stack(
        [tensor(1, 1, -1, -1), tensor(1, -1, 1, -1), tensor(2, -2, -2, 2)], dim=1
    )

    @staticmethod
    def about(got: Tensor, want: Tensor | float) -> None:
        """Equal up to the small numbers that keep a variance of 0 harmless."""
        assert got.item() == pytest.approx(float(want), rel=1e-3, abs=1e-12)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_neither_shift_nor_scale_nor_sign_of_a_column_matters(self, variant: str) -> None:
        penalty = feddecorr.decorrelation_penalty(self.features, variant)
        shifted = feddecorr.decorrelation_penalty(self.features + tensor(1, -2, 30, 4), variant)
        assert shifted.item() == pytest.approx(penalty.item(), rel=1e-9)
        self.about(
            feddecorr.decorrelation_penalty(self.features * tensor(2, -3, 50, 1), variant), penalty
        )

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_the_order_of_rows_and_columns_does_not_matter(self, variant: str) -> None:
        penalty = feddecorr.decorrelation_penalty(self.features, variant)
        close(
            feddecorr.decorrelation_penalty(self.features[[3, 0, 6, 1, 5, 2, 4]], variant), penalty
        )
        close(feddecorr.decorrelation_penalty(self.features[:, [2, 0, 3, 1]], variant), penalty)

    def test_correlated_columns_cost_most_and_uncorrelated_ones_least(self) -> None:
        same = random(7, 1) * tensor(1, -2, 3)
        self.about(feddecorr.decorrelation_penalty(same, "paper"), 1.0)
        self.about(feddecorr.decorrelation_penalty(self.uncorrelated, "paper"), 1 / 3)
        self.about(feddecorr.decorrelation_penalty(same, "authors"), 6**2 / 7)
        close(feddecorr.decorrelation_penalty(self.uncorrelated, "authors"), 0.0)

    @pytest.mark.parametrize(("rows", "columns"), [(7, 4), (2, 5), (64, 3)])
    def test_the_authors_penalty_follows_from_the_printed_one(
        self, rows: int, columns: int
    ) -> None:
        features = random(rows, columns, seed=4)
        printed = feddecorr.decorrelation_penalty(features, "paper")
        authors = feddecorr.decorrelation_penalty(features, "authors")
        factor = rows * ((rows - 1) / rows) ** 2
        self.about(authors, factor * (columns**2 * printed - columns) / (columns * (columns - 1)))

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_the_gradient_moves_no_column_as_a_whole(self, variant: str) -> None:
        features = self.features.clone().requires_grad_()
        feddecorr.decorrelation_penalty(features, variant).backward()
        assert features.grad is not None and features.grad.abs().max() > 1e-3
        close(features.grad.sum(dim=0), torch.zeros(4))

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_dead_units_cost_nothing_and_have_a_finite_gradient(self, variant: str) -> None:
        features = (
            torch.cat([self.features, torch.zeros(7, 2, dtype=torch.float64)], dim=1)
            .float()
            .requires_grad_()
        )
        penalty = feddecorr.decorrelation_penalty(features, variant)
        penalty.backward()
        assert features.grad is not None and features.grad.isfinite().all()
        live = feddecorr.decorrelation_penalty(self.features, variant)
        pairs = (4 * 3) / (6 * 5) if variant == "authors" else 4**2 / 6**2
        assert penalty.item() == pytest.approx(pairs * live.item(), rel=1e-4)
        dead = torch.zeros(7, 2, requires_grad=True)
        feddecorr.decorrelation_penalty(dead, variant).backward()
        assert dead.grad is not None and dead.grad.isfinite().all()

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_a_single_row_costs_nothing(self, variant: str) -> None:
        close(feddecorr.decorrelation_penalty(self.features[:1], variant), 0.0)

    def test_the_third_form_by_hand(self) -> None:
        # Centred columns (-2, 0, 2) and (-2, -2, 4): unbiased variances 4 and 12, product 12.
        features = torch.stack([tensor(1, 3, 5), tensor(2, 2, 8)], dim=1)
        one, other = 2 + 1e-4, math.sqrt(12) + 1e-4
        entries = [
            8 / one**2 / 3,
            24 / other**2 / 3,
            12 / (one * other) / 3,
            12 / (one * other) / 3,
        ]
        close(
            feddecorr.decorrelation_penalty(features, "fedbr"),
            sum(entry**2 for entry in entries) / 4,
        )

    def test_in_the_third_form_a_variance_is_at_least_its_smallest_one(self) -> None:
        # Centred (-a, 0, a): the variance is a squared, and 1e-16 where that is smaller.
        for a, deviation in ((1e-7, 1e-7), (1e-9, 1e-8)):
            penalty = feddecorr.decorrelation_penalty(tensor(-a, 0, a)[:, None], "fedbr")
            expected = (2 * (a / (deviation + 1e-4)) ** 2 / 3) ** 2
            assert penalty.item() == pytest.approx(expected, rel=1e-9, abs=0)

    def test_an_unknown_variant_is_refused(self) -> None:
        with pytest.raises(
            ValueError, match=r"variant='papers' does not exist: .* did you mean 'paper'"
        ):
            feddecorr.decorrelation_penalty(self.features, "papers")


class TestFedNTD:
    student, teacher, labels = random(5, 4), random(5, 4, seed=1), torch.tensor([0, 3, 1, 2, 3])

    def loss(self, student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        return fedntd.not_true_distillation_loss(student, teacher, self.labels, temperature)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
    def test_it_is_the_divergence_over_the_other_classes(self, temperature: float) -> None:
        rows = []
        for own, other, label in zip(self.student, self.teacher, self.labels.tolist(), strict=True):
            rest = [c for c in range(4) if c != label]
            p, q = ((logits[rest] / temperature).softmax(dim=0) for logits in (other, own))
            rows.append((p * (p / q).log()).sum())
        close(
            self.loss(self.student, self.teacher, temperature),
            temperature**2 * torch.stack(rows).mean(),
        )

    def test_the_true_class_has_no_part_in_it(self) -> None:
        student = self.student.clone().requires_grad_()
        loss = self.loss(student, self.teacher)
        loss.backward()
        true = F.one_hot(self.labels, 4).bool()
        assert student.grad is not None and torch.equal(
            student.grad[true], torch.zeros(5, dtype=torch.float64)
        )
        assert (student.grad[~true] != 0).all()
        for change in (50.0, -math.inf):
            changed = (
                torch.where(true, logits + change, logits)
                for logits in (self.student, self.teacher)
            )
            assert torch.equal(self.loss(*changed), loss.detach())

    def test_a_constant_added_to_a_row_changes_nothing(self) -> None:
        shifted = self.loss(
            self.student + random(5, 1, seed=2), self.teacher + random(5, 1, seed=3), 2.0
        )
        close(shifted, self.loss(self.student, self.teacher, 2.0))

    def test_the_loss_is_positive_unless_both_agree(self) -> None:
        assert self.loss(self.student, self.teacher).item() > 0
        student = self.student.clone().requires_grad_()
        agreed = self.loss(student, self.student + random(5, 1, seed=2))
        agreed.backward()
        close(agreed.detach(), 0.0)
        close(student.grad, torch.zeros(5, 4))

    def test_no_gradient_reaches_the_teacher(self) -> None:
        teacher = self.teacher.clone().requires_grad_()
        self.loss(self.student.clone().requires_grad_(), teacher).backward()
        assert teacher.grad is None

    def test_at_a_high_temperature_it_is_the_variance_of_the_differences(self) -> None:
        others = torch.tensor(
            [[c for c in range(4) if c != label] for label in self.labels.tolist()]
        )
        delta = (self.student - self.teacher).gather(1, others)
        limit = ((delta - delta.mean(dim=1, keepdim=True)) ** 2).sum(dim=1).mean() / (2 * 3)
        far, near = (
            abs(self.loss(self.student, self.teacher, tau) - limit) / limit for tau in (1e2, 1e4)
        )
        assert near < 1e-3 < far * 50

    def test_with_two_classes_there_is_nothing_to_distil(self) -> None:
        labels = torch.tensor([0, 1, 1])
        close(
            fedntd.not_true_distillation_loss(random(3, 2), random(3, 2, seed=1), labels, 1.0), 0.0
        )
