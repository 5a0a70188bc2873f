"""The factors A and B of a run's adapters, for methods that treat them differently.

`raysim/models/lora.py` says what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.models.lora import Adapter, find_adapters

if TYPE_CHECKING:
    from raysim.api.setup import Setup

# Methods that decide what becomes of the factors; a list may hold one of them.
LORA_METHODS = ("ffa_lora", "fedsa_lora")


def require_adapters(run: Setup) -> tuple[Adapter, ...]:
    """Return the adapters of the run's model; refuse a second method of `LORA_METHODS`.

    Raise ValueError for a model without adapters.
    """
    for other in LORA_METHODS:
        if other != run.method:
            run.excludes(other, "both decide what becomes of the factors of adapters")
    adapters = find_adapters(run.model)
    run.require(
        adapters,
        f"model.lora.rank: the model has no adapters, and method '{run.method}' is about them. Set "
        "model.lora.rank=4, for example, or leave the method out.",
    )
    return adapters
