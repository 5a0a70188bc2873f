"""Map each number in a paper's tables to a command of `raysim run` and to a score of this run.

The score is compared with the number. Add a `PaperRuns` for each new paper: it maps a table's cell
to a `Command` and a `Score`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jobs.papers.tables import Cell, Table
from raysim.experiment.instantiate import format_value
from raysim.primitives.checks import finite_values
from raysim.results.history import Row, best_mean, column, last_mean_std


@dataclass(frozen=True)
class Command:
    """The command of a run.

    experiment: the preset.
    methods: the names of the methods; empty for FedAvg.
    overrides: maps the keys of overrides to values.
    path_overrides: overrides with a path that the user must fill in, such as "data.root=DIR".
    """

    experiment: str
    methods: tuple[str, ...]
    overrides: Mapping[str, object] = field(default_factory=dict)
    path_overrides: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the command as arguments of `raysim run`."""
        settings = [f"{key}={format_value(value)}" for key, value in self.overrides.items()]
        methods = "+".join(self.methods) or "fedavg"
        return [
            f"experiment={self.experiment}",
            f"method={methods}",
            *settings,
            *self.path_overrides,
        ]

    def __str__(self) -> str:
        return f"raysim run {' '.join(self.arguments())}"


@dataclass(frozen=True)
class Score:
    """A rule that computes a score from the history of a run, such as the best accuracy.

    column: the history column from which the score is computed. The number of rounds until an
    accuracy is reached is computed from this column, too.
    summary(rows, name): returns the score from the history's rows and the column's name; None if
    there is no score.
    factor: the factor on the score, such as 100 for percent.
    spread(rows, name): returns the standard deviation over the rounds of a run. `spread` is None if
    the table prints no such deviations.
    additional_columns: the history columns of additional scores, by the title of the score. These
    scores also use `summary` and `factor`.
    """

    column: str
    summary: Callable[[Sequence[Row], str], float | None]
    factor: float = 1.0
    spread: Callable[[Sequence[Row], str], float | None] | None = None
    additional_columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PaperRuns:
    """A map from the cells of a paper's tables to commands of our runs and to their scores.

    own_method: the paper's method, such as "fedld". Names of its partial variants begin with it.
    command, score: functions that return our run's command and score for a cell.
    row_prefixes: rows of a table differ in the values of keys with these prefixes, such as
    "method.".
    score_explanation: which of our scores is compared with the printed numbers.
    gains: the scores for which gains over FedAvg are computed, by title.
    gain_score_name: completes the sentence "Gains in points of ...", such as "the mean of the five
    best rounds".
    """

    own_method: str
    command: Callable[[Table, Cell], Command]
    score: Callable[[Table, Cell], Score]
    row_prefixes: tuple[str, ...] = ("method.",)
    notes: Mapping[str, str] = field(default_factory=dict)
    score_explanation: str = ""
    gains: Mapping[str, Score] = field(default_factory=dict)
    gain_score_name: str = ""


def best_five(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of the five highest values in the column `name`.

    If there are fewer values, return the mean of all; without values, return None.
    """
    return best_mean(column(rows, name))


def per_job(rows: Sequence[Row], name: str) -> float | None:
    """Return the sum of the column `name`, divided by the run's number of aggregated jobs.

    Return None if the column has no values, or if no job was aggregated.
    """
    return _per_job(finite_values(column(rows, name)), rows)


def total_per_job(rows: Sequence[Row], name: str) -> float | None:
    """Return the last value of the column `name`, divided by the number of aggregated jobs.

    The column must be a running sum over rounds. Return None if it has no values, or if no job was
    aggregated.
    """
    return _per_job(finite_values(column(rows, name))[-1:], rows)


def _per_job(values: Sequence[float], rows: Sequence[Row]) -> float | None:
    jobs = sum(finite_values(column(rows, "clients")))
    return sum(values) / jobs if values and jobs else None


# --- FedBR ----------------------------------------------------------------------------------------
# Map each key of a variant to a function from its value to overrides. pseudo_data needs none: the
# presets already have its batch size.
FEDBR: dict[str, Callable[[object], dict[str, object]]] = {
    "virtual_data": lambda value: {"method.vhl.virtual": value},
    "pseudo_data": lambda value: {},
    "pseudo_refresh": lambda value: {"method.fedbr.pseudo_refresh": value},
    "pseudo_kind": lambda value: {"method.fedbr.pseudo": value},
    "components": lambda value: {"method.fedbr.mu": 0} if value == [1] else {"method.fedbr.lam": 0},
    "removed": lambda value: {"method.fedbr.max_step": False},
    "tau1": lambda value: {"method.fedbr.tau1": value},
    "tau2": lambda value: {"method.fedbr.tau2": value},
    "lambda": lambda value: {"method.fedbr.lam": value},
}
PRESETS = {"fedbr/table5": "fedbr/cifar10_100_clients", "fedbr/table9": "fedbr/cifar10_clean"}
LOCAL_MODELS = "Local Model Performance"
PROBE = 10  # rounds between measurements of local models; not stated in the paper


def fedbr_command(table: Table, cell: Cell) -> Command:
    """Return the command of our run for a cell of FedBR's tables."""
    variant = dict(cell.variant)
    if variant.pop("added", None):
        # Component 1 with the min step of component 2 is the whole method without the max step.
        variant.pop("components", None)
        variant["removed"] = "max step"
    overrides: dict[str, object] = {}
    for name, setting in variant.items():
        overrides.update(FEDBR[name](setting))
    if "fedcm" in cell.methods and table.momentum.get(cell.dataset):
        overrides["local.momentum"] = 0  # FedCM replaces the local momentum
    if "local" in cell.methods or table.name == "fedbr/table6":
        overrides["evaluate.probe"] = PROBE
    path_overrides = ("data.root=DIR",) if cell.dataset == "pacs" else ()
    return Command(
        PRESETS.get(table.name, f"fedbr/{cell.dataset}"), cell.methods, overrides, path_overrides
    )


FEDBR_SCORE_EXPLANATION = (
    "The paper's text says that 20 % of each client's own data are its test set. Its code scores "
    "these and also the whole test set at each of ten angles. We compare with the second "
    "(central), because the paper's local models, trained on about one class each, score 10.0 % on "
    "CIFAR10, which is only possible on a test set with all classes in equal shares. For Table 14 "
    "we compare the worst angle; on PACS, which has only the clients' tests, the worst client. "
    "Local mean and local worst are scores on the clients' own tests, by the same rule (mean of "
    "the five best rounds)."
)
FEDBR_ADDITIONAL_COLUMNS = {
    "local mean": "accuracy",
    "local worst": "accuracy_worst",
    "central": "accuracy_global",
}


def fedbr_score(table: Table, cell: Cell) -> Score:
    """Return the rule that computes our score for a cell of FedBR's tables.

    The score is an accuracy in percent, the mean over the five best rounds. For Table 14, it is the
    accuracy of the worst angle or of the worst client. For tables of costs, the score is the number
    of floats that a job receives, in millions, or the seconds that a job trains.
    """
    if cell.unit == "million parameters":
        # In the paper, FedCM has twice the number of FedAvg. FedCM sends more only to clients, so the
        # paper counts what clients receive.
        return Score("floats_down", total_per_job, 1e-6)
    if cell.unit == "seconds":
        return Score("worker_seconds", per_job)
    if table.name == "fedbr/table14":
        worst = "accuracy_worst" if cell.dataset == "pacs" else "accuracy_worst_domain"
        return Score(worst, best_five, 100, additional_columns=FEDBR_ADDITIONAL_COLUMNS)
    local = "local" in cell.methods or cell.column == LOCAL_MODELS
    return Score(
        "local_accuracy" if local else "accuracy_global",
        best_five,
        100,
        additional_columns=FEDBR_ADDITIONAL_COLUMNS,
    )


# --- FedBSS ---------------------------------------------------------------------------------------
FEDBSS: dict[str, Callable[[float], dict[str, object]]] = {
    "dirichlet": lambda value: {"partition.alpha": value},
    "shards": lambda value: {"partition": "shards", "partition.shards_per_client": int(value)},
    "label_noise": lambda value: {"partition": "iid", "data.label_noise": value},
}


def fedbss_command(table: Table, cell: Cell) -> Command:
    """Return the command of our run for a cell of FedBSS's tables.

    The columns of the tables are splits of the data, or shares of wrong labels.
    """
    kind, value = cell.column.split()
    return Command(f"fedbss/{cell.dataset}", cell.methods, FEDBSS[kind](float(value)))


FEDBSS_SCORE_EXPLANATION = (
    "Mean and standard deviation over the last ten rounds of the accuracy on the central test set. "
    "The paper does not say which test set it scores. Its ± is over the same rounds of a run."
)


def last_ten(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of the last ten values in the column `name`.

    Rounds that were not scored have no value. If there are fewer than ten values, return the mean
    of all; without values, return None.
    """
    return last_mean_std(column(rows, name))[0]


def deviation_of_last_ten(rows: Sequence[Row], name: str) -> float | None:
    """Return the population standard deviation of the last ten values in the column `name`.

    Rounds that were not scored have no value. If there are fewer than ten values, use all; without
    values, return None.
    """
    return last_mean_std(column(rows, name))[1]


def fedbss_score(table: Table, cell: Cell) -> Score:
    """Return the rule that computes our score for FedBSS's tables.

    The score is the central test accuracy in percent, the mean over the last ten scored rounds. The
    spread is the standard deviation over these rounds.
    """
    return Score("accuracy_global", last_ten, 100, deviation_of_last_ten)


# --- FRAug ----------------------------------------------------------------------------------------
# The marks of Table 3 are not readable, so the missing parts of rows 1 to 6 are our guess. Row 7 is
# the whole method.
FRAUG_ROWS: dict[object, dict[str, object]] = {
    1: {"use_rtnet": False, "prototype_weight": 1, "residual": 1},
    2: {"use_generator": False, "prototype_weight": 1, "residual": 1},
    3: {"prototype_weight": 1, "residual": 1},
    4: {"residual": 1},
    5: {"prototype_weight": 1},
    6: {"use_rtnet": False},
    7: {},
}
# Map the printed letters of the domains to prefixes of the folder names.
FRAUG_DOMAINS = {
    "office_home": {"A": "Art", "C": "Clipart", "P": "Product", "R": "Real"},
    "pacs": {"A": "art", "C": "cartoon", "P": "photo", "S": "sketch"},
    "digits": {"MT": "mnist", "MM": "mnist_m", "SV": "svhn", "UP": "usps"},
}
AVERAGES = ("Avg", "avg")  # the columns with an average over the domains
HEAD_EPOCHS = 10  # of the head in Table 1; not stated in the paper
FRAUG_NOTES = {
    "fraug/table1": (
        f"we train the head for {HEAD_EPOCHS} epochs, which the paper does not state, on all "
        "training samples of the client's domain; the whole network was trained on the share "
        "partition.fraction of them"
    ),
    "fraug/table3": "the missing parts of our rows 1 to 6 are a guess: see the commands",
}


def fraug_command(table: Table, cell: Cell) -> Command:
    """Return the command of our run for a cell of FRAug's tables."""
    overrides: dict[str, object] = {
        f"method.fraug.{key}": value
        for key, value in FRAUG_ROWS.get(cell.variant.get("row"), {}).items()
    }
    if cell.variant.get("head_finetune"):
        overrides |= {
            "evaluate.finetune.epochs": HEAD_EPOCHS,
            "evaluate.finetune.head": True,
            "evaluate.finetune.last": True,
            "evaluate.finetune.samples": "all",
        }
    return Command(f"fraug/{cell.dataset}", cell.methods, overrides, ("data.root=DIR",))


FRAUG_SCORE_EXPLANATION = (
    "Each client's test accuracy in the round in which its validation accuracy was highest, as the "
    "paper's code chooses its checkpoints. On OfficeHome and PACS that code then scores the same "
    "validation samples that chose the round; this score is our best validation. Our compared "
    "score uses other samples."
)


def fraug_score(table: Table, cell: Cell) -> Score:
    """Return the rule that computes our score for a cell of FRAug's tables.

    The score is the clients' mean test accuracy in percent. Each client's accuracy is that in the
    round in which the client's validation accuracy is highest. Models with fine-tuned heads are
    scored once, at the end.
    """
    kind = "accuracy_finetuned" if cell.variant.get("head_finetune") else "accuracy_best"
    letter = cell.column
    if letter in AVERAGES:
        return Score(
            kind,
            last,
            100,
            additional_columns={
                "last round": "accuracy",
                "best validation": "accuracy_validation_best",
            },
        )
    domain = FRAUG_DOMAINS[cell.dataset][letter]
    return Score(
        f"{kind}.{domain}",
        last_of_domain,
        100,
        additional_columns={"last round": f"accuracy.{domain}"},
    )


def last(rows: Sequence[Row], name: str) -> float | None:
    """Return the last value in the column `name`, or None if the column has no values."""
    return next(reversed(finite_values(column(rows, name))), None)


def last_of_domain(rows: Sequence[Row], name: str) -> float | None:
    """Return the last value in the column of a domain, or None without values.

    name: the beginning of the column's name, without regard to case and separators. Of several such
    columns, the one with the shortest name is used.
    """
    wanted = _simple(name)
    names = dict.fromkeys(key for row in rows for key in row if _simple(key).startswith(wanted))
    return last(rows, min(names, key=len)) if names else None


def _simple(name: str) -> str:
    return re.sub(r"[ _-]", "", name).lower()


# --- FedLD ----------------------------------------------------------------------------------------
FEDLD_SPLITS = {  # Retina's columns
    "Split-1": {"partition.alpha": 100.0, "method.fedld_margin.lam": 0.1},
    "Split-2": {"partition.alpha": 1.0, "method.fedld_margin.lam": 0.03},
    "Split-3": {"partition.alpha": 0.5, "method.fedld_margin.lam": 0.03},
}
FEDLD_NAMES = {"fedgh": ("fedgh_hierarchical",), "fedld": ("fedld_margin", "fedld_principal")}
OWN_MODELS = ("fedbn", "fedpac")
_FEDLD_OWN_MODELS = (
    "the models of FedBN's and FedPAC's clients are scored on the central test set and averaged, "
    "as in the released code"
)
FEDLD_NOTES = {
    "fedld/table1": f"{_FEDLD_OWN_MODELS}; FedGH is the version of that code",
    "fedld/table3": f"{_FEDLD_OWN_MODELS}; our margin weight is 0.03, as in Split-3",
}


def fedld_command(table: Table, cell: Cell) -> Command:
    """Return the command of our run for a cell of FedLD's tables."""
    methods = tuple(part for name in cell.methods for part in FEDLD_NAMES.get(name, (name,)))
    methods = tuple(name for name in methods if cell.variant.get(name.removeprefix("fedld_"), True))
    overrides: dict[str, object] = dict(FEDLD_SPLITS.get(cell.column, {}))
    if table.name == "fedld/table3":
        overrides |= FEDLD_SPLITS["Split-3"] | {"partition.clients": 50}
    if "fedld_margin" not in methods:
        overrides.pop("method.fedld_margin.lam", None)
    if set(methods) & set(OWN_MODELS):
        overrides["evaluate.common"] = True
    if "fedpac" in methods:
        overrides["local.epochs"] = 2
    return Command(f"fedld/{cell.dataset}", methods, overrides, ("data.root=DIR",))


FEDLD_SCORE_EXPLANATION = "The last accuracy on the central test set."


def fedld_score(table: Table, cell: Cell) -> Score:
    """Return the rule that computes our score for FedLD's tables.

    The score is the last accuracy on the central test set, in percent. With FedBN and FedPAC, each
    client has its own model, and the score is the mean over these models. With all other methods,
    the score is that of the shared model.
    """
    return Score(
        "accuracy_common" if set(cell.methods) & set(OWN_MODELS) else "accuracy_global", last, 100
    )


def last_central(rows: Sequence[Row], name: str) -> float | None:
    """Return a run's last accuracy on the central test set, or None without values.

    Return the clients' mean (column `accuracy_common`) if the run has it, else the shared model's
    score.
    name: the column with the shared model's score.
    """
    own = last(rows, "accuracy_common")
    return last(rows, name) if own is None else own


PAPER_RUNS = {
    "fedbr": PaperRuns(
        "fedbr",
        fedbr_command,
        fedbr_score,
        score_explanation=FEDBR_SCORE_EXPLANATION,
        gains={
            "central": Score("accuracy_global", best_five, 100),
            "local mean": Score("accuracy", best_five, 100),
        },
        gain_score_name="the mean of the five best rounds",
    ),
    "fedbss": PaperRuns(
        "fedbss",
        fedbss_command,
        fedbss_score,
        ("method.", "partition", "data.label_noise"),
        score_explanation=FEDBSS_SCORE_EXPLANATION,
        gains={"central": Score("accuracy_global", last_ten, 100)},
        gain_score_name="the mean of the last ten rounds",
    ),
    "fedld": PaperRuns(
        "fedld",
        fedld_command,
        fedld_score,
        ("method.", "partition"),
        FEDLD_NOTES,
        FEDLD_SCORE_EXPLANATION,
        gains={"central": Score("accuracy_global", last_central, 100)},
        gain_score_name="the final accuracy",
    ),
    "fraug": PaperRuns(
        "fraug",
        fraug_command,
        fraug_score,
        ("method.", "evaluate.finetune"),
        FRAUG_NOTES,
        FRAUG_SCORE_EXPLANATION,
        gains={"clients' tests": Score("accuracy_best", last, 100)},
        gain_score_name="the test accuracy in each client's round of best validation",
    ),
}
