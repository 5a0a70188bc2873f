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
- `job.start` becomes the mixed start, so that corrections by w - w^g (FedProx, SCAFFOLD) and models that are kept as
  received refer to it; the update that is averaged stays the difference to the shared model. Hooks that look at the
  received model before training (FedBSS ranks samples with it) see the mixed one if this method is listed before them.
- All entries travel in both directions, those too that no client may ever load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raysim.api.declarations import Participation
from raysim.api.method import Method
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.vectors.layout import Entry, Layout, plan_layout
from raysim.vectors.optimizer import LocalOptimizer, Optimizer

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.setup import Setup

COUNTED = ("bottom_up", "top_down")
BATCHNORM = nn.modules.batchnorm._BatchNorm
STRATEGIES = (*COUNTED, "no_bn", "no_classifier", "no_bn_no_classifier", "all", "none", "adaptive")


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


def sample_loading_policy(
    *, logits: Tensor, gumbel: Tensor, temperature: float
) -> dict[str, Tensor]:
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
        return [
            new if loads else old
            for (new, old), loads in zip(pairs, load_global.tolist(), strict=True)
        ]
    return [
        u * new + (1 - u) * old for (new, old), u in zip(pairs, load_global.unbind(), strict=True)
    ]


def model_layers(layout: Layout, model: nn.Module) -> list[str]:
    """Return the paths of modules that own tensors of the model, in the model's order."""
    entries = (*layout.entries, *layout.counters)
    owning = {_layer(entry) for entry in entries if entry.network == "model"}
    return [path for path, _ in model.named_modules() if path in owning]


def _layer(entry: Entry) -> str:
    return entry.path.rpartition(".")[0]


class PartialFed(Method):
    """strategy: what is loaded; num_loaded: how many layers, for bottom_up and top_down.

    max_staleness: load everything after an absence of more versions. adaptive only: `policy_steps`
    steps of Adam with `policy_lr` in each job, on `policy_batch` samples each; the temperature is
    multiplied by `decay` in each version, down to `floor`; sample_decision draws the layers with
    noise.
    """

    name = "partialfed"
    paper = "Sun et al., NeurIPS 2021"

    def __init__(
        self,
        strategy: Literal[
            "bottom_up",
            "top_down",
            "no_bn",
            "no_classifier",
            "no_bn_no_classifier",
            "all",
            "none",
            "adaptive",
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
        self.strategy = strategy
        self.num_loaded = num_loaded
        if num_loaded is not None:
            self.num_loaded = int(at_least("method.partialfed.num_loaded", num_loaded, 0))
        self.max_staleness = max_staleness
        if max_staleness is not None:
            self.max_staleness = int(at_least("method.partialfed.max_staleness", max_staleness, 1))
        self.policy_steps = int(at_least("method.partialfed.policy_steps", policy_steps, 1))
        self.policy_batch = int(at_least("method.partialfed.policy_batch", policy_batch, 1))
        self.policy_lr = at_least("method.partialfed.policy_lr", policy_lr, 0.0)
        self.temperature = above("method.partialfed.temperature", temperature, 0.0)
        self.decay = in_range("method.partialfed.decay", decay, above=0, most=1)
        self.floor = above("method.partialfed.floor", floor, 0.0)
        self.sample_decision = sample_decision
        self._check_strategy()

    def _check_strategy(self) -> None:
        """Raise ValueError for settings that the strategy does not use, or lacks."""
        if self.strategy in COUNTED and self.num_loaded is None:
            raise ValueError(
                f"method.partialfed.num_loaded=null with strategy={self.strategy}, which needs a "
                "number. Set it to the number of layers to load."
            )
        if self.strategy not in COUNTED and self.num_loaded is not None:
            raise ValueError(
                f"method.partialfed.num_loaded={self.num_loaded} has no effect with "
                f"strategy={self.strategy}. Set it to null."
            )
        if self.sample_decision and self.strategy != "adaptive":
            raise ValueError(
                "method.partialfed.sample_decision=true has no effect with "
                f"strategy={self.strategy}. Set strategy=adaptive."
            )

    def setup(self, run: Setup) -> None:
        """Keep the trained model on the client, and the logits of a learnt policy."""
        layers = model_layers(plan_layout({"model": run.model}), run.model)
        run.client_state("model", lambda samples: torch.empty(0))
        run.client_state("counters", lambda samples: torch.empty(0, dtype=torch.int64))
        run.client_state("version", lambda samples: torch.full((1,), -1))
        if self.strategy == "adaptive":
            run.client_state("logits", lambda samples: torch.zeros(len(layers), 2))
            run.client_state("adam", lambda samples: {})
            return
        run.skip("cost")
        if self.strategy != "all" and bool(self._fixed_mask(layers, run.model).all()):
            run.warn(
                f"method 'partialfed' with strategy={self.strategy} keeps no layer of this model "
                "and trains as FedAvg: choose another strategy or model"
            )

    def cost(self, job: Participation) -> float:
        """Return the samples of the policy's steps, from the second job on."""
        return self.policy_steps * min(self.policy_batch, job.samples) if job.earlier else 0.0

    def begin(self, job: LocalJob) -> None:
        """Start training from the mixture of the received and the kept model."""
        job.report["loaded"] = 1.0
        if not len(job.state["model"]) or self._is_stale(job):
            return
        layers, layout = model_layers(job.layout, job.model), job.layout
        loads = self._mask(job, layers)
        job.report["loaded"] = float(loads.double().mean())
        entries = [entry for entry in layout.entries if not entry.personal]
        job.start = _mixed(entries, layers, loads, job.start, job.state["model"])
        counters = [entry for entry in layout.counters if not entry.personal]
        if counters:
            received = job.vector.counters[: layout.shared_counters]
            received.copy_(_mixed(counters, layers, loads, received, job.state["counters"]))

    def end(self, job: LocalJob) -> None:
        """Keep the trained model."""
        counters = job.vector.counters[: job.layout.shared_counters]
        job.state["model"] = job.vector.shared.clone()
        job.state["counters"] = counters.clone()
        job.state["version"] = torch.full((1,), job.version)

    def personalise(self, client: PersonalModel) -> None:
        """Load what the client trained last, if it ever trained."""
        if not len(client.state["model"]):
            return
        vector = client.vector
        vector.shared.copy_(client.state["model"])
        vector.counters[: vector.layout.shared_counters].copy_(client.state["counters"])

    def _is_stale(self, job: LocalJob) -> bool:
        age = job.version - int(job.state["version"])
        return self.max_staleness is not None and age > self.max_staleness

    def _mask(self, job: LocalJob, layers: Sequence[str]) -> Tensor:
        """Return which layers this job loads: bool [L]."""
        if self.strategy == "adaptive":
            return self._learnt_mask(job, layers)
        return self._fixed_mask(layers, job.model)

    def _fixed_mask(self, layers: Sequence[str], model: nn.Module) -> Tensor:
        """Return which layers a strategy without a policy loads: bool [L]."""
        if self.num_loaded is not None:
            return fixed_loading_mask(
                num_layers=len(layers), strategy=self.strategy, num_loaded=self.num_loaded
            )
        return torch.tensor([self._loads(path, model) for path in layers], dtype=torch.bool)

    def _loads(self, path: str, model: nn.Module) -> bool:
        """Return whether a strategy by the kind of layer loads this one."""
        if self.strategy == "none":
            return False
        if "no_bn" in self.strategy and isinstance(model.get_submodule(path), BATCHNORM):
            return False
        return "no_classifier" not in self.strategy or path.partition(".")[0] != "head"

    # --- the learnt policy --------------------------------------------------------------------
    def _learnt_mask(self, job: LocalJob, layers: Sequence[str]) -> Tensor:
        """Return bool [L] after some steps on the logits; the model keeps its values."""
        logits = job.state["logits"].clone()
        optimizer = LocalOptimizer(Optimizer("adam"))
        if job.state["adam"]:
            optimizer.load(job.state["adam"], [logits])
        noise = job.stream("gumbel").gumbel(size=(self.policy_steps + 1, *logits.shape))
        gumbel = torch.from_numpy(noise).to(logits)
        temperature = max(self.floor, self.temperature * self.decay**job.version)
        job.model.eval()
        for (inputs, labels), drawn in zip(self._batches(job), gumbel, strict=False):
            policy = logits.detach().requires_grad_()
            sampled = sample_loading_policy(logits=policy, gumbel=drawn, temperature=temperature)
            relaxed = _relaxed(job, layers, sampled["soft"][:, 0])
            outputs = functional_call(job.model, relaxed, (inputs,))
            loss = job.task.objective.loss(outputs, labels)
            optimizer.step([logits], list(torch.autograd.grad(loss, [policy])), self.policy_lr)
        job.model.train()
        job.state["logits"], job.state["adam"] = logits, optimizer.save()
        last = gumbel[-1] if self.sample_decision else torch.zeros_like(logits)
        decision = sample_loading_policy(logits=logits, gumbel=last, temperature=temperature)
        return decision["load_global"]

    def _batches(self, job: LocalJob) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `policy_steps` batches of the client's samples, shuffled again in every pass."""
        generator, rows = job.stream("batches"), job.rows
        order = rows[:0]
        for _ in range(self.policy_steps):
            if not len(order):
                order = generator.permutation(rows)
            yield job.gather(order[: self.policy_batch])
            order = order[self.policy_batch :]


def _places(entries: Sequence[Entry], layers: Sequence[str]) -> list[int]:
    """Return the layer of each entry; len(layers) for entries of other networks."""
    place = {path: index for index, path in enumerate(layers)}
    return [place[_layer(entry)] if entry.network == "model" else len(layers) for entry in entries]


def _mixed(
    entries: Sequence[Entry],
    layers: Sequence[str],
    loads: Tensor,
    received: Tensor,
    previous: Tensor,
) -> Tensor:
    """Return the received values of loaded layers and the previous ones of the others.

    All are flat tensors laid out as `entries`, which cover them.
    """
    others = torch.ones(1, dtype=torch.bool)
    loads_entry = torch.cat([loads.cpu(), others])[_places(entries, layers)]
    new = [received[entry.start : entry.stop] for entry in entries]
    old = [previous[entry.start : entry.stop] for entry in entries]
    mixed = partial_initialize(global_layers=new, local_layers=old, load_global=loads_entry)
    return torch.cat(mixed)


def _relaxed(job: LocalJob, layers: Sequence[str], shares: Tensor) -> dict[str, Tensor]:
    """Return the model's shared tensors by path, mixed by the shares [L] of received values."""
    entries = [e for e in job.layout.entries if e.network == "model" and not e.personal]
    previous = job.state["model"]
    new = [job.start[e.start : e.stop].view(e.shape) for e in entries]
    old = [previous[e.start : e.stop].view(e.shape) for e in entries]
    loads = shares[_places(entries, layers)]
    mixed = partial_initialize(global_layers=new, local_layers=old, load_global=loads)
    tensors = {entry.path: tensor for entry, tensor in zip(entries, mixed, strict=True)}
    for path, module in job.model.named_modules():
        if isinstance(module, BATCHNORM) and f"{path}.running_var" in tensors:
            tensors |= _folded(path, module, tensors)
    return tensors


def _folded(
    path: str, module: nn.modules.batchnorm._BatchNorm, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return weight and bias that normalise alone, because torch has no derivative by statistics.

    They give what the module gives in eval mode.
    """
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
