"""A study in MLflow: one run of its own, to which its runs belong, with the report and the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from raysim.commands.study.plan import Campaign
from raysim.primitives.files import parse_json
from raysim.results.tracking import Tracker, source_tags

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
def tracked(campaign: Campaign, say: Callable[[str], None]) -> Iterator[None]:
    """Begin, or continue, the study's run; when the block ends, send its files. Nothing for a study without MLflow."""
    options = next(
        (c.config["tracking"] for c in campaign.cells if c.config["tracking"]["name"] == "mlflow"),
        None,
    )
    if options is None:
        yield
        return
    folder, status = campaign.folder, "FAILED"
    tracker = Tracker(folder, options["uri"] or "", say=say, command="raysim study")
    words = {key: " ".join(each) for key, each in campaign.words.items()}
    tracker.start(words, {"kind": "study", "study": folder.resolve().name, **source_tags()})
    tracker.known()
    try:
        yield
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        files = [folder / name for name in FILES if (folder / name).is_file()]
        tracker.finish({"runs": len(campaign.cells), **_means(folder)}, files, status)


def _means(folder: Path) -> Mapping[str, object]:
    """The mean of every metric by setting, for the charts of the study itself: {"final": {"fedavg": 0.8}}."""
    path = folder / "study.json"
    found: dict[str, dict[str, float]] = {}
    for row in parse_json(path.read_bytes())["settings"] if path.is_file() else ():
        setting = " ".join(str(value) for value in row.values() if not isinstance(value, dict))
        for metric, values in row.items():
            if isinstance(values, dict) and values["mean"] is not None:
                found.setdefault(metric, {})[setting] = values["mean"]
    return found
