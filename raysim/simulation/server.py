"""The server: the shared vector, the server state, and the step to the next version."""

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
from raysim.api.entries import Entries
from raysim.api.hook_checks import (
    HookError,
    check_report,
    check_type,
    check_vector,
    format_error,
    format_traceback,
)
from raysim.api.messages import Arrays, Failure, GroupSums, PublishedVersion, Update
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView, Weighting
from raysim.api.setup import MethodDeclaration, Send, number_of_floats
from raysim.api.update_code import UpdateCode
from raysim.primitives.streams import stream
from raysim.simulation.events import RunStoppedError
from raysim.training.run_spec import RunSpec
from raysim.vectors.blocks import in_blocks, is_finite
from raysim.vectors.tree_sum import TreeLeaf, sum_in_tree, weighted_sum


def default_weighting(methods: Sequence[Method]) -> Weighting:
    """Return how a server weighs updates: "uniform" if a method needs it, else "samples"."""
    needs_uniform = any(method.weighting == "uniform" for method in methods)
    return "uniform" if needs_uniform else "samples"


class AggregationError(RunStoppedError):
    """The error of a server that could not make the next version."""


class Server:
    """The server of one model, which makes the next version from the updates.

    Update i has the weight w_i and the change delta_i of the parameters. Without methods, the next
    version of the shared vector x is x + sum(w_i * delta_i) / sum(w_i). Hooks of methods can change
    the weights, the mean and the step.

    vector: float [layout.shared], the initial shared vector.
    counters: int [layout.shared_counters], the initial integer buffers.
    counts: int64 [clients], the number of training samples of each client. It is 0 for clients that
    never train this model, unless each client has its own replica.
    weighting: "samples" weighs an update by its client's training samples; "uniform" weighs all by
    1.
    size: the largest number of updates in one aggregation.
    format_client: returns the name of a client for errors.
    unseen: the number of clients that never train this model; 0 if each client has its own replica.
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
        size: int = 0,
        format_client: Callable[[int], str] = str,
        unseen: int = 0,
        replica: int = 0,
        *,
        local: Local,
    ):
        layout = declarations.layout
        self.declarations, self.layout = declarations, layout
        self.seed, self.task, self.local, self.replica = seed, task, local, replica
        self.weighting, self.size = weighting, size
        self.format_client = format_client
        self.vector, self.counters = vector, counters
        self.set_clients(counts, unseen)
        # Server state by "method.name"; checkpoints contain all of it.
        self.state: dict[str, Tensor] = {}
        self.version = 0
        self.has_moved = False  # True if an exchange has changed the vector since this version
        self.report: dict[str, float] = {}  # columns of this step's history row, by "method.name"
        self._views = {
            declared.method: ServerView(self, declared.method) for declared in declarations.methods
        }
        # By receivers ("all", "once", "client"): what methods send to them.
        self._sends: dict[str, list[tuple[MethodDeclaration, Send]]] = {}
        for declared in declarations.methods:
            for send in declared.sends:
                self._sends.setdefault(send.to, []).append((declared, send))
        self._weighers = declarations.hooks_of("weigh")
        self._absorbers = declarations.hooks_of("absorb")
        self._combiner = declarations.single_hook("combine")
        # The owner of the step comes last: it acts on the steps of the other methods.
        steppers = declarations.hooks_of("step")
        self._steppers = sorted(steppers, key=lambda pair: "step" in pair[0].owned)
        self._scored = declarations.declarer("scored")
        self._compression: tuple[str, UpdateCode] | None = None
        compression = declarations.compressor
        if compression is not None and compression[1].compresses_down:
            self._compression = compression
        # Workers may sum updates if no method needs single updates or changes their weights.
        self.summable = not declarations.uses_of_single_updates
        # The sizes that hooks may return, by name.
        self._trained = {"layout.trained": layout.trained}
        self._shared = {"layout.shared": layout.shared}
        for declared in declarations.methods:
            for name, initial in declared.server_state.items():
                self.state[f"{declared.method}.{name}"] = initial(self._views[declared.method])

    def set_clients(self, counts: np.ndarray, unseen: int) -> None:
        """Change the clients of this model.

        counts: int64 [clients], the training samples of each client; 0 for a client that never
        trains this model.
        unseen: the number of clients that never train this model: unseen clients, and clients of
        other replicas.
        """
        self.counts = counts
        self.population = len(counts) - unseen
        # Clients that have samples, and all samples; counted once, for a million clients.
        self.able, self.samples = int(np.count_nonzero(counts)), int(np.sum(counts))
        self.__dict__.pop("sample_ends", None)

    @property
    def clients(self) -> int:
        """The number of all clients of the run."""
        return len(self.counts)

    @property
    def params(self) -> Tensor:
        """The shared trainable parameters [layout.trained]."""
        return self.vector[: self.layout.trained]

    @functools.cached_property
    def sample_ends(self) -> np.ndarray:
        """The cumulative distribution for drawing clients in proportion to their training samples.

        Each client with samples has an entry, float64, in the order of the clients. A uniform
        random number in [0, 1) draws the client with the first entry above it.
        """
        return np.cumsum(self.counts[self.counts > 0] / self.samples)

    def stream(self, purpose: str) -> np.random.Generator:
        """Return a random generator for one purpose in the current version of this model.

        Other purposes, versions and replicas get independent generators.
        purpose: the name of the use, such as "compression".
        """
        if self.replica:
            purpose = f"{purpose}.replica{self.replica}"
        return stream(self.seed, purpose, self.version)

    def weight(self, client: int) -> float:
        """Return the weight of a client's updates, before methods change it.

        It is the number of the client's training samples, or 1 with weighting="uniform".
        """
        return float(self.counts.item(client)) if self.weighting == "samples" else 1.0

    def scored(self) -> Tensor:
        """Return the shared vector [layout.shared] with which this server's model is scored.

        Normally it is `self.vector`, the current version. A method may declare a function
        (`run.scores`) that returns a different vector, for example the average of earlier versions.
        """
        declared = self._scored
        if declared is None or declared.scored is None:
            return self.vector
        scored = declared.scored(self._views[declared.method])
        return check_vector(scored, declared.method, "scores", self._shared)

    def assemble(
        self, declared: MethodDeclaration, parts: Sequence[Mapping[str, np.ndarray]]
    ) -> None:
        """Let a method make server state from the arrays that clients sent before round 0.

        declared: what the method has declared.
        parts: for each client, in the order of their numbers, its arrays by "method.name".
        """
        assert declared.assemble is not None, "only for a method that gathers"
        prefix = f"{declared.method}."
        arrays: dict[str, Sequence[np.ndarray]] = {}
        for name in parts[0]:
            if name.startswith(prefix):
                arrays[name.removeprefix(prefix)] = [part[name] for part in parts]
        declared.assemble(arrays, self._views[declared.method])

    # --- what clients receive ---------------------------------------------------------------------
    def published(self, number: int = 0) -> PublishedVersion:
        """Return the current version as a message for the clients that start from it.

        number: the number that identifies this version among the versions of all replicas.
        """
        vector, counters, extras = self.vector.numpy(), self.counters.numpy(), self._sent("all")
        return PublishedVersion(self.version, vector, counters, extras, number=number)

    def sent_once(self) -> Arrays:
        """Return the tensors that each client receives only once in a run, with its first job.

        The keys are "method.name".
        """
        return self._sent("once")

    def sent_to(self, client: int) -> Arrays:
        """Return the tensors that methods send to this client alone, by "method.name"."""
        return self._sent("client", client)

    def _sent(self, to: str, *client: int) -> dict[str, np.ndarray]:
        """Return the tensors that methods now send to clients, by "method.name".

        to: "all" returns the tensors that every client receives with each version. "once" returns
        those that each client receives only with its first job. "client" returns those that a
        method sends to a single client.
        client: the number of the single client; only with to="client".
        """
        arrays: dict[str, np.ndarray] = {}
        for declared, send in self._sends.get(to, ()):
            tensor = self._tensor_to_send(declared, send, *client)
            if tensor is not None:
                arrays[f"{declared.method}.{send.name}"] = tensor.numpy()
        return arrays

    def _tensor_to_send(
        self, declared: MethodDeclaration, send: Send, *client: int
    ) -> Tensor | None:
        view = self._views[declared.method]
        state = self.state.get(f"{declared.method}.{send.name}")
        tensor = state if send.value is None else send.value(*client, view)
        if tensor is None:
            return None
        hook = f"the function of run.send({send.name!r}, ...)"
        check_type(
            tensor, Tensor, declared.method, hook, "a tensor, or None where nothing is sent now"
        )
        expected = number_of_floats(send.floats, self.layout)
        if tensor.numel() != expected and not send.varies:
            raise HookError(
                f"method '{declared.method}' sends {tensor.numel()} floats as '{send.name}', but "
                f"declares {expected}. Correct the size in "
                f'run.send("{send.name}", ...).'
            )
        return tensor

    # --- the step ---------------------------------------------------------------------------------
    def receive(self, arrivals: Sequence[Update | Failure]) -> list[Update | Failure]:
        """Let methods replace the updates of an aggregation when they arrive.

        Return the updates and failures, in the same order.
        arrivals: for each job of the aggregation its update, or the failure of the job.
        """
        with self._name_failures():
            for declared in self.declarations.methods:
                if declared.change_updates is not None:
                    arrivals = declared.change_updates(arrivals, self._views[declared.method])
        return list(arrivals)

    def step(
        self,
        updates: Sequence[Update | None],
        sums: GroupSums,
        staleness: Sequence[int],
        bases: Mapping[int, PublishedVersion],
    ) -> None:
        """Aggregate the updates of jobs into the next version, and increase `version` by 1.

        If all jobs failed, the vector stays the same.

        updates: an entry for each job, in the order of aggregation; None for a failed job.
        sums: sums of deltas, by the job numbers of each sum. The updates of these jobs have no
        delta.
        staleness: the staleness of each entry of `updates`.
        bases: the base versions of the updates, by version number.
        Raises AggregationError if the next version cannot be made.
        """
        self.report = {}
        if any(update is not None for update in updates):
            with self._name_failures():
                aggregation = self._weigh(updates, staleness, bases)
                direction, buffers = self._combine(aggregation, updates, sums)
                direction = self._step_of_methods(direction, aggregation)
                direction = self._compress(direction)
                self._move(direction, buffers, aggregation)
                for declared, absorb in self._absorbers:
                    scoped = replace(aggregation, method=declared.method)
                    absorb(scoped, self._views[declared.method])
                check_report(self.report, "server")
        self.version += 1

    @contextmanager
    def _name_failures(self) -> Iterator[None]:
        """Inside `with`, turn an error of a hook into an AggregationError that names the method."""
        try:
            yield
        except (Exception, SystemExit) as error:
            name = failing_method_name(error)
            if not (name or isinstance(error, HookError)):
                raise
            text = f"on the server in round {self.version + 1}"
            if name:
                text = f"method {name!r} failed {text}"
            reason = format_error(error).rstrip(".")
            text += f": {reason}. Continue the run with resume=latest."
            raise AggregationError(f"{text}\n{format_traceback(error)}".rstrip("\n")) from error

    def _weigh(
        self,
        updates: Sequence[Update | None],
        staleness: Sequence[int],
        bases: Mapping[int, PublishedVersion],
    ) -> Aggregation:
        """Return the updates that did not fail, with the weights that the methods give them.

        The arguments are those of `step`.
        """
        present = [update for update in updates if update is not None]
        staleness_of_present = [
            value for update, value in zip(updates, staleness, strict=True) if update is not None
        ]
        deltas: list[Tensor] = []
        if not self.summable:
            deltas = [
                torch.from_numpy(update.delta) for update in present if update.delta is not None
            ]
        weights = [self.weight(update.client) for update in present]
        aggregation = Aggregation(present, deltas, weights, staleness_of_present, bases)
        for declared, weigh in self._weighers:
            scoped = replace(aggregation, method=declared.method)
            weighed = weigh(scoped, self._views[declared.method])
            instead = "aggregation.with_weights(weights)"
            aggregation = check_type(weighed, Aggregation, declared.method, "weigh", instead)
            _check_weights(aggregation, declared.method, self.format_client)
        return aggregation

    def _step_of_methods(self, direction: Tensor, aggregation: Aggregation) -> Tensor:
        """Let all methods change the combined direction; return the server's step.

        direction: [layout.trained], the combined updates.
        """
        # With several methods the first may change the direction in place.
        combined = direction.clone() if len(self._steppers) > 1 else direction
        aggregation = replace(aggregation, combined=combined)
        for declared, step in self._steppers:
            scoped = replace(aggregation, method=declared.method)
            changed = step(direction, scoped, self._views[declared.method])
            direction = check_vector(changed, declared.method, "step", self._trained)
        return direction

    def _compress(self, direction: Tensor) -> Tensor:
        """Compress the change of the parameters; return it as clients decode it, [layout.trained].

        Return `direction` unchanged if a value is not finite, or if the run does not compress what
        the server sends.
        direction: [layout.trained], the change to the next version.
        """
        # `_move` raises the error of a step that is not finite.
        if self._compression is None or not is_finite(direction):
            return direction
        name, compressor = self._compression
        step = direction.clone()  # the direction may be server state of a method
        state = Entries[Tensor](self, "state", name)
        key = int(self.stream("compression").integers(2**63 - 1))
        received, following = compressor.send(step, state, self.layout, key)
        state |= following
        return received

    def _combine(
        self, aggregation: Aggregation, updates: Sequence[Update | None], sums: GroupSums
    ) -> tuple[Tensor, Tensor]:
        """Combine the updates into a change of the parameters and a change of the float buffers.

        Both are flat vectors of shared values.

        aggregation: the updates that did not fail, with their weights.
        updates, sums: as in `step`.
        """
        trained = self.layout.trained
        if self._combiner is None:
            total = self._sum_updates(updates, aggregation.weights, sums)
            divisor = aggregation.divisor
            in_blocks(trained, lambda part: total[part].div_(divisor))
            return total[:trained], self._average_buffers(total[trained:], aggregation)
        declared, combine = self._combiner
        scoped = replace(aggregation, method=declared.method)
        direction = combine(scoped, self._views[declared.method])
        direction = check_vector(
            direction, declared.method, "combine", self._trained | self._shared
        )
        if len(direction) == self.layout.shared:
            return direction[:trained], direction[trained:]
        buffers = [delta[trained:].numpy() for delta in aggregation.deltas]
        total = weighted_sum(buffers, aggregation.weights)
        return direction, self._average_buffers(total, aggregation)

    def _move(self, direction: Tensor, buffers: Tensor, aggregation: Aggregation) -> None:
        """Add the step to the shared vector, and store the result as a new vector.

        direction: [layout.trained], the step of the parameters.
        buffers: the step of the float buffers.
        Raises AggregationError if the new vector is not finite.
        """
        trained, start = self.layout.trained, self.params
        moved = torch.empty_like(self.vector)
        out = moved[:trained]
        in_blocks(trained, lambda part: torch.add(start[part], direction[part], out=out[part]))
        # Buffers are statistics: no server rate or momentum touches them.
        torch.add(self.vector[trained:], buffers, out=moved[trained:])
        if not all(in_blocks(len(moved), lambda part: is_finite(moved[part]))):
            raise AggregationError(self._describe_divergence(aggregation))
        if len(self.counters):
            counters = [update.counters for update in aggregation.updates]
            self.counters = torch.from_numpy(np.max(counters, axis=0))
        self.vector = moved

    def _describe_divergence(self, aggregation: Aggregation) -> str:
        """Describe why the next vector is not finite: zero weights, or too large updates."""
        clients = [self.format_client(client) for client in aggregation.clients]
        listed = ", ".join(clients[:20])
        number = self.version + 1
        if not any(aggregation.weights):
            return (
                f"weights of updates: the shared vector is not finite after round {number} (all "
                f"weights of clients {listed} are 0). Start a new run without the method whose "
                "hook `weigh` sets them to 0. Or correct this hook, and continue from the last "
                "checkpoint with resume=latest."
            )
        reason = f"after the updates of clients {listed}"
        if aggregation.deltas:
            norms = [
                float(torch.linalg.vector_norm(delta, dtype=torch.float64))
                for delta in aggregation.deltas
            ]
            longest = sorted(range(len(norms)), key=norms.__getitem__, reverse=True)[:3]
            texts = [f"{norms[index]:g} of client {clients[index]}" for index in longest]
            reason = f"the longest updates are {', '.join(texts)}"
        return (
            f"faults.norm: the shared vector is not finite after round {number} ({reason}). Set "
            "faults.norm to leave out clients with longer updates, or decrease local.lr; then "
            "continue the run with resume=latest."
        )

    def _average_buffers(self, total: Tensor, aggregation: Aggregation) -> Tensor:
        """Return the step from the server's float buffers to the mean of the clients' buffers.

        total: the weighted sum of the changes of the clients' buffers; it is changed in place.
        """
        trained = self.layout.trained
        if len(total) == 0:
            return total
        for update, weight in zip(aggregation.updates, aggregation.weights, strict=True):
            if update.version != self.version or self.has_moved:
                # The change is relative to the base version, the step to the current version.
                # Without this correction, a variance could become negative.
                moved = aggregation.base(update)[trained:] - self.vector[trained:]
                total.add_(moved, alpha=weight)
        return total.div_(float(sum(aggregation.weights)))

    def _sum_updates(
        self, updates: Sequence[Update | None], weights: Sequence[float], sums: GroupSums
    ) -> Tensor:
        """Return the weighted sum of the updates, added up in a fixed tree over their positions.

        updates, sums: as in `step`.
        weights: one for each update that is not None.
        """
        positions: dict[int, int] = {}  # by number of the job
        remaining_weights = iter(weights)
        leaves: list[TreeLeaf | None] = []
        for position, update in enumerate(updates):
            leaf = None
            if update is not None:
                positions[update.job] = position
                weight = next(remaining_weights)
                if update.delta is not None:
                    leaf = TreeLeaf(update.delta, weight)
            leaves.append(leaf)
        total = sum_in_tree(leaves, _ranges_of_sums(sums, positions))
        assert total is not None, "there is an update"
        return total


def _ranges_of_sums(
    sums: GroupSums, positions: Mapping[int, int]
) -> dict[range, np.ndarray | None]:
    """Map ranges of job positions to the sums of updates that workers made.

    A job's position is its index among all jobs of the aggregation. The result has no entry for a
    sum whose jobs all failed.
    sums: the sums, by the numbers of their jobs, which have consecutive positions.
    positions: maps job numbers to positions; failed jobs are missing.
    """
    ranges: dict[range, np.ndarray | None] = {}
    for jobs, total in sums.items():
        for offset, job in enumerate(jobs):
            if job in positions:
                start = positions[job] - offset
                ranges[range(start, start + len(jobs))] = total
                break
    return ranges


def _check_weights(
    aggregation: Aggregation, method: str, format_client: Callable[[int], str]
) -> None:
    """Raise HookError unless a method returns one finite weight for each update."""
    weights, updates = aggregation.weights, aggregation.updates
    count = len(weights) if isinstance(weights, Sized) else "no"
    if count != len(updates):
        raise HookError(
            f"method '{method}' returns {count} weights from weigh for {len(updates)} updates. "
            "Return one for each update."
        )
    for weight, update in zip(weights, updates, strict=True):
        if not (hasattr(weight, "__float__") and math.isfinite(weight)):
            raise HookError(
                f"method '{method}' returns the weight {weight} from weigh for client "
                f"{format_client(update.client)}. Return a finite number."
            )


def make_server(
    spec: RunSpec,
    declarations: Declarations,
    vector: Tensor,
    counters: Tensor,
    size: int,
    counts: np.ndarray | None = None,
    unseen: int | None = None,
    replica: int = 0,
) -> Server:
    """Return the server of a replica, for a run that has not begun.

    vector, counters: the initial shared vector and integer buffers, which replicas may share.
    size: the largest number of updates in one aggregation.
    counts, unseen: as in `Server`; None in a run with one replica.
    """
    settings, partition = spec.settings, spec.data.partition
    return Server(
        declarations,
        vector,
        counters,
        partition.train.counts if counts is None else counts,
        settings.seed,
        spec.task,
        settings.weighting or default_weighting(spec.methods),
        size,
        spec.data.number,
        partition.unseen_count if unseen is None else unseen,
        replica,
        local=settings.local,
    )
