"""What methods gain over FedAvg with the same seed on the same split, and how that depends on how uneven it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raysim.results.markdown import table
from raysim.results.report import Run
from raysim.results.significance import FEWEST, paired

FEDAVG = "method=fedavg"
# Columns of a summary that are compared, and what they are called.
SCORES = {"best5_mean_global": "central", "best5_mean": "local mean"}
Own = Mapping[int, Run]  # of one method, by seed
Runs = dict[str, dict[int, Run]]  # of one setting: by methods and their options, then by seed


HOW = ("device=", "runtime.", "data.root=")  # words of a command that say where and how, not what


def by_setting(runs: Sequence[Run]) -> dict[str, Runs]:
    """The runs by all that their commands say besides methods and seed."""
    found: dict[str, Runs] = {}
    for run in runs:
        words = str(run.summary.get("command")).split()[2:]
        methods = [word for word in words if word.startswith("method")]
        others = [word for word in words if not word.startswith(("method", "seed=", *HOW))]
        own = found.setdefault(" ".join(others), {}).setdefault(" ".join(methods), {})
        own[int(str(run.config["seed"]))] = run
    return found


def gains(runs: Sequence[Run]) -> Iterator[str]:
    """A section as Markdown, of every setting in which FedAvg and another method share enough seeds."""
    for setting, by_method in by_setting(runs).items():
        fedavg = by_method.pop(FEDAVG, {})
        others = {name: own for name, own in sorted(by_method.items()) if len(own.keys() & fedavg.keys()) >= FEWEST}
        if not others:
            continue
        every = [run for own in (fedavg, *others.values()) for run in own.values()]
        scores = {key: title for key, title in SCORES.items() if all(run.summary.get(key) is not None for run in every)}
        yield f"## Over FedAvg, seed by seed: {setting}"
        yield (
            "A seed is a split, too. Gains in points, best five rounds: mean of the differences over the seeds that "
            "both have, 95 % interval (Student)."
        )
        head = ("methods", "seeds", *scores.values())
        yield table(head, [_gain(name, own, fedavg, scores) for name, own in others.items()])
        name, own = max(others.items(), key=lambda each: len(each[1].keys() & fedavg.keys()))
        yield from _by_split(name, own, fedavg, scores)


def _by_split(name: str, own: Own, fedavg: Own, scores: Mapping[str, str]) -> Iterator[str]:
    """The method that shares the most seeds with FedAvg, from the most uneven split to the most even one."""
    seeds = sorted(own.keys() & fedavg.keys(), key=lambda seed: _entropy(fedavg[seed]))
    entropies = [_entropy(fedavg[seed]) for seed in seeds]
    columns, said = [], []
    for column, title in scores.items():
        pairs = [(_score(fedavg[seed], column), _score(own[seed], column)) for seed in seeds]
        columns.append([f"{before:.2f} → {after:.2f} ({after - before:+.2f})" for before, after in pairs])
        if len(seeds) > FEWEST:
            from scipy.stats import spearmanr

            found = spearmanr(entropies, [after - before for before, after in pairs])
            said.append(f"{title} {found.statistic:+.2f} (p = {found.pvalue:.4f})")
    yield (
        f"`{name}` by split, the most uneven one first (label entropy: mean over clients, nats; FedAvg's score → the "
        "method's):"
    )
    facts = [f"{seed}" for seed in seeds], [f"{entropy:.3f}" for entropy in entropies]
    yield table(("seed", "label entropy", *scores.values()), list(zip(*facts, *columns, strict=True)))
    if said:
        yield f"Rank correlation (Spearman) of the gain with the label entropy, {len(seeds)} splits: {'; '.join(said)}."


def _gain(name: str, own: Own, fedavg: Own, scores: Mapping[str, str]) -> tuple[str, ...]:
    seeds = sorted(own.keys() & fedavg.keys())
    cells = []
    for column in scores:
        found = paired([_score(own[seed], column) for seed in seeds], [_score(fedavg[seed], column) for seed in seeds])
        interval = f" ({found.note})" if found.low is None else f" ({found.low:+.2f} to {found.high:+.2f})"
        cells.append(f"{found.mean:+.2f}{interval}")
    return f"`{name}`", f"{len(seeds)}", *cells


def _score(run: Run, column: str) -> float:
    return 100 * float(str(run.summary[column]))


def _entropy(run: Run) -> float:
    split = run.summary["split"]
    assert isinstance(split, Mapping), "a stored run says how uneven its split is"
    return float(split["label_entropy"])
