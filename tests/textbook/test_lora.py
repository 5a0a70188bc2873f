"""Test the methods of adapters against their textbooks, and which of their means are exact."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from raysim.methods.fedsa_lora import FedSALoRA
from raysim.methods.ffa_lora import FFALoRA
from raysim.models import Lora, Mlp
from raysim.simulation.schedule import Synchronous
from raysim.training.worker import Worker
from textbook.check import Row, check
from textbook.lora import factor_mean, fedsa

RANK, ALPHA = 2, 3.0
SCALING = ALPHA / RANK
MODEL: dict[str, Any] = {"model": Mlp((6,), Lora(RANK, ALPHA))}
FEW: dict[str, Any] = {"schedule": Synchronous(1), "run": {"rounds": 2}}


def frozen(worker: Worker) -> dict[str, Tensor]:
    """Return the model's frozen parameters by full name."""
    parameters = worker.vector.networks["model"].named_parameters()
    return {f"model.{name}": p.detach() for name, p in parameters if not p.requires_grad}


ROWS = {
    "fedavg": Row(partial(factor_mean, scaling=SCALING), lambda: [], MODEL, drawn=frozen),
    "ffa_lora": Row(
        partial(factor_mean, scaling=SCALING), lambda: [FFALoRA()], MODEL, drawn=frozen
    ),
    "fedsa_lora": Row(partial(fedsa, scaling=SCALING), lambda: [FedSALoRA()], MODEL, drawn=frozen),
    "fedsa_lora, some never train": Row(
        partial(fedsa, scaling=SCALING), lambda: [FedSALoRA()], MODEL, drawn=frozen, **FEW
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_method_ends_where_its_textbook_does(name: str) -> None:
    check(ROWS[name])
