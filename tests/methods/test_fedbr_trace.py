"""Test FedBR's two-stage step, in float64, against an implementation in NumPy."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_step
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Stage
from raysim.api.local_job import LocalJob
from raysim.methods import fedbr
from raysim.methods.fedbr import PROJECTOR, FedBR
from raysim.vectors.layout import Vector, plan_layout
from raysim.vectors.optimizer import OptimizerSettings

TRACE = "fedbr_two_stage_step.json"


def tensor(entry: dict[str, Any]) -> Tensor:
    return torch.tensor(entry["data"], dtype=torch.float64).reshape(entry["shape"])


def dense(layer: dict[str, Any]) -> nn.Linear:
    linear = nn.Linear(*reversed(layer["weight"]["shape"]), dtype=torch.float64)
    linear.load_state_dict({name: tensor(value) for name, value in layer.items()})
    return linear


class Net(nn.Module):
    """A network with one dense layer, tanh, and a dense head."""

    def __init__(self, feature: dict[str, Any], classifier: dict[str, Any]):
        super().__init__()
        self.extractor, self.head = dense(feature), dense(classifier)
        self.feature_dim = self.head.in_features

    def features(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.extractor(inputs))


def networks(args: dict[str, Any]) -> dict[str, nn.Module]:
    layers: list[nn.Module] = []
    for layer in args["projection"]:
        layers += [dense(layer), nn.ReLU()]
    return {
        "model": Net(args["feature"], args["classifier"]),
        PROJECTOR: nn.Sequential(*layers[:-1]),
    }


class Watched(FedBR):
    """A FedBR that stores each value of its contrastive loss."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._seen: list[Tensor] = []

    def contrast(self, *args: Any) -> Tensor:
        self._seen.append(super().contrast(*args))
        return self._seen[-1]


@pytest.fixture
def cases(shared: Path) -> list[dict[str, Any]]:
    return json.loads((shared / "vectors" / "traces" / TRACE).read_text())["cases"]


@pytest.mark.parametrize("number", range(4))
def test_fedbr_step_equals_numpy_implementation(
    number: int, cases: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(cases) == 4
    args, expected = cases[number]["args"], cases[number]["expected"]
    method = Watched(
        **{key: args[key] for key in ("lam", "mu", "tau1", "tau2", "temperature_mode", "max_step")}
    )
    pseudo_losses: list[Tensor] = []
    # Pseudo-data of the class are means, whose targets are uniform; a case with others gives them
    # here.
    targets = args["pseudo_targets"] and tensor(args["pseudo_targets"])

    @functools.wraps(fedbr.pseudo_label_loss)
    def watched_loss(logits: Tensor, uniform: None) -> Tensor:
        assert uniform is None
        pseudo_losses.append(original(logits, targets))
        return pseudo_losses[-1]

    original = fedbr.pseudo_label_loss
    monkeypatch.setattr(fedbr, "pseudo_label_loss", watched_loss)

    nets = networks(args)
    layout = plan_layout(nets)
    vector = Vector(nets, layout, torch.device("cpu"), torch.float64)
    inputs, labels, pseudo = (tensor(args[key]) for key in ("inputs", "targets", "pseudo_inputs"))
    ctx = Context(
        trainer=SimpleNamespace(
            statistics_layers=[], task=SimpleNamespace(num_classes=labels.shape[1])
        ),  # type: ignore[arg-type]
        seed=0,
        client=0,
        participation=0,
        version=0,
        samples=len(inputs),
        rate=args["lr"],
        vector=vector,
        received=vector.shared,
        received_counters=vector.shared_counters,
        base=vector.shared.clone(),
        download={"fedbr.pseudo": pseudo},
        state={},
    )
    with torch.no_grad():
        ctx.kept["fedbr.global"] = torch.tanh(dense(args["global_feature"])(pseudo))
    ctx.views = {"fedbr": LocalJob(ctx, "fedbr")}
    step = make_step(vector, [method], OptimizerSettings())
    stages = [Stage()]
    if method.max_step:
        climb = Stage("fedbr.max", (PROJECTOR,), method.projected_contrast, ascend=True)
        stages = [climb, Stage()]
    local = step(ctx, Batch(inputs, labels, inputs, labels), stages)

    found = {
        "feature": state(nets["model"].extractor),  # type: ignore[arg-type]
        "classifier": state(nets["model"].head),  # type: ignore[arg-type]
        "projection": [state(layer) for layer in nets[PROJECTOR] if isinstance(layer, nn.Linear)],  # type: ignore[union-attr]
        "contrastive_loss_before": method._seen[0],
        "contrastive_loss_after": method._seen[-1],
        "local_loss": local,
        "pseudo_loss": pseudo_losses[0],
    }
    assert len(method._seen) == (2 if args["max_step"] else 1)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        agree(found[key], value, key)


def state(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in layer.named_parameters()}


def agree(found: Any, expected: Any, where: str) -> None:
    """Assert that two nested structures have equal numbers, with a relative tolerance of 1e-9.

    where: the place in the structure, for the error message.
    """
    if isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            agree(one, other, f"{where}[{index}]")
    elif isinstance(expected, dict) and "data" not in expected:
        assert found.keys() == expected.keys(), where
        for key in expected:
            agree(found[key], expected[key], f"{where}.{key}")
    else:
        want = tensor(expected) if isinstance(expected, dict) else expected
        np.testing.assert_allclose(
            found.detach().numpy(), want, rtol=1e-9, atol=1e-12, err_msg=where
        )
