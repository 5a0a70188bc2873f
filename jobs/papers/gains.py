"""What methods gain over FedAvg with the same seed on the same split, and how that depends on how uneven it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from jobs.papers.comparison import plainly
from jobs.papers.presets import PaperRuns, Score
from raysim.primitives.checks import finite_values
from raysim.results.history import column
from raysim.results.report import Run
from raysim.results.significance import MIN_PAIRS, Difference, compare_pairs
from raysim.results.tables import to_markdown

FEDAVG = "method=fedavg"
TERM = "decomposition."  # begins the columns of FedLD's terms
Own = Mapping[int, Run]  # of one method, by seed
Runs = dict[str, dict[int, Run]]  # of one setting: by methods and their options, then by seed


HOW = ("device=", "runtime.", "data.root=")  # words of a command that say where and how, not what


@dataclass(frozen=True)
class Setting:
    """All that the commands of these runs say besides methods and seed, and the methods that share enough seeds."""

    words: str
    fedavg: Own
    others: Runs
    too_few: Runs  # methods that share fewer seeds with FedAvg
    scores: Mapping[str, Score]  # by title: those that all runs have

    @property
    def uneven(self) -> bool:
        """Whether its splits have an order."""
        return len({entropy(run) for run in self.fedavg.values()}) > 1

    @property
    def commonest(self) -> tuple[str, Own]:
        """The method that shares the most seeds with FedAvg."""
        return max(self.others.items(), key=lambda each: len(self.seeds(each[1])))

    def seeds(self, own: Own) -> list[int]:
        """Those that a method and FedAvg have, the most uneven split first."""
        return sorted(
            own.keys() & self.fedavg.keys(), key=lambda seed: (entropy(self.fedavg[seed]), seed)
        )

    def pairs(self, own: Own, score: Score) -> list[tuple[float, float]]:
        """Return FedAvg's score and the method's, in percent, for each of the seeds."""
        return [
            (_value(self.fedavg[seed], score), _value(own[seed], score)) for seed in self.seeds(own)
        ]

    def gain(self, own: Own, score: Score) -> Difference:
        """Return the gain of a method, in points."""
        before, after = zip(*self.pairs(own, score), strict=True)
        return compare_pairs(after, before)


def by_setting(runs: Sequence[Run], paper: PaperRuns) -> list[Setting]:
    """Return the settings in which FedAvg and another method share enough seeds."""
    found: dict[str, Runs] = {}
    for run in runs:
        words = plainly(str(run.summary.get("command"))).split()[2:]
        methods = [word for word in words if word.startswith("method")]
        others = [word for word in words if not word.startswith(("method", "seed=", *HOW))]
        own = found.setdefault(" ".join(others), {}).setdefault(" ".join(methods), {})
        own[int(str(run.config["seed"]))] = run
    settings = [_setting(words, by_method, paper) for words, by_method in found.items()]
    return [setting for setting in settings if setting.others]


def _setting(words: str, by_method: Runs, paper: PaperRuns) -> Setting:
    fedavg = by_method.pop(FEDAVG, {})
    enough = {
        name: len(own.keys() & fedavg.keys()) >= MIN_PAIRS
        for name, own in sorted(by_method.items())
    }
    others, too_few = (
        {name: by_method[name] for name in enough if enough[name] is which}
        for which in (True, False)
    )
    every = [run for own in (fedavg, *others.values()) for run in own.values()]
    scores = {
        title: score
        for title, score in paper.gains.items()
        if all(score.summary(run.rows, score.column) is not None for run in every)
    }
    return Setting(words, fedavg, others, too_few, scores)


def gains(runs: Sequence[Run], paper: PaperRuns) -> Iterator[str]:
    """Yield a section of every setting as Markdown; the gains are those of the paper's own score."""
    for setting in by_setting(runs, paper):
        yield f"## Over FedAvg, seed by seed: {setting.words}"
        yield (
            f"{'A seed is a split, too. ' if setting.uneven else ''}Gains in points of {paper.gained}: mean of the "
            "differences over the seeds that both have, 95 % interval (Student)."
        )
        head = ("methods", "seeds", *setting.scores)
        yield to_markdown(head, [_gain(name, own, setting) for name, own in setting.others.items()])
        if setting.uneven:
            yield from _by_split(setting)
        yield from _terms(setting.others | setting.too_few, setting.fedavg)


def _terms(by_method: Runs, fedavg: Own) -> Iterator[str]:
    """The terms of the loss decomposition that all who measured it have, of each method that shares enough seeds."""
    all_of_it = {FEDAVG: fedavg, **dict(sorted(by_method.items()))}
    found = {
        method: {seed: run for seed, run in own.items() if _measured(run)}
        for method, own in all_of_it.items()
    }
    fedavg = found.pop(FEDAVG)
    others = {
        method: own for method, own in found.items() if len(own.keys() & fedavg.keys()) >= MIN_PAIRS
    }
    every = [run for own in (fedavg, *others.values()) for run in own.values()]
    names = [
        name
        for run in every[:1]
        for name in _measured(run)
        if all(name in _measured(other) for other in every)
    ]
    if not names:
        return
    yield (
        "Terms of the loss decomposition (nats), the mean of the last five that were measured: mean over the seeds, "
        "and in brackets what that is over FedAvg's, with its 95 % interval."
    )
    rows = [
        (
            f"`{FEDAVG}`",
            f"{len(fedavg)}",
            *(f"{mean(_term(r, n) for r in fedavg.values()):.3f}" for n in names),
        )
    ]
    for method, own in others.items():
        seeds = sorted(own.keys() & fedavg.keys())
        rows.append(
            (f"`{method}`", f"{len(seeds)}", *(_change(own, fedavg, seeds, name) for name in names))
        )
    yield to_markdown(
        ("methods", "seeds", *(name.removeprefix(TERM).replace("_", " ") for name in names)), rows
    )


def _change(own: Own, fedavg: Own, seeds: Sequence[int], name: str) -> str:
    after = [_term(own[seed], name) for seed in seeds]
    found = compare_pairs(after, [_term(fedavg[seed], name) for seed in seeds])
    interval = (
        f"; {found.note}" if found.low is None else f"; {found.low:+.3f} to {found.high:+.3f}"
    )
    return f"{mean(after):.3f} ({found.mean:+.3f}{interval})"


def _measured(run: Run) -> list[str]:
    """The terms of which a run has a value."""
    names = [name for row in run.rows[-1:] for name in row if name.startswith(TERM)]
    return [name for name in names if finite_values(column(run.rows, name))]


def _term(run: Run, name: str) -> float:
    return mean(finite_values(column(run.rows, name))[-5:])


def _by_split(setting: Setting) -> Iterator[str]:
    """The method that shares the most seeds with FedAvg, from the most uneven split to the most even one."""
    name, own = setting.commonest
    seeds = setting.seeds(own)
    entropies = [entropy(setting.fedavg[seed]) for seed in seeds]
    columns, said = [], []
    for title, score in setting.scores.items():
        pairs = setting.pairs(own, score)
        columns.append(
            [f"{before:.2f} → {after:.2f} ({after - before:+.2f})" for before, after in pairs]
        )
        if len(seeds) > MIN_PAIRS:
            from scipy.stats import spearmanr

            found = spearmanr(entropies, [after - before for before, after in pairs])
            said.append(f"{title} {found.statistic:+.2f} (p = {found.pvalue:.4f})")
    yield (
        f"`{name}` by split, the most uneven one first (label entropy: mean over clients, nats; FedAvg's score → the "
        "method's):"
    )
    facts = [f"{seed}" for seed in seeds], [f"{each:.3f}" for each in entropies]
    yield to_markdown(
        ("seed", "label entropy", *setting.scores), list(zip(*facts, *columns, strict=True))
    )
    if said:
        yield f"Rank correlation (Spearman) of the gain with the label entropy, {len(seeds)} splits: {'; '.join(said)}."


def _gain(name: str, own: Own, setting: Setting) -> tuple[str, ...]:
    cells = []
    for score in setting.scores.values():
        found = setting.gain(own, score)
        interval = (
            f" ({found.note})" if found.low is None else f" ({found.low:+.2f} to {found.high:+.2f})"
        )
        cells.append(f"{found.mean:+.2f}{interval}")
    return f"`{name}`", f"{len(setting.seeds(own))}", *cells


def _value(run: Run, score: Score) -> float:
    value = score.summary(run.rows, score.column)
    assert value is not None, "a setting has the scores that all of its runs have"
    return score.factor * value


def entropy(run: Run) -> float:
    """How uneven a run's split is: mean label entropy of its clients, nats."""
    split = run.summary["split"]
    assert isinstance(split, Mapping), "a stored run says how uneven its split is"
    return float(split["label_entropy"])
