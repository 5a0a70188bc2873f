"""Test FRAug against its textbook, with each of its parts and settings."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from tiny_runs import MLP, NORMED_MLP, BiasFreeMlp, tiny_data

from raysim.data.federated import FederatedData
from raysim.data.partition import CSR, Partition
from raysim.methods.fraug import FRAug
from raysim.simulation.schedule import Synchronous
from textbook.check import LOCAL, Row, check
from textbook.fraug import fraug

# A short ramp with a strong slope, so that rho, beta and the prototypes' weight differ from round
# to round.
SHORT = replace(LOCAL, epochs=1)  # a third of a second less
BASE = {"rounds": 3, "noise_dim": 4, "gamma": 0.8, "generator_lam": 0.7, "rtnet_lam": 1.3}


def with_few(few: int) -> FederatedData:
    """Return data of four clients; the first client has only `few` training samples."""
    data = tiny_data(clients=4, samples=70)
    rows = [data.partition.train.rows(client) for client in range(4)]
    rows[0] = rows[0][:few]
    train = CSR(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))
    return replace(data, partition=Partition(train, data.partition.test))


def row(**changed: Any) -> Row:
    """Return a comparison of FRAug with its textbook, on a network with BatchNorm.

    changed: settings of FRAug that differ from `BASE`. Three names are passed to `Row` instead:
    `study`, `run` and `schedule`.
    """
    row_settings = {key: changed.pop(key) for key in ("study", "run", "schedule") if key in changed}
    row_settings["study"] = {"model": NORMED_MLP, "local": SHORT} | row_settings.get("study", {})
    settings = BASE | changed
    return Row(partial(fraug, **settings), lambda: [FRAug(**settings)], **row_settings)


ROWS = {
    "as it is": row(study={"local": LOCAL}),
    "uniform noise": row(noise="uniform"),
    "mse": row(generator_metric="mse", rtnet_metric="mse"),
    "moments": row(generator_metric="mmd_moments", rtnet_metric="mmd_moments"),
    "MMD for each class": row(generator_metric="mmd_classes", rtnet_metric="mmd_classes"),
    "text of the paper": row(
        generator_metric="mmd_classes", rtnet_metric="mse", residual=None, prototype_ramp=True
    ),
    "mse for the generator alone": row(generator_metric="mse"),
    "no distances": row(generator_lam=0.0, rtnet_lam=0.0),
    "rates": row(generator_lr_factor=0.7, rtnet_lr_factor=1.7),
    "generator's BatchNorm local": row(generator_norm="local"),
    "RTNet without a last BatchNorm": row(rtnet_norm=False),
    "ramp of Laine and Aila": row(ramp="laine_aila"),
    "reciprocal ramp": row(ramp="reciprocal", rounds=None),
    "reciprocal ramp that ends before the run": row(ramp="reciprocal", rounds=1),
    "constant ramp": row(ramp="constant", rounds=None),
    "least share": row(weight=0.1),
    "no synthetic share": row(weight=0.0),
    "whole share": row(weight=1.0, ramp="reciprocal", gamma=30.0),
    "residuals in full": row(residual=1.0),
    "no residuals": row(residual=0.0),
    "prototypes of the last batch": row(prototype_weight=1.0),
    "prototypes that ramp": row(prototype_ramp=True),
    "ramps that end before the run": row(rounds=1, prototype_ramp=True),
    "without the generator": row(use_generator=False),
    "without RTNet": row(use_rtnet=False),
    "without RTNet, mse": row(use_rtnet=False, generator_metric="mse"),
    "fresh optimisers": row(keep_optimizer=False),
    "no momentum": row(study={"local": replace(SHORT, momentum=0.0)}),
    "no BatchNorm in the model": row(study={"model": MLP}),
    "a head without bias": row(study={"model": BiasFreeMlp()}),
    "a client of one sample": row(
        study={"data": with_few(1)}, schedule=Synchronous(4), run={"rounds": 2}
    ),
    "a client of two samples": row(
        study={"data": with_few(2)}, schedule=Synchronous(4), run={"rounds": 2}
    ),
    "a client that never trains": row(schedule=Synchronous(1), run={"rounds": 2}),
}


@pytest.mark.parametrize("name", ROWS)
def test_fraug_equals_its_textbook_computation(name: str) -> None:
    check(ROWS[name])
