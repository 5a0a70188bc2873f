"""Store trainable tensors and floating buffers in one vector; modules use views of it.

The order is: shared parameters, shared buffers, personal parameters, personal buffers. Integer
buffers have a separate vector. Frozen parameters and buffers with persistent=False are in neither
vector, because every process builds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """A tensor of a network, which is the slice [start, stop) of the vector.

    network, path: names such as "model" and "head.weight".
    parameter: False for a buffer.
    personal: True if the tensor stays on the client.
    """

    network: str
    path: str
    shape: tuple[int, ...]
    start: int
    stop: int
    parameter: bool
    personal: bool

    @property
    def name(self) -> str:
        """The full name, which is unique in a run: "model.head.weight"."""
        return f"{self.network}.{self.path}"


@dataclass(frozen=True)
class Layout:
    """The position of each tensor in the vector; the same in all processes of a run.

    Shapes in docstrings use the lengths below, such as [layout.shared].

    entries: parameters and floating buffers, by position in the vector.
    counters: integer buffers, by position in a second vector.
    trained: the length of the shared parameters.
    shared: the length of what travels: `trained` plus the length of the shared floating buffers.
    total: `shared` plus the length of the personal parameters and floating buffers.
    shared_counters, total_counters: the lengths of the shared and of all integer buffers.
    """

    entries: tuple[Entry, ...]
    counters: tuple[Entry, ...]
    trained: int
    shared: int
    total: int
    shared_counters: int
    total_counters: int

    @property
    def personal(self) -> int:
        """The number of floats that stay on a client."""
        return self.total - self.shared

    @property
    def has_personal(self) -> bool:
        """True if a tensor of the networks stays on a client."""
        return self.personal > 0 or self.total_counters > self.shared_counters

    @property
    def personal_entries(self) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
        """The tensors that stay on a client: a tuple of float tensors and one of integer buffers.

        Each tuple is in the order of the tensors' positions.
        """
        return tuple(e for e in self.entries if e.personal), tuple(
            e for e in self.counters if e.personal
        )

    def entries_in(self, prefixes: Iterable[str]) -> tuple[Entry, ...]:
        """Return the parameters of networks or modules ("model.head"), sorted by position."""
        dotted = tuple(prefix + "." for prefix in prefixes)
        return tuple(
            entry for entry in self.entries if entry.parameter and entry.name.startswith(dotted)
        )

    def num_parameters(self, prefix: str) -> int:
        """Return the number of parameters of a network or module.

        prefix: the full name of the network or module, such as "model" or "model.head".
        """
        return sum(entry.stop - entry.start for entry in self.entries_in((prefix,)))

    def stretches(self, entries: Iterable[Entry]) -> tuple[slice, ...]:
        """Return the slices of the vector that the entries occupy.

        Two entries that follow each other in the vector share a slice, unless one of them is shared
        and the other is personal.
        """
        merged: list[slice] = []
        for entry in entries:
            if merged and merged[-1].stop == entry.start and entry.start != self.shared:
                merged[-1] = slice(merged[-1].start, entry.stop)
            else:
                merged.append(slice(entry.start, entry.stop))
        return tuple(merged)


def plan_layout(networks: Mapping[str, nn.Module], personal: Iterable[str] = ()) -> Layout:
    """Return the layout of the networks' tensors.

    The parts are in the order at the top of this file; each part goes network after network.

    personal: the full names of the tensors that stay on the clients. Names of frozen parameters and
    of buffers that are not saved are ignored.
    Raises ValueError for an unknown name.
    """
    stays = frozenset(personal) - _constant_names(networks)
    parameters: list[tuple[str, str, Tensor]] = []
    buffers: list[tuple[str, str, Tensor]] = []
    integers: list[tuple[str, str, Tensor]] = []
    for network, module in networks.items():
        parameters += [
            (network, path, p) for path, p in module.named_parameters() if p.requires_grad
        ]
        saved = module.state_dict().keys()
        for path, b in module.named_buffers():
            if path not in saved:
                continue
            (buffers if b.is_floating_point() else integers).append((network, path, b))
    if unknown := stays - {
        f"{network}.{path}" for network, path, _ in (*parameters, *buffers, *integers)
    }:
        raise ValueError(
            f"a method declares the tensors {sorted(unknown)} as personal, but no network of the "
            "run has tensors with these names. Correct the names in the method's "
            "run.private_parameters(...)."
        )

    entries: list[Entry] = []
    marks: list[int] = []
    position = 0
    for keep in (False, True):
        for kind, trainable in ((parameters, True), (buffers, False)):
            for network, path, tensor in kind:
                if (f"{network}.{path}" in stays) == keep:
                    stop = position + tensor.numel()
                    entries.append(
                        Entry(network, path, tuple(tensor.shape), position, stop, trainable, keep)
                    )
                    position = stop
            marks.append(position)
    counters: list[Entry] = []
    position = shared_counters = 0
    for keep in (False, True):
        for network, path, tensor in integers:
            if (f"{network}.{path}" in stays) == keep:
                stop = position + tensor.numel()
                counters.append(
                    Entry(network, path, tuple(tensor.shape), position, stop, False, keep)
                )
                position = stop
        if not keep:
            shared_counters = position
    return Layout(
        tuple(entries), tuple(counters), marks[0], marks[1], marks[3], shared_counters, position
    )


def _constant_names(networks: Mapping[str, nn.Module]) -> set[str]:
    """Return the full names of frozen parameters, and of buffers that are not saved."""
    names: set[str] = set()
    for network, module in networks.items():
        saved = module.state_dict().keys()
        constant = [path for path, p in module.named_parameters() if not p.requires_grad]
        constant += [path for path, _ in module.named_buffers() if path not in saved]
        names |= {f"{network}.{path}" for path in constant}
    return names


# An attribute of a module: its dictionary of parameters or buffers, and the key of a tensor.
_Holder: TypeAlias = tuple[dict[str, Tensor], str]


def _holders(networks: Iterable[nn.Module]) -> dict[int, list[_Holder]]:
    """Map the id of each tensor to the places in the modules that hold this tensor.

    A place is a pair: a module's dictionary of parameters or buffers, and a key in it.
    """
    holders: dict[int, list[_Holder]] = {}
    for network in networks:
        for module in network.modules():
            for tensors in (module._parameters, module._buffers):
                for leaf, tensor in tensors.items():
                    holder = cast("dict[str, Tensor]", tensors), leaf
                    holders.setdefault(id(tensor), []).append(holder)
    return holders


def _put(holders: Iterable[_Holder], tensor: Tensor) -> None:
    for tensors, leaf in holders:
        tensors[leaf] = tensor


@dataclass(frozen=True, eq=False)
class VectorStorage:
    """Two flat tensors, and views of them for the parameters and buffers of modules.

    data: parameters and float buffers.
    counters: integer buffers.
    views: views of `data` for the tensors in `Layout.entries`, then views of `counters` for those
    in `Layout.counters`.
    """

    data: Tensor
    counters: Tensor
    views: list[Tensor]


class Vector:
    """The parameters and buffers of the networks as two flat tensors.

    data: all parameters and float buffers.
    counters: all integer buffers.
    The constructor replaces the modules' tensors by views of `data` and `counters` with the same
    values.
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.layout = layout
        self.networks = dict(networks)
        self.data = torch.empty(layout.total, device=device, dtype=dtype)
        self.counters = torch.empty(layout.total_counters, device=device, dtype=torch.int64)
        self.parameters: dict[str, nn.Parameter] = {}
        for module in self.networks.values():
            module.to(device=device, dtype=dtype)
        everywhere = _holders(self.networks.values())
        # Places of each entry, floating ones first; several if modules share a tensor.
        self._holders: list[list[_Holder]] = []
        self._parameters: list[nn.Parameter | None] = []  # of each entry
        with torch.no_grad():
            for entry, flat in self._with_flat(self.data, self.counters):
                owner, _, leaf = entry.path.rpartition(".")
                tensor = getattr(self.networks[entry.network].get_submodule(owner), leaf)
                flat[entry.start : entry.stop].view(entry.shape).copy_(tensor)
                self._holders.append(everywhere[id(tensor)])
                self._parameters.append(tensor if entry.parameter else None)
                if entry.parameter:
                    self.parameters[entry.name] = tensor
        self.use_storage(self.storage(self.data, self.counters))

    def _with_flat(self, data: Tensor, counters: Tensor) -> Iterator[tuple[Entry, Tensor]]:
        yield from ((entry, data) for entry in self.layout.entries)
        yield from ((entry, counters) for entry in self.layout.counters)

    def storage(self, data: Tensor, counters: Tensor) -> VectorStorage:
        """Return the two given flat tensors, with a view of them for each tensor of the networks.

        `use_storage` takes the result.

        data: the flat tensor of all parameters and float buffers.
        counters: the flat tensor of all integer buffers.
        """
        # .data: otherwise autograd takes a change of one view for a change of all views
        views = [
            flat[e.start : e.stop].view(e.shape).data for e, flat in self._with_flat(data, counters)
        ]
        return VectorStorage(data, counters, views)

    def use_storage(self, storage: VectorStorage) -> None:
        """Let the modules use the flat tensors of `storage` as their parameters and buffers.

        Nothing is copied: afterwards the modules have the values that are in `storage`.
        """
        self.data, self.counters = storage.data, storage.counters
        for holders, parameter, view in zip(
            self._holders, self._parameters, storage.views, strict=True
        ):
            if parameter is None:
                _put(holders, view)
            else:
                parameter.data = view

    def collect(self) -> None:
        """Let the modules use the vector again, after code that may have replaced their tensors.

        The values of replaced tensors are copied into the vector. Gradients are deleted, and the
        vector's parameters require gradients again. Raises ValueError if the shape of a tensor has
        changed.
        """
        storage = self.storage(self.data, self.counters)
        entries = [*self.layout.entries, *self.layout.counters]
        problem = ""
        for entry, holders, view in zip(entries, self._holders, storage.views, strict=True):
            owner, leaf = holders[0]
            current = owner[leaf].detach()
            if current.shape != view.shape:
                problem = (
                    f"{entry.name} has the shape {list(current.shape)} after training, and had "
                    f"{list(view.shape)} before. Change its values, do not replace it."
                )
            elif current.data_ptr() != view.data_ptr():
                view.copy_(current)
        self.use_storage(storage)
        for holders, parameter in zip(self._holders, self._parameters, strict=True):
            if parameter is not None:
                _put(holders, parameter)
                parameter.grad = None
                parameter.requires_grad_(True)
        if problem:
            raise ValueError(problem)

    @contextmanager
    def stand_in(self, data: Tensor, counters: Tensor, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside `with`, replace the tensors of this vector and of the modules.

        data, counters: the replacements of `self.data` and `self.counters`.
        tensors: the modules' tensors, in the order of `layout.entries` and then of
        `layout.counters`. They need not be views of `data` and `counters`.
        """
        before = (
            self.data,
            self.counters,
            [holders[0][0][holders[0][1]] for holders in self._holders],
        )
        self.data, self.counters = data, counters
        for holders, tensor in zip(self._holders, tensors, strict=True):
            _put(holders, tensor)
        try:
            yield
        finally:
            self.data, self.counters = before[:2]
            for holders, tensor in zip(self._holders, before[2], strict=True):
                _put(holders, tensor)

    @property
    def shared(self) -> Tensor:
        """The part that travels between server and clients, [layout.shared]."""
        # A slice takes 1 us, and a job needs several.
        return self.data[: self.layout.shared] if self.layout.personal else self.data

    @property
    def shared_counters(self) -> Tensor:
        """The integer buffers that travel between server and clients, [layout.shared_counters]."""
        return self.counters[: self.layout.shared_counters]

    @property
    def personal(self) -> Tensor:
        """The part that stays on the client, [layout.personal]."""
        return self.data[self.layout.shared :]

    def tensors(self, entries: Iterable[Entry]) -> list[nn.Parameter]:
        """Return the parameters of some entries."""
        return [self.parameters[entry.name] for entry in entries]

    def named(self, flat: Tensor, counters: Tensor) -> dict[str, Tensor]:
        """Map the full name of each tensor to a view of `flat` or of `counters`.

        flat: all floats [layout.total], or only the shared ones [layout.shared].
        counters: the entries of all integer buffers [layout.total_counters], or only of the shared
        ones [layout.shared_counters].
        """
        views: dict[str, Tensor] = {}
        for entry in self.layout.entries:
            if entry.stop <= len(flat):
                views[entry.name] = flat[entry.start : entry.stop].view(entry.shape)
        for entry in self.layout.counters:
            if entry.stop <= len(counters):
                views[entry.name] = counters[entry.start : entry.stop].view(entry.shape)
        return views
