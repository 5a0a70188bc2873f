"""Test that methods with several steps, models or data sets agree with their textbooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from tiny_runs import MLP, NORMED_MLP, SEED

from raysim.api.declarations import Local
from raysim.api.method import Method
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import Dirichlet
from raysim.data.sources import Synthetic
from raysim.methods.dann import Dann
from raysim.methods.fedbr import FedBR
from raysim.methods.fedcm import FedCM
from raysim.methods.fedsr import FedSR
from raysim.methods.mixup import Mixup
from raysim.methods.scaffold import Scaffold
from raysim.methods.vhl import Vhl
from raysim.training.worker import Worker
from textbook.check import Row, check
from textbook.corrected import with_fedcm, with_scaffold
from textbook.dann import dann
from textbook.fedavg import fedavg
from textbook.fedbr import fedbr
from textbook.fedsr import fedsr
from textbook.vhl import vhl

NORMED = {"model": NORMED_MLP}
WIDE = {
    "model": MLP
}  # without a projection, images that wake no unit at all would have no direction
PROXY = Synthetic(samples=40, test_samples=20, classes=7, seed=9, mean=[0.2], std=[0.6])


def public(worker: Worker) -> Mapping[str, Any]:
    """Return normalised training images and classes of `PROXY`, the public data set of FedBR."""
    data = PROXY.build()
    images = torch.from_numpy(data.inputs[: data.train_rows].copy()).double() / 255
    return {"proxy": ((images - 0.2) / 0.6, data.labels[: data.train_rows])}


def of_fedbr(
    *others: Callable[[], Method], study: Any = None, run: Any = None, **settings: Any
) -> Row:
    """Return a comparison of FedBR with its textbook.

    others: functions that return methods, which follow FedBR in the run's list.
    study: arguments of `tiny_runs.run_spec`; None: none.
    run: arguments of `tiny_runs.coordinate`; None: none.
    settings: settings of FedBR.
    """
    row_settings: dict[str, Any] = {
        "lam": 0.7,
        "mu": 0.9,
        "pseudo_batch": 4,
        "samples_per_mean": 3,
    } | settings
    book_settings = {
        key: value for key, value in row_settings.items() if key not in ("projection", "rounds")
    }
    if book_settings.pop("fresh", False):
        book_settings["pseudo"] = "fresh"
    if "rounds" in row_settings:
        book_settings["rounds"] = row_settings.pop("rounds")
    mixture = row_settings.get("pseudo") == "mixture"
    if mixture:
        row_settings, book_settings["mix_samples"] = (
            {"proxy": PROXY} | row_settings,
            row_settings.get("mix_samples", 1),
        )
    method_settings = {"projection": "code"} | row_settings
    return Row(
        partial(fedbr, **book_settings, mixup=Mixup in others),
        lambda: [FedBR(**method_settings), *(other() for other in others)],
        study or {},
        run or {},
        drawn=public if mixture else {},
    )


def noise(worker: Worker) -> Mapping[str, Any]:
    """Return the normal noise that FedSR's model uses when it is scored, under the name "noise"."""
    return {"noise": worker.vector.networks["model"].noise}


def of_fedsr(study: Mapping[str, Any] | None = None, **settings: Any) -> Row:
    """Return a comparison of FedSR with its textbook. The penalties are large enough to matter.

    study: arguments of `tiny_runs.run_spec`; None: none.
    settings: settings of FedSR.
    """
    row_settings = {"alpha_l2r": 0.2, "alpha_cmi": 0.05} | settings
    book_settings = {
        key: row_settings[key] for key in row_settings if key not in ("width", "samples")
    }
    drawn: Any = noise if row_settings.get("probabilistic", True) else {}
    return Row(
        partial(fedsr, **book_settings), lambda: [FedSR(**row_settings)], study or {}, drawn=drawn
    )


def of_vhl(
    *others: Callable[[], Method], study: Mapping[str, Any] | None = None, **settings: Any
) -> Row:
    """Return a comparison of VHL with its textbook, at a higher temperature than in the paper.

    others: functions that return methods, which follow VHL in the run's list.
    study: arguments of `tiny_runs.run_spec`; None: none.
    settings: settings of VHL.
    """
    row_settings: dict[str, Any] = {"virtual": 30, "temperature": 0.5, "kappa": 0.4} | settings
    method_settings = {"virtual_batch": 7} | row_settings
    book_settings = {key: value for key, value in row_settings.items() if key != "label_mode"}
    return Row(
        partial(
            vhl,
            **book_settings,
            extra=row_settings.get("label_mode") != "shared",
            mixup=Mixup in others,
        ),
        lambda: [Vhl(**method_settings), *(other() for other in others)],
        study or {},
    )


@cache
def larger() -> FederatedData:
    """Return data with images of 3 x 12 x 10 values: more pixels than the 8 x 8 of VHL's noise."""
    source = Synthetic(shape=[3, 12, 10], samples=60, test_samples=20, classes=3)
    return federate(source, Dirichlet(clients=4, alpha=2.0, minimum=5), SEED)


FEDCM = partial(FedCM, 0.3)

ROWS = {
    "fedbr": of_fedbr(),
    "fedbr as in the paper's settings": of_fedbr(
        lam=0.1, mu=0.5, projection="paper", pseudo_batch=10, run={"rounds": 1}
    ),
    "fedbr with BatchNorm": of_fedbr(study=NORMED),
    "fedbr without projection": of_fedbr(projection="none", study=WIDE),
    "fedbr without max step": of_fedbr(max_step=False),
    "fedbr's first component": of_fedbr(mu=0.0, study=WIDE),
    "fedbr's second component": of_fedbr(lam=0.0),
    "fedbr's second component without projection": of_fedbr(lam=0.0, projection="none", study=WIDE),
    "fedbr without both": Row(fedavg, lambda: [FedBR(0.0, 0.0)]),
    "fedbr dividing": of_fedbr(temperature_mode="divide", tau1=0.4, tau2=0.9),
    "fedbr multiplying": of_fedbr(tau1=0.6, tau2=1.7),
    "fedbr without negatives": of_fedbr(tau2=0.0),
    "fedbr with pseudo-data drawn once": of_fedbr(pseudo_refresh="once"),
    "fedbr with a larger pool": of_fedbr(means_per_client=3),
    "fedbr with a pool by samples": of_fedbr(means_per_client=3, sources="unbalanced"),
    "fedbr with a pool by classes": of_fedbr(means_per_client=3, sources="classes"),
    "fedbr with fresh means by classes": of_fedbr(fresh=True, sources="classes"),
    "fedbr with mixtures by classes": of_fedbr(pseudo="mixture", sources="classes"),
    "fedbr with fresh means": of_fedbr(fresh=True),
    "fedbr with fresh means by samples": of_fedbr(fresh=True, sources="unbalanced"),
    "fedbr with mixtures": of_fedbr(pseudo="mixture"),
    "fedbr with mixtures by images": of_fedbr(
        pseudo="mixture", sources="unbalanced", mix_samples=2
    ),
    "fedbr with mixtures and BatchNorm": of_fedbr(pseudo="mixture", study=NORMED),
    "fedbr with mixtures drawn once": of_fedbr(pseudo="mixture", pseudo_refresh="once"),
    "fedbr with mixtures of nothing": of_fedbr(pseudo="mixture", mix_samples=0),
    "fedbr with global features of the round": of_fedbr(pseudo="mixture", global_features="round"),
    "fedbr, mixup": of_fedbr(Mixup),
    "fedbr, mixup with mixtures": of_fedbr(Mixup, pseudo="mixture"),
    "fedbr, fedcm": of_fedbr(FEDCM, rounds=partial(with_fedcm, alpha=0.3)),
    "fedbr, fedcm without max step": of_fedbr(
        FEDCM, rounds=partial(with_fedcm, alpha=0.3), max_step=False
    ),
    "fedbr, scaffold": of_fedbr(Scaffold, rounds=with_scaffold),
    "fedbr, scaffold with BatchNorm": of_fedbr(Scaffold, rounds=with_scaffold, study=NORMED),
    "fedbr, scaffold without max step": of_fedbr(Scaffold, rounds=with_scaffold, max_step=False),
    "fedbr, mixup, scaffold": of_fedbr(Mixup, Scaffold, rounds=with_scaffold),
    "dann": Row(partial(dann, lam=0.4), lambda: [Dann(0.4, width=9)]),
    "dann with BatchNorm": Row(partial(dann, lam=0.4), lambda: [Dann(0.4, width=9)], NORMED),
    "dann without adversary": Row(partial(dann, lam=0.0), lambda: [Dann(0.0, width=9)]),
    "dann with two discriminator steps": Row(
        partial(dann, lam=0.4, r=2), lambda: [Dann(0.4, 9, 2)]
    ),
    "dann with a rate of its own": Row(
        partial(dann, lam=0.4, rate=0.3), lambda: [Dann(0.4, 9, rate=0.3)]
    ),
    "dann by reversal": Row(
        partial(dann, lam=0.4, reversal=True), lambda: [Dann(0.4, width=9, mode="grl")]
    ),
    "dann by reversal with BatchNorm": Row(
        partial(dann, lam=0.4, reversal=True), lambda: [Dann(0.4, width=9, mode="grl")], NORMED
    ),
    "dann, scaffold": Row(
        partial(dann, lam=0.4, r=2, rate=0.3, rounds=with_scaffold),
        lambda: [Dann(0.4, 9, 2, 0.3), Scaffold()],
    ),
    "dann, fedcm": Row(
        partial(dann, lam=0.4, r=2, rate=0.3, rounds=partial(with_fedcm, alpha=0.3)),
        lambda: [Dann(0.4, 9, 2, 0.3), FEDCM()],
    ),
    "vhl": of_vhl(),
    "vhl as in the paper's settings": of_vhl(alpha=1.0, gamma=1.0, kappa=0.1, temperature=0.07),
    "vhl with shared labels": of_vhl(label_mode="shared", alpha=0.6, gamma=0.7),
    "vhl with BatchNorm": of_vhl(study=NORMED),
    "vhl aligning in the first epoch": of_vhl(align_epochs=1),
    "vhl aligning in the first epoch with nothing else": of_vhl(
        align_epochs=1, alpha=0.0, study=NORMED
    ),
    "vhl without alignment": of_vhl(gamma=0.0, kappa=0.0),
    "vhl without virtual contrast": of_vhl(kappa=0.0, gamma=0.6),
    "vhl of virtual contrast alone": of_vhl(alpha=0.0, gamma=0.0),
    "vhl on larger images": of_vhl(study={"data": larger()}),
    "vhl counting steps": of_vhl(
        align_epochs=1, study={"local": Local(lr=0.1, epochs=None, steps=3, batch=8)}
    ),
    "vhl, mixup": of_vhl(Mixup),
    "vhl, mixup with BatchNorm": of_vhl(Mixup, study=NORMED, align_epochs=1),
    "fedsr": of_fedsr(),
    "fedsr as in the code's settings": of_fedsr(alpha_l2r=0.01, alpha_cmi=5e-4),
    "fedsr with BatchNorm": of_fedsr(NORMED),
    "fedsr with a narrow representation": of_fedsr(width=3, samples=4),
    "fedsr with shared references": of_fedsr(share_reference=True),
    "fedsr without the norm": of_fedsr(alpha_l2r=0.0),
    "fedsr without references": of_fedsr(alpha_cmi=0.0),
    "fedl2r": of_fedsr(probabilistic=False),
}


@pytest.mark.parametrize("name", ROWS)
def test_method_with_stages_equals_its_textbook_computation(
    name: str,
) -> None:
    check(ROWS[name])
