"""The server's side of a run: the shared vector, what methods keep there, and the step to the next vector."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from types import NoneType

import numpy as np
import torch
from torch import Tensor

from raysim.api.composition import blamed, overrides, owner, owners
from raysim.api.declarations import Download, Task, Tensors
from raysim.api.messages import Arrays, GroupSums, Published, Update
from raysim.api.method import Method
from raysim.api.mistakes import HookMistake, check_report, returned, said, traced, vector
from raysim.api.server_view import Aggregation, Weighting
from raysim.primitives.streams import stream
from raysim.simulation.events import RunStopped
from raysim.training.run_spec import RunSpec
from raysim.vectors.blocks import Group, folded, grouped, in_blocks, is_finite
from raysim.vectors.layout import Layout, Vector


def asked_weighting(methods: Sequence[Method]) -> Weighting:
    """By samples, unless a method asks for uniform weights."""
    return "uniform" if any(method.weighting == "uniform" for method in methods) else "samples"


class AggregationFailed(RunStopped):
    """The server could not make the next version."""


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
        # Clients that have samples, and all samples; counted once, for they may be a million.
        self.able, self.samples = int(np.count_nonzero(counts)), int(np.sum(counts))
        self.needs_single_updates = any(method.needs_single_updates for method in methods)
        self.state: dict[str, Tensor] = {}  # what methods keep, by "method.name"; all of it is in a checkpoint
        self.version = 0
        self.report: dict[str, float] = {}  # columns of this step's history row, by "method.name"
        self._weighers, self._absorbers = owners(methods, "weigh"), owners(methods, "absorb")
        # A rule for the step may ask how large the combined direction is, before others change it.
        self._mixers = sorted(owners(methods, "mix"), key=lambda method: not overrides(method, "apply"))
        self._combiner, self._applier = owner(methods, "combine"), owner(methods, "apply")
        self._scorer = owner(methods, "scored")
        # What hooks may return, by the size's name.
        self._trained, self._shared = {"layout.trained": layout.trained}, {"layout.shared": layout.shared}
        for method in methods:
            method.start(self)
        self._downloads = [
            returned(method.send(self), Download, method, "send", "a Download") for method in owners(methods, "send")
        ]

    @property
    def clients(self) -> int:
        """All clients of the run, sampled or not."""
        return len(self.counts)

    @property
    def params(self) -> Tensor:
        """[layout.trained] the shared trainable parameters."""
        return self.vector[: self.layout.trained]

    @functools.cached_property
    def sample_ends(self) -> np.ndarray:
        """float64 [able]: where the share of [0, 1) ends that each client with samples has, by its samples."""
        return np.cumsum(self.counts[self.counts > 0] / self.samples)

    @property
    def summable(self) -> bool:
        """Whether hosts may sum updates: weights are known beforehand and nobody needs single updates."""
        return not self._weighers and self._combiner is None and not self.needs_single_updates

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
        if self._scorer is None:
            return self.vector
        return vector(self._scorer.scored(self), self._scorer, "scored", self._shared)

    # --- what is sent ----------------------------------------------------------------------------------------------
    def published(self) -> Published:
        """What all clients of this version receive."""
        extras = _arrays(each.version() for each in self._downloads if each.version is not None)
        return Published(self.version, self.vector.numpy(), self.counters.numpy(), extras)

    def sent_once(self) -> Arrays:
        """What every client receives besides, at its first participation."""
        return _arrays(each.once() for each in self._downloads if each.once is not None)

    def sent_to(self, client: int) -> Arrays:
        """What this client alone receives besides."""
        return _arrays(each.client(client) for each in self._downloads if each.client is not None)

    # --- the step --------------------------------------------------------------------------------------------------

    def step(
        self,
        updates: Sequence[Update | None],
        sums: GroupSums,
        staleness: Sequence[int],
        bases: Mapping[int, Published],
    ) -> None:
        """One aggregation. updates: in the order of acceptance; a failed client is None and keeps its place."""
        self.report = {}
        if any(update is not None for update in updates):
            with self._named():
                aggregation = self._weighed(updates, staleness, bases)
                direction, buffers = self._combined(aggregation, updates, sums)
                for method in self._mixers:
                    direction = vector(method.mix(direction, aggregation, self), method, "mix", self._trained)
                self._move(direction, buffers, aggregation)
                for method in self._absorbers:
                    method.absorb(aggregation, self)
                check_report(self.report, "server")
        self.version += 1

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the method in whose hook an aggregation fails. Raises AggregationFailed."""
        try:
            yield
        except (Exception, SystemExit) as error:
            name, where = blamed(error), f"on the server in round {self.version + 1}"
            if not (name or isinstance(error, HookMistake)):
                raise
            text = f"method {name!r} failed {where}" if name else where
            text += f": {said(error)}. The run goes on from its last checkpoint with resume=latest"
            raise AggregationFailed(f"{text}\n{traced(error)}".rstrip("\n")) from error

    def _weighed(
        self, updates: Sequence[Update | None], staleness: Sequence[int], bases: Mapping[int, Published]
    ) -> Aggregation:
        """The updates that came, and how much each counts."""
        present = [update for update in updates if update is not None]
        aggregation = Aggregation(
            updates=present,
            deltas=[] if self.summable else [torch.from_numpy(u.delta) for u in present if u.delta is not None],
            weights=[self.weight(update.client) for update in present],
            staleness=[late for update, late in zip(updates, staleness, strict=True) if update is not None],
            bases=bases,
        )
        for method in self._weighers:
            aggregation = returned(
                method.weigh(aggregation, self), Aggregation, method, "weigh", "aggregation.reweighted(weights)"
            )
            _check_weights(aggregation, method)
        return aggregation

    def _combined(
        self, aggregation: Aggregation, updates: Sequence[Update | None], sums: GroupSums
    ) -> tuple[Tensor, Tensor]:
        """The direction [layout.trained] of the parameters, and the step of the floating buffers."""
        trained = self.layout.trained
        if self._combiner is None:
            total, divisor = self._folded(updates, aggregation.weights, sums), aggregation.divisor
            in_blocks(trained, lambda part: total[part].div_(divisor))
            return total[:trained], self._averaged(total[trained:], aggregation)
        combined = vector(
            self._combiner.combine(aggregation, self), self._combiner, "combine", self._trained | self._shared
        )
        if len(combined) == self.layout.shared:
            return combined[:trained], combined[trained:]
        buffers = [delta[trained:].numpy() for delta in aggregation.deltas]
        return combined, self._averaged(folded(grouped(buffers, aggregation.weights, self.group)), aggregation)

    def _move(self, direction: Tensor, buffers: Tensor, aggregation: Aggregation) -> None:
        """Take the step, into a new vector: the old one may lie in an object store."""
        trained, start, moved = self.layout.trained, self.params, torch.empty_like(self.vector)
        out = moved[:trained]
        if self._applier is None:
            in_blocks(trained, lambda part: torch.add(start[part], direction[part], out=out[part]))
        else:
            made: object = self._applier.apply(direction, out, aggregation, self)  # type: ignore[func-returns-value]
            if made is not None and made is not out:
                returned(made, NoneType, self._applier, "apply", "nothing, and write the parameters into `out`")
        # Buffers are statistics: no server rate or momentum touches them.
        torch.add(self.vector[trained:], buffers, out=moved[trained:])
        if not all(in_blocks(len(moved), lambda part: is_finite(moved[part]))):
            raise AggregationFailed(self._diverged(aggregation))
        if len(self.counters):
            self.counters = torch.from_numpy(np.max([update.counters for update in aggregation.updates], axis=0))
        self.vector = moved

    def _diverged(self, aggregation: Aggregation) -> str:
        """Why the next vector is not finite: no weights, or whose updates are the longest."""
        clients = [update.client for update in aggregation.updates]
        why = f"of clients {', '.join(map(str, clients[:20]))}"
        if not any(aggregation.weights):
            why = f"all weights {why} are 0"
        elif aggregation.deltas:
            norms = [float(torch.linalg.vector_norm(delta, dtype=torch.float64)) for delta in aggregation.deltas]
            longest = sorted(range(len(norms)), key=norms.__getitem__, reverse=True)[:3]
            why = f"the longest updates are {', '.join(f'{norms[i]:g} of client {clients[i]}' for i in longest)}"
        return (
            f"the shared vector is not finite after round {self.version + 1} ({why}), and stays as it was before: set "
            "faults.norm to leave out clients with longer updates, or lower local.lr; resume=latest goes on from the "
            "last checkpoint"
        )

    def _averaged(self, buffers: Tensor, aggregation: Aggregation) -> Tensor:
        """The weighted sum of the buffers' changes, turned into the step to the weighted mean of the clients' buffers.

        Of the buffers, not of their changes: a stale change can make a variance negative.
        """
        trained = self.layout.trained
        for update, weight in zip(aggregation.updates, aggregation.weights, strict=True):
            if update.version != self.version:
                buffers.add_(aggregation.base(update)[trained:] - self.vector[trained:], alpha=weight)
        return buffers.div_(float(sum(aggregation.weights)))

    def _folded(self, updates: Sequence[Update | None], weights: Sequence[float], sums: GroupSums) -> Tensor:
        """Sum w * delta over groups of consecutive updates, then over the groups; workers may have made some sums."""
        summed = {job: jobs for jobs in sums for job in jobs}
        left, groups, last = iter(weights), list[Group](), None
        for start in range(0, len(updates), self.group):
            members = [update for update in updates[start : start + self.group] if update is not None]
            own = [next(left) for _ in members]
            jobs = summed.get(members[0].job) if members else None
            if jobs is not None:
                if jobs != last:  # a sum may be of several groups, if of all up to its last one
                    groups.append(([sums[jobs]], [1.0]))
                last = jobs
            elif members:
                groups.append(([update.delta for update in members if update.delta is not None], own))
        return folded(groups)


def _check_weights(aggregation: Aggregation, method: Method) -> None:
    """Refuse weights that are not one finite number for each update."""
    weights, updates = aggregation.weights, aggregation.updates
    count = len(weights) if isinstance(weights, Sized) else "no"
    if count != len(updates):
        raise HookMistake(
            f"method '{method.name}' returns {count} weights for {len(updates)} updates from weigh: return one for each"
        )
    for weight, update in zip(weights, updates, strict=True):
        if not (hasattr(weight, "__float__") and math.isfinite(weight)):
            raise HookMistake(
                f"method '{method.name}' returns the weight {weight} for client {update.client} from weigh: return a "
                "finite number"
            )


def _arrays(sent: Iterable[Tensors]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for entries in sent for name, tensor in entries.items()}


def make_server(spec: RunSpec, initial: Vector, size: int) -> Server:
    """Return the server of a run at its start. size: most updates in one aggregation."""
    layout, settings = initial.layout, spec.settings
    server = Server(
        layout,
        initial.shared.clone(),
        initial.counters[: layout.shared_counters].clone(),
        spec.methods,
        spec.data.partition.train.counts,
        settings.seed,
        spec.task,
        settings.weighting or asked_weighting(spec.methods),
        settings.summation,
        size,
    )
    server.needs_single_updates |= spec.attackers.attack.on_updates
    return server
