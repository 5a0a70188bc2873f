"""FFA-LoRA: freeze the factor A of each adapter; train and average B alone.

Source: Sun et al., "Improving LoRA in Privacy-preserving Federated Learning" (ICLR 2024). All
clients have the same random A, so the mean of B_i gives the mean of the products B_i A. A does not
travel.

Departures from the paper
- The head is trained and averaged, too.
- A has peft's initial values.
- Virtual time counts both factors as trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.api.method import Method
from raysim.methods.lora_factors import require_adapters
from raysim.models.lora import find_adapters

if TYPE_CHECKING:
    from raysim.api.setup import Setup


class FFALoRA(Method):
    """A method that freezes the factor A of each adapter."""

    name = "ffa_lora"
    paper = "Sun et al., ICLR 2024"

    def setup(self, run: Setup) -> None:
        """Freeze the factor A of each adapter.

        Refuse a model without adapters. Also refuse a model in which an embedding has an adapter.
        """
        for adapter in require_adapters(run):
            run.require(
                not adapter.is_embedding,
                f"model.lora.layers: the factor A of the embedding '{adapter.layer}' starts at 0, "
                "and method 'ffa_lora' never trains it, so that the factor B would learn nothing. "
                "Leave the layer out.",
            )
        # Every process builds frozen parameters from the seed; they are not in the vector. A method
        # before this one may have copied the model.
        for network in run.networks.values():
            for adapter in find_adapters(network):
                network.get_parameter(adapter.a).requires_grad_(False)
