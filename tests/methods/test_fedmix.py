"""Test FedMix's loss against published traces and the paper's expansion, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
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
    ran,
    run,
    run_spec,
    tiny,
)
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Stage
from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.data.partition import CSR
from raysim.methods.fedmix import FedMix, label_terms, loss_terms, mean_pairs, raw_rows
from raysim.methods.mixup import Mixup
from raysim.models import Cct7
from raysim.training.run_spec import declare_run
from raysim.vectors.layout import Vector, plan_layout
from raysim.vectors.optimizer import Optimizer

SMALL: dict[str, Any] = {"means": 4, "samples_per_mean": 3}


def tensor(entry: dict[str, Any]) -> Tensor:
    dtype = {"float64": torch.float64, "int64": torch.int64}[entry["dtype"]]
    return torch.tensor(entry["data"], dtype=dtype).reshape(entry["shape"])


class Net(nn.Module):
    """Dense layers with tanh between them; the last is the head."""

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


# --- the published traces -------------------------------------------------------------------------------------------


def cases(shared: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((shared / "vectors" / "traces" / f"fedmix_mlp_loss_{name}.json").read_text())[
        "cases"
    ]


def published(args: dict[str, Any]) -> tuple[Net, dict[str, Tensor]]:
    """The network of a case and its tensors."""
    net = Net([tensor(each) for each in args["weights"]], [tensor(each) for each in args["biases"]])
    return net, {
        key: tensor(args[key]) for key in ("inputs", "labels", "mean_inputs", "mean_targets")
    }


def terms_of(
    net: nn.Module, given: dict[str, Tensor], lam: float, **options: str
) -> dict[str, Tensor]:
    """The terms for samples x, of which the network sees u = (1 - lam) x."""
    u = ((1 - lam) * given["inputs"]).requires_grad_()
    return loss_terms(
        net(u), u, given["labels"], given["mean_inputs"], given["mean_targets"], lam, **options
    )


@pytest.mark.parametrize("number", range(3))
def test_the_terms_of_the_loss_follow_the_trace(number: int, shared: Path) -> None:
    case = cases(shared, "terms")[number]
    net, given = published(case["args"])
    found = terms_of(net, given, case["args"]["lam"])
    assert found.keys() == case["expected"].keys()
    for key, value in case["expected"].items():
        assert found[key].item() == pytest.approx(value, rel=1e-10, abs=1e-14), key


@pytest.mark.parametrize("number", range(3))
def test_the_gradient_of_the_loss_follows_the_trace(number: int, shared: Path) -> None:
    case = cases(shared, "gradients")[number]
    net, given = published(case["args"])
    terms_of(net, given, case["args"]["lam"])["total"].backward()
    layers = [layer for layer in [*net.extractor, net.head] if isinstance(layer, nn.Linear)]
    for key, part in (("weights", "weight"), ("biases", "bias")):
        assert len(layers) == len(case["expected"][key])
        for layer, value in zip(layers, case["expected"][key], strict=True):
            torch.testing.assert_close(
                getattr(layer, part).grad, tensor(value), rtol=1e-10, atol=1e-13
            )


@pytest.mark.parametrize("number", range(2))
def test_one_step_of_the_method_descends_the_gradient_of_the_trace(
    number: int, shared: Path
) -> None:
    case, loss = (
        cases(shared, "gradients")[number],
        cases(shared, "terms")[number]["expected"]["total"],
    )
    net, given = published(case["args"])
    pairs = len(given["mean_inputs"])
    nets: dict[str, nn.Module] = {"model": net}
    vector = Vector(nets, plan_layout(nets), torch.device("cpu"), torch.float64)
    pool = {"fedmix.inputs": given["mean_inputs"], "fedmix.targets": given["mean_targets"]}
    ctx = Context(
        trainer=SimpleNamespace(tracking=[]),  # type: ignore[arg-type]
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
    step = make_step(vector, [method], Optimizer())
    x, y = given["inputs"], given["labels"]
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


# --- the expansion --------------------------------------------------------------------------------------------------


def example(layers: int = 2, batch: int = 5, seed: int = 0) -> tuple[Net, dict[str, Tensor]]:
    """A random smooth network in float64 and a batch with its pairs."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    sizes = [4, *[6] * (layers - 1), 3]
    net = Net([random(o, i) for i, o in pairwise(sizes)], [random(o) for o in sizes[1:]])
    labels = torch.randint(3, (batch,), generator=generator)
    targets = random(batch, 3).softmax(1)
    return net, {
        "inputs": random(batch, 4), "labels": labels, "mean_inputs": random(batch, 4), "mean_targets": targets
    }  # fmt: skip


def test_the_taylor_term_is_linear_in_the_mean_inputs() -> None:
    net, given = example()
    first = terms_of(net, given, 0.2)["taylor"]
    other = example(seed=1)[1]["mean_inputs"]
    second = terms_of(net, given | {"mean_inputs": other}, 0.2)["taylor"]
    both = terms_of(net, given | {"mean_inputs": 2 * given["mean_inputs"] - 3 * other}, 0.2)[
        "taylor"
    ]
    torch.testing.assert_close(both, 2 * first - 3 * second, rtol=1e-12, atol=1e-14)
    assert terms_of(net, given | {"mean_inputs": torch.zeros(1, 4)}, 0.2)["taylor"] == 0


def test_the_taylor_term_is_the_directional_derivative_of_the_batchs_loss() -> None:
    net, given = example()
    lam, epsilon = 0.2, 1e-5
    u, step = (1 - lam) * given["inputs"], epsilon * given["mean_inputs"]
    up, down = (F.cross_entropy(net(u + sign * step), given["labels"]) for sign in (1, -1))
    taylor = terms_of(net, given, lam)["taylor"]
    assert taylor.item() == pytest.approx(
        lam * (1 - lam) * ((up - down) / (2 * epsilon)).item(), rel=1e-7
    )
    assert abs(taylor) > 1e-3


def test_fedmix_differs_from_naivemix_by_the_square_of_lam() -> None:
    net, given = example()

    def difference(lam: float) -> float:
        mixed = (1 - lam) * given["inputs"] + lam * given["mean_inputs"]
        naive = sum(label_terms(net(mixed), given["labels"], given["mean_targets"], lam))
        return (terms_of(net, given, lam)["total"] - naive).item()

    assert difference(1e-3) / difference(5e-4) == pytest.approx(4, rel=0.01)


def test_the_taylor_term_of_a_linear_model_has_a_closed_form() -> None:
    net, given = example(layers=1)
    lam = 0.3
    logits = net((1 - lam) * given["inputs"])
    error = logits.softmax(1) - F.one_hot(given["labels"], 3)
    expected = lam * (1 - lam) * (error * (given["mean_inputs"] @ net.head.weight.T)).sum(1).mean()
    torch.testing.assert_close(
        terms_of(net, given, lam)["taylor"], expected, rtol=1e-12, atol=1e-14
    )


def test_repeating_the_batch_changes_no_term_but_the_public_taylor_term() -> None:
    net, given = example()
    twice = {key: torch.cat([value, value]) for key, value in given.items()}
    for key, value in terms_of(net, given, 0.2).items():
        torch.testing.assert_close(terms_of(net, twice, 0.2)[key], value, rtol=1e-12, atol=1e-14)
    public = terms_of(net, given, 0.2, taylor_scale="public")["taylor"]
    torch.testing.assert_close(
        public, terms_of(net, given, 0.2)["taylor"] / 5, rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(
        terms_of(net, twice, 0.2, taylor_scale="public")["taylor"], public / 2
    )


def test_outputs_that_a_method_added_have_no_share_in_the_mean_targets() -> None:
    logits, labels = (
        torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),
        torch.arange(4) % 3,
    )
    targets = torch.full((1, 3), 1 / 3)
    wide = torch.cat([targets, torch.zeros(1, 3)], dim=1).expand(4, 6)
    assert torch.equal(
        label_terms(logits, labels, targets, 0.5)[1], 0.5 * F.cross_entropy(logits, wide)
    )


# --- the pool -------------------------------------------------------------------------------------------------------


def test_a_pair_is_the_mean_of_samples_and_of_their_labels() -> None:
    inputs, labels = torch.tensor([[0.0, 2.0], [4.0, 6.0], [8.0, 0.0]]), torch.tensor([1, 0, 1])
    found = mean_pairs(inputs, labels, 3, torch.tensor([[0, 1], [2, 2]]))
    assert found["inputs"].tolist() == [[2.0, 4.0], [8.0, 0.0]]
    assert found["targets"].tolist() == [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]


def test_raw_rows_of_one_mean_belong_to_one_client_and_no_client_is_left_out_but_the_empty() -> (
    None
):
    partition = CSR(np.array([7, 3, 5, 1, 9, 2]), np.array([0, 1, 1, 4, 6]))
    rows = raw_rows(partition, 50, 4, 3, np.random.default_rng(0))
    assert rows.shape == (50, 4, 3) and rows.dtype == np.int64
    owner = {7: 0, 3: 2, 5: 2, 1: 2, 9: 3, 2: 3}
    owners = np.vectorize(owner.get)(rows)
    assert (owners == owners[..., :1]).all()
    share = np.bincount(owners[..., 0].ravel(), minlength=4) / 200
    assert share[1] == 0 and (share[[0, 2, 3]] > 0.25).all(), "not by their samples"
    assert set(rows.ravel().tolist()) == set(owner)


def test_a_batch_larger_than_the_pool_is_refused() -> None:
    local = Local(batch=32)
    with pytest.raises(ValueError, match=r"^local\.batch=32 .* method\.fedmix\.means=6 "):
        declare_run(run_spec(FedMix(means=5), local=local))
    for fits in (
        FedMix(means=6),
        FedMix(means=5, pairs="one"),
        FedMix(means=5, fresh=True),
        FedMix(0.0, means=1),
    ):
        declare_run(run_spec(fits, local=local))


def test_clients_without_samples_add_nothing_to_the_pool() -> None:
    data = tiny()
    train = data.partition.train
    ends = np.concatenate([train.offsets[:3], [train.offsets[2]] * 4])
    some = CSR(train.indices[: train.offsets[2]], ends)
    data = replace(data, partition=replace(data.partition, train=some))
    local = replace(LOCAL, batch=8)
    with pytest.raises(ValueError, match=r"^local\.batch=8 .* method\.fedmix\.means=4 "):
        declare_run(run_spec(FedMix(means=3), data=data, local=local))
    study = run_spec(FedMix(means=4), data=data, local=local)
    assert not run(study, replace(ROUNDS, cohort=2)).failures


# --- in a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"lam": 0.0}, {"fresh": True}], ids=str)
def test_nothing_is_collected_or_sent_without_a_pool(options: dict[str, Any]) -> None:
    study = run_spec(FedMix(**SMALL, **options))
    spy = Spy(study)
    assert not ran(coordinate(study, runtime=spy, rounds=1)).failures
    assert not any(spy.contributed) and not spy.kept


def test_it_does_not_combine_with_mixup() -> None:
    with pytest.raises(ValueError, match="method 'fedmix' does not combine with method 'mixup'"):
        check_composition([Mixup(), FedMix()])


def test_attention_has_the_second_derivative() -> None:
    model = Cct7(attention_dropout=0.0, drop_path=0.0).build((1, 8, 8), 5, seed=0)
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(3, 1, 8, 8, generator=generator).requires_grad_()
    means, targets = torch.randn(3, 1, 8, 8, generator=generator), torch.full((3, 5), 0.2)
    terms = loss_terms(model(u), u, torch.arange(3), means, targets, 0.1)
    weight = model.extractor[5].attention.qkv.weight
    (gradient,) = torch.autograd.grad(terms["taylor"], weight)
    assert torch.isfinite(gradient).all() and gradient.abs().sum() > 0
    local = replace(LOCAL, epochs=None, steps=1, lr=1e-3)
    found = run(
        run_spec(FedMix(**SMALL), model=Cct7(), local=local), replace(ROUNDS, cohort=1), rounds=1
    )
    assert not found.failures


def test_a_pass_costs_as_much_again() -> None:
    assert FedMix().cost(participation_facts(None, 5, 20.0)) == 20
    assert FedMix(naive=True).cost(participation_facts(None, 5, 20.0)) == 0
    assert FedMix(0.0).cost(participation_facts(None, 5, 20.0)) == 0


@pytest.mark.parametrize("settings", [{"lam": 1.5}, {"means": 0}, {"samples_per_mean": 0}], ids=str)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"^method\.fedmix\.{key}="):
        FedMix(**settings)


def test_all_of_the_means_may_be_mixed_in_and_no_more() -> None:
    assert FedMix(lam=1.0).lam == 1.0
    with pytest.raises(ValueError, match=r"lam=1\.05 must be from 0 to 1"):
        FedMix(lam=1.05)
