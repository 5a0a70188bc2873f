"""The server's side of a run: the shared vector, what methods keep there, and the step to the next vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from raysim.api.composition import owner, owners
from raysim.api.declarations import Task
from raysim.api.messages import Published, Sum, Update
from raysim.api.method import Method
from raysim.api.server_view import Weighting
from raysim.primitives.streams import stream
from raysim.vectors.blocks import Group, folded, grouped, in_blocks
from raysim.vectors.layout import Layout


def asked_weighting(methods: Sequence[Method]) -> Weighting:
    """By samples, unless a method asks for uniform weights."""
    return "uniform" if any(method.weighting == "uniform" for method in methods) else "samples"


class Server:
    """x, and the rule x + sum(w_i * delta_i) / divisor, with every method's part in it.

    Sums are folded in the order of acceptance, in groups of `group` consecutive clients, wherever they are made.
    """

    def __init__(
        self,
        layout: Layout,
        vector: Tensor,
        counters: Tensor,
        methods: Sequence[Method],
        counts: np.ndarray,
        seed: int,
        task: Task,
        weighting: Weighting = "samples",
        group: int = 5,
        size: int = 0,
    ):
        self.layout, self.methods, self.seed, self.weighting, self.group = layout, methods, seed, weighting, group
        self.task, self.size = task, size  # size: most updates in one aggregation
        self.vector, self.counters = vector, counters  # [layout.shared], [layout.shared_counters]
        self.counts = counts  # int64 [clients] training samples
        self.state: dict[str, Tensor] = {}  # what methods keep, by "method.name"; all of it is in a checkpoint
        self.version = 0
        self.report: dict[str, float] = {}  # columns of this step's history row, by "method.name"
        # The combination at hand, for the hooks of one step:
        self.updates: Sequence[Update] = ()
        self.weights: list[float] = []
        self.divided_by = 1.0
        self.following = vector[:0]  # [layout.trained] where `apply` may write the next parameters
        self.staleness: list[int] = []  # of each update, at its arrival
        self.bases: Mapping[int, Published] = {}  # base versions of the updates
        self._weighers, self._mixers = owners(methods, "weigh"), owners(methods, "mix")
        self._measurers = owners(methods, "measure")
        self._combiner, self._applier = owner(methods, "combine"), owner(methods, "apply")
        self._divider, self._scorer = owner(methods, "divisor"), owner(methods, "scored")
        for method in methods:
            method.start(self)

    @property
    def clients(self) -> int:
        """All clients of the run, sampled or not."""
        return len(self.counts)

    @property
    def params(self) -> Tensor:
        """[layout.trained] the shared trainable parameters."""
        return self.vector[: self.layout.trained]

    @property
    def summable(self) -> bool:
        """Whether hosts may sum updates: weights are known beforehand and nobody needs single updates."""
        return not self._weighers and self._combiner is None and not any(method.singly for method in self.methods)

    def fills(self, slot: str) -> bool:
        """Whether a method of the run fills this hook."""
        return bool(owners(self.methods, slot))

    def stream(self, purpose: str) -> np.random.Generator:
        """The random stream of this purpose and version."""
        return stream(self.seed, purpose, self.version)

    def weight(self, client: int) -> float:
        """A client's raw weight before any method changes it."""
        return float(self.counts[client]) if self.weighting == "samples" else 1.0

    def scored(self) -> Tensor:
        """[layout.shared] the vector that evaluation uses."""
        return self.vector if self._scorer is None else self._scorer.scored(self)

    def published(self) -> Published:
        """What the clients of this version receive."""
        extras = {k: v.numpy() for m in owners(self.methods, "publish") for k, v in m.publish(self).items()}
        return Published(self.version, self.vector.numpy(), self.counters.numpy(), extras)

    def step(
        self,
        updates: Sequence[Update | None],
        sums: Sequence[Sum],
        staleness: Sequence[int],
        bases: Mapping[int, Published],
    ) -> None:
        """One aggregation. updates: in the order of acceptance; a failed client is None and keeps its place."""
        present = [update for update in updates if update is not None]
        self.report = {}
        if present:
            self.staleness = [late for update, late in zip(updates, staleness, strict=True) if update is not None]
            self._move(updates, present, bases, {job: part for part in sums for job in part.jobs})
        self.version += 1

    def _move(
        self,
        updates: Sequence[Update | None],
        present: list[Update],
        bases: Mapping[int, Published],
        sums: Mapping[int, Sum],
    ) -> None:
        self.bases = bases
        weights = [self.weight(update.client) for update in present]
        for method in self._weighers:
            weights = method.weigh(weights, present, self)
        self.updates, self.weights = present, weights
        divisor = float(sum(weights)) if self._divider is None else self._divider.divisor(weights, self)
        self.divided_by = divisor
        trained = self.layout.trained
        if self._combiner is None:
            total = self._fold(updates, dict(zip((u.job for u in present), weights, strict=True)), sums)
            in_blocks(trained, lambda part: total[part].div_(divisor))
            direction, buffers = total[:trained], total[trained:]
            decided = False
        else:
            combined = self._combiner.combine(present, weights, divisor, self)
            direction, buffers = combined[:trained], combined[trained:]
            decided = len(combined) == self.layout.shared
            if not decided:
                deltas = [update.delta[trained:] for update in present]  # type: ignore[index]
                buffers = folded(grouped(deltas, weights, self.group))
        if not decided:
            self._average(buffers, present, weights)
        for method in self._measurers:
            method.measure(direction, self)
        for method in self._mixers:
            direction = method.mix(direction, self)
        following = torch.empty_like(self.vector)
        self.following = following[:trained]
        if self._applier is None:
            start, into = self.params, self.following
            in_blocks(trained, lambda part: torch.add(start[part], direction[part], out=into[part]))
        elif (found := self._applier.apply(self.params, direction, self)) is not self.following:
            self.following.copy_(found)
        # Buffers are statistics: no server rate or momentum touches them.
        torch.add(self.vector[trained:], buffers, out=following[trained:])
        if len(self.counters):
            self.counters = torch.from_numpy(np.max([update.counters for update in present], axis=0))
        self.vector = following
        for method in owners(self.methods, "absorb"):
            method.absorb(present, self)

    def _average(self, buffers: Tensor, present: Sequence[Update], weights: Sequence[float]) -> None:
        """Turn the weighted sum of the buffers' changes into the step to the weighted mean of the clients' buffers.

        Of the buffers, not of their changes: a stale change can make a variance negative.
        """
        trained = self.layout.trained
        for update, weight in zip(present, weights, strict=True):
            if update.version != self.version:
                lag = torch.from_numpy(self.bases[update.version].vector)[trained:] - self.vector[trained:]
                buffers.add_(lag, alpha=weight)
        buffers.div_(float(sum(weights)))

    def _fold(self, updates: Sequence[Update | None], weights: Mapping[int, float], sums: Mapping[int, Sum]) -> Tensor:
        """Sum of w * delta over groups of consecutive updates, then over the groups."""
        groups: list[Group] = []
        for start in range(0, len(updates), self.group):
            members = [update for update in updates[start : start + self.group] if update is not None]
            if not members:
                continue
            if (made := sums.get(members[0].job)) is not None:
                groups.append(([made.total], [1.0]))
            else:
                deltas = [update.delta for update in members if update.delta is not None]
                groups.append((deltas, [weights[update.job] for update in members]))
        return folded(groups)
