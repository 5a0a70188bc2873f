"""Print a published table with our runs, which are matched by their stored configurations."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from string import ascii_lowercase

from jobs.papers.presets import PAPER_RUNS, Command, PaperRuns, Score
from jobs.papers.tables import Cell, Table, find, tables
from raysim.primitives.checks import finite_values
from raysim.results.history import column
from raysim.results.report import Run, chosen_option, flat_settings
from raysim.results.tables import MISSING, Column, format_table, number_column

# Keys, with all keys below them, that may differ from the paper's setting.
FREE = (
    *("seed", "device", "runtime", "checkpoint", "faults", "state", "thresholds", "summation"),
    *("data.root", "data.cache", "data.download"),
    *("evaluate.clients", "evaluate.probe", "evaluate.probe_rows", "evaluate.decompose"),
)
OPEN = (
    ("weighting", "None"),
)  # what a preset leaves to the methods, and a run's configuration says
GROUPS = ("data", "partition", "model", "schedule", "fleet")
FEDAVG_FINAL = "fedavg_final"  # a threshold that is no number: FedAvg's own last accuracy
CHANGED = "*"  # behind a number of ours
AS_PAPER = "as in the preset"
SPLIT = "entropy / divergence"  # of the clients' labels, see raysim.data.heterogeneity


@dataclass(frozen=True)
class Match:
    """A run at a cell of a table, and what its configuration has otherwise than the paper's command.

    setting: differences that all methods of a table share, such as the data or the number of rounds; "" is the paper's
    setting. variant: differences in the values of the methods. data: the run's data set if it is not the paper's.
    """

    run: Run
    setting: str = ""
    variant: str = ""
    data: str = ""
    is_kept: bool = False


@dataclass
class Entry:
    """A printed number and the runs that belong to it. variant: that of all its runs, which the label names."""

    cell: Cell
    command: Command
    score: Score
    matches: list[Match] = field(default_factory=list)
    variant: str = ""

    @property
    def place(self) -> str:
        """The data set and the paper's column."""
        return f"{self.dataset}, {self.cell.column}"

    @property
    def runs(self) -> list[Run]:
        """The runs of this cell."""
        return [match.run for match in self.matches]

    @property
    def dataset(self) -> str:
        """The data set of the runs, which is the paper's unless all of them have another one."""
        others = {match.data for match in self.matches}
        return others.pop() if len(others) == 1 and "" not in others else self.cell.dataset

    @property
    def is_comparable(self) -> bool:
        """Whether the runs have the paper's data, so that a difference from the printed number says something."""
        return self.dataset == self.cell.dataset

    @property
    def changed(self) -> bool:
        """Whether a run of it is not at the paper's setting."""
        return any(match.setting or match.variant for match in self.matches)

    @property
    def values(self) -> list[float]:
        """Our scores, one for each run that measured it."""
        return self.of(self.score.column)

    def of(self, name: str) -> list[float]:
        """Return the scores of another column of the runs' histories."""
        scores = [self.score.summary(run.rows, name) for run in self.runs]
        return [value * self.score.factor for value in scores if value is not None]

    def beside(self) -> dict[str, list[float]]:
        """Return the other scores that are shown, by their titles, without the compared one."""
        return {
            title: self.of(name)
            for title, name in self.score.beside.items()
            if name != self.score.column
        }

    def split(self, name: str) -> float | None:
        """Return the mean over the runs of a number of `raysim.data.heterogeneity`."""
        splits = [run.summary.get("split") for run in self.runs]
        values = [split.get(name) for split in splits if isinstance(split, Mapping)]
        number_column = [value for value in values if isinstance(value, (int, float))]
        return statistics.fmean(number_column) if number_column else None

    def settings(self) -> set[str]:
        """Return the settings of the runs that measured the score."""
        return {match.setting for match in self.matches if replace(self, matches=[match]).values}

    def at(self, setting: str) -> list[Entry]:
        """Return an entry for each variant among the runs at a setting; one without runs if there are none."""
        matches = [match for match in self.matches if match.setting == setting]
        variants = sorted({match.variant for match in matches})
        return [
            replace(
                self,
                matches=[match for match in matches if match.variant == variant],
                variant=variant,
            )
            for variant in variants
        ] or [replace(self, matches=[])]

    def add_kept(self, matches: Sequence[Match]) -> None:
        """Add kept runs where there are none at the same setting and variant."""
        taken = {(match.setting, match.variant) for match in self.matches}
        added = [match for match in matches if (match.setting, match.variant) not in taken]
        self.matches += [replace(match, is_kept=True) for match in added]

    @property
    def spread(self) -> float | None:
        """The deviation within the one run, where the table has such."""
        if not self.score.spread or not self.runs:
            return None
        value = self.score.spread(self.runs[0].rows, self.score.column)
        return None if value is None else value * self.score.factor


def compare(name: str, runs: Sequence[Run] = (), width: int = 120, kept: Sequence[Run] = ()) -> str:
    """Return a table with the scores of runs next to the printed numbers, and the commands of what is missing.

    Each data set has the runs of one setting in its table; runs at other settings have tables of their own below it.
    width: of a line; columns that do not fit go below the others. kept: runs that stand where `runs` has none.
    Raises `Refused` for an unknown name.
    """
    table = find(name)
    paper_runs = PAPER_RUNS[name.partition("/")[0]]
    entries, notes = matched(name, runs)
    for entry, stored in zip(entries, matched(name, kept)[0], strict=True):
        entry.add_kept(stored.matches)

    parts = [f"{table.title}: {table.caption}\n{table.metric}"]
    main = main_settings(entries)
    for dataset, chosen in main.items():
        cells = [entry for entry in entries if entry.cell.dataset == dataset]
        rows = [row for entry in cells for row in entry.at(chosen)]
        parts += [*_difference_from_paper(rows, chosen), *_section(rows, width)]
        for setting in _settings(cells):
            if setting != chosen:
                rows = [row for entry in cells for row in entry.at(setting) if row.values]
                title = _difference_from_paper(rows, setting) or [
                    f"{dataset}, at the paper's setting"
                ]
                parts += [*title, *_section(rows, width)]
    parts += _paragraph("notes", _notes(table, entries, paper_runs))
    parts += _paragraph(
        f"runs ({CHANGED}: not at the paper's setting)", [*notes, *_kept_notes(entries)]
    )
    return "\n\n".join([*parts, *_paragraph("without a run", _missing(entries))])


def matched(name: str, runs: Sequence[Run]) -> tuple[list[Entry], list[str]]:
    """Return the cells of a table with their runs, and what a reader must know of each run."""
    table, paper_runs = find(name), PAPER_RUNS[name.partition("/")[0]]
    entries = [
        Entry(cell, paper_runs.command(table, cell), paper_runs.score(table, cell))
        for cell in table.cells
    ]
    return entries, list(_match(paper_runs, name, entries, runs))


def main_settings(entries: Sequence[Entry]) -> dict[str, str]:
    """Choose one setting for each data set of a table: the one at which most cells have a run.

    Cells with a run that is not a kept one count first. Between equals the paper's setting is chosen, else the one with
    more runs. Runs on other data than the paper's are never chosen.
    """

    def rank(setting: str, cells: Sequence[Entry]) -> tuple[int, int, bool, int]:
        at_setting = [
            [match for match in entry.matches if match.setting == setting] for entry in cells
        ]
        of_user = sum(any(not match.is_kept for match in matches) for matches in at_setting)
        return of_user, sum(map(bool, at_setting)), setting == "", sum(map(len, at_setting))

    chosen = {}
    for dataset in dict.fromkeys(entry.cell.dataset for entry in entries):
        cells = [entry for entry in entries if entry.cell.dataset == dataset]
        settings = {match.setting for entry in cells for match in entry.matches if not match.data}
        chosen[dataset] = max(
            sorted(settings), key=lambda setting: rank(setting, cells), default=""
        )
    return chosen


def _settings(entries: Sequence[Entry]) -> list[str]:
    return sorted({setting for entry in entries for setting in entry.settings()})


def _kept_notes(entries: Sequence[Entry]) -> list[str]:
    """Say which rows hold runs that are kept with raysim."""
    rows = [entry.cell.label for entry in entries if any(match.is_kept for match in entry.matches)]
    return [f"kept with raysim: {', '.join(dict.fromkeys(rows))}"] if rows else []


def _paragraph(title: str, lines: Sequence[str]) -> list[str]:
    return ["\n".join([f"{title}:", *(f"  {line}" for line in lines)])] if lines else []


def _notes(table: Table, entries: Sequence[Entry], paper_runs: PaperRuns) -> list[str]:
    theirs = [f"the paper's ± is over {table.deviation_of}"] if table.deviation_of else []
    ours = (
        ["our ± is the standard deviation over runs, divisor n - 1"]
        if any(len(e.values) > 1 for e in entries)
        else []
    )
    notes = [paper_runs.notes[table.name]] if table.name in paper_runs.notes else []
    scored = (
        [paper_runs.scored] if paper_runs.scored and any(entry.runs for entry in entries) else []
    )
    return [*theirs, *ours, *table.notes, *notes, *scored]


# --- which run belongs to which cell --------------------------------------------------------------------------------
def _match(
    paper_runs: PaperRuns, name: str, entries: Sequence[Entry], runs: Sequence[Run]
) -> Iterator[str]:
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
                match = _as_match(run, different)
                entry.matches.append(match)
                differences = "; ".join(filter(None, [match.setting, match.variant]))
                labels.setdefault(differences, []).append(entry.cell.label)
        yield from _run_note(run, labels)


def _as_match(run: Run, different: Mapping[str, str]) -> Match:
    of_methods = {key for key in different if key.startswith("method.")}
    setting = "; ".join(text for key, text in different.items() if key not in of_methods)
    variant = "; ".join(text for key, text in different.items() if key in of_methods)
    data = chosen_option(run.config, "data") if "data" in different else ""
    return Match(run, setting, variant, data)


def _row_keys(paper_runs: PaperRuns, paper: str) -> set[str]:
    """Return the keys by which rows of a paper differ; a run must have the value of its row."""
    commands = [
        paper_runs.command(table, cell) for table in tables(paper).values() for cell in table.cells
    ]
    return {
        key
        for command in commands
        for key in command.overrides
        if key.startswith(paper_runs.row_prefixes)
    }


def _same_choices(run: Run, command: Command) -> bool:
    methods = run.config.get("method") or {}
    names = set(methods) if isinstance(methods, Mapping) else set()
    return chosen_option(run.config, "experiment") == command.experiment and names == set(
        command.methods
    )


def _preset(command: Command) -> dict[str, str]:
    """Return every value of the preset by its dotted key, and the options by their groups."""
    from raysim.experiment.compose import compose
    from raysim.experiment.config_files import to_dict

    return _flat(to_dict(compose(replace(command, overrides={}, places=()).words())))


def _flat(config: Mapping[str, object]) -> dict[str, str]:
    return flat_settings(config) | {group: chosen_option(config, group) for group in GROUPS}


def _different(
    run: Run, preset: Mapping[str, str], command: Command, row_keys: set[str]
) -> dict[str, str]:
    """Map each key in which a run differs from a command to a text that says how.

    A key that only one of them has follows from an option that is named already, but for keys by which rows differ: a
    run without such a key is no run of the row.
    """
    present = _flat(run.config)
    expected = {**preset, **{key: str(value) for key, value in command.overrides.items()}}
    different = {}
    for key, value in expected.items():
        if _is_free(key) or (key, value) in OPEN:
            continue
        if key in present and not is_equal(present[key], value):
            different[key] = plainly(f"{key}={present[key]} instead of {value}")
        elif key in row_keys and key not in present:
            different[key] = f"no {key} instead of {value}"
    return different


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE) or key.endswith(
        (".root", ".cache")
    )


def plainly(text: str) -> str:
    """Write 10.0 as 10, because both are one setting."""
    return re.sub(r"(?<==)(-?\d+)\.0\b", r"\1", text)


def is_equal(one: str, other: str) -> bool:
    """Tell whether two values are equal as numbers, or else as texts."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _run_note(run: Run, labels: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the rows of a run and how it differs from the paper's setting."""
    if not labels:
        what = f"experiment={chosen_option(run.config, 'experiment')}, method {chosen_option(run.config, 'method')}"
        yield f"{run.folder} belongs to no row of this table (it has {what})"
    for different, rows in labels.items():
        state = [] if run.finished else ["it has not finished"]
        said = [f"it has {different}", *state] if different else state
        yield f"{run.folder}: {', '.join(dict.fromkeys(rows))}; {'; '.join(said) or AS_PAPER}"


def _missing(entries: Sequence[Entry]) -> list[str]:
    """Return the commands of the cells without a number, each once."""
    commands: dict[str, list[str]] = {}
    for entry in entries:
        if not entry.values:
            where = commands.setdefault(str(entry.command), [])
            where += (
                [] if (label := f"{entry.cell.label}, {entry.cell.dataset}") in where else [label]
            )
    labels = {command: " / ".join(where) for command, where in commands.items()}
    width = max(map(len, labels.values()), default=0)
    return [f"{label:<{width}}  {command}" for command, label in labels.items()]


# --- numbers --------------------------------------------------------------------------------------------------------
def _printed(mean: Decimal, deviation: Decimal | None) -> str:
    return f"{mean}" if deviation is None else f"{mean} ± {deviation}"


def _ours(entry: Entry) -> str:
    values, digits = entry.values, _digits(entry.cell.mean)
    if not values:
        return MISSING
    mean = f"{statistics.fmean(values):.{digits}f}{CHANGED if entry.changed else ''}"
    if len(values) > 1:
        return f"{mean} ± {statistics.stdev(values):.{digits}f} ({len(values)} runs)"
    spread = entry.spread
    return mean if spread is None else f"{mean} ± {spread:.{digits}f}"


def _difference(entry: Entry) -> str:
    if not entry.values or not entry.is_comparable:
        return MISSING
    return (
        f"{statistics.fmean(entry.values) - float(entry.cell.mean):+.{_digits(entry.cell.mean)}f}"
    )


def _digits(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _round(run: Run, name: str, threshold: float) -> int | None:
    """Return the first evaluated round whose value reaches the threshold, or None."""
    reached = (row["round"] for row in run.rows if (row.get(name) or -math.inf) >= threshold)
    first = next(reached, None)
    return None if first is None else int(first)


def _threshold(key: str, entry: Entry, entries: Sequence[Entry]) -> float | None:
    """Return 0.8 for "0.80"; for FedAvg's threshold the last accuracy of our FedAvg runs, or None."""
    if not key.startswith(FEDAVG_FINAL):
        return float(key)
    of_fedavg = [
        other for other in entries if not other.cell.methods and other.place == entry.place
    ]
    runs = [run for other in of_fedavg for run in other.runs]
    last = [
        value for run in runs for value in finite_values(column(run.rows, entry.score.column))[-1:]
    ]
    return statistics.fmean(last) if last else None


def _rounds(key: str, entry: Entry, entries: Sequence[Entry]) -> str:
    """Return the mean over the runs of a cell; a dash if one of them never reached it."""
    if (threshold := _threshold(key, entry, entries)) is None:
        return MISSING
    rounds = [_round(run, entry.score.column, threshold) for run in entry.runs]
    reached = [number for number in rounds if number is not None]
    return (
        f"{statistics.fmean(reached):.0f}" if reached and len(reached) == len(rounds) else MISSING
    )


# --- text -----------------------------------------------------------------------------------------------------------
def _difference_from_paper(entries: Sequence[Entry], setting: str) -> list[str]:
    return [f"{entries[0].dataset}, otherwise than the paper: {setting}"] if setting else []


def _section(entries: Sequence[Entry], width: int) -> Iterator[str]:
    """Yield a table for each column of the paper, of the cells of one data set at one setting."""
    variants = sorted({entry.variant for entry in entries} - {""})
    marks = {
        variant: f" [{letter}]" for variant, letter in zip(variants, ascii_lowercase, strict=False)
    }
    for place in dict.fromkeys(entry.place for entry in entries):
        cells = [entry for entry in entries if entry.place == place]
        labels = [f"{entry.cell.label}{marks.get(entry.variant, '')}" for entry in cells]
        yield format_table([Column(place, labels), *_columns(cells, entries)], width)
    if marks:
        yield "\n".join(f"{mark.strip()} {variant}" for variant, mark in marks.items())


def _columns(cells: Sequence[Entry], entries: Sequence[Entry]) -> Iterator[Column]:
    """Yield the printed numbers, ours, and what else is known of any of the cells."""

    yield number_column(
        "paper", [_printed(entry.cell.mean, entry.cell.deviation) for entry in cells]
    )
    is_made = any(entry.values for entry in cells)
    if is_made:
        yield number_column("ours", [_ours(entry) for entry in cells])
        yield number_column("diff", [_difference(entry) for entry in cells])
        for title, texts in _more(cells).items():
            if set(texts) != {MISSING}:
                yield number_column(title, texts)
    for key in dict.fromkeys(key for entry in cells for key in entry.cell.rounds_to):
        texts = []
        for entry in cells:
            printed = entry.cell.rounds_to.get(key)
            theirs = MISSING if printed is None else str(printed)
            texts.append(f"{theirs} / {_rounds(key, entry, entries)}" if is_made else theirs)
        yield number_column(f"to {key.replace('_', ' ')}", texts)


def _more(cells: Sequence[Entry]) -> dict[str, list[str]]:
    """Return the other scores, and how unlike the clients were, by their titles."""
    more = {}
    for title in dict.fromkeys(title for entry in cells for title in entry.score.beside):
        more[title] = [
            _mean(entry.beside().get(title, ()), _digits(entry.cell.mean)) for entry in cells
        ]
    return more | {SPLIT: [_unlike(entry) for entry in cells]}


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else MISSING


def _unlike(entry: Entry) -> str:
    number_column = [entry.split(name) for name in ("label_entropy", "divergence")]
    if all(number is None for number in number_column):
        return MISSING
    return " / ".join(MISSING if number is None else f"{number:.2f}" for number in number_column)
