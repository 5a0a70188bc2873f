"""One flat buffer for everything trainable and every floating buffer, with the modules' tensors as views into it.

Order: shared parameters, shared buffers, then personal parameters, personal buffers. What travels is the prefix
`[0, layout.shared)`; what a server step may scale is `[0, layout.trained)`. Integer buffers have a vector of their own.
Frozen parameters (requires_grad False) are no part of it: every process builds them from the seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """One tensor of a network, `path` within it, and its place [start, stop)."""

    network: str
    path: str
    shape: tuple[int, ...]
    start: int
    stop: int
    parameter: bool
    personal: bool

    @property
    def name(self) -> str:
        """Unique in a run: "model.head.weight"."""
        return f"{self.network}.{self.path}"


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies. Fixed once per run, equal on all hosts and on the coordinator."""

    entries: tuple[Entry, ...]  # floating, by position
    counters: tuple[Entry, ...]  # integer buffers, by position
    trained: int  # shared trainable parameters
    shared: int  # the same plus shared floating buffers: what travels
    total: int
    shared_counters: int
    total_counters: int

    @property
    def personal(self) -> int:
        """Floats that stay on a client."""
        return self.total - self.shared

    @property
    def has_personal(self) -> bool:
        """Whether any tensor of the networks stays on a client."""
        return self.personal > 0 or self.total_counters > self.shared_counters

    @property
    def personal_entries(self) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
        """The tensors that stay on a client, by position: floating ones, and integer buffers."""
        return tuple(e for e in self.entries if e.personal), tuple(e for e in self.counters if e.personal)

    def within(self, prefixes: Iterable[str]) -> tuple[Entry, ...]:
        """The trainable entries of some networks or modules, by position: "model" or "model.head"."""
        dotted = tuple(prefix + "." for prefix in prefixes)
        return tuple(entry for entry in self.entries if entry.parameter and entry.name.startswith(dotted))

    def runs(self, entries: Iterable[Entry]) -> tuple[slice, ...]:
        """Contiguous stretches that cover the entries, none of them across the border of the shared parameters."""
        merged: list[slice] = []
        for entry in entries:
            if merged and merged[-1].stop == entry.start and entry.start != self.shared:
                merged[-1] = slice(merged[-1].start, entry.stop)
            else:
                merged.append(slice(entry.start, entry.stop))
        return tuple(merged)


def plan_layout(networks: Mapping[str, nn.Module], personal: Iterable[str] = ()) -> Layout:
    """The layout of the networks, in their order. `personal` names entries ("network.path") that do not travel."""
    stays = frozenset(personal)
    parameters: list[tuple[str, str, Tensor]] = []
    buffers: list[tuple[str, str, Tensor]] = []
    integers: list[tuple[str, str, Tensor]] = []
    for network, module in networks.items():
        parameters += [(network, path, p) for path, p in module.named_parameters() if p.requires_grad]
        for path, b in module.named_buffers():
            (buffers if b.is_floating_point() else integers).append((network, path, b))
    if unknown := stays - {f"{network}.{path}" for network, path, _ in (*parameters, *buffers, *integers)}:
        raise ValueError(f"personal tensors {sorted(unknown)} exist in no network")

    entries: list[Entry] = []
    marks: list[int] = []
    position = 0
    for keep in (False, True):
        for kind, trainable in ((parameters, True), (buffers, False)):
            for network, path, tensor in kind:
                if (f"{network}.{path}" in stays) == keep:
                    stop = position + tensor.numel()
                    entries.append(Entry(network, path, tuple(tensor.shape), position, stop, trainable, keep))
                    position = stop
            marks.append(position)
    counters: list[Entry] = []
    position = shared_counters = 0
    for keep in (False, True):
        for network, path, tensor in integers:
            if (f"{network}.{path}" in stays) == keep:
                stop = position + tensor.numel()
                counters.append(Entry(network, path, tuple(tensor.shape), position, stop, False, keep))
                position = stop
        if not keep:
            shared_counters = position
    return Layout(tuple(entries), tuple(counters), marks[0], marks[1], marks[3], shared_counters, position)


class Vector:
    """The networks' state as two flat tensors (`data`, `counters`); the modules see views and never copies.

    Creating it re-homes the modules: their values are copied in, then replaced by views.
    """

    def __init__(self, networks: Mapping[str, nn.Module], layout: Layout, device: torch.device, dtype: torch.dtype):
        self.layout = layout
        self.networks = dict(networks)
        self.data = torch.empty(layout.total, device=device, dtype=dtype)
        self.counters = torch.empty(layout.total_counters, device=device, dtype=torch.int64)
        self.parameters: dict[str, nn.Parameter] = {}
        for module in self.networks.values():
            module.to(device=device, dtype=dtype)
        with torch.no_grad():
            for entry in layout.entries:
                self._rehome(entry, self.data)
            for entry in layout.counters:
                self._rehome(entry, self.counters)

    def _rehome(self, entry: Entry, flat: Tensor) -> None:
        owner, _, leaf = entry.path.rpartition(".")
        module = self.networks[entry.network].get_submodule(owner)
        view = flat[entry.start : entry.stop].view(entry.shape)
        tensor = getattr(module, leaf)
        view.copy_(tensor)
        if entry.parameter:
            tensor.data = view
            self.parameters[entry.name] = tensor
        else:
            setattr(module, leaf, view.data)  # .data: autograd must not mistake a step on its neighbours for one on it

    @property
    def shared(self) -> Tensor:
        """[layout.shared] what travels."""
        return self.data[: self.layout.shared]

    @property
    def personal(self) -> Tensor:
        """[layout.personal] what stays."""
        return self.data[self.layout.shared :]

    def tensors(self, entries: Iterable[Entry]) -> list[nn.Parameter]:
        """The parameters of some entries."""
        return [self.parameters[entry.name] for entry in entries]

    def named(self, flat: Tensor, counters: Tensor) -> dict[str, Tensor]:
        """Views into a vector laid out like this one (or like its shared prefix), by entry name."""
        found = {e.name: flat[e.start : e.stop].view(e.shape) for e in self.layout.entries if e.stop <= len(flat)}
        found |= {
            e.name: counters[e.start : e.stop].view(e.shape) for e in self.layout.counters if e.stop <= len(counters)
        }
        return found
