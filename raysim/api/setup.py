"""The declarations of a method, made in `Method.setup` before the run starts."""

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
    ExtraNetwork,
    Finetune,
    Labels,
    Local,
    Participation,
    Task,
)
from raysim.api.local_job import LocalJob, ScoredModel
from raysim.api.local_training import LocalResult
from raysim.api.messages import Failure, Update
from raysim.api.server_view import ServerView, Weighting
from raysim.api.update_code import UpdateCode
from raysim.vectors.layout import Layout

if TYPE_CHECKING:
    from raysim.models import Classifier

Need: TypeAlias = Literal["classes", "features", "gradients", "images", "numbers"]
Targets: TypeAlias = Literal["any", "soft", "integer"]
Correction: TypeAlias = Literal["add", "shift", "mix"]
Floats: TypeAlias = int | Callable[[Layout], int]
Cycle: TypeAlias = Sequence[Sequence[Stage]]
Contributed: TypeAlias = Mapping[str, np.ndarray]
Pooled: TypeAlias = Mapping[str, Sequence[np.ndarray]]
JobCondition: TypeAlias = Callable[[Participation], bool]
# Returns the number of floats that a client sends, from the number of floats that it received.
PlannedUpload: TypeAlias = Callable[[int], int]
Arrivals: TypeAlias = Sequence[Update | Failure]


def always(job: Participation) -> bool:
    """Return True: by default, `Setup.send` sends a tensor with every job."""
    return True


def num_parameters(layout: Layout) -> int:
    """Return the number of shared trainable parameters."""
    return layout.trained


def number_of_floats(floats: Floats, layout: Layout) -> int:
    """Return the declared size of a tensor as a number of floats.

    floats: the number, or a function that computes it from the layout.
    """
    return floats(layout) if callable(floats) else floats


@dataclass(frozen=True)
class Send:
    """A tensor that clients receive in addition to the model (`Setup.send` and `send_to_client`).

    value: called as value(server), or as value(client, server) if `to` is "client". It returns the
    tensor, or None to send nothing now. Without a function, the server state `name` is sent.
    floats: the size, a number or a function of the layout.
    to: "all" sends the tensor with each version, and "once" with a client's first job. "client"
    sends each client a tensor of its own.
    when: a function that returns True if traffic and virtual time count the tensor for a job.
    varies: True if `floats` is only the size in version 0.
    """

    name: str
    value: Callable[..., Tensor | None] | None
    floats: Floats
    to: Literal["all", "once", "client"]
    when: JobCondition
    varies: bool = False


@dataclass(frozen=True)
class Omission:
    """A declaration that some jobs do not receive or send the whole model, see `Setup.omit`.

    down: a function of the job. It returns how many of the model's floats the client does not
    receive.
    up: a function of the job. It returns how many of the model's floats the client does not send.
    """

    down: Callable[[Participation], int]
    up: Callable[[Participation], int]


@dataclass(frozen=True)
class RoundWarning:
    """A warning during the run.

    `text(row)` returns the text for a row of the history, or "" for no warning. Only the first
    warning is shown.
    """

    text: Callable[[Mapping[str, Any]], str]


@dataclass
class MethodDeclaration:
    """Everything that one method declared in `setup`.

    Most attributes are filled by the function of `Setup` with the same or a similar name, whose
    docstring explains them. The other attributes are:

    contribute, assemble: the functions `client` and `server` of `Setup.gather`.
    load: the function of `Setup.load_model`.
    correction: the argument of `Setup.corrects`.
    late_private_parameters: functions of `Setup.private_parameters`, called when all networks of
    the run are known.
    pools: `Method.pools`, about pooled data and not about pools of clients.
    """

    method: str
    networks: dict[str, ExtraNetwork] = field(default_factory=dict)
    private_parameters: list[str] = field(default_factory=list)
    late_private_parameters: list[Callable[[Mapping[str, nn.Module]], Sequence[str]]] = field(
        default_factory=list
    )
    fixed_parameters: list[str] = field(default_factory=list)  # also in private_parameters
    client_state: dict[str, Callable[[int], Any]] = field(default_factory=dict)
    server_state: dict[str, Callable[[ServerView], Tensor]] = field(default_factory=dict)
    sends: list[Send] = field(default_factory=list)
    omissions: list[Omission] = field(default_factory=list)
    uploads: dict[str, Floats] = field(default_factory=dict)
    planned_uploads: dict[str, PlannedUpload] = field(default_factory=dict)
    stages: Callable[[Plan], Cycle] | None = None
    select: Callable[[LocalJob, int, int], np.ndarray | None] | None = None
    draws: dict[str, Callable[[LocalJob, np.random.Generator], Sequence[Any]]] = field(
        default_factory=dict
    )
    train: Callable[[LocalJob], LocalResult | None] | None = None
    compressor: UpdateCode | None = None
    has_gradients: bool = True  # False: the model cannot be differentiated
    has_parameters: bool = True  # False: the model is not stored in the vector
    evaluate: Callable[[ScoredModel], Mapping[str, float]] | None = None
    load: Callable[[ScoredModel], None] | None = None
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
    needs_clients: str = ""  # the reason why no other method may pool the data
    needs_fixed_clients: str = ""  # the reason why clients may not change models
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
        """Return the initial state, by full name, of a client with `samples` training samples."""
        return {
            f"{self.method}.{name}": initial(samples) for name, initial in self.client_state.items()
        }

    def has_hook(self, hook: str) -> bool:
        """Return True if the run calls this hook of the method."""
        return hook in self.hooks and hook not in self.skipped

    def sees_updates(self) -> bool:
        """Return True if the server can learn more about clients than their mean update.

        This is true if the method calls `Setup.upload` or `Setup.gather`, or overrides `weigh` or
        `absorb`. It is also true if the method overrides `step` without `Setup.owns("step")`.
        `combine` and `Setup.change_updates` are not considered.
        """
        if self.contribute is not None or self.uploads:
            return True
        changes_mean = self.has_hook("step") and "step" not in self.owned
        return changes_mean or self.has_hook("weigh") or self.has_hook("absorb")

    @property
    def keeps_parameters(self) -> bool:
        """True if the method declares `private_parameters`, which stay on the client."""
        return bool(self.private_parameters or self.late_private_parameters)

    @property
    def keeps_client_state(self) -> bool:
        """True if the method keeps state for each client."""
        return bool(self.client_state)


@dataclass
class Setup:
    """A run before its start: the argument of `setup`, with which a method makes declarations.

    It also has facts about the run:

    - networks: the model, and the networks that methods before this one added.
    - methods: the names of the run's methods, with the hooks that each overrides.
    - rounds: the number of aggregations.
    - weighting: the setting `weighting`; None lets methods decide.
    - max_updates: the largest number of updates in one aggregation, without late updates.
    - has_stale_updates: True if an update may start from an earlier version than the current one.
    - devices: `devices.names` lists the kinds of devices, such as "phone". `devices.kinds` has each
      client's kind as a position in this list. None without a fleet, as in tests.

    SCAFFOLD declares, for example:

        run.corrects("shift")
        run.client_state("control", run.zeros)
        run.server_state("control", run.zeros)
        run.send("control")
        run.upload("control")
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
    devices: Labels | None = None
    _layout: list[Layout] = field(default_factory=list)

    # --- conditions that the method needs -----------------------------------------------------
    @property
    def model(self) -> Classifier:
        """The model of the run, or the model that a method's hook `model` returned instead."""
        return self.networks["model"]  # type: ignore[return-value]

    def others_fill(self, hook: str) -> list[str]:
        """Return the names of the other federated methods of the run that override a hook.

        The method that gets this `Setup` is left out.
        hook: the name of the hook, such as "weigh".
        """
        return [
            name for name, hooks in self.methods.items() if name != self.method and hook in hooks
        ]

    def needs(self, *needs: Need) -> None:
        """Declare what the method needs from the data and the model.

        If a need is not met, ValueError stops the run before its start.

        needs: any of these:
        - "classes": labels are classes.
        - "features": the model has features in front of a linear head.
        - "gradients": PyTorch can differentiate the model.
        - "images": inputs are images.
        - "numbers": inputs can be added up, unlike tokens.
        """
        self.declared.needs.extend(needs)

    def excludes(self, other: str, why: str) -> None:
        """Declare that the method cannot be combined with another method of the list.

        other: the name of the other method.

        why: the reason in the error, such as "it replaces the labels".
        """
        self.declared.excludes[other] = why

    def needs_clients(self, why: str) -> None:
        """Declare that the method cannot be combined with a method that pools all clients' data.

        why: the reason in the error, such as "it compares the updates of clients".
        """
        self.declared.needs_clients = why

    def needs_fixed_clients(self, why: str) -> None:
        """Declare that the method needs a topology in which clients never change their replica.

        why: the reason in the error, such as "the server has a row for each client".
        """
        self.declared.needs_fixed_clients = why

    def require(self, condition: object, text: str) -> None:
        """Raise ValueError unless the condition is true.

        text: the error, in the form "key: what is wrong. What to do.".
        """
        if not condition:
            raise ValueError(text)

    def warn(self, text: str) -> None:
        """Warn with this text before the run starts."""
        self.declared.warnings.append(text)

    def check(self, check: Callable[[Any], Sequence[str]]) -> None:
        """Call `check(run)` after all methods have made their declarations.

        `check` returns a list of warnings, or raises ValueError. `run` is a
        `raysim.api.declare.Declarations` with all networks, the layout and the declarations of each
        method.
        """
        self.declared.checks.append(check)

    def warn_if_single(self, effect: str) -> None:
        """Warn if each aggregation of the run has only one update.

        Call this function in a method that compares the updates of an aggregation.
        effect: the consequence that the warning names, such as "it does what FedAvg does".
        """
        if self.max_updates > 1:
            return
        self.warn(
            f"method '{self.method}' compares the updates of an aggregation, and each aggregation "
            f"has only one, so that {effect}. Choose a schedule that aggregates two or more "
            "updates at once, or leave the method out."
        )

    def warn_of_second_correction(self, other: str) -> None:
        """Warn if the run also uses the method `other`, which corrects the same bias.

        The bias between the clients would then be corrected twice.
        other: the name of that method.
        """
        if other in self.methods:
            self.warn(
                f"methods '{other}' and '{self.method}' both correct the differences between the "
                "updates of clients, so the correction is applied twice. Leave one of the "
                "methods out."
            )

    def warn_when(self, text: Callable[[Mapping[str, Any]], str]) -> None:
        """Warn at most once during the run, with a text that depends on a row of the history.

        text: called for each row of the history; returns a warning, or "" for none.
        """
        self.declared.round_warnings.append(RoundWarning(text))

    # --- networks and client state ------------------------------------------------------------
    def network(self, name: str, module: nn.Module, private: bool = False) -> None:
        """Add a network to the run; in a job, `job.network(name)` returns this network.

        private: True if each client has a separate copy, which is never sent.
        """
        self.declared.networks[f"{self.method}.{name}"] = ExtraNetwork(module, private)

    def private_parameters(
        self, names: Sequence[str] | Callable[[Mapping[str, nn.Module]], Sequence[str]]
    ) -> None:
        """Keep tensors on the client instead of sending and averaging them.

        names: full names such as "model.bn1.weight". If they depend on networks of later methods,
        pass a function that maps the dictionary of all networks to the names.
        """
        if callable(names):
            self.declared.late_private_parameters.append(names)
        else:
            self.declared.private_parameters.extend(names)

    def fixed_parameters(self, names: Sequence[str]) -> None:
        """Freeze parameters, such as "model.head.weight", at their initial values on all clients.

        These parameters are not sent, and clients store them only along with other client state. A
        stage that trains one raises ValueError. Fine-tuning before a score may change them in the
        scored model.
        """
        self.declared.private_parameters.extend(names)
        self.declared.fixed_parameters.extend(names)

    def client_state(self, name: str, initial: Callable[[int], Any]) -> None:
        """Keep a value for each client between jobs, which hooks see as `job.state[name]`.

        initial(samples) returns the first value; `samples` is the client's number of training
        samples. A value is a tensor of any shape, a number, bytes, or a dictionary of these. Shapes
        and keys may change. A new value is kept only if the job is aggregated.

            run.client_state("losses", torch.zeros)  # a loss for each sample
        """
        self._check_new(name, "client_state", self.declared.client_state)
        self.declared.client_state[name] = initial

    def _check_new(self, name: str, kind: str, declared: Mapping[str, object]) -> None:
        """Raise ValueError if the method has already declared a state of this name.

        kind: the name of the `Setup` function that declares the state, such as "server_state".
        declared: the states that the method has declared with this function, by name.
        """
        if name in declared:
            raise ValueError(
                f"method '{self.method}' declares {kind} '{name}' twice. Rename the second "
                "declaration."
            )

    def keep_optimizer(self) -> None:
        """Keep the state of a client's optimizer (momentum, step counts) for the client's next job.

        The setting `local.keep_optimizer` does the same.
        """
        self.declared.keeps_optimizer = True

    # --- server state and messages ------------------------------------------------------------
    def server_state(self, name: str, initial: Callable[[ServerView], Tensor]) -> None:
        """Declare a tensor that the server keeps; hooks see the tensor as `server.state[name]`.

        Checkpoints contain the tensor.
        initial: a function that gets the server, as the hooks see it. It returns the tensor's value
        before round 0.
        """
        self._check_new(name, "server_state", self.declared.server_state)
        self.declared.server_state[name] = initial

    def send(
        self,
        name: str,
        value: Callable[[ServerView], Tensor | None] | None = None,
        floats: Floats = num_parameters,
        *,
        once: bool = False,
        when: JobCondition = always,
        varies: bool = False,
    ) -> None:
        """Send a tensor to each client with the model; jobs see it as `job.received[name]`.

        value: returns the tensor for each version, or None to send nothing now. Without a function,
        the server state `name` is sent.
        floats: the size, a number or a function of the layout; by default that of the shared
        parameters.
        once: True sends the tensor with a client's first job only; later jobs see it, too. raysim
        computes it before round 0, and again when it continues a run; the value must then be the
        same.
        when: a function of a job that returns True if the job's hooks use the tensor. Traffic and
        virtual time count it only for these jobs.
        varies: True allows other sizes than `floats` after version 0. Planning then waits for the
        real size. It cannot be used with `once` or `when`.
        """
        if varies and (once or when is not always):
            raise ValueError(
                f"method '{self.method}': run.send('{name}', varies=True) sends the tensor with "
                "every job, so the arguments `once` and `when` cannot be used with it. Leave "
                "`once` and `when` out."
            )
        to: Literal["all", "once"] = "once" if once else "all"
        self.declared.sends.append(Send(name, value, floats, to, when, varies))

    def send_to_client(
        self,
        name: str,
        value: Callable[[int, ServerView], Tensor | None],
        floats: Floats = num_parameters,
        *,
        when: JobCondition = always,
    ) -> None:
        """Send each client a tensor of its own with each job: `job.received[name]` in hooks.

        The hook `personalise` also sees it, as `model.received[name]`.
        value: called as value(client, server) with the client's number. It returns the tensor, or
        None to send nothing now.
        floats: the size, a number or a function of the layout; by default that of the shared
        parameters.
        when: a function of a job that returns True if the job's hooks use the tensor. Traffic and
        virtual time count it only for these jobs.
        """
        self.declared.sends.append(Send(name, value, floats, "client", when))

    def omit(
        self, down: Callable[[Participation], int], up: Callable[[Participation], int]
    ) -> None:
        """Count fewer floats of the model for jobs whose clients do not need the whole model.

        down(job) returns how many floats of the model the client does not receive; up(job) returns
        how many the client does not send. The method must make sure that the job uses none of these
        floats.
        """
        self.declared.omissions.append(Omission(down, up))

    def upload(
        self,
        name: str,
        floats: Floats = num_parameters,
        *,
        planned: PlannedUpload | None = None,
    ) -> None:
        """Let each job send a tensor to the server, in addition to its update.

        The hook `end` sets `job.upload[name]`. Hooks on the server read
        `aggregation.uploads(name)`.
        floats: the size, a number or a function of the layout; by default that of the shared
        parameters.
        planned: None if the size is always `floats`. Otherwise `floats` is the size in version 0,
        and this function estimates all later sizes for virtual time. Its argument is the number of
        floats that this method sends to the client with `varies=True`. Traffic counts the real
        size.
        """
        self.declared.uploads[name] = floats
        if planned is not None:
            self.declared.planned_uploads[name] = planned

    def gather(
        self,
        client: Callable[[Contribution], Contributed],
        server: Callable[[Pooled, ServerView], None],
    ) -> None:
        """Collect arrays from all clients before round 0.

        client: function that returns the arrays of a client with samples, by name.
        server: function that is then called once. It gets, for each name, the list of the clients'
        arrays, ordered by client number, and this method's ServerView.
        """
        self.declared.contribute = client
        self.declared.assemble = server

    @property
    def layout(self) -> Layout:
        """The position of each tensor in the flat vector; known after `setup` of all methods."""
        return self._layout[0]

    def compress(self, compressor: UpdateCode) -> None:
        """Declare the compressor of the run; only one method in a run's list of methods may do so.

        `compressor.direction` decides whether clients' updates, the server's steps or both are
        compressed. A `Compressor` calls this function in its own `setup`.
        """
        self.declared.compressor = compressor

    def zeros(self, at: int | ServerView = 0) -> Tensor:
        """Return zeros [layout.trained]: the initial value of a client state or server state.

        Pass this function itself: `run.client_state("control", run.zeros)`.
        at: the argument that raysim passes. For a client state, it is the client's number of
        samples, and the zeros are on the CPU. For a server state, it is the `ServerView`, and the
        zeros have the device and dtype of the server's parameters.
        """
        if isinstance(at, int):
            return torch.zeros(self.layout.trained)
        return torch.zeros_like(at.params)

    def change_updates(self, change: Callable[[Arrivals, ServerView], Arrivals]) -> None:
        """Replace updates when they reach the server, before they are counted and weighted.

        change(arrivals, server) gets a list with an entry for each job of an aggregation: an
        `Update`, or a `Failure` if the job failed. It returns such a list in the same order.
        """
        self.declared.change_updates = change

    def count_clients(self, column: str, clients: Iterable[int]) -> None:
        """Add a column to the history: how many updates of an aggregation come from `clients`."""
        self.declared.counted_clients[column] = frozenset(clients)

    # --- training -----------------------------------------------------------------------------
    def train(self, function: Callable[[LocalJob], LocalResult | None]) -> None:
        """Declare a function that trains a client, in place of raysim's training steps.

        function: trains `job.model` on `job.dataset()` in any way. It may also train this method's
        networks, `job.network(name)`. If it returns None, this stands for `LocalResult()`.
        The hooks `begin`, `prepare` and `end` and all hooks of the server are called as usual. Only
        one method may declare such a function. No method may override a hook of raysim's steps,
        such as `loss`.
        """
        self.declared.train = function

    def change_labels(self, change: Callable[[Tensor], Tensor]) -> None:
        """Train with other labels than those of the data.

        change(labels) gets and returns the labels [n] of all n rows of the data set. It must keep
        the labels of test and validation samples, because scores use the returned labels.
        """
        self.declared.change_labels = change

    def without_gradients(self) -> None:
        """Declare that the model has no gradients; methods that need them raise an error."""
        self.declared.has_gradients = False

    def without_parameters(self) -> None:
        """Declare that the trained model, such as decision trees, is not stored in the flat vector.

        Methods that read or change parameters or updates then raise an error.
        """
        self.declared.has_parameters = False

    def load_model(self, load: Callable[[ScoredModel], None]) -> None:
        """Call `load(model)` before a model is scored, to load data that is not in the vector."""
        self.declared.load = load

    def evaluate(self, evaluate: Callable[[ScoredModel], Mapping[str, float]]) -> None:
        """Score sets of samples with `evaluate(model)`; only one method of a run may do so.

        The sets are the test and validation samples of each scored client, the central test set and
        each domain. raysim then computes no metrics. The function returns numbers by name, which
        should include `evaluate.metric`.
        """
        self.declared.evaluate = evaluate

    def stages(self, stages: Sequence[Stage] | Callable[[Plan], Cycle]) -> None:
        """Set the stages of the step on each batch; only one method of a run may do so.

        At most one stage of a step may have the task loss.
        stages: the stages of every step, in order. Or a function that gets the job's plan and
        returns a list with the stages of each step. If this list has fewer steps than the job, it
        is repeated.
        """
        self.declared.stages = stages if callable(stages) else lambda plan: (tuple(stages),)

    def select(self, choose: Callable[[LocalJob, int, int], np.ndarray | None]) -> None:
        """Choose the samples of each epoch; only one method of a run may do so.

        choose(job, epoch, epochs) is called for epochs 1 to `epochs`. It returns positions (int64)
        in the client's samples; None for epoch 1 means all samples in all epochs. With the setting
        `local.steps`, a job is divided into `local.phases` parts (at most `local.steps`), and each
        part counts as an epoch.
        """
        self.declared.select = choose

    def draw(
        self, name: str, draw: Callable[[LocalJob, np.random.Generator], Sequence[Any]]
    ) -> None:
        """Declare random values, one for each step of a job; raysim draws them for every job.

        name: a name of your choice. In step i = 0, 1, ..., `job.drawn(name)` is value i.
        draw: called as draw(job, generator) before a job's first step. It returns a sequence of
        `job.plan.steps` values: tensors, or Python values as `LocalJob.scratch` may contain.
        """
        self.declared.draws[name] = draw

    def corrects(self, kind: Correction) -> None:
        """Declare what the hook `gradient` does: "add" (the default), "shift" or "mix".

        "add" adds a term. "shift" adds a vector that the method keeps for the client (SCAFFOLD).
        "mix" mixes the gradient with another vector (FedCM) or sets parts of it to 0 (FlexLoRA).
        If several methods correct the gradient, the hooks are called in this order.
        """
        self.declared.correction = kind

    def targets(self, kind: Targets) -> None:
        """Declare which labels the method makes or needs.

        kind: "soft" if the method turns labels into probabilities of the classes. "integer" if the
        method needs class numbers as labels. These two kinds of methods cannot be combined.
        """
        self.declared.targets = kind

    def owns(self, *hooks: Literal["loss", "step"]) -> None:
        """Replace the task loss ("loss") or the server's step ("step"); only one method may do so.

        With "loss", this method's hook `loss` is called first, and gets 0 as the loss. With "step",
        this method's hook `step` is called last, and gets the direction that other methods' hooks
        `step` returned.
        """
        self.declared.owned.update(hooks)

    def adds_rows(self) -> None:
        """Declare that the hook `batch` adds rows to each batch.

        raysim then also trains BatchNorm networks on batches with a single sample.
        """
        self.declared.adds_rows = True

    def skip(self, *hooks: str) -> None:
        """Do not call some hooks of this method in this run.

        A method declares this if the hooks would do nothing with the method's settings.
        hooks: the names of the hooks.
        """
        self.declared.skipped.update(hooks)

    # --- scoring and the server's step --------------------------------------------------------
    def finetune(self, how: Finetune) -> None:
        """Fine-tune clients' models before they are scored; at most one method of a run may do so.

        how: the settings to use instead of `evaluate.finetune`.
        """
        self.declared.finetune = how

    def scores(self, vector: Callable[[ServerView], Tensor]) -> None:
        """Declare a vector that is scored in place of the parameters of the current version.

        Only one method of a run may do so.
        vector: called as vector(server); returns the vector [layout.shared], such as the average of
        earlier versions.
        """
        self.declared.scored = vector

    def read_updates(self) -> None:
        """Give `absorb` access to each update, including `update.moves` (`LocalJob.moves`).

        Without this declaration, workers may send sums of updates, which need less memory and time.
        """
        self.declared.reads_updates = True
