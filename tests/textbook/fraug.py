"""FRAug: Chen et al. 2023, Algorithm 1 with eqs. (1)-(6).

Symbols:
- v: the real embeddings of a batch
- G: the generator
- RTNet: the network whose output, times rho, is added to an embedding
- D: the distance between two sets of embeddings
- beta: the weight of synthetic embeddings in the loss

Choices where paper and code leave questions open:
- The weights of the three losses in eq. (1) are 1 - beta, beta/2 and beta/2.
- D is computed once for a batch.
- rho and beta depend on the round of the run.
- RTNet's step has two batches: first class prototypes, then real embeddings.
- Without RTNet, a synthetic embedding is (1 - rho) v plus rho times G's output.
- Without the generator, RTNet gets noise in place of G's output.
- A batch of one sample is left out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.plain import (
    RowMean,
    average,
    copy_for_training,
    detach,
    features,
    gradients,
    head,
    optimizer,
    row_mean,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World

GENERATOR, RTNET = "fraug.generator", "fraug.rtnet"


def network(
    p: Params, name: str, rows: Tensor, labels: Tensor, classes: int, training: bool = False
) -> Tensor:
    """Return the outputs of the generator or of RTNet for a batch.

    The network's input is a row of `rows` followed by the one-hot label.
    name: `GENERATOR` or `RTNET`.
    rows: [B, R].
    labels: [B], the classes.
    training: True normalises with the statistics of the batch and updates the running ones.
    """

    def norm(layer: int, x: Tensor) -> Tensor:
        at = f"{name}.layers.{layer}"
        if training:
            p[f"{at}.num_batches_tracked"].add_(1)
        mean, var = p[f"{at}.running_mean"], p[f"{at}.running_var"]
        return F.batch_norm(x, mean, var, p[f"{at}.weight"], p[f"{at}.bias"], training)

    def linear(layer: int, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{name}.layers.{layer}.weight"], p[f"{name}.layers.{layer}.bias"])

    x = torch.cat([rows, F.one_hot(labels, classes).to(rows.dtype)], 1)
    x = linear(3, norm(1, linear(0, x)).relu())
    x = norm(4, x) if f"{name}.layers.4.weight" in p else x
    return x.relu() if name == GENERATOR else x


def ramp(t: int, last: int | None, gamma: float, form: str) -> float:
    """Return the value in round t = 0, 1, ... of a weight that changes from round to round.

    last: from round `last` on, the weight is constant; None: never.
    gamma: how fast the weight changes.
    form: "exp": exp(gamma (t - last)), with last = 0 for None. "laine_aila": exp(-gamma (1 - t /
    last)^2), with last = 1 for None. "constant": 0.5. Any other text: 1 - 1 / (gamma t + 1).
    """
    t = t if last is None else min(t, last)
    if form == "exp":
        return math.exp(gamma * (t - (last or 0)))
    if form == "laine_aila":
        return math.exp(-gamma * (1 - t / (last or 1)) ** 2)
    return 0.5 if form == "constant" else 1 - 1 / (gamma * t + 1)


def distance(a: Tensor, b: Tensor, metric: str) -> Tensor:
    """Return FRAug's distance D between two sets of embeddings, given as rows.

    metric: "mse" is the mean squared difference of a and b. "mmd_moments" is the mean squared
    difference of their means, plus that of their covariance matrices. Any other text is the squared
    MMD with five Gaussian kernels.
    """
    if metric == "mse":
        return (a - b).square().mean()
    if metric == "mmd_moments":
        return (a.mean(0) - b.mean(0)).square().mean() + (a.T.cov() - b.T.cov()).square().mean()
    rows = torch.cat([a, b])
    squares = (rows[:, None] - rows).square().sum(2)
    width = squares.detach().sum() / (len(rows) ** 2 - len(rows))
    k = sum(
        (torch.exp(-squares / (width * 2.0 ** (q - 2))) for q in range(5)),
        torch.zeros_like(squares),
    )
    return (
        k[: len(a), : len(a)].mean()
        + k[len(a) :, len(a) :].mean()
        - 2 * k[: len(a), len(a) :].mean()
    )


def distance_of_labels(
    a: Tensor, b: Tensor, metric: str, a_labels: Tensor, b_labels: Tensor
) -> Tensor:
    """Return the distance between two sets of embeddings whose classes are known.

    metric: "mmd_classes" is the squared MMD within a class, averaged over the classes in both sets;
    0 without such a class. For other metrics, `distance` compares all embeddings.
    """
    if metric != "mmd_classes":
        return distance(a, b, metric)
    both = set(a_labels.tolist()) & set(b_labels.tolist())
    parts = [distance(a[a_labels == k], b[b_labels == k], "mmd") for k in both]
    return torch.stack(parts).mean() if parts else a.sum() * 0


def entropy(scores: Tensor) -> Tensor:
    """Return the mean entropy of the samples' softmax probabilities."""
    return torch.distributions.Categorical(logits=scores).entropy().mean()


def mean_norm(rows: Tensor) -> float:
    """Return the mean norm of the rows."""
    return float(rows.detach().square().sum(1).sqrt().mean())


def mean_of(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def fraug(world: World, rounds: int | None = None, **settings: Any) -> Book:
    """Compute a run of FRAug. Each batch has three steps: for classifier, generator and RTNet.

    rounds: the round from which rho, beta and the weight in the update of prototypes are constant;
    None: no such round.
    settings: arguments of raysim's class `FRAug`.
    """
    get = {
        "noise_dim": 256,
        "noise": "normal",
        "gamma": 0.01,
        "ramp": "exp",
        "weight": 0.5,
        "residual": None,
        "use_generator": True,
        "use_rtnet": True,
        "generator_norm": "shared",
        "prototype_weight": 0.3,
        "prototype_ramp": False,
        "keep_optimizer": True,
        "generator_lam": 1.0,
        "rtnet_lam": 1.0,
        "generator_metric": "mmd",
        "rtnet_metric": "mmd",
        "generator_lr_factor": 5.0,
        "rtnet_lr_factor": 2.5,
    } | settings
    has_g, has_h, classes = get["use_generator"], get["use_rtnet"], world.classes
    x, mine = (
        dict(world.start),
        [{n: world.start[n] for n in world.personal} for _ in range(world.clients)],
    )
    prototypes = [torch.zeros_like(x["model.head.weight"]) for _ in range(world.clients)]
    optimizers: dict[int, tuple[Any, Any, Any]] = {}
    count: dict[int, int] = {}

    hidden, dim = get["noise_dim"], x["model.head.weight"].shape[1]
    assert not has_h or x[f"{RTNET}.layers.0.weight"].shape == (
        hidden,
        (dim if has_g else hidden) + classes,
    )
    local = ("model.", RTNET, *([GENERATOR] if get["generator_norm"] == "local" else []))
    norms = {n.rpartition(".")[0] for n in x if n.endswith("running_mean")}
    assert world.personal == {
        n
        for n in x
        if n.startswith(local) and (n.startswith(RTNET) or n.rpartition(".")[0] in norms)
    }

    def client(job: Job) -> tuple[Params, list[float], dict[str, float]]:
        generator = stream(world.seed, "draws.fraug", job.client, job.turn)
        draw = generator.random if get["noise"] == "uniform" else generator.standard_normal
        p, t, i, losses = (
            copy_for_training(x | mine[job.client]),
            job.version,
            job.client,
            RowMean(),
        )
        seen: dict[str, list[float]] = {}
        fresh = [
            optimizer(world, job, f)
            for f in (1.0, get["generator_lr_factor"], get["rtnet_lr_factor"])
        ]
        for new, old in zip(
            fresh, optimizers.get(i, ()), strict=False
        ):  # buffers go on, rates are those of this round
            new.buffers = old.buffers
        optimizers[i] = tuple(fresh) if get["keep_optimizer"] else ()
        count[i] = count.get(i, 0) + sum(len(y) > 1 for _, y in job.batches)
        rho = ramp(t, rounds, get["gamma"], get["ramp"])
        beta, strength = (
            min(get["weight"], rho),
            rho if get["residual"] is None else get["residual"],
        )
        mu = get["prototype_weight"] * (
            ramp(t, rounds, 5.0, "laine_aila") if get["prototype_ramp"] else 1.0
        )

        def synthetic(
            v: Tensor, z: Tensor, labels: Tensor, rho: float, training: bool = False
        ) -> Tensor:
            source = network(p, GENERATOR, z, labels, classes).detach() if has_g else z
            return (
                v + rho * network(p, RTNET, source, labels, classes, training)
                if has_h
                else (1 - rho) * v + rho * source
            )

        for s, ((inputs, y), drawn) in enumerate(zip(job.batches, job.draws, strict=True)):
            size = len(y)
            z = torch.from_numpy(draw((5, size, hidden), dtype=np.float32))
            assert torch.equal(z, drawn["fraug.noise"])
            if size == 1:
                continue
            z = z.to(inputs.dtype)
            turn = torch.tensor(
                [((t * len(job.batches) + s) * size + b) % classes for b in range(size)]
            )
            v = features(p, inputs)
            c = prototypes[i] = prototypes[i].clone()
            for k in y.unique():
                c[k] = (1 - mu) * c[k] + mu * v.detach()[y == k].mean(0)
            around = [
                synthetic(v, z[0], y, strength).detach(),
                synthetic(c[turn], z[1], turn, strength).detach(),
            ]
            real = F.cross_entropy(head(p, v), y)
            made = F.cross_entropy(head(p, around[0]), y) + F.cross_entropy(
                head(p, around[1]), turn
            )
            loss = (1 - beta) * real + beta / 2 * made
            losses.add(loss, inputs)
            if beta:  # else no embeddings are made
                right = [head(p, e).argmax(1) == k for e, k in zip(around, (y, turn), strict=True)]
                seen.setdefault("fraug.synthetic_accuracy", []).append(
                    float(torch.cat(right).to(v.dtype).mean())
                )
                seen.setdefault("fraug.real_norm", []).append(mean_norm(v))
            if beta and has_g:
                both = [
                    network(p, GENERATOR, z[k], labels, classes)
                    for k, labels in enumerate((y, turn))
                ]
                seen.setdefault("fraug.generated_norm", []).append(mean_norm(torch.cat(both)))
            fresh[0].step(p, gradients(loss, p, trainable(p)))

            v = features(p, inputs, training=False).detach()
            if has_g:
                e = network(p, GENERATOR, z[2], turn, classes, training=True)
                metric = get["generator_metric"]
                away = distance_of_labels(e, c[turn] if metric == "mse" else v, metric, turn, y)
                loss = F.cross_entropy(head(p, e), turn) - get["generator_lam"] * away
                fresh[1].step(p, gradients(loss, p, trainable(p, GENERATOR)))
            if has_h:
                hat, tilde = (
                    synthetic(c[turn], z[3], turn, 1.0, True),
                    synthetic(v, z[4], y, 1.0, True),
                )
                metric = get["rtnet_metric"]
                near = distance_of_labels(tilde, v, metric, y, y)
                near = near + distance_of_labels(hat, c[turn], metric, turn, turn)
                loss = (
                    -(entropy(head(p, tilde)) + entropy(head(p, hat))) / 2
                    + get["rtnet_lam"] / 2 * near
                )
                fresh[2].step(p, gradients(loss, p, trainable(p, RTNET)))
        return detach(p), losses, {name: mean_of(values) for name, values in seen.items()}

    train_loss = []
    looks: dict[str, list[float]] = {}
    for jobs in world.rounds:
        trained = [client(job) for job in jobs]
        for job, (p, _, _) in zip(jobs, trained, strict=True):
            mine[job.client] = {name: p[name] for name in world.personal}
        x = average([p for p, _, _ in trained], weights(world, jobs))
        train_loss.append(row_mean(losses for _, losses, _ in trained))
        for name in ("fraug.real_norm", "fraug.generated_norm", "fraug.synthetic_accuracy"):
            known = [seen[name] for _, _, seen in trained if name in seen]
            looks.setdefault(name, []).append(mean_of(known) if known else math.nan)

    private: dict[int, Params] = {}
    names = sorted(
        trainable(x), key=lambda name: name in world.personal
    )  # shared parameters first, else as they are
    for i in count:
        private[i] = mine[i] | {"fraug.prototypes": prototypes[i]}
        stages = zip(
            ("task", GENERATOR, RTNET),
            (names, trainable(x, GENERATOR), trainable(x, RTNET)),
            strict=True,
        )
        for sgd, (stage, stage_names) in zip(optimizers[i], stages, strict=False):
            if stage_names and count[i]:
                private[i][f"local.kept.{stage}/steps"] = torch.tensor([count[i]])
            if sgd.buffers:
                private[i][f"local.kept.{stage}/first"] = torch.cat(
                    [sgd.buffers[n].flatten() for n in stage_names]
                )
    models = {
        i: {n: t for n, t in (x | mine[i]).items() if n.startswith("model.")}
        for i in range(world.clients)
    }
    return Book(x, private, columns={"train_loss": train_loss} | looks, own=models)
