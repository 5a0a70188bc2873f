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
from test_conformance import COMPATIBLE, EPOCHS, TABLE, small_fedbr
from tiny_runs import NORMED_MLP, ROUNDS, NormedMlp, ShiftedGradient, run, run_spec, tiny_data
from torch import Tensor, nn

from raysim.api.local_job import LocalJob
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
PARTNERS = [
    name for name in TABLE if name not in OWNERS and frozenset((name, "fedsam")) in COMPATIBLE
]


class TwoMoreGradients(Method):
    """A method that computes two more gradients in each step, and makes the step with the second.

    The first one is the gradient with all parameters set to 0.3, the second one the gradient at the
    model's parameters.

    seen: for each step, the usual, the first and the second gradient.
    """

    name = "asking"
    paper = "a test"

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def perturb(
        self,
        job: LocalJob,
        params: Tensor,
        grad: Tensor,
        gradient_at: Callable[[Tensor], Tensor],
    ) -> Tensor:
        usual = grad.clone()
        shifted = gradient_at(torch.full_like(params, 0.3)).clone()
        same = gradient_at(torch.zeros_like(params))
        self.seen.append((usual, shifted, same.clone()))
        return same


def bits_with(name: str, *more: Method) -> tuple[str, str]:
    """Run two rounds; return the hashes of the parameters and of the state.

    name: the first method of the run, a key of the conformance table; "fedavg" adds no method.
    more: further methods of the run.
    """
    row = TABLE.get(name)
    methods, model = ([row.make()], row.model) if row else ([], NORMED_MLP)
    spec = study(*methods, *more, model=model, data=tiny_data(samples=60))
    return run(spec, ROUNDS, rounds=2).bits


@pytest.mark.parametrize("name", ["fedavg", *PARTNERS])
def test_gradient_computed_twice_at_the_same_parameters_is_equal(
    name: str,
) -> None:
    asking = TwoMoreGradients()
    assert bits_with(name, asking) == bits_with(name)
    assert all(torch.equal(usual, same) for usual, _, same in asking.seen)
    assert any(not torch.equal(usual, shifted) for usual, shifted, _ in asking.seen)


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
