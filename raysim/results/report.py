"""Compare runs in tables: as text, LaTeX or CSV.

`stored_runs.py` reads the runs, and `number_format.py` formats their numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from raysim.primitives.checks import finite_values
from raysim.primitives.errors import suggest
from raysim.primitives.kinds import FLOAT_BYTES, SHARES
from raysim.results.curves import PERCENT
from raysim.results.history import (
    THRESHOLDS,
    Row,
    column,
    lower_metrics,
    metric_of,
    metrics_of,
    score,
    threshold_name,
)
from raysim.results.measures import better_direction, is_column_of, measure_title
from raysim.results.number_format import (
    format_bytes,
    format_count,
    format_grams,
    format_mean,
    format_number,
    format_percent,
    format_rounds,
    format_score,
    format_seconds,
    format_watt_hours,
    in_common_unit,
)
from raysim.results.significance import (
    MIN_PAIRS,
    Difference,
    compare_pairs,
    holm_correction,
    mean_deviation,
)
from raysim.results.stored_runs import (
    GROUPS,
    UNFINISHED,
    Run,
    as_mapping,
    chosen_option,
    chosen_options,
    flat_settings,
    run_labels,
)
from raysim.results.tables import (
    BEST_RULE,
    BOLD_RULES,
    MARK_RULE,
    MISSING,
    Column,
    FormatNumber,
    format_table,
    to_csv,
)

ROUNDS_TO = "rounds_to."  # start of the keys of the first rounds at a threshold
CLIENT_TESTS, CENTRAL_TEST = "on the clients' own tests (mean)", "on the central test set"


# --- the table ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TableView:
    """The choices of a user for tables and figures, set by flags of `raysim report`.

    columns: keys of a summary, or titles of usual columns; () shows the usual columns.
    percent: True shows scores between 0 and 1 in percent.
    thresholds: the target scores whose costs are shown. () takes the highest target scores that a
    run reached: four in a table, two on the HTML page.
    bold: a rule in `BOLD_RULES` for marking the best value.
    """

    columns: Sequence[str] = ()
    percent: bool = False
    thresholds: Sequence[float] = ()
    bold: str = "clear"


USUAL_VIEW = TableView()


def share_factor(runs: Sequence[Run], percent: bool) -> float:
    """Return 100 if scores are shown in percent, else 1.

    Raises `ValueError` if percent is True and the main metric of a run is not between 0 and 1.
    """
    if not percent:
        return 1.0
    unsuitable = {metric_of(run.rows) for run in runs} - SHARES
    if unsuitable:
        raise ValueError(
            f"--percent: {', '.join(sorted(unsuitable))} cannot be shown in percent; only scores "
            "between 0 and 1 can. Leave --percent out."
        )
    return 100.0


def _rank(runs: Sequence[Run]) -> float:
    """Return a number by which settings are sorted: the best setting has the smallest number.

    The number is the mean of `best5_mean` over the runs of one setting, times -1 if a higher score
    is better. Without scores, it is infinity.
    """
    scores = finite_values([_number(run, "best5_mean") for run in runs])
    if not scores:
        return math.inf
    mean, _ = mean_deviation(scores)
    assert mean is not None
    return mean if metric_of(runs[0].rows) in lower_metrics(runs[0].config) else -mean


def _number(run: Run, key: str) -> float | None:
    value = run.summary.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _column(
    title: str,
    scores: Sequence[float | None],
    show: FormatNumber,
    better: int = 0,
    deviations: Sequence[float | None] | None = None,
    key: str = "",
) -> Column:
    show_in_unit = in_common_unit(show, scores)
    texts = [show_in_unit(number) for number in scores]
    return Column(title, texts, list(scores), better, deviations, show=show, key=key)


def _scaled(values: Sequence[float | None], factor: float) -> list[float | None]:
    return [None if value is None else factor * value for value in values]


def _format_threshold(threshold: str, percent: bool) -> str:
    """Return the text that a title shows for the threshold of a score.

    threshold: the threshold as the summary writes it, such as "0.80".
    percent: True returns the threshold in percent, such as "80 %"; False returns it unchanged.
    """
    return f"{100 * float(threshold):g} %" if percent else threshold


def _threshold_columns(
    runs: Sequence[Run], limit: int, better: int, percent: bool = False
) -> list[Column]:
    """Return columns with the first round in which each run reached a threshold.

    There is a column for each of the `limit` highest thresholds that any run reached.
    better: -1 marks the smallest number of rounds as the best; 0 marks none.
    """
    rounds_by_run = [as_mapping(run.summary.get("rounds_to")) for run in runs]
    reached = set()
    for rounds in rounds_by_run:
        reached |= {str(name) for name, number in rounds.items() if number is not None}
    columns = []
    for name in sorted(reached, key=float)[-limit:]:
        scores = []
        for rounds in rounds_by_run:
            number = rounds.get(name)
            scores.append(None if number is None else float(str(number)))
        key = f"rounds_to.{name}"
        title = f"to {_format_threshold(name, percent)}"
        columns.append(_column(title, scores, format_rounds, better, key=key))
    return columns


def _columns(runs: Sequence[Run], limit: int, view: TableView = USUAL_VIEW) -> list[Column]:
    """Return the columns of a table that compares runs, with one row for each run.

    limit: the largest number of columns about thresholds (target scores). It has no effect if
    `view.columns` names the columns.
    Raises `ValueError` for a column that no run has.
    """
    data = [str(_data_settings(run)) for run in runs]
    if not view.columns:
        columns = _usual_columns(runs, limit, view.percent)
    else:
        columns = _chosen_columns(runs, view)
    return [replace(column, groups=data, bold=view.bold) for column in columns]


def _chosen_columns(runs: Sequence[Run], view: TableView) -> list[Column]:
    usual = _usual_columns(runs, len(THRESHOLDS), view.percent)
    known: dict[str, Column] = {}
    for usual_column in usual[1:]:
        known[usual_column.title.removesuffix(PERCENT)] = usual_column
        known[usual_column.key or usual_column.title] = usual_column
    chosen = [usual[0]]
    for name in view.columns:
        if name == "seeds":  # `result_columns` adds it
            continue
        column = known.get(name) or _summary_column(runs, name, view.percent)
        if column is None:
            valid = dict.fromkeys(known)  # in order, each once
            for run in runs:
                numbers = _flat_numbers(run.summary)
                valid |= dict.fromkeys(key for key, value in numbers.items() if value is not None)
            advice = suggest(name, valid)
            raise ValueError(f"--columns {name}: no run has such a column; {advice}")
        if name in known and column.key.startswith(ROUNDS_TO):
            # The title is short, because the usual table has many columns.
            column = replace(column, title=f"rounds {column.title}")
        chosen.append(column)
    return chosen


def _summary_column(runs: Sequence[Run], key: str, percent: bool) -> Column | None:
    """Return a column with one number of each run's summary; None if all runs lack the number.

    A column such as "rounds_to.0.80" also exists if its score was never reached.
    key: the key of the number; dots join nested keys.
    percent: True shows scores between 0 and 1 in percent.
    """
    values = [score(run.summary, key) for run in runs]
    is_threshold = any(key in _flat_numbers(run.summary) for run in runs) and ROUNDS_TO in key
    # a threshold that no run reached still has a column
    if not finite_values(values) and not is_threshold:
        return None
    lower: frozenset[str] = frozenset()
    names: set[str] = set()
    for run in runs:
        lower |= lower_metrics(run.config)
        names |= set(metrics_of(run.rows))
    is_error = lower.issuperset(metric_of(run.rows) for run in runs)
    direction = better_direction(key, is_error, lower, names - lower)
    title = measure_title(key)
    if percent and key.startswith(ROUNDS_TO):
        title = f"rounds to {_format_threshold(key.removeprefix(ROUNDS_TO), percent)}"
    if percent and any(is_column_of(metric, key) for metric in SHARES):
        scores = _scaled(values, share_factor(runs, percent))
        return _column(f"{title}{PERCENT}", scores, format_percent, direction, key=key)
    return _column(title, values, format_number, direction, key=key)


def _usual_columns(runs: Sequence[Run], limit: int, percent: bool) -> list[Column]:
    factor = share_factor(runs, percent)
    unit = PERCENT if percent else ""
    show: FormatNumber = format_percent if percent else format_score

    def numbers(key: str) -> list[float | None]:
        return [_number(run, key) for run in runs]

    metrics = [metric_of(run.rows) for run in runs]

    def scores(suffix: str) -> list[float | None]:
        keys = [f"{metric}{suffix}" for metric in metrics]
        values = [_number(run, key) for run, key in zip(runs, keys, strict=True)]
        return _scaled(values, factor)

    are_errors = [metric_of(run.rows) in lower_metrics(run.config) for run in runs]
    better = 0
    if len(set(are_errors)) == 1:
        better = -1 if are_errors[0] else 1
    # Costs grow with the rounds, so runs are compared only after equally many rounds.
    cheaper = -abs(better) if len(set(numbers("rounds"))) == 1 else 0

    means = _scaled(numbers("last10_mean"), factor)
    deviations = _scaled(numbers("last10_std"), factor)
    last_ten = []
    for mean, deviation in zip(means, deviations, strict=True):
        last_ten.append(format_mean(mean, deviation, show))
    client_scores, central_scores = scores(""), scores("_global")
    final = []
    for client_score, central_score in zip(client_scores, central_scores, strict=True):
        final.append(central_score if client_score is None else client_score)
    usual_metric = metrics[0]
    titled_scores = {
        ("final", "final"): final,
        ("worst", f"{usual_metric}_worst"): scores("_worst"),
        ("central", f"{usual_metric}_global"): central_scores,
    }
    unseen = scores("_unseen")
    if finite_values(unseen):
        titled_scores["unseen", f"{usual_metric}_unseen"] = unseen
    floats = []
    for down, up in zip(numbers("floats_down"), numbers("floats_up"), strict=True):
        floats.append((down or 0.0) + (up or 0.0))
    traffic = [FLOAT_BYTES * number for number in floats]

    columns = [Column("run", run_labels(runs))]
    for group in GROUPS:
        columns.append(Column(group, [chosen_option(run.config, group) for run in runs]))
    rounds = [number or 0.0 for number in numbers("rounds")]
    best_five = _scaled(numbers("best5_mean"), factor)
    columns += [
        _column("rounds", rounds, format_rounds, key="rounds"),
        _column(f"best 5{unit}", best_five, show, better, deviations, "best5_mean"),
        replace(
            _column(f"last 10{unit}", means, show, better, deviations, "last10_mean"),
            texts=last_ten,
        ),
    ]
    for (title, key), values in titled_scores.items():
        columns.append(_column(f"{title}{unit}", values, show, better, deviations, key))
    columns += _threshold_columns(runs, limit, -abs(better), percent)
    columns += [
        _column("floats", floats, format_count, cheaper, key="floats"),
        _column("traffic", traffic, format_bytes, cheaper, key="bytes"),
        _column(
            "virtual", numbers("virtual_seconds"), format_seconds, cheaper, key="virtual_seconds"
        ),
        # Wall time depends on the machine and on what else ran there.
        _column("wall", numbers("wall_seconds"), format_seconds, key="wall_seconds"),
    ]
    for title, key, show in ENERGY_COLUMNS:
        values = numbers(key)
        if any(values):
            columns.append(_column(title, values, show, cheaper, key=key))
    return columns


# Columns of fleets with costs: title, key and format.
ENERGY_COLUMNS: tuple[tuple[str, str, FormatNumber], ...] = (
    ("energy", "energy_wh", format_watt_hours),
    ("money", "money", format_count),
    ("CO2", "co2_g", format_grams),
)


def _data_settings(run: Run) -> dict[str, str]:
    """Return the settings that decide which samples the clients have, and which clients train.

    These are the values of `data`, `partition` and `evaluate.unseen`, as text, by dotted key.
    """
    config = {key: run.config.get(key) for key in ("data", "partition")}
    # Older runs have no such key.
    config["unseen"] = as_mapping(run.config.get("evaluate")).get("unseen") or 0
    return flat_settings(config)


def score_kinds(runs: Sequence[Run]) -> dict[str, bool]:
    """Return a dict whose keys describe the main scores of the runs.

    A key names the metric and the test samples: "accuracy on the central test set". The value is
    True if a run with this key has scores both of the clients' test sets and of the central test
    set.
    """
    kinds: dict[str, bool] = {}
    for run in runs:
        metric = metric_of(run.rows)
        has_client_scores = bool(finite_values(column(run.rows, metric)))
        has_central_scores = bool(finite_values(column(run.rows, f"{metric}_global")))
        if has_client_scores or has_central_scores:
            kind = f"{metric} {CLIENT_TESTS if has_client_scores else CENTRAL_TEST}"
            has_both = has_client_scores and has_central_scores
            kinds[kind] = kinds.get(kind, False) or has_both
    return kinds


def describe_scores(runs: Sequence[Run]) -> str:
    """Return a line that explains the scores of a table; "" if there are no scores."""
    kinds = score_kinds(runs)
    if not kinds:
        return ""
    central = f"; central: {CENTRAL_TEST}" if any(kinds.values()) else ""
    return f"scores: {' or '.join(kinds)}{central}"


def as_sentence(text: str) -> str:
    """Return a line with a capital letter and a full stop; "" stays ""."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def comparison_table(
    groups: Sequence[RunGroup], width: int = 0, view: TableView = USUAL_VIEW
) -> str:
    """Return the comparison as text: a row for each run, or each setting if it has several seeds.

    Options that all runs share are above the table. Lines below explain its marks.
    width: the longest line of the table, as in `format_table`; 0 means no limit. Columns that do
    not fit are printed below.
    """
    runs = [run for group in groups for run in group.runs]
    has_seeds = len(groups) < len(runs)
    run_columns = _columns(runs, 2, view)
    if has_seeds:
        columns = result_columns(groups, 2, view)
    else:
        columns = [replace(run_columns[0], texts=[group.label for group in groups])]
        columns += run_columns[1:]

    above = []
    left_out = set()
    if len(runs) > 1:
        shared = [c for c in run_columns if c.title in GROUPS and len(set(c.texts)) == 1]
        if shared:
            above.append(" · ".join(f"{column.title} {column.texts[0]}" for column in shared))
        left_out |= {column.title for column in shared}
    left_out |= {c.title for c in columns if c.scores and set(c.texts) == {MISSING}}
    shown = [column for column in columns if column.title not in left_out]

    below = []
    if any(column.best() for column in shown):
        spread = "the seeds" if has_seeds else "the last ten rounds"
        if view.bold == "clear":
            below.append(f"* best of its column; of accuracies, {BEST_RULE} over {spread}")
        else:
            below.append(f"* best of its column, {BOLD_RULES[view.bold]}")
    if any(column.is_tested for column in shown):
        below.append(MARK_RULE)
    scores = describe_scores(runs)
    if scores:
        below.append(scores)
    has_deviation = any(c.key == "last10_mean" and "±" in "".join(c.texts) for c in shown)
    if has_seeds:
        below.append("mean ± sample standard deviation over the seeds; --csv prints every run")
    elif has_deviation:
        below.append("last 10: mean ± deviation over these rounds")
    return "\n".join([*above, format_table(shown, width), *below])


# --- runs of several seeds ------------------------------------------------------------------------
@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seeds: one setting of a study.

    label: the name of the setting in tables and figures.
    runs: the runs, at least one.
    """

    label: str
    runs: Sequence[Run]


def group_by_setting(runs: Sequence[Run]) -> list[RunGroup]:
    """Group runs that differ only in their seeds; return the groups in the order of a report.

    A run's score is the mean over its five best rounds. A group's score is the mean over its runs.
    Better groups come first. But all groups with the same data and partition directly follow the
    best of them.

    Finished and unfinished runs are in different groups. So are two runs with the same settings and
    the same seed.
    """
    groups: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: _rank([run])):
        for group in groups:
            if _belongs(run, group):
                group.append(run)
                break
        else:
            groups.append([run])
    groups = [sorted(group, key=lambda run: (len(_seed(run)), _seed(run))) for group in groups]
    groups = _neighbours_by_data(sorted(groups, key=_rank))
    firsts = [group[0] for group in groups]
    names = run_labels(firsts) if len(groups) == len(runs) else _setting_labels(firsts)
    return [RunGroup(name, group) for name, group in zip(names, groups, strict=True)]


def _neighbours_by_data(groups: Sequence[list[Run]]) -> list[list[Run]]:
    """Order groups so that those with the same data and partition follow each other."""
    by_data: dict[str, list[list[Run]]] = {}
    for group in groups:
        by_data.setdefault(str(_data_settings(group[0])), []).append(group)
    return list(itertools.chain.from_iterable(by_data.values()))


def _belongs(run: Run, group: Sequence[Run]) -> bool:
    first = group[0]
    has_same_setting = _setting(first) == _setting(run) and first.finished == run.finished
    return has_same_setting and _seed(run) not in map(_seed, group)


def _setting(run: Run) -> dict[str, str]:
    setting = {**flat_settings(run.config), **chosen_options(run.config)}
    setting.pop("seed", None)
    return setting


def _seed(run: Run) -> str:
    return str(run.config.get("seed"))


def _setting_labels(firsts: Sequence[Run]) -> list[str]:
    """Return a label for each setting: its methods, or all values that differ between settings.

    Methods are enough if no two settings have the same methods.
    firsts: the first run of each setting.
    """
    settings = [_setting(run) for run in firsts]
    places = [settings.index(setting) for setting in settings]
    distinct = [firsts[place] for place in dict.fromkeys(places)]
    names = [chosen_option(run.config, "method") for run in distinct]
    if len(set(names)) < len(names):
        unnamed = []
        for run in distinct:
            config = {key: value for key, value in run.config.items() if key != "seed"}
            unnamed.append(replace(run, name="", finished=True, config=config))
        names = run_labels(unnamed)
    name_at = dict(zip(dict.fromkeys(places), names, strict=True))
    labels = []
    for place, run in zip(places, firsts, strict=True):
        labels.append(f"{name_at[place]}{'' if run.finished else UNFINISHED}")
    return labels if len(set(labels)) == len(labels) else run_labels(firsts)


def arrange_groups(
    groups: Sequence[RunGroup], labels: Mapping[str, str], order: Sequence[str]
) -> list[RunGroup]:
    """Return groups of runs with new labels and in a new order.

    labels: new labels by old label; other groups keep their labels.
    order: labels, old or new, in the wanted order. Each group that is not listed follows the last
    group with the same data and partition, or comes at the end.
    Raises `ValueError` if `labels` or `order` has a label that no group has.
    """
    known = [group.label for group in groups]
    for name in labels:
        if name not in known:
            raise ValueError(f"--labels {name}: there is no such setting; {suggest(name, known)}.")
    renamed = [replace(group, label=labels.get(group.label, group.label)) for group in groups]
    positions = {group.label: index for index, group in enumerate(groups)}
    positions |= {group.label: index for index, group in enumerate(renamed)}
    chosen = []
    for name in order:
        if name not in positions:
            advice = suggest(name, positions)
            raise ValueError(f"--order {name}: there is no such setting; {advice}.")
        chosen.append(positions[name])
    data = [_data_settings(group.runs[0]) for group in groups]
    places = list(dict.fromkeys(chosen))
    for place in range(len(groups)):
        if place in chosen:
            continue
        neighbours = [
            position for position, other in enumerate(places) if data[other] == data[place]
        ]
        position = neighbours[-1] + 1 if neighbours else len(places)
        places.insert(position, place)
    return [renamed[place] for place in places]


def result_columns(
    groups: Sequence[RunGroup], limit: int = 4, view: TableView = USUAL_VIEW
) -> list[Column]:
    """Return the columns of the table of results, with a row for each group.

    Numbers are mean ± sample standard deviation over seeds. If a column has a best score, paired
    t-tests compare each group with a reference: the first group with the same data and partition.

    limit: the largest number of columns about target scores. The highest target scores that a run
    reached get a column. With `view.columns`, the limit has no effect.
    """
    runs = [run for group in groups for run in group.runs]
    columns = [Column("", [group.label for group in groups], key="setting")]
    has_seeds = len(runs) > len(groups)
    if has_seeds and (not view.columns or "seeds" in view.columns):
        counts = [len(group.runs) for group in groups]
        texts = [str(count) for count in counts]
        columns.append(Column("seeds", texts, list(counts), key="seeds"))
    for run_column in _columns(runs, limit, view)[1:]:
        if finite_values(run_column.scores):
            columns.append(_over_seeds(run_column, groups))
        elif not run_column.scores and not has_seeds and len(set(run_column.texts)) > 1:
            columns.append(run_column)  # the names of folders do not say what was run
    return columns


def _over_seeds(column: Column, groups: Sequence[RunGroup]) -> Column:
    """Return a column with a row for each group, from a column with a row for each run.

    A row shows the mean of the group's runs and, except in the column "rounds", the deviation.
    groups: the groups of runs, in the order of the rows of `column`.
    """
    numbers = iter(column.scores)
    data = iter(column.groups or [])
    by_seed: list[dict[str, float | None]] = []
    blocks: list[object] = []
    for group in groups:
        by_seed.append({_seed(run): next(numbers) for run in group.runs})
        data_of_group = [next(data) for _ in group.runs]
        blocks.append(data_of_group[0])
    means = []
    deviations = []
    for scores in by_seed:
        mean, deviation = mean_deviation(finite_values(scores.values()))
        means.append(mean)
        deviations.append(deviation)
    show = in_common_unit(column.show or format_score, means)
    texts = []
    incomplete = set()
    for row, scores in enumerate(by_seed):
        deviation = deviations[row] if column.title != "rounds" else None
        text = format_mean(means[row], deviation, show)
        count = len(finite_values(scores.values()))
        is_part = 0 < count < len(scores)
        if is_part:  # without the seeds that never reach a score, the mean is too good
            incomplete.add(row)
        texts.append(f"{text} ({count} of {len(scores)})" if is_part else text)
    has_seeds = any(len(group.runs) > 1 for group in groups)
    return replace(
        column,
        texts=texts,
        scores=means,
        deviations=deviations if has_seeds else column.deviations,
        groups=blocks,
        incomplete=incomplete,
        tests=_compare_with_first(by_seed, blocks) if column.better else (),
    )


def _compare_with_first(
    by_seed: Sequence[Mapping[str, float | None]], blocks: Sequence[object]
) -> list[Difference | None]:
    """Test the scores of each row of a table against those of the first row with the same data.

    A pair is the two rows' scores for the same seed. Return None for the first row itself, and for
    a row without any pair. Holm's correction counts all tests of the table.

    by_seed: for each row, the score of each seed, or None.
    blocks: a value for each row, equal for rows with the same data.
    """
    tests: list[Difference | None] = []
    for row, (scores, block) in enumerate(zip(by_seed, blocks, strict=True)):
        reference = by_seed[blocks.index(block)]
        pairs = []
        for seed, value in scores.items():
            other = reference.get(seed)
            if value is not None and other is not None:
                pairs.append((value, other))
        is_reference = blocks.index(block) == row
        if is_reference or not pairs:
            tests.append(None)
        else:
            left, right = zip(*pairs, strict=True)
            tests.append(compare_pairs(left, right))
    corrected = holm_correction([None if test is None else test.p for test in tests])
    return [
        None if test is None else replace(test, holm=p)
        for test, p in zip(tests, corrected, strict=True)
    ]


def describe_tests(columns: Sequence[Column], groups: Sequence[RunGroup]) -> str:
    """Explain in one line a table's marks for significant differences, or why there are none.

    Return "" if there is only one setting. Also return "" if some setting has enough seeds, but no
    test was made.
    """
    if any(column.is_tested for column in columns):
        return MARK_RULE
    if len(groups) > 1 and max(len(group.runs) for group in groups) < MIN_PAIRS:
        return f"no significance is marked: a test needs {MIN_PAIRS} seeds of each setting"
    return ""


def difference_rows(
    columns: Sequence[Column], groups: Sequence[RunGroup]
) -> list[dict[str, object]]:
    """Return a row for each comparison of a setting with the first setting on the same data.

    A row has the metric, the labels of both settings, and all fields of a `Difference`.
    """
    rows: list[dict[str, object]] = []
    for tested in columns:
        blocks = list(tested.groups or [])
        for row, test in enumerate(tested.tests):
            if test is None:
                continue
            first = blocks.index(blocks[row])
            rows.append(
                {
                    "metric": tested.key,
                    "compared": groups[row].label,
                    "reference": groups[first].label,
                    **asdict(test),
                }
            )
    return rows


# --- the costs of a score -------------------------------------------------------------------------
def threshold_columns(
    groups: Sequence[RunGroup], view: TableView = USUAL_VIEW, limit: int = 4
) -> list[Column]:
    """Return a table's columns with the costs of reaching target scores; [] if none was reached.

    There is a row for each pair of a target score and a group. The costs are rounds, bytes, times,
    and the fleet's energy, money and CO2, until the score is reached. Each cost is a mean ± sample
    standard deviation over the seeds that reach the score.

    view: `view.thresholds` are the target scores. () takes the highest target scores that a run
    reached, from `rounds_to` in the summaries.
    limit: the most target scores to take from `rounds_to`.
    """
    runs = [run for group in groups for run in group.runs]
    factor = share_factor(runs, view.percent)
    thresholds = view.thresholds or _reached_thresholds(runs)[-limit:]
    names: list[str] = []
    labels: list[str] = []
    blocks: list[object] = []  # only settings with the same data are compared
    reached: list[list[Row]] = []
    totals: list[int] = []
    for threshold in thresholds:
        for group in groups:
            first_rows = [_first_row(run, threshold) for run in group.runs]
            shown = threshold_name(threshold) if factor == 1.0 else f"{factor * threshold:g}"
            names.append(shown)
            labels.append(group.label)
            blocks.append((shown, str(_data_settings(group.runs[0]))))
            reached.append([row for row in first_rows if row is not None])
            totals.append(len(first_rows))
    if not any(reached):
        return []
    counts = [f"{len(rows)} of {total}" for rows, total in zip(reached, totals, strict=True)]
    columns = [
        Column("score" + (PERCENT if factor != 1.0 else ""), names, key="score"),
        Column("", labels, key="setting"),
        Column("reached", counts, [float(len(rows)) for rows in reached], key="reached"),
    ]
    # Without the seeds that never reach the score, a mean is too low to be the best.
    incomplete = set()
    for place, (rows, total) in enumerate(zip(reached, totals, strict=True)):
        if len(rows) < total:
            incomplete.add(place)
    for title, key, read, show, better in COSTS:
        means: list[float | None] = []
        spreads: list[float | None] = []
        for rows in reached:
            mean, deviation = mean_deviation(finite_values([read(row) for row in rows]))
            means.append(mean)
            spreads.append(deviation)
        if not any(means):  # ideal devices take no virtual time
            continue
        show = in_common_unit(show, means)
        texts = []
        for mean, deviation in zip(means, spreads, strict=True):
            texts.append(format_mean(mean, deviation, show))
        deviations = []
        for place, deviation in enumerate(spreads):
            deviations.append(None if place in incomplete else deviation)
        has_seeds = max(totals) > 1
        columns.append(
            Column(
                title,
                texts,
                means,
                better,
                deviations if has_seeds else None,
                blocks,
                show,
                key,
                bold=view.bold,
                incomplete=incomplete,
            )
        )
    return columns


def _reached_thresholds(runs: Sequence[Run]) -> list[float]:
    """Return the thresholds that runs reached (`rounds_to` in summaries), ascending."""
    reached = set()
    for run in runs:
        for name, number in as_mapping(run.summary.get("rounds_to")).items():
            if number is not None:
                reached.add(float(name))
    return sorted(reached)


def _first_row(run: Run, threshold: float) -> Row | None:
    """Return the first row of a run's history whose score reaches a threshold, or None.

    Scores on the clients' test sets are used; if there are none, those on the central test set.
    """
    metric, lower = metric_of(run.rows), lower_metrics(run.config)
    has_client_scores = bool(finite_values(column(run.rows, metric)))
    key = metric if has_client_scores else f"{metric}_global"
    for row in run.rows:
        value = row.get(key)
        if value is None:
            continue
        if value <= threshold if metric in lower else value >= threshold:
            return row
    return None


def _sent_bytes(row: Row) -> float:
    floats = finite_values([row.get("floats_down"), row.get("floats_up")])
    return FLOAT_BYTES * sum(floats)


# Title, key, value in a row, format and direction of each cost.
COSTS: tuple[tuple[str, str, Callable[[Row], float | None], FormatNumber, int], ...] = (
    ("rounds", "rounds", lambda row: row["round"], format_rounds, -1),
    ("traffic", "bytes", _sent_bytes, format_bytes, -1),
    ("virtual", "virtual_seconds", lambda row: row.get("virtual_seconds"), format_seconds, -1),
    # Wall time depends on the machine and on what else ran there.
    ("wall", "wall_seconds", lambda row: row.get("wall_seconds"), format_seconds, 0),
    ("energy", "energy_wh", lambda row: row.get("energy_wh"), format_watt_hours, -1),
    ("money", "money", lambda row: row.get("money"), format_count, -1),
    ("CO2", "co2_g", lambda row: row.get("co2_g"), format_grams, -1),
)


# --- every number ---------------------------------------------------------------------------------
def as_csv(groups: Sequence[RunGroup]) -> str:
    """Return CSV: a line for each run, and a column for each number of the summaries."""
    return to_csv(run_rows(groups)).removesuffix("\n")


def run_rows(groups: Sequence[RunGroup]) -> list[Mapping[str, object]]:
    """Return a row for each run: its setting, seed, options, and all numbers of its summary."""
    rows: list[Mapping[str, object]] = []
    for group in groups:
        for run in group.runs:
            options = {name: chosen_option(run.config, name) for name in GROUPS}
            names = {"setting": group.label, "run": run.name, "seed": _seed(run)}
            rows.append({**names, **options, **_flat_numbers(run.summary)})
    return rows


def _flat_numbers(summary: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the numbers of a nested summary; a key joins the names of all levels by dots.

    The entries "identity" and "choices" are left out, because they are no results.
    prefix: the beginning of all keys.
    """
    flat: dict[str, object] = {}
    for key, value in summary.items():
        if key in ("identity", "choices"):
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(value, Mapping):
            flat.update(_flat_numbers(value, f"{prefix}{key}."))
        elif value is None or is_number:
            flat[f"{prefix}{key}"] = value
    return flat
