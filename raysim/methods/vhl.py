"""VHL: train all clients also on the same labelled noise, and align real features with it.

Source: Tang et al., "Virtual Homogeneity Learning: Defending against Data Heterogeneity in
Federated Learning" (ICML 2022). x are the images of a batch, with labels y. x_v are noise with
labels y_v, called virtual images. h and h_v are the features of x and x_v in front of the
classifier, divided by their norm. T is the temperature, and CE the cross-entropy:

    s_ij     = exp(h_i.h_j / T) / sum_{a != i} exp(h_i.h_a / T)
    SC(h, l) = mean_i -1/|P_i| sum_{j in P_i} log s_ij
    loss     = CE(x, y) + alpha CE(x_v, y_v)
               + gamma SC([h; h_v], [y; y_v]) + kappa SC(h_v, y_v)

P_i are the other rows with the label l_i. If there are none, row i adds 0. In the term with gamma,
h_v is a constant.

BatchNorm's running statistics come from real and virtual images, so the data should be normalised.

Departures from the paper
- With label_mode="extra", virtual images have classes of their own, as in the authors' code. The
  model has two outputs for each class; evaluation uses the larger one.
- With label_mode="shared", virtual images have the real classes, as in FedBR's code.
- The authors' untrained StyleGAN is left out.
- Each channel of the noise is standardised, not clipped to [0, 1].
- A step pads, crops and flips its virtual images.
- If another method changes x (Mixup, FedMix), only CE(x, y) uses the changed images. A second
  forward pass computes all other terms, as in FedBR's code. This pass also updates BatchNorm's
  statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.method import Method
from raysim.models.classifier import Classifier
from raysim.primitives.checks import above, at_least, one_of
from raysim.primitives.streams import stream

if TYPE_CHECKING:
    from raysim.api.context import Batch, Outputs
    from raysim.api.declarations import Participation, Task
    from raysim.api.declare import Declarations
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import ServerView
    from raysim.api.setup import Setup

LabelMode: TypeAlias = Literal["extra", "shared"]


def supervised_contrastive_loss(
    features: Tensor, labels: Tensor, temperature: float, base_temperature: float
) -> Tensor:
    """Return the supervised contrastive loss, times temperature / base_temperature.

    features: [n, D]; this function divides each row by its norm.
    labels: int64 [n]. A row without another row of its label adds 0 to the mean.
    """
    rows = F.normalize(features, dim=1, eps=1e-12)
    is_itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    similarity = (rows @ rows.T / temperature).masked_fill(is_itself, -torch.inf)
    is_positive = (labels.unsqueeze(1) == labels) & ~is_itself
    log_shares = F.log_softmax(similarity, dim=1).masked_fill(~is_positive, 0.0)
    losses = -log_shares.sum(dim=1) / is_positive.sum(dim=1).clamp(min=1)
    return temperature / base_temperature * losses.mean()


def alignment_loss(
    real_features: Tensor,
    real_labels: Tensor,
    virtual_features: Tensor,
    virtual_labels: Tensor,
    temperature: float,
    align_weight: float,
    virtual_weight: float,
) -> Tensor:
    """Return the weighted sum of two contrastive losses.

    The first loss is over real and virtual features, with the virtual ones as constants. The second
    one is over the virtual features alone.

    real_features: [n, D] with real_labels int64 [n].
    virtual_features: [m, D] with virtual_labels int64 [m].
    temperature: divides the scalar products of features.
    align_weight: the weight of the first loss.
    virtual_weight: the weight of the second loss.
    """
    features = torch.cat([real_features, virtual_features.detach()])
    labels = torch.cat([real_labels, virtual_labels])
    both = supervised_contrastive_loss(features, labels, temperature, temperature)
    virtual = supervised_contrastive_loss(
        virtual_features, virtual_labels, temperature, temperature
    )
    return align_weight * both + virtual_weight * virtual


def virtual_images(means: Tensor, noise: Tensor, labels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return V images [V, c, height, width] of labelled noise.

    An image is the mean of its class plus half of its noise, enlarged to `size`. Each channel is
    then standardised over all images.

    means: [C, c, k, k], one for each class.
    noise: [V, c, k, k].
    labels: int64 [V].
    """
    images = F.interpolate(means[labels] + 0.5 * noise, size=size, mode="bilinear")
    deviation, mean = torch.std_mean(images, dim=(0, 2, 3), correction=0, keepdim=True)
    return (images - mean) / deviation


def shifted(images: Tensor, down: Tensor, right: Tensor, flip: Tensor, padding: int) -> Tensor:
    """Pad images with zeros, crop them to their old size, and flip some; return [B, c, h, w].

    images: [B, c, h, w].
    down, right: int64 [B], the top left corner of each crop in the padded image, from 0 to 2 *
    padding pixels.
    flip: int64 [B], 1 mirrors the image from left to right.
    padding: the number of zero pixels at each edge.
    """
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device) + down.unsqueeze(1)
    columns = torch.arange(width, device=images.device)
    columns = torch.where(flip.unsqueeze(1) == 1, columns.flip(0), columns) + right.unsqueeze(1)
    places = rows.unsqueeze(2) * (width + 2 * padding) + columns.unsqueeze(1)  # [B, h, w]
    places = places.flatten(1).unsqueeze(1).expand(batch, channels, height * width)
    return F.pad(images, (padding,) * 4).flatten(2).gather(2, places).view(images.shape)


# The height and width of the noise before it is enlarged.
COARSE = 8
# The number of pixels that are added on each side before an image is cropped.
PADDING = 4


class Doubled(Classifier):
    """A classifier with two outputs for each class: one for real and one for virtual images."""

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs [B, 2C] in training; in evaluation, one output for each class, [B, C].

        Outputs c and C + c belong to class c. In evaluation, the result is the larger of the two.
        """
        logits = super().forward(x)
        if self.training:
            return logits
        real, virtual = logits.chunk(2, dim=1)
        return torch.maximum(real, virtual)


class Vhl(Method):
    """A method that also trains on labelled noise, and aligns real features with it.

    alpha: the weight of the cross-entropy of virtual images (the noise).
    gamma: the weight of the contrastive loss over real and virtual features.
    kappa: the weight of the contrastive loss over virtual features.
    temperature: T, the temperature of both contrastive losses.
    virtual, virtual_batch: the number of all virtual images, and of those in a step.
    label_mode: "extra" gives virtual images classes of their own, "shared" the real classes.
    align_epochs: the number of epochs with the contrastive losses, from the start of a job. With
    local.steps, all steps have them.
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
        label_mode: LabelMode = "extra",
        align_epochs: int = 5,
    ):
        self.alpha = at_least("method.vhl.alpha", alpha, 0.0)
        self.gamma = at_least("method.vhl.gamma", gamma, 0.0)
        self.kappa = at_least("method.vhl.kappa", kappa, 0.0)
        self.temperature = above("method.vhl.temperature", temperature, 0.0)
        self.label_mode = one_of("method.vhl.label_mode", label_mode, get_args(LabelMode))
        self.virtual_batch = int(at_least("method.vhl.virtual_batch", virtual_batch, 1))
        self.virtual = int(at_least("method.vhl.virtual", virtual, 1))
        self.align_epochs = int(at_least("method.vhl.align_epochs", align_epochs, 0))
        # Whether another method changes the inputs; see `setup`.
        self._are_inputs_changed = False

    # --- before the run ------------------------------------------------------------------------
    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """With label_mode="extra", give each class a second output, for virtual images.

        With label_mode="shared", return the model unchanged.
        """
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
            f"method.vhl.virtual_batch={self.virtual_batch}: there are only {self.virtual} "
            f"virtual images (method.vhl.virtual). Set method.vhl.virtual_batch={self.virtual} or "
            "less.",
        )
        run.require(
            self.virtual >= classes,
            f"method.vhl.virtual={self.virtual}: the data has {classes} classes, and each needs a "
            f"virtual image. Set method.vhl.virtual={classes} or more.",
        )
        run.send("inputs", self.inputs, self.virtual * math.prod(run.task.shape), once=True)
        run.send("labels", self.labels, self.virtual, once=True)
        run.draw("views", self.draw_views)
        run.draw("aligns", self.draw_alignment)
        run.adds_rows()
        run.check(self.note_changed_inputs)

    def note_changed_inputs(self, run: Declarations) -> Sequence[str]:
        """Record whether another method changes the inputs of a batch; return no warning."""
        self._are_inputs_changed = False
        for declared in run.methods:
            changes_inputs = declared.has_hook("batch") and not declared.adds_rows
            if declared.method != self.name and changes_inputs:
                self._are_inputs_changed = True
        return ()

    def cost(self, job: Participation) -> float:
        """Return the cost of training on the virtual samples, as a number of trained samples.

        If another method changes the inputs, add the real samples of the same steps, because VHL
        then also trains on the unchanged ones.
        """
        if not (self.alpha or self.gamma or self.kappa):
            return 0.0
        local = job.run.local
        steps, real = local.steps or 0, job.trained_samples
        if local.epochs is not None:
            epochs = local.epochs if self.alpha else min(local.epochs, self.align_epochs)
            steps, real = epochs * math.ceil(job.samples / local.batch), epochs * job.samples
        virtual = float(steps * self.virtual_batch)
        return virtual + real if self._are_inputs_changed else virtual

    # --- the virtual set -----------------------------------------------------------------------
    def labels(self, server: ServerView) -> Tensor:
        """Return the labels of the virtual images, int64 [virtual]: 0, 1, ..., C - 1, 0, 1, ..."""
        return torch.arange(self.virtual) % server.task.num_classes

    def inputs(self, server: ServerView) -> Tensor:
        """Return the virtual images [virtual, ...], which depend only on the seed and the data."""
        task, generator = server.task, stream(server.seed, "vhl.virtual")
        channels, height, width = task.shape
        edge = (channels, COARSE, COARSE)
        means = torch.from_numpy(generator.standard_normal((task.num_classes, *edge)))
        noise = torch.from_numpy(generator.standard_normal((self.virtual, *edge)))
        images = virtual_images(means, noise, self.labels(server), (height, width))
        return images.to(task.dtype)

    # --- a client's job ------------------------------------------------------------------------
    def draw_views(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        """Draw the virtual images, crops and flips of each step: int64 [4, batch] for each step.

        The four rows are the numbers of the images, the two offsets of the crops (pixels), and 1
        for a flipped image.
        """
        steps, size = job.plan.steps, self.virtual_batch
        rows = [generator.choice(self.virtual, size=(1, size), replace=False) for _ in range(steps)]
        offsets = generator.integers(2 * PADDING + 1, size=(steps, 2, size))
        flips = generator.integers(2, size=(steps, 1, size))
        return torch.from_numpy(np.concatenate([np.stack(rows), offsets, flips], axis=1)).unbind()

    def draw_alignment(self, job: LocalJob, _: np.random.Generator) -> Sequence[bool]:
        """Return True for each step whose loss has the alignment loss; nothing is random."""
        steps, epochs = job.plan.steps, job.local.epochs
        if self.gamma == 0 and self.kappa == 0:
            return [False] * steps
        if epochs is None:
            return [True] * steps
        return [step * epochs // steps < self.align_epochs for step in range(steps)]

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        """Return the batch with the step's virtual images, if a term of the loss needs them.

        If another method changes inputs, return the batch unchanged. The hook `loss` then computes
        the features of the virtual images.
        """
        if self._needs_virtual(job) and not self._are_inputs_changed:
            batch.add_rows(self.name, self._images(job))
        return batch

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add two terms to the loss: a cross-entropy of virtual images, and an alignment loss.

        The first term has the weight alpha. The second term has the weights gamma and kappa. It
        ends after a job's first `align_epochs` epochs; with local.steps it does not end.
        """
        if not self._needs_virtual(job):
            return loss
        terms = []
        real, virtual = self._features(job, out)
        labels = job.received["labels"]
        labels = labels.index_select(0, job.drawn("views")[0].to(labels.device))
        if self.alpha:
            first = job.num_classes // 2 if self.label_mode == "extra" else 0
            entropy = F.cross_entropy(job.model.head(virtual), labels + first)
            terms.append(self.alpha * entropy)
        if job.drawn("aligns"):
            weights = (self.temperature, self.gamma, self.kappa)
            targets = out.batch.raw_targets
            terms.append(alignment_loss(real, targets, virtual, labels, *weights))
        return loss + sum(terms)

    def _needs_virtual(self, job: LocalJob) -> bool:
        return self.alpha > 0 or bool(job.drawn("aligns"))

    def _images(self, job: LocalJob) -> Tensor:
        images = job.received["inputs"]
        rows, down, right, flip = job.drawn("views").to(images.device).unbind()
        return shifted(images.index_select(0, rows), down, right, flip, PADDING)

    def _features(self, job: LocalJob, out: Outputs) -> tuple[Tensor, Tensor]:
        """Return the features of the real and of the virtual samples.

        The real samples are the inputs before any other method, such as Mixup, has changed them.
        """
        if not self._are_inputs_changed:
            return out.features, out.rows(self.name)
        real = out.batch.raw_inputs
        both = job.model.features(torch.cat([real, self._images(job)]))
        return both[: len(real)], both[len(real) :]
