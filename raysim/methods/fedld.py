"""FedLD: smaller margins on the clients, and updates rewritten in their principal directions on the server.

Zeng, Guo, Wang, Wang, Zhou and Qu, "Tackling Data Heterogeneity in Federated Learning via Loss Decomposition" (MICCAI
2024), eq. 3 (client) and 4-7 (server). Client, with f the logits:

    loss = cross-entropy + lam mean_b log(1 + |f_b|^2)

Server: of m updates g_i as rows of G, (lambda_l, e_l) the eigenpairs of G G^T / m in descending order, L of them kept,
and v_l = G^T e_l / |G^T e_l|, the mean of the updates gives way to the mean of

    g_i' = |g_i| sum_l w_l sign<g_i, v_l> v_l           w_l = lambda_l / sqrt(sum_k lambda_k^2),  so that |g_i'| = |g_i|

As <g_i, v_l> = sqrt(m lambda_l) e_l[i], that mean is a weighted sum of the updates with coefficients from their Gram
matrix. The three parts are independent methods; "fedld" is the first and the last of them.

Choices where paper and code disagree or are silent
- The code penalises softmax probabilities of the whole batch in one logarithm ("batch_softmax"); the printed lam were
  tuned with it. "logit_l2", "threshold" and the damped loss are variants of eq. 3 that the paper only names.
- Read literally, eq. 7 has w_l = 1 ("none"), and updates grow; the code's lambda_l over the sum of all ("sum") shrinks
  them. The default is the one that keeps lengths, as the paper claims.
- Eq. 6's orientation of v_l has no effect: everything is even in v_l.
- One vector per client, of trainable parameters; the code treats every tensor for itself ("tensor"), buffers too.
- Weights as everywhere (paper: n_i / n); the code's mean is unweighted.
- At least one component is kept: the code's int(0.8 m) is 0 for m = 1. Eigenvalues up to tol lambda_1 and projections
  up to tol |g_i| count as 0, where the code divides 0 by 0 or makes noise as long as an update.
- Every round has this rule: the code starts with its third, and trains nothing in its first.
- Soft targets (Mixup) count as their heaviest class where a margin needs a label.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.fedavg import weight_total, weighted_sum
from raysim.methods.recombination import recombined
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.vectors.gram import GRANULARITIES, Granularity, gram

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

Kind: TypeAlias = Literal["marg_log", "batch_softmax", "logit_l2", "threshold"]
Normalization: TypeAlias = Literal["l2", "sum", "none"]


# --- client ---------------------------------------------------------------------------------------------------------
def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """rho_b = f_b[y_b] - max_c!=y_b f_b[c] of ``logits`` (B, C), C >= 2, and ``labels`` int64 (B,): (B,)."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    is_label = (
        labels.unsqueeze(1) == classes
    )  # F.one_hot would ask the device for the largest label
    others = logits.masked_fill(is_label, -torch.inf).amax(dim=1)
    return logits.gather(1, labels.unsqueeze(1)).squeeze(1) - others


def margin_control_penalty(
    *, logits: Tensor, lam: float, kind: str, labels: Tensor | None = None, threshold: float = 0.0
) -> Tensor:
    """lam times the penalty on ``logits`` (B, C); ``labels`` int64 (B,) and ``threshold`` for kind "threshold" alone.

    ValueError for another kind than the four, and for kind "threshold" without labels.
    """
    one_of("method.fedld_margin.kind", kind, get_args(Kind))
    if kind == "batch_softmax":
        return lam * logits.softmax(dim=1).square().sum().log1p()
    if kind == "threshold":
        if labels is None:
            raise ValueError(
                "kind=threshold needs labels: margins are those of the labelled classes"
            )
        return lam * (margins(logits, labels) - threshold).clamp(min=0.0).square().mean()
    squares = logits.square().sum(dim=1)
    return lam * (squares.log1p() if kind == "marg_log" else squares).mean()


def damped_logits(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """(1 - sigmoid(rho_b / T)) f_b; gradients flow through the factor too."""
    return torch.sigmoid(-margins(logits, labels) / temperature).unsqueeze(1) * logits


def damped_margin_loss(*, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of the damped ``logits`` (B, C), the mean over the batch; ``labels`` int64 (B,)."""
    return F.cross_entropy(damped_logits(logits, labels, temperature), labels)


def _heaviest(targets: Tensor) -> Tensor:
    return targets if targets.ndim == 1 else targets.argmax(dim=1)


class MarginControl(Method):
    """lam weighs the penalty on large logits; threshold: the margin up to which kind "threshold" leaves them alone."""

    name = "fedld_margin"
    paper = "Zeng et al., MICCAI 2024"

    def __init__(self, lam: float = 0.03, kind: Kind = "marg_log", threshold: float = 0.0):
        self.lam = at_least("method.fedld_margin.lam", lam, 0.0)
        one_of("method.fedld_margin.kind", kind, get_args(Kind))
        if threshold and kind != "threshold":
            raise ValueError(
                f"method.fedld_margin.threshold={threshold} has no part in kind={kind}: set kind=threshold, or "
                "threshold=0"
            )
        self.kind, self.threshold = kind, threshold

    def setup(self, run: Setup) -> None:
        """Need classes."""
        run.needs("classes")

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add the penalty on the raw logits."""
        if not self.lam:
            return loss
        labels = _heaviest(out.batch.targets) if self.kind == "threshold" else None
        return loss + margin_control_penalty(
            logits=out.logits,
            lam=self.lam,
            kind=self.kind,
            labels=labels,
            threshold=self.threshold,
        )


class DampedMargin(Method):
    """Multiplies the logits of the training loss by what falls with their margin, faster for a small temperature."""

    name = "fedld_damped"
    paper = "Zeng et al., MICCAI 2024"

    def __init__(self, temperature: float = 1.0):
        self.temperature = above("method.fedld_damped.temperature", temperature, 0.0)

    def setup(self, run: Setup) -> None:
        """Need classes; replace the task loss."""
        run.needs("classes")
        run.owns("loss")

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the task loss of damped logits."""
        targets = out.batch.targets
        damped = damped_logits(out.logits, _heaviest(targets), self.temperature)
        return job.task.objective.loss(damped, targets)


# --- server ---------------------------------------------------------------------------------------------------------
def num_principal_components(*, num_clients: int, fraction: float) -> int:
    """L: the fraction of m, rounded down, at least 1."""
    return max(1, math.floor(fraction * num_clients + 1e-9))


def _coefficients(products: Tensor, components: int, normalization: str, tol: float) -> Tensor:
    """Of the revised updates (rows) in the original ones, float64 [m, m], of their Gram matrix [m, m]."""
    one_of("method.fedld_principal.normalization", normalization, get_args(Normalization))
    values, vectors = torch.linalg.eigh(products)  # of G G^T: m lambda_l, ascending
    principal = (values > tol * values[-1]) & (torch.arange(len(values), 0, -1) <= components)
    eigenvalues, directions = values[principal], vectors[:, principal]
    lengths, norms = eigenvalues.sqrt(), products.diagonal().sqrt()
    shares = (
        eigenvalues
        / {"l2": eigenvalues.norm(), "sum": values.sum(), "none": eigenvalues}[normalization]
    )
    projections = directions * lengths
    signs = torch.where(projections.abs() > tol * norms[:, None], projections.sign(), 0.0)
    coefficients: Tensor = (norms[:, None] * signs * shares / lengths) @ directions.T
    return coefficients


def revise_gradients(
    *, gradients: Tensor, num_components: int, normalization: str = "l2", tol: float = 1e-8
) -> Tensor:
    """g_i' of every row of ``gradients`` [m, d] -> [m, d]; ``normalization`` "l2", "sum" or "none"."""
    coefficients = _coefficients(gram(gradients.unbind()), num_components, normalization, tol)
    return coefficients.to(gradients.dtype) @ gradients


def principal_gradient_aggregate(
    *,
    gradients: Tensor,
    weights: Tensor,
    num_components: int,
    normalization: str = "l2",
    tol: float = 1e-8,
) -> Tensor:
    """The weighted mean of ``revise_gradients`` without forming them: ``gradients`` [m, d], ``weights`` [m] -> [d].

    ValueError for weights without a mean.
    """
    coefficients = _coefficients(gram(gradients.unbind()), num_components, normalization, tol)
    return weighted_sum(gradients, weights.double() @ coefficients) / weight_total(weights)


class PrincipalGradient(Method):
    """fraction: of the updates at hand, how many components are kept. tol: what counts as zero."""

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
        one_of("method.fedld_principal.granularity", granularity, GRANULARITIES)
        self.fraction, self.normalization, self.granularity = fraction, normalization, granularity
        self.tol = at_least("method.fedld_principal.tol", tol, 0.0)

    def setup(self, run: Setup) -> None:
        """Warn of aggregations of one update, which is its own principal component."""
        run.warn_if_single("the revised update is the update itself")

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """The weighted mean of the revised updates."""
        components = num_principal_components(
            num_clients=len(aggregation.updates), fraction=self.fraction
        )

        def change(products: Tensor) -> Tensor:
            return _coefficients(products, components, self.normalization, self.tol)

        return recombined(aggregation, server, self.granularity, change)
