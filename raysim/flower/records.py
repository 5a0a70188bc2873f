"""Convert the content of Flower messages to bytes and back, without pickle.

Replies on disk, client states in checkpoints, and replies from workers have this form: a header in
JSON, then the data of all arrays and byte strings.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

Buffer: TypeAlias = bytes | memoryview
_HEADER_SIZE_BYTES = 8
_KINDS = {"metric": MetricRecord, "config": ConfigRecord}
_VALUES = (bool, int, float, str, bytes, np.generic)


class RecordEntry(NamedTuple):
    """An array or a value in a record of a message's content.

    record: the name of the record.
    key: the name of the array or value in the record.
    shape: the shape of an array; () for a value.
    """

    record: str
    key: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Return the entry as text, such as "arrays['weight'] of shape [3, 2]"."""
        shape = f" of shape {list(self.shape)}" if self.shape else ""
        return f"{self.record}[{self.key!r}]{shape}"


class _BytesWriter:
    """A collector of the binary data that follow the header of packed records."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def add(self, data: bytes) -> int:
        """Append a byte string to `parts`; return the byte string's index, for the header."""
        self.parts.append(data)
        return len(self.parts) - 1


def check_records(content: Any, name: str) -> None:
    """Raise TypeError for content that `pack_records` cannot convert.

    Flower does not check values that an app appends to a list later.
    name: the name of the app's variable that contains the records, for the error.
    """
    if not isinstance(content, RecordDict):
        raise TypeError(f"{name} is a {type(content).__name__}. Use a RecordDict.")
    for record_name, record in content.items():
        if isinstance(record, ArrayRecord):
            continue
        for key, value in record.items():
            for item in value if isinstance(value, list) else [value]:
                if not isinstance(item, _VALUES):
                    raise TypeError(
                        f"{name}[{record_name!r}][{key!r}] contains a {type(item).__name__}. "
                        "Use numbers, texts or bytes."
                    )


def pack_records(content: RecordDict) -> bytes:
    """Convert all records to bytes; their order is kept."""
    writer = _BytesWriter()
    records: list[list[Any]] = []
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            arrays = [
                [key, array.dtype, list(array.shape), array.stype, writer.add(array.data)]
                for key, array in record.items()
            ]
            records.append(["array", name, arrays])
            continue
        kind = "metric" if isinstance(record, MetricRecord) else "config"
        values = [[key, _pack_value(value, writer)] for key, value in record.items()]
        records.append([kind, name, values])
    sizes = [len(part) for part in writer.parts]
    header = json.dumps({"records": records, "sizes": sizes}).encode()
    return b"".join([len(header).to_bytes(_HEADER_SIZE_BYTES, "little"), header, *writer.parts])


def unpack_records(data: Buffer) -> RecordDict:
    """Return the records that `pack_records` converted to these bytes."""
    view = memoryview(data)
    header, start = _read_header(view)
    parts = []
    for size in header["sizes"]:
        parts.append(bytes(view[start : start + size]))
        start += size
    content = RecordDict()
    for kind, name, entries in header["records"]:
        if kind == "array":
            record = ArrayRecord()
            for key, dtype, shape, stype, number in entries:
                record[key] = Array(dtype, tuple(shape), stype, parts[number])
            content[name] = record
            continue
        values = {key: _unpack_value(value, parts) for key, value in entries}
        content[name] = _KINDS[kind](values)
    return content


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """Return the header of packed records, and the position at which the data begin.

    view: the packed records, or the header alone.
    """
    start = _HEADER_SIZE_BYTES + int.from_bytes(view[:_HEADER_SIZE_BYTES], "little")
    return json.loads(bytes(view[_HEADER_SIZE_BYTES:start])), start


def copy_header(data: Buffer) -> bytes:
    """Return a copy of the header of packed records, which is enough for `structure_of`."""
    view = memoryview(data)
    end = _HEADER_SIZE_BYTES + int.from_bytes(view[:_HEADER_SIZE_BYTES], "little")
    return bytes(view[:end])


def _pack_value(value: Any, writer: _BytesWriter) -> Any:
    """Convert a value of a record to one that JSON can express.

    A byte string is added to `writer` and replaced by {"bytes": its index in `writer.parts`}.
    writer: the object that collects the byte strings.
    """
    if isinstance(value, bytes):
        return {"bytes": writer.add(value)}
    if isinstance(value, list):
        return [_pack_value(item, writer) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def _unpack_value(value: Any, parts: list[bytes]) -> Any:
    if isinstance(value, dict):
        return parts[value["bytes"]]
    if isinstance(value, list):
        return [_unpack_value(item, parts) for item in value]
    return value


def count_array_bytes(content: RecordDict) -> int:
    """Return the bytes of all arrays, without the headers that Flower adds to arrays.

    An array whose type is unknown, such as that of a NumPyClient, counts with its header.
    """
    total = 0
    for record in content.array_records.values():
        for array in record.values():
            total += _array_bytes(array)
    return total


def structure_of(data: Buffer) -> frozenset[RecordEntry]:
    """Return the names of all values, and the names and shapes of all arrays, in packed records.

    An array whose shape Flower does not know has the shape (number of bytes,).
    data: packed records, or only their header.
    """
    header, _ = _read_header(memoryview(data))
    entries = set()
    for kind, name, values in header["records"]:
        for value in values:
            shape: tuple[int, ...] = ()
            if kind == "array":
                _, dtype, dimensions, _, number = value
                shape = tuple(dimensions) if dtype else (header["sizes"][number],)
            entries.add(RecordEntry(name, value[0], shape))
    return frozenset(entries)


def _array_bytes(array: Array) -> int:
    if not array.dtype:  # an array of a Client or NumPyClient has no type; its header is small
        return _length(array)
    try:
        item_bytes = np.dtype(array.dtype).itemsize
    except TypeError:
        return _length(array)
    values = int(np.prod(array.shape, dtype=np.int64))
    return values * int(item_bytes)


def _length(array: Array) -> int:
    data: bytes = array.data
    return len(data)
