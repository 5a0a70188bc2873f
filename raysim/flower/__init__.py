"""Run Flower apps on raysim: with a learner, a Grid on virtual time, and `start_simulation`.

The function `start_simulation` replaces Flower's function of the same name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysim.flower.simulation import start_simulation as start_simulation

__all__ = ["start_simulation"]


def __getattr__(name: str) -> Any:
    """Import `start_simulation` only when it is used, because it needs the package flwr."""
    if name == "start_simulation":
        from raysim.flower.simulation import start_simulation

        return start_simulation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
