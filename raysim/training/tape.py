"""A computation written down operation by operation, and played again on other tensors of the same shapes.

Autograd and `vmap` cost a small model more than its products do; playing costs neither. Every operation is the one that
was recorded, so the bits are the same. What Python decided while it was recorded stays decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any], Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler here: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, dict(kwargs or {}), found))
        return found


# Of these only the shapes of tensors among the arguments count, and not what they hold.
_SHAPED = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _mixed(args: Sequence[Any]) -> bool:
    """Whether an argument has tensors among other things."""
    return any(0 < len(_tensors(each)) < len(pytree.tree_leaves(each)) for each in args)


@dataclass(frozen=True)
class _Call:
    """An operation. Its arguments are as recorded, but for tensors, which come from slots."""

    run: Callable[..., Any]
    arguments: list[Any]
    slots: list[tuple[int, int]]  # of arguments that are tensors: place among the arguments, slot
    nested: list[tuple[int, list[int]]]  # of arguments that are lists of tensors
    results: list[int]  # slots of what it returns
    # Where tensors lie among other things, or are given by name: all leaves of (args, kwargs), how they are nested, and
    # of those that are tensors place and slot.
    mixed: tuple[list[Any], Any, list[tuple[int, int]]] | None
    free: list[int]  # slots that nobody needs from here on

    @property
    def used(self) -> set[int]:
        """Every slot that it reads."""
        mixed = self.mixed[2] if self.mixed else []
        return {slot for _, slot in (*self.slots, *mixed)} | {slot for _, many in self.nested for slot in many}


class Tape:
    """What `compute` did, as a list of operations. first: what it returned."""

    def __init__(self, compute: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]):
        with _Recorder() as recorder:
            self.first = list(compute())
        self._slots = {id(tensor): slot for slot, tensor in enumerate(inputs)}
        self._inputs, self._constants = len(inputs), dict[int, Tensor]()
        self._same: set[int] = set()  # slots of constants that follow from shapes alone
        # What is changed in place is made anew each time.
        self._fixed = not any(call[0]._schema.is_mutable for call in recorder.calls)
        calls = [call for each in recorder.calls if (call := self._call(*each)) is not None]
        self._outputs = [self._slots[id(tensor)] for tensor in self.first]
        needed, kept, self._calls = set(self._outputs), {*self._outputs, *self._constants}, list[_Call]()
        for call in reversed(calls):
            if self._fixed and not needed.intersection(call.results):
                continue
            needed |= call.used
            mine = call.used | set(call.results)
            call.free.extend(sorted(mine - kept))
            kept |= mine
            self._calls.insert(0, call)
        self._size = len(self._slots)
        self._slots = {}  # the ids are of tensors that are gone now

    def _slot(self, tensor: Tensor) -> int:
        """Where an argument comes from; one that nobody made is a constant."""
        if id(tensor) not in self._slots:
            self._constants[len(self._slots)] = tensor
        return self._slots.setdefault(id(tensor), len(self._slots))

    def _call(self, run: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> _Call | None:
        """One operation; None for those that only autograd sees a sense in, and where the result is always the same."""
        if run in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            self._slots[id(found)] = self._slot(args[0])
            return None
        if self._fixed and self._is_same(run, args, kwargs):
            self._same |= {self._slot(tensor) for tensor in _tensors(found)}
            return None
        if _tensors(kwargs) or _mixed(args):
            leaves, spec = pytree.tree_flatten((args, kwargs))
            places = [(place, self._slot(leaf)) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
            leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return _Call(run, [], [], [], self._results(found), (leaves, spec, places), [])
        arguments, slots, nested = list(args), list[tuple[int, int]](), list[tuple[int, list[int]]]()
        for place, argument in enumerate(args):
            if isinstance(argument, Tensor):
                slots.append((place, self._slot(argument)))
                arguments[place] = None
            elif many := _tensors(argument):
                nested.append((place, [self._slot(tensor) for tensor in many]))
                arguments[place] = None
        return _Call(
            partial(run, **kwargs) if kwargs else run, arguments, slots, nested, self._results(found), None, []
        )

    def _is_same(self, run: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether an operation's result follows from shapes alone."""
        if run._schema.name.removeprefix("aten::") in _SHAPED:
            return True
        slots = [self._slots.get(id(tensor)) for tensor in _tensors((args, kwargs))]
        return bool(slots) and torch.Tag.nondeterministic_seeded not in run.tags and self._same.issuperset(slots)

    def _results(self, found: Any) -> list[int]:
        return [self._slots.setdefault(id(tensor), len(self._slots)) for tensor in _tensors(found)]

    def play(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What `compute` would return of these inputs."""
        slots: list[Any] = [*inputs, *[None] * (self._size - self._inputs)]
        for slot, constant in self._constants.items():
            slots[slot] = constant
        with torch.no_grad():
            for call in self._calls:
                if call.mixed is None:
                    arguments = call.arguments.copy()
                    for place, slot in call.slots:
                        arguments[place] = slots[slot]
                    for place, many in call.nested:
                        arguments[place] = [slots[slot] for slot in many]
                    found = call.run(*arguments)
                else:
                    leaves, spec, places = call.mixed
                    leaves = leaves.copy()
                    for place, slot in places:
                        leaves[place] = slots[slot]
                    args, kwargs = pytree.tree_unflatten(leaves, spec)
                    found = call.run(*args, **kwargs)
                if isinstance(found, Tensor):
                    slots[call.results[0]] = found
                elif call.results:
                    for slot, tensor in zip(call.results, _tensors(found), strict=True):
                        slots[slot] = tensor
                for slot in call.free:
                    slots[slot] = None
        return [slots[slot].clone() if slot in self._same else slots[slot] for slot in self._outputs]
