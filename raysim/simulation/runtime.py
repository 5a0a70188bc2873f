"""The interface through which a coordinator calls its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

# A worker has this additional time for its first answer, because it must start.
START_TIMEOUT_S = 300.0

Ref: TypeAlias = Any  # a reference to a value that may not exist yet


class WorkerDiedError(RuntimeError):
    """The error of a worker that died, or counts as dead, before it answered.

    The worker's memory is lost. Values that the worker had returned before can still be read,
    unless its node is lost.
    """


class LostNode(NamedTuple):
    """A node whose workers are not used any more.

    reason: text that follows the name of the node in messages, such as "was declared dead by Ray".
    is_reachable: True if values on the node can still be read.
    """

    reason: str
    is_reachable: bool = False


class Runtime(Protocol):
    """The interface through which a coordinator calls workers.

    Calls to one worker run in the order in which they were made.
    """

    @property
    def workers(self) -> int:
        """The number of workers, including those that `release` has removed from the run."""
        ...

    @property
    def nodes(self) -> Sequence[int]:
        """The node of each worker; node 0 is the coordinator's."""
        ...

    def node_name(self, worker: int) -> str:
        """Return the name and the address of a worker's node.

        Return "" if the worker has not started, or if all workers are in the coordinator's process.
        """
        ...

    @property
    def combine_from(self) -> float:
        """The smallest size of a model, in floats, for which nodes add up their workers' sums.

        Each node then sends one total to the coordinator. Infinity means that each worker always
        sends the sum of its updates.
        """
        ...

    @property
    def is_in_process(self) -> bool:
        """True if the workers are in this process.

        Then `call` runs the worker's method itself, and returns when the method has ended.
        """
        ...

    def put(self, value: object) -> Ref:
        """Store a value once for all workers; return a reference to it.

        The reference may be an argument of `call`.
        """
        ...

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        """Call a method of a worker without waiting; return references to what the method returns.

        method: the name of a method of `Worker`.
        args: the arguments, or references to them.
        returns: the number of returned values.
        """
        ...

    def add_up(self, node: int, parts: Sequence[range], refs: Sequence[Ref]) -> Ref:
        """Let a node add up sums of updates; return a reference to the total.

        On a Ray cluster, a separate process of the node does this.

        parts: for each sum, the positions of its updates in the order of aggregation. They must
        form a subtree of the summation tree (`tree_sum`).
        refs: references to the sums, in the same order.
        """
        ...

    def get(self, ref: Ref) -> Any:
        """Wait for a value and return it.

        Raises WorkerDiedError if the worker that makes the value died.
        """
        ...

    def ready(self, refs: Sequence[Ref], seconds: float) -> int | None:
        """Wait until any of these values exists or is lost; return its index in `refs`.

        A value is lost if its worker died. Return None if nothing happens within `seconds` seconds.
        """
        ...

    def revive(self, worker: int) -> None:
        """Start a worker that replaces a dead one, on the same node.

        Raises WorkerDiedError if the node is lost.
        Raises RunStoppedError if the new worker does not start, or if its results would not be
        bit-identical.
        """
        ...

    def explain_death(self, worker: int, death: WorkerDiedError) -> str:
        """Return why a worker died, as text without a full stop.

        death: the error that says that the worker is dead.
        """
        ...

    def silent_node_timeout(self, worker: int) -> float | None:
        """Return the time limit in seconds for a node that does not answer; None if it answers.

        After this time without an answer, the node counts as lost.
        worker: a worker on the node.
        """
        ...

    def stacks(self, worker: int) -> str:
        """Return the call stacks of a worker's threads as text, without waiting for the worker.

        A call requests the call stacks, and a later call returns them. Return "" if none have
        arrived yet.
        """
        ...

    def find_lost_workers(self) -> Mapping[int, LostNode]:
        """Return the workers whose node is lost or leaves the cluster.

        The keys are the numbers of the workers; the values say why the node is lost. Workers that
        `release` has removed are left out.
        """
        ...

    def release(self, worker: int, may_return: bool = True) -> None:
        """Stop using a worker; its node may be unreachable.

        may_return: True if a worker with the same number may be started later; `take_new_workers`
        then returns this number. False if the number will never be used again.
        """
        ...

    def take_new_workers(self) -> Sequence[int]:
        """Return the workers that have joined or returned since the last call.

        A worker that joins gets the next free number, and `workers` and `nodes` include it from
        then on.
        """
        ...

    def take_notices(self) -> Sequence[str]:
        """Return sentences about the cluster for the user; each is returned only once."""
        ...
