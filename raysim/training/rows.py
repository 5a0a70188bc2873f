"""Rows of the stack [K, D] in which lanes train: what one stage of an iteration computes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import vmap

from raysim.api.context import Stage
from raysim.training.across import across, across_alone, alone
from raysim.training.lane import Asked, Kind
from raysim.training.tape import Tape
from raysim.training.trainer import Trainer
from raysim.vectors.layout import Entry
from raysim.vectors.optimizer import StackedOptimizer


@dataclass(frozen=True)
class LaneGroup:
    """What a stage trains: where its tensors are among the layout's entries, the same as views [K, ...], its stretches
    of the vector, and those of them that are shared parameters."""

    places: list[int]
    views: list[Tensor]
    runs: tuple[slice, ...]
    shared: tuple[slice, ...]


BORDER = 64  # floats between which rows begin on a GPU
_READ = 16  # bytes that its kernels read at once


def convolves(trainer: Trainer) -> bool:
    """Whether one of the networks has convolutions of pictures."""
    return any(isinstance(module, nn.Conv2d) for module in trainer.modules)


def stacked_rows(flat: Tensor, count: int, border: int = 1) -> Tensor:
    """[K, n] so many copies of flat [n], each of which begins at a multiple of `border` numbers."""
    whole = flat.new_empty(count, -(-len(flat) // border) * border)[:, : len(flat)]
    return whole.copy_(flat.detach().expand(count, -1))


def on_border(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where on a GPU it begins where some kernels cannot read: they would end the process."""
    return tensor if tensor.device.type != "cuda" or tensor.data_ptr() % _READ == 0 else tensor.clone()


class Rows(ABC):
    """data [K, D], counters [K, C]: the vectors of so many clients. asked: what their steps have asked for.

    apart: computed one by one, each as a client alone would be; else all at once, under `vmap`.
    """

    def __init__(self, trainer: Trainer, asked: Asked, data: Tensor, counters: Tensor, apart: bool):
        self.trainer, self.step, self.layout, self.asked = trainer, trainer.step, trainer.vector.layout, asked
        self.data, self.counters, self.count, self.apart = data, counters, len(data), apart
        self.channels_last = not any(isinstance(module, nn.GroupNorm) for module in trainer.modules)
        self.mapped: Callable[..., Callable[..., Any]] = alone if apart else vmap
        self.across = across_alone if apart else across
        # .data: autograd must not mistake a step on its neighbours for one on it
        self.leaves = [self._view(e).data.requires_grad_() for e in self.layout.entries if e.parameter]
        # Whether nothing but the model decides what a step computes up to its gradient.
        self.plain = not (trainer.stochastic or trainer.stager or self.step.has_hooks)
        self.tapes: dict[Kind, tuple[Tape, bool]] = {}  # and whether they may be played
        self._groups: dict[tuple[str, ...], LaneGroup] = {}

    @abstractmethod
    def optimizer(self, stage: Stage) -> StackedOptimizer:
        """Of these rows, for a stage."""

    def _view(self, entry: Entry) -> Tensor:
        return self.data[:, entry.start : entry.stop].view(self.count, *entry.shape)

    def _counter(self, entry: Entry) -> Tensor:
        return self.counters[:, entry.start : entry.stop].view(self.count, *entry.shape)

    def group(self, trains: tuple[str, ...]) -> LaneGroup:
        """What stages train that name these networks or modules."""
        group = self._groups.get(trains)
        if group is None:
            parts = self.step.group(trains)
            trained = {id(parameter) for parameter in parts.params}
            places = [i for i, p in enumerate(self.trainer.vector.parameters.values()) if id(p) in trained]
            views = [self._view(entry) for entry in self.layout.within(trains)]
            group = self._groups[trains] = LaneGroup(places, views, parts.runs, parts.shared)
        return group

    def parameters(self) -> list[Tensor]:
        """The leaves as networks see them."""
        return list(map(on_border, self.leaves)) if self.apart else self.leaves

    def tensors(self) -> list[Tensor]:
        """Views [K, ...] of all parameters and buffers, in the order of the layout."""
        return [*map(self._view, self.layout.entries), *map(self._counter, self.layout.counters)]

    def buffers(self) -> list[Tensor]:
        """Copies of all buffers [K, ...]: floating ones, then counters."""
        floating = [self._view(entry).clone() for entry in self.layout.entries if not entry.parameter]
        return floating + [self._counter(entry).clone() for entry in self.layout.counters]

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


class OneRow(Rows):
    """One row of others."""

    def __init__(self, whole: Rows, row: int):
        own = slice(row, row + 1)
        super().__init__(whole.trainer, whole.asked, whole.data[own], whole.counters[own], whole.apart)
        self._whole, self._row = whole, row
        self._optimizers: dict[str, StackedOptimizer] = {}

    def optimizer(self, stage: Stage) -> StackedOptimizer:
        """Buffers are rows of the others'."""
        if stage.name not in self._optimizers:
            self._optimizers[stage.name] = self._whole.optimizer(stage).part(self._row)
        return self._optimizers[stage.name]
