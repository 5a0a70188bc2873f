"""The interface by which a coordinator reaches its workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

START_TIMEOUT_S = 300.0  # for a worker to start; before, its first answer is not late

Ref: TypeAlias = Any  # a runtime's handle on a result that may not exist yet


class WorkerDiedError(RuntimeError):
    """The error of a worker whose process ended before it answered.

    The worker's memory is lost; the values that it had returned are not.
    """


class Runtime(Protocol):
    """The interface that calls workers. Calls to one worker run in the order they were made."""

    @property
    def workers(self) -> int:
        """The number of workers."""
        ...

    @property
    def nodes(self) -> Sequence[int]:
        """The node of each worker; 0 is the coordinator's node."""
        ...

    def node_name(self, worker: int) -> str:
        """Return name and address of a worker's node; "" if they are unknown or need no name."""
        ...

    @property
    def combine_from(self) -> float:
        """The shortest vector, in floats, for which nodes add up the sums of their workers."""
        ...

    @property
    def is_in_process(self) -> bool:
        """True if workers are in this process, so that a call has ended when it returns."""
        ...

    def put(self, value: object) -> Ref:
        """Store a value once for all workers. The returned Ref may be an argument of `call`."""
        ...

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        """Start a method of `Worker`; return a Ref for each returned value."""
        ...

    def get(self, ref: Ref) -> Any:
        """Wait for a value and return it. Raises WorkerDiedError if its worker died."""
        ...

    def ready(self, refs: Sequence[Ref], seconds: float) -> int | None:
        """Wait for any of these values; return the index of one that exists or is lost.

        A value is lost if its worker died. Return None if there is none within the time limit.
        """
        ...

    def revive(self, worker: int) -> None:
        """Replace a worker that died. Raises RunStoppedError if there is no room for a process."""
        ...
