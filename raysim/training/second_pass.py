"""Compute gradients of the same batch at shifted parameters, for the hook `perturb`.

A method such as SAM needs these gradients after the usual forward pass of a step, which is the
first pass. The second pass uses the same batch and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from raysim.api.context import Batch, Context, Outputs
from raysim.vectors.layout import Vector

T = TypeVar("T")


def generator_state(device: torch.device) -> Tensor:
    """Return the state of torch's generator on this device; empty during a CUDA graph's capture.

    During a capture the generator cannot be read, but steps that draw random numbers are never
    captured.
    """
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(0, dtype=torch.uint8)
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state()


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Set the state of torch's generator on this device; an empty state changes nothing."""
    if not len(state):
        return
    if device.type == "cpu":
        torch.set_rng_state(state)
    elif device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.mps.set_rng_state(state)


class RecordedOutputs(Outputs):
    """The outputs of the model in the first pass through a stage.

    `starts` has the state of torch's random generator before the computation of each output, by the
    output's name.
    """

    __slots__ = ("starts",)

    def __init__(self, ctx: Context, batch: Batch):
        super().__init__(ctx, batch)
        self.starts: dict[str, Tensor] = {}

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Return the output stored as `name`; compute and store it at the first use.

        Before computing, this method stores the state of torch's random generator in `starts`. With
        it, a second pass can draw the same random numbers.
        """
        if self._kept.get(name) is None:
            self.starts[name] = generator_state(self.ctx.vector.data.device)
        return super().once(name, compute)


class RepeatedOutputs(Outputs):
    """Outputs of the second pass: at shifted parameters, with the first pass's random numbers."""

    __slots__ = ("_first",)

    def __init__(self, first: RecordedOutputs):
        super().__init__(first.ctx, first.batch)
        self._first = first

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Return the output stored as `name`; compute and store it at the first use.

        The second pass computes all outputs with the shifted parameters of the model. If the first
        pass also computed this output, both passes draw the same random numbers for it.
        """
        start = self._first.starts.get(name)
        if start is None or self._kept.get(name) is not None:
            return super().once(name, compute)
        device = self.ctx.vector.data.device
        current = generator_state(device)
        set_generator_state(device, start)
        value = super().once(name, compute)
        if not torch.equal(current, start):
            # An earlier stage computed this output, so the first pass drew no numbers for it.
            set_generator_state(device, current)
        return value


class SecondPass:
    """A second pass through a stage, which begins in the same state as the stage's first pass.

    Create the object before the first pass, because it stores the state.

    outputs: will record the outputs of the first pass.
    """

    def __init__(self, vector: Vector, outputs: RecordedOutputs):
        self.vector, self.outputs, self.ctx = vector, outputs, outputs.ctx
        self._state, self._scratch = dict(self.ctx.state), dict(self.ctx.kept)
        self._draws = generator_state(vector.data.device)

    @contextmanager
    def at(self, shift: Tensor, runs: Sequence[slice]) -> Iterator[Outputs]:
        """Shift parameters inside `with`; yield the shifted model's outputs for the same batch.

        At the end, parameters, buffers, client state and torch's random generator are as before.

        shift: flat values to add, in the order of `runs`.
        runs: the slices of the vector to shift.
        """
        ctx, vector, device = self.ctx, self.vector, self.vector.data.device
        state, scratch = ctx.state, ctx.kept
        data, counters = vector.data.clone(), vector.counters.clone()
        draws = generator_state(device)
        ctx.state, ctx.kept = dict(self._state), dict(self._scratch)
        set_generator_state(device, self._draws)
        try:
            parts = shift.split([run.stop - run.start for run in runs])
            for run, part in zip(runs, parts, strict=True):
                vector.data[run].add_(part)
            yield RepeatedOutputs(self.outputs)
        finally:
            ctx.state, ctx.kept = state, scratch
            vector.data.copy_(data)
            vector.counters.copy_(counters)
            set_generator_state(device, draws)
