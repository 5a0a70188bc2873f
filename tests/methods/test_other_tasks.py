"""Test all methods on token sequences and on regression.

Each method trains, or an error names the method.
"""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from cluster import Workers
from test_conformance import TABLE, declared
from tiny_runs import coordinate, run, run_spec, run_to_end, with_settings
from torch import nn

from raysim.api.declarations import Evaluation, Finetune, Local
from raysim.data.arrays import store_arrays
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import IID, Natural
from raysim.data.sources import Markov, Tabular
from raysim.methods.fedprox import FedProx
from raysim.methods.lora_factors import LORA_METHODS
from raysim.methods.scaffold import Scaffold
from raysim.models import Gru, Lora, Mlp, ModelRecipe, Transformer
from raysim.models.split import CustomModel
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSpec

GRU = Gru(embedding=4, width=6)
TRANSFORMER = Transformer(width=8, blocks=1)
LOCAL = Local(lr=0.05, batch=8)
MIXES = {"mixup", "fedmix", "fedbr"}  # Methods that compute sums of inputs.
DATA = {
    "tokens": lambda: federate(
        Markov(users=5, samples=20, test_samples=4, vocabulary=6, length=6, shortest=3),
        Natural(),
        0,
    ),
    "values": lambda: federate(Tabular("diabetes"), IID(clients=5), 0),
    "positions": lambda: federate(store_arrays(labelled_pixels()), IID(clients=5), 0),
}


def labelled_pixels() -> tuple[np.ndarray, np.ndarray]:
    """Return images, float32 [60, 1, 4, 4], and the class of each pixel, [60, 4, 4].

    The class is -100 in the first row of each image: these pixels have no class.
    """
    x = np.random.default_rng(0).normal(size=(60, 1, 4, 4)).astype(np.float32)
    y = np.digitize(x[:, 0], [-0.5, 0.5])
    y[:, 0] = -100
    return x, y


def pixel_classifier(num_classes: int) -> nn.Module:
    return nn.Conv2d(1, num_classes, 3, padding=1)


MODELS: dict[str, ModelRecipe] = {
    "tokens": GRU,
    "values": Mlp((6,)),
    "positions": CustomModel(pixel_classifier),
}
ADAPTED_MODELS: dict[str, ModelRecipe] = {
    "tokens": Transformer(width=8, blocks=1, lora=Lora(rank=2)),
    "values": Mlp((6,), lora=Lora(rank=2)),
}
LACKS = {
    "tokens": {"images", "numbers"},
    "values": {"classes", "images"},
    "positions": {"classes", "features"},
}


@functools.cache
def data(kind: str) -> FederatedData:
    return DATA[kind]()


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("name", TABLE)
def test_method_trains_on_each_task_or_raises_an_error_that_names_the_method(
    name: str, kind: str
) -> None:
    method = TABLE[name].make()
    lacks = LACKS[kind]
    model = MODELS[kind]
    if name in LORA_METHODS:
        model = ADAPTED_MODELS.get(kind, model)
    spec = run_spec(method, model=model, data=data(kind), local=Local(lr=0.05, batch=32))
    if lacks & {*declared(name).needs}:
        with pytest.raises(ValueError, match=f"^method '{method.name}' needs "):
            run(spec)
        return
    try:
        ended = run(spec, rounds=2)
    except ValueError as error:  # of a check of the method's own
        assert re.search(f"method '?{method.name}'?", str(error)) or f"method.{method.name}" in str(
            error
        )
    else:
        assert not ended.failures and ended.rows[-1]["train_loss"] is not None


def test_methods_that_mix_inputs_require_numeric_inputs() -> None:
    assert {name for name in TABLE if "numbers" in declared(name).needs} == MIXES


@pytest.mark.parametrize(
    "model", [GRU, TRANSFORMER, Transformer(width=8, blocks=1, dropout=0.2)], ids=repr
)
def test_runs_on_token_data_are_bit_identical_on_one_and_two_workers(
    model: ModelRecipe, workers: Workers
) -> None:
    spec = run_spec(FedProx(0.1), Scaffold(), model=model, data=data("tokens"), local=LOCAL)
    one_worker = run(spec)
    two_workers = run_to_end(coordinate(spec, runtime=workers.runtime(with_settings(spec), 2)))
    assert not one_worker.failures
    assert two_workers.bits == one_worker.bits
    assert two_workers.history == one_worker.history


def test_adapters_are_sent_without_the_base_model() -> None:
    pytest.importorskip("peft")
    model = Transformer(width=8, blocks=1, lora=Lora(rank=2, layers=["qkv"]))
    ended = run(run_spec(model=model, data=data("tokens"), local=Local(lr=0.3, batch=8)), rounds=6)
    assert ended.coordinator.layout.shared == 2 * (8 + 24) + 8 * 6 + 6  # one adapter, and the head
    assert ended.rows[-1]["loss_global"] < ended.rows[0]["loss_global"]  # type: ignore[operator]


def test_history_of_token_data_has_one_accuracy_column_per_user() -> None:
    spec: RunSpec = run_spec(model=GRU, data=data("tokens"), local=LOCAL)
    row = run(spec).rows[-1]
    assert {
        f"accuracy.user {user}" for user in range(5)
    } <= row.keys() and "accuracy_worst_domain" in row


# --- values ---------------------------------------------------------------------------------
def test_regression_is_scored_by_absolute_or_squared_errors() -> None:
    rows = run(
        run_spec(model=Mlp((6,)), data=data("values"), local=LOCAL), Synchronous(5), rounds=8
    ).rows
    assert not any(key.startswith("accuracy") for key in rows[0])
    assert (
        rows[-1]["mae_worst"] > rows[-1]["mae"] and rows[-1]["mae_global"] < rows[0]["mae_global"]
    )  # type: ignore[operator]
    evaluate = Evaluation(metric="mse")
    rows = run(
        run_spec(model=Mlp((6,)), data=data("values"), local=LOCAL), rounds=1, evaluate=evaluate
    ).rows
    assert rows[0]["mse_global"] == pytest.approx(rows[0]["loss_global"])


def test_regression_refuses_accuracy_and_probes() -> None:
    spec = run_spec(model=Mlp((6,)), data=data("values"), local=LOCAL)
    with pytest.raises(ValueError, match=r"evaluate\.metric=accuracy"):
        run(spec, evaluate=Evaluation(metric="accuracy"))
    with pytest.raises(
        ValueError,
        match=r"evaluate\.probe=1",
    ):
        run(spec, evaluate=Evaluation(probe=1))
    tuned = run(spec, evaluate=Evaluation(finetune=Finetune(1, head=True))).rows[-1]
    assert tuned["mae_finetuned"] is not None
