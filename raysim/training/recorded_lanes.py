"""Record training steps as CUDA graphs, and replay them.

Steps of the same kind can use one recording: they have equal stages, batch sizes, train or eval
modes, and Python values, and the tensors that they read have equal shapes and dtypes.
A float that a method keeps counts as a tensor, because steps read it as a scalar tensor.

The first step of a kind is not recorded. It lets libraries choose kernels, and shows which values
are read. The second step is recorded. If the next steps of all lanes are of the same kind, one
recording contains a step of every lane. Otherwise each step has a separate recording. With several
lanes, steps with unusual batch sizes are never recorded (`usual_batch_sizes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from raysim.api.composition import failing_method_name
from raysim.api.context import Batch, Stage
from raysim.api.hook_checks import HookError
from raysim.primitives.errors import RefusedError, first_line
from raysim.training.cuda_graph import Branches, Compute, recorder
from raysim.training.gpu_kernels import GpuKernels, NoReading
from raysim.training.lanes import LaneLoop, LanesError
from raysim.training.recorded_context import (
    FACTS,
    VECTORS,
    Entry,
    Reads,
    RecordedContext,
    RecordedLane,
    entry_of,
    tables_of,
)
from raysim.training.step import set_modes
from raysim.training.trainer import Trainer
from raysim.vectors.optimizer import RecordedOptimizer, widest_float

MAX_RECORDINGS = 128  # per worker; the recording that was used longest ago is dropped first
# Each lane's vector starts at a multiple of so many floats, as GPU kernels need it.
_ROW_ALIGNMENT = 64
SHARED = -1  # marks an input that all lanes of a recording share
_MAX_SCALARS = 256  # more than the floats that the lanes read in one step

# The path of an input: the position of its lane in the recording (or `SHARED`), the table, the key.
InputPath: TypeAlias = tuple[int, str, str]
Key: TypeAlias = tuple[Any, ...]


def stacked_rows(flat: Tensor, count: int, alignment: int) -> Tensor:
    """Return `count` copies of a flat tensor [n] as the rows of a tensor [count, n].

    alignment: the start of each row is a multiple of this number of entries, as GPU kernels need
    it.
    """
    padded = -(-len(flat) // alignment) * alignment
    return flat.new_empty(count, padded)[:, : len(flat)].copy_(flat.detach().expand(count, -1))


def modes_after(modes: Mapping[str, bool], stages: Sequence[Stage]) -> dict[str, bool]:
    """Return the modes of neural networks and modules after some stages.

    modes: the modes before the stages: True for train mode, False for eval mode. The result has the
    most recently set mode last.
    stages: the stages, in the order of training.
    """
    result = dict(modes)
    for stage in stages:
        for part, training in stage.modes.items():
            result.pop(part, None)
            result[part] = training
    return result


class RecordedLanes(LaneLoop[RecordedLane]):
    """A loop that trains K clients at once by replaying recorded steps (CUDA graphs on a GPU).

    The first step of each kind is computed without a recording. The top of this file defines the
    kinds.
    """

    def __init__(self, trainer: Trainer, count: int):
        vector = trainer.vector
        data, counters = (
            stacked_rows(flat, count, _ROW_ALIGNMENT) for flat in (vector.data, vector.counters)
        )
        super().__init__(trainer, data, counters, RecordedLane)
        self.device = data.device
        self.record, self.branches = recorder(self.device), Branches(self.device)
        self.reads = Reads()
        self.recordings: dict[Key, Recording] = {}
        self._computed: set[Key] = set()  # kinds that are recorded next time
        self._optimizers: dict[tuple[int, str], RecordedOptimizer] = {}  # by lane and stage
        self._rates: dict[float, Tensor] = {}
        self._scalars: dict[float, Tensor] = {}

    # --- a lane's job ------------------------------------------------------------------------
    def start(self, lane: RecordedLane) -> None:
        """Prepare a lane for a job that has begun."""
        lane.restart()

    def finish(self, lane: RecordedLane) -> None:
        """Put the modules into the train or eval modes that unrecorded steps would have set.

        Replayed steps set no modes; `lane.modes` has the modes instead.
        """
        if self.trainer.declarations.methods:
            self.set_modes(lane.modes)

    def prepare(self, lane: RecordedLane) -> None:
        """Give a lane's job the optimizers that it needs for its next step and does not have yet.

        Each stage has an optimizer. Its buffers are those of an earlier job of the client, or 0.
        """
        step, ctx = self.trainer.step, lane.ctx
        ctx.step = lane.step
        for stage in lane.stages:
            if ctx.optimizers.get(stage.name) is not None:
                continue
            self.enter(lane)
            group, key = step.group(stage.trains), (lane.row, stage.name)
            if key not in self._optimizers:
                targets = step.optimized_tensors(group)
                self._optimizers[key] = RecordedOptimizer(step.optimizer, targets)
            self._optimizers[key].restart(ctx.optimizers.saved_buffers(stage.name))
            ctx.optimizers.put(stage.name, self._optimizers[key], group.shared, stage.rate)

    def set_modes(self, modes: Mapping[str, bool]) -> None:
        """Set the train or eval mode of networks and modules.

        All networks are first put into train mode.
        modes: for each name of a network or module, True for train mode or False for eval mode.
        """
        self.trainer.set_training(True)
        set_modes(self.trainer.vector.networks, modes)

    # --- a step -----------------------------------------------------------------------------
    def step_lanes(self, busy: Sequence[RecordedLane]) -> None:
        """Make the next step of these lanes.

        busy: the lanes that have a job.
        """
        keys: dict[int, Key] = {}
        for lane in busy:
            self.prepare(lane)
            if self._is_recorded(lane):
                keys[lane.row] = self._key(lane)
            else:
                with _name_method_in_errors():
                    self._compute_unrecorded(lane)
        recorded = [lane for lane in busy if lane.row in keys]
        are_alike = len(recorded) == self.count and len({*keys.values()}) == 1
        groups = [recorded] if are_alike else [[lane] for lane in recorded]
        for lanes in groups:
            with _name_method_in_errors():
                self._iterate(keys[lanes[0].row], lanes)

    def _is_recorded(self, lane: RecordedLane) -> bool:
        """Return True if the lane's next step shall be recorded and replayed.

        With several lanes, this needs a usual batch size (`usual_batch_sizes`). With a single lane,
        all steps are recorded.
        """
        return self.count == 1 or len(lane.next_batch.inputs) in self.trainer.usual_sizes

    def _key(self, lane: RecordedLane) -> Key:
        """Return the kind of a lane's next step; steps of equal kind can use one recording."""
        stages = tuple((stage.name, stage.trains, stage.rate) for stage in lane.stages)
        facts = tuple((name, FACTS[name](lane)) for name in self.reads.facts)
        entries = tuple(
            (entry, _form(entry, entry_of(lane, *entry))) for entry in self.reads.entries
        )
        batch = _tensor_form(lane.next_batch.inputs), _tensor_form(lane.next_batch.targets)
        return stages, tuple(lane.modes.items()), batch, facts, entries

    def _iterate(self, key: Key, lanes: Sequence[RecordedLane]) -> None:
        """Make the next step of some lanes, whose steps are of the same kind (`key`).

        The first step of a kind is unrecorded, the second step is recorded, and later steps replay
        this recording.
        """
        inputs = self._inputs(lanes)
        key = key, tuple(lane.row for lane in lanes), tuple(inputs)
        recording = self.recordings.pop(key, None)
        reads = len(self.reads)
        if recording is None and key in self._computed:
            self._computed.discard(key)
            recording = Recording(self, lanes, inputs)
        if recording is None or len(self.reads) > reads:
            for lane in lanes:
                self._compute_unrecorded(lane)
            if len(self.reads) == reads:
                self._computed.add(key)
            return
        self.recordings[key] = recording  # moved to the end: it is dropped last
        if len(self.recordings) > MAX_RECORDINGS:
            del self.recordings[next(iter(self.recordings))]
        for lane, (loss, changed) in zip(lanes, recording.replay(inputs), strict=True):
            self._advance(lane, loss, changed)

    def _compute_unrecorded(self, lane: RecordedLane) -> None:
        """Compute a lane's next step without a recording, directly on the client's tensors."""
        loss, changed = self.compute(lane, lane.next_batch, tables_of(lane), self.rate(lane))
        self._advance(lane, loss, changed)

    def _advance(
        self, lane: RecordedLane, loss: Tensor | None, changed: Mapping[Entry, Tensor]
    ) -> None:
        """Copy the results of a step into the lane's job.

        loss: the task loss; None if no stage has the task loss.
        changed: the tensors that hooks have set. A key is ("state" or "kept", "method.name").
        """
        for (table, key), value in changed.items():
            getattr(lane.ctx, table)[key] = value
        lane.modes = modes_after(lane.modes, lane.stages)
        for stage in lane.stages:
            self._optimizers[lane.row, stage.name].steps += 1
        lane.advance(loss)

    def compute(
        self,
        lane: RecordedLane,
        batch: Batch,
        tables: Mapping[str, Mapping[str, Any]],
        rate: Tensor,
    ) -> tuple[Tensor | None, dict[Entry, Tensor]]:
        """Compute a training step of a lane; return its task loss and the tensors that hooks set.

        The loss is None if no stage has the task loss. A tensor of the client state has the key
        ("state", "method.name"), one of `LocalJob.scratch` has ("kept", "method.name").

        tables: the values that the step may read, as `tables_of` returns them.
        rate: the learning rate, a scalar tensor.
        Raises LanesError if a hook writes to `job.upload` or `job.report`, or if it writes a value
        that is not a tensor to `job.state` or `job.scratch`.
        """
        self.enter(lane)
        if self.trainer.declarations.methods:
            self.set_modes(lane.modes)
        with ExitStack() as stack:
            stack.enter_context(GpuKernels(self.trainer.modules))
            stack.enter_context(NoReading())
            ctx = RecordedContext(
                lane.ctx,
                tables,
                rate,
                self.scalar,
                self.reads,
                self.trainer.frozen_networks.vector,
                stack,
            )
            ctx.views = self.trainer.views(ctx)
            loss = self.trainer.step(ctx, batch, lane.stages)
        written = next(iter([*ctx.upload, *ctx.report]), None)
        if written is not None:
            method = written.partition(".")[0]
            raise LanesError(
                f"runtime.graph=true: method '{method}' writes {written} to job.upload or "
                "job.report in a step, but a recorded step would not write it again. "
                "Write it in the method's hook `end`, or set runtime.graph=false."
            )
        changed = ctx.changed()
        for (table, key), value in changed.items():
            if not isinstance(value, Tensor):
                raise LanesError(_python_value_error(table, key, value))
        return loss, changed

    # --- inputs ------------------------------------------------------------------------------
    def rate(self, lane: RecordedLane) -> Tensor:
        """Return the learning rate of a lane's job as a scalar tensor.

        If jobs have the same rate, they usually get the same tensor object.
        """
        value = lane.ctx.rate
        if value not in self._rates:
            self._rates = dict(list(self._rates.items())[-3:])  # the newest
            self._rates[value] = torch.full(
                (), value, dtype=widest_float(self.device), device=self.device
            )
        return self._rates[value]

    def scalar(self, value: float) -> Tensor:
        """Return a float that a method keeps as a scalar tensor in the dtype of the parameters.

        Equal floats usually get the same tensor object.
        """
        if value not in self._scalars:
            newest = list(self._scalars.items())[1 - _MAX_SCALARS :]
            self._scalars = dict(newest)
            self._scalars[value] = self.data.new_full((), value)
        return self._scalars[value]

    def _inputs(self, lanes: Sequence[RecordedLane]) -> dict[InputPath, Tensor]:
        """Return the tensors that the next steps of some lanes read, and the floats as tensors.

        A key is (index of the lane in `lanes`, table, name). The index is `SHARED` for a tensor
        that all lanes read. Tables are "batch", "rate" and those of `tables_of`.
        """
        inputs: dict[InputPath, Tensor] = {(SHARED, "rate", ""): self.rate(lanes[0])}
        for position, lane in enumerate(lanes):
            inputs[position, "batch", "inputs"] = lane.next_batch.inputs
            inputs[position, "batch", "targets"] = lane.next_batch.targets
        for table, key in self.reads.entries:
            values = [self._input(entry_of(lane, table, key)) for lane in lanes]
            if all(value is values[0] for value in values):
                if values[0] is not None:
                    inputs[SHARED, table, key] = values[0]
                continue
            for position, value in enumerate(values):
                if value is not None:
                    inputs[position, table, key] = value
        return inputs

    def _input(self, value: Any) -> Tensor | None:
        """Return a value of a table as a tensor; None if a replay does not copy the value."""
        if isinstance(value, float):
            return self.scalar(value)
        return value if isinstance(value, Tensor) else None


class Recording:
    """The recorded step of some lanes, which `replay` repeats on other inputs.

    A replay first copies the inputs into tensors of the recording, at fixed addresses.

    inputs: the tensors that the step reads.
    """

    def __init__(
        self, loop: RecordedLanes, lanes: Sequence[RecordedLane], inputs: Mapping[InputPath, Tensor]
    ):
        self.loop = loop
        self._loaded = dict(inputs)
        self._inputs = {path: tensor.detach().clone() for path, tensor in inputs.items()}
        self._lanes = [_snapshot(lane) for lane in lanes]
        # The values of each lane that belong to the kind of the step, by table and key.
        self._constants = [_constants(lane, loop.reads) for lane in lanes]
        # For each lane: True if it returns a loss, and the entries that it changes.
        self._outputs: list[tuple[bool, list[Entry]]] = []
        self._replay: Compute = loop.record(self._compute)

    def replay(
        self, inputs: Mapping[InputPath, Tensor]
    ) -> list[tuple[Tensor | None, dict[Entry, Tensor]]]:
        """Replay the step with these inputs; return each lane's loss and changed tensors."""
        for path, tensor in inputs.items():
            if self._loaded[path] is not tensor:
                self._inputs[path].copy_(tensor)
                self._loaded[path] = tensor
        # Copies, because the next replay overwrites the outputs.
        outputs = iter([tensor.clone() for tensor in self._replay()])
        results: list[tuple[Tensor | None, dict[Entry, Tensor]]] = []
        for has_loss, entries in self._outputs:
            loss = next(outputs) if has_loss else None
            results.append((loss, {entry: next(outputs) for entry in entries}))
        return results

    def _compute(self) -> Sequence[Tensor]:
        """Compute the step of each lane; return the results of all lanes in one list.

        The results of a lane are its loss, if it has one, and the tensors that its hooks have
        changed. `_outputs` describes these results.
        """
        loop, outputs = self.loop, list[Tensor]()
        self._outputs = []
        for position, lane in enumerate(self._lanes):
            batch, tables = self._lane_inputs(position)
            with loop.branches.branch(position):
                loss, changed = loop.compute(lane, batch, tables, self._inputs[SHARED, "rate", ""])
            self._outputs.append((loss is not None, list(changed)))
            if loss is not None:
                outputs.append(loss)
            outputs += changed.values()
        loop.branches.join()
        return outputs

    def _lane_inputs(self, position: int) -> tuple[Batch, dict[str, dict[str, Any]]]:
        """Return the batch and the tables (`tables_of`) that the step of a lane reads.

        All tensors are inputs of this recording, into which a replay copies the current values.
        position: the index of the lane among the lanes of this recording.
        """
        tables: dict[str, dict[str, Any]] = {
            name: {} for name in ("state", "kept", "download", "draws", VECTORS)
        }
        for (table, key), constant in self._constants[position].items():
            tables[table][key] = constant
        for (owner, table, key), tensor in self._inputs.items():
            if owner in (position, SHARED) and table in tables:
                tables[table][key] = tensor
        inputs, targets = (self._inputs[position, "batch", name] for name in ("inputs", "targets"))
        return Batch(inputs, targets, inputs, targets), tables


def _snapshot(lane: RecordedLane) -> RecordedLane:
    """Return a copy of a lane. Later steps of the lane's job do not change this copy."""
    running = replace(lane.job, ctx=copy(lane.ctx))
    return replace(lane, running=running, modes=dict(lane.modes))


def _constants(lane: RecordedLane, reads: Reads) -> dict[Entry, Any]:
    """Return the values that belong to the kind of a lane's step, by table and key.

    They are neither tensors nor floats, so no replay copies them.
    """
    constants: dict[Entry, Any] = {}
    for table, key in reads.entries:
        value = entry_of(lane, table, key)
        if value is not None and not isinstance(value, (Tensor, float)):
            constants[table, key] = value
    return constants


def _python_value_error(table: str, key: str, value: object) -> str:
    """Return the error text for a value that a step has written and that is not a tensor.

    table: "state" or "kept".
    key: the full name of the value, "method.name".
    """
    method, _, name = key.partition(".")
    place = "job.scratch" if table == "kept" else "job.state"
    return (
        f"runtime.graph=true: method '{method}' writes {place}['{name}'] in a step, but its value "
        f"has the type {type(value).__name__}. A recorded step can write only tensors. Write a "
        "tensor, or write the value in the method's hook `begin` or `prepare`, or set "
        "runtime.graph=false."
    )


def _tensor_form(tensor: Tensor) -> object:
    return tensor.shape, tensor.dtype


def _form(entry: Entry, value: object) -> object:
    """Return what is equal for two values of a table if one recording fits both.

    entry: the table of the value and its key, for the error.
    value: None if the client does not have the value.
    Raises LanesError for a value that cannot be hashed, such as a list.
    """
    if value is None:
        return None
    if isinstance(value, Tensor):
        return _tensor_form(value)
    if isinstance(value, float):
        return float
    try:
        hash(value)
    except TypeError:
        method, _, name = entry[1].partition(".")
        raise LanesError(
            f"runtime.graph=true: method '{method}' reads '{name}' in a step, but this value has "
            f"the type {type(value).__name__}. A recorded step can read tensors, numbers and "
            "strings. Store a tensor, or set runtime.graph=false."
        ) from None
    return type(value), value


@contextmanager
def _name_method_in_errors() -> Iterator[None]:
    """Replace errors of a recorded step by clearer ones, inside a `with` statement.

    A `HookError` becomes a `RefusedError` with the same text: the hook would also fail without a
    recording. A `LanesError` stays unchanged. Any other error becomes a `LanesError`, which names
    the method, if one has caused it, and suggests `runtime.graph=false`.
    """
    try:
        yield
    except LanesError:
        raise
    except HookError as error:  # the hook would also fail without a recording
        raise RefusedError(str(error)) from error
    except Exception as error:
        name = failing_method_name(error)
        subject = f"method '{name}'" if name else "the model or the loop"
        text = first_line(error).rstrip(".")
        raise LanesError(
            f"runtime.graph=true: the step of {subject} cannot be recorded ({text}). Set "
            "runtime.graph=false."
        ) from error
