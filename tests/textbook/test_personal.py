"""Methods that give clients models of their own, and what evaluation does with these, end where their textbooks do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from studies import NORMED_MLP, SEED, tiny
from torch import Tensor

from raysim.client import Local
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import Dirichlet
from raysim.data.sources import Synthetic
from raysim.evaluation import Evaluation
from raysim.experiment import _pooled
from raysim.methods.centralized import Centralized
from raysim.methods.fedbn import FedBN
from raysim.methods.fedprox import FedProx
from raysim.methods.local import LocalTraining
from raysim.methods.method import Finetune
from raysim.methods.pfedavg import PFedAvg
from raysim.schedule import Synchronous
from textbook.centralized import centralized
from textbook.check import LOCAL, Row, check
from textbook.fedbn import fedbn
from textbook.local import local
from textbook.loss_decomposition import loss_decomposition
from textbook.pfedavg import after_local, finetuned

DATA = tiny(clients=4, samples=70)
NORMED: dict[str, Any] = {"model": NORMED_MLP}
FEW: dict[str, Any] = {"schedule": Synchronous(1), "run": {"rounds": 2}}  # so some client never takes part
SPARED = federate(
    Synthetic(samples=120, test_samples=20, classes=5, mean=[0.5], std=[0.3]),
    Dirichlet(clients=4, alpha=2.0, minimum=5, fraction=0.4),
    SEED,
)


def samples(data: FederatedData, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inputs, normalised by hand, and labels."""
    source = data.open()
    return (torch.from_numpy(source.images[rows]).double() / 255 - 0.5) / 0.3, torch.from_numpy(source.labels[rows])


def adapting(how: Finetune) -> dict[str, Any]:
    return {"evaluation": Evaluation(finetune=how)}


def pooling(asked: Local, **study: Any) -> Row:
    """As an experiment pools the data of a federated run with these settings and three clients a round."""
    train = DATA.partition.train
    images, labels = samples(DATA, np.arange(70))
    data, schedule, local = _pooled(DATA, Synchronous(3), asked)
    drawn = {
        "images": images,
        "labels": labels,
        "rows": [train.rows(client) for client in range(4)],
        "cohort": 3,
        "local": asked,
    }
    return Row(
        centralized, lambda: [Centralized()], {"data": data, "local": local, **study}, schedule=schedule, drawn=drawn
    )


ROWS = {
    "fedbn": Row(fedbn, lambda: [FedBN()], NORMED),
    "fedbn, statistics": Row(partial(fedbn, scope="statistics"), lambda: [FedBN("statistics")], NORMED),
    "fedbn, affine": Row(partial(fedbn, scope="affine"), lambda: [FedBN("affine")], NORMED),
    "fedbn, none": Row(partial(fedbn, scope="none"), lambda: [FedBN("none")], NORMED),
    "fedbn by name": Row(fedbn, lambda: [FedBN(name_rule="or.2")], NORMED),
    "fedbn of every kind of norm": Row(fedbn, lambda: [FedBN(layers="all")], NORMED),
    "fedbn, some never train": Row(fedbn, lambda: [FedBN()], NORMED, **FEW),
    "fedbn, statistics from a pass": Row(
        partial(fedbn, reestimate=True), lambda: [FedBN(reestimate=True)], NORMED, **FEW
    ),
    "fedbn without BatchNorm": Row(fedbn, lambda: [FedBN()]),
    "fedbn and fedprox": Row(partial(fedbn, mu=0.5), lambda: [FedBN(), FedProx(0.5)], NORMED),
    "local": Row(local, lambda: [LocalTraining()], NORMED),
    "local, kept optimisers": Row(partial(local, keep=True), lambda: [LocalTraining(True)], NORMED),
    "local, kept Nesterov": Row(
        partial(local, keep=True), lambda: [LocalTraining(True)], {"local": replace(LOCAL, nesterov=True)}
    ),
    "local, kept Adam": Row(
        partial(local, keep=True),
        lambda: [LocalTraining(True)],
        {"local": replace(LOCAL, optimizer="adam", momentum=0.0, lr=0.01)},
    ),
    "pfedavg": Row(after_local, lambda: [PFedAvg()], NORMED),
    "pfedavg, some never train": Row(after_local, lambda: [PFedAvg()], NORMED, **FEW),
    "pfedavg, fine-tuned": Row(partial(finetuned, epochs=2), lambda: [PFedAvg("finetune", 2)], NORMED),
    "pfedavg, fine-tuned at last": Row(
        partial(finetuned, epochs=1, last=True), lambda: [PFedAvg("finetune_last")], NORMED
    ),
    "pfedavg, fine-tuned heads": Row(
        partial(finetuned, epochs=2, head_only=True), lambda: [PFedAvg("finetune", 2, head_only=True)], NORMED
    ),
    "evaluate.finetune": Row(partial(finetuned, epochs=2), list, run=adapting(Finetune(2))),
    "evaluate.finetune of heads at last": Row(
        partial(finetuned, epochs=1, head_only=True, last=True), list, run=adapting(Finetune(1, head=True, last=True))
    ),
    "evaluate.finetune on training samples": Row(
        partial(finetuned, epochs=1), list, {"data": SPARED}, adapting(Finetune(1))
    ),
    "evaluate.finetune on all samples": Row(
        partial(finetuned, epochs=1),
        list,
        {"data": SPARED},
        adapting(Finetune(1, samples="all")),
        drawn={"spared": [samples(SPARED, SPARED.partition.spare.rows(client)) for client in range(4)]},
    ),
    "centralized": pooling(replace(LOCAL, epochs=4)),
    "centralized, part of a pass": pooling(replace(LOCAL, epochs=1), **NORMED),
    "centralized, steps": pooling(replace(LOCAL, epochs=None, steps=4)),
    "loss decomposition": Row(loss_decomposition, list, run={"evaluation": Evaluation(decompose=1)}),
    "loss decomposition, uniform": Row(
        loss_decomposition, list, NORMED, {"evaluation": Evaluation(decompose=1), "weighting": "uniform"}
    ),
    "loss decomposition of some samples": Row(
        partial(loss_decomposition, most=4), list, run={"evaluation": Evaluation(decompose=1, decompose_rows=4)}
    ),
    "loss decomposition with personal layers": Row(
        loss_decomposition, lambda: [FedBN()], NORMED, {"evaluation": Evaluation(decompose=1)}
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_method_ends_where_its_textbook_does(name: str) -> None:
    check(ROWS[name])
