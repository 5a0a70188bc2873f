"""Local training: every client keeps its own model, and nothing is exchanged.

Source: "Single" in FRAug's Table 2 (ICCV 2023) and "Local" in FedBR's Table 1 (ICML 2023).

Departures from the papers
- The optimizer starts again in each job, as in FedAvg, unless keep_optimizer=True.
- A client trains only when it is sampled. All clients train in each round if schedule.cohort is
  the number of clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from raysim.api.method import Method

if TYPE_CHECKING:
    from raysim.api.setup import Setup


class LocalTraining(Method):
    """A method in which every client keeps its own model.

    keep_optimizer: True lets a client keep its optimizer from job to job.
    """

    name = "local"
    paper = "no aggregation"

    def __init__(self, keep_optimizer: bool = False):
        self.keep_optimizer = keep_optimizer

    def setup(self, run: Setup) -> None:
        """Declare that all parameters and buffers stay on the client.

        With keep_optimizer=True, the state of the client's optimizer stays there, too.
        """
        run.private_parameters(_all_names)
        if self.keep_optimizer:
            run.keep_optimizer()


def _all_names(networks: Mapping[str, nn.Module]) -> Sequence[str]:
    """Return the names of all trainable parameters and buffers."""
    names = []
    for name, network in networks.items():
        trained = [path for path, tensor in network.named_parameters() if tensor.requires_grad]
        buffers = [path for path, _ in network.named_buffers()]
        names += [f"{name}.{path}" for path in (*trained, *buffers)]
    return names
