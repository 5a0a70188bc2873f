"""Test that methods with personal models, and the models' scores, agree with the textbooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import NORMED_MLP, SEED, tiny_data
from torch import Tensor

from raysim.api.declarations import Evaluation, Finetune, Local
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import Dirichlet
from raysim.data.sources import Synthetic
from raysim.experiment.adjustments import pool_training
from raysim.methods.centralized import Centralized
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedpac import FedPAC
from raysim.methods.fedprox import FedProx
from raysim.methods.local import LocalTraining
from raysim.methods.partialfed import PartialFed
from raysim.methods.pfedavg import PFedAvg
from raysim.models import Mlp
from raysim.simulation.schedule import Synchronous
from textbook.centralized import centralized
from textbook.check import LOCAL, Row, check
from textbook.fedbn import fedbn
from textbook.fedbss import fedbss
from textbook.fedpac import fedpac
from textbook.local import local
from textbook.loss_decomposition import loss_decomposition
from textbook.partialfed import PolicySettings, partialfed
from textbook.pfedavg import after_local, finetuned

DATA = tiny_data(clients=4, samples=70)
NORMED: dict[str, Any] = {"model": NORMED_MLP}
FEW: dict[str, Any] = {
    "schedule": Synchronous(1),
    "run": {"rounds": 2},
}  # so some client never takes part
SPARED = federate(
    Synthetic(samples=120, test_samples=20, classes=5, mean=[0.5], std=[0.3]),
    Dirichlet(clients=4, alpha=2.0, minimum=5, fraction=0.4),
    SEED,
)

SKEWED = federate(
    Synthetic(samples=70, test_samples=20, classes=5),
    Dirichlet(clients=4, alpha=0.15, minimum=6),
    SEED,
)


def samples(data: FederatedData, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of some rows of the data; the test itself normalises the inputs."""
    source = data.open()
    return (torch.from_numpy(source.inputs[rows]).double() / 255 - 0.5) / 0.3, torch.from_numpy(
        source.labels[rows]
    )


def adapting(how: Finetune) -> dict[str, Any]:
    return {"evaluate": Evaluation(finetune=how)}


def pooling(settings: Local, **study: Any) -> Row:
    """Return a comparison of centralized training with its textbook.

    One client has the data of all four clients. A round has as many samples as an average federated
    round with three clients.

    settings: `local.*` of the federated run.
    """
    train = DATA.partition.train
    images, labels = samples(DATA, np.arange(70))
    data, schedule, local = pool_training(DATA, Synchronous(3), settings, "centralized")
    drawn = {
        "images": images,
        "labels": labels,
        "rows": [train.rows(client) for client in range(4)],
        "cohort": 3,
        "local": settings,
    }
    return Row(
        centralized,
        lambda: [Centralized()],
        {"data": data, "local": local, **study},
        schedule=schedule,
        drawn=drawn,
    )


def selecting(
    *,
    kind: Any = "cosine",
    warmup: int = 1,
    refresh: int = 1,
    fraction_of: Any = "samples",
    rounds: int = 3,
    **study: Any,
) -> Row:
    book = partial(fedbss, warmup=warmup, kind=kind, refresh=refresh, fraction_of=fraction_of)
    method = partial(FedBSS, warmup, refresh, kind, fraction_of)
    return Row(book, lambda: [method()], study, {"rounds": rounds})


def loading(strategy: Any, mask: Sequence[bool], model: Any = NORMED_MLP, **settings: Any) -> Row:
    return Row(
        partial(partialfed, mask=mask), lambda: [PartialFed(strategy, **settings)], {"model": model}
    )


def learning(*, model: Any = NORMED_MLP, sampled: bool = False) -> Row:
    """Return a comparison of PartialFed with its textbook, for a policy that changes quickly.

    sampled: True draws for each layer whether it is loaded from the shared model. False takes the
    more probable choice.
    """
    settings = PolicySettings(
        steps=4, batch=5, rate=0.3, start=2.0, decay=0.5, floor=0.6, sampled=sampled
    )
    method = partial(PartialFed, "adaptive", None, None, 4, 5, 0.3, 2.0, 0.5, 0.6, sampled)
    return Row(
        partial(partialfed, policy=settings), lambda: [method()], {"model": model}, {"rounds": 4}
    )


def mixing(*, drawn: dict[str, Any] | None = None, **study: Any) -> Row:
    """Return a comparison of FedPAC with its textbook.

    drawn: settings of FedPAC, by the textbook's names. By default lam=0.7, head_epochs=1,
    factor=3.0 and least=1e-3.
    study: further arguments of `tiny_runs.run_spec`.
    """
    settings = {"lam": 0.7, "head_epochs": 1, "factor": 3.0, "least": 1e-3} | (drawn or {})
    method = partial(
        FedPAC, settings["lam"], settings["head_epochs"], settings["factor"], settings["least"]
    )
    return Row(
        partial(fedpac, **settings), lambda: [method()], {"local": replace(LOCAL, epochs=3)} | study
    )


ROWS = {
    "fedbn": Row(fedbn, lambda: [FedBN()], NORMED),
    "fedbn, statistics": Row(
        partial(fedbn, scope="statistics"), lambda: [FedBN("statistics")], NORMED
    ),
    "fedbn, affine": Row(partial(fedbn, scope="affine"), lambda: [FedBN("affine")], NORMED),
    "fedbn, none": Row(partial(fedbn, scope="none"), lambda: [FedBN("none")], NORMED),
    "fedbn by name": Row(fedbn, lambda: [FedBN(name_rule="or.2")], NORMED),
    "fedbn, statistics by name": Row(
        partial(fedbn, scope="statistics"), lambda: [FedBN("statistics", name_rule="or.2")], NORMED
    ),
    "fedbn of every kind of norm": Row(fedbn, lambda: [FedBN(layers="all")], NORMED),
    "fedbn, some never train": Row(fedbn, lambda: [FedBN()], NORMED, **FEW),
    "fedbn, statistics from a pass": Row(
        partial(fedbn, reestimate=True), lambda: [FedBN(reestimate=True)], NORMED, **FEW
    ),
    "fedbn without BatchNorm": Row(fedbn, lambda: [FedBN()]),
    "fedbn and fedprox": Row(partial(fedbn, mu=0.5), lambda: [FedBN(), FedProx(0.5)], NORMED),
    "fedbss": selecting(local=replace(LOCAL, epochs=4)),
    "fedbss with BatchNorm": selecting(local=replace(LOCAL, epochs=3, batch=5), **NORMED),
    "fedbss, linear": selecting(kind="linear", local=replace(LOCAL, epochs=3)),
    "fedbss, filter": selecting(kind="filter"),
    "fedbss, all": selecting(kind="all"),
    "fedbss from the start": selecting(
        warmup=0, refresh=2, rounds=4, local=replace(LOCAL, epochs=4)
    ),
    "fedbss, steps": selecting(warmup=0, local=replace(LOCAL, epochs=None, steps=7, phases=3)),
    "fedbss, weights": selecting(fraction_of="loss", local=replace(LOCAL, epochs=4)),
    "fedbss, weights with BatchNorm": selecting(
        fraction_of="loss", local=replace(LOCAL, epochs=3, batch=5), **NORMED
    ),
    "fedbss, weights without the biased": selecting(fraction_of="loss", kind="filter"),
    "fedbss, weights in phases": selecting(
        fraction_of="loss",
        warmup=0,
        local=replace(LOCAL, epochs=None, steps=7, phases=3),
    ),
    "fedbss, fewer steps than phases": selecting(
        warmup=0, local=replace(LOCAL, epochs=None, steps=4, phases=6)
    ),
    "partialfed, bottom up": loading("bottom_up", (True, False, False), num_loaded=1),
    "partialfed, top down": loading("top_down", (False, True, True), num_loaded=2),
    "partialfed, no_bn": loading("no_bn", (True, False, True)),
    "partialfed, no_classifier": loading("no_classifier", (True, True, False)),
    "partialfed, no_bn_no_classifier": loading("no_bn_no_classifier", (True, False, False)),
    "partialfed, all": loading("all", (True, True, True)),
    "partialfed, none": loading("none", (False, False, False)),
    "partialfed without BatchNorm": loading("no_classifier", (True, False), Mlp((6,))),
    "partialfed, too long away": Row(
        partial(partialfed, mask=(True, False, False), most=1),
        lambda: [PartialFed(max_staleness=1)],
        NORMED,
        {"rounds": 5},
        Synchronous(2),
    ),
    "partialfed, some never train": Row(
        partial(partialfed, mask=(True, False, False)), lambda: [PartialFed()], NORMED, **FEW
    ),
    "partialfed and fedprox": Row(
        partial(partialfed, mask=(True, True, False), mu=0.5),
        lambda: [PartialFed("no_classifier"), FedProx(0.5)],
        NORMED,
    ),
    "partialfed, adaptive": learning(),
    "partialfed, adaptive without BatchNorm": learning(model=Mlp((6,))),
    "partialfed, adaptive, drawn": learning(sampled=True),
    "fedpac": mixing(),
    "fedpac with BatchNorm": mixing(**NORMED),
    "fedpac without alignment": mixing(drawn={"lam": 0.0}),
    "fedpac, longer head phase": mixing(
        drawn={"head_epochs": 2}, local=replace(LOCAL, epochs=4), **NORMED
    ),
    "fedpac, few heads": mixing(drawn={"least": 0.4}),
    "fedpac, no head": mixing(drawn={"least": 1.0}),
    "fedpac, steps": mixing(drawn={"head_epochs": 2}, local=replace(LOCAL, epochs=None, steps=5)),
    "fedpac, classes that few hold": mixing(data=SKEWED),
    "local": Row(local, lambda: [LocalTraining()], NORMED),
    "local, kept optimisers": Row(partial(local, keep=True), lambda: [LocalTraining(True)], NORMED),
    "local, kept Nesterov": Row(
        partial(local, keep=True),
        lambda: [LocalTraining(True)],
        {"local": replace(LOCAL, nesterov=True)},
    ),
    "local, kept Adam": Row(
        partial(local, keep=True),
        lambda: [LocalTraining(True)],
        {"local": replace(LOCAL, optimizer="adam", momentum=0.0, lr=0.01)},
    ),
    "pfedavg": Row(after_local, lambda: [PFedAvg()], NORMED),
    "pfedavg, some never train": Row(after_local, lambda: [PFedAvg()], NORMED, **FEW),
    "pfedavg, fine-tuned": Row(
        partial(finetuned, epochs=2), lambda: [PFedAvg("finetune", 2)], NORMED
    ),
    "pfedavg, fine-tuned at last": Row(
        partial(finetuned, epochs=1, last=True), lambda: [PFedAvg("finetune_last")], NORMED
    ),
    "pfedavg, fine-tuned heads": Row(
        partial(finetuned, epochs=2, head_only=True),
        lambda: [PFedAvg("finetune", 2, head_only=True)],
        NORMED,
    ),
    "evaluate.finetune": Row(partial(finetuned, epochs=2), list, run=adapting(Finetune(2))),
    "evaluate.finetune of heads at last": Row(
        partial(finetuned, epochs=1, head_only=True, last=True),
        list,
        run=adapting(Finetune(1, head=True, last=True)),
    ),
    "evaluate.finetune on training samples": Row(
        partial(finetuned, epochs=1), list, {"data": SPARED}, adapting(Finetune(1))
    ),
    "evaluate.finetune on all samples": Row(
        partial(finetuned, epochs=1),
        list,
        {"data": SPARED},
        adapting(Finetune(1, samples="all")),
        drawn={
            "spared": [samples(SPARED, SPARED.partition.spare.rows(client)) for client in range(4)]
        },
    ),
    "centralized": pooling(replace(LOCAL, epochs=4)),
    "centralized, part of a pass": pooling(replace(LOCAL, epochs=1), **NORMED),
    "centralized, steps": pooling(replace(LOCAL, epochs=None, steps=4)),
    "loss decomposition": Row(loss_decomposition, list, run={"evaluate": Evaluation(decompose=1)}),
    "loss decomposition, uniform": Row(
        loss_decomposition,
        list,
        NORMED,
        {"evaluate": Evaluation(decompose=1), "weighting": "uniform"},
    ),
    "loss decomposition of some samples": Row(
        partial(loss_decomposition, most=4),
        list,
        run={"evaluate": Evaluation(decompose=1, decompose_rows=4)},
    ),
    "loss decomposition with personal layers": Row(
        loss_decomposition, lambda: [FedBN()], NORMED, {"evaluate": Evaluation(decompose=1)}
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_personalising_method_equals_its_textbook_computation(name: str) -> None:
    check(ROWS[name])
