"""Test data whose samples have several inputs, given as a dictionary or a tuple of arrays.

Also test data frames that are passed to `raysim.run` as data.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from quick_runs import FAST
from tiny_runs import coordinate, run, run_spec, run_to_end, several_workers
from torch import Tensor, nn
from torch.utils.data import Dataset

import raysim
from raysim.api.declarations import Local
from raysim.data.arrays import store_arrays
from raysim.data.federated import federate
from raysim.data.fields import pack_fields
from raysim.data.partition import IID
from raysim.models.packed import UnpackFields, unpack_fields
from raysim.models.split import CustomModel
from raysim.primitives.errors import RefusedError
from raysim.primitives.kinds import InputField, PackedShape

RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(size=(60, 2, 3)).astype(np.float32)
WORDS = RNG.integers(0, 9, (60, 4))
LABELS = (NUMBERS[:, 0, 0] > 0).astype(int) + (WORDS[:, 0] > 4)
INPUTS = {"numbers": NUMBERS, "words": WORDS}


class TwoInputs(nn.Module):
    def __init__(self, input_shape: Any, num_classes: int):
        super().__init__()
        shape = input_shape["numbers"] if isinstance(input_shape, dict) else input_shape[0]
        self.embedding = nn.Embedding(9, 3)
        self.head = nn.Linear(shape[0] * shape[1] + 3, num_classes)

    def forward(self, numbers: Tensor, words: Tensor) -> Tensor:
        assert words.dtype == torch.int64
        return self.head(torch.cat([numbers.flatten(1), self.embedding(words).mean(1)], 1))


# --- rows of several inputs ------------------------------------------------------------------
def test_several_inputs_are_equal_after_packing_and_unpacking() -> None:
    levels = RNG.integers(0, 256, (60, 1, 2, 2)).astype(np.uint8)
    packed, fields = pack_fields({**INPUTS, "picture": levels}, "here")
    numbers, words, picture = unpack_fields(torch.from_numpy(packed), fields)
    assert torch.equal(numbers, torch.from_numpy(NUMBERS))
    assert torch.equal(words, torch.from_numpy(WORDS))
    assert torch.equal(picture, torch.from_numpy(levels) / 255)
    shape = PackedShape(fields)
    copy = pickle.loads(pickle.dumps(shape))
    assert copy == (6 + 4 + 4,) and copy.fields == fields
    assert shape.arguments == {"numbers": (2, 3), "words": (4,), "picture": (1, 2, 2)}


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"a": NUMBERS, "b": WORDS[:5]}, "b: .*5 rows"),
        ({"a": WORDS - 1}, "a: integers"),
        ({"a": WORDS + 2**24}, "a: integers"),
        ((NUMBERS, np.array(["x"] * 60)), "input 1: .*type"),
    ],
)
def test_packing_refuses_an_input_with_a_wrong_length_or_type_or_value(
    inputs: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        pack_fields(inputs, "here")


def test_hook_unpacks_a_packed_tensor_into_arguments_of_the_network() -> None:
    hook = UnpackFields((InputField("a", (2,)), InputField("b", (1,), True)))
    network = nn.Identity()
    assert hook(network, (torch.ones(3, 2), torch.ones(3)), {}) is None
    assert hook(network, (torch.ones(3, 4),), {}) is None
    _, arguments = hook(network, (torch.ones(3, 3),), {})  # type: ignore[misc]
    assert arguments["a"].shape == (3, 2) and arguments["b"].dtype == torch.int64


# --- runs ------------------------------------------------------------------------------------
class Items(Dataset[Any]):
    """A data set whose samples have two inputs and a label.

    form: the type of a sample. "dictionary" is {"numbers": ..., "words": ..., "label": ...}, "pair"
    is ({"numbers": ..., "words": ...}, label), and "tuple" is ((numbers, words), label).
    """

    def __init__(self, form: str):
        self.form = form

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, row: int) -> Any:
        inputs = {name: values[row] for name, values in INPUTS.items()}
        if self.form == "dictionary":
            return {**inputs, "label": int(LABELS[row])}
        if self.form == "pair":
            return inputs, int(LABELS[row])
        return (torch.from_numpy(inputs["numbers"]), inputs["words"]), int(LABELS[row])


@pytest.mark.parametrize(
    "data",
    [
        (INPUTS, LABELS),
        ((NUMBERS, WORDS), LABELS),
        {"train": (INPUTS, LABELS), "test": (INPUTS, LABELS)},
        Items("dictionary"),
        Items("pair"),
        Items("tuple"),
    ],
    ids=["dictionary", "tuple", "halves", "items", "pairs", "tuples"],
)
def test_data_with_several_inputs_are_packed_for_a_custom_network(data: Any) -> None:
    experiment = raysim.build(**FAST, model=TwoInputs, data=data)
    assert isinstance(experiment.spec.task.shape, PackedShape)
    dataset = experiment.spec.data.open()
    assert "2 inputs" in dataset.columns and dataset.num_classes == 3


def test_trained_network_with_several_inputs_gives_the_predictions_of_its_run(
    tmp_path: Path,
) -> None:
    settings = {**FAST, "rounds": 12, "local.lr": 0.3, "local.epochs": 5}
    data = ((INPUTS, LABELS), (INPUTS, LABELS))
    result = raysim.run(**settings, model=TwoInputs, data=data, out=tmp_path / "run", quiet=True)
    assert result.rows[-1]["accuracy_global"] > 0.6
    network = result.model()
    numbers, words = torch.from_numpy(NUMBERS), torch.from_numpy(WORDS)
    with torch.no_grad():
        outputs = network(numbers=numbers, words=words)
    assert torch.allclose(outputs, torch.from_numpy(result.predictions().scores), atol=1e-5)


def test_run_with_several_inputs_is_bit_identical_on_one_and_two_workers() -> None:
    data = federate(store_arrays(((INPUTS, LABELS), (INPUTS, LABELS))), IID(clients=4), 0)
    spec = run_spec(model=CustomModel(TwoInputs), data=data, local=Local(lr=0.2, batch=8))
    one = run(spec, rounds=3)
    two = run_to_end(coordinate(spec, rounds=3, runtime=several_workers(spec, 2)))
    assert one.bits == two.bits and one.history == two.history


def test_error_of_a_list_of_dictionaries_suggests_a_dictionary_of_arrays() -> None:
    rows = [{"age": 1.0, "size": 2.0}] * len(LABELS)
    with pytest.raises(RefusedError, match='"age": array'):
        raysim.build(**FAST, model=TwoInputs, data=(rows, LABELS))


@pytest.mark.parametrize(
    ("words", "model", "text"),
    [
        ("", "mlp", "takes one input"),
        ("", "small_cnn", "takes one input"),
        ("method=mixup", TwoInputs, "mixup"),
        ("data.mean=[0.5] data.std=[1.0]", TwoInputs, r"data\.mean"),
    ],
)
def test_settings_that_need_a_single_input_are_refused(words: str, model: Any, text: str) -> None:
    with pytest.raises(RefusedError, match=text):
        raysim.build(words, **FAST, model=model, data=(INPUTS, LABELS))


def test_label_noise_does_not_change_the_shapes_of_several_inputs() -> None:
    experiment = raysim.build(
        "data.label_noise=0.5", **FAST, model=TwoInputs, data=(INPUTS, LABELS)
    )
    dataset = experiment.spec.data.open()
    assert isinstance(dataset.shape, PackedShape) and dataset.shape.fields[1].name == "words"


def test_error_of_an_item_without_a_label_names_its_keys() -> None:
    class Unlabelled(Items):
        def __getitem__(self, row: int) -> Any:
            return {"picture": NUMBERS[row], "kind": 1}

    with pytest.raises(RefusedError, match=r"item 0 .*picture, kind.*without label"):
        raysim.build(**FAST, model=TwoInputs, data=Unlabelled("dictionary"))


# --- tables from Python ----------------------------------------------------------------------
def frame() -> pd.DataFrame:
    table = pd.DataFrame(NUMBERS.reshape(60, -1), columns=list("abcdef"))
    return table.assign(kind=np.where(LABELS > 1, "high", "low"), branch=np.arange(60) % 4)


def polars_frame() -> Any:
    return pytest.importorskip("polars").from_pandas(frame())


def hugging_face() -> Any:
    return pytest.importorskip("datasets").Dataset.from_pandas(frame())


@pytest.mark.parametrize(
    "make",
    [frame, lambda: pa.Table.from_pandas(frame()), polars_frame, hugging_face],
    ids=["pandas", "arrow", "polars", "datasets"],
)
def test_data_frames_are_accepted_as_data(make: Any) -> None:
    words = "data.label=kind data.user=branch data.columns=a+b+c model=mlp partition=natural"
    settings = {key: value for key, value in FAST.items() if not key.startswith("partition")}
    experiment = raysim.build(words, **settings, data=make())
    dataset = experiment.spec.data.open()
    assert dataset.class_names == ["high", "low"] and dataset.shape == (3,)
    assert len(experiment.spec.data.partition.train) == 4 and len(dataset) == 60
    assert experiment.config["data"]["_target_"] == "raysim.data.parquet.Parquet"
    again = raysim.build(experiment.config)  # the table is in the cache
    assert again.spec.data.open().path == dataset.path


def test_data_frame_under_the_dictionary_key_test_becomes_the_central_test_set() -> None:
    data = {"train": frame(), "test": frame()[:7]}
    words = "data.label=kind data.columns=a+b model=mlp"
    experiment = raysim.build(words, **FAST, data=data)
    assert len(experiment.spec.data.central) == 7
