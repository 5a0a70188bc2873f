"""FedLD: train with smaller margins on clients, and rebuild updates from their common directions.

Source: Zeng et al., "Tackling Data Heterogeneity in Federated Learning via Loss Decomposition"
(MICCAI 2024), eq. (3) (client) and (4)-(7) (server). f_b are the logits of sample b. The client's
loss is

    loss = cross-entropy + lam mean_b log(1 + |f_b|^2)

The server has m updates g_i, the rows of a matrix G. lambda_l and e_l are the L largest eigenvalues
of G G^T / m and their eigenvectors. With the principal directions v_l = G^T e_l / |G^T e_l|, the
server averages

    g_i' = |g_i| sum_l w_l sign<g_i, v_l> v_l           w_l = lambda_l / sqrt(sum_k lambda_k^2)

The option "fedld" is the list fedld_margin (the loss), fedld_principal (the server's rule). Each of
the two can be used alone. "fedld_damped" is another loss.

Departures from the paper
- kind="batch_softmax" is the penalty of the authors' code, with which the paper's values of lam
  were tuned. The paper only names kind="logit_l2", kind="threshold" and the damped loss.
- By default |g_i'| = |g_i|, as the paper claims, unless a projection counts as 0 (`tol`). Eq. (7)
  has w_l = 1 (normalization="none"), which makes updates longer. The authors' code divides lambda_l
  by the sum of all eigenvalues ("sum"), which makes them shorter.
- The mean of the g_i' is longer than FedAvg's mean if the updates have a common direction. For a
  fair comparison, also try FedAvg with a larger server step.
- The authors' code has granularity="tensor" and the same weight for all updates. It applies the
  rule from the third round on.
- With Mixup, the label of a sample is the class with the largest weight.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.fedavg import weight_total, weighted_sum
from raysim.methods.recombination import recombine
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.vectors.gram import Granularity, gram_matrix

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

PenaltyKind: TypeAlias = Literal["marg_log", "batch_softmax", "logit_l2", "threshold"]
Normalization: TypeAlias = Literal["l2", "sum", "none"]


# --- client -------------------------------------------------------------------------------------
def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each row's margin: the label's logit minus the largest other logit, [B].

    logits: [B, C], C >= 2.
    labels: int64 [B].
    """
    classes = torch.arange(logits.shape[1], device=logits.device)
    # F.one_hot would wait for the device to know the largest label.
    is_label = labels.unsqueeze(1) == classes
    largest_other = logits.masked_fill(is_label, -torch.inf).amax(dim=1)
    return logits.gather(1, labels.unsqueeze(1)).squeeze(1) - largest_other


def margin_control_penalty(
    *, logits: Tensor, lam: float, kind: str, labels: Tensor | None = None, threshold: float = 0.0
) -> Tensor:
    """Return lam times a penalty on the logits of a batch.

    logits: [B, C].
    lam, kind, threshold: the settings of `MarginControl`.
    labels: int64 [B], needed for kind="threshold" only.
    Raises ValueError for an unknown kind, and for kind="threshold" without labels.
    """
    one_of("method.fedld_margin.kind", kind, get_args(PenaltyKind))
    if kind == "batch_softmax":
        return lam * logits.softmax(dim=1).square().sum().log1p()
    if kind == "threshold":
        if labels is None:
            raise ValueError(
                "labels=None: the margin penalty with kind='threshold' needs labels. Pass the "
                "labels of the batch."
            )
        return lam * (margins(logits, labels) - threshold).clamp(min=0.0).square().mean()
    squares = logits.square().sum(dim=1)
    if kind == "marg_log":
        squares = squares.log1p()
    return lam * squares.mean()


def damped_logits(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return damped logits, [B, C]: each row is multiplied by a factor of its own.

    The factor of a row is 1 - sigmoid(margin / temperature). The margin is the logit of the label
    minus the largest other logit of the row. Gradients also flow through the factor.
    logits: [B, C].
    labels: int64 [B].
    """
    factors = torch.sigmoid(-margins(logits, labels) / temperature)
    return factors.unsqueeze(1) * logits


# The method computes the same without this function, which states the rule on plain tensors.
def damped_margin_loss(*, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy of damped logits.

    The logits of each row are multiplied by 1 - sigmoid(margin / temperature). The margin of a row
    is the label's logit minus the largest other logit.
    logits: [B, C].
    labels: int64 [B].
    """
    return F.cross_entropy(damped_logits(logits, labels, temperature), labels)


def _heaviest_class(targets: Tensor) -> Tensor:
    """Return the labels [B]; for soft targets [B, C], the class with the largest weight."""
    if targets.ndim == 1:
        return targets
    return targets.argmax(dim=1)


class MarginControl(Method):
    """A penalty on large logits in the local loss.

    lam: the weight of the penalty.
    kind: the penalty on the logits f of the samples. "marg_log" (eq. 3) is the mean of log(1 +
    |f|^2). "logit_l2" is the mean of |f|^2. "threshold" is the mean of max(0, margin -
    threshold)^2. "batch_softmax" is log(1 + S), where S sums p^2 over all softmax probabilities p
    of the batch.
    threshold: the largest margin without a penalty. A margin is the label's logit minus the largest
    other logit.
    """

    name = "fedld_margin"
    paper = "Zeng et al., MICCAI 2024"

    def __init__(self, lam: float = 0.03, kind: PenaltyKind = "marg_log", threshold: float = 0.0):
        self.lam = at_least("method.fedld_margin.lam", lam, 0.0)
        self.kind = one_of("method.fedld_margin.kind", kind, get_args(PenaltyKind))
        if threshold and kind != "threshold":
            raise ValueError(
                f"method.fedld_margin.threshold={threshold} has no effect with "
                f"method.fedld_margin.kind={kind}. Set method.fedld_margin.kind=threshold, or "
                "method.fedld_margin.threshold=0."
            )
        self.threshold = threshold

    def setup(self, run: Setup) -> None:
        """Require a classification task."""
        run.needs("classes")

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add the penalty on the logits."""
        if not self.lam:
            return loss
        labels = _heaviest_class(out.batch.targets) if self.kind == "threshold" else None
        return loss + margin_control_penalty(
            logits=out.logits,
            lam=self.lam,
            kind=self.kind,
            labels=labels,
            threshold=self.threshold,
        )


class DampedMargin(Method):
    """A cross-entropy whose logits are multiplied by a factor that falls as their margin grows.

    The margin of a sample is its label's logit minus the largest other logit.
    temperature: a smaller value makes the factor fall faster.
    """

    name = "fedld_damped"
    paper = "Zeng et al., MICCAI 2024"

    def __init__(self, temperature: float = 1.0):
        self.temperature = above("method.fedld_damped.temperature", temperature, 0.0)

    def setup(self, run: Setup) -> None:
        """Require a classification task; replace the task loss."""
        run.needs("classes")
        run.owns("loss")

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the cross-entropy of damped logits, which replaces the task loss `loss`.

        The logits of each sample are multiplied by 1 - sigmoid(margin / temperature). The margin is
        the label's logit minus the largest other logit. For soft targets, the label is the class
        with the largest weight.
        """
        targets = out.batch.targets
        damped = damped_logits(out.logits, _heaviest_class(targets), self.temperature)
        return job.task.objective.loss(damped, targets)


# --- server -------------------------------------------------------------------------------------
def num_principal_components(*, num_clients: int, fraction: float) -> int:
    """Return L, the number of principal directions.

    L is fraction * num_clients, rounded down, but at least 1.
    num_clients: the number of updates in the aggregation.
    """
    return max(1, math.floor(fraction * num_clients + 1e-9))


def _coefficients(products: Tensor, components: int, normalization: str, tol: float) -> Tensor:
    """Return coefficients c, float64 [m, m]: the rebuilt update i is sum_j c_ij g_j.

    products: the inner products [m, m] of the original updates g_j.
    components: the largest number of principal directions that are used.
    normalization, tol: the arguments of `revise_gradients`.
    """
    one_of("method.fedld_principal.normalization", normalization, get_args(Normalization))
    # The eigenvalues of G G^T are m lambda_l, ascending.
    values, vectors = torch.linalg.eigh(products)
    rank = torch.arange(len(values), 0, -1)
    is_principal = (values > tol * values[-1]) & (rank <= components)
    eigenvalues, directions = values[is_principal], vectors[:, is_principal]
    if normalization == "l2":
        w = eigenvalues / eigenvalues.norm()
    elif normalization == "sum":
        w = eigenvalues / values.sum()
    else:
        w = eigenvalues / eigenvalues
    lengths, norms = eigenvalues.sqrt(), products.diagonal().sqrt()
    projections = directions * lengths
    signs = torch.where(projections.abs() > tol * norms[:, None], projections.sign(), 0.0)
    coefficients: Tensor = (norms[:, None] * signs * w / lengths) @ directions.T
    return coefficients


# The method computes the same without these functions, which state the rule on plain tensors.
def revise_gradients(
    *, gradients: Tensor, num_components: int, normalization: str = "l2", tol: float = 1e-8
) -> Tensor:
    """Rebuild updates from their principal directions; return the rebuilt updates [m, d].

    The rebuilt update i is |g_i| sum_l w_l sign<g_i, v_l> v_l, over the principal directions v_l of
    all updates.
    gradients: [m, d], the original updates g_i.
    num_components: the largest number of directions.
    normalization, tol: the settings of `PrincipalGradient`.
    """
    coefficients = _coefficients(
        gram_matrix(gradients.unbind()), num_components, normalization, tol
    )
    return coefficients.to(gradients.dtype) @ gradients


def principal_gradient_aggregate(
    *,
    gradients: Tensor,
    weights: Tensor,
    num_components: int,
    normalization: str = "l2",
    tol: float = 1e-8,
) -> Tensor:
    """Rebuild updates from their principal directions; return the rebuilt updates' mean [d].

    gradients: [m, d], the original updates.
    weights: [m], the weight of each rebuilt update.
    num_components, normalization, tol: the arguments of `revise_gradients`.
    Raises ValueError unless the weights are finite and at least 0, and one of them is positive.
    Also raises it for an unknown normalization.
    """
    coefficients = _coefficients(
        gram_matrix(gradients.unbind()), num_components, normalization, tol
    )
    return weighted_sum(gradients, weights.double() @ coefficients) / weight_total(weights)


class PrincipalGradient(Method):
    """A server rule that rebuilds each update from the principal directions of all updates.

    The rebuilt update is a weighted sum of L principal directions, times the length of the original
    update. Each direction gets the sign of the update's projection on it.
    fraction: L divided by the number of updates.
    normalization: the weight of a direction with the eigenvalue lambda_l. "l2" is lambda_l /
    sqrt(sum_{k <= L} lambda_k^2), which keeps the length of an update without projections that
    count as 0. "sum" divides lambda_l by the sum of all eigenvalues, and "none" is 1.
    granularity: "model" rebuilds whole updates, "tensor" rebuilds each tensor separately.
    tol: an eigenvalue counts as 0 if it is at most tol times the largest eigenvalue. A projection
    counts as 0 if it is at most tol times the length of the update.
    """

    name = "fedld_principal"
    paper = "Zeng et al., MICCAI 2024"

    def __init__(
        self,
        fraction: float = 0.8,
        normalization: Normalization = "l2",
        granularity: Granularity = "model",
        tol: float = 1e-8,
    ):
        in_range("method.fedld_principal.fraction", fraction, above=0.0, most=1.0)
        one_of("method.fedld_principal.normalization", normalization, get_args(Normalization))
        one_of("method.fedld_principal.granularity", granularity, get_args(Granularity))
        self.fraction = fraction
        self.normalization = normalization
        self.granularity = granularity
        self.tol = at_least("method.fedld_principal.tol", tol, 0.0)

    def setup(self, run: Setup) -> None:
        """Warn if each aggregation has a single update, which the rule would not change."""
        run.warn_if_single("the rebuilt update is the update itself")

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the weighted mean of the rebuilt updates.

        Each update is rebuilt from the principal directions of all updates of the aggregation. A
        rebuilt update has the same weight in the mean as its original update.
        """
        num_updates = len(aggregation.updates)
        components = num_principal_components(num_clients=num_updates, fraction=self.fraction)

        def coefficients(products: Tensor) -> Tensor:
            return _coefficients(products, components, self.normalization, self.tol)

        return recombine(aggregation, server, self.granularity, coefficients)
