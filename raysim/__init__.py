"""raysim: asynchronous, cluster-scale federated-learning simulation.

import raysim
result = raysim.run(["method=fedprox", "runtime=inprocess", "rounds=20"])
result.summary["accuracy_global"], result.rows[-1]
raysim.run(["rounds=20"], on_round=lambda row: print(row["round"], row["accuracy_global"]))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysim.api.method import Method
    from raysim.commands.sweep.tune import run as sweep
    from raysim.experiment.execute import build, run
    from raysim.results.observers import Observer

    __version__: str

__all__ = ["Method", "Observer", "build", "run", "sweep"]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("raysim-fl")
    except PackageNotFoundError:  # a copy that nobody installed, as in a job
        return "unknown"


def __getattr__(name: str) -> Any:
    """Imports what is asked for: `import raysim` itself imports neither PyTorch nor Hydra nor Ray."""
    if name == "__version__":
        return _version()
    if name == "Method":
        from raysim.api.method import Method

        return Method
    if name == "Observer":
        from raysim.results.observers import Observer

        return Observer
    if name == "sweep":
        from raysim.commands.sweep.tune import run

        return run
    if name in ("build", "run"):
        from raysim.experiment import execute

        return getattr(execute, name)
    raise AttributeError(f"module 'raysim' has no attribute {name!r}")
