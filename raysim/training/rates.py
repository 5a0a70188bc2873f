"""Compute the factors on the learning rate of parts of a model (`local.rates`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raysim.vectors.layout import Entry

# A later part replaces an earlier one, and a named module replaces all.
PARTS = ("body", "head", "adapters")


def rate_factors(entries: Sequence[Entry], rates: Mapping[str, float]) -> list[float]:
    """Return each parameter's factor on the learning rate; 1 for parameters in no part.

    If a parameter is in several parts, the part with the longest module name counts, else
    "adapters", else "head".
    rates: the factor of each part: "head", "body", "adapters", or a module's full name.
    """
    names = [name for name in PARTS if name in rates]
    names += sorted(rates.keys() - set(PARTS), key=len)
    factors = [1.0] * len(entries)
    for name in names:
        for index, entry in enumerate(entries):
            if is_in_part(entry.name, name):
                factors[index] = rates[name]
    return factors


def is_in_part(parameter: str, part: str) -> bool:
    """Return True if a parameter belongs to a part of the model.

    parameter: the full name, such as "model.head.weight".
    part: "head", "body" (the model without head and adapters), "adapters", or the full name of a
    module or parameter.
    """
    is_head = parameter.startswith("model.head.")
    is_adapter = "lora_" in parameter
    if part == "head":
        return is_head
    if part == "adapters":
        return is_adapter
    if part == "body":
        return parameter.startswith("model.") and not (is_head or is_adapter)
    return parameter == part or parameter.startswith(f"{part}.")
