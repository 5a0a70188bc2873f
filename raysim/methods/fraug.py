"""FRAug: train the classifier also on synthetic features that are adapted to the client.

Source: Chen et al., "FRAug: Tackling Federated Learning with Non-IID Features via Representation
Augmentation" (ICCV 2023), eqs. (1)-(6), Algorithm 1. Symbols:

    h(f(x))  FedBN's classifier: head h, extractor f       c    class prototypes of the client
    G        generator, averaged                           H    RTNet, stays with the client
    y^       labels that cycle through all classes         z    noise
    rho = exp(gamma (t - T)) in round t of T               beta = min(1/2, rho)
    D        squared maximum mean discrepancy, with five Gaussian kernels

Each batch takes three optimizer steps. The networks that a step does not train are in eval mode.

    c_k <- (1 - mu) c_k + mu mean_{y_b = k} f(x_b)      for the classes k of the batch
    v^ = c_y^ + rho H(G(z, y^), y^)                     v~ = f(x) + rho H(G(z', y), y)
    classifier:  (1 - beta) CE(h(f(x)), y) + beta/2 [CE(h(v~), y) + CE(h(v^), y^)]
                 v~ and v^ are constants
    generator:   CE(h(e), y^) - lambda_G D(e, f(x)),    e = G(z, y^)
    RTNet:       -1/2 [entropy(h(v~)) + entropy(h(v^))]
                 + lambda_H/2 [D(v~, f(x)) + D(v^, c_y^)], with rho = 1

Departures from the paper
- The weights of the cross-entropies, which are illegible in the paper, are those of the authors'
  code.
- As in this code, prototypes start at 0, mu is constant, and rho and beta are constant in a round.
  A batch of one sample is left out.
- D is over all classes together, as in this code. The metric "mmd_classes" computes D for each
  class, as in the paper's text.
- noise="uniform" is the noise of the authors' code, prototype_ramp=True the mu of a cited work.
- T is the setting `rounds`. After round T, rho and beta are constant. The paper chose gamma for T =
  300; with a smaller T, use ramp_rounds=300.
- The norm of generated features has no limit. The run warns if it is above 10 times the norm of
  real features. A smaller lambda_G or learning rate of the generator helps.
- BatchNorm layers are found by their type, so also in the shortcuts of a ResNet.
- The learning rates of generator and RTNet are multiples of local.lr. All other settings of their
  optimizers are those of the classifier's optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.context import Stage, without_gradient
from raysim.api.declarations import FORWARD
from raysim.api.method import Method
from raysim.methods.feature_distances import Metric, feature_distance, mmd as mmd
from raysim.methods.feature_networks import make_generator, make_rtnet
from raysim.methods.fedbn import batchnorm_names
from raysim.methods.mixup import soft_targets
from raysim.methods.ramps import RampForm, rampup_coefficient as rampup_coefficient
from raysim.primitives.checks import above, at_least, between, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs, Plan
    from raysim.api.declarations import Local, Participation
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

NoiseKind: TypeAlias = Literal["normal", "uniform"]
GeneratorNorm: TypeAlias = Literal["shared", "local"]
Weight: TypeAlias = float | Tensor  # in recorded steps, a scalar tensor

GENERATOR, RTNET = "fraug.generator", "fraug.rtnet"
# The ratio of the norms of generated and real features at which a run warns; it is far above the
# ratios with the paper's settings.
MAX_NORM_RATIO = 10.0


# --- the three losses ---------------------------------------------------------------------------
def classification_loss(
    real_logits: Tensor,
    real_labels: Tensor,
    domain_logits: Tensor,
    proto_logits: Tensor,
    proto_labels: Tensor,
    weight: Weight,
) -> Tensor:
    """Return the classifier's loss: (1 - weight) * real + weight / 2 * (domain + proto).

    The three terms are mean cross-entropies. Logits are [B, C], labels int64 [B].

    domain_logits: the logits of features generated around the real ones; labels are `real_labels`.
    proto_logits: the logits of features generated around class prototypes.
    weight: beta in the paper, a number or a scalar tensor.
    """
    domain = F.cross_entropy(domain_logits, real_labels)
    proto = F.cross_entropy(proto_logits, proto_labels)
    return (1 - weight) * F.cross_entropy(real_logits, real_labels) + weight / 2 * (domain + proto)


def generator_loss(
    fake_embeddings: Tensor,
    labels: Tensor,
    reference: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    lam: float,
    metric: str = "mmd",
    reference_labels: Tensor | None = None,
) -> Tensor:
    """Return the generator's loss: mean cross-entropy minus lam times a distance.

    fake_embeddings: [B, D], the generated features.
    labels: int64 [B].
    reference: [k, D], real features or prototypes, from which generated features should differ.
    head_weight, head_bias: [C, D] and [C], the classifier's linear head.
    metric: the distance, by its name in `feature_distance`.
    reference_labels: int64 [k], only for "mmd_classes"; None means `labels`.
    """
    logits = F.linear(fake_embeddings, head_weight, head_bias)
    distance = feature_distance(metric, fake_embeddings, reference, labels, reference_labels)
    return F.cross_entropy(logits, labels) - lam * distance


def rtnet_loss(
    domain_embeddings: Tensor,
    real_embeddings: Tensor,
    proto_embeddings: Tensor,
    anchors: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    lam: float,
    metric: str = "mmd",
    real_labels: Tensor | None = None,
    proto_labels: Tensor | None = None,
) -> Tensor:
    """Return RTNet's loss, which is low for uncertain predictions and small distances.

        lam/2 [dist(v~, f) + dist(v^, c)] - 1/2 [entropy(h(v~)) + entropy(h(v^))]

    domain_embeddings: v~, [B, D], synthetic features around the real features.
    real_embeddings: f, [B, D].
    proto_embeddings: v^, [B, D], synthetic features around the anchors.
    anchors: c, [B, D], class prototypes.
    head_weight, head_bias: [C, D] and [C], the classifier's linear head h.
    metric: the distance dist, by its name in `feature_distance`.
    real_labels, proto_labels: int64 [B], only for "mmd_classes".
    """
    domain_logits = F.linear(domain_embeddings, head_weight, head_bias)
    proto_logits = F.linear(proto_embeddings, head_weight, head_bias)
    entropies = _entropy(domain_logits) + _entropy(proto_logits)
    domain_distance = feature_distance(metric, domain_embeddings, real_embeddings, real_labels)
    proto_distance = feature_distance(metric, proto_embeddings, anchors, proto_labels)
    return lam / 2 * (domain_distance + proto_distance) - entropies / 2


def _entropy(logits: Tensor) -> Tensor:
    logs = F.log_softmax(logits, dim=1)
    return -(logs.exp() * logs).sum(1).mean()


# --- prototypes and labels ----------------------------------------------------------------------
def class_prototype_ema(
    prototypes: Tensor, features: Tensor, labels: Tensor, momentum: Weight
) -> Tensor:
    """Return prototypes [C, D] moved towards the mean features of their class in a batch.

    The prototype of a class without a sample does not change.
    features: [B, D].
    labels: int64 [B].
    momentum: the share of the mean features in the result, from 0 to 1; a number or a scalar
    tensor.
    """
    # Features may have a dtype with fewer digits than prototypes.
    features = features.to(prototypes.dtype)
    members = soft_targets(labels, len(prototypes), features.dtype)
    counts = members.sum(0).unsqueeze(1)
    means = members.T @ features / counts.clamp(min=1)
    return torch.where(counts > 0, (1 - momentum) * prototypes + momentum * means, prototypes)


def balanced_labels(batch_size: int, num_classes: int, step: int) -> Tensor:
    """Return the labels of one step, int64 [batch_size], which cycle through all classes.

    The first label is (step * batch_size) modulo `num_classes`, so a step continues the cycle of
    the previous step.
    step: the number of the step, from 0.
    """
    return (torch.arange(batch_size) + step * batch_size % num_classes) % num_classes


class FRAug(Method):
    """FedBN with two more networks, a generator and RTNet, to make synthetic features.

    The classifier is trained on real and synthetic features. A synthetic feature is an anchor plus
    rho times RTNet's output. The anchor is a real feature or a class prototype. The module's
    docstring has the formulas.

    rounds: T, the round from which rho and beta stay constant. The configuration sets it to the
    run's number of rounds. None is an error if ramp="exp", ramp="laine_aila", prototype_ramp=True
    or ramp_rounds is set.
    noise_dim: the length of a noise vector; in the paper half the number of features.
    noise: "normal", or "uniform" on [0, 1).
    generator_lam: the weight of the distance between generated and real features. The generator
    increases this distance.
    rtnet_lam: the weight of the distance between synthetic features and their anchors. RTNet
    decreases this distance.
    generator_metric, rtnet_metric: the two distances, by their names in `feature_distance`.
    generator_metric="mse" compares generated features with class prototypes, not with real
    features.
    generator_lr_factor, rtnet_lr_factor: factors on local.lr.
    generator_norm: "local" keeps the generator's BatchNorm on the client, "shared" sends it.
    rtnet_norm: True adds a BatchNorm at the end of RTNet.
    ramp: the formula of rho in round t:

        "exp"          exp(gamma (t - T))
        "laine_aila"   exp(-gamma (1 - t/T)^2)
        "reciprocal"   1 - 1 / (gamma t + 1)
        "constant"     1/2

    gamma: the constant in this formula.
    ramp_rounds: the number of rounds for which gamma was chosen; 300 in the paper. Except for
    "laine_aila", gamma is multiplied by ramp_rounds / T. None uses gamma itself.
    weight: the upper limit of beta, the weight of synthetic features in the classifier's loss.
    residual: a constant in place of rho in the classifier's synthetic features; None uses rho.
    prototype_weight: mu, the weight of a batch in a prototype.
    prototype_ramp: True multiplies mu by exp(-5 (1 - t/T)^2).
    use_generator: False gives RTNet the noise in place of generated features.
    use_rtnet: False makes synthetic features without RTNet, as in the authors' code. They are rho
    times the generated features plus (1 - rho) times the anchor.
    keep_optimizer: True keeps the states of a client's optimizers from one job to the next.

    The ablations of the paper's Table 3 are use_generator=False, use_rtnet=False,
    prototype_weight=1 and residual=1.
    """

    name = "fraug"
    paper = "Chen et al., ICCV 2023"

    def __init__(
        self,
        rounds: int | None = None,
        noise_dim: int = 256,
        noise: NoiseKind = "normal",
        generator_lam: float = 1.0,
        generator_metric: Metric = "mmd",
        generator_lr_factor: float = 5.0,
        generator_norm: GeneratorNorm = "shared",
        rtnet_lam: float = 1.0,
        rtnet_metric: Metric = "mmd",
        rtnet_lr_factor: float = 2.5,
        rtnet_norm: bool = True,
        ramp: RampForm = "exp",
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
        key, metrics, norms = "method.fraug", get_args(Metric), get_args(GeneratorNorm)
        self.rounds = _optional_count(f"{key}.rounds", rounds)
        self.noise_dim = int(at_least(f"{key}.noise_dim", noise_dim, 1))
        self.noise = one_of(f"{key}.noise", noise, get_args(NoiseKind))
        self.generator_lam = at_least(f"{key}.generator_lam", generator_lam, 0.0)
        self.generator_metric = one_of(f"{key}.generator_metric", generator_metric, metrics)
        self.generator_lr_factor = above(f"{key}.generator_lr_factor", generator_lr_factor, 0.0)
        self.generator_norm = one_of(f"{key}.generator_norm", generator_norm, norms)
        self.rtnet_lam = at_least(f"{key}.rtnet_lam", rtnet_lam, 0.0)
        self.rtnet_metric = one_of(f"{key}.rtnet_metric", rtnet_metric, metrics)
        self.rtnet_lr_factor = above(f"{key}.rtnet_lr_factor", rtnet_lr_factor, 0.0)
        self.rtnet_norm = rtnet_norm
        self.ramp = one_of(f"{key}.ramp", ramp, get_args(RampForm))
        self.gamma = at_least(f"{key}.gamma", gamma, 0.0)
        self.ramp_rounds = _optional_count(f"{key}.ramp_rounds", ramp_rounds)
        self.weight = between(f"{key}.weight", weight, 0.0, 1.0)
        self.residual = None if residual is None else at_least(f"{key}.residual", residual, 0.0)
        self.prototype_weight = between(f"{key}.prototype_weight", prototype_weight, 0.0, 1.0)
        self.prototype_ramp, self.keep_optimizer = prototype_ramp, keep_optimizer
        self.use_generator, self.use_rtnet = use_generator, use_rtnet
        if not (use_generator or use_rtnet):
            raise ValueError(
                f"{key}.use_generator=false and {key}.use_rtnet=false leave no network that "
                "generates features. Set one of them to true, or use method=fedbn."
            )

    # --- before the run -------------------------------------------------------------------------
    def setup(self, run: Setup) -> None:
        """Declare the generator, RTNet and the client state.

        All clients share the generator. Each client has its own RTNet, which is never sent. A
        setting can remove one of these networks. The client state is the class prototypes.
        """
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
        prototypes_shape = run.model.head.weight.shape
        run.client_state("prototypes", lambda samples: torch.zeros(prototypes_shape))
        run.stages(self.three_steps)
        run.draw("noise", self.draw_noise)
        run.draw("labels", self.draw_labels)
        if self.keep_optimizer:
            run.keep_optimizer()
        run.warn_when(self.scale_warning)

    def _check(self, run: Setup) -> None:
        """Raise an error unless the run's settings fit FRAug.

        FRAug needs batches of 2 samples or more, a linear head, and the number of rounds if a
        setting depends on this number. A model without BatchNorm only gives a warning.
        """
        has_end = self.ramp in ("exp", "laine_aila") or self.prototype_ramp
        run.require(
            self.rounds is not None or not (has_end or self.ramp_rounds),
            "method.fraug.rounds=null: ramp=exp, ramp=laine_aila, prototype_ramp=true and "
            "ramp_rounds need the number of rounds. Set method.fraug.rounds.",
        )
        run.require(
            run.local.batch > 1,
            "local.batch=1: method 'fraug' needs 2 samples in a batch. Set local.batch=2 or more.",
        )
        head = run.model.head
        run.require(
            isinstance(head, nn.Linear),
            f"model: method 'fraug' needs a linear head, not {type(head).__name__}. Set another "
            "model.",
        )
        if not batchnorm_names("model", run.model):
            run.warn(
                "model: it has no BatchNorm layer, so method 'fraug' keeps none of its layers on "
                "the client. Choose another model, such as model=small_cnn model.norm=batch."
            )

    def settings(self, local: Local) -> Mapping[str, object]:
        """Return the setting that FRAug needs: the run's local.batch, but at least 2.

        FRAug leaves out batches of one sample.
        """
        return {"local.batch": max(local.batch, 2)}

    def private_norms(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """Return the names of the BatchNorm tensors that stay on the client.

        The model's tensors always stay, as in FedBN. The generator's tensors stay only with
        generator_norm="local".
        """
        names = batchnorm_names("model", networks["model"])
        if self.use_generator and self.generator_norm == "local":
            names += batchnorm_names(GENERATOR, networks[GENERATOR])
        return names

    def three_steps(self, plan: Plan) -> Sequence[tuple[Stage, ...]]:
        """Return the stages of each batch of a job: classifier, generator, RTNet.

        A batch of one sample has no stage.
        plan: the batches of the job.
        """
        steps = {"model": Stage()}
        if self.use_generator:
            rate = self.generator_lr_factor
            steps[GENERATOR] = Stage(GENERATOR, (GENERATOR,), self.generator_step, rate=rate)
        if self.use_rtnet:
            rate = self.rtnet_lr_factor
            steps[RTNET] = Stage(RTNET, (RTNET,), self.rtnet_step, rate=rate)
        stages = tuple(
            replace(stage, modes={name: name == network for name in steps})
            for network, stage in steps.items()
        )
        return [stages if size > 1 else () for size in plan.sizes]

    def cost(self, job: Participation) -> float:
        """Return how much more a job costs than plain training, as a number of trained samples.

        The cost has two parts: a forward pass of the model in eval mode, and the passes of
        generator and RTNet. Without RTNet, generator_metric="mse" needs no such forward pass. The
        second part is estimated from the number of parameters of these networks, compared with the
        model. The estimate is too high for a model with convolutions.
        """
        layout = job.run.layout
        generator, rtnet = layout.num_parameters(GENERATOR), layout.num_parameters(RTNET)
        model = max(1, layout.num_parameters("model"))
        # Rows for each sample in the classifier's and in RTNet's step.
        first, last = 2 * bool(self.weight), 2 * self.use_rtnet
        networks = generator * (FORWARD * (first + last) + 1) + rtnet * (FORWARD * first + last)
        needs_features = self.use_rtnet or self.generator_metric != "mse"
        return (FORWARD * needs_features + networks / model) * job.trained_samples

    def scale_warning(self, row: Mapping[str, Any]) -> str:
        """Return a warning if generated features have a much larger norm than real ones, else "".

        row: a round's row of the history.
        """
        real, generated = row.get("fraug.real_norm"), row.get("fraug.generated_norm")
        if real is None or generated is None or generated <= MAX_NORM_RATIO * real:
            return ""
        remedies = [f"decrease method.fraug.generator_lr_factor (now {self.generator_lr_factor:g})"]
        if self.generator_lam > 0:
            remedies.append(f"decrease method.fraug.generator_lam (now {self.generator_lam:g})")
            if self.generator_metric not in ("mmd", "mmd_classes"):
                remedies.append("set method.fraug.generator_metric=mmd")
        return (
            f"method 'fraug': generated features have a norm of {generated:.4g}, real ones of "
            f"{real:.4g}. Synthetic features may then be unlike real ones. To correct it, "
            f"{', or '.join(remedies)}."
        )

    # --- a client's job -------------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Compute the weights of this round. Set the job's sums to 0.

        The sums are those of norms, correct predictions and steps. `end` computes the reported
        means from them.
        """
        job.scratch["sums"] = torch.zeros(4, dtype=job.params.dtype, device=job.params.device)
        rho = self._rho(job)
        beta = min(self.weight, rho)
        job.scratch["has_synthetic"] = beta > 0
        job.scratch["beta"] = beta
        job.scratch["strength"] = rho if self.residual is None else self.residual
        job.scratch["momentum"] = self._momentum(job)

    def draw_noise(self, job: LocalJob, generator: np.random.Generator) -> Sequence[Tensor]:
        """Draw noise [5, B, noise_dim] for each batch.

        Of the five matrices, the classifier's stage uses two, the generator's stage one and RTNet's
        stage two.
        """
        draw = generator.standard_normal if self.noise == "normal" else generator.random
        shapes = [(5, size, self.noise_dim) for size in job.plan.sizes]
        return [torch.from_numpy(draw(shape, dtype=np.float32)) for shape in shapes]

    def draw_labels(self, job: LocalJob, _: np.random.Generator) -> Sequence[Tensor]:
        """Return, for each batch, the classes of the features that the generator makes.

        All stages of a batch use the same classes.
        """
        classes, sizes = job.task.num_classes, job.plan.sizes
        first = job.version * len(sizes)
        return [balanced_labels(size, classes, first + step) for step, size in enumerate(sizes)]

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Update the prototypes, and return the classifier's loss, which replaces `loss`.

        The loss mixes the cross-entropy of real features with that of synthetic features. While the
        weight of the synthetic features is 0, only the real features count.
        """
        real, labels = out.features.detach(), out.batch.targets
        job.state["prototypes"] = class_prototype_ema(
            job.state["prototypes"], real, labels, job.scratch["momentum"]
        )
        if not job.scratch["has_synthetic"]:
            return F.cross_entropy(out.logits, labels)
        turn = job.drawn("labels")
        both_labels = torch.cat([labels, turn])
        with torch.no_grad():
            anchors = torch.cat([real, _anchors(job)])
            source = self._source(job, _noise(job, out)[:2], both_labels)
            strength = job.scratch["strength"]
            synthetic = self._synthetic(job, anchors, source, both_labels, strength)
        logits = job.model.head(synthetic)
        with torch.no_grad():
            _add_sums(job, real, source, logits.argmax(1) == both_labels)
        domain, proto = logits.split(len(labels))
        return classification_loss(out.logits, labels, domain, proto, turn, job.scratch["beta"])

    def generator_step(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the generator's loss."""
        labels = job.drawn("labels")
        fake = job.network("generator")(_noise(job, out)[2], labels)
        is_mse = self.generator_metric == "mse"
        reference = _anchors(job) if is_mse else _real_features(job, out)
        reference_labels = labels if is_mse else out.batch.targets
        head, lam, metric = _constant_head(job), self.generator_lam, self.generator_metric
        return generator_loss(fake, labels, reference, *head, lam, metric, reference_labels)

    def rtnet_step(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the loss of RTNet for two batches of synthetic features.

        RTNet's outputs are added to class prototypes (first batch) and to real features (second
        batch). As in the authors' code, RTNet's BatchNorm normalises the batches separately.
        """
        real, anchors, rtnet = _real_features(job, out), _anchors(job), job.network("rtnet")
        labels, turn = out.batch.targets, job.drawn("labels")
        with torch.no_grad():
            source = self._source(job, _noise(job, out)[3:], torch.cat([turn, labels]))
        proto_source, domain_source = source.split(len(labels))
        proto = anchors + rtnet(proto_source, turn)
        domain = real + rtnet(domain_source, labels)
        head, lam, metric = _constant_head(job), self.rtnet_lam, self.rtnet_metric
        return rtnet_loss(domain, real, proto, anchors, *head, lam, metric, labels, turn)

    def end(self, job: LocalJob) -> None:
        """Report three means over the job's steps, which become columns of the history.

        - "real_norm": the norm of real features.
        - "generated_norm": the norm of the generator's features; missing without a generator.
        - "synthetic_accuracy": the share of synthetic features that the head classifies correctly.

        Nothing is reported if no step used synthetic features.
        """
        real, generated, correct, steps = job.scratch["sums"].tolist()
        if not steps:
            return
        job.report["real_norm"] = real / steps
        if self.use_generator:
            job.report["generated_norm"] = generated / steps
        job.report["synthetic_accuracy"] = correct / steps

    # --- parts of the steps ---------------------------------------------------------------------
    def _rho(self, job: LocalJob) -> float:
        gamma = self.gamma
        # Laine and Aila's ramp depends only on t/T and needs no scaling.
        if self.ramp_rounds and self.rounds and self.ramp != "laine_aila":
            gamma = gamma * self.ramp_rounds / self.rounds
        return self._ramp(job, self.ramp, gamma)

    def _ramp(self, job: LocalJob, form: str, gamma: float) -> float:
        step = job.version if self.rounds is None else min(job.version, self.rounds)
        return rampup_coefficient(step, self.rounds or 1, gamma, form)

    def _momentum(self, job: LocalJob) -> float:
        ramp = self._ramp(job, "laine_aila", 5.0) if self.prototype_ramp else 1.0
        return self.prototype_weight * ramp

    def _source(self, job: LocalJob, noise: Tensor, labels: Tensor) -> Tensor:
        """Return RTNet's input, 2B rows: features that the generator makes from noise.

        With use_generator=False, the rows are the noise itself.
        noise: [2, B, noise_dim].
        labels: int64 [2B], the class of each row of the result.
        """
        rows = noise.flatten(0, 1)
        if not self.use_generator:
            return rows
        return cast(Tensor, job.network("generator")(rows, labels))

    def _synthetic(
        self, job: LocalJob, anchors: Tensor, source: Tensor, labels: Tensor, strength: Weight
    ) -> Tensor:
        """Return synthetic features [2B, D]: anchors + strength * RTNet(source, labels).

        Without RTNet, return (1 - strength) * anchors + strength * source.
        anchors: [2B, D], the real features, then the prototypes.
        source: [2B, ...], RTNet's input.
        labels: int64 [2B].
        strength: rho, or the setting `residual`; a number or a scalar tensor.
        """
        if not self.use_rtnet:
            return (1 - strength) * anchors + strength * source
        return anchors + strength * cast(Tensor, job.network("rtnet")(source, labels))


def _optional_count(key: str, value: int | None) -> int | None:
    return None if value is None else int(at_least(key, value, 1))


# --- what a step needs --------------------------------------------------------------------------
def _anchors(job: LocalJob) -> Tensor:
    """Return the prototypes of the classes that `draw_labels` chose for this batch, [B, D]."""
    prototypes: Tensor = job.state["prototypes"]
    return prototypes.index_select(0, job.drawn("labels"))


def _noise(job: LocalJob, out: Outputs) -> Tensor:
    noise: Tensor = job.drawn("noise")
    return out.once("fraug.noise", lambda: noise.to(job.params))


def _real_features(job: LocalJob, out: Outputs) -> Tensor:
    """Return the features [B, D] that the model computes for the real batch, in eval mode.

    They are computed once for each batch, after the optimizer step that trains the classifier.
    """
    features = job.model.features
    return out.once("fraug.real", lambda: without_gradient(lambda: features(out.batch.inputs)))


def _constant_head(job: LocalJob) -> tuple[Tensor, Tensor | None]:
    """Return the head's weight and bias without gradients; the bias is None if there is none."""
    head = job.model.head
    bias = cast("Tensor | None", head.bias)
    return head.weight.detach(), None if bias is None else bias.detach()


def _add_sums(job: LocalJob, real: Tensor, generated: Tensor, is_correct: Tensor) -> None:
    """Add two mean norms and an accuracy of a step to the job's sums, and count the step.

    The norms are those of the rows of `real` and of `generated`.
    real: [B, D], the features of real samples.
    generated: [2B, ...], the generator's features; without a generator, the noise.
    is_correct: bool [2B], True for correctly classified synthetic features.
    """
    real_norm, generated_norm = real.norm(dim=1).mean(), generated.norm(dim=1).mean()
    correct = is_correct.to(real.dtype).mean()
    sums = torch.stack([real_norm, generated_norm, correct, torch.ones_like(real_norm)])
    job.scratch["sums"] = job.scratch["sums"] + sums.to(job.params.dtype)
