"""The report: one HTML file that needs no other, of the runs that a study or a list of folders has.

What is said is put together here; how it looks is in report.html, a Jinja2 template.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from raysim.data.federated import size_edges
from raysim.data.heterogeneity import SCALES
from raysim.data.partition import Ints
from raysim.primitives.checks import finite_values
from raysim.primitives.files import make_folder, replace_file, without_password
from raysim.results.clients import (
    CLIENTS_FILE,
    SPLIT_FILE,
    ClientLabels,
    read_clients,
    read_split,
    read_users,
)
from raysim.results.curves import draw_comparison, mean_curve, panels
from raysim.results.history import metric_of
from raysim.results.jobs import read_jobs
from raysim.results.report import (
    Run,
    RunGroup,
    as_sentence,
    describe_scores,
    distinguishing_settings,
    flat_settings,
    result_columns,
)
from raysim.results.rerun import rerun_command
from raysim.results.tables import BEST_RULE, MISSING, Column
from raysim.results.theme import DARK, LIGHT, draw_svg
from raysim.results.timeline import has_events, timeline_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = {
    "{metric}": "{metric}, mean of the clients",
    "{metric}_worst": "{metric} of the worst client",
    "{metric}_global": "{metric} on the central test set",
    "{metric}_unseen": "{metric} of clients that are never trained",
    "train_loss": "training loss",
    "loss_global": "loss on the central test set",
}
TIMELINES, SPLITS, ERRORS = 6, 4, 20  # most of each on a page
LOWEST = 5  # users named with the lowest scores
SHOWN_CLIENTS = 1000  # columns of a picture of a split
LINE = 300  # characters of an error
DIGITS = 12  # of a checksum
CHECKSUMS = ("model_sha256", "state_sha256")  # of a summary
Shown: TypeAlias = dict[str, Any]  # what the template is given


@dataclass(frozen=True)
class ReportSection:
    """A part of a page: a table, and a picture as PNG for light and for dark pages."""

    title: str
    text: str
    columns: Sequence[Column]
    picture: tuple[bytes, bytes] | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class PagePart:
    """What the template shows under one heading."""

    title: str
    text: str = ""
    tables: list[Shown] = field(default_factory=list)
    pictures: list[Shown] = field(default_factory=list)
    plots: list[Shown] = field(default_factory=list)  # rows of SVGs, each with a heading
    folded: dict[str, list[Shown]] = field(
        default_factory=dict
    )  # SVGs that tell no more, by their axes
    notes: list[str] = field(default_factory=list)


def write_report(
    groups: Sequence[RunGroup], out_folder: Path, title: str = "", sections: Sequence[ReportSection] = (),
    found: ReportSection | None = None,
) -> Path:  # fmt: skip
    """Write `report.html`, which needs no other file, and one PNG per metric; return the page's path.

    sections: what comes after the results. found: the results, where they are not those of `results`, a row for each
    group. Raises `ValueError` where there is no run, or where a file of a run is broken.
    """
    if not groups:
        raise ValueError(
            "no run to report; name at least one folder that `raysim run out=DIR` wrote."
        )
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    parts = [
        _results(groups) if found is None else _section(found, named=True),
        *(_section(section) for section in sections),
        None,  # the curves: they are written once all else could be read
        _spread(groups),
        _splits(groups),
        _timelines(groups),
        _failures(groups),
        _differences(groups),
        _repeat(groups),
    ]
    out_folder = make_folder(Path(out_folder))
    parts[1 + len(sections)] = _curves(groups, out_folder)
    runs = [run for group in groups for run in group.runs]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("report.html").render(
        title=title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"),
        subtitle=_subtitle(groups),
        parts=[part for part in parts if part is not None],
        legend=[_swatch(index, group.label) for index, group in enumerate(groups)],
        configurations=_configurations(groups),
        colours=list(zip(LIGHT, DARK, strict=True)),
    )
    replace_file(out_folder / "report.html", page.encode())
    return out_folder / "report.html"


def _subtitle(groups: Sequence[RunGroup]) -> str:
    runs = [run for group in groups for run in group.runs]
    unfinished = sum(not run.finished for run in runs)
    texts = [f"{len(runs)} runs of {len(groups)} settings" if len(runs) > len(groups) > 1 else ""]
    texts += [
        ", ".join(
            dict.fromkeys(str(run.summary["title"]) for run in runs if "title" in run.summary)
        )
    ]
    texts += [
        f"{unfinished} of {len(runs)} unfinished: their last rounds are counted as the end"
        if unfinished
        else ""
    ]
    return " · ".join(filter(None, texts))


def _swatch(index: int, label: str) -> Shown:
    return {"number": index + 1, "colour": index % len(LIGHT), "label": label}


def _table(columns: Sequence[Column], swatches: bool = False) -> Shown:
    """Rows of cells; swatches: the first column has the colours of the groups."""
    rows = [
        [
            {"text": c.texts[row], "number": bool(c.scores), "best": row in c.best(), "whole": ""}
            for c in columns
        ]
        for row in range(len(columns[0].texts))
    ]
    head = [{"text": c.title, "number": bool(c.scores)} for c in columns]
    return {"head": head, "rows": rows, "swatches": swatches}


def _section(section: ReportSection, named: bool = False) -> PagePart:
    """named: rows are settings."""
    tables = [_table(section.columns, named)] if section.columns else []
    pictures = [_picture(section.title, *section.picture)] if section.picture else []
    return PagePart(section.title, section.text, tables, pictures, notes=list(section.notes))


def _picture(about: str, light: bytes, dark: bytes) -> Shown:
    day, night = (
        f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in (light, dark)
    )
    return {"about": about, "light": day, "dark": night}


def _plot(drawn: str, title: str = "") -> Shown:
    return {"about": title, "svg": drawn}


# --- results --------------------------------------------------------------------------------------------------------
def _results(groups: Sequence[RunGroup]) -> PagePart:
    if max(len(group.runs) for group in groups) > 1:
        text = "Mean ± standard deviation over the seeds (sample deviation, divisor n-1). "
        text += f"Bold is the best, {BEST_RULE}."
    elif len(groups) > 1:
        text = "One seed of each setting, so no deviation can be given. Bold is the best of a column; of accuracies, "
        text += f"{BEST_RULE} over the last ten rounds."
    else:
        text = ""
    text = " ".join(
        filter(
            None,
            [text, as_sentence(describe_scores([run for group in groups for run in group.runs]))],
        )
    )
    return PagePart("Results", text, [_table(result_columns(groups), True)])


# --- curves ---------------------------------------------------------------------------------------------------------
def _curves(groups: Sequence[RunGroup], folder: Path) -> PagePart:
    plots: list[Shown] = []
    folded: list[Shown] = []
    alike: dict[str, None] = {}  # the axes of these
    metrics = dict.fromkeys(metric_of(run.rows) for group in groups for run in group.runs)
    shown = {
        key.format(metric=m): about.format(metric=m)
        for key, about in CURVES.items()
        for m in metrics
    }
    for key, about in shown.items():
        curves = [
            mean_curve(g.label, [run.rows for run in g.runs], key, index)
            for index, g in enumerate(groups)
        ]
        curves = [curve for curve in curves if curve.points]
        if curves:
            name = key.replace("_", " ")
            draw_comparison(curves, folder / f"comparison_{key}.png", about, name)
            title = about[0].upper() + about[1:]
            for axis, drawn, more in panels(curves, name):
                (plots if more else folded).append(_plot(drawn, title))
                if not more:
                    alike[axis] = None
    most = max(len(group.runs) for group in groups)
    text = {1: "", 2: "Lines are means of two seeds, too few for a band. "}.get(
        most,
        "Lines are means over the seeds, bands ± one sample deviation (divisor n-1), from three seeds on. ",
    )
    if not plots:
        return PagePart("Curves", text, notes=["No run has measured anything yet."])
    return PagePart(
        "Curves",
        text,
        plots=[{"about": "", "svgs": plots}],
        folded={" · ".join(alike): folded} if folded else {},
    )


# --- clients --------------------------------------------------------------------------------------------------------
def _spread(groups: Sequence[RunGroup]) -> PagePart:
    """How far apart the clients' scores are, at the last evaluation; the clients of all seeds together."""
    found = [_each(group) for group in groups]
    metrics = dict.fromkeys(metric_of(run.rows) for group in groups for run in group.runs)
    title = "Spread over clients"
    if not any(len(values) for values, _ in found):
        return PagePart(
            title,
            notes=[
                f"No run stores the scores of single clients ({CLIENTS_FILE}): it is older, or unfinished."
            ],
        )

    def draw(ax: Axes) -> None:
        for index, (values, _) in enumerate(found):
            if len(values):
                share = np.arange(1, len(values) + 1) / len(values)
                places = np.unique(np.linspace(0, len(values) - 1, 400).astype(int))
                ax.step(
                    values[places],
                    share[places],
                    where="post",
                    color=LIGHT[index % len(LIGHT)],
                    linewidth=1.6,
                )
        ax.grid(True)
        ax.set(xlabel=" or ".join(metrics), ylabel="share of clients up to there", ylim=(0, 1.02))

    names = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}
    columns = [
        Column("", [group.label for group in groups]),
        Column("clients", [f"{len(v):,}" for v, _ in found], [float(len(v)) for v, _ in found]),
        Column(
            "tests a client",
            [MISSING if t is None else f"{t:g}" for _, t in found],
            [t for _, t in found],
        ),
        *(_quantile(name, [v for v, _ in found], at) for name, at in names.items()),
        _figures("mean", [float(v.mean()) if len(v) else None for v, _ in found]),
        _figures("deviation", [float(v.std()) if len(v) else None for v, _ in found]),
    ]
    text = (
        f"Scores ({', '.join(metrics)}) of single clients at the last evaluation, those of all seeds together. Tests a "
        "client: the median; with few, the extremes say little. Deviation: over the clients (divisor n)."
    )
    plots = [{"about": "", "svgs": [_plot(draw_svg(draw, "share of clients by their score"))]}]
    return PagePart(title, text, [_table(columns, True), *_lowest_users(groups)], plots=plots)


def _lowest_users(groups: Sequence[RunGroup]) -> list[Shown]:
    """Return a table of the users with the lowest scores, by setting (its first seed); none where nobody has a name."""
    labels: list[str] = []
    clients: list[str] = []
    scores: list[float | None] = []
    for group in groups:
        run = group.runs[0]
        users, values = read_users(run.folder), _scores(run)
        if users is None or len(users) != len(values):
            continue
        lowest = np.argsort(values, kind="stable")[: min(LOWEST, int(np.isfinite(values).sum()))]
        for client in lowest.tolist():
            labels.append(group.label)
            clients.append(f"{client} (user {users[client]})")
            scores.append(float(values[client]))
    if not labels:
        return []
    return [
        _table([Column("", labels), Column("lowest clients", clients), _figures("score", scores)])
    ]


def _scores(run: Run) -> np.ndarray:
    """Return the score of each client, nan where it was not scored; empty where none was."""
    columns, metric = read_clients(run.folder) or {}, metric_of(run.rows)
    return columns.get(metric, columns.get(f"{metric}_shared", np.empty(0)))


def _each(group: RunGroup) -> tuple[np.ndarray, float | None]:
    """Sorted scores of all scored clients, and the median of their test samples."""
    values, tests = [np.empty(0)], [np.empty(0)]
    for run in group.runs:
        scores, columns = _scores(run), read_clients(run.folder) or {}
        describe_scores = np.isfinite(scores)
        if "unseen" in columns:
            describe_scores &= columns["unseen"] == 0
        values.append(scores[describe_scores])
        if describe_scores.any():
            tests.append(columns["tests"][describe_scores])
    joined = np.concatenate(tests)
    return np.sort(np.concatenate(values)), float(np.median(joined)) if len(joined) else None


def _quantile(name: str, values: Sequence[np.ndarray], at: float) -> Column:
    return _figures(name, [float(np.quantile(each, at)) if len(each) else None for each in values])


def _figures(name: str, values: Sequence[float | None]) -> Column:
    return Column(
        name, [MISSING if value is None else f"{value:.3f}" for value in values], list(values)
    )


# --- the split ------------------------------------------------------------------------------------------------------
def _splits(groups: Sequence[RunGroup]) -> PagePart:
    """Who has which classes, once for each split that differs; that of the first seed of each setting."""
    title, found = "Split of the data", {}  # type: str, dict[bytes, tuple[ClientLabels, list[str], Mapping[str, object]]]
    for group in groups:
        split = read_split(group.runs[0].folder)
        if split is not None:
            key = split.client.tobytes() + split.label.tobytes() + split.samples.tobytes()
            numbers = group.runs[0].summary.get("split")
            found.setdefault(key, (split, [], numbers if isinstance(numbers, Mapping) else {}))[
                1
            ].append(group.label)
    if not found:
        return PagePart(
            title,
            notes=[
                f"No run stores its split ({SPLIT_FILE}): it is older. `raysim partition` draws one."
            ],
        )
    shown = list(found.values())
    names = [
        "all settings" if len(labels) == len(groups) else ", ".join(labels)
        for _, labels, _ in shown
    ]
    plots = [
        {
            "about": name if len(found) > 1 else "",
            "svgs": [*map(_plot, [_class_map(split), *_size_bars(split)])],
            "wide": True,
        }
        for (split, *_), name in zip(shown[:SPLITS], names, strict=False)
    ]
    notes = (
        [f"{len(found) - SPLITS} more splits are in the table alone."]
        if len(found) > SPLITS
        else []
    )
    told = "; ".join(f"{name.replace('_', ' ')}: {about}" for name, about in SCALES.items())
    text = (
        f"Training samples of the first seed. Means over the clients that have some, of the {told}."
    )
    return PagePart(
        title,
        text,
        [_table(_split_columns(names, [(split, numbers) for split, _, numbers in shown]))],
        plots=plots,
        notes=notes,
    )


def _split_columns(
    names: Sequence[str], splits: Sequence[tuple[ClientLabels, Mapping[str, object]]]
) -> list[Column]:
    sizes = [split.sizes for split, _ in splits]
    columns = {
        "clients": [f"{len(each):,}" for each in sizes],
        "samples": [f"{each.sum():,}" for each in sizes],
        "sizes (least / median / most)": [_sizes(each) for each in sizes],
        "clients without": [f"{(each == 0).sum():,}" for each in sizes],
    }
    for name in SCALES:
        values = [
            numbers.get(name) if len(split.classes) > 1 else None for split, numbers in splits
        ]
        columns[name.replace("_", " ")] = [
            f"{v:.3g}" if isinstance(v, (int, float)) else MISSING for v in values
        ]
    return [
        Column("split", list(names)),
        *(Column(title, texts, [0.0] * len(texts)) for title, texts in columns.items()),
    ]


def _sizes(sizes: Ints) -> str:
    if not len(sizes):
        return MISSING
    if sizes.min() == sizes.max():
        return f"{sizes[0]:,} each"
    return " / ".join(f"{at(sizes):,.10g}" for at in (np.min, np.median, np.max))


def _class_map(split: ClientLabels) -> str:
    """Clients x classes; the deeper the colour, the larger the share of a class in a client's samples.

    By the square root of the share, or what is spread over many classes could not be told from nothing.
    """
    shown = np.unique(
        np.linspace(0, max(0, split.clients - 1), min(split.clients, SHOWN_CLIENTS)).astype(int)
    )
    inside = np.isin(split.client, shown)
    shares = np.zeros((len(split.classes), len(shown)))
    sizes = split.sizes
    place = np.searchsorted(shown, split.client[inside])
    shares[split.label[inside], place] = split.samples[inside] / sizes[split.client[inside]]

    def draw(ax: Axes) -> None:
        from matplotlib.colors import to_rgb

        image = np.empty((*shares.shape, 4))
        image[..., :3] = to_rgb(LIGHT[0])
        image[..., 3] = np.sqrt(shares)
        ax.imshow(
            image,
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, len(shown) - 0.5, len(shares) - 0.5, -0.5),
        )
        some = "" if len(shown) == split.clients else f" ({len(shown):,} of {split.clients:,})"
        ax.set(xlabel=f"client{some}", ylabel="class")
        ax.xaxis.set_major_formatter(
            lambda at, _: f"{shown[int(at)]}" if 0 <= at < len(shown) and at == int(at) else ""
        )
        if len(split.classes) <= 12:
            ax.set_yticks(range(len(split.classes)), [name[:14] for name in split.classes])

    return draw_svg(draw, "share of each class in each client's training samples", (7.4, 3.0))


def _size_bars(split: ClientLabels) -> list[str]:
    """Clients by their number of samples; nothing where all have as many, which the table says."""
    if len(set(split.sizes.tolist())) == 1:
        return []

    def draw(ax: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        ax.hist(split.sizes, bins=size_edges(split.sizes), color=LIGHT[0], rwidth=0.92)
        ax.set(xlabel="training samples", ylabel="clients")
        ax.ticklabel_format(axis="x", useOffset=False)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))

    return [draw_svg(draw, "clients by their number of training samples")]


# --- virtual time ---------------------------------------------------------------------------------------------------
def _timelines(groups: Sequence[RunGroup]) -> PagePart | None:
    """The first run of each setting on virtual time, as in its own folder, where that says something."""
    pictures: list[Shown] = []
    left = 0
    for group in groups:
        run = group.runs[0]
        jobs = read_jobs(run.folder)
        if jobs is None or not has_events(jobs):
            continue
        if len(pictures) == TIMELINES:
            left += 1
            continue
        light, dark = (
            timeline_png(jobs, run.rows, group.label, dark=dark) for dark in (False, True)
        )
        pictures.append(
            _picture(
                f"{group.label}: clients, fleet and workers on virtual time, and staleness",
                light,
                dark,
            )
        )
    notes = [f"{left} more: timeline.png in the folder of each run."] if left else []
    return (
        PagePart(
            "On virtual time", "The first seed of each setting.", pictures=pictures, notes=notes
        )
        if pictures
        else None
    )


# --- failures -------------------------------------------------------------------------------------------------------
def _failures(groups: Sequence[RunGroup]) -> PagePart:
    """What went wrong or was in vain, over all rounds and seeds, and the errors of clients that failed."""
    keys = {
        "failures": "failed",
        "lost": "lost on the way",
        "discarded": "discarded",
        "worker_deaths": "worker processes died",
    }
    sums = {key: [_total(group, key) for group in groups] for key in keys}
    if not any(any(values) for values in sums.values()):
        return PagePart(
            "Failures", notes=["No client failed, no result was lost or discarded, no worker died."]
        )
    columns = [Column("", [group.label for group in groups])]
    columns += [
        Column(title, [MISSING if v is None else f"{v:,.0f}" for v in sums[key]], list(sums[key]))
        for key, title in keys.items()
        if any(sums[key])
    ]
    errors: Counter[tuple[str, str]] = Counter()
    for group in groups:
        for run in group.runs:
            errors.update((group.label, text) for text in _errors(run.folder / "failures.jsonl"))
    tables = [_table(columns, True)]
    most = errors.most_common(ERRORS)
    if most:
        texts = [
            [str(count) for _, count in most],
            [where for (where, _), _ in most],
            [text for (_, text), _ in most],
        ]
        titled = zip(("times", "setting", "error"), texts, strict=True)
        tables.append(
            _table([Column(title, each, [1.0] * (title == "times")) for title, each in titled])
        )
    notes = (
        [f"{len(errors) - ERRORS} more kinds: failures.jsonl of the runs."]
        if len(errors) > ERRORS
        else []
    )
    return PagePart(
        "Failures", "Jobs of clients, summed over rounds and seeds.", tables, notes=notes
    )


def _total(group: RunGroup, key: str) -> float | None:
    """Of a column, over all rounds of all seeds; None where no run has it."""
    values = finite_values(row.get(key) for run in group.runs for row in run.rows)
    return sum(values) if values else None


def _errors(path: Path) -> list[str]:
    """The errors of a run's clients, without their numbers; a line that cannot be read counts as such."""
    if not path.is_file():
        return []
    found = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                fields = json.loads(line)
                method, error = str(fields.get("method") or ""), str(fields.get("error"))
                found.append(f"{f'method {method}: ' if method else ''}{error}"[:LINE])
            except (ValueError, AttributeError, RecursionError):
                found.append("a line that cannot be read")
    return found


# --- settings and how to repeat -------------------------------------------------------------------------------------
def _differences(groups: Sequence[RunGroup]) -> PagePart | None:
    """What the settings do not share: each key's values, and who has them."""
    different, left = (
        distinguishing_settings([group.runs[0] for group in groups]) if len(groups) > 1 else ({}, 0)
    )
    rows = []
    for key, values in different.items():
        owners: dict[str, list[Shown]] = {}
        for index, value in enumerate(values):
            owners.setdefault(without_password(value), []).append(
                _swatch(index, groups[index].label)
            )
        rows.append({"key": key, "values": list(owners.items())})
    text = (
        f"Left out: {left} defaults of options that not all have chosen; Settings (below) has them."
        if left
        else ""
    )
    return PagePart("What differs", text, tables=[{"differences": rows}]) if rows else None


def _configurations(groups: Sequence[RunGroup]) -> list[Shown]:
    """The whole configuration of each setting's first run, as YAML that `raysim run --config` takes."""
    import yaml

    return [
        {
            "label": group.label,
            "text": without_password(
                yaml.safe_dump(group.runs[0].config, sort_keys=False, width=120)
            ),
        }
        for group in groups
    ]


def _checksum(value: object) -> str:
    """As a summary has it; a dash for that of no bytes, where no method keeps a state."""
    return MISSING if value in (None, "", hashlib.sha256().hexdigest()) else str(value)


def _repeat(groups: Sequence[RunGroup]) -> PagePart:
    """A command and the checksums of each run, and the versions of what made them."""
    runs = [(group.label, run) for group in groups for run in group.runs]
    places = [
        f"out=again/{number}" if len(runs) > 1 else "out=again"
        for number in range(1, len(runs) + 1)
    ]
    again = zip(runs, places, strict=True)
    commands = [
        rerun_command(run.config, run.folder / "config.yaml", place) for (_, run), place in again
    ]
    columns = [
        Column("", [label for label, _ in runs]),
        Column("seed", [str(run.config.get("seed", MISSING)) for _, run in runs]),
        Column("command", commands),
        *(
            Column(key.replace("_", " "), [_checksum(run.summary.get(key)) for _, run in runs])
            for key in CHECKSUMS
        ),
    ]
    table = _table(columns)
    for row in table["rows"]:
        for cell in row[-len(CHECKSUMS) :]:
            if len(cell["text"]) > DIGITS:
                cell |= {"text": cell["text"][:DIGITS], "whole": cell["text"]}
    versions: dict[str, list[str]] = {}
    for _, run in runs:
        identity = run.summary.get("identity")
        for key, value in flat_settings(identity if isinstance(identity, Mapping) else {}).items():
            if key != "seed":
                versions.setdefault(key, []).append(value)
    shown = [
        Column("made with", list(versions)),
        Column("", [", ".join(dict.fromkeys(v)) for v in versions.values()]),
    ]
    text = "The same command gives the same checksums on the same kind of device with the same versions. Without the "
    text += "run's folder, save its configuration (below) as config.yaml and name that. Of a checksum the first "
    text += f"{DIGITS} digits are shown; all of them are in the run's summary.json."
    return PagePart("How to repeat it", text, [table, *([_table(shown)] if versions else [])])
