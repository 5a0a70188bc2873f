"""A published table with our runs beside it: matched by their stored configurations, printed as text."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from jobs.papers.presets import PAPER_RUNS, Command, PaperRuns, Score
from jobs.papers.tables import Cell, Table, find, tables
from raysim.primitives.checks import known
from raysim.results.history import column
from raysim.results.report import NOTHING, Run, choice, settings

# Keys, or all keys below them, that may differ without making a run another one than the paper's.
FREE = (
    *("seed", "device", "runtime", "checkpoint", "faults", "state", "thresholds", "summation"),
    *("data.root", "data.cache", "data.download", "evaluate.clients", "evaluate.probe", "evaluate.probe_rows"),
)
OPEN = (("weighting", "None"),)  # what a preset leaves to the methods, and a run's configuration says
GROUPS = ("data", "partition", "model", "schedule", "fleet")
FEDAVG_FINAL = "fedavg_final"  # a threshold that is no number: FedAvg's own last accuracy
GAP = "   "
CHANGED = "*"  # behind a number of ours
SPLIT = "entropy / divergence"  # of the clients' labels, see raysim.data.heterogeneity


@dataclass
class Entry:
    """A printed number and ours."""

    cell: Cell
    command: Command
    score: Score
    runs: list[Run] = field(default_factory=list)
    different: list[str] = field(default_factory=list)  # of each run, what it has otherwise than the paper's setting

    @property
    def changed(self) -> bool:
        """Whether a run of it is not at the paper's setting."""
        return any(self.different)

    @property
    def values(self) -> list[float]:
        """Ours, one of each run that measured it."""
        return self.of(self.score.column)

    def of(self, name: str) -> list[float]:
        """The same of another column of the runs' histories."""
        scores = [self.score.summary(run.rows, name) for run in self.runs]
        return [value * self.score.factor for value in scores if value is not None]

    def beside(self) -> dict[str, list[float]]:
        """The other scores that are shown, by their titles; the compared one is not among them."""
        return {title: self.of(name) for title, name in self.score.beside.items() if name != self.score.column}

    def split(self, name: str) -> float | None:
        """The mean over the runs of a number of `raysim.data.heterogeneity`."""
        splits = [run.summary.get("split") for run in self.runs]
        values = [split.get(name) for split in splits if isinstance(split, Mapping)]
        numbers = [value for value in values if isinstance(value, (int, float))]
        return statistics.fmean(numbers) if numbers else None

    def at(self, setting: str) -> Entry:
        """With those runs alone that differ from the paper in this way."""
        runs = [run for run, different in zip(self.runs, self.different, strict=True) if different == setting]
        return replace(self, runs=runs, different=[setting] * len(runs))

    @property
    def spread(self) -> float | None:
        """The deviation within the one run, where the table has such."""
        if not self.score.spread or not self.runs:
            return None
        value = self.score.spread(self.runs[0].rows, self.score.column)
        return None if value is None else value * self.score.factor


def compare(name: str, runs: Sequence[Run] = (), width: int = 120, kept: Sequence[Run] = ()) -> str:
    """The table `name` beside what the runs reached, what they did differently, and how to make those that lack.

    width: columns of text; data sets that do not fit go below the others. kept: runs that stand where `runs` has none.
    Raises Refused for an unknown name.
    """
    table = find(name)
    paper_runs = PAPER_RUNS[name.partition("/")[0]]
    entries, notes = matched(name, runs)
    notes += _filled(entries, matched(name, kept)[0])
    above = [f"{table.title}: {table.caption}", table.metric]
    parts = [
        "\n".join(above),
        *_grids(entries, width),
        *_paragraph("notes", _notes(table, entries, paper_runs)),
        *_paragraph(f"runs ({CHANGED}: not at the paper's setting)", notes),
    ]
    return "\n\n".join([*parts, *_paragraph("without a run", _missing(entries))])


def matched(name: str, runs: Sequence[Run]) -> tuple[list[Entry], list[str]]:
    """The cells of a table with their runs, and what a reader must know of each run."""
    table, paper_runs = find(name), PAPER_RUNS[name.partition("/")[0]]
    entries = [Entry(cell, paper_runs.command(table, cell), paper_runs.score(table, cell)) for cell in table.cells]
    return entries, list(_match(paper_runs, name, entries, runs))


def _filled(entries: Sequence[Entry], others: Sequence[Entry]) -> list[str]:
    """Give the cells without a run those that are kept, of the setting that most of these have; says which."""
    labels: dict[str, list[str]] = {}
    for entry, other in zip(entries, others, strict=True):
        if not entry.runs and other.runs:
            setting = max(other.different, key=other.different.count)
            chosen = other.at(setting)
            entry.runs, entry.different = chosen.runs, chosen.different
            labels.setdefault(setting, []).append(entry.cell.label)
    return [
        f"kept with raysim: {', '.join(dict.fromkeys(rows))}; {f'they have {said}' if said else 'as in the preset'}"
        for said, rows in labels.items()
    ]


def _paragraph(title: str, lines: Sequence[str]) -> list[str]:
    return ["\n".join([f"{title}:", *(f"  {line}" for line in lines)])] if lines else []


def _notes(table: Table, entries: Sequence[Entry], paper_runs: PaperRuns) -> list[str]:
    theirs = [f"the paper's ± is over {table.deviation_of}"] if table.deviation_of else []
    ours = (
        ["our ± is the standard deviation over runs, divisor n - 1"] if any(len(e.values) > 1 for e in entries) else []
    )
    notes = [paper_runs.notes[table.name]] if table.name in paper_runs.notes else []
    scored = [paper_runs.scored] if paper_runs.scored and any(entry.runs for entry in entries) else []
    return [*theirs, *ours, *table.notes, *notes, *scored]


# --- which run belongs to which cell --------------------------------------------------------------------------------
def _match(paper_runs: PaperRuns, name: str, entries: Sequence[Entry], runs: Sequence[Run]) -> Iterator[str]:
    """Put the runs into their entries; yields what a reader must know of each."""
    row_keys = _row_keys(paper_runs, name.partition("/")[0])
    presets: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
    for run in runs:
        labels: dict[str, list[str]] = {}
        for entry in entries:
            command = entry.command
            if not _same_choices(run, command):
                continue
            key = command.experiment, command.methods
            if key not in presets:
                presets[key] = _preset(command)
            different = _different(run, presets[key], command, row_keys)
            if not row_keys & set(different):
                entry.runs.append(run)
                entry.different.append("; ".join(different.values()))
                labels.setdefault("; ".join(different.values()), []).append(entry.cell.label)
        yield from _run_note(run, labels)


def _row_keys(paper_runs: PaperRuns, paper: str) -> set[str]:
    """The keys by which the rows of a paper differ: there a run must have the row's value."""
    commands = [paper_runs.command(table, cell) for table in tables(paper).values() for cell in table.cells]
    return {key for command in commands for key in command.overrides if key.startswith(paper_runs.row_prefixes)}


def _same_choices(run: Run, command: Command) -> bool:
    methods = run.config.get("method") or {}
    names = set(methods) if isinstance(methods, Mapping) else set()
    return choice(run.config, "experiment") == command.experiment and names == set(command.methods)


def _preset(command: Command) -> dict[str, str]:
    """Every value of the preset with these methods, by its dotted key; the chosen options by their groups."""
    from raysim.experiment.compose import compose, plain

    return _flat(plain(compose(replace(command, overrides={}, places=()).words())))


def _flat(config: Mapping[str, object]) -> dict[str, str]:
    return settings(config) | {group: choice(config, group) for group in GROUPS}


def _different(run: Run, preset: Mapping[str, str], command: Command, row_keys: set[str]) -> dict[str, str]:
    """What the run has otherwise than the command says. Other keys that only one has follow from a named option."""
    # A run from before a method had a switch is a run at its default.
    settings = {key: preset[key] for key in row_keys if key in preset} | _flat(run.config)
    expected = {**preset, **{key: str(value) for key, value in command.overrides.items()}}
    return {
        key: plainly(f"{key}={settings[key]} instead of {value}")
        for key, value in expected.items()
        if key in settings and not is_equal(settings[key], value) and not _is_free(key) and (key, value) not in OPEN
    }


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE) or key.endswith((".root", ".cache"))


def plainly(text: str) -> str:
    """10.0 and 10 are one setting."""
    return re.sub(r"(?<==)(-?\d+)\.0\b", r"\1", text)


def is_equal(one: str, other: str) -> bool:
    """Whether two values are the same as numbers, or else as texts."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _run_note(run: Run, labels: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Where a run stands and how it differs from the paper's setting."""
    if not labels:
        what = f"experiment={choice(run.config, 'experiment')}, method {choice(run.config, 'method')}"
        yield f"{run.folder} belongs to no row of this table (it has {what})"
    for different, rows in labels.items():
        state = [] if run.finished else ["it has not finished"]
        said = [f"it has {different}", *state] if different else state
        yield f"{run.folder}: {', '.join(dict.fromkeys(rows))}; {'; '.join(said) or 'as in the preset'}"


def _missing(entries: Sequence[Entry]) -> list[str]:
    """The commands of the cells that no run has a number for, each once."""
    commands: dict[str, list[str]] = {}
    for entry in entries:
        if not entry.values:
            where = commands.setdefault(str(entry.command), [])
            where += [] if (label := f"{entry.cell.label}, {entry.cell.dataset}") in where else [label]
    labels = {command: " / ".join(where) for command, where in commands.items()}
    width = max(map(len, labels.values()), default=0)
    return [f"{label:<{width}}  {command}" for command, label in labels.items()]


def _place(entry: Entry, entries: Sequence[Entry]) -> str:
    """The data set, and the paper's column where there are several."""
    several = len({other.cell.column for other in entries}) > 1
    return f"{entry.cell.dataset}, {entry.cell.column}" if several else entry.cell.dataset


# --- numbers --------------------------------------------------------------------------------------------------------
def _printed(mean: Decimal, deviation: Decimal | None) -> str:
    return f"{mean}" if deviation is None else f"{mean} ± {deviation}"


def _ours(entry: Entry) -> str:
    values, digits = entry.values, _digits(entry.cell.mean)
    if not values:
        return NOTHING
    mean = f"{statistics.fmean(values):.{digits}f}{CHANGED if entry.changed else ''}"
    if len(values) > 1:
        return f"{mean} ± {statistics.stdev(values):.{digits}f} ({len(values)} runs)"
    spread = entry.spread
    return mean if spread is None else f"{mean} ± {spread:.{digits}f}"


def _difference(entry: Entry) -> str:
    if not entry.values:
        return NOTHING
    return f"{statistics.fmean(entry.values) - float(entry.cell.mean):+.{_digits(entry.cell.mean)}f}"


def _digits(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _round(run: Run, name: str, threshold: float) -> int | None:
    """The first round whose value reaches the threshold; not every round need have been evaluated."""
    reached = (row["round"] for row in run.rows if (row.get(name) or -math.inf) >= threshold)
    first = next(reached, None)
    return None if first is None else int(first)


def _threshold(key: str, entry: Entry, entries: Sequence[Entry]) -> float | None:
    """0.8 of "0.80"; of a FedAvg threshold the last accuracy of our own FedAvg runs, None without any."""
    if not key.startswith(FEDAVG_FINAL):
        return float(key)
    place = _place(entry, entries)
    runs = [
        run for other in entries if not other.cell.methods and _place(other, entries) == place for run in other.runs
    ]
    last = [value for run in runs for value in known(column(run.rows, entry.score.column))[-1:]]
    return statistics.fmean(last) if last else None


def _rounds(key: str, entry: Entry, entries: Sequence[Entry]) -> str:
    """Mean over the runs of a cell; a dash where one of them never got there."""
    if (threshold := _threshold(key, entry, entries)) is None:
        return NOTHING
    rounds = [_round(run, entry.score.column, threshold) for run in entry.runs]
    reached = [number for number in rounds if number is not None]
    return f"{statistics.fmean(reached):.0f}" if reached and len(reached) == len(rounds) else NOTHING


# --- text -----------------------------------------------------------------------------------------------------------
def _grids(entries: Sequence[Entry], width: int) -> Iterator[str]:
    """The table, a block of columns per data set and column of the paper; blocks that do not fit go below."""
    lines = _lines(entries)
    labels = _aligned(["", "", *(label for label, _ in lines)], left=True)
    places = dict.fromkeys(_place(entry, entries) for entry in entries)
    blocks = [_block(place, [line.get(place) for _, line in lines], entries) for place in places]
    while blocks:
        count = 1
        while count < len(blocks) and sum(len(b[0]) + len(GAP) for b in blocks[: count + 1]) + len(labels[0]) <= width:
            count += 1
        head, title, *rows = [GAP.join(row).rstrip() for row in zip(labels, *blocks[:count], strict=True)]
        yield "\n".join([head, title, "-" * max(map(len, (head, title, *rows))), *rows])
        blocks = blocks[count:]


def _lines(entries: Sequence[Entry]) -> list[tuple[str, dict[str, Entry]]]:
    """The cells by the paper's rows: a label that comes again in a column begins a new row."""
    lines: list[tuple[str, dict[str, Entry]]] = []
    for entry in entries:
        label, place = entry.cell.label, _place(entry, entries)
        line = next((line for name, line in lines if name == label and place not in line), None)
        if line is None:
            lines.append((label, line := {}))
        line[place] = entry
    return lines


def _block(title: str, cells: Sequence[Entry | None], entries: Sequence[Entry]) -> list[str]:
    """A head of two lines and a line a row; what nobody has is left out."""
    keys = dict.fromkeys(key for entry in cells if entry for key in entry.cell.rounds_to)
    made = any(entry and entry.values for entry in cells)
    columns = [["paper", *(_printed(e.cell.mean, e.cell.deviation) if e else "" for e in cells)]]
    if made:
        columns.append(["ours", *(_ours(e) if e else "" for e in cells)])
        columns.append(["diff", *(_difference(e) if e else "" for e in cells)])
        columns += _more(cells)
    for key in keys:
        theirs = [NOTHING if e is None or (r := e.cell.rounds_to.get(key)) is None else str(r) for e in cells]
        ours = [f" / {_rounds(key, e, entries) if e else NOTHING}" if made else "" for e in cells]
        columns.append([f"to {key.replace('_', ' ')}", *(a + b for a, b in zip(theirs, ours, strict=True))])
    rows = ["  ".join(row) for row in zip(*(_aligned(column) for column in columns), strict=True)]
    return _aligned([title, *rows], left=True)


def _more(cells: Sequence[Entry | None]) -> list[list[str]]:
    """Columns of the other scores, and of how unlike the clients were, where anything is known of them."""
    titles = dict.fromkeys(title for entry in cells if entry for title in entry.score.beside)
    columns = [
        [title, *(_mean(e.beside().get(title, ()), _digits(e.cell.mean)) if e else "" for e in cells)]
        for title in titles
    ]
    columns.append([SPLIT, *(_unlike(e) if e else "" for e in cells)])
    return [column for column in columns if set(column[1:]) - {"", NOTHING}]


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else NOTHING


def _unlike(entry: Entry) -> str:
    numbers = [entry.split(name) for name in ("label_entropy", "divergence")]
    return (
        " / ".join(NOTHING if number is None else f"{number:.2f}" for number in numbers)
        if any(number is not None for number in numbers)
        else NOTHING
    )


def _aligned(texts: Sequence[str], left: bool = False) -> list[str]:
    width = max(map(len, texts))
    return [text.ljust(width) if left else text.rjust(width) for text in texts]
