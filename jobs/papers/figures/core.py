"""Define a figure of a paper: small runs, the numbers from these runs, and one picture.

The numbers are stored as JSON together with the commands of the runs. The picture is drawn only
from these numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from raysim.results.figures import figure_file
from raysim.results.history import write_json
from raysim.results.theme import line_style, set_log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from raysim.experiment.result import Result

# Numbers of a panel: kind ("lines", "points", "bars" or "images"), title, x and y (labels of the
# axes), series (each with label, x, y), log (True: a logarithmic x axis), ticks
# (texts on the x axis), images (rows of pixels).
Panel: TypeAlias = dict[str, Any]
STORED = Path(__file__).parent.parent / "results" / "figures"
DEFAULT_FOLDER = "figures"  # of the runs, in commands
COLUMNS = 3  # panels next to each other
IMAGE_COLUMNS = 8
DIGITS = 4


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper.

    name: such as "fedbss/5a".
    shows: what the paper's figure shows.
    scale: how our runs differ from the paper's runs.
    panels: function that makes the panels from runs.
    """

    name: str
    shows: str
    scale: str
    panels: Callable[[Runs], Sequence[Panel]]

    @property
    def command(self) -> str:
        """Return the command line that draws this figure."""
        return f"uv run python -m jobs.papers.figure {self.name} data.root=DIR"

    @property
    def file(self) -> str:
        """Return the name of the files of this figure, without an ending such as ".png".

        One of these files is the picture, and one has its numbers.
        """
        return self.name.replace("/", "-")


@dataclass
class Runs:
    """A factory for the runs of a figure. It does not repeat a finished run.

    folder: the folder of the runs.
    overrides: overrides of every run. They replace the figure's overrides of the same keys.
    commands: the commands of the runs so far.
    """

    folder: Path
    overrides: tuple[str, ...] = ()
    commands: list[str] = field(default_factory=list)

    def run(self, *overrides: str) -> Result:
        """Execute the run with these overrides, unless it has finished; return its result."""
        import raysim

        words = [*overrides, *self.overrides]
        runtime_overrides = ["runtime=inprocess", "tracking=none"]
        text = " ".join(word for word in words if not word.startswith("data.root="))
        # a run may start from the model of another run in the folder, wherever the folder is
        text = text.replace(str(self.folder), DEFAULT_FOLDER)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        out = self.folder / "runs" / digest
        self.commands.append(f"raysim run {text}")
        if (out / "summary.json").is_file():
            return raysim.load(out, allow=["jobs"])
        resume = ["resume=latest"] if out.exists() else []
        conf = str(Path(__file__).parent / "conf")
        return _run([*words, *runtime_overrides, f"out={out}", *resume], conf)


def _run(overrides: Sequence[str], conf: str) -> Result:
    import raysim
    from raysim.experiment.compose import compose
    from raysim.experiment.config_files import to_dict

    return raysim.run(to_dict(compose(overrides, [conf])), quiet=True, allow=["jobs"])


# --- panels ---------------------------------------------------------------------------------------
def series(label: str, x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Return a series of points, rounded, without points whose y is missing or not finite."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if b is not None and math.isfinite(b)]
    return {
        "label": label,
        "x": [round(float(a), DIGITS) for a, _ in pairs],
        "y": [round(float(b), DIGITS) for _, b in pairs],
    }


def curve(label: str, result: Result, name: str, factor: float = 1.0) -> dict[str, Any]:
    """Return a series: a column of a run's history, multiplied by `factor`, over its rounds."""
    rows = [row for row in result.rows if row.get(name) is not None]
    rounds = [float(row["round"] or 0) for row in rows]
    return series(label, rounds, [factor * float(row[name] or 0) for row in rows])


def panel(kind: str, title: str, x: str, y: str, lines: Sequence[Mapping[str, Any]]) -> Panel:
    """Return a panel that shows series as lines, bars or points.

    kind: "lines", "bars" or "points".
    x, y: the labels of the axes.
    lines: the series, each with "label" (a text), "x" and "y" (lists of numbers).
    """
    return {"kind": kind, "title": title, "x": x, "y": y, "series": list(lines)}


def image_panel(title: str, images: np.ndarray) -> Panel:
    """Return a panel of grey images [n, height, width], scaled together to 0..255."""
    low, high = float(images.min()), float(images.max())
    scaled = np.rint(255 * (images - low) / ((high - low) or 1.0)).astype(int)
    return {"kind": "images", "title": title, "images": scaled.tolist()}


def embed(features: np.ndarray) -> np.ndarray:
    """Map m rows of features [m, F] to points in the plane [m, 2] by t-SNE.

    The same array of features always gives the same points.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    perplexity = min(30.0, (len(features) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca", random_state=0)
    with threadpool_limits(1, "openmp"):
        points: np.ndarray = tsne.fit_transform(features / (np.abs(features).max() or 1.0))
    return points


def points_by_class(points: np.ndarray, labels: np.ndarray) -> list[dict[str, Any]]:
    """Return a series for each class, with the points [m, 2] of its samples."""
    lines = []
    for label in np.unique(labels):
        chosen = points[labels == label]
        lines.append(series(f"{label}", chosen[:, 0].tolist(), chosen[:, 1].tolist()))
    return lines


# --- the picture ----------------------------------------------------------------------------------
def draw(figure: PaperFigure, panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels of a figure as one picture.

    The metadata of the picture's file has the checksum of the drawn numbers.
    path: the path of the picture.
    """
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    size = (max(6.0, 4.6 * columns), 0.8 + 3.4 * rows)
    about = {"Description": checksum(panels)}
    with figure_file(path, f"{figure.name}: {figure.shows}", size, about=about) as picture:
        axes = list(picture.subplots(rows, columns, squeeze=False).flat)
        for ax, content in zip(axes, panels, strict=False):
            _draw_panel(ax, content)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()


def checksum(panels: Sequence[Panel]) -> str:
    """Return a checksum of all numbers in the panels."""
    return hashlib.sha256(json.dumps(panels, sort_keys=True).encode()).hexdigest()


def _draw_panel(ax: Axes, content: Panel) -> None:
    ax.set_title(content["title"], fontsize=10)
    if content["kind"] == "images":
        _draw_images(ax, np.asarray(content["images"]))
        return
    for index, line in enumerate(content["series"]):
        style = line_style(index)
        if content["kind"] == "lines":
            marker = "o" if len(line["x"]) <= 12 else ""
            ax.plot(line["x"], line["y"], label=line["label"], marker=marker, **style)
        elif content["kind"] == "points":
            ax.plot(line["x"], line["y"], ".", color=style["color"], label=line["label"])
        else:
            width = 0.8 / len(content["series"])
            shifted = np.asarray(line["x"]) + (index - (len(content["series"]) - 1) / 2) * width
            ax.bar(shifted, line["y"], width, color=style["color"], label=line["label"])
    ax.set(xlabel=content["x"], ylabel=content["y"])
    if content.get("ticks"):
        ax.set_xticks(range(len(content["ticks"])), content["ticks"])
    if content.get("log"):
        set_log_scale(ax, "x")
    ax.grid(True)
    if len(content["series"]) > 1 and content["kind"] == "points":
        # beside the axes, because points are everywhere inside
        ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), handletextpad=0.1)
    elif len(content["series"]) > 1:
        ax.legend(fontsize=8, ncols=2 if len(content["series"]) > 5 else 1)


def _draw_images(ax: Axes, images: np.ndarray) -> None:
    """Draw grey images [n, height, width] as a grid with `IMAGE_COLUMNS` images in each row."""
    count, height, width = images.shape
    rows = -(-count // IMAGE_COLUMNS)
    sheet = np.full((rows * (height + 1), IMAGE_COLUMNS * (width + 1)), 255)
    for index, image in enumerate(images):
        top, left = (index // IMAGE_COLUMNS) * (height + 1), (index % IMAGE_COLUMNS) * (width + 1)
        sheet[top : top + height, left : left + width] = image
    ax.imshow(sheet, cmap="gray", vmin=0, vmax=255)
    ax.set_axis_off()


# --- numbers --------------------------------------------------------------------------------------
def write_numbers(figure: PaperFigure, panels: Sequence[Panel], runs: Runs, folder: Path) -> Path:
    """Write the numbers of a figure, and the commands of its runs, to a JSON file.

    Return the path of this file.
    runs: the runs from which the figure was made.
    folder: is created if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{figure.file}.json"
    commands = list(dict.fromkeys(runs.commands))
    write_json({"figure": figure.name, "commands": commands, "panels": list(panels)}, path)
    return path


def read_numbers(figure: PaperFigure, folder: Path = STORED) -> Mapping[str, Any] | None:
    """Return the stored numbers of a figure; None if there are none."""
    path = folder / f"{figure.file}.json"
    if not path.is_file():
        return None
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
