"""Train a workload with FedJAX and write the times at the ends of its rounds.

    python fedjax_app.py FOLDER ROUNDS

`jobs.benchmarks.peers` writes FOLDER and starts this file. Values of FEDJAX_BACKEND:

    jit     trains one client at a time, with all threads
    pmap    trains two clients at a time, each on a device with one thread
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import numpy as np


def apply_layer(name: str, values: Any, parameters: list[Any]) -> Any:
    """Apply a layer of `settings.json` to a batch of inputs.

    name: the kind of layer.
    values: the inputs.
    parameters: the layer's parameters.
    """
    if name == "flatten":
        return values.reshape(len(values), -1)
    if name == "relu":
        return jax.nn.relu(values)
    if name == "pool":
        window = (1, 1, 2, 2)
        return jax.lax.reduce_window(values, -jnp.inf, jax.lax.max, window, window, "VALID")
    weight, bias = parameters
    if name == "linear":
        return values @ weight.T + bias
    return jax.lax.conv(values, weight, (1, 1), "SAME") + bias[:, None, None]


def main(folder: Path, rounds: int) -> None:
    """Train a stored workload with FedJAX, and write the times at the ends of the rounds.

    folder: the folder with the workload's files. The times are written to times.json in it.
    rounds: the number of rounds.
    """
    settings = json.loads((folder / "settings.json").read_text())
    inputs = np.load(folder / "inputs.npy")
    labels = np.load(folder / "labels.npy")
    with np.load(folder / "parameters.npz") as stored:
        initial = [jnp.asarray(stored[f"arr_{index}"]) for index in range(len(stored))]

    def loss(params: list[Any], batch: dict[str, Any]) -> Any:
        values, place = batch["x"], 0
        for name in settings["layers"]:
            count = 2 if name in ("linear", "convolution") else 0
            values = apply_layer(name, values, params[place : place + count])
            place += count
        logs = jax.nn.log_softmax(values)
        return -jnp.take_along_axis(logs, batch["y"][:, None], 1).mean()

    def gradient(params: list[Any], batch: dict[str, Any], rng: Any) -> Any:
        return jax.grad(loss)(params, batch)

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        gradient,
        fedjax.optimizers.sgd(settings["lr"]),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=settings["batch"], num_epochs=1),
    )
    samples = settings["samples"]
    draws = np.random.default_rng(0)
    times: list[float] = []
    with fedjax.for_each_client_backend(os.environ["FEDJAX_BACKEND"]):
        state = algorithm.init(initial)
        for _ in range(rounds):
            cohort = draws.choice(settings["clients"], settings["cohort"], replace=False)
            clients = []
            for client in cohort:
                rows = slice(client * samples, (client + 1) * samples)
                data = fedjax.ClientDataset({"x": inputs[rows], "y": labels[rows]})
                clients.append((str(client).encode(), data, jax.random.PRNGKey(client)))
            state, _ = algorithm.apply(state, clients)
            jax.block_until_ready(state.params)
            times.append(time.monotonic())
    change = max(
        float(jnp.abs(new - old).max()) for new, old in zip(state.params, initial, strict=True)
    )
    (folder / "times.json").write_text(json.dumps({"times": times, "change": change}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
