"""The interface by which a coordinator reaches its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

START_TIMEOUT_S = 300.0  # for a worker to start; before, its first answer is not late

Ref: TypeAlias = Any  # a runtime's handle on a result that may not exist yet


class WorkerDiedError(RuntimeError):
    """The error of a worker whose process ended before it answered.

    The worker's memory is lost; the values that it had returned are not.
    """


class LostNode(NamedTuple):
    """A node whose workers are not used any more.

    reason: a clause about the node.
    is_reachable: True if values on the node can still be read.
    """

    reason: str
    is_reachable: bool = False


class Runtime(Protocol):
    """The interface that calls workers. Calls to one worker run in the order they were made."""

    @property
    def workers(self) -> int:
        """The number of workers, the released ones included."""
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

    def add_up(self, node: int, parts: Sequence[range], refs: Sequence[Ref]) -> Ref:
        """Start to add up sums on their node; return a Ref for the total.

        parts: the positions of each sum in a part of the tree, see `tree_sum.add_up`. A node that
        is busy with training adds up as well.
        """
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
        """Replace a worker that died, on its node.

        Raises WorkerDiedError if the node is lost, and RunStoppedError if it has no room.
        """
        ...

    def silent_node_timeout(self, worker: int) -> float | None:
        """Return None if a worker's node answers.

        Otherwise return the seconds without an answer after which the node counts as lost.
        """
        ...

    def stacks(self, worker: int) -> str:
        """Return where the threads of a worker's process stand; "" if that is not known yet.

        It is asked for now, and known at a later call.
        """
        ...

    def find_lost_workers(self) -> Mapping[int, LostNode]:
        """Return the workers, not released yet, whose node is lost or leaves the cluster."""
        ...

    def release(self, worker: int, may_return: bool = True) -> None:
        """Stop using a worker; it may be unreachable.

        may_return: False never starts it again.
        """
        ...

    def take_new_workers(self) -> Sequence[int]:
        """Return the workers that have joined, or come back, since the last call.

        A worker that joins has the next free number; then `workers` and `nodes` contain it.
        """
        ...

    def take_notices(self) -> Sequence[str]:
        """Return what the user should know about the cluster since the last call, as sentences."""
        ...
