"""Numbers in place of pictures: scikit-learn's tables, and NumPy archives of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raysim.data.columns import assembled, spread
from raysim.data.labels import labels_of
from raysim.data.raw import Origin, Raw, Source
from raysim.data.values import plain_array, type_name
from raysim.primitives.checks import in_range, one_of
from raysim.primitives.files import existing_file, regular_file, user_path
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
        labels = labels_of(
            table.target, "regression" if values else "classification", names, self.name
        )
        test = spread(labels, None, self.test_fraction)
        target = _standard(labels[0], ~test) if values else labels[0]
        return assembled(_standard(table.data, ~test), (target, *labels[1:]), None, test, None)


def _standard(values: NDArray[Any], train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Columns with mean 0 and deviation 1 over the training rows; constant ones become 0."""
    mean, deviation = values[train].mean(axis=0), values[train].std(axis=0)
    standard: NDArray[np.float32] = (
        (values - mean) / np.where(deviation > 0, deviation, 1.0)
    ).astype(np.float32)
    return standard


@dataclass(frozen=True)
class NumPy(Source):
    """NumPy arrays of any shape: root/train.npz with x [n, ...], y and, where there are some, user [n]; test.npz alike.

    x: uint8 levels (images are [n, channels, height, width]), floats, or integers, which are token numbers; `padding`
    fills short sequences up. y: labels [n] or [n, outputs], see `labels.inferred_kind`. user: whose sample it is, for
    partition=natural. Without test.npz, `test_fraction` of the rows is for testing.
    """

    root: str | None = None
    padding: int = 0
    test_fraction: float = 0.2

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        root = user_path(self.root or "")
        if not self.root or not (root / "train.npz").is_file():
            hint = (
                "; data=npz reads one file for each client"
                if self.root and _numbered(root / "train")
                else ""
            )
            raise ValueError(
                f"data.root={self.root} holds no train.npz: name a folder that has it, with x and y in it{hint}."
            )
        return [root / "train.npz", *existing_file(root / "test.npz")]

    def read(self) -> Raw:
        paths = self.files()
        parts = [_arrays(path) for path in paths]
        place = str(user_path(self.root or ""))
        whole = _concatenated(parts, [path.name for path in paths], place)
        test = np.arange(len(whole["y"])) >= len(parts[0]["y"])
        split = None if len(parts) == 1 else test
        return _assembled(whole, split, self.test_fraction, self.kind, self.padding, place)


@dataclass(frozen=True)
class Npz(Source):
    """One NumPy archive for each client: root/train/0.npz, 1.npz, ... and perhaps root/test/0.npz, ..., as PFLlib's.

    Each holds x [n, ...] and y, as `NumPy` describes them. The name of a file is the user of its rows, and
    partition=natural makes each a client. Without the folder test, `test_fraction` of each user's rows is for testing.
    """

    root: str | None = None
    padding: int = 0
    test_fraction: float = 0.2

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        root = user_path(self.root or "")
        train = _numbered(root / "train") if self.root else []
        if not train:
            hint = (
                "; data=numpy reads train.npz"
                if self.root and (root / "train.npz").is_file()
                else ""
            )
            raise ValueError(
                f"data.root={self.root} holds no train/0.npz, train/1.npz, ...: name the folder with train and test, "
                f"which have a file for each client{hint}."
            )
        return train + _numbered(root / "test")

    def read(self) -> Raw:
        paths = self.files()
        place = str(user_path(self.root or ""))
        parts = [_arrays(path) for path in paths]
        names = [f"{path.parent.name}/{path.name}" for path in paths]
        stems = [path.stem for path in paths]
        are_numbers = all(
            stem.isascii() and stem.isdecimal() and str(int(stem)) == stem for stem in stems
        )
        for part, stem in zip(parts, stems, strict=True):
            part["user"] = np.full(len(part["y"]), int(stem) if are_numbers else stem)
        filled = [number for number, part in enumerate(parts) if len(part["y"])]
        if not filled:
            raise ValueError(f"data.root={self.root} holds no samples in any file: put some there.")
        parts, names = [parts[number] for number in filled], [names[number] for number in filled]
        whole = _concatenated(parts, names, place)
        test = np.repeat(
            [name.startswith("test/") for name in names], [len(part["y"]) for part in parts]
        )
        return _assembled(
            whole, test if test.any() else None, self.test_fraction, self.kind, self.padding, place
        )


def _numbered(folder: Path) -> list[Path]:
    """Return the archives in a folder: by their number, then by name."""
    paths = folder.glob("*.npz") if folder.is_dir() else []
    return sorted(
        map(regular_file, paths),
        key=lambda path: (not path.stem.isdecimal(), len(path.stem), path.stem),
    )


def _assembled(
    whole: Mapping[str, NDArray[Any]],
    test: NDArray[np.bool_] | None,
    test_fraction: float,
    kind: Kind | None,
    padding: int,
    place: str,
) -> Raw:
    inputs, users = whole["x"], whole.get("user")
    labels = labels_of(whole["y"], kind, None, place)
    if test is None:
        test = spread(labels, users, test_fraction)
    tokens = None
    if inputs.dtype.kind in "iu" and inputs.dtype != np.uint8 and inputs.size:
        tokens = Tokens(max(int(inputs.max()), padding) + 1, padding)
    origin = Origin(
        f"x ({inputs.dtype})", f"y ({type_name(whole['y'])})", "" if users is None else "user"
    )
    return assembled(inputs, labels, users, test, tokens, origin)


def _concatenated(
    parts: Sequence[Mapping[str, NDArray[Any]]], names: Sequence[str], place: str
) -> dict[str, Any]:
    """Return the arrays of all archives as one. Raise ValueError where types, shapes or keys differ."""
    whole: dict[str, NDArray[Any]] = {}
    first = names[0]
    for key in parts[0]:
        for part, name in zip(parts, names, strict=True):
            if key not in part:
                raise ValueError(
                    f"{place}: {first} has {key}, and {name} has none: write it to both."
                )
            types = parts[0][key].dtype, part[key].dtype
            if _meaning(key, types[0]) != _meaning(key, types[1]):
                raise ValueError(
                    f"{place}: {key} of {first} is {types[0]} and of {name} {types[1]}: write both in one type."
                )
            shapes = parts[0][key].shape[1:], part[key].shape[1:]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"{place}: {key} of {first} has rows of shape {list(shapes[0])} and of {name} {list(shapes[1])}: "
                    "make them alike."
                )
        whole[key] = np.concatenate([part[key] for part in parts])
    return whole


def _meaning(key: str, dtype: np.dtype[Any]) -> str:
    """What a type stands for: levels, numbers of classes or tokens, values, or texts."""
    if key == "x" and dtype == np.uint8:
        return "levels"
    return "integers" if dtype.kind in "iub" else dtype.kind


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            names = list(file)
            arrays = {key: file[key] for key in ("x", "y", "user") if key in names}
    except Exception as error:  # a damaged archive fails in many ways
        reason = "it holds Python objects" if "allow_pickle" in str(error) else str(error)
        raise ValueError(
            f"{path} is no readable NumPy archive ({reason}): write arrays of numbers or text with numpy.savez."
        ) from error
    if "data" in names and not arrays:
        raise ValueError(
            f"{path} holds a pickled object, data, and raysim unpickles nothing, because a pickle can run any program: "
            'convert a file that you trust with d = numpy.load(path, allow_pickle=True)["data"].item(); '
            'numpy.savez(path, x=d["x"], y=d["y"]).'
        )
    for key in ("x", "y"):
        if key not in arrays:
            raise ValueError(
                f"{path} has no array {key}: write it with numpy.savez(path, x=inputs, y=labels)."
            )
    arrays = {
        key: plain_array(array, f"{path}: the values of {key}") for key, array in arrays.items()
    }
    if len({len(array) for array in arrays.values()}) > 1:
        sizes = ", ".join(f"{key} {len(array)}" for key, array in arrays.items())
        raise ValueError(
            f"{path} has arrays of different lengths ({sizes}): they need a row per sample."
        )
    return arrays
