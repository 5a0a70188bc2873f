"""Give hooks the context of a job in a recorded step, and note which values they read.

A replay gets the current client's tensors. It also gets the floats that the client's tables
contain, as scalar tensors. It gets all other Python values from the time of the recording. So a
recording is replayed only for steps in which these other values are equal.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from raysim.api.context import Context, Plan
from raysim.api.hook_checks import UndeclaredStateError
from raysim.training.gpu_kernels import align
from raysim.training.lanes import Lane
from raysim.vectors.layout import Vector

Entry: TypeAlias = tuple[str, str]  # the name of a table and a key in it

# The name of the table with "base", "received", "received_counters" and "start"; see `tables_of`.
VECTORS = "vectors"
# The Python values of a client that a step may read.
FACTS: Mapping[str, Callable[[Lane], Any]] = {
    "step": lambda lane: lane.step,
    "plan": lambda lane: (lane.ctx.plan.sizes, lane.ctx.samples),
    "samples": lambda lane: lane.ctx.samples,
    "participation": lambda lane: lane.ctx.participation,
    "version": lambda lane: lane.ctx.version,
    "client": lambda lane: lane.ctx.client,
}


@dataclass
class Reads:
    """The names of all client data that steps have read so far: tensors and Python values.

    entries: pairs (table, key), such as ("state", "scaffold.control"), in the order of their first
    reads.
    facts: names of Python values, such as "client".
    """

    entries: dict[Entry, None] = field(default_factory=dict)
    facts: dict[str, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.entries) + len(self.facts)


class TrackedTable(UserDict[str, Any]):
    """A table that records which of its original values a step reads.

    Reads of values that the step has put into the table are not recorded. A step reads an original
    float as a scalar tensor.

    name: the name of the table, such as "state".
    values: the original values.
    as_tensor: returns a float as a scalar tensor.
    """

    def __init__(
        self,
        name: str,
        values: Mapping[str, Any],
        reads: Reads,
        as_tensor: Callable[[float], Tensor],
    ):
        self.name, self.reads, self.initial = name, reads, dict(values)
        self._as_tensor = as_tensor
        super().__init__()
        self.data = dict(values)

    def _note(self, key: str) -> None:
        if self.data.get(key) is self.initial.get(key):
            self.reads.entries[self.name, key] = None

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        value = super().__getitem__(key)
        is_original = value is self.initial.get(key)
        if is_original and isinstance(value, float):
            value = self.initial[key] = self.data[key] = self._as_tensor(value)
        return value

    def __missing__(self, key: str) -> Any:
        raise UndeclaredStateError(key) if self.name == "state" else KeyError(key)

    def __contains__(self, key: object) -> bool:
        self._note(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        for key in self.data:
            self._note(key)
        return super().__iter__()


@dataclass(eq=False)
class RecordedLane(Lane):
    """A lane whose training steps are recorded.

    modes: the mode of each neural network or module that a step of the job has set: True for train
    mode, False for eval mode. Names are in the order in which their modes were last set.
    """

    modes: dict[str, bool] = field(default_factory=dict)
    _start: Tensor | None = None

    def restart(self) -> None:
        """Prepare the lane for its next job.

        Forget the start vector of the last job, and the train or eval modes of its modules.
        """
        self.modes, self._start = {}, None

    @property
    def start(self) -> Tensor:
        """The vector before training, [layout.total], with the personal parameters."""
        if self._start is None:
            self._start = torch.cat([self.ctx.base, self.ctx.start.personal])
        return self._start


def entry_of(lane: RecordedLane, table: str, key: str) -> Any:
    """Return a value of a lane's client, or None if the client does not have it.

    table: "state", "kept", "download", "draws" or `VECTORS`.
    key: the name of the value in this table, such as "scaffold.control".
    """
    ctx = lane.ctx
    if table == VECTORS:
        return lane.start if key == "start" else getattr(ctx, key)
    if table == "draws":
        return ctx.draws[key][lane.step] if key in ctx.draws else None
    return getattr(ctx, table).get(key)


def tables_of(lane: RecordedLane) -> dict[str, Mapping[str, Any]]:
    """Return all values of a lane's client that a step may read, by table name and key.

    The first four tables have keys "method.name":
    - "state": the client state.
    - "kept": what methods keep until the end of the job (`LocalJob.scratch`).
    - "download": what methods on the server sent to the client.
    - "draws": the values that methods have drawn for the next step.
    - `VECTORS`: "received" and "received_counters", the parameters and integer buffers from the
      server; "base", the shared vector from which training starts; and "start", which is "base"
      followed by the personal parameters. Without personal parameters, there is no "start".
    """
    ctx = lane.ctx
    vectors = {
        "base": ctx.base,
        "received": ctx.received,
        "received_counters": ctx.received_counters,
    }
    if ctx.vector.layout.personal:
        vectors["start"] = lane.start
    drawn = {key: values[lane.step] for key, values in ctx.draws.items()}
    return {
        "state": ctx.state,
        "kept": ctx.kept,
        "download": ctx.download,
        "draws": drawn,
        VECTORS: vectors,
    }


@dataclass(frozen=True)
class Sizes:
    """The sizes of a job's batches and of its client's data, for hooks in a recorded step.

    This object replaces the job's `Plan`. It does not have the positions of the samples.

    sizes: the number of samples in each batch.
    samples: the number of the client's training samples.
    """

    sizes: tuple[int, ...]
    samples: int

    @property
    def steps(self) -> int:
        """The number of training steps of the job, one for each of its batches."""
        return len(self.sizes)


class RecordedContext(Context):
    """The context of a job in a recorded step; it notes which values hooks read.

    ctx: the context in ordinary steps. `tables` and `rate` replace its tensors and learning rate.
    tables: the values that the step may read, as `tables_of` returns them.
    rate: the learning rate, a scalar tensor.
    as_tensor: returns a float of a table as a scalar tensor.
    reads: the object that collects the names of the values that hooks read.
    frozen_vector: returns the vector of a frozen copy of the networks, by the name of the copy.
    iteration: a stack that the caller closes at the end of the step, to reset the frozen copies.
    """

    __slots__ = ("_frozen", "_frozen_vector", "_iteration", "_reads", "_tables")

    def __init__(
        self,
        ctx: Context,
        tables: Mapping[str, Mapping[str, Any]],
        rate: Tensor,
        as_tensor: Callable[[float], Tensor],
        reads: Reads,
        frozen_vector: Callable[[str], Vector],
        iteration: ExitStack,
    ):
        self._reads, self._frozen_vector, self._iteration = reads, frozen_vector, iteration
        self._frozen: dict[str, Mapping[str, nn.Module]] = {}
        self._tables = {
            name: TrackedTable(name, values, reads, as_tensor) for name, values in tables.items()
        }
        vectors = tables[VECTORS]
        super().__init__(
            trainer=ctx.trainer,
            seed=ctx.seed,
            client=ctx.client,
            participation=ctx.participation,
            version=ctx.version,
            samples=ctx.samples,
            rate=cast(float, rate),  # a hook that computes with it gets a tensor
            vector=ctx.vector,
            received=vectors.get("received", ctx.received),
            received_counters=vectors.get("received_counters", ctx.received_counters),
            base=vectors.get("base", ctx.base),
            download=self._tables["download"],
            state=cast("dict[str, Tensor]", self._tables["state"]),
            optimizers=ctx.optimizers,
            kept=cast("dict[str, Tensor]", self._tables["kept"]),
        )
        self.step = ctx.step
        self.plan = cast(Plan, Sizes(ctx.plan.sizes, ctx.plan.samples))

    def __getattribute__(self, name: str) -> Any:
        if name in FACTS:
            object.__getattribute__(self, "_reads").facts[name] = None
        elif name in ("base", "received", "received_counters"):
            object.__getattribute__(self, "_reads").entries[VECTORS, name] = None
        return object.__getattribute__(self, name)

    def drawn(self, name: str) -> Any:
        """Return a value that a method drew for this step.

        name: the name of the value, "method.name".
        """
        return self._tables["draws"][name]

    def frozen(
        self, name: str = "received", values: Tensor | None = None
    ) -> Mapping[str, nn.Module]:
        """Return a second set of all networks, by name, in eval mode and without gradients.

        name: a name for the set. Later calls in the step with this name ignore `values`.
        values: [layout.total], used without a copy until the step ends. None means the model from
        which training started.
        """
        if name not in self._frozen:
            vector = self._frozen_vector(name)
            if values is None:
                values = self._tables[VECTORS]["start"] if vector.layout.personal else self.base
            views = [align(view) for view in vector.named(values, vector.counters).values()]
            self._iteration.enter_context(vector.stand_in(values, vector.counters, views))
            self._frozen[name] = vector.networks
        return self._frozen[name]

    def changed(self) -> dict[Entry, Any]:
        """Return the values that hooks of methods have set in this step.

        A key is a pair: "state" (client state) or "kept" (kept until the job's end), and the
        value's full name "method.name".
        """
        changed: dict[Entry, Any] = {}
        for name in ("state", "kept"):
            table = getattr(self, name)  # a hook may have put another mapping there
            values = table.data if isinstance(table, TrackedTable) else table
            initial = self._tables[name].initial
            for key, value in values.items():
                if value is not initial.get(key):
                    changed[name, key] = value
        return changed
