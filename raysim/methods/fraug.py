"""FRAug: a shared generator and a private network make embeddings of every client's kind, on which the head trains too.

Chen, Frikha, Krompass, Gu and Tresp, "FRAug: Tackling Federated Learning with Non-IID Features via Representation
Augmentation" (ICCV 2023), eqs. (1)-(6), Algorithm 1. FedBN's classifier h(f(x)), class prototypes c, a generator G that
is averaged, and a network H (RTNet) that stays. In round t of T, with rho = exp(gamma (t - T)), beta = min(1/2, rho):

    c_k <- (1 - mu) c_k + mu mean_{y_b = k} f(x_b)      for the classes k of the batch
    v^ = c_y^ + rho H(G(z, y^), y^)     labels y^ in turn          v~ = f(x) + rho H(G(z', y), y)     both constant
    classifier:  (1 - beta) CE(h(f(x)), y) + beta/2 [CE(h(v~), y) + CE(h(v^), y^)]
    generator:   CE(h(e), y^) - lambda_G D(e, f(x)),  e = G(z, y^)
    RTNet:       -1/2 [entropy(h(v~)) + entropy(h(v^))] + lambda_H/2 [D(v~, f(x)) + D(v^, c_y^)],  rho = 1

are three optimiser steps on every batch. In each the other networks are fixed and in eval mode, and D is the squared
maximum mean discrepancy with five Gaussian kernels.

Choices where paper and code disagree or are silent
- Noise is normal (paper); noise="uniform" on [0, 1) is the code's.
- mu stays as it is (code); prototype_ramp=True multiplies it by exp(-5 (1 - t/T)^2), to which the paper refers.
- A class that is not in the batch keeps its prototype, and a new one starts at mu times its mean (code).
- The weights of the three cross-entropies, illegible in the paper, are the code's.
- D is taken once per batch, with all classes together (code; the paper speaks of each class).
- rho and beta follow the global round, not the iteration (code), and stay where they are after round T. gamma is the
  paper's for T = 300: with fewer rounds rho starts higher; ramp_rounds=300 makes gamma 300/T times as large instead.
- Nothing bounds the norm of generated embeddings. A distance "mse" grows with it. MMD has a largest value, but the
  widths of its kernels grow with the distances, so the norm grows more slowly and without a bound. A smaller lambda_G
  or rate of the generator helps: after 40 rounds on scikit-learn's digits with MMD, generated embeddings have a norm of
  65, 17 and 8 with lambda_G = 10, 1 and 0, and of 27 with lambda_G = 10 and a fifth of the rate; real ones have 13. The
  history has both norms and how many synthetic embeddings the head knows; a run that leaves the scale warns.
- BatchNorm is known by its type: names, as in the code, miss the shortcuts of a ResNet.
- Optimisers go on from round to round (code); keep_optimizer=False starts them anew, as other methods do. The order of
  the data begins anew in every round, as in all runs; the code goes on in it.
- Generator and RTNet move at multiples of local.lr and share the other settings of the local optimiser.
- A batch of one sample is left out, as in the code: there BatchNorm has nothing to normalise with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.context import Stage, inferred
from raysim.api.declarations import FORWARD
from raysim.api.method import Method
from raysim.methods.fedbn import BATCHNORM, split_parameter_names
from raysim.primitives.checks import above, at_least, between, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs, Plan
    from raysim.api.declarations import Local, Participation
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup
    from raysim.vectors.layout import Layout

RAMPS = ("exp", "laine_aila", "reciprocal", "constant")
METRICS = ("mmd", "mse", "mmd_moments")


def class_prototype_ema(
    *, prototypes: Tensor, features: Tensor, labels: Tensor, momentum: float
) -> Tensor:
    """Prototypes [C, D] moved by ``momentum`` towards the means of ``features`` [B, D] of their class, int64 [B].

    Classes without a sample keep theirs.
    """
    members = _one_hot(labels, len(prototypes), features.dtype)
    counts = members.sum(0).unsqueeze(1)
    means = members.T @ features / counts.clamp(min=1)
    return torch.where(counts > 0, (1 - momentum) * prototypes + momentum * means, prototypes)


def rampup_coefficient(*, step: int, total_steps: int, gamma: float, form: str = "exp") -> float:
    """How far a schedule is at ``step`` of ``total_steps``: in [0, 1] up to there, non-decreasing.

    "exp" e^(gamma (s - T)), "laine_aila" e^(-gamma (1 - min(s/T, 1))^2), "reciprocal" 1 - 1/(gamma s + 1), "constant"
    1/2. Raises ValueError for another form.
    """
    one_of("method.fraug.ramp", form, RAMPS)
    if form == "exp":
        return math.exp(gamma * (step - total_steps))
    if form == "laine_aila":
        return math.exp(-gamma * (1.0 - min(step / total_steps, 1.0)) ** 2)
    return 0.5 if form == "constant" else 1.0 - 1.0 / (gamma * step + 1.0)


def balanced_labels(*, batch_size: int, num_classes: int, step: int) -> Tensor:
    """All classes in turn, int64 [B]; the next step goes on where this one ends, except for what B leaves over."""
    return (torch.arange(batch_size) + step * batch_size % num_classes) % num_classes


def mmd(
    *, x: Tensor, y: Tensor, kernel: str = "gaussian", kernel_mul: float = 2.0, kernel_num: int = 5
) -> Tensor:
    """Squared maximum mean discrepancy of ``x`` [n, D] and ``y`` [k, D], biased: a scalar, 0 if all rows coincide.

    Kernel q = 0..num-1 is exp(-|a - b|^2 / w_q), w_q the mean squared distance of all rows (a constant in gradients)
    times mul^(q - num // 2). kernel="moments": mean squared differences of means and of unbiased covariances instead.
    """
    one_of("kernel", kernel, ("gaussian", "moments"))
    if kernel == "moments":
        return F.mse_loss(x.mean(0), y.mean(0)) + F.mse_loss(_covariance(x), _covariance(y))
    n, rows = len(x), torch.cat([x, y])
    rows = (
        rows - rows[:1].detach()
    )  # distances stay as they are, and large common parts do not cancel in them
    norms = rows.square().sum(1)
    squares = (norms[:, None] + norms - 2 * rows @ rows.T).clamp(min=0)
    mean = squares.detach().sum() / (len(rows) ** 2 - len(rows))
    scaled = -squares / torch.where(mean > 0, mean, 1)
    kernels = torch.stack(
        [torch.exp(scaled / kernel_mul ** (q - kernel_num // 2)) for q in range(kernel_num)]
    ).sum(0)
    return kernels[:n, :n].mean() + kernels[n:, n:].mean() - 2 * kernels[:n, n:].mean()


def classification_loss(
    *,
    real_logits: Tensor,
    real_labels: Tensor,
    domain_logits: Tensor,
    proto_logits: Tensor,
    proto_labels: Tensor,
    weight: float,
) -> Tensor:
    """Of logits [B, C] of real samples, of embeddings around them (same labels), and of ones around prototypes.

    ``weight``: beta, the share of the two synthetic parts, which count alike.
    """
    synthetic = F.cross_entropy(domain_logits, real_labels) + F.cross_entropy(
        proto_logits, proto_labels
    )
    return (1 - weight) * F.cross_entropy(real_logits, real_labels) + weight / 2 * synthetic


def generator_loss(
    *,
    fake_embeddings: Tensor,
    labels: Tensor,
    reference: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    lam: float,
    metric: str = "mmd",
) -> Tensor:
    """Embeddings [B, D] that the head knows, ``lam`` times their distance from ``reference`` [k, D] subtracted."""
    loss = F.cross_entropy(F.linear(fake_embeddings, head_weight, head_bias), labels)
    return loss - lam * _distance(fake_embeddings, reference, metric)


def rtnet_loss(
    *,
    domain_embeddings: Tensor,
    real_embeddings: Tensor,
    proto_embeddings: Tensor,
    anchors: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    lam: float,
    metric: str = "mmd",
) -> Tensor:
    """Low where the head is unsure of both kinds of embeddings [B, D] and they stay close to what they imitate.

    ``lam`` times the mean of two distances, of ``domain_embeddings`` from ``real_embeddings`` [B, D] and of
    ``proto_embeddings`` from ``anchors`` [B, D], less the mean of both kinds' entropy under the head.
    """
    doubt = sum(
        _entropy(F.linear(each, head_weight, head_bias))
        for each in (domain_embeddings, proto_embeddings)
    )
    distance = _distance(domain_embeddings, real_embeddings, metric) + _distance(
        proto_embeddings, anchors, metric
    )
    return lam / 2 * distance - doubt / 2


def _distance(a: Tensor, b: Tensor, metric: str) -> Tensor:
    one_of("method.fraug metric", metric, METRICS)
    if metric == "mse":
        return F.mse_loss(a, b)
    return mmd(x=a, y=b, kernel="gaussian" if metric == "mmd" else "moments")


def _covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred.T @ centred / (len(x) - 1)


def _entropy(logits: Tensor) -> Tensor:
    logs = F.log_softmax(logits, dim=1)
    return -(logs.exp() * logs).sum(1).mean()


def _one_hot(labels: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Rows [B, C]; torch's own asks the device for the largest label."""
    return (labels.unsqueeze(1) == torch.arange(num_classes, device=labels.device)).to(dtype)


class Conditional(nn.Module):
    """Layers that see rows [B, n] beside their labels, one-hot."""

    def __init__(self, num_classes: int, *layers: nn.Module):
        super().__init__()
        self.num_classes = num_classes
        self.layers = nn.Sequential(*layers)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        coded = torch.cat([rows, _one_hot(labels, self.num_classes, rows.dtype)], dim=1)
        return cast(Tensor, self.layers(coded))


def make_generator(features: int, noise: int, num_classes: int) -> Conditional:
    """G: noise [B, Z] to embeddings [B, D], none of them negative."""
    first, second = nn.Linear(noise + num_classes, features), nn.Linear(features, features)
    layers = first, nn.BatchNorm1d(features), nn.ReLU(), second, nn.BatchNorm1d(features), nn.ReLU()
    return Conditional(num_classes, *layers)


def make_rtnet(
    source: int, features: int, hidden: int, num_classes: int, norm: bool
) -> Conditional:
    """H: what G makes [B, source] to residuals [B, D] of either sign. norm: a BatchNorm at the end."""
    first, second = nn.Linear(source + num_classes, hidden), nn.Linear(hidden, features)
    last = (nn.BatchNorm1d(features),) if norm else ()
    return Conditional(num_classes, first, nn.BatchNorm1d(hidden), nn.ReLU(), second, *last)


GENERATOR, RTNET = "fraug.generator", "fraug.rtnet"
# Norms of generated embeddings, in those of real ones, that no setting of the paper comes to.
FAR = 10.0


class FRAug(Method):
    """rounds: T of the ramps, the run's own in the configuration. noise_dim: Z, half of D in the paper's networks.

    generator_lam, rtnet_lam: lambda of the two distances, of kind `*_metric`; with "mse" the generator's is the one
    from the prototypes. *_lr_factor: on local.lr. ramp, gamma: rho (see `rampup_coefficient`). ramp_rounds: the number
    of rounds that gamma is meant for, by which it is scaled to T; None: as it is. weight: the most that beta may be.
    residual: the strength of residuals in the classifier's step in place of rho. prototype_weight: mu.
    generator_norm="local" keeps the generator's BatchNorm on the client. rtnet_norm: RTNet ends with BatchNorm.

    The parts of Table 3, whose marks are lost in the text, are left out like this:
    generator (use_generator=False): RTNet makes residuals of the noise itself, and nothing but the classifier travels;
    transformation network (use_rtnet=False): the generator's embeddings themselves, rho G + (1 - rho) v (code);
    moving average (prototype_weight=1): a prototype is the mean of the last batch that had its class;
    smoothing (residual=1): synthetic embeddings carry the full residual from the first round on (code).
    """

    name = "fraug"
    paper = "Chen et al., ICCV 2023"

    def __init__(
        self,
        rounds: int | None = None,
        noise_dim: int = 256,
        noise: Literal["normal", "uniform"] = "normal",
        generator_lam: float = 1.0,
        generator_metric: Literal["mmd", "mse", "mmd_moments"] = "mmd",
        generator_lr_factor: float = 5.0,
        generator_norm: Literal["shared", "local"] = "shared",
        rtnet_lam: float = 1.0,
        rtnet_metric: Literal["mmd", "mse", "mmd_moments"] = "mmd",
        rtnet_lr_factor: float = 2.5,
        rtnet_norm: bool = True,
        ramp: Literal["exp", "laine_aila", "reciprocal", "constant"] = "exp",
        gamma: float = 0.01,
        ramp_rounds: int | None = None,
        weight: float = 0.5,
        residual: float | None = None,
        prototype_weight: float = 0.3,
        prototype_ramp: bool = False,
        use_generator: bool = True,
        use_rtnet: bool = True,
        keep_optimizer: bool = True,
    ):
        self.rounds = _whole("rounds", rounds)
        self.noise_dim = int(at_least("method.fraug.noise_dim", noise_dim, 1))
        self.noise = one_of("method.fraug.noise", noise, ("normal", "uniform"))
        self.generator_lam = at_least("method.fraug.generator_lam", generator_lam, 0.0)
        self.generator_metric = one_of("method.fraug.generator_metric", generator_metric, METRICS)
        self.generator_lr_factor = above(
            "method.fraug.generator_lr_factor", generator_lr_factor, 0.0
        )
        self.generator_norm = one_of(
            "method.fraug.generator_norm", generator_norm, ("shared", "local")
        )
        self.rtnet_lam = at_least("method.fraug.rtnet_lam", rtnet_lam, 0.0)
        self.rtnet_metric = one_of("method.fraug.rtnet_metric", rtnet_metric, METRICS)
        self.rtnet_lr_factor = above("method.fraug.rtnet_lr_factor", rtnet_lr_factor, 0.0)
        self.rtnet_norm = rtnet_norm
        self.ramp = one_of("method.fraug.ramp", ramp, RAMPS)
        self.gamma = at_least("method.fraug.gamma", gamma, 0.0)
        self.ramp_rounds = _whole("ramp_rounds", ramp_rounds)
        self.weight = between("method.fraug.weight", weight, 0.0, 1.0)
        self.residual = (
            None if residual is None else at_least("method.fraug.residual", residual, 0.0)
        )
        self.prototype_weight = between("method.fraug.prototype_weight", prototype_weight, 0.0, 1.0)
        self.prototype_ramp, self.keep_optimizer = prototype_ramp, keep_optimizer
        if not (use_generator or use_rtnet):
            raise ValueError(
                "method.fraug.use_generator=false and method.fraug.use_rtnet=false leave nothing to "
                "make embeddings with. Set one of them to true, or use method=fedbn."
            )
        self.use_generator, self.use_rtnet = use_generator, use_rtnet

    # --- before the run ------------------------------------------------------------------------
    def setup(self, run: Setup) -> None:
        """Add G, which travels, and H, which does not; keep BatchNorm and prototypes on clients."""
        run.needs("classes", "features")
        run.targets("integer")
        run.owns("loss")
        self._check(run)
        size, classes = run.model.feature_dim, run.task.num_classes
        if self.use_generator:
            run.network("generator", make_generator(size, self.noise_dim, classes))
        if self.use_rtnet:
            source = size if self.use_generator else self.noise_dim
            rtnet = make_rtnet(source, size, self.noise_dim, classes, self.rtnet_norm)
            run.network("rtnet", rtnet, private=True)
        run.private_parameters(self.private_norms)
        outputs = run.model.head.weight.shape
        run.client_state("prototypes", lambda samples: torch.zeros(outputs))
        run.stages(self.three_steps)
        run.draw("noise", self.draw_noise)
        run.draw("labels", self.draw_labels)
        if self.keep_optimizer:
            run.keep_optimizer()
        run.warn_when(self.scale_warning)

    def _check(self, run: Setup) -> None:
        """Require a length for the ramps, batches of two and a linear head."""
        ends = self.ramp in ("exp", "laine_aila")
        which = f"ramp={self.ramp}" if ends else "prototype_ramp=true"
        run.require(
            self.rounds is not None or not (ends or self.prototype_ramp),
            f"method.fraug.rounds=null leaves the end of method.fraug.{which} open. Set it to the "
            "number of rounds.",
        )
        run.require(
            self.rounds is not None or self.ramp_rounds is None,
            f"method.fraug.ramp_rounds={self.ramp_rounds} scales gamma to the number of rounds, and "
            "method.fraug.rounds=null gives none. Set method.fraug.rounds.",
        )
        run.require(
            run.local.batch > 1,
            "local.batch=1 makes batches of one sample, which method 'fraug' leaves out. Set "
            "local.batch=2 or more.",
        )
        run.require(
            isinstance(run.model.head, nn.Linear),
            "method 'fraug' trains the model's head on embeddings, and "
            f"{type(run.model.head).__name__} is no linear layer. Choose a model with one Linear as "
            "its head.",
        )
        if not _normalising("model", run.model):
            run.warn(
                "method 'fraug' finds no BatchNorm in the model, so that no layer besides RTNet's "
                "stays on the client. Choose a model with BatchNorm, such as model=small_cnn "
                "model.norm=batch."
            )

    def settings(self, local: Local) -> Mapping[str, object]:
        """Return batches of two: those of one sample are left out."""
        return {"local.batch": max(local.batch, 2)}

    def private_norms(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """Return BatchNorm of the model, as in FedBN, and of the generator where it is local."""
        names = _normalising("model", networks["model"])
        if self.use_generator and self.generator_norm == "local":
            names += _normalising(GENERATOR, networks[GENERATOR])
        return names

    def three_steps(self, plan: Plan) -> Sequence[tuple[Stage, ...]]:
        """Return classifier, generator and RTNet of each batch; nothing on one of one sample."""
        steps = {"model": Stage()}
        if self.use_generator:
            rate = self.generator_lr_factor
            steps[GENERATOR] = Stage(GENERATOR, (GENERATOR,), self.generator_step, rate=rate)
        if self.use_rtnet:
            rate = self.rtnet_lr_factor
            steps[RTNET] = Stage(RTNET, (RTNET,), self.rtnet_step, rate=rate)
        fixed = dict.fromkeys(steps, False)
        stages = tuple(
            replace(stage, modes={**fixed, network: True}) for network, stage in steps.items()
        )
        return [stages if size > 1 else () for size in plan.sizes]

    def cost(self, job: Participation) -> float:
        """Return a forward pass in eval mode, and the small networks' passes by their parameters.

        That makes them dearer than they are compared with convolutions, which use a parameter many
        times.
        """
        layout = job.run.layout
        generator, rtnet = _floats(layout, GENERATOR), _floats(layout, RTNET)
        # Rows for each sample in the first and the third step.
        first, last = 2 * bool(self.weight), 2 * self.use_rtnet
        own = generator * (FORWARD * (first + last) + 1) + rtnet * (FORWARD * first + last)
        looks = self.use_rtnet or self.generator_metric != "mse"  # at real embeddings
        return (FORWARD * looks + own / max(1, _floats(layout, "model"))) * job.trained

    def scale_warning(self, row: Mapping[str, Any]) -> str:
        """Return a warning with what to do once generated embeddings leave the scale of real ones."""
        real, generated = row.get("fraug.real_norm"), row.get("fraug.generated_norm")
        if real is None or generated is None or generated <= FAR * real:
            return ""
        remedies = [f"method.fraug.generator_lr_factor (now {self.generator_lr_factor:g})"]
        if self.generator_lam > 0:
            remedies.insert(0, f"method.fraug.generator_lam (now {self.generator_lam:g})")
        slower = ""
        if self.generator_lam > 0 and self.generator_metric != "mmd":
            slower = (
                ", or set method.fraug.generator_metric=mmd, with which the norm grows more slowly"
            )
        return (
            f"method 'fraug': generated embeddings have a norm of {generated:.4g}, real ones of "
            f"{real:.4g}, so that the head learns from embeddings that no client has. "
            f"Decrease {' or '.join(remedies)}{slower}."
        )

    # --- a client's job ------------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Start the sums of what embeddings are like, and of the steps that made any."""
        job.scratch["seen"] = torch.zeros(4, dtype=job.params.dtype, device=job.params.device)

    def draw_noise(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        """Draw [5, B, Z] for each step: two for the classifier, one for G, two for RTNet."""
        draw = generator.standard_normal if self.noise == "normal" else generator.random
        shapes = [(5, size, self.noise_dim) for size in job.plan.sizes]
        return [torch.from_numpy(draw(shape, dtype=np.float32)) for shape in shapes]

    def draw_labels(self, job: LocalJob, _: np.random.Generator) -> Sequence[Tensor]:
        """Return y^ of each step, the same for all its stages, in turn instead of at random."""
        classes, sizes = job.task.num_classes, job.plan.sizes
        first = job.version * len(sizes)
        return [
            balanced_labels(batch_size=size, num_classes=classes, step=first + step)
            for step, size in enumerate(sizes)
        ]

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the classifier's loss; prototypes move first."""
        real, labels = out.features.detach(), out.batch.targets
        self._move_prototypes(job, real, labels)
        gamma = self.gamma if self.ramp == "laine_aila" else self._pace
        rho = self._ramp(job, self.ramp, gamma)
        beta = min(self.weight, rho)
        if not beta:
            return F.cross_entropy(out.logits, labels)
        even = job.drawn("labels")
        both = labels, even
        with torch.no_grad():
            anchors = torch.cat([real, self._anchors(job)])
            source = self._source(job, self._noise(job, out)[:2], both)
            strength = rho if self.residual is None else self.residual
            synthetic = self._around(job, anchors, source, both, strength)
        logits = job.model.head(synthetic)
        with torch.no_grad():
            known = logits.argmax(1) == torch.cat(both)
            self._add_scale(job, real, source, known)
        domain, proto = logits.split(len(labels))
        return classification_loss(
            real_logits=out.logits,
            real_labels=labels,
            domain_logits=domain,
            proto_logits=proto,
            proto_labels=even,
            weight=beta,
        )

    def generator_step(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the generator's loss."""
        labels = job.drawn("labels")
        fake = job.network("generator")(self._noise(job, out)[2], labels)
        is_mse = self.generator_metric == "mse"
        weight, bias = _constant_head(job)
        return generator_loss(
            fake_embeddings=fake,
            labels=labels,
            reference=self._anchors(job) if is_mse else self._real(job, out),
            head_weight=weight,
            head_bias=bias,
            lam=self.generator_lam,
            metric=self.generator_metric,
        )

    def rtnet_step(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return RTNet's loss. Its BatchNorm sees the two residuals apart, in the code's order."""
        real, anchors, rtnet = self._real(job, out), self._anchors(job), job.network("rtnet")
        labels, even = out.batch.targets, job.drawn("labels")
        with torch.no_grad():
            source = self._source(job, self._noise(job, out)[3:], (even, labels))
        first, second = source.split(len(labels))
        proto = anchors + rtnet(first, even)
        domain = real + rtnet(second, labels)
        weight, bias = _constant_head(job)
        return rtnet_loss(
            domain_embeddings=domain,
            real_embeddings=real,
            proto_embeddings=proto,
            anchors=anchors,
            head_weight=weight,
            head_bias=bias,
            lam=self.rtnet_lam,
            metric=self.rtnet_metric,
        )

    def end(self, job: LocalJob) -> None:
        """Report what embeddings were like: norms, and the share of synthetic ones the head knows."""
        real, generated, known, steps = job.scratch["seen"].tolist()
        if not steps:
            return
        job.report["real_norm"] = real / steps
        if self.use_generator:
            job.report["generated_norm"] = generated / steps
        job.report["synthetic_accuracy"] = known / steps

    # --- their parts ---------------------------------------------------------------------------
    @staticmethod
    def _add_scale(job: LocalJob, real: Tensor, generated: Tensor, known: Tensor) -> None:
        """Add a step's norms, and what the head knows of synthetic embeddings, to the job's sums."""
        norms = [rows.norm(dim=1).mean() for rows in (real, generated)]
        seen = torch.stack([*norms, known.to(real.dtype).mean(), torch.ones_like(norms[0])])
        job.scratch["seen"] = job.scratch["seen"] + seen.to(job.params.dtype)

    @property
    def _pace(self) -> float:
        """gamma, as fast as in a run of `ramp_rounds`."""
        if self.ramp_rounds and self.rounds:
            return self.gamma * self.ramp_rounds / self.rounds
        return self.gamma

    def _ramp(self, job: LocalJob, form: str, gamma: float) -> float:
        step = job.version if self.rounds is None else min(job.version, self.rounds)
        return rampup_coefficient(step=step, total_steps=self.rounds or 1, gamma=gamma, form=form)

    def _move_prototypes(self, job: LocalJob, features: Tensor, labels: Tensor) -> None:
        """Move the prototypes of the batch's classes."""
        momentum = self.prototype_weight
        if self.prototype_ramp:
            momentum *= self._ramp(job, "laine_aila", 5.0)
        before = job.state["prototypes"]
        # Features may have come out of products in a coarser type.
        job.state["prototypes"] = class_prototype_ema(
            prototypes=before,
            features=features.to(before.dtype),
            labels=labels,
            momentum=momentum,
        )

    @staticmethod
    def _anchors(job: LocalJob) -> Tensor:
        """Return the prototypes of y^."""
        prototypes: Tensor = job.state["prototypes"]
        return prototypes.index_select(0, job.drawn("labels"))

    @staticmethod
    def _noise(job: LocalJob, out: Outputs) -> Tensor:
        """Return the step's noise in the vector's type."""
        return out.once("fraug.noise", lambda: job.drawn("noise").to(job.params))

    @staticmethod
    def _real(job: LocalJob, out: Outputs) -> Tensor:
        """Return f(x) after the classifier's step, in eval mode; one pass for G and RTNet."""
        features = job.model.features
        return out.once("fraug.real", lambda: inferred(lambda: features(out.batch.inputs)))

    def _source(self, job: LocalJob, noise: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        """Return what RTNet transforms [2B, n]: noise [2, B, Z] through G, all rows at once."""
        rows = noise.flatten(0, 1)
        if not self.use_generator:
            return rows
        return cast(Tensor, job.network("generator")(rows, torch.cat(labels)))

    def _around(
        self,
        job: LocalJob,
        anchors: Tensor,
        source: Tensor,
        labels: tuple[Tensor, Tensor],
        strength: float,
    ) -> Tensor:
        """Return synthetic embeddings [2B, D], made of what `_source` returned."""
        if not self.use_rtnet:
            return (1 - strength) * anchors + strength * source
        return anchors + strength * cast(Tensor, job.network("rtnet")(source, torch.cat(labels)))


def _whole(key: str, value: int | None) -> int | None:
    """Return a setting that is None or a number of rounds."""
    return None if value is None else int(at_least(f"method.fraug.{key}", value, 1))


def _normalising(network: str, module: nn.Module) -> list[str]:
    """Return full names of all that belongs to a network's BatchNorm layers."""
    norms = [
        f"{network}.{path}"
        for path, layer in module.named_modules()
        if isinstance(layer, BATCHNORM)
    ]
    leaves = (*module.named_parameters(), *module.named_buffers())
    names = [f"{network}.{path}" for path, _ in leaves]
    return split_parameter_names(names=names, norm_modules=norms)["personal"]


def _constant_head(job: LocalJob) -> tuple[Tensor, Tensor | None]:
    """Return the head's weight and bias, which another method may have removed, as constants."""
    head = job.model.head
    bias = cast("Tensor | None", head.bias)
    return head.weight.detach(), None if bias is None else bias.detach()


def _floats(layout: Layout, network: str) -> int:
    return sum(entry.stop - entry.start for entry in layout.within((network,)))
