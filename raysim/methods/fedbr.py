"""FedBR: reduce the bias of local learning with a tiny shared set of pseudo-data that carries no labels.

Guo, Tang and Lin, "FedBR: Improving Federated Learning on Heterogeneous Data via Local Learning Bias Reduction" (ICML
2023), eqs. (2)-(7), Algorithms 1-3. With s+ = cos(P(z_p), P(z_g)) and s- = cos(P(z_p), P(z)) row by row,

    L_con = mean_j -log( f1 / (f1 + f2) )     f1 = exp(tau1 s+_j), f2 = exp(tau2 s-_j)         Component 2
    L_p   = cross-entropy of pseudo-data with its targets, uniform for means of samples         Component 1
    max step: the projection P ascends L_con;  min step: features and classifier descend L_local + lambda L_p + mu L_con

Choices where paper and code disagree or are silent
- Eqs. (5)-(6) print s / tau, the code multiplies, and the published ablation with tau2 = 0 only makes sense so:
  "multiply" is the default, "divide" the other form.
- Row j of the pseudo-batch meets row j of the real one, one negative each, as in the code; eq. (2) is an expectation.
- Global features of pseudo-data are computed at every step (paper), with the frozen extractor in eval mode; the code
  computes them once a round, in train mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.methods.method import Cost, Method, Network, Stage, Task, at_least
from raysim.methods.mixup import soft_targets

if TYPE_CHECKING:
    from raysim.client import Contribution, Plan
    from raysim.models import Classifier
    from raysim.server import Server
    from raysim.step import Batch, Context, Outputs


def contrastive_loss(
    z_local_pseudo: Tensor,
    z_global_pseudo: Tensor,
    z_local: Tensor,
    tau1: float,
    tau2: float,
    temperature_mode: str = "multiply",
) -> Tensor:
    """L_con of three projected embeddings (B, D), rows paired: the mean over the rows, eqs. (2), (5) and (6).

    Raises ValueError for a mode other than "multiply" and "divide", and for dividing by a temperature of 0 or less.
    """
    kappa1, kappa2 = (_similarity_scale(tau, temperature_mode) for tau in (tau1, tau2))
    positive = kappa1 * F.cosine_similarity(z_local_pseudo, z_global_pseudo, dim=-1)
    negative = kappa2 * F.cosine_similarity(z_local_pseudo, z_local, dim=-1)
    # -log(f1 / (f1 + f2)) without the exponentials, which overflow at small temperatures in "divide".
    return -F.logsigmoid(positive - negative).mean()


def _similarity_scale(tau: float, temperature_mode: str) -> float:
    """What a similarity is multiplied by: tau or 1/tau."""
    if temperature_mode == "multiply":
        return tau
    if temperature_mode != "divide":
        raise ValueError(f"method.fedbr.temperature_mode={temperature_mode!r} must be 'multiply' or 'divide'.")
    if tau <= 0.0:
        raise ValueError(
            f"method.fedbr cannot divide by a temperature of {tau}: make it positive or set temperature_mode=multiply."
        )
    return 1.0 / tau


def pseudo_label_loss(logits: Tensor, targets: Tensor | None = None) -> Tensor:
    """Cross-entropy of ``logits`` (B, C) with soft rows ``targets`` (B, C), uniform if None: the mean over the rows."""
    log_probabilities = F.log_softmax(logits, dim=-1)
    if targets is None:
        return -log_probabilities.mean()
    return -(targets * log_probabilities).sum(dim=-1).mean()


def random_sample_mean(inputs: Tensor, indices: Tensor) -> Tensor:
    """Algorithm 2: row r is the mean of the M samples ``indices[r]``; (n, ...) and int64 (R, M) -> (R, ...)."""
    return inputs[indices].mean(dim=1)


def mixture_pseudo_data(
    proxy_means: Tensor, inputs: Tensor, labels: Tensor, indices: Tensor, num_classes: int
) -> dict[str, Tensor]:
    """Algorithm 3, eq. (4): mix each proxy mean with K of the client's samples: {"inputs" (R, ...), "targets" (R, C)}.

    ``proxy_means`` (R, ...) count as labelled uniformly; ``inputs`` (n, ...) have int64 (n,) or float (n, C) labels;
    ``indices`` int64 (R, K) names the samples, where K = 0 leaves the means as they are.
    """
    parts = indices.shape[1] + 1
    rows = soft_targets(labels, num_classes, torch.promote_types(inputs.dtype, torch.float32))
    return {
        "inputs": (proxy_means + inputs[indices].sum(dim=1)) / parts,
        "targets": (1.0 / num_classes + rows[indices].sum(dim=1)) / parts,
    }


PROJECTOR = "fedbr.projector"


class FedBR(Method):
    """Random sample means as pseudo-data. lam: weight of Component 1, mu: of Component 2; 0 leaves it out.

    pseudo_batch: B rows of pseudo-data; every client sends as many means of `samples_per_mean` samples before round 0.
    pseudo_refresh: draw B of all means every "round", or "once". projection: the paper's widths (256, 256, 128), the
    released code's (2F, 2F, F), or none. max_step=False leaves the projector as received.
    """

    name = "fedbr"
    paper = "Guo et al., ICML 2023"

    def __init__(
        self,
        lam: float = 1.0,
        mu: float = 0.5,
        tau1: float = 2.0,
        tau2: float = 2.0,
        temperature_mode: Literal["multiply", "divide"] = "multiply",
        max_step: bool = True,
        projection: Literal["paper", "code", "none"] = "paper",
        pseudo_refresh: Literal["round", "once"] = "round",
        pseudo_batch: int = 64,
        samples_per_mean: int = 10,
    ):
        self.lam = at_least("method.fedbr.lam", lam, 0.0)
        self.mu = at_least("method.fedbr.mu", mu, 0.0)
        for tau in (tau1, tau2):
            _similarity_scale(tau, temperature_mode)
        self.tau1, self.tau2, self.temperature_mode = tau1, tau2, temperature_mode
        self.max_step, self.projection, self.pseudo_refresh = max_step, projection, pseudo_refresh
        self.pseudo_batch = int(at_least("method.fedbr.pseudo_batch", pseudo_batch, 1))
        self.samples_per_mean = int(at_least("method.fedbr.samples_per_mean", samples_per_mean, 1))

    @property
    def _active(self) -> bool:
        return self.lam > 0 or self.mu > 0

    def networks(self, task: Task, model: nn.Module) -> Mapping[str, Network]:
        """P: three linear layers with ReLU between them; in no forward pass but the loss's."""
        if self.mu == 0 or self.projection == "none":
            return {}
        features = int(model.feature_dim)  # type: ignore[arg-type]
        hidden, out = (256, 128) if self.projection == "paper" else (2 * features, features)
        layers = nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, out)
        return {PROJECTOR: Network(nn.Sequential(*layers))}

    def contribute(self, client: Contribution) -> Mapping[str, np.ndarray]:
        """B means of the client's samples, drawn with replacement."""
        if not self._active:
            return {}
        size = (self.pseudo_batch, self.samples_per_mean)
        indices = torch.from_numpy(client.generator.integers(len(client.inputs), size=size)).to(client.inputs.device)
        return {"fedbr.pool": random_sample_mean(client.inputs, indices).cpu().numpy()}

    def assemble(self, parts: Mapping[str, Sequence[np.ndarray]], server: Server) -> None:
        """The pool of all means; if they are drawn once, only the drawn ones."""
        if self._active:
            pool = torch.from_numpy(np.concatenate(parts["fedbr.pool"]))
            server.state["fedbr.pool"] = pool if self.pseudo_refresh == "round" else self._draw(pool, server)

    def publish(self, server: Server) -> Mapping[str, Tensor]:
        """This version's pseudo-data."""
        if not self._active:
            return {}
        pool = server.state["fedbr.pool"]
        return {"fedbr.pseudo": self._draw(pool, server) if self.pseudo_refresh == "round" else pool}

    def _draw(self, pool: Tensor, server: Server) -> Tensor:
        return pool[server.stream("fedbr.pseudo").choice(len(pool), size=self.pseudo_batch, replace=False)]

    def cost(self, server: Server, samples: int, trained: float, turn: int) -> Cost:
        """A pass over as much pseudo-data; drawn once, it travels only to a client's first participation."""
        if not self._active:
            return Cost()
        known = self.pseudo_refresh == "once" and turn > 0
        return Cost(samples=trained, down=-server.state["fedbr.pool"].numel() if known else 0)

    def receive(self, ctx: Context) -> None:
        """Features of the pseudo-data under the received extractor; they stay the same for the whole job."""
        if self.mu:
            with torch.no_grad():
                ctx.kept["fedbr.global"] = cast("Classifier", ctx.frozen()["model"]).features(
                    ctx.published["fedbr.pseudo"]
                )

    def stages(self, plan: Plan) -> Sequence[tuple[Stage, ...]]:
        """The max step, then the min step."""
        if self.mu == 0 or self.projection == "none" or not self.max_step:
            return ((Stage(),),)
        return ((Stage("fedbr.max", trains=(PROJECTOR,), loss=self.projected_contrast, ascend=True), Stage()),)

    def projected_contrast(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """L_con with constant features: what the projector ascends."""
        return self._contrast(ctx, self._pseudo_features(ctx, out).detach(), out.features.detach())

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """lam L_p + mu L_con, the latter with the projector as the max step left it."""
        total = torch.zeros((), device=batch.inputs.device, dtype=batch.inputs.dtype)
        if self.lam:
            total = total + self.lam * pseudo_label_loss(ctx.model.head(self._pseudo_features(ctx, out)))
        if self.mu:
            total = total + self.mu * self._contrast(ctx, self._pseudo_features(ctx, out), out.features)
        return total

    def _pseudo_features(self, ctx: Context, out: Outputs) -> Tensor:
        def compute() -> Tensor:
            with ctx.statistics_kept():  # BatchNorm's statistics are of real data only
                return ctx.model.features(ctx.published["fedbr.pseudo"])

        return out.once("fedbr.pseudo_features", compute)

    def _contrast(self, ctx: Context, pseudo: Tensor, real: Tensor) -> Tensor:
        """Row j of the pseudo-data meets row j of the batch, modulo its length."""
        if len(real) != len(pseudo):
            real = real[torch.arange(len(pseudo), device=real.device) % len(real)]
        project = ctx.networks.get(PROJECTOR, nn.Identity())
        z_p, z_g, z = project(pseudo), project(ctx.kept["fedbr.global"]), project(real)
        return contrastive_loss(z_p, z_g, z, self.tau1, self.tau2, self.temperature_mode)
