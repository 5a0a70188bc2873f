"""Compute the gains of methods over FedAvg on equal seeds.

If each seed has its own split of the data, also compute the gain on each split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from jobs.papers.presets import PaperRuns, Score
from jobs.papers.settings import Setting, overrides_of, setting_of
from raysim.primitives.checks import finite_values
from raysim.results.history import column
from raysim.results.significance import MIN_PAIRS, Difference, compare_pairs
from raysim.results.stored_runs import Run
from raysim.results.tables import to_markdown

FEDAVG = "method=fedavg"
TERM_PREFIX = "decomposition."  # start of the columns with the terms of FedLD's decomposition
MEASURED_TERMS = 5  # the number of last measurements of a term whose mean is shown
RunsBySeed = Mapping[int, Run]  # of one method
RunsByMethod = dict[str, dict[int, Run]]  # of one setting; the key includes the method's settings


@dataclass(frozen=True)
class PairedSetting:
    """Runs of FedAvg and of other methods that differ only in method and seed.

    others: the methods that have at least `MIN_PAIRS` seeds in common with FedAvg.
    too_few: the methods that have fewer.
    scores: the scores that all runs in `fedavg` and `others` have, by title.
    own_method: the paper's method, such as "fedld". Names of its partial variants begin with it.
    """

    setting: Setting
    fedavg: RunsBySeed
    others: RunsByMethod
    too_few: RunsByMethod
    scores: Mapping[str, Score]
    own_method: str

    @property
    def has_different_splits(self) -> bool:
        """Return True if the split of the data is not the same for all seeds."""
        return len({label_entropy(run) for run in self.fedavg.values()}) > 1

    @property
    def most_frequent(self) -> tuple[str, RunsBySeed]:
        """Return the method with the most seeds in common with FedAvg, and the method's runs.

        If several methods have the most seeds, a method with the name of the paper's own is
        preferred.
        """

        def rank(item: tuple[str, RunsBySeed]) -> tuple[int, bool]:
            overrides, by_seed = item
            return len(self.seeds(by_seed)), self.own_method in overrides

        return max(self.others.items(), key=rank)

    def seeds(self, runs: RunsBySeed) -> list[int]:
        """Return the seeds that have both a run of a method and a run of FedAvg.

        The seed with the most uneven partition comes first.
        runs: the runs of the method; FedAvg's runs are in `self.fedavg`.
        """
        shared = runs.keys() & self.fedavg.keys()
        return sorted(shared, key=lambda seed: (label_entropy(self.fedavg[seed]), seed))

    def pairs(self, runs: RunsBySeed, score: Score) -> list[tuple[float, float]]:
        """Return FedAvg's score and a method's score in percent, one pair for each seed.

        Only seeds with runs of both are used.
        runs: the method's runs; FedAvg's are in `self.fedavg`.
        score: the rule that computes a run's score.
        """
        pairs = []
        for seed in self.seeds(runs):
            pairs.append((_value(self.fedavg[seed], score), _value(runs[seed], score)))
        return pairs

    def gain(self, runs: RunsBySeed, score: Score) -> Difference:
        """Return how much higher a method's score is than FedAvg's, in percentage points.

        This is the mean difference over the seeds with runs of both.
        runs: the method's runs; FedAvg's are in `self.fedavg`.
        score: the rule that computes a run's score.
        """
        before, after = zip(*self.pairs(runs, score), strict=True)
        return compare_pairs(after, before)


def by_setting(runs: Sequence[Run], paper: PaperRuns) -> list[PairedSetting]:
    """Return the settings at which at least one method can be compared with FedAvg.

    A comparison needs runs of the method and of FedAvg on at least `MIN_PAIRS` common seeds.
    paper: defines the scores that are compared.
    """
    runs_by_setting: dict[str, RunsByMethod] = {}
    settings: dict[str, Setting] = {}
    for run in runs:
        methods, overrides = overrides_of(run)
        setting = setting_of(overrides)
        settings[setting.name] = setting
        by_method = runs_by_setting.setdefault(setting.name, {})
        by_seed = by_method.setdefault(" ".join(methods), {})
        by_seed[int(str(run.config["seed"]))] = run
    paired = [
        _paired(settings[name], by_method, paper) for name, by_method in runs_by_setting.items()
    ]
    return [setting for setting in paired if setting.others]


def _paired(setting: Setting, by_method: RunsByMethod, paper: PaperRuns) -> PairedSetting:
    fedavg = by_method.pop(FEDAVG, {})
    others: RunsByMethod = {}
    too_few: RunsByMethod = {}
    for name, by_seed in sorted(by_method.items()):
        has_enough = len(by_seed.keys() & fedavg.keys()) >= MIN_PAIRS
        (others if has_enough else too_few)[name] = by_seed
    runs = [run for by_seed in (fedavg, *others.values()) for run in by_seed.values()]
    scores = {}
    for title, score in paper.gains.items():
        if all(score.summary(run.rows, score.column) is not None for run in runs):
            scores[title] = score
    return PairedSetting(setting, fedavg, others, too_few, scores, paper.own_method)


# --- Markdown -------------------------------------------------------------------------------------
def gains(runs: Sequence[Run], paper: PaperRuns) -> Iterator[str]:
    """Yield Markdown about the methods' gains over FedAvg, with one heading for each setting.

    A gain is the mean difference between a method's and FedAvg's scores over their common seeds.
    paper: defines the scores that are compared.
    """
    for setting in by_setting(runs, paper):
        yield f"## Gains over FedAvg: {setting.setting.title}"
        yield f"Scale `{setting.setting.name}`: `{setting.setting.command}`."
        splits = "Each seed also draws its own split. " if setting.has_different_splits else ""
        yield (
            f"{splits}Gains in points of {paper.gain_score_name}: mean of the differences over the seeds "
            "that both methods have, with a 95 % interval (Student)."
        )
        rows = [_gain_row(name, by_seed, setting) for name, by_seed in setting.others.items()]
        yield to_markdown(("methods", "seeds", *setting.scores), rows)
        if setting.has_different_splits:
            yield from _gains_by_split(setting)
        yield from _terms(setting.others | setting.too_few, setting.fedavg)


def _gain_row(name: str, by_seed: RunsBySeed, setting: PairedSetting) -> tuple[str, ...]:
    cells = []
    for score in setting.scores.values():
        gain = setting.gain(by_seed, score)
        interval = gain.note if gain.low is None else f"{gain.low:+.2f} to {gain.high:+.2f}"
        cells.append(f"{gain.mean:+.2f} ({interval})")
    return f"`{name}`", f"{len(setting.seeds(by_seed))}", *cells


def _gains_by_split(setting: PairedSetting) -> Iterator[str]:
    """Yield Markdown about one method's gain over FedAvg for each seed.

    Each seed has its own partition; seeds with more uneven partitions come first. The method that
    has the most seeds in common with FedAvg is shown.
    """
    name, by_seed = setting.most_frequent
    seeds = setting.seeds(by_seed)
    entropies = [label_entropy(setting.fedavg[seed]) for seed in seeds]
    columns = []
    correlations = []
    for title, score in setting.scores.items():
        pairs = setting.pairs(by_seed, score)
        cells = [f"{before:.2f} → {after:.2f} ({after - before:+.2f})" for before, after in pairs]
        columns.append(cells)
        if len(seeds) > MIN_PAIRS:
            from scipy.stats import spearmanr

            test = spearmanr(entropies, [after - before for before, after in pairs])
            correlations.append(f"{title} {test.statistic:+.2f} (p = {test.pvalue:.4f})")
    yield (
        f"`{name}` by split, the most uneven split first. Label entropy: mean over clients, nats. "
        "Scores: FedAvg's → the method's."
    )
    seed_cells = [f"{seed}" for seed in seeds]
    entropy_cells = [f"{entropy:.3f}" for entropy in entropies]
    rows = list(zip(seed_cells, entropy_cells, *columns, strict=True))
    yield to_markdown(("seed", "label entropy", *setting.scores), rows)
    if correlations:
        yield (
            "Rank correlation (Spearman) of the gain with the label entropy, "
            f"{len(seeds)} splits: {'; '.join(correlations)}."
        )


def _terms(by_method: RunsByMethod, fedavg: RunsBySeed) -> Iterator[str]:
    """Yield a Markdown table of the terms of FedLD's loss decomposition (equation 2).

    A term is shown if all runs in the table measured it. A method is shown if it measured terms on
    at least `MIN_PAIRS` of the seeds on which FedAvg measured them.
    """
    fedavg = _with_terms(fedavg)
    others = {}
    for method, by_seed in sorted(by_method.items()):
        measured = _with_terms(by_seed)
        if len(measured.keys() & fedavg.keys()) >= MIN_PAIRS:
            others[method] = measured
    runs = [run for by_seed in (fedavg, *others.values()) for run in by_seed.values()]
    if not runs:
        return
    names = _measured_terms(runs[0])
    names = [name for name in names if all(name in _measured_terms(run) for run in runs)]
    if not names:
        return

    yield (
        f"Terms of the loss decomposition (nats), mean of the last {MEASURED_TERMS} measurements: "
        "mean over the seeds and, in brackets, the difference from FedAvg with its 95 % interval."
    )
    fedavg_cells = [f"{mean(_term(run, name) for run in fedavg.values()):.3f}" for name in names]
    rows = [(f"`{FEDAVG}`", f"{len(fedavg)}", *fedavg_cells)]
    for method, by_seed in others.items():
        seeds = sorted(by_seed.keys() & fedavg.keys())
        cells = [_format_change(by_seed, fedavg, seeds, name) for name in names]
        rows.append((f"`{method}`", f"{len(seeds)}", *cells))
    titles = [name.removeprefix(TERM_PREFIX).replace("_", " ") for name in names]
    yield to_markdown(("methods", "seeds", *titles), rows)


def _with_terms(by_seed: RunsBySeed) -> dict[int, Run]:
    return {seed: run for seed, run in by_seed.items() if _measured_terms(run)}


def _format_change(by_seed: RunsBySeed, fedavg: RunsBySeed, seeds: Sequence[int], name: str) -> str:
    after = [_term(by_seed[seed], name) for seed in seeds]
    before = [_term(fedavg[seed], name) for seed in seeds]
    change = compare_pairs(after, before)
    interval = change.note if change.low is None else f"{change.low:+.3f} to {change.high:+.3f}"
    return f"{mean(after):.3f} ({change.mean:+.3f}; {interval})"


def _measured_terms(run: Run) -> list[str]:
    """Return the columns with terms of FedLD's loss decomposition that a run measured."""
    names = [name for row in run.rows[-1:] for name in row if name.startswith(TERM_PREFIX)]
    return [name for name in names if finite_values(column(run.rows, name))]


def _term(run: Run, name: str) -> float:
    return mean(finite_values(column(run.rows, name))[-MEASURED_TERMS:])


def _value(run: Run, score: Score) -> float:
    value = score.summary(run.rows, score.column)
    assert value is not None, "a setting has the scores that all of its runs have"
    return score.factor * value


def label_entropy(run: Run) -> float:
    """Return the mean label entropy of a run's clients, in nats; lower is more uneven."""
    split = run.summary["split"]
    assert isinstance(split, Mapping), "a stored run has the numbers of its split"
    return float(split["label_entropy"])
