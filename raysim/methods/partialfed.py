"""PartialFed: a client loads some layers of the shared model and goes on with its own previous values in the others.

Sun, Huo, Yang and Bai, "PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization" (NeurIPS
2021). With theta^g the received model, theta^c what this client trained last, and u_l in {0, 1} for each layer l,

    theta_l = u_l theta^g_l + (1 - u_l) theta^c_l            where training starts; u = 1 at the first participation

The whole model is trained, uploaded and averaged as in FedAvg; the client's own model is what it trained last. Fix sets
u by hand (`fixed_loading_mask`, or by the kind of layer). Adaptive lets each client learn it, by steps on logits pi
[L, 2] alone through a Gumbel-softmax relaxation s = softmax((pi + noise) / tau), and loads where pi_l0 >= pi_l1.

Choices where the source is silent (no code was released, and the text of the paper was not at hand: how the adaptive
policy is trained is a reconstruction)
- A layer is a module of the model that owns parameters or buffers itself; they move together, integer buffers too.
  Networks besides the model are always loaded, and what stays on the client anyway (FedBN) is no matter of this method.
- The first participation loads the shared model as it is by then; so `none` is local training, and no_bn FedBN, where
  all clients start together.
- The normalisation of no_bn is BatchNorm by its type, so that it trains as FedBN does. no_classifier keeps the head.
- The policy's batches are the client's own samples, not augmented, on streams of their own; the model is in eval mode
  and BatchNorm's running statistics are mixed like parameters. The loss is the plain cross-entropy.
- `ctx.base` becomes the mixed start, so that corrections by w - w^g (FedProx, SCAFFOLD) and models that are kept as
  received refer to it; the update that is averaged stays the difference to the shared model. Hooks that look at the
  received model before training (FedBSS ranks samples with it) see the mixed one if this method is listed before them.
- All entries travel in both directions, those too that no client may ever load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from raysim.api.declarations import Cost, Participation
from raysim.api.hooked_method import HookedMethod
from raysim.primitives.checks import at_least, one_of
from raysim.vectors.layout import Entry, Layout, plan_layout
from raysim.vectors.optimizer import LocalOptimizer, Optimizer

if TYPE_CHECKING:
    from raysim.api.context import Context, Own
    from raysim.api.hooked_method import OldSetup as Setup

COUNTED = ("bottom_up", "top_down")
STRATEGIES = (*COUNTED, "no_bn", "no_classifier", "no_bn_no_classifier", "all", "none", "adaptive")
_ADAM = "partialfed.adam."


def fixed_loading_mask(*, num_layers: int, strategy: str, num_loaded: int) -> Tensor:
    """bool [L], True = load: the first `num_loaded` layers ("bottom_up") or the last ones ("top_down").

    Raises ValueError for another strategy, and for more layers than there are.
    """
    one_of("method.partialfed.strategy", strategy, COUNTED)
    if not 0 <= num_loaded <= num_layers:
        raise ValueError(
            f"method.partialfed.num_loaded={num_loaded} does not fit a model of {num_layers} layers: set it to "
            f"{num_layers} or less"
        )
    place = torch.arange(num_layers)
    return place < num_loaded if strategy == "bottom_up" else place >= num_layers - num_loaded


def sample_loading_policy(*, logits: Tensor, gumbel: Tensor, temperature: float) -> dict[str, Tensor]:
    """{"soft": softmax((logits + gumbel) / temperature) [L, 2], "load_global": bool [L]}; column 0 means to load.

    A tie loads. The decision is that of the larger noisy logit, whatever the temperature.
    """
    noisy = logits + gumbel
    return {"soft": (noisy / temperature).softmax(1), "load_global": noisy[:, 0] >= noisy[:, 1]}


def partial_initialize(
    *, global_layers: Sequence[Tensor], local_layers: Sequence[Tensor], load_global: Tensor
) -> list[Tensor]:
    """u g + (1 - u) c for each layer, u of ``load_global`` [L]; of bool either tensor itself, to the bit."""
    pairs = list(zip(global_layers, local_layers, strict=True))
    if load_global.dtype == torch.bool:
        return [new if loads else old for (new, old), loads in zip(pairs, load_global.tolist(), strict=True)]
    return [u * new + (1 - u) * old for (new, old), u in zip(pairs, load_global.unbind(), strict=True)]


def model_layers(layout: Layout, model: nn.Module) -> list[str]:
    """Paths of the modules that own entries of the model, in the model's order."""
    owning = _owning(layout)
    return [path for path, _ in model.named_modules() if path in owning]


def _owning(layout: Layout) -> set[str]:
    return {_layer(entry) for entry in (*layout.entries, *layout.counters) if entry.network == "model"}


def _layer(entry: Entry) -> str:
    return entry.path.rpartition(".")[0]


class PartialFed(HookedMethod):
    """strategy: what is loaded; num_loaded: how many layers, for bottom_up and top_down.

    max_staleness: load everything after an absence of more versions. adaptive only: `policy_steps` steps of Adam with
    `policy_lr` a participation, on `policy_batch` samples each; the temperature is multiplied by `decay` each version,
    down to `floor`; sample_decision draws the layers with noise.
    """

    name = "partialfed"
    paper = "Sun et al., NeurIPS 2021"

    def __init__(
        self,
        strategy: Literal[
            "bottom_up", "top_down", "no_bn", "no_classifier", "no_bn_no_classifier", "all", "none", "adaptive"
        ] = "no_bn_no_classifier",
        num_loaded: int | None = None,
        max_staleness: int | None = None,
        policy_steps: int = 10,
        policy_batch: int = 32,
        policy_lr: float = 0.01,
        temperature: float = 5.0,
        decay: float = 0.965,
        floor: float = 0.1,
        sample_decision: bool = False,
    ):
        one_of("method.partialfed.strategy", strategy, STRATEGIES)
        if (num_loaded is not None) != (strategy in COUNTED):
            does = "needs a number" if num_loaded is None else "means nothing"
            fit = "the number of layers to load" if num_loaded is None else "null"
            raise ValueError(
                f"method.partialfed.num_loaded={'null' if num_loaded is None else num_loaded} {does} "
                f"with strategy={strategy}: set it to {fit}"
            )
        if not (temperature > 0 and floor > 0 and 0 < decay <= 1):
            raise ValueError(
                f"method.partialfed has temperature={temperature}, floor={floor} and decay={decay}: set the first two "
                "above 0 and the third above 0 and at most 1"
            )
        if sample_decision and strategy != "adaptive":
            raise ValueError(
                f"method.partialfed.sample_decision=true means nothing with strategy={strategy}: set strategy=adaptive"
            )
        self.strategy = strategy
        self.num_loaded = None if num_loaded is None else int(at_least("method.partialfed.num_loaded", num_loaded, 0))
        self.max_staleness = (
            None if max_staleness is None else int(at_least("method.partialfed.max_staleness", max_staleness, 1))
        )
        self.policy_steps = int(at_least("method.partialfed.policy_steps", policy_steps, 1))
        self.policy_batch = int(at_least("method.partialfed.policy_batch", policy_batch, 1))
        self.policy_lr = at_least("method.partialfed.policy_lr", policy_lr, 0.0)
        self.temperature, self.decay, self.floor = temperature, decay, floor
        self.sample_decision = sample_decision

    def check(self, setup: Setup) -> Sequence[str]:
        """More layers than the model has are refused; a strategy that keeps none is FedAvg."""
        paths = model_layers(plan_layout(setup.networks), setup.networks["model"])
        if self.strategy not in ("adaptive", "all") and bool(self._fixed(paths, setup.networks["model"]).all()):
            return (
                f"method 'partialfed' with strategy={self.strategy} keeps no layer of this model and trains as FedAvg: "
                "choose another strategy or model",
            )
        return ()

    def state(self, layout: Layout, samples: int) -> Mapping[str, Tensor]:
        """No model yet; all logits 0, which loads."""
        state = {
            "partialfed.model": torch.empty(0),
            "partialfed.counters": torch.empty(0, dtype=torch.int64),
            "partialfed.version": torch.full((1,), -1),
        }
        if self.strategy == "adaptive":
            state["partialfed.logits"] = torch.zeros(len(_owning(layout)), 2)
        return state

    def cost(self, job: Participation) -> Cost:
        """The steps of the policy, from the second participation on."""
        learns = self.strategy == "adaptive" and job.earlier > 0
        return Cost(samples=self.policy_steps * min(self.policy_batch, job.samples) if learns else 0)

    def receive(self, ctx: Context) -> None:
        """Let training start from the mixture of what was received and what was kept."""
        ctx.report["partialfed.loaded"] = 1.0
        if not len(ctx.state["partialfed.model"]) or self._is_stale(ctx):
            return
        paths, layout = model_layers(ctx.vector.layout, ctx.model), ctx.vector.layout
        loads = self._adapted(ctx, paths) if self.strategy == "adaptive" else self._fixed(paths, ctx.model)
        ctx.report["partialfed.loaded"] = float(loads.double().mean())
        shared = [entry for entry in layout.entries if not entry.personal]
        ctx.base = _mixed(shared, paths, loads, ctx.base, ctx.state["partialfed.model"])
        ctx.vector.shared.copy_(ctx.base)
        if layout.shared_counters:
            received = ctx.vector.counters[: layout.shared_counters]
            counters = [entry for entry in layout.counters if not entry.personal]
            received.copy_(_mixed(counters, paths, loads, received, ctx.state["partialfed.counters"]))

    def finish(self, ctx: Context) -> None:
        """Keep the model as trained."""
        ctx.state["partialfed.model"] = ctx.vector.shared.clone()
        ctx.state["partialfed.counters"] = ctx.vector.counters[: ctx.vector.layout.shared_counters].clone()
        ctx.state["partialfed.version"] = torch.full((1,), ctx.version)

    def personalise(self, own: Own) -> None:
        """What the client trained last; the shared model if it never did."""
        if len(own.state["partialfed.model"]):
            own.vector.shared.copy_(own.state["partialfed.model"])
            own.vector.counters[: own.vector.layout.shared_counters].copy_(own.state["partialfed.counters"])

    def _is_stale(self, ctx: Context) -> bool:
        age = ctx.version - int(ctx.state["partialfed.version"])
        return self.max_staleness is not None and age > self.max_staleness

    def _fixed(self, paths: Sequence[str], model: nn.Module) -> Tensor:
        """bool [L] of the published families."""
        if self.num_loaded is not None:
            return fixed_loading_mask(num_layers=len(paths), strategy=self.strategy, num_loaded=self.num_loaded)
        bn, classifier = (kind in self.strategy for kind in ("no_bn", "no_classifier"))
        stays = [
            self.strategy == "none"
            or (bn and isinstance(model.get_submodule(path), nn.modules.batchnorm._BatchNorm))
            or (classifier and path.partition(".")[0] == "head")
            for path in paths
        ]
        return ~torch.tensor(stays, dtype=torch.bool)

    # --- the learnt policy ---------------------------------------------------------------------------------------
    def _adapted(self, ctx: Context, paths: Sequence[str]) -> Tensor:
        """bool [L] after some steps on the logits; the model keeps its values."""
        old = ctx.state["partialfed.logits"]
        saved = {key.removeprefix(_ADAM): value for key, value in ctx.state.items() if key.startswith(_ADAM)}
        optimizer, logits = LocalOptimizer(Optimizer("adam")), old.clone()
        if saved:
            optimizer.load(saved, [logits])
        noise = ctx.stream("partialfed.gumbel").gumbel(size=(self.policy_steps + 1, *old.shape))
        gumbel = torch.from_numpy(noise).to(logits)
        temperature = max(self.floor, self.temperature * self.decay**ctx.version)
        ctx.model.eval()
        for (inputs, labels), drawn in zip(self._batches(ctx), gumbel, strict=False):
            policy = logits.detach().requires_grad_()
            soft = sample_loading_policy(logits=policy, gumbel=drawn, temperature=temperature)["soft"]
            outputs = functional_call(ctx.model, _relaxed(ctx, paths, soft[:, 0]), (inputs,))
            loss = ctx.trainer.task.objective.loss(outputs, labels)
            optimizer.step([logits], list(torch.autograd.grad(loss, [policy])), self.policy_lr)
        ctx.model.train()
        ctx.state["partialfed.logits"] = logits
        ctx.state |= {f"{_ADAM}{key}": value for key, value in optimizer.save().items()}
        last = gumbel[-1] if self.sample_decision else torch.zeros_like(logits)
        return sample_loading_policy(logits=logits, gumbel=last, temperature=temperature)["load_global"]

    def _batches(self, ctx: Context) -> Iterator[tuple[Tensor, Tensor]]:
        """`policy_steps` batches of the client's samples, shuffled anew in every pass."""
        generator, rows = ctx.stream("partialfed.batches"), ctx.trainer.partition.rows(ctx.client)
        order: np.ndarray = rows[:0]
        for _ in range(self.policy_steps):
            if not len(order):
                order = generator.permutation(rows)
            yield ctx.trainer.gather(order[: self.policy_batch])
            order = order[self.policy_batch :]


def _places(entries: Sequence[Entry], paths: Sequence[str]) -> list[int]:
    """The layer of each entry; behind the last one for entries of other networks."""
    place = {path: index for index, path in enumerate(paths)}
    return [place[_layer(entry)] if entry.network == "model" else len(paths) for entry in entries]


def _mixed(entries: Sequence[Entry], paths: Sequence[str], loads: Tensor, received: Tensor, previous: Tensor) -> Tensor:
    """A flat tensor laid out as `entries`, which cover it: by layer the received values or the kept ones."""
    each = torch.cat([loads.cpu(), torch.ones(1, dtype=torch.bool)])[_places(entries, paths)]
    new, old = ([flat[entry.start : entry.stop] for entry in entries] for flat in (received, previous))
    return torch.cat(partial_initialize(global_layers=new, local_layers=old, load_global=each))


def _relaxed(ctx: Context, paths: Sequence[str], soft: Tensor) -> dict[str, Tensor]:
    """The model's shared tensors by path, each a mixture with its layer's share [L] of the received values."""
    entries = [entry for entry in ctx.vector.layout.entries if entry.network == "model" and not entry.personal]
    new, old = (
        [flat[entry.start : entry.stop].view(entry.shape) for entry in entries]
        for flat in (ctx.base, ctx.state["partialfed.model"])
    )
    mixed = partial_initialize(global_layers=new, local_layers=old, load_global=soft[_places(entries, paths)])
    tensors = {entry.path: tensor for entry, tensor in zip(entries, mixed, strict=True)}
    for path, module in ctx.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and f"{path}.running_var" in tensors:
            tensors |= _folded(path, module, tensors)
    return tensors


def _folded(path: str, module: nn.modules.batchnorm._BatchNorm, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same normalisation in eval mode by weight and bias alone, for torch has no derivative by the statistics."""
    mean, var = tensors[f"{path}.running_mean"], tensors[f"{path}.running_var"]
    if not module.affine:
        return {f"{path}.running_mean": mean.detach(), f"{path}.running_var": var.detach()}
    weight = tensors.get(f"{path}.weight", module.weight) / (var + module.eps).sqrt()
    return {
        f"{path}.weight": weight,
        f"{path}.bias": tensors.get(f"{path}.bias", module.bias) - weight * mean,
        f"{path}.running_mean": torch.zeros_like(mean),
        f"{path}.running_var": torch.full_like(var, 1 - module.eps),
    }
