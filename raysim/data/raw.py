"""Define the base class of data sources, and the samples that a source returns."""

from __future__ import annotations

import inspect
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from raysim.data.batches import Pipeline
from raysim.data.corruption import Rotation
from raysim.data.csr import Ints
from raysim.data.dataset import Dataset, Inputs, LabelArray, Samples, open_or_build
from raysim.data.labels import read_labels, streams_error
from raysim.data.pictures import Picture, resize_masks, stack_images
from raysim.data.values import as_float32
from raysim.primitives.checks import at_least, between, require
from raysim.primitives.errors import suggest
from raysim.primitives.files import user_path
from raysim.primitives.kinds import (
    IGNORED,
    KINDS,
    POSITION_KINDS,
    InputField,
    Kind,
    TargetField,
    Tokens,
)
from raysim.primitives.memory import check_memory

Augmentation: TypeAlias = Literal["crop", "flip", "rotate", "resized_crop", "jitter", "grey"]
BYTES_PER_TOKEN = 64  # model=gru, the smallest network for tokens, has 16 parameters for each token


class Origin(NamedTuple):
    """The names of the columns, arrays or files from which inputs, labels and users were read.

    unused: the names of columns that were left out.
    """

    inputs: str = ""
    labels: str = ""
    users: str = ""
    unused: str = ""


NO_ORIGIN = Origin()


@dataclass(frozen=True, eq=False)
class Raw:
    """The samples of a source, training samples first: arrays, or pictures that are not decoded.

    inputs: an array [n, ...] of uint8 values, floats or int64 token numbers; or n pictures.
    labels: the labels, whose content depends on `kind`:

        "classification"         class numbers, [n]
        "positions", "causal"    the class number of each position, [n, ...]
        "regression"             values, [n, outputs] or [n, outputs, ...]
        "multilabel"             1 for each label that a sample has, else 0, [n, outputs]
        "structure"              floats, [n, length of a row]

    train_rows: the number of training samples.
    class_names: the names of the model's outputs.
    domains: the domain of each sample, [n]; None if there is only one domain.
    domain_names: the names of the domains, by number.
    tokens: None takes the largest token number plus 1 as the number of tokens.
    origin: the columns that were read, for the plan of a run.
    fields: for several inputs, a description of each, in the order of a row of `inputs`; else ().
    targets: for kind="structure", a description of each array, in the order of a row of `labels`;
    else ().
    tokenizer: the tokenizer of language data; else "".
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
    fields: tuple[InputField, ...] = ()
    targets: tuple[TargetField, ...] = ()
    tokenizer: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The base class of data sources, with the settings that all sources have.

    only: the names of the classes to keep, numbered in this order; None keeps all.
    size: the new height and width of images and their masks, in pixels; None keeps their size.
    channels: 1 makes images grey, 3 makes them RGB. None keeps grey images and makes coloured
    pictures RGB, without transparency.
    cache: the folder for the data sets that raysim writes. None uses the environment variable
    RAYSIM_CACHE, or else ~/.cache/raysim.
    kind: "classification", "regression", "multilabel", "positions" (a class at each position, such
    as a pixel), "causal" (language data) or "structure" (labels of several named arrays). None
    infers it from the labels.
    ignore: the label that means "no label", which losses and scores ignore. Only `Arrays`, `NumPy`,
    `Npz`, `Leaf`, `WebDataset` and the subclasses of `TableSource` use it.
    label_noise: the share of each client's training labels that change to another class.
    rotation: the rotation of images (see `Rotation` in corruption.py).
    pool: replaces each block of pool x pool pixels by its mean; 1 changes nothing.
    mean, std: lists with one value, or with one per channel. Inputs x become (x - mean) / std,
    after images are scaled to [0, 1]. None does not normalise.
    augment: any of "resized_crop", "crop", "flip", "rotate", "jitter" and "grey", for images in
    training.
    crop_padding, rotate_degrees, crop_area, jitter, grey: the strengths of these augmentations (see
    `Pipeline` in batches.py).
    """

    only: list[str | int] | None = None
    size: int | None = None
    channels: Literal[1, 3] | None = None
    cache: str | None = None
    kind: Kind | None = None
    ignore: int | str = IGNORED
    label_noise: float = 0.0
    rotation: Rotation = field(default_factory=Rotation)
    pool: int = 1
    mean: list[float] | None = None
    std: list[float] | None = None
    augment: list[Augmentation] = field(default_factory=list)
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
        are_different = self.only is None or 0 < len(self.only) == len(set(map(str, self.only)))
        require("data.only", self.only, are_different, "a list of different names, or null")
        are_finite = all(math.isfinite(value) for value in self.mean or ())
        require("data.mean", self.mean, are_finite, "finite, or null")
        are_positive = all(0 < value < math.inf for value in self.std or ())
        require("data.std", self.std, are_positive, "above 0 and finite everywhere, or null")
        if (self.mean is None) != (self.std is None):
            raise ValueError(
                f"data.mean={self.mean} and data.std={self.std} must be set together. Set both, or "
                "null for both."
            )
        self._check_augmentation()
        self.check()

    def _check_augmentation(self) -> None:
        names = get_args(Augmentation)
        are_known = set(self.augment) <= set(names)
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        require("data.augment", self.augment, are_known, f"a list of {listed}, or []")
        at_least("data.crop_padding", self.crop_padding, 0)
        between("data.rotate_degrees", self.rotate_degrees, 0, 180)
        area = self.crop_area
        require(
            "data.crop_area",
            area,
            len(area) == 2 and 0 < area[0] <= area[1] < math.inf,
            "two shares of the image, [lowest, highest], both above 0 and the lowest first",
        )
        between("data.jitter", self.jitter, 0, 0.5)
        between("data.grey", self.grey, 0, 1)

    def check(self) -> None:
        """Raise ValueError for invalid settings of the subclass, before any data is read."""

    def files(self) -> list[Path]:
        """Return the files that `read` reads; download missing files.

        The data set is built again if the name, the size or the modification time of a file
        changes.
        """
        return []

    def read(self) -> Raw:
        """Return all samples."""
        raise NotImplementedError

    def with_domains(self, column: str) -> Source:
        """Return a copy of the source in which each different value of a column is a domain.

        With `partition=natural`, each domain becomes a client. The base class raises ValueError; a
        subclass for data with columns overrides this function.
        column: `partition.column`, such as a column of users.
        """
        raise ValueError(
            f"partition.column={column} names a column, but the data source {type(self).__name__} "
            "has no columns. Set it to null, or choose data=parquet or data=huggingface."
        )

    def pipeline(self) -> Pipeline:
        """Return the pipeline that augments and normalises the inputs of a training step."""
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
        """Return the data set without corruptions, from the cache if it was built before."""
        shared = {entry.name for entry in fields(Source)} - {"size", "channels", "kind"}
        settings = {key: value for key, value in asdict(self).items() if key not in shared}
        if self.ignore != IGNORED:
            settings["ignore"] = self.ignore
        if self.only:
            settings["only"] = [str(name) for name in self.only]
        files = []
        for path in (*self.files(), *_code_files(type(self))):
            stat = path.stat()
            files.append((os.path.realpath(path), stat.st_size, stat.st_mtime_ns))
        name = type(self).__name__.lower()
        content: dict[str, object] = {"source": name, "settings": settings, "files": files}
        if self.size is not None:
            content["resizes_masks"] = True  # older files in the cache have masks of the old size
        return open_or_build(self.cache, name, content, self._read_samples)

    def _read_samples(self) -> Samples:
        name = type(self).__name__
        raw = _read_as_kind(self.read(), self.kind, self.ignore, f"data source {name}")
        if self.only is not None:
            raw = _keep_classes(raw, [str(label) for label in self.only])
        count = len(raw.labels)
        if raw.train_rows > count:
            raise ValueError(
                f"data source {name} has train_rows={raw.train_rows}, but only {count} labels. "
                "Correct the `Raw` that its function `read` returns."
            )
        if raw.train_rows <= 0:
            action = "Check data.root" if hasattr(self, "root") else "Return some from `read`"
            raise ValueError(f"data source {name} has no training samples. {action}.")
        inputs, tokens = self._store_inputs(raw, name)
        if len(inputs) != count:
            raise ValueError(
                f"data source {name} has {len(inputs)} inputs and {count} labels. Give each input "
                "one label."
            )
        labels = convert_labels(raw.labels, raw.kind, len(raw.class_names), name)
        are_images = inputs.dtype == np.uint8 and inputs.ndim == 4
        if self.size is not None and are_images and raw.kind == "positions" and labels.ndim == 3:
            check_memory(f"{count} masks of data.size={self.size}", 8 * count * self.size**2)
            labels = resize_masks(labels, self.size)
        domains = np.zeros(count, dtype=np.int64) if raw.domains is None else raw.domains
        return Samples(
            inputs,
            labels,
            domains,
            raw.train_rows,
            raw.class_names,
            raw.domain_names or [name.lower()],
            raw.kind,
            tokens,
            _describe_columns(raw, inputs, tokens),
            raw.fields,
            raw.targets,
            raw.tokenizer,
        )

    def _store_inputs(self, raw: Raw, name: str) -> tuple[Inputs, Tokens | None]:
        """Return the inputs as they are stored, and their `Tokens` if they are token numbers.

        Pictures become uint8 [n, c, h, w]. `convert_inputs` converts other inputs.
        raw: the samples that the source read.
        name: the name of the source in errors.
        """
        if isinstance(raw.inputs, dict):
            raise ValueError(
                f"data source {name} has a dictionary of inputs ({', '.join(map(str, raw.inputs))})"
                ". In `read`, join them with `raysim.data.fields.pack_fields(...)`. It returns "
                "inputs and fields; pass both to `Raw`."
            )
        if isinstance(raw.inputs, np.ndarray):
            are_images = raw.inputs.dtype == np.uint8 and raw.inputs.ndim == 4
            if not are_images:
                return convert_inputs(raw.inputs, raw.tokens, name)
        count = len(raw.labels)
        if self.size is not None:
            needed_bytes = count * (self.channels or 1) * self.size**2
            check_memory(f"{count} images of data.size={self.size}", needed_bytes)
        return stack_images(raw.inputs, count, self.size, self.channels), None


def require_root(root: str | None, option: str, content: str) -> Path:
    """Return the path of `data.root`. Raise ValueError if it is not set.

    option: the user's choice, such as "data=csv", for the error.
    content: a description of what the path must contain, for the error.
    """
    if not root:
        raise ValueError(f"{option} needs data.root: {content}. Set data.root=PATH.")
    return user_path(root)


def convert_inputs(
    inputs: NDArray[Any], tokens: Tokens | None, name: str
) -> tuple[Inputs, Tokens | None]:
    """Convert inputs to the type in which raysim stores them; return them and their `Tokens`.

    Floats and booleans become float32. uint8 values stay uint8 if `tokens` is None. All other
    integers are token numbers and become int64. Without token numbers, the second result is None.
    inputs: [n, ...].
    tokens: None infers the number of tokens from the largest one.
    name: the name of the source, for errors.
    Raise ValueError for other types, floats that are not finite, and token numbers that `tokens`
    does not allow.
    """
    inputs = inputs[:, None] if inputs.ndim == 1 else inputs
    type_kind = inputs.dtype.kind
    if type_kind in "fb":
        return as_float32(inputs, f"data source {name}: the inputs"), None
    if type_kind not in "iu":
        action = "Give numbers"
        if type_kind in "SU":
            action = "Give numbers, or read text from a file: data=csv, jsonl, parquet, huggingface"
        raise ValueError(f"data source {name} has inputs of type {inputs.dtype}. {action}.")
    if inputs.dtype == np.uint8 and tokens is None:
        return inputs, None
    lowest, highest = (int(inputs.min()), int(inputs.max())) if inputs.size else (0, 0)
    check_memory(
        f"data source {name} has the token {highest} (integers are token numbers; store "
        "measurements as floats), and the weights of so many tokens",
        BYTES_PER_TOKEN * highest,
    )
    tokens = tokens or Tokens(highest + 1)
    if lowest < 0 or highest >= tokens.size:
        wrong, allowed = highest, f"0 to {tokens.size - 1}"
        if lowest < 0:
            wrong, allowed = lowest, "0 or more"
        raise ValueError(
            f"data source {name} has the token {wrong}, but only tokens {allowed} are allowed. "
            "raysim reads integers as token numbers: store measurements as floats."
        )
    return inputs.astype(np.int64), tokens


def convert_labels(labels: NDArray[Any], kind: Kind, outputs: int, name: str) -> LabelArray:
    """Convert labels to the type in which raysim stores them: int64 for classes, else float32.

    outputs: the number of the model's outputs.
    name: the name of the source in errors.
    Raise ValueError if labels for "regression" or "multilabel" do not fit `kind` or `outputs`. All
    other labels are not checked.
    """
    if kind in ("classification", *POSITION_KINDS):
        return labels.astype(np.int64)
    if kind == "structure":
        return labels.astype(np.float32)
    values = np.asarray(labels[:, None] if labels.ndim == 1 else labels, np.float32)
    if values.shape[1] != outputs:
        raise ValueError(
            f"data source {name} has labels of shape {values.shape}, but {outputs} class_names. "
            "Let its function 'read' return a Raw whose class_names has a name for each column of "
            "labels."
        )
    if kind == "multilabel" and not np.isin(values, (0, 1)).all():
        raise ValueError(
            f"data source {name} has labels for data.kind=multilabel that are not all 0 (absent) "
            "or 1 (present). Correct them, or set data.kind=regression if they are values."
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"data source {name} has labels for data.kind={kind} that are nan or infinite. Correct "
            "them."
        )
    return values


def _read_as_kind(raw: Raw, kind: Kind | None, ignore: int | str, place: str) -> Raw:
    """Convert the labels of samples to the kind of task that `data.kind` sets.

    For example, kind="regression" turns the classes "0" and "1" into the values 0.0 and 1.0.
    kind: None changes nothing.
    ignore: `data.ignore`, the label that means "no label".
    Raise ValueError if this is impossible.
    """
    if kind in (None, raw.kind):
        return raw
    if kind == "causal":
        raise streams_error(place)
    if raw.kind == "causal":
        raise ValueError(
            f"data.kind={kind}: {place} is language data. Set data.kind=causal or null."
        )
    if "structure" in (kind, raw.kind):
        raise ValueError(
            f"data.kind={kind}: {place} has labels of kind {raw.kind}, which cannot be converted. "
            "Set data.kind=null: raysim then recognises the kind of the labels (lists of "
            "dictionaries are of kind structure)."
        )
    labels: NDArray[Any] = raw.labels
    names: list[str] | None = raw.class_names
    if raw.kind == "classification":
        try:
            values, names = np.array([float(name) for name in raw.class_names]), None
        except ValueError:
            values = np.array(raw.class_names)
        labels = values[labels]
    if kind == "classification":
        names = None
    result = read_labels(labels, kind, names, place, ignore)
    return replace(raw, labels=result.values, class_names=result.names, kind=result.kind)


def _describe_columns(raw: Raw, inputs: Inputs, tokens: Tokens | None) -> str:
    """Describe in one line which columns have the inputs, the labels and the users.

    raw: the samples that the source read.
    inputs: the inputs as they are stored.
    tokens: None if the inputs are not token numbers.
    """
    if raw.fields:
        form = f"{len(raw.fields)} inputs: {_describe_fields(raw.fields)}"
    elif tokens:
        form = "token numbers"
    elif inputs.dtype == np.uint8:
        form = "images" if inputs.ndim == 4 else "levels"
    else:
        form = "numbers"
    outputs = len(raw.class_names)
    positions = f"{_format_shape(raw.labels.shape[1:])} positions"
    meanings = {
        "structure": "",
        "classification": "class" if outputs == 1 else "classes",
        "multilabel": "label, there or not" if outputs == 1 else "labels, each there or not",
        "regression": "value" if outputs == 1 else "values",
        "positions": f"classes at each of {positions}",
        "causal": f"tokens, the next one at each of {positions}",
    }
    labels = f"{outputs} {meanings[raw.kind]} (data.kind={raw.kind})"
    if raw.kind == "structure":
        shapes = [f"{part.name} (up to {_format_shape(part.shape)})" for part in raw.targets]
        labels = f"structures of {', '.join(shapes)} (data.kind=structure)"
    if raw.kind == "regression" and raw.labels.ndim > 2:
        labels = f"values of shape {_format_shape(raw.labels.shape[1:])} (data.kind=regression)"
    ignored = np.count_nonzero(raw.labels == IGNORED) if raw.labels.dtype.kind in "iu" else 0
    if ignored:
        things = "samples have no label" if raw.labels.ndim == 1 else "positions are ignored"
        labels += f", {ignored:,} of {raw.labels.size:,} {things}"
    origin = raw.origin
    parts = {
        "inputs": f"{origin.inputs} as {form}" if origin.inputs else form,
        "labels": f"{origin.labels} as {labels}" if origin.labels else labels,
        "users": origin.users,
        "left out": origin.unused,
    }
    return "; ".join(f"{part}: {text}" for part, text in parts.items() if text)


def _describe_fields(fields: Sequence[InputField]) -> str:
    texts = []
    for number, part in enumerate(fields):
        form = "tokens" if part.has_tokens else "numbers"
        texts.append(f"{part.name or number} ({_format_shape(part.shape)} {form})")
    return ", ".join(texts)


def _format_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _code_files(cls: type[Source]) -> list[Path]:
    """Return a list with the source file of a user's class; the data set depends on this file.

    Return [] for a class of raysim, and for a class from a notebook, which has no file.
    """
    if cls.__module__.partition(".")[0] == "raysim":
        return []
    try:
        return [Path(inspect.getfile(cls))]
    except (OSError, TypeError):  # a class that was defined in a notebook has no file
        return []


def _keep_classes(raw: Raw, classes: Sequence[str]) -> Raw:
    """Return only the samples of some classes, and the samples without a label.

    Pictures of other classes are never decoded.
    classes: the names of the classes to keep, which are numbered in this order.
    """
    if raw.kind != "classification":
        raise ValueError(
            f"data.only={list(classes)} needs one class for each sample, which this data does not "
            f"have (it is for {raw.kind}). Set data.only=null."
        )
    for name in classes:
        if name not in raw.class_names:
            hint = suggest(name, raw.class_names, "the data has")
            raise ValueError(f"data.only contains {name!r}, which is not a class: {hint}")
    numbers = np.full(len(raw.class_names), -1)
    numbers[[raw.class_names.index(name) for name in classes]] = np.arange(len(classes))
    labels = np.where(raw.labels == IGNORED, IGNORED, numbers[raw.labels])
    is_kept = labels != -1
    inputs: NDArray[Any] | Iterable[Picture] = itertools.compress(raw.inputs, is_kept)
    if isinstance(raw.inputs, np.ndarray):
        inputs = raw.inputs[is_kept]
    return replace(
        raw,
        inputs=inputs,
        labels=labels[is_kept],
        train_rows=int(np.count_nonzero(is_kept[: raw.train_rows])),
        class_names=list(classes),
        domains=None if raw.domains is None else raw.domains[is_kept],
    )
