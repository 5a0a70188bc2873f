"""Test FRAug's functions, its relation to FedBN, its warnings and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tiny_runs import (
    BUFFER,
    LOCAL,
    MLP,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    NormedMlp,
    participation_facts,
    run,
    run_spec,
    same_arrays,
    tiny_data,
)
from torch import Tensor, nn

from raysim.api.declarations import FORWARD, Local
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.data.federated import FederatedData
from raysim.data.partition import CSR, Partition
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.methods import feature_networks
from raysim.methods.feature_distances import Metric, mmd, mmd_of_classes
from raysim.methods.fedbn import FedBN
from raysim.methods.fedprox import FedProx
from raysim.methods.fraug import GENERATOR, RTNET, FRAug
from raysim.models import Classifier
from raysim.models.classifier import Shape
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import declare_run


def small(rounds: int | None = 4, **settings: Any) -> FRAug:
    """Return an FRAug whose generator has few inputs, unless `settings` says otherwise."""
    return FRAug(rounds, **({"noise_dim": 6} | settings))


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return reproducible normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- functions --------------------------------------------------------------------------------


def test_mmd_does_not_depend_on_a_common_offset() -> None:
    x, y = random(6, 4), random(5, 4, seed=1) + 1
    assert torch.allclose(mmd(x, y), mmd(x + 1000, y + 1000), rtol=1e-7)


def test_mmd_of_equal_rows_is_zero_with_finite_gradient() -> None:
    x = torch.full((3, 4), 0.1, requires_grad=True)
    value = mmd(x, torch.full((5, 4), 0.1))
    (gradient,) = torch.autograd.grad(value, x)
    assert value == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_mmd_per_class_is_averaged_over_the_classes_that_both_sets_have() -> None:
    x, y = random(5, 4), random(4, 4, seed=1) + 1
    x_labels, y_labels = torch.tensor([0, 1, 0, 2, 1]), torch.tensor([1, 0, 1, 3])
    parts = [mmd(x[[0, 2]], y[[1]]), mmd(x[[1, 4]], y[[0, 2]])]
    assert torch.allclose(mmd_of_classes(x, y, x_labels, y_labels), sum(parts) / 2)
    one = torch.zeros(9, dtype=torch.int64)
    assert torch.allclose(mmd_of_classes(x, y, one[:5], one[:4]), mmd(x, y))
    assert mmd_of_classes(x, y, one[:5], one[:4] + 1) == 0


def test_mmd_per_class_has_gradient_zero_if_all_features_are_equal() -> None:
    x = torch.full((3, 4), 0.1, requires_grad=True)
    labels = torch.tensor([0, 1, 2])
    value = mmd_of_classes(x, torch.full((3, 4), 0.1), labels, labels.flip(0) + 1)
    (gradient,) = torch.autograd.grad(value, x)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_fraug_networks_have_the_sizes_of_the_paper() -> None:
    generator, rtnet = (
        feature_networks.make_generator(512, 256, 65),
        feature_networks.make_rtnet(512, 512, 256, 65, norm=True),
    )
    assert sum(p.numel() for p in generator.parameters()) == 429_568
    assert sum(b.numel() for b in generator.buffers() if b.is_floating_point()) == 2_048
    assert sum(p.numel() for p in rtnet.parameters()) == 281_088
    plain_end = feature_networks.make_rtnet(512, 512, 256, 65, norm=False)
    assert sum(p.numel() for p in plain_end.parameters()) == 281_088 - 2 * 512
    noise, labels = torch.randn(65, 256), torch.arange(65)
    embeddings = generator(noise, labels)
    assert bool((embeddings >= 0).all()) and bool((rtnet(embeddings, labels) < 0).any())


# --- FedBN ------------------------------------------------------------------------------------


def model_tensors(result: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the model's shared tensors and its personal tensors, each as arrays by name.

    result: a finished run.
    """
    shared = {name: value for name, value in result.tensors.items() if name.startswith("model.")}
    return shared, {key: value for key, value in result.private.items() if "/model." in key}


@pytest.mark.parametrize(
    ("keep", "residual"), [(False, 0.0), (True, None)], ids=["fresh optimisers", "kept optimisers"]
)
@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
@pytest.mark.parametrize("model", [NORMED_MLP, NORMED], ids=["mlp", "cnn"])
def test_model_of_fraug_with_weight_zero_is_bit_identical_to_that_of_fedbn(
    model: Any, schedule: Any, keep: bool, residual: float | None
) -> None:
    local = replace(
        LOCAL, momentum=0.0 if keep else 0.9, epochs=2
    )  # buffers alone tell kept optimisers from fresh ones
    method = small(weight=0.0, residual=residual, keep_optimizer=keep)
    study = {"model": model, "local": local, "data": tiny_data(samples=60)}
    result = run(run_spec(method, **study), schedule, Ideal(), rounds=4)
    fedbn = run(run_spec(FedBN(), **study), schedule, Ideal(), rounds=4)
    (shared, own), (wanted, wanted_own) = model_tensors(result), model_tensors(fedbn)
    assert len(own) > 10 and same_arrays(shared, wanted) and same_arrays(own, wanted_own)
    trained = [name for name in result.tensors if name.startswith(GENERATOR)]
    start = result.coordinator.initial
    first = start.named(start.shared, start.counters)
    assert trained and any(
        not np.array_equal(result.tensors[name], first[name].numpy()) for name in trained
    )
    weighed = run(run_spec(small(keep_optimizer=keep), **study), schedule, Ideal(), rounds=4)
    assert not same_arrays(model_tensors(weighed)[0], wanted)


@pytest.mark.parametrize("order", [0, 1], ids=["before", "after"])
def test_fraug_has_the_same_bits_with_and_without_fedbn_in_the_list(order: int) -> None:
    methods: list[Method] = [small()]
    methods.insert(order, FedBN())
    alone, both = run(run_spec(small(), model=NORMED)), run(run_spec(*methods, model=NORMED))
    assert both.bits == alone.bits


@pytest.mark.parametrize("norm", ["shared", "local"])
def test_fraug_sends_norm_layers_of_the_generator_only_if_they_are_shared(norm: Any) -> None:
    features, noise, classes = 12, 6, 5
    result = run(run_spec(small(generator_norm=norm), model=NORMED_MLP), ROUNDS, rounds=1)
    classifier = 64 * features + features + features * classes + classes
    generator = features * (noise + classes + features) + 2 * features
    generator += 8 * features if norm == "shared" else 0  # four vectors of two layers
    assert result.coordinator.layout.shared == classifier + generator
    assert (
        result.rows[0]["floats_down"] == result.rows[0]["floats_up"] == 4 * (classifier + generator)
    )


# --- what stays -------------------------------------------------------------------------------


class Count(Method):
    """A method that counts optimizer steps in two ways at the end of each job.

    `_steps` has the numbers from the optimizer's state, which may include steps of earlier jobs.
    `_moved` has the numbers from `LocalJob.moves`, which include only steps of this job.
    """

    name, paper = "count", "a test"

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._moved: list[int] = []

    def end(self, job: LocalJob) -> None:
        self._steps.append(int(job.context.optimizers.save()["task/steps"]))
        self._moved.append(next(job.moves())[1])


@pytest.mark.parametrize("keep", [True, False])
def test_step_counts_continue_in_the_next_job_if_keep_optimizer_is_true(keep: bool) -> None:
    count = Count()
    local = replace(LOCAL, epochs=None, steps=4, keep_optimizer=keep)
    result = run(run_spec(count, local=local), Synchronous(6), rounds=3)
    assert count._steps == [4] * 6 + [8 if keep else 4] * 6 + [12 if keep else 4] * 6
    assert count._moved == [4] * 18
    assert result.coordinator.client_states.stateful is keep


def test_keep_optimizer_of_method_fraug_has_the_same_effect_as_local_keep_optimizer() -> None:
    by_run, by_method, by_both, fresh = (
        run(
            run_spec(
                small(keep_optimizer=own),
                model=NORMED_MLP,
                local=replace(LOCAL, keep_optimizer=whole),
            )
        )
        for own, whole in ((False, True), (True, False), (True, True), (False, False))
    )
    assert by_run.bits == by_method.bits == by_both.bits != fresh.bits
    stages = {key.split("/")[1] for key in by_method.private if "local.kept." in key}
    assert stages == {f"local.kept.{stage}" for stage in ("task", GENERATOR, RTNET)}
    assert not any("local.kept." in key for key in fresh.private)


# --- the scale of embeddings ------------------------------------------------------------------


def test_fraug_warns_of_too_large_generated_features() -> None:
    method = small()
    text = method.scale_warning({"fraug.real_norm": 19.0, "fraug.generated_norm": 843.0})
    assert "843" in text and "19" in text
    assert method.scale_warning({"fraug.real_norm": 19.0, "fraug.generated_norm": 190.0}) == ""
    assert method.scale_warning({"fraug.real_norm": None}) == ""


def test_fraug_history_has_no_column_generated_norm_if_the_generator_is_off() -> None:
    alone = run(run_spec(small(use_generator=False), model=NORMED_MLP), rounds=1).rows[0]
    assert "fraug.generated_norm" not in alone and alone["fraug.real_norm"] is not None


@pytest.mark.slow  # 10 rounds of 4 epochs, twice
def test_fraug_generated_features_grow_far_more_slowly_with_mmd_than_with_mse() -> None:
    local = Local(lr=0.05, momentum=0.5, batch=8, epochs=4)
    last = {}
    for metric in ("mse", "mmd"):
        method = FRAug(20, noise_dim=6, generator_metric=metric, gamma=0.002)
        rows = run(run_spec(method, model=NORMED_MLP, local=local), ROUNDS, rounds=10).rows
        last[metric] = [
            float(row["fraug.generated_norm"] or 0) / float(row["fraug.real_norm"] or 1)
            for row in rows
        ]
    # Growth without a bound is chaotic, 5,000 to over 10,000 times by how a machine rounds; the
    # other grows 5 times.
    assert last["mse"][-1] > 1_000 * last["mse"][0] and last["mmd"][-1] < 20 * last["mmd"][0]


@pytest.mark.parametrize("metric", get_args(Metric))
@pytest.mark.parametrize("lam", [0.0, 10.0])
def test_fraug_warning_of_too_large_generated_features_suggests_other_settings(
    metric: Any, lam: float
) -> None:
    method = small(generator_metric=metric, generator_lam=lam, generator_lr_factor=4.0)
    text = method.scale_warning({"fraug.real_norm": 8.0, "fraug.generated_norm": 149.0})
    assert ("generator_metric=mmd" in text) == (metric in ("mse", "mmd_moments") and lam > 0)
    assert ("method.fraug.generator_lam (now 10)" in text) == (lam > 0)
    assert "method.fraug.generator_lr_factor (now 4)" in text


@pytest.mark.slow  # 6 rounds of 3 epochs, three times
def test_fraug_generator_output_has_smaller_norm_if_loss_weight_or_learning_rate_is_lower() -> None:
    def generated(**settings: Any) -> float:
        local = replace(LOCAL, lr=0.1, epochs=3)
        study = run_spec(small(**settings), model=NORMED_MLP, local=local)
        return float(run(study, Synchronous(6), rounds=6).rows[-1]["fraug.generated_norm"] or 0.0)

    far = generated(generator_lam=10.0)
    assert generated(generator_lam=0.0) < 0.5 * far
    assert generated(generator_lam=10.0, generator_lr_factor=0.5) < 0.5 * far


# --- ramps ------------------------------------------------------------------------------------


def strengths(rounds: int, method_rounds: int, **settings: Any) -> list[float]:
    """Run FRAug; return all values of `strength` with which it made embeddings.

    The values ascend, and each is returned once.
    rounds: the number of rounds of the run.
    method_rounds: FRAug's own setting `rounds`.
    settings: further settings of FRAug.
    """
    seen: set[float] = set()

    class Look(FRAug):
        def _synthetic(
            self, job: LocalJob, anchors: Tensor, source: Tensor, labels: Tensor, strength: float
        ) -> Tensor:
            seen.add(strength)
            return super()._synthetic(job, anchors, source, labels, strength)

    method = Look(method_rounds, noise_dim=6, gamma=0.01, **settings)
    run(run_spec(method, model=NORMED_MLP), Synchronous(1), rounds=rounds)
    return sorted(seen)


@pytest.mark.parametrize(("pace", "gamma"), [(None, 0.01), (300, 0.01 * 300 / 6)])
def test_fraug_multiplies_gamma_by_the_ratio_of_ramp_rounds_to_the_number_of_rounds(
    pace: int | None, gamma: float
) -> None:
    expected = [math.exp(gamma * (t - 6)) for t in range(3)]
    assert strengths(3, 6, ramp_rounds=pace) == pytest.approx(expected)


def test_fraug_strength_stays_at_1_after_the_rounds_in_which_it_grows() -> None:
    assert strengths(5, 2) == pytest.approx([math.exp(-0.02), math.exp(-0.01), 1.0])


@pytest.mark.parametrize("first", ["method=[fraug]", "experiment=fraug/digits"])
def test_fraug_uses_the_number_of_rounds_of_the_run_unless_an_override_changes_it(
    first: str,
) -> None:
    def rounds(*words: str) -> object:
        return to_dict(compose([first, *words]))["method"]["fraug"]["rounds"]

    assert rounds() == to_dict(compose([first]))["rounds"]
    assert rounds("rounds=7") == 7
    assert rounds("rounds=7", "method.fraug.rounds=9") == 9


# --- edges ------------------------------------------------------------------------------------


def lonely() -> FederatedData:
    """Return `tiny_data` in which client 0 has only one sample."""
    rows = [tiny_data().partition.train.rows(client) for client in range(6)]
    rows[0] = rows[0][:1]
    train_rows = CSR(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))
    return replace(tiny_data(), partition=Partition(train_rows, tiny_data().partition.test))


def test_fraug_leaves_out_batch_of_one_sample() -> None:
    result = run(run_spec(small(), model=NORMED, data=lonely()), Synchronous(6), rounds=2)
    assert not result.failures
    moved = {client: result.private[f"{client}/fraug.prototypes"].any() for client in range(6)}
    assert moved == {client: client != 0 for client in range(6)}


def test_fedprox_changes_only_the_classifier_stage_of_fraug() -> None:
    touched: dict[str, list[bool]] = {}

    class Only(FedProx):
        def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
            before = grad.clone()
            super().gradient(job, grad, at)
            touched.setdefault(job.stage.name, []).append(not torch.equal(grad, before))

    run(run_spec(small(), Only(5.0), model=NORMED_MLP), rounds=1)
    assert any(touched["task"]) and not any(touched[GENERATOR]) and RTNET not in touched


def test_cost_of_fraug_includes_a_forward_pass_and_the_training_of_small_networks() -> None:
    classifier = 64 * 12 + 12 + 2 * 12 + 12 * 5 + 5
    generator = 12 * 11 + 12 + 24 + 12 * 12 + 12 + 24
    rtnet = 6 * 17 + 6 + 12 + 12 * 6 + 12 + 24
    extra = 1 / 3 + (generator * (1 + 4 / 3) + rtnet * (2 + 2 / 3)) / classifier
    job = participation_facts(run_spec(small(), model=NORMED_MLP), 10, 30.0)
    assert small().cost(job) == pytest.approx(30 * extra)
    cheap = small(use_rtnet=False, generator_metric="mse", weight=0.0)
    job = participation_facts(run_spec(cheap, model=NORMED_MLP), 10, 30.0)
    assert cheap.cost(job) == pytest.approx(30 * generator / classifier)


@pytest.mark.parametrize("use_rtnet", [True, False])
def test_cost_of_fraug_has_a_forward_pass_if_a_step_needs_real_features(use_rtnet: bool) -> None:
    """RTNet's step needs the features of real images, and a generator with "mmd" needs them, too.

    With "mse", the generator is compared with class prototypes.
    """
    local, costs = Local(epochs=2, batch=32), []
    for metric in ("mmd", "mse"):
        fraug = small(generator_metric=metric, use_rtnet=use_rtnet)
        facts = participation_facts(run_spec(fraug, local=local), 70, local.budget(70))
        costs.append(fraug.cost(facts))
    assert costs[0] - costs[1] == pytest.approx(0 if use_rtnet else FORWARD * 2 * 70)


def test_fraug_warns_of_model_without_batchnorm() -> None:
    (text,) = declare_run(run_spec(small(), model=MLP)).warnings
    assert text.startswith("model: ") and "no BatchNorm" in text
    assert not [*declare_run(run_spec(small(), model=NORMED)).warnings]
    assert not run(run_spec(small(), model=MLP), rounds=1).failures


class Nested(NormedMlp):
    """A network with its head in a Sequential."""

    def build(self, input_shape: Shape, num_classes: int, seed: int) -> Classifier:
        model = super().build(input_shape, num_classes, seed)
        model.head = nn.Sequential(model.head)  # type: ignore[assignment]
        return model


def test_fraug_refuses_head_that_is_not_linear() -> None:
    with pytest.raises(ValueError, match=r"^model: method 'fraug'"):
        declare_run(run_spec(small(), model=Nested()))


@pytest.mark.parametrize(
    "settings",
    [
        {"ramp": "exp"},
        {"ramp": "laine_aila"},
        {"ramp": "constant", "prototype_ramp": True},
        {"ramp": "constant", "ramp_rounds": 300},
    ],
    ids=str,
)
def test_fraug_ramp_is_refused_if_the_number_of_rounds_is_unknown(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^method\.fraug\.rounds=null: "):
        declare_run(run_spec(small(None, **settings), model=NORMED))
    declare_run(run_spec(small(None, ramp="constant"), model=NORMED))


def test_fraug_refuses_batches_of_one_sample() -> None:
    with pytest.raises(ValueError, match=r"^local\.batch=1: "):
        declare_run(run_spec(small(), model=NORMED, local=replace(LOCAL, batch=1)))


@pytest.mark.parametrize(
    "settings",
    [
        {"rounds": 0},
        {"noise_dim": 0},
        {"noise": "cauchy"},
        {"generator_lam": -1.0},
        {"generator_metric": "cosine"},
        {"generator_lr_factor": 0.0},
        {"generator_norm": "none"},
        {"rtnet_lam": -1.0},
        {"rtnet_metric": "cosine"},
        {"rtnet_lr_factor": -1.0},
        {"ramp": "linear"},
        {"gamma": -0.1},
        {"weight": 1.5},
        {"residual": -1.0},
        {"prototype_weight": 2.0},
    ],
    ids=str,
)
def test_fraug_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"^method\.fraug\.{key}="):
        FRAug(**settings)


def test_fraug_with_neither_generator_nor_rtnet_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^method\.fraug\.use_generator=false .*use_rtnet=false"):
        FRAug(4, use_generator=False, use_rtnet=False)
