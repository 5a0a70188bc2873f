"""Mixup inside each client: train on convex combinations of the pairs of a batch and of their labels.

Zhang et al., "mixup: Beyond Empirical Risk Minimization" (ICLR 2018), as FedBR (ICML 2023, Appendix A) uses it:

    x~ = lam x + (1 - lam) x_pi    y~ = lam onehot(y) + (1 - lam) onehot(y_pi)    lam ~ Beta(alpha, alpha), alpha = 0.2

Choices where the sources differ or are silent
- The partner is a random permutation of the same local batch (FedBR); DomainBed pairs batches of different domains.
- One lam a batch, and lam itself rather than max(lam, 1 - lam).
- Mixing comes after augmentation and normalisation; only the mixed batch is forwarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import above

if TYPE_CHECKING:
    from raysim.api.context import Batch
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup


def soft_targets(labels: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Labels as rows of probabilities: int64 (..., ) -> (..., C) one-hot in ``dtype``; floating rows pass unchanged."""
    if labels.is_floating_point():
        return labels
    # A comparison, because torch's one_hot reads the largest label back from the device.
    return (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).to(dtype)


def mixed_batch(
    inputs: Tensor, labels: Tensor, num_classes: int, lam: float | Tensor, permutation: Tensor
) -> dict[str, Tensor]:
    """Mix every sample with its partner: {"inputs" (B, ...), "targets" (B, C)}.

    ``labels`` are int64 (B,) or float rows (B, C); ``lam`` in [0, 1] is a number or a scalar tensor; ``permutation``
    int64 (B,) names the partners.
    """
    targets = soft_targets(labels, num_classes, torch.promote_types(inputs.dtype, torch.float32))
    return {
        "inputs": lam * inputs + (1.0 - lam) * inputs[permutation],
        "targets": lam * targets + (1.0 - lam) * targets[permutation],
    }


def mixed_loss(logits: Tensor, labels: Tensor, lam: float | Tensor, permutation: Tensor) -> Tensor:
    """lam CE(logits, y) + (1 - lam) CE(logits, y_pi), the mean over the batch.

    ``logits`` (B, C) of the mixed inputs, ``labels`` int64 (B,). Equal to the cross-entropy with the mixed targets.
    """
    log_probabilities = F.log_softmax(logits, dim=-1)
    own, partner = (
        F.nll_loss(log_probabilities, labels),
        F.nll_loss(log_probabilities, labels[permutation]),
    )
    return lam * own + (1.0 - lam) * partner


class Mixup(Method):
    """Train on mixed inputs with soft targets; `batch.pair` has the labels of each pair."""

    name = "mixup"
    paper = "Zhang et al., ICLR 2018"

    def __init__(self, alpha: float = 0.2):
        self.alpha = above("method.mixup.alpha", alpha, 0.0, "leave mixup out for no mixing")

    def setup(self, run: Setup) -> None:
        """Declare a weight and a permutation for each step."""
        run.needs("numbers")
        run.targets("soft")
        run.draw("lam", self.draw_weights)
        run.draw("permutation", self.draw_partners)

    def draw_weights(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        """Draw the weight lam of each batch."""
        weights = generator.beta(self.alpha, self.alpha, size=job.plan.steps)
        return torch.from_numpy(weights).unbind()

    def draw_partners(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        """Draw the partner of each sample of each batch."""
        return [torch.from_numpy(generator.permutation(size)) for size in job.plan.sizes]

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        """Mix inputs and targets within the batch."""
        lam = job.drawn("lam")
        permutation = job.drawn("permutation").to(batch.inputs.device)
        mixed = mixed_batch(batch.inputs, batch.targets, job.num_classes, lam, permutation)
        pair = (batch.targets, batch.targets[permutation], lam)
        return replace(batch, inputs=mixed["inputs"], targets=mixed["targets"], pair=pair)
