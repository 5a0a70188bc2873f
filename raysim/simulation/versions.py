"""The published versions that somebody still needs: the current one, and those that jobs under way start from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from raysim.api.messages import Published
from raysim.simulation.runtime import Ref, Runtime


class Versions(Mapping[int, Published]):
    """By version: what was published, which lies in the runtime's store and nowhere else.

    The coordinator reads it from there, without a copy, where a rule of the server or a checkpoint asks for it.
    """

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.refs: dict[int, Ref] = {}  # where hosts find them
        self._read: dict[int, Published] = {}
        self._sizes: dict[int, int] = {}

    def publish(self, published: Published) -> None:
        """Into the store."""
        self.refs[published.version] = self._runtime.put(published)
        self._sizes[published.version] = published.nbytes

    def drop(self, version: int) -> None:
        """Nobody needs it any more."""
        del self.refs[version], self._sizes[version]
        self._read.pop(version, None)

    @property
    def nbytes(self) -> int:
        """Of all in the store."""
        return sum(self._sizes.values())

    def __getitem__(self, version: int) -> Published:
        if version not in self._read:
            self._read[version] = self._runtime.get(self.refs[version])
        return self._read[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self.refs)

    def __len__(self) -> int:
        return len(self.refs)
