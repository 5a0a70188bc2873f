"""The pages of `docs/papers`: a paper's tables with our results beside them, all of it made from stored numbers.

`uv run python -m jobs.papers.pages docs/papers` writes them; a test compares them with what it would write.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.command import run as run_program
from jobs.papers.comparison import Entry, matched
from jobs.papers.gains import gains
from jobs.papers.pictures import ABOUT, draw, numbers
from jobs.papers.presets import PAPER_RUNS
from jobs.papers.results import kept
from jobs.papers.tables import PAPERS, Table, tables
from raysim.data.heterogeneity import SCALES
from raysim.primitives.files import user_path
from raysim.results.report import Run
from raysim.results.tables import MISSING, to_markdown

NOT_RUN = "not run yet"
NOT_KNOWN = "not known"
MADE = (
    "*Made by `uv run python -m jobs.papers.pages docs/papers` from the published tables and from the results in "
    "`jobs/papers/results`; not to be edited.*"
)
SPLIT = ("label_entropy", "largest_share", "divergence")  # shown beside every result


def pages() -> dict[str, str]:
    """Every page as Markdown, by its file's name."""
    made = {f"{paper}.md": page(paper, kept(paper)) for paper in PAPERS}
    return {"index.md": _index(), **made}


def page(paper: str, runs: Sequence[Run]) -> str:
    """The page of a paper, with these runs of ours."""
    every, known = tables(paper), _known(paper)
    title = next(iter(every.values())).title.rpartition(",")[0]
    parts = [f"# {title}", MADE, f"**Which score.** {PAPER_RUNS[paper].scored}"]
    parts += [
        f"**How unlike clients are.** {'; '.join(f'{name}: {SCALES[name]}' for name in SPLIT)}; means over clients."
    ]
    if claims := known["claims"]:
        parts.append(
            "\n".join(["**What we could not see.**", "", *(f"- {text}" for text in claims)])
        )
    if numbers(runs, PAPER_RUNS[paper]):
        parts.append(f"![{ABOUT}]({paper}.png)")
    parts += gains(runs, PAPER_RUNS[paper])
    for name, table in every.items():
        parts += _table(name, table, runs, known["causes"])
    return "\n\n".join(parts) + "\n"


def _known(paper: str) -> Any:
    """What a person has found out, in `known.json`.

    causes: why a number of ours is another than the paper's, by "table1/row label" or "table1". claims: sentences about
    what the paper claims and we could not see, with what was tried.
    """
    return json.loads((Path(__file__).parent / "known.json").read_text(encoding="utf-8"))[paper]


def _index() -> str:
    lines = [
        "# Papers",
        "What the papers' tables say, what we found, and why the two differ.",
        MADE,
    ]
    rows = []
    for paper in PAPERS:
        runs = kept(paper)
        every = tables(paper)
        entries = [entry for name in every for entry in matched(name, runs)[0]]
        found = sum(bool(entry.values) for entry in entries)
        title = next(iter(every.values())).title.rpartition(",")[0]
        rows.append((f"[{title}]({paper}.md)", f"{len(every)}", f"{len(entries)}", f"{found}"))
    table = to_markdown(("paper", "tables", "printed numbers", "with a result of ours"), rows)
    toctree = ["```{toctree}", ":maxdepth: 1", ":hidden:", *PAPERS, "```"]
    return "\n\n".join([*lines, table, "\n".join(toctree)]) + "\n"


def _table(
    name: str, table: Table, runs: Sequence[Run], causes: Mapping[str, str]
) -> Iterator[str]:
    short = name.rpartition("/")[2]
    entries, _ = matched(name, runs)
    yield f"## {short.replace('table', 'Table ')}: {table.caption}"
    yield f"The paper's number: {table.metric}."
    said = [
        *table.notes,
        *(text for key, text in PAPER_RUNS[name.partition("/")[0]].notes.items() if key == name),
    ]
    if said:
        yield "\n".join(f"- {text}" for text in said)
    settings = dict.fromkeys(match.setting for entry in entries for match in entry.matches)
    for setting in settings:
        yield from _results(
            short, [part for entry in entries for part in entry.at(setting)], setting, causes
        )
    if not settings:
        yield f"**Ours: {NOT_RUN}.**"
    yield _commands(entries)


# --- one setting of ours --------------------------------------------------------------------------------------------
def _results(
    short: str, entries: Sequence[Entry], setting: str, causes: Mapping[str, str]
) -> Iterator[str]:
    """Ours beside theirs, at one setting."""
    shown = [entry for entry in entries if entry.values]
    if not shown:
        return
    yield f"### Ours at {'the paper' + chr(39) + 's setting' if not setting else 'another scale'}"
    if setting:
        yield f"Otherwise than the paper: {setting}."
    yield _made_on([run for entry in shown for run in entry.runs])
    titles = dict.fromkeys(
        title for entry in shown for title, values in entry.beside().items() if values
    )
    head = [
        "row",
        "data",
        "paper",
        "ours",
        "seeds",
        "difference",
        *titles,
        *(name.replace("_", " ") for name in SPLIT),
        "why",
    ]
    rows = [_row(short, entry, list(titles), bool(setting), causes) for entry in shown]
    yield to_markdown(head, rows)


def _row(
    short: str, entry: Entry, titles: Sequence[str], elsewhere: bool, causes: Mapping[str, str]
) -> list[str]:
    cell, values = entry.cell, entry.values
    mean = statistics.fmean(values)
    theirs = f"{cell.mean}" if cell.deviation is None else f"{cell.mean} ± {cell.deviation}"
    beside = entry.beside()
    others = [_shown(beside.get(title, ())) for title in titles]
    split = [
        MISSING if (number := entry.split(name)) is None else f"{number:.3f}" for name in SPLIT
    ]
    label = f"{cell.label} ({entry.variant})" if entry.variant else cell.label
    known = (
        causes.get(f"{short}/{cell.label}")
        or causes.get(short)
        or ("scale" if elsewhere else NOT_KNOWN)
    )
    difference = f"{mean - float(cell.mean):+.2f}" if entry.is_comparable else MISSING
    return [
        label.replace("|", "\\|"),
        entry.place,
        theirs,
        _shown(values),
        f"{len(values)}",
        difference,
        *others,
        *split,
        known,
    ]


def _shown(values: Sequence[float]) -> str:
    if not values:
        return MISSING
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{deviation}"


def _made_on(runs: Sequence[Run]) -> str:
    """Hardware, versions and digests of these runs; the whole of it is in their files."""
    machines = dict.fromkeys(_machine(run) for run in runs)
    files = dict.fromkeys(run.folder.name for run in runs)
    each = "±: standard deviation over seeds, divisor n - 1." if len(files) > 1 else ""
    return f"{len(files)} runs on {'; '.join(machines)}. {each}".strip()


def _machine(run: Run) -> str:
    identity = run.summary.get("identity")
    facts = identity if isinstance(identity, Mapping) else {}
    libraries = facts.get("libraries")
    versions = (
        ", ".join(f"{name} {version}" for name, version in libraries.items())
        if isinstance(libraries, Mapping)
        else ""
    )
    on = dict.fromkeys(str(each) for each in (run.summary.get("hardware"), facts.get("device")))
    return f"{', '.join(on)}, {facts.get('threads')} thread ({versions})"


# --- what makes it --------------------------------------------------------------------------------------------------
def _commands(entries: Sequence[Entry]) -> str:
    """A command for each cell: that of its runs where there are some, else the one that would make it."""
    lines = []
    made: dict[str, list[str]] = {}
    for entry in entries:
        text = str(entry.command) if not entry.runs else str(entry.runs[0].summary.get("command"))
        state = f"{entry.cell.mean}" if entry.runs else f"{entry.cell.mean}, {NOT_RUN}"
        where = f"{entry.cell.label}, {entry.cell.dataset}, {entry.cell.column} ({state})"
        made.setdefault(text, []).append(where)
    for text, cells in made.items():
        lines.append(f"{'; '.join(cells)}\n\n    {text}\n")
    return "\n".join(
        [
            "<details><summary>The paper's numbers, and a command for each</summary>",
            "",
            *lines,
            "</details>",
        ]
    )


def write(folder: Path) -> None:
    """Write all pages and their pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    for paper in PAPERS:
        if numbers(runs := kept(paper), PAPER_RUNS[paper]):
            draw(runs, PAPER_RUNS[paper], folder / f"{paper}.png")


def main(words: Sequence[str] | None = None) -> None:
    """Write the pages into the folder of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.papers.pages", description="Write the pages of the papers."
    )
    parser.add_argument(
        "folder", metavar="DIR", nargs="?", default="docs/papers", help="where (docs/papers)"
    )
    write(user_path(parser.parse_args(words).folder))


if __name__ == "__main__":
    run_program(main)
