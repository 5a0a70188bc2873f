"""Arrays on disk instead of in memory: one unnamed file with a region for every client."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class _Piece:
    """The position of one array in the file."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    size: int  # bytes


class SpillFile:
    """A file with dictionaries of arrays by client. It grows with the clients, not the writes.

    folder: on the disk to use; "" is the system's folder for temporary files. The file is removed
    when the process ends in any way.
    """

    def __init__(self, folder: Path | str = ""):
        self._folder: str | None = None
        if str(folder):
            # A run's folder may be made after the states of its checkpoint are restored.
            candidates = (Path(folder), *Path(folder).absolute().parents)
            self._folder = str(next(path for path in candidates if path.is_dir()))
        # It stays open as long as this object.
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._places: dict[int, tuple[int, int]] = {}  # by client: start and bytes of its place
        self._pieces: dict[int, list[_Piece]] = {}  # by client
        self._end = 0

    def write(self, client: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace a client's arrays. Raises OSError with the name of the folder."""
        needed = sum(_aligned_bytes(array) for array in arrays.values())
        start, room = self._places.get(client, (self._end, 0))
        if room < needed:
            start = self._end
            self._places[client] = start, needed
            self._end = start + needed
        pieces = []
        try:
            for key, array in arrays.items():
                self._file.seek(start)
                self._file.write(np.ascontiguousarray(array).data)
                pieces.append(_Piece(key, array.dtype, array.shape, start, array.nbytes))
                start += _aligned_bytes(array)
            self._file.flush()
        except OSError as error:
            where = self._folder or tempfile.gettempdir()
            text = f"{error.strerror}: {self._end} bytes of client states"
            raise OSError(error.errno, text, where) from None
        self._pieces[client] = pieces

    def read(self, client: int) -> dict[str, np.ndarray]:
        """Return a client's arrays, read-only.

        They are a copy: a memory map would count as memory of this process.
        """
        pieces = self._pieces[client]
        if not pieces:
            return {}
        start = pieces[0].start
        end = pieces[-1].start + pieces[-1].size
        content = np.empty(end - start, np.uint8)
        self._file.seek(start)
        self._file.readinto(content.data)
        content.flags.writeable = False
        arrays: dict[str, np.ndarray] = {}
        for piece in pieces:
            offset = piece.start - start
            part = content[offset : offset + piece.size]
            arrays[piece.key] = part.view(piece.dtype).reshape(piece.shape)
        return arrays


def _aligned_bytes(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
