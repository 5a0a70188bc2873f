"""Train a workload with pfl-research and write the times at the ends of its rounds.

    python pfl_app.py FOLDER ROUNDS

`jobs.benchmarks.peers` writes FOLDER and starts this file once for each process. Environment
variables of pfl connect the processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LAYERS = {"flatten": nn.Flatten, "relu": nn.ReLU, "pool": lambda: nn.MaxPool2d(2)}


class Network(nn.Module):
    """The workload's network, with the methods `loss` and `metrics` that pfl requires.

    layers: the names of the layers in `settings.json`.
    parameters: the weight and the bias of each layer that has them, in the order of `layers`.
    """

    def __init__(self, layers: list[str], parameters: list[Tensor]):
        super().__init__()
        self.layers = nn.Sequential()
        place = 0
        for name in layers:
            if name in LAYERS:
                self.layers.append(LAYERS[name]())
                continue
            weight, bias = parameters[place : place + 2]
            place += 2
            outputs, inputs = weight.shape[:2]
            if name == "linear":
                layer: Any = nn.Linear(inputs, outputs)
            else:
                layer = nn.Conv2d(inputs, outputs, weight.shape[2], padding="same")
            layer.weight.data.copy_(weight)
            layer.bias.data.copy_(bias)
            self.layers.append(layer)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return cross_entropy(self.layers(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return no metrics, because nothing is evaluated."""
        return {}


class Times(TrainingProcessCallback):
    """A callback that stores the times at the ends of rounds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Store the time at the end of a round; return (False, no metrics).

        False tells pfl to continue.
        """
        self.times.append(time.monotonic())
        return False, Metrics()


def main(folder: Path, rounds: int) -> None:
    """Train a stored workload with pfl-research, in one or several processes.

    The first process writes times.json: the times at the ends of the rounds, and the largest change
    of a parameter.
    folder: the folder that `jobs.benchmarks.peers` has written.
    """
    torch.set_num_threads(1)
    settings = json.loads((folder / "settings.json").read_text())
    inputs = torch.from_numpy(np.load(folder / "inputs.npy"))
    labels = torch.from_numpy(np.load(folder / "labels.npy"))
    with np.load(folder / "parameters.npz") as stored:
        initial = [torch.from_numpy(stored[f"arr_{index}"]) for index in range(len(stored))]
    network = Network(settings["layers"], initial)
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    samples = settings["samples"]

    def samples_of(client: int) -> Dataset:
        rows = slice(client * samples, (client + 1) * samples)
        return Dataset([inputs[rows], labels[rows]])

    sampler = get_user_sampler("random", list(range(settings["clients"])))
    training_data = FederatedDataset(samples_of, sampler)
    times = Times()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds * 1000,
            train_cohort_size=settings["cohort"],
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=training_data, val_data=training_data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=settings["lr"],
            local_batch_size=settings["batch"],
        ),
        callbacks=[times],
    )
    if os.environ["PFL_WORKER_RANK"] == "0":
        pairs = zip(network.parameters(), initial, strict=True)
        change = max(float((new.detach() - old).abs().max()) for new, old in pairs)
        text = json.dumps({"times": times.times, "change": change})
        (folder / "times.json").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
