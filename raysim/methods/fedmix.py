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

from raysim.api.declarations import Cost, Download, Participation
from raysim.api.hooked_method import HookedMethod
from raysim.data.partition import CSR
from raysim.methods.mixup import soft_targets
from raysim.primitives.checks import at_least, between

if TYPE_CHECKING:
    from raysim.api.context import Batch, Context, Contribution, Outputs
    from raysim.api.hooked_method import OldSetup as Setup
    from raysim.api.server_view import Server


def mean_pairs(inputs: Tensor, labels: Tensor, num_classes: int, indices: Tensor) -> dict[str, Tensor]:
    """Row r: the means of the samples ``indices[r]`` and of their one-hot labels.

    ``inputs`` (n, ...), ``labels`` int64 (n,), ``indices`` int64 (R, M) -> {"inputs" (R, ...), "targets" (R, C)}.
    """
    targets = soft_targets(labels, num_classes, torch.promote_types(inputs.dtype, torch.float32))
    return {"inputs": inputs[indices].mean(dim=1), "targets": targets[indices].mean(dim=1)}


def label_terms(logits: Tensor, labels: Tensor, mean_targets: Tensor, lam: float) -> tuple[Tensor, Tensor]:
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
    taylor = lam * (gradient * mean_inputs).sum()  # the mean over the batch: l1 is one, so the rows carry 1/B
    if taylor_scale == "public":
        taylor = taylor / len(inputs)
    return {"local": local, "mean_target": mean_target, "taylor": taylor, "total": local + mean_target + taylor}


def raw_rows(partition: CSR, steps: int, rows: int, samples: int, generator: np.random.Generator) -> np.ndarray:
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


INPUTS, TARGETS = "fedmix.inputs", "fedmix.targets"


class FedMix(HookedMethod):
    """lam: how much of the means is mixed in; 0 is FedAvg. means: pairs that each client sends before round 0.

    pairs: one for "each" sample of a step or "one" for all. naive: NaiveMix. taylor_scale, fresh: see above.
    """

    name = "fedmix"
    paper = "Yoon et al., ICLR 2021"
    needs = frozenset(("classes", "numbers"))
    targets = "integer"

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

    @property
    def _pooled(self) -> bool:
        return self.lam > 0 and not self.fresh

    def check(self, setup: Setup) -> Sequence[str]:
        """Enough pairs for a batch."""
        if self._pooled and self.pairs == "each":
            clients = setup.task.population
            self._require(setup.local.batch, self.means * clients, clients)
        return ()

    def _require(self, rows: int, pool: int, clients: int) -> None:
        if rows > pool:
            raise ValueError(
                f"local.batch={rows} is more than the pool of {pool} mean pairs from {clients} clients: set "
                f"method.fedmix.means={-(-rows // clients)} (now {self.means}) or more"
            )

    def cost(self, job: Participation) -> Cost:
        """The second derivative: as much again as a pass.

        In forward passes a step is 1 and a backward pass of 2. The gradient of the inputs adds 1, and differentiating
        it 2, which makes 6 for 3. The pool travels once.
        """
        task, pool = job.run.task, self.means * job.run.clients if self._pooled and not job.earlier else 0
        down = pool * (math.prod(task.shape) + task.num_classes)
        return Cost(samples=job.trained if self.lam and not self.naive else 0.0, down=down)

    # --- the pool ------------------------------------------------------------------------------------------------
    def contribute(self, client: Contribution) -> Mapping[str, np.ndarray]:
        """Pairs of means of the client's own samples, drawn with replacement."""
        if not self._pooled:
            return {}
        size = (self.means, self.samples_per_mean)
        indices = torch.from_numpy(client.generator.integers(len(client.inputs), size=size)).to(client.inputs.device)
        means = mean_pairs(client.inputs, client.labels, client.num_classes, indices)
        return {f"fedmix.{key}": value.cpu().numpy() for key, value in means.items()}

    def assemble(self, parts: Mapping[str, Sequence[np.ndarray]], server: Server) -> None:
        """All clients' pairs, one after another."""
        if self._pooled:
            server.state |= {key: torch.from_numpy(np.concatenate(parts[key])) for key in (INPUTS, TARGETS)}

    def send(self, server: Server) -> Download:
        """The pool, to each client once."""
        if not self._pooled:
            return Download()
        return Download(once=lambda: {key: server.state[key] for key in (INPUTS, TARGETS)})

    def planned(self, ctx: Context) -> None:
        """Draw the pairs of all steps; `draws` could not: it does not know how many there are."""
        if self.lam:
            ctx.draws = {**ctx.draws, "fedmix.chosen": self._chosen(ctx).unbind()}

    # --- the step ------------------------------------------------------------------------------------------------
    def transform(self, ctx: Context, batch: Batch) -> Batch:
        """u, whose gradient the loss will ask for, or NaiveMix's x~."""
        if not self.lam:
            return batch
        pair = self._pair(ctx, len(batch.inputs))
        ctx.kept |= {"fedmix.pair_inputs": pair["inputs"], "fedmix.pair_targets": pair["targets"]}
        scaled = (1 - self.lam) * batch.inputs
        if self.naive:
            return replace(batch, inputs=scaled + self.lam * pair["inputs"])
        return replace(batch, inputs=scaled.requires_grad_())

    def loss(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """l1 + l2, and l3 unless the inputs were mixed themselves."""
        if not self.lam:
            return F.cross_entropy(out.logits, batch.targets)
        inputs, targets = ctx.kept["fedmix.pair_inputs"], ctx.kept["fedmix.pair_targets"]
        if self.naive:
            local, mean_target = label_terms(out.logits, batch.targets, targets, self.lam)
            return local + mean_target
        parts = out.logits, batch.inputs, batch.targets, inputs, targets
        return loss_terms(*parts, self.lam, self.taylor_scale)["total"]

    def _pair(self, ctx: Context, size: int) -> dict[str, Tensor]:
        """This step's pairs, "inputs" and "targets" of one row per sample, or one row."""
        chosen = ctx.drawn("fedmix.chosen")[:size]
        if not self.fresh:
            return {key: ctx.download[f"fedmix.{key}"].index_select(0, chosen) for key in ("inputs", "targets")}
        inputs, labels = ctx.trainer.gather(chosen.flatten().numpy())
        order = torch.arange(len(labels), device=labels.device).view(chosen.shape)
        return mean_pairs(inputs, labels, ctx.trainer.task.num_classes, order)

    def _chosen(self, ctx: Context) -> Tensor:
        """For all steps of the job: rows of the pool [steps, R], or of raw data [steps, R, M]."""
        plan, generator = ctx.plan, ctx.stream("fedmix.pairs")
        rows = max(plan.sizes) if self.pairs == "each" else 1
        if self.fresh:
            partition = ctx.trainer.partition
            return torch.from_numpy(raw_rows(partition, plan.steps, rows, self.samples_per_mean, generator))
        pool = ctx.download[INPUTS]
        self._require(rows, len(pool), len(pool) // self.means)  # clients without samples sent none
        chosen = [generator.choice(len(pool), size=rows, replace=False) for _ in range(plan.steps)]
        return torch.from_numpy(np.stack(chosen)).to(pool.device)
