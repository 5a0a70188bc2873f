"""What a source of data is: the settings that all share, and the raw samples that each delivers."""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.data.batches import Pipeline
from raysim.data.corruption import Rotation
from raysim.data.dataset import Dataset, Inputs, Labels, Samples, open_or_build
from raysim.data.labels import labels_of
from raysim.data.partition import Ints
from raysim.data.pictures import Picture, numbered, stacked
from raysim.data.values import as_float32
from raysim.primitives.checks import at_least, between, require
from raysim.primitives.errors import suggest
from raysim.primitives.kinds import KINDS, Kind, Tokens
from raysim.primitives.memory import check_memory

AUGMENTATIONS = ("crop", "flip", "rotate", "resized_crop", "jitter", "grey")


class Origin(NamedTuple):
    """Where inputs, labels and users were read: names of columns, arrays or files, for the plan of a run."""

    inputs: str = ""
    labels: str = ""
    users: str = ""
    unused: str = ""  # columns that were left out


NO_ORIGIN = Origin()


@dataclass(frozen=True, eq=False)
class Raw:
    """What a source delivers: arrays, or pictures still to be decoded; training rows first.

    inputs [n, ...]: uint8 levels, numbers, or int64 token numbers (`tokens`; None: as many as the largest says).
    labels: classes [n]; of several labels whether each is there, or values, [n, outputs] (or [n]).
    """

    inputs: NDArray[Any] | Iterable[Picture]
    labels: NDArray[Any]
    train_rows: int
    class_names: list[str]
    domains: Ints | None = None
    domain_names: list[str] = field(default_factory=list)
    kind: Kind = "classification"
    tokens: Tokens | None = None
    origin: Origin = NO_ORIGIN


@dataclass(frozen=True, kw_only=True)
class Source:
    """The settings that all sources share. `size` resizes to a square, `channels` makes grey or RGB of every image.

    only: names of the classes to keep, which are numbered in this order; None keeps all. kind: what is learnt; None: as
    the labels say (`labels.inferred_kind`). From `mean` on, the settings
    of the training step's pipeline. Images alone have a size, channels, a rotation, a pool and augmentations.
    """

    only: list[str | int] | None = None
    size: int | None = None
    channels: Literal[1, 3] | None = None
    cache: str | None = None
    kind: Kind | None = None
    label_noise: float = 0.0
    rotation: Rotation = field(default_factory=Rotation)
    pool: int = 1
    mean: list[float] | None = None
    std: list[float] | None = None
    augment: list[Literal["crop", "flip", "rotate", "resized_crop", "jitter", "grey"]] = field(
        default_factory=list
    )
    crop_padding: int = 4
    rotate_degrees: float = 30.0
    crop_area: list[float] = field(default_factory=lambda: [0.7, 1.0])
    jitter: float = 0.3
    grey: float = 0.1

    def __post_init__(self) -> None:
        if self.size is not None:
            between("data.size", self.size, 1, 2**15)
        require("data.channels", self.channels, self.channels in (None, 1, 3), "1, 3 or null")
        require("data.kind", self.kind, self.kind in (None, *KINDS), f"{', '.join(KINDS)} or null")
        between("data.label_noise", self.label_noise, 0, 1)
        at_least("data.pool", self.pool, 1)
        different = self.only is None or 0 < len(self.only) == len(set(map(str, self.only)))
        require("data.only", self.only, different, "a list of different names, or null")
        require("data.mean", self.mean, all(map(math.isfinite, self.mean or ())), "finite, or null")
        spread = all(0 < value < math.inf for value in self.std or ())
        require("data.std", self.std, spread, "above 0 and finite everywhere, or null")
        if (self.mean is None) != (self.std is None):
            raise ValueError(
                f"data.mean={self.mean} and data.std={self.std} belong together: give both, or null for both."
            )
        self._check_augmentation()
        self.check()

    def _check_augmentation(self) -> None:
        kinds = f"{', '.join(AUGMENTATIONS[:-1])} and {AUGMENTATIONS[-1]}"
        require(
            "data.augment",
            self.augment,
            set(self.augment) <= set(AUGMENTATIONS),
            f"a list of {kinds}, or []",
        )
        at_least("data.crop_padding", self.crop_padding, 0)
        between("data.rotate_degrees", self.rotate_degrees, 0, 180)
        area = self.crop_area
        valid = len(area) == 2 and 0 < area[0] <= area[1] < math.inf
        require(
            "data.crop_area",
            area,
            valid,
            "[lowest, highest] share of the image, above 0 and in this order",
        )
        between("data.jitter", self.jitter, 0, 0.5)
        between("data.grey", self.grey, 0, 1)

    def check(self) -> None:
        """Refuse settings that cannot be meant."""

    def files(self) -> list[Path]:
        """The files read; names, sizes and times are part of the cached file's name. Downloads what is missing."""
        return []

    def read(self) -> Raw:
        """All samples."""
        raise NotImplementedError

    def with_domains(self, column: str) -> Source:
        """The same source with a column's values as the domains, of which `partition=natural` makes clients."""
        raise ValueError(
            f"partition.column={column} names a column, and data source {type(self).__name__} has none: leave it null, "
            "or choose data=parquet or data=huggingface."
        )

    def pipeline(self) -> Pipeline:
        """What the training step does to a batch."""
        return Pipeline(
            None if self.mean is None else tuple(self.mean),
            None if self.std is None else tuple(self.std),
            tuple(self.augment),
            self.crop_padding,
            self.rotate_degrees,
            (self.crop_area[0], self.crop_area[1]),
            self.jitter,
            self.grey,
        )

    def build(self) -> Dataset:
        """The cached data set without corruptions; the first call on a machine reads, resizes and writes it."""
        shared = {entry.name for entry in fields(Source)} - {"size", "channels", "kind"}
        settings = {key: value for key, value in asdict(self).items() if key not in shared}
        settings |= {"only": [str(name) for name in self.only]} if self.only else {}
        stats = [
            (os.path.realpath(path), path.stat().st_size, path.stat().st_mtime_ns)
            for path in (*self.files(), *_code(type(self)))
        ]
        name = type(self).__name__.lower()
        return open_or_build(
            self.cache, name, {"source": name, "settings": settings, "files": stats}, self._samples
        )

    def _samples(self) -> Samples:
        name = type(self).__name__
        raw = _of_kind(self.read(), self.kind, f"data source {name}")
        raw = raw if self.only is None else _only(raw, [str(name) for name in self.only])
        count = len(raw.labels)
        if not 0 < raw.train_rows <= count:
            do = "check data.root" if hasattr(self, "root") else "its `read` must deliver some"
            raise ValueError(f"data source {name} has no training samples: {do}.")
        domains = np.zeros(count, dtype=np.int64) if raw.domains is None else raw.domains
        names = raw.domain_names or [name.lower()]
        if isinstance(raw.inputs, np.ndarray) and not (
            raw.inputs.dtype == np.uint8 and raw.inputs.ndim == 4
        ):
            inputs, tokens = accepted(raw.inputs, raw.tokens, name)
        else:
            if self.size is not None:
                check_memory(
                    f"{count} images of data.size={self.size}",
                    count * (self.channels or 1) * self.size**2,
                )
            inputs, tokens = stacked(raw.inputs, count, self.size, self.channels), None
        if len(inputs) != count:
            raise ValueError(
                f"data source {name} has {len(inputs)} inputs and {count} labels: give each input its own."
            )
        labels = labelled(raw.labels, raw.kind, len(raw.class_names), name)
        columns = _described_columns(raw, inputs, tokens)
        return Samples(
            inputs,
            labels,
            domains,
            raw.train_rows,
            raw.class_names,
            names,
            raw.kind,
            tokens,
            columns,
        )


def accepted(
    inputs: NDArray[Any], tokens: Tokens | None, place: str
) -> tuple[Inputs, Tokens | None]:
    """Inputs in the type they are stored in: uint8 as it is, floats as float32, other integers as token numbers.

    Raises ValueError where that would change a value: for other types, nan, and numbers that are no tokens.
    """
    inputs = inputs[:, None] if inputs.ndim == 1 else inputs
    kind = inputs.dtype.kind
    if kind in "fb":
        return as_float32(inputs, f"data source {place}: the inputs"), None
    if kind not in "iu":
        text = (
            "; text is read from a file: data=csv, jsonl, parquet or huggingface"
            if kind in "SU"
            else ""
        )
        raise ValueError(
            f"data source {place} has inputs of type {inputs.dtype}: they must be numbers{text}."
        )
    if inputs.dtype == np.uint8 and tokens is None:
        return inputs, None
    lowest, highest = (int(inputs.min()), int(inputs.max())) if inputs.size else (0, 0)
    meaning = "(integers are token numbers; store measurements as floats)"
    check_memory(
        f"data source {place} has the token {highest} {meaning}, and the weights of so many",
        64 * highest,
    )
    tokens = tokens or Tokens(highest + 1)
    if lowest < 0 or highest >= tokens.size:
        wrong, allowed = (
            (lowest, "0 or more") if lowest < 0 else (highest, f"0 to {tokens.size - 1}")
        )
        raise ValueError(
            f"data source {place} has the token {wrong}, its tokens are {allowed}: integers are token numbers, so "
            "store measurements as floats."
        )
    return inputs.astype(np.int64), tokens


def _of_kind(raw: Raw, kind: Kind | None, place: str) -> Raw:
    """Return the samples with their labels read as `data.kind` says. Raise ValueError where they cannot be."""
    if kind in (None, raw.kind):
        return raw
    names: list[str] | None = raw.class_names
    labels = raw.labels
    if raw.kind == "classification":
        try:
            numbers, names = np.array([float(name) for name in raw.class_names]), None
        except ValueError:
            numbers = np.array(raw.class_names)
        labels = numbers[labels]
    values, names, kind = labels_of(
        labels, kind, names if kind != "classification" else None, place
    )
    return replace(raw, labels=values, class_names=names, kind=kind)


def _described_columns(raw: Raw, inputs: Inputs, tokens: Tokens | None) -> str:
    """Return what was read as what, in one line."""
    levels = "images" if inputs.ndim == 4 else "levels"
    form = "token numbers" if tokens else levels if inputs.dtype == np.uint8 else "numbers"
    outputs = len(raw.class_names)
    meanings = {
        "classification": "class",
        "multilabel": "label, there or not",
        "regression": "value",
    }
    if outputs != 1:
        meanings = {
            "classification": "classes",
            "multilabel": "labels, each there or not",
            "regression": "values",
        }
    origin = raw.origin
    labels = f"{outputs} {meanings[raw.kind]} (data.kind={raw.kind})"
    parts = {
        "inputs": f"{origin.inputs} as {form}" if origin.inputs else form,
        "labels": f"{origin.labels} as {labels}" if origin.labels else labels,
        "users": origin.users,
        "left out": origin.unused,
    }
    return "; ".join(f"{part}: {text}" for part, text in parts.items() if text)


def labelled(labels: NDArray[Any], kind: Kind, outputs: int, place: str) -> Labels:
    """Labels in the type they are stored in. Raises ValueError where they do not fit what is learnt."""
    if kind == "classification":
        return labels.astype(np.int64)
    values = np.asarray(labels[:, None] if labels.ndim == 1 else labels, np.float32)
    if values.shape[1:] != (outputs,):
        raise ValueError(
            f"data source {place} has labels of shape {values.shape} for {outputs} outputs: name each one."
        )
    allowed = np.isin(values, (0, 1)).all() if kind == "multilabel" else np.isfinite(values).all()
    if not allowed:
        what, other = "finite", ""
        if kind == "multilabel":
            what, other = (
                "0 or 1, for not there or there",
                ", or set data.kind=regression if they are values",
            )
        raise ValueError(
            f"data source {place} has labels for {kind} that are not all {what}: correct them{other}."
        )
    return values


def _code(cls: type[Source]) -> list[Path]:
    """The file of a user's own class: when it changes, the data are built again."""
    if cls.__module__.partition(".")[0] == "raysim":
        return []
    try:
        return [Path(inspect.getfile(cls))]
    except (OSError, TypeError):  # of a notebook, or typed in
        return []


def numbered_domains(
    values: NDArray[Any], train: NDArray[np.bool_], ordered: Sequence[str] | None = None
) -> tuple[Ints, list[str]]:
    """Number domains, or users, in their natural order; those without training rows come last.

    values: what names the domain of each row. ordered: all names in the order to number them by; None: as
    `natural_order`.
    """
    names = values.astype(np.str_)
    order = natural_order(values) if ordered is None else ordered
    trained = set(names[train].tolist())
    known = [name for name in order if name in trained]
    others = [name for name in order if name not in trained]
    return numbered(names, known + others, "a domain")


def natural_order(values: NDArray[Any]) -> list[str]:
    """Return the different values as text: numbers by value, text as text ("user10" comes before "user2")."""
    if values.dtype.kind in "iuf":
        return [str(value) for value in np.unique(values).tolist()]
    return sorted(set(values.astype(np.str_).tolist()))


def join_names(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate names of domains, as integers where all are integers, else as text."""
    if all(part.dtype.kind in "iu" for part in parts):
        joined = np.concatenate(parts)
        if joined.dtype.kind in "iu":  # signed and unsigned integers of 64 bits would become floats
            return joined
    return np.concatenate([part.astype(np.str_) for part in parts])


def _only(raw: Raw, classes: Sequence[str]) -> Raw:
    """What is of these classes; pictures of others are never decoded."""
    if raw.kind != "classification":
        raise ValueError(
            f"data.only={list(classes)} keeps some classes, and the data has none ({raw.kind}): leave it null."
        )
    if unknown := [name for name in classes if name not in raw.class_names]:
        raise ValueError(
            f"data.only names {unknown[0]!r}: {suggest(unknown[0], raw.class_names, 'the data has')}"
        )
    numbers = np.full(len(raw.class_names), -1)
    numbers[[raw.class_names.index(name) for name in classes]] = np.arange(len(classes))
    labels = numbers[raw.labels]
    rows = labels >= 0
    inputs = (
        raw.inputs[rows]
        if isinstance(raw.inputs, np.ndarray)
        else itertools.compress(raw.inputs, rows)
    )
    domains = None if raw.domains is None else raw.domains[rows]
    train_rows = int(np.count_nonzero(rows[: raw.train_rows]))
    return replace(
        raw,
        inputs=inputs,
        labels=labels[rows],
        train_rows=train_rows,
        class_names=list(classes),
        domains=domains,
    )
