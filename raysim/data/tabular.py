"""Read tables of scikit-learn and the user's NumPy archives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from raysim.data.columns import assemble, read_label_column, spread_test_rows
from raysim.data.fields import pack_fields
from raysim.data.labels import read_labels
from raysim.data.raw import Origin, Raw, Source, require_root
from raysim.data.values import plain_array, type_name
from raysim.primitives.checks import in_range, one_of
from raysim.primitives.files import existing_file, regular_file
from raysim.primitives.kinds import Kind, Tokens

TableName: TypeAlias = Literal["breast_cancer", "wine", "diabetes"]

ARRAY_NAMES = ("x", "y", "user")  # of a NumPy archive
INPUT, TARGET = "x.", "y."  # start of the names of several inputs, and of the parts of a target
ROWS = ".rows"  # end of the name of the number of rows that each sample has in a part of a target


@dataclass(frozen=True)
class Tabular(Source):
    """A source of a scikit-learn table; columns are scaled to mean 0 and standard deviation 1.

    The training rows give the scale. The labels of breast_cancer and wine are classes. The label of
    diabetes is a value, which is scaled like the columns.
    name: "breast_cancer", "wine" or "diabetes".
    test_fraction: the share of samples for testing. The same share is taken from each class.
    """

    name: TableName
    test_fraction: float = 0.2

    def check(self) -> None:
        one_of("data.name", self.name, get_args(TableName))
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def read(self) -> Raw:
        from sklearn import datasets

        table = getattr(datasets, f"load_{self.name}")()
        if self.name == "diabetes":
            labels = read_labels(table.target, "regression", ["progression"], self.name)
        else:
            names = [str(name) for name in table.target_names]
            labels = read_labels(table.target, "classification", names, self.name)
        is_test = spread_test_rows(labels, None, self.test_fraction)
        if labels.kind == "regression":
            labels = labels._replace(values=_standardise(labels.values, ~is_test))
        return assemble(_standardise(table.data, ~is_test), labels, None, is_test, None)


def _standardise(values: NDArray[Any], is_train: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Scale columns to mean 0 and deviation 1 over the training rows; constant columns become 0.

    values: [n, columns].
    is_train: [n], True for training rows.
    """
    mean, deviation = values[is_train].mean(axis=0), values[is_train].std(axis=0)
    scaled = (values - mean) / np.where(deviation > 0, deviation, 1.0)
    standard: NDArray[np.float32] = scaled.astype(np.float32)
    return standard


@dataclass(frozen=True)
class NumPy(Source):
    """A source of NumPy arrays of any shape: root/train.npz and optionally root/test.npz.

    Each file has these arrays:
    - x [n, ...]: the inputs. They are uint8 levels (images are [n, channels, height, width]),
      floats, or token numbers (all other integers).
    - y [n] or [n, ...]: the labels; `data.kind` or `labels.infer_kind` decides what they mean.
    - user [n]: the users, for partition=natural; this array may be missing.

    Several inputs are arrays x.NAME, and several targets are arrays y.NAME. A target may have a
    different number of entries in each sample. Then y.NAME has all entries one after another, and
    y.NAME.rows [n] has the number of each sample.

    padding: the token number with which the files already fill up short sequences.
    test_fraction: without test.npz, this share of each user's samples is for testing, equally in
    each class.
    """

    root: str | None = None
    padding: int = 0
    test_fraction: float = 0.2

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        root = require_root(self.root, "data=numpy", "a folder with train.npz")
        if not (root / "train.npz").is_file():
            action = "Set data.root to a folder with this file"
            if _numbered_archives(root / "train"):
                action += ", or set data=npz, which reads one file for each client"
            raise ValueError(f"data.root={self.root} has no file train.npz. {action}.")
        return [root / "train.npz", *existing_file(root / "test.npz")]

    def read(self) -> Raw:
        paths = self.files()
        archives = [_read_archive(path) for path in paths]
        place = str(paths[0].parent)
        arrays = _concatenate(archives, [path.name for path in paths], place)
        is_test = None
        if len(archives) > 1:
            is_test = np.arange(_count_samples(arrays)) >= _count_samples(archives[0])
        return _assemble(
            arrays, is_test, self.test_fraction, self.kind, self.ignore, self.padding, place
        )


@dataclass(frozen=True)
class Npz(Source):
    """A source with one NumPy archive for each client, in the layout of PFLlib.

    The files are root/train/0.npz, 1.npz, ... and root/test/0.npz, .... Each has inputs x [n, ...]
    and labels y [n] or [n, outputs]. Inputs are uint8 levels, floats, or token numbers (all other
    integers). Each number is a user, which partition=natural makes a client.
    padding: the token number with which the files already fill up short sequences.
    test_fraction: without test files, this share of each user's samples is for testing, equally in
    each class.
    """

    root: str | None = None
    padding: int = 0
    test_fraction: float = 0.2

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        content = "a folder with train/0.npz, train/1.npz, ..., one file for each client"
        root = require_root(self.root, "data=npz", content)
        train = _numbered_archives(root / "train")
        if not train:
            action = "Set data.root to a folder that has such a file for each client"
            if (root / "train.npz").is_file():
                action += ", or set data=numpy, which reads train.npz"
            raise ValueError(
                f"data.root={self.root} has no files train/0.npz, train/1.npz and so on. {action}."
            )
        return train + _numbered_archives(root / "test")

    def read(self) -> Raw:
        paths = self.files()
        place = str(paths[0].parents[1])
        stems = [path.stem for path in paths]
        are_numbers = all(_is_plain_number(stem) for stem in stems)
        archives, names = [], []
        for path in paths:
            archive = _read_archive(path)
            user = int(path.stem) if are_numbers else path.stem
            count = _count_samples(archive)
            archive["user"] = np.full(count, user)
            if count:
                archives.append(archive)
                names.append(f"{path.parent.name}/{path.name}")
        if not archives:
            raise ValueError(
                f"data.root={self.root} has only files without samples. Set data.root to a folder "
                "whose files have samples."
            )
        arrays = _concatenate(archives, names, place)
        sizes = [_count_samples(archive) for archive in archives]
        is_test = np.repeat([name.startswith("test/") for name in names], sizes)
        return _assemble(
            arrays,
            is_test if is_test.any() else None,
            self.test_fraction,
            self.kind,
            self.ignore,
            self.padding,
            place,
        )


def _is_plain_number(text: str) -> bool:
    """Return True for texts like "0" and "12"; False for "07", "-1" and "a"."""
    return text.isascii() and text.isdecimal() and str(int(text)) == text


def _numbered_archives(folder: Path) -> list[Path]:
    """Return the archives in a folder: 0.npz, 1.npz, ... by number, then those with other names."""
    if not folder.is_dir():
        return []
    paths = [regular_file(path) for path in folder.glob("*.npz")]
    return sorted(paths, key=lambda path: (not path.stem.isdecimal(), len(path.stem), path.stem))


def _assemble(
    arrays: Mapping[str, NDArray[Any]],
    is_test: NDArray[np.bool_] | None,
    test_fraction: float,
    kind: Kind | None,
    ignore: int | str,
    padding: int,
    place: str,
) -> Raw:
    """Return the samples that the arrays of an archive describe.

    arrays: the arrays, by name.
    is_test: the mask of test rows. None chooses a share `test_fraction` of each user's rows.
    kind, ignore, padding: `data.kind`, `data.ignore` and `data.padding`.
    place: the name of the data in errors.
    """
    users = arrays.get("user")
    values = arrays["y"] if "y" in arrays else _read_targets(arrays, place)
    labels = read_label_column(values, kind, None, place, ignore)
    if is_test is None:
        is_test = spread_test_rows(labels, users, test_fraction)
    label_origin = f"y ({type_name(arrays['y'])})" if "y" in arrays else ""
    user_origin = "" if users is None else "user"
    if "x" not in arrays:
        columns = {
            key.removeprefix(INPUT): array for key, array in arrays.items() if key.startswith(INPUT)
        }
        inputs, fields = pack_fields(columns, place)
        origin = Origin("", label_origin, user_origin)
        return assemble(inputs, labels, users, is_test, None, origin, fields=fields)
    inputs = arrays["x"]
    tokens = None
    if inputs.dtype.kind in "iu" and inputs.dtype != np.uint8 and inputs.size:
        tokens = Tokens(max(int(inputs.max()), padding) + 1, padding)
    origin = Origin(f"x ({inputs.dtype})", label_origin, user_origin)
    return assemble(inputs, labels, users, is_test, tokens, origin)


def _count_samples(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the number of samples in an archive: the length of its first input."""
    return next(len(array) for key, array in arrays.items() if _is_input(key))


def _is_input(key: str) -> bool:
    return key == "x" or key.startswith(INPUT)


def _read_targets(arrays: Mapping[str, NDArray[Any]], place: str) -> list[dict[str, Any]]:
    """Return for each sample a dictionary of its targets, from the arrays named y.NAME.

    place: the name of the data in errors.
    """
    parts: dict[str, Any] = {}
    for key, values in arrays.items():
        if not key.startswith(TARGET) or key.endswith(ROWS):
            continue
        rows = arrays.get(f"{key}{ROWS}")
        if rows is not None:
            are_counts = rows.ndim == 1 and rows.dtype.kind in "iu" and rows.min(initial=0) >= 0
            if not are_counts or int(rows.sum()) != len(values):
                raise ValueError(
                    f"{place}: {key}{ROWS} must hold an integer for each sample: the number of "
                    f"rows of {key} that belong to the sample. Write integers whose sum is "
                    f"{len(values)}, the number of rows of {key}."
                )
            parts[key.removeprefix(TARGET)] = np.split(values, np.cumsum(rows)[:-1])
        else:
            parts[key.removeprefix(TARGET)] = list(values)
    return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]


def _concatenate(
    archives: Sequence[Mapping[str, NDArray[Any]]], names: Sequence[str], place: str
) -> dict[str, NDArray[Any]]:
    """Concatenate the arrays that have the same name in all archives; return them by name.

    Raise ValueError if an archive lacks an array of the first one. Raise it also if arrays of one
    name differ in the kind of values (integers, floats, ...) or in the shape of a row.
    names: the archives' file names, for errors.
    """
    first, first_name = archives[0], names[0]
    for archive, name in zip(archives, names, strict=True):
        for key in first:
            if key not in archive:
                raise ValueError(
                    f"{place}: {first_name} has the array {key}, but {name} does not. Write this "
                    "array to both files."
                )
            if _value_kind(key, first[key].dtype) != _value_kind(key, archive[key].dtype):
                raise ValueError(
                    f"{place}: {key} of {first_name} has the type {first[key].dtype}, but {key} of "
                    f"{name} has {archive[key].dtype}. Write both in one type."
                )
            shape, other_shape = first[key].shape[1:], archive[key].shape[1:]
            if shape != other_shape:
                raise ValueError(
                    f"{place}: {key} of {first_name} has rows of shape {list(shape)}, but {key} of "
                    f"{name} has {list(other_shape)}. Give both the same shape."
                )
    joined = {}
    for key in first:
        joined[key] = np.concatenate([archive[key] for archive in archives])
    return joined


def _value_kind(key: str, dtype: np.dtype[Any]) -> str:
    """Describe which kind of values an array has: levels of pixels, integers, floats or text.

    key: the name of the array; only arrays of inputs can have levels of pixels.
    dtype: the type of its values.
    """
    if _is_input(key) and dtype == np.uint8:
        return "levels"
    return "integers" if dtype.kind in "iub" else dtype.kind


def _read_archive(path: Path) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            names = list(file)
            used = [key for key in names if key in ARRAY_NAMES or key.startswith((INPUT, TARGET))]
            arrays = {key: file[key] for key in used}
    except Exception as error:  # a damaged archive can raise any error
        reason = "it holds Python objects" if "allow_pickle" in str(error) else str(error)
        raise ValueError(
            f"{path} is not a readable NumPy archive ({reason}). Write arrays of numbers or text "
            "with numpy.savez."
        ) from error
    if "data" in names and not arrays:
        raise ValueError(
            f"{path} has an array called 'data', but none called 'x'. PFLlib stores data as a "
            "pickled object, which raysim never reads, because a pickle can run any program. If "
            "you trust the file, convert it with "
            'd = numpy.load(path, allow_pickle=True)["data"].item(); '
            'numpy.savez(path, x=d["x"], y=d["y"]).'
        )
    for key, start in (("x", INPUT), ("y", TARGET)):
        parts = [name for name in arrays if name.startswith(start)]
        if key not in arrays and not parts:
            raise ValueError(
                f"{path} has no array {key}. Write it with numpy.savez(path, x=inputs, y=labels)."
            )
        if key in arrays and parts:
            raise ValueError(
                f"{path} has an array {key} and an array {parts[0]}, which would be a part of "
                f"{key}. Store only the array {key}, or only arrays whose names begin with "
                f"'{start}'."
            )
    for key, array in arrays.items():
        arrays[key] = plain_array(array, f"{path}: the values of {key}")
    ragged = {key for key in arrays if f"{key}{ROWS}" in arrays}
    lengths = {key: len(array) for key, array in arrays.items() if key not in ragged}
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise ValueError(
            f"{path} has arrays of different lengths ({sizes}). Give each array one row per sample."
        )
    return arrays
