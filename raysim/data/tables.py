"""Tables as text, CSV and JSON lines, whose columns are inputs, labels and users."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from raysim.data.columns import (
    USER_NAMES,
    assembled,
    column_of,
    find_column,
    find_inputs,
    find_label,
    inputs_of,
    integers_or_text,
    origin_of,
    spread,
)
from raysim.data.labels import labels_of
from raysim.data.raw import Raw, Source
from raysim.primitives.checks import at_least, in_range, require
from raysim.primitives.errors import first_line
from raysim.primitives.files import existing_file, regular_file, user_path

ONE_BLOCK = 2**31 - 1  # bytes: types are inferred from a file's first block


@dataclass(frozen=True)
class Table(Source):
    """A file of rows, or a folder with a file of training rows and perhaps one of test rows.

    label and user name the columns of labels and of users (clients, with partition=natural); None: a column that is
    called so (`LABEL_NAMES`, `USER_NAMES`). columns: what is the input; None: all other columns. Without a file of
    test rows, `test_fraction` of each class of each user is for testing. `length`, `padding`, `tokenizer`: see
    `inputs_of`.
    """

    root: str | None = None
    columns: list[str] | None = None
    label: str | None = None
    user: str | None = None
    test_fraction: float = 0.2
    length: int = 128
    padding: int = 0
    tokenizer: str | None = None
    endings: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)
        at_least("data.length", self.length, 1)
        require("data.columns", self.columns, self.columns != [], "a list of columns, or null")

    def with_domains(self, column: str) -> Table:
        """See `Source`."""
        return replace(self, user=column)

    def files(self) -> list[Path]:
        root = user_path(self.root or "")
        if self.root and root.is_file():
            return [root]
        train, test = (
            [path for ending in self.endings for path in existing_file(root / f"{split}{ending}")]
            if self.root
            else []
            for split in ("train", "test")
        )
        if len(train) != 1 or len(test) > 1:
            what = " and ".join(path.name for path in train + test) or f"no train{self.endings[0]}"
            raise ValueError(
                f"data.root={self.root} holds {what}: name a file, or a folder with one train{self.endings[0]} and "
                f"perhaps one test{self.endings[0]}."
            )
        return [*train, *test]

    def read(self) -> Raw:
        paths = self.files()
        place = str(paths[0])
        tables = [self._read_file(path) for path in paths]
        for table, path in zip(tables, paths, strict=True):
            if set(table.column_names) != set(tables[0].column_names):
                raise ValueError(
                    f"{path} has the columns {', '.join(table.column_names)}, and {place} has "
                    f"{', '.join(tables[0].column_names)}: give both the same."
                )
        try:
            table = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise ValueError(
                f"{paths[-1]} does not fit {place} ({first_line(error)}): use the same types."
            ) from error
        names = table.column_names
        types = dict(zip(names, table.schema.types, strict=True))
        label = self.label or find_label(names, place)
        user = self.user or find_column([name for name in names if name != label], USER_NAMES)
        labels = labels_of(column_of(table, label, place, "data.label"), self.kind, None, place)
        users = None if user is None else integers_or_text(table, user, place, "data.user")
        test = np.arange(len(table)) >= len(tables[0])
        if len(tables) == 1:
            test = spread(labels, users, self.test_fraction)
        columns, unused = find_inputs(self.columns, types, (label, user), place)
        inputs, tokens = inputs_of(table, columns, self.length, self.padding, self.tokenizer, place)
        return assembled(
            inputs, labels, users, test, tokens, origin_of(types, columns, label, user, unused)
        )

    def _read_file(self, path: Path) -> pa.Table:
        """Return a file's rows. Raise ValueError where it is empty, or names a column twice."""
        try:
            table = self.parse(regular_file(path))
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} cannot be read ({first_line(error).rstrip('.')}): correct the file."
            ) from error
        names = table.column_names
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"{path} has two columns called {twice!r}: rename one.")
        if not table.num_rows:
            raise ValueError(f"{path} has no rows: put some there.")
        return table

    def parse(self, path: Path) -> pa.Table:
        """Return the table in a file, with the types of its columns inferred."""
        raise NotImplementedError


@dataclass(frozen=True)
class Csv(Table):
    """Comma-separated values with the names of the columns in the first line; see `Table`.

    delimiter: what separates the values of a row. A field that is empty or NA, and not in quotes, is missing.
    """

    delimiter: str = ","
    endings: ClassVar[tuple[str, ...]] = (".csv", ".csv.gz")

    def check(self) -> None:
        super().check()
        require("data.delimiter", self.delimiter, len(self.delimiter) == 1, "one character")

    def parse(self, path: Path) -> pa.Table:
        """See `Table`."""
        table = pyarrow.csv.read_csv(
            path,
            pyarrow.csv.ReadOptions(block_size=ONE_BLOCK),
            pyarrow.csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False),
        )
        header = table.column_names[0]
        if table.num_columns == 1 and (
            other := next((mark for mark in ";\t|," if mark in header), None)
        ):
            raise ValueError(
                f"{path} has one column, {header!r}: set data.delimiter={other!r} if that separates the columns."
            )
        return table


@dataclass(frozen=True)
class JsonLines(Table):
    """A JSON object in each line, with the same keys in all; see `Table`. Lists of numbers are vectors or tokens."""

    endings: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson", ".json", ".jsonl.gz")

    def parse(self, path: Path) -> pa.Table:
        """See `Table`."""
        return pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=ONE_BLOCK))
