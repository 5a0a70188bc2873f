"""Data sets of the user's own, in the form in which they lie: Parquet, folders of pictures, strips."""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raysim.data.columns import (
    USER_NAMES,
    assembled,
    column_of,
    find_column,
    find_inputs,
    go_together,
    inputs_of,
    integers_or_text,
    label_column,
    origin_of,
    plain_type,
    spread,
)
from raysim.data.labels import Labels, labels_of
from raysim.data.packed import Strips, are_strips
from raysim.data.pictures import PICTURES, Picture, are_names, numbered, spread_test, train_first
from raysim.data.raw import Raw, Source, join_names, natural_order, numbered_domains
from raysim.primitives.checks import at_least, in_range, require
from raysim.primitives.files import existing_file, parse_json, regular_file, user_path
from raysim.primitives.kinds import Kind


class ParquetColumns(NamedTuple):
    """Which column of Parquet files is which."""

    inputs: list[str]
    label: str
    user: str
    has_pictures: bool
    unused: list[str]


@dataclass(frozen=True)
class Parquet(Source):
    """Folders with train.parquet and test.parquet, or split in parts train-*.parquet, as Hugging Face stores them.

    `root` is one such folder, a list of them, or a folder of them; with several, each is a domain named by its folder.
    An image is its file's bytes, alone or in a struct {bytes, path}; a domain column is used where there is one.
    Where a folder has no test.parquet, `test_fraction` of each domain's classes is taken from training; null demands
    the file. columns: what is the input in place of an image; None: all others, where there is no image. `length`,
    `padding`, `tokenizer`: see `inputs_of`. label, user: other names of `label_column` and `domain_column`, as data=csv
    has them; where neither is set, columns that are called as usual (`LABEL_NAMES`, `USER_NAMES`).
    """

    root: str | list[str] | None = None
    image_column: str = "image"
    label_column: str = "label"
    domain_column: str = "domain"
    test_fraction: float | None = None
    columns: list[str] | None = None
    label: str | None = None
    user: str | None = None
    length: int = 128
    padding: int = 0
    tokenizer: str | None = None

    def check(self) -> None:
        fraction = self.test_fraction
        if fraction is not None:
            in_range("data.test_fraction", fraction, least=0, below=1)
        at_least("data.length", self.length, 1)

    def with_domains(self, column: str) -> Parquet:
        """See `Source`."""
        for path in self.files():
            if column not in (names := _schema(path).names):
                raise ValueError(
                    f"{path} has no column {column}, it has {', '.join(names)}: set partition.column."
                )
        return replace(self, user=column)

    def files(self) -> list[Path]:
        return [
            path
            for folder in self._folders()
            for split in ("train", "test")
            for path in _parts(folder, split)
        ]

    def read(self) -> Raw:
        folders = self._folders()
        tables = [
            (split, folder, path)
            for split in ("train", "test")
            for folder in folders
            for path in _parts(folder, split)
        ]
        paths = [path for *_, path in tables]
        columns = self._find_columns(paths[0])
        names = [self._domains(path, columns, folder.name) for _, folder, path in tables]
        sizes = [len(rows) for rows in names]
        domains, ordered = join_names(names), None
        if len(folders) > 1:
            domains, ordered = self._in_folders(names, paths, columns.user)
        labels = self._labels(paths, columns.label, str(folders[0]))
        test = np.repeat([split == "test" for split, *_ in tables], sizes)
        unsplit = np.repeat([not _parts(folder, "test") for _, folder, _ in tables], sizes)
        if unsplit.any():
            own = (labels[0][unsplit], *labels[1:])
            test[unsplit] = spread(own, domains[unsplit], self.test_fraction or 0.0)
        types = _types(paths[0])
        user = columns.user if columns.user in types else None
        origin = origin_of(types, columns.inputs, columns.label, user, columns.unused)
        if not columns.has_pictures:
            with _readable(paths[0]):
                whole = pa.concat_tables(
                    [pq.read_table(path, columns=columns.inputs) for path in paths]
                )
            place = str(folders[0])
            inputs, tokens = inputs_of(
                whole, columns.inputs, self.length, self.padding, self.tokenizer, place
            )
            return assembled(inputs, labels, domains, test, tokens, origin, ordered)
        raw = assembled(np.arange(len(test)), labels, domains, test, None, origin, ordered)
        masks = np.split(test, np.cumsum(sizes)[:-1])
        pictures = itertools.chain(
            self._chosen(paths, [~mask for mask in masks]), self._chosen(paths, masks)
        )
        return replace(raw, inputs=pictures)

    def _find_columns(self, path: Path) -> ParquetColumns:
        """Return which column is which, by the settings and the first file's schema."""
        types = _types(path)
        names = list(types)
        label = label_column(names, self.label, self.label_column, str(path))
        user = self.user or self.domain_column
        has_pictures = self.columns is None and (
            self.image_column in names or self.image_column != "image"
        )
        if has_pictures:
            return ParquetColumns([self.image_column], label, user, has_pictures, [])
        if self.columns is not None:
            return ParquetColumns(self.columns, label, user, has_pictures, [])
        if pictures := [
            name
            for name, kind in types.items()
            if name not in (label, user) and _may_be_pictures(kind)
        ]:
            raise ValueError(
                f"{path} has no column {self.image_column}, and column {pictures[0]} holds {types[pictures[0]]}: set "
                f"data.image_column={pictures[0]} if these are pictures, or data.columns to the columns of the input."
            )
        if user not in names:
            user = find_column(names, USER_NAMES) or user
        inputs, unused = find_inputs(None, types, (label, user, self.domain_column), str(path))
        return ParquetColumns(inputs, label, user, has_pictures, unused)

    def _labels(self, paths: list[Path], label: str, place: str) -> Labels:
        """Return the labels of all files."""
        _same_kind(paths, label, self.kind)
        tables = []
        for path in paths:
            with _readable(path):
                tables.append(pq.read_table(path, columns=[label]))
        parts = [
            column_of(table, label, str(path)) for table, path in zip(tables, paths, strict=True)
        ]
        return labels_of(_joined(paths, parts, label), self.kind, _class_names(paths, label), place)

    def _folders(self) -> list[Path]:
        if not self.root:
            raise ValueError(
                "data.root is empty: name a folder with train.parquet and test.parquet, or a list of them."
            )
        if isinstance(self.root, list):
            folders = [user_path(root) for root in self.root]
            names = [folder.name for folder in folders]
            if len(set(names)) < len(names):
                raise ValueError(
                    f"data.root={self.root} has two folders of one name, and a domain is named by its folder."
                )
        else:
            root = user_path(self.root)
            inner = [] if _parts(root, "train") or not root.is_dir() else sorted(root.iterdir())
            folders = [folder for folder in inner if _parts(folder, "train")] or [root]
        for folder in folders:
            for split in ("train", "test") if self.test_fraction is None else ("train",):
                if not _parts(folder, split):
                    hint = ", or set data.test_fraction" if split == "test" else ""
                    raise ValueError(
                        f"data.root={folder} holds no {split}.parquet: looked for it and for {split}-*.parquet there; "
                        f"name a folder that has it{hint}."
                    )
        return folders

    def _in_folders(
        self, names: list[NDArray[Any]], paths: list[Path], user: str
    ) -> tuple[NDArray[np.str_], list[str] | None]:
        """Put the folder in front of the names in a domain column; return also their order where all are integers."""
        whole = []
        values: dict[str, list[NDArray[Any]]] = {}
        for rows, path in zip(names, paths, strict=True):
            folder = path.parent.name
            values.setdefault(folder, []).append(rows)
            has_column = user in _schema(path).names
            whole.append(np.char.add(f"{folder}/", rows.astype(np.str_)) if has_column else rows)
        domains = np.concatenate(whole)
        if any(rows.dtype.kind not in "iu" for rows in names):
            return domains, None
        ordered = []
        for folder in sorted(values):
            ordered += [f"{folder}/{name}" for name in natural_order(join_names(values[folder]))]
        return domains, ordered

    def _domains(self, path: Path, columns: ParquetColumns, folder: str) -> NDArray[Any]:
        """Return the domain of each row, an integer or text. Raise ValueError where a column is missing."""
        names = _schema(path).names
        needed = [
            (column, "image_column" if columns.has_pictures else "columns")
            for column in columns.inputs
        ]
        needed.append((columns.label, "label" if self.label else "label_column"))
        needed += [(self.user, "user")] if self.user else []
        for column, key in needed:
            if column not in names:
                raise ValueError(
                    f"{path} has no column {column}, it has {', '.join(names)}: set data.{key}."
                )
        with _readable(path):
            table = pq.read_table(
                path, columns=[n for n in names if n in (columns.label, columns.user)]
            )
        if empty := next((name for name in table.column_names if table[name].null_count), None):
            raise ValueError(f"{path}: column {empty} has empty values: remove or fill these rows.")
        if columns.user not in names:
            return np.full(table.num_rows, folder)
        domains = integers_or_text(table, columns.user, str(path))
        return domains if domains.dtype.kind in "iu" else domains.astype(np.str_)

    def _chosen(self, paths: list[Path], masks: list[NDArray[np.bool_]]) -> Iterator[Picture]:
        for path, mask in zip(paths, masks, strict=True):
            if mask.any():
                yield from itertools.compress(self._pictures(path), mask)

    def _pictures(self, path: Path) -> Iterator[Picture]:
        kind = _schema(path).field(self.image_column).type
        inner = (
            kind.field("bytes").type
            if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            else kind
        )
        if not (pa.types.is_binary(inner) or pa.types.is_large_binary(inner)):
            raise ValueError(
                f"{path}: column {self.image_column} holds {kind}: it must hold the bytes of picture files, alone or "
                "as `bytes` of a struct; set data.image_column to the one that does."
            )
        with _readable(path):
            batches = pq.ParquetFile(path).iter_batches(256, columns=[self.image_column])
        rows = itertools.count()
        while True:
            with _readable(path):
                batch = next(batches, None)
            if batch is None:
                return
            for value in batch.column(0).to_pylist():
                yield Picture(
                    f"{path}, row {next(rows)}",
                    value["bytes"] if isinstance(value, dict) else value,
                )


@dataclass(frozen=True)
class ImageFolder(Source):
    """Pictures in root/class/ or root/domain/class/, or in either below root/train/ and root/test/.

    A file root/split.csv with the columns path, domain, class, split (train or test) decides what is there and what
    is test; without one and without the two folders, every class of every domain gives `test_fraction` of its
    pictures, evenly spread by name.
    """

    root: str | None = None
    test_fraction: float = 0.2

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        return existing_file(self._root() / "split.csv") + [
            self._root() / path for path, *_ in self._rows()
        ]

    def read(self) -> Raw:
        rows = self._rows()
        root = self._root()
        classes, class_names = numbered(np.array([row[2] for row in rows]), None, str(root))
        names = np.array([row[1] for row in rows])
        if rows[0][3]:
            test = np.array([row[3] == "test" for row in rows])
        else:
            groups = np.unique(names, return_inverse=True)[1] * len(class_names) + classes
            test = spread_test(groups, self.test_fraction)
        domains, domain_names = numbered_domains(names, ~test)
        order, train_rows = train_first(test)
        paths = [root / row[0] for row in rows]
        pictures = (Picture(str(paths[row]), paths[row]) for row in order.tolist())
        return Raw(pictures, classes[order], train_rows, class_names, domains[order], domain_names)

    def _root(self) -> Path:
        root = user_path(self.root or "")
        if not self.root or not root.is_dir():
            raise ValueError(
                f"data.root={self.root} is no folder: name one with a subfolder of pictures per class."
            )
        return root

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """(path below root, domain, class, split or "") of every picture, sorted by path."""
        root = self._root()
        table = existing_file(root / "split.csv")
        rows = _listed(table[0]) if table else _found(root)
        if not rows:
            raise ValueError(
                f"data.root={root} holds no pictures: looked for class/*.jpg and domain/class/*.jpg there."
            )
        return sorted(rows)


@dataclass(frozen=True)
class Stored(Source):
    """A set by name, as strips, Parquet or pictures, whichever lies there.

    root: its folder, or the one around it, in which the folder called `name` is found whatever its case and hyphens.
    `test_fraction` of each domain's classes is for testing where the files do not say what is; the columns are those
    of Parquet files.
    """

    root: str | None = None
    name: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    domain_column: str = "domain"
    test_fraction: float = 0.2

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        try:
            return self.form().files()
        except ValueError as error:
            root = user_path(self.root or "")
            if not self.name or not root.is_dir() or named_folder(root, self.name):
                raise
            raise ValueError(
                f"data.root={root} has no folder {self.name} and is none itself: {error}"
            ) from error

    def read(self) -> Raw:
        return self.form().read()

    def form(self) -> Strips | Parquet | ImageFolder:
        """The source that reads what is there. Raises ValueError when nothing is."""
        root = user_path(self.root or "")
        if not self.root or not root.is_dir():
            raise ValueError(
                f"data.root={self.root} is no folder: name the one with {self.name or 'the images'} as strips, Parquet "
                "files or folders of pictures."
            )
        folder = (self.name and named_folder(root, self.name)) or root
        if are_strips(folder):
            return Strips(root=str(folder))
        if _has_parquet(folder):
            columns = (self.image_column, self.label_column, self.domain_column)
            return Parquet(str(folder), *columns, test_fraction=self.test_fraction)
        return ImageFolder(root=str(folder), test_fraction=self.test_fraction)


def named_folder(root: Path, name: str) -> Path | None:
    """The folder in root that is called so, whatever the case, blanks, hyphens and underscores."""
    inner = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    return next((path for path in inner if _plain(path.name) == _plain(name)), None)


def holds_images(folder: Path) -> bool:
    """Whether there is anything that `Stored` could read."""
    pictures = (path for path in folder.glob("*/**/*") if path.suffix.lower() in PICTURES)
    return are_strips(folder) or _has_parquet(folder) or next(pictures, None) is not None


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _has_parquet(folder: Path) -> bool:
    inner = [path for path in folder.iterdir() if path.is_dir()]
    return any(_parts(each, "train") for each in (folder, *inner))


def _listed(path: Path) -> list[tuple[str, str, str, str]]:
    columns = ("path", "domain", "class", "split")
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if missing := set(columns) - set(reader.fieldnames or ()):
                raise ValueError(f"it lacks the column {sorted(missing)[0]}")
            found = [[row[column] for column in columns] for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} is no table of path, domain, class and split ({error}): correct it."
        ) from error
    rows = []
    for number, values in enumerate(found, 2):
        if any(value is None or "\0" in value for value in values):
            raise ValueError(
                f"{path}, line {number} has no path, domain, class and split: correct it."
            )
        rows.append((values[0], values[1], values[2], values[3]))
    for name, _, _, split in rows:
        if split not in ("train", "test"):
            raise ValueError(f"{path}: split={split} of {name} must be train or test.")
        if not (path.parent / name).is_file():
            raise ValueError(
                f"{path} names {name}, which is not there: remove the row or restore the file."
            )
    return rows


def _found(root: Path) -> list[tuple[str, str, str, str]]:
    if not all((root / split).is_dir() for split in ("train", "test")):
        return [(*row, "") for row in _below(root, root.name)]
    return [
        (f"{split}/{path}", domain, name, split)
        for split in ("train", "test")
        for path, domain, name in _below(root / split, root.name)
    ]


def _below(root: Path, only_domain: str) -> list[tuple[str, str, str]]:
    """(path below root, domain, class) of every picture in class/ or domain/class/."""
    rows = []
    for path in root.glob("*/**/*"):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        if path.suffix.lower() not in PICTURES or hidden or path.is_dir():
            continue
        regular_file(path)
        if len(parts) not in (2, 3):
            raise ValueError(
                f"{path} lies too deep: pictures belong into class/ or domain/class/ below {root}."
            )
        rows.append(("/".join(parts), parts[0] if len(parts) == 3 else only_domain, parts[-2]))
    if len({row[0].count("/") for row in rows}) > 1:
        raise ValueError(
            f"data.root={root} mixes class/ and domain/class/: use one of them for all pictures."
        )
    return rows


def _parts(folder: Path, split: str) -> list[Path]:
    whole = existing_file(folder / f"{split}.parquet")
    return whole or [regular_file(path) for path in sorted(folder.glob(f"{split}-*.parquet"))]


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{path} is no readable Parquet file ({error}): fetch it again."
        ) from error


def _schema(path: Path) -> pa.Schema:
    with _readable(path):
        return pq.read_schema(path)


def _may_be_pictures(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind)
    )


def _types(path: Path) -> dict[str, pa.DataType]:
    """Return the types of a file's columns by their names."""
    schema = _schema(path)
    return dict(zip(schema.names, schema.types, strict=True))


def _same_kind(paths: list[Path], name: str, learnt: Kind | None) -> None:
    """Refuse text in one file and numbers in another, lists in one and single labels in another.

    learnt: where it is not said, or classes, floats do not go with integers: of these, silently, values would be made.
    """
    first: dict[pa.DataType, Path] = {}
    for path in paths:
        first.setdefault(plain_type(_schema(path).field(name).type), path)
    for (one, earlier), (other, path) in itertools.combinations(first.items(), 2):
        if not go_together(one, other, learnt in (None, "classification")):
            hint = ", or set data.kind=regression" if go_together(one, other, False) else ""
            raise ValueError(
                f"{path}: column {name} holds {other}, but {earlier} holds {one}: use one for all files{hint}."
            )


def _joined(paths: list[Path], parts: list[Any], name: str) -> Any:
    """The labels of all files in the form of the first one's: numbers or texts, sets, or rows of 0 and 1."""
    if isinstance(parts[0], list):
        return [
            row for part in parts for row in (part if isinstance(part, list) else part.tolist())
        ]
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = parts[0].shape[1]
    for path, part in zip(paths, parts, strict=True):
        if (odd := next((len(row) for row in part if len(row) != width), None)) is not None:
            raise ValueError(
                f"{path}: column {name} has a list of {odd} labels, and {paths[0]} lists of {width}: make them equal."
            )
    return np.concatenate([np.array(part).reshape(len(part), width) for part in parts])


def _class_names(paths: list[Path], label_column: str) -> list[str] | None:
    """The class names that the files' metadata give, ours or Hugging Face's; all files must agree."""
    earlier: list[str] | None = None
    for path in paths:
        names = _named(path, label_column)
        if names and earlier and names != earlier:
            raise ValueError(
                f"{path} names the classes {', '.join(names)}, the files before it {', '.join(earlier)}."
            )
        earlier = earlier or names
    return earlier


def _named(path: Path, label_column: str) -> list[str] | None:
    names: list[str] | None
    metadata = _schema(path).metadata or {}
    try:
        names = parse_json(metadata.get(b"class_names", b"null"))
        features = (
            parse_json(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        )
        names = names if names is not None else features.get(label_column, {}).get("names")
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: its class names ({error}) must be a list of different texts in JSON."
        ) from error
    return require(
        f"{path}: its class names",
        names,
        names is None or are_names(names),
        "a list of different texts",
    )
