"""What a person looks at when runs are done: the plots of one run, and one page that compares several."""

from __future__ import annotations

import html
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.primitives.checks import known
from raysim.primitives.files import from_json, replace_file
from raysim.results.history import Row, column, metric_of, read_history, summarise
from raysim.results.jobs import read_jobs
from raysim.results.theme import DARK, LIGHT, page_theme, time_unit
from raysim.results.timeline import eventful, timeline_png
from raysim.simulation.fleet import FLOAT_BYTES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTHING = "–"
GAP = "  "
MARKED = "where it is ahead of the next by more than the deviation of either"  # a value as the best, in words
GROUPS = ("method", "data", "partition")  # what the table says of a configuration
NOISE = ("_target_", "out", "resume", "choices", "tracking", "hydra")  # differences that tell nothing about a study
METRICS = {
    "accuracy": "accuracy, mean of the clients",
    "accuracy_global": "accuracy on the central test set",
    "train_loss": "training loss",
    "loss_global": "loss on the central test set",
}
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it."""

    name: str
    config: dict[str, object]
    rows: list[dict[str, int | float | None]]
    summary: dict[str, object]
    folder: Path = Path()
    finished: bool = True


@dataclass(frozen=True)
class Curve:
    """One line of a plot; `points` are (row, y) with y known."""

    label: str
    points: list[tuple[Row, float]]
    colour: int
    dash: int = 0


@dataclass(frozen=True)
class Column:
    """One column of the comparison: `better` is +1 where the highest `score` wins, -1 where the lowest, 0 for text.

    deviations: of the scores, where they have one; `MARKED` is the rule. groups: rows that are compared to each other
    have the same; all of them unless given.
    """

    title: str
    texts: list[str]
    scores: list[float | None] = field(default_factory=list)
    better: int = 0
    deviations: Sequence[float | None] | None = None
    groups: Sequence[object] | None = None

    def best(self) -> set[int]:
        """Indices of the winners; nobody wins where all are equal or only one run has a value."""
        groups = self.groups or [None] * len(self.scores)
        return {winner for group in dict.fromkeys(groups) for winner in self._best_of(group, groups)}

    def _best_of(self, group: object, groups: Sequence[object]) -> set[int]:
        scores = {i: score for i, score in enumerate(self.scores) if score is not None and groups[i] == group}
        if not self.better or len(scores) < 2 or len({*scores.values()}) == 1:
            return set()
        first, second, *_ = sorted(scores, key=lambda index: -self.better * scores[index])
        if self.deviations is None:
            return {index for index, score in scores.items() if score == scores[first]}
        spread = [self.deviations[first], self.deviations[second]]
        clear = None not in spread and abs(scores[first] - scores[second]) > max(known(spread))
        return {first} if clear else set()


@dataclass(frozen=True)
class Section:
    """A part of a page: a table, and a picture as PNG for light and for dark pages."""

    title: str
    text: str
    columns: Sequence[Column]
    picture: tuple[bytes, bytes] | None = None


# ---------------------------------------------------------------- reading


def load_run(folder: Path) -> Run:
    """Read a run's folder; one that is still going, or was stopped, has no summary.json and is summed up here.

    Raises `ValueError` with one sentence where the folder is no run or one of its files is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name one that `raysim run out=DIR` wrote.")
    missing = [name for name in ("config.yaml", "history.parquet") if not (folder / name).is_file()]
    if missing:
        inside = sorted(path.parent.name for path in folder.glob("*/history.parquet"))
        hint = f"did you mean {folder / inside[0]}?" if inside else "name one that `raysim run out=DIR` wrote."
        raise ValueError(f"{folder} is no folder of a run, it has no {' and no '.join(missing)}; {hint}")
    rows = read_history(folder / "history.parquet")
    if not rows:
        raise ValueError(f"{folder} has a history without a round; let the run get further and ask again.")
    finished = (folder / "summary.json").is_file()
    summary = _read(folder / "summary.json", from_json) if finished else summarise(rows)
    return Run(folder.resolve().name, _read(folder / "config.yaml", _yaml), rows, summary, folder, finished)


def _yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except Exception as problem:  # the YAML reader fails in many ways
        raise ValueError(str(problem)) from problem


def _read(path: Path, parse: Callable[[str], object]) -> dict[str, object]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is broken and cannot be read; restore it or run the study again.") from problem
    mapping = _mapping(content)
    if not mapping:
        raise ValueError(f"{path} holds no names and values; restore it or run the study again.")
    return dict(mapping)


# ---------------------------------------------------------------- names


def choice(config: Mapping[str, object], group: str) -> str:
    """The option that was chosen in a group: from `choices` where the config has it, else from the group itself."""
    choices = config.get("choices")
    value = choices.get(group) if isinstance(choices, Mapping) else None
    value = config.get(group) if value is None else value
    if isinstance(value, Mapping):
        value = value.get("name") or str(value.get("_target_", "")).rpartition(".")[2] or list(value)
    if isinstance(value, (list, tuple)):
        value = " + ".join(str(item) for item in value)
    return str(value) if value else ("fedavg" if group == "method" else NOTHING)


def settings(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Every value of a config by its dotted key, without what says nothing about the study."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if key in NOISE:
            continue
        if isinstance(value, Mapping):
            flat.update(settings(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """What differs between runs: the chosen options first, then the keys whose values are not all the same."""
    flat = [{**{group: choice(run.config, group) for group in GROUPS}, **settings(run.config)} for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    columns = {key: [one.get(key, NOTHING) for one in flat] for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def labels(runs: Sequence[Run]) -> list[str]:
    """Names of the runs; those who share one are told apart by what differs in their configs, else by their folder."""
    names = [run.name for run in runs]
    for name in {name for name in names if names.count(name) > 1}:
        twins = [index for index, other in enumerate(names) if other == name]
        different = differences([runs[index] for index in twins])
        # What only some have follows from an option that is named already: needed only where nothing else differs.
        shared = {key: values for key, values in different.items() if NOTHING not in values} or different
        for place, index in enumerate(twins):
            settings = [f"{key}={values[place]}" for key, values in shared.items() if values[place] != NOTHING]
            names[index] = ", ".join(settings) or name
    told_apart = [
        f"{name} ({run.folder})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)
    ]
    return [name if run.finished else f"{name} (unfinished)" for name, run in zip(told_apart, runs, strict=True)]


# ---------------------------------------------------------------- the table


def _ordered(runs: Sequence[Run]) -> list[Run]:
    def key(run: Run) -> float:
        score = _number(run, "best5_mean")
        return math.inf if score is None else -score

    return sorted(runs, key=key)


def _number(run: Run, key: str) -> float | None:
    value = run.summary.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _score(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _count(value: float | None) -> str:
    """1234567 as 1.23 M."""
    if value is None:
        return NOTHING
    step = min(4, int(math.log10(value) // 3)) if value >= 1000 else 0
    return f"{value / 1000**step:.3g} {('', 'k', 'M', 'G', 'T')[step]}".strip()


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    size, unit = time_unit(value)
    return f"{value / size:.3g} {unit}"


def _column(
    title: str,
    runs: Sequence[Run],
    key: str,
    show: Callable[[float | None], str],
    better: int,
    deviations: Sequence[float | None] | None = None,
) -> Column:
    scores = [_number(run, key) for run in runs]
    return Column(title, [show(score) for score in scores], scores, better, deviations)


def _thresholds(runs: Sequence[Run], limit: int) -> list[Column]:
    """First round to reach a threshold: the highest `limit` thresholds that any run reached."""
    reached = [{str(k): v for k, v in _mapping(run.summary.get("rounds_to")).items()} for run in runs]
    names = sorted({name for one in reached for name, value in one.items() if value is not None}, key=float)
    columns = []
    for name in names[-limit:]:
        scores = [float(str(one[name])) if one.get(name) is not None else None for one in reached]
        texts = [NOTHING if score is None else f"{score:.0f}" for score in scores]
        columns.append(Column(f"to {name}", texts, scores, -1))
    return columns


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _columns(runs: Sequence[Run], limit: int) -> list[Column]:
    """The comparison of runs in the order given."""
    means = [_number(run, "last10_mean") for run in runs]
    deviations = [_number(run, "last10_std") for run in runs]
    pairs = [_score(m) + (f" ± {_score(d)}" if d is not None else "") for m, d in zip(means, deviations, strict=True)]
    finals = [_number(run, "accuracy" if _number(run, "accuracy") is not None else "accuracy_global") for run in runs]
    floats = [(_number(run, "floats_down") or 0.0) + (_number(run, "floats_up") or 0.0) for run in runs]
    rounds = [f"{_number(run, 'rounds') or 0:.0f}" for run in runs]
    return [
        Column("run", labels(runs)),
        *(Column(group, [choice(run.config, group) for run in runs]) for group in GROUPS),
        Column("rounds", rounds, [float(text) for text in rounds]),
        _column("best 5", runs, "best5_mean", _score, 1, deviations),
        Column("last 10", pairs, means, 1, deviations),
        Column("final", [_score(final) for final in finals], list(finals), 1, deviations),
        _column("worst", runs, "accuracy_worst", _score, 1, deviations),
        _column("central", runs, "accuracy_global", _score, 1, deviations),
        *_thresholds(runs, limit),
        Column("floats", [_count(value) for value in floats], list(floats), -1),
        _column("virtual", runs, "virtual_seconds", _seconds, -1),
        _column("wall", runs, "wall_seconds", _seconds, -1),
    ]


def table(runs: Sequence[Run], width: int = 0) -> str:
    """The comparison as text, best run first; what all share is said above it, what a star means below.

    width: as of `aligned`.
    """
    columns = _columns(_ordered(runs), limit=2)
    shared = [c for c in columns if c.title in GROUPS and len(set(c.texts)) == 1 and len(runs) > 1]
    empty = [c for c in columns if c.better and set(c.texts) == {NOTHING}]
    shown = [c for c in columns if c not in shared and c not in empty]
    above = [" · ".join(f"{c.title} {c.texts[0]}" for c in shared)] if shared else []
    below = [f"* best of its column; of accuracies, {MARKED} over the last ten rounds"]
    return "\n".join([*above, aligned(shown, width), *(below if any(c.best() for c in shown) else [])])


def aligned(columns: Sequence[Column], width: int = 0) -> str:
    """A table as text: numbers right, winners with a star.

    width: of a line, if above 0; columns that do not fit come in a block below, beside the first one again.
    """
    label, *others = [_padded(column) for column in columns]
    blocks, room = [[label]], width or math.inf
    for texts in others:
        if len(blocks[-1]) > 1 and sum(len(each[0]) + len(GAP) for each in blocks[-1]) + len(texts[0]) > room:
            blocks.append([label])
        blocks[-1].append(texts)
    return "\n\n".join(map(_block, blocks))


def _padded(column: Column) -> list[str]:
    best = column.best()
    texts = [column.title, *(f"{text}{'*' if index in best else ''}" for index, text in enumerate(column.texts))]
    size = max(map(len, texts))
    return [text.rjust(size) if column.scores else text.ljust(size) for text in texts]


def _block(columns: Sequence[Sequence[str]]) -> str:
    head, *body = [GAP.join(row) for row in zip(*columns, strict=True)]
    return "\n".join(line.rstrip() for line in (head, "-" * len(head), *body))


# ---------------------------------------------------------------- plots


def _curve(label: str, rows: Sequence[Row], key: str, index: int) -> Curve:
    points = [(row, float(y)) for row, y in zip(rows, column(rows, key), strict=True) if y is not None]
    finite = [(row, y) for row, y in points if math.isfinite(y)]
    return Curve(label, finite, index % len(LIGHT), index // len(LIGHT) % len(DASHES))


def _bytes(row: Row) -> float:
    return FLOAT_BYTES * (float(row.get("floats_down") or 0) + float(row.get("floats_up") or 0))


def _value(key: str) -> Callable[[Row], float]:
    return lambda row: float(row.get(key) or 0)


# Name of the axis, what of a row it shows, its unit, and what is said where nothing of it was used.
AXES: tuple[tuple[str, Callable[[Row], float], str, str], ...] = (
    ("round", _value("round"), "", "no round was made"),
    ("sent, both ways", _bytes, "bytes", "nothing was sent"),
    ("virtual time", _value("virtual_seconds"), "seconds", "no virtual time passed on these devices"),
    ("wall time", _value("wall_seconds"), "seconds", "wall time was not recorded"),
)


def _panel(
    ax: Axes, curves: Sequence[Curve], axis: tuple[str, Callable[[Row], float], str, str], colours: Sequence[str]
) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    title, read, unit, excuse = axis
    # A run that used nothing of what the axis shows (no virtual time on ideal devices) would be a wall at zero.
    moving = [curve for curve in curves if any(read(row) for row, _ in curve.points)]
    xs = [read(row) for curve in moving for row, _ in curve.points]
    ax.set_xlabel(title)
    if not xs:
        measured = any(curve.points for curve in curves)
        ax.text(0.5, 0.5, excuse if measured else "not measured", transform=ax.transAxes, ha="center", alpha=0.7)
        ax.tick_params(labelbottom=False, bottom=False)
        ax.grid(False)
        return
    size = 1.0
    if unit == "seconds":
        size, name = time_unit(max(xs))
        ax.set_xlabel(f"{title} ({name})")
    for curve in moving:
        x, y = [read(row) / size for row, _ in curve.points], [value for _, value in curve.points]
        # Few points are seen as points; a line alone would show nothing for one, and hide where two were measured.
        marker = "o" if len(x) <= 12 else None
        ax.plot(x, y, DASHES[curve.dash], color=colours[curve.colour], marker=marker, markersize=4, label=curve.label)
    if unit == "bytes":
        ax.xaxis.set_major_formatter(EngFormatter("B"))
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=title == "round"))


def _draw(curves: Sequence[Curve], title: str, ylabel: str, *, dark: bool = False) -> bytes:
    """A PNG of 1300 x 1000 pixels or taller: the same curves against rounds, bytes, virtual time and wall time."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [textwrap.shorten(curve.label, 100, placeholder=" …") for curve in curves]
    across = max(1, min(len(curves), 110 // (max(map(len, names), default=0) + 8)))
    with matplotlib.rc_context(page_theme(dark) | {"axes.grid": True}):
        figure = Figure(figsize=(10, 7.2 + 0.24 * math.ceil(len(curves) / across)), dpi=130, layout="constrained")
        panels = list(figure.subplots(2, 2, sharey=True).flat)
        for ax, axis in zip(panels, AXES, strict=True):
            _panel(ax, curves, axis, DARK if dark else LIGHT)
        values = [y for curve in curves for _, y in curve.points]
        if "loss" in ylabel and values and min(values) > 0 and max(values) > 50 * min(values):
            panels[0].set_yscale("log")
        panels[0].set_ylabel(ylabel)
        panels[2].set_ylabel(ylabel)
        figure.suptitle(textwrap.fill(title, 90), fontsize=13)
        handles = panels[0].get_legend_handles_labels()[0]
        if handles:
            figure.legend(handles, names, loc="outside lower center", ncols=across)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def draw_run(rows: Sequence[Row], folder: Path, title: str) -> list[Path]:
    """Write accuracy.png (or the metric's) and loss.png: a run against rounds, bytes, virtual time and wall time."""
    metric = metric_of(rows)
    kinds = {
        metric: {
            metric: "mean of the clients",
            f"{metric}_worst": "worst client",
            f"{metric}_global": "central test set",
            f"{metric}_shared": "shared model, mean of the clients",
            f"{metric}_finetuned": "after fine-tuning, mean of the clients",
            f"{metric}_common": "clients' models, central test set",
        },
        "loss": {"train_loss": "training", "loss_global": "central test set"},
    }
    paths = []
    for kind, keys in kinds.items():
        curves = [_curve(label, rows, key, index) for index, (key, label) in enumerate(keys.items())]
        paths.append(Path(folder) / f"{kind}.png")
        replace_file(paths[-1], _draw([curve for curve in curves if curve.points], title, kind))
    return paths


# ---------------------------------------------------------------- the page


def compare(runs: Sequence[Run], out_folder: Path, title: str = "", sections: Sequence[Section] = ()) -> Path:
    """Write one PNG per metric and `report.html`, which needs no other file; return the page's path.

    sections: what comes before the comparison of the runs. Raises `ValueError` where there is no run.
    """
    if not runs:
        raise ValueError("no run to report; name at least one folder that `raysim run out=DIR` wrote.")
    runs, out_folder = _ordered(runs), Path(out_folder)
    out_folder.mkdir(parents=True, exist_ok=True)
    names, figures = labels(runs), []
    for key, about in METRICS.items():
        curves = [_curve(name, run.rows, key, index) for index, (name, run) in enumerate(zip(names, runs, strict=True))]
        curves = [curve for curve in curves if curve.points]
        if curves:
            light, dark = (_draw(curves, about, key.replace("_", " "), dark=dark) for dark in (False, True))
            replace_file(out_folder / f"comparison_{key}.png", light)
            figures.append(_picture(f"{about} against rounds, bytes, virtual time and wall time", light, dark))
    timelines = "".join(_timeline(name, run) for name, run in zip(names, runs, strict=True))
    page = out_folder / "report.html"
    replace_file(page, _page(runs, figures, timelines, title, sections).encode())
    return page


def _timeline(name: str, run: Run) -> str:
    """A run on virtual time, as in its own folder; "" where that says nothing, or is not known."""
    jobs = None if run.folder == Path() else read_jobs(run.folder)  # a mean of runs has no folder
    if jobs is None or not eventful(jobs):
        return ""
    light, dark = (timeline_png(jobs, run.rows, name, dark=dark) for dark in (False, True))
    return _picture(f"{name}: clients, fleet and hosts on virtual time, and staleness", light, dark)


def _picture(about: str, light: bytes, dark: bytes) -> str:
    import base64

    day, night = (f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in (light, dark))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{night}">'
        f'<img src="{day}" alt="{html.escape(about)}"></picture>'
    )


def _cells(columns: Sequence[Column], swatches: bool) -> str:
    """A table; numbers right, winners bold, the first column with the colour of the run's curve."""
    kinds = [' class="number"' if c.scores else "" for c in columns]
    head = "".join(f"<th{kind}>{html.escape(c.title)}</th>" for c, kind in zip(columns, kinds, strict=True))
    body = []
    for index in range(len(columns[0].texts)):
        cells = []
        for place, (c, kind) in enumerate(zip(columns, kinds, strict=True)):
            text = html.escape(c.texts[index])
            text = f"<b>{text}</b>" if index in c.best() else text
            if swatches and place == 0:
                hue = index % len(LIGHT)
                text = f'<i style="--day:{LIGHT[hue]};--night:{DARK[hue]}"></i>{text}'
            cells.append(f"<td{kind}>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


def _section(section: Section) -> str:
    text = f"<p>{html.escape(section.text)}</p>" if section.text else ""
    picture = f'<div class="figures">{_picture(section.title, *section.picture)}</div>' if section.picture else ""
    return f"<h2>{html.escape(section.title)}</h2>{text}{_cells(section.columns, False)}{picture}"


def _page(
    runs: Sequence[Run], figures: Sequence[str], timelines: str = "", title: str = "", sections: Sequence[Section] = ()
) -> str:
    different = differences(runs) if len(runs) > 1 else {}
    columns = [Column("run", labels(runs)), *(Column(key, values) for key, values in different.items())]
    title = title or (f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name)
    settings_table = f"<h2>What differs</h2>{_cells(columns, True)}" if different else ""
    return PAGE.format(
        title=html.escape(title),
        subtitle=f"Best run first; bold is the best of a column, of accuracies {MARKED}." if len(runs) > 1 else "",
        sections="".join(map(_section, sections)) + ("<h2>Comparison</h2>" if sections else ""),
        table=_cells(_columns(runs, limit=4), True),
        settings=settings_table,
        figures="".join(figures) or "<p>No run has measured anything yet.</p>",
        timelines=f'<h2>On virtual time</h2><div class="figures whole">{timelines}</div>' if timelines else "",
    )


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>raysim · {title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #22262a; --soft: #667078; --line: #e2e5e8; --page: #f6f7f8; --card: #fff;
  --win: #0b6e4f; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e8ea; --soft: #9aa3ab; --line: #2c3137; --page: #0e1013;
  --card: #16191d; --win: #58d6a9; }} td i {{ background: var(--night) !important; }} }}
body {{ margin: 0 auto; max-width: 1600px; padding: 2rem clamp(1rem, 3vw, 3rem); background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
h1 {{ font-size: 1.6rem; margin: 0 0 .2rem; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .6rem; }}
p {{ color: var(--soft); margin: .2rem 0 1.2rem; max-width: 80ch; }}
.wide {{ overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .5rem .8rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }}
th {{ color: var(--soft); font-weight: 600; font-size: .85rem; }}
tbody tr:last-child td {{ border-bottom: 0; }}
th:first-child, td:first-child {{ position: sticky; left: 0; background: var(--card); }}
td:first-child {{ white-space: normal; min-width: min(15rem, 38vw); max-width: 26rem; overflow-wrap: anywhere; }}
td:first-child {{ font-weight: 600; }}
.number {{ text-align: right; }}
b {{ color: var(--win); }}
td i {{ display: inline-block; width: .7rem; height: .7rem; border-radius: 3px; margin-right: .55rem;
  background: var(--day); }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 1rem; }}
.wide + .figures {{ max-width: 900px; margin-top: 1rem; }}
.whole {{ grid-template-columns: 1fr; }}
.figures img {{ display: block; width: 100%; border: 1px solid var(--line); border-radius: 10px; }}
@media print {{ body {{ background: none; }} .figures {{ display: block; }} }}
</style></head><body>
<h1>{title}</h1>
{sections}
<p>{subtitle}</p>
{table}
{settings}
<h2>Curves</h2>
<div class="figures">{figures}</div>
{timelines}
<h2>How to read the table</h2>
<p>Accuracies are fractions. <em>Best 5</em> is the mean of the five best rounds, <em>last 10</em> mean and standard
deviation over the last ten evaluated rounds, <em>final</em> the last one: of the mean over the clients' own tests, or
of the central test set where clients have none. <em>Worst</em> (client) and <em>central</em> (test set) are those of
the last evaluation, <em>to 0.80</em> is the first round that reaches that accuracy (the four
highest thresholds that any run reached). <em>Floats</em> counts both
directions; <em>virtual</em> is the time that the simulated devices took, <em>wall</em> the time it took here.</p>
</body></html>
"""
