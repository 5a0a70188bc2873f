"""Define partitioners: rules that divide the training samples between the clients.

A partitioner checks its settings, draws random numbers, and computes the rows of each client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np

from raysim.data.csr import CSR, Floats, Ints, Partition
from raysim.data.splits import (
    class_counts_by_client,
    class_proportions,
    dirichlet_client_split,
    dirichlet_label_split,
    domain_class_split,
    domain_split,
    draw_classes,
    fraction_count,
    hand_out_classes,
    hold_out,
    iid_split,
    quantity_split,
    satisfies_minimum,
    shard_split,
    share_counts,
    subsample,
)
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.memory import check_memory
from raysim.primitives.streams import stream

__all__ = [  # the pure functions too: the shared test vectors name them in this module
    "CSR",
    "IID",
    "Dirichlet",
    "DirichletClient",
    "Domain",
    "DomainClass",
    "Draws",
    "Floats",
    "Ints",
    "Natural",
    "Partition",
    "Partitioner",
    "Quantity",
    "Shards",
    "class_proportions",
    "dirichlet_client_split",
    "dirichlet_label_split",
    "domain_class_split",
    "domain_split",
    "fraction_count",
    "iid_split",
    "quantity_split",
    "satisfies_minimum",
    "shard_split",
    "subsample",
]

DrawnShares: TypeAlias = Literal["class", "client"]
Concentration: TypeAlias = Literal["symmetric", "prior_scaled"]
Turns: TypeAlias = Literal["rotating", "sequential"]

MAX_ATTEMPTS = 10_000  # draws of a split before it fails because a client is below the minimum size
# Shares drawn before a large split fails, after about four seconds. Settings that need more draws
# rarely succeed.
MAX_PROPORTIONS = 10**8
BYTES_PER_CLIENT = 100  # of the arrays of a partition


@dataclass(frozen=True, eq=False)
class Draws:
    """The rows that a partitioner splits, and its two random streams.

    labels, domains: [n], the label and domain of each row. Without classes, all labels are 0. Rows
    without a label are in a further class, the last one.
    num_classes: includes classes without samples, and this further class.
    proportions: the random stream for all draws except permutations of rows, such as how many rows,
    or which classes, each client gets.
    orders: the random stream for permutations of rows.
    """

    labels: Ints
    domains: Ints
    num_classes: int
    proportions: np.random.Generator
    orders: np.random.Generator

    def order(self) -> Ints:
        """Draw a permutation of all row numbers."""
        return self.orders.permutation(len(self.labels))


@dataclass(frozen=True, kw_only=True)
class Partitioner:
    """A rule that gives each client its training, test and validation rows.

    A subclass overrides `assign`.
    by_class: True if the rule needs classes, which not all data have.
    fraction: the share of a client's training rows that the client uses.
    test_fraction: the share of each client's rows that are for testing. With None, each client is
    scored on rows of the central test set, which the function `tests` chooses.
    validation_fraction: the share of each client's rows that are for validation. Scores on these
    rows choose the best round.
    """

    by_class: ClassVar[bool] = False  # True: the rule needs classes, which not all data have
    fraction: float = 1.0
    test_fraction: float | None = 0.2
    validation_fraction: float = 0.0

    def __post_init__(self) -> None:
        in_range("partition.fraction", self.fraction, above=0, most=1)
        test_fraction = self.test_fraction or 0.0
        in_range("partition.test_fraction", test_fraction, least=0, below=1)
        in_range("partition.validation_fraction", self.validation_fraction, least=0, below=1)
        if test_fraction + self.validation_fraction >= 1:
            raise ValueError(
                f"partition.test_fraction={test_fraction} and "
                f"partition.validation_fraction={self.validation_fraction} leave no samples to "
                "train on. Choose values whose sum is below 1."
            )
        if self.test_fraction is None and type(self).tests is Partitioner.tests:
            raise ValueError(
                "partition.test_fraction=null tests each client on the central test samples of its "
                "domain. Of raysim's partitions, only partition=domain and partition=domain_class "
                "do this. Choose one of them, or set a share such as partition.test_fraction=0.2."
            )
        self.check()

    def check(self) -> None:
        """Raise ValueError for settings that no data set can satisfy."""

    def assign(self, draws: Draws) -> CSR:
        """Return the rows of each client, before rows are held out for tests.

        draws: the training rows and the random streams.
        Raise ValueError if the rows cannot be split in this way; the error names the key to change.
        """
        raise NotImplementedError

    def tests(self, labels: Ints, domains: Ints, num_domains: int) -> CSR:
        """Choose the samples of the central test set on which each client is scored.

        Return their positions in the central test set, by client. This function is used only if
        `test_fraction` is None.
        labels, domains: the label and the domain of each sample of the central test set.
        num_domains: D. Domains 0 to D - 1 have training rows, and all later domains have none.
        """
        raise NotImplementedError

    def users(
        self, partition: Partition, domains: Ints, domain_names: Sequence[str]
    ) -> Sequence[str] | None:
        """Return the name of each client if clients are users of the data; otherwise None.

        partition: the result of `split`.
        domains: the domains of the training rows.
        domain_names: the names of the domains, in the order of their numbers.
        """
        return None

    def split(self, labels: Ints, domains: Ints, num_classes: int, seed: int) -> Partition:
        """Divide n training samples between clients; return each client's rows.

        A smaller `fraction` keeps a subset of the training rows of a larger one.
        labels, domains: [n].
        num_classes: the number of classes, including classes without samples.
        Raise ValueError if the samples cannot be divided with these settings.
        """
        draws = Draws(
            labels, domains, num_classes, stream(seed, "partition"), stream(seed, "order")
        )
        order = stream(seed, "split").permutation(len(labels))
        rows = self.assign(draws)
        parts = hold_out(rows, self.test_fraction or 0.0, order, self.validation_fraction)
        if self.fraction == 1:
            return parts
        train = subsample(
            indices=parts.train.indices,
            offsets=parts.train.offsets,
            fraction=self.fraction,
            order=draws.order(),
        )
        is_spare = ~np.isin(parts.train.indices, train.indices)
        spare = CSR.from_owners(
            parts.train.indices[is_spare], parts.train.owners[is_spare], len(train)
        )
        return replace(parts, train=train, spare=spare)


@dataclass(frozen=True)
class IID(Partitioner):
    """A partition that gives each client the same number of randomly drawn rows.

    clients: the number of clients. If the rows cannot be divided evenly, the first clients get one
    row more than the other clients.
    """

    clients: int

    def check(self) -> None:
        _check_clients("partition.clients", self.clients)

    def assign(self, draws: Draws) -> CSR:
        return iid_split(order=draws.order(), num_clients=self.clients)


@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """A partition that draws the clients' shares of each class from a Dirichlet distribution.

    The shares are drawn again until every client has `minimum` samples (Yurochkin et al. 2019).
    alpha: the parameter of the distribution. A small alpha gives most samples of a class to few
    clients.
    balance: If True, a client that already has the mean number of samples gets no further classes.
    minimum: the smallest number of samples of a client. None means 1 without `grouping`, and half
    of the mean number with it.
    grouping: the number of clients in a group. Each group gets random samples, and divides them
    between its clients. None makes no groups.
    per: "class" draws the clients' shares of each class. "client" draws each client's class
    probabilities, and scales them to a sum of 1 over the clients for each class.
    """

    by_class: ClassVar[bool] = True
    clients: int
    alpha: float
    balance: bool = False
    minimum: int | None = None
    grouping: int | None = None
    per: DrawnShares = "class"

    def check(self) -> None:
        _check_clients("partition.clients", self.clients)
        above("partition.alpha", self.alpha, 0)
        if self.minimum is not None:
            at_least("partition.minimum", self.minimum, 0)
        if self.grouping is not None:
            at_least("partition.grouping", self.grouping, 1)
        one_of("partition.per", self.per, get_args(DrawnShares))

    def assign(self, draws: Draws) -> CSR:
        total, order = len(draws.labels), draws.order()
        bounds = np.append(np.arange(0, self.clients, self.grouping or self.clients), self.clients)
        cuts = total * bounds // self.clients
        minimum = self.minimum
        if minimum is None:
            minimum = total // (2 * self.clients) if self.grouping else 1
        _check_minimum(total, self.clients, minimum)
        groups = []
        for group, clients in enumerate(np.diff(bounds).tolist()):
            rows = order[cuts[group] : cuts[group + 1]]
            groups.append(self._split_group(draws, rows, clients, minimum))
        return CSR.from_counts(
            np.concatenate([group.indices for group in groups]),
            np.concatenate([group.counts for group in groups]),
        )

    def _split_group(self, draws: Draws, rows: Ints, clients: int, minimum: int) -> CSR:
        labels = draws.labels[rows]
        class_sizes = np.bincount(labels, minlength=draws.num_classes)

        def draw() -> Floats:
            if self.per == "class":
                alphas = np.full(clients, self.alpha)
                return draws.proportions.dirichlet(alphas, size=draws.num_classes)
            alphas = np.full(draws.num_classes, self.alpha)
            distributions = draws.proportions.dirichlet(alphas, size=clients)
            return class_proportions(client_distributions=distributions)

        def client_sizes(proportions: Floats) -> Ints:
            sizes = np.zeros(clients, dtype=np.int64)
            for counts in class_counts_by_client(class_sizes, proportions, self.balance):
                sizes += counts
            return sizes

        proportions = _draw_until_minimum(draw, client_sizes, minimum, self.alpha, self.clients)
        # `rows` are already shuffled, so their positions are a random order
        positions = dirichlet_label_split(
            labels=labels,
            proportions=proportions,
            order=np.arange(len(rows)),
            balance=self.balance,
        )
        return CSR(rows[positions.indices], positions.offsets)


@dataclass(frozen=True)
class DirichletClient(Partitioner):
    """A partition into clients of equal size with Dirichlet class shares (Hsu et al. 2019).

    Each client draws a class distribution, and from it its samples, without replacement.
    alpha: the parameter of the distribution. With a small alpha a client has few classes.
    concentration: "symmetric" draws from Dirichlet(alpha, ..., alpha). "prior_scaled" draws from
    Dirichlet(alpha * p), where p_c is the share of class c in the data.
    remaining: True computes p for each client from the samples that no client has taken yet. It
    needs concentration="prior_scaled" and turns="sequential".
    turns: "rotating" gives one sample to each client, then a second one, and so on. "sequential"
    gives a client all its samples before the next client gets any.
    """

    by_class: ClassVar[bool] = True
    clients: int
    alpha: float
    concentration: Concentration = "symmetric"
    remaining: bool = False
    turns: Turns = "rotating"

    def check(self) -> None:
        _check_clients("partition.clients", self.clients)
        above("partition.alpha", self.alpha, 0)
        one_of("partition.concentration", self.concentration, get_args(Concentration))
        one_of("partition.turns", self.turns, get_args(Turns))
        if self.remaining and (self.concentration, self.turns) != ("prior_scaled", "sequential"):
            raise ValueError(
                "partition.remaining=true needs partition.concentration=prior_scaled and "
                "partition.turns=sequential, but this run has "
                f"partition.concentration={self.concentration} and partition.turns={self.turns}. "
                "Set prior_scaled and sequential, or set partition.remaining=false."
            )

    def assign(self, draws: Draws) -> CSR:
        _check_minimum(len(draws.labels), self.clients, 1)
        size = len(draws.labels) // self.clients
        class_sizes = np.bincount(draws.labels, minlength=draws.num_classes)
        if self.remaining:
            turns = np.repeat(np.arange(self.clients), size)
            classes = [
                self._draw_next_client(draws, class_sizes, size) for _ in range(self.clients)
            ]
            return hand_out_classes(
                draws.labels, turns, np.concatenate(classes), draws.order(), self.clients
            )
        return dirichlet_client_split(
            labels=draws.labels,
            proportions=self._draw_distributions(draws, class_sizes, self.clients),
            turns=self._draw_turns(draws.proportions, size),
            uniforms=draws.proportions.random(self.clients * size),
            order=draws.order(),
        )

    def _draw_distributions(self, draws: Draws, class_sizes: Ints, clients: int) -> Floats:
        """Draw a distribution over the C classes for each of `clients` clients: [clients, C].

        draws: has the random streams.
        class_sizes: the number of samples of each class, [C]. With
        `partition.concentration=prior_scaled` a class without samples gets probability 0.
        """
        scale = np.ones(len(class_sizes))
        if self.concentration == "prior_scaled":
            scale = class_sizes / class_sizes.sum()
        is_present = scale > 0
        distributions = np.zeros((clients, len(class_sizes)))
        distributions[:, is_present] = draws.proportions.dirichlet(
            self.alpha * scale[is_present], size=clients
        )
        return distributions

    def _draw_next_client(self, draws: Draws, class_sizes: Ints, size: int) -> Ints:
        """Draw the class of each sample of the next client: [size].

        class_sizes: [C], the number of samples of each class that no client has yet. The drawn
        samples are subtracted in place.
        """
        distribution = self._draw_distributions(draws, class_sizes, 1)
        turns = np.zeros(size, dtype=np.int64)
        return draw_classes(distribution, turns, draws.proportions.random(size), class_sizes)

    def _draw_turns(self, generator: np.random.Generator, size: int) -> Ints:
        clients = np.arange(self.clients)
        if self.turns == "sequential":
            return np.repeat(clients, size)
        return generator.permuted(np.tile(clients, (size, 1)), axis=1).ravel()


@dataclass(frozen=True)
class Shards(Partitioner):
    """A partition in which each client gets random shards of the data (McMahan et al. 2017).

    The samples are sorted by label and cut into shards whose sizes differ by at most one sample.
    clients: the number of clients.
    shards_per_client: the number of shards that each client gets.
    """

    by_class: ClassVar[bool] = True
    clients: int
    shards_per_client: int

    def check(self) -> None:
        _check_clients("partition.clients", self.clients)
        at_least("partition.shards_per_client", self.shards_per_client, 1)

    def assign(self, draws: Draws) -> CSR:
        total, shards = len(draws.labels), self.clients * self.shards_per_client
        if shards > total:
            key, limit = "partition.clients", total // self.shards_per_client
            if self.shards_per_client > total:
                key, limit = "partition.shards_per_client", max(1, total // self.clients)
            raise ValueError(
                f"partition.clients={self.clients} with "
                f"partition.shards_per_client={self.shards_per_client} needs {shards} samples, but "
                f"the training data has {total}. Set {key}={limit} or less."
            )
        return shard_split(
            labels=draws.labels,
            num_clients=self.clients,
            shards_per_client=self.shards_per_client,
            order=draws.order(),
            assignment=draws.proportions.permutation(shards),
        )


@dataclass(frozen=True)
class Quantity(Partitioner):
    """A partition with IID labels, and client sizes from a Dirichlet(alpha) draw.

    Sizes are drawn again until every client has `minimum` samples (Li et al. 2022).
    clients: the number of clients.
    alpha: with a small alpha, the sizes differ more.
    minimum: the smallest number of samples of a client.
    """

    clients: int
    alpha: float
    minimum: int = 1

    def check(self) -> None:
        _check_clients("partition.clients", self.clients)
        above("partition.alpha", self.alpha, 0)
        at_least("partition.minimum", self.minimum, 0)

    def assign(self, draws: Draws) -> CSR:
        total = len(draws.labels)
        _check_minimum(total, self.clients, self.minimum)

        def draw() -> Floats:
            return draws.proportions.dirichlet(np.full(self.clients, self.alpha))

        def client_sizes(shares: Floats) -> Ints:
            return share_counts(total, shares)

        shares = _draw_until_minimum(draw, client_sizes, self.minimum, self.alpha, self.clients)
        return quantity_split(order=draws.order(), proportions=shares)


@dataclass(frozen=True)
class Domain(Partitioner):
    """A partition that divides the samples of each domain evenly between several clients.

    clients_per_domain: the number of clients of each domain.
    """

    clients_per_domain: int = 1

    def check(self) -> None:
        _check_clients("partition.clients_per_domain", self.clients_per_domain)

    def assign(self, draws: Draws) -> CSR:
        return domain_split(
            domains=draws.domains,
            num_domains=int(draws.domains.max()) + 1,
            order=draws.order(),
            clients_per_domain=self.clients_per_domain,
        )

    def tests(self, labels: Ints, domains: Ints, num_domains: int) -> CSR:
        """Divide the central test samples of each domain between the clients of this domain.

        The rows of the result are positions in the central test set.
        num_domains: the number of domains with training rows, which come first. No client gets the
        test samples of later domains.
        """
        rows = np.argsort(domains, kind="stable")
        rows = rows[domains[rows] < num_domains]
        sizes = np.bincount(domains[rows], minlength=num_domains)
        ranks = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        owners = domains[rows] * self.clients_per_domain + ranks % self.clients_per_domain
        return CSR.from_owners(rows, owners, num_domains * self.clients_per_domain)


@dataclass(frozen=True)
class Natural(Partitioner):
    """A partition in which every user is a client.

    column: the column of the data with the user of each row. None makes each domain a user.
    minimum: the smallest number of samples of a user. Samples that are later held out for tests
    count too. Users with fewer samples are left out.
    clients: the number of users to draw at random; None takes all with `minimum` samples.
    """

    column: str | None = None
    minimum: int = 2
    clients: int | None = None

    def check(self) -> None:
        at_least("partition.minimum", self.minimum, 1)
        if self.clients is not None:
            _check_clients("partition.clients", self.clients)

    def assign(self, draws: Draws) -> CSR:
        if not draws.domains.any():
            raise ValueError(
                "partition=natural makes each user a client, but this data has no users or only "
                "one. Set partition.column to the column of users, give (inputs, labels, users) "
                "from Python, or choose partition=iid, dirichlet or another."
            )
        sizes = np.bincount(draws.domains)
        order, users = draws.order(), np.flatnonzero(sizes >= self.minimum)
        if not len(users):
            raise ValueError(
                f"partition.minimum={self.minimum}: no user has that many training samples; the "
                f"user with the most has {sizes.max()}. Set partition.minimum={sizes.max()} or "
                "less."
            )
        if self.clients is not None and len(users) < self.clients:
            raise ValueError(
                f"partition.clients={self.clients} is more than the {len(users)} users with "
                f"partition.minimum={self.minimum} or more samples. Decrease one of them."
            )
        if self.clients is not None:
            users = np.sort(draws.proportions.choice(users, self.clients, replace=False))
        client_of_user = np.full(int(draws.domains.max()) + 1, -1)
        client_of_user[users] = np.arange(len(users))
        rows = order[client_of_user[draws.domains[order]] >= 0]
        return CSR.from_owners(rows, client_of_user[draws.domains[rows]], len(users))

    def users(
        self, partition: Partition, domains: Ints, domain_names: Sequence[str]
    ) -> Sequence[str]:
        """Return the name of the user that each client represents.

        In this partition, each domain is a user, so this is the name of the client's domain.
        domains: the domain of each training row.
        domain_names: the names of the domains, in the order of their numbers.
        """
        domain_of_client = np.zeros(len(partition), np.int64)
        for part in (partition.train, partition.test, partition.validation, partition.spare):
            if part is not None:
                domain_of_client[part.owners] = domains[part.indices]
        return [domain_names[domain] for domain in domain_of_client.tolist()]


@dataclass(frozen=True)
class DomainClass(Partitioner):
    """A partition with one client for each pair of a domain and a group of classes.

    groups: lists of class numbers. Classes that are in no group are not used.
    """

    by_class: ClassVar[bool] = True
    groups: list[list[int]]

    def check(self) -> None:
        classes: list[int] = []
        for group in self.groups:
            classes += group
        is_valid = bool(classes) and all(self.groups) and min(classes) >= 0
        if not is_valid or len(set(classes)) < len(classes):
            raise ValueError(
                f"partition.groups={self.groups} must be lists of class numbers from 0 on. Each "
                "list needs at least one class, and no class may appear twice. Write, for "
                "example, partition.groups=[[0,1,2,3],[4,5,6]]."
            )

    def assign(self, draws: Draws) -> CSR:
        largest = max(max(group) for group in self.groups)
        if largest >= draws.num_classes:
            raise ValueError(
                f"partition.groups names class {largest}, but the data has the classes 0 to "
                f"{draws.num_classes - 1}. Remove class {largest} from partition.groups."
            )
        return domain_class_split(
            domains=draws.domains,
            labels=draws.labels,
            num_domains=int(draws.domains.max()) + 1,
            class_groups=self.groups,
        )

    def tests(self, labels: Ints, domains: Ints, num_domains: int) -> CSR:
        """Choose the test samples of each client: those of its domain and its group of classes.

        The rows of the result are positions in the central test set.
        num_domains: the number of domains with training rows, which come first. No client gets the
        test samples of later domains.
        """
        rows = np.flatnonzero(domains < num_domains)
        positions = domain_class_split(
            domains=domains[rows],
            labels=labels[rows],
            num_domains=num_domains,
            class_groups=self.groups,
        )
        return CSR(rows[positions.indices], positions.offsets)


def _check_clients(key: str, clients: int) -> None:
    at_least(key, clients, 1)
    check_memory(f"{key}={clients}: the row numbers of all clients", BYTES_PER_CLIENT * clients)


def _check_minimum(total: int, clients: int, minimum: int) -> None:
    """Raise ValueError if `total` samples are too few to give each client `minimum` of them.

    clients: the number of clients.
    """
    if clients * minimum > total:
        most_clients = total // minimum
        advice = f"Set partition.clients={most_clients} or less"
        if most_clients == 0:
            advice = f"Set partition.minimum={total // clients} or less"
        raise ValueError(
            f"partition.clients={clients} with at least {minimum} samples each needs "
            f"{clients * minimum} samples, but the training data has {total}. {advice}."
        )


def _draw_until_minimum(
    draw: Callable[[], Floats],
    client_sizes: Callable[[Floats], Ints],
    minimum: int,
    alpha: float,
    clients: int,
) -> Floats:
    """Draw shares until every client has `minimum` samples; return the shares.

    client_sizes: function that computes each client's number of samples from the shares.
    alpha, clients: settings that the error names.
    Raise ValueError if none of at most `MAX_ATTEMPTS` draws is sufficient.
    """
    shares = draw()
    max_attempts = min(MAX_ATTEMPTS, max(20, MAX_PROPORTIONS // shares.size))
    best = -1
    for attempt in range(max_attempts):
        if attempt:
            shares = draw()
        smallest = int(client_sizes(shares).min())
        if smallest >= minimum:
            return shares
        best = max(best, smallest)
    raise ValueError(
        f"partition.alpha={alpha} and partition.clients={clients}: in {max_attempts} attempts no "
        f"split gave every client {minimum} samples; at best the smallest client had {best}. Set "
        f"partition.minimum={best}, increase partition.alpha or decrease partition.clients."
    )
