"""The hook `perturb` beside every method: both passes see the same batch, draws and state; nothing stays behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_conformance import EPOCHS, TABLE, clash, small_fedbr
from tiny_runs import NORMED_MLP, ROUNDS, NormedMlp, ShiftedGradient, run, run_spec
from torch import nn

from raysim.api.method import Method
from raysim.methods.fedbn import FedBN
from raysim.methods.fedprox import FedProx
from raysim.methods.mixup import Mixup
from raysim.models.classifier import Shape


@dataclass(frozen=True)
class Dropping(NormedMlp):
    """With dropout in front of BatchNorm and behind it."""

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        width = self.width
        layers = [
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), width),
            nn.Dropout(0.3),
            nn.BatchNorm1d(width),
        ]
        return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(0.3)), width


def study(*methods: Method, model: Any = NORMED_MLP, **others: Any) -> Any:
    return run_spec(*methods, model=model, **({"local": EPOCHS} | others))


OWNERS = ("fedsam", "fedspeed")
PARTNERS = [name for name in TABLE if name not in OWNERS and not clash(name, "fedsam")]


def beside(name: str, *more: Method) -> tuple[str, str]:
    """The bits of two rounds of the method of that name and others."""
    row = TABLE.get(name)
    methods, model = ([row.make()], row.model) if row else ([], NORMED_MLP)
    return run(study(*methods, *more, model=model), ROUNDS, rounds=2).bits


@pytest.mark.parametrize("name", ["fedavg", *PARTNERS])
def test_beside_every_method_a_second_pass_sees_the_same_and_leaves_nothing_behind(
    name: str,
) -> None:
    alone = beside(name)
    same, elsewhere = ShiftedGradient(), ShiftedGradient(0.3, take=False)
    assert beside(name, same) == alone
    assert same.seen and all(torch.equal(here, there) for _, _, here, there in same.seen)
    assert beside(name, elsewhere) == alone
    assert any(not torch.equal(here, there) for _, _, here, there in elsewhere.seen)


DROPPED: dict[str, Callable[[], list[Method]]] = {
    "alone": list,
    "with drawn mixtures": lambda: [Mixup()],
    "with personal BatchNorm": lambda: [FedBN(), FedProx(0.1)],
    # Its first stage computes what the second one uses again, in another order.
    "with two stages of an iteration": lambda: [small_fedbr()],
    "with noise in the features": lambda: [TABLE["fedsr"].make()],
    "with synthetic features through the head": lambda: [TABLE["fraug"].make()],
}


@pytest.mark.parametrize("partners", DROPPED)
def test_dropout_has_the_same_masks_in_both_passes(partners: str) -> None:
    asking = ShiftedGradient()
    found = run(study(*DROPPED[partners](), asking, model=Dropping()), rounds=2)
    plain = run(study(*DROPPED[partners](), model=Dropping()), rounds=2)
    assert found.bits == plain.bits
    assert all(torch.equal(here, there) for _, _, here, there in asking.seen)
