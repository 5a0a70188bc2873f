"""A partition that somebody else has drawn: for each client a list of the training rows that it has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysim.data.dataset import cache_folder
from raysim.data.partition import CSR, Draws, Ints, Partition, Partitioner
from raysim.primitives.errors import first_line
from raysim.primitives.files import parse_json, regular_file, replace_file, user_path

FORM = "a JSON file with a list of row numbers for each client, [[0, 5], [1, 2]] or {NAME: [0, 5], NAME: [1, 2]}"


@dataclass(frozen=True)
class Listed(Partitioner):
    """Every client has the rows that a file lists for it; rows of the training data, from 0, in no list stay unused.

    file: JSON, a list of lists or an object of lists, of which the first is client 0's.
    """

    file: str | None = None

    def assign(self, draws: Draws) -> CSR:
        """Raises ValueError, in one sentence, for lists that are none, and rows that are not there or given twice."""
        found = self._content()
        given = user_path(str(self.file)).parent == cache_folder(
            None
        )  # from Python, by `store_lists`
        return _checked(
            found, "partition" if given else f"partition.file={self.file}", len(draws.labels)
        )

    def users(
        self, partition: Partition, domains: Ints, domain_names: Sequence[str]
    ) -> Sequence[str] | None:
        """Return the names that the file gives the lists; None where it gives none."""
        found = self._content()
        return list(found) if isinstance(found, dict) else None

    def _content(self) -> Any:
        if self.file is None:
            raise ValueError(f"partition.file=null names no lists: set it to {FORM}")
        try:
            return parse_json(regular_file(user_path(self.file)).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"partition.file={self.file} cannot be read ({first_line(error)}): give {FORM}"
            ) from error


def store_lists(
    rows: Mapping[int | str, Sequence[int]] | Sequence[Sequence[int]],
    settings: Mapping[str, Any] | None = None,
) -> Listed:
    """Return the partition of lists from Python, stored in the cache of this machine under their checksum.

    settings: arguments of `Listed`.
    """
    csr = _checked(rows, "partition", None)
    lists = [csr.rows(client).tolist() for client in range(len(csr))]
    names = [str(name) for name in rows] if isinstance(rows, Mapping) else []
    is_named = names != [str(number) for number in range(len(names))]
    content = json.dumps(dict(zip(names, lists, strict=True)) if is_named else lists).encode()
    path = cache_folder(None) / f"rows-{hashlib.blake2b(content, digest_size=8).hexdigest()}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return Listed(file=str(path), **(settings or {}))


def is_lists_of_rows(part: object) -> bool:
    """Whether an argument is lists of rows, and not an option's values by their keys."""
    if isinstance(part, Mapping):
        rows = all(isinstance(value, (list, tuple, range, np.ndarray)) for value in part.values())
        return bool(part) and (rows or not any(isinstance(key, str) for key in part))
    return isinstance(part, (list, tuple))


def _checked(found: Any, place: str, total: int | None) -> CSR:
    form = FORM.removeprefix("a JSON file with ") if place == "partition" else FORM
    lists = list(found.values()) if isinstance(found, Mapping) else found
    if not isinstance(lists, (list, tuple)) or not lists:
        raise ValueError(f"{place} holds no list of clients: give {form}")
    names = list(found if isinstance(found, Mapping) else range(len(found)))
    parts = [
        _numbers(each, f"{place}, client {name}", form)
        for name, each in zip(names, lists, strict=True)
    ]
    csr = CSR(
        np.concatenate(parts), np.concatenate(([0], np.cumsum([len(part) for part in parts])))
    )
    order = np.argsort(csr.indices, kind="stable")
    twice = np.flatnonzero(np.diff(csr.indices[order]) == 0)
    if len(twice):
        row = csr.indices[order[twice[0]]]
        one, other = (names[owner] for owner in csr.owners[order[twice[0] : twice[0] + 2]])
        raise ValueError(
            f"{place} gives row {row} to client {one} and to client {other}: give it to one"
        )
    wrong = np.flatnonzero((csr.indices < 0) | (csr.indices >= (total or np.inf)))
    if len(wrong):
        rows = (
            "rows are counted from 0"
            if total is None
            else f"the training data has the rows 0 to {total - 1}"
        )
        row, name = csr.indices[wrong[0]], names[csr.owners[wrong[0]]]
        raise ValueError(f"{place} gives row {row} to client {name}, and {rows}: leave it out")
    return csr


def _numbers(rows: Any, place: str, form: str) -> Ints:
    try:
        found = np.asarray(rows if len(rows) else np.empty(0, np.int64))
    except (TypeError, ValueError):
        found = np.empty(0)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(f"{place} has no list of row numbers: give {form}")
    return found.astype(np.int64)
