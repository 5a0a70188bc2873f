"""Split training rows over clients by lists that the user gives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysim.data.csr import CSR, Ints, Partition
from raysim.data.dataset import cache_folder
from raysim.data.partition import Draws, Partitioner
from raysim.primitives.errors import first_line
from raysim.primitives.files import parse_json, regular_file, replace_file, user_path

FORM = "a list of row numbers for each client, [[0, 5], [1, 2]] or {NAME: [0, 5], NAME: [1, 2]}"


@dataclass(frozen=True)
class Listed(Partitioner):
    """A partition that is read from a file with the training rows of every client.

    file: a JSON file with a list of lists, the first for client 0, or with lists by client name.
    Rows are counted from 0. Rows in no list are not used.
    """

    file: str | None = None

    def assign(self, draws: Draws) -> CSR:
        """Return the training rows that the file gives to each client.

        draws: only the number of training rows is used.
        Raise ValueError if the file does not contain lists of rows, or if a row occurs twice or
        does not exist.
        """
        content = self._read_file()
        is_from_python = user_path(str(self.file)).parent == cache_folder(None)  # `store_lists`
        place = "partition" if is_from_python else f"partition.file={self.file}"
        return _check_lists(content, place, len(draws.labels))

    def users(
        self, partition: Partition, domains: Ints, domain_names: Sequence[str]
    ) -> Sequence[str] | None:
        """Return the names of the clients: the keys of the JSON object in the file.

        If the file contains a list of lists, the clients have no names, and None is returned. The
        arguments are not used.
        """
        content = self._read_file()
        return list(content) if isinstance(content, dict) else None

    def _read_file(self) -> Any:
        if self.file is None:
            raise ValueError(
                f"partition=listed needs partition.file, a JSON file with {FORM}. Set "
                "partition.file=PATH."
            )
        try:
            return parse_json(regular_file(user_path(self.file)).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"partition.file={self.file} cannot be read ({first_line(error)}). Give a JSON "
                f"file with {FORM}."
            ) from error


def store_lists(
    rows: Mapping[int | str, Sequence[int]] | Sequence[Sequence[int]],
    settings: Mapping[str, Any] | None = None,
) -> Listed:
    """Write lists of rows to a file in the cache of this machine; return a partition with them.

    rows: the training rows of each client, as a list of lists or as lists by client name.
    settings: other settings of `Listed`, such as {"test_fraction": 0.1}.
    """
    csr = _check_lists(rows, "partition", None)
    lists = [csr.rows(client).tolist() for client in range(len(csr))]
    names = [str(name) for name in rows] if isinstance(rows, Mapping) else []
    has_names = names != [str(number) for number in range(len(names))]
    content = json.dumps(dict(zip(names, lists, strict=True)) if has_names else lists).encode()
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    path = cache_folder(None) / f"rows-{digest}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    return Listed(file=str(path), **(settings or {}))


def is_lists_of_rows(part: object) -> bool:
    """Return True if `part` consists of lists of rows, False for settings and other objects.

    Lists and tuples consist of rows. A dictionary is settings if it is empty. It is also settings
    if it has a text key and a value that is no list, tuple, range or array.
    part: the argument `partition` of `raysim.run`.
    """
    if isinstance(part, Mapping):
        list_types = (list, tuple, range, np.ndarray)
        are_lists = all(isinstance(value, list_types) for value in part.values())
        has_text_keys = any(isinstance(key, str) for key in part)
        return bool(part) and (are_lists or not has_text_keys)
    return isinstance(part, (list, tuple))


def _check_lists(content: Any, place: str, total: int | None) -> CSR:
    """Return the numbers of the training rows that the user's lists give to each client.

    content: a list of rows for each client. These lists are in a list, or in a dictionary whose
    keys are the names of the clients.
    place: the setting that gives the lists, for errors.
    total: the number of training rows, or None.
    Raise ValueError for another format, for repeated rows, and for rows that do not exist. Rows may
    be in no list.
    """
    form = FORM if place == "partition" else f"a JSON file with {FORM}"
    lists = list(content.values()) if isinstance(content, Mapping) else content
    if not isinstance(lists, (list, tuple)) or not lists:
        raise ValueError(
            f"{place} does not contain lists of row numbers for the clients. Give {form}."
        )
    names = list(content if isinstance(content, Mapping) else range(len(content)))
    parts = []
    for name, rows in zip(names, lists, strict=True):
        parts.append(_read_rows(rows, f"{place}, client {name}", form))
    csr = CSR.from_counts(np.concatenate(parts), np.array([len(part) for part in parts]))

    order = np.argsort(csr.indices, kind="stable")
    repeated = np.flatnonzero(np.diff(csr.indices[order]) == 0)
    if len(repeated):
        first, second = order[repeated[0] : repeated[0] + 2]
        owner, other_owner = names[csr.owners[first]], names[csr.owners[second]]
        raise ValueError(
            f"{place} gives row {csr.indices[first]} to client {owner} and to client "
            f"{other_owner}. List each row once."
        )
    is_wrong = (csr.indices < 0) | (csr.indices >= (total or np.inf))
    if is_wrong.any():
        wrong = np.flatnonzero(is_wrong)[0]
        allowed = "rows are counted from 0"
        if total is not None:
            allowed = f"the training data has the rows 0 to {total - 1}"
        raise ValueError(
            f"{place} gives row {csr.indices[wrong]} to client {names[csr.owners[wrong]]}, but "
            f"{allowed}. Remove this row number from the client's list."
        )
    return csr


def _read_rows(rows: Any, place: str, form: str) -> Ints:
    try:
        numbers = np.asarray(rows if len(rows) else np.empty(0, np.int64))
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(f"{place} has no list of row numbers. Give {form}.")
    return numbers.astype(np.int64)
