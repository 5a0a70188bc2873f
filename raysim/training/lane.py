"""A client in a lane, and what the steps of several clients may ask of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from raysim.api.context import Batch, Context, Stage
from raysim.api.mistakes import Undeclared
from raysim.primitives.errors import Refused
from raysim.training.trainer import LocalRun, Trainer
from raysim.vectors.layout import Home, Vector

Kind: TypeAlias = tuple[object, ...]  # of an iteration: lanes with the same one are stepped together
Tensors: TypeAlias = dict[str, Any]  # nested dictionaries and lists of tensors [K, ...]


class NotInLanes(Refused):
    """A step cannot be computed for several clients at once."""


class Wanted(Exception):
    """A step asks for something of its clients that it was not given: an entry of a table, or a fact."""

    def __init__(self, table: str, key: str):
        super().__init__(f"{table} {key}")
        self.table, self.key = table, key


@dataclass(eq=False)
class Lane:
    """A row of the stack, and the client at work there."""

    row: int
    home: Home
    generator: torch.Generator | None  # what the client draws from, where the model draws at all
    index: int = 0  # of the client among those to train
    work: LocalRun | None = None
    batch: Batch | None = None  # the next one; None: all are done
    step: int = 0
    modes: dict[str, bool] = field(default_factory=dict)  # what its stages have set so far
    changed: set[str] = field(default_factory=set)  # entries of its state that are rows of something larger
    start: Tensor | None = None  # [total] what training started from; made on demand
    kinds: tuple[object, ...] = ()  # of each iteration of the cycle: names, parts and rates of its stages

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
        self.kinds = tuple(tuple((each.name, each.trains, each.rate) for each in stages) for stages in work.cycle)
        self.batch = next(work.batches, None)

    def advance(self) -> None:
        """To the next batch."""
        assert self.work is not None, "a lane at work has a client"
        self.step += 1
        self.batch = next(self.work.batches, None)


def _start(lane: Lane) -> Tensor:
    """[total] the vector that training started from."""
    if lane.start is None:
        lane.start = torch.cat([lane.ctx.base, lane.ctx.start.personal])
    return lane.start


# Where a client has what a step may ask for, by table and key; KeyError where it has not.
TABLES: Mapping[str, Callable[[Lane, str], Tensor]] = {
    "state": lambda lane, key: lane.ctx.state[key],
    "kept": lambda lane, key: lane.ctx.kept[key],
    "download": lambda lane, key: lane.ctx.download[key],
    "draws": lambda lane, key: lane.ctx.draws[key][lane.step],
    "start": lambda lane, key: _start(lane),
    "base": lambda lane, key: lane.ctx.base,
}
# What a step may use as a Python value: lanes are stepped together where they agree on it.
FACTS: Mapping[str, Callable[[Lane], Any]] = {
    "step": lambda lane: lane.step,
    "plan": lambda lane: (lane.ctx.plan.sizes, lane.ctx.samples),
    "samples": lambda lane: lane.ctx.samples,
    "participation": lambda lane: lane.ctx.participation,
    "version": lambda lane: lane.ctx.version,
    "rate": lambda lane: lane.ctx.rate,
}


class Asked:
    """What steps have asked for so far; it is handed to them from then on."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.entries: dict[tuple[str, str], None] = {}  # of tables, in the order in which they were asked for
        self.facts: set[str] = set()
        self.seconds: dict[str, Vector] = {}  # further sets of networks

    def add(self, wanted: Wanted) -> None:
        """Hand this over from now on."""
        if wanted.table == "fact":
            self.facts.add(wanted.key)
        elif wanted.table == "second set":
            self.seconds[wanted.key] = self.trainer.second(wanted.key)
        else:
            self.entries[wanted.table, wanted.key] = None


class Table(dict[str, Tensor]):
    """Tensors of all lanes by name, those that steps have asked for so far; asking for another one makes it come."""

    def __init__(self, name: str, given: Mapping[str, Tensor], wanted: Mapping[tuple[str, str], None]):
        super().__init__(given)
        self.name, self.wanted = name, wanted

    def __missing__(self, key: str) -> Tensor:
        if (self.name, key) in self.wanted:
            raise Undeclared(key) if self.name == "state" else KeyError(key)
        raise Wanted(self.name, key)

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key) and (self.name, key) not in self.wanted:
            raise Wanted(self.name, str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As a dictionary's."""
        return self[key] if key in self else default  # noqa: SIM401 (this is what `get` does)


@dataclass(frozen=True)
class Sizes:
    """What lanes that are stepped together have in common of their plans."""

    sizes: tuple[int, ...]
    samples: int

    @property
    def steps(self) -> int:
        """Number of iterations."""
        return len(self.sizes)
