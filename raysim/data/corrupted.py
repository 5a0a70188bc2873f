"""Corrupt a whole data set, and cache the result.

The corruptions are wrong labels, rotated images, and blocks of pixels replaced by their mean.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.data.corruption import (
    client_angle_numbers,
    image_angle_numbers,
    pool_images,
    rotate_images,
    symmetric_label_noise,
)
from raysim.data.csr import CSR, Floats, Ints, Partition
from raysim.data.dataset import Dataset, Inputs, Samples, open_or_build
from raysim.data.raw import Source
from raysim.data.splits import floor_counts, leading_places
from raysim.primitives.kinds import InputField, PackedShape
from raysim.primitives.streams import stream

IMAGES_AT_ONCE = 8192  # rotated and pooled at once
NO_ANGLE = -1  # the angle number of an image that no client has


def corrupt(source: Source, clean: Dataset, partition: Partition, seed: int) -> Dataset:
    """Return the data set with the source's corruptions, or `clean` if the source has none.

    First, labels become wrong (`data.label_noise`). Then images are rotated (`data.rotation`). In a
    source with one domain, each angle becomes a domain. Last, blocks of pixels are replaced by
    their mean (`data.pool`).
    partition: the rows of each client. They decide which labels become wrong, and the angles.
    """
    is_rotated = source.rotation.per != "none"
    if not source.label_noise and not is_rotated and source.pool <= 1:
        return clean
    content: dict[str, object] = {"clean": clean.path.name, "pool": source.pool}
    fields = _fields(clean)
    if fields:
        content["fields"] = len(fields)  # earlier versions stored such data without their fields
    if source.label_noise or is_rotated:
        content["noise"] = source.label_noise
        content["rotation"] = asdict(source.rotation) if is_rotated else None
        content["seed"] = seed
        content["partition"] = _digest(partition)
    name = f"{type(source).__name__.lower()}-corrupted"
    return open_or_build(
        source.cache, name, content, lambda: _build(source, clean, partition, seed)
    )


def _build(source: Source, clean: Dataset, partition: Partition, seed: int) -> Samples:
    labels = _add_label_noise(clean, partition.train, source.label_noise, seed)
    rows = np.arange(len(clean))
    angles = np.zeros(len(clean))
    domains, domain_names = clean.domains, clean.domain_names
    if source.rotation.per != "none":
        rows, angle_numbers = _draw_angles(source, clean, partition, seed)
        all_angles = np.array(source.rotation.angles)
        angles = np.where(angle_numbers == NO_ANGLE, 0.0, all_angles[angle_numbers])
        domains = clean.domains[rows]
        if len(domain_names) == 1:
            domains = np.maximum(angle_numbers, 0)
            domain_names = [f"{angle:g} degrees" for angle in source.rotation.angles]
    return Samples(
        _rotate_and_pool(source, clean, rows, angles),
        labels[rows],
        domains,
        clean.train_rows,
        clean.class_names,
        domain_names,
        clean.kind,
        clean.tokens,
        clean.columns,
        _fields(clean),
    )


def _fields(clean: Dataset) -> tuple[InputField, ...]:
    return clean.shape.fields if isinstance(clean.shape, PackedShape) else ()


def _add_label_noise(clean: Dataset, train: CSR, ratio: float, seed: int) -> NDArray[Any]:
    """Return all labels, after some training labels of each client have become wrong.

    Of a client's n training labels, floor(ratio * n) change to another class.
    clean: the data without noise.
    train: the training rows of each client.
    ratio: the share of wrong labels.
    seed: the seed of the run.
    """
    rng = stream(seed, "noise")
    order = rng.permutation(clean.train_rows)
    shifts = rng.integers(1, max(clean.num_classes, 2), len(clean))
    changed = train.indices[leading_places(train, floor_counts(train.counts * ratio), order)]
    labels = clean.labels.copy()
    labels[changed] = symmetric_label_noise(
        labels=labels[changed],
        ratio=1.0,
        num_classes=clean.num_classes,
        order=np.arange(len(changed)),
        shifts=shifts[changed],
    )
    return labels


def _draw_angles(
    source: Source, clean: Dataset, partition: Partition, seed: int
) -> tuple[Ints, Ints]:
    """Draw an angle for each image of the rotated data set; return (rows, angle_numbers).

    Both are int64 [n]. Image i is image rows[i] of the clean data set, turned by
    rotation.angles[angle_numbers[i]]. The number is `NO_ANGLE` for a training image that no client
    has.
    """
    rotation, rng = source.rotation, stream(seed, "rotation")
    num_angles = len(rotation.angles)
    numbers = np.full(clean.train_rows, NO_ANGLE)
    if rotation.per == "client":
        for part in partition.parts_of_clients():
            numbers[part.indices] = client_angle_numbers(part.owners, num_angles)
    else:
        concentrations = np.full(num_angles, rotation.concentration)
        preferences = rng.dirichlet(concentrations, size=len(partition))
        uniforms = rng.random(clean.train_rows)
        for part in partition.parts_of_clients():
            numbers[part.indices] = image_angle_numbers(
                preferences[part.owners], uniforms[part.indices]
            )
    central = np.arange(clean.train_rows, len(clean))
    if rotation.test == "all":
        central_numbers = np.repeat(np.arange(num_angles), len(central))
        central = np.tile(central, num_angles)
    else:
        central_numbers = np.arange(len(central)) % num_angles
    rows = np.concatenate((np.arange(clean.train_rows), central))
    return rows, np.concatenate((numbers, central_numbers))


def _rotate_and_pool(source: Source, clean: Dataset, rows: Ints, angles: Floats) -> Inputs:
    """Return the inputs of `rows`; images are rotated, and blocks of their pixels are averaged.

    source: gives the interpolation of the rotation and the height and width of a block,
    `source.pool`.
    clean: the data before these changes.
    rows: [n], rows of `clean`.
    angles: [n], the angle of each row in degrees.
    """
    if not clean.is_images:
        return clean.inputs[rows]
    channels, height, width = clean.shape
    shape = (len(rows), channels, height // source.pool, width // source.pool)
    changed = np.empty(shape, dtype=np.uint8)
    for start in range(0, len(rows), IMAGES_AT_ONCE):
        part = slice(start, start + IMAGES_AT_ONCE)
        rotated = rotate_images(
            images=clean.inputs[rows[part]],
            angles=angles[part],
            interpolation=source.rotation.interpolation,
        )
        pixels = rotated.astype(np.uint8, copy=False)
        changed[part] = pool_images(pixels, source.pool) if source.pool > 1 else pixels
    return changed


def _digest(partition: Partition) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in partition.parts_of_clients():
        digest.update(part.indices.tobytes())
        digest.update(part.offsets.tobytes())
    return digest.hexdigest()
