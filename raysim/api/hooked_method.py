"""The earlier hooks of methods, on top of the present ones.

A method that still has them extends `HookedMethod`; `setup` translates each hook. This file goes
when the last such method is converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn

from raysim.api.context import Batch, Contribution, Outputs, Stage
from raysim.api.declarations import Cost, Download, Finetune, Network, Participation, Task
from raysim.api.method import Method
from raysim.api.setup import Declared, Need, RoundWarning, Setup
from raysim.vectors.layout import Layout

if TYPE_CHECKING:
    from raysim.api.context import Context, Own, Plan
    from raysim.api.declarations import Local
    from raysim.api.server_view import Aggregation, Server


class HookedMethod(Method):
    """One part of a federated algorithm. `ctx` is the job at work, `server` the coordinator's side.

    Besides hooks a class may say of itself:
    name: what it is called; every class has one. paper: where it is from, if from a paper.
    weighting: the raw weights that it asks for, unless the configuration names others.
    needs: what it can do nothing without: "classes" as labels, "features" that a head turns into outputs, "images", or
    "numbers", inputs that can be added up and have a gradient.
    targets: "soft" if it makes labels soft, "integer" if it needs them whole.
    excludes: other methods, and why the two do not combine.
    needs_single_updates: whether its `absorb` reads deltas, and `moves` of updates.
    keep_optimizer: whether it keeps the optimisers of a client itself, as `local.keep_optimizer` does.
    pools: whether it trains one model on the clients' pooled data.
    """

    needs: ClassVar[frozenset[Need]] = frozenset()
    targets: ClassVar[Literal["any", "soft", "integer"]] = "any"
    excludes: ClassVar[Mapping[str, str]] = {}
    needs_single_updates: ClassVar[bool] = False
    keep_optimizer: bool = False
    @property
    def idle(self) -> frozenset[str]:
        """Slots that its class fills and that do nothing at its settings."""
        return frozenset()

    # --- declared once -------------------------------------------------------------------------------------------
    def networks(self, task: Task, model: nn.Module) -> Mapping[str, Network]:
        """Networks besides the model, by full name ("fedbr.projector"). torch's generator is seeded for them."""
        return {}

    def personal(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """Names of tensors ("model.bn1.weight") that stay on the client."""
        return ()

    def state(self, layout: Layout, samples: int) -> Mapping[str, Tensor]:
        """Initial private state of a client with so many training samples, by full name. Never changed in place."""
        return {}

    def stages(self, plan: Plan) -> Sequence[tuple[Stage, ...]]:
        """Exclusive. A cycle of iterations, each some stages; at most one stage of an iteration has the task loss."""
        return ((Stage(),),)

    def draws(self, plan: Plan, generator: np.random.Generator) -> Mapping[str, Sequence[Tensor]]:
        """Random values drawn before the first step, one per step, by full name; read with `ctx.drawn(name)`."""
        return {}

    def cost(self, job: Participation) -> Cost:
        """What a job costs besides training on all its samples and moving the vector.

        Every float that travels besides it is declared here: also what `send` and `upload` move. It follows from the
        job alone, and never from a result of training.
        """
        return Cost()

    def require(self, local: Local) -> Mapping[str, object]:
        """Return the settings that the method cannot run without."""
        return {}

    def settings(self, local: Local) -> Mapping[str, object]:
        """Translate `require`."""
        return self.require(local)

    def check(self, setup: OldSetup) -> Sequence[str]:
        """Sentences to warn with before the run starts; raises ValueError to refuse it."""
        return ()

    # --- before round 0 ------------------------------------------------------------------------------------------
    def contribute(self, client: Contribution) -> Mapping[str, np.ndarray]:
        """What each client sends once, before round 0, by full name."""
        return {}

    def assemble(self, parts: Mapping[str, Sequence[np.ndarray]], server: Server) -> None:
        """Turn the contributions (a list per name, by client id) into server state."""

    # --- once per job --------------------------------------------------------------------------------------------
    def receive(self, ctx: Context) -> None:
        """After the broadcast was loaded, before training."""

    def select(self, ctx: Context, epoch: int, epochs: int) -> np.ndarray | None:
        """Exclusive. Positions in the client's samples that epoch 1..epochs trains on; None: all, in this job."""
        return None

    def planned(self, ctx: Context) -> None:
        """After the batches were planned (`ctx.plan`) and `draws` drawn, before the first step: what steps will need.

        What a step uses of the client itself, or draws with knowledge of what was received, is put into `ctx.kept` or
        `ctx.draws` here.
        """

    def finish(self, ctx: Context) -> None:
        """After training: fill `ctx.upload` and replace entries of `ctx.state`."""

    # --- once per batch: tensors in, tensors out -----------------------------------------------------------------
    def transform(self, ctx: Context, batch: Batch) -> Batch:
        """Change inputs and targets."""
        return batch

    def rows(self, ctx: Context, batch: Batch) -> Tensor | None:
        """More inputs [R, ...] for the model's forward pass; their features are in `out.rows(name)`, and only there."""
        return None

    def logits(self, ctx: Context, logits: Tensor, batch: Batch) -> Tensor:
        """Exclusive. Change the logits of the task loss; everything else sees the raw ones."""
        return logits

    def loss(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """Exclusive. Replace the task loss."""
        raise NotImplementedError

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """A scalar that is added to the task loss."""
        raise NotImplementedError

    def perturb(self, ctx: Context, params: Tensor, grad: Tensor, gradient_at: Callable[[Tensor], Tensor]) -> Tensor:
        """Exclusive. The gradient to use in place of `grad`, made of gradients at shifted points (SAM).

        params, grad [n]: all parameters that `ctx.stage` trains, shared and personal ones, and their gradient; not to
        be changed. gradient_at(shift) is the gradient [n] at params + shift: the same batch, random draws and terms of
        all methods in one more forward and backward pass. Afterwards parameters, BatchNorm's statistics and private
        state are what they were. `gradient`, clipping and the optimiser act on what is returned.
        """
        return grad

    # The order of kinds in which corrections apply: "add" to the gradient, "shift" it, "mix" it.
    correction: ClassVar[str] = "add"

    def gradient(self, ctx: Context, grad: Tensor, part: slice) -> None:
        """Correct, in place, the gradient of the shared parameters `ctx.vector.data[part]` that `ctx.stage` trains."""

    def watch(self, row: Mapping[str, int | float | None]) -> str:
        """A sentence to warn with once a round is done, from its row of the history; "" where nothing is amiss.

        Asked of every round until it says something, and then no more.
        """
        return ""

    # --- scoring -------------------------------------------------------------------------------------------------
    def predict(self, logits: Tensor) -> Tensor:
        """Exclusive. Logits [B, C'] to the scores [B, C] that evaluation ranks."""
        return logits

    def personalise(self, own: Own) -> None:
        """Change `own.vector` into the client's own model; it holds the shared part and the client's personal one.

        For clients that never trained, too. Touches nothing else: training goes on as if nobody had looked.
        """

    def finetuning(self) -> Finetune | None:
        """Exclusive. Fine-tuning that it asks evaluation for, in place of `evaluate.finetune`."""
        return None

    # --- on the server -------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        """Create the method's entries in `server.state`."""

    def send(self, server: Server) -> Download:
        """What clients receive besides the vector, in `ctx.download`; asked for once, after `start`."""
        return Download()

    def weigh(self, aggregation: Aggregation, server: Server) -> Aggregation:
        """Change the weights, or what the weighted sum is divided by, with `aggregation.reweighted`; chains."""
        return aggregation

    def combine(self, aggregation: Aggregation, server: Server) -> Tensor:
        """Exclusive. Updates to one direction [layout.trained], or [layout.shared] to decide on buffers as well."""
        raise NotImplementedError

    def mix(self, direction: Tensor, aggregation: Aggregation, server: Server) -> Tensor:
        """Change the combined direction [layout.trained], in place or into another tensor, or only look at it; chains.

        The method that fills `apply` comes first and sees what was combined; the others follow in the list's order.
        """
        return direction

    def apply(self, direction: Tensor, out: Tensor, aggregation: Aggregation, server: Server) -> None:
        """Exclusive. Write the parameters that follow on `server.params` into `out`; all are [layout.trained]."""
        raise NotImplementedError

    def absorb(self, aggregation: Aggregation, server: Server) -> None:
        """Update `server.state` after the step."""

    def scored(self, server: Server) -> Tensor:
        """Exclusive. The shared vector [layout.shared] that evaluation uses."""
        return server.vector

    # --- translation -----------------------------------------------------------------------------
    def setup(self, run: Setup) -> None:
        """Declare what the earlier hooks say."""
        declared = run.declared
        declared.full_names = True
        declared.task = run.task
        declared.needs = list(self.needs)
        declared.targets = self.targets
        declared.excludes = dict(self.excludes)
        declared.correction = self.correction  # type: ignore[assignment]
        declared.reads_updates = self.needs_single_updates
        declared.old_keeps_optimizer = self.keep_optimizer
        if overrides(self, "networks"):
            declared.networks |= self.networks(run.task, run.model)
        if overrides(self, "personal"):
            declared.late_private_parameters.append(self.personal)
        if overrides(self, "state"):
            declared.initial_state = lambda layout, samples: dict(self.state(layout, samples))
        if overrides(self, "stages"):
            declared.stages = self.stages
        if overrides(self, "select"):
            declared.select = self.select  # type: ignore[assignment]
        if overrides(self, "contribute"):
            declared.contribute, declared.assemble = self.contribute, self.assemble
        if overrides(self, "finetuning"):
            declared.finetune = self.finetuning()
        if overrides(self, "scored"):
            declared.scored = self.scored
        if overrides(self, "watch"):
            declared.round_warnings.append(RoundWarning(self.watch))
        for slot in OLD_SLOTS:
            if overrides(self, slot) and hasattr(declared, f"old_{slot}"):
                setattr(declared, f"old_{slot}", getattr(self, slot))
        self._declare_hooks(declared)

    def _declare_hooks(self, declared: Declared) -> None:
        hooks: dict[str, Callable[..., Any]] = {}
        for hook, slot in _SAME.items():
            if overrides(self, slot):
                hooks[hook] = getattr(self, slot)
        if overrides(self, "transform") or overrides(self, "rows"):
            hooks["batch"] = self._translated_batch
        if any(overrides(self, slot) for slot in ("logits", "loss", "term")):
            hooks["loss"] = self._translated_loss
            if overrides(self, "logits") or overrides(self, "loss"):
                declared.owned.add("loss")
        if overrides(self, "apply"):
            declared.owned.add("step")
        declared.hooks = hooks

    def _translated_batch(self, ctx: Context, batch: Batch) -> Batch:
        if overrides(self, "transform"):
            batch = self.transform(ctx, batch)
        return batch

    def _translated_loss(self, ctx: Context, out: Outputs, loss: Tensor) -> Tensor:
        if overrides(self, "loss"):
            loss = self.loss(ctx, out, out.batch)
        elif overrides(self, "logits"):
            logits = self.logits(ctx, out.logits, out.batch)
            loss = ctx.trainer.task.objective.loss(logits, out.batch.targets)
        if overrides(self, "term"):
            loss = loss + self.term(ctx, out, out.batch)
        return loss


_SAME = {
    "begin": "receive",
    "end": "finish",
    "gradient": "gradient",
    "perturb": "perturb",
    "personalise": "personalise",
    "weigh": "weigh",
    "combine": "combine",
    "absorb": "absorb",
}


@dataclass(frozen=True)
class OldSetup:
    """What a run is made of, as a method sees it before the start.

    methods: all of the list. size: most results in one aggregation. stale: whether results may arrive that started from
    an earlier version than the current one.
    """

    task: Task
    local: Local
    networks: Mapping[str, nn.Module]
    layout: Layout
    methods: Sequence[Any]
    size: int
    stale: bool
    declarations: Any = None

    def warn_of_second_correction(self, name: str, other: str) -> tuple[str, ...]:
        """For a method that corrects the same bias as another one: a warning where both are in the list."""
        if all(method.name != other for method in self.methods):
            return ()
        return (f"methods '{other}' and '{name}' correct the same bias, so it is corrected twice: leave one out",)

    def warn_if_single(self, name: str, effect: str) -> tuple[str, ...]:
        """For a method that compares the results of an aggregation: a warning where each has only one."""
        if self.size > 1:
            return ()
        return (
            f"method '{name}' compares the results of an aggregation, and each has only one, so that {effect}: choose "
            "a schedule that aggregates two or more at once, or leave the method out",
        )


OLD_SLOTS = tuple(
    name
    for name, value in vars(HookedMethod).items()
    if callable(value) and not name.startswith("_") and name not in ("setup", "settings")
) + ("model",)


def overrides(method: Method, slot: str) -> bool:
    """Return whether a method fills one of the earlier hooks."""
    base = HookedMethod if isinstance(method, HookedMethod) and slot in OLD_SLOTS else Method
    if not hasattr(base, slot):
        return False
    if getattr(type(method), slot) is getattr(base, slot):
        return False
    return slot not in getattr(method, "idle", ())
