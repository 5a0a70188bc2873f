"""Measure how long a worker's calls and their parts take, in a run with `profile=true`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from raysim.primitives.spans import Spans, Track

# The kind of work of each call, for the time that none of its measured parts counts.
WORKER_CALLS = {
    "ready": "other",
    "store_constants": "other",
    "release": "other",
    "contribute": "other",
    "train": "other",
    "train_apart": "other",
    "evaluate": "evaluation",
    "scored_tensors": "evaluation",
    "predictions": "evaluation",
}


@dataclass(frozen=True)
class WorkerTrack:
    """The time of a worker's calls by kind of work, and the start and end of each call.

    Starts and ends are in seconds since the epoch.
    """

    track: Track
    calls: list[tuple[float, float]]


def watch(parts: Iterable[tuple[object, Mapping[str, str]]], device: torch.device) -> Spans:
    """Time Python functions of several objects from now on; return the recorder of the times.

    parts: pairs (object, kinds). `kinds` maps a function's name to the type of work for which its
    time counts. Names that the object does not have are ignored.
    device: on a GPU, times include the wait until the GPU has finished.
    """
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    spans = Spans(whole=("evaluation",), settle=settle)
    for owner, kinds in parts:
        for name, kind in kinds.items():
            if hasattr(owner, name):
                spans.watch(owner, name, kind)
    return spans


def gpu_utilization(device: torch.device) -> float | None:
    """Return the share of the last second in which a GPU was busy, 0 to 1.

    Return None if the device is not a GPU, or if its driver does not report the share.
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ImportError, RuntimeError):  # the driver's package is not installed, or fails
        return None
