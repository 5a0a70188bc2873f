"""Make federated data from a source, its corruptions and a partition."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from raysim.data.batches import Pipeline
from raysim.data.corrupted import corrupt
from raysim.data.corruption import Rotation
from raysim.data.csr import CSR, Ints, Partition
from raysim.data.dataset import Dataset
from raysim.data.partition import Partitioner
from raysim.data.raw import Source
from raysim.primitives.kinds import IGNORED, PackedShape
from raysim.primitives.streams import stream

# Settings that titles leave out: paths, and how batches are made.
SETTINGS_OUTSIDE_TITLES = frozenset(
    ("root", "cache", "download", "digest", *(entry.name for entry in fields(Pipeline)))
)
MOVING_AUGMENTATIONS = ("resized_crop", "crop", "flip", "rotate")
USUAL_IGNORED = 255  # of masks: marks pixels without a label
MAX_EXAMINED_ROWS = 100  # in which this label is looked for
CHANNEL_COUNTS = (1, 3, 4)  # of images


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The data that a run trains and evaluates on.

    central: the rows of the central test set.
    title: the title of plots: the data set and the partitioner, with the settings that were
    changed.
    users: the name of each client, or None. This is the client's user in the data. With
    `partition=listed`, it is the client's name in the lists.
    """

    dataset_path: Path
    partition: Partition
    central: Ints
    pipeline: Pipeline
    title: str
    users: pa.Array | None = None

    def open(self) -> Dataset:
        """Return the memory-mapped data set, opened once per process."""
        return _open_dataset(self.dataset_path)

    def user(self, client: int) -> str | None:
        """Return the name of the user whose samples a client has.

        A user is a person or a device in the data set. With `partition=listed`, it is the client's
        name in the lists. Return None without such names, or if one client trains on all samples.
        """
        # in pooled data one client trains on the rows of all clients
        is_pooled = len(self.partition.train) != len(self.partition.test)
        if self.users is None or is_pooled:
            return None
        return str(self.users[client].as_py())

    def number(self, client: int) -> str:
        """Return a client's number as text: "2", or "2 (user alice)" if its user is known."""
        user = self.user(client)
        return str(client) if user is None else f"{client} (user {user})"

    def label(self, client: int) -> str:
        """Return the client's name for messages: "client 2", or "client 2 (user alice)"."""
        return f"client {self.number(client)}"


@functools.lru_cache(maxsize=8)
def _open_dataset(path: Path) -> Dataset:
    return Dataset(path)


# ---- from a source to federated data -------------------------------------------------------------
def federate(source: Source, partitioner: Partitioner, seed: int) -> FederatedData:
    """Split the source's training rows over clients, then corrupt them.

    partitioner: the rule of the split.
    seed: the seed of the run.
    Raise ValueError if a setting does not fit the data; the error names the setting to change.
    """
    column = getattr(partitioner, "column", None)
    if column is not None:
        source = source.with_domains(column)
    clean = source.build()
    _check_settings(source, clean)
    _check_has_classes(partitioner, clean)
    groups, group_names = clean.groups()
    labels, domains = groups[: clean.train_rows], clean.domains[: clean.train_rows]
    partition = partitioner.split(labels, domains, len(group_names), seed)
    partition = _keep_labelled_tests(partition, clean)
    dataset = corrupt(source, clean, partition, seed)
    # a user's partitioner need not extend `Partitioner`, and may lack both attributes
    name_users = getattr(partitioner, "users", None)
    users = None
    if callable(name_users):
        users = name_users(partition, domains, clean.domain_names)
    if getattr(partitioner, "test_fraction", 0.0) is None:
        partition = replace(partition, test=_central_tests(source, clean, partitioner))
    return FederatedData(
        dataset_path=dataset.path,
        partition=partition,
        central=_labelled_rows(dataset, np.arange(dataset.train_rows, len(dataset))),
        pipeline=source.pipeline(),
        title=f"{_title(source)}, {_title(partitioner)}",
        users=None if users is None else pa.array(users, pa.string()),
    )


def _labelled_rows(dataset: Dataset, rows: Ints) -> Ints:
    """Return the row numbers in `rows` whose samples have a label."""
    if not dataset.has_unlabelled:
        return rows
    labelled: Ints = rows[dataset.labels[rows] != IGNORED]
    return labelled


def _keep_labelled_tests(partition: Partition, dataset: Dataset) -> Partition:
    """Return the partition without the test and validation rows that have no label.

    partition: the rows of each client.
    dataset: the data set to which the row numbers refer.
    """
    if not dataset.has_unlabelled:
        return partition

    def labelled(part: CSR | None) -> CSR | None:
        if part is None:
            return None
        is_kept = dataset.labels[part.indices] != IGNORED
        counts = np.bincount(part.owners[is_kept], minlength=len(part))
        return CSR.from_counts(part.indices[is_kept], counts)

    test, validation = labelled(partition.test), labelled(partition.validation)
    assert test is not None, "every partition has test samples, perhaps none for each client"
    return replace(partition, test=test, validation=validation)


def _check_has_classes(partitioner: Partitioner, clean: Dataset) -> None:
    """Raise ValueError if the partitioner needs one class per sample, but the data has none.

    clean: the data set without corruptions.
    """
    if clean.kind == "classification" or not getattr(partitioner, "by_class", False):
        return
    action = "Set partition=iid, quantity, domain, natural or listed"
    if clean.kind == "regression" and bool((np.mod(clean.labels, 1) == 0).all()):
        action = (
            "Set data.kind=classification if these whole numbers are classes; otherwise set "
            "partition=iid, quantity, domain, natural or listed"
        )
    raise ValueError(
        f"partition: {type(partitioner).__name__} needs one class for each sample, which "
        f"{clean.kind} data does not have. {action}."
    )


def _central_tests(source: Source, clean: Dataset, partitioner: Partitioner) -> CSR:
    """Divide the central test set between the clients; return the test rows of each client.

    clean: the data set without corruptions.
    Raise ValueError if there is no central test set, or if the source rotates images
    (`data.rotation`).
    """
    if source.rotation.per != "none":
        raise ValueError(
            "partition.test_fraction=null takes clients' test samples from the central test set, "
            f"but with data.rotation.per={source.rotation.per} the images of the central test set "
            "have other angles than the clients' training images. Set partition.test_fraction to "
            "a share, such as 0.2."
        )
    start = clean.train_rows
    if start == len(clean):
        action = "Set a share, such as 0.2"
        if hasattr(source, "test_fraction"):
            action += ", or increase data.test_fraction"
        raise ValueError(
            "partition.test_fraction=null takes clients' test samples from the central test set, "
            f"but this data has none. {action}."
        )
    num_domains = int(clean.domains[:start].max()) + 1
    tests = partitioner.tests(clean.groups()[0][start:], clean.domains[start:], num_domains)
    return CSR(start + tests.indices, tests.offsets)


def _check_settings(source: Source, clean: Dataset) -> None:
    """Raise ValueError if a setting of the source does not fit the data.

    For example, `data.mean` may have the wrong number of channels.
    clean: the data set of the source, without corruptions.
    """
    channels = clean.shape[0]
    for key, values in (("mean", source.mean), ("std", source.std)):
        if values is not None and len(values) not in (1, channels):
            raise ValueError(
                f"data.{key}={values} has {len(values)} values, but the inputs have {channels} "
                "channels. Give one value, or one value per channel."
            )
    if isinstance(clean.shape, PackedShape) and source.mean is not None:
        raise ValueError(
            f"data.mean={source.mean} is for one input, but samples of this data have "
            f"{len(clean.shape.fields)} inputs. Normalise the inputs before you store them, and "
            "set data.mean=null."
        )
    if source.label_noise and clean.kind != "classification":
        raise ValueError(
            f"data.label_noise={source.label_noise} needs one class for each sample, which this "
            f"data does not have (it is for {clean.kind}). Set it to 0."
        )
    if source.label_noise and clean.num_classes < 2:
        raise ValueError(
            f"data.label_noise={source.label_noise} needs at least two classes, but the data has "
            "one. Set it to 0."
        )
    if source.label_noise and clean.has_unlabelled:
        raise ValueError(
            f"data.label_noise={source.label_noise} needs a class for every sample, but some "
            "samples have no class: their label is the value of data.ignore. Set "
            "data.label_noise=0."
        )
    if clean.is_images:
        _check_image_sizes(source, clean)
        has_masks = clean.kind == "positions" and len(clean.label_shape) == 2
        if has_masks:
            _refuse_moved_pixels(source)
    else:
        _refuse_image_settings(source, clean)


def _refuse_image_settings(source: Source, clean: Dataset) -> None:
    rotation = source.rotation.per
    settings = {
        "size": source.size,
        "channels": source.channels,
        "rotation.per": rotation if rotation != "none" else None,
        "pool": source.pool if source.pool > 1 else None,
        "augment": source.augment,
    }
    for key, value in settings.items():
        if value:
            raise ValueError(
                f"data.{key}={value} is for images, but the data has {clean.inputs.dtype} inputs "
                f"of shape {list(clean.shape)}. Leave it out."
            )


def _refuse_moved_pixels(source: Source) -> None:
    """Raise ValueError if a setting moves the pixels of images whose pixels have labels."""
    rotation = source.rotation.per
    settings = {
        "rotation.per": rotation if rotation != "none" else None,
        "pool": source.pool if source.pool > 1 else None,
        "augment": [name for name in source.augment if name in MOVING_AUGMENTATIONS],
    }
    for key, value in settings.items():
        if value:
            raise ValueError(
                f"data.{key}={value} moves the pixels of images, but not the labels of these "
                "pixels. Leave it out, or change images and labels before raysim reads them."
            )


def _check_image_sizes(source: Source, clean: Dataset) -> None:
    _, height, width = clean.shape
    if height % source.pool or width % source.pool:
        raise ValueError(
            f"data.pool={source.pool} is not a divisor of the height and width of the images, "
            f"which have {height} x {width} pixels. Choose a number that divides both."
        )
    if "crop" in source.augment and source.crop_padding > max(height, width):
        raise ValueError(
            f"data.crop_padding={source.crop_padding} is more than the longer side of the images, "
            f"which have {height} x {width} pixels, so that a crop could lie outside an image. "
            "Decrease it."
        )


def _title(settings: Source | Partitioner) -> str:
    """Return the name of a data set or partition with its settings that are not the defaults.

    The settings in `SETTINGS_OUTSIDE_TITLES` are left out.
    """
    changed = []
    for entry in fields(settings) if is_dataclass(settings) else ():
        value = getattr(settings, entry.name)
        default = entry.default
        if entry.default_factory is not MISSING:
            default = entry.default_factory()
        if value == default or entry.name in SETTINGS_OUTSIDE_TITLES:
            continue
        text = f"per {value.per}" if isinstance(value, Rotation) else value
        changed.append(f"{entry.name}={text}")
    name = type(settings).__name__
    return f"{name}({', '.join(changed)})" if changed else name


# ---- changes of federated data -------------------------------------------------------------------
def drop_single_rows(data: FederatedData) -> FederatedData:
    """Remove the training rows of clients with only one row; such a client does not train.

    A network with BatchNorm cannot train on one row.
    """
    train = data.partition.train
    counts = np.where(train.counts == 1, 0, train.counts)
    is_kept = np.repeat(train.counts != 1, train.counts)
    remaining = CSR.from_counts(train.indices[is_kept], counts)
    return replace(data, partition=replace(data.partition, train=remaining))


def pool_clients(data: FederatedData) -> FederatedData:
    """Return the data with only one training client, which has the training rows of all clients.

    Its number is 0, and its rows are in ascending order. The test rows of all clients stay
    unchanged.
    """
    rows = np.sort(data.partition.train.indices)
    train = CSR(rows, np.array([0, len(rows)]))
    partition = replace(data.partition, train=train, spare=None, with_unseen=None)
    return replace(data, partition=partition, title=f"{data.title}, pooled")


def hold_out_clients(data: FederatedData, share: float, seed: int) -> FederatedData:
    """Make a random share of the clients unseen: they are scored, but never trained.

    An unseen client has no validation rows. It keeps its training rows, to which a method may adapt
    the model before the score.
    share: `evaluate.unseen`, the share of the clients with training samples; 0 makes none unseen.
    Raise ValueError if the share selects no client, all clients, or only clients without test
    samples. Raise it also if a trained client has a sample of an unseen client.
    """
    if not share:
        return data
    partition, train = data.partition, data.partition.train
    candidates = np.flatnonzero(train.counts)
    count = round(share * len(candidates))
    selection = (
        f"evaluate.unseen={share:g} selects {count} of the {len(candidates)} clients with training "
        "samples"
    )
    if not count:
        raise ValueError(
            f"{selection}, so that no client is unseen. Increase evaluate.unseen, or set it to 0 "
            "to train all clients."
        )
    if count == len(candidates):
        raise ValueError(
            f"{selection}, so that no client is left to train. Decrease evaluate.unseen."
        )
    unseen = np.sort(stream(seed, "unseen").permutation(candidates)[:count])
    if not partition.test.counts[unseen].any():
        raise ValueError(
            f"{selection}, but no selected client has test samples. Increase "
            "partition.test_fraction or evaluate.unseen."
        )
    trained = _remove_rows(train, unseen)
    unseen_rows = []
    for client in unseen.tolist():
        unseen_rows += [train.rows(client), partition.test.rows(client)]
    if np.isin(np.concatenate(unseen_rows), trained.indices).any():
        raise ValueError(
            f"evaluate.unseen={share:g}: clients share samples in this partition, so trained "
            "clients would see samples of unseen clients. Set evaluate.unseen=0, or choose "
            "another partition."
        )
    validation = partition.validation
    if validation is not None:
        validation = _remove_rows(validation, unseen)
    changed = replace(
        partition, train=trained, validation=validation, unseen=unseen, with_unseen=train
    )
    return replace(data, partition=changed)


def _remove_rows(part: CSR, clients: Ints) -> CSR:
    """Return a copy of `part` in which the clients `clients` have no rows.

    part: the rows of each client.
    clients: the numbers of the clients whose rows are removed.
    """
    counts = part.counts
    counts[clients] = 0
    is_kept = ~np.isin(part.owners, clients)
    return CSR.from_counts(part.indices[is_kept], counts)


# ---- warnings ------------------------------------------------------------------------------------
def data_warnings(data: FederatedData) -> Iterator[str]:
    """Yield a warning for each property of the data that is probably a mistake.

    - More than half of the classes have no sample.
    - Labels have a class per position, and the class 255 seems to mean "no label".
    - The images seem to have the shape [height, width, channels].
    - No client has a test sample, and there is no central test set.
    """
    dataset = data.open()
    if dataset.kind == "classification":
        counts = np.bincount(dataset.groups()[0], minlength=dataset.num_classes)
        counts = counts[: dataset.num_classes]
        absent = int(np.count_nonzero(counts == 0))
        if 2 * absent > dataset.num_classes:
            yield (
                f"{absent} of {dataset.num_classes} classes have no sample, and each is an output "
                "of the model. Number the classes from 0 on, give text as labels, or set "
                "data.kind=regression if the labels are values"
            )
    if dataset.kind == "positions" and dataset.num_classes == USUAL_IGNORED + 1:
        rows = np.linspace(0, len(dataset.labels) - 1, MAX_EXAMINED_ROWS).astype(int)
        present = np.unique(dataset.labels[np.unique(rows)])
        others = present[present != USUAL_IGNORED]
        if len(present) > len(others) and others.max(initial=0) < USUAL_IGNORED // 2:
            yield (
                f"data.ignore: the label {USUAL_IGNORED} is a class, and the model has "
                f"{dataset.num_classes} outputs. If {USUAL_IGNORED} marks positions without a "
                f"label, set data.ignore={USUAL_IGNORED}"
            )
    shape = dataset.shape
    may_be_images = len(shape) == 3 and dataset.tokens is None
    if may_be_images and shape[2] in CHANNEL_COUNTS and shape[0] not in CHANNEL_COUNTS:
        yield (
            f"inputs of shape {list(shape)} are read as {shape[0]} channels of {shape[1]} x "
            f"{shape[2]}. If the {shape[2]} are the channels, move them to the front, as "
            "inputs.transpose(0, 3, 1, 2) of NumPy does"
        )
    train, test = data.partition.train, data.partition.test
    validation = data.partition.validation
    if not len(test.indices) and not len(data.central):
        scored = "nothing will be scored"
        if validation is not None and len(validation.indices):
            scored = "only validation samples will be scored"
        yield (
            f"{scored}: none of {len(train)} clients (of at most "
            f"{train.counts.max()} training samples) has a test sample, and there is no central "
            "test set. Use fewer clients, increase partition.test_fraction, or give a test set"
        )
