"""Compare a table of a paper with our runs.

The configuration of a run decides with which cells of this table the run is compared.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from string import ascii_lowercase

from jobs.papers.presets import AVERAGES, PAPER_RUNS, Command, PaperRuns, Score
from jobs.papers.tables import Cell, Table, find, tables
from raysim.primitives.checks import finite_values
from raysim.results.history import column
from raysim.results.stored_runs import Run, chosen_option, flat_settings
from raysim.results.tables import MISSING, Column, format_table, number_column

# Keys, with all keys below them, that may differ from the paper's setting.
FREE = (
    *("seed", "device", "runtime", "checkpoint", "faults", "state", "thresholds", "summation"),
    *("data.root", "data.cache", "data.download"),
    *("evaluate.clients", "evaluate.probe", "evaluate.probe_rows", "evaluate.decompose"),
)
# Preset values that the methods decide; a run's configuration has the decided value.
OPEN = (("weighting", "None"),)
# Keys whose default is the number of rounds.
ROUNDS = ("local.schedule_rounds", "method.fraug.rounds")
GROUPS = ("data", "partition", "model", "schedule", "fleet")
FEDAVG_FINAL = "fedavg_final"  # a threshold: FedAvg's last accuracy
CHANGED = "*"  # marks our numbers that are not at the paper's setting
AS_PAPER = "as in the preset"
SPLIT = "entropy / divergence"  # of the clients' labels, see raysim.data.heterogeneity


@dataclass(frozen=True)
class Match:
    """A run for a cell of a table, and how its configuration differs from the paper's.

    variant: the differences in the methods' hyperparameters, or "".
    setting: all further differences, such as another number of rounds, or "".
    data: the data set of the run if it is not the paper's, or "".
    is_stored: True if the run is stored with raysim.
    """

    run: Run
    setting: str = ""
    variant: str = ""
    data: str = ""
    is_stored: bool = False


@dataclass
class Entry:
    """A number that a paper's table prints, and our runs that are compared with it.

    command: the command of a run at the paper's setting.
    score: the rule that computes the score of a run.
    variant: how the methods' hyperparameters in the runs differ from the paper's; "" if they do
    not differ. It is also "" until `at` has divided the entry by the hyperparameters of its runs.
    """

    cell: Cell
    command: Command
    score: Score
    matches: list[Match] = field(default_factory=list)
    variant: str = ""

    @property
    def heading(self) -> str:
        """Return the heading of this entry's text table, such as "cifar10, Acc (%)".

        A text table is about one data set and one column of the paper's table.
        """
        return f"{self.dataset}, {self.cell.column}"

    @property
    def runs(self) -> list[Run]:
        """Return the runs of this entry."""
        return [match.run for match in self.matches]

    @property
    def dataset(self) -> str:
        """Return the name of the runs' data set if all have the same one, else the paper's."""
        others = {match.data for match in self.matches}
        return others.pop() if len(others) == 1 and "" not in others else self.cell.dataset

    @property
    def is_comparable(self) -> bool:
        """Return False if our scores cannot be compared with the printed number.

        One reason is that all runs use the same data set, and that this is not the paper's. The
        other reason is that the number is an average over domains, and a run has other domains.
        """
        has_other_domains = any("data.domains=" in match.setting for match in self.matches)
        if self.cell.column in AVERAGES and has_other_domains:
            return False
        return self.dataset == self.cell.dataset

    @property
    def is_changed(self) -> bool:
        """Return True if a run differs from the paper's setting."""
        return any(match.setting or match.variant for match in self.matches)

    @property
    def values(self) -> list[float]:
        """Return the values of `self.score`, one for each of our runs that has a value."""
        return self.values_of(self.score.column)

    def values_of(self, name: str) -> list[float]:
        """Return a score from a column of the history, for each run that has the column.

        The score is computed by `self.score.summary`, for example as the mean of the last rounds.
        name: the name of the column.
        """
        scores = [self.score.summary(run.rows, name) for run in self.runs]
        return [value * self.score.factor for value in scores if value is not None]

    def additional_scores(self) -> dict[str, list[float]]:
        """Map the title of each additional score to its values, one for each run that has it."""
        return {
            title: self.values_of(name)
            for title, name in self.score.additional_columns.items()
            if name != self.score.column
        }

    def split(self, name: str) -> float | None:
        """Return a statistic of how the data are split among clients: the mean over our runs.

        Return None if no run has the statistic.
        name: the key of the statistic in the section "split" of a run's summary.
        """
        splits = [run.summary.get("split") for run in self.runs]
        values = [split.get(name) for split in splits if isinstance(split, Mapping)]
        numbers = [value for value in values if isinstance(value, (int, float))]
        return statistics.fmean(numbers) if numbers else None

    def settings(self) -> set[str]:
        """Return the texts `Match.setting` of all runs for which `self.score` has a value.

        A text says how a run differs from the paper, apart from methods' hyperparameters, such as
        "rounds=40 instead of 1000"; "" for no difference.
        """
        return {match.setting for match in self.matches if self.only(match).values}

    def only(self, match: Match) -> Entry:
        """Return this entry with only one of its runs."""
        return replace(self, matches=[match])

    def at(self, setting: str) -> list[Entry]:
        """Return an entry for each group of runs with equal hyperparameters of the methods.

        Without runs at `setting`, return one entry without runs.
        setting: selects the runs with this `Match.setting`, such as "rounds=40 instead of 1000"; ""
        selects runs at the paper's setting.
        """
        by_variant: dict[str, list[Match]] = {}
        for match in self.matches:
            if match.setting == setting:
                by_variant.setdefault(match.variant, []).append(match)
        if not by_variant:
            return [replace(self, matches=[])]
        return [
            replace(self, matches=matches, variant=variant)
            for variant, matches in sorted(by_variant.items())
        ]

    def add_stored(self, matches: Sequence[Match]) -> None:
        """Add stored runs to this entry.

        A stored run is left out if the entry already has a run with the same setting and variant.
        """
        taken = {(match.setting, match.variant) for match in self.matches}
        added = [match for match in matches if (match.setting, match.variant) not in taken]
        self.matches += [replace(match, is_stored=True) for match in added]

    @property
    def spread(self) -> float | None:
        """Return the standard deviation of the score over the last rounds of the first run.

        Return None if the paper's table prints no such deviations, or if there is no run.
        """
        if not self.score.spread or not self.runs:
            return None
        value = self.score.spread(self.runs[0].rows, self.score.column)
        return None if value is None else value * self.score.factor


def compare(
    name: str, runs: Sequence[Run] = (), width: int = 120, stored: Sequence[Run] = ()
) -> str:
    """Return a text with the numbers of a paper's table and our scores next to them.

    The first text tables show the configuration at which the user's runs fill the most cells. The
    commands of missing runs come last. Raise `RefusedError` for an unknown name.
    name: the name of the paper's table, such as "fedbr/table1".
    runs: the user's runs.
    width: the largest number of characters in a line of a text table.
    stored: raysim's stored runs. They fill cells without a run of the user at the same
    configuration.
    """
    table = find(name)
    paper_runs = PAPER_RUNS[name.partition("/")[0]]
    entries, notes = match_runs(name, runs)
    stored_entries, _ = match_runs(name, stored)
    for entry, stored_entry in zip(entries, stored_entries, strict=True):
        entry.add_stored(stored_entry.matches)

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
        f"runs ({CHANGED}: not at the paper's setting)", [*notes, *_stored_notes(entries)]
    )
    return "\n\n".join([*parts, *_paragraph("commands of missing runs", _missing(entries))])


def match_runs(name: str, runs: Sequence[Run]) -> tuple[list[Entry], list[str]]:
    """Match our runs with the printed numbers of a paper's table.

    Return one entry for each printed number, and texts that say to which rows each run belongs and
    how it differs from the paper's setting.
    name: the name of the paper's table, such as "fedbr/table1".
    """
    table = find(name)
    paper_runs = PAPER_RUNS[name.partition("/")[0]]
    entries = [
        Entry(cell, paper_runs.command(table, cell), paper_runs.score(table, cell))
        for cell in table.cells
    ]
    return entries, list(_match(paper_runs, name, entries, runs))


def main_settings(entries: Sequence[Entry]) -> dict[str, str]:
    """Choose, for each data set of a table, the setting whose runs are shown first.

    The user's runs fill the most cells of the table at this setting. Settings on other data than
    the paper's are not considered. Return a text `Match.setting` for each data set; "" if it has no
    runs.
    """

    # Among settings with equally many cells of the user, the order of this tuple decides.
    def rank(setting: str, cells: Sequence[Entry]) -> tuple[int, int, bool, int]:
        at_setting = [
            [match for match in entry.matches if match.setting == setting] for entry in cells
        ]
        of_user = sum(any(not match.is_stored for match in matches) for matches in at_setting)
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


def _stored_notes(entries: Sequence[Entry]) -> list[str]:
    """Return a line that names all table rows with runs from `jobs/papers/results`.

    Return an empty list if there are no such rows.
    """
    rows = [
        entry.cell.label for entry in entries if any(match.is_stored for match in entry.matches)
    ]
    return [f"stored with raysim: {', '.join(dict.fromkeys(rows))}"] if rows else []


def _paragraph(title: str, lines: Sequence[str]) -> list[str]:
    return ["\n".join([f"{title}:", *(f"  {line}" for line in lines)])] if lines else []


def _notes(table: Table, entries: Sequence[Entry], paper_runs: PaperRuns) -> list[str]:
    notes = []
    if table.deviation_of:
        notes.append(f"the paper's ± is over {table.deviation_of}")
    if any(len(entry.values) > 1 for entry in entries):
        notes.append("our ± is the sample standard deviation over runs")
    notes += table.notes
    if table.name in paper_runs.notes:
        notes.append(paper_runs.notes[table.name])
    if paper_runs.score_explanation and any(entry.runs for entry in entries):
        notes.append(paper_runs.score_explanation)
    return notes


# --- which run belongs to which cell --------------------------------------------------------------
def _match(
    paper_runs: PaperRuns, name: str, entries: Sequence[Entry], runs: Sequence[Run]
) -> Iterator[str]:
    """Add each run to the entries with which it is compared; yield texts about each run.

    A run is compared with an entry if it has the same preset and methods as the entry's command,
    and the same values of the keys in `_row_keys`. The texts say to which rows of the paper's table
    the run belongs, and how it differs from the paper's setting.
    """
    row_keys = _row_keys(paper_runs, name.partition("/")[0])
    for run in runs:
        labels: dict[str, list[str]] = {}
        for entry in entries:
            command = entry.command
            if not _same_choices(run, command):
                continue
            preset = _settings_of(tuple(_with_options(command).arguments()))
            different = _different(run, preset, command, row_keys)
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
    """Return the configuration keys whose values decide to which table row a run belongs.

    A command for the paper's tables sets these keys. They begin with one of
    `paper_runs.row_prefixes`.
    paper: a name, such as "fedbr".
    """
    keys: set[str] = set()
    for table in tables(paper).values():
        for cell in table.cells:
            keys.update(paper_runs.command(table, cell).overrides)
    return {key for key in keys if key.startswith(paper_runs.row_prefixes)}


def _same_choices(run: Run, command: Command) -> bool:
    methods = run.config.get("method") or {}
    names = set(methods) if isinstance(methods, Mapping) else set()
    return chosen_option(run.config, "experiment") == command.experiment and names == set(
        command.methods
    )


def _with_options(command: Command) -> Command:
    """Return a command with only its preset, methods and options such as partition=iid.

    Overrides with a dotted key, such as local.lr=0.1, are left out. Overrides whose value is a path
    are left out, too.
    """
    options = {key: value for key, value in command.overrides.items() if "." not in key}
    return replace(command, overrides=options, path_overrides=())


# Many tables have the same commands.
@functools.cache
def _settings_of(overrides: tuple[str, ...]) -> Mapping[str, str]:
    """Return the values of a configuration by dotted key, and the option of each of `GROUPS`."""
    from raysim.experiment.compose import compose
    from raysim.experiment.config_files import to_dict

    return _flat(to_dict(compose(overrides)))


def _flat(config: Mapping[str, object]) -> dict[str, str]:
    return flat_settings(config) | {group: chosen_option(config, group) for group in GROUPS}


def _different(
    run: Run, preset: Mapping[str, str], command: Command, row_keys: set[str]
) -> dict[str, str]:
    """Map configuration keys to texts about the differences between a run and a command.

    preset: the values that follow from the command's preset, methods and options, by
    configuration key.
    row_keys: the keys that count as different even if the run lacks them.
    """
    # A key that only one of the two has follows from the choice of another option, which is a
    # difference itself. A run without a row key does not belong to the row.
    present = _flat(run.config)
    expected = {**preset, **{key: str(value) for key, value in command.overrides.items()}}
    different = {}
    for key, value in expected.items():
        if _is_free(key) or (key, value) in OPEN:
            continue
        if key in ROUNDS and present.get(key) == present.get("rounds"):
            continue
        if key in present and not is_equal(present[key], value):
            different[key] = shorten_numbers(f"{key}={present[key]} instead of {value}")
        elif key in row_keys and key not in present:
            different[key] = f"no {key} instead of {value}"
    return different


@functools.cache
def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE) or key.endswith(
        (".root", ".cache")
    )


def shorten_numbers(text: str) -> str:
    """Replace "=10.0" by "=10" in a text, because both are the same setting."""
    return re.sub(r"(?<==)(-?\d+)\.0\b", r"\1", text)


def is_equal(one: str, other: str) -> bool:
    """Return True if two values are equal as numbers or, if they are not numbers, as texts."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _run_note(run: Run, labels: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield lines that say to which rows of a paper's table a run belongs, and how it differs.

    labels: the labels of these rows. Each key says how the run differs from the paper's setting
    in these rows; "" means no difference. The mapping is empty if the run belongs to no row.
    """
    if not labels:
        experiment = chosen_option(run.config, "experiment")
        method = chosen_option(run.config, "method")
        choices = f"experiment={experiment}, method {method}"
        yield f"{run.folder} belongs to no row of this table (it has {choices})"
    for difference, rows in labels.items():
        notes = []
        if difference:
            notes.append(f"it has {difference}")
        if not run.finished:
            notes.append("it has not finished")
        yield f"{run.folder}: {', '.join(dict.fromkeys(rows))}; {'; '.join(notes) or AS_PAPER}"


def _missing(entries: Sequence[Entry]) -> list[str]:
    """Return a line for each command that would compute a missing score of a paper's table.

    A line begins with the rows and data sets that lack the score.
    entries: the numbers of the paper's table, each with our runs.
    """
    cells_by_command: dict[str, dict[str, None]] = {}
    for entry in entries:
        if not entry.values:
            cells = cells_by_command.setdefault(str(entry.command), {})
            cells[f"{entry.cell.label}, {entry.cell.dataset}"] = None
    labels = {command: " / ".join(cells) for command, cells in cells_by_command.items()}
    width = max(map(len, labels.values()), default=0)
    return [f"{label:<{width}}  {command}" for command, label in labels.items()]


# --- numbers --------------------------------------------------------------------------------------
def _printed(mean: Decimal, deviation: Decimal | None) -> str:
    return f"{mean}" if deviation is None else f"{mean} ± {deviation}"


def _ours(entry: Entry) -> str:
    values, digits = entry.values, _digits(entry.cell.mean)
    if not values:
        return MISSING
    mean = f"{statistics.fmean(values):.{digits}f}{CHANGED if entry.is_changed else ''}"
    if len(values) > 1:
        return f"{mean} ± {statistics.stdev(values):.{digits}f} ({len(values)} runs)"
    spread = entry.spread
    return mean if spread is None else f"{mean} ± {spread:.{digits}f}"


def _difference(entry: Entry) -> str:
    if not entry.values or not entry.is_comparable:
        return MISSING
    difference = statistics.fmean(entry.values) - float(entry.cell.mean)
    return f"{difference:+.{_digits(entry.cell.mean)}f}"


def _digits(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _round(run: Run, name: str, threshold: float) -> int | None:
    """Return the first round in which a score is at least the threshold; None if no round is.

    name: the column of the run's history that has the score.
    """
    for row in run.rows:
        value = row.get(name) or -math.inf
        if value >= threshold:
            return int(row["round"] or 0)
    return None


def _threshold(key: str, entry: Entry, entries: Sequence[Entry]) -> float | None:
    """Return the accuracy, from 0 to 1, that a key of `Cell.rounds_to` means.

    A key that begins with `FEDAVG_FINAL` means the mean final accuracy of our FedAvg runs for the
    table column of `entry`. The result is None if there are no such runs.
    entries: all entries of the data set of `entry`.
    """
    if not key.startswith(FEDAVG_FINAL):
        return float(key)
    last_values: list[float] = []
    for other in entries:
        if other.cell.methods or other.heading != entry.heading:
            continue
        for run in other.runs:
            last_values += finite_values(column(run.rows, entry.score.column))[-1:]
    return statistics.fmean(last_values) if last_values else None


def _rounds(key: str, entry: Entry, entries: Sequence[Entry]) -> str:
    """Return, as text, the mean number of rounds until our runs of an entry reach an accuracy.

    Return a dash if there is no run, if a run never reaches the accuracy, or if the accuracy is
    unknown.
    key: a key of `Cell.rounds_to`.
    entries: all entries of the same data set.
    """
    threshold = _threshold(key, entry, entries)
    if threshold is None:
        return MISSING
    rounds = [_round(run, entry.score.column, threshold) for run in entry.runs]
    reached = [number for number in rounds if number is not None]
    if not reached or len(reached) < len(rounds):
        return MISSING
    return f"{statistics.fmean(reached):.0f}"


# --- text -----------------------------------------------------------------------------------------
def _difference_from_paper(entries: Sequence[Entry], setting: str) -> list[str]:
    return [f"{entries[0].dataset}, differences from the paper: {setting}"] if setting else []


def _section(entries: Sequence[Entry], width: int) -> Iterator[str]:
    """Yield text tables, one for each column of the paper's table; then a legend of the marks.

    A row has a mark such as [a] if its runs use other hyperparameters than the paper. The legend
    says which.
    entries: the entries of one data set, whose runs have the same `Match.setting`.
    """
    variants = sorted({entry.variant for entry in entries} - {""})
    marks = {
        variant: f" [{letter}]" for variant, letter in zip(variants, ascii_lowercase, strict=False)
    }
    for heading in dict.fromkeys(entry.heading for entry in entries):
        cells = [entry for entry in entries if entry.heading == heading]
        labels = [f"{entry.cell.label}{marks.get(entry.variant, '')}" for entry in cells]
        yield format_table([Column(heading, labels), *_columns(cells, entries)], width)
    if marks:
        yield "\n".join(f"{mark.strip()} {variant}" for variant, mark in marks.items())


def _columns(cells: Sequence[Entry], entries: Sequence[Entry]) -> Iterator[Column]:
    """Yield the columns of a text table that compares printed numbers with our numbers.

    cells: the entries from one column of the paper's table, one for each row.
    entries: all entries of the data set, among them those of FedAvg.
    """
    yield number_column(
        "paper", [_printed(entry.cell.mean, entry.cell.deviation) for entry in cells]
    )
    is_made = any(entry.values for entry in cells)
    if is_made:
        yield number_column("ours", [_ours(entry) for entry in cells])
        yield number_column("ours - paper", [_difference(entry) for entry in cells])
        for title, texts in _other_scores(cells).items():
            if set(texts) != {MISSING}:
                yield number_column(title, texts)
    for key in dict.fromkeys(key for entry in cells for key in entry.cell.rounds_to):
        texts = []
        for entry in cells:
            printed = entry.cell.rounds_to.get(key)
            theirs = MISSING if printed is None else str(printed)
            texts.append(f"{theirs} / {_rounds(key, entry, entries)}" if is_made else theirs)
        yield number_column(f"rounds to {key.replace('_', ' ')}", texts)


def _other_scores(cells: Sequence[Entry]) -> dict[str, list[str]]:
    """Return the columns of a text table that follow the differences, by title.

    There is a column for each additional score of our runs, and one that says how labels are split
    among clients. A column is a list with one text for each entry.
    cells: the entries, in the order of the rows.
    """
    columns: dict[str, list[str]] = {}
    for entry in cells:
        columns.update({title: [] for title in entry.score.additional_columns})
    for title, texts in columns.items():
        for entry in cells:
            texts.append(_mean(entry.additional_scores().get(title, ()), _digits(entry.cell.mean)))
    return columns | {SPLIT: [_split_text(entry) for entry in cells]}


def _mean(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else MISSING


def _split_text(entry: Entry) -> str:
    numbers = [entry.split(name) for name in ("label_entropy", "divergence")]
    if all(number is None for number in numbers):
        return MISSING
    return " / ".join(MISSING if number is None else f"{number:.2f}" for number in numbers)
