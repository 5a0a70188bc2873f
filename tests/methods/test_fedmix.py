"""Test FedMix: a step against an implementation in NumPy, the means of samples, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import (
    LOCAL,
    ROUNDS,
    Spy,
    check_composition,
    coordinate,
    make_step,
    participation_facts,
    run,
    run_spec,
    run_to_end,
    tiny_data,
)
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Stage
from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.data.partition import CSR
from raysim.methods.fedmix import FedMix, label_terms, loss_terms, raw_rows
from raysim.methods.mixup import Mixup
from raysim.models import Cct7
from raysim.training.run_spec import declare_run
from raysim.vectors.layout import Vector, plan_layout
from raysim.vectors.optimizer import OptimizerSettings

SMALL: dict[str, Any] = {"means": 4, "samples_per_mean": 3}


def tensor(entry: dict[str, Any]) -> Tensor:
    dtype = {"float64": torch.float64, "int64": torch.int64}[entry["dtype"]]
    return torch.tensor(entry["data"], dtype=dtype).reshape(entry["shape"])


class Net(nn.Module):
    """A network of linear layers with tanh between them; the last is the head."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor]):
        super().__init__()
        layers: list[nn.Module] = []
        for weight, bias in zip(weights, biases, strict=True):
            layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
            layer.load_state_dict({"weight": weight, "bias": bias})
            layers += [layer, nn.Tanh()]
        self.extractor, self.head = nn.Sequential(*layers[:-2]), layers[-2]
        self.num_classes = len(biases[-1])

    def features(self, inputs: Tensor) -> Tensor:
        return self.extractor(inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs))


# --- the step of an implementation in NumPy ---------------------------------------------------


def cases(shared: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((shared / "vectors" / "traces" / f"fedmix_mlp_loss_{name}.json").read_text())[
        "cases"
    ]


def read_case(args: dict[str, Any]) -> tuple[Net, dict[str, Tensor]]:
    """Return the network and the tensors of a test case.

    args: the arguments of the case in the file of test vectors, in which arrays are nested lists.
    """
    net = Net(
        [tensor(entry) for entry in args["weights"]], [tensor(entry) for entry in args["biases"]]
    )
    return net, {
        key: tensor(args[key]) for key in ("inputs", "labels", "mean_inputs", "mean_targets")
    }


@pytest.mark.parametrize("number", range(2))
def test_fedmix_step_equals_numpy_implementation(number: int, shared: Path) -> None:
    case, loss = (
        cases(shared, "gradients")[number],
        cases(shared, "terms")[number]["expected"]["total"],
    )
    net, tensors = read_case(case["args"])
    pairs = len(tensors["mean_inputs"])
    nets: dict[str, nn.Module] = {"model": net}
    vector = Vector(nets, plan_layout(nets), torch.device("cpu"), torch.float64)
    pool = {"fedmix.inputs": tensors["mean_inputs"], "fedmix.targets": tensors["mean_targets"]}
    ctx = Context(
        trainer=SimpleNamespace(statistics_layers=[]),  # type: ignore[arg-type]
        seed=0,
        client=0,
        participation=0,
        version=0,
        samples=pairs,
        rate=1.0,
        vector=vector,
        received=vector.shared,
        received_counters=vector.shared_counters,
        base=vector.shared.clone(),
        download=pool,
        state={},
    )
    ctx.draws = {"fedmix.chosen": [torch.arange(pairs)]}
    method = FedMix(lam=case["args"]["lam"], pairs="each" if pairs > 1 else "one")
    ctx.views = {"fedmix": LocalJob(ctx, "fedmix")}
    step = make_step(vector, [method], OptimizerSettings())
    x, y = tensors["inputs"], tensors["labels"]
    reported = step(ctx, Batch(x, y, x, y), [Stage()])
    assert reported is not None and reported.item() == pytest.approx(loss, rel=1e-10)
    layers = [name for name in vector.parameters if name.endswith("weight")]
    for index, name in enumerate(layers):
        weight, grad = (
            tensor(case["args"]["weights"][index]),
            tensor(case["expected"]["weights"][index]),
        )
        torch.testing.assert_close(
            vector.parameters[name].detach(), weight - grad, rtol=1e-10, atol=1e-13
        )


# --- the expansion ----------------------------------------------------------------------------


def test_fedmix_mean_labels_are_zero_for_outputs_that_other_methods_add() -> None:
    logits, labels = (
        torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),
        torch.arange(4) % 3,
    )
    targets = torch.full((1, 3), 1 / 3)
    wide = torch.cat([targets, torch.zeros(1, 3)], dim=1).expand(4, 6)
    assert torch.equal(
        label_terms(logits, labels, targets, 0.5)[1], 0.5 * F.cross_entropy(logits, wide)
    )


# --- the pool ---------------------------------------------------------------------------------


def test_fedmix_averages_only_samples_of_the_same_client() -> None:
    partition = CSR(np.array([7, 3, 5, 1, 9, 2]), np.array([0, 1, 1, 4, 6]))
    rows = raw_rows(partition, 50, 4, 3, np.random.default_rng(0))
    assert rows.shape == (50, 4, 3) and rows.dtype == np.int64
    owner = {7: 0, 3: 2, 5: 2, 1: 2, 9: 3, 2: 3}
    owners = np.vectorize(owner.get)(rows)
    assert (owners == owners[..., :1]).all()
    share = np.bincount(owners[..., 0].ravel(), minlength=4) / 200
    assert share[1] == 0 and (share[[0, 2, 3]] > 0.25).all(), "not by their samples"
    assert set(rows.ravel().tolist()) == set(owner)


def test_fedmix_refuses_a_batch_if_all_clients_together_send_too_few_means() -> None:
    local = Local(batch=32)
    with pytest.raises(ValueError, match=r"^method\.fedmix\.means=5: .*means=6 "):
        declare_run(run_spec(FedMix(means=5), local=local))
    for fits in (
        FedMix(means=6),
        FedMix(means=5, pairs="one"),
        FedMix(means=5, fresh=True),
        FedMix(0.0, means=1),
    ):
        declare_run(run_spec(fits, local=local))


def test_fedmix_clients_without_samples_send_no_means() -> None:
    data = tiny_data()
    train = data.partition.train
    ends = np.concatenate([train.offsets[:3], [train.offsets[2]] * 4])
    some = CSR(train.indices[: train.offsets[2]], ends)
    data = replace(data, partition=replace(data.partition, train=some))
    local = replace(LOCAL, batch=8)
    with pytest.raises(ValueError, match=r"^method\.fedmix\.means=3: .*means=4 "):
        declare_run(run_spec(FedMix(means=3), data=data, local=local))
    study = run_spec(FedMix(means=4), data=data, local=local)
    assert not run(study, replace(ROUNDS, cohort=2)).failures


# --- in a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"lam": 0.0}, {"fresh": True}], ids=str)
def test_fedmix_clients_send_no_means_if_lam_is_zero_or_setting_fresh_is_true(
    options: dict[str, Any],
) -> None:
    study = run_spec(FedMix(**SMALL, **options))
    spy = Spy(study)
    assert not run_to_end(coordinate(study, runtime=spy, rounds=1)).failures
    assert not any(spy.contributed) and not spy.constants


def test_fedmix_refuses_mixup() -> None:
    with pytest.raises(ValueError, match=r"'fedmix'.*'mixup'"):
        check_composition([Mixup(), FedMix()])


def test_fedmix_computes_second_derivatives_of_a_model_with_attention() -> None:
    model = Cct7(attention_dropout=0.0, drop_path=0.0).build((1, 8, 8), 5, seed=0)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(3, 1, 8, 8, generator=generator).requires_grad_()
    means, targets = torch.randn(3, 1, 8, 8, generator=generator), torch.full((3, 5), 0.2)
    terms = loss_terms(model(u), u, torch.arange(3), means, targets, 0.1)
    weight = model.extractor[5].attention.qkv.weight
    (gradient,) = torch.autograd.grad(terms["taylor"], weight)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0
    local = replace(LOCAL, epochs=None, steps=1, lr=1e-3)
    ended = run(
        run_spec(FedMix(**SMALL), model=Cct7(), local=local), replace(ROUNDS, cohort=1), rounds=1
    )
    assert not ended.failures


def test_fedmix_costs_another_pass_unless_naive_is_true_or_lam_is_zero() -> None:
    assert FedMix().cost(participation_facts(None, 5, 20.0)) == 20
    assert FedMix(naive=True).cost(participation_facts(None, 5, 20.0)) == 0
    assert FedMix(0.0).cost(participation_facts(None, 5, 20.0)) == 0


@pytest.mark.parametrize("settings", [{"lam": 1.5}, {"means": 0}, {"samples_per_mean": 0}], ids=str)
def test_fedmix_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"^method\.fedmix\.{key}="):
        FedMix(**settings)


def test_fedmix_accepts_lam_1() -> None:
    assert FedMix(lam=1.0).lam == 1.0
