"""Make the pseudo-data of FedBR: means of clients' samples, or of samples of a public set.

The setting `sources` chooses the probabilities with which samples are drawn. For means of clients'
samples:

- "balanced": the same for all clients, as in Algorithm 2 of FedBR.
- "unbalanced": for each client, in proportion to its number of samples.
- "classes": the same for all clients, and the same for all classes of a client.

For means of a public set:

- "balanced" and "classes": the same for all classes.
- "unbalanced": the same for all samples.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.data.batches import Pipeline
from raysim.data.dataset import Dataset
from raysim.data.partition import CSR
from raysim.data.sources import Source
from raysim.models.single_rows import refusing_layer
from raysim.primitives.checks import at_least, one_of
from raysim.primitives.streams import stream

if TYPE_CHECKING:
    from raysim.api.context import Contribution
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import ServerView
    from raysim.api.setup import Setup

PseudoKind: TypeAlias = Literal["rsm", "mixture"]
PseudoRefresh: TypeAlias = Literal["round", "once"]
SamplingRule: TypeAlias = Literal["balanced", "unbalanced", "classes"]


@dataclass(frozen=True)
class PseudoData:
    """The settings of a run's pseudo-data.

    Pseudo-data are means of samples. The server sends them to the clients.

    kind: "rsm" makes means of clients' samples, "mixture" makes means of a public set's samples.
    rows: the number of means that a client receives.
    samples_per_mean: the number of samples in each mean.
    means_per_client: for "rsm", the number of means that each client sends before round 0.
    refresh: "round" draws new means in every round, as in the paper. "once" draws means only at the
    start, as in the released code.
    sources: how samples are drawn; the module's docstring describes the rules.
    proxy: the source of the public set; "rsm" does not use it.
    fresh: True computes the means in each job from raw samples of all clients. No means are sent
    before round 0. A real system could not do this.
    Raises ValueError for settings that do not fit together.
    """

    kind: PseudoKind
    refresh: PseudoRefresh
    rows: int
    samples_per_mean: int
    means_per_client: int
    sources: SamplingRule
    fresh: bool
    proxy: Source | None

    def __post_init__(self) -> None:
        at_least("method.fedbr.pseudo_batch", self.rows, 1)
        at_least("method.fedbr.samples_per_mean", self.samples_per_mean, 1)
        at_least("method.fedbr.means_per_client", self.means_per_client, 1)
        one_of("method.fedbr.sources", self.sources, get_args(SamplingRule))
        is_mixture = self.kind == "mixture"
        if is_mixture and (self.proxy is None or type(self.proxy) is Source):
            raise ValueError(
                "method.fedbr.pseudo=mixture needs a public data set. Set method.fedbr.proxy to "
                "a data source, such as '{_target_: raysim.data.sources.Cifar100}', or set "
                "method.fedbr.pseudo=rsm."
            )
        if self.fresh and (is_mixture or self.refresh == "once"):
            other = "pseudo=mixture" if is_mixture else "pseudo_refresh=once"
            raise ValueError(
                "method.fedbr.fresh=true draws new means of the clients' data in every round, "
                f"which is impossible with method.fedbr.{other}. Set method.fedbr.fresh=false."
            )

    @functools.cached_property
    def proxy_set(self) -> Dataset:
        """The public data set, which the first access builds."""
        assert self.proxy is not None, "pseudo=mixture needs a proxy set"
        return self.proxy.build()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the public set out of pickles, because only the server needs it."""
        return {name: value for name, value in vars(self).items() if name != "proxy_set"}

    def declare(self, run: Setup) -> None:
        """Declare what clients send before round 0, and what the server sends to them."""
        self._check(run)
        floats = self.rows * math.prod(run.task.shape)
        if self.fresh:
            run.send("pseudo", lambda server: None, floats)
            return
        run.skip("begin")
        if self.kind == "rsm":
            run.gather(self.own_means, self.join_means)
        if self.refresh == "round":
            run.send("pseudo", self.draw, floats)
            return
        if self.kind == "mixture":
            run.server_state("pool", self.draw)
        run.send("pseudo", lambda server: server.state["pool"], floats, once=True)

    def _check(self, run: Setup) -> None:
        """Raise ValueError for settings that do not fit the model, the data or the clients."""
        check_pseudo_batch(run, self.rows)
        if self.kind == "mixture":
            assert self.proxy is not None
            check_proxy(run, self.proxy, self.proxy_set)
            return
        clients = run.clients_with_samples
        pool = self.means_per_client * clients
        run.require(
            self.fresh or self.rows <= pool,
            f"method.fedbr.pseudo_batch={self.rows} needs {self.rows} means of samples, but the "
            f"{clients} clients with samples send only {pool}. Set "
            f"method.fedbr.pseudo_batch={pool} or less, or increase "
            "method.fedbr.means_per_client.",
        )

    def own_means(self, client: Contribution) -> Mapping[str, np.ndarray]:
        """Return means of a client's samples, which the client sends before round 0.

        The result is {"pool": means}, where the array has the shape [means_per_client, ...]. Each
        mean is over `samples_per_mean` samples of the client.
        """
        size = self.means_per_client, self.samples_per_mean
        return {"pool": client_means(client, size, self.sources)}

    def join_means(self, parts: Mapping[str, Sequence[np.ndarray]], server: ServerView) -> None:
        """Store in the server state the means that all clients sent before round 0.

        With refresh="once", store only `rows` of the means, drawn at random for the whole run.
        parts: {"pool": a list of the clients' means, in the order of the client numbers}.
        """
        server.state["pool"] = torch.from_numpy(np.concatenate(parts["pool"]))
        if self.refresh == "once":
            server.state["pool"] = self.draw(server)

    def draw(self, server: ServerView) -> Tensor:
        """Return the pseudo-data that the server sends: means of samples, [rows, ...].

        With kind="rsm", the means are drawn without replacement from the stored means of the
        clients. With kind="mixture", the means are computed from samples of the public set.
        """
        generator = server.stream("pseudo")
        if self.kind == "mixture":
            assert self.proxy is not None
            size = self.rows, self.samples_per_mean
            proxy = self.proxy, self.proxy_set
            return proxy_means(*proxy, size, self.sources, generator, server.task.dtype)
        pool = server.state["pool"]
        if self.sources == "unbalanced":
            ends = server.sample_ends
            return pool[rows_by_samples(ends, self.means_per_client, self.rows, generator)]
        return pool[generator.choice(len(pool), size=self.rows, replace=False)]

    def draw_fresh(self, job: LocalJob) -> Tensor:
        """Return means of clients' samples for a job, [rows, ...].

        Each mean is over `samples_per_mean` samples of one client, which is drawn from all clients.
        All jobs with the same base version get equal means.
        """
        return fresh_means(job, (self.rows, self.samples_per_mean), self.sources)


def random_sample_mean(inputs: Tensor, indices: Tensor) -> Tensor:
    """Return means [R, ...]: row r is the mean of the M samples `indices[r]`.

    inputs: [n, ...].
    indices: int64 [R, M].
    """
    return inputs[indices].mean(dim=1)


def class_chances(labels: np.ndarray) -> np.ndarray:
    """Return the probability of each sample, float64 [n], if classes are drawn equally often.

    labels: int64 [n]; classes without a sample are ignored.
    """
    _, classes, frequency = np.unique(labels, return_inverse=True, return_counts=True)
    chances: np.ndarray = 1 / (frequency[classes] * len(frequency))
    return chances


# --- means of clients' samples ----------------------------------------------------------------
def client_means(client: Contribution, size: tuple[int, int], sources: str) -> np.ndarray:
    """Return means of samples drawn from the client with replacement: [size[0], ...].

    size: the number of means, and the number of samples in each mean.
    sources: "classes" draws all classes of the client with the same probability. All other values
    draw all samples of the client with the same probability.
    """
    if sources == "classes":
        chances = class_chances(client.labels.cpu().numpy())
        drawn = client.generator.choice(len(client.inputs), size=size, p=chances)
    else:
        drawn = client.generator.integers(len(client.inputs), size=size)
    indices = torch.from_numpy(drawn).to(client.inputs.device)
    return random_sample_mean(client.inputs, indices).cpu().numpy()


def rows_by_samples(
    ends: np.ndarray, per_client: int, size: int, generator: np.random.Generator
) -> np.ndarray:
    """Draw some of the stored means without replacement; return their numbers, int64 [size].

    Clients without samples have no means and are not counted. The means of client c have
    `per_client` numbers, from c * per_client on. The probability of a mean is in proportion to the
    samples of its client.
    ends: float64 [clients with samples], the cumulative probabilities of these clients.
    """
    # Except for rounding, the distribution is that of `Generator.choice` without replacement, but
    # the computing time does not grow with the table.
    rows: dict[int, None] = {}
    while len(rows) < size:
        # Draw points of [0, 1) outside the intervals of the rows that were drawn before: draw from
        # a shorter interval, and move a point up by the width of each such interval below it.
        taken = np.array(sorted(rows), np.int64)
        first, share = _client_intervals(ends, taken // per_client)
        numbers = generator.random(size - len(rows)) * (1 - share.sum() / per_client)
        starts = first + taken % per_client * share / per_client
        for start, width in zip(starts, share / per_client, strict=True):
            numbers[numbers >= start] += width
        clients = np.minimum(ends.searchsorted(numbers, side="right"), len(ends) - 1)
        first, share = _client_intervals(ends, clients)
        places = ((numbers - first) / share * per_client).astype(np.int64)
        drawn = clients * per_client + np.minimum(places, per_client - 1)
        rows |= dict.fromkeys(drawn.tolist())
    return np.fromiter(rows, np.int64)


def _client_intervals(ends: np.ndarray, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and the width of k clients' intervals in [0, 1), both float64 [k].

    The width is the probability of the client.
    ends: [clients with samples], the ends of these clients' intervals.
    clients: int64 [k], the clients' positions in `ends`.
    """
    first = np.where(clients > 0, ends[clients - 1], 0.0)
    return first, ends[clients] - first


def fresh_means(job: LocalJob, size: tuple[int, int], sources: str) -> Tensor:
    """Return means of samples of randomly drawn clients, [size[0], ...].

    Each mean is over samples of one client. Jobs with the same base version get equal means.
    size: the number of means, and the number of samples in each mean.
    sources: a rule that the module's docstring describes.
    """
    generator = stream(job.seed, "fedbr.fresh", job.version)
    ends = _interval_ends(job.partition, sources != "unbalanced")
    # Clients are drawn as by `Generator.choice`, but without a new array over all clients.
    clients = ends.searchsorted(generator.random(size[0]), side="right")
    rows = []
    for client in clients:
        own_rows = job.partition.rows(client)
        chances = class_chances(job.labels_of(own_rows)) if sources == "classes" else None
        rows.append(generator.choice(own_rows, size=size[1], p=chances))
    inputs, _ = job.gather(np.concatenate(rows))
    places = torch.arange(len(inputs), device=inputs.device)
    return random_sample_mean(inputs, places.view(size))


@functools.lru_cache(maxsize=2)
def _interval_ends(partition: CSR, is_uniform: bool) -> np.ndarray:
    """Return the cumulative probabilities with which clients are drawn, float64 [clients].

    partition: the samples of each client.
    is_uniform: True draws all clients that have samples equally often; False draws clients in
    proportion to their samples.
    """
    chances = (partition.counts > 0) if is_uniform else partition.counts
    ends = (chances / chances.sum()).cumsum()
    return np.asarray(ends / ends[-1])


def check_pseudo_batch(run: Setup, rows: int) -> None:
    """Raise ValueError if `rows` is 1 and the model cannot train on a batch of one row.

    rows: the number of rows in a batch of pseudo-data.
    """
    if rows > 1:
        return
    layer = refusing_layer(run.model, run.task.example)
    run.require(
        not layer,
        "method.fedbr.pseudo_batch: the model cannot train on a batch of 1 row, because of its "
        f"{layer}. Set method.fedbr.pseudo_batch=2 or more.",
    )


# --- means of a public set --------------------------------------------------------------------
def proxy_means(
    proxy: Source,
    dataset: Dataset,
    size: tuple[int, int],
    sources: str,
    generator: np.random.Generator,
    dtype: torch.dtype,
) -> Tensor:
    """Return means of normalised training samples of a public set, [size[0], ...].

    proxy: the source of the public set. Its `mean` and `std` normalise the samples.
    dataset: the public set.
    size: the number of means, and the number of samples in each mean.
    sources: how samples are drawn; the module's docstring describes the rules.
    dtype: the type of the means.
    """
    labels = dataset.labels[: dataset.train_rows]
    chances = None if sources == "unbalanced" else class_chances(labels)
    rows = generator.choice(len(labels), size=size, p=chances)
    mean = None if proxy.mean is None else tuple(proxy.mean)
    std = None if proxy.std is None else tuple(proxy.std)
    unique, places = np.unique(rows, return_inverse=True)
    images = Pipeline(mean, std).normalise(torch.from_numpy(dataset.inputs[unique]), dtype)
    return random_sample_mean(images, torch.from_numpy(places.reshape(rows.shape)))


def check_proxy(run: Setup, proxy: Source, dataset: Dataset) -> None:
    """Raise ValueError if a public set does not fit the data on which the run trains.

    The set's inputs must have the shape of the run's inputs. `proxy.mean` and `proxy.std` must have
    one value, or one for each channel; None is allowed.
    """
    shape, (channels, *size) = dataset.shape, run.task.shape
    advice = "Set method.fedbr.pseudo=rsm."
    if len(size) == 2 and size[0] == size[1]:
        advice = (
            f"Set method.fedbr.proxy.size={size[0]} and method.fedbr.proxy.channels={channels}."
        )
    run.require(
        shape == run.task.shape,
        f"method.fedbr.proxy has inputs of the shape {_times(shape)}, but the data has the shape "
        f"{_times(run.task.shape)}. {advice}",
    )
    for key, values in (("mean", proxy.mean), ("std", proxy.std)):
        run.require(
            values is None or len(values) in (1, channels),
            f"method.fedbr.proxy.{key}={values} does not have one value for each of the {channels} "
            "channels. Give one value, or one for each channel.",
        )


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
