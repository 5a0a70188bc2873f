"""The model versions that are needed: the current one, and base versions of jobs in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from raysim.api.messages import PublishedVersion
from raysim.simulation.runtime import Ref, Runtime


class Versions(Mapping[int, PublishedVersion]):
    """The published versions by number. They are only in the runtime's store.

    The coordinator reads a version from the store, without a copy, if the server or a checkpoint
    needs it. A version is dropped when no replica has it as its current one and no job holds it.
    """

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.refs: dict[int, Ref] = {}  # where workers find them
        self._current: dict[int, int] = {}  # by replica: its current version
        self._replicas: Counter[int] = Counter()  # by version: replicas whose current one it is
        self._holders: Counter[int] = Counter()  # by version: jobs that start from it
        self._read: dict[int, PublishedVersion] = {}
        self._sizes: dict[int, int] = {}
        self._extra_floats: dict[int, dict[str, int]] = {}  # by version and full name

    def publish(self, replica: int, version: int, make: Callable[[], PublishedVersion]) -> None:
        """Store a replica's current version unless it is stored; drop the previous one if not held.

        version: its number.
        """
        before = self._current.get(replica, -1)
        self._current[replica] = version
        self._replicas[version] += 1
        self._replicas[before] -= 1
        if version not in self.refs:
            self._store(make())
        self._drop_unless_needed(before)

    def restore(self, published: Iterable[PublishedVersion]) -> None:
        """Store the base versions of a checkpoint's jobs in flight; these jobs hold them."""
        for version in published:
            self._store(version)

    def hold(self, version: int) -> None:
        """Record that a job starts from this version."""
        self._holders[version] += 1

    def release(self, version: int) -> None:
        """Record that a job does not need its base version any more."""
        self._holders[version] -= 1
        self._drop_unless_needed(version)

    def _store(self, published: PublishedVersion) -> None:
        self.refs[published.number] = self._runtime.put(published)
        self._sizes[published.number] = published.nbytes
        sizes = {name: array.size for name, array in published.extras.items()}
        self._extra_floats[published.number] = sizes

    def _drop_unless_needed(self, version: int) -> None:
        if self._replicas[version] > 0 or self._holders[version] > 0:
            return
        self._holders.pop(version, None)
        self._replicas.pop(version, None)
        self._sizes.pop(version, None)
        self._extra_floats.pop(version, None)
        self._read.pop(version, None)
        self.refs.pop(version, None)

    def extra_floats(self, version: int, name: str) -> int:
        """Return the floats of a tensor that travels with a version, by its full name."""
        return self._extra_floats[version].get(name, 0)

    @property
    def held_versions(self) -> list[int]:
        """The base versions from which jobs may still start."""
        return [version for version, holders in self._holders.items() if holders > 0]

    @property
    def nbytes(self) -> int:
        """The bytes of all versions in the store."""
        return sum(self._sizes.values())

    def __getitem__(self, version: int) -> PublishedVersion:
        if version not in self._read:
            self._read[version] = self._runtime.get(self.refs[version])
        return self._read[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self.refs)

    def __len__(self) -> int:
        return len(self.refs)
