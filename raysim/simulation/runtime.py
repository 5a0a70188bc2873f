"""How a coordinator reaches its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

START_TIMEOUT_S = 300.0  # for a worker to start; before, its first answer is not late

Ref: TypeAlias = Any  # a runtime's handle on a result that may not exist yet


class WorkerDiedError(RuntimeError):
    """The process of a worker ended before it answered.

    Its memory is lost; the values that it had returned are not.
    """


class Runtime(Protocol):
    """Makes calls to workers. Calls to one worker run in the order in which they were made."""

    @property
    def workers(self) -> int:
        """The number of workers."""
        ...

    @property
    def nodes(self) -> Sequence[int]:
        """By worker: the machine that it is on; 0 is the coordinator's own."""
        ...

    @property
    def combine_from(self) -> float:
        """The fewest floats of a vector for which a node adds up the sums of its workers."""
        ...

    @property
    def is_in_process(self) -> bool:
        """Whether workers are in this process, so that a call has ended when it returns."""
        ...

    def put(self, value: object) -> Ref:
        """Store a value once for all workers; a Ref may be an argument of `call`."""
        ...

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        """Start a method of `Worker`; return a Ref per returned value."""
        ...

    def get(self, ref: Ref) -> Any:
        """Wait for a value and return it. Raises WorkerDiedError if its worker died."""
        ...

    def ready(self, refs: Sequence[Ref], seconds: float) -> int | None:
        """Wait for any of these values; return the index of one that exists or whose worker died.

        Return None if there is none after so many seconds.
        """
        ...

    def revive(self, worker: int) -> None:
        """Replace a worker that died. Raises RunStoppedError if there is no room for a process."""
        ...
