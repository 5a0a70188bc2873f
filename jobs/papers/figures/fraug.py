"""Redraw Figure 2 of FRAug: accuracy against the share of local data."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.papers.figures.core import Panel, PaperFigure, Runs, panel, series

SHARES = (0.01, 0.03, 0.1)
METHODS = {"FedAvg": "fedavg", "FedBN": "fedbn", "FRAug": "fraug"}
SMALL = (
    "experiment=fraug/digits",
    "data.domains=[mnist,mnist_m,usps,digits]",
    "data.size=16",
    "model=small_cnn",
    "model.norm=batch",
    "rounds=40",
    "evaluate.every=5",
)


def shares(runs: Runs) -> Sequence[Panel]:
    """Return one panel: each method's accuracy against the amount of training data.

    The x-axis is `partition.fraction`. The accuracy is the clients' mean test accuracy. For each
    client, it is taken from the scored round in which the client's validation score is best.
    """
    lines = []
    for label, method in METHODS.items():
        values = []
        for share in SHARES:
            words = [f"method={method}", f"partition.fraction={share}"]
            words += ["method.fraug.ramp_rounds=300"] if method == "fraug" else []
            values.append(100 * float(runs.run(*SMALL, *words).rows[-1]["accuracy_best"] or 0))
        lines.append(series(label, SHARES, values))
    chart = panel(
        "lines", "mean of the clients' tests", "share of the images", "accuracy, %", lines
    )
    return [chart | {"log": True}]


FIGURES = (
    PaperFigure(
        "fraug/2",
        "accuracy against the amount of local data",
        "Digits at 16 x 16 pixels with scikit-learn's digits in place of SVHN, small CNN with "
        "BatchNorm, 40 rounds, one seed",
        shares,
    ),
)
