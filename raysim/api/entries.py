"""Let a method use short names for entries that the run stores under "method.name"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Entries(MutableMapping[str, V], Generic[V]):
    """A view of the entries of one method in a dictionary that all methods share.

    `Entries(server, "state", "scaffold")["control"]` is `server.state["scaffold.control"]`.
    owner: the object that has the dictionary.
    attribute: the name of the owner's attribute that has the dictionary. The owner may replace the
    dictionary later.
    method: the name of the method.
    """

    __slots__ = ("_attribute", "_owner", "_prefix")

    def __init__(self, owner: Any, attribute: str, method: str):
        self._owner = owner
        self._attribute = attribute
        self._prefix = f"{method}."

    @property
    def _all(self) -> MutableMapping[str, V]:
        entries: MutableMapping[str, V] = getattr(self._owner, self._attribute)
        return entries

    def __getitem__(self, name: str) -> V:
        return self._all[self._prefix + name]

    def __setitem__(self, name: str, value: V) -> None:
        self._all[self._prefix + name] = value

    def __delitem__(self, name: str) -> None:
        del self._all[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return f"{self._prefix}{name}" in self._all

    def __iter__(self) -> Iterator[str]:
        for key in self._all:
            if key.startswith(self._prefix):
                yield key.removeprefix(self._prefix)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __ior__(self, entries: Mapping[str, V]) -> Entries[V]:
        self.update(entries)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))
