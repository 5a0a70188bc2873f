"""What a method declares about a run before it starts: each fact once, in `Method.setup`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.context import Contribution, Plan, Stage
from raysim.api.declarations import (
    Finetune,
    Local,
    Network,
    Participation,
    Task,
)
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.messages import Failure, Update
from raysim.api.server_view import ServerView, Weighting
from raysim.vectors.layout import Layout

if TYPE_CHECKING:
    from raysim.models import Classifier

Need: TypeAlias = Literal["classes", "features", "images", "numbers"]
Targets: TypeAlias = Literal["any", "soft", "integer"]
Correction: TypeAlias = Literal["add", "shift", "mix"]
Floats: TypeAlias = int | Callable[[Layout], int]
Cycle: TypeAlias = Sequence[Sequence[Stage]]
Contributed: TypeAlias = Mapping[str, np.ndarray]
Pooled: TypeAlias = Mapping[str, Sequence[np.ndarray]]
Always: TypeAlias = Callable[[Participation], bool]
Arrivals: TypeAlias = Sequence[Update | Failure]


def always(job: Participation) -> bool:
    """Return True: the default for `when`."""
    return True


def num_parameters(layout: Layout) -> int:
    """Return the number of shared trainable parameters."""
    return layout.trained


def number_of_floats(floats: Floats, layout: Layout) -> int:
    """Return a declared size as a number."""
    return floats(layout) if callable(floats) else floats


@dataclass(frozen=True)
class Send:
    """Something that clients receive next to the model.

    value: makes it, or returns None where nothing is sent now; None: the server state of that name.
    to: "all" clients with each version, each client "once", or one "client" at a time.
    when: whether a job receives it, as far as it is known at dispatch; it decides what is counted.
    """

    name: str
    value: Callable[..., Tensor | None] | None
    floats: Floats
    to: Literal["all", "once", "client"]
    when: Always


@dataclass(frozen=True)
class RoundWarning:
    """A text to warn with, once, after the first round whose history row is told to be unusual."""

    text: Callable[[Mapping[str, Any]], str]


@dataclass
class MethodDeclaration:
    """What one method declared in `setup`."""

    method: str
    networks: dict[str, Network] = field(default_factory=dict)
    private_parameters: list[str] = field(default_factory=list)
    late_private_parameters: list[Callable[[Mapping[str, nn.Module]], Sequence[str]]] = field(
        default_factory=list
    )
    fixed_parameters: list[str] = field(default_factory=list)  # also in private_parameters
    client_state: dict[str, Callable[[int], Any]] = field(default_factory=dict)
    server_state: dict[str, Callable[[ServerView], Tensor]] = field(default_factory=dict)
    sends: list[Send] = field(default_factory=list)
    uploads: dict[str, Floats] = field(default_factory=dict)
    stages: Callable[[Plan], Cycle] | None = None
    select: Callable[[LocalJob, int, int], np.ndarray | None] | None = None
    draws: dict[str, Callable[[LocalJob, np.random.Generator], Sequence[Tensor]]] = field(
        default_factory=dict
    )
    train: Callable[[LocalJob], LocalResult | None] | None = None
    contribute: Callable[[Contribution], Contributed] | None = None
    assemble: Callable[[Pooled, ServerView], None] | None = None
    finetune: Finetune | None = None
    scored: Callable[[ServerView], Tensor] | None = None
    owned: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    correction: Correction = "add"
    targets: Targets = "any"
    needs: list[Need] = field(default_factory=list)
    excludes: dict[str, str] = field(default_factory=dict)
    needs_whole_model: str = ""  # why no other method may keep parameters on the client
    needs_clients: str = ""  # why no other method may pool the data of all clients
    pools: bool = False
    change_labels: Callable[[Tensor], Tensor] | None = None
    change_updates: Callable[[Arrivals, ServerView], Arrivals] | None = None
    counted_clients: dict[str, frozenset[int]] = field(default_factory=dict)
    keeps_optimizer: bool = False
    reads_updates: bool = False
    adds_rows: bool = False
    warnings: list[str] = field(default_factory=list)
    round_warnings: list[RoundWarning] = field(default_factory=list)
    checks: list[Callable[[Any], Sequence[str]]] = field(default_factory=list)
    # Hooks that the run calls, each with the arguments that `Method` gives it.
    hooks: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def client_states(self, samples: int) -> dict[str, Any]:
        """Return the initial state of a client with so many training samples, by full name."""
        return {
            f"{self.method}.{name}": initial(samples) for name, initial in self.client_state.items()
        }

    def has_hook(self, hook: str) -> bool:
        """Return whether the run calls this hook of the method."""
        return hook in self.hooks and hook not in self.skipped

    def sees_updates(self) -> bool:
        """Return whether the method uploads anything, or looks at updates on the server."""
        if self.contribute is not None or self.uploads:
            return True
        changes_mean = self.has_hook("step") and "step" not in self.owned
        return changes_mean or self.has_hook("weigh") or self.has_hook("absorb")

    @property
    def keeps_parameters(self) -> bool:
        """Whether the method keeps parameters on the client, besides private networks."""
        return bool(self.private_parameters or self.late_private_parameters)

    @property
    def keeps_client_state(self) -> bool:
        """Whether the method keeps something for each client."""
        return bool(self.client_state)


@dataclass
class Setup:
    """A run before its start, to which a method declares what it needs: the argument of `setup`.

    Facts: `task`, `local` (the settings `local.*`), `rounds`, `seed`, `weighting` (as the
    configuration asks, None: left to the methods), `networks` (the model and what methods before
    this one added), `clients` (those that have training samples), `size` (most updates in one
    aggregation), `stale` (whether updates may start from an earlier version than the current one)
    and `methods` (the names of all methods of the list, with the hooks that each fills).
    """

    method: str
    task: Task
    local: Local
    networks: Mapping[str, nn.Module]
    methods: Mapping[str, frozenset[str]]
    declared: MethodDeclaration
    rounds: int = 1
    seed: int = 0
    weighting: Weighting | None = None
    clients_with_samples: int = 0
    max_updates: int = sys.maxsize
    has_stale_updates: bool = False
    _layout: list[Layout] = field(default_factory=list)

    # --- what the method can count on ---------------------------------------------------------
    @property
    def model(self) -> Classifier:
        """The model, after a method that replaces it."""
        return self.networks["model"]  # type: ignore[return-value]

    def others_fill(self, hook: str) -> list[str]:
        """Return the names of the other methods of the list that fill a hook."""
        return [
            name for name, hooks in self.methods.items() if name != self.method and hook in hooks
        ]

    def needs(self, *needs: Need) -> None:
        """Refuse a run without what the method needs.

        "classes": labels are classes. "features": the model has features in front of a linear
        head. "images": inputs are images. "numbers": inputs can be added up and have a gradient.
        """
        self.declared.needs.extend(needs)

    def excludes(self, other: str, why: str) -> None:
        """Refuse a run whose list has the method `other`, too."""
        self.declared.excludes[other] = why

    def needs_whole_model(self, why: str) -> None:
        """Refuse a run whose list has a method that keeps parameters on the client, too."""
        self.declared.needs_whole_model = why

    def needs_clients(self, why: str) -> None:
        """Refuse a run whose list has a method that pools the data of all clients, too."""
        self.declared.needs_clients = why

    def require(self, condition: object, text: str) -> None:
        """Refuse the run with this text unless the condition holds: "key: what is wrong. Do ..."."""
        if not condition:
            raise ValueError(text)

    def warn(self, text: str) -> None:
        """Warn with this text before the run starts."""
        self.declared.warnings.append(text)

    def check(self, check: Callable[[Any], Sequence[str]]) -> None:
        """Call `check(run)` once all methods have declared; it returns warnings or raises ValueError.

        `run.layout` is where each tensor lies, `run.methods` has what each method declared.
        """
        self.declared.checks.append(check)

    def warn_if_single(self, effect: str) -> None:
        """Warn that a method which compares updates gets only one in each aggregation."""
        if self.max_updates > 1:
            return
        self.warn(
            f"method '{self.method}' compares the updates of an aggregation, and each aggregation "
            f"has only one, so that {effect}. Choose a schedule that aggregates two or more at "
            "once, or leave the method out."
        )

    def warn_of_second_correction(self, other: str) -> None:
        """Warn where the list has another method that corrects the same bias."""
        if other in self.methods:
            self.warn(
                f"methods '{other}' and '{self.method}' correct the same bias, so it is corrected "
                "twice. Leave one of them out."
            )

    def warn_when(self, text: Callable[[Mapping[str, Any]], str]) -> None:
        """Warn during the run: `text(row)` of a row of the history, until it is not empty."""
        self.declared.round_warnings.append(RoundWarning(text))

    # --- networks and client state ------------------------------------------------------------
    def network(self, name: str, module: nn.Module, private: bool = False) -> None:
        """Add a network next to the model; a private one stays on the client."""
        self.declared.networks[f"{self.method}.{name}"] = Network(module, private)

    def private_parameters(
        self, names: Sequence[str] | Callable[[Mapping[str, nn.Module]], Sequence[str]]
    ) -> None:
        """Keep tensors on the client ("model.bn1.weight"), instead of sending and averaging them.

        A function gets all networks of the run, those of later methods included.
        """
        if callable(names):
            self.declared.late_private_parameters.append(names)
        else:
            self.declared.private_parameters.extend(names)

    def fixed_parameters(self, names: Sequence[str]) -> None:
        """Keep parameters ("model.head.weight") at their initial values on all clients.

        They never travel and no client stores them. A stage that trains one is an error;
        fine-tuning before a score may change them in the model that is scored.
        """
        self.declared.private_parameters.extend(names)
        self.declared.fixed_parameters.extend(names)

    def client_state(self, name: str, initial: Callable[[int], Any]) -> None:
        """Keep a value for each client between its jobs: `job.state[name]`.

        initial(samples): the value of a client that never trained. A value is a tensor of any
        shape, a number, bytes, or a mapping of such; it may change its shape and keys.
        """
        self._check_new(name, "client_state", self.declared.client_state)
        self.declared.client_state[name] = initial

    def _check_new(self, name: str, kind: str, declared: Mapping[str, object]) -> None:
        """Raise ValueError if the method has declared a state of this name already."""
        if name in declared:
            raise ValueError(
                f"method '{self.method}' declares {kind} '{name}' twice: "
                "give the second one another name"
            )

    def keep_optimizer(self) -> None:
        """Let a client's optimizer continue in its next job, as `local.keep_optimizer` does."""
        self.declared.keeps_optimizer = True

    # --- the server and what travels ----------------------------------------------------------
    def server_state(self, name: str, initial: Callable[[ServerView], Tensor]) -> None:
        """Keep a tensor on the server: `server.state[name]`; it is part of every checkpoint."""
        self._check_new(name, "server_state", self.declared.server_state)
        self.declared.server_state[name] = initial

    def send(
        self,
        name: str,
        value: Callable[[ServerView], Tensor | None] | None = None,
        floats: Floats = num_parameters,
        *,
        once: bool = False,
        when: Always = always,
    ) -> None:
        """Send a tensor to each client with the model: `job.received[name]`.

        value(server) makes it, once for each version; None sends the server state of that name.
        floats: its size. once: only with a client's first job. when(job): which jobs receive it.
        """
        to: Literal["all", "once"] = "once" if once else "all"
        self.declared.sends.append(Send(name, value, floats, to, when))

    def send_to_client(
        self,
        name: str,
        value: Callable[[int, ServerView], Tensor | None],
        floats: Floats = num_parameters,
        *,
        when: Always = always,
    ) -> None:
        """Send `value(client, server)` to one client alone, and when its own model is scored."""
        self.declared.sends.append(Send(name, value, floats, "client", when))

    def upload(self, name: str, floats: Floats = num_parameters) -> None:
        """Let each job send a tensor of so many floats with its update: `job.upload[name]`."""
        self.declared.uploads[name] = floats

    def gather(
        self,
        client: Callable[[Contribution], Contributed],
        server: Callable[[Pooled, ServerView], None],
    ) -> None:
        """Collect something from every client before round 0.

        client(contribution) returns arrays by name; server(parts, server) gets, for each name, a
        list with one array for each client, by client number.
        """
        self.declared.contribute = client
        self.declared.assemble = server

    def zeros(self, at: int | ServerView = 0) -> Tensor:
        """Return zeros for all shared parameters: an initial value of client or server state."""
        if isinstance(at, int):
            return torch.zeros(self._layout[0].trained)
        return torch.zeros_like(at.params)

    def change_updates(self, change: Callable[[Arrivals, ServerView], Arrivals]) -> None:
        """Replace updates when they reach the server, before they are counted and weighed.

        change(arrivals, server) gets the updates and failures of an aggregation in the order of
        acceptance and returns as many of them; sums on workers are off.
        """
        self.declared.change_updates = change

    def count_clients(self, column: str, clients: Iterable[int]) -> None:
        """Add a column to the history: how many of an aggregation's updates are of these clients."""
        self.declared.counted_clients[column] = frozenset(clients)

    # --- training -----------------------------------------------------------------------------
    def train(self, function: Callable[[LocalJob], LocalResult | None]) -> None:
        """Train each client by `function(job)` in place of raysim's steps.

        The function trains `job.model` and `job.network(...)` in any way, on `job.dataset()`, and
        returns a `LocalResult` or None. `begin`, `end` and all server hooks work as usual. No other
        method of the list may take part in the steps. Only one method of a list may do this.
        """
        self.declared.train = function

    def change_labels(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the labels [n] of the data set with which workers train; scores are unchanged."""
        self.declared.change_labels = change

    def stages(self, stages: Sequence[Stage] | Callable[[Plan], Cycle]) -> None:
        """Decide what one step on a batch does: the stages, or a function of the job's plan.

        The function returns a cycle of steps, each some stages. At most one stage of a step has
        the task loss. Only one method of a list may do this.
        """
        self.declared.stages = stages if callable(stages) else lambda plan: (tuple(stages),)

    def select(self, choose: Callable[[LocalJob, int, int], np.ndarray | None]) -> None:
        """Choose the samples of an epoch: `choose(job, epoch, epochs)`, with epochs from 1.

        It returns positions in the client's samples, or None for all of them in this job. Only
        one method of a list may do this.
        """
        self.declared.select = choose

    def draw(
        self, name: str, draw: Callable[[LocalJob, np.random.Generator], Sequence[Tensor]]
    ) -> None:
        """Draw random tensors, one for each step, before the first step: `job.drawn(name)`.

        `draw(job, generator)` may look at `job.plan` and at what was received.
        """
        self.declared.draws[name] = draw

    def corrects(self, kind: Correction) -> None:
        """Say how `gradient` changes the gradient: "add" to it, "shift" it or "mix" it.

        Corrections of several methods are applied in this order of kinds.
        """
        self.declared.correction = kind

    def targets(self, kind: Targets) -> None:
        """Say whether the method makes labels "soft" or needs them as "integer"."""
        self.declared.targets = kind

    def owns(self, *hooks: Literal["loss", "step"]) -> None:
        """Take a hook that is a chain alone: replace the task loss, or be the server's rule.

        The owner's `loss` is called first and gets 0 instead of the usual loss. The owner's `step`
        is called last. Only one method of a list may own each of them.
        """
        self.declared.owned.update(hooks)

    def adds_rows(self) -> None:
        """Say that `batch` adds rows to each batch, so that a batch of one row can be trained on."""
        self.declared.adds_rows = True

    def skip(self, *hooks: str) -> None:
        """Do not call these hooks in this run: they do nothing at the method's settings."""
        self.declared.skipped.update(hooks)

    # --- scoring and the server's step --------------------------------------------------------
    def finetune(self, how: Finetune) -> None:
        """Fine-tune clients' models before they are scored, instead of `evaluate.finetune`."""
        self.declared.finetune = how

    def scores(self, vector: Callable[[ServerView], Tensor]) -> None:
        """Score `vector(server)` [layout.shared] instead of the current version."""
        self.declared.scored = vector

    def read_updates(self) -> None:
        """Make single updates and their moves available in `absorb`; sums on workers are off."""
        self.declared.reads_updates = True
