"""Keep arrays on disk instead of in memory, in unnamed files.

A `SpillFile` stores the arrays of each client; `read` returns copies. Programs use the arrays of a
`MappedFile` like arrays in memory; the system reads the file when necessary.
"""

from __future__ import annotations

import mmap
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

_ALIGNMENT_BYTES = 64
# Bytes of a file that are mapped at once; a longer array gets its own segment.
SEGMENT_BYTES = 2**28


@dataclass(frozen=True)
class _StoredArray:
    """An array in a file: its name, type and shape, and the bytes that it occupies."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    size: int  # bytes


class SpillFile:
    """A file that contains a dictionary of arrays for each client.

    The file is removed when the process ends in any way.

    folder: a folder on the disk to use; "" is the system's folder for temporary files.
    """

    def __init__(self, folder: Path | str = ""):
        self._file = _UnnamedFile(folder, "client states")
        self._places: dict[int, tuple[int, int]] = {}  # by client: start and bytes of its place
        self._pieces: dict[int, list[_StoredArray]] = {}  # by client
        self._end = 0

    def write(self, client: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace a client's arrays.

        Raises OSError, which names the folder, if the file cannot be written.
        """
        needed = sum(_aligned_bytes(array) for array in arrays.values())
        start, room = self._places.get(client, (self._end, 0))
        if room < needed:
            start = self._end
            self._places[client] = start, needed
            self._end = start + needed
        pieces = []
        for key, array in arrays.items():
            self._file.write(start, array, self._end)
            pieces.append(_StoredArray(key, array.dtype, array.shape, start, array.nbytes))
            start += _aligned_bytes(array)
        self._pieces[client] = pieces

    def read(self, client: int) -> dict[str, np.ndarray]:
        """Return a copy of a client's arrays, read-only."""
        pieces = self._pieces[client]
        if not pieces:
            return {}
        start = pieces[0].start
        end = pieces[-1].start + pieces[-1].size
        # A copy, because the pages of a memory map stay in the memory of this process.
        content = np.empty(end - start, np.uint8)
        self._file.read(start, content)
        content.flags.writeable = False
        arrays: dict[str, np.ndarray] = {}
        for piece in pieces:
            offset = piece.start - start
            part = content[offset : offset + piece.size]
            arrays[piece.key] = part.view(piece.dtype).reshape(piece.shape)
        return arrays


class MappedFile:
    """A temporary file whose arrays are used like arrays in memory, and may be changed in place.

    The space of an array is free when the array and all its views are deleted. The file is removed
    when the process ends.

    folder: where the file is; "" is the system's folder for temporary files.
    what: the kind of the arrays, for errors.
    resident: after this number of read bytes, `note_read` removes the file's content from memory.
    """

    def __init__(self, folder: Path | str, what: str, resident: float):
        self._file = _UnnamedFile(folder, what)
        self._resident = resident
        self._segments: list[mmap.mmap] = []
        self._addresses: list[range] = []  # of each segment
        self._starts: list[int] = []  # of each segment in the file
        self._end = self._limit = 0  # ends of the space that was ever used, and of the last segment
        # By bytes: segments and offsets of the space that is free again.
        self._free: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._read = 0  # bytes read since pages were last removed
        self.used = 0  # bytes of the arrays in the file

    def move(self, array: np.ndarray) -> np.ndarray:
        """Write an array into the file; return the copy, which is mapped from the file.

        Raises OSError, which names the folder, if the file cannot be written.
        """
        size = _aligned_bytes(array)
        segment, offset = self._take(size)
        self._file.write(self._starts[segment] + offset, array, self._end)
        region = np.frombuffer(self._segments[segment], np.uint8, array.nbytes, offset)
        self.used += size
        weakref.finalize(region, self._release, size, segment, offset).atexit = False
        return region.view(array.dtype).reshape(array.shape)

    def contains(self, array: np.ndarray) -> bool:
        """Return True if an array is in this file."""
        address = array.ctypes.data
        return any(address in addresses for addresses in self._addresses)

    def note_read(self, size: int) -> None:
        """Record that the caller reads `size` bytes next.

        Each time more than `resident` bytes have been read, all pages are removed from memory.
        """
        if self._read + size > self._resident:
            for segment in self._segments:
                segment.madvise(mmap.MADV_DONTNEED)
            self._read = 0
        self._read += size

    def _take(self, size: int) -> tuple[int, int]:
        """Reserve space for `size` bytes in the file.

        The file consists of segments, each of which is mapped as a whole. Return the index of a
        segment, and the position of the space in it.
        """
        if self._free[size]:
            return self._free[size].pop()
        if self._end + size > self._limit:
            self._add_segment(max(size, SEGMENT_BYTES))
        offset = self._end - self._starts[-1]
        self._end += size
        return len(self._segments) - 1, offset

    def _add_segment(self, size: int) -> None:
        self._end = -(-self._limit // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._limit = self._end + size
        segment = self._file.map(self._end, size)
        address = np.frombuffer(segment, np.uint8).ctypes.data
        self._segments.append(segment)
        self._addresses.append(range(address, address + size))
        self._starts.append(self._end)

    def _release(self, size: int, segment: int, offset: int) -> None:
        self._free[size].append((segment, offset))
        self.used -= size


class _UnnamedFile:
    """A temporary file without a name, which disappears when it is closed.

    folder: where the file is; "" is the system's folder for temporary files.
    what: the content, such as "client states", for errors.
    """

    def __init__(self, folder: Path | str, what: str):
        self._folder: str | None = None
        self._what = what
        if str(folder):
            # A run's folder may be made after its checkpoint is restored.
            candidates = (Path(folder), *Path(folder).absolute().parents)
            self._folder = str(next(path for path in candidates if path.is_dir()))
        # It stays open as long as this object.
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115

    def write(self, start: int, array: np.ndarray, total: int) -> None:
        """Write an array into the file.

        start: the position of the array in the file, in bytes.
        total: the bytes of the whole file, for the error.
        Raises OSError, which names the folder, if the file cannot be written.
        """
        try:
            self._file.seek(start)
            self._file.write(np.ascontiguousarray(array).data)
            self._file.flush()
        except OSError as error:
            where = self._folder or tempfile.gettempdir()
            text = f"{error.strerror}: {total} bytes of {self._what}"
            raise OSError(error.errno, text, where) from None

    def read(self, start: int, content: np.ndarray) -> None:
        """Fill `content`, uint8 [n], with n bytes of the file, from the position `start` on."""
        self._file.seek(start)
        self._file.readinto(content.data)  # type: ignore[attr-defined]

    def map(self, start: int, size: int) -> mmap.mmap:
        """Extend the file to `start` + `size` bytes; return the new part as mapped memory."""
        self._file.truncate(start + size)
        return mmap.mmap(self._file.fileno(), size, offset=start)


def _aligned_bytes(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
