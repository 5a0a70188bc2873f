"""FedMix: approximate a loss in which a client's samples are mixed with means of samples.

Before round 0, each client averages some of its inputs to a *mean input*, and their one-hot labels
to a *mean label*. All clients receive all pairs (mean input, mean label). NaiveMix mixes each input
of a batch with a mean input. FedMix is the first-order Taylor expansion of NaiveMix's loss.

Source: Yoon et al., "FedMix: Approximation of Mixup under Mean Augmented Federated Learning" (ICLR
2021), Proposition 1 and the local update. A sample x with label y gets the mean input xbar and the
mean label ybar. f is the model, and with u = (1 - lam) x,

    l1 = (1 - lam) CE(f(u), y)    l2 = lam CE(f(u), ybar)    l3 = lam <grad_u l1, xbar>
    FedMix:    loss = mean of l1 + l2 + l3
    NaiveMix:  x~ = (1 - lam) x + lam xbar
               loss = mean of (1 - lam) CE(f(x~), y) + lam CE(f(x~), ybar)

Choices where the paper and the public implementations differ
- Public implementations divide l3 by the batch size (taylor_scale="public").
- l3 has the total factor lam (1 - lam), as in the paper's algorithm. In the paper's formula of the
  loss, the factor is lam.
- The pairs of a step are drawn without replacement. pairs="each" is the rule of the FedBR paper,
  pairs="one" that of the FedMix paper.
- A mean is over `samples_per_mean` samples of a client, drawn with replacement, as in FedBR's code.
  The paper averages all samples of a client.
- fresh=True is for reproducing the numbers of FedBR's code.
- The reported task loss is l1 + l2 + l3 or, with naive=True, the loss of NaiveMix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.api.method import Method
from raysim.data.partition import CSR
from raysim.methods.mixup import soft_targets
from raysim.primitives.checks import at_least, between, one_of

if TYPE_CHECKING:
    from raysim.api.context import Batch, Contribution, Outputs
    from raysim.api.declarations import Participation
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import ServerView
    from raysim.api.setup import Setup

PairCount: TypeAlias = Literal["each", "one"]
TaylorScale: TypeAlias = Literal["paper", "public"]


def mean_pairs(
    inputs: Tensor, labels: Tensor, num_classes: int, indices: Tensor
) -> dict[str, Tensor]:
    """Return means of samples and of their one-hot labels: "inputs" [R, ...], "targets" [R, C].

    inputs: [n, ...].
    labels: int64 [n].
    num_classes: the number C of classes.
    indices: int64 [R, M], the samples of each mean.
    """
    targets = soft_targets(labels, num_classes, torch.promote_types(inputs.dtype, torch.float32))
    return {"inputs": inputs[indices].mean(dim=1), "targets": targets[indices].mean(dim=1)}


def label_terms(
    logits: Tensor, labels: Tensor, mean_targets: Tensor, lam: float
) -> tuple[Tensor, Tensor]:
    """Return FedMix's losses l1 (with labels) and l2 (with mean targets), averaged over the batch.

    l1 is already multiplied by 1 - lam, and l2 by lam.

    logits: [B, C].
    labels: int64 [B].
    mean_targets: means of one-hot labels, [B or 1, c]. If c < C, because a method has added outputs
    to the model, these outputs have target 0.
    """
    added_outputs = logits.shape[1] - mean_targets.shape[1]
    targets = F.pad(mean_targets, (0, added_outputs)).expand_as(logits)
    local = (1 - lam) * F.cross_entropy(logits, labels)
    mean_target = lam * F.cross_entropy(logits, targets)
    return local, mean_target


def loss_terms(
    logits: Tensor,
    inputs: Tensor,
    labels: Tensor,
    mean_inputs: Tensor,
    mean_targets: Tensor,
    lam: float,
    taylor_scale: str = "paper",
) -> dict[str, Tensor]:
    """Return FedMix's terms l1, l2, l3 and their sum: "local", "mean_target", "taylor", "total".

    `label_terms` describes l1 and l2. l3 is lam times the batch's mean of <d l1 / d x, xbar>, with
    a sample's input x and mean input xbar.
    logits: [B, C], the outputs of the model for `inputs`.
    inputs: [B, ...], already multiplied by 1 - lam, with `requires_grad`.
    labels: int64 [B].
    mean_inputs, mean_targets: [B or 1, ...] and [B or 1, C].
    taylor_scale: "public" divides l3 by the batch size B, "paper" does not.
    """
    local, mean_target = label_terms(logits, labels, mean_targets, lam)
    (gradient,) = torch.autograd.grad(local, inputs, create_graph=True)
    # The gradient's rows already have the factor 1/B of l1, so this sum is a mean over the batch.
    taylor = lam * (gradient * mean_inputs).sum()
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
    """Draw the samples whose means a job uses; return their positions in the data set.

    The result is int64 [steps, rows, samples]. A mean is over samples of one client, which is drawn
    from all clients that have samples. All draws are uniform and with replacement.
    partition: the positions of each client's samples in the data set.
    rows: the number of means in a step.
    samples: the number of samples in a mean.
    """
    clients = generator.choice(_clients_with_samples(partition), size=(steps, rows, 1))
    first = partition.offsets[clients]
    counts = partition.offsets[clients + 1] - first
    positions = generator.integers(counts, size=(steps, rows, samples))
    data_rows: np.ndarray = partition.indices[first + positions]
    return data_rows


# Cached, because all jobs of a run have the same partition.
@functools.lru_cache(maxsize=2)
def _clients_with_samples(partition: CSR) -> np.ndarray:
    return np.flatnonzero(partition.counts)


class FedMix(Method):
    """A method whose loss mixes a client's samples with means of all clients' samples.

    lam: the weight of the means in a mixture, from 0 to 1; 0 is FedAvg.
    means: the number of pairs (mean input, mean label) that each client sends before round 0.
    samples_per_mean: the number of samples in each mean.
    pairs: "each" draws a pair for each sample of a step, "one" draws one pair for all samples.
    naive: True uses the loss of NaiveMix, on inputs that are mixed with mean inputs. False uses the
    first-order Taylor expansion of this loss.
    taylor_scale: with "paper", the first-order term is a mean over the batch. "public" divides this
    mean by the batch size.
    fresh: True draws means of the clients' raw data in each step, which only a simulator can do.
    """

    name = "fedmix"
    paper = "Yoon et al., ICLR 2021"

    def __init__(
        self,
        lam: float = 0.1,
        means: int = 64,
        samples_per_mean: int = 10,
        pairs: PairCount = "each",
        naive: bool = False,
        taylor_scale: TaylorScale = "paper",
        fresh: bool = False,
    ):
        self.lam = between("method.fedmix.lam", lam, 0.0, 1.0)
        self.means = int(at_least("method.fedmix.means", means, 1))
        self.samples_per_mean = int(at_least("method.fedmix.samples_per_mean", samples_per_mean, 1))
        self.pairs = one_of("method.fedmix.pairs", pairs, get_args(PairCount))
        self.naive = naive
        self.taylor_scale = one_of(
            "method.fedmix.taylor_scale", taylor_scale, get_args(TaylorScale)
        )
        self.fresh = fresh

    def setup(self, run: Setup) -> None:
        """Declare the loss, and the pairs (mean input, mean label) that clients send and receive.

        With fresh=true, clients exchange no pairs, because each step computes new means from all
        clients' raw data.
        """
        run.needs("classes", "numbers")
        run.targets("integer")
        if not self.lam:
            run.skip("batch", "loss")
            return
        run.owns("loss")
        if self.fresh:
            return
        pairs = self.means * run.clients_with_samples
        run.require(
            self.pairs == "one" or run.local.batch <= pairs,
            f"method.fedmix.means={self.means}: the {run.clients_with_samples} clients with "
            f"samples send {pairs} pairs of a mean input and a mean label, fewer than "
            f"local.batch={run.local.batch}. Set "
            f"method.fedmix.means={-(-run.local.batch // max(1, run.clients_with_samples))} or "
            "more.",
        )
        run.gather(self.own_means, self.join_means)
        run.send("inputs", floats=pairs * math.prod(run.task.shape), once=True)
        run.send("targets", floats=pairs * run.task.num_classes, once=True)
        run.draw("chosen", self.draw_pairs)

    def cost(self, job: Participation) -> float:
        """Return the cost of the second derivative, as a number of trained samples.

        It is equal to the cost of plain training. NaiveMix and lam = 0 have no such cost.
        """
        # In forward passes: one for the gradient of the inputs, and two for its derivative. Plain
        # training also costs three.
        return job.trained_samples if self.lam and not self.naive else 0.0

    # --- the pairs of all clients --------------------------------------------------------------
    def own_means(self, client: Contribution) -> Mapping[str, np.ndarray]:
        """Return a client's pairs: mean inputs as "inputs", mean labels as "targets".

        The samples of a mean are drawn with replacement.
        """
        size = (self.means, self.samples_per_mean)
        drawn = client.generator.integers(len(client.inputs), size=size)
        indices = torch.from_numpy(drawn).to(client.inputs.device)
        means = mean_pairs(client.inputs, client.labels, client.num_classes, indices)
        return {name: value.cpu().numpy() for name, value in means.items()}

    def join_means(self, parts: Mapping[str, Sequence[np.ndarray]], server: ServerView) -> None:
        """Store all clients' pairs (mean input, mean label) in `server.state`.

        A pair has the same row in the tables "inputs" and "targets".
        parts: the lists "inputs" and "targets", each with one array for each client with samples.
        """
        for name in ("inputs", "targets"):
            server.state[name] = torch.from_numpy(np.concatenate(parts[name]))

    # --- the step ------------------------------------------------------------------------------
    def draw_pairs(self, job: LocalJob, _: np.random.Generator) -> Sequence[Tensor]:
        """Draw some of the received pairs (mean input, mean label) for each step of a job.

        Return the rows of R different pairs for each step, int64 [R]. R is the size of the largest
        batch with pairs="each", and 1 with pairs="one".
        """
        generator, pairs = job.stream("pairs"), len(job.received["inputs"])
        rows = self._most_pairs(job)
        chosen = [generator.choice(pairs, size=rows, replace=False) for _ in job.plan.sizes]
        return torch.from_numpy(np.stack(chosen)).unbind()

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        """Return the batch with scaled inputs (FedMix) or mixed inputs (NaiveMix).

        FedMix multiplies the inputs by 1 - lam; the result has `requires_grad`. NaiveMix also adds
        lam times the mean inputs of the step's pairs, without `requires_grad`.
        """
        pair = self._fresh_pair(job, batch) if self.fresh else self._received_pair(job, batch)
        job.scratch["inputs"], job.scratch["targets"] = pair["inputs"], pair["targets"]
        scaled = (1 - self.lam) * batch.inputs
        if self.naive:
            return replace(batch, inputs=scaled + self.lam * pair["inputs"])
        return replace(batch, inputs=scaled.requires_grad_())

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the sum of FedMix's three terms, or NaiveMix's loss."""
        batch = out.batch
        mean_inputs, mean_targets = job.scratch["inputs"], job.scratch["targets"]
        if self.naive:
            local, mean_target = label_terms(out.logits, batch.targets, mean_targets, self.lam)
            return local + mean_target
        terms = loss_terms(
            out.logits,
            batch.inputs,
            batch.targets,
            mean_inputs,
            mean_targets,
            self.lam,
            self.taylor_scale,
        )
        return terms["total"]

    def _most_pairs(self, job: LocalJob) -> int:
        """Return the largest number of pairs (mean input, mean label) that one step needs."""
        return max(job.plan.sizes) if self.pairs == "each" else 1

    def _received_pair(self, job: LocalJob, batch: Batch) -> dict[str, Tensor]:
        """Return the received pairs that were drawn for this step, as "inputs" and "targets".

        With pairs="each" there is a row for each sample of the batch, with "one" a single row.
        """
        chosen = job.drawn("chosen")[: len(batch.inputs)]
        return {name: job.received[name].index_select(0, chosen) for name in ("inputs", "targets")}

    def _fresh_pair(self, job: LocalJob, batch: Batch) -> dict[str, Tensor]:
        """Return means of raw inputs and of one-hot labels, as "inputs" and "targets".

        Each row is a mean over samples of a random client. With pairs="each", each sample of the
        batch has a row; with pairs="one", there is a single row.
        """
        if job.step == 0:  # draws the samples of all steps
            size = job.plan.steps, self._most_pairs(job), self.samples_per_mean
            job.scratch["rows"] = raw_rows(job.partition, *size, job.stream("pairs"))
        rows = job.scratch["rows"][job.step, : len(batch.inputs)]
        inputs, labels = job.gather(rows.flatten())
        order = torch.arange(len(labels), device=labels.device).view(rows.shape)
        return mean_pairs(inputs, labels, job.task.num_classes, order)
