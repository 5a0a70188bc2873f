"""Scores of several clients' own models at once: each model in a row of the stack that lanes train in.

A client's lane is its number modulo their count, and the rows of one pass follow from its own number of rows alone.
Other rows are filled up, so what is computed always has the same shape, and a score depends on nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from raysim.training.across import InLanes
from raysim.training.lane_step import explained
from raysim.training.lanes import Lanes


def pays(device: torch.device) -> bool:
    """Whether models are scored that way where several clients are trained at once.

    Not on a CPU, where without a backward pass the calls cost less than `vmap` does: a client's 20 test rows took
    118 us in a loop and 205 to 285 us in 25 and 10 lanes (MLP of W2), 7.7 ms and 9.2 ms in 5 lanes (CNN of W1).
    """
    return device.type != "cpu"


def width(rows: int, most: int) -> int:
    """Rows of one pass for a client with so many: the next power of two, or three quarters of it, up to `most`."""
    power = 1 << max(0, rows - 1).bit_length()
    return min(most, power * 3 // 4 if rows <= power * 3 // 4 else power)


class LaneScores:
    """Makes logits of as many models as there are lanes."""

    def __init__(self, lanes: Lanes, most: int):
        self.lanes, self.trainer, self.most = lanes, lanes.trainer, most  # rows of one model at once
        self._number = torch.arange(lanes.count, device=lanes.data.device)

    def turns(self, clients: Sequence[int], rows: Sequence[np.ndarray]) -> list[dict[int, int]]:
        """Which clients are scored together: by lane, places in `clients`. rows: of the data set, of each client."""
        waiting: dict[int, list[list[int]]] = {}
        for place, (client, own) in enumerate(zip(clients, rows, strict=True)):
            by_lane = waiting.setdefault(width(len(own), self.most), [[] for _ in range(self.lanes.count)])
            by_lane[client % self.lanes.count].append(place)
        return [
            {lane: place for lane, place in enumerate(turn) if place is not None}
            for by_lane in waiting.values()
            for turn in zip_longest(*by_lane)
        ]

    def keep(self, lane: int) -> None:
        """The model that the trainer's vector is now is scored in this lane."""
        self.lanes.data[lane].copy_(self.trainer.vector.data)
        self.lanes.counters[lane].copy_(self.trainer.vector.counters)

    @torch.no_grad()
    def outputs(self, rows: Mapping[int, np.ndarray]) -> dict[int, tuple[Tensor, Tensor]]:
        """By lane: logits and labels of rows of the data set, of models that are in eval mode."""
        step = width(max(map(len, rows.values())), self.most)
        found: dict[int, list[tuple[Tensor, Tensor]]] = {lane: [] for lane in rows}
        for start in range(0, max(map(len, rows.values())), step):
            logits, labels = self._pass({lane: own[start : start + step] for lane, own in rows.items()}, step)
            for lane, own in rows.items():
                count = len(own[start : start + step])
                found[lane].append((logits[lane, :count], labels[lane, :count]))
        return {
            lane: (torch.cat([logits for logits, _ in parts]), torch.cat([labels for _, labels in parts]))
            for lane, parts in found.items()
        }

    def _pass(self, rows: Mapping[int, np.ndarray], size: int) -> tuple[Tensor, Tensor]:
        """[K, size, ...] of all lanes; what a lane has not is filled up with some row."""
        some = next(own[0] for own in rows.values() if len(own))
        index = np.full((self.lanes.count, size), some)
        for lane, own in rows.items():
            index[lane, : len(own)] = own
        inputs, labels = self.trainer.gather(index.ravel())
        shape = self.lanes.count, size
        return self._logits(inputs.view(*shape, *inputs.shape[1:])), labels.view(*shape, *labels.shape[1:])

    def _logits(self, inputs: Tensor) -> Tensor:
        vector, lanes = self.trainer.vector, self.lanes

        def model(number: Tensor, inputs: Tensor, tensors: list[Tensor], data: Tensor, counters: Tensor) -> Tensor:
            with vector.standing_for(data, counters, tensors), InLanes({}, number):
                out: Tensor = vector.networks["model"](inputs)
                return out

        with explained(lanes.count, "score"):
            out: Tensor = vmap(model)(self._number, inputs, lanes.tensors(), lanes.data, lanes.counters)
        return out
