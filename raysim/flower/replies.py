"""Store clients' replies in a file, so that a run that was killed can continue.

To continue, the ServerApp starts again with the same seed. It sends the same messages, which are
answered by the stored replies.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from flwr.app import RecordDict

from raysim.flower.records import pack_records
from raysim.flower.worker import Answer, Request

_LENGTHS = struct.Struct("<IQQI")  # bytes of the key, of the content, of the state; checksum


class ReplayError(RuntimeError):
    """The error of a ServerApp that does not send the same messages as the stored run."""


class StoredReplies:
    """The stored replies of a run, in a file.

    The first incomplete or damaged entry and all later entries are removed from the file.
    path: the file; None stores nothing.
    """

    def __init__(self, path: Path | None = None):
        self._path = path
        self._places: dict[tuple[int, int], tuple[str, int, int, int, str]] = {}
        # By identity of the content, of one batch.
        self._digests: dict[int, tuple[RecordDict, str]] = {}
        self._file: BinaryIO | None = None
        self.replayed = 0
        if path is not None:
            path.touch()
            self._index_entries(path)
            self._file = path.open("r+b")

    @property
    def count(self) -> int:
        """The number of stored replies."""
        return len(self._places)

    def _index_entries(self, path: Path) -> None:
        """Find the position of each stored reply; cut the file off at the first damaged one."""
        end = 0
        with path.open("rb") as file:
            while True:
                head = file.read(_LENGTHS.size)
                if len(head) < _LENGTHS.size:
                    break
                key_size, content_size, state_size, checksum = _LENGTHS.unpack(head)
                key = file.read(key_size)
                payload = file.read(content_size + state_size)
                is_complete = len(payload) == content_size + state_size
                if not is_complete or zlib.crc32(key + payload) != checksum:
                    break
                client, number, digest, error = json.loads(key)
                start = end + _LENGTHS.size + key_size
                self._places[client, number] = (digest, start, content_size, state_size, error)
                end = file.tell()
        with path.open("r+b") as file:
            file.truncate(end)

    def find(self, request: Request) -> Answer | None:
        """Return the stored answer to a message; None if there is none.

        The message's client and the message's number identify the answer.
        Raises ReplayError if the stored answer belongs to a message with other content or type.
        """
        place = self._places.get((request.client, request.number))
        if place is None or self._file is None:
            return None
        digest, start, content_size, state_size, error = place
        if digest != self._digest(request):
            raise ReplayError(
                f"{self._path}: message {request.number} to client {request.client} differs from "
                "the message whose reply this file stores. The app or its settings were "
                "changed, or the ServerApp depends on something besides the seed. Start a new run "
                "in another folder."
            )
        self._file.seek(start)
        content = np.frombuffer(self._file.read(content_size), np.uint8)
        self.replayed += 1
        return Answer(content, self._file.read(state_size), error)

    def add(self, request: Request, answer: Answer) -> None:
        """Store a client's answer at the end of the file.

        request: the message that the client has answered.
        answer: the client's reply, or an error.
        """
        if self._file is None:
            return
        digest = self._digest(request)
        key = json.dumps([request.client, request.number, digest, answer.error]).encode()
        checksum = zlib.crc32(answer.state, zlib.crc32(answer.content.data, zlib.crc32(key)))
        head = _LENGTHS.pack(len(key), len(answer.content), len(answer.state), checksum)
        end = self._file.seek(0, 2)
        self._file.write(b"".join([head, key, answer.content.data, answer.state]))
        self._file.flush()
        start = end + len(head) + len(key)
        self._places[request.client, request.number] = (
            digest,
            start,
            len(answer.content),
            len(answer.state),
            answer.error,
        )

    def forget_digests(self) -> None:
        """Forget the checksums of messages, because the app may change messages when it runs."""
        self._digests.clear()

    def _digest(self, request: Request) -> str:
        """Return a checksum of a message's type and content.

        The checksum of a content object is cached. If several messages share the object, it is
        serialised only once.
        """
        stored = self._digests.get(id(request.content))
        if stored is None:
            data = pack_records(request.content)
            stored = (request.content, hashlib.blake2b(data, digest_size=16).hexdigest())
            self._digests[id(request.content)] = stored
        return f"{request.message_type}:{stored[1]}"

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
