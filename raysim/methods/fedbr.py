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
- Global features of pseudo-data belong to the pseudo-data of the step (paper), with the frozen extractor in eval mode;
  the code computes them for the first step's only, in train mode: global_features="round" is that, in eval mode.
- Random sample means are drawn anew every round by default (paper); the released code draws them once.
- Sources of pseudo-data are "balanced" if every client is drawn equally often, which is how Algorithm 2 chooses
  clients, and "unbalanced" if in proportion to their samples. With clients of equal size, as in the paper, both are
  the same. Figure 6d compares means of balanced with those of unbalanced labels: sources="classes" also draws every
  class that a client has equally often. The proxy set has no clients: "balanced" and "classes" draw its classes alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.context import Stage, inferred
from raysim.api.declarations import FORWARD, Cost, Download, Network, Participation, Task
from raysim.api.hooked_method import HookedMethod
from raysim.data.batches import Pipeline
from raysim.data.dataset import Dataset
from raysim.data.partition import CSR
from raysim.data.sources import Source
from raysim.methods.mixup import soft_targets
from raysim.models.single_rows import refusing_layer
from raysim.primitives.checks import at_least, one_of
from raysim.primitives.streams import stream

if TYPE_CHECKING:
    from raysim.api.context import Batch, Context, Contribution, Outputs, Plan
    from raysim.api.hooked_method import OldSetup as Setup
    from raysim.api.server_view import Server
    from raysim.models import Classifier


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


def rows_by_samples(ends: np.ndarray, each: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """int64 [size] different rows of a pool to which every client sent `each`, its share of [0, 1) ends at ``ends``.

    What `Generator.choice` draws without replacement, but for rounding, at a cost that does not grow with the pool:
    a number falls on what is left, so each row that was drawn before it moves it on by that row's share.
    """
    rows: dict[int, None] = {}
    while len(rows) < size:
        taken = np.array(sorted(rows), np.int64)
        first, share = _share(ends, taken // each)
        numbers = generator.random(size - len(rows)) * (1 - share.sum() / each)
        for start, width in zip(first + taken % each * share / each, share / each, strict=True):
            numbers[numbers >= start] += width
        clients = np.minimum(ends.searchsorted(numbers, side="right"), len(ends) - 1)
        first, share = _share(ends, clients)
        places = ((numbers - first) / share * each).astype(np.int64)
        rows |= dict.fromkeys((clients * each + np.minimum(places, each - 1)).tolist())
    return np.fromiter(rows, np.int64)


def _share(ends: np.ndarray, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the share of each of these clients begins, and how wide it is."""
    first = np.where(clients > 0, ends[clients - 1], 0.0)
    return first, ends[clients] - first


def class_chances(labels: np.ndarray) -> np.ndarray:
    """Return float64 [n], the chance of each sample if every class that occurs in ``labels`` [n] is drawn alike."""
    _, classes, frequency = np.unique(labels, return_inverse=True, return_counts=True)
    chances: np.ndarray = 1 / (frequency[classes] * len(frequency))
    return chances


PROJECTOR = "fedbr.projector"
SOURCES = ("balanced", "unbalanced", "classes")
PSEUDO = "fedbr.pseudo"


@functools.lru_cache(maxsize=2)
def _ends(partition: CSR, alike: bool) -> np.ndarray:
    """float64 [clients]: where each client's share of [0, 1) ends, by samples or alike; made once, for all jobs."""
    chances = (partition.counts > 0) if alike else partition.counts
    ends = (chances / chances.sum()).cumsum()
    return np.asarray(ends / ends[-1])


class FedBR(HookedMethod):
    """lam: weight of Component 1 (uniform answers), mu: of Component 2 (the contrast); 0 leaves it out.

    pseudo: "rsm", means of `samples_per_mean` samples of a client, of which each sends `means_per_client` (None: B)
    before round 0; or "mixture", B means of a public `proxy` set, mixed at every step with `mix_samples` samples of the
    batch each. pseudo_batch: B rows. pseudo_refresh: B new ones every "round", or "once". fresh: means of raw data
    every round, which only a simulator can do. sources: who is drawn equally often (see above). projection: the
    paper's widths (256, 256, 128), the released code's (2F, 2F, F), or none. max_step=False leaves the projector as
    received.
    """

    name = "fedbr"
    paper = "Guo et al., ICML 2023"
    needs = frozenset(("classes", "features", "numbers"))

    def __init__(
        self,
        lam: float = 1.0,
        mu: float = 0.5,
        tau1: float = 2.0,
        tau2: float = 2.0,
        temperature_mode: Literal["multiply", "divide"] = "multiply",
        max_step: bool = True,
        projection: Literal["paper", "code", "none"] = "paper",
        pseudo: Literal["rsm", "mixture"] = "rsm",
        pseudo_refresh: Literal["round", "once"] = "round",
        pseudo_batch: int = 64,
        samples_per_mean: int = 10,
        means_per_client: int | None = None,
        sources: Literal["balanced", "unbalanced", "classes"] = "balanced",
        fresh: bool = False,
        proxy: Source | None = None,
        mix_samples: int = 1,
        global_features: Literal["step", "round"] = "step",
    ):
        self.lam = at_least("method.fedbr.lam", lam, 0.0)
        self.mu = at_least("method.fedbr.mu", mu, 0.0)
        for tau in (tau1, tau2):
            _similarity_scale(tau, temperature_mode)
        self.tau1, self.tau2, self.temperature_mode = tau1, tau2, temperature_mode
        self.max_step, self.projection = max_step, projection
        self.sources = one_of("method.fedbr.sources", sources, SOURCES)
        self.pseudo, self.pseudo_refresh, self.fresh = pseudo, pseudo_refresh, fresh
        self.pseudo_batch = int(at_least("method.fedbr.pseudo_batch", pseudo_batch, 1))
        self.samples_per_mean = int(at_least("method.fedbr.samples_per_mean", samples_per_mean, 1))
        each = (
            pseudo_batch if means_per_client is None else at_least("method.fedbr.means_per_client", means_per_client, 1)
        )
        self.means_per_client = int(each)
        self.proxy, self.mix_samples = proxy, int(at_least("method.fedbr.mix_samples", mix_samples, 0))
        self.global_features = global_features
        if pseudo == "mixture" and (proxy is None or type(proxy) is Source):
            raise ValueError(
                "method.fedbr.pseudo=mixture needs a public set: set method.fedbr.proxy to a data source, such as "
                "'{_target_: raysim.data.sources.Cifar100}', or pseudo=rsm"
            )
        if fresh and (pseudo == "mixture" or pseudo_refresh == "once"):
            raise ValueError(
                f"method.fedbr.fresh=true draws means of clients' data every round, which does not fit pseudo={pseudo} "
                f"with pseudo_refresh={pseudo_refresh}: set fresh=false"
            )

    @property
    def _active(self) -> bool:
        return self.lam > 0 or self.mu > 0

    @property
    def _mixes(self) -> bool:
        return self.pseudo == "mixture" and self.mix_samples > 0

    # --- declared once -------------------------------------------------------------------------------------------
    def networks(self, task: Task, model: nn.Module) -> Mapping[str, Network]:
        """P: three linear layers with ReLU between them; in no forward pass but the loss's."""
        if self.mu == 0 or self.projection == "none":
            return {}
        features = int(model.feature_dim)  # type: ignore[arg-type]
        hidden, out = (256, 128) if self.projection == "paper" else (2 * features, features)
        layers = nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, out)
        return {PROJECTOR: Network(nn.Sequential(*layers))}

    def check(self, setup: Setup) -> Sequence[str]:
        """Enough means for a batch of them, and a proxy set of the data's image size."""
        if not self._active:
            return ()
        if self.pseudo_batch == 1 and (layer := refusing_layer(setup.networks["model"], setup.task.example)):
            raise ValueError(
                f"method.fedbr.pseudo_batch: the model cannot train on a batch of 1 row, because of its {layer}. "
                "Set method.fedbr.pseudo_batch=2 or more."
            )
        clients = setup.task.population
        pool = self.means_per_client * clients
        if self.pseudo == "rsm" and not self.fresh and self.pseudo_batch > pool:
            raise ValueError(
                f"method.fedbr.pseudo_batch={self.pseudo_batch} is more than the pool of {clients} clients "
                f"x means_per_client={self.means_per_client}: set pseudo_batch={pool} or less"
            )
        if (public := _public(self)) is None:
            return ()
        proxy, dataset = public
        if (shape := dataset.shape) != setup.task.shape:
            sizes = [" x ".join(map(str, each)) for each in (shape, setup.task.shape)]
            raise ValueError(
                f"method.fedbr.proxy has images of {sizes[0]} (channels, height, width), the data has {sizes[1]}: set "
                f"method.fedbr.proxy.size={setup.task.shape[1]} and method.fedbr.proxy.channels={setup.task.shape[0]}"
            )
        for key, values in (("mean", proxy.mean), ("std", proxy.std)):
            if values is not None and len(values) not in (1, setup.task.shape[0]):
                raise ValueError(
                    f"method.fedbr.proxy.{key}={values} has {len(values)} values, its images have "
                    f"{setup.task.shape[0]} channels: give one each"
                )
        return ()

    def stages(self, plan: Plan) -> Sequence[tuple[Stage, ...]]:
        """The max step, then the min step."""
        if self.mu == 0 or self.projection == "none" or not self.max_step:
            return ((Stage(),),)
        return ((Stage("fedbr.max", trains=(PROJECTOR,), loss=self.projected_contrast, ascend=True), Stage()),)

    def draws(self, plan: Plan, generator: np.random.Generator) -> Mapping[str, Sequence[Tensor]]:
        """Which samples of the batch each pseudo-sample is mixed with: int64 [B, K]."""
        if not (self._active and self._mixes):
            return {}
        shape = (self.pseudo_batch, self.mix_samples)
        return {"fedbr.mix": [torch.from_numpy(generator.integers(size, size=shape)) for size in plan.sizes]}

    def cost(self, job: Participation) -> Cost:
        """A pass over as much pseudo-data, and one forward through the received extractor where it changes."""
        if not self._active:
            return Cost()
        again = FORWARD if self.mu and self._mixes and self.global_features == "step" else 0.0
        again_sent = self.fresh or self.pseudo_refresh != "once" or not job.earlier
        down = self.pseudo_batch * math.prod(job.run.task.shape) if again_sent else 0
        return Cost(samples=(1 + again) * job.trained, down=down)

    # --- pseudo-data ---------------------------------------------------------------------------------------------
    def contribute(self, client: Contribution) -> Mapping[str, np.ndarray]:
        """Return means of the client's own samples, drawn with replacement."""
        if not self._active or self.pseudo == "mixture" or self.fresh:
            return {}
        size = (self.means_per_client, self.samples_per_mean)
        if self.sources == "classes":
            chances = class_chances(client.labels.cpu().numpy())
            drawn = client.generator.choice(len(client.inputs), size=size, p=chances)
        else:
            drawn = client.generator.integers(len(client.inputs), size=size)
        indices = torch.from_numpy(drawn).to(client.inputs.device)
        return {"fedbr.pool": random_sample_mean(client.inputs, indices).cpu().numpy()}

    def assemble(self, parts: Mapping[str, Sequence[np.ndarray]], server: Server) -> None:
        """The pool of all means; of what is drawn once, only the drawn ones."""
        if not self._active or self.fresh:
            return
        if self.pseudo == "rsm":
            pool = np.concatenate(parts["fedbr.pool"])
            if len(pool) < self.pseudo_batch:  # clients without samples sent none
                raise ValueError(
                    f"method.fedbr.pseudo_batch={self.pseudo_batch} is more than the {len(pool)} means of all clients "
                    f"that have samples: set pseudo_batch={len(pool)} or less, or means_per_client higher"
                )
            server.state["fedbr.pool"] = torch.from_numpy(pool)
        if self.pseudo_refresh == "once":
            server.state["fedbr.pool"] = self._drawn(server)

    def send(self, server: Server) -> Download:
        """Pseudo-data, drawn once or for every version."""
        if not self._active or self.fresh:
            return Download()
        if self.pseudo_refresh == "once":
            return Download(once=lambda: {PSEUDO: server.state["fedbr.pool"]})
        return Download(version=lambda: {PSEUDO: self._drawn(server)})

    def _drawn(self, server: Server) -> Tensor:
        """B rows: of the pool, without replacement; or new means of the proxy set."""
        generator = server.stream(PSEUDO)
        if (public := _public(self)) is not None:
            return self._proxy_means(*public, generator, server.task.dtype)
        pool = server.state["fedbr.pool"]
        if self.sources == "unbalanced":
            return pool[rows_by_samples(server.sample_ends, self.means_per_client, self.pseudo_batch, generator)]
        return pool[generator.choice(len(pool), size=self.pseudo_batch, replace=False)]

    def _proxy_means(
        self, proxy: Source, dataset: Dataset, generator: np.random.Generator, dtype: torch.dtype
    ) -> Tensor:
        """Algorithm 3: B means of M samples of the proxy set, normalised with its own constants."""
        labels = dataset.labels[: dataset.train_rows]
        chances = None if self.sources == "unbalanced" else class_chances(labels)
        rows = generator.choice(len(labels), size=(self.pseudo_batch, self.samples_per_mean), p=chances)
        mean, std = (None if values is None else tuple(values) for values in (proxy.mean, proxy.std))
        unique, places = np.unique(rows, return_inverse=True)
        images = Pipeline(mean, std).normalise(torch.from_numpy(dataset.inputs[unique]), dtype)
        return random_sample_mean(images, torch.from_numpy(places.reshape(rows.shape)))

    def receive(self, ctx: Context) -> None:
        """Means of raw data for this version, the same for all its clients, where they are asked for."""
        if not (self._active and self.fresh):
            return
        generator = stream(ctx.seed, "fedbr.fresh", ctx.version)
        partition = ctx.trainer.partition
        ends = _ends(partition, self.sources != "unbalanced")
        clients = ends.searchsorted(generator.random(self.pseudo_batch), side="right")  # as `Generator.choice` does
        rows = []
        for client in clients:
            own = partition.rows(client)
            chances = self._chances_within(ctx, own)
            rows.append(generator.choice(own, size=self.samples_per_mean, p=chances))
        inputs, _ = ctx.trainer.gather(np.concatenate(rows))
        places = torch.arange(len(inputs), device=inputs.device).view(self.pseudo_batch, self.samples_per_mean)
        ctx.kept[PSEUDO] = random_sample_mean(inputs, places)

    def _chances_within(self, ctx: Context, rows: np.ndarray) -> np.ndarray | None:
        """Return the chance of each of a client's rows; None if they are drawn alike."""
        if self.sources != "classes":
            return None
        labels = ctx.trainer.labels
        chosen = labels.index_select(0, torch.from_numpy(rows).to(labels.device))
        return class_chances(chosen.cpu().numpy())

    # --- the two steps -------------------------------------------------------------------------------------------
    def projected_contrast(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """L_con with constant features: what the projector ascends."""
        return self._contrast(ctx, out, self._pseudo_features(ctx, out).detach(), out.features.detach())

    def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """lam L_p + mu L_con, the latter with the projector as the max step left it."""
        total = torch.zeros((), device=batch.inputs.device, dtype=batch.inputs.dtype)
        if self.lam:
            logits = ctx.model.head(self._pseudo_features(ctx, out))
            total = total + self.lam * pseudo_label_loss(logits, self._mixed(ctx, out)[1])
        if self.mu:
            total = total + self.mu * self._contrast(ctx, out, self._pseudo_features(ctx, out), out.features)
        return total

    def _mixed(self, ctx: Context, out: Outputs) -> tuple[Tensor, Tensor | None]:
        """This step's pseudo-data [B, ...] and their targets [B, C]; None where all are uniform."""
        base = ctx.kept[PSEUDO] if self.fresh else ctx.download[PSEUDO]
        if not self._mixes:
            return base, None
        mixed = out.once("fedbr.mixed", lambda: self._mix(ctx, base, out.batch))
        return mixed["inputs"], mixed["targets"]

    def _mix(self, ctx: Context, base: Tensor, batch: Batch) -> dict[str, Tensor]:
        indices = ctx.drawn("fedbr.mix").to(base.device)
        return mixture_pseudo_data(base, batch.inputs.detach(), batch.targets, indices, ctx.num_classes)

    def _pseudo_features(self, ctx: Context, out: Outputs) -> Tensor:
        def compute() -> Tensor:
            with ctx.statistics_kept():  # BatchNorm's statistics are of real data only
                return ctx.model.features(self._mixed(ctx, out)[0])

        return out.once("fedbr.pseudo_features", compute)

    def _global_features(self, ctx: Context, out: Outputs) -> Tensor:
        """Of the received extractor: once per job where the pseudo-data stay the same in it, else at every step."""
        each = self._mixes and self.global_features == "step"
        if not each and "fedbr.global" in ctx.kept:
            return ctx.kept["fedbr.global"]
        inputs, _ = self._mixed(ctx, out)
        received = cast("Classifier", ctx.frozen()["model"])
        features = out.once("fedbr.global", lambda: inferred(lambda: received.features(inputs)))
        if not each:
            ctx.kept["fedbr.global"] = features
        return features

    def _contrast(self, ctx: Context, out: Outputs, pseudo: Tensor, real: Tensor) -> Tensor:
        """Row j of the pseudo-data meets row j of the batch, modulo its length."""
        if len(real) != len(pseudo):
            real = real[torch.arange(len(pseudo), device=real.device) % len(real)]
        project = ctx.networks.get(PROJECTOR, nn.Identity())
        z_p, z_g, z = project(pseudo), project(self._global_features(ctx, out)), project(real)
        return contrastive_loss(z_p, z_g, z, self.tau1, self.tau2, self.temperature_mode)


@functools.lru_cache(maxsize=4)
def _public(method: FedBR) -> tuple[Source, Dataset] | None:
    """The proxy set, built and opened once; None where pseudo-data are means of the clients' own samples."""
    if method.pseudo != "mixture" or method.proxy is None:
        return None
    return method.proxy, method.proxy.build()
