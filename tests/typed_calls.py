"""Calls from the documentation, for the type checker only: nothing runs this file."""

from __future__ import annotations

import numpy as np
from torch import nn

import raysim
from raysim.methods.fedprox import FedProx
from raysim.simulation.fleet import Lognormal
from raysim.simulation.schedule import Buffered

X, Y = np.zeros((20, 4), np.float32), np.zeros(20, np.int64)


def calls() -> None:
    """Call `raysim.run` with every kind of argument that its type hints allow.

    A group can be an option's name, a mapping of keys to values, or an object.
    """
    raysim.run("method=fedprox", rounds=20, runtime="inprocess")
    raysim.run(
        ["method=fedprox"], schedule={"cohort": 5}, fleet={"sigma": 0.5}, partition={"clients": 3}
    )
    raysim.run(methods=[FedProx(mu=0.1), "mixup"], data=((X, Y), (X, Y)), local={"lr": 0.05})
    raysim.run(
        data=(X, Y),
        model=nn.Linear(4, 2),
        partition=[[0, 1], [2, 3]],
        schedule="buffered",
        fleet="lognormal",
    )
    raysim.run(
        partition={0: [0, 1], 1: [2, 3]},
        schedule=Buffered(concurrency=4, size=2),
        fleet=Lognormal(),
    )
    result = raysim.run(loss="focal", on_round=print, quiet=True)
    result.model().eval()
    print(
        result.history["accuracy"].max(),
        result.clients,
        result.client_model(0),
        result.predictions().classes,
    )
