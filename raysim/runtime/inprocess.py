"""The runtime without processes: one host as a plain object; calls run at once."""

from __future__ import annotations

from typing import Any

from raysim.host import Host, Recipe


class InProcess:
    """One host in this process."""

    def __init__(self, recipe: Recipe):
        self._host = Host(recipe)
        self.hosts = 1

    def put(self, value: object) -> object:
        """The value itself."""
        return value

    def call(self, host: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        """Run it now."""
        result = getattr(self._host, method)(*args)
        return list(result) if method == "train" else [result]

    def get(self, ref: Any) -> Any:
        """The value itself."""
        return ref
