"""Split rows over clients by pure functions: every random draw is an argument.

The rules are those of McMahan et al. 2017 (shards), Yurochkin et al. 2019 (Dirichlet per class),
Hsu, Qi and Brown 2019 (Dirichlet per client) and Li et al. 2022 (quantity skew). In the shapes of
arrays, N is the number of clients, C that of classes and n that of samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.data.csr import CSR, Floats, Ints, Partition

# No function makes a Python object for each client, because there may be a million clients.

# Added before rounding down. Without it a cumulative sum of 0.99...9 would give a sample to a
# client whose share is 0, and 100 * 0.29 would give 28.
GUARD = 1e-9


# ---- counts --------------------------------------------------------------------------------------
def fraction_count(*, total: int, fraction: float) -> int:
    """Return total * fraction rounded down: floor(total * fraction + 1e-9)."""
    return math.floor(total * fraction + GUARD)


def floor_counts(values: NDArray[np.floating]) -> Ints:
    """Return floor(value + 1e-9) for each value; 1e-9 outweighs small rounding errors."""
    counts: Ints = np.floor(values + GUARD).astype(np.int64)
    return counts


def satisfies_minimum(*, offsets: ArrayLike, minimum: int) -> bool:
    """Return True if every client has at least `minimum` rows.

    offsets: [N + 1] for N clients, the offsets of a `CSR`. Client k has offsets[k + 1] - offsets[k]
    rows.
    """
    return bool((np.diff(np.asarray(offsets)) >= minimum).all())


def share_counts(total: int, shares: Floats) -> Ints:
    """Divide `total` samples between N clients; return the number of samples of each client, [N].

    The samples are cut at the cumulative sums of the shares; each cut is rounded down.
    shares: [N], the share of each client, with sum 1.
    """
    cuts = np.minimum(floor_counts(total * np.cumsum(shares)), total)
    cuts[-1] = total
    return np.diff(cuts, prepend=0)


def class_counts_by_client(sizes: Ints, proportions: Floats, balance: bool) -> Iterator[Ints]:
    """Yield, for each of C classes, the number of samples of this class that each client gets, [N].

    sizes: [C], the number of samples of each class.
    proportions: [C, N], the share of each class that each client gets.
    balance: If True, a client that already has 1/N of all samples gets none of later classes.
    """
    total, clients = int(sizes.sum()), proportions.shape[1]
    totals = np.zeros(clients, dtype=np.int64)
    for size, class_shares in zip(sizes, proportions, strict=True):
        shares = class_shares
        if balance and size:
            is_open = totals * clients < total
            shares = np.where(is_open, shares, 0.0)
            if not shares.sum() > 0:
                shares = is_open
            shares = shares / shares.sum()
        counts = share_counts(int(size), shares)
        totals += counts
        yield counts


def _even_offsets(total: int, parts: int) -> Ints:
    """Return the start of each of several equal parts, and the end of the last: [parts + 1].

    If `total` rows cannot be divided evenly, each of the first parts has one row more.
    """
    numbers = np.arange(parts + 1)
    return numbers * (total // parts) + np.minimum(numbers, total % parts)


# ---- splits of all rows --------------------------------------------------------------------------
def iid_split(*, order: ArrayLike, num_clients: int) -> CSR:
    """Cut a permutation into even parts; the first n mod N clients get one sample more.

    order: a permutation of the rows, [n].
    num_clients: the number N of clients.
    """
    indices = np.asarray(order, dtype=np.int64)
    return CSR(indices, _even_offsets(len(indices), num_clients))


def quantity_split(*, order: ArrayLike, proportions: ArrayLike) -> CSR:
    """Split shuffled rows over clients: client i gets the share `proportions[i]` of them.

    order: the shuffled rows.
    proportions: the shares of the N clients, [N].
    """
    indices = np.asarray(order, dtype=np.int64)
    return CSR.from_counts(indices, share_counts(len(indices), np.asarray(proportions)))


def dirichlet_label_split(
    *, labels: ArrayLike, proportions: ArrayLike, order: ArrayLike, balance: bool = False
) -> CSR:
    """Split the rows of each of C classes over N clients.

    labels: [n], the class of each row.
    proportions: [C, N], the share of each class that each client gets.
    order: a permutation of the rows. The rows of a class are given out in this order.
    balance: If True, a client that already has 1/N of all rows gets none of later classes.
    """
    labels, shares = np.asarray(labels), np.asarray(proportions)
    clients = np.arange(shares.shape[1])
    sizes = np.bincount(labels, minlength=len(shares))
    owners = []
    for counts in class_counts_by_client(sizes, shares, balance):
        owners.append(np.repeat(clients, counts))
    samples = _sort_by_class(labels, np.asarray(order))
    return CSR.from_owners(samples, np.concatenate(owners), len(clients))


def class_proportions(*, client_distributions: ArrayLike) -> Floats:
    """Return s_ck = p_kc / sum_j p_jc, the share of class c that client k gets, [C, N].

    If class c has the probability 0 for all N clients, each client gets 1/N.
    client_distributions: [N, C], the probability p_kc of class c for client k.
    """
    weights = np.asarray(client_distributions, dtype=np.float64).T
    mass = weights.sum(axis=1, keepdims=True)
    equal = np.full_like(weights, 1 / weights.shape[1])
    shares: Floats = np.divide(weights, mass, out=equal, where=mass > 0)
    return shares


def dirichlet_client_split(
    *,
    labels: ArrayLike,
    proportions: ArrayLike,
    turns: ArrayLike,
    uniforms: ArrayLike,
    order: ArrayLike,
) -> CSR:
    """Give clients samples without replacement, one by one; return the rows of each client.

    `draw_classes` draws the class of each sample; it explains `proportions`, `turns` and
    `uniforms`.

    labels: the class of each row, [n].
    order: a permutation of the rows, [n]. The samples of a class are given out in this order.
    """
    labels, shares, turns = np.asarray(labels), np.asarray(proportions), np.asarray(turns)
    pools = np.bincount(labels, minlength=shares.shape[1])
    classes = draw_classes(shares, turns, np.asarray(uniforms), pools)
    return hand_out_classes(labels, turns, classes, np.asarray(order), len(shares))


def draw_classes(proportions: Floats, turns: Ints, uniforms: Floats, pools: Ints) -> Ints:
    """Draw T classes one after another, each for one client; return the drawn classes, [T].

    A draw uses the client's class distribution, without the classes that have no remaining sample.
    If none of the client's classes remains, each remaining sample has the same probability.
    proportions: the class distribution of each of N clients over C classes, [N, C].
    turns: the client of each draw, [T].
    uniforms: a random number in [0, 1) for each draw, [T].
    pools: the number of remaining samples of each class, [C]; decreased in place.
    """
    shares = np.where(pools > 0, proportions, 0.0)
    classes = np.empty(len(turns), dtype=np.int64)
    for step, (client, uniform) in enumerate(zip(turns.tolist(), uniforms.tolist(), strict=True)):
        cumulative = np.cumsum(shares[client])
        # No samples of the client's classes are left: it takes any other class.
        if not cumulative[-1] > 0:
            cumulative = np.cumsum(pools / pools.sum())
        label = int(np.searchsorted(cumulative / cumulative[-1], uniform, side="right"))
        if label == len(pools):  # rounding: take the last class of positive probability
            label = int(np.searchsorted(cumulative, cumulative[-1]))
        classes[step] = label
        pools[label] -= 1
        if not pools[label]:
            shares[:, label] = 0.0
    return classes


def hand_out_classes(labels: Ints, turns: Ints, classes: Ints, order: Ints, clients: int) -> CSR:
    """Give T samples to clients; return the row numbers of each client's samples.

    labels: the class of each row, [n].
    turns, classes: [T]. Sample t has the class `classes[t]` and goes to the client `turns[t]`.
    order: a permutation of the rows, [n]. The samples of a class are given out in this order.
    """
    samples = _sort_by_class(labels, order)
    sizes = np.bincount(labels)
    starts = np.cumsum(sizes) - sizes
    by_class = np.argsort(classes, kind="stable")
    counts = np.bincount(classes, minlength=len(starts))
    places = np.arange(len(classes)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    indices = np.empty(len(classes), dtype=np.int64)
    indices[by_class] = samples[places]
    return CSR.from_owners(indices, turns, clients)


def shard_split(
    *,
    labels: ArrayLike,
    num_clients: int,
    shards_per_client: int,
    order: ArrayLike,
    assignment: ArrayLike,
) -> CSR:
    """Sort rows by label, cut them into N * S shards, and give each client S shards.

    N is `num_clients` and S `shards_per_client`. Sizes of shards differ by at most one row.
    labels: [n].
    order: a permutation of the rows, [n], which orders the rows of each class.
    assignment: a permutation of the shards, [N * S]. Client 0 gets the first S of them.
    """
    samples = _sort_by_class(np.asarray(labels), np.asarray(order))
    bounds = _even_offsets(len(samples), num_clients * shards_per_client)
    shards = np.asarray(assignment)
    sizes = np.diff(bounds)[shards]
    ends = np.cumsum(sizes)
    places = np.arange(len(samples)) + np.repeat(bounds[shards] - (ends - sizes), sizes)
    offsets = np.concatenate(([0], ends[shards_per_client - 1 :: shards_per_client]))
    return CSR(samples[places], offsets)


def domain_split(
    *, domains: ArrayLike, num_domains: int, order: ArrayLike, clients_per_domain: int = 1
) -> CSR:
    """Split the rows of each domain evenly over the clients of this domain.

    Domain d has the clients d * clients_per_domain to (d + 1) * clients_per_domain - 1.
    domains: [n], the domain of each row.
    order: [n], a permutation of the rows. A domain's clients get its rows in this order.
    """
    domains = np.asarray(domains)
    sizes = np.bincount(domains, minlength=num_domains)
    counts = [np.diff(_even_offsets(int(size), clients_per_domain)) for size in sizes]
    samples = _sort_by_class(domains, np.asarray(order))
    return CSR.from_counts(samples, np.concatenate(counts))


def domain_class_split(
    *,
    domains: ArrayLike,
    labels: ArrayLike,
    num_domains: int,
    class_groups: Sequence[Sequence[int]],
) -> CSR:
    """Make one client for each pair of a domain and a group of classes.

    With G groups, client d * G + g has the samples of domain d and group g, in ascending order.
    Rows whose class is in no group are not used.
    domains, labels: the domain and the class of each row, [n].
    class_groups: for each group the numbers of its classes.
    """
    domains, labels = np.asarray(domains), np.asarray(labels)
    largest = int(labels.max(initial=0))
    for group in class_groups:
        largest = max(largest, *group)
    group_of_class = np.full(largest + 1, -1)
    for number, group in enumerate(class_groups):
        group_of_class[list(group)] = number
    groups = group_of_class[labels]
    used = np.flatnonzero(groups >= 0)
    owners = domains[used] * len(class_groups) + groups[used]
    return CSR.from_owners(used, owners, num_domains * len(class_groups))


# ---- parts of each client's rows -----------------------------------------------------------------
def subsample(*, indices: ArrayLike, offsets: ArrayLike, fraction: float, order: ArrayLike) -> CSR:
    """Return a share of each client's rows.

    A smaller fraction returns a subset of the rows of a larger fraction.
    indices, offsets: the arrays of the `CSR` with each client's rows.
    fraction: the share; the number of rows is rounded down.
    order: all row numbers, permuted. The client's rows that come first in `order` are returned.
    """
    csr = CSR(np.asarray(indices), np.asarray(offsets))
    places = leading_places(csr, floor_counts(csr.counts * fraction), np.asarray(order))
    return CSR.from_owners(csr.indices[places], csr.owners[places], len(csr))


def leading_places(csr: CSR, counts: Ints, order: Ints) -> Ints:
    """Choose samples of each client; return the positions of these samples in `csr.indices`.

    counts: [N], the number of samples to choose from each client.
    order: all row numbers, permuted. The client's samples that come first in `order` are chosen.
    """
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    places = np.lexsort((ranks[csr.indices], csr.owners))
    rank_in_client = np.arange(len(places)) - np.repeat(csr.offsets[:-1], csr.counts)
    return places[rank_in_client < np.repeat(counts, csr.counts)]


def hold_out(csr: CSR, test: float, order: Ints, validation: float = 0.0) -> Partition:
    """Divide each client's rows into test, validation and training rows.

    A client that has rows keeps at least one of them for training.
    test, validation: shares of a client's rows, rounded down to a number of rows.
    order: a permutation of all rows. The client's rows that come first in it are test rows, and
    the next ones are validation rows.
    """
    most = np.maximum(csr.counts - 1, 0)
    test_counts = np.minimum(floor_counts(csr.counts * test), most)
    out_counts = np.minimum(test_counts + floor_counts(csr.counts * validation), most)
    part_of_row = np.zeros(len(csr.indices), dtype=np.int8)  # 0: training, 1: test, 2: validation
    part_of_row[leading_places(csr, out_counts, order)] = 2
    part_of_row[leading_places(csr, test_counts, order)] = 1
    parts = []
    for part in range(3):
        is_in_part = part_of_row == part
        rows, owners = csr.indices[is_in_part], csr.owners[is_in_part]
        parts.append(CSR.from_owners(rows, owners, len(csr)))
    return Partition(parts[0], parts[1], validation=parts[2] if validation else None)


def _sort_by_class(labels: Ints, order: Ints) -> Ints:
    """Return all rows sorted by class; rows of the same class are sorted as in `order`.

    labels: the class of each row, [n].
    order: a permutation of the rows, [n].
    """
    return np.asarray(order[np.argsort(labels[order], kind="stable")], dtype=np.int64)
