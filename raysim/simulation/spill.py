"""Arrays on disk instead of in memory: one file without a name, in which every client has a place of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_ALIGN = 64  # bytes


@dataclass(frozen=True)
class _Piece:
    key: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    size: int


class Spill:
    """Keeps dictionaries of arrays by client. The file grows with the clients, not with how often they are written.

    folder: on whose disk it lies ("": the system's for temporary files). It ends with the process, however that ends.
    """

    def __init__(self, folder: Path | str = ""):
        # A run's folder appears later than the states that it goes on from.
        existing = (
            path for path in (Path(folder), *Path(folder).absolute().parents) if path.is_dir()
        )
        self._folder = str(next(existing)) if str(folder) else None
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - open for as long as this lives
        self._places: dict[
            int, tuple[int, int]
        ] = {}  # by client: where its place begins, and how long it is
        self._pieces: dict[int, list[_Piece]] = {}
        self._end = 0

    def write(self, client: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep a client's arrays, instead of those that it had. Raises OSError that names the folder."""
        needed = sum(_room(array) for array in arrays.values())
        start, room = self._places.get(client, (self._end, 0))
        if room < needed:
            start = self._end
            self._places[client], self._end = (start, needed), start + needed
        pieces = []
        try:
            for key, array in arrays.items():
                self._file.seek(start)
                self._file.write(np.ascontiguousarray(array).data)
                pieces.append(_Piece(key, array.dtype, array.shape, start, array.nbytes))
                start += _room(array)
            self._file.flush()
        except OSError as error:
            where = self._folder or tempfile.gettempdir()
            raise OSError(
                error.errno, f"{error.strerror}: {self._end} bytes of client states", where
            ) from None
        self._pieces[client] = pieces

    def read(self, client: int) -> dict[str, np.ndarray]:
        """What `write` kept, read-only. A copy: what were mapped would count as memory of this process."""
        pieces = self._pieces[client]
        start, end = (pieces[0].start, pieces[-1].start + pieces[-1].size) if pieces else (0, 0)
        room = np.empty(end - start, np.uint8)
        self._file.seek(start)
        self._file.readinto(room.data)
        room.flags.writeable = False
        own = {
            piece.key: (piece, room[piece.start - start : piece.start - start + piece.size])
            for piece in pieces
        }
        return {
            key: part.view(piece.dtype).reshape(piece.shape) for key, (piece, part) in own.items()
        }


def _room(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGN) * _ALIGN
