"""raysim: asynchronous, cluster-scale federated-learning simulation.

    import raysim
    result = raysim.run("method=fedprox", rounds=20, runtime="inprocess")
    result.history, result.clients, result.predictions().classes
    raysim.run(
        methods=[MyMethod()], model=MyModel(), data=((x, y), (x_test, y_test)), partition="iid"
    )
    raysim.load("runs/first").model()

`study`, `sweep` and `report` compare runs. `build` checks a run without starting it. `raysim new
NAME` writes a package with an example of each class that extends raysim.
`raysim.conformance.checks` tests an object of such a class.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raysim.primitives.version import __version__

if TYPE_CHECKING:
    from raysim.api.compression import Compressor
    from raysim.api.learner import EvaluationData, Learner, LearnerUpdate
    from raysim.api.local_training import LocalResult
    from raysim.api.method import Method
    from raysim.api.metrics import Metric
    from raysim.api.selection import Selection, SelectionView
    from raysim.api.topology import Federation, Network, Topology
    from raysim.commands.study.session import StudyResult, study
    from raysim.commands.sweep.results import SweepResult
    from raysim.commands.sweep.session import sweep
    from raysim.data.partition import CSR, Partition, Partitioner
    from raysim.data.raw import Raw, Source
    from raysim.experiment.build import build
    from raysim.experiment.execute import load, run
    from raysim.experiment.result import Result
    from raysim.experiment.settings import Interrupted
    from raysim.models.classifier import Classifier, ModelRecipe
    from raysim.primitives.errors import RefusedError
    from raysim.results.comparison import Report, report
    from raysim.results.observers import Observer, ObserverError
    from raysim.simulation.events import TooManyFailuresError
    from raysim.simulation.fleet import Fleet
    from raysim.simulation.schedule import Schedule

__all__ = [
    "CSR",
    "Classifier",
    "Compressor",
    "EvaluationData",
    "Federation",
    "Fleet",
    "Interrupted",
    "Learner",
    "LearnerUpdate",
    "LocalResult",
    "Method",
    "Metric",
    "ModelRecipe",
    "Network",
    "Observer",
    "ObserverError",
    "Partition",
    "Partitioner",
    "Raw",
    "RefusedError",
    "Report",
    "Result",
    "Schedule",
    "Selection",
    "SelectionView",
    "Source",
    "StudyResult",
    "SweepResult",
    "TooManyFailuresError",
    "Topology",
    "__version__",
    "build",
    "load",
    "report",
    "run",
    "study",
    "sweep",
]

_PLACES = {
    "raysim.api.compression": ("Compressor",),
    "raysim.api.learner": ("EvaluationData", "Learner", "LearnerUpdate"),
    "raysim.api.local_training": ("LocalResult",),
    "raysim.api.method": ("Method",),
    "raysim.api.selection": ("Selection", "SelectionView"),
    "raysim.api.metrics": ("Metric",),
    "raysim.api.topology": ("Federation", "Network", "Topology"),
    "raysim.commands.study.session": ("StudyResult", "study"),
    "raysim.commands.sweep.results": ("SweepResult",),
    "raysim.commands.sweep.session": ("sweep",),
    "raysim.data.partition": ("CSR", "Partition", "Partitioner"),
    "raysim.data.raw": ("Raw", "Source"),
    "raysim.experiment.build": ("build",),
    "raysim.experiment.execute": ("load", "run"),
    "raysim.experiment.result": ("Result",),
    "raysim.experiment.settings": ("Interrupted",),
    "raysim.models.classifier": ("Classifier", "ModelRecipe"),
    "raysim.primitives.errors": ("Refused", "RefusedError"),
    "raysim.results.comparison": ("Report", "report"),
    "raysim.results.observers": ("Observer", "ObserverError", "ObserverFailed"),
    "raysim.simulation.events": ("TooManyFailures", "TooManyFailuresError"),
    "raysim.simulation.fleet": ("Fleet",),
    "raysim.simulation.schedule": ("Schedule",),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: `import raysim` imports no PyTorch, Hydra or Ray."""
    if name not in _MODULES:
        raise AttributeError(f"module 'raysim' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all public names, including those that are not imported yet."""
    return sorted(__all__)
