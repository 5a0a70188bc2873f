"""FedMix: Mixup with means of other clients' samples, as its first-order Taylor expansion; NaiveMix mixes with them.

Yoon, Shin, Hwang and Yang, "FedMix: Approximation of Mixup under Mean Augmented Federated Learning" (ICLR 2021),
Proposition 1 and the local update. A sample (x, y) meets a pair (xbar, ybar) of means; with u = (1 - lam) x,

    l1 = (1 - lam) CE(f(u), y)    l2 = lam CE(f(u), ybar)    l3 = lam <grad_u l1, xbar>    loss = mean of l1 + l2 + l3
    NaiveMix: x~ = (1 - lam) x + lam xbar,  loss = mean of (1 - lam) CE(f(x~), y) + lam CE(f(x~), ybar)

Choices where the sources differ or are silent
- l3 is a mean over the batch of the samples' own products (paper). The public implementations divide by the batch size
  twice, which all but removes the term: taylor_scale="public".
- Its factor is lam (1 - lam), as in the algorithm and by Taylor's theorem; the paper's formula prints lam.
- The pool of pairs is built once, of all clients with samples; a step draws from it without replacement, a pair per
  sample (FedBR's comparison) or one for the batch ("one", original). A mean is of `samples_per_mean` samples, drawn
  with replacement (FedBR's code); the original averages all samples of a client.
- fresh=True draws means of clients' raw data at every step, as FedBR's code does. No client could: it is there to
  reproduce numbers, and what it would move is not counted.
- With BatchNorm a row's gradient is that of the whole batch's loss. The reported task loss is l1 + l2 + l3.

The gradient of l3 is a second derivative, which fused attention kernels do not have; Cct7 writes its attention out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.api.method import Method
from raysim.data.partition import CSR
from raysim.methods.mixup import soft_targets
from raysim.primitives.checks import at_least, between

if TYPE_CHECKING:
    from raysim.api.context import Batch, Contribution, Outputs
    from raysim.api.declarations import Participation
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import ServerView
    from raysim.api.setup import Setup


def mean_pairs(
    inputs: Tensor, labels: Tensor, num_classes: int, indices: Tensor
) -> dict[str, Tensor]:
    """Row r: the means of the samples ``indices[r]`` and of their one-hot labels.

    ``inputs`` (n, ...), ``labels`` int64 (n,), ``indices`` int64 (R, M) -> {"inputs" (R, ...), "targets" (R, C)}.
    """
    targets = soft_targets(labels, num_classes, torch.promote_types(inputs.dtype, torch.float32))
    return {"inputs": inputs[indices].mean(dim=1), "targets": targets[indices].mean(dim=1)}


def label_terms(
    logits: Tensor, labels: Tensor, mean_targets: Tensor, lam: float
) -> tuple[Tensor, Tensor]:
    """l1 and l2, means over the batch: ``logits`` (B, C), ``labels`` int64 (B,), ``mean_targets`` (B or 1, C or fewer).

    Outputs beyond those of ``mean_targets`` have no share in them.
    """
    targets = F.pad(mean_targets, (0, logits.shape[1] - mean_targets.shape[1])).expand_as(logits)
    return (1 - lam) * F.cross_entropy(logits, labels), lam * F.cross_entropy(logits, targets)


def loss_terms(
    logits: Tensor,
    inputs: Tensor,
    labels: Tensor,
    mean_inputs: Tensor,
    mean_targets: Tensor,
    lam: float,
    taylor_scale: str = "paper",
) -> dict[str, Tensor]:
    """l1, l2, l3 and their sum, as "local", "mean_target", "taylor" and "total", all with gradient.

    ``logits`` (B, C) = f(u) of ``inputs`` u (B, ...), which require gradient; ``mean_inputs`` (B or 1, ...).
    """
    local, mean_target = label_terms(logits, labels, mean_targets, lam)
    (gradient,) = torch.autograd.grad(local, inputs, create_graph=True)
    taylor = (
        lam * (gradient * mean_inputs).sum()
    )  # the mean over the batch: l1 is one, so the rows carry 1/B
    if taylor_scale == "public":
        taylor = taylor / len(inputs)
    return {
        "local": local,
        "mean_target": mean_target,
        "taylor": taylor,
        "total": local + mean_target + taylor,
    }


def raw_rows(
    partition: CSR, steps: int, rows: int, samples: int, generator: np.random.Generator
) -> np.ndarray:
    """Rows of the data set, int64 [steps, rows, samples]: a client that has any for each row, samples of it for each.

    Both uniformly with replacement.
    """
    clients = generator.choice(_owners(partition), size=(steps, rows, 1))
    first = partition.offsets[clients]
    places = generator.integers(partition.offsets[clients + 1] - first, size=(steps, rows, samples))
    found: np.ndarray = partition.indices[first + places]
    return found


@functools.lru_cache(maxsize=2)
def _owners(partition: CSR) -> np.ndarray:
    """int64: the clients that have samples; looked for once, for all jobs."""
    return np.flatnonzero(partition.counts)


class FedMix(Method):
    """lam: how much of the means is mixed in; 0 is FedAvg. means: pairs that each client sends before round 0.

    pairs: one for "each" sample of a step or "one" for all. naive: NaiveMix. taylor_scale, fresh: see above.
    """

    name = "fedmix"
    paper = "Yoon et al., ICLR 2021"

    def __init__(
        self,
        lam: float = 0.1,
        means: int = 64,
        samples_per_mean: int = 10,
        pairs: Literal["each", "one"] = "each",
        naive: bool = False,
        taylor_scale: Literal["paper", "public"] = "paper",
        fresh: bool = False,
    ):
        self.lam = between("method.fedmix.lam", lam, 0.0, 1.0)
        self.means = int(at_least("method.fedmix.means", means, 1))
        self.samples_per_mean = int(at_least("method.fedmix.samples_per_mean", samples_per_mean, 1))
        self.pairs, self.naive, self.taylor_scale, self.fresh = pairs, naive, taylor_scale, fresh

    def setup(self, run: Setup) -> None:
        """Own the loss, and collect and send the pool unless pairs are of raw data."""
        run.needs("classes", "numbers")
        run.targets("integer")
        if not self.lam:
            run.skip("batch", "loss")
            return
        run.owns("loss")
        if self.fresh:
            return
        pool = self.means * run.clients
        run.require(
            self.pairs == "one" or run.local.batch <= pool,
            f"local.batch={run.local.batch} is more than the pool of {pool} mean pairs from "
            f"{run.clients} clients with samples. Set method.fedmix.means="
            f"{-(-run.local.batch // max(1, run.clients))} (now {self.means}) or more.",
        )
        run.gather(self.own_means, self.join_means)
        run.send("inputs", floats=pool * math.prod(run.task.shape), once=True)
        run.send("targets", floats=pool * run.task.num_classes, once=True)
        run.draw("chosen", self.draw_pairs)

    def cost(self, job: Participation) -> float:
        """Return as much again as a pass, for the second derivative.

        In forward passes a step is 1 and a backward pass of 2. The gradient of the inputs adds 1,
        and differentiating it 2, which makes 6 for 3.
        """
        return job.trained if self.lam and not self.naive else 0.0

    # --- the pool ------------------------------------------------------------------------------
    def own_means(self, client: Contribution) -> Mapping[str, np.ndarray]:
        """Return pairs of means of the client's own samples, drawn with replacement."""
        size = (self.means, self.samples_per_mean)
        drawn = client.generator.integers(len(client.inputs), size=size)
        indices = torch.from_numpy(drawn).to(client.inputs.device)
        means = mean_pairs(client.inputs, client.labels, client.num_classes, indices)
        return {name: value.cpu().numpy() for name, value in means.items()}

    def join_means(self, parts: Mapping[str, Sequence[np.ndarray]], server: ServerView) -> None:
        """Make the pool: all clients' pairs, one after another."""
        for name in ("inputs", "targets"):
            server.state[name] = torch.from_numpy(np.concatenate(parts[name]))

    # --- the step ------------------------------------------------------------------------------
    def draw_pairs(self, job: LocalJob, _: np.random.Generator) -> Sequence[Tensor]:
        """Draw rows of the pool [R] for each step, different ones within a step."""
        generator, pool = job.stream("pairs"), len(job.received["inputs"])
        rows = self._largest(job)
        chosen = [generator.choice(pool, size=rows, replace=False) for _ in job.plan.sizes]
        return torch.from_numpy(np.stack(chosen)).unbind()

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        """Return u, by which the loss is differentiated, or NaiveMix's x~."""
        pair = self._fresh_pair(job, batch) if self.fresh else self._pooled_pair(job, batch)
        job.scratch["inputs"], job.scratch["targets"] = pair["inputs"], pair["targets"]
        scaled = (1 - self.lam) * batch.inputs
        if self.naive:
            return replace(batch, inputs=scaled + self.lam * pair["inputs"])
        return replace(batch, inputs=scaled.requires_grad_())

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return l1 + l2, and l3 unless the inputs were mixed themselves."""
        batch = out.batch
        pair = {name: job.scratch[name] for name in ("inputs", "targets")}
        if self.naive:
            local, mean_target = label_terms(out.logits, batch.targets, pair["targets"], self.lam)
            return local + mean_target
        terms = loss_terms(
            out.logits,
            batch.inputs,
            batch.targets,
            pair["inputs"],
            pair["targets"],
            self.lam,
            self.taylor_scale,
        )
        return terms["total"]

    def _largest(self, job: LocalJob) -> int:
        """Return the most pairs that a step of the job needs."""
        return max(job.plan.sizes) if self.pairs == "each" else 1

    def _pooled_pair(self, job: LocalJob, batch: Batch) -> dict[str, Tensor]:
        """Return this step's pairs: "inputs" and "targets" of one row per sample, or one row."""
        chosen = job.drawn("chosen")[: len(batch.inputs)]
        return {name: job.received[name].index_select(0, chosen) for name in ("inputs", "targets")}

    def _fresh_pair(self, job: LocalJob, batch: Batch) -> dict[str, Tensor]:
        """Return the same of raw data, whose rows are drawn at the first step."""
        if job.step == 0:
            size = job.plan.steps, self._largest(job), self.samples_per_mean
            job.scratch["rows"] = raw_rows(job.partition, *size, job.stream("pairs"))
        rows = job.scratch["rows"][job.step, : len(batch.inputs)]
        inputs, labels = job.gather(rows.flatten())
        order = torch.arange(len(labels), device=labels.device).view(rows.shape)
        return mean_pairs(inputs, labels, job.task.num_classes, order)
