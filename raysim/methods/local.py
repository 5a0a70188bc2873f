"""Local training without any exchange: every client keeps a model of its own; the lower reference of federated methods.

"Single" in FRAug's Table 2 and "Local" in FedBR's Table 1; nothing travels in either direction.

Choices where the sources differ or are silent
- The optimiser starts anew in every participation, as in all federated methods, so that only sharing differs;
  keep_optimizer=True carries its buffers on.
- A client trains when it is sampled; with schedule.cohort equal to the number of clients all train in every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from raysim.api.hooked_method import HookedMethod

if TYPE_CHECKING:
    from raysim.api.context import Context

_PREFIX = "local.optimizer."


class LocalTraining(HookedMethod):
    """All networks are personal."""

    name = "local"
    paper = "no aggregation"

    def __init__(self, keep_optimizer: bool = False):
        self.keep_optimizer = keep_optimizer

    def personal(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """Every parameter and buffer of every network."""
        return [
            f"{name}.{path}"
            for name, network in networks.items()
            for path, tensor in (*network.named_parameters(), *network.named_buffers())
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        ]

    def receive(self, ctx: Context) -> None:
        """Let the optimisers go on where they were."""
        if self.keep_optimizer:
            buffers = {key.removeprefix(_PREFIX): value for key, value in ctx.state.items() if key.startswith(_PREFIX)}
            ctx.optimizers.resume(buffers)

    def finish(self, ctx: Context) -> None:
        """Keep the optimisers' buffers."""
        if self.keep_optimizer:
            ctx.state |= {f"{_PREFIX}{key}": value for key, value in ctx.optimizers.save().items()}
