"""Time a worker's calls and their parts from outside, in a run with `profile=true`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from raysim.primitives.spans import Spans, Track

# The kind of time that each call of a coordinator takes, unless a part of it says otherwise.
WORKER_CALLS = {
    "ready": "other",
    "store_constants": "other",
    "release": "other",
    "contribute": "other",
    "train": "other",
    "train_apart": "other",
    "combine": "sums",
    "evaluate": "evaluation",
    "scored_tensors": "evaluation",
    "predictions": "evaluation",
}


@dataclass(frozen=True)
class WorkerTrack:
    """Where the time of a worker's calls went, and their starts and ends in epoch seconds."""

    track: Track
    calls: list[tuple[float, float]]


def watch(parts: Iterable[tuple[object, Mapping[str, str]]], device: torch.device) -> Spans:
    """Time methods of some objects from now on.

    parts: objects, and the kind of time that each of their methods takes. On a GPU, which works
    asynchronously, every span waits for the end of the work.
    """
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    spans = Spans(whole=("evaluation",), settle=settle)
    for owner, kinds in parts:
        for name, kind in kinds.items():
            if hasattr(owner, name):
                spans.watch(owner, name, kind)
    return spans


def gpu_utilization(device: torch.device) -> float | None:
    """Return the share of the last moments in which a GPU was busy, as its driver reports it.

    None: the device is no GPU, or its driver does not report it.
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ImportError, RuntimeError):  # the driver's package is not installed, or fails
        return None
