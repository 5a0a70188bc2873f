"""Lanes: K clients of one version train at once, each in a row of a stack [K, D], under one `torch.func.vmap`.

Where steps are recorded and a network has convolutions, rows are computed apart instead, each as a client alone would
be: a GPU does so beside each other, and kernels for one client's convolutions are faster than those for groups of them.

A batch of a usual size is stepped for all lanes that are at the same kind of iteration; other lanes wait, and lanes
without a client compute on whatever lies there. A batch of another size is stepped by `Step`, for its client alone.

What a client ends with does not depend on its neighbours. In the last bit it may depend on its lane, since kernels
treat the end of a tensor, and rows that begin off a border of 64 bytes, in other ways. So the job's number decides its
lane, whichever host trains it.

Hooks run as they are. What a client keeps is handed to them with an axis for the lanes: `LaneContext` has the names
of a `Context`. A fact that has to be a Python value, such as `ctx.step`, decides which lanes are stepped together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.composition import overrides
from raysim.api.context import Stage
from raysim.models.classifier import is_stochastic
from raysim.models.split import Foreign
from raysim.training.graph import Graphs, Masks, recorder
from raysim.training.lane import FACTS, TABLES, Asked, Kind, Lane, Wanted
from raysim.training.lane_step import LaneStep, after, explained, stacked_batch, stacked_given
from raysim.training.rows import BORDER, OneRow, Rows, convolves, stacked_rows
from raysim.training.run_spec import RunSpec
from raysim.training.second_pass import generator_state, set_generator_state
from raysim.training.step import set_modes
from raysim.training.trainer import Clients, LocalRun, Trainer
from raysim.vectors.optimizer import StackedOptimizer

# Hooks that take part in a step.
_IN_STEP = ("transform", "rows", "logits", "loss", "term", "perturb", "gradient", "stages")

# Of (clients under way, lanes): what keeps the lanes of a few hosts busy. Measured on W2, in CPU time of one thread: a
# client's step takes 0.68, 0.55 and 0.54 of the loop's time with 5, 10 and 25 lanes.
_BUSY = ((40, 10), (20, 5))
_METHODS = "raysim.methods."
NO_GRAPH = (
    "runtime.graph=true: the model draws random numbers in its steps (dropout or noise), which a recorded step would "
    "repeat: set runtime.graph=false"
)
_LARGEST = 1_000_000  # parameters of a model that gains: the products of larger ones take all of the time
# On a GPU, in graphs: 10 lanes took 0.61 to 0.79 of the time of one with 0.4 to 11 M parameters (H100, `bench gpu`).
_ON_GPU, _LARGEST_ON_GPU = 10, 20_000_000


def usual_lanes(spec: RunSpec, networks: Mapping[str, nn.Module], concurrency: int) -> int:
    """How many clients a host trains at once unless the run says so: as was fastest for such a model and device.

    On a GPU as many as there are where steps are recorded. On a CPU small networks of linear layers, where only the
    model decides what a step computes: networks with convolutions gained nothing (W1: 1.03 of the loop's time with 5
    lanes), nor did large ones (W3: 0.97). The clients' number of samples counts too: what is no full batch is trained
    alone. Networks for sequences were not measured, and of networks and losses that others wrote nobody knows whether
    they can.
    """
    size = sum(parameter.numel() for network in networks.values() for parameter in network.parameters())
    if spec.graph and spec.device.startswith("cuda"):
        return max(1, min(_ON_GPU, concurrency)) if size <= _LARGEST_ON_GPU else 1
    modules = [module for network in networks.values() for module in network.modules()]
    linear = not any(isinstance(module, nn.modules.conv._ConvNd) for module in modules)
    linear = linear and spec.task.tokens is None and _is_ours(spec)
    hooks = any(overrides(method, hook) for method in spec.methods for hook in _IN_STEP)
    counts = spec.data.partition.train.counts
    full = bool(np.median(counts[counts > 0]) >= 4 * spec.settings.local.batch) if counts.any() else False
    drawing = is_stochastic(*networks.values())
    if spec.device != "cpu" or not (linear and size <= _LARGEST and full) or hooks or drawing:
        return 1
    return next((lanes for least, lanes in _BUSY if concurrency >= least), 1)


def uses_graph(spec: RunSpec, networks: Mapping[str, nn.Module], asked: bool | None) -> bool:
    """Whether iterations are recorded; unless the run says so, on a GPU, where it was 1.5 to 2 times as fast.

    Of networks, losses and methods that others wrote nobody knows whether they can be. Raises ValueError where a
    recorded step would be wrong.
    """
    drawing = is_stochastic(*networks.values())
    if asked and drawing:
        raise ValueError(NO_GRAPH)
    if asked is not None:
        return asked
    ours = _is_ours(spec) and all(type(method).__module__.startswith(_METHODS) for method in spec.methods)
    return spec.device.startswith("cuda") and ours and not drawing


def _is_ours(spec: RunSpec) -> bool:
    """Whether network and loss are of raysim."""
    return not isinstance(spec.model, Foreign) and spec.loss is None


class Lanes(Rows):
    """K rows for clients to train in, and the loop that keeps them busy."""

    def __init__(self, trainer: Trainer, count: int, graph: bool = False):
        if graph and trainer.stochastic:
            raise ValueError(NO_GRAPH)
        vector = trainer.vector
        border = BORDER if vector.data.device.type == "cuda" else 1
        data, counters = (stacked_rows(flat, count, border) for flat in (vector.data, vector.counters))
        super().__init__(trainer, Asked(trainer), data, counters, graph and convolves(trainer))
        self.home = vector.home(vector.data, vector.counters)
        device = vector.data.device
        self.lanes = [
            Lane(
                row,
                vector.home(self.data[row], self.counters[row]),
                torch.Generator(device) if trainer.stochastic else None,
            )
            for row in range(count)
        ]
        self.all = tuple(range(count))
        self._alone_in: dict[int, OneRow] = {}
        self._tried: set[Kind] = set()
        self.masks, self._clients = Masks(device), dict[tuple[int, ...], Tensor]()
        self.record, self.graphs = recorder(device), Graphs(self) if graph else None
        self._optimizers: dict[str, tuple[StackedOptimizer, Stage]] = {}
        self._stacks: dict[tuple[str, str, tuple[int, ...]], tuple[dict[int, Tensor], Tensor]] = {}

    def row(self, row: int) -> OneRow:
        """One of the rows."""
        if row not in self._alone_in:
            self._alone_in[row] = OneRow(self, row)
        return self._alone_in[row]

    # --- the loop ------------------------------------------------------------------------------------------------
    def train(self, clients: Clients) -> None:
        """See `OneByOne`. Raises NotInLanes where a hook or the model does what cannot be done for several at once."""
        waiting = self._by_lane(clients.numbers)
        try:
            while True:
                for lane in self.lanes:
                    self._work_alone(lane, waiting[lane.row], clients)
                if busy := [lane for lane in self.lanes if lane.work is not None]:
                    self._step_together(busy)
                elif not any(waiting):
                    return
        finally:
            for lane in self.lanes:
                lane.work = None
            self.trainer.vector.rehome(self.home)
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

    def _work_alone(self, lane: Lane, waiting: list[int], clients: Clients) -> None:
        """Bring a lane to a batch that can be stepped with others, through ends and beginnings of clients."""
        while lane.batch is None or not self._is_usual(len(lane.batch.inputs)):
            try:
                if lane.work is None:
                    index = next(filter(clients.ready, waiting), None)
                    if index is None:
                        return
                    lane.index = index
                    waiting.remove(index)
                    self._begin(lane, clients.begin)
                elif lane.batch is not None:
                    self._step_alone(lane)
                else:
                    self._end(lane, clients.end)
            except (Exception, SystemExit) as error:  # a client must not take the others down
                clients.fail(lane.index, error)
                lane.work = lane.batch = None

    def _is_usual(self, size: int) -> bool:
        """Whether batches of this size are stepped together; a single lane has nobody to wait for."""
        return size in self.trainer.usual_sizes or (self.graphs is not None and self.count == 1)

    def _begin(self, lane: Lane, begin: Callable[[int], LocalRun]) -> None:
        with self._alone(lane, drawing=False):
            work = begin(lane.index)
        lane.take(work)
        for stacked, stage in self._optimizers.values():
            stacked.begin(lane.row, work.ctx.optimizers.resumed(stage.name))

    def _step_alone(self, lane: Lane) -> None:
        """Do a batch of another size as the loop would."""
        with self._alone(lane):
            self._lend(lane)
            self._set_modes(lane)
            lane.ctx.step = lane.step
            assert lane.batch is not None and lane.work is not None, "a lane at work has a batch"
            loss = self.step(lane.ctx, lane.batch, lane.stages)
        for stage in lane.stages:
            lane.modes = after(lane.modes, stage.modes)
            if (used := lane.ctx.optimizers.get(stage.name)) is not None:
                self.optimizer(stage).put(lane.row, used)
        if loss is not None:
            lane.work.losses.append(loss)
        lane.advance()

    def _end(self, lane: Lane, end: Callable[[int, LocalRun], None]) -> None:
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
    def _alone(self, lane: Lane, drawing: bool = True) -> Iterator[None]:
        """The lane's row is the trainer's vector, and torch's generator stands where the client's does."""
        device = self.data.device
        if self.trainer.vector.data is not lane.home.data:
            self.trainer.vector.rehome(lane.home)
        if lane.generator is not None and drawing:
            set_generator_state(device, lane.generator.get_state())
        yield
        if lane.generator is not None:
            lane.generator.set_state(generator_state(device))

    def _set_modes(self, lane: Lane) -> None:
        if self.trainer.methods:
            self.trainer.training(True)
            set_modes(self.trainer.vector.networks, lane.modes)

    # --- optimisers ----------------------------------------------------------------------------------------------
    def _lend(self, lane: Lane) -> None:
        """Hand the client its rows of the optimisers."""
        for stacked, stage in self._optimizers.values():
            if stacked.counts[lane.row]:
                lane.ctx.optimizers.put(stage.name, stacked.row(lane.row), self.group(stage.trains).shared, stage.rate)

    def optimizer(self, stage: Stage) -> StackedOptimizer:
        """Of all rows."""
        if stage.name not in self._optimizers:
            group = self.group(stage.trains)
            like = [self.data[:, run] for run in group.runs] if self.step.flat else group.views
            stacked = StackedOptimizer(self.step.optimizer, like)
            for lane in self.lanes:
                if lane.work is not None:
                    stacked.begin(lane.row, lane.ctx.optimizers.resumed(stage.name))
            self._optimizers[stage.name] = stacked, stage
        return self._optimizers[stage.name][0]

    # --- one iteration of many clients ---------------------------------------------------------------------------
    def _kind(self, lane: Lane) -> Kind:
        """What lanes have to agree on to be stepped together."""
        assert lane.batch is not None, "a lane at work has a batch"
        asked, kind = self.asked, lane.kinds[lane.step % len(lane.kinds)]
        facts = tuple(FACTS[name](lane) for name in sorted(asked.facts)) if asked.facts else ()
        shapes = tuple(self.shape(lane, table, key) for table, key in asked.entries) if asked.entries else ()
        return kind, lane.batch.inputs.shape, tuple(lane.modes.items()), facts, shapes

    @staticmethod
    def shape(lane: Lane, table: str, key: str) -> Any:
        try:
            return TABLES[table](lane, key).shape
        except KeyError:
            return None

    def _step_together(self, busy: Sequence[Lane]) -> None:
        """Step the lanes of the commonest kind."""
        kinds: dict[Kind, list[Lane]] = {}
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
        kept = self._rows(others) if others and not self.apart else []
        try:
            done = self._iterate(group) if self.graphs is None else self._replay(self.graphs, kind, group)
        except Wanted as wanted:
            self.asked.add(wanted)
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

    def _try(self, group: Sequence[Lane]) -> bool:
        """Compute all losses and corrections of an iteration without a step, to see what they ask for; whether all is
        there."""
        draws = [lane.generator.get_state() if lane.generator is not None else None for lane in self.lanes]
        complete = False
        try:
            self._iterate(group, dry=True)
            complete = True
        except Wanted as wanted:
            self.asked.add(wanted)
        for lane, state in zip(self.lanes, draws, strict=True):
            if lane.generator is not None and state is not None:
                lane.generator.set_state(state)
        return complete

    def _iterate(self, group: Sequence[Lane], dry: bool = False) -> bool:
        """All stages of the next iteration of these lanes; dry: without any effect on them."""
        lead, on, rows = group[0], cast("Rows", self), self.all
        if self.apart:  # only what is recorded is, so this is dry
            group, on, rows = [lead], self.row(lead.row), (lead.row,)
        modes, cached = dict(lead.modes), dict[str, Any]()
        last_task = next((stage for stage in reversed(lead.stages) if stage.task), None)  # as `Step` reports it
        for stage in lead.stages:
            modes = after(modes, stage.modes)
            if self.trainer.methods:
                self.trainer.training(True)
                set_modes(self.trainer.vector.networks, modes)
            more, batch = stage is not lead.stages[-1], stacked_batch(rows, group)
            work = LaneStep(on, group, stage, cached, more, batch, partial(stacked_given, self, rows, group))
            with explained(self.count):
                found, gradient = work.passes() if dry or not self.plain else work.played()
            if dry:
                work.try_corrections()
            else:
                work.commit(found)
                work.descend(gradient, lead.ctx.rate, self.masks.of(rows, group))
                losses = found["task"].detach() if stage is last_task else None
                self._note(group, rows, [stage], losses, work.changed)
            cached = found["out"]
        if not dry:
            for lane in group:
                lane.modes = dict(modes)
        return True

    def _replay(self, graphs: Graphs, kind: Kind, group: Sequence[Lane]) -> bool:
        """The same from recordings: of all rows, or where rows are computed apart of those that are needed."""
        stages, modes = group[0].stages, dict(group[0].modes)
        whole = not self.apart or len(group) == self.count
        for rows, some in [(self.all, group)] if whole else [((lane.row,), [lane]) for lane in group]:
            with explained(self.count, graph=True):
                losses, changed = graphs.iterate(kind, rows, some)
            self._note(some, rows, stages, losses, changed)
        for stage in stages:
            modes = after(modes, stage.modes)
        for lane in group:
            lane.modes = dict(modes)
        return True

    def _note(
        self,
        group: Sequence[Lane],
        rows: Sequence[int],
        stages: Sequence[Stage],
        losses: Tensor | None,
        changed: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """Hand the clients of a group what is theirs of stages that are done: steps, losses [K], entries of tables.

        rows: those that were computed.
        """
        for stage in stages:
            self.optimizer(stage).count(lane.row for lane in group)
        if losses is not None:
            own = dict(zip(rows, losses.unbind(), strict=True))
            for lane in group:
                assert lane.work is not None, "a lane at work has a client"
                lane.work.losses.append(own[lane.row])
        for table, entries in changed.items():
            for key, whole in entries.items():
                self.unstack(table, key, whole, tuple(rows), group)

    def clients(self, rows: Sequence[int], group: Sequence[Lane]) -> Tensor:
        """[K] int64 the clients of a group's lanes; 0 in others. The last one is kept: a copy to a device is a wait."""
        own = {lane.row: lane.ctx.client for lane in group}
        key = tuple(own.get(row, 0) for row in rows)
        if key not in self._clients:
            self._clients = {key: torch.tensor(key, device=self.data.device)}
        return self._clients[key]

    def stacked(self, table: str, key: str, rows: Sequence[int], group: Sequence[Lane]) -> Tensor:
        """[K, ...] an entry of all lanes of a group; rows of other lanes repeat the first one's."""
        own = {lane.row: TABLES[table](lane, key) for lane in group}
        place = table, key, tuple(rows)
        known = self._stacks.get(place)
        if known is not None and all(known[0].get(row) is value for row, value in own.items()):
            return known[1]
        first = next(iter(own.values()))
        whole = torch.stack([own.get(row, first) for row in rows])
        self._stacks[place] = own, whole
        return whole

    def unstack(self, table: str, key: str, whole: Tensor, rows: tuple[int, ...], group: Sequence[Lane]) -> None:
        """Hand every client of a group its row of an entry that a step has changed."""
        own = {lane.row: whole[rows.index(lane.row)] for lane in group}
        for lane in group:
            getattr(lane.ctx, table)[key] = own[lane.row]
            if table == "state":
                lane.changed.add(key)
        self._stacks[table, key, rows] = own, whole
