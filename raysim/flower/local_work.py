"""Send a client the message for a job of raysim, and read the reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, RecordDict

from raysim.api.local_training import LocalResult
from raysim.flower.client import AppError, AppRunner
from raysim.flower.initial import arrays_of
from raysim.flower.messages import instruction, model_records
from raysim.flower.records import pack_records, unpack_records

LOSS_NAMES = ("train_loss", "train-loss", "loss")
EVALUATION_LOSS_NAMES = ("eval_loss", "eval-loss", "test_loss", "val_loss")
ACCURACY_NAMES = ("eval_acc", "eval-acc", "acc", "eval_accuracy", "test_acc", "val_acc")
EXAMPLES_NAMES = ("num-examples", "num_examples")
ROUND = "server-round"
LEGACY_ROUNDS = ("server_round", "current_round", "round")  # names that apps choose themselves


@dataclass(frozen=True)
class Trained:
    """What the reply to a message for training contains.

    arrays: the trained parameters, by name.
    state: the packed records that the client keeps; b"" for none.
    result: the loss and the metrics of the reply.
    """

    arrays: dict[str, np.ndarray]
    state: bytes
    result: LocalResult


def train(
    runner: AppRunner,
    arrays: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    *,
    client: int,
    number: int,
    version: int,
    state: bytes,
) -> Trained:
    """Send parameters to a client for training; return what its reply contains.

    number: how many messages for training the client has received before.
    version: the number of earlier aggregations.
    state: the packed records that the client keeps; b"" for none.
    Raises AppError if the app fails or trains on no samples, or if its reply has not exactly one
    ArrayRecord.
    """
    content = model_records(
        arrays, _with_round(config, version), "train", runner.app.uses_client_fn
    )
    message = instruction(client, content, "train", f"{client}-{number}")
    returned, records = runner.answer(message, number, read_state(state))
    array_records = list(returned.array_records.values())
    if len(array_records) != 1:
        raise AppError(
            f"the app's reply has {len(array_records)} ArrayRecords. Return the trained parameters "
            "in one."
        )
    metrics = numbers_of(returned)
    for name in EXAMPLES_NAMES:
        if metrics.get(name) == 0:
            raise AppError(
                f"the app's reply has {name}=0, so the client trained on no samples. Check how the "
                f"app loads the data of partition {client}."
            )
    loss = next((metrics[name] for name in LOSS_NAMES if name in metrics), nan)
    result = LocalResult(loss=loss, metrics=metrics)
    packed = pack_records(records) if len(records) else b""
    return Trained(arrays_of(array_records[0]), packed, result)


def evaluate(
    runner: AppRunner,
    arrays: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    client: int,
    state: bytes,
) -> dict[str, float]:
    """Send parameters to a client for evaluation; return the numbers in its reply, by name.

    The number of examples is left out. An accuracy or a loss with another name, such as "eval_acc",
    is also returned as "accuracy" or "loss".
    state: the packed records that the client keeps, which do not change; b"" for none.
    Raises AppError if the app fails.
    """
    content = model_records(arrays, config, "evaluate", runner.app.uses_client_fn)
    message = instruction(client, content, "evaluate", f"{client}-evaluation")
    returned, _ = runner.answer(message, 0, read_state(state))
    numbers = numbers_of(returned)
    for name in EXAMPLES_NAMES:
        numbers.pop(name, None)
    for usual, names in (("accuracy", ACCURACY_NAMES), ("loss", EVALUATION_LOSS_NAMES)):
        name = next((name for name in names if name in numbers), usual)
        if usual not in numbers and name in numbers:
            numbers[usual] = numbers[name]
    return numbers


def _with_round(config: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Return a copy of a config with the number of the round, version + 1, as "server-round".

    If the config has "server_round", "current_round" or "round", they get this number, too.
    version: how many aggregations were made before.
    """
    values = {**config, ROUND: version + 1}
    for name in LEGACY_ROUNDS:
        if name in config:
            values[name] = version + 1
    return values


def read_state(data: bytes) -> RecordDict:
    """Unpack the records that a client keeps.

    data: the packed records; b"" for none.
    """
    return unpack_records(data) if data else RecordDict()


def numbers_of(content: RecordDict) -> dict[str, float]:
    """Return all single numbers in the records of a reply, by name.

    Lists, model parameters, and the status codes of older Flower clients are left out.
    """
    numbers: dict[str, float] = {}
    for name, record in content.items():
        if name.endswith(".status") or isinstance(record, ArrayRecord):
            continue
        for key, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[key] = float(value)
    return numbers
