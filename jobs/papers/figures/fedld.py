"""Redraw Figure 2 of FedLD: the two terms of its loss decomposition against alpha.

alpha is the parameter of the Dirichlet distribution that splits the data. A smaller alpha makes the
clients' labels more uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from jobs.papers.figures.core import Panel, PaperFigure, Runs, panel, series

ALPHAS = (100.0, 10.0, 1.0, 0.1, 0.01)  # of the paper
SEEDS = (0, 1, 2)
TERMS = {"distribution_shift": "distribution shift loss", "aggregation": "aggregation loss"}
SMALL = (
    "experiment=fedld/retina",
    "data=pneumonia_mnist",
    "model=small_cnn",
    "partition.minimum=1",
    "rounds=10",
    "evaluate.decompose=10",
)


def terms(runs: Runs) -> Sequence[Panel]:
    """Return a panel for each of the two terms of FedLD's loss decomposition.

    The x-axis is the value alpha of the Dirichlet partition. The y-axis is the absolute value of
    the term in the last round of FedAvg, averaged over the seeds.
    """
    means: dict[str, list[float]] = {name: [] for name in TERMS}
    for alpha in ALPHAS:
        rows = [
            runs.run(*SMALL, f"partition.alpha={alpha}", f"seed={seed}", "method=fedavg").rows[-1]
            for seed in SEEDS
        ]
        for name in TERMS:
            values = [float(row[f"decomposition.{name}"] or 0) for row in rows]
            means[name].append(mean(abs(value) for value in values))
    panels = []
    for name, title in TERMS.items():
        lines = panel(
            "lines", title, "alpha", "absolute value, nats", [series("FedAvg", ALPHAS, means[name])]
        )
        panels.append(lines | {"log": True})
    return panels


FIGURES = (
    PaperFigure(
        "fedld/2",
        "both loss terms over alpha of the Dirichlet split",
        "chest X-rays (PneumoniaMNIST) in place of Retina, small CNN, FedAvg without FedLD's parts, "
        "after 10 rounds, means over three seeds; absolute values, as in the paper",
        terms,
    ),
)
