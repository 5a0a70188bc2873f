"""Read CSV and JSON-lines files, whose columns are inputs, labels and users."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
from numpy.typing import NDArray

from raysim.data.causal import choose_test_documents, read_documents
from raysim.data.columns import (
    assemble,
    describe_origin,
    find_inputs,
    find_label,
    group_values,
    label_values,
    read_input_rows,
    read_label_column,
    spread_test_rows,
    structure_values,
)
from raysim.data.raw import Raw, require_root
from raysim.data.table_source import TableSource
from raysim.primitives.checks import in_range, require
from raysim.primitives.errors import first_line
from raysim.primitives.files import existing_file, regular_file

ONE_BLOCK_BYTES = 2**31 - 1  # types are inferred from a file's first block


@dataclass(frozen=True)
class TextTable(TableSource):
    """A source that reads a file of rows, or a folder with a training file and maybe a test file.

    label: the column of labels; None finds a usual name, such as "label" or "y".
    user: the column of users, which partition=natural makes clients; None finds a usual name, such
    as "user" or "client".
    targets: columns that together are one structured target, in place of a label.
    test_fraction: without a test file, this share of each user's samples is for testing, equally in
    each class.
    """

    root: str | None = None
    label: str | None = None
    user: str | None = None
    targets: list[str] | None = None
    test_fraction: float = 0.2
    option: ClassVar[str] = ""  # what the user chose, such as "data=csv"
    endings: ClassVar[tuple[str, ...]] = ()  # endings of its files; errors name the first one

    def check(self) -> None:
        super().check()
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def with_domains(self, column: str) -> TextTable:
        return replace(self, user=column)

    def files(self) -> list[Path]:
        train_name, test_name = f"train{self.endings[0]}", f"test{self.endings[0]}"
        root = require_root(self.root, self.option, f"a file, or a folder with {train_name}")
        if root.is_file():
            return [root]
        train = self._files_of_split(root, "train")
        test = self._files_of_split(root, "test")
        if len(train) == 1 and len(test) <= 1:
            return [*train, *test]
        what = f"no {train_name}"
        if train or test:
            what = " and ".join(path.name for path in train + test)
        raise ValueError(
            f"data.root={self.root} holds {what}. Give a file, or a folder with one {train_name} "
            f"and perhaps one {test_name}."
        )

    def _files_of_split(self, root: Path, split: str) -> list[Path]:
        paths: list[Path] = []
        for ending in self.endings:
            paths += existing_file(root / f"{split}{ending}")
        return paths

    def read(self) -> Raw:
        paths = self.files()
        place = str(paths[0])
        tables = [self._read_file(path) for path in paths]
        table = _concatenate(tables, paths)
        names = table.column_names
        types = dict(zip(names, table.schema.types, strict=True))
        test_rows = None
        if len(tables) > 1:
            test_rows = np.arange(len(table)) >= len(tables[0])
        if self.kind == "causal":
            return self._read_documents(table, test_rows, place)
        targets = self._target_columns(names, place)
        user = self.user or self.find_users([name for name in names if name not in targets])
        if self.targets:
            values: Any = structure_values(table, targets, place)
        else:
            values = label_values(table, targets[0], place, "data.label")
        labels = read_label_column(values, self.kind, None, place, self.ignore)
        users = None if user is None else group_values(table, user, place, "data.user")
        is_test = test_rows
        if is_test is None:
            is_test = spread_test_rows(labels, users, self.test_fraction)
        known = (*targets, user)
        columns, unused = find_inputs(self.columns, types, known, place, self.separate)
        inputs = read_input_rows(table, columns, self.token_settings, place, self.separate)
        origin = describe_origin(types, columns, targets, user, unused)
        return assemble(
            inputs.values, labels, users, is_test, inputs.tokens, origin, fields=inputs.fields
        )

    def _target_columns(self, names: list[str], place: str) -> list[str]:
        """Return the columns of the target: `data.targets`, or else the column of labels.

        names: the columns of the table.
        place: the name of the file in errors.
        Raise ValueError if `data.targets` and `data.label` are both set. Also raise it if neither
        is set and no column has a usual name for labels.
        """
        if self.targets and self.label:
            raise ValueError(
                f"data.targets={'+'.join(self.targets)} and data.label={self.label} both name the "
                "target. Set one of them to null."
            )
        return self.targets or [self.label or find_label(names, place)]

    def _read_documents(
        self, table: pa.Table, is_test: NDArray[np.bool_] | None, place: str
    ) -> Raw:
        """Return the samples of a table in which each row is a document.

        is_test: bool [rows], True for test rows. None makes `test_fraction` of the documents test
        rows.
        place: the name of the file in errors.
        """
        user = self.user or self.find_users(table.column_names)
        users = None if user is None else group_values(table, user, place, "data.user")
        if is_test is None:
            is_test = choose_test_documents(users, len(table), self.test_fraction)
        return read_documents(table, user, users, is_test, self.document_settings, place)

    def _read_file(self, path: Path) -> pa.Table:
        """Return a file's rows; raise ValueError if it is empty or repeats a column name."""
        try:
            table = self.parse(regular_file(path))
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} cannot be read ({first_line(error).rstrip('.')}). Correct the file."
            ) from error
        names = table.column_names
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{path} has two columns called {name!r}. Rename one.")
        if not table.num_rows:
            raise ValueError(f"{path} has no rows. Add rows, or name another file.")
        return table

    def parse(self, path: Path) -> pa.Table:
        """Return the table in a file, with the types of its columns inferred."""
        raise NotImplementedError


@dataclass(frozen=True)
class Csv(TextTable):
    """A source of comma-separated values with the names of the columns in the first line.

    delimiter: the character between the values of a row.
    Values without quotes are missing if they are empty, or words such as NA, NaN and NULL.
    """

    delimiter: str = ","
    option: ClassVar[str] = "data=csv"
    endings: ClassVar[tuple[str, ...]] = (".csv", ".csv.gz")

    def check(self) -> None:
        super().check()
        require("data.delimiter", self.delimiter, len(self.delimiter) == 1, "one character")

    def parse(self, path: Path) -> pa.Table:
        table = pyarrow.csv.read_csv(
            path,
            pyarrow.csv.ReadOptions(block_size=ONE_BLOCK_BYTES),
            pyarrow.csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False),
        )
        header = table.column_names[0]
        if table.num_columns == 1:
            for mark in ";\t|,":
                if mark in header:
                    raise ValueError(
                        f"{path} has one column, {header!r}. Set data.delimiter={mark!r} if this "
                        "character separates the columns."
                    )
        return table


@dataclass(frozen=True)
class JsonLines(TextTable):
    """A source that reads files with a JSON object in each line.

    All objects have the same keys; lists are vectors or tokens.
    """

    option: ClassVar[str] = "data=jsonl"
    endings: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json", ".jsonl.gz")

    def parse(self, path: Path) -> pa.Table:
        return pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=ONE_BLOCK_BYTES))


def _concatenate(tables: list[pa.Table], paths: list[Path]) -> pa.Table:
    """Return the rows of all files; raise ValueError if two files have different columns.

    tables: the rows of each file.
    paths: the files, for errors.
    """
    for table, path in zip(tables, paths, strict=True):
        if set(table.column_names) != set(tables[0].column_names):
            raise ValueError(
                f"{path} has the columns {', '.join(table.column_names)}, but {paths[0]} has "
                f"{', '.join(tables[0].column_names)}. Give both files the same columns."
            )
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise ValueError(
            f"{paths[-1]} cannot be joined with {paths[0]} ({first_line(error)}). Use the same "
            "column types in both files."
        ) from error
