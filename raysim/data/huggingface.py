"""Read data sets of Hugging Face's `datasets`: from a folder, or by a name on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.data.causal import choose_test_documents, read_documents
from raysim.data.columns import (
    assemble,
    describe_origin,
    find_inputs,
    group_values,
    label_column,
    label_values,
    read_input_rows,
    read_label_column,
    spread_test_rows,
)
from raysim.data.pictures import Picture
from raysim.data.raw import Raw
from raysim.data.rows import train_first
from raysim.data.table_source import TableSource
from raysim.primitives.checks import in_range
from raysim.primitives.errors import first_line
from raysim.primitives.extras import import_optional
from raysim.primitives.files import user_path


@dataclass(frozen=True)
class HuggingFace(TableSource):
    """A source that reads the splits `train` and `test` of a Hugging Face data set.

    root: a folder that `save_to_disk` wrote; None if `name` is set.
    name, config: a data set on the hub and its configuration, for a download.
    label: the column of labels, which must exist. None uses `label_column`.
    label_column: the column of labels if `label` is None. If the default "label" is missing, raysim
    looks for another usual name, such as "y".
    user: the column of users, which must exist; each user is a domain. None uses `domain_column`.
    domain_column: the column of users if `user` is None, which must exist. Only the default
    "domain" may be missing; raysim then looks for a usual name, such as "client".
    test_fraction: without a split `test`, this share of each user's samples is for testing, equally
    in each class.
    """

    root: str | None = None
    name: str | None = None
    config: str | None = None
    label_column: str = "label"
    domain_column: str = "domain"
    test_fraction: float = 0.2
    label: str | None = None
    user: str | None = None

    def check(self) -> None:
        super().check()
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        if not self.root:
            return []
        folder = user_path(self.root)
        if not folder.is_dir():
            return []
        return [path for path in sorted(folder.glob("**/*")) if path.is_file()]

    def with_domains(self, column: str) -> HuggingFace:
        return replace(self, user=column)

    def read(self) -> Raw:
        splits = self._load_splits()
        place = self.root or self.name or ""
        tables = [split.with_format("arrow")[:] for split in splits]
        table, features = pa.concat_tables(tables), splits[0].features
        test_rows = None
        if len(tables) > 1:
            test_rows = np.arange(len(table)) >= len(tables[0])
        if self.kind == "causal":
            return self._read_documents(table, test_rows, place)
        label = label_column(list(features), self.label, self.label_column, place)
        values = label_values(table, label, place)
        class_names = _class_names(features[label])
        labels = read_label_column(values, self.kind, class_names, place, self.ignore)
        user = self._find_user(list(features), place)
        users = None if user is None else group_values(table, user, place)
        is_test = test_rows
        if is_test is None:
            is_test = spread_test_rows(labels, users, self.test_fraction)
        types = dict(zip(table.schema.names, table.schema.types, strict=True))
        columns, unused = find_inputs(self.columns, types, (label, user), place, self.separate)
        origin = describe_origin(types, columns, [label], user, unused)
        if len(columns) == 1 and type(features.get(columns[0])).__name__ == "Image":
            origin = origin._replace(inputs=f"{columns[0]} (image)")
            raw = assemble(np.arange(len(is_test)), labels, users, is_test, None, origin)
            order, _ = train_first(is_test)
            return replace(raw, inputs=_read_pictures(table[columns[0]], order, place))
        inputs = read_input_rows(table, columns, self.token_settings, place, self.separate)
        return assemble(
            inputs.values, labels, users, is_test, inputs.tokens, origin, fields=inputs.fields
        )

    def _read_documents(
        self, table: pa.Table, is_test: NDArray[np.bool_] | None, place: str
    ) -> Raw:
        """Return the samples of a table in which each row is a document.

        is_test: bool [rows], True for test rows. None makes `test_fraction` of the documents test
        rows.
        place: the name of the data set in errors.
        """
        user = self._find_user(table.column_names, place)
        users = None if user is None else group_values(table, user, place)
        if is_test is None:
            is_test = choose_test_documents(users, len(table), self.test_fraction)
        return read_documents(table, user, users, is_test, self.document_settings, place)

    def _find_user(self, names: list[str], place: str) -> str | None:
        """Return the column that has the users, or None if there is none.

        names: the columns of the data set.
        place: the name of the data set in errors.
        Raise ValueError if a setting names a missing column.
        """
        user = self.user or self.domain_column
        if user in names:
            return user
        if user == "domain" and not self.user:
            return self.find_users(names)
        raise ValueError(
            f"{place} has no column {user}. Set partition.column or data.user to one of its "
            f"columns: {', '.join(names)}."
        )

    def _load_splits(self) -> list[Any]:
        """Load the data set; return a list of its training split and, if it exists, test split."""
        if not self.root and not self.name:
            raise ValueError(
                "data=huggingface needs data.root (a folder that save_to_disk wrote) or data.name "
                "(a name on the hub). Set one of them."
            )
        if self.root and self.name:
            raise ValueError(
                f"data.root={self.root} and data.name={self.name} name two data sets. Set one of "
                "them to null."
            )
        datasets = import_optional("datasets", "data=huggingface")
        key = "root" if self.root else "name"
        try:
            if self.root:
                loaded = datasets.load_from_disk(str(user_path(self.root)))
            else:
                loaded = datasets.load_dataset(self.name, self.config)
        except Exception as error:  # the hub, its cache and files can fail in many ways
            reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
            raise ValueError(
                f"data.{key}={self.root or self.name} cannot be read ({reason}). Give a folder "
                "that save_to_disk wrote, or a data set that can be downloaded."
            ) from error
        splits = loaded if isinstance(loaded, dict) else {"train": loaded}
        if "train" not in splits:
            raise ValueError(
                f"data.{key}={self.root or self.name} has the splits {', '.join(splits)}, but no "
                "split train. Rename one of them."
            )
        return [splits[name] for name in ("train", "test") if name in splits]


def _class_names(feature: Any) -> list[str] | None:
    """Return the class names of a column of labels, or of lists of labels; None without names.

    feature: the type of the column, as the package `datasets` describes it.
    """
    names: list[str] | None = getattr(feature, "names", None)
    if names:
        return names
    return getattr(getattr(feature, "feature", None), "names", None)


def _read_pictures(column: pa.ChunkedArray, order: np.ndarray, place: str) -> Iterator[Picture]:
    for row in order.tolist():
        value = column[row].as_py()
        content = value["bytes"] if value["bytes"] is not None else Path(value["path"])
        yield Picture(f"{place}, row {row}", content)
