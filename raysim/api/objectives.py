"""The loss and the metrics of each kind of task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from raysim.api.losses import RowLoss
from raysim.api.structures import OnStructures
from raysim.primitives.kinds import IGNORED, Kind, TargetField


def mean(values: np.ndarray) -> float:
    """Return the mean over samples [n], computed in float64."""
    return float(values.mean(dtype=np.float64))


def mean_loss(losses: np.ndarray) -> float:
    """Return the mean of the losses in a `ScoringReport`.

    losses: [n], a loss for each sample; or [n, 2], two numbers for each sample: the sum of its
    labels' losses, and the number of its labels. With [n, 2], the mean is over the labels of all
    samples; nan without labels.
    """
    return mean(losses) if losses.ndim == 1 else ratio_of_sums(losses)


@dataclass(frozen=True)
class MetricRule:
    """A metric: the two functions that compute the score of a set of samples.

    rows: returns a value or an array for each sample, [B, ...], from outputs [B, C] and labels.
    None if the score needs the whole set at once.
    summarise: returns the score of a set from an array with an entry for each sample: the value
    from `rows`, or without `rows` its outputs and labels.
    higher: True if a higher score is better.
    """

    name: str
    rows: Callable[[Tensor, Tensor], Tensor] | None
    summarise: Callable[[np.ndarray], float] = mean
    higher: bool = True


@dataclass(frozen=True)
class Objective:
    """The loss and the metrics of one task type, such as classification.

    loss: returns the mean loss of a batch, from outputs [B, C] and labels.
    losses: returns the loss of each sample, [B].
    metrics: all metrics of this task type; the first `usual_metrics` are computed by default.
    has_ignored: True if labels `IGNORED` do not count in the losses.
    parts: None if the loss of a set is a mean over samples. If it is a mean over labels, such as
    tokens, a function that returns [B, 2]: the sum of each sample's losses, and the number of its
    labels.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    losses: RowLoss
    metrics: tuple[MetricRule, ...]
    has_ignored: bool = False
    usual_metrics: int = 1
    parts: Callable[[Tensor, Tensor], Tensor] | None = None

    def with_loss(self, row_loss: RowLoss) -> Objective:
        """Return a copy of this objective that computes its losses with `row_loss`.

        row_loss: a function from outputs and labels to a loss for each sample or for each label.
        """
        if self.has_ignored:
            return replace(
                self,
                loss=lambda outputs, labels: _counted_mean(row_loss(outputs, labels), labels),
                losses=lambda outputs, labels: _counted_means(row_loss(outputs, labels), labels),
                parts=self.parts and (lambda x, y: _counted_parts(row_loss(x, y), y)),
            )

        def losses(outputs: Tensor, labels: Tensor) -> Tensor:
            values = row_loss(outputs, labels)
            return values if values.ndim == 1 else values.flatten(1).mean(1)

        return replace(
            self, loss=lambda outputs, labels: losses(outputs, labels).mean(), losses=losses
        )

    def metric(self, name: str) -> MetricRule | None:
        """Return the metric of this name, or None."""
        return next((metric for metric in self.metrics if metric.name == name), None)


# ---- labels with ignored ones among them ---------------------------------------------------------
def _counted_mean(values: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of a batch, in which labels `IGNORED` do not count.

    The mean is 0 if all labels are ignored.
    values: the losses, [B, ...]. If they have the shape of `labels`, the mean is over all labels
    that are not ignored. Otherwise it is over all samples that have such a label, and these samples
    have equal weights.
    labels: [B, ...].
    """
    is_counted = labels != IGNORED
    if values.shape != labels.shape:
        is_counted = is_counted.flatten(1).any(1)
        values = values if values.ndim == 1 else values.flatten(1).mean(1)
    return torch.where(is_counted, values, 0).sum() / is_counted.sum().clamp(min=1)


def _counted_means(values: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of each sample, [B], in which labels `IGNORED` do not count.

    values: the losses, [B, ...]. If they have the shape of `labels`, the mean of a sample whose
    labels are all ignored is 0. With any other shape, the mean is over all losses of the sample,
    because no loss belongs to a single label.
    labels: [B, ...].
    """
    if values.shape != labels.shape:
        return values if values.ndim == 1 else values.flatten(1).mean(1)
    is_counted = (labels != IGNORED).reshape(len(labels), -1)
    sums = torch.where(is_counted, values.reshape(len(labels), -1), 0).sum(1)
    return sums / is_counted.sum(1).clamp(min=1)


def _counted_parts(values: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of each sample's losses and the number of its labels: float64 [B, 2].

    Labels `IGNORED` do not count.
    values: the losses, [B, ...]. If they do not have the shape of `labels`, the sum is the sample's
    mean loss times its number of labels.
    labels: [B, ...].
    """
    counts = (labels != IGNORED).flatten(1).sum(1, dtype=torch.float64)
    return torch.stack([_counted_means(values, labels).double() * counts, counts], 1)


def label_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of each label, in the shape of `labels`; 0 for ignored labels.

    outputs: [B, C] for labels [B], and [B, C, ...] for labels [B, ...].
    """
    rows = outputs.movedim(1, -1).reshape(-1, outputs.shape[1])
    losses = cross_entropy(rows, labels.reshape(-1), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape)


def counted_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over labels that are not ignored; 0 if all are ignored."""
    return _counted_mean(label_losses(outputs, labels), labels)


def counted_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample [B] the mean cross-entropy over its labels that are not ignored."""
    return _counted_means(label_losses(outputs, labels), labels)


def token_losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's cross-entropy, summed over its tokens, and its number of tokens.

    The result is float64 [B, 2]. `IGNORED` tokens count in neither column.
    outputs: [B, C, T], the logits of C tokens at T positions.
    labels: [B, T], the token at each position.
    """
    sums = label_losses(outputs, labels).sum(1, dtype=torch.float64)
    return torch.stack([sums, (labels != IGNORED).sum(1, dtype=torch.float64)], 1)


def token_hits(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample the number of correctly predicted tokens and of all tokens, [B, 2].

    `IGNORED` tokens count in neither number.
    outputs: [B, C, T], the logits of C tokens at T positions.
    labels: [B, T], the token at each position.
    """
    is_counted = labels != IGNORED
    is_right = (outputs.argmax(1) == labels) & is_counted
    return torch.stack([is_right.sum(1), is_counted.sum(1)], 1)


def ratio_of_sums(parts: np.ndarray) -> float:
    """Divide the sum of the first column by the sum of the second; nan if the second sum is 0.

    parts: [n, 2].
    """
    total, count = parts.sum(axis=0, dtype=np.float64)
    return float(total / count) if count else float("nan")


def perplexity(parts: np.ndarray) -> float:
    """Return the exponential of the mean cross-entropy over tokens; nan if there are no tokens.

    parts: [n, 2], the results of `token_losses` for n samples.
    If the mean is above 709, the result is infinite.
    """
    with np.errstate(over="ignore"):
        return float(np.exp(ratio_of_sums(parts)))


def class_counts(outputs: Tensor, labels: Tensor) -> Tensor:
    """Count positions, such as pixels, for each sample and class: int64 [B, 3, C].

    The counts are positions that are correctly predicted as the class, predicted as the class, and
    labelled as the class. Labels `IGNORED` do not count.

    outputs: [B, C, ...], the logits at each position.
    labels: [B, ...], the class at each position.
    """
    batch, classes = outputs.shape[:2]
    labels = labels.reshape(batch, -1)
    predicted = outputs.argmax(1).reshape(batch, -1)
    is_counted = labels != IGNORED
    first = classes * torch.arange(batch, device=labels.device).unsqueeze(1)
    parts = [
        (first + labels)[is_counted & (labels == predicted)],
        (first + predicted)[is_counted],
        (first + labels)[is_counted],
    ]
    counts = [torch.bincount(part, minlength=batch * classes) for part in parts]
    return torch.stack(counts).view(3, batch, classes).transpose(0, 1)


def position_accuracy(counts: np.ndarray) -> float:
    """Return the share of labelled positions, such as pixels, that are predicted correctly.

    counts: [n, 3, C], the counts that `class_counts` returns for n samples.
    Ignored positions are not counted. The result is nan if all positions are ignored.
    """
    right, _, labelled = counts.sum(axis=0)
    return float(right.sum() / labelled.sum()) if labelled.any() else float("nan")


def mean_iou(counts: np.ndarray) -> float:
    """Return the intersection over union (Jaccard index), averaged over the classes.

    Classes that are neither labelled nor predicted anywhere are left out; nan if none remains.
    counts: [n, 3, C], the counts that `class_counts` returns for n samples.
    """
    right, predicted, labelled = counts.sum(axis=0)
    union = predicted + labelled - right
    is_present = union > 0
    if not is_present.any():
        return float("nan")
    return float(np.mean(right[is_present] / union[is_present]))


def position_f1(counts: np.ndarray) -> float:
    """Return the mean over the classes of 2 TP / (2 TP + FP + FN), the Dice coefficient.

    TP, FP and FN are true positives, false positives and false negatives. Classes that are neither
    labelled nor predicted are left out; nan without any class.
    counts: [n, 3, C], from `class_counts`.
    """
    right, predicted, labelled = counts.sum(axis=0)
    total = predicted + labelled
    is_present = total > 0
    if not is_present.any():
        return float("nan")
    return float(np.mean(2 * right[is_present] / total[is_present]))


# ---- classes, several labels, values -------------------------------------------------------------
def is_right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample whether its class is predicted: bool [B].

    outputs: [B, C]; the class with the largest output is the prediction.
    labels: [B], the classes.
    """
    return outputs.argmax(1) == labels


def is_among_five(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample whether its class has one of the five largest outputs: bool [B].

    outputs: [B, C].
    labels: [B], the classes.
    """
    return (outputs.topk(min(5, outputs.shape[1]), 1).indices == labels.unsqueeze(1)).any(1)


def label_pairs(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample its label, then its predicted class: int64 [B, 2].

    outputs: [B, C]; the class with the largest output is the prediction.
    labels: [B], the classes.
    """
    return torch.stack([labels, outputs.argmax(1)], dim=1)


def class_f1(pairs: np.ndarray) -> float:
    """Return the mean over the classes of F1 = 2 TP / (2 TP + FP + FN).

    TP, FP and FN count a class's true positives, false positives and false negatives. As in
    scikit-learn, classes that are neither labelled nor predicted are left out.
    pairs: int [n, 2], the label and the predicted class of each sample.
    """
    labels, predicted = pairs[:, 0], pairs[:, 1]
    classes = int(pairs.max()) + 1
    right = np.bincount(labels[labels == predicted], minlength=classes)
    total = np.bincount(labels, minlength=classes) + np.bincount(predicted, minlength=classes)
    return float(np.mean(2 * right[total > 0] / total[total > 0]))


def class_auroc(rows: np.ndarray) -> float:
    """Return the mean over the classes of the area under the ROC curve.

    Each class is compared with all other classes. A class is left out if all samples have it, or if
    no sample has it. The result is nan if no class remains.
    rows: n samples from `SetRows`, with the fields "outputs" [n, C] and "labels" [n].
    """
    outputs = torch.from_numpy(rows["outputs"].astype(np.float64)).softmax(1).numpy()
    is_class = rows["labels"][:, None] == np.arange(outputs.shape[1])
    return _mean_area(outputs, is_class)


def label_auroc(rows: np.ndarray) -> float:
    """Return the area under the ROC curve, averaged over the labels of a multi-label task.

    A label is left out if all samples have it, or if no sample has it. The result is nan if no
    label remains.
    rows: n samples from `SetRows`: "outputs" [n, L] and "labels" [n, L] for L labels.
    """
    return _mean_area(rows["outputs"], rows["labels"] > 0)


def _mean_area(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """Return the area under the ROC curve, averaged over the columns of `scores`.

    Columns in which all samples or none are positive are left out; nan if no column remains.
    scores: [n, C], for n samples.
    is_positive: bool [n, C].
    """
    positives = is_positive.sum(axis=0)
    negatives = len(is_positive) - positives
    has_both = (positives > 0) & (negatives > 0)
    if not has_both.any():
        return float("nan")
    from scipy.stats import rankdata  # slow to import, and few runs need it

    ranks = rankdata(scores[:, has_both], axis=0)
    positives, negatives = positives[has_both], negatives[has_both]
    rank_sums = (ranks * is_positive[:, has_both]).sum(axis=0)
    right_pairs = rank_sums - positives * (positives + 1) / 2
    return float(np.mean(right_pairs / (positives * negatives)))


def label_codes(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a code from 0 to 3 for each sample and label: uint8 [B, L].

    The code is 2 if the sample has the label, else 0, plus 1 if the label is predicted.
    outputs: [B, L], positive for predicted labels.
    labels: [B, L], positive for labels that a sample has.
    """
    return 2 * (labels > 0).to(torch.uint8) + (outputs > 0).to(torch.uint8)


def macro_f1(codes: np.ndarray) -> float:
    """Return the mean over the labels of F1 = 2 TP / (2 TP + FP + FN).

    TP, FP and FN count a label's true positives, false positives and false negatives. F1 is 0 for a
    label for which all three counts are 0.
    codes: [n, L], from `label_codes`, for n samples and L labels.
    """
    right = (codes == 3).sum(0)
    present_or_predicted = (codes & 1).sum(0, dtype=np.int64) + (codes >> 1).sum(0, dtype=np.int64)
    return float(np.mean(2 * right / np.maximum(present_or_predicted, 1)))


def f1_of_each(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the F1 score [B] of each sample over its labels; 0 for a sample without labels.

    The mean equals scikit-learn's `f1_score(average="samples")`.
    outputs: [B, L], positive for predicted labels.
    labels: [B, L], positive for labels that a sample has.
    """
    predicted = outputs > 0
    present = labels > 0
    right = (predicted & present).sum(1)
    present_or_predicted = predicted.sum(1) + present.sum(1)
    return 2 * right / present_or_predicted.clamp(min=1)


def share_right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the fraction of the L yes-or-no labels that are predicted correctly: [B].

    outputs, labels: [B, L]; a positive value means yes.
    """
    return ((outputs > 0) == (labels > 0)).float().mean(1)


def absolute_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample [B] the mean absolute error over the outputs."""
    return (outputs - labels).abs().flatten(1).mean(1)


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each sample [B] the mean squared error over the outputs."""
    return (outputs - labels).square().flatten(1).mean(1)


OBJECTIVES: Mapping[Kind, Objective] = {
    "classification": Objective(
        cross_entropy,
        lambda outputs, labels: cross_entropy(outputs, labels, reduction="none"),
        (
            MetricRule("accuracy", is_right),
            MetricRule("top5_accuracy", is_among_five),
            MetricRule("f1", label_pairs, class_f1),
            MetricRule("auroc", None, class_auroc),
        ),
    ),
    "multilabel": Objective(
        binary_cross_entropy_with_logits,
        lambda outputs, labels: binary_cross_entropy_with_logits(
            outputs, labels, reduction="none"
        ).mean(1),
        (
            MetricRule("f1", label_codes, macro_f1),
            MetricRule("f1_samples", f1_of_each),
            MetricRule("label_accuracy", share_right),
            MetricRule("auroc", None, label_auroc),
        ),
    ),
    "regression": Objective(
        mse_loss,
        squared_error,
        (
            MetricRule("mae", absolute_error, higher=False),
            MetricRule("mse", squared_error, higher=False),
        ),
    ),
    "positions": Objective(
        counted_loss,
        counted_losses,
        (
            MetricRule("accuracy", class_counts, position_accuracy),
            MetricRule("iou", class_counts, mean_iou),
            MetricRule("f1", class_counts, position_f1),
        ),
        has_ignored=True,
    ),
    "causal": Objective(
        counted_loss,
        counted_losses,
        (
            MetricRule("perplexity", token_losses, perplexity, higher=False),
            MetricRule("accuracy", token_hits, ratio_of_sums),
        ),
        has_ignored=True,
        usual_metrics=2,
        parts=token_losses,
    ),
}
# Only samples with a class are scored, so data with missing classes have the same scores.
PARTLY_LABELLED = Objective(
    counted_loss, counted_losses, OBJECTIVES["classification"].metrics, has_ignored=True
)


def structure_objective(loss: RowLoss | None, targets: tuple[TargetField, ...]) -> Objective:
    """Return the objective for targets that are dictionaries or lists, with the user's loss.

    Raise ValueError if the user gave no loss.
    """
    if loss is None:
        raise ValueError(
            "loss=usual cannot be used, because each target of this data is a dictionary or list "
            f"of values ({', '.join(field.name for field in targets)}). Give your own loss: a "
            "function of outputs and a list of targets that returns a value for each sample."
        )
    empty = Objective(mse_loss, squared_error, ())
    objective = empty.with_loss(OnStructures(loss, targets))
    return replace(objective, metrics=(MetricRule("sample_loss", objective.losses, higher=False),))


Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
