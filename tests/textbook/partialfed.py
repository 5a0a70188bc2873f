"""PartialFed: Sun et al. 2021, fixed masks, and a reconstruction of the adaptive policy.

At the start of a job, each layer is taken from the received model or from the client's last model.
A mask or a learned policy makes this choice. A layer is a module that has tensors.

The training of a policy uses a weighted mean of both models in eval mode. This mean includes
BatchNorm's statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.local import Optimizer
from textbook.plain import average, cross_entropy, detach, head, train, trainable, weights
from textbook.world import Book, Job, Params, World

NORM = "model.extractor.2"


@dataclass(frozen=True)
class PolicySettings:
    """Settings of the training of a client's policy.

    steps: the number of Adam's steps in a job.
    batch: the number of samples in a step.
    rate: the learning rate.
    start, decay, floor: at version t, the temperature is max(start * decay^t, floor).
    sampled: True draws for each layer one of the two models, with the policy's probabilities. False
    takes the model with the larger probability.
    """

    steps: int
    batch: int
    rate: float
    start: float
    decay: float
    floor: float
    sampled: bool


class Policy:
    """The policy of a client, which chooses for each layer from which model it is loaded.

    logits: [layers, 2], for the received model and for the client's last model.
    adam: the optimizer of these logits.
    """

    def __init__(self, layers: Sequence[str], settings: PolicySettings):
        self.layers, self.settings = layers, settings
        self.logits = torch.zeros(len(layers), 2, dtype=torch.float64)
        self.adam = Optimizer(SimpleNamespace(optimizer="adam", weight_decay=0.0))

    def learn(self, world: World, job: Job, received: Params, last_model: Params) -> Tensor:
        """Train the policy on the client's samples, and choose a model for each layer.

        Return a boolean tensor [layers]: True for layers to load from the received model, False for
        layers of the client's last model. The training minimises the cross-entropy of a mixture of
        both models, with Gumbel noise on the policy.
        """
        settings, (x, y) = self.settings, world.data[job.client]
        temperature = max(settings.floor, settings.start * settings.decay**job.version)
        draw = stream(world.seed, "partialfed.gumbel", job.client, job.turn)
        noise = torch.from_numpy(draw.gumbel(size=(settings.steps + 1, len(self.layers), 2)))
        draw, waiting = stream(world.seed, "partialfed.batches", job.client, job.turn), list[int]()
        for gumbel in noise[:-1]:
            waiting = waiting or draw.permutation(len(y)).tolist()
            chosen, waiting = waiting[: settings.batch], waiting[settings.batch :]
            pi = self.logits.clone().requires_grad_()
            soft = dict(zip(self.layers, ((pi + gumbel) / temperature).softmax(1), strict=True))
            model = {
                n: soft[layer(n)][0] * received[n] + soft[layer(n)][1] * last_model[n]
                for n in received
            }
            (slope,) = torch.autograd.grad(
                F.cross_entropy(evaluated(model, x[chosen]), y[chosen]), [pi]
            )
            self.adam.step({"pi": self.logits}, {"pi": slope}, settings.rate)
        noisy = self.logits + noise[-1] if settings.sampled else self.logits
        return noisy[:, 0] >= noisy[:, 1]


def layer(name: str) -> str:
    """Return the name of the module to which the tensor `name` belongs."""
    return name.rpartition(".")[0]


def evaluated(p: Params, x: Tensor) -> Tensor:
    """Return the network's logits in eval mode.

    Their gradient with respect to BatchNorm's statistics is defined, too.
    """
    z = F.linear(x.flatten(1), p["model.extractor.1.weight"], p["model.extractor.1.bias"])
    if f"{NORM}.weight" in p:
        z = (z - p[f"{NORM}.running_mean"]) / (p[f"{NORM}.running_var"] + 1e-5).sqrt()
        z = z * p[f"{NORM}.weight"] + p[f"{NORM}.bias"]
    return head(p, z.relu())


def partialfed(
    world: World,
    mask: Sequence[bool] = (),
    most: int = 10**9,
    mu: float = 0.0,
    policy: PolicySettings | None = None,
) -> Book:
    """Compute a run of PartialFed, in which a job loads each layer from one of two models.

    These are the received model and the last model, which the client trained in its last job.
    mask: True for layers of the received model, False for layers of the last model.
    most: the largest number of versions since the last job. After more versions, and in a first
    job, all layers come from the received model.
    mu: the weight of FedProx's term, whose reference is the start of the job.
    policy: the settings of a policy that chooses in place of `mask`; None uses `mask`.
    """
    x, layers = dict(world.start), list(dict.fromkeys(layer(name) for name in world.start))
    last_models, versions, loaded = dict[int, Params](), dict[int, int](), list[float]()
    policies = {i: Policy(layers, policy) for i in range(world.clients)} if policy else {}

    def client(job: Job) -> tuple[Params, float]:
        loads = torch.ones(len(layers), dtype=torch.bool)
        if job.client in last_models and job.version - versions[job.client] <= most:
            learnt = (
                policies[job.client].learn(world, job, x, last_models[job.client])
                if policy
                else None
            )
            loads = torch.tensor(mask) if learnt is None else learnt
        start = {
            n: x[n] if loads[layers.index(layer(n))] else last_models[job.client][n] for n in x
        }

        def loss(p: Params, step: int, inputs: Tensor, labels: Tensor) -> Tensor:
            distance = sum((p[name] - start[name]).square().sum() for name in trainable(p))
            return cross_entropy(p, step, inputs, labels) + mu / 2 * distance

        return detach(train(world, job, start, loss)), float(loads.double().mean())

    for jobs in world.rounds:
        trained = [client(job) for job in jobs]
        last_models |= {job.client: model for job, (model, _) in zip(jobs, trained, strict=True)}
        versions |= {job.client: job.version for job in jobs}
        x = average([model for model, _ in trained], weights(world, jobs))
        loaded.append(sum(share for _, share in trained) / len(jobs))

    private = {}
    for i, model in last_models.items():
        floats = [tensor.flatten() for tensor in model.values() if tensor.is_floating_point()]
        counters = [tensor.flatten() for tensor in model.values() if not tensor.is_floating_point()]
        private[i] = {
            "partialfed.model": torch.cat(floats),
            "partialfed.counters": torch.cat(counters)
            if counters
            else torch.empty(0, dtype=torch.int64),
            "partialfed.version": torch.tensor([versions[i]]),
        }
        if policy:
            private[i]["partialfed.logits"] = policies[i].logits
        if policy and policies[i].adam.steps:
            buffers = policies[i].adam.kept()
            private[i] |= {f"partialfed.adam['{name}']": value for name, value in buffers.items()}
        elif policy:  # an empty mapping
            private[i]["partialfed.adam#empty"] = torch.empty(0)
    scored = {i: last_models.get(i, x) for i in range(world.clients)}
    return Book(x, private, columns={"partialfed.loaded": loaded}, own=scored)
