"""One stage of an iteration of many clients: hooks and model under `vmap`, one gradient, one step of the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from raysim.api.composition import blamed
from raysim.api.context import Batch, Context, Stage
from raysim.api.mistakes import HookMistake, returned
from raysim.primitives.errors import Refused, first_line
from raysim.training.across import Convolutions, InLanes, across
from raysim.training.lane import FACTS, TABLES, Lane, NotInLanes, Sizes, Table, Tensors, Wanted
from raysim.training.rows import Rows, on_border
from raysim.training.step import gradients
from raysim.training.tape import Tape

if TYPE_CHECKING:
    from raysim.training.lanes import Lanes


class LaneContext(Context):
    """What hooks see of all clients of a step at once: tensors of each, behind the names of a `Context`."""

    __slots__ = ("_apart", "_asked", "_client", "_frozen", "_lead", "_open", "_start")

    def __init__(
        self, lanes: Rows, lead: Lane, stage: Stage, given: Tensors, common: Mapping[str, Tensor], open_: ExitStack
    ):
        ctx, asked = lead.ctx, lanes.asked
        self.trainer, self.seed = ctx.trainer, ctx.seed
        self.vector, self.received, self.base = ctx.vector, ctx.received, given.get("base", ctx.base)
        self.stage, self.upload, self.report = stage, {}, {}
        self.state = Table("state", given["state"], asked.entries)
        self.kept = Table("kept", given["kept"], asked.entries)
        self._start = Table("start", given["start"], asked.entries)
        self.download = ctx.download
        if "download" in given:
            self.download = Table("download", {**common, **given["download"]}, asked.entries)
        self.draws = Table("draws", given["draws"], asked.entries)  # type: ignore[assignment]
        self._asked, self._lead, self._open, self._apart = asked, lead, open_, lanes.apart
        self._client: Tensor = given["client"]
        self._frozen: dict[str, Mapping[str, nn.Module]] = {}

    def _fact(self, name: str) -> Any:
        if name not in self._asked.facts:
            raise Wanted("fact", name)
        return FACTS[name](self._lead)

    @property
    def client(self) -> Tensor:  # type: ignore[override]
        """[] int64, one for each lane."""
        return self._client

    @property
    def step(self) -> int:  # type: ignore[override]
        return int(self._fact("step"))

    @property
    def version(self) -> int:  # type: ignore[override]
        return int(self._fact("version"))

    @property
    def rate(self) -> float:  # type: ignore[override]
        return float(self._fact("rate"))

    @property
    def plan(self) -> Sizes:  # type: ignore[override]
        return Sizes(*self._fact("plan"))

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
            if (vector := self._asked.seconds.get(name)) is None:
                raise Wanted("second set", name)
            if values is None:
                values = self._start["received"] if vector.layout.personal else self.base
            views = list(vector.named(values, vector.counters).values())
            views = list(map(on_border, views)) if self._apart else views
            self._open.enter_context(vector.standing_for(values, vector.counters, views))
            self._frozen[name] = vector.networks
        return self._frozen[name]

    def leaf(self, inputs: Tensor) -> Tensor:
        """See `Context`."""
        return super().leaf(inputs) if self._apart else across(lambda whole: whole.detach().requires_grad_(), inputs)

    def input_gradient(self, loss: Tensor, inputs: Tensor) -> Tensor:
        """See `Context`."""
        if self._apart:
            return super().input_gradient(loss, inputs)

        def compute(losses: Tensor, whole: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(losses.sum(), whole, create_graph=True)
            return gradient

        return across(compute, loss, inputs)


def after(modes: Mapping[str, bool], others: Mapping[str, bool]) -> dict[str, bool]:
    """Modes in the order in which they were set, the later ones last."""
    return {**{part: mode for part, mode in modes.items() if part not in others}, **others}


def _changed(found: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in found.items() if value is not given.get(key)}


def _is_tensors(value: object) -> bool:
    return all(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _flat(found: Tensors, gradient: list[Tensor]) -> list[Tensor]:
    return [found["loss"].detach(), *gradient]


@contextmanager
def explained(count: int, what: str = "train", graph: bool = False) -> Iterator[None]:
    """What fails in a step of many clients fails because of lanes, and says so by the method's name."""
    try:
        yield
    except (Wanted, NotInLanes):
        raise
    except HookMistake as error:  # alone it would fail as well
        raise Refused(str(error)) from error
    except Exception as error:
        name = blamed(error)
        who = f"method '{name}'" if name else "the model or the loop"
        said = first_line(error).rstrip(".")
        raise NotInLanes(
            f"runtime.graph=true: the step of {who} cannot be recorded ({said}): set runtime.graph=false"
            if graph
            else f"runtime.lanes={count}: {who} cannot {what} several clients at once ({said}): set runtime.lanes=1"
        ) from error


def stacked_batch(rows: Sequence[int], active: Sequence[Lane]) -> list[Tensor]:
    """Inputs and targets of a group's next batches, [K, B, ...]; rows of other lanes repeat the first one's."""
    own = {lane.row: lane.batch for lane in active}
    batches = [own.get(row) or active[0].batch for row in rows]
    return [torch.stack([getattr(batch, name) for batch in batches]) for name in ("inputs", "targets")]


def stacked_given(lanes: Lanes, rows: Sequence[int], active: Sequence[Lane]) -> tuple[Tensors, dict[str, Tensor]]:
    """What the steps of a group ask for besides batches and parameters, [K, ...] each; and downloads that all have,
    where others have some of their own. rows: those that are computed."""
    contexts = [lane.ctx for lane in active]
    given: Tensors = {name: {} for name in TABLES if name != "base"}
    common: dict[str, Tensor] = {}
    for table, key in lanes.asked.entries:
        if lanes.shape(active[0], table, key) is not None:
            one, *others = (TABLES[table](lane, key) for lane in active)
            if table == "download" and all(other is one for other in others):
                common[key] = one
            else:
                given[table][key] = lanes.stacked(table, key, rows, active)
    if all(ctx.download is contexts[0].download for ctx in contexts):
        del given["download"]
    if any(ctx.base is not contexts[0].base for ctx in contexts):
        given["base"] = lanes.stacked("base", "", rows, active)
    given["client"] = lanes.clients(rows, active)
    return given, common


class LaneStep:
    """One stage of an iteration, for the lanes of a group.

    batch: as `stacked_batch` returns it; given: makes what `stacked_given` returns, when that is needed.
    changed: entries of tables that hooks have replaced, [K, ...] each.
    """

    def __init__(
        self,
        lanes: Rows,
        active: Sequence[Lane],
        stage: Stage,
        cached: Tensors,
        more: bool,
        batch: list[Tensor],
        given: Callable[[], tuple[Tensors, dict[str, Tensor]]],
    ):
        self.lanes, self.active, self.stage, self.more = lanes, active, stage, more
        self.vector, self.step, self.group = lanes.trainer.vector, lanes.step, lanes.group(stage.trains)
        self.batch = batch
        self._given = given
        self.changed: dict[str, dict[str, Tensor]] = {"state": {}, "kept": {}}
        self.cached = cached
        self.draws = self._draws() if self.step.perturber is not None else []
        # Of BatchNorm: contiguous, for only such tensors are changed in place under vmap.
        self.buffers = lanes.buffers()
        self.started = [buffer.clone() for buffer in self.buffers] if self.step.perturber is not None else []

    @cached_property
    def _asked(self) -> tuple[Tensors, dict[str, Tensor]]:
        return self._given()

    @property
    def given(self) -> Tensors:
        """See `stacked_given`."""
        return self._asked[0]

    @contextmanager
    def _context(self, given: Tensors, data: Tensor, counters: Tensor, tensors: Sequence[Tensor]) -> Iterator[Context]:
        """Inside vmap, or alone: what hooks see. The networks and the vector are those of the lane."""
        with ExitStack() as stack:
            stack.enter_context(self.vector.standing_for(data, counters, tensors))
            generators = {lane.row: lane.generator for lane in self.active if lane.generator is not None}
            usual = Convolutions(self.lanes.channels_last) if self.lanes.apart else InLanes(generators, given["client"])
            stack.enter_context(usual)
            yield LaneContext(self.lanes, self.active[0], self.stage, given, self._asked[1], stack)

    # --- the loss ------------------------------------------------------------------------------------------------
    def forward(self, buffers: Sequence[Tensor] | None = None, again: bool = False) -> Tensors:
        """The loss of every lane, and what the hooks changed; buffers: of BatchNorm, changed in place.

        again: for a second pass, which computes all outputs anew.
        """
        lanes = self.lanes
        tensors = lanes.merged(lanes.parameters(), self.buffers if buffers is None else buffers)
        cached = {} if again else self.cached
        objective = lanes.mapped(self._objective)
        found: Tensors = objective(self.given, self.batch, cached, tensors, lanes.data, lanes.counters)
        return found

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
        return {"task": found[0], "out": {}, "state": {}, "kept": {}}, found[1:]

    def gradient(self, loss: Tensor) -> list[Tensor]:
        """Of each tensor of the stage, [K, ...]; zeros where the loss does not depend on it."""
        return gradients(loss.sum(), [self.lanes.leaves[place] for place in self.group.places])

    def commit(self, found: Tensors) -> None:
        """Keep what the first pass did besides the losses."""
        self.lanes.keep_buffers(self.buffers)
        self._note(found)

    def _note(self, found: Tensors) -> None:
        for table, entries in self.changed.items():
            entries |= found[table]

    # --- the step ------------------------------------------------------------------------------------------------
    def descend(self, grads: list[Tensor], rate: float | Tensor, active: Tensor) -> None:
        """One step of the stage's optimiser, in the rows of these lanes and of those that nobody needs.

        active: [K] 1 for these lanes.
        """
        lanes, group = self.lanes, self.group
        optimizer, rate = lanes.optimizer(self.stage), rate * self.stage.rate
        if not self.step.flat:
            optimizer.step_rows(active, group.views, grads, rate)
            return
        flat = torch.cat([grad.reshape(lanes.count, -1) for grad in grads], dim=1)
        if self.step.perturber is not None:
            flat = self._perturbed(self.step.perturber, flat)
        parts = self.corrected(list(flat.split([run.stop - run.start for run in group.runs], dim=1)))
        if self.step.clip:
            norms = torch.cat(parts, dim=1).norm(dim=1, keepdim=True)
            factors = (self.step.clip / (norms + 1e-6)).clamp(max=1.0)
            parts = [part * factors for part in parts]
        optimizer.step_rows(active, [lanes.data[:, run] for run in group.runs], parts, rate)

    def corrected(self, parts: list[Tensor]) -> list[Tensor]:
        """The gradient's stretches [K, n], after all corrections of shared ones."""
        if not self.step.corrections:
            return parts
        found = self._corrections(parts)
        self._note(found)
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
        with explained(lanes.count):
            found: Tensors = lanes.mapped(self._correct)(self.given, parts, tensors, lanes.data, lanes.counters)
            return found

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
                gradient_at = partial(lanes.across, self._gradient_at)
                found: Tensor = perturber.perturb(ctx, params, grad, gradient_at)
                return returned(found, Tensor, perturber, "perturb", "the gradient")

        with explained(lanes.count):
            found: Tensor = lanes.mapped(change)(self.given, params, flat, tensors, lanes.data, lanes.counters)
            return found.detach()

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
