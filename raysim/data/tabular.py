"""Numbers in place of pictures: scikit-learn's tables, and arrays of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raysim.data.columns import assembled, labels_of, spread
from raysim.data.raw import Raw, Source
from raysim.primitives.checks import in_range, one_of
from raysim.primitives.files import if_there, user_path
from raysim.primitives.kinds import Kind, Tokens

TABLES = ("breast_cancer", "wine", "diabetes")


@dataclass(frozen=True)
class Tabular(Source):
    """A table that comes with scikit-learn, every column (and the values to tell) brought to mean 0 and deviation 1.

    breast_cancer and wine have classes, diabetes a value: the course of the disease, of which errors are in units of
    its deviation. `test_fraction` of each class is for testing. Means and deviations are of the training rows.
    """

    name: Literal["breast_cancer", "wine", "diabetes"]
    test_fraction: float = 0.2

    def check(self) -> None:
        one_of("data.name", self.name, TABLES)
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def read(self) -> Raw:
        from sklearn import datasets

        table = getattr(datasets, f"load_{self.name}")()
        values = self.name == "diabetes"
        names = ["progression"] if values else [str(name) for name in table.target_names]
        labels = labels_of(table.target, None, names, self.name)
        test = spread(labels, None, self.test_fraction)
        target = _standard(labels[0], ~test) if values else labels[0]
        return assembled(_standard(table.data, ~test), (target, *labels[1:]), None, test, None)


def _standard(values: NDArray[Any], train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Columns with mean 0 and deviation 1 over the training rows; constant ones become 0."""
    mean, deviation = values[train].mean(axis=0), values[train].std(axis=0)
    standard: NDArray[np.float32] = ((values - mean) / np.where(deviation > 0, deviation, 1.0)).astype(np.float32)
    return standard


@dataclass(frozen=True)
class NumPy(Source):
    """NumPy arrays of any shape: root/train.npz with x [n, ...], y and, where there are some, user [n]; test.npz alike.

    x: uint8 levels (images are [n, channels, height, width]), floats, or integers, which are token numbers; `padding`
    fills short sequences up. y: integers or texts [n] are classes, floats values, integers [n, labels] several labels;
    `kind` says otherwise. user: whose sample it is, for partition=natural. Without test.npz, `test_fraction` of the
    rows is for testing.
    """

    root: str | None = None
    kind: Kind | None = None
    padding: int = 0
    test_fraction: float = 0.2

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        root = user_path(self.root or "")
        if not self.root or not (root / "train.npz").is_file():
            raise ValueError(
                f"data.root={self.root} holds no train.npz: name a folder that has it, with x and y in it."
            )
        return [root / "train.npz", *if_there(root / "test.npz")]

    def read(self) -> Raw:
        parts = [_arrays(path) for path in self.files()]
        place = str(user_path(self.root or ""))
        whole: dict[str, NDArray[Any]] = {}
        for key in parts[0]:
            types = [part[key].dtype for part in parts if key in part]
            if len({_meaning(key, each) for each in types}) > 1:
                raise ValueError(
                    f"{place}: {key} of train.npz is {types[0]} and of test.npz {types[1]}: write both in one type."
                )
            try:
                whole[key] = np.concatenate([part[key] for part in parts])
            except (KeyError, ValueError) as error:
                raise ValueError(f"{place}: {key} of train.npz and test.npz do not fit together ({error}).") from error
        inputs, users = whole["x"], whole.get("user")
        labels = labels_of(whole["y"], self.kind, None, place)
        test = np.arange(len(whole["y"])) >= len(parts[0]["y"])
        if len(parts) == 1:
            test = spread(labels, users, self.test_fraction)
        tokens = None
        if inputs.dtype.kind in "iu" and inputs.dtype != np.uint8 and inputs.size:
            tokens = Tokens(max(int(inputs.max()), self.padding) + 1, self.padding)
        return assembled(inputs, labels, users, test, tokens)


def _meaning(key: str, dtype: np.dtype[Any]) -> str:
    """What a type stands for: levels, numbers of classes or tokens, values, or texts."""
    if key == "x" and dtype == np.uint8:
        return "levels"
    return "integers" if dtype.kind in "iub" else dtype.kind


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in ("x", "y", "user") if key in file}
    except Exception as error:  # a damaged archive fails in many ways
        raise ValueError(f"{path} is no readable NumPy archive ({error}): write it with numpy.savez.") from error
    for key in ("x", "y"):
        if key not in found:
            raise ValueError(f"{path} has no array {key}: write it with numpy.savez(path, x=inputs, y=labels).")
    if len({len(array) for array in found.values()}) > 1:
        sizes = ", ".join(f"{key} {len(array)}" for key, array in found.items())
        raise ValueError(f"{path} has arrays of different lengths ({sizes}): they need a row per sample.")
    return found
