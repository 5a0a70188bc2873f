"""FedSA-LoRA: average the factor A of each adapter; each client keeps its own B.

Source: Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning" (ICLR
2025). Clients train both factors, and are scored with their own models.

Departures from the paper
- The head is averaged, unless `method=fedsa_lora+fedrep method.fedrep.mode=joint` keeps it on the
  client.
- A client that never trained has B = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.api.method import Method
from raysim.methods.lora_factors import require_adapters

if TYPE_CHECKING:
    from raysim.api.setup import Setup


class FedSALoRA(Method):
    """A method that keeps the factor B of each adapter on the client."""

    name = "fedsa_lora"
    paper = "Guo et al., ICLR 2025"

    def setup(self, run: Setup) -> None:
        """Declare B as personal; refuse a model without adapters, and adapters of embeddings."""
        adapters = require_adapters(run)
        for adapter in adapters:
            run.require(
                not adapter.is_embedding,
                f"model.lora.layers: layer '{adapter.layer}' is an embedding. Method 'fedsa_lora' "
                "averages the factor A, because A should contain what all clients have in common. "
                "But the A of an embedding contains separate values for each token. Leave this "
                "layer out.",
            )
        run.private_parameters([f"model.{adapter.b}" for adapter in adapters])
