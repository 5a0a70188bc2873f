"""Show a study in MLflow: a parent run with report and tables, and a child for each run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from raysim.commands.study.plan import StudyPlan
from raysim.primitives.files import parse_json
from raysim.results.tracking import make_tracker, source_tags

FILES = (
    "report.html",
    "study.csv",
    "differences.csv",
    "study.json",
    "study.tex",
    "study.png",
    "study.yaml",
)


@contextmanager
def track(study: StudyPlan, say: Callable[[str], None]) -> Iterator[None]:
    """Begin or continue MLflow's parent run of a study; when the `with` block ends, finish it.

    The parent run gets the means of the metrics and the result files. Without tracking.uri, they
    are stored for `raysim ui`. Nothing happens if no run has tracking=mlflow.
    say: function that gets lines for the user.
    """
    tracked = [run for run in study.runs if run.config["tracking"]["name"] == "mlflow"]
    if not tracked:
        yield
        return
    folder = study.folder
    uri = tracked[0].config["tracking"]["uri"]
    tracker = make_tracker(folder, uri, say=say, command="raysim study")
    overrides = {key: " ".join(texts) for key, texts in study.overrides.items()}
    tracker.start(overrides, {"kind": "study", "study": folder.resolve().name, **source_tags()})
    tracker.wait_until_known()
    status = "FAILED"
    try:
        yield
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        files = [folder / name for name in FILES if (folder / name).is_file()]
        tracker.finish({"runs": len(study.runs), **_means(folder)}, files, status)
    if not uri:
        say(f"see the runs in MLflow with: raysim ui {shlex.quote(str(folder))}")


def _means(folder: Path) -> Mapping[str, object]:
    """Read the mean of each metric for each setting of a study.

    {"final": {"fedavg": 0.8}} means that the setting "fedavg" has the mean 0.8 of the metric
    "final". Without results in the folder, return {}.
    """
    path = folder / "study.json"
    if not path.is_file():
        return {}
    means: dict[str, dict[str, float]] = {}
    for row in parse_json(path.read_bytes())["settings"]:
        metrics = {name: value for name, value in row.items() if isinstance(value, dict)}
        setting = " ".join(str(value) for name, value in row.items() if name not in metrics)
        for name, value in metrics.items():
            if value["mean"] is not None:
                means.setdefault(name, {})[setting] = value["mean"]
    return means
