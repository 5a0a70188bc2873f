"""Redraw Figures 3 to 5 of FedBSS with a small CNN.

Figures 3 and 5 use Fashion-MNIST at 14 x 14 pixels, Figure 4 digits of four domains at 16 x 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jobs.papers.figures.core import Panel, PaperFigure, Runs, curve, panel, series

SCALE = (
    "Fashion-MNIST in place of CIFAR-10, 14 x 14 pixels, small CNN, a twentieth of the images, 40 "
    "rounds of 10 epochs at rate 0.1, one seed"
)
SMALL = (
    "experiment=fedbss/fashion_mnist",
    "data.pool=2",
    "model=small_cnn",
    "partition.fraction=0.05",
    "local.lr=0.1",
    "rounds=40",
)
NOISY = (*SMALL, "partition=iid", "data.label_noise=0.5")
WARMUP = 10  # a quarter of the rounds, as in the paper
ACCURACY = "accuracy, %"


def _accuracy(label: str, runs: Runs, *overrides: str) -> dict[str, object]:
    return curve(label, runs.run(*overrides), "accuracy_global", 100)


def halves(runs: Runs, column: str, factor: float, y: str) -> Sequence[Panel]:
    """Return two panels with the values of a history column in each round.

    The first panel is about unevenly distributed labels, the second about 50 % wrong labels. Both
    panels compare three ways of training: on all samples, on the half with the lowest losses, and
    on the half with the highest losses.
    column: the name of the column, in which {} stands for the name of the method.
    factor: the factor on the values.
    y: the label of the vertical axis.
    """
    panels = []
    for title, setting in (("Dirichlet 0.1", SMALL), ("50 % wrong labels", NOISY)):
        methods = (
            ("all samples", ("method=moved",)),
            ("low loss", ("method=loss_half",)),
            ("high loss", ("method=loss_half", "method.loss_half.half=high")),
        )
        lines = []
        for label, method in methods:
            result = runs.run(*setting, *method)
            name = column.format(method[0].partition("=")[2])
            lines.append(curve(label, result, name, factor))
        panels.append(panel("lines", title, "round", y, lines))
    return panels


def loss_and_uncertainty(runs: Runs) -> Sequence[Panel]:
    """Return panels of loss against uncertainty: a point for each sample of one client."""
    panels = []
    for title, setting in (("Dirichlet 0.1", SMALL), ("50 % wrong labels", NOISY)):
        result = runs.run(*setting, "method=fedbss", f"method.fedbss.warmup_rounds={WARMUP}")
        client, state = _most_recently_ranked(result)
        losses, uncertainties = state["fedbss.losses"], state["fedbss.uncertainties"]
        border = float(losses[np.argmax(uncertainties)])
        biased = losses > border
        lines = [
            series("unbiased", losses[~biased].tolist(), uncertainties[~biased].tolist()),
            series("biased", losses[biased].tolist(), uncertainties[biased].tolist()),
        ]
        panels.append(panel("points", f"{title}, client {client}", "loss", "uncertainty", lines))
    return panels


def _most_recently_ranked(result: object) -> tuple[int, dict[str, np.ndarray]]:
    """Return which of the first thirty clients trained most recently, and its client state.

    FedBSS ranks a client's samples when the client trains.
    result: the `Result` of a run.
    """
    states = {client: result.client_state(client) for client in range(30)}  # type: ignore[attr-defined]
    client = max(states, key=lambda client: int(states[client]["fedbss.version"][0]))
    return client, states[client]


def split_points(runs: Runs) -> Sequence[Panel]:
    """Return a panel with the split point of five clients over the rounds.

    The split point is the share of a client's samples that FedBSS treats as unbiased.
    """
    result = runs.run(*SMALL, "method=split_points", "schedule.cohort=5", "partition.clients=5")
    lines = [
        curve(f"client {client}", result, f"split_points.client_{client}") for client in range(5)
    ]
    return [panel("lines", "Dirichlet 0.1", "round", "share of unbiased samples", lines)]


def feature_skew(runs: Runs) -> Sequence[Panel]:
    """Return a panel with the final accuracy of each method on each domain."""
    setting = (
        "experiment=fraug/digits",
        "data.domains=[mnist,mnist_m,usps,digits]",
        "data.size=16",
        "model=small_cnn",
        "partition.fraction=0.02",
        "local.epochs=5",
        "local.steps=null",
        "rounds=30",
    )
    domains = ("mnist", "mnist_m", "usps", "digits")
    lines = []
    for label, methods in (
        ("FedAvg", ("method=fedavg",)),
        ("FedProx", ("method=fedprox",)),
        ("FedBN", ("method=fedbn", "model.norm=batch")),
        ("FedBSS", ("method=fedbss", "method.fedbss.warmup_rounds=8")),
    ):
        rows = runs.run(*setting, *methods).rows
        values = [100 * float(rows[-1][f"accuracy.{domain}"] or 0) for domain in domains]
        lines.append(series(label, range(len(domains)), values))
    bars = panel("bars", "a domain per client", "domain", ACCURACY, lines)
    return [bars | {"ticks": list(domains)}]


def warmups(runs: Runs) -> Sequence[Panel]:
    """Return a panel with the accuracy over rounds for four lengths of FedBSS's warm-up."""
    lines = []
    for of_paper in (0, 25, 50, 100):
        rounds = of_paper * 40 // 200
        words = ("method=fedbss", f"method.fedbss.warmup_rounds={rounds}")
        label = f"{rounds} of 40 rounds ({of_paper} of 200)"
        lines.append(_accuracy(label, runs, *SMALL, *words))
    return [panel("lines", "rounds of warm-up", "round", ACCURACY, lines)]


def strategies(runs: Runs) -> Sequence[Panel]:
    """Return panels with the accuracy over rounds for FedBSS's ways to add biased samples."""
    panels = []
    for title, setting in (("Dirichlet 0.1", SMALL), ("50 % wrong labels", NOISY)):
        lines = []
        for kind in ("cosine", "linear", "filter", "all"):
            words = ["method=fedbss", f"method.fedbss.warmup_rounds={WARMUP}"]
            words += [] if kind == "cosine" else [f"method.fedbss.kind={kind}"]
            lines.append(_accuracy(kind, runs, *setting, *words))
        panels.append(panel("lines", title, "round", ACCURACY, lines))
    return panels


FIGURES = (
    PaperFigure(
        "fedbss/3a",
        "training on half of each client's samples, by loss: accuracy",
        SCALE,
        lambda runs: halves(runs, "accuracy_global", 100, ACCURACY),
    ),
    PaperFigure(
        "fedbss/3b",
        "training on half of each client's samples, by loss: distance that the clients move",
        SCALE,
        lambda runs: halves(runs, "{}.moved", 1, "distance"),
    ),
    PaperFigure(
        "fedbss/3c", "loss against uncertainty of a client's samples", SCALE, loss_and_uncertainty
    ),
    PaperFigure(
        "fedbss/3d",
        "the split points of clients over the rounds",
        f"{SCALE}; five clients without a warm-up",
        split_points,
    ),
    PaperFigure(
        "fedbss/4",
        "accuracy under feature skew",
        "MNIST, MNIST-M, USPS and scikit-learn's digits at 16 x 16 pixels in place of DomainNet, "
        "small CNN, for FedBN with BatchNorm, a fiftieth of the images, 30 rounds of 5 epochs, one "
        "seed",
        feature_skew,
    ),
    PaperFigure("fedbss/5a", "the number of rounds of warm-up", SCALE, warmups),
    PaperFigure("fedbss/5b", "the ways to add biased samples", SCALE, strategies),
)
