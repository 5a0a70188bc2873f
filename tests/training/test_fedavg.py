"""Test FedAvg against a few lines of plain PyTorch, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import MLP, NORMED, SEED, run, run_spec, tiny_data
from torch import Tensor, nn

from raysim.api.declarations import Local
from raysim.data.federated import FederatedData
from raysim.models import ModelRecipe
from raysim.primitives.streams import stream
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous

CLIENTS, ROUNDS, BATCH, EPOCHS = 7, 2, 8, 2


def batches(
    data: FederatedData, client: int, turn: int, whole: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the normalised batches of a client's job; each epoch shuffles the samples again.

    turn: the number of the client's job, from 0.
    whole: True leaves out a last batch of one sample.
    """
    dataset, rows = data.open(), data.partition.train.rows(client)
    shuffle = stream(SEED, "batches", client, turn)
    for _ in range(EPOCHS):
        order = rows[shuffle.permutation(len(rows))]
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            if not (whole and len(chosen) == 1):
                images = torch.tensor(dataset.inputs[chosen]).float()
                yield (images / 255 - 0.5) / 0.3, torch.tensor(dataset.labels[chosen])


def plain_fedavg(
    model: nn.Module, data: FederatedData, weighting: str, **optimizer: Any
) -> dict[str, Tensor]:
    """Return the model after FedAvg: x <- x + sum_i w_i (y_i - x) / sum_i w_i in each round.

    As in raysim, the changes are added up in pairs, in the order in which the clients finish. Then
    these sums are added up in pairs, and so on.
    weighting: w_i, "samples" or "uniform".
    optimizer: settings of torch's SGD.
    """
    counts = data.partition.train.counts
    arrival = sorted(
        range(CLIENTS), key=lambda client: (counts[client], client)
    )  # on equal devices
    normed = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    for turn in range(ROUNDS):
        base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        deltas = {}
        for client in arrival:
            local = copy.deepcopy(model).train()
            steps = torch.optim.SGD(local.parameters(), **optimizer)
            for inputs, labels in batches(data, client, turn, normed):
                steps.zero_grad()
                nn.functional.cross_entropy(local(inputs), labels).backward()
                steps.step()
            deltas[client] = {
                name: tensor - base[name] for name, tensor in local.state_dict().items()
            }
        weight = {
            client: float(counts[client]) if weighting == "samples" else 1.0 for client in arrival
        }
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                tensor.add_(max(deltas[client][name] for client in arrival))
                continue
            sums = [deltas[client][name] * weight[client] for client in arrival]
            while len(sums) > 1:
                sums = [sum(sums[at + 1 : at + 2], sums[at]) for at in range(0, len(sums), 2)]
            tensor.add_(sums[0] / sum(weight.values()))
    return model.state_dict()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.01},
    "nesterov": {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
}


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("model", [MLP, NORMED], ids=["mlp", "cnn with BatchNorm"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fedavg_equals_plain_pytorch_bit_for_bit(
    optimizer: dict[str, Any], model: ModelRecipe, weighting: Any
) -> None:
    data = tiny_data(clients=CLIENTS, samples=170)
    assert 1 in data.partition.train.counts % BATCH, "some last batch has one sample"
    local = Local(lr=0.05, batch=BATCH, epochs=EPOCHS, **optimizer)
    result = run(
        run_spec(model=model, local=local, data=data),
        Synchronous(CLIENTS),
        Ideal(),
        rounds=ROUNDS,
        weighting=weighting,
    )
    torch.set_num_threads(1)
    dataset = data.open()
    expected = plain_fedavg(
        model.build(dataset.shape, dataset.num_classes, SEED),
        data,
        weighting,
        lr=local.lr,
        **optimizer,
    )
    assert result.tensors.keys() == {f"model.{name}" for name in expected}
    for name, tensor in expected.items():
        assert np.array_equal(result.tensors[f"model.{name}"], tensor.numpy()), name
