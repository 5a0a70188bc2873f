"""FedAsync: Xie et al. 2020, Algorithm 1.

Symbols: y, the model that arrives; tau, the version that it started from; t, the server's time;
sigma, a function that decreases with the staleness t - tau.
"""

from __future__ import annotations

from torch import Tensor

from textbook.plain import cross_entropy, detach, train, trainable
from textbook.world import Book, Job, Params, World


def fedasync(
    world: World,
    alpha: float,
    kind: str = "polynomial",
    a: float = 0.5,
    b: float = 4.0,
    oldest: float = float("inf"),
    decay: float = 1.0,
    rho: float = 0.0,
) -> Book:
    """Compute a run of FedAsync, which mixes each arriving model into the shared model.

    The models of an aggregation are mixed in one after another. Each model increases the staleness
    s of the later ones by 1. Integer buffers get the largest value of the arriving models.

    alpha, decay: in aggregation k = 0, 1, ..., the weight of an arriving model is alpha decay^k
    sigma(s). If the run weighs by samples, the weight is multiplied by n_i / (mean of all n), and
    is at most 1.
    kind: sigma(s): 1 ("constant"), (s + 1)^-a ("polynomial") or "hinge". "hinge" is 1 if s <= b,
    else 1 / (a (s - b) + 1).
    oldest: models with a larger s have the weight 0.
    rho: the local loss has the penalty rho / 2 times the squared distance from the received
    parameters.
    """
    versions: list[Params] = [dict(world.start)]
    mean_samples = sum(len(labels) for _, labels in world.data) / world.clients
    rates, discarded = [], []

    def sigma(s: int) -> float:
        hinge = 1 if s <= b else 1 / (a * (s - b) + 1)
        return {"constant": 1, "polynomial": (s + 1) ** -a, "hinge": hinge}[kind]

    def client(job: Job) -> Params:
        x = versions[job.version]

        def loss(p: Params, step: int, inputs: Tensor, labels: Tensor) -> Tensor:
            distance = sum((p[n] - x[n]).square().sum() for n in trainable(p))
            return cross_entropy(p, step, inputs, labels) + rho / 2 * distance

        return detach(train(world, job, x, loss))

    for version, jobs in enumerate(world.rounds):
        arrived, x, used = [client(job) for job in jobs], versions[-1], []
        for t, (job, y) in enumerate(zip(jobs, arrived, strict=True), start=version):
            rate = alpha * decay**version * sigma(t - job.version)
            if world.weighting == "samples":
                rate = min(1.0, rate * job.samples / mean_samples)
            used.append(rate if t - job.version <= oldest else 0.0)
            x = {n: (1 - used[-1]) * x[n] + used[-1] * y[n] for n in x}
        counters = [n for n in x if not world.start[n].is_floating_point()]
        versions.append(x | {n: max(y[n] for y in arrived) for n in counters})
        rates.append(sum(used) / len(used))
        discarded.append(float(used.count(0.0)))
    columns = {"fedasync.rate": rates} | (
        {"fedasync.discarded": discarded} if oldest < float("inf") else {}
    )
    return Book(versions[-1], columns=columns)
