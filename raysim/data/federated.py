"""A source, its corruptions and a partition become one federated data set; its statistics and its picture."""

from __future__ import annotations

import functools
import hashlib
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.data.batches import Pipeline
from raysim.data.corruption import (
    Rotation,
    client_turns,
    image_turns,
    pool_images,
    rotate_images,
    symmetric_label_noise,
)
from raysim.data.dataset import Dataset, Samples, open_or_build
from raysim.data.heterogeneity import entropy, heterogeneity
from raysim.data.partition import CSR, Floats, Ints, Partition, Partitioner, guarded_floor, leading
from raysim.data.sources import Source
from raysim.primitives.streams import stream

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHUNK = 8192  # images corrupted at once
# Left out of titles.
UNTOLD = frozenset(
    ("root", "cache", "download", "digest", *(entry.name for entry in fields(Pipeline)))
)
CHANNELS = (1, 3, 4)  # as many has an image
BARS, LEGEND, COLUMNS, BINS = (
    50,
    20,
    1000,
    30,
)  # most clients as bars, classes in a legend, columns, bars of sizes


@dataclass(frozen=True, eq=False)
class FederatedData:
    """What a run trains and evaluates on; pickles as a path and a few integer arrays."""

    dataset_path: Path
    partition: Partition
    central: Ints  # rows of the central test set
    pipeline: Pipeline
    title: str  # data set and partitioner, for plots and summaries
    users: pa.Array | None = (
        None  # text, the name of each client's user; None where clients are no users
    )

    def open(self) -> Dataset:
        """The memory-mapped data set, opened once per process."""
        return _opened(self.dataset_path)

    def user(self, client: int) -> str | None:
        """Return the name of a client's user, or None."""
        is_pooled = len(self.partition.train) != len(
            self.partition.test
        )  # one client trains for all
        return None if self.users is None or is_pooled else str(self.users[client].as_py())

    def number(self, client: int) -> str:
        """Return "2", or "2 (user alice)"."""
        user = self.user(client)
        return str(client) if user is None else f"{client} (user {user})"

    def label(self, client: int) -> str:
        """Return "client 2", or "client 2 (user alice)"."""
        return f"client {self.number(client)}"


def drop_single_rows(data: FederatedData) -> FederatedData:
    """Return the data without the training row of clients that have one: they never train, and are scored as before."""
    train = data.partition.train
    counts = np.where(train.counts == 1, 0, train.counts)
    stays = np.repeat(train.counts != 1, train.counts)
    left = CSR(train.indices[stays], np.concatenate(([0], np.cumsum(counts))))
    return replace(data, partition=replace(data.partition, train=left))


def data_warnings(data: FederatedData) -> Iterator[str]:
    """Sentences to warn with of data that are perhaps not meant as they stand.

    Most classes of the labels do not occur, images have their channels last, or there is nothing to score on.
    """
    dataset = data.open()
    if dataset.kind == "classification":
        absent = int(
            np.count_nonzero(np.bincount(dataset.labels, minlength=dataset.num_classes) == 0)
        )
        if 2 * absent > dataset.num_classes:
            yield (
                f"{absent} of {dataset.num_classes} classes have no sample, and each is an output of the model: number "
                "the classes from 0 on, give text as labels, or set data.kind=regression where the labels are values"
            )
    shape = dataset.shape
    if (
        len(shape) == 3
        and dataset.tokens is None
        and shape[2] in CHANNELS
        and shape[0] not in CHANNELS
    ):
        yield (
            f"inputs of shape {list(shape)} are read as {shape[0]} channels of {shape[1]} x {shape[2]}: where the "
            f"{shape[2]} are the channels, bring them to the front, as inputs.transpose(0, 3, 1, 2) of NumPy does"
        )
    train, tests = data.partition.train, data.partition.test
    if not len(tests.indices) and not len(data.central):
        yield (
            f"nothing will be scored: none of {len(train)} clients (of at most {train.counts.max()} training samples) "
            "has a test sample of its own, and there are no central ones: use fewer clients, raise "
            "partition.test_fraction, or give a test set"
        )


def pool_clients(data: FederatedData) -> FederatedData:
    """All clients' training rows, ascending, as one client; the clients' test rows stay apart."""
    rows = np.sort(data.partition.train.indices)
    train = CSR(rows, np.array([0, len(rows)]))
    partition = replace(data.partition, train=train, spare=None, with_unseen=None)
    return replace(data, partition=partition, title=f"{data.title}, pooled")


def hold_out_clients(data: FederatedData, share: float, seed: int) -> FederatedData:
    """Draw a share of the clients with training samples, rounded, and take them out of training.

    They keep their training samples, to which methods may adapt a model before it is scored on their tests. Of their
    validation samples nothing is used: they take no part in the choice of the best round.
    Raises ValueError where that leaves no client on one side, where nothing could be scored, or where a client that is
    trained has samples of one that is not.
    """
    if not share:
        return data
    partition, train = data.partition, data.partition.train
    able = np.flatnonzero(train.counts)
    count = round(share * len(able))
    chosen = (
        f"evaluate.unseen={share:g} selects {count} of {len(able)} clients with training samples"
    )
    if not count:
        raise ValueError(f"{chosen}. Increase it, or set evaluate.unseen=0.")
    if count == len(able):
        raise ValueError(f"{chosen}, so that none is left to train. Decrease it.")
    unseen = np.sort(stream(seed, "unseen").permutation(able)[:count])
    if not partition.test.counts[unseen].any():
        raise ValueError(
            f"{chosen}, and none of these has test samples to be scored on. Set partition.test_fraction above 0."
        )
    trained = _without(train, unseen)
    own = [part.rows(client) for part in (train, partition.test) for client in unseen.tolist()]
    if np.isin(np.concatenate(own), trained.indices).any():
        raise ValueError(
            f"evaluate.unseen={share:g}: clients share samples in this partition, so that others would train on those "
            "of unseen clients. Set evaluate.unseen=0, or choose another partition."
        )
    validation = None if partition.validation is None else _without(partition.validation, unseen)
    parts = replace(
        partition, train=trained, validation=validation, unseen=unseen, with_unseen=train
    )
    return replace(data, partition=parts)


def _without(part: CSR, clients: Ints) -> CSR:
    """Return the same clients, of which some have no rows any more."""
    counts = part.counts
    counts[clients] = 0
    stays = ~np.isin(part.owners, clients)
    return CSR(part.indices[stays], np.concatenate([[0], np.cumsum(counts)]))


@functools.lru_cache(maxsize=8)
def _opened(path: Path) -> Dataset:
    return Dataset(path)


def federate(source: Source, partitioner: Partitioner, seed: int) -> FederatedData:
    """Split the source's training rows over clients, then corrupt: label noise, rotation, pooling.

    Rows in no client stay in the file unused. A corrupted data set is a cached file of its own. Where images are
    rotated and the source has one domain, the angle becomes the domain. Raises ValueError with the key to change.
    """
    if (column := getattr(partitioner, "column", None)) is not None:
        source = source.with_domains(column)
    clean = source.build()
    _check(source, clean)
    if clean.kind != "classification" and getattr(partitioner, "by_class", False):
        whole = clean.kind == "regression" and bool((np.mod(clean.labels, 1) == 0).all())
        meant = (
            "set data.kind=classification where these whole numbers are classes, or "
            if whole
            else ""
        )
        raise ValueError(
            f"the partition {type(partitioner).__name__} shares out classes, and the data has none ({clean.kind}): "
            f"{meant}set partition=iid, quantity, domain, natural or listed."
        )
    rows, (groups, names) = clean.train_rows, clean.groups()
    partition = partitioner.split(groups[:rows], clean.domains[:rows], len(names), seed)
    name_users = getattr(partitioner, "users", None)  # a partitioner need not extend ours
    users = (
        name_users(partition, clean.domains[:rows], clean.domain_names)
        if callable(name_users)
        else None
    )
    dataset = _corrupted(source, clean, partition, seed)
    if getattr(partitioner, "test_fraction", 0.0) is None:
        partition = replace(partition, test=_central_tests(source, clean, partitioner))
    return FederatedData(
        dataset_path=dataset.path,
        partition=partition,
        central=np.arange(dataset.train_rows, len(dataset)),
        pipeline=source.pipeline(),
        title=f"{_described(source)}, {_described(partitioner)}",
        users=None if users is None else pa.array(users, pa.string()),
    )


def _central_tests(source: Source, clean: Dataset, partitioner: Partitioner) -> CSR:
    """Rows of the central test set as the clients' own tests."""
    if source.rotation.per != "none":
        raise ValueError(
            f"partition.test_fraction=null takes clients' tests from the central test set, which "
            f"data.rotation.per={source.rotation.per} turns in other ways: give a share, such as 0.2."
        )
    rows = clean.train_rows
    if rows == len(clean):
        raised = ", or raise data.test_fraction" if hasattr(source, "test_fraction") else ""
        raise ValueError(
            "partition.test_fraction=null takes clients' tests from the central test set, of which the data has none: "
            f"give a share, such as 0.2{raised}."
        )
    domains = int(clean.domains[:rows].max()) + 1
    tests = partitioner.tests(clean.groups()[0][rows:], clean.domains[rows:], domains)
    return CSR(rows + tests.indices, tests.offsets)


def _check(source: Source, clean: Dataset) -> None:
    channels = clean.shape[0]
    for key, values in (("mean", source.mean), ("std", source.std)):
        if values is not None and len(values) not in (1, channels):
            raise ValueError(
                f"data.{key}={values} has {len(values)} values, the inputs have {channels} channels: give one each."
            )
    if source.label_noise and clean.kind != "classification":
        raise ValueError(
            f"data.label_noise={source.label_noise} changes classes, and the data has none ({clean.kind}): set it to 0."
        )
    if source.label_noise and clean.num_classes < 2:
        raise ValueError(
            f"data.label_noise={source.label_noise} needs at least two classes, the data has one: set it to 0."
        )
    _check_images(source, clean)


def _check_images(source: Source, clean: Dataset) -> None:
    if not clean.is_images:
        asked = {
            "size": source.size,
            "channels": source.channels,
            "rotation.per": source.rotation.per != "none" and source.rotation.per,
            "pool": source.pool > 1 and source.pool,
            "augment": source.augment,
        }
        if key := next((key for key, value in asked.items() if value), None):
            raise ValueError(
                f"data.{key}={asked[key]} is for images, and the data has {clean.inputs.dtype} inputs of shape "
                f"{list(clean.shape)}: leave it out."
            )
        return
    _, height, width = clean.shape
    if height % source.pool or width % source.pool:
        raise ValueError(
            f"data.pool={source.pool} does not divide images of {height} x {width} pixels: choose a divisor."
        )
    if "crop" in source.augment and source.crop_padding > max(height, width):
        raise ValueError(
            f"data.crop_padding={source.crop_padding} is more than images of {height} x {width} pixels: a crop may "
            "show nothing of them; lower it."
        )


# ---- corruptions ---------------------------------------------------------------------------------------------------


def _corrupted(source: Source, clean: Dataset, partition: Partition, seed: int) -> Dataset:
    turned = source.rotation.per != "none"
    if not (source.label_noise or turned or source.pool > 1):
        return clean
    content: dict[str, object] = {"clean": clean.path.name, "pool": source.pool}
    if source.label_noise or turned:
        content |= {
            "noise": source.label_noise,
            "rotation": asdict(source.rotation) if turned else None,
        }
        content |= {"seed": seed, "partition": _digest(partition)}
    name = f"{type(source).__name__.lower()}-corrupted"
    return open_or_build(
        source.cache, name, content, lambda: _corrupt(source, clean, partition, seed)
    )


def _corrupt(source: Source, clean: Dataset, partition: Partition, seed: int) -> Samples:
    labels = _noisy(clean, partition.train, source.label_noise, seed)
    rows = np.arange(len(clean))
    domains, names = clean.domains, clean.domain_names
    angles = np.zeros(len(clean))
    if source.rotation.per != "none":
        rows, turns = _turns(source, clean, partition, seed)
        used = turns >= 0
        angles = np.where(used, np.array(source.rotation.angles)[turns], 0.0)
        domains = clean.domains[rows]
        if len(names) == 1:
            domains, names = (
                np.maximum(turns, 0),
                [f"{angle:g} degrees" for angle in source.rotation.angles],
            )
    inputs = _drawn(source, clean.inputs, rows, angles) if clean.is_images else clean.inputs[rows]
    return Samples(
        inputs,
        labels[rows],
        domains,
        clean.train_rows,
        clean.class_names,
        names,
        clean.kind,
        clean.tokens,
        clean.columns,
    )


def _noisy(clean: Dataset, train: CSR, ratio: float, seed: int) -> NDArray[Any]:
    """All labels, with exactly floor(ratio * n_k) wrong ones among each client's training rows."""
    rng = stream(seed, "noise")
    order = rng.permutation(clean.train_rows)
    shifts = rng.integers(1, max(clean.num_classes, 2), len(clean))
    hit = train.indices[leading(train, guarded_floor(train.counts * ratio), order)]
    labels = clean.labels.copy()
    labels[hit] = symmetric_label_noise(
        labels=labels[hit],
        ratio=1.0,
        num_classes=clean.num_classes,
        order=np.arange(len(hit)),
        shifts=shifts[hit],
    )
    return labels


def _turns(source: Source, clean: Dataset, partition: Partition, seed: int) -> tuple[Ints, Ints]:
    """For each image of the new file: its row in the clean one, and the number of its angle (-1 in no client)."""
    rotation, rng = source.rotation, stream(seed, "rotation")
    angles = len(rotation.angles)
    turns = np.full(clean.train_rows, -1)
    if rotation.per == "image":
        preferences = rng.dirichlet(np.full(angles, rotation.concentration), size=len(partition))
        uniforms = rng.random(clean.train_rows)
    for part in _parts(partition):
        if rotation.per == "client":
            turns[part.indices] = client_turns(part.owners, angles)
        else:
            turns[part.indices] = image_turns(preferences[part.owners], uniforms[part.indices])
    central = np.arange(clean.train_rows, len(clean))
    if rotation.test == "all":
        central_turns = np.repeat(np.arange(angles), len(central))
        central = np.tile(central, angles)
    else:
        central_turns = np.arange(len(central)) % angles
    return np.concatenate((np.arange(clean.train_rows), central)), np.concatenate(
        (turns, central_turns)
    )


def _drawn(source: Source, images: NDArray[Any], rows: Ints, angles: Floats) -> NDArray[np.uint8]:
    """The images of `rows`, turned and then pooled."""
    _, channels, height, width = images.shape
    drawn = np.empty(
        (len(rows), channels, height // source.pool, width // source.pool), dtype=np.uint8
    )
    for start in range(0, len(rows), CHUNK):
        part = slice(start, start + CHUNK)
        pixels = rotate_images(
            images=images[rows[part]],
            angles=angles[part],
            interpolation=source.rotation.interpolation,
        ).astype(np.uint8, copy=False)
        drawn[part] = pool_images(pixels, source.pool) if source.pool > 1 else pixels
    return drawn


def _parts(partition: Partition) -> list[CSR]:
    """What clients hold and are scored on."""
    return [
        each
        for each in (partition.all_train, partition.test, partition.validation)
        if each is not None
    ]


def _digest(partition: Partition) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(partition):
        digest.update(part.indices.tobytes())
        digest.update(part.offsets.tobytes())
    return digest.hexdigest()


# ---- what one wants to see -----------------------------------------------------------------------------------------


def class_counts(data: FederatedData) -> Ints:
    """Training samples of each client and class, [N, C]; of data without classes, [N, 1]. Unseen clients count."""
    train = data.partition.all_train
    groups, names = data.open().groups()
    cells = train.owners * len(names) + groups[train.indices]
    return np.bincount(cells, minlength=len(train) * len(names)).reshape(len(train), len(names))


def statistics(data: FederatedData) -> dict[str, object]:
    """Numbers that describe the split: sizes, classes per client, `heterogeneity`, the [N, C] count matrix.

    Medians of classes are over clients with samples; `pooled_entropy` is that of all clients' labels together, in nats.
    """
    counts = class_counts(data)
    sizes = counts.sum(axis=1)
    filled = counts[sizes > 0]
    classes = (filled > 0).sum(axis=1)
    rows, parts = data.open().train_rows, _parts(data.partition)
    return {
        "clients": len(sizes),
        "empty_clients": int((sizes == 0).sum()),
        "unseen_clients": 0 if data.partition.unseen is None else len(data.partition.unseen),
        "samples": int(sizes.sum()),
        "unused": rows - sum(int((part.indices < rows).sum()) for part in parts),
        "central_test": len(data.central),
        "sizes": _spread(sizes),
        "test_sizes": _spread(data.partition.test.counts),
        "classes_per_client": _spread(classes),
        "heterogeneity": heterogeneity(counts),
        "pooled_entropy": float(entropy(counts.sum(axis=0, keepdims=True))[0]),
        "counts": counts,
    }


def _spread(values: Ints) -> dict[str, float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def draw_partition(data: FederatedData, path: str | Path) -> None:
    """A PNG: the classes of every client, as bars or (many clients or classes) as a heat map, and the client sizes."""
    from matplotlib.figure import Figure

    counts = class_counts(data)
    names = data.open().groups()[1]
    bars = len(counts) <= BARS and len(names) <= LEGEND
    height = max(4.8, 2 + 0.17 * len(counts)) if bars else 6.0
    figure = Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.4, 1))
    (_draw_bars if bars else _draw_heat_map)(left, counts, names)
    _draw_sizes(right, counts.sum(axis=1))
    if bars:
        columns = min(len(names), 10 if max(map(len, names)) < 10 else 7)
        figure.legend(
            *left.get_legend_handles_labels(),
            loc="outside lower left",
            ncols=columns,
            frameon=False,
        )
    figure.suptitle("\n".join(textwrap.wrap(data.title, 110)), fontsize=13)
    figure.savefig(path, dpi=130, format="png")


def _draw_bars(axes: Axes, counts: Ints, names: list[str]) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    sizes = counts.sum(axis=1)
    shares = counts / np.maximum(sizes, 1)[:, None]
    colours = colormaps["tab10" if len(names) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    for number, name in enumerate(names):
        before = shares[:, :number].sum(axis=1)
        axes.barh(
            np.arange(len(counts)),
            shares[:, number],
            left=before,
            height=0.86,
            color=colours[number],
            label=name,
        )
    for client in np.flatnonzero(sizes == 0).tolist():
        axes.text(0.01, client, "no samples", va="center", color="0.4", fontsize=8)
    axes.set(
        xlim=(0, 1),
        ylim=(len(counts) - 0.5, -0.5),
        ylabel="client",
        title="classes of each client's training samples",
    )
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_heat_map(axes: Axes, counts: Ints, names: list[str]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    shown = np.unique(np.linspace(0, len(counts) - 1, min(len(counts), COLUMNS)).astype(np.int64))
    shares = counts[shown] / np.maximum(counts[shown].sum(axis=1), 1)[:, None]
    image = axes.imshow(
        shares.T,
        aspect="auto",
        cmap="Blues",
        vmin=0,
        vmax=max(0.05, float(shares.max())),
        interpolation="nearest",
        extent=(0, len(shown), len(names), 0),
    )
    some = "" if len(shown) == len(counts) else f" ({len(shown)} of {len(counts)} clients)"
    axes.set(
        xlabel="client",
        ylabel="class",
        title=f"share of each class in a client's training samples{some}",
    )
    if len(names) <= 30:
        axes.set_yticks(np.arange(len(names)) + 0.5, names)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(
        lambda place, _: str(shown[int(place)]) if 0 <= place < len(shown) else ""
    )
    axes.figure.colorbar(image, ax=axes, format=PercentFormatter(1), pad=0.02)


def size_edges(sizes: Ints) -> list[float]:
    """Between the bars of a histogram of clients' sizes."""
    low, high = (int(sizes.min()), int(sizes.max())) if len(sizes) else (0, 0)
    width = (
        high - low
    ) // BINS + 1  # whole numbers of samples, or bins would hold unequal counts of them
    edges = np.arange(low, high + width + 1, width) - 0.5
    if high == low:
        edges = low + np.arange(-4.5, 5) * max(1, low // 40)  # one bar in the middle
    return [float(edge) for edge in edges]


def _draw_sizes(axes: Axes, sizes: Ints) -> None:
    from matplotlib.ticker import MaxNLocator

    low, high = int(sizes.min()), int(sizes.max())
    empty = f", {int((sizes == 0).sum())} empty" if low == 0 else ""
    title = f"sizes {low} to {high}, median {np.median(sizes):g}{empty}"
    axes.hist(sizes, bins=size_edges(sizes), color="tab:blue", rwidth=0.92)
    if high > low:
        axes.axvline(float(np.median(sizes)), color="0.25", linestyle="--", linewidth=1.2)
    axes.set(
        xlabel="training samples",
        ylabel="clients",
        title=title if high > low else f"every client has {high}",
    )
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _described(settings: Source | Partitioner) -> str:
    """The name and what differs from the defaults, without where data lie and how they are normalised."""
    told = []
    for entry in fields(settings) if is_dataclass(settings) else ():
        value = getattr(settings, entry.name)
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if value != default and entry.name not in UNTOLD:
            told.append(
                f"{entry.name}={f'per {value.per}' if isinstance(value, Rotation) else value}"
            )
    return f"{type(settings).__name__}({', '.join(told)})" if told else type(settings).__name__
