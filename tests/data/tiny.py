"""Write tiny data sets to disk, in several file formats."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

RNG = np.random.default_rng(0)
DIGITS = [str(digit) for digit in range(10)]


def picture(height: int = 4, width: int = 4, channels: int = 1) -> np.ndarray:
    """Return random pixels, [h, w] or [h, w, 3]."""
    pixels = RNG.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[:, :, 0] if channels == 1 else pixels


def encoded(pixels: np.ndarray) -> bytes:
    """Return an image as the bytes of a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(
    path: Path, pixels: list[np.ndarray], labels: list, struct: bool = True, **columns: list
) -> None:
    """Write one Parquet file with the columns "image" and "label".

    struct: True stores an image as {"bytes": ..., "path": ...}, False as its PNG bytes.
    columns: further columns, by name. An argument `metadata` is not a column, but the metadata of
    the file.
    """
    content = [encoded(one) for one in pixels]
    images = (
        pa.array([{"bytes": one, "path": None} for one in content]) if struct else pa.array(content)
    )
    metadata = columns.pop("metadata", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"image": images, "label": labels, **columns}).replace_schema_metadata(metadata),
        path,
    )


def write_picture(path: Path, pixels: np.ndarray) -> None:
    """Write one PNG file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_strips(
    folder: Path,
    size: int = 4,
    channels: int = 1,
    rows: tuple[int, int] = (12, 10),
    classes: list[str] = DIGITS,
    per_strip: int = 5,
) -> np.ndarray:
    """Write a data set of strips; return all images, [n, h, w] or [n, h, w, 3].

    size: the height and width of an image in pixels.
    rows: the numbers of training and of test images.
    classes: the names of the classes, which the images have in turn.
    per_strip: the largest number of images in a strip.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images = np.stack([picture(size, size, channels) for _ in range(sum(rows))])
    for split, part in (("train", images[: rows[0]]), ("test", images[rows[0] :])):
        np.save(
            folder / f"{split}-labels.npy", (np.arange(len(part)) % len(classes)).astype(np.uint8)
        )
        for number, start in enumerate(range(0, len(part), per_strip)):
            strip = part[start : start + per_strip]
            write_picture(folder / f"{split}-{number:03d}.png", strip.reshape(-1, *strip.shape[2:]))
    (folder / "meta.json").write_text(
        json.dumps({"classes": classes, "height": size, "width": size})
    )
    return images


def write_mnist(folder: Path, train: int = 6, test: int = 3) -> np.ndarray:
    """Write torchvision's four files below folder/MNIST/raw; return all images, [n, 28, 28].

    The result has the training images first.
    train: the number of training images.
    test: the number of test images.
    """
    images = RNG.integers(0, 256, (train + test, 28, 28), dtype=np.uint8)
    labels = (np.arange(train + test) % 10).astype(np.uint8)
    (folder / "MNIST/raw").mkdir(parents=True)
    for name, rows in (("train", slice(0, train)), ("t10k", slice(train, None))):
        header = np.array([2051, len(images[rows]), 28, 28], ">i4").tobytes()
        (folder / f"MNIST/raw/{name}-images-idx3-ubyte").write_bytes(
            header + images[rows].tobytes()
        )
        header = np.array([2049, len(images[rows])], ">i4").tobytes()
        (folder / f"MNIST/raw/{name}-labels-idx1-ubyte").write_bytes(
            header + labels[rows].tobytes()
        )
    return images
