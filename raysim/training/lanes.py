"""Lanes: K clients of one version train at once, each in a row of a stack [K, D], under one `torch.func.vmap`.

A batch of a usual size is stepped for all lanes that are at the same kind of iteration; other lanes wait, and lanes
without a client compute on whatever lies there. A batch of another size is stepped by `Step`, for its client alone.

What a client ends with does not depend on its neighbours. In the last bit it may depend on its lane, since kernels
treat the end of a tensor, and rows that begin off a border of 64 bytes, in other ways. So the job's number decides its
lane, whichever host trains it.

Hooks run as they are. What a client keeps is handed to them with an axis for the lanes: `_LaneContext` has the names
of a `Context`. A fact that has to be a Python value, such as `ctx.step`, decides which lanes are stepped together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from raysim.api.composition import blamed, overrides
from raysim.api.context import Batch, Context, Stage
from raysim.models.classifier import is_stochastic
from raysim.primitives.errors import Refused, first_line
from raysim.training.across import InLanes, across
from raysim.training.run_spec import RunSpec
from raysim.training.second_pass import generator_state, set_generator_state
from raysim.training.step import gradients, set_modes
from raysim.training.tape import Tape
from raysim.training.trainer import LocalRun, Trainer
from raysim.vectors.layout import Entry, Vector
from raysim.vectors.optimizer import StackedOptimizer

# Hooks that take part in a step.
_IN_STEP = ("transform", "rows", "logits", "loss", "term", "perturb", "gradient", "stages")
Kind: TypeAlias = tuple[object, ...]  # of an iteration: lanes with the same one are stepped together
Tensors: TypeAlias = dict[str, Any]  # nested dictionaries and lists of tensors [K, ...]


class NotInLanes(Refused):
    """A step cannot be computed for several clients at once."""


class _Wanted(Exception):
    """A step asks for something of its clients that it was not given: an entry of a table, or a fact."""

    def __init__(self, table: str, key: str):
        super().__init__(f"{table} {key}")
        self.table, self.key = table, key


# Of (clients under way, lanes): as many lanes as keep busy on a few hosts. Measured on W2 with one thread: a step of a
# client takes 0.87, 0.67, 0.60 of the loop's time with 5, 10, 25 lanes, and more again with 50, which leave the cache.
_BUSY = ((100, 25), (40, 10))
_LARGEST = 1_000_000  # parameters of a model that gains: the products of larger ones take all of the time


def usual_lanes(spec: RunSpec, networks: Mapping[str, nn.Module], concurrency: int) -> int:
    """How many clients a host trains at once unless the run says so: as was fastest for such a model and device.

    Small networks of linear layers, on a CPU, where only the model decides what a step computes. Networks with
    convolutions gained nothing (W1: 1.00 of the loop's time with 5 lanes), nor did large ones (W3: 0.97). The clients'
    number of samples counts too: what is no full batch is trained alone.
    """
    modules = [module for network in networks.values() for module in network.modules()]
    linear = not any(isinstance(module, nn.modules.conv._ConvNd) for module in modules)
    small = sum(parameter.numel() for network in networks.values() for parameter in network.parameters()) <= _LARGEST
    hooks = any(overrides(method, hook) for method in spec.methods for hook in _IN_STEP)
    counts = spec.data.partition.train.counts
    full = bool(np.median(counts[counts > 0]) >= 4 * spec.settings.local.batch) if counts.any() else False
    drawing = any(is_stochastic(network) for network in networks.values())
    if spec.device != "cpu" or not (linear and small and full) or hooks or drawing:
        return 1
    return next((lanes for least, lanes in _BUSY if concurrency >= least), 1)


@dataclass(eq=False)
class _Lane:
    """A row of the stack, and the client at work there."""

    row: int
    data: Tensor
    counters: Tensor
    generator: torch.Generator | None  # what the client draws from, where the model draws at all
    index: int = 0  # of the client among those to train
    work: LocalRun | None = None
    batch: Batch | None = None  # the next one; None: all are done
    step: int = 0
    modes: dict[str, bool] = field(default_factory=dict)  # what its stages have set so far
    changed: set[str] = field(default_factory=set)  # entries of its state that are rows of something larger
    start: Tensor | None = None  # [total] what training started from; made on demand

    @property
    def ctx(self) -> Context:
        """What hooks outside the step see of the client."""
        assert self.work is not None, "a lane at work has a client"
        return self.work.ctx

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of the next iteration."""
        assert self.work is not None, "a lane at work has a client"
        return self.work.cycle[self.step % len(self.work.cycle)]

    def take(self, work: LocalRun) -> None:
        """Begin with a client."""
        self.work, self.step, self.start = work, 0, None
        self.modes, self.changed = {}, set()
        self.batch = next(work.batches, None)

    def advance(self) -> None:
        """To the next batch."""
        assert self.work is not None, "a lane at work has a client"
        self.step += 1
        self.batch = next(self.work.batches, None)


def _start(lane: _Lane) -> Tensor:
    """[total] the vector that training started from."""
    if lane.start is None:
        lane.start = torch.cat([lane.ctx.base, lane.ctx.start.personal])
    return lane.start


# Where a client has what a step may ask for, by table and key; KeyError where it has not.
_TABLES: Mapping[str, Callable[[_Lane, str], Tensor]] = {
    "state": lambda lane, key: lane.ctx.state[key],
    "kept": lambda lane, key: lane.ctx.kept[key],
    "download": lambda lane, key: lane.ctx.download[key],
    "draws": lambda lane, key: lane.ctx.draws[key][lane.step],
    "start": lambda lane, key: _start(lane),
    "base": lambda lane, key: lane.ctx.base,
}
# What a step may use as a Python value: lanes are stepped together where they agree on it.
_FACTS: Mapping[str, Callable[[_Lane], Any]] = {
    "step": lambda lane: lane.step,
    "plan": lambda lane: (lane.ctx.plan.sizes, lane.ctx.samples),
    "samples": lambda lane: lane.ctx.samples,
    "participation": lambda lane: lane.ctx.participation,
}


class _Table(dict[str, Tensor]):
    """Tensors of all lanes by name, those that steps have asked for so far; asking for another one makes it come."""

    def __init__(self, name: str, given: Mapping[str, Tensor], wanted: Mapping[tuple[str, str], None]):
        super().__init__(given)
        self.name, self.wanted = name, wanted

    def __missing__(self, key: str) -> Tensor:
        if (self.name, key) in self.wanted:
            raise KeyError(key)
        raise _Wanted(self.name, key)

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key) and (self.name, key) not in self.wanted:
            raise _Wanted(self.name, str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As a dictionary's."""
        return self[key] if key in self else default  # noqa: SIM401 (this is what `get` does)


@dataclass(frozen=True)
class _Sizes:
    """What lanes that are stepped together have in common of their plans."""

    sizes: tuple[int, ...]
    samples: int

    @property
    def steps(self) -> int:
        """Number of iterations."""
        return len(self.sizes)


class _LaneContext(Context):
    """What hooks see of all clients of a step at once: tensors of each, behind the names of a `Context`."""

    __slots__ = ("_client", "_frozen", "_lanes", "_lead", "_open", "_start")

    def __init__(
        self, lanes: Lanes, lead: _Lane, stage: Stage, given: Tensors, common: Mapping[str, Tensor], open_: ExitStack
    ):
        ctx = lead.ctx
        self.trainer, self.seed, self.version, self.rate = ctx.trainer, ctx.seed, ctx.version, ctx.rate
        self.vector, self.received, self.base = ctx.vector, ctx.received, given.get("base", ctx.base)
        self.stage, self.upload, self.report = stage, {}, {}
        self.state = _Table("state", given["state"], lanes.wanted)
        self.kept = _Table("kept", given["kept"], lanes.wanted)
        self._start = _Table("start", given["start"], lanes.wanted)
        self.download = ctx.download
        if "download" in given:
            self.download = _Table("download", {**common, **given["download"]}, lanes.wanted)
        self.draws = _Table("draws", given["draws"], lanes.wanted)  # type: ignore[assignment]
        self._lanes, self._lead, self._open = lanes, lead, open_
        self._client: Tensor = given["client"]
        self._frozen: dict[str, Mapping[str, nn.Module]] = {}

    def _fact(self, name: str) -> Any:
        if name not in self._lanes.facts:
            raise _Wanted("fact", name)
        return _FACTS[name](self._lead)

    @property
    def client(self) -> Tensor:  # type: ignore[override]
        """[] int64, one for each lane."""
        return self._client

    @property
    def step(self) -> int:  # type: ignore[override]
        return int(self._fact("step"))

    @property
    def plan(self) -> _Sizes:  # type: ignore[override]
        return _Sizes(*self._fact("plan"))

    @property
    def samples(self) -> int:  # type: ignore[override]
        return int(self._fact("samples"))

    @property
    def participation(self) -> int:  # type: ignore[override]
        return int(self._fact("participation"))

    def drawn(self, name: str) -> Tensor:
        """See `Context`."""
        return self.draws[name]  # type: ignore[return-value]

    def frozen(self, name: str = "received", values: Tensor | None = None) -> Mapping[str, nn.Module]:
        """See `Context`; the networks see `values` themselves, no copy, to the end of the step."""
        if name not in self._frozen:
            if (vector := self._lanes.seconds.get(name)) is None:
                raise _Wanted("second set", name)
            if values is None:
                values = self._start["received"] if vector.layout.personal else self.base
            views = list(vector.named(values, vector.counters).values())
            self._open.enter_context(vector.standing_for(values, vector.counters, views))
            self._frozen[name] = vector.networks
        return self._frozen[name]

    def leaf(self, inputs: Tensor) -> Tensor:
        """See `Context`."""
        return across(lambda whole: whole.detach().requires_grad_(), inputs)

    def input_gradient(self, loss: Tensor, inputs: Tensor) -> Tensor:
        """See `Context`."""

        def compute(losses: Tensor, whole: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(losses.sum(), whole, create_graph=True)
            return gradient

        return across(compute, loss, inputs)


@dataclass(frozen=True)
class _Group:
    """What a stage trains: where its tensors are among the layout's entries, the same as views [K, ...], its stretches
    of the vector, and those of them that are shared parameters."""

    places: list[int]
    views: list[Tensor]
    runs: tuple[slice, ...]
    shared: tuple[slice, ...]


def _after(modes: Mapping[str, bool], others: Mapping[str, bool]) -> dict[str, bool]:
    """Modes in the order in which they were set, the later ones last."""
    return {**{part: mode for part, mode in modes.items() if part not in others}, **others}


def _changed(found: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in found.items() if value is not given.get(key)}


def _is_tensors(value: object) -> bool:
    return all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _flat(found: Tensors, gradient: list[Tensor]) -> list[Tensor]:
    return [found["loss"].detach(), *gradient]


@contextmanager
def _explained(count: int) -> Iterator[None]:
    """What fails in a step of many clients fails because of lanes, and says so by the method's name."""
    try:
        yield
    except (_Wanted, NotInLanes):
        raise
    except Exception as error:
        name = blamed(error)
        who = f"method '{name}'" if name else "the model or the loop"
        raise NotInLanes(
            f"runtime.lanes={count}: {who} cannot train several clients at once ({first_line(error).rstrip('.')}): set "
            "runtime.lanes=1"
        ) from error


class _Work:
    """One stage of an iteration, for the lanes of a group."""

    def __init__(self, lanes: Lanes, active: Sequence[_Lane], stage: Stage, cached: Tensors, more: bool):
        self.lanes, self.active, self.stage, self.more = lanes, active, stage, more
        self.vector, self.step, self.group = lanes.trainer.vector, lanes.step, lanes.group(stage.trains)
        self.common: dict[str, Tensor] = {}  # downloads that all have, where others have some of their own
        self.given = self._given()
        self.batch = self._batch()
        self.cached = cached
        self.draws = self._draws() if self.step.perturber is not None else []
        # Of BatchNorm: contiguous, for only such tensors are changed in place under vmap.
        self.buffers = lanes.buffers()
        self.started = [buffer.clone() for buffer in self.buffers] if self.step.perturber is not None else []

    def _given(self) -> Tensors:
        """What the steps of the group ask for besides batches and parameters, [K, ...] each."""
        lanes, active = self.lanes, self.active
        contexts = [lane.ctx for lane in active]
        given: Tensors = {name: {} for name in _TABLES if name != "base"}
        for table, key in lanes.wanted:
            if lanes.shape(active[0], table, key) is not None:
                one, *others = (_TABLES[table](lane, key) for lane in active)
                if table == "download" and all(other is one for other in others):
                    self.common[key] = one
                else:
                    given[table][key] = lanes.stacked(table, key, active)
        if all(ctx.download is contexts[0].download for ctx in contexts):
            del given["download"]
        if any(ctx.base is not contexts[0].base for ctx in contexts):
            given["base"] = lanes.stacked("base", "", active)
        clients = {lane.row: lane.ctx.client for lane in active}
        given["client"] = torch.tensor([clients.get(row, 0) for row in range(lanes.count)], device=lanes.data.device)
        return given

    def _batch(self) -> list[Tensor]:
        own = {lane.row: lane.batch for lane in self.active}
        batches = [own.get(row) or self.active[0].batch for row in range(self.lanes.count)]
        return [torch.stack([getattr(batch, name) for batch in batches]) for name in ("inputs", "targets")]

    @contextmanager
    def _context(self, given: Tensors, data: Tensor, counters: Tensor, tensors: Sequence[Tensor]) -> Iterator[Context]:
        """Inside vmap: what hooks see. The networks and the vector are those of the lane."""
        with ExitStack() as stack:
            stack.enter_context(self.vector.standing_for(data, counters, tensors))
            generators = {lane.row: lane.generator for lane in self.active if lane.generator is not None}
            stack.enter_context(InLanes(generators, given["client"]))
            yield _LaneContext(self.lanes, self.active[0], self.stage, given, self.common, stack)

    # --- the loss ------------------------------------------------------------------------------------------------
    def forward(self, buffers: Sequence[Tensor] | None = None, again: bool = False) -> Tensors:
        """The loss of every lane, and what the hooks changed; buffers: of BatchNorm, changed in place.

        again: for a second pass, which computes all outputs anew.
        """
        lanes = self.lanes
        tensors = lanes.merged(lanes.leaves, self.buffers if buffers is None else buffers)
        cached = {} if again else self.cached
        return vmap(self._objective)(self.given, self.batch, cached, tensors, lanes.data, lanes.counters)

    def _objective(
        self, given: Tensors, pair: list[Tensor], cached: Tensors, tensors: list[Tensor], data: Tensor, counters: Tensor
    ) -> Tensors:
        with self._context(given, data, counters, tensors) as ctx:
            inputs, targets = pair
            out = self.step.outputs(ctx, Batch(inputs, targets, inputs, targets))
            out.recall(cached)
            loss, task = self.step.objective(ctx, out)
            if ctx.upload or ctx.report:
                name = next(iter({**ctx.upload, **ctx.report}))
                raise NotInLanes(
                    f"runtime.lanes={self.lanes.count}: method '{name.partition('.')[0]}' writes {name} in a step, and "
                    "a step is of many clients: let it write that in `finish`, or set runtime.lanes=1"
                )
            kept = {key: value for key, value in out.kept.items() if _is_tensors(value)} if self.more else {}
            return {
                "loss": loss,
                "task": loss if task is None else task,
                "out": kept,
                "state": _changed(ctx.state, given["state"]),
                "kept": _changed(ctx.kept, given["kept"]),
            }

    def passes(self) -> tuple[Tensors, list[Tensor]]:
        """Forward and backward."""
        found = self.forward()
        return found, self.gradient(found["loss"])

    def played(self) -> tuple[Tensors, list[Tensor]]:
        """The same where only the model decides what is computed: from a tape, once it has proved itself."""
        lanes, inputs = self.lanes, [*self.batch, *self.lanes.leaves, *self.buffers]
        key = self.stage.name, self.stage.trains, *(tensor.shape for tensor in self.batch)
        tape, trusted = lanes.tapes.get(key, (None, False))
        if tape is None:
            tape = Tape(lambda: _flat(*self.passes()), inputs)
            found = tape.first
        elif not trusted:
            copies = [*inputs[: -len(self.buffers) or None], *(buffer.clone() for buffer in self.buffers)]
            again = tape.play(copies)
            found = _flat(*self.passes())
            trusted = all(
                map(torch.equal, [*found, *self.buffers], [*again, *copies[len(copies) - len(self.buffers) :]])
            )
            lanes.plain = trusted
        else:
            found = tape.play(inputs)
        lanes.tapes[key] = tape, trusted
        return {"loss": found[0], "task": found[0], "out": {}, "state": {}, "kept": {}}, found[1:]

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """Of each tensor of the stage, [K, ...]; zeros where the loss does not depend on it."""
        return gradients(loss.sum(), [self.lanes.leaves[place] for place in self.group.places])

    def commit(self, found: Tensors) -> None:
        """Keep what the first pass did besides the losses."""
        self.lanes.keep_buffers(self.buffers)
        for table in ("state", "kept"):
            for key, whole in found[table].items():
                self.lanes.unstack(table, key, whole, self.active)

    # --- the step ------------------------------------------------------------------------------------------------
    def descend(self, grads: list[Tensor]) -> None:
        """One step of the stage's optimiser, in the rows of these lanes and of those that nobody needs."""
        lanes, group = self.lanes, self.group
        optimizer, rate = lanes.optimizer(self.stage), self.active[0].ctx.rate * self.stage.rate
        rows = [lane.row for lane in self.active]
        if not self.step.flat:
            optimizer.step_rows(rows, group.views, grads, rate)
            return
        flat = torch.cat([grad.reshape(lanes.count, -1) for grad in grads], dim=1)
        if self.step.perturber is not None:
            flat = self._perturbed(self.step.perturber, flat)
        parts = self.corrected(list(flat.split([run.stop - run.start for run in group.runs], dim=1)))
        if self.step.clip:
            norms = torch.cat(parts, dim=1).norm(dim=1, keepdim=True)
            factors = (self.step.clip / (norms + 1e-6)).clamp(max=1.0)
            parts = [part * factors for part in parts]
        optimizer.step_rows(rows, [lanes.data[:, run] for run in group.runs], parts, rate)

    def corrected(self, parts: list[Tensor]) -> list[Tensor]:
        """The gradient's stretches [K, n], after all corrections of shared ones."""
        if not self.step.corrections:
            return parts
        found = self._corrections(parts)
        for table in ("state", "kept"):
            for key, whole in found[table].items():
                self.lanes.unstack(table, key, whole, self.active)
        return list(found["parts"])

    def try_corrections(self) -> None:
        """Ask for what corrections and `perturb` need, without any effect."""
        flat = [torch.zeros_like(self.lanes.data[:, run]) for run in self.group.runs]
        if self.step.corrections:
            self._corrections(flat)
        if self.step.perturber is not None:
            self._perturbed(self.step.perturber, torch.cat(flat, dim=1))

    def _corrections(self, parts: list[Tensor]) -> Tensors:
        lanes = self.lanes
        tensors = lanes.merged(lanes.leaves, self.buffers)
        with _explained(lanes.count):
            return vmap(self._correct)(self.given, parts, tensors, lanes.data, lanes.counters)

    def _correct(
        self, given: Tensors, parts: list[Tensor], tensors: list[Tensor], data: Tensor, counters: Tensor
    ) -> Tensors:
        parts = [part.clone() for part in parts]
        with self._context(given, data, counters, tensors) as ctx, torch.no_grad():
            for run, part in zip(self.group.runs, parts, strict=True):
                if run in self.group.shared:
                    for method in self.step.corrections:
                        method.gradient(ctx, part, run)
            return {
                "parts": parts,
                "state": _changed(ctx.state, given["state"]),
                "kept": _changed(ctx.kept, given["kept"]),
            }

    # --- a second pass -------------------------------------------------------------------------------------------
    def _draws(self) -> list[Tensor]:
        return [lane.generator.get_state() for lane in self.active if lane.generator is not None]

    def _set_draws(self, states: Sequence[Tensor]) -> None:
        drawing = [lane.generator for lane in self.active if lane.generator is not None]
        for generator, state in zip(drawing, states, strict=True):
            generator.set_state(state)

    def _perturbed(self, perturber: Any, flat: Tensor) -> Tensor:
        """The gradient [K, n] that the owner of `perturb` makes of this one and those at other points."""
        lanes = self.lanes
        params = torch.cat([lanes.data[:, run] for run in self.group.runs], dim=1)
        tensors = lanes.merged(lanes.leaves, self.buffers)

        def change(
            given: Tensors, params: Tensor, grad: Tensor, tensors: list[Tensor], data: Tensor, counters: Tensor
        ) -> Tensor:
            with self._context(given, data, counters, tensors) as ctx:
                found: Tensor = perturber.perturb(ctx, params, grad, lambda shift: across(self._gradient_at, shift))
                return found

        with _explained(lanes.count):
            return vmap(change)(self.given, params, flat, tensors, lanes.data, lanes.counters).detach()

    def _gradient_at(self, shift: Tensor) -> Tensor:
        """[K, n] at shifted parameters, from the state, statistics and draws that the first pass started from."""
        lanes, now = self.lanes, self._draws()
        before = lanes.data.clone()
        self._set_draws(self.draws)
        try:
            with torch.no_grad():
                for run, part in zip(
                    self.group.runs, shift.split([r.stop - r.start for r in self.group.runs], 1), strict=True
                ):
                    lanes.data[:, run].add_(part)
            found = self.forward([buffer.clone() for buffer in self.started], again=True)
            return torch.cat([grad.reshape(lanes.count, -1) for grad in self.gradient(found["loss"])], dim=1)
        finally:
            lanes.data.copy_(before)
            self._set_draws(now)


class Lanes:
    """K rows for clients to train in, and the loop that keeps them busy."""

    def __init__(self, trainer: Trainer, count: int):
        vector, layout = trainer.vector, trainer.vector.layout
        self.trainer, self.step, self.layout, self.count = trainer, trainer.step, layout, count
        self.home = vector.data, vector.counters
        self.data, self.counters = (flat.detach().repeat(count, 1) for flat in self.home)
        device = vector.data.device
        self.lanes = [
            _Lane(row, self.data[row], self.counters[row], torch.Generator(device) if trainer.stochastic else None)
            for row in range(count)
        ]
        # .data: autograd must not mistake a step on its neighbours for one on it
        self.leaves = [self._view(e).data.requires_grad_() for e in layout.entries if e.parameter]
        self.wanted: dict[tuple[str, str], None] = {}  # tables' entries that steps have asked for, in that order
        # Whether nothing but the model decides what a step computes up to its gradient.
        self.plain = not (trainer.stochastic or trainer.stager or self.step.has_hooks)
        self.tapes: dict[Kind, tuple[Tape, bool]] = {}  # and whether they may be played
        self.facts: set[str] = set()
        self.seconds: dict[str, Vector] = {}  # further sets of networks that steps have asked for
        self._tried: set[Kind] = set()
        self._optimizers: dict[str, tuple[StackedOptimizer, Stage]] = {}
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._stacks: dict[tuple[str, str], tuple[dict[int, Tensor], Tensor]] = {}

    def _view(self, entry: Entry) -> Tensor:
        return self.data[:, entry.start : entry.stop].view(self.count, *entry.shape)

    # --- the loop ------------------------------------------------------------------------------------------------
    def train(
        self,
        numbers: Sequence[int],
        ready: Callable[[int], bool],
        begin: Callable[[int], LocalRun],
        end: Callable[[int, LocalRun], None],
        fail: Callable[[int, BaseException], None],
    ) -> None:
        """See `OneByOne`. Raises NotInLanes where a hook or the model does what cannot be done for several at once."""
        waiting = self._by_lane(numbers)
        try:
            while True:
                for lane in self.lanes:
                    self._work_alone(lane, waiting[lane.row], ready, begin, end, fail)
                if busy := [lane for lane in self.lanes if lane.work is not None]:
                    self._step_together(busy)
                elif not any(waiting):
                    return
        finally:
            for lane in self.lanes:
                lane.work = None
            self.trainer.vector.rehome(*self.home)
            self._stacks.clear()

    def _by_lane(self, numbers: Sequence[int]) -> list[list[int]]:
        """Of each lane, the places of its jobs."""
        found: list[list[int]] = [[] for _ in self.lanes]
        for place, number in enumerate(numbers):
            found[(number + number // self.count) % self.count].append(place)
        return found

    def order(self, numbers: Sequence[int]) -> Sequence[int]:
        """See `OneByOne`; nearly, for lanes that end early begin early."""
        return [place for turn in zip_longest(*self._by_lane(numbers)) for place in turn if place is not None]

    def _work_alone(
        self,
        lane: _Lane,
        waiting: list[int],
        ready: Callable[[int], bool],
        begin: Callable[[int], LocalRun],
        end: Callable[[int, LocalRun], None],
        fail: Callable[[int, BaseException], None],
    ) -> None:
        """Bring a lane to a batch that can be stepped with others, through ends and beginnings of clients."""
        while lane.batch is None or len(lane.batch.inputs) not in self.trainer.usual_sizes:
            try:
                if lane.work is None:
                    index = next(filter(ready, waiting), None)
                    if index is None:
                        return
                    lane.index = index
                    waiting.remove(index)
                    self._begin(lane, begin)
                elif lane.batch is not None:
                    self._step_alone(lane)
                else:
                    self._end(lane, end)
            except (Exception, SystemExit) as error:  # a client must not take the others down
                fail(lane.index, error)
                lane.work = lane.batch = None

    def _begin(self, lane: _Lane, begin: Callable[[int], LocalRun]) -> None:
        with self._alone(lane, drawing=False):
            work = begin(lane.index)
        lane.take(work)
        for stacked, stage in self._optimizers.values():
            stacked.begin(lane.row, work.ctx.optimizers.resumed(stage.name))

    def _step_alone(self, lane: _Lane) -> None:
        """Do a batch of another size as the loop would."""
        with self._alone(lane):
            self._lend(lane)
            self._set_modes(lane)
            lane.ctx.step = lane.step
            assert lane.batch is not None and lane.work is not None, "a lane at work has a batch"
            loss = self.step(lane.ctx, lane.batch, lane.stages)
        for stage in lane.stages:
            lane.modes = _after(lane.modes, stage.modes)
            if (used := lane.ctx.optimizers.get(stage.name)) is not None:
                self.optimizer(stage).put(lane.row, used)
        if loss is not None:
            lane.work.losses.append(loss)
        lane.advance()

    def _end(self, lane: _Lane, end: Callable[[int, LocalRun], None]) -> None:
        work = lane.work
        assert work is not None, "a lane that ends has a client"
        with self._alone(lane):
            self._lend(lane)
            for key in lane.changed:
                work.ctx.state[key] = work.ctx.state[key].clone()
            self.trainer.end(work)
            end(lane.index, work)
        lane.work = None

    @contextmanager
    def _alone(self, lane: _Lane, drawing: bool = True) -> Iterator[None]:
        """The lane's row is the trainer's vector, and torch's generator stands where the client's does."""
        device = self.data.device
        if self.trainer.vector.data is not lane.data:
            self.trainer.vector.rehome(lane.data, lane.counters)
        if lane.generator is not None and drawing:
            set_generator_state(device, lane.generator.get_state())
        yield
        if lane.generator is not None:
            lane.generator.set_state(generator_state(device))

    def _set_modes(self, lane: _Lane) -> None:
        if self.trainer.methods:
            self.trainer.training(True)
            set_modes(self.trainer.vector.networks, lane.modes)

    # --- optimisers ----------------------------------------------------------------------------------------------
    def _lend(self, lane: _Lane) -> None:
        """Hand the client its rows of the optimisers."""
        for stacked, stage in self._optimizers.values():
            if stacked.counts[lane.row]:
                lane.ctx.optimizers.put(stage.name, stacked.row(lane.row), self.group(stage.trains).shared, stage.rate)

    def optimizer(self, stage: Stage) -> StackedOptimizer:
        if stage.name not in self._optimizers:
            group = self.group(stage.trains)
            like = [self.data[:, run] for run in group.runs] if self.step.flat else group.views
            stacked = StackedOptimizer(self.step.optimizer, like)
            for lane in self.lanes:
                if lane.work is not None:
                    stacked.begin(lane.row, lane.ctx.optimizers.resumed(stage.name))
            self._optimizers[stage.name] = stacked, stage
        return self._optimizers[stage.name][0]

    def group(self, trains: tuple[str, ...]) -> _Group:
        group = self._groups.get(trains)
        if group is None:
            parts = self.step.group(trains)
            trained = {id(parameter) for parameter in parts.params}
            places = [i for i, p in enumerate(self.trainer.vector.parameters.values()) if id(p) in trained]
            entries = self.layout.within(trains)
            views = [self._view(entry) for entry in entries]
            group = self._groups[trains] = _Group(places, views, parts.runs, parts.shared)
        return group

    # --- one iteration of many clients ---------------------------------------------------------------------------
    def _kind(self, lane: _Lane) -> Kind:
        """What lanes have to agree on to be stepped together."""
        assert lane.batch is not None, "a lane at work has a batch"
        stages = tuple((stage.name, stage.trains, stage.rate) for stage in lane.stages)
        facts = tuple(_FACTS[name](lane) for name in sorted(self.facts))
        shapes = tuple(self.shape(lane, table, key) for table, key in self.wanted)
        return stages, lane.batch.inputs.shape, tuple(lane.modes.items()), facts, shapes

    @staticmethod
    def shape(lane: _Lane, table: str, key: str) -> Any:
        try:
            return _TABLES[table](lane, key).shape
        except KeyError:
            return None

    def _step_together(self, busy: Sequence[_Lane]) -> None:
        """Step the lanes of the commonest kind."""
        kinds: dict[Kind, list[_Lane]] = {}
        for lane in busy:
            kinds.setdefault(self._kind(lane), []).append(lane)
        kind, group = max(kinds.items(), key=lambda each: len(each[1]))
        if kind[:2] not in self._tried:
            if not self._try(group):
                return
            self._tried.add(kind[:2])
        for stage in group[0].stages:
            self.optimizer(stage)
        others = [lane.row for lane in busy if lane not in group]
        kept = self._rows(others) if others else []
        try:
            done = self._iterate(group)
        except _Wanted as wanted:
            self._want(wanted)
            done = False
        for tensor, rows in kept:
            tensor[others] = rows
        if done:
            for lane in group:
                lane.advance()

    def _rows(self, others: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Copies of all that a step changes in the rows of lanes that have to wait."""
        tensors = [self.data, self.counters]
        tensors += [buffer for stacked, _ in self._optimizers.values() for buffer in (*stacked.first, *stacked.second)]
        return [(tensor, tensor[others].clone()) for tensor in tensors]

    def _want(self, wanted: _Wanted) -> None:
        if wanted.table == "fact":
            self.facts.add(wanted.key)
        elif wanted.table == "second set":
            self.seconds[wanted.key] = self.trainer.second(wanted.key)
        else:
            self.wanted[wanted.table, wanted.key] = None

    def _try(self, group: Sequence[_Lane]) -> bool:
        """Compute all losses and corrections of an iteration without a step, to see what they ask for; whether all is
        there."""
        draws = [lane.generator.get_state() if lane.generator is not None else None for lane in self.lanes]
        complete = False
        try:
            self._iterate(group, dry=True)
            complete = True
        except _Wanted as wanted:
            self._want(wanted)
        for lane, state in zip(self.lanes, draws, strict=True):
            if lane.generator is not None and state is not None:
                lane.generator.set_state(state)
        return complete

    def _iterate(self, group: Sequence[_Lane], dry: bool = False) -> bool:
        """All stages of the next iteration of these lanes; dry: without any effect on them."""
        lead = group[0]
        modes, cached = dict(lead.modes), dict[str, Any]()
        for stage in lead.stages:
            modes = _after(modes, stage.modes)
            if self.trainer.methods:
                self.trainer.training(True)
                set_modes(self.trainer.vector.networks, modes)
            work = _Work(self, group, stage, cached, more=stage is not lead.stages[-1])
            with _explained(self.count):
                found, gradient = work.passes() if dry or not self.plain else work.played()
            if dry:
                work.try_corrections()
            else:
                work.commit(found)
                work.descend(gradient)
                if stage.loss is None:
                    for lane, loss in zip(self.lanes, found["task"].detach().unbind(), strict=True):
                        if lane in group and lane.work is not None:
                            lane.work.losses.append(loss)
            cached = found["out"]
        if not dry:
            for lane in group:
                lane.modes = dict(modes)
        return True

    def buffers(self) -> list[Tensor]:
        """Copies of all buffers [K, ...]: floating ones, then counters."""
        floating = [self._view(entry).clone() for entry in self.layout.entries if not entry.parameter]
        return floating + [self._counter(entry).clone() for entry in self.layout.counters]

    def _counter(self, entry: Entry) -> Tensor:
        return self.counters[:, entry.start : entry.stop].view(self.count, *entry.shape)

    def keep_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Write back what `buffers` returned."""
        places = [self._view(entry) for entry in self.layout.entries if not entry.parameter]
        for place, buffer in zip(places + [self._counter(e) for e in self.layout.counters], buffers, strict=True):
            place.copy_(buffer)

    def merged(self, leaves: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor]:
        """Parameters and buffers in the order of the layout."""
        parameters, others = iter(leaves), iter(buffers)
        entries = (*self.layout.entries, *self.layout.counters)
        return [next(parameters if entry.parameter else others) for entry in entries]

    def stacked(self, table: str, key: str, group: Sequence[_Lane]) -> Tensor:
        """[K, ...] an entry of all lanes of a group; rows of other lanes repeat the first one's."""
        own = {lane.row: _TABLES[table](lane, key) for lane in group}
        known = self._stacks.get((table, key))
        if known is not None and all(known[0].get(row) is value for row, value in own.items()):
            return known[1]
        first = next(iter(own.values()))
        whole = torch.stack([own.get(row, first) for row in range(self.count)])
        self._stacks[table, key] = own, whole
        return whole

    def unstack(self, table: str, key: str, whole: Tensor, group: Sequence[_Lane]) -> None:
        """Hand every client of a group its row of an entry that a step has changed."""
        own = {lane.row: whole[lane.row] for lane in group}
        for lane in group:
            getattr(lane.ctx, table)[key] = own[lane.row]
            if table == "state":
                lane.changed.add(key)
        self._stacks[table, key] = own, whole
