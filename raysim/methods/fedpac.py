"""FedPAC: share an extractor, and give each client a mixture of all clients' heads.

Source: Xu et al., "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration" (ICLR 2023). Client i has n_i samples, n_ik of them in class k, and pi_ik = n_ik /
n_i. f is the shared extractor, and f_i the extractor that client i has trained. phi_i is the head
of client i, and c_k the prototype of class k. [j = l] is 1 if j = l, otherwise 0. CE is the
cross-entropy, R the alignment loss, and lam its weight:

    h_ik = pi_ik mean_{y=k} f(x)    V_i = (sum_k pi_ik mean_{y=k} |f(x)|^2 - sum_k |h_ik|^2) / n_i
    head phase:        CE, only phi_i is trained
    extractor phase:   CE + lam R, only f is trained
                       R = mean over batch and features of (f(x) - c_y)^2
    c_k   <- sum_i n_ik mean_{y=k} f_i(x) / sum_i n_ik
    phi_i <- sum_j a_ij phi_j,  a_i = argmin a'P_i a over the simplex
             P_i,jl = V_j [j = l] + sum_k <h_ik - h_jk, h_ik - h_lk>

Departures from the paper
- The first head_epochs epochs of a job train the head, all later epochs the extractor. With
  local.steps, the head trains for the steps of head_epochs passes over the samples, but at most
  head_epochs / (head_epochs + 1) of all steps. The authors train the head for one epoch and then
  the extractor for E epochs.
- The two phases have separate optimizers.
- h and V are measured with the received extractor, as in the authors' code. Measurements use all
  samples of a client, in eval mode and without augmentation.
- The authors' code trains the extractor in eval mode.
- If the last participants have no samples of a class, a client uses its own mean features as
  prototype. In the first round R is 0.
- Mixtures are over the participants of one aggregation. All other clients keep their last head, or
  the initial one.
- The authors' code drops eigenvalues of P below 0.01, and may then fail to find weights. Here P is
  not changed.
- With Mixup, R is averaged over both labels with Mixup's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn.functional import one_hot

from raysim.api.context import Stage
from raysim.api.declarations import FORWARD, Participation
from raysim.api.method import Method
from raysim.methods.client_rows import declare_rows, rows_of
from raysim.primitives.checks import above, at_least, between

if TYPE_CHECKING:
    from raysim.api.context import Outputs, Plan
    from raysim.api.declarations import Local
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup
    from raysim.vectors.layout import Layout, Vector


class Statistics(TypedDict):
    """Statistics of the D features of a client's samples.

    variance: the sum of the estimated variances of the entries of `weighted_means`.
    weighted_means: [C, D], the mean features of each class, multiplied by the share of the client's
    samples that are in the class.
    class_means: [C, D], the mean features of each class; zeros for a class without samples.
    class_counts: int64 [C], the number of samples of each class.
    """

    variance: float
    weighted_means: Tensor
    class_means: Tensor
    class_counts: Tensor


# The method computes the same without this function, which states the rule on plain tensors.
def local_statistics(*, features: Tensor, labels: Tensor, num_classes: int) -> Statistics:
    """Return the `Statistics` of a client's features, computed in float64.

    features: [n, D], the features of its n >= 1 samples.
    labels: the class of each sample, int64 [n].
    num_classes: the number C of classes.
    """
    return _statistics([(features, labels)], num_classes)


def _statistics(batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Statistics:
    """Return the statistics of all of a client's samples, from one pass over its batches.

    batches: the features [B, D] and the labels int64 [B] of each batch.
    num_classes: the number C of classes.
    """
    batch_sums = [_sums(features, labels, num_classes) for features, labels in batches]
    sums = torch.stack([row[0] for row in batch_sums]).sum(0)
    counts = torch.stack([row[1] for row in batch_sums]).sum(0)
    square = torch.stack([row[2] for row in batch_sums]).sum(0)
    samples = counts.sum()
    weighted = sums / samples
    variance = (square / samples - weighted.square().sum()) / samples
    return {
        "variance": max(0.0, float(variance)),
        "weighted_means": weighted,
        "class_means": sums / counts.clamp_min(1).unsqueeze(1),
        "class_counts": counts.long(),
    }


def _sums(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each class's sum of features [C, D] and number of rows [C], and a sum of squares.

    The sum of squares is a scalar over all entries of `features`.
    features: [B, D].
    labels: int64 [B].
    """
    values = features.double()
    classes = torch.arange(num_classes, device=labels.device)
    members = (labels == classes.unsqueeze(1)).double()
    # A matrix product, because an indexed sum on a GPU has no fixed order.
    return members @ values, members.sum(1), values.square().sum()


def aggregate_prototypes(*, class_means: Tensor, class_counts: Tensor) -> dict[str, Tensor]:
    """Return each class's prototype: the mean of the clients' class means, weighted by samples.

    class_means: [m, C, D], for m clients.
    class_counts: [m, C], the numbers of samples.
    Return "prototypes" [C, D], and "present", bool [C]: False for classes without samples.
    """
    counts = class_counts.double()
    total = counts.sum(0)
    sums = (class_means.double() * counts.unsqueeze(2)).sum(0)
    prototypes = sums / total.clamp_min(1).unsqueeze(1)
    return {"prototypes": prototypes.to(class_means.dtype), "present": total > 0}


def feature_alignment_loss(
    *,
    features: Tensor,
    labels: Tensor,
    global_prototypes: Tensor,
    global_present: Tensor,
    local_prototypes: Tensor,
    local_present: Tensor,
) -> Tensor:
    """Return the mean squared difference of `features` [B, D] and the prototypes of their classes.

    The mean is over the batch and the D features.
    The local prototype is used if the global one is not present. With neither, the distance is 0.
    labels: int64 [B].
    global_prototypes, local_prototypes: [C, D].
    global_present, local_present: bool [C].
    """
    targets = torch.where(global_present.unsqueeze(1), global_prototypes, local_prototypes).detach()
    has_target = (global_present | local_present).to(features.dtype)
    distance = (features - targets[labels]) * has_target[labels].unsqueeze(1)
    return distance.square().mean()


# The method computes the same without this function, which states the rule on plain tensors.
def classifier_combination_weights(
    *, variances: Tensor, weighted_means: Tensor, client: int, min_weight: float = 1e-3
) -> Tensor:
    """Return the weights with which one of m participants mixes the m heads, float64 [m].

    Weights are at least 0 and sum to 1. A weight of at most `min_weight` becomes 0, unless all
    weights are that small.

    variances, weighted_means: [m] and [m, C, D], from each participant's `Statistics`.
    client: the position of the participant that gets the mixed head.
    """
    return _mixture(variances.double(), _coordinates(weighted_means), client, min_weight)


def _coordinates(weighted_means: Tensor) -> Tensor:
    """Return one point for each of m participants, float64 [m, k] with k at most m.

    The distance between two points is the distance between the participants' weighted means.
    weighted_means: [m, C, D].
    """
    flat = weighted_means.double().flatten(1)
    triangle: Tensor = torch.linalg.qr((flat - flat.mean(0)).T, mode="r").R
    return triangle.T


def _mixture(variances: Tensor, points: Tensor, client: int, min_weight: float) -> Tensor:
    weights = _simplex_minimum(variances, points[client] - points, client)
    large = torch.where(weights > min_weight, weights, 0.0)
    if not bool(large.any()):
        return weights
    return large / large.sum()


def _simplex_minimum(variances: Tensor, offsets: Tensor, preferred: int) -> Tensor:
    """Return the weights a, float64 [m], that minimise a^T P a, with a_j >= 0 and sum 1.

    P is diag(variances) + offsets offsets^T. If the diagonal of P has a 0 for a participant, this
    participant gets the weight 1.
    variances: [m].
    offsets: [m, k].
    preferred: the participant that gets the weight 1 if the diagonal has a 0 for it and for others.
    """
    # With A^T A = P, let b >= 0 minimise |A b|^2 + (sum(b) - 1)^2; then a = b / sum(b).
    diagonal = variances + offsets.square().sum(1)
    best = diagonal.min()
    if not best > 0:
        # A participant without variance and bias gets the whole weight.
        choice = preferred if not diagonal[preferred] > 0 else int(diagonal.argmin())
        return one_hot(torch.tensor(choice), len(variances)).double()
    # A, whose scale has no effect.
    root = torch.cat([variances.sqrt().diag(), offsets.T]) / best.sqrt()
    system = torch.cat([root, torch.ones_like(variances).unsqueeze(0)])
    target = torch.zeros(len(system), dtype=torch.float64)
    target[-1] = 1.0
    solution, _ = nnls(system.numpy(), target.numpy(), maxiter=30 * len(variances))
    return torch.from_numpy(solution / solution.sum())


def head_steps(sizes: Sequence[int], samples: int, head_epochs: int) -> int:
    """Return the number of a job's first steps that train the head.

    These steps make `head_epochs` passes over the client's samples, but are at most head_epochs /
    (head_epochs + 1) of all steps.
    sizes: the number of samples in each batch.
    samples: the number of the client's samples.
    """
    full_batches, rest = divmod(samples, max(sizes))
    # A last batch of one sample is left out because of BatchNorm.
    is_left_out = rest == 1 and min(sizes) > 1
    steps_per_pass = full_batches + (rest > 0 and not is_left_out)
    return min(head_epochs * steps_per_pass, len(sizes) * head_epochs // (head_epochs + 1))


def _head_slices(layout: Layout) -> tuple[slice, ...]:
    """Return the slices of the vector that contain the head's parameters."""
    return layout.stretches(layout.entries_in(["model.head"]))


def _head_size(layout: Layout) -> int:
    return sum(at.stop - at.start for at in _head_slices(layout))


def _load_head(vector: Vector, head: Tensor) -> None:
    slices = _head_slices(vector.layout)
    parts = head.split([at.stop - at.start for at in slices])
    for at, values in zip(slices, parts, strict=True):
        vector.data[at].copy_(values)


def _has_prototypes(view: Participation | ServerView) -> bool:
    # Version 0 has no prototypes. The version of a job is its base version.
    return view.version > 0


def _state_reader(name: str) -> Callable[[ServerView], Tensor | None]:
    """Return a function that reads a server state; before the first aggregation it returns None.

    name: the name of the server state.
    """
    return lambda server: server.state[name] if _has_prototypes(server) else None


def _local_work(local: Local) -> tuple[str, int]:
    """Return the key and the value of the run's setting for the length of a job.

    The key is "local.epochs", or "local.steps" if the run sets no epochs.
    """
    if local.epochs is not None:
        return "local.epochs", local.epochs
    return "local.steps", local.steps or 0


class FedPAC(Method):
    """A method with a shared extractor and, for each client, a mixture of participants' heads.

    A client gets a mixture of the heads of the last aggregation in which the client took part. The
    server stores this head; for 10 classes and 512 features, 100,000 heads take 2 GB.

    lam: the weight of the loss that aligns features with prototypes.
    head_epochs: the number of a job's first epochs, which train the head.
    head_lr_factor: factor on local.lr while the head is trained.
    min_weight: weights up to this value become 0 in a mixture, unless all weights are that small.
    """

    name = "fedpac"
    paper = "Xu et al., ICLR 2023"

    def __init__(
        self,
        lam: float = 1.0,
        head_epochs: int = 1,
        head_lr_factor: float = 10.0,
        min_weight: float = 1e-3,
    ):
        self.lam = at_least("method.fedpac.lam", lam, 0.0)
        self.head_epochs = int(at_least("method.fedpac.head_epochs", head_epochs, 1))
        self.head_lr_factor = above("method.fedpac.head_lr_factor", head_lr_factor, 0.0)
        self.min_weight = between("method.fedpac.min_weight", min_weight, 0.0, 1.0)

    # --- before the run -----------------------------------------------------------------------
    def settings(self, local: Local) -> Mapping[str, object]:
        """Return the job length that FedPAC needs, under the key local.epochs or local.steps.

        The key is the one that the run sets. The value is the run's value, but at least head_epochs
        + 1, so that a job trains head and extractor.
        """
        key, budget = _local_work(local)
        return {key: max(budget, self.head_epochs + 1)}

    def setup(self, run: Setup) -> None:
        """Declare the head as personal, and what clients and server exchange besides the model."""
        run.needs("classes", "features")
        run.excludes(
            "local",
            "it compares clients by the features of a shared extractor, but local training has "
            "none",
        )
        run.warn_if_single("every client keeps the head that it trained")
        self._require_parts(run)
        key, budget = _local_work(run.local)
        unit = key.removeprefix("local.")
        run.require(
            budget > self.head_epochs,
            f"{key}={budget}: a job needs more {unit} than method.fedpac.head_epochs="
            f"{self.head_epochs}, so that it trains the head and then the extractor. Set "
            f"{key}={self.head_epochs + 1} or more.",
        )
        run.private_parameters(
            [f"model.head.{name}" for name, _ in run.model.head.named_parameters()]
        )
        run.stages(self._stages)

        classes, features = run.task.num_classes, run.model.feature_dim
        run.upload("head", _head_size)
        run.upload("class_means", classes * features)
        run.upload("weighted_means", classes * features)
        run.upload("class_counts", classes)
        run.upload("variance", 1)

        declare_rows(run, lambda server: (_head_size(server.layout),), "memory", "heads")
        run.server_state("prototypes", lambda server: server.vector.new_zeros(classes, features))
        run.server_state("present", lambda server: torch.zeros(classes, dtype=torch.bool))
        run.send_to_client("head", _head_of, _head_size, when=lambda job: job.aggregated_jobs > 0)
        if self.lam:
            for name, floats in (("prototypes", classes * features), ("present", classes)):
                run.send(name, _state_reader(name), floats, when=_has_prototypes)

    @staticmethod
    def _require_parts(run: Setup) -> None:
        """Raise an error if the model has no extractor or no linear head."""
        parts = dict(run.model.named_children())
        kind = type(parts.get("head")).__name__
        run.require(
            isinstance(parts.get("head"), nn.Linear) and "extractor" in parts,
            "model: method 'fedpac' needs a model with an extractor and a linear head, but this "
            f"model has the parts {', '.join(parts)}, and its head has the type {kind}. Choose "
            "another model.",
        )

    def _stages(self, plan: Plan) -> Sequence[Sequence[Stage]]:
        """Return a list for each batch of a job, with the one stage of this batch.

        The stages of the first batches train the head, those of later batches the extractor.
        plan: the batches of the job.
        """
        modes = {"model": True, "model.extractor": False}
        head = Stage("fedpac.head", ("model.head",), rate=self.head_lr_factor, modes=modes)
        extractor = Stage("fedpac.extractor", ("model.extractor",), modes={"model": True})
        first = head_steps(plan.sizes, plan.samples, self.head_epochs)
        return [[head]] * first + [[extractor]] * (plan.steps - first)

    def cost(self, job: Participation) -> float:
        """Return how much more a job costs than plain training, as a number of trained samples.

        Two forward passes over the client's samples measure statistics. For one sample, a forward
        pass costs a third of training the model. Training only the head also costs a third, which
        lowers the result; the result may be negative.
        """
        most = job.trained_samples * self.head_epochs / (self.head_epochs + 1)
        head = min(self.head_epochs * job.samples, most)
        return FORWARD * 2 * job.samples + (FORWARD - 1) * head

    # --- a client's job -----------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Load the client's mixture of heads; measure the statistics of the received extractor."""
        if "head" in job.received:
            _load_head(job.vector, job.received["head"])
        statistics = self._measure(job)
        job.scratch["prototypes"] = statistics["class_means"].to(job.params)
        job.scratch["present"] = statistics["class_counts"] > 0
        job.upload["weighted_means"] = statistics["weighted_means"].to(job.params)
        job.upload["class_counts"] = statistics["class_counts"]
        job.upload["variance"] = job.params.new_tensor([statistics["variance"]])

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add the weighted alignment loss while the extractor is trained."""
        is_extractor_phase = job.stage.name == "fedpac.extractor"
        if not self.lam or not is_extractor_phase or "prototypes" not in job.received:
            return loss
        return loss + self.lam * self._alignment(job, out)

    def end(self, job: LocalJob) -> None:
        """Upload the trained head, and class means of the trained extractor's features."""
        job.upload["head"] = torch.cat([job.params[at] for at in _head_slices(job.layout)])
        job.upload["class_means"] = self._measure(job)["class_means"].to(job.params)

    def personalise(self, client: PersonalModel) -> None:
        """Copy the received mixture of heads into the client's model, if there is one."""
        if "head" in client.received:
            _load_head(client.vector, client.received["head"])

    @staticmethod
    def _measure(job: LocalJob) -> Statistics:
        """Return the client's statistics, measured in eval mode."""
        job.model.eval()
        with torch.no_grad():
            batches = ((job.model.features(inputs), labels) for inputs, labels in job.data())
            statistics = _statistics(batches, job.task.num_classes)
        job.model.train()
        return statistics

    @staticmethod
    def _alignment(job: LocalJob, out: Outputs) -> Tensor:
        """Return the loss that aligns a batch's features with the prototypes of their classes."""

        def alignment(labels: Tensor) -> Tensor:
            return feature_alignment_loss(
                features=out.features,
                labels=labels,
                global_prototypes=job.received["prototypes"],
                global_present=job.received["present"],
                local_prototypes=job.scratch["prototypes"],
                local_present=job.scratch["present"],
            )

        if out.batch.pair is None:
            return alignment(out.batch.targets)
        labels, partners, weight = out.batch.pair
        first, second = alignment(labels), alignment(partners)
        weight = weight.to(first)
        return weight * first + (1 - weight) * second

    # --- an aggregation -----------------------------------------------------------------------
    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Compute new prototypes, and a new head for each participant."""
        rows = rows_of(aggregation, server, "memory", "heads")
        # Of a client with two updates, the last one counts.
        last_updates = {row: number for number, row in enumerate(rows)}

        def latest(name: str) -> Tensor:
            uploads = aggregation.uploads(name)
            return torch.stack([uploads[number] for number in last_updates.values()])

        means, counts = latest("class_means"), latest("class_counts")
        server.state.update(aggregate_prototypes(class_means=means, class_counts=counts))

        variances = latest("variance").double().flatten()
        points = _coordinates(latest("weighted_means"))
        participants = range(len(last_updates))
        mixtures = [_mixture(variances, points, i, self.min_weight) for i in participants]
        weights = torch.stack(mixtures)
        server.report["own_weight"] = float(weights.diagonal().mean())

        all_heads = server.state["heads"]
        mixed = weights @ latest("head").double()
        all_heads[list(last_updates)] = mixed.to(all_heads.dtype)


def _head_of(client: int, server: ServerView) -> Tensor | None:
    """Return a copy of a client's mixture of heads; None before its first update is aggregated."""
    rows = (server.state["clients"] == client).nonzero()
    return server.state["heads"][int(rows)].clone() if len(rows) else None
