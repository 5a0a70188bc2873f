"""A study in MLflow: one run of its own, to which its runs belong, with the report and the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raysim.commands.study.runner import Campaign
from raysim.results.tracking import Tracker, origin

FILES = ("report.html", "study.csv", "differences.csv", "study.json", "study.tex", "study.png", "study.yaml")


@contextmanager
def tracked(campaign: Campaign, say: Callable[[str], None]) -> Iterator[None]:
    """Begin, or continue, the study's run; when the block ends, send its files. Nothing for a study without MLflow."""
    options = next((c.config["tracking"] for c in campaign.cells if c.config["tracking"]["name"] == "mlflow"), None)
    if options is None:
        yield
        return
    folder, status = campaign.folder, "FAILED"
    tracker = Tracker(folder, options["uri"] or "", say=say, command="raysim study")
    words = {key: " ".join(each) for key, each in campaign.words.items()}
    tracker.start(words, {"kind": "study", "study": folder.resolve().name, **origin()})
    tracker.known()
    try:
        yield
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        counts = {"runs": len(campaign.cells)}
        tracker.finish(counts, [folder / name for name in FILES if (folder / name).is_file()], status)
