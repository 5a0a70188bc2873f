"""Runs are read from their folders, told apart, and compared in a table: as text, LaTeX or CSV."""

from __future__ import annotations

import itertools
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
GROUPS = ("method", "data", "partition")  # what the table says of a configuration
RUN_FILES = ("config.yaml", "history.parquet")  # of a run that can be shown
UNTOLD_KEYS = (
    "_target_",
    "out",
    "resume",
    "choices",
    "tracking",
    "hydra",
)  # differences that tell nothing about a study


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it."""

    name: str
    config: dict[str, object]
    rows: list[dict[str, int | float | None]]
    summary: dict[str, object]
    folder: Path = Path()
    finished: bool = True


# ---------------------------------------------------------------- reading


def load_run(folder: Path) -> Run:
    """Read a run's folder; one that is still going, or was stopped, has no summary.json and is summed up here.

    Raises `ValueError` with one sentence where the folder is no run or one of its files is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name one that `raysim run out=DIR` wrote.")
    missing = [name for name in RUN_FILES if not (folder / name).is_file()]
    if missing:
        inside = sorted(path.parent.name for path in folder.glob("*/history.parquet"))
        hint = (
            f"did you mean {folder / inside[0]}?"
            if inside
            else "name one that `raysim run out=DIR` wrote."
        )
        raise ValueError(
            f"{folder} is no folder of a run, it has no {' and no '.join(missing)}; {hint}"
        )
    rows = read_history(folder / "history.parquet")
    if not rows:
        raise ValueError(
            f"{folder} has a history without a round; let the run get further and ask again."
        )
    finished = (folder / "summary.json").is_file()
    summary = _read(folder / "summary.json", parse_json) if finished else summarise(rows)
    return Run(
        folder.resolve().name, _read(folder / "config.yaml", _yaml), rows, summary, folder, finished
    )


def load_runs(paths: Sequence[str | Path], warn: Callable[[str], object]) -> list[Run]:
    """Read the runs that the paths name, without the other files and folders that `runs/*` matches.

    `warn` gets one sentence about folders that no run wrote. Raises `ValueError` where no path is a run.
    """
    from raysim.results.tracking import ARTIFACTS

    found = [path for name in paths for path in find_runs(Path(name))]
    files = [path for path in found if path.is_file()]
    others = [
        path
        for path in found
        if path.is_dir() and not all((path / name).is_file() for name in RUN_FILES)
    ]
    runs = [path for path in found if path not in (*files, *others)]
    loaded = [load_run(path) for path in runs or found]  # an error names the first of them
    unknown = [str(path) for path in others if path.name != ARTIFACTS]
    if runs and unknown:
        warn(f"passed over, as no run has written there: {', '.join(unknown)}")
    return loaded


def find_runs(folder: Path) -> list[Path]:
    """Return the runs of a study or a sweep, by its folder; any other path alone."""
    return sorted(path.parent for path in folder.glob("runs/*/history.parquet")) or [folder]


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
        raise ValueError(
            f"{path} is broken and cannot be read; restore it or run the study again."
        ) from problem
    mapping = _mapping(content)
    if not mapping:
        raise ValueError(f"{path} holds no names and values; restore it or run the study again.")
    return dict(mapping)


# ---------------------------------------------------------------- names


def chosen_option(config: Mapping[str, object], group: str) -> str:
    """The option that was chosen in a group: from `choices` where the config has it, else from the group itself."""
    choices = config.get("choices")
    value = choices.get(group) if isinstance(choices, Mapping) else None
    value = config.get(group) if value is None else value
    if isinstance(value, Mapping):
        value = (
            value.get("name") or str(value.get("_target_", "")).rpartition(".")[2] or list(value)
        )
    if isinstance(value, (list, tuple)):
        value = " + ".join(str(item) for item in value)
    return str(value) if value else ("fedavg" if group == "method" else MISSING)


def flat_settings(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Every value of a config by its dotted key, without what says nothing about the study."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if key in UNTOLD_KEYS:
            continue
        if isinstance(value, Mapping):
            flat.update(flat_settings(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def _chosen(config: Mapping[str, object]) -> dict[str, str]:
    """The options that tell settings apart; a loss, which may have no key of its own, where it is not the usual one."""
    groups = GROUPS if chosen_option(config, "loss") in (MISSING, "usual") else (*GROUPS, "loss")
    return {group: chosen_option(config, group) for group in groups}


def differing_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """What differs between runs: the chosen options first, then the keys whose values are not all the same."""
    flat = [{**_chosen(run.config), **flat_settings(run.config)} for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    columns = {key: [one.get(key, MISSING) for one in flat] for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def distinguishing_settings(runs: Sequence[Run]) -> tuple[dict[str, list[str]], int]:
    """What differs, without the defaults of options that not all runs chose; and how many keys these are.

    That the options differ is listed itself, and a key that some runs do not have says no more, unless it was set. The
    values of a method stay: a study is about them.
    """
    different = differing_settings(runs)
    found = {
        key: values
        for key, values in different.items()
        if not _default_alone(runs, key, values, different)
    }
    return found, len(different) - len(found)


def _default_alone(
    runs: Sequence[Run], key: str, values: Sequence[str], different: Mapping[str, object]
) -> bool:
    """Whether a key is one that only some runs have, by an option that is listed, all of them with its default."""
    group, _, inside = key.partition(".")
    if (
        MISSING not in values
        or not inside
        or group == "method"
        or not {group, f"{group}.name"} & different.keys()
    ):
        return False
    having = [(run, value) for run, value in zip(runs, values, strict=True) if value != MISSING]
    return all(
        _defaults(group, chosen_option(run.config, group)).get(inside) == value
        for run, value in having
    )


def _defaults(group: str, option: str) -> dict[str, str]:
    """The values that an option of raysim's own is written with; {} of any other."""
    path = conf_folder() / group / f"{option}.yaml"
    if not re.fullmatch(r"\w+", option) or not path.is_file():
        return {}
    return flat_settings(_mapping(_yaml(path.read_text(encoding="utf-8"))))


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Names of the runs; those who share one are told apart by what differs in their configs, else by their folder."""
    names = [run.name for run in runs]
    for name in {name for name in names if names.count(name) > 1}:
        twins = [index for index, other in enumerate(names) if other == name]
        different = differing_settings([runs[index] for index in twins])
        # What only some have follows from an option that is named already: needed only where nothing else differs.
        shared = {
            key: values for key, values in different.items() if MISSING not in values
        } or different
        for place, index in enumerate(twins):
            flat_settings = [
                f"{key}={values[place]}"
                for key, values in shared.items()
                if values[place] != MISSING
            ]
            names[index] = ", ".join(flat_settings) or name
    told_apart = [
        f"{name} ({run.folder})" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]
    return [
        name if run.finished else f"{name}{UNFINISHED}"
        for name, run in zip(told_apart, runs, strict=True)
    ]


# ---------------------------------------------------------------- the table


def _ordered(runs: Sequence[Run]) -> list[Run]:
    def key(run: Run) -> float:
        score = _number(run, "best5_mean")
        return (
            math.inf
            if score is None
            else score
            if metric_of(run.rows) in LOWER_IS_BETTER
            else -score
        )

    return sorted(runs, key=key)


def _number(run: Run, key: str) -> float | None:
    value = run.summary.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _score(value: float | None, *, like: float | None = None) -> str:
    return MISSING if value is None else f"{value:.4f}"


def _count(value: float | None, *, like: float | None = None) -> str:
    """1234567 as 1.23 M."""
    if value is None:
        return MISSING
    large = abs(value if like is None else like)
    step = min(4, int(math.log10(large) // 3)) if large >= 1000 else 0
    return f"{_digits(value, like, 1000**step)} {('', 'k', 'M', 'G', 'T')[step]}".strip()


def _rounds(value: float | None, *, like: float | None = None) -> str:
    """A whole number as it is, a mean with one decimal."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if like is None and value == int(value) else f"{value:.1f}"


def _seconds(value: float | None, *, like: float | None = None) -> str:
    if value is None:
        return MISSING
    size, unit = time_unit(value if like is None else like)
    return f"{_digits(value, like, size)} {unit}"


def _digits(value: float, like: float | None, size: float) -> str:
    """A number in units of `size`: its first three digits, or as many decimals as `like` has with them."""
    if like is None:
        return f"{value / size:.3g}"
    return f"{value / size:.{max(0, 2 - math.floor(math.log10(abs(like / size)))) if like else 0}f}"


def format_mean(mean: float | None, deviation: float | None, show: FormatNumber) -> str:
    """Mean ± deviation, where there is one."""
    return (
        show(mean)
        if deviation is None
        else f"{show(mean, like=mean)} ± {show(deviation, like=mean)}"
    )


def _column(
    title: str,
    runs: Sequence[Run],
    key: str,
    show: FormatNumber,
    better: int,
    deviations: Sequence[float | None] | None = None,
) -> Column:
    scores = [_number(run, key) for run in runs]
    return Column(title, [show(score) for score in scores], scores, better, deviations, show=show)


def _thresholds(runs: Sequence[Run], limit: int) -> list[Column]:
    """First round to reach a threshold: the highest `limit` thresholds that any run reached."""
    reached = [
        {str(k): v for k, v in _mapping(run.summary.get("rounds_to")).items()} for run in runs
    ]
    names = sorted(
        {name for one in reached for name, value in one.items() if value is not None}, key=float
    )
    columns = []
    for name in names[-limit:]:
        scores = [float(str(one[name])) if one.get(name) is not None else None for one in reached]
        columns.append(
            Column(f"to {name}", [_rounds(score) for score in scores], scores, -1, show=_rounds)
        )
    return columns


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _columns(runs: Sequence[Run], limit: int) -> list[Column]:
    """The comparison of runs in the order given."""
    means = [_number(run, "last10_mean") for run in runs]
    deviations = [_number(run, "last10_std") for run in runs]
    pairs = [
        format_mean(mean, deviation, _score)
        for mean, deviation in zip(means, deviations, strict=True)
    ]
    metrics = [metric_of(run.rows) for run in runs]
    better = 0 if not _alike(runs) else -1 if LOWER_IS_BETTER.issuperset(metrics) else 1
    less = better and -int(
        len({_number(run, "rounds") for run in runs}) == 1
    )  # of what grows with the rounds
    local, worst, central, unseen = ([_number(r, f"{m}{end}") for r, m in zip(runs, metrics, strict=True)]
                                     for end in ("", "_worst", "_global", "_unseen"))  # fmt: skip
    scores = {
        "final": [c if own is None else own for own, c in zip(local, central, strict=True)],
        "worst": worst,
        "central": central,
    }
    if finite_values(unseen):
        scores["unseen"] = unseen
    floats = [
        (_number(run, "floats_down") or 0.0) + (_number(run, "floats_up") or 0.0) for run in runs
    ]
    rounds = [_number(run, "rounds") or 0.0 for run in runs]
    return [
        Column("run", run_labels(runs)),
        *(Column(group, [chosen_option(run.config, group) for run in runs]) for group in GROUPS),
        Column("rounds", [_rounds(value) for value in rounds], list(rounds), show=_rounds),
        _column("best 5", runs, "best5_mean", _score, better, deviations),
        Column("last 10", pairs, means, better, deviations),
        *(
            Column(title, [_score(value) for value in values], values, better, deviations)
            for title, values in scores.items()
        ),
        *(replace(column, better=-abs(better)) for column in _thresholds(runs, limit)),
        Column("floats", [_count(value) for value in floats], list(floats), less, show=_count),
        _column("virtual", runs, "virtual_seconds", _seconds, less),
        _column("wall", runs, "wall_seconds", _seconds, 0),  # of a machine and of what else it did
    ]


def _alike(runs: Sequence[Run]) -> bool:
    """Whether the clients of all runs have the same data, so that one of the runs can be the best."""
    return len({str(_clients_data(run)) for run in runs}) == 1


def _clients_data(run: Run) -> dict[str, str]:
    """The settings that say which samples clients have, and which clients are never trained."""
    config = {key: run.config.get(key) for key in ("data", "partition")}
    config["unseen"] = (
        _mapping(run.config.get("evaluate")).get("unseen") or 0
    )  # older runs have no such key
    return flat_settings(config)


def score_kinds(runs: Sequence[Run]) -> dict[str, bool]:
    """Which metric on which tests the scores of some runs are, and whether some have central ones besides."""
    found: dict[str, bool] = {}
    for run in runs:
        metric = metric_of(run.rows)
        own, central = (
            bool(finite_values(column(run.rows, key))) for key in (metric, f"{metric}_global")
        )
        if own or central:
            kind = f"{metric} {CLIENT_TESTS if own else CENTRAL_TEST}"
            found[kind] = found.get(kind, False) or (own and central)
    return found


def describe_scores(runs: Sequence[Run]) -> str:
    """What the scores of a table are, as a line below it."""
    kinds = score_kinds(runs)
    central = f"; central: {CENTRAL_TEST}" if any(kinds.values()) else ""
    return f"scores: {' or '.join(kinds)}{central}" if kinds else ""


def as_sentence(text: str) -> str:
    """A line below a table as a sentence of a page."""
    return text and f"{text[0].upper()}{text[1:]}."


def comparison_table(runs: Sequence[Run], width: int = 0) -> str:
    """The comparison as text, best first: a row per run, or per setting where some differ in their seeds alone.

    What all share is said above it, what a star and a deviation mean below. width: as of `aligned`.
    """
    groups = group_by_setting(runs)
    of_runs = _columns(_ordered(runs), limit=2)
    several = len(groups) < len(runs)
    columns = result_columns(groups, limit=2) if several else of_runs
    shared = [c for c in of_runs if c.title in GROUPS and len(set(c.texts)) == 1 and len(runs) > 1]
    left_out = {c.title for c in shared} | {
        c.title for c in columns if c.scores and set(c.texts) == {MISSING}
    }
    shown = [c for c in columns if c.title not in left_out]
    above = [" · ".join(f"{c.title} {c.texts[0]}" for c in shared)] if shared else []
    over = "the seeds" if several else "the last ten rounds"
    below = (
        [f"* best of its column; of accuracies, {BEST_RULE} over {over}"]
        if any(c.best() for c in shown)
        else []
    )
    below += filter(None, [describe_scores(runs)])
    if several:
        below.append("mean ± sample deviation over the seeds; --csv prints every run")
    elif any(c.title == "last 10" and "±" in "".join(c.texts) for c in shown):
        below.append("last 10: mean ± deviation over these rounds")
    return "\n".join([*above, format_table(shown, width), *below])


# ---------------------------------------------------------------- runs of several seeds


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seeds alone: one setting of a study."""

    label: str
    runs: Sequence[Run]


def group_by_setting(runs: Sequence[Run]) -> list[RunGroup]:
    """The settings of some runs, the best first; unfinished runs, and a seed that comes twice, are groups apart."""
    found: list[list[Run]] = []
    for run in _ordered(runs):
        for group in found:
            alike = _setting(group[0]) == _setting(run) and group[0].finished == run.finished
            if alike and _seed(run) not in map(_seed, group):
                group.append(run)
                break
        else:
            found.append([run])
    found = [sorted(group, key=lambda run: (len(_seed(run)), _seed(run))) for group in found]
    names = (
        run_labels([group[0] for group in found])
        if len(found) == len(runs)
        else _apart([group[0] for group in found])
    )
    return [RunGroup(name, group) for name, group in zip(names, found, strict=True)]


def _setting(run: Run) -> dict[str, str]:
    return {
        key: value
        for key, value in {**flat_settings(run.config), **_chosen(run.config)}.items()
        if key != "seed"
    }


def _seed(run: Run) -> str:
    return str(run.config.get("seed"))


def _apart(firsts: Sequence[Run]) -> list[str]:
    """A run of each group by what sets the groups apart: the methods, else all that differs but the seed."""
    flat_settings = [_setting(run) for run in firsts]
    places = [flat_settings.index(setting) for setting in flat_settings]
    distinct = [firsts[place] for place in dict.fromkeys(places)]
    methods = [chosen_option(run.config, "method") for run in distinct]
    if len(set(methods)) == len(methods):
        found = methods
    else:
        without = [{key: v for key, v in run.config.items() if key != "seed"} for run in distinct]
        nameless = [
            replace(run, name="", finished=True, config=c)
            for run, c in zip(distinct, without, strict=True)
        ]
        found = run_labels(nameless)
    name = dict(zip(dict.fromkeys(places), found, strict=True))
    names = [
        f"{name[p]}{'' if r.finished else UNFINISHED}" for p, r in zip(places, firsts, strict=True)
    ]
    return names if len(set(names)) == len(names) else run_labels(firsts)


def result_columns(groups: Sequence[RunGroup], limit: int = 4) -> list[Column]:
    """A row per group: number of seeds, and mean ± sample deviation (divisor n-1) over them of every number."""
    runs = [run for group in groups for run in group.runs]
    ends = [sum(len(group.runs) for group in groups[:place]) for place in range(len(groups) + 1)]
    spans = [range(low, high) for low, high in itertools.pairwise(ends)]
    columns = [Column("", [group.label for group in groups])]
    if len(runs) > len(groups):
        columns.append(
            Column(
                "seeds", [str(len(group.runs)) for group in groups], [len(g.runs) for g in groups]
            )
        )
    for each in _columns(runs, limit)[1:]:
        if each.scores and finite_values(each.scores):
            columns.append(_over_seeds(each, spans))
        elif not each.scores and len(runs) == len(groups) and len(set(each.texts)) > 1:
            columns.append(each)  # names of folders alone do not say what was run
    return columns


def _over_seeds(column: Column, spans: Sequence[range]) -> Column:
    show, texts = column.show or _score, []
    found = [
        mean_deviation(finite_values([column.scores[index] for index in span])) for span in spans
    ]
    for (mean, deviation), span in zip(found, spans, strict=True):
        count = len(finite_values([column.scores[index] for index in span]))
        some = f" ({count} of {len(span)})" if 0 < count < len(span) else ""
        texts.append(
            format_mean(mean, deviation if column.title != "rounds" else None, show) + some
        )
    several = any(len(span) > 1 for span in spans)
    deviations = [deviation for _, deviation in found] if several else column.deviations
    return replace(column, texts=texts, scores=[mean for mean, _ in found], deviations=deviations)


# ---------------------------------------------------------------- every number


def as_csv(groups: Sequence[RunGroup]) -> str:
    """A line per run below the head, with every number of its summary in full, by the summary's own keys."""
    rows: list[Mapping[str, object]] = [
        {"setting": group.label, "run": run.name, "seed": _seed(run),
         **{g: chosen_option(run.config, g) for g in GROUPS}, **_numbers(run.summary)}
        for group in groups for run in group.runs
    ]  # fmt: skip
    return to_csv(rows).removesuffix("\n")


def _numbers(summary: Mapping[str, object], above: str = "") -> dict[str, object]:
    """Those of a summary by their dotted keys, but not what a run says of itself."""
    flat: dict[str, object] = {}
    for key, value in summary.items():
        if key in ("identity", "choices"):
            continue
        if isinstance(value, Mapping):
            flat.update(_numbers(value, f"{above}{key}."))
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            flat[f"{above}{key}"] = value
    return flat
