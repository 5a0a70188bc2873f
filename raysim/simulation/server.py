"""The server's side of a run: the shared vector, what methods keep there, and the step to the next vector."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raysim.api.composition import failing_method_name
from raysim.api.declarations import Local, Task
from raysim.api.declare import Declarations
from raysim.api.messages import Arrays, Failure, GroupSums, Published, Update
from raysim.api.method import Method
from raysim.api.mistakes import HookMistake, check_report, returned, said, traced, vector
from raysim.api.server_view import Aggregation, ServerView, Weighting
from raysim.api.setup import Declared, Send, number_of_floats
from raysim.primitives.streams import stream
from raysim.simulation.events import RunStoppedError
from raysim.training.run_spec import RunSpec
from raysim.vectors.blocks import Group, folded, grouped, in_blocks, is_finite
from raysim.vectors.layout import Vector


def default_weighting(methods: Sequence[Method]) -> Weighting:
    """By samples, unless a method asks for uniform weights."""
    return "uniform" if any(method.weighting == "uniform" for method in methods) else "samples"


class AggregationError(RunStoppedError):
    """The server could not make the next version."""


class Server:
    """x, and the rule x + sum(w_i * delta_i) / divisor, with every method's part in it.

    Sums are folded in the order of acceptance, in groups of `group` consecutive clients, wherever they are made.
    """

    def __init__(
        self,
        declarations: Declarations,
        vector: Tensor,
        counters: Tensor,
        counts: np.ndarray,
        seed: int,
        task: Task,
        weighting: Weighting = "samples",
        group: int = 5,
        size: int = 0,
        number: Callable[[int], str] = str,
        unseen: int = 0,
        *,
        local: Local,
    ):
        self.declarations, self.layout = declarations, (layout := declarations.layout)
        self.seed, self.weighting, self.group = seed, weighting, group
        self.local = local
        self.number = number  # formats a client for errors
        self.task, self.size = task, size  # size: most updates in one aggregation
        self.vector, self.counters = vector, counters  # [layout.shared], [layout.shared_counters]
        self.counts = (
            counts  # int64 [clients] training samples; 0 of clients that are never trained
        )
        self.population = len(counts) - unseen
        # Clients that have samples, and all samples; counted once, for they may be a million.
        self.able, self.samples = int(np.count_nonzero(counts)), int(np.sum(counts))
        self.needs_single_updates = declarations.needs_single_updates
        self.state: dict[str, Tensor] = {}  # by "method.name"; all of it is in a checkpoint
        self.version = 0
        self.report: dict[str, float] = {}  # columns of this step's history row, by "method.name"
        self._views = {each.method: self._view(each) for each in declarations.methods}
        self._weighers = declarations.filling("weigh")
        self._absorbers = declarations.filling("absorb")
        self._combiner = declarations.only("combine")
        # The owner of the step is the server's rule: it acts on what the others made.
        steppers = declarations.filling("step")
        self._steppers = sorted(steppers, key=lambda pair: "step" in pair[0].owned)
        self._scored = declarations.one("scored")
        # What hooks may return, by the size's name.
        self._trained = {"layout.trained": layout.trained}
        self._shared = {"layout.shared": layout.shared}
        for each in declarations.methods:
            for name, initial in each.server_state.items():
                self.state[f"{each.method}.{name}"] = initial(self._views[each.method])

    def _view(self, declared: Declared) -> ServerView:
        return ServerView(self, declared.method)

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
        """Whether workers may sum updates: weights are known beforehand and nobody needs single updates."""
        return not self._weighers and self._combiner is None and not self.needs_single_updates

    def stream(self, purpose: str) -> np.random.Generator:
        """The random stream of this purpose and version."""
        return stream(self.seed, purpose, self.version)

    def weight(self, client: int) -> float:
        """A client's raw weight before any method changes it."""
        return float(self.counts[client]) if self.weighting == "samples" else 1.0

    def scored(self) -> Tensor:
        """[layout.shared] the vector that evaluation uses."""
        declared = self._scored
        if declared is None or declared.scored is None:
            return self.vector
        scored = declared.scored(self._views[declared.method])
        return vector(scored, declared.method, "scores", self._shared)

    def assemble(self, declared: Declared, parts: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Let a method make server state of what clients sent before round 0, by client number."""
        assert declared.assemble is not None, "only a method that gathers is asked"
        prefix = f"{declared.method}."
        names = [name for name in parts[0] if name.startswith(prefix)]
        lists = {name: [part[name] for part in parts] for name in names}
        own = {name.removeprefix(prefix): arrays for name, arrays in lists.items()}
        declared.assemble(own, self._views[declared.method])

    # --- what is sent ---------------------------------------------------------------------------
    def published(self) -> Published:
        """Return what all clients of this version receive."""
        extras = self._sent("all")
        return Published(self.version, self.vector.numpy(), self.counters.numpy(), extras)

    def sent_once(self) -> Arrays:
        """Return what every client receives besides, with its first job."""
        return self._sent("once")

    def sent_to(self, client: int) -> Arrays:
        """Return what this client alone receives besides."""
        return self._sent("client", client)

    def _sent(self, to: str, *client: int) -> dict[str, np.ndarray]:
        """Return what methods declared to send, by full name, after a check of its size."""
        arrays: dict[str, np.ndarray] = {}
        for declared in self.declarations.methods:
            for send in declared.sends:
                if send.to != to:
                    continue
                tensor = self._value(declared, send, *client)
                if tensor is not None:
                    arrays[f"{declared.method}.{send.name}"] = tensor.numpy()
        return arrays

    def _value(self, declared: Declared, send: Send, *client: int) -> Tensor | None:
        view = self._views[declared.method]
        state = self.state.get(f"{declared.method}.{send.name}")
        tensor = state if send.value is None else send.value(*client, view)
        if tensor is None:
            return None
        hook = f"the function of run.send({send.name!r}, ...)"
        returned(
            tensor, Tensor, declared.method, hook, "a tensor, or None where nothing is sent now"
        )
        expected = number_of_floats(send.floats, self.layout)
        if tensor.numel() != expected:
            raise HookMistake(
                f"method '{declared.method}' sends {tensor.numel()} floats as '{send.name}' and "
                f'declares {expected}. Correct the size in run.send("{send.name}", ...).'
            )
        return tensor

    # --- the step --------------------------------------------------------------------------------------------------
    def receive(self, arrivals: Sequence[Update | Failure]) -> list[Update | Failure]:
        """Return what arrived after the methods that replace updates on their arrival."""
        with self._named():
            for declared in self.declarations.methods:
                if declared.change_updates is not None:
                    arrivals = declared.change_updates(arrivals, self._views[declared.method])
        return list(arrivals)

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
                direction = self._stepped(direction, aggregation)
                self._move(direction, buffers, aggregation)
                for declared, absorb in self._absorbers:
                    absorb(self._scoped(aggregation, declared), self._views[declared.method])
                check_report(self.report, "server")
        self.version += 1

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the method in whose hook an aggregation fails. Raises AggregationError."""
        try:
            yield
        except (Exception, SystemExit) as error:
            name, where = failing_method_name(error), f"on the server in round {self.version + 1}"
            if not (name or isinstance(error, HookMistake)):
                raise
            text = f"method {name!r} failed {where}" if name else where
            text += f": {said(error)}. The run goes on from its last checkpoint with resume=latest"
            raise AggregationError(f"{text}\n{traced(error)}".rstrip("\n")) from error

    def _weighed(
        self,
        updates: Sequence[Update | None],
        staleness: Sequence[int],
        bases: Mapping[int, Published],
    ) -> Aggregation:
        """The updates that came, and how much each counts."""
        present = [update for update in updates if update is not None]
        aggregation = Aggregation(
            updates=present,
            deltas=[]
            if self.summable
            else [torch.from_numpy(u.delta) for u in present if u.delta is not None],
            weights=[self.weight(update.client) for update in present],
            staleness=[
                late for update, late in zip(updates, staleness, strict=True) if update is not None
            ],
            bases=bases,
        )
        for declared, weigh in self._weighers:
            weighed = weigh(self._scoped(aggregation, declared), self._views[declared.method])
            instead = "aggregation.reweighted(weights)"
            aggregation = returned(weighed, Aggregation, declared.method, "weigh", instead)
            _check_weights(aggregation, declared.method, self.number)
        return aggregation

    def _scoped(self, aggregation: Aggregation, declared: Declared) -> Aggregation:
        """Return the aggregation as one method sees it."""
        return replace(aggregation, method=declared.method)

    def _stepped(self, direction: Tensor, aggregation: Aggregation) -> Tensor:
        """Return the step that the methods make of the combined direction."""
        if len(self._steppers) > 1:  # the first may change the direction in place
            aggregation = replace(aggregation, combined=direction.clone())
        else:
            aggregation = replace(aggregation, combined=direction)
        for declared, step in self._steppers:
            view = self._views[declared.method]
            made = step(direction, self._scoped(aggregation, declared), view)
            direction = vector(made, declared.method, "step", self._trained)
        return direction

    def _combined(
        self, aggregation: Aggregation, updates: Sequence[Update | None], sums: GroupSums
    ) -> tuple[Tensor, Tensor]:
        """The direction [layout.trained] of the parameters, and the step of the floating buffers."""
        trained = self.layout.trained
        if self._combiner is None:
            total, divisor = self._folded(updates, aggregation.weights, sums), aggregation.divisor
            in_blocks(trained, lambda part: total[part].div_(divisor))
            return total[:trained], self._averaged(total[trained:], aggregation)
        declared, combine = self._combiner
        made = combine(self._scoped(aggregation, declared), self._views[declared.method])
        combined = vector(made, declared.method, "combine", self._trained | self._shared)
        if len(combined) == self.layout.shared:
            return combined[:trained], combined[trained:]
        buffers = [delta[trained:].numpy() for delta in aggregation.deltas]
        return combined, self._averaged(
            folded(grouped(buffers, aggregation.weights, self.group)), aggregation
        )

    def _move(self, direction: Tensor, buffers: Tensor, aggregation: Aggregation) -> None:
        """Take the step, into a new vector: the old one may lie in an object store."""
        trained, start, moved = self.layout.trained, self.params, torch.empty_like(self.vector)
        out = moved[:trained]
        in_blocks(trained, lambda part: torch.add(start[part], direction[part], out=out[part]))
        # Buffers are statistics: no server rate or momentum touches them.
        torch.add(self.vector[trained:], buffers, out=moved[trained:])
        if not all(in_blocks(len(moved), lambda part: is_finite(moved[part]))):
            raise AggregationError(self._diverged(aggregation))
        if len(self.counters):
            self.counters = torch.from_numpy(
                np.max([update.counters for update in aggregation.updates], axis=0)
            )
        self.vector = moved

    def _diverged(self, aggregation: Aggregation) -> str:
        """Why the next vector is not finite: no weights, or whose updates are the longest."""
        clients = [update.client for update in aggregation.updates]
        why = f"of clients {', '.join(map(self.number, clients[:20]))}"
        if not any(aggregation.weights):
            why = f"all weights {why} are 0"
        elif aggregation.deltas:
            norms = [
                float(torch.linalg.vector_norm(delta, dtype=torch.float64))
                for delta in aggregation.deltas
            ]
            longest = sorted(range(len(norms)), key=norms.__getitem__, reverse=True)[:3]
            texts = [
                f"{norms[place]:g} of client {self.number(clients[place])}" for place in longest
            ]
            why = f"the longest updates are {', '.join(texts)}"
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
                buffers.add_(
                    aggregation.base(update)[trained:] - self.vector[trained:], alpha=weight
                )
        return buffers.div_(float(sum(aggregation.weights)))

    def _folded(
        self, updates: Sequence[Update | None], weights: Sequence[float], sums: GroupSums
    ) -> Tensor:
        """Sum w * delta over groups of consecutive updates, then over the groups; workers may have made some sums."""
        summed = {job: jobs for jobs in sums for job in jobs}
        left, groups, last = iter(weights), list[Group](), None
        for start in range(0, len(updates), self.group):
            members = [
                update for update in updates[start : start + self.group] if update is not None
            ]
            own = [next(left) for _ in members]
            jobs = summed.get(members[0].job) if members else None
            if jobs is not None:
                if jobs != last:  # a sum may be of several groups, if of all up to its last one
                    groups.append(([sums[jobs]], [1.0]))
                last = jobs
            elif members:
                groups.append(
                    ([update.delta for update in members if update.delta is not None], own)
                )
        return folded(groups)


def _check_weights(aggregation: Aggregation, method: str, number: Callable[[int], str]) -> None:
    """Refuse weights that are not one finite number for each update."""
    weights, updates = aggregation.weights, aggregation.updates
    count = len(weights) if isinstance(weights, Sized) else "no"
    if count != len(updates):
        raise HookMistake(
            f"method '{method}' returns {count} weights for {len(updates)} updates from weigh: return one for each"
        )
    for weight, update in zip(weights, updates, strict=True):
        if not (hasattr(weight, "__float__") and math.isfinite(weight)):
            raise HookMistake(
                f"method '{method}' returns the weight {weight} for client "
                f"{number(update.client)} from weigh: return a finite number"
            )


def make_server(spec: RunSpec, declarations: Declarations, initial: Vector, size: int) -> Server:
    """Return the server of a run at its start. size: most updates in one aggregation."""
    settings, partition = spec.settings, spec.data.partition
    return Server(
        declarations,
        initial.shared.clone(),
        initial.counters[: initial.layout.shared_counters].clone(),
        partition.train.counts,
        settings.seed,
        spec.task,
        settings.weighting or default_weighting(spec.methods),
        settings.summation,
        size,
        spec.data.number,
        partition.unseen_count,
        local=settings.local,
    )
