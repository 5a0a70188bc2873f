"""Read Parquet files. The inputs are pictures, numbers, vectors, text or lists of token ids."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raysim.data.causal import choose_test_documents, read_documents
from raysim.data.columns import (
    are_compatible,
    assemble,
    describe_origin,
    find_inputs,
    group_values,
    label_column,
    label_values,
    read_input_rows,
    read_label_column,
    spread_test_rows,
    values_type,
)
from raysim.data.labels import LabelSet
from raysim.data.pictures import Picture
from raysim.data.raw import Raw
from raysim.data.rows import are_names, join_names, natural_order
from raysim.data.table_source import TableSource
from raysim.primitives.checks import in_range, require
from raysim.primitives.files import existing_file, parse_json, regular_file, user_path
from raysim.primitives.kinds import Kind

ROWS_AT_ONCE = 256  # rows of pictures that are read from a file at once


class ParquetColumns(NamedTuple):
    """The names of the columns that a Parquet source reads, and of the columns that it ignores.

    user: the column of users, which may be missing.
    has_pictures: True if the only input is a column of encoded pictures.
    unused: row numbers or users that are left out of the input. [] for pictures, and if
    `data.columns` names the input.
    """

    inputs: list[str]
    label: str
    user: str
    has_pictures: bool
    unused: list[str]


@dataclass(frozen=True)
class Parquet(TableSource):
    """A source that reads folders with train.parquet and test.parquet.

    A split may also be several files: train-*.parquet or test-*.parquet. Each user is a domain.
    Without a column of users, each folder is a domain.

    root: one such folder, a list of such folders, or a folder that contains them. With several
    folders, the domain of a user is called "FOLDER/USER".
    image_column: the column of encoded pictures, as bytes or as a struct {bytes, path}.
    `data.columns` replaces it.
    label: the column of labels, which must exist. None uses `label_column`.
    label_column: the column of labels if `label` is None. If the default "label" is missing, raysim
    looks for another usual name, such as "y".
    user: the column of users, which must exist. None uses `domain_column`.
    domain_column: the column of users if `user` is None. It may be missing; raysim then looks for a
    usual name, such as "client".
    test_fraction: in a folder without test files, this share of each domain's samples is for
    testing, equally in each class. With None, every folder must have test files.
    """

    root: str | list[str] | None = None
    image_column: str = "image"
    label_column: str = "label"
    domain_column: str = "domain"
    test_fraction: float | None = None
    label: str | None = None
    user: str | None = None

    def check(self) -> None:
        super().check()
        if self.test_fraction is not None:
            in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def with_domains(self, column: str) -> Parquet:
        for path in self.files():
            names = _read_schema(path).names
            if column not in names:
                raise ValueError(
                    f"{path} has no column {column}; its columns are {', '.join(names)}. Set "
                    "partition.column to one of them."
                )
        return replace(self, user=column)

    def files(self) -> list[Path]:
        paths: list[Path] = []
        for folder in self._folders():
            paths += [*split_files(folder, "train"), *split_files(folder, "test")]
        return paths

    def read(self) -> Raw:
        folders = self._folders()
        if self.kind == "causal":
            return self._read_documents(folders)
        paths: list[Path] = []
        test_file_count = 0
        for folder in folders:
            paths += split_files(folder, "train")
        for folder in folders:
            test_files = split_files(folder, "test")
            paths += test_files
            test_file_count += len(test_files)
        columns = self._find_columns(paths[0])
        domain_parts = [self._read_domains(path, columns) for path in paths]
        sizes = [len(part) for part in domain_parts]
        domains, domain_order = join_names(domain_parts), None
        if len(folders) > 1:
            domains, domain_order = _prefix_folders(domain_parts, paths, columns.user)
        labels = self._read_labels(paths, columns.label, str(folders[0]))

        is_test_file = np.arange(len(paths)) >= len(paths) - test_file_count
        is_test = np.repeat(is_test_file, sizes)
        has_no_test_file = [not split_files(path.parent, "test") for path in paths]
        is_unsplit = np.repeat(has_no_test_file, sizes)
        if is_unsplit.any():
            unsplit_labels = labels._replace(values=labels.values[is_unsplit])
            is_test[is_unsplit] = spread_test_rows(
                unsplit_labels, domains[is_unsplit], self.test_fraction or 0.0
            )

        types = _column_types(paths[0])
        user = columns.user if columns.user in types else None
        origin = describe_origin(types, columns.inputs, [columns.label], user, columns.unused)
        if columns.has_pictures:
            rows = np.arange(len(is_test))
            raw = assemble(rows, labels, domains, is_test, None, origin, domain_order)
            return replace(raw, inputs=self._train_first_pictures(paths, is_test, sizes))
        table = pa.concat_tables([_read_columns(path, columns.inputs) for path in paths])
        place = str(folders[0])
        inputs = read_input_rows(table, columns.inputs, self.token_settings, place, self.separate)
        return assemble(
            inputs.values,
            labels,
            domains,
            is_test,
            inputs.tokens,
            origin,
            domain_order,
            inputs.fields,
        )

    def _read_documents(self, folders: list[Path]) -> Raw:
        """Return the samples of files in which each row is a document.

        If there is no column of users but several folders, the documents of a folder belong to one
        user.
        """
        names = _read_schema(split_files(folders[0], "train")[0]).names
        user: str | None = self.user or self.domain_column
        if user not in names and self.user is None:
            user = self.find_users(names)
        tables, user_parts, test_parts = [], [], []
        for folder in folders:
            files = {split: split_files(folder, split) for split in ("train", "test")}
            parts = [_read_columns(path, names) for path in (*files["train"], *files["test"])]
            table = pa.concat_tables(parts)
            users = np.full(len(table), folder.name)
            if user is not None:
                users = group_values(table, user, str(folder), "data.user").astype(np.str_)
                users = np.char.add(f"{folder.name}/", users) if len(folders) > 1 else users
            is_test = choose_test_documents(users, len(table), self.test_fraction or 0.0)
            if files["test"]:
                is_test = np.arange(len(table)) >= sum(map(len, parts[: len(files["train"])]))
            tables.append(table)
            user_parts.append(users)
            test_parts.append(is_test)
        has_users = user is not None or len(folders) > 1
        return read_documents(
            pa.concat_tables(tables),
            user,
            np.concatenate(user_parts) if has_users else None,
            np.concatenate(test_parts),
            self.document_settings,
            str(folders[0]),
        )

    def _find_columns(self, path: Path) -> ParquetColumns:
        """Choose the columns of the inputs, the label and the user.

        Columns that the settings do not name are chosen by their names and types.
        path: the first file.
        Raise ValueError if the column of labels is missing, or if no input can be chosen. Input
        columns that a setting names are not checked: they may be missing.
        """
        types = _column_types(path)
        names = list(types)
        label = label_column(names, self.label, self.label_column, str(path))
        user = self.user or self.domain_column
        if user not in names and self.user is None:
            user = self.find_users(names) or user
        if self.columns is not None:
            return ParquetColumns(self.columns, label, user, False, [])
        if self.image_column in names or self.image_column != "image":
            return ParquetColumns([self.image_column], label, user, True, [])
        for name, kind in types.items():
            if name not in (label, user) and _may_be_pictures(kind):
                raise ValueError(
                    f"{path} has no column {self.image_column}, and column {name} holds {kind}. "
                    f"Set data.image_column={name} if these are pictures, or data.columns to the "
                    "columns of the input."
                )
        inputs, unused = find_inputs(
            None, types, (label, user, self.domain_column), str(path), self.separate
        )
        return ParquetColumns(inputs, label, user, False, unused)

    def _folders(self) -> list[Path]:
        """Return the folders to read: those in `root` that contain Parquet files.

        Raise ValueError if a folder lacks training files, or lacks test files and `test_fraction`
        is None. Also raise it if two folders have the same name.
        """
        if not self.root:
            raise ValueError(
                "data=parquet needs data.root: a folder with train.parquet and test.parquet, or a "
                "list of such folders. Set data.root=PATH."
            )
        if isinstance(self.root, list):
            folders = [user_path(root) for root in self.root]
            names = [folder.name for folder in folders]
            if len(set(names)) < len(names):
                raise ValueError(
                    f"data.root={self.root} lists two paths that end in the same folder name, but "
                    "raysim names each domain after its folder. Rename one of the two folders."
                )
        else:
            root = user_path(self.root)
            folders = [root]
            if root.is_dir() and not split_files(root, "train"):
                inner = sorted(root.iterdir())
                folders = [path for path in inner if split_files(path, "train")] or [root]
        for folder in folders:
            if not split_files(folder, "train"):
                raise ValueError(
                    f"data.root={folder} holds neither train.parquet nor train-*.parquet. Give a "
                    "folder with training files."
                )
            if self.test_fraction is None and not split_files(folder, "test"):
                raise ValueError(
                    f"data.root={folder} holds neither test.parquet nor test-*.parquet. Give a "
                    "folder with test files, or set data.test_fraction."
                )
        return folders

    def _read_domains(self, path: Path, columns: ParquetColumns) -> NDArray[Any]:
        """Return the domain of each row of a file, as integers or text.

        The domain of a row is its user. In a file without a column of users, it is the folder's
        name.
        Raise ValueError if a column of inputs, the column of labels or the column `data.user` is
        missing. Raise it also if a label or a user is empty.
        """
        names = _read_schema(path).names
        input_key = "image_column" if columns.has_pictures else "columns"
        needed = [(column, input_key) for column in columns.inputs]
        needed.append((columns.label, "label" if self.label else "label_column"))
        if self.user:
            needed.append((self.user, "user"))
        for column, key in needed:
            if column not in names:
                raise ValueError(
                    f"{path} has no column {column}; its columns are {', '.join(names)}. Set "
                    f"data.{key} to one of them."
                )
        present = [name for name in names if name in (columns.label, columns.user)]
        table = _read_columns(path, present)
        for name in table.column_names:
            if table[name].null_count:
                raise ValueError(
                    f"{path}: column {name} has empty values. Remove or fill these rows."
                )
        if columns.user not in names:
            return np.full(table.num_rows, path.parent.name)
        domains = group_values(table, columns.user, str(path))
        return domains if domains.dtype.kind in "iu" else domains.astype(np.str_)

    def _read_labels(self, paths: list[Path], label: str, place: str) -> LabelSet:
        _check_label_types(paths, label, self.kind)
        parts = []
        for path in paths:
            parts.append(label_values(_read_columns(path, [label]), label, str(path)))
        values = _join_labels(paths, parts, label)
        names = _read_class_names(paths, label)
        return read_label_column(values, self.kind, names, place, self.ignore)

    def _train_first_pictures(
        self, paths: list[Path], is_test: NDArray[np.bool_], sizes: list[int]
    ) -> Iterator[Picture]:
        """Yield the pictures of all training rows, then the pictures of all test rows.

        paths: the files.
        is_test: the mask of test rows, over the rows of all files.
        sizes: the number of rows of each file.
        """
        masks = np.split(is_test, np.cumsum(sizes)[:-1])
        for path, mask in zip(paths, masks, strict=True):
            if not mask.all():
                yield from itertools.compress(self._read_pictures(path), ~mask)
        for path, mask in zip(paths, masks, strict=True):
            if mask.any():
                yield from itertools.compress(self._read_pictures(path), mask)

    def _read_pictures(self, path: Path) -> Iterator[Picture]:
        kind = _read_schema(path).field(self.image_column).type
        bytes_type = kind
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            bytes_type = kind.field("bytes").type
        if not (pa.types.is_binary(bytes_type) or pa.types.is_large_binary(bytes_type)):
            raise ValueError(
                f"{path}: column {self.image_column} holds {kind}, but pictures must be bytes, or "
                "a struct with the bytes in `bytes`. Set data.image_column to such a column."
            )
        with _readable(path):
            batches = pq.ParquetFile(path).iter_batches(ROWS_AT_ONCE, columns=[self.image_column])
        rows = itertools.count()
        while True:
            with _readable(path):
                batch = next(batches, None)
            if batch is None:
                return
            for value in batch.column(0).to_pylist():
                content = value["bytes"] if isinstance(value, dict) else value
                yield Picture(f"{path}, row {next(rows)}", content)


def split_files(folder: Path, split: str) -> list[Path]:
    """Return the files of a split: <split>.parquet, or else all files <split>-*.parquet.

    folder: the folder that contains the files.
    split: "train" or "test".
    """
    parts = existing_file(folder / f"{split}.parquet")
    return parts or [regular_file(path) for path in sorted(folder.glob(f"{split}-*.parquet"))]


def has_parquet_files(folder: Path) -> bool:
    """Return True if a folder, or a folder directly inside it, has Parquet files for training.

    These files are named train.parquet or train-*.parquet.
    """
    inner = [path for path in folder.iterdir() if path.is_dir()]
    return any(split_files(path, "train") for path in (folder, *inner))


# ---- files ---------------------------------------------------------------------------------------
@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Run a `with` block that reads a Parquet file; turn errors of reading into ValueError.

    path: the file, which the error names.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{path} is not a readable Parquet file ({error}). Download it again."
        ) from error


def _read_schema(path: Path) -> pa.Schema:
    with _readable(path):
        return pq.read_schema(path)


def _read_columns(path: Path, columns: list[str]) -> pa.Table:
    with _readable(path):
        return pq.read_table(path, columns=columns)


def _column_types(path: Path) -> dict[str, pa.DataType]:
    """Return the types of a file's columns by their names."""
    schema = _read_schema(path)
    return dict(zip(schema.names, schema.types, strict=True))


def _may_be_pictures(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_struct)
    return any(bool(test(kind)) for test in tests)


# ---- domains and labels --------------------------------------------------------------------------
def _prefix_folders(
    parts: list[NDArray[Any]], paths: list[Path], user: str
) -> tuple[NDArray[np.str_], list[str] | None]:
    """Return the domain of each row as text, and the sorted names of all domains or None.

    A domain is "FOLDER/USER", or "FOLDER" in a file without users. The names are sorted by folder,
    and in a folder by the user's number. They are None unless all files have users that are
    integers.
    parts: for each file, the user of each row. In a file without users, it is the folder's name.
    user: the column of users.
    """
    # Users of the same name in two folders are different domains.
    names = []
    parts_by_folder: dict[str, list[NDArray[Any]]] = {}
    for part, path in zip(parts, paths, strict=True):
        folder = path.parent.name
        parts_by_folder.setdefault(folder, []).append(part)
        has_column = user in _read_schema(path).names
        names.append(np.char.add(f"{folder}/", part.astype(np.str_)) if has_column else part)
    domains = np.concatenate(names)
    if any(part.dtype.kind not in "iu" for part in parts):
        return domains, None
    order = []
    for folder in sorted(parts_by_folder):
        order += [f"{folder}/{name}" for name in natural_order(join_names(parts_by_folder[folder]))]
    return domains, order


def _check_label_types(paths: list[Path], name: str, kind: Kind | None) -> None:
    """Raise ValueError if two files have different types of labels, such as text and numbers.

    name: the column of labels.
    kind: `data.kind`. For None and "classification", integers and floats are different types,
    because joining them would make class numbers floats.
    """
    first_paths: dict[pa.DataType, Path] = {}
    for path in paths:
        first_paths.setdefault(values_type(_read_schema(path).field(name).type), path)
    separate_floats = kind in (None, "classification")
    for (one, earlier), (other, path) in itertools.combinations(first_paths.items(), 2):
        if are_compatible(one, other, separate_floats):
            continue
        hint = ""
        if are_compatible(one, other, separate_floats=False):
            hint = ", or set data.kind=regression"
        raise ValueError(
            f"{path}: column {name} holds {other}, but the same column of {earlier} holds {one}. "
            f"Use one type in all files{hint}."
        )


def _join_labels(paths: list[Path], parts: list[Any], name: str) -> Any:
    """Join the labels of all files; the result has the type of the first file's labels.

    If each row has one label, this is an array [rows]. Lists of a fixed size become an array
    [rows, size]. Other lists, and dictionaries, stay a list with one item for each row.
    """
    if isinstance(parts[0], list):
        rows: list[Any] = []
        for part in parts:
            rows += part if isinstance(part, list) else part.tolist()
        return rows
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = parts[0].shape[1]
    arrays = []
    for path, part in zip(paths, parts, strict=True):
        for row in part:
            if len(row) != width:
                raise ValueError(
                    f"{path}: column {name} has a list of {len(row)} labels, but lists in "
                    f"{paths[0]} have {width}. Make all lists equally long."
                )
        arrays.append(np.array(part).reshape(len(part), width))
    return np.concatenate(arrays)


def _read_class_names(paths: list[Path], label: str) -> list[str] | None:
    """Return the class names in the files' metadata, which raysim or Hugging Face wrote.

    Return None if no file has class names.
    paths: the files.
    label: the column of labels.
    Raise ValueError if two files have different class names.
    """
    class_names: list[str] | None = None
    for path in paths:
        names = _read_names_of_file(path, label)
        if names and class_names and names != class_names:
            raise ValueError(
                f"{path} names the classes {', '.join(names)}, but earlier files name "
                f"{', '.join(class_names)}. Give all files the same class names."
            )
        class_names = class_names or names
    return class_names


def _read_names_of_file(path: Path, label: str) -> list[str] | None:
    names: list[str] | None
    metadata = _read_schema(path).metadata or {}
    try:
        names = parse_json(metadata.get(b"class_names", b"null"))
        hugging_face = parse_json(metadata.get(b"huggingface", b"{}"))
        features = hugging_face.get("info", {}).get("features", {})
        if names is None:
            names = features.get(label, {}).get("names")
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: its class names cannot be read ({error}). Store them in the file's metadata "
            "as a JSON list of texts without duplicates."
        ) from error
    has_names = names is None or are_names(names)
    return require(f"{path}: its class names", names, has_names, "a list of different texts")
