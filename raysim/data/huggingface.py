"""Data sets of Hugging Face's `datasets`: a folder that `save_to_disk` wrote, or a name on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raysim.data.columns import (
    USER_NAMES,
    assembled,
    column_of,
    find_column,
    find_inputs,
    inputs_of,
    integers_or_text,
    label_column,
    origin_of,
    spread,
)
from raysim.data.labels import labels_of
from raysim.data.pictures import Picture
from raysim.data.raw import Origin, Raw, Source
from raysim.primitives.checks import at_least, in_range
from raysim.primitives.errors import first_line
from raysim.primitives.extras import import_optional
from raysim.primitives.files import user_path


@dataclass(frozen=True)
class HuggingFace(Source):
    """Splits `train` and `test` of a data set; without the second, `test_fraction` of the rows is for testing.

    root: a folder that `save_to_disk` wrote; or `name` (and `config`) on the hub, which `datasets` downloads and keeps.
    columns: the input; one column of images, or see `inputs_of`, as for `length`, `padding` and `tokenizer`; None: all
    others. label, user: other names of `label_column` and `domain_column`, as data=csv has them; where neither is set,
    columns that are called as usual (`LABEL_NAMES`, `USER_NAMES`).
    """

    root: str | None = None
    name: str | None = None
    config: str | None = None
    columns: list[str] | None = None
    label_column: str = "label"
    domain_column: str = "domain"
    test_fraction: float = 0.2
    label: str | None = None
    user: str | None = None
    length: int = 128
    padding: int = 0
    tokenizer: str | None = None

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)
        at_least("data.length", self.length, 1)

    def files(self) -> list[Path]:
        if not self.root:
            return []
        folder = user_path(self.root)
        return (
            [path for path in sorted(folder.glob("**/*")) if path.is_file()]
            if folder.is_dir()
            else []
        )

    def with_domains(self, column: str) -> HuggingFace:
        """See `Source`."""
        return replace(self, user=column)

    def read(self) -> Raw:
        splits = self._splits()
        place = self.root or self.name or ""
        tables = [split.with_format("arrow")[:] for split in splits]
        table, features = pa.concat_tables(tables), splits[0].features
        label = label_column(list(features), self.label, self.label_column, place)
        feature = features[label]
        names = getattr(feature, "names", None) or getattr(
            getattr(feature, "feature", None), "names", None
        )
        labels = labels_of(column_of(table, label, place), self.kind, names, place)
        user: str | None = self.user or self.domain_column
        if user == "domain" and user not in features:
            user = find_column(list(features), USER_NAMES) if self.columns is None else None
        if user is not None and user not in features:
            raise ValueError(
                f"{place} has no column {user}, it has {', '.join(features)}: set partition.column or data.user."
            )
        users = None if user is None else integers_or_text(table, user, place)
        test = np.arange(len(table)) >= len(tables[0])
        if len(tables) == 1:
            test = spread(labels, users, self.test_fraction)
        types = dict(zip(table.schema.names, table.schema.types, strict=True))
        columns, unused = find_inputs(self.columns or None, types, (label, user), place)
        if len(columns) == 1 and type(features.get(columns[0])).__name__ == "Image":
            origin = Origin(
                f"{columns[0]} (image)", f"{label} ({types[label]})", user or "", ", ".join(unused)
            )
            raw = assembled(np.arange(len(test)), labels, users, test, None, origin)
            order = np.concatenate([np.flatnonzero(~test), np.flatnonzero(test)])
            return replace(raw, inputs=_pictures(table[columns[0]], order, place))
        inputs, tokens = inputs_of(table, columns, self.length, self.padding, self.tokenizer, place)
        origin = origin_of(types, columns, label, user, unused)
        return assembled(inputs, labels, users, test, tokens, origin)

    def _splits(self) -> list[Any]:
        """The training split, and the test split if there is one."""
        if bool(self.root) == bool(self.name):
            raise ValueError(
                f"data.root={self.root}, data.name={self.name}: give one, a folder or a name on the hub."
            )
        datasets = import_optional("datasets", "data=huggingface")
        try:
            if self.root:
                found = datasets.load_from_disk(str(user_path(self.root)))
            else:
                found = datasets.load_dataset(self.name, self.config)
        except Exception as error:  # the hub, its cache and files can fail in many ways
            raise ValueError(
                f"data.{'root' if self.root else 'name'}={self.root or self.name} cannot be read "
                f"({type(error).__name__}: {first_line(error).rstrip('.')}): name a folder that save_to_disk wrote, or "
                "a data set that can be downloaded."
            ) from error
        splits = found if isinstance(found, dict) else {"train": found}
        if "train" not in splits:
            raise ValueError(
                f"{self.root or self.name} has the splits {', '.join(splits)}, and none is called train."
            )
        return [splits[name] for name in ("train", "test") if name in splits]


def _pictures(column: pa.ChunkedArray, order: np.ndarray, place: str) -> Iterator[Picture]:
    for row in order.tolist():
        value = column[row].as_py()
        content = value["bytes"] if value["bytes"] is not None else Path(value["path"])
        yield Picture(f"{place}, row {row}", content)
