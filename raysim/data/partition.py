"""Which client owns which samples: pure splits of sample ids, and the partitioners that draw what the splits need.

Nothing here makes a Python object per client: a partition of a million clients is two integer arrays for train and two
for test. The rules are those of McMahan et al. 2017 (shards), Yurochkin et al. 2019 (class-wise Dirichlet), Hsu, Qi and
Brown 2019 (Dirichlet per client), Lin et al. 2020 (groups of ten) and Li et al. 2022 (quantity skew).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.memory import check_memory
from raysim.primitives.streams import stream

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = dict[str, Ints]  # {"indices": [n'], "offsets": [N+1]}

# Without it a cumulative sum of 0.99...9 hands a sample to a client whose share is 0, and 100 * 0.29 gives 28.
GUARD = 1e-9
ATTEMPTS = 10_000
WORK = (
    10**8
)  # proportions drawn before a large partition gives up: about four seconds, where success is yes or no anyway


@dataclass(frozen=True, eq=False)
class CSR:
    """Client k owns `indices[offsets[k]:offsets[k+1]]`; both arrays are int64."""

    indices: Ints
    offsets: Ints

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def counts(self) -> Ints:
        """Samples of each client, [N]."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> Ints:
        """The client of each entry of `indices`."""
        return np.repeat(np.arange(len(self)), self.counts)

    def rows(self, client: int) -> Ints:
        """The sample ids of one client: a view, not a copy."""
        return self.indices[self.offsets[client] : self.offsets[client + 1]]


@dataclass(frozen=True, eq=False)
class Partition:
    """Each client's training rows, its test and validation rows, and training rows that `fraction` left out.

    The same number of clients in all; `spare` is None where nothing was left out, `validation` where there is none.
    unseen: clients that are never trained, ascending; None: there are none. `train` has no rows of theirs.
    with_unseen: the training rows of all clients, those of unseen ones included; None: the same as `train`.
    """

    train: CSR
    test: CSR
    spare: CSR | None = None
    validation: CSR | None = None
    unseen: Ints | None = None
    with_unseen: CSR | None = None

    def __len__(self) -> int:
        return len(self.train)

    @property
    def all_train(self) -> CSR:
        """The training rows that each client holds, whether it is ever trained or not."""
        return self.train if self.with_unseen is None else self.with_unseen

    @property
    def unseen_count(self) -> int:
        """How many clients of `train` are unseen; of pooled data, whose one client is trained, none."""
        return 0 if self.unseen is None or self.with_unseen is None else len(self.unseen)


# ---- pure functions: every random draw is an argument -------------------------------------------------------------


def fraction_count(*, total: int, fraction: float) -> int:
    """floor(total * fraction + 1e-9)."""
    return math.floor(total * fraction + GUARD)


def satisfies_minimum(*, offsets: ArrayLike, minimum: int) -> bool:
    """Whether every client has at least `minimum` samples."""
    return bool((np.diff(np.asarray(offsets)) >= minimum).all())


def dirichlet_label_split(
    *, labels: ArrayLike, proportions: ArrayLike, order: ArrayLike, balance: bool = False
) -> Rows:
    """Cut each class, in `order`, at cumulative `proportions` [C, N]; `balance` stops clients that hold n/N samples."""
    labels, shares = np.asarray(labels), np.asarray(proportions)
    clients = np.arange(shares.shape[1])
    sizes = np.bincount(labels, minlength=len(shares))
    owners = [np.repeat(clients, counts) for counts in _class_counts(sizes, shares, balance)]
    return _grouped(_class_major(labels, np.asarray(order)), np.concatenate(owners), len(clients))


def class_proportions(*, client_distributions: ArrayLike) -> Floats:
    """Turn class distributions of clients, [N, C], into shares of each class, [C, N]; unwanted classes go equally."""
    wanted = np.asarray(client_distributions, dtype=np.float64).T
    mass = wanted.sum(axis=1, keepdims=True)
    equal = np.full_like(wanted, 1 / wanted.shape[1])
    shares: Floats = np.divide(wanted, mass, out=equal, where=mass > 0)
    return shares


def dirichlet_client_split(
    *,
    labels: ArrayLike,
    proportions: ArrayLike,
    turns: ArrayLike,
    uniforms: ArrayLike,
    order: ArrayLike,
) -> Rows:
    """Clients take single samples in `turns` without replacement, each by its own class distribution [N, C]."""
    labels, shares, turns = np.asarray(labels), np.asarray(proportions), np.asarray(turns)
    pools = np.bincount(labels, minlength=shares.shape[1])
    classes = _taken_classes(shares, turns, np.asarray(uniforms), pools)
    return _handed_out(labels, turns, classes, np.asarray(order), len(shares))


def shard_split(
    *,
    labels: ArrayLike,
    num_clients: int,
    shards_per_client: int,
    order: ArrayLike,
    assignment: ArrayLike,
) -> Rows:
    """Sort by label, cut into N * S even shards, give client k the shards `assignment[k*S:(k+1)*S]`, in that order."""
    ranked = _class_major(np.asarray(labels), np.asarray(order))
    bounds = _even_cuts(len(ranked), num_clients * shards_per_client)
    chosen = np.asarray(assignment)
    sizes = np.diff(bounds)[chosen]
    ends = np.cumsum(sizes)
    places = np.arange(len(ranked)) + np.repeat(bounds[chosen] - (ends - sizes), sizes)
    return {
        "indices": ranked[places],
        "offsets": np.concatenate(([0], ends[shards_per_client - 1 :: shards_per_client])),
    }


def iid_split(*, order: ArrayLike, num_clients: int) -> Rows:
    """Even consecutive cuts of a permutation; the first n mod N clients get one more."""
    indices = np.asarray(order, dtype=np.int64)
    return {"indices": indices, "offsets": _even_cuts(len(indices), num_clients)}


def quantity_split(*, order: ArrayLike, proportions: ArrayLike) -> Rows:
    """Consecutive cuts of a permutation at the cumulative `proportions` [N]."""
    indices = np.asarray(order, dtype=np.int64)
    counts = _cut(len(indices), np.asarray(proportions))
    return {"indices": indices, "offsets": np.concatenate(([0], np.cumsum(counts)))}


def domain_split(
    *, domains: ArrayLike, num_domains: int, order: ArrayLike, clients_per_domain: int = 1
) -> Rows:
    """Each domain, in `order`, cut evenly; client = domain * clients_per_domain + part."""
    domains = np.asarray(domains)
    sizes = np.bincount(domains, minlength=num_domains)
    cuts = [np.diff(_even_cuts(int(size), clients_per_domain)) for size in sizes]
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(cuts))))
    return {"indices": _class_major(domains, np.asarray(order)), "offsets": offsets}


def domain_class_split(
    *,
    domains: ArrayLike,
    labels: ArrayLike,
    num_domains: int,
    class_groups: Sequence[Sequence[int]],
) -> Rows:
    """A client per domain and group of classes: client = domain * groups + group; ids ascend, other classes unused."""
    domains, labels = np.asarray(domains), np.asarray(labels)
    group_of = np.full(
        1 + max(int(labels.max(initial=0)), *(c for group in class_groups for c in group)), -1
    )
    for number, group in enumerate(class_groups):
        group_of[list(group)] = number
    groups = group_of[labels]
    used = np.flatnonzero(groups >= 0)
    return _grouped(
        used, domains[used] * len(class_groups) + groups[used], num_domains * len(class_groups)
    )


def subsample(*, indices: ArrayLike, offsets: ArrayLike, fraction: float, order: ArrayLike) -> Rows:
    """Keep of each client the first `fraction_count` samples by `order`; smaller fractions are inside larger ones."""
    csr = CSR(np.asarray(indices), np.asarray(offsets))
    chosen = leading(csr, guarded_floor(csr.counts * fraction), np.asarray(order))
    return _grouped(csr.indices[chosen], csr.owners[chosen], len(csr))


def leading(csr: CSR, counts: Ints, order: Ints) -> Ints:
    """Places in `csr.indices`: of each client k the `counts[k]` samples that come first in `order`, in that order."""
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    places = np.lexsort((ranks[csr.indices], csr.owners))
    return places[
        np.arange(len(places)) - np.repeat(csr.offsets[:-1], csr.counts)
        < np.repeat(counts, csr.counts)
    ]


def held_out(csr: CSR, test: float, order: Ints, validation: float = 0.0) -> Partition:
    """Set aside shares of every client's samples, by `order` first for its test, then for its validation.

    Each has `fraction_count` samples, but a client's last sample is never taken.
    """
    most = np.maximum(csr.counts - 1, 0)
    tested = np.minimum(guarded_floor(csr.counts * test), most)
    aside = np.minimum(tested + guarded_floor(csr.counts * validation), most)
    use = np.zeros(len(csr.indices), dtype=np.int8)
    use[leading(csr, aside, order)] = 2
    use[leading(csr, tested, order)] = 1
    parts = [
        CSR(**_grouped(csr.indices[use == k], csr.owners[use == k], len(csr))) for k in range(3)
    ]
    return Partition(parts[0], parts[1], validation=parts[2] if validation else None)


def guarded_floor(values: NDArray[np.floating]) -> Ints:
    """The count rule for many numbers at once."""
    counts: Ints = np.floor(values + GUARD).astype(np.int64)
    return counts


def _even_cuts(total: int, parts: int) -> Ints:
    numbers = np.arange(parts + 1)
    return numbers * (total // parts) + np.minimum(numbers, total % parts)


def _cut(total: int, shares: Floats) -> Ints:
    """How many of `total` consecutive things each share gets."""
    cuts = np.minimum(guarded_floor(total * np.cumsum(shares)), total)
    cuts[-1] = total
    return np.diff(cuts, prepend=0)


def _class_counts(sizes: Ints, proportions: Floats, balance: bool) -> Iterator[Ints]:
    """For one class after another, how many of its samples each client gets."""
    total, clients = int(sizes.sum()), proportions.shape[1]
    held = np.zeros(clients, dtype=np.int64)
    for size, shares in zip(sizes, proportions, strict=True):
        if balance and size:
            open_ = held * clients < total
            shares = np.where(open_, shares, 0.0)
            shares = shares / shares.sum() if shares.sum() > 0 else open_ / open_.sum()
        counts = _cut(int(size), shares)
        held += counts
        yield counts


def _taken_classes(proportions: Floats, turns: Ints, uniforms: Floats, pools: Ints) -> Ints:
    """The class taken at each turn, by inverse CDF over the classes still in `pools` [C], which is used up in place."""
    shares = np.where(pools > 0, proportions, 0.0)
    classes = np.empty(len(turns), dtype=np.int64)
    for step, (client, uniform) in enumerate(zip(turns.tolist(), uniforms.tolist(), strict=True)):
        cumulative = np.cumsum(shares[client])
        if not cumulative[-1] > 0:  # nothing left of what this client wants: take what there is
            cumulative = np.cumsum(pools / pools.sum())
        chosen = int(np.searchsorted(cumulative / cumulative[-1], uniform, side="right"))
        if chosen == len(pools):  # rounding: the last class of positive probability
            chosen = int(np.searchsorted(cumulative, cumulative[-1]))
        classes[step] = chosen
        pools[chosen] -= 1
        if not pools[chosen]:
            shares[:, chosen] = 0.0
    return classes


def _handed_out(labels: Ints, turns: Ints, classes: Ints, order: Ints, clients: int) -> Rows:
    """Give the turns that took class c its samples in `order`; a client's rows are in the order of its turns."""
    ranked = _class_major(labels, order)
    starts = np.cumsum(np.bincount(labels)) - np.bincount(labels)
    by_class = np.argsort(classes, kind="stable")
    taken = np.bincount(classes, minlength=len(starts))
    places = np.arange(len(classes)) + np.repeat(starts - (np.cumsum(taken) - taken), taken)
    samples = np.empty(len(classes), dtype=np.int64)
    samples[by_class] = ranked[places]
    return _grouped(samples, turns, clients)


def _class_major(labels: Ints, order: Ints) -> Ints:
    """All ids by ascending class, within a class by `order`."""
    return np.asarray(order[np.argsort(labels[order], kind="stable")], dtype=np.int64)


def _grouped(ids: Ints, owners: Ints, clients: int) -> Rows:
    """Collect `ids` by owner, keeping their order within one owner."""
    offsets = np.concatenate(([0], np.cumsum(np.bincount(owners, minlength=clients))))
    return {"indices": ids[np.argsort(owners, kind="stable")], "offsets": offsets}


# ---- partitioners: check the settings, draw, split ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Draws:
    """What a partitioner may look at, and its two random streams."""

    labels: Ints
    domains: Ints
    num_classes: int
    proportions: np.random.Generator
    orders: np.random.Generator

    def order(self) -> Ints:
        """A fresh permutation of all sample ids."""
        return self.orders.permutation(len(self.labels))


@dataclass(frozen=True, kw_only=True)
class Partitioner:
    """Every partitioner can hold out local test and validation rows, and then keep a fraction of the training rows.

    `test_fraction=None` holds nothing out for tests: a client's own test is its part of the central test set, for
    partitioners that can tell which that is.
    """

    by_class: ClassVar[bool] = False  # whether it shares out classes, which not all data have
    fraction: float = 1.0
    test_fraction: float | None = 0.2
    validation_fraction: float = 0.0

    def __post_init__(self) -> None:
        in_range("partition.fraction", self.fraction, above=0, most=1)
        held = self.test_fraction or 0.0
        in_range("partition.test_fraction", held, least=0, below=1)
        in_range("partition.validation_fraction", self.validation_fraction, least=0, below=1)
        if held + self.validation_fraction >= 1:
            raise ValueError(
                f"partition.test_fraction={held} and partition.validation_fraction={self.validation_fraction} leave "
                "nothing to train on: their sum must be below 1."
            )
        if self.test_fraction is None and type(self).tests is Partitioner.tests:
            raise ValueError(
                "partition.test_fraction=null gives clients the test samples of their domain, and only "
                "partition=domain and partition=domain_class know which those are: give a share such as 0.2."
            )
        self.check()

    def check(self) -> None:
        """Refuse settings that no data set could satisfy."""

    def assign(self, draws: Draws) -> CSR:
        """The split of all rows, before anything is held out."""
        raise NotImplementedError

    def tests(self, labels: Ints, domains: Ints, num_domains: int) -> CSR:
        """Of the central test set, by positions in it, what each client is tested on; see `test_fraction`.

        num_domains: those that have training samples; they are the first ones.
        """
        raise NotImplementedError

    def users(
        self, partition: Partition, domains: Ints, domain_names: Sequence[str]
    ) -> Sequence[str] | None:
        """Return the user of each client of a partition that `split` made, or None where clients are no users.

        domains: of the training rows.
        """
        return None

    def split(self, labels: Ints, domains: Ints, num_classes: int, seed: int) -> Partition:
        """Split training rows 0..n-1. The held-out rows do not depend on `fraction`; smaller fractions are nested.

        Raises ValueError with the nearest setting that works where these rows cannot be split as asked.
        """
        draws = Draws(
            labels, domains, num_classes, stream(seed, "partition"), stream(seed, "order")
        )
        order = stream(seed, "split").permutation(len(labels))
        parts = held_out(
            self.assign(draws), self.test_fraction or 0.0, order, self.validation_fraction
        )
        if self.fraction == 1:
            return parts
        train = parts.train
        kept = CSR(
            **subsample(
                indices=train.indices,
                offsets=train.offsets,
                fraction=self.fraction,
                order=draws.order(),
            )
        )
        left = ~np.isin(train.indices, kept.indices)
        spare = CSR(**_grouped(train.indices[left], train.owners[left], len(train)))
        return replace(parts, train=kept, spare=spare)


def _clients(name: str, value: int) -> None:
    """Refuse a number of clients that cannot be."""
    check_memory(f"{name}={at_least(name, value, 1)}: indices of all clients", 100 * value)


@dataclass(frozen=True)
class IID(Partitioner):
    """Equal parts of a random permutation."""

    clients: int

    def check(self) -> None:
        _clients("partition.clients", self.clients)

    def assign(self, draws: Draws) -> CSR:
        return CSR(**iid_split(order=draws.order(), num_clients=self.clients))


@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Each class is shared out by its own Dirichlet(alpha) draw, redrawn until every client has `minimum` samples.

    `per="client"` draws one class distribution per client instead and normalises per class. `grouping=10` is the rule
    of FedDF: clients in groups of ten, each with its consecutive share of shuffled data and its own redraws.
    `minimum=None` is 1, or half the mean client size with `grouping`.
    """

    by_class: ClassVar[bool] = True
    clients: int
    alpha: float
    balance: bool = False
    minimum: int | None = None
    grouping: int | None = None
    per: Literal["class", "client"] = "class"

    def check(self) -> None:
        _clients("partition.clients", self.clients)
        above("partition.alpha", self.alpha, 0)
        if self.minimum is not None:
            at_least("partition.minimum", self.minimum, 0)
        if self.grouping is not None:
            at_least("partition.grouping", self.grouping, 1)
        one_of("partition.per", self.per, ("class", "client"))

    def assign(self, draws: Draws) -> CSR:
        total, order = len(draws.labels), draws.order()
        bounds = np.append(np.arange(0, self.clients, self.grouping or self.clients), self.clients)
        cuts = total * bounds // self.clients
        minimum = self.minimum
        if minimum is None:
            minimum = total // (2 * self.clients) if self.grouping else 1
        _enough(total, self.clients, minimum)
        groups = [
            self._group(draws, order[start:stop], clients, minimum)
            for start, stop, clients in zip(cuts, cuts[1:], np.diff(bounds).tolist(), strict=False)
        ]
        starts = np.concatenate(([0], np.cumsum([len(group.indices) for group in groups])))
        offsets = [group.offsets[1:] + start for group, start in zip(groups, starts, strict=False)]
        return CSR(
            np.concatenate([group.indices for group in groups]), np.concatenate(([0], *offsets))
        )

    def _group(self, draws: Draws, ids: Ints, clients: int, minimum: int) -> CSR:
        labels = draws.labels[ids]
        class_sizes = np.bincount(labels, minlength=draws.num_classes)

        def draw() -> Floats:
            if self.per == "class":
                return draws.proportions.dirichlet(
                    np.full(clients, self.alpha), size=draws.num_classes
                )
            wanted = draws.proportions.dirichlet(
                np.full(draws.num_classes, self.alpha), size=clients
            )
            return class_proportions(client_distributions=wanted)

        def sizes(proportions: Floats) -> Ints:
            return sum(
                _class_counts(class_sizes, proportions, self.balance),
                np.zeros(clients, dtype=np.int64),
            )

        shares = _redrawn(draw, sizes, minimum, self.alpha, self.clients)
        # `ids` are shuffled already, so their positions serve as the order
        rows = dirichlet_label_split(
            labels=labels, proportions=shares, order=np.arange(len(ids)), balance=self.balance
        )
        return CSR(ids[rows["indices"]], rows["offsets"])


@dataclass(frozen=True)
class DirichletClient(Partitioner):
    """Equal-sized clients that draw samples without replacement, each by its own Dirichlet class distribution.

    `concentration="symmetric"` is Dir(alpha, ..., alpha); `"prior_scaled"` is Dir(alpha * p) with the class shares p of
    the data, or of what is still unassigned when a client's turn begins (`remaining=True`, as FedBR's release does).
    """

    by_class: ClassVar[bool] = True
    clients: int
    alpha: float
    concentration: Literal["symmetric", "prior_scaled"] = "symmetric"
    remaining: bool = False
    turns: Literal["rotating", "sequential"] = "rotating"

    def check(self) -> None:
        _clients("partition.clients", self.clients)
        above("partition.alpha", self.alpha, 0)
        one_of("partition.concentration", self.concentration, ("symmetric", "prior_scaled"))
        one_of("partition.turns", self.turns, ("rotating", "sequential"))
        if self.remaining and (self.concentration, self.turns) != ("prior_scaled", "sequential"):
            raise ValueError(
                "partition.remaining=true needs partition.concentration=prior_scaled and partition.turns=sequential, "
                f"got {self.concentration} and {self.turns}."
            )

    def assign(self, draws: Draws) -> CSR:
        _enough(len(draws.labels), self.clients, 1)
        size = len(draws.labels) // self.clients
        pools = np.bincount(draws.labels, minlength=draws.num_classes)
        if self.remaining:
            turns = np.repeat(np.arange(self.clients), size)
            classes = np.concatenate(
                [self._next_client(draws, pools, size) for _ in range(self.clients)]
            )
            return CSR(**_handed_out(draws.labels, turns, classes, draws.order(), self.clients))
        return CSR(
            **dirichlet_client_split(
                labels=draws.labels,
                proportions=self._distributions(draws, pools, self.clients),
                turns=self._turns(draws.proportions, size),
                uniforms=draws.proportions.random(self.clients * size),
                order=draws.order(),
            )
        )

    def _distributions(self, draws: Draws, pools: Ints, clients: int) -> Floats:
        scale = pools / pools.sum() if self.concentration == "prior_scaled" else np.ones(len(pools))
        present = scale > 0
        rows = np.zeros((clients, len(pools)))
        rows[:, present] = draws.proportions.dirichlet(self.alpha * scale[present], size=clients)
        return rows

    def _next_client(self, draws: Draws, pools: Ints, size: int) -> Ints:
        row = self._distributions(draws, pools, 1)
        return _taken_classes(
            row, np.zeros(size, dtype=np.int64), draws.proportions.random(size), pools
        )

    def _turns(self, generator: np.random.Generator, size: int) -> Ints:
        clients = np.arange(self.clients)
        if self.turns == "sequential":
            return np.repeat(clients, size)
        return generator.permuted(np.tile(clients, (size, 1)), axis=1).ravel()


@dataclass(frozen=True)
class Shards(Partitioner):
    """Data sorted by label, cut into equal shards, a few shards per client."""

    by_class: ClassVar[bool] = True
    clients: int
    shards_per_client: int

    def check(self) -> None:
        _clients("partition.clients", self.clients)
        at_least("partition.shards_per_client", self.shards_per_client, 1)

    def assign(self, draws: Draws) -> CSR:
        total, shards = len(draws.labels), self.clients * self.shards_per_client
        if shards > total:
            fewer = f"partition.clients={total // self.shards_per_client}"
            if self.shards_per_client > total:
                fewer = f"partition.shards_per_client={max(1, total // self.clients)}"
            raise ValueError(
                f"partition.clients={self.clients} with partition.shards_per_client={self.shards_per_client} needs "
                f"{shards} samples, the training data has {total}: set {fewer} or less."
            )
        return CSR(
            **shard_split(
                labels=draws.labels,
                num_clients=self.clients,
                shards_per_client=self.shards_per_client,
                order=draws.order(),
                assignment=draws.proportions.permutation(shards),
            )
        )


@dataclass(frozen=True)
class Quantity(Partitioner):
    """IID labels, client sizes by one Dirichlet(alpha) draw, redrawn until every client has `minimum` samples."""

    clients: int
    alpha: float
    minimum: int = 1

    def check(self) -> None:
        _clients("partition.clients", self.clients)
        above("partition.alpha", self.alpha, 0)
        at_least("partition.minimum", self.minimum, 0)

    def assign(self, draws: Draws) -> CSR:
        total = len(draws.labels)
        _enough(total, self.clients, self.minimum)

        def draw() -> Floats:
            return draws.proportions.dirichlet(np.full(self.clients, self.alpha))

        shares = _redrawn(
            draw, lambda shares: _cut(total, shares), self.minimum, self.alpha, self.clients
        )
        return CSR(**quantity_split(order=draws.order(), proportions=shares))


@dataclass(frozen=True)
class Domain(Partitioner):
    """Each domain's samples over its own clients."""

    clients_per_domain: int = 1

    def check(self) -> None:
        _clients("partition.clients_per_domain", self.clients_per_domain)

    def assign(self, draws: Draws) -> CSR:
        return CSR(
            **domain_split(
                domains=draws.domains,
                num_domains=int(draws.domains.max()) + 1,
                order=draws.order(),
                clients_per_domain=self.clients_per_domain,
            )
        )

    def tests(self, labels: Ints, domains: Ints, num_domains: int) -> CSR:
        """Samples of a domain in turn over its clients, so that each class is spread over them."""
        ids = np.argsort(domains, kind="stable")
        ids = ids[domains[ids] < num_domains]
        sizes = np.bincount(domains[ids], minlength=num_domains)
        ranks = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        owners = domains[ids] * self.clients_per_domain + ranks % self.clients_per_domain
        return CSR(**_grouped(ids, owners, num_domains * self.clients_per_domain))


@dataclass(frozen=True)
class Natural(Partitioner):
    """Every domain is a client: whoever wrote, spoke or owned the samples.

    column: whose values are the clients' names (a user id), in data that has columns; None: the data's own domains, as
    the users of LEAF's files. minimum: those with fewer samples are left out. clients: so many of the others, drawn;
    None: all.
    """

    column: str | None = None
    minimum: int = 2
    clients: int | None = None

    def check(self) -> None:
        at_least("partition.minimum", self.minimum, 1)
        if self.clients is not None:
            _clients("partition.clients", self.clients)

    def assign(self, draws: Draws) -> CSR:
        if not draws.domains.any():
            raise ValueError(
                "partition=natural makes a client of each user, and all samples are of one: name the column that tells "
                "users apart (partition.column), give (inputs, labels, users) from Python, or choose partition=iid, "
                "dirichlet or another."
            )
        sizes = np.bincount(draws.domains)
        order, users = draws.order(), np.flatnonzero(sizes >= self.minimum)
        if not len(users):
            raise ValueError(
                f"partition.minimum={self.minimum}: no user has so many training samples, the largest has "
                f"{sizes.max()}. Set partition.minimum={sizes.max()} or less."
            )
        if self.clients is not None and len(users) < self.clients:
            raise ValueError(
                f"partition.clients={self.clients} is more than the {len(users)} users with "
                f"partition.minimum={self.minimum} or more samples: lower one of them."
            )
        if self.clients is not None:
            users = np.sort(draws.proportions.choice(users, self.clients, replace=False))
        number = np.full(int(draws.domains.max()) + 1, -1)
        number[users] = np.arange(len(users))
        chosen = order[number[draws.domains[order]] >= 0]
        return CSR(**_grouped(chosen, number[draws.domains[chosen]], len(users)))

    def users(
        self, partition: Partition, domains: Ints, domain_names: Sequence[str]
    ) -> Sequence[str]:
        """Return the name of the domain that each client is."""
        numbers = np.zeros(len(partition), np.int64)
        for part in (partition.train, partition.test, partition.validation, partition.spare):
            if part is not None:
                numbers[part.owners] = domains[part.indices]
        return [domain_names[number] for number in numbers.tolist()]


@dataclass(frozen=True)
class DomainClass(Partitioner):
    """One client per domain and group of classes; classes in no group stay unused."""

    by_class: ClassVar[bool] = True
    groups: list[list[int]]

    def check(self) -> None:
        classes = [c for group in self.groups for c in group]
        if (
            not classes
            or not all(self.groups)
            or len(set(classes)) < len(classes)
            or min(classes) < 0
        ):
            raise ValueError(
                f"partition.groups={self.groups} must be lists of class numbers from 0, none empty and no class twice, "
                "such as [[0,1,2,3],[4,5,6]]."
            )

    def assign(self, draws: Draws) -> CSR:
        largest = max(c for group in self.groups for c in group)
        if largest >= draws.num_classes:
            raise ValueError(
                f"partition.groups names class {largest}, the data has the classes 0 to {draws.num_classes - 1}: "
                "leave it out."
            )
        return CSR(
            **domain_class_split(
                domains=draws.domains,
                labels=draws.labels,
                num_domains=int(draws.domains.max()) + 1,
                class_groups=self.groups,
            )
        )

    def tests(self, labels: Ints, domains: Ints, num_domains: int) -> CSR:
        """Samples of the client's domain and classes."""
        ids = np.flatnonzero(domains < num_domains)
        rows = domain_class_split(
            domains=domains[ids],
            labels=labels[ids],
            num_domains=num_domains,
            class_groups=self.groups,
        )
        return CSR(ids[rows["indices"]], rows["offsets"])


def _redrawn(
    draw: Callable[[], Floats],
    sizes: Callable[[Floats], Ints],
    minimum: int,
    alpha: float,
    clients: int,
) -> Floats:
    """The first draw that gives every client `minimum` samples; only sizes are computed for the others."""
    best, attempts, shares = -1, 0, draw()
    while attempts < min(ATTEMPTS, max(20, WORK // shares.size)):
        shares = draw() if attempts else shares
        attempts += 1
        smallest = int(sizes(shares).min())
        if smallest >= minimum:
            return shares
        best = max(best, smallest)
    raise ValueError(
        f"partition.alpha={alpha} over partition.clients={clients} gave no split with at least {minimum} samples per "
        f"client (partition.minimum) in {attempts} attempts, the best had a client with {best}: "
        f"set partition.minimum={best}, raise partition.alpha or lower partition.clients."
    )


def _enough(total: int, clients: int, minimum: int) -> None:
    if clients * minimum > total:
        raise ValueError(
            f"partition.clients={clients} with at least {minimum} samples each needs {clients * minimum} samples, the "
            f"training data has {total}: set partition.clients={total // minimum} or less."
        )
