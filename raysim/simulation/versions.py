"""Keep the model versions that are needed.

Each replica needs its current version. Each job in flight needs the version from which it started.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from raysim.api.messages import PublishedVersion
from raysim.simulation.runtime import Ref, Runtime


class Versions(Mapping[int, PublishedVersion]):
    """The published versions of all replicas, by version number, in the runtime's object store.

    The store has the base version of each job that has not ended. It also has the current version
    of each replica, unless `unload` has recorded that this version is on disk.
    """

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._refs: dict[int, Ref] = {}  # by version: the reference with which workers read it
        # By replica: function that makes its current version.
        self._makers: dict[int, Callable[[], PublishedVersion]] = {}
        self._on_disk: set[int] = set()  # current versions of replicas on disk
        self._current: dict[int, int] = {}  # by replica: its current version
        # By version: the replicas that have it as their current version.
        self._replicas: defaultdict[int, set[int]] = defaultdict(set)
        self._holders: Counter[int] = Counter()  # by version: jobs that start from it
        self._read: dict[int, PublishedVersion] = {}
        self._sizes: dict[int, int] = {}
        self._extra_floats: dict[int, dict[str, int]] = {}  # by version and full name

    def publish(
        self,
        replica: int,
        version: int,
        make: Callable[[], PublishedVersion],
        is_on_disk: bool = False,
    ) -> None:
        """Store a replica's current version, unless this version is stored already.

        The replica's previous version is dropped if no job needs it.
        make: returns the current version. It may be called until a newer version is published.
        is_on_disk: True calls `make`, which reads from disk, only when the version is needed.
        """
        before = self._current.get(replica, -1)
        self._current[replica] = version
        self._replicas[before].discard(replica)
        self._replicas[version].add(replica)
        self._makers[replica] = make
        if is_on_disk:
            self.unload(version)
        elif version not in self._refs:
            self._store(make())
        self._drop_unless_needed(before)

    def unload(self, version: int) -> None:
        """Record that a replica's current version is on disk and need not stay in memory.

        The version stays in the object store while a job needs it. It is read from disk again for a
        later job.
        """
        self._on_disk.add(version)
        self._drop_unless_needed(version)

    def ref(self, version: int) -> Ref:
        """Return a reference with which workers read a version."""
        if version in self._refs:
            return self._refs[version]
        return self._runtime.put(self._make(version))

    def _make(self, version: int) -> PublishedVersion:
        return self._makers[min(self._replicas[version])]()

    def restore(self, published: Iterable[PublishedVersion]) -> None:
        """Store the base versions from a checkpoint.

        Afterwards the caller must call `hold` for each job that starts from one of these versions.
        published: the base versions of all jobs in the checkpoint.
        """
        for version in published:
            self._store(version)

    def hold(self, version: int) -> None:
        """Record that a job starts from this version; store the version if it is not stored."""
        self._holders[version] += 1
        if version not in self._refs:
            self._store(self._make(version))

    def release(self, version: int) -> None:
        """Record that a job does not need this version any more; drop it if nothing needs it."""
        self._holders[version] -= 1
        self._drop_unless_needed(version)

    def _store(self, published: PublishedVersion) -> None:
        self._refs[published.number] = self._runtime.put(published)
        self._sizes[published.number] = published.nbytes
        sizes = {name: array.size for name, array in published.extras.items()}
        self._extra_floats[published.number] = sizes

    def _drop_unless_needed(self, version: int) -> None:
        if self._holders[version] > 0:
            return
        is_current = bool(self._replicas.get(version))
        if is_current and version not in self._on_disk:
            return
        self._holders.pop(version, None)
        self._sizes.pop(version, None)
        self._extra_floats.pop(version, None)
        self._read.pop(version, None)
        self._refs.pop(version, None)
        if not is_current:
            self._replicas.pop(version, None)
            self._on_disk.discard(version)

    def is_held(self, version: int) -> bool:
        """Return True if at least one job starts from this version and has not ended.

        For such a job `hold` was called, and `release` was not called yet.
        """
        return self._holders[version] > 0

    def extra_floats(self, version: int, name: str) -> int:
        """Return the size of a tensor that a method sends with a version, in floats.

        Return 0 if the version has no such tensor.
        name: the tensor's name, "method.name".
        """
        return self._extra_floats[version].get(name, 0)

    @property
    def held_versions(self) -> list[int]:
        """The numbers of the base versions of all jobs that have not ended."""
        return [version for version, holders in self._holders.items() if holders > 0]

    @property
    def nbytes(self) -> int:
        """The bytes of all versions in the store."""
        return sum(self._sizes.values())

    def __getitem__(self, version: int) -> PublishedVersion:
        if version not in self._read:
            self._read[version] = self._runtime.get(self._refs[version])
        return self._read[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)
