"""Test the hook `perturb` with every method that can be combined with FedSAM.

With this hook, a step computes gradients at the model's parameters and at shifted parameters. Both
forward passes must use the same batch, dropout masks and BatchNorm statistics.
"""

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
    """A network with dropout before and after BatchNorm."""

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


def bits_with(name: str, *more: Method) -> tuple[str, str]:
    """Run two rounds; return the hashes of the parameters and of the state.

    name: the first method of the run, a key of the conformance table; "fedavg" adds no method.
    more: further methods of the run.
    """
    row = TABLE.get(name)
    methods, model = ([row.make()], row.model) if row else ([], NORMED_MLP)
    return run(study(*methods, *more, model=model), ROUNDS, rounds=2).bits


@pytest.mark.parametrize("name", ["fedavg", *PARTNERS])
def test_gradient_computed_twice_at_the_same_parameters_is_equal(
    name: str,
) -> None:
    alone = bits_with(name)
    same, shifted = ShiftedGradient(), ShiftedGradient(0.3, take=False)
    assert bits_with(name, same) == alone
    assert same.seen and all(torch.equal(here, there) for _, _, here, there in same.seen)
    assert bits_with(name, shifted) == alone
    assert any(not torch.equal(here, there) for _, _, here, there in shifted.seen)


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
def test_both_gradients_of_a_step_use_the_same_dropout_masks(partners: str) -> None:
    asking = ShiftedGradient()
    ended = run(study(*DROPPED[partners](), asking, model=Dropping()), rounds=2)
    plain = run(study(*DROPPED[partners](), model=Dropping()), rounds=2)
    assert ended.bits == plain.bits
    assert all(torch.equal(here, there) for _, _, here, there in asking.seen)
