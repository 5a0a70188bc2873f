"""How a coordinator reaches its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

START_TIMEOUT_S = 300.0  # for a worker to start; before, its first answer is not late

Ref: TypeAlias = Any  # a runtime's handle on a result that may not exist yet


class WorkerDiedError(RuntimeError):
    """The process of a worker ended before it answered. What it held is lost; what it had returned is not."""


class Runtime(Protocol):
    """How a coordinator reaches its workers. Calls to one worker run in the order in which they were made."""

    @property
    def workers(self) -> int:
        """How many there are."""
        ...

    @property
    def nodes(self) -> Sequence[int]:
        """By worker: the machine that it is on; 0 is the coordinator's own."""
        ...

    @property
    def combine_from(self) -> float:
        """Floats of a vector from which on a node adds up what its workers have summed before it travels."""
        ...

    @property
    def is_in_process(self) -> bool:
        """Whether a call has ended when it returns, because the workers are in this process."""
        ...

    def put(self, value: object) -> Ref:
        """Store a value once for all workers; a Ref may be an argument of `call`."""
        ...

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        """Start a method of `Worker`; a Ref per returned value."""
        ...

    def get(self, ref: Ref) -> Any:
        """Wait for a value. Raises WorkerDiedError if the worker that was to return it is no more."""
        ...

    def ready(self, refs: Sequence[Ref], seconds: float) -> int | None:
        """Wait for any of these values; return the index of one that ended or whose worker died, or None."""
        ...

    def revive(self, worker: int) -> None:
        """A new process in the place of a worker that died. Raises RunStoppedError if there is no room for one."""
        ...
