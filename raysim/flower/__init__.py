"""Run Flower apps on raysim, in one of three ways.

- `raysim flower run` executes a whole app with its ServerApp, on raysim's virtual clock.
- `learner=flower` trains the clients of a run of raysim with an app's ClientApp.
- `start_simulation` replaces Flower's function of this name in an older program.
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
