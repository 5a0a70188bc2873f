"""An iteration of many clients recorded once and replayed: a CUDA graph on a GPU, a tape elsewhere.

What it reads lies in tensors that stay where they are: before a replay, what has changed since is copied into them. So
whatever differs from one iteration to the next is a tensor (rates and counts of steps, too) or part of the key under
which a recording is kept. What Python decided while it was recorded stays decided.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from raysim.training.lane import Kind, Lane, Tensors
from raysim.training.lane_step import LaneStep, after, stacked_batch, stacked_given
from raysim.training.rows import Rows
from raysim.training.step import set_modes
from raysim.training.tape import Tape
from raysim.vectors.optimizer import widest

if TYPE_CHECKING:
    from raysim.training.lanes import Lanes

MOST = 128  # recordings that are kept; the one that was used longest ago goes first
Recorder = Callable[[Callable[[], Sequence[Tensor]], Sequence[Tensor]], "Callable[[], Sequence[Tensor]]"]


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dictionaries and lists, by path."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(part, f"{path}/{key}")


def rebuilt(tree: Any, named: Mapping[str, Tensor], path: str = "") -> Any:
    """The same nest with other tensors."""
    if isinstance(tree, Tensor):
        return named[path]
    if isinstance(tree, Mapping):
        return {key: rebuilt(part, named, f"{path}/{key}") for key, part in tree.items()}
    return [rebuilt(part, named, f"{path}/{key}") for key, part in enumerate(tree)]


# --- two ways to record ----------------------------------------------------------------------------------------------
def taped(compute: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Computes once; the result computes again what was computed, operation by operation."""
    tape = Tape(compute, inputs)
    first = [tape.first]  # of the first call, whose result is there already
    return lambda: first.pop() if first else tape.play(inputs)


def captured(pool: Any) -> Recorder:
    """Captures CUDA graphs that share a pool of memory: what one returns holds until the next one is played."""

    def record(compute: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = compute()

        def play() -> Sequence[Tensor]:
            graph.replay()
            return outputs

        return play

    return record


@contextmanager
def _no_collection() -> Iterator[None]:
    """Freeing another graph, which the collector may do at any time, would end a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def recorder(device: torch.device) -> Recorder:
    """What records on a device."""
    return captured(torch.cuda.graph_pool_handle()) if device.type == "cuda" else taped


# --- the iteration ---------------------------------------------------------------------------------------------------
class Branches:
    """Work that may go on beside each other on a GPU, each on a stream of its own; elsewhere one after the other."""

    def __init__(self, device: torch.device):
        self.device = device
        self._streams: list[torch.cuda.Stream] = []
        self._open = 0

    @contextmanager
    def branch(self, place: int) -> Iterator[None]:
        """What is done in here is done after all that was begun outside. place: 0, 1, ... in this order."""
        if self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # each would keep its memory
            yield
            return
        self._open = place + 1
        while len(self._streams) <= place:
            self._streams.append(torch.cuda.Stream(self.device))
        self._streams[place].wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._streams[place]):
            yield

    def join(self) -> None:
        """What comes now is done after all branches."""
        for stream in self._streams[: self._open]:
            torch.cuda.current_stream(self.device).wait_stream(stream)
        self._open = 0


class Recording:
    """All stages of an iteration of one kind, on tensors of their own."""

    def __init__(
        self, lanes: Lanes, branches: Branches, rows: tuple[int, ...], lead: Lane, tree: Tensors, named: Tensors
    ):
        self.lanes, self.branches, self.rows = lanes, branches, rows
        self.stages, self.before = lead.stages, dict(lead.modes)
        self._loaded = dict(named)
        self._inputs = {path: tensor.detach().clone() for path, tensor in named.items()}
        self._tree = rebuilt(tree, self._inputs)
        self._lead = _standing_in(lead, self._tree["lead"])
        self._changed: list[tuple[str, str]] = []  # entries of tables that it returns after the losses
        self._play: Callable[[], Sequence[Tensor]] | None = None
        self._warm = False

    def run(self, named: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, dict[str, Tensor]]]:
        """Do the iteration: the losses [K] of the task if a stage has it, and what hooks changed, by table and key."""
        for path, tensor in named.items():
            if self._loaded[path] is not tensor:
                self._inputs[path].copy_(tensor)
                self._loaded[path] = tensor
        found: Sequence[Tensor]
        if not self._warm:  # libraries choose and allocate in a first pass, which cannot be captured
            found, self._warm = self._compute(), True
        else:
            if self._play is None:
                self._play = self.lanes.record(self._compute, list(self._inputs.values()))
            found = self._play()
        own = [tensor.clone() for tensor in found]  # the next replay writes over them
        changed: dict[str, dict[str, Tensor]] = {"state": {}, "kept": {}}
        for (table, key), tensor in zip(self._changed, own[len(own) - len(self._changed) :], strict=True):
            changed[table][key] = tensor
        return own[0] if len(own) > len(self._changed) else None, changed

    def _compute(self) -> Sequence[Tensor]:
        lanes, tree = self.lanes, self._tree
        if not lanes.apart:
            return self._iteration(lanes, tree["batch"], tree["given"], tree["active"])
        found = []
        for place, row in enumerate(self.rows):
            with self.branches.branch(place):
                own = [_row(tree[name], place) for name in ("batch", "given", "active")]
                found.append(self._iteration(lanes.row(row), *own))
        self.branches.join()
        return [torch.cat(parts) for parts in zip(*found, strict=True)]

    def _iteration(self, on: Rows, batch: list[Tensor], given: Tensors, active: Tensor) -> list[Tensor]:
        """Of these rows."""
        trainer, lead = self.lanes.trainer, self._tree["lead"]
        given, modes, cached = dict(given), self.before, dict[str, Any]()
        losses: list[Tensor] = []
        changed: dict[tuple[str, str], Tensor] = {}

        def asked() -> tuple[Tensors, dict[str, Tensor]]:
            return given, lead["common"]

        for stage in self.stages:
            modes = after(modes, stage.modes)
            if trainer.methods:
                trainer.training(True)
                set_modes(trainer.vector.networks, modes)
            work = LaneStep(on, [self._lead], stage, cached, stage is not self.stages[-1], batch, asked)
            found, gradient = work.passes()
            work.commit(found)
            work.descend(gradient, self._tree["rate"], active)
            for table, entries in work.changed.items():
                given[table] = {**given[table], **entries}
                changed |= {(table, key): whole for key, whole in entries.items()}
            losses = [found["task"].detach()] if stage.loss is None else losses
            cached = found["out"]
        self._changed = list(changed)
        return [*losses, *changed.values()]


def _row(tree: Any, place: int) -> Any:
    """The tensors [1, ...] of one row of nested ones [K, ...]."""
    return rebuilt(tree, {path: whole[place : place + 1] for path, whole in leaves(tree)})


def _standing_in(lead: Lane, own: Mapping[str, Any]) -> Lane:
    """The lane whose client stands for all, with what it received as tensors that stay where they are."""
    assert lead.work is not None, "a lane at work has a client"
    ctx = copy(lead.ctx)
    ctx.base, ctx.received, ctx.download = own["base"], own["received"], own["download"]
    return replace(lead, work=replace(lead.work, ctx=ctx))


class Masks:
    """[K] on the device: 1 for the rows of a group."""

    def __init__(self, device: torch.device):
        self.device = device
        self._known: dict[tuple[bool, ...], Tensor] = {}

    def of(self, rows: Sequence[int], group: Sequence[Lane]) -> Tensor:
        """The same tensor for the same rows. rows: those that are computed."""
        own = {lane.row for lane in group}
        key = tuple(row in own for row in rows)
        if key not in self._known:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = torch.tensor(key, dtype=widest(self.device)).to(self.device)
        return self._known[key]


class Graphs:
    """The recordings of a host, by what has to be the same for a replay."""

    def __init__(self, lanes: Lanes):
        self.lanes, self.branches = lanes, Branches(lanes.data.device)
        self._known: dict[tuple[Kind, tuple[int, ...], tuple[str, ...]], Recording] = {}
        self._numbers: dict[float, Tensor] = {}

    def __len__(self) -> int:
        return len(self._known)

    def iterate(
        self, kind: Kind, rows: tuple[int, ...], group: Sequence[Lane]
    ) -> tuple[Tensor | None, dict[str, dict[str, Tensor]]]:
        """See `Recording.run`. rows: those that are computed, among them the group's."""
        tree = self._inputs(rows, group)
        named = dict(leaves(tree))
        key = kind, rows, tuple(named)
        recording = self._known.pop(key, None)
        if recording is None:
            recording = Recording(self.lanes, self.branches, rows, group[0], tree, named)
        found = recording.run(named)
        self._known[key] = recording  # the last one to go
        if len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        return found

    def _inputs(self, rows: Sequence[int], group: Sequence[Lane]) -> Tensors:
        lanes, ctx = self.lanes, group[0].ctx
        given, common = stacked_given(lanes, rows, group)
        lead = {"base": ctx.base, "received": ctx.received, "download": dict(ctx.download), "common": common}
        rate, active = self._number(ctx.rate), lanes.masks.of(rows, group)
        return {"batch": stacked_batch(rows, group), "given": given, "lead": lead, "rate": rate, "active": active}

    def _number(self, value: float) -> Tensor:
        """[] on the device; the last few, since each host has one rate a version."""
        if value not in self._numbers:
            self._numbers = dict(list(self._numbers.items())[-3:])
            device = self.lanes.data.device
            self._numbers[value] = torch.full((), value, dtype=widest(device), device=device)
        return self._numbers[value]
