"""Choose how a host computes steps: one client after another, several at once, or from a recording."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from raysim.models.classifier import is_stochastic
from raysim.models.split import Foreign
from raysim.primitives.errors import Refused
from raysim.training.run_spec import RunSpec


def check_step_mode(spec: RunSpec, networks: Mapping[str, nn.Module]) -> None:
    """Raise `Refused` if the run cannot be trained in the mode that `runtime.lanes` and `runtime.graph` ask for."""
    if spec.graph and is_stochastic(*networks.values()):
        raise Refused(
            "runtime.graph=true: the model draws random numbers in its steps (dropout or noise), which a recording "
            "would repeat. Set runtime.graph=false."
        )
    if spec.graph:
        raise Refused("runtime.graph=true: steps cannot be recorded. Set runtime.graph=false.")
    if spec.lanes > 1:
        raise Refused(f"runtime.lanes={spec.lanes}: clients are trained one after another. Set runtime.lanes=1.")


def usual_lanes(spec: RunSpec, networks: Mapping[str, nn.Module], concurrency: int) -> int:
    """Return the number of clients that a host trains at once unless `runtime.lanes` is set."""
    return 1


def uses_graph(spec: RunSpec, networks: Mapping[str, nn.Module], asked: bool | None) -> bool:
    """Return whether steps are recorded; `asked` is `runtime.graph`, None if it is not set."""
    return bool(asked)


def is_built_in(spec: RunSpec) -> bool:
    """Return whether the network and the loss are part of raysim."""
    return not isinstance(spec.model, Foreign) and spec.loss is None
