"""Write the pages of `docs/papers`: a paper's tables with our stored results.

`uv run python -m jobs.papers.pages docs/papers` writes the pages. A test compares the stored pages
with what this command would write.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.command import run as run_program
from jobs.papers.claims import TRAINED, VERDICTS, claims_table, settings_table, verdicts
from jobs.papers.comparison import Entry, match_runs
from jobs.papers.figures import FIGURES, figures_section
from jobs.papers.figures.core import draw as draw_figure, read_numbers
from jobs.papers.gains import gains
from jobs.papers.pictures import TITLE, checksum, draw
from jobs.papers.presets import PAPER_RUNS
from jobs.papers.results import stored_runs
from jobs.papers.settings import overrides_of, setting_of
from jobs.papers.tables import PAPERS, Table, tables
from raysim.data.heterogeneity import SCALES
from raysim.primitives.files import user_path
from raysim.results.stored_runs import Run
from raysim.results.tables import MISSING, to_markdown

NOT_RUN = "not run yet"
NOT_KNOWN = "not known"
ORIGIN = (
    "*Written by `uv run python -m jobs.papers.pages docs/papers` from the published tables and "
    "the results in `jobs/papers/results`; do not edit it.*"
)
ABOUT_CLAIMS = (
    "Each row compares two methods on the same seeds, at one scale: *ours* has both means and the "
    "mean of the differences with its 95 % interval (Student). The verdict is *supported* if the "
    "interval lies on the claimed side of 0, *contradicted* if it lies on the other side, and else "
    "*undecided*. It is also undecided at a scale where the method that is compared with has less "
    f"than {100 * TRAINED:.0f} % of the accuracy that the paper prints for it. It holds for its "
    "scale only."
)
ABOUT_FIGURES = (
    "Each command draws what a figure of the paper shows, from small runs that take minutes. The "
    "paper's own pictures are not stored here; which panel shows what is our reading of its text."
)
SPLIT = ("label_entropy", "largest_share", "divergence")  # shown with every result


def pages() -> dict[str, str]:
    """Return every page as Markdown, by file name."""
    by_paper = {f"{paper}.md": page(paper, stored_runs(paper)) for paper in PAPERS}
    return {"index.md": _index(), **by_paper}


def page(paper: str, runs: Sequence[Run]) -> str:
    """Return the Markdown page that compares a paper's tables with our results.

    paper: the name of the paper, such as "fedbr".
    runs: our finished runs of this paper.
    """
    paper_tables = tables(paper)
    paper_runs = PAPER_RUNS[paper]
    explanations = _explanations(paper)
    scales = "; ".join(f"{name}: {SCALES[name]}" for name in SPLIT)
    parts = [
        f"# {_title(paper_tables)}",
        ORIGIN,
        "## Claims",
        ABOUT_CLAIMS,
        claims_table(paper, runs),
        settings_table(paper),
    ]
    if explanations["remarks"]:
        parts.append("\n".join(f"- {text}" for text in explanations["remarks"]))
    parts += ["## Figures", ABOUT_FIGURES, *figures_section(paper)]
    parts += [
        "## Scores",
        f"**Which score.** {paper_runs.score_explanation}",
        f"**Heterogeneity of the clients.** {scales}; means over clients.",
    ]
    if checksum(runs, paper_runs):
        parts.append(f"![{TITLE}]({paper}.png)")
    parts += gains(runs, paper_runs)
    for name, table in paper_tables.items():
        parts += _table(name, table, runs, explanations["causes"])
    return "\n\n".join(parts) + "\n"


def _title(paper_tables: Mapping[str, Table]) -> str:
    first = next(iter(paper_tables.values()))
    return first.title.rpartition(",")[0]


def _explanations(paper: str) -> Any:
    """Read the explanations of a paper's page from `known.json`.

    "causes" maps "table1/ROW LABEL", or "table1" for a whole table, to the reason why our numbers
    differ from the paper's. "remarks" is a list of texts for below the claims.
    """
    return json.loads((Path(__file__).parent / "known.json").read_text(encoding="utf-8"))[paper]


def _index() -> str:
    rows = []
    for paper in PAPERS:
        runs = stored_runs(paper)
        paper_tables = tables(paper)
        entries = [entry for name in paper_tables for entry in match_runs(name, runs)[0]]
        results = sum(bool(entry.values) for entry in entries)
        link = f"[{_title(paper_tables)}]({paper}.md)"
        counts = Counter(verdicts(paper, runs))
        texts = [f"{counts[verdict]}" for verdict in VERDICTS]
        rows.append((link, *texts, f"{len(paper_tables)}", f"{len(entries)}", f"{results}"))
    parts = [
        "# Papers",
        "What four papers claim, what raysim's results say about it, their figures and their "
        "tables. A claim is counted once for each scale at which it was tested. A claim that was not "
        "tested is counted once, as undecided.",
        ORIGIN,
        to_markdown(("paper", *VERDICTS, "tables", "printed numbers", "with our result"), rows),
        "\n".join(["```{toctree}", ":maxdepth: 1", ":hidden:", *PAPERS, "```"]),
    ]
    return "\n\n".join(parts) + "\n"


def _table(
    name: str, table: Table, runs: Sequence[Run], causes: Mapping[str, str]
) -> Iterator[str]:
    paper, _, short_name = name.partition("/")
    entries, _ = match_runs(name, runs)
    yield f"## {short_name.replace('table', 'Table ')}: {table.caption}"
    yield f"The paper's number: {table.metric}."
    notes = list(table.notes)
    if name in PAPER_RUNS[paper].notes:
        notes.append(PAPER_RUNS[paper].notes[name])
    if notes:
        yield "\n".join(f"- {text}" for text in notes)
    settings = dict.fromkeys(match.setting for entry in entries for match in entry.matches)
    for setting in settings:
        at_setting = [variant for entry in entries for variant in entry.at(setting)]
        yield from _results(short_name, at_setting, setting, causes)
    if not settings:
        yield f"**Our result: {NOT_RUN}.**"
    yield _commands(entries)


# --- our results at one setting -------------------------------------------------------------------
def _results(
    table_name: str, entries: Sequence[Entry], setting: str, causes: Mapping[str, str]
) -> Iterator[str]:
    """Yield Markdown: our results at one setting next to the numbers of a paper's table.

    table_name: such as "table1"; the paper is not named.
    setting: how our runs differ from the paper's; "" if there is no difference.
    causes: maps "table1/ROW LABEL", or "table1", to the reason why our numbers differ.
    """
    shown = [entry for entry in entries if entry.values]
    if not shown:
        return
    if setting:
        yield from _scales([run for entry in shown for run in entry.runs])
        yield "\n".join(
            [
                "<details><summary>Differences from the paper</summary>",
                "",
                f"{setting}.",
                "",
                "</details>",
            ]
        )
    else:
        yield "### Our results at the paper's setting"
    yield _made_on([run for entry in shown for run in entry.runs])
    titles: dict[str, None] = {}
    for entry in shown:
        titles.update(
            dict.fromkeys(title for title, values in entry.additional_scores().items() if values)
        )
    head = ["method", "data", "paper", "ours", "seeds", "ours - paper", *titles]
    head += [*(name.replace("_", " ") for name in SPLIT), "cause of the difference"]
    rows = [_row(table_name, entry, list(titles), bool(setting), causes) for entry in shown]
    yield to_markdown(head, rows)


def _scales(runs: Sequence[Run]) -> Iterator[str]:
    """Yield Markdown: a heading that names the scales of the runs, and the command of each scale.

    A scale is the `Setting` at which runs were made. If the columns of a paper's table are
    different settings, such as splits of the data, each column has its own scale.
    """
    scales = list(dict.fromkeys(setting_of(overrides_of(run)[1]) for run in runs))
    if len(scales) == 1:
        yield f"### Our results: {scales[0].title}"
        yield f"Scale `{scales[0].name}`: `{scales[0].command}`."
        return

    yield f"### Our results: scales {', '.join(f'`{scale.name}`' for scale in scales)}"
    for scale in scales:
        yield f"Scale `{scale.name}`, {scale.title}: `{scale.command}`."


def _row(
    table_name: str,
    entry: Entry,
    titles: Sequence[str],
    is_other_setting: bool,
    causes: Mapping[str, str],
) -> list[str]:
    cell, values = entry.cell, entry.values
    theirs = f"{cell.mean}" if cell.deviation is None else f"{cell.mean} ± {cell.deviation}"
    label = f"{cell.label} ({entry.variant})" if entry.variant else cell.label
    difference = MISSING
    if entry.is_comparable:
        difference = f"{statistics.fmean(values) - float(cell.mean):+.2f}"
    additional_scores = entry.additional_scores()
    split = []
    for name in SPLIT:
        number = entry.split(name)
        split.append(MISSING if number is None else f"{number:.3f}")
    cause = causes.get(f"{table_name}/{cell.label}") or causes.get(table_name)
    if not cause:
        cause = "scale" if is_other_setting else NOT_KNOWN
    return [
        label.replace("|", "\\|"),
        entry.heading,
        theirs,
        _format_values(values),
        f"{len(values)}",
        difference,
        *(_format_values(additional_scores.get(title, ())) for title in titles),
        *split,
        cause,
    ]


def _format_values(values: Sequence[float]) -> str:
    if not values:
        return MISSING
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{deviation}"


def _made_on(runs: Sequence[Run]) -> str:
    """Return a text: the number of runs, their hardware, and the versions of the software."""
    machines = dict.fromkeys(_machine(run) for run in runs)
    files = dict.fromkeys(run.folder.name for run in runs)
    if len(files) == 1:
        return f"1 run on {'; '.join(machines)}."
    return f"{len(files)} runs on {'; '.join(machines)}. ±: sample standard deviation over seeds."


def _machine(run: Run) -> str:
    identity = run.summary.get("identity")
    facts = identity if isinstance(identity, Mapping) else {}
    libraries = facts.get("libraries")
    versions = ""
    if isinstance(libraries, Mapping):
        versions = ", ".join(f"{name} {version}" for name, version in libraries.items())
    devices = dict.fromkeys((str(run.summary.get("hardware")), str(facts.get("device"))))
    return f"{', '.join(devices)}, {facts.get('threads')} thread ({versions})"


# --- commands -------------------------------------------------------------------------------------
def _commands(entries: Sequence[Entry]) -> str:
    """Return Markdown that lists the numbers of a paper's table, each with a command.

    If we have a result for a number, the command is that of the run with this result. Otherwise it
    is the command of a run at the paper's setting.
    entries: the numbers of the paper's table.
    """
    cells_by_command: dict[str, list[str]] = {}
    for entry in entries:
        command = str(entry.command)
        state = f"{entry.cell.mean}, {NOT_RUN}"
        with_result = [match.run for match in entry.matches if entry.only(match).values]
        if with_result:
            command = str(with_result[0].summary.get("command"))
            state = f"{entry.cell.mean}"
        place = f"{entry.cell.label}, {entry.cell.dataset}, {entry.cell.column} ({state})"
        cells_by_command.setdefault(command, []).append(place)
    lines = [f"{'; '.join(cells)}\n\n    {text}\n" for text, cells in cells_by_command.items()]
    summary = "<details><summary>The paper's numbers, and a command for each</summary>"
    return "\n".join([summary, "", *lines, "</details>"])


def write(folder: Path) -> None:
    """Write all pages about the papers, and the pictures of these pages.

    folder: the folder to write into; it is created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    for paper in PAPERS:
        runs = stored_runs(paper)
        if checksum(runs, PAPER_RUNS[paper]):
            draw(runs, PAPER_RUNS[paper], folder / f"{paper}.png")
    for figure in FIGURES.values():
        numbers = read_numbers(figure)
        if numbers is not None:
            (folder / "figures").mkdir(exist_ok=True)
            draw_figure(figure, numbers["panels"], folder / "figures" / f"{figure.file}.png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pages that compare the papers' tables with our results, and their pictures.

    arguments: the folder to write into; None reads it from the command line. An empty list writes
    into docs/papers.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jobs.papers.pages", description="Write the pages of the papers' tables."
    )
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        default="docs/papers",
        help="folder of the pages (docs/papers)",
    )
    write(user_path(parser.parse_args(arguments).folder))


if __name__ == "__main__":
    run_program(main)
