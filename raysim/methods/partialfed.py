"""PartialFed: load only some layers of the shared model; the client keeps its other layers.

Source: Sun et al., "PartialFed: Cross-Domain Personalized Federated Learning via Partial
Initialization" (NeurIPS 2021). theta^g is the received model, and theta^c the model that the client
trained last. u_l in {0, 1} decides about layer l. Training starts from

    theta_l = u_l theta^g_l + (1 - u_l) theta^c_l            u = 1 in the first job

The whole model is trained, and averaged as in FedAvg. There are two variants:

- PartialFed-Fix: the setting `strategy` fixes u.
- PartialFed-Adaptive: each client trains a policy with the logits pi [L, 2] for L layers.
  Meanwhile, the model is constant, and u is column 0 of softmax((pi + Gumbel noise) / tau).
  Afterwards, layer l is loaded if pi_l0 >= pi_l1.

A layer is a module that directly has parameters or buffers. Networks of other methods are always
loaded. If all clients take part in each round, strategy=none is local training, and strategy=no_bn
is FedBN.

Departures from the paper
- The training of the policy is a reconstruction: code and text of the paper were not available.
- The policy is trained with the task loss alone, on samples without augmentation, in eval mode.
  BatchNorm's running statistics are mixed like parameters.
- FedProx, SCAFFOLD and MOON use theta as the received model. But an update is the trained model
  minus theta^g.
- The whole model travels in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raysim.api.declarations import Participation
from raysim.api.method import Method
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.vectors.layout import Entry, Layout, plan_layout
from raysim.vectors.optimizer import LocalOptimizer, OptimizerSettings

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.setup import Setup

CountedStrategy: TypeAlias = Literal["bottom_up", "top_down"]
Strategy: TypeAlias = Literal[
    CountedStrategy, "no_bn", "no_classifier", "no_bn_no_classifier", "all", "none", "adaptive"
]

BATCHNORM = nn.modules.batchnorm._BatchNorm


def fixed_loading_mask(*, num_layers: int, strategy: str, num_loaded: int) -> Tensor:
    """Return a mask, bool [num_layers]: True for the layers that clients load from the server.

    strategy: "bottom_up" loads the first `num_loaded` layers, "top_down" the last ones.

    Raises ValueError for an unknown strategy, or more layers than the model has.
    """
    one_of("method.partialfed.strategy", strategy, get_args(CountedStrategy))
    if not 0 <= num_loaded <= num_layers:
        raise ValueError(
            f"method.partialfed.num_loaded={num_loaded}: the model has {num_layers} layers. Set "
            f"method.partialfed.num_loaded={num_layers} or less."
        )
    index = torch.arange(num_layers)
    if strategy == "bottom_up":
        return index < num_loaded
    return index >= num_layers - num_loaded


def sample_loading_policy(
    *, logits: Tensor, gumbel: Tensor, temperature: float
) -> dict[str, Tensor]:
    """Return which of L layers a policy loads, as probabilities and as decisions.

    "soft" is softmax((logits + gumbel) / temperature), [L, 2]. Column 0 is the probability that a
    layer is loaded. "load_global", bool [L], is True if logits + gumbel in column 0 is at least
    that in column 1.
    logits: [L, 2], the policy.
    gumbel: [L, 2], noise; zeros for no noise.
    """
    noisy = logits + gumbel
    return {"soft": (noisy / temperature).softmax(1), "load_global": noisy[:, 0] >= noisy[:, 1]}


def partial_initialize(
    *, global_layers: Sequence[Tensor], local_layers: Sequence[Tensor], load_global: Tensor
) -> list[Tensor]:
    """Return for each layer a mixture of the received values and the client's values.

    global_layers, local_layers: for each of L layers, the received values and the client's values.
    load_global: [L], the weight of each layer's received values: floats from 0 to 1, or bool.
    """
    layers = []
    if load_global.dtype == torch.bool:
        loads_layer = load_global.tolist()
        for new, old, loads in zip(global_layers, local_layers, loads_layer, strict=True):
            layers.append(new if loads else old)
    else:
        shares = load_global.unbind()
        for new, old, u in zip(global_layers, local_layers, shares, strict=True):
            layers.append(u * new + (1 - u) * old)
    return layers


def model_layers(layout: Layout, model: nn.Module) -> list[str]:
    """Return the paths of the model's layers: the modules that directly have tensors, in order."""
    entries = (*layout.entries, *layout.counters)
    owning = {_layer(entry) for entry in entries if entry.network == "model"}
    return [path for path, _ in model.named_modules() if path in owning]


def _layer(entry: Entry) -> str:
    return entry.path.rpartition(".")[0]


class PartialFed(Method):
    """A method that loads only some layers of the shared model.

    strategy: the layers that a client loads:

    - "all" or "none": all layers, or no layer.
    - "bottom_up" or "top_down": the first or the last `num_loaded` layers.
    - "no_bn": all layers but BatchNorm.
    - "no_classifier": all layers but the head.
    - "no_bn_no_classifier": all layers but BatchNorm and the head.
    - "adaptive": each client learns the choice.

    num_loaded: only for "bottom_up" and "top_down"; otherwise None.
    max_staleness: the client loads all layers if its last base version is more than this number of
    versions old. None sets no limit.

    For "adaptive":

    policy_steps, policy_lr, policy_batch: the number of Adam steps in each job, the learning rate,
    and the number of samples in a step.
    temperature, decay, floor: the temperature of the policy's softmax during its training. In
    version v, it is max(floor, temperature * decay^v).
    sample_decision: True adds noise to the policy's logits when layers are chosen.
    """

    name = "partialfed"
    paper = "Sun et al., NeurIPS 2021"

    def __init__(
        self,
        strategy: Strategy = "no_bn_no_classifier",
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
        one_of("method.partialfed.strategy", strategy, get_args(Strategy))
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
        """Raise ValueError if a setting is missing, or is set but not used by the strategy."""
        if self.strategy in get_args(CountedStrategy) and self.num_loaded is None:
            raise ValueError(
                f"method.partialfed.num_loaded=null: method.partialfed.strategy={self.strategy} "
                "needs the number of layers to load. Set method.partialfed.num_loaded=1 or more."
            )
        if self.strategy not in get_args(CountedStrategy) and self.num_loaded is not None:
            raise ValueError(
                f"method.partialfed.num_loaded={self.num_loaded} has no effect with "
                f"method.partialfed.strategy={self.strategy}. Set "
                "method.partialfed.num_loaded=null."
            )
        if self.sample_decision and self.strategy != "adaptive":
            raise ValueError(
                "method.partialfed.sample_decision=true has no effect with "
                f"method.partialfed.strategy={self.strategy}. Set "
                "method.partialfed.strategy=adaptive."
            )

    def setup(self, run: Setup) -> None:
        """Declare the client state: the trained model, and the logits of a learnt policy."""
        run.needs("gradients")
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
                f"method.partialfed.strategy={self.strategy}: with this strategy clients load "
                "every layer of this model from the server, so method 'partialfed' does not change "
                "training. Choose another strategy or model."
            )

    def cost(self, job: Participation) -> float:
        """Return the cost of training the policy in a job, as a number of trained samples.

        It is 0 in a client's first job. This job loads all layers, so it does not train the policy.
        """
        if not job.earlier_jobs:
            return 0.0
        return self.policy_steps * min(self.policy_batch, job.samples)

    def begin(self, job: LocalJob) -> None:
        """Start from the received model, with some layers of the client's last trained model.

        All layers are the received ones if the client has no last trained model. They also are if
        more than `max_staleness` aggregations have passed since this model's base version.
        """
        job.report["loaded"] = 1.0
        if not len(job.state["model"]) or self._is_stale(job):
            return
        layers, layout = model_layers(job.layout, job.model), job.layout
        mask = self._mask(job, layers)
        job.report["loaded"] = float(mask.double().mean())
        entries = [entry for entry in layout.entries if not entry.personal]
        job.start = _mix(entries, layers, mask, job.start, job.state["model"])
        counters = [entry for entry in layout.counters if not entry.personal]
        if counters:
            received = job.vector.counters[: layout.shared_counters]
            received.copy_(_mix(counters, layers, mask, received, job.state["counters"]))

    def end(self, job: LocalJob) -> None:
        """Store the trained model and the job's base version as client state."""
        counters = job.vector.counters[: job.layout.shared_counters]
        job.state["model"] = job.vector.shared.clone()
        job.state["counters"] = counters.clone()
        job.state["version"] = torch.full((1,), job.version)

    def personalise(self, client: PersonalModel) -> None:
        """Load the model that the client trained last, if there is one."""
        if not len(client.state["model"]):
            return
        vector = client.vector
        vector.shared.copy_(client.state["model"])
        vector.counters[: vector.layout.shared_counters].copy_(client.state["counters"])

    def _is_stale(self, job: LocalJob) -> bool:
        age = job.version - int(job.state["version"])
        return self.max_staleness is not None and age > self.max_staleness

    def _mask(self, job: LocalJob, layers: Sequence[str]) -> Tensor:
        """Return a mask of the L layers, bool [L]: True where the job loads the server's layer.

        layers: the paths of the model's layers.
        """
        if self.strategy == "adaptive":
            return self._learnt_mask(job, layers)
        return self._fixed_mask(layers, job.model)

    def _fixed_mask(self, layers: Sequence[str], model: nn.Module) -> Tensor:
        """Return a mask of the L layers, bool [L]: True where jobs load the server's layer.

        Use this for all strategies except "adaptive".
        layers: the paths of the layers in `model`.
        """
        if self.num_loaded is not None:
            return fixed_loading_mask(
                num_layers=len(layers), strategy=self.strategy, num_loaded=self.num_loaded
            )
        return torch.tensor([self._loads(path, model) for path in layers], dtype=torch.bool)

    def _loads(self, path: str, model: nn.Module) -> bool:
        """Return True if clients load this layer from the server, False if they keep their own.

        Use this for strategies that depend on the type of a layer, such as "no_bn".
        path: the path of the layer in `model`.
        """
        if self.strategy == "none":
            return False
        if "no_bn" in self.strategy and isinstance(model.get_submodule(path), BATCHNORM):
            return False
        return "no_classifier" not in self.strategy or path.partition(".")[0] != "head"

    # --- the adaptive policy ------------------------------------------------------------------
    def _learnt_mask(self, job: LocalJob, layers: Sequence[str]) -> Tensor:
        """Train the policy for `policy_steps` steps; return which layers the job loads.

        The result is bool [layers], True for a layer to load from the server. The model does not
        change.
        """
        logits = job.state["logits"].clone()
        optimizer = LocalOptimizer(OptimizerSettings("adam"))
        if job.state["adam"]:
            optimizer.load(job.state["adam"], [logits])
        noise = job.stream("gumbel").gumbel(size=(self.policy_steps + 1, *logits.shape))
        gumbel = torch.from_numpy(noise).to(logits)
        temperature = max(self.floor, self.temperature * self.decay**job.version)
        job.model.eval()
        for (inputs, labels), step_noise in zip(self._batches(job), gumbel, strict=False):
            policy = logits.detach().requires_grad_()
            sampled = sample_loading_policy(
                logits=policy, gumbel=step_noise, temperature=temperature
            )
            relaxed = _relax(job, layers, sampled["soft"][:, 0])
            outputs = functional_call(job.model, relaxed, (inputs,))
            loss = job.task.objective.loss(outputs, labels)
            gradients = list(torch.autograd.grad(loss, [policy]))
            optimizer.step([logits], gradients, self.policy_lr)
        job.model.train()
        job.state["logits"] = logits
        job.state["adam"] = optimizer.save()
        noise_at_last = gumbel[-1] if self.sample_decision else torch.zeros_like(logits)
        decision = sample_loading_policy(
            logits=logits, gumbel=noise_at_last, temperature=temperature
        )
        return decision["load_global"]

    def _batches(self, job: LocalJob) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `policy_steps` batches; shuffle all samples again when each was used once."""
        generator, rows = job.stream("batches"), job.rows
        order = rows[:0]
        for _ in range(self.policy_steps):
            if not len(order):
                order = generator.permutation(rows)
            yield job.gather(order[: self.policy_batch])
            order = order[self.policy_batch :]


def _layer_indices(entries: Sequence[Entry], layers: Sequence[str]) -> list[int]:
    """Return for each tensor the index of the layer that contains it.

    For a tensor of a network that another method added, the index is len(layers).
    entries: the tensors.
    layers: the paths of the model's layers.
    """
    index_of = {path: index for index, path in enumerate(layers)}
    indices = []
    for entry in entries:
        indices.append(index_of[_layer(entry)] if entry.network == "model" else len(layers))
    return indices


def _mix(
    entries: Sequence[Entry],
    layers: Sequence[str],
    mask: Tensor,
    received: Tensor,
    previous: Tensor,
) -> Tensor:
    """Return a flat tensor in which each layer has either its received or its previous values.

    Networks that other methods added always have the received values.
    entries: the tensors of the result, with their positions in `received` and `previous`.
    mask: for each of `layers`, True if it gets the received values.
    """
    loads_other_networks = torch.ones(1, dtype=torch.bool)
    loads_index = torch.cat([mask.cpu(), loads_other_networks])
    loads_entry = loads_index[_layer_indices(entries, layers)]
    new = [received[entry.start : entry.stop] for entry in entries]
    old = [previous[entry.start : entry.stop] for entry in entries]
    mixed = partial_initialize(global_layers=new, local_layers=old, load_global=loads_entry)
    return torch.cat(mixed)


def _relax(job: LocalJob, layers: Sequence[str], shares: Tensor) -> dict[str, Tensor]:
    """Return the shared tensors by path, mixed from received and previously trained values.

    The result is differentiable with respect to `shares`. `_fold_statistics` replaces the tensors
    of BatchNorm layers.
    shares: [layers], from 0 to 1, the weight of each layer's received values.
    """
    entries = [
        entry for entry in job.layout.entries if entry.network == "model" and not entry.personal
    ]
    previous = job.state["model"]
    new = [job.start[entry.start : entry.stop].view(entry.shape) for entry in entries]
    old = [previous[entry.start : entry.stop].view(entry.shape) for entry in entries]
    entry_shares = shares[_layer_indices(entries, layers)]
    mixed = partial_initialize(global_layers=new, local_layers=old, load_global=entry_shares)
    tensors = {entry.path: tensor for entry, tensor in zip(entries, mixed, strict=True)}
    for path, module in job.model.named_modules():
        if isinstance(module, BATCHNORM) and f"{path}.running_var" in tensors:
            tensors |= _fold_statistics(path, module, tensors)
    return tensors


def _fold_statistics(
    path: str, module: nn.modules.batchnorm._BatchNorm, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return tensors of a BatchNorm that let gradients reach its running statistics.

    torch computes no such gradients. The new weight and bias contain the statistics, so outputs in
    eval mode do not change. The new mean is 0, and the new variance 1 - eps. Statistics of a
    BatchNorm without weight and bias are returned unchanged, without gradients.
    tensors: the model's tensors by path.
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
