"""VHL: all clients train on the same labelled noise, and pull real features to the noise of their own class.

Tang, Zhang, Shi, He, Han and Chu, "Virtual Homogeneity Learning: Defending against Data Heterogeneity in Federated
Learning" (ICML 2022). With h the features in front of the classifier, T the temperature, and virtual rows marked v,

    SC(h, l) = mean_i -1/|P_i| sum_{j in P_i} log( exp(h_i.h_j / T) / sum_{a != i} exp(h_i.h_a / T) ),   |h_i| = 1
    loss = CE(x, y) + alpha CE(x_v, y_v) + gamma SC([h; constant h_v], [y; y_v]) + kappa SC(h_v, y_v)

with P_i the other rows of label l_i (none: 0).

Choices where the sources differ or are silent
- FedBR's baseline forwards both batches apart, aligns logits, and with its "shared" labels never finds a real row and a
  virtual one of the same class; here all variants follow the authors.
- Virtual labels are classes of their own for the classifier ("extra", authors), where evaluation takes the better one
  of the two outputs of a class, or the real classes ("shared", FedBR).
- The authors' noise generator, not their untrained StyleGAN. They clip its noise to [0, 1] and scale it as pixels of
  mean 0.5 and deviation 0.25; here each channel of the whole set is standardised, which is where such pixels end.
- Crops pad with zeros after that, so with the mean; a step draws its virtual images without replacement.
- Where the inputs are changed (Mixup, FedMix), what is classified are the changed ones alone, and what is aligned the
  unchanged, in a second forward pass with the virtual ones (FedBR's code), which BatchNorm's statistics see as well.
- BatchNorm's running statistics are of both kinds of images, and evaluation uses them on real ones: the data should be
  normalised too.
- The authors' distance between domains has weight 0 in their code, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.declarations import Cost, Download, Participation, Task
from raysim.api.hooked_method import HookedMethod
from raysim.models.classifier import Classifier
from raysim.primitives.checks import above, at_least
from raysim.primitives.streams import stream

if TYPE_CHECKING:
    from raysim.api.context import Batch, Context, Outputs, Plan
    from raysim.api.hooked_method import OldSetup as Setup
    from raysim.api.server_view import Server


def supervised_contrastive_loss(
    features: Tensor, labels: Tensor, temperature: float, base_temperature: float
) -> Tensor:
    """SC times temperature / base_temperature: ``features`` (n, D), normalised inside; ``labels`` int64 (n,).

    A row without another of its label adds 0 to the mean over all n.
    """
    rows = F.normalize(features, dim=1, eps=1e-12)
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    similarity = (rows @ rows.T / temperature).masked_fill(itself, -torch.inf)
    positive = (labels.unsqueeze(1) == labels) & ~itself
    log_share = F.log_softmax(similarity, dim=1).masked_fill(~positive, 0.0)  # subtracts the row's maximum
    each = -log_share.sum(dim=1) / positive.sum(dim=1).clamp(min=1)
    return temperature / base_temperature * each.mean()


def alignment_loss(
    real_features: Tensor,
    real_labels: Tensor,
    virtual_features: Tensor,
    virtual_labels: Tensor,
    temperature: float,
    align_weight: float,
    virtual_weight: float,
) -> Tensor:
    """gamma SC of both, which moves real features only, plus kappa SC of the virtual: ``align_weight`` is gamma,
    ``virtual_weight`` kappa; features (n, D) and (m, D), labels int64 (n,) and (m,) of the same classes."""
    features = torch.cat([real_features, virtual_features.detach()])
    labels = torch.cat([real_labels, virtual_labels])
    both = supervised_contrastive_loss(features, labels, temperature, temperature)
    virtual = supervised_contrastive_loss(virtual_features, virtual_labels, temperature, temperature)
    return align_weight * both + virtual_weight * virtual


def virtual_images(means: Tensor, noise: Tensor, labels: Tensor, size: tuple[int, int]) -> Tensor:
    """A class's mean plus half the noise, enlarged bilinearly and standardised per channel over all of them.

    ``means`` (C, c, k, k), ``noise`` (V, c, k, k), ``labels`` int64 (V,) -> (V, c, *size).
    """
    images = F.interpolate(means[labels] + 0.5 * noise, size=size, mode="bilinear")
    deviation, mean = torch.std_mean(images, dim=(0, 2, 3), correction=0, keepdim=True)
    return (images - mean) / deviation


def shifted(images: Tensor, down: Tensor, right: Tensor, flip: Tensor, padding: int) -> Tensor:
    """Pad with zeros, cut the old size out at (``down``, ``right``) in 0..2 padding, mirror where ``flip`` is 1.

    ``images`` (B, c, h, w), the others int64 (B,).
    """
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device) + down.unsqueeze(1)
    columns = torch.arange(width, device=images.device)
    columns = torch.where(flip.unsqueeze(1) == 1, columns.flip(0), columns) + right.unsqueeze(1)
    places = rows.unsqueeze(2) * (width + 2 * padding) + columns.unsqueeze(1)  # [B, h, w]
    places = places.flatten(1).unsqueeze(1).expand(batch, channels, height * width)
    return F.pad(images, (padding,) * 4).flatten(2).gather(2, places).view(images.shape)


INPUTS, LABELS, VIEWS = "vhl.inputs", "vhl.labels", "vhl.views"
COARSE, PADDING = 8, 4  # pixels along an edge of the noise before it is enlarged; around an image before it is cropped


class Vhl(HookedMethod):
    """alpha: weight of the virtual images' cross-entropy, gamma: of the alignment, kappa: of the virtual images' own.

    virtual: images in the set, virtual_batch: of them in a step. align_epochs: epochs of a job in which features are aligned;
    a budget of local.steps has no epochs, and aligns in all of them.
    """

    name = "vhl"
    paper = "Tang et al., ICML 2022"
    needs = frozenset(("classes", "features", "images"))

    def __init__(
        self,
        alpha: float = 1.0,
        gamma: float = 1.0,
        kappa: float = 0.1,
        temperature: float = 0.07,
        virtual_batch: int = 128,
        virtual: int = 2000,
        label_mode: Literal["extra", "shared"] = "extra",
        align_epochs: int = 5,
    ):
        self.alpha = at_least("method.vhl.alpha", alpha, 0.0)
        self.gamma = at_least("method.vhl.gamma", gamma, 0.0)
        self.kappa = at_least("method.vhl.kappa", kappa, 0.0)
        above("method.vhl.temperature", temperature, 0.0)
        self.temperature, self.label_mode = temperature, label_mode
        self.virtual_batch = int(at_least("method.vhl.virtual_batch", virtual_batch, 1))
        self.virtual = int(at_least("method.vhl.virtual", virtual, 1))
        self.align_epochs = int(at_least("method.vhl.align_epochs", align_epochs, 0))

    @property
    def _active(self) -> bool:
        return self.alpha > 0 or self.gamma > 0 or self.kappa > 0

    # --- declared once -------------------------------------------------------------------------------------------
    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """With "extra" labels, an output for the virtual images of each class after those of the classes."""
        base = cast(Classifier, model)
        if self.label_mode == "shared":
            return base
        return Classifier(base.extractor, base.feature_dim, 2 * task.num_classes)

    def check(self, setup: Setup) -> Sequence[str]:
        """Enough virtual images for a batch, and for the classes."""
        if self._active and self.virtual < self.virtual_batch:
            raise ValueError(
                f"method.vhl.virtual_batch={self.virtual_batch} is more than all method.vhl.virtual={self.virtual} images: set "
                f"method.vhl.virtual_batch={self.virtual} or less"
            )
        if self._active and self.virtual < setup.task.num_classes:
            raise ValueError(
                f"method.vhl.virtual={self.virtual} images are too few for the data's {setup.task.num_classes} "
                f"classes: set method.vhl.virtual={setup.task.num_classes} or more"
            )
        return ()

    def send(self, server: Server) -> Download:
        """The virtual set, to each client once."""
        return Download(once=lambda: self._virtual(server)) if self._active else Download()

    def _virtual(self, server: Server) -> Mapping[str, Tensor]:
        """Images and their labels 0..C-1 in turn."""
        task, generator = server.task, stream(server.seed, "vhl.virtual")
        channels, *size = task.shape
        labels = torch.arange(self.virtual) % task.num_classes
        means, noise = (
            torch.from_numpy(generator.standard_normal((count, channels, COARSE, COARSE)))
            for count in (task.num_classes, self.virtual)
        )
        images = virtual_images(means, noise, labels, (size[0], size[1]))
        return {INPUTS: images.to(task.dtype), LABELS: labels}

    def draws(self, plan: Plan, generator: np.random.Generator) -> Mapping[str, Sequence[Tensor]]:
        """Virtual images and their crops: rows, downward and rightward offsets and flips, int64 [4, batch]."""
        if not self._active:
            return {}
        rows = [generator.choice(self.virtual, size=(1, self.virtual_batch), replace=False) for _ in range(plan.steps)]
        offsets = generator.integers(2 * PADDING + 1, size=(plan.steps, 2, self.virtual_batch))
        flips = generator.integers(2, size=(plan.steps, 1, self.virtual_batch))
        return {VIEWS: torch.from_numpy(np.concatenate([np.stack(rows), offsets, flips], axis=1)).unbind()}

    def cost(self, job: Participation) -> Cost:
        """As many virtual samples as real ones, though local.batch is not known here and `batch` may be larger.

        Changed inputs mean a second pass over the real ones.
        """
        if not self._active:
            return Cost()
        images = 0 if job.earlier else self.virtual * (math.prod(job.run.task.shape) + 1)
        return Cost(samples=(1 + ("transform" in job.run.filled)) * job.trained, down=images)

    # --- the step ------------------------------------------------------------------------------------------------
    def rows(self, ctx: Context, batch: Batch) -> Tensor | None:
        """The step's virtual images, unless the batch is not what they are aligned with."""
        if batch.inputs is not batch.raw_inputs or not self._joins(ctx):
            return None
        return self._images(ctx)

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """alpha CE of the virtual images, and the alignment."""
        total = out.logits.new_zeros(())
        if not self._joins(ctx):
            return total
        real, virtual = self._features(ctx, out, batch)
        labels = ctx.download[LABELS]
        labels = labels.index_select(0, ctx.drawn(VIEWS)[0].to(labels.device))
        if self.alpha:
            first = ctx.num_classes // 2 if self.label_mode == "extra" else 0
            total = total + self.alpha * F.cross_entropy(ctx.model.head(virtual), labels + first)
        if self._aligns(ctx):
            weights = (self.temperature, self.gamma, self.kappa)
            total = total + alignment_loss(real, batch.raw_targets, virtual, labels, *weights)
        return total

    def predict(self, logits: Tensor) -> Tensor:
        """With "extra" labels, the better of a class's two outputs."""
        if self.label_mode == "shared":
            return logits
        own, virtual = logits.chunk(2, dim=1)
        return torch.maximum(own, virtual)

    def _aligns(self, ctx: Context) -> bool:
        """Whether features are aligned in this step."""
        epochs = ctx.trainer.local.epochs
        early = epochs is None or ctx.step * epochs // ctx.plan.steps < self.align_epochs
        return early and (self.gamma > 0 or self.kappa > 0)

    def _joins(self, ctx: Context) -> bool:
        """Whether this step needs virtual images."""
        return self.alpha > 0 or self._aligns(ctx)

    def _images(self, ctx: Context) -> Tensor:
        images = ctx.download[INPUTS]
        rows, down, right, flip = ctx.drawn(VIEWS).to(images.device).unbind()
        return shifted(images.index_select(0, rows), down, right, flip, PADDING)

    def _features(self, ctx: Context, out: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the unchanged real batch and of the virtual one, of one forward pass."""
        if batch.inputs is batch.raw_inputs:
            return out.features, out.rows(self.name)
        both = ctx.model.features(torch.cat([batch.raw_inputs, self._images(ctx)]))
        return both[: len(batch.raw_inputs)], both[len(batch.raw_inputs) :]
