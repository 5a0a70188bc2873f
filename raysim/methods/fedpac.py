"""FedPAC: a shared extractor that is drawn to global class means, and for each client a mixture of all clients' heads.

Xu, Tong and Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration" (ICLR 2023).
Client i has n_i samples, a share pi_ik of them in class k; f is the extractor, phi_i the head, c_k a class's prototype.

    h_ik = pi_ik mean_{y=k} f(x)    V_i = (sum_k pi_ik mean_{y=k} |f(x)|^2 - sum_k |h_ik|^2) / n_i
    head phase:        CE, phi_i alone moves
    extractor phase:   CE + lam R, f alone moves;  R = mean over batch and features of (f(x) - c_y)^2
    c_k   <- sum_i n_ik mean_{y=k} f_i(x) / sum_i n_ik
    phi_i <- sum_j a_ij phi_j,  a_i = argmin a'P_i a over the simplex
             P_i,jl = V_j [j = l] + sum_k <h_ik - h_jk, h_ik - h_lk>

The extractor is combined as the run says (FedAvg by default). Label counts travel up with the statistics.

Choices where paper and code disagree or are silent
- The budget. The authors train the head for one epoch and then the extractor for E, so local.epochs is the sum: set it
  to head_epochs + E. The head phase is as many steps as `head_epochs` = h passes over all of the client's samples take,
  and at most h of h + 1 equal parts of all steps, which matters for a budget of local.steps (or epochs on some samples
  only). local.lr is the extractor's rate. Each phase has an optimiser of its own.
- h and V are of the received extractor, the class means that become prototypes of the trained one (code); all in eval
  mode, without augmentation, over all samples. The code never leaves eval mode; here the extractor trains in train mode
  and is in eval mode while it is frozen, so that the head phase leaves running statistics alone.
- A class that nobody holds has no prototype; its samples are drawn to the client's own mean of the received extractor's
  features, and R is 0 in the first round. The code fails there.
- Prototypes and mixtures are over the participants of one aggregation (of a single one its own); others keep their last
  head, and a client that never took part the initial one. Of a client that is twice in a buffer only the last
  update counts. A client that is sent off again before its update was aggregated starts from its previous mixture.
- P has no negative eigenvalue, so nothing is repaired (the code drops eigenvalues below 0.01 and may give up).
- Weights up to min_weight are cut off (code), unless all of them are.
- With Mixup, R is the mean of the two labels' R with Mixup's weights.

Where all participants are close, their mixtures take 0.1 s for 20 of them and 2 s for 100, on one core.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.context import Stage
from raysim.api.declarations import FORWARD, Cost, Download, Participation
from raysim.api.hooked_method import HookedMethod
from raysim.primitives.checks import above, at_least, between
from raysim.vectors.row_store import extended, reserve, settled

if TYPE_CHECKING:
    from raysim.api.context import Batch, Context, Outputs, Own, Plan
    from raysim.api.declarations import Local
    from raysim.api.hooked_method import OldSetup as Setup
    from raysim.api.server_view import Aggregation, Server
    from raysim.vectors.layout import Layout, Vector

_OPTIMAL = 1e-12  # how far a gradient on the simplex may point inwards, relative to the best single client's objective


class Statistics(TypedDict):
    """Of a client's features: V_i, h_i [C, D], class means [C, D] and counts int64 [C]; zeros for absent classes."""

    variance: float
    weighted_means: Tensor
    class_means: Tensor
    class_counts: Tensor


def local_statistics(*, features: Tensor, labels: Tensor, num_classes: int) -> Statistics:
    """The statistics of ``features`` [n, D], n >= 1, with ``labels`` int64 [n], added up in float64."""
    return _statistics([(features, labels)], num_classes)


def _statistics(batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Statistics:
    """The same of batches. As sum_k pi_k mean_k |f|^2 is the mean of all |f|^2, three sums are enough."""
    parts = [_sums(features, labels, num_classes) for features, labels in batches]
    sums, counts, square = (torch.stack(column).sum(0) for column in zip(*parts, strict=True))
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
    """Of the features by class [C, D], of ones by class [C], and of all squares; a product, for its order is fixed."""
    values = features.double()
    member = (labels == torch.arange(num_classes, device=labels.device).unsqueeze(1)).double()
    return member @ values, member.sum(1), values.square().sum()


def aggregate_prototypes(*, class_means: Tensor, class_counts: Tensor) -> dict[str, Tensor]:
    """Means weighed by samples: ``class_means`` [m, C, D], ``class_counts`` [m, C] -> "prototypes" [C, D] and
    "present" bool [C], False for a class that nobody holds."""
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
    """R: mean squared distance of ``features`` [B, D] to the prototypes [C, D] of their ``labels`` int64 [B].

    Global ones where present (bool [C]), else local ones; a class with neither contributes 0, still counted in B.
    """
    targets = torch.where(global_present.unsqueeze(1), global_prototypes, local_prototypes).detach()
    known = (global_present | local_present).to(features.dtype)
    distance = (features - targets[labels]) * known[labels].unsqueeze(1)
    return distance.square().mean()


def classifier_combination_weights(
    *, variances: Tensor, weighted_means: Tensor, client: int, min_weight: float = 1e-3
) -> Tensor:
    """a_i, float64 [m], of ``client`` among m participants with V ``variances`` [m] and h ``weighted_means`` [m, C, D].

    At least 0, of sum 1; entries up to ``min_weight`` are 0 unless all would be.
    """
    return _combination(variances.double(), _coordinates(weighted_means), client, min_weight)


def _coordinates(weighted_means: Tensor) -> Tensor:
    """Points [m, at most m], float64, with the distances of h: all that P needs, without its many features."""
    flat = weighted_means.double().flatten(1)
    triangle: Tensor = torch.linalg.qr((flat - flat.mean(0)).T, mode="r").R
    return triangle.T


def _combination(variances: Tensor, points: Tensor, client: int, min_weight: float) -> Tensor:
    away = points[client] - points
    weights = _simplex_minimum(variances.diag() + away @ away.T, client)
    large = torch.where(weights > min_weight, weights, 0.0)
    return large / large.sum() if bool(large.any()) else weights


def _simplex_minimum(matrix: Tensor, preferred: int) -> Tensor:
    """argmin of a'Pa over a >= 0, sum(a) = 1, for a positive semidefinite P [m, m], float64.

    With P = A'A it is b / sum(b) of the non-negative least squares |Ab|^2 + (sum(b) - 1)^2, solved by the active sets
    of Lawson and Hanson (1974, chapter 23) on the normal equations (P + 11') b = 1, from the best single entry on.
    """
    diagonal = matrix.diagonal()
    start = preferred if bool(diagonal[preferred] <= diagonal.min()) else int(diagonal.argmin())
    best = diagonal[start]
    weights, passive = torch.zeros_like(diagonal), torch.zeros_like(diagonal, dtype=torch.bool)
    passive[start] = True
    if not best > 0:  # nothing is better than no variance and no bias
        return passive.double()
    system = matrix / best + 1.0  # a factor on P changes b but not b / sum(b)
    weights[start] = 0.5
    for _ in range(10 * len(matrix)):  # each turn lowers the objective, so few suffice; rounding must not hold it up
        inward = (1.0 - system @ weights).masked_fill(passive, -torch.inf)
        if float(inward.max()) <= _OPTIMAL:
            break
        passive[inward.argmax()] = True
        weights = _solved(system, weights, passive)
    return weights / weights.sum()


def _solved(system: Tensor, weights: Tensor, passive: Tensor) -> Tensor:
    """From `weights` to the minimum over the entries in `passive`, dropping from it those that reach 0 on the way."""
    while True:
        chosen = passive.nonzero().flatten()
        trial = torch.zeros_like(weights)
        trial[chosen] = torch.linalg.solve(system[chosen][:, chosen], torch.ones_like(weights[chosen]))
        blocked = chosen[trial[chosen] <= 0]
        if not len(blocked):
            return trial
        ways = weights[blocked] / (weights[blocked] - trial[blocked]).clamp_min(1e-300)
        first = ways.argmin()
        weights = weights + ways[first] * (trial - weights)
        passive[blocked[first]] = False
        weights = weights.clamp_min(0.0) * passive


def head_steps(sizes: Sequence[int], samples: int, head_epochs: int) -> int:
    """How many of a job's steps, with batches of ``sizes``, train the head: the first of them; see above."""
    whole, rest = divmod(samples, max(sizes))
    dropped = rest == 1 and min(sizes) > 1  # for the sake of BatchNorm
    once = whole + (rest > 0 and not dropped)
    return min(head_epochs * once, len(sizes) * head_epochs // (head_epochs + 1))


HEAD, MEANS, WEIGHTED, COUNTS, VARIANCE = (
    f"fedpac.{name}" for name in ("head", "class_means", "weighted_means", "class_counts", "variance")
)
PROTOTYPES, PRESENT, LOCAL, HELD = (f"fedpac.{name}" for name in ("prototypes", "present", "local", "held"))
HEADS, ROWS = "fedpac.heads", "fedpac.rows"


def _runs(layout: Layout) -> tuple[slice, ...]:
    """Where the head lies in the vector."""
    return layout.runs(layout.within(["model.head"]))


def _head_size(layout: Layout) -> int:
    return sum(run.stop - run.start for run in _runs(layout))


def _load_head(vector: Vector, head: Tensor) -> None:
    runs = _runs(vector.layout)
    for run, values in zip(runs, head.split([run.stop - run.start for run in runs]), strict=True):
        vector.data[run].copy_(values)


class FedPAC(HookedMethod):
    """lam weighs R. head_epochs: of local.epochs, for the head; head_lr_factor: on local.lr there.

    min_weight: shares of other clients' heads that are too small to keep. The server keeps a head for each client that
    took part: 20 KB each for 10 classes of 512 features, 2 GB for 100,000 clients.
    """

    name = "fedpac"
    paper = "Xu et al., ICLR 2023"
    needs = frozenset(("classes", "features"))
    excludes: ClassVar[Mapping[str, str]] = {
        "local": "it compares clients by their features in one shared extractor, and local training shares none"
    }

    def __init__(self, lam: float = 1.0, head_epochs: int = 1, head_lr_factor: float = 10.0, min_weight: float = 1e-3):
        self.lam = at_least("method.fedpac.lam", lam, 0.0)
        self.head_epochs = int(at_least("method.fedpac.head_epochs", head_epochs, 1))
        self.head_lr_factor = above("method.fedpac.head_lr_factor", head_lr_factor, 0.0)
        self.min_weight = between("method.fedpac.min_weight", min_weight, 0.0, 1.0)

    # --- declared once -------------------------------------------------------------------------------------------
    def personal(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """The head; it travels on purpose, beside the update."""
        return [f"model.head.{name}" for name, _ in networks["model"].get_submodule("head").named_parameters()]

    def require(self, local: Local) -> Mapping[str, object]:
        """Return a budget that has an epoch or a step for the extractor after those of the head."""
        key, budget = ("epochs", local.epochs) if local.epochs is not None else ("steps", local.steps or 0)
        return {f"local.{key}": max(budget, self.head_epochs + 1)}

    def check(self, setup: Setup) -> Sequence[str]:
        """An extractor and a linear head, and a budget that both phases have a part in."""
        parts = dict(setup.networks["model"].named_children())
        if not isinstance(parts.get("head"), nn.Linear) or "extractor" not in parts:
            raise ValueError(
                f"method 'fedpac' needs a model of an extractor and a linear head, and this one has a "
                f"{type(parts.get('head')).__name__} as its head and the parts {', '.join(parts)}: choose another model"
            )
        local = setup.local
        key, budget = ("epochs", local.epochs) if local.epochs is not None else ("steps", local.steps or 0)
        if budget <= self.head_epochs:
            raise ValueError(
                f"local.{key}={budget} leaves nothing for the extractor after method.fedpac.head_epochs="
                f"{self.head_epochs} for the head: set local.{key}={self.head_epochs + 1} or more"
            )
        return setup.warn_if_single("fedpac", "every client keeps the head that it trained")

    def stages(self, plan: Plan) -> Sequence[tuple[Stage, ...]]:
        """An entry per step: first the head's, then the extractor's."""
        modes = {"model": True, "model.extractor": False}
        head = Stage("fedpac.head", ("model.head",), rate=self.head_lr_factor, modes=modes)
        extractor = Stage("fedpac.extractor", ("model.extractor",), modes={"model": True})
        first = head_steps(plan.sizes, plan.samples, self.head_epochs)
        return [(head,)] * first + [(extractor,)] * (plan.steps - first)

    def cost(self, job: Participation) -> Cost:
        """Two passes over all samples for the statistics; the head phase saves the extractor's backward pass.

        The prototypes travel from the second round on, a head to each client that has an update in an earlier version:
        also where that update failed, since no result of training can be known here.
        """
        layout, classes = job.run.layout, job.run.task.num_classes
        features = next(e.shape[1] for e in layout.within(["model.head"]) if e.path == "head.weight")
        head = min(self.head_epochs * job.samples, job.trained * self.head_epochs / (self.head_epochs + 1))
        return Cost(
            samples=FORWARD * 2 * job.samples + (FORWARD - 1) * head,
            down=(classes * (features + 1) if self.lam and job.version else 0)
            + (_head_size(layout) if job.accepted else 0),
            up=_head_size(layout) + 2 * classes * features + classes + 1,
        )

    # --- on a client ---------------------------------------------------------------------------------------------
    def receive(self, ctx: Context) -> None:
        """Take the combined head, and measure the client with the received extractor."""
        if HEAD in ctx.download:
            _load_head(ctx.vector, ctx.download[HEAD])
        statistics = self._measure(ctx)
        ctx.kept |= {LOCAL: statistics["class_means"].to(ctx.vector.data), HELD: statistics["class_counts"] > 0}
        ctx.upload |= {
            WEIGHTED: statistics["weighted_means"].to(ctx.vector.data),
            COUNTS: statistics["class_counts"],
            VARIANCE: ctx.vector.data.new_tensor([statistics["variance"]]),
        }

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """lam R, in the extractor phase."""
        if not self.lam or ctx.stage.name != "fedpac.extractor" or PROTOTYPES not in ctx.download:
            return out.logits.new_zeros(())
        if batch.pair is None:
            return self.lam * self._alignment(ctx, out.features, batch.targets)
        own, partner, weight = batch.pair
        first, second = (self._alignment(ctx, out.features, labels) for labels in (own, partner))
        weight = weight.to(first)
        return self.lam * (weight * first + (1 - weight) * second)

    def finish(self, ctx: Context) -> None:
        """The trained head, and class means of the trained extractor's features."""
        ctx.upload[HEAD] = torch.cat([ctx.vector.data[run] for run in _runs(ctx.vector.layout)])
        ctx.upload[MEANS] = self._measure(ctx)["class_means"].to(ctx.vector.data)

    def personalise(self, own: Own) -> None:
        """The combined head, once there is one."""
        if HEAD in own.download:
            _load_head(own.vector, own.download[HEAD])

    @staticmethod
    def _measure(ctx: Context) -> Statistics:
        """In eval mode; training goes on in train mode."""
        ctx.model.eval()
        with torch.no_grad():
            batches = ((ctx.model.features(inputs), labels) for inputs, labels in ctx.data())
            statistics = _statistics(batches, ctx.trainer.task.num_classes)
        ctx.model.train()
        return statistics

    @staticmethod
    def _alignment(ctx: Context, features: Tensor, labels: Tensor) -> Tensor:
        return feature_alignment_loss(
            features=features,
            labels=labels,
            global_prototypes=ctx.download[PROTOTYPES],
            global_present=ctx.download[PRESENT],
            local_prototypes=ctx.kept[LOCAL],
            local_present=ctx.kept[HELD],
        )

    # --- on the server -------------------------------------------------------------------------------------------
    def start(self, server: Server) -> None:
        """The combined heads of the clients seen so far, in the order in which they came, and each client's row."""
        room = server.able, _head_size(server.layout)
        server.state[HEADS] = reserve(room, server.vector.dtype, "memory")
        server.state[ROWS] = torch.full((server.clients,), -1)

    def send(self, server: Server) -> Download:
        """To all clients the prototypes and which of them exist, none in the first round; to each client its head."""
        names = (PROTOTYPES, PRESENT) if self.lam else ()

        def prototypes() -> Mapping[str, Tensor]:
            return {name: server.state[name] for name in names if name in server.state}

        def head(client: int) -> Mapping[str, Tensor]:
            """The combined one, a copy, once the client took part."""
            row = int(server.state[ROWS][client])
            return {HEAD: server.state[HEADS][row].clone()} if row >= 0 else {}

        return Download(version=prototypes, client=head)

    def absorb(self, aggregation: Aggregation, server: Server) -> None:
        """New prototypes, and a new head for each participant."""
        latest = {update.client: update for update in aggregation.updates}

        def sent(name: str) -> Tensor:
            return torch.from_numpy(np.stack([update.extras[name] for update in latest.values()]))

        aggregated = aggregate_prototypes(class_means=sent(MEANS), class_counts=sent(COUNTS))
        server.state |= {PROTOTYPES: aggregated["prototypes"], PRESENT: aggregated["present"]}
        variances, points = sent(VARIANCE).double().flatten(), _coordinates(sent(WEIGHTED))
        weights = torch.stack([_combination(variances, points, i, self.min_weight) for i in range(len(latest))])
        server.report["fedpac.own_weight"] = float(weights.diagonal().mean())
        heads = weights @ sent(HEAD).double()
        self._keep(list(latest), heads, server)

    @staticmethod
    def _keep(clients: Sequence[int], heads: Tensor, server: Server) -> None:
        """Write the heads [m, head] into the clients' rows; new clients get the next ones."""
        state = server.state
        rows, seen = state[ROWS], len(state[HEADS])  # in place: there are as many as clients
        for client in clients:
            if rows[client] < 0:
                rows[client], seen = seen, seen + 1
        room = settled(state[HEADS], server.able, "memory")  # it may be a checkpoint's
        all_heads = extended(room, seen)
        all_heads[rows[list(clients)]] = heads.to(all_heads.dtype)
        server.state |= {ROWS: rows, HEADS: all_heads}
