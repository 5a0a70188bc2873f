"""Read tar files in the layout of webdataset, where files with the same key form a sample."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.data.columns import (
    LABEL_NAMES,
    USER_NAMES,
    TokenSettings,
    assemble,
    find_column,
    read_inputs,
    read_label_column,
    spread_test_rows,
)
from raysim.data.csr import Ints
from raysim.data.fields import pack_fields
from raysim.data.pictures import PICTURE_SUFFIXES, Picture, stack_images
from raysim.data.raw import Origin, Raw, Source, require_root
from raysim.data.rows import train_first
from raysim.data.values import plain_array
from raysim.primitives.checks import at_least, in_range, require
from raysim.primitives.files import parse_json, regular_file
from raysim.primitives.kinds import Tokens

INTEGER_ENDINGS = ("cls", "cls2", "id", "index", "inx")
TEXT_ENDINGS = ("txt", "text", "transcript")
USUAL_LABELS = ("cls", *LABEL_NAMES, "mask", "seg")


class Part(NamedTuple):
    """One file of a sample, and where the file's bytes are in a tar file.

    shard: the tar file.
    name: the file's name in the tar file.
    start: the position of the file's first byte.
    size: the number of the file's bytes.
    """

    shard: Path
    name: str
    start: int
    size: int

    @property
    def place(self) -> str:
        """Return "TAR, NAME" for error messages: the path of the tar file, and this part's name."""
        return f"{self.shard}, {self.name}"

    def read(self) -> bytes:
        """Return the content of the file."""
        with self.shard.open("rb") as stream:
            stream.seek(self.start)
            return stream.read(self.size)


@dataclass(frozen=True)
class WebDataset(Source):
    """A source that reads tar files, in which all files with the same key form a sample.

    For example, 0007.jpg and 0007.cls are the files of the sample 0007. The ending after the first
    dot gives the type: a picture, `npy`, `json`, `txt`, or `cls` (an integer).

    root: a folder of tar files, in which names of test files start with "test"; or a folder with
    the subfolders train and, optionally, test.
    columns: the endings of the inputs, such as "jpg". None uses all but the label and the user.
    Several inputs become arguments of the model, such as `image` for "image.png".
    label: the ending of the label; None finds a usual one, such as "cls". A label is an integer,
    text, an array, a picture whose pixels are classes, or JSON.
    user: the ending of the user; None finds a usual one, such as "user", if there is one.
    test_fraction: without test files, this share of each user's samples is for testing, equally in
    each class.
    length: the largest number of tokens of a text or a list; further tokens are left out.
    padding: the token number that fills up short lists of tokens; text has a padding of its own.
    tokenizer: a folder or name of a Hugging Face tokenizer for text; None turns text into bytes.
    """

    root: str | None = None
    columns: list[str] | None = None
    label: str | None = None
    user: str | None = None
    test_fraction: float = 0.2
    length: int = 128
    padding: int = 0
    tokenizer: str | None = None

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)
        at_least("data.length", self.length, 1)
        require(
            "data.columns",
            self.columns,
            self.columns != [],
            "a list of at least one file name ending, such as [jpg], or null",
        )

    def with_domains(self, column: str) -> WebDataset:
        return replace(self, user=column)

    def files(self) -> list[Path]:
        train, test = self._find_shards()
        return train + test

    def read(self) -> Raw:
        train, test = self._find_shards()
        samples = _read_index(train)
        train_count = len(samples)
        samples += _read_index(test)
        place = str(self.root)
        columns, label, user = self._choose_endings(samples[0], place)
        for sample in samples:
            _check_parts(sample, [*columns, label, *([user] if user else [])])
        labels = read_label_column(
            self._read_labels([sample[label] for sample in samples], label),
            self.kind,
            None,
            place,
            self.ignore,
        )
        users = None
        if user is not None:
            texts = [_read_text(sample[user]).strip() for sample in samples]
            are_numbers = all(text.isascii() and text.isdecimal() for text in texts)
            users = np.array([int(text) for text in texts] if are_numbers else texts)
        is_test = np.arange(len(samples)) >= train_count
        if not test:
            is_test = spread_test_rows(labels, users, self.test_fraction)
        origin = Origin(", ".join(columns), label, user or "")
        if len(columns) == 1 and _is_picture(columns[0]):
            raw = assemble(np.arange(len(samples)), labels, users, is_test, None, origin)
            order, _ = train_first(is_test)
            return replace(raw, inputs=_pictures(samples, columns[0], order))
        if len(columns) == 1:
            inputs, tokens = self._read_input(samples, columns[0], place)
            return assemble(inputs, labels, users, is_test, tokens, origin)
        arrays = {}
        for ending in columns:
            arrays[_field_name(ending)], _ = self._read_input(samples, ending, place)
        inputs, fields = pack_fields(arrays, place)
        return assemble(inputs, labels, users, is_test, None, origin, fields=fields)

    def _find_shards(self) -> tuple[list[Path], list[Path]]:
        """Return the tar files for training and the tar files for testing, both sorted by name."""
        root = require_root(self.root, "data=webdataset", "a folder of tar files")
        train, test = _tar_files(root / "train"), _tar_files(root / "test")
        for path in _tar_files(root):
            (test if path.name.startswith("test") else train).append(path)
        if not train:
            raise ValueError(
                f"data.root={self.root} holds neither *.tar nor train/*.tar. Give a folder with "
                "tar files."
            )
        return train, test

    def _choose_endings(
        self, sample: Mapping[str, Part], place: str
    ) -> tuple[list[str], str, str | None]:
        """Return the endings of the inputs, the ending of the label, and that of the user or None.

        sample: the files of the first sample, by ending.
        Raise ValueError if `data.label` is not set and no ending is usual for labels. Raise it also
        if no file is left for the inputs.
        """
        by_name = {_field_name(ending): ending for ending in sample}
        label = self.label or by_name.get(find_column(list(by_name), USUAL_LABELS) or "")
        user = self.user or by_name.get(find_column(list(by_name), USER_NAMES) or "")
        endings = ", ".join(sample)
        if label is None:
            raise ValueError(
                f"{place}: the samples have the endings {endings}, and none is a usual ending of "
                "labels. Set data.label to the ending of the labels."
            )
        columns = self.columns or [ending for ending in sample if ending not in (label, user)]
        if not columns:
            raise ValueError(
                f"{place}: a sample has only files with the endings {endings}. raysim reads them "
                "as labels or users, and finds no input. Set data.columns to the endings of the "
                "input files, or data.label to the ending of the label files."
            )
        return columns, label, user

    def _read_labels(self, parts: Sequence[Part], ending: str) -> Any:
        if _is_picture(ending):
            return _stack([self._read_mask(part) for part in parts], f"{self.root}, {ending}")
        values = [_read_value(part, ending) for part in parts]
        if isinstance(values[0], np.ndarray):
            return _stack(values, f"{self.root}, {ending}")
        has_lists = any(isinstance(value, (list, dict)) for value in values)
        return values if has_lists else plain_array(values, f"{self.root}, {ending}")

    def _read_mask(self, part: Part) -> NDArray[np.uint8]:
        """Read a picture whose pixel values are class numbers: uint8 [height, width]."""
        picture = Picture(part.place, part.read()).open()
        if picture.mode not in ("1", "L", "P"):
            raise ValueError(
                f"{part.place} has colours (mode {picture.mode}), but a picture of labels must "
                "have a class for each pixel. Save it with a palette or as grey levels."
            )
        if self.size is not None:
            picture = picture.resize((self.size, self.size), resample=0)  # the nearest pixel
        return np.asarray(picture).astype(np.uint8)

    def _read_input(
        self, samples: Sequence[Mapping[str, Part]], ending: str, place: str
    ) -> tuple[NDArray[Any], Tokens | None]:
        """Read one file of each of n samples; return the contents as an array [n, ...].

        Also return the `Tokens` of texts and of lists of integers, or None for other contents.
        samples: the files of each sample, by ending.
        ending: the ending of the files to read, such as "jpg".
        place: `data.root`, for errors.
        """
        if _is_picture(ending):
            pictures = _pictures(samples, ending, np.arange(len(samples)))
            return stack_images(pictures, len(samples), self.size, self.channels), None
        values = [_read_value(sample[ending], ending) for sample in samples]
        if isinstance(values[0], np.ndarray):
            return _stack(values, f"{place}, {ending}"), None
        table = pa.table({ending: values})
        settings = TokenSettings(self.length, self.padding, self.tokenizer)
        return read_inputs(table, [ending], settings, place)


def _tar_files(folder: Path) -> list[Path]:
    return [regular_file(path) for path in sorted(folder.glob("*.tar"))]


def _field_name(ending: str) -> str:
    """Return the name of the model's argument that gets the input files with this ending.

    This is the ending up to its last dot: `image` for "image.png", but `jpg` for "jpg".
    """
    return ending.rpartition(".")[0] or ending


def _is_picture(ending: str) -> bool:
    return f".{ending.rpartition('.')[2]}" in PICTURE_SUFFIXES


def _read_index(shards: Sequence[Path]) -> list[dict[str, Part]]:
    """Return a dictionary for each sample, which maps file name endings to the sample's files.

    The samples have the order in which they are stored in the tar files.
    shards: the tar files.
    """
    samples: dict[tuple[Path, str], dict[str, Part]] = {}
    for shard in shards:
        try:
            with tarfile.open(shard, "r:") as archive:
                members = [member for member in archive if member.isfile()]
        except (OSError, tarfile.TarError) as error:
            raise ValueError(
                f"{shard} is not a readable tar file ({error}). Write it again, without "
                "compression."
            ) from error
        for member in members:
            folder, _, name = member.name.rpartition("/")
            stem, _, ending = name.partition(".")
            if not stem or not ending:  # hidden files, and files without an ending
                continue
            part = Part(shard, member.name, member.offset_data, member.size)
            samples.setdefault((shard, f"{folder}/{stem}"), {})[ending.lower()] = part
        if not any(path == shard for path, _ in samples):
            raise ValueError(f"{shard} has no samples. Write files named KEY.ENDING into it.")
    return list(samples.values())


def _check_parts(sample: Mapping[str, Part], endings: Sequence[str]) -> None:
    """Raise ValueError if a file of a sample is missing.

    sample: the files of the sample, by ending.
    endings: the endings of the files that the sample must have.
    """
    for ending in endings:
        if ending not in sample:
            other = next(iter(sample.values()))
            raise ValueError(
                f"{other.place}: this sample has no file that ends in .{ending}; its files end "
                f"in {', '.join(sample)}. Write the missing file, or set data.columns, "
                "data.label and data.user to endings that every sample has."
            )


def _pictures(samples: Sequence[Mapping[str, Part]], ending: str, order: Ints) -> Iterator[Picture]:
    """Yield the pictures of some samples in a given order.

    samples: the files of each sample, by ending.
    ending: the ending of the pictures.
    order: the indices of the samples.
    """
    for row in order.tolist():
        part = samples[row][ending]
        yield Picture(part.place, part.read())


def _read_text(part: Part) -> str:
    try:
        return part.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{part.place} is not text in UTF-8 ({error}). Convert it.") from error


def _read_value(part: Part, ending: str) -> Any:
    """Return the content of a file that is not a picture: a number, text, array or JSON value.

    ending: the file's ending, which gives its type.
    Raise ValueError if the file cannot be read or has an unknown ending.
    """
    form = ending.rpartition(".")[2]
    try:
        if form == "npy":
            return np.load(io.BytesIO(part.read()), allow_pickle=False)
        if form == "json":
            return parse_json(part.read())
        if form in INTEGER_ENDINGS:
            return int(_read_text(part))
    except ValueError as error:
        raise ValueError(f"{part.place} cannot be read ({error}). Correct it.") from error
    if form in TEXT_ENDINGS:
        return _read_text(part).strip()
    raise ValueError(
        f"{part.place} ends in .{form}, which raysim cannot read. Convert the file to a picture "
        "or to a file that ends in npy, json, txt or cls. Or set data.columns and data.label to "
        "the endings of files that raysim can read."
    )


def _stack(arrays: Sequence[NDArray[Any]], place: str) -> NDArray[Any]:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        described = " and ".join(map(str, sorted(shapes)[:2]))
        raise ValueError(
            f"{place}: the arrays have different shapes: {described}. Give all arrays the same "
            "shape, or set data.size to resize pictures."
        )
    return np.stack(arrays)
