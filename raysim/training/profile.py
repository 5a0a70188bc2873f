"""Where a host's time goes: its own calls and methods are timed, from outside, in a run that asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from raysim.primitives.spans import Spans, Track

if TYPE_CHECKING:
    from raysim.training.host import Host

# The calls of a coordinator, and what they are where nothing inside says otherwise.
_CALLS = {
    **dict.fromkeys(("ready", "keep", "release", "contribute", "train", "train_apart"), "other"),
    "combine": "sums",
    **dict.fromkeys(("evaluate", "own_tensors", "outputs"), "evaluation"),
}
_WITHIN_HOST = {
    **dict.fromkeys(("_receive", "_with_extras", "_state", "_copied", "_arrive"), "copies"),
    "_add": "sums",
}
_WITHIN_TRAINER = {"gather": "gathering", "look_ahead": "gathering", "load": "copies", "steps": "steps"}
_WITHIN_LANES = {"step_lanes": "steps"}


@dataclass(frozen=True)
class HostTrack:
    """Where the time of a host's calls went, and when each call began and ended (seconds since the epoch)."""

    track: Track
    calls: list[tuple[float, float]]


def watched(host: Host) -> Spans:
    """Time what this host does from now on. On a GPU, which works on its own, every span waits for its end."""
    waits = host.device.type == "cuda"
    spans = Spans(whole=("evaluation",), settle=torch.cuda.synchronize if waits else lambda: None)
    parts = (host, _CALLS), (host, _WITHIN_HOST), (host.trainer, _WITHIN_TRAINER), (host.loop, _WITHIN_LANES)
    for owner, kinds in parts:
        for name, kind in kinds.items():
            if hasattr(owner, name):
                spans.watch(owner, name, kind)
    return spans


def device_use(device: torch.device) -> float | None:
    """The share of the last moments in which a GPU was at work, as its driver says; None where nobody knows."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except (ImportError, RuntimeError):  # its driver's package is not installed, or the driver does not tell
        return None
