"""Read runs from their folders and compare them in a table: as text, LaTeX or CSV."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raysim.primitives.checks import finite_values
from raysim.primitives.files import conf_folder, parse_json
from raysim.primitives.kinds import LOWER_IS_BETTER
from raysim.results.history import column, metric_of, read_history, summarise
from raysim.results.significance import mean_deviation
from raysim.results.tables import BEST_RULE, MISSING, Column, FormatNumber, format_table, to_csv
from raysim.results.theme import time_unit

UNFINISHED = " (unfinished)"
CLIENT_TESTS, CENTRAL_TEST = "on the clients' own tests (mean)", "on the central test set"
GROUPS = ("method", "data", "partition")  # configuration groups that the table shows
RUN_FILES = ("config.yaml", "history.parquet")  # files of a run that can be shown
# Keys that do not distinguish the runs of a study.
UNTOLD_KEYS = ("_target_", "out", "resume", "choices", "tracking", "hydra")


@dataclass(frozen=True)
class Run:
    """A run as its folder describes it."""

    name: str
    config: dict[str, object]
    rows: list[dict[str, int | float | None]]
    summary: dict[str, object]
    folder: Path = Path()
    finished: bool = True


# --- reading --------------------------------------------------------------------------------------
def load_run(folder: Path) -> Run:
    """Read a run's folder; the summary of an unfinished run is computed from its history.

    Raises `ValueError` if the folder is no run or one of its files is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one that `raysim run out=DIR` wrote.")
    missing = [name for name in RUN_FILES if not (folder / name).is_file()]
    if missing:
        inside = sorted(path.parent.name for path in folder.glob("*/history.parquet"))
        hint = "give one that `raysim run out=DIR` wrote."
        if inside:
            hint = f"did you mean {folder / inside[0]}?"
        raise ValueError(
            f"{folder} is no folder of a run, it has no {' and no '.join(missing)}; {hint}"
        )
    rows = read_history(folder / "history.parquet")
    if not rows:
        raise ValueError(
            f"{folder} has a history without a round; wait until the run has made one."
        )
    finished = (folder / "summary.json").is_file()
    summary = _read_mapping(folder / "summary.json", parse_json) if finished else summarise(rows)
    config = _read_mapping(folder / "config.yaml", _parse_yaml)
    return Run(folder.resolve().name, config, rows, summary, folder, finished)


def load_runs(paths: Sequence[str | Path], warn: Callable[[str], object]) -> list[Run]:
    """Read the runs at these paths; skip files and folders that no run wrote.

    warn: function that gets one sentence about skipped folders. Raises `ValueError` if there is no
    run.
    """
    from raysim.results.tracking import ARTIFACTS

    paths_found = [path for name in paths for path in find_runs(Path(name))]
    runs = []
    skipped = []
    for path in paths_found:
        if path.is_file():
            continue
        is_run = not path.is_dir() or all((path / name).is_file() for name in RUN_FILES)
        if is_run:
            runs.append(path)
        elif path.name != ARTIFACTS:
            skipped.append(str(path))
    # Without any run, the first path is read for its error, which says what is missing.
    loaded = [load_run(path) for path in runs or paths_found]
    if runs and skipped:
        warn(f"skipped, because no run wrote there: {', '.join(skipped)}")
    return loaded


def find_runs(folder: Path) -> list[Path]:
    """Return the runs of a study or a sweep; [folder] for any other folder."""
    histories = folder.glob("runs/*/history.parquet")
    return sorted(path.parent for path in histories) or [folder]


def _parse_yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except Exception as error:  # the YAML reader raises errors of many kinds
        raise ValueError(str(error)) from error


def _read_mapping(path: Path, parse: Callable[[str], object]) -> dict[str, object]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is broken and cannot be read; restore it or run the study again."
        ) from error
    mapping = _as_mapping(content)
    if not mapping:
        raise ValueError(f"{path} holds no names and values; restore it or run the study again.")
    return dict(mapping)


def _as_mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


# --- names ----------------------------------------------------------------------------------------
def chosen_option(config: Mapping[str, object], group: str) -> str:
    """Return the option of a group from `choices`, or from the group itself."""
    value = _as_mapping(config.get("choices")).get(group)
    if value is None:
        value = config.get(group)
    if isinstance(value, Mapping):
        class_name = str(value.get("_target_", "")).rpartition(".")[2]
        value = value.get("name") or class_name or list(value)
    if isinstance(value, (list, tuple)):
        value = " + ".join(str(item) for item in value)
    if value:
        return str(value)
    return "fedavg" if group == "method" else MISSING


def flat_settings(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Return every value of a config by its dotted key, without `UNTOLD_KEYS`."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if key in UNTOLD_KEYS:
            continue
        if isinstance(value, Mapping):
            flat.update(flat_settings(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def _chosen_options(config: Mapping[str, object]) -> dict[str, str]:
    """Return the options that distinguish settings.

    A loss counts unless it is the usual one: it may have no key of its own.
    """
    has_own_loss = chosen_option(config, "loss") not in (MISSING, "usual")
    groups = (*GROUPS, "loss") if has_own_loss else GROUPS
    return {group: chosen_option(config, group) for group in groups}


def differing_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Map each key whose values differ to the values of all runs; chosen options come first."""
    settings = [{**_chosen_options(run.config), **flat_settings(run.config)} for run in runs]
    keys = dict.fromkeys(key for run_settings in settings for key in run_settings)
    differing = {}
    for key in keys:
        values = [run_settings.get(key, MISSING) for run_settings in settings]
        if len(set(values)) > 1:
            differing[key] = values
    return differing


def distinguishing_settings(runs: Sequence[Run]) -> tuple[dict[str, list[str]], int]:
    """Return the differing settings without implied defaults, and the number of keys left out.

    If only runs with another option have a key, and all of them have its default, the key is left
    out: the option itself is listed. Values of methods are always listed.
    """
    differing = differing_settings(runs)
    shown = {}
    for key, values in differing.items():
        if not _is_implied_default(runs, key, values, differing):
            shown[key] = values
    return shown, len(differing) - len(shown)


def _is_implied_default(
    runs: Sequence[Run], key: str, values: Sequence[str], differing: Mapping[str, object]
) -> bool:
    group, _, inside = key.partition(".")
    is_option_listed = bool({group, f"{group}.name"} & differing.keys())
    if MISSING not in values or not inside or group == "method" or not is_option_listed:
        return False
    for run, value in zip(runs, values, strict=True):
        defaults = _defaults(group, chosen_option(run.config, group))
        if value != MISSING and defaults.get(inside) != value:
            return False
    return True


def _defaults(group: str, option: str) -> dict[str, str]:
    """Return the values in the file of one of raysim's options; {} for any other option."""
    path = conf_folder() / group / f"{option}.yaml"
    if not re.fullmatch(r"\w+", option) or not path.is_file():
        return {}
    return flat_settings(_as_mapping(_parse_yaml(path.read_text(encoding="utf-8"))))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run.

    Equal names are replaced by the settings that differ, or else by the folder.
    """
    names = [run.name for run in runs]
    for name in {name for name in names if names.count(name) > 1}:
        twins = [index for index, other in enumerate(names) if other == name]
        differing = differing_settings([runs[index] for index in twins])
        # A key that only some have follows from an option that is named already, so it is needed
        # only if nothing else differs.
        shared = {key: values for key, values in differing.items() if MISSING not in values}
        settings = shared or differing
        for place, index in enumerate(twins):
            texts = []
            for key, values in settings.items():
                if values[place] != MISSING:
                    texts.append(f"{key}={values[place]}")
            names[index] = ", ".join(texts) or name

    labels = []
    for name, run in zip(names, runs, strict=True):
        label = f"{name} ({run.folder})" if names.count(name) > 1 else name
        labels.append(label if run.finished else f"{label}{UNFINISHED}")
    return labels


# --- the table ------------------------------------------------------------------------------------
def _best_first(runs: Sequence[Run]) -> list[Run]:
    def key(run: Run) -> float:
        score = _number(run, "best5_mean")
        if score is None:
            return math.inf
        return score if metric_of(run.rows) in LOWER_IS_BETTER else -score

    return sorted(runs, key=key)


def _number(run: Run, key: str) -> float | None:
    value = run.summary.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _format_score(value: float | None, *, like: float | None = None) -> str:
    return MISSING if value is None else f"{value:.4f}"


def _format_count(value: float | None, *, like: float | None = None) -> str:
    """Return 1234567 as "1.23 M"."""
    if value is None:
        return MISSING
    size = abs(value if like is None else like)
    step = min(4, int(math.log10(size) // 3)) if size >= 1000 else 0
    prefix = ("", "k", "M", "G", "T")[step]
    return f"{_format_digits(value, like, 1000**step)} {prefix}".strip()


def _format_rounds(value: float | None, *, like: float | None = None) -> str:
    """Return a whole number without decimals, or a mean with one decimal."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if like is None and value == int(value) else f"{value:.1f}"


def _format_seconds(value: float | None, *, like: float | None = None) -> str:
    if value is None:
        return MISSING
    size, unit = time_unit(value if like is None else like)
    return f"{_format_digits(value, like, size)} {unit}"


def _format_digits(value: float, like: float | None, size: float) -> str:
    """Return a number in units of `size` with three digits, or with the decimals of `like`."""
    if like is None:
        return f"{value / size:.3g}"
    decimals = 0
    if like:
        decimals = max(0, 2 - math.floor(math.log10(abs(like / size))))
    return f"{value / size:.{decimals}f}"


def format_mean(mean: float | None, deviation: float | None, show: FormatNumber) -> str:
    """Return "mean ± deviation", or the mean alone if there is no deviation."""
    if deviation is None:
        return show(mean)
    return f"{show(mean, like=mean)} ± {show(deviation, like=mean)}"


def _column(
    title: str,
    scores: Sequence[float | None],
    show: FormatNumber,
    better: int = 0,
    deviations: Sequence[float | None] | None = None,
) -> Column:
    texts = [show(score) for score in scores]
    return Column(title, texts, list(scores), better, deviations, show=show)


def _threshold_columns(runs: Sequence[Run], limit: int, better: int) -> list[Column]:
    """Return the first round at the `limit` highest thresholds that any run reached."""
    rounds_by_run = [_as_mapping(run.summary.get("rounds_to")) for run in runs]
    reached = set()
    for rounds in rounds_by_run:
        reached |= {str(name) for name, number in rounds.items() if number is not None}
    columns = []
    for name in sorted(reached, key=float)[-limit:]:
        scores = []
        for rounds in rounds_by_run:
            number = rounds.get(name)
            scores.append(None if number is None else float(str(number)))
        columns.append(_column(f"to {name}", scores, _format_rounds, better))
    return columns


def _columns(runs: Sequence[Run], limit: int) -> list[Column]:
    """Return the comparison of runs, in their order. limit: the number of threshold columns."""

    def numbers(key: str) -> list[float | None]:
        return [_number(run, key) for run in runs]

    metrics = [metric_of(run.rows) for run in runs]

    def scores(suffix: str) -> list[float | None]:
        return [_number(run, f"{m}{suffix}") for run, m in zip(runs, metrics, strict=True)]

    better = 0
    if _have_same_data(runs):
        better = -1 if LOWER_IS_BETTER.issuperset(metrics) else 1
    # Costs grow with the rounds, so they are compared only after equally many.
    cheaper = -abs(better) if len(set(numbers("rounds"))) == 1 else 0

    means, deviations = numbers("last10_mean"), numbers("last10_std")
    last_ten = []
    for mean, deviation in zip(means, deviations, strict=True):
        last_ten.append(format_mean(mean, deviation, _format_score))
    client_scores, central_scores = scores(""), scores("_global")
    final = []
    for client_score, central_score in zip(client_scores, central_scores, strict=True):
        final.append(central_score if client_score is None else client_score)
    titled_scores = {"final": final, "worst": scores("_worst"), "central": central_scores}
    unseen = scores("_unseen")
    if finite_values(unseen):
        titled_scores["unseen"] = unseen
    floats = []
    for down, up in zip(numbers("floats_down"), numbers("floats_up"), strict=True):
        floats.append((down or 0.0) + (up or 0.0))

    columns = [Column("run", run_labels(runs))]
    for group in GROUPS:
        columns.append(Column(group, [chosen_option(run.config, group) for run in runs]))
    rounds = [number or 0.0 for number in numbers("rounds")]
    columns += [
        _column("rounds", rounds, _format_rounds),
        _column("best 5", numbers("best5_mean"), _format_score, better, deviations),
        Column("last 10", last_ten, means, better, deviations),
    ]
    for title, values in titled_scores.items():
        columns.append(
            replace(_column(title, values, _format_score, better, deviations), show=None)
        )
    columns += _threshold_columns(runs, limit, -abs(better))
    columns += [
        _column("floats", floats, _format_count, cheaper),
        _column("virtual", numbers("virtual_seconds"), _format_seconds, cheaper),
        # Wall time depends on the machine and on what else ran there.
        _column("wall", numbers("wall_seconds"), _format_seconds),
    ]
    return columns


def _have_same_data(runs: Sequence[Run]) -> bool:
    """Return True if clients of all runs have the same data, so that one run can be the best."""
    return len({str(_data_settings(run)) for run in runs}) == 1


def _data_settings(run: Run) -> dict[str, str]:
    """Return the settings that decide which samples clients have and which clients are trained."""
    config = {key: run.config.get(key) for key in ("data", "partition")}
    # Older runs have no such key.
    config["unseen"] = _as_mapping(run.config.get("evaluate")).get("unseen") or 0
    return flat_settings(config)


def score_kinds(runs: Sequence[Run]) -> dict[str, bool]:
    """Map "metric on tests" of the scores to whether some runs have central scores as well."""
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
    """Return a line that explains the scores of a table; "" without scores."""
    kinds = score_kinds(runs)
    if not kinds:
        return ""
    central = f"; central: {CENTRAL_TEST}" if any(kinds.values()) else ""
    return f"scores: {' or '.join(kinds)}{central}"


def as_sentence(text: str) -> str:
    """Return a line with a capital letter and a full stop; "" stays empty."""
    return f"{text[0].upper()}{text[1:]}." if text else ""


def comparison_table(runs: Sequence[Run], width: int = 0) -> str:
    """Return the comparison as text, best first.

    It has a row for each run, or for each setting if some runs differ only in their seeds. Options
    that all share stand above it, the meaning of stars and deviations below. width: see
    `format_table`.
    """
    groups = group_by_setting(runs)
    has_seeds = len(groups) < len(runs)
    run_columns = _columns(_best_first(runs), limit=2)
    columns = result_columns(groups, limit=2) if has_seeds else run_columns

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
        below.append(f"* best of its column; of accuracies, {BEST_RULE} over {spread}")
    scores = describe_scores(runs)
    if scores:
        below.append(scores)
    has_deviation = any(c.title == "last 10" and "±" in "".join(c.texts) for c in shown)
    if has_seeds:
        below.append("mean ± sample deviation over the seeds; --csv prints every run")
    elif has_deviation:
        below.append("last 10: mean ± deviation over these rounds")
    return "\n".join([*above, format_table(shown, width), *below])


# --- runs of several seeds ------------------------------------------------------------------------
@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seeds: one setting of a study."""

    label: str
    runs: Sequence[Run]


def group_by_setting(runs: Sequence[Run]) -> list[RunGroup]:
    """Return the settings of runs, the best first.

    Unfinished runs and a second run with the same seed are separate groups.
    """
    groups: list[list[Run]] = []
    for run in _best_first(runs):
        for group in groups:
            if _belongs(run, group):
                group.append(run)
                break
        else:
            groups.append([run])
    groups = [sorted(group, key=lambda run: (len(_seed(run)), _seed(run))) for group in groups]
    firsts = [group[0] for group in groups]
    names = run_labels(firsts) if len(groups) == len(runs) else _setting_labels(firsts)
    return [RunGroup(name, group) for name, group in zip(names, groups, strict=True)]


def _belongs(run: Run, group: Sequence[Run]) -> bool:
    first = group[0]
    has_same_setting = _setting(first) == _setting(run) and first.finished == run.finished
    return has_same_setting and _seed(run) not in map(_seed, group)


def _setting(run: Run) -> dict[str, str]:
    setting = {**flat_settings(run.config), **_chosen_options(run.config)}
    setting.pop("seed", None)
    return setting


def _seed(run: Run) -> str:
    return str(run.config.get("seed"))


def _setting_labels(firsts: Sequence[Run]) -> list[str]:
    """Return a name for each setting: its methods, or else all settings that differ."""
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


def result_columns(groups: Sequence[RunGroup], limit: int = 4) -> list[Column]:
    """Return a row for each group, with mean ± sample deviation (divisor n-1) over its seeds.

    limit: number of threshold columns.
    """
    runs = [run for group in groups for run in group.runs]
    spans: list[range] = []
    for group in groups:
        start = spans[-1].stop if spans else 0
        spans.append(range(start, start + len(group.runs)))
    columns = [Column("", [group.label for group in groups])]
    has_seeds = len(runs) > len(groups)
    if has_seeds:
        counts = [len(group.runs) for group in groups]
        columns.append(Column("seeds", [str(count) for count in counts], list(counts)))
    for run_column in _columns(runs, limit)[1:]:
        if finite_values(run_column.scores):
            columns.append(_over_seeds(run_column, spans))
        elif not run_column.scores and not has_seeds and len(set(run_column.texts)) > 1:
            columns.append(run_column)  # the names of folders do not say what was run
    return columns


def _over_seeds(column: Column, spans: Sequence[range]) -> Column:
    """Return a column with one row for each span of rows."""
    show = column.show or _format_score
    texts = []
    means = []
    deviations = []
    for span in spans:
        values = finite_values([column.scores[index] for index in span])
        mean, deviation = mean_deviation(values)
        means.append(mean)
        deviations.append(deviation)
        text = format_mean(mean, deviation if column.title != "rounds" else None, show)
        is_part = 0 < len(values) < len(span)
        texts.append(f"{text} ({len(values)} of {len(span)})" if is_part else text)
    has_seeds = any(len(span) > 1 for span in spans)
    return replace(
        column,
        texts=texts,
        scores=means,
        deviations=deviations if has_seeds else column.deviations,
    )


# --- every number ---------------------------------------------------------------------------------
def as_csv(groups: Sequence[RunGroup]) -> str:
    """Return a line for each run with every number of its summary, by the summary's keys."""
    rows: list[Mapping[str, object]] = []
    for group in groups:
        for run in group.runs:
            options = {name: chosen_option(run.config, name) for name in GROUPS}
            names = {"setting": group.label, "run": run.name, "seed": _seed(run)}
            rows.append({**names, **options, **_flat_numbers(run.summary)})
    return to_csv(rows).removesuffix("\n")


def _flat_numbers(summary: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return the numbers of a summary by dotted keys, without the description of the run."""
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
