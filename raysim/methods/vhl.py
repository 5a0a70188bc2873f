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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.method import Method
from raysim.models.classifier import Classifier
from raysim.primitives.checks import above, at_least
from raysim.primitives.streams import stream

if TYPE_CHECKING:
    from raysim.api.context import Batch, Outputs
    from raysim.api.declarations import Participation, Task
    from raysim.api.declare import Declarations
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import ServerView
    from raysim.api.setup import Setup


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
    log_share = F.log_softmax(similarity, dim=1).masked_fill(
        ~positive, 0.0
    )  # subtracts the row's maximum
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
    virtual = supervised_contrastive_loss(
        virtual_features, virtual_labels, temperature, temperature
    )
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


# Pixels along an edge of the noise before it is enlarged; around an image before it is cropped.
COARSE, PADDING = 8, 4


class Doubled(Classifier):
    """A classifier with two outputs for each class: scores are the larger of the two."""

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs [B, 2C] in training, and scores [B, C] elsewhere."""
        logits = super().forward(x)
        if self.training:
            return logits
        real, virtual = logits.chunk(2, dim=1)
        return torch.maximum(real, virtual)


class Vhl(Method):
    """alpha: weight of the virtual images' cross-entropy, gamma: of the alignment, kappa: of their own.

    virtual: images in the set, virtual_batch: of them in a step. align_epochs: epochs of a job in
    which features are aligned; a budget of local.steps has no epochs, and aligns in all of them.
    """

    name = "vhl"
    paper = "Tang et al., ICML 2022"

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
        self.temperature = above("method.vhl.temperature", temperature, 0.0)
        self.label_mode = label_mode
        self.virtual_batch = int(at_least("method.vhl.virtual_batch", virtual_batch, 1))
        self.virtual = int(at_least("method.vhl.virtual", virtual, 1))
        self.align_epochs = int(at_least("method.vhl.align_epochs", align_epochs, 0))
        self._apart = False  # whether another method changes the inputs; see `setup`

    # --- before the run ------------------------------------------------------------------------
    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """Add, for "extra" labels, an output for the virtual images of each class."""
        base = cast(Classifier, model)
        if self.label_mode == "shared":
            return base
        return Doubled(base.extractor, base.feature_dim, 2 * task.num_classes)

    def setup(self, run: Setup) -> None:
        """Send the virtual set to each client once, and add images of it to each batch."""
        run.needs("classes", "features", "images")
        if not (self.alpha or self.gamma or self.kappa):
            run.skip("batch", "loss")
            return
        classes = run.task.num_classes
        run.require(
            self.virtual >= self.virtual_batch,
            f"method.vhl.virtual_batch={self.virtual_batch} is more than all "
            f"method.vhl.virtual={self.virtual} images. Set "
            f"method.vhl.virtual_batch={self.virtual} or less.",
        )
        run.require(
            self.virtual >= classes,
            f"method.vhl.virtual={self.virtual} images are too few for the {classes} classes of the "
            f"data. Set method.vhl.virtual={classes} or more.",
        )
        run.send("inputs", self.inputs, self.virtual * math.prod(run.task.shape), once=True)
        run.send("labels", self.labels, self.virtual, once=True)
        run.draw("views", self.draw_views)
        run.adds_rows()
        run.check(self.note_changed_inputs)

    def note_changed_inputs(self, run: Declarations) -> Sequence[str]:
        """Note whether another method changes inputs, so that virtual images pass on their own."""
        others = [each for each in run.methods if each.method != self.name]
        self._apart = any(each.has_hook("batch") and not each.adds_rows for each in others)
        return ()

    def cost(self, job: Participation) -> float:
        """Return a pass over as many virtual samples as real ones; twice where inputs are changed.

        `local.batch` is not known here, and `virtual_batch` may be larger.
        """
        if not (self.alpha or self.gamma or self.kappa):
            return 0.0
        return 2 * job.trained if self._apart else job.trained

    # --- the virtual set -----------------------------------------------------------------------
    def labels(self, server: ServerView) -> Tensor:
        """Return the classes 0..C-1 in turn, int64 [virtual]."""
        return torch.arange(self.virtual) % server.task.num_classes

    def inputs(self, server: ServerView) -> Tensor:
        """Return the virtual images [virtual, ...], which depend on the seed and the data alone."""
        task, generator = server.task, stream(server.seed, "vhl.virtual")
        channels, height, width = task.shape
        edge = (channels, COARSE, COARSE)
        means = torch.from_numpy(generator.standard_normal((task.num_classes, *edge)))
        noise = torch.from_numpy(generator.standard_normal((self.virtual, *edge)))
        images = virtual_images(means, noise, self.labels(server), (height, width))
        return images.to(task.dtype)

    # --- a client's job ------------------------------------------------------------------------
    def draw_views(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        """Draw rows, downward and rightward offsets and flips of each step, int64 [4, batch]."""
        steps, size = job.plan.steps, self.virtual_batch
        rows = [generator.choice(self.virtual, size=(1, size), replace=False) for _ in range(steps)]
        offsets = generator.integers(2 * PADDING + 1, size=(steps, 2, size))
        flips = generator.integers(2, size=(steps, 1, size))
        return torch.from_numpy(np.concatenate([np.stack(rows), offsets, flips], axis=1)).unbind()

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        """Add the step's virtual images, unless the batch is not what they are aligned with."""
        if self._joins(job) and not self._apart:
            batch.add_rows(self.name, self._images(job))
        return batch

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add alpha times the cross-entropy of the virtual images, and the alignment."""
        if not self._joins(job):
            return loss
        terms = []
        real, virtual = self._features(job, out)
        labels = job.received["labels"]
        labels = labels.index_select(0, job.drawn("views")[0].to(labels.device))
        if self.alpha:
            first = job.num_classes // 2 if self.label_mode == "extra" else 0
            entropy = F.cross_entropy(job.model.head(virtual), labels + first)
            terms.append(self.alpha * entropy)
        if self._aligns(job):
            weights = (self.temperature, self.gamma, self.kappa)
            targets = out.batch.raw_targets
            terms.append(alignment_loss(real, targets, virtual, labels, *weights))
        return loss + sum(terms)

    def _aligns(self, job: LocalJob) -> bool:
        """Return whether features are aligned in this step."""
        if self.gamma == 0 and self.kappa == 0:
            return False
        epochs = job.local.epochs
        if epochs is None or epochs <= self.align_epochs:
            return True  # in all steps, so one recording serves all of them
        return job.step * epochs // job.plan.steps < self.align_epochs

    def _joins(self, job: LocalJob) -> bool:
        """Return whether this step needs virtual images."""
        return self.alpha > 0 or self._aligns(job)

    def _images(self, job: LocalJob) -> Tensor:
        images = job.received["inputs"]
        rows, down, right, flip = job.drawn("views").to(images.device).unbind()
        return shifted(images.index_select(0, rows), down, right, flip, PADDING)

    def _features(self, job: LocalJob, out: Outputs) -> tuple[Tensor, Tensor]:
        """Return features of the unchanged real batch and of the virtual one, of one pass."""
        if not self._apart:
            return out.features, out.rows(self.name)
        real = out.batch.raw_inputs
        both = job.model.features(torch.cat([real, self._images(job)]))
        return both[: len(real)], both[len(real) :]
