"""Where a worker's time goes: its own calls and methods are timed, from outside, in a run that asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raysim.primitives.spans import Spans, Track

# The calls of a coordinator, and what they are where nothing inside says otherwise.
_CALLS = {
    **dict.fromkeys(
        ("ready", "store_constants", "release", "contribute", "train", "train_apart"), "other"
    ),
    "combine": "sums",
    **dict.fromkeys(("evaluate", "scored_tensors", "predictions"), "evaluation"),
}
_WITHIN_WORKER = {
    **dict.fromkeys(("_receive", "_with_extras", "_state", "_copied", "_arrive"), "copies"),
    "_add": "sums",
}
_WITHIN_TRAINER = {
    "gather": "gathering",
    "look_ahead": "gathering",
    "load": "copies",
    "steps": "steps",
}
_WITHIN_LANES = {"step_lanes": "steps"}


@dataclass(frozen=True)
class WorkerTrack:
    """Where the time of a worker's calls went, and when each call began and ended (seconds since the epoch)."""

    track: Track
    calls: list[tuple[float, float]]


def watch_worker(worker: object, trainer: object, loop: object, device: torch.device) -> Spans:
    """Time what a worker, its trainer and its loop do from now on.

    On a GPU, which works asynchronously, every span waits for the end of the work.
    """
    waits = device.type == "cuda"
    spans = Spans(whole=("evaluation",), settle=torch.cuda.synchronize if waits else lambda: None)
    parts = (
        (worker, _CALLS),
        (worker, _WITHIN_WORKER),
        (trainer, _WITHIN_TRAINER),
        (loop, _WITHIN_LANES),
    )
    for owner, kinds in parts:
        for name, kind in kinds.items():
            if hasattr(owner, name):
                spans.watch(owner, name, kind)
    return spans


def gpu_utilization(device: torch.device) -> float | None:
    """The share of the last moments in which a GPU was at work, as its driver says; None where nobody knows."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (
        ImportError,
        RuntimeError,
    ):  # its driver's package is not installed, or the driver does not tell
        return None
