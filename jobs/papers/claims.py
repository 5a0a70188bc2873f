"""Test the papers' claims on the stored results: supported, contradicted, or undecided.

A claim says that a method has a higher or a lower score than a second method. The scores of runs
with the same seed are subtracted. The verdict follows from the 95 % interval (Student's t) of the
mean difference:

    supported      the interval lies on the claimed side of 0
    contradicted   the interval lies on the wrong side of 0
    undecided      the interval contains 0 or does not exist, or the accuracy of the second method
                   is less than `TRAINED` times the accuracy in the paper
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from jobs.papers.presets import (
    PAPER_RUNS,
    Score,
    best_five,
    deviation_of_last_ten,
    last,
    last_ten,
)
from jobs.papers.settings import Setting, find_setting, overrides_of, setting_of
from jobs.papers.tables import Cell, find
from raysim.primitives.checks import finite_values
from raysim.results.history import Row, column
from raysim.results.significance import MIN_PAIRS, Difference, compare_pairs
from raysim.results.stored_runs import Run
from raysim.results.tables import MISSING, to_markdown

TRAINED = 0.8  # share of the printed accuracy that a setting must reach to show a claim
MOST_SEEDS = 100  # the largest number of seeds that is computed
MEASURED = 5  # the number of last measurements of a column whose mean is compared
# Settings of methods that follow from the number of rounds, and do not tell methods apart.
LENGTHS = ("method.fedbss.warmup_rounds=", "method.fraug.rounds=", "method.fraug.ramp_rounds=")
VERDICTS = ("supported", "contradicted", "undecided")
HEAD = ("claim", "paper", "ours (95 % interval)", "scale", "verdict", "to decide it", "command")


@dataclass(frozen=True)
class Printed:
    """Two numbers that a paper prints in one column of a table, for two compared methods.

    table: the name of the table, such as "fedbr/table1".
    row, other_row: the labels of the rows of `Claim.method` and of `Claim.other`.
    """

    table: str
    row: str
    other_row: str
    dataset: str
    column: str

    def cells(self) -> tuple[Cell, Cell]:
        """Return the number in the row `row`, and then the number in the row `other_row`."""
        return self._cell(self.row), self._cell(self.other_row)

    def _cell(self, label: str) -> Cell:
        for cell in find(self.table).cells:
            if (cell.label, cell.dataset, cell.column) == (label, self.dataset, self.column):
                return cell
        raise KeyError(
            f"{self.table} has no value for {label}, data set {self.dataset}, column {self.column}"
        )


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper that compares the scores of two methods.

    method, other: the overrides of the two methods, such as "method=fedbr method.fedbr.mu=0".
    settings: the settings at which we test the claim; the one with the largest runs is the last.
    printed: where the paper prints the two scores, or None.
    source: the figure or the equations that make the claim, such as "Figure 5b"; "" if `printed`
    names a table.
    deviations: True if the claim is about printed standard deviations, not means.
    higher: True if the paper claims the higher score for `method`.
    """

    text: str
    method: str
    other: str
    score: Score
    settings: tuple[str, ...]
    printed: Printed | None = None
    source: str = ""
    deviations: bool = False
    higher: bool = True
    unit: str = "points"

    def printed_numbers(self) -> tuple[float, float] | None:
        """Return the numbers that the paper prints for `method` and `other`, or None."""
        if self.printed is None:
            return None
        cells = self.printed.cells()
        numbers = [cell.deviation if self.deviations else cell.mean for cell in cells]
        assert all(number is not None for number in numbers), self.text
        first, second = (float(str(number)) for number in numbers)
        return first, second


@dataclass(frozen=True)
class Finding:
    """The scores of the two methods of a claim, in our runs at one setting.

    pairs: the scores of `claim.method` and `claim.other` for each common seed.
    accuracy: the mean accuracy of `claim.other` in percent; None if the paper prints no numbers, or
    if no run has an accuracy.
    """

    claim: Claim
    setting: Setting
    pairs: tuple[tuple[float, float], ...]
    accuracy: float | None

    @property
    def gain(self) -> Difference:
        """Return the mean difference between the two methods' scores, with its 95 % interval.

        A difference is the score of `claim.method` minus the score of `claim.other` on the same
        seed.
        """
        first, second = zip(*self.pairs, strict=True)
        return compare_pairs(first, second)

    @property
    def is_trained(self) -> bool:
        """Return True if our runs of the method `claim.other` are accurate enough for the claim.

        Their mean accuracy must be at least `TRAINED` times the accuracy in the paper. Return True,
        too, if one of the two accuracies is unknown.
        """
        if self.accuracy is None or self.claim.printed is None:
            return True
        return self.accuracy >= TRAINED * float(self.claim.printed.cells()[1].mean)

    @property
    def verdict(self) -> str:
        """Return "supported", "contradicted" or "undecided"."""
        gain = self.gain
        if not self.is_trained or gain.low is None or gain.high is None:
            return "undecided"
        low, high = (gain.low, gain.high) if self.claim.higher else (-gain.high, -gain.low)
        if low > 0:
            return "supported"
        return "contradicted" if high < 0 else "undecided"

    def to_decide(self) -> str:
        """Say which further runs could decide an undecided claim; "" if the claim is decided."""
        if self.verdict != "undecided":
            return ""
        if not self.is_trained:
            assert self.claim.printed is not None and self.accuracy is not None
            printed = self.claim.printed.cells()[1].mean
            return (
                f"more training: `{self.claim.other}` has {self.accuracy:.1f} % here, {printed} % "
                f"in the paper; run `{self._next_setting().name}`"
            )
        gain, last_setting = self.gain, self.claim.settings[-1]
        if gain.low is None or not gain.deviation:
            return f"{max(MIN_PAIRS, gain.pairs + 1)} seeds or more"
        assert gain.mean is not None
        seeds = f"{seeds_needed(gain.deviation, gain.mean)} seeds if the mean stays as it is"
        return seeds if last_setting == self.setting.name else f"{seeds}, or `{last_setting}`"

    def _next_setting(self) -> Setting:
        names = self.claim.settings
        place = names.index(self.setting.name)
        return find_setting(names[min(place + 1, len(names) - 1)])


def seeds_needed(deviation: float, difference: float) -> str:
    """Return, as text, how many seeds are needed until a 95 % interval does not contain 0.

    The interval is that of the mean difference between two methods' scores.
    deviation, difference: standard deviation and mean of the differences, one per seed.
    """
    from scipy import stats

    for pairs in range(MIN_PAIRS, MOST_SEEDS + 1):
        quantile = float(stats.t.ppf(0.975, pairs - 1))
        if quantile * deviation < abs(difference) * math.sqrt(pairs):
            return f"about {pairs}"
    return f"more than {MOST_SEEDS}"


# --- findings -------------------------------------------------------------------------------------
def findings(claim: Claim, runs: Sequence[Run]) -> list[Finding]:
    """Return a finding for each setting of a claim.

    Settings at which the two methods of the claim have no seed with both scores are left out.
    """
    by_setting: dict[str, dict[str, dict[int, Run]]] = {}
    for run in runs:
        methods, overrides = overrides_of(run)
        methods = [text for text in methods if not text.startswith(LENGTHS)]
        by_method = by_setting.setdefault(setting_of(overrides).name, {})
        by_method.setdefault(" ".join(methods), {})[int(str(run.config["seed"]))] = run
    result = []
    for name in claim.settings:
        by_method = by_setting.get(name, {})
        method, other = by_method.get(claim.method, {}), by_method.get(claim.other, {})
        pairs, accuracies = [], []
        for seed in sorted(method.keys() & other.keys()):
            values = [_value(runs_of[seed], claim.score) for runs_of in (method, other)]
            if values[0] is not None and values[1] is not None:
                pairs.append((values[0], values[1]))
                accuracies.append(_accuracy(claim, other[seed]))
        if pairs:
            known = [value for value in accuracies if value is not None]
            accuracy = mean(known) if known else None
            result.append(Finding(claim, find_setting(name), tuple(pairs), accuracy))
    return result


def _value(run: Run, score: Score) -> float | None:
    value = score.summary(run.rows, score.column)
    return None if value is None else score.factor * value


def _accuracy(claim: Claim, run: Run) -> float | None:
    """Return the accuracy of a run of `claim.other` in percent, computed as in the paper's table.

    Return None if the paper prints no numbers for the claim, or if the run has no accuracy.
    """
    if claim.printed is None:
        return None
    table = find(claim.printed.table)
    paper = claim.printed.table.partition("/")[0]
    score = PAPER_RUNS[paper].score(table, claim.printed.cells()[1])
    return _value(run, score)


# --- Markdown -------------------------------------------------------------------------------------
def claims_table(paper: str, runs: Sequence[Run]) -> str:
    """Return a paper's claims as a Markdown table, with a row for each setting that has runs.

    A claim without runs has one row, too.
    """
    rows: list[tuple[str, ...]] = []
    for claim in CLAIMS[paper]:
        of_claim = findings(claim, runs)
        rows += [_row(finding) for finding in of_claim]
        if not of_claim:
            rows.append(_row_without_runs(claim))
    return to_markdown(HEAD, rows)


def _row(finding: Finding) -> tuple[str, ...]:
    claim, setting = finding.claim, finding.setting
    return (
        claim.text,
        _paper_text(claim),
        _our_text(finding),
        f"`{setting.name}`",
        f"**{finding.verdict}**",
        finding.to_decide() or MISSING,
        f"`{setting.study}`",
    )


def _row_without_runs(claim: Claim) -> tuple[str, ...]:
    decide = "run " + " or ".join(f"`{name}`" for name in claim.settings)
    study = f"`{find_setting(claim.settings[0]).study}`"
    return claim.text, _paper_text(claim), "not run yet", MISSING, "**undecided**", decide, study


def _paper_text(claim: Claim) -> str:
    numbers = claim.printed_numbers()
    if numbers is None:
        return claim.source
    first, second = numbers
    assert claim.printed is not None
    table = claim.printed.table.partition("/")[2].replace("table", "Table ")
    return f"{first:.2f} against {second:.2f} ({first - second:+.2f}), {table}"


def _our_text(finding: Finding) -> str:
    digits = 2 if finding.claim.unit == "points" else 3
    first, second = (mean(values) for values in zip(*finding.pairs, strict=True))
    gain = finding.gain
    interval = (
        gain.note if gain.low is None else f"{gain.low:+.{digits}f} to {gain.high:+.{digits}f}"
    )
    unit = "" if finding.claim.unit == "points" else f" {finding.claim.unit}"
    return (
        f"{first:.{digits}f} against {second:.{digits}f}{unit}: {gain.mean:+.{digits}f} "
        f"({interval}), {gain.pairs} seed{'s' if gain.pairs > 1 else ''}"
    )


def settings_table(paper: str) -> str:
    """Return a Markdown table of the experiments with which a paper's claims are tested.

    A row has an experiment's name and description, the command of one run, and that of all runs.
    """
    names = dict.fromkeys(name for claim in CLAIMS[paper] for name in claim.settings)
    rows = []
    for setting in map(find_setting, names):
        codes = (setting.name, setting.command, setting.study)
        name, command, study = (f"`{code}`" for code in codes)
        rows.append((name, setting.title, command, study))
    head = (
        "scale",
        "data, model and training",
        "command of a run, without method and seed",
        "command of all runs",
    )
    return to_markdown(head, rows)


def verdicts(paper: str, runs: Sequence[Run]) -> Iterator[str]:
    """Yield the verdict of every row of the claims table, in order."""
    for claim in CLAIMS[paper]:
        of_claim = findings(claim, runs)
        yield from (finding.verdict for finding in of_claim)
        if not of_claim:
            yield "undecided"


# --- the claims -----------------------------------------------------------------------------------
def mean_of_last(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of a column's last `MEASURED` values; None if the column has no values.

    rows: the history of a run.
    name: the name of the column.
    """
    values = finite_values(column(rows, name))[-MEASURED:]
    return mean(values) if values else None


def absolute_mean_of_last(rows: Sequence[Row], name: str) -> float | None:
    """Return the absolute value of the mean of a column's last `MEASURED` values.

    Return None if the column has no values.
    rows: the history of a run.
    name: the name of the column.
    """
    value = mean_of_last(rows, name)
    return None if value is None else abs(value)


CENTRAL_BEST = Score("accuracy_global", best_five, 100)
CENTRAL_LAST = Score("accuracy_global", last, 100)
CENTRAL_LAST_TEN = Score("accuracy_global", last_ten, 100)
DEVIATION = Score("accuracy_global", deviation_of_last_ten, 100)
WORST_DOMAIN = Score("accuracy_worst_domain", best_five, 100)
BEST_VALIDATION = Score("accuracy_best", last, 100)
SHIFT = Score("decomposition.distribution_shift", mean_of_last)
GLOBAL_LOSS = Score("decomposition.global_loss", mean_of_last)
AGGREGATION = Score("decomposition.aggregation", absolute_mean_of_last)
ROTATED = (
    "rotated-small",
    "rotated-cnn",
    "rotated-steps",
    "rotated-cnn-steps",
    "rotated-fast",
    "rotated-paper",
)
ROTATED_PARTS = ("rotated-small", "rotated-cnn", "rotated-steps", "rotated-paper")
ROTATED_MIXUP = ("rotated-small", "rotated-steps", "rotated-paper")
SKEW = ("skew-slow", "skew-paper-80", "skew-fast", "skew-paper")
XRAYS = ("xrays", "retina-paper")
DIGITS = ("digits-small", "digits-tenth", "digits-300", "digits-paper")
FEDBR = "method=fedbr"
NO_MU, NO_LAM = f"{FEDBR} method.fedbr.mu=0", f"{FEDBR} method.fedbr.lam=0"
NO_MAX = f"{FEDBR} method.fedbr.max_step=false"
FEDAVG = "method=fedavg"
FEDLD = "method=fedld_margin+fedld_principal"


BSS, FILTER = "method=fedbss", "method=fedbss method.fedbss.kind=filter"
LINEAR = "method=fedbss method.fedbss.kind=linear"


def _rotated(row: str, other_row: str, table: str = "fedbr/table4") -> Printed:
    return Printed(table, row, other_row, "rotated_mnist", "Acc (%)")


def _fashion(table: str, column: str) -> Printed:
    return Printed(f"fedbss/{table}", "Ours", "FedAvg", "fashion_mnist", column)


def _retina(margin: str, principal: str) -> Printed:
    row, other = f"margin {margin}, principal {principal}", "margin no, principal no"
    return Printed("fedld/table2", row, other, "retina", "Split-3")


def _noise_claim(noise: str) -> Claim:
    settings = (f"noise-{noise}", "noise-paper") if noise == "0.5" else (f"noise-{noise}",)
    printed = _fashion("table2", f"label_noise {noise}")
    text = f"FedBSS is above FedAvg with {100 * float(noise):.0f} % wrong labels"
    return Claim(text, BSS, FEDAVG, CENTRAL_LAST_TEN, settings, printed)


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "fedbr": (
        Claim(
            "FedBR is above FedAvg",
            FEDBR,
            FEDAVG,
            CENTRAL_BEST,
            ROTATED,
            _rotated("FedBR", "FedAvg"),
        ),
        Claim(
            "FedBR is above FedAvg on the worst angle",
            FEDBR,
            FEDAVG,
            WORST_DOMAIN,
            ROTATED,
            _rotated("FedBR (Ours)", "ERM (FedAvg)", "fedbr/table14"),
        ),
        Claim(
            "Component 1 alone is above FedAvg",
            NO_MU,
            FEDAVG,
            CENTRAL_BEST,
            ROTATED_PARTS,
            _rotated("Component 1", "FedAvg"),
        ),
        Claim(
            "Component 2 alone is above component 1 alone",
            NO_LAM,
            NO_MU,
            CENTRAL_BEST,
            ROTATED_PARTS,
            _rotated("Component 2", "Component 1"),
        ),
        Claim(
            "FedBR is above FedBR without its max step",
            FEDBR,
            NO_MAX,
            CENTRAL_BEST,
            ROTATED_PARTS,
            _rotated("FedBR", "+ min step"),
        ),
        Claim(
            "With Mixup, FedBR is above FedAvg",
            f"{FEDBR}+mixup",
            "method=mixup",
            CENTRAL_BEST,
            ROTATED_MIXUP,
            _rotated("FedBR + Mixup (Ours)", "FedAvg + Mixup", "fedbr/table1"),
        ),
        Claim(
            "FedBR is above FedAvg on CIFAR10",
            FEDBR,
            FEDAVG,
            CENTRAL_BEST,
            ("cifar10-paper",),
            Printed("fedbr/table1", "FedBR (Ours)", "FedAvg", "cifar10", "Acc (%)"),
        ),
        Claim(
            "With 100 clients, FedBR is above FedAvg on CIFAR10",
            FEDBR,
            FEDAVG,
            CENTRAL_BEST,
            ("cifar10-100",),
            Printed("fedbr/table5", "FedBR", "FedAvg", "cifar10", "Acc"),
        ),
    ),
    "fedbss": (
        *(_noise_claim(noise) for noise in ("0.5", "0.3", "0.1")),
        Claim(
            "With 50 % wrong labels, FedBSS is steadier than FedAvg: deviation over the last ten "
            "rounds",
            BSS,
            FEDAVG,
            DEVIATION,
            ("noise-0.5", "noise-paper"),
            _fashion("table2", "label_noise 0.5"),
            deviations=True,
            higher=False,
        ),
        Claim(
            "With 50 % wrong labels, adding the biased samples (cosine) is above leaving them out "
            "(filter)",
            BSS,
            FILTER,
            CENTRAL_LAST_TEN,
            ("noise-0.5",),
            source="Figure 5b, on CIFAR10",
        ),
        Claim(
            "With 50 % wrong labels, cosine is above linear",
            BSS,
            LINEAR,
            CENTRAL_LAST_TEN,
            ("noise-0.5",),
            source="Figure 5b, on CIFAR10",
        ),
        Claim(
            "FedBSS is above FedAvg under label skew (Dirichlet 0.1)",
            BSS,
            FEDAVG,
            CENTRAL_LAST_TEN,
            SKEW,
            _fashion("table1", "dirichlet 0.1"),
        ),
        *(
            Claim(
                f"FedBSS is above FedAvg under label skew (Dirichlet {alpha})",
                BSS,
                FEDAVG,
                CENTRAL_LAST_TEN,
                (f"skew-fast-{alpha}",),
                _fashion("table1", f"dirichlet {alpha}"),
            )
            for alpha in ("0.3", "0.5")
        ),
        Claim(
            "Under label skew, FedBSS is steadier than FedAvg: deviation over the last ten rounds",
            BSS,
            FEDAVG,
            DEVIATION,
            SKEW,
            _fashion("table1", "dirichlet 0.1"),
            deviations=True,
            higher=False,
        ),
    ),
    "fedld": (
        Claim("FedLD is above FedAvg", FEDLD, FEDAVG, CENTRAL_LAST, XRAYS, _retina("yes", "yes")),
        Claim(
            "Margin control alone is above FedAvg",
            "method=fedld_margin",
            FEDAVG,
            CENTRAL_LAST,
            XRAYS,
            _retina("yes", "no"),
        ),
        Claim(
            "Principal gradients alone are above FedAvg",
            "method=fedld_principal",
            FEDAVG,
            CENTRAL_LAST,
            XRAYS,
            _retina("no", "yes"),
        ),
        Claim(
            "Margin control decreases the loss of the distribution shift",
            "method=fedld_margin",
            FEDAVG,
            SHIFT,
            ("shift", *XRAYS),
            source="eqs. 2 and 3",
            higher=False,
            unit="nats",
        ),
        Claim(
            "Principal gradients decrease the aggregation loss, as an absolute value",
            "method=fedld_principal",
            FEDAVG,
            AGGREGATION,
            ("shift", *XRAYS),
            source="eqs. 2 and 7",
            higher=False,
            unit="nats",
        ),
        Claim(
            "Both parts together decrease the loss on all data",
            FEDLD,
            FEDAVG,
            GLOBAL_LOSS,
            ("shift", *XRAYS),
            source="eqs. 1 and 2",
            higher=False,
            unit="nats",
        ),
    ),
    "fraug": (
        Claim(
            "FRAug is above FedBN on Digits",
            "method=fraug",
            "method=fedbn",
            BEST_VALIDATION,
            DIGITS,
            Printed("fraug/table2", "FRAug", "FedBN", "digits", "avg"),
        ),
        Claim(
            "FRAug is above FedAvg on Digits",
            "method=fraug",
            FEDAVG,
            BEST_VALIDATION,
            DIGITS,
            Printed("fraug/table2", "FRAug", "FedAvg", "digits", "avg"),
        ),
    ),
}
