"""Pictures of what a run looked at besides accuracy and loss: probes, domains, loss decomposition, methods' reports."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.api.messages import Probe
from raysim.data.partition import Floats, Ints
from raysim.primitives.checks import finite_values
from raysim.primitives.files import replace_file
from raysim.results.history import Row, metric_of
from raysim.results.theme import LIGHT, page_theme
from raysim.training.probe import output_distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_INK, _SOFT = "#22262a", "#9aa1a7"
_CLASS_COLOURS = (*LIGHT, "#a9b800", _INK)
_MARKERS = ("o", "^", "s", "D", "v")  # the received model first
_MODELS, _ROWS, _PANELS = (
    4,
    150,
    6,
)  # clients and rows of a t-SNE (a few seconds), clients of a figure of outputs


@contextmanager
def figure_file(
    path: Path | io.BytesIO,
    title: str,
    size: tuple[float, float],
    *,
    dark: bool = False,
    about: Mapping[str, str] | None = None,
) -> Iterator[Figure]:
    """A figure in the report's looks; when the block ends it is a PNG with 130 pixels per inch.

    dark: for a dark page. about: what the file says of itself.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(page_theme(dark) | {"axes.titlesize": 11}):
        figure = Figure(figsize=size, dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        figure.suptitle(textwrap.fill(title, int(9 * size[0])), fontsize=13)
        yield figure
        figure.savefig(buffer := io.BytesIO(), format="png", metadata=about)
    if isinstance(path, io.BytesIO):
        path.write(buffer.getvalue())
    else:
        replace_file(Path(path), buffer.getvalue())


def _say(ax: Axes, sentence: str) -> None:
    """A sentence where there is nothing to draw."""
    ax.set_axis_off()
    ax.text(
        0.5,
        0.5,
        textwrap.fill(sentence, 30),
        transform=ax.transAxes,
        ha="center",
        va="center",
        alpha=0.8,
    )


def _comparable(probes: Sequence[Probe]) -> list[Probe]:
    """Some clients that received one model, of the version which most did (the newest of these), on the same rows."""
    finite = [p for p in probes if np.isfinite(p.features).all() and np.isfinite(p.received).all()]
    counts = Counter(probe.version for probe in finite)
    version = max(counts, key=lambda v: (counts[v], v), default=None)
    chosen = [probe for probe in finite if probe.version == version]
    return [probe for probe in chosen if np.array_equal(probe.labels, chosen[0].labels)][:_MODELS]


def _shown_rows(labels: Ints) -> Ints:
    """About `_ROWS` positions, balanced, of as many classes as there are colours: the first ones of each."""
    classes = np.unique(labels)[: len(_CLASS_COLOURS)]
    return np.concatenate(
        [np.flatnonzero(labels == c)[: max(1, _ROWS // len(classes))] for c in classes]
    )


def _embed(features: Floats) -> Floats:
    """t-SNE of [m, F] to [m, 2], m >= 2; always the same for the same features."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    features = features / (
        np.abs(features).max() or 1.0
    )  # t-SNE knows no scale, but squares what it is given
    perplexity = min(30.0, (len(features) - 1) / 3)
    start = "pca" if features.shape[1] > 1 and np.ptp(features, axis=0).any() else "random"
    tsne = TSNE(perplexity=perplexity, init=start, random_state=0)
    with threadpool_limits(
        1, "openmp"
    ):  # its threads wait for each other, ten times as long where a core is busy
        embedded: Floats = tsne.fit_transform(features)
    return embedded


def draw_features(probes: Sequence[Probe], path: Path, title: str) -> None:
    """Write a joint t-SNE of the received features and those of up to 4 local models on the same rows (Figures 2, 15).

    Shown are up to 10 classes and about 150 rows, for clients which received the same version.
    """
    chosen = _comparable(probes)
    with figure_file(path, title, (12.0, 6.9 if chosen else 3.0)) as figure:
        if not chosen:
            return _say(figure.subplots(), "No probed model has finite features on these rows.")
        rows = _shown_rows(chosen[0].labels)
        features = np.stack(
            [chosen[0].received[rows], *(probe.features[rows] for probe in chosen)]
        ).astype(np.float64)
        points = _embed(features.reshape(-1, features.shape[-1])).reshape(
            len(features), len(rows), 2
        )
        names = [
            f"received model (version {chosen[0].version})",
            *(f"client {probe.client}" for probe in chosen),
        ]
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        _by_class(left, points, chosen[0].labels[rows])
        _by_model(right, points, names)
        for ax in (left, right):
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(visible=True, color=_SOFT)
    return None


def _by_class(ax: Axes, points_MBD: Floats, labels: Ints) -> None:
    from matplotlib.lines import Line2D

    classes = np.unique(labels)
    colours = np.array(_CLASS_COLOURS)[np.searchsorted(classes, labels)]
    for points, marker in zip(points_MBD, _MARKERS, strict=False):
        ax.scatter(
            points[:, 0], points[:, 1], c=colours, marker=marker, s=24, alpha=0.75, linewidths=0
        )
    handles = [
        Line2D([], [], color=c, marker="o", linestyle="") for c in _CLASS_COLOURS[: len(classes)]
    ]
    ax.set_title("coloured by class, markers as on the right")
    ax.legend(
        handles, [str(c) for c in classes], title="class", loc="upper center", bbox_to_anchor=(0.5, -0.01),
        ncols=5, handletextpad=0.1, columnspacing=1.4,
    )  # fmt: skip


def _by_model(ax: Axes, points_MBD: Floats, names: Sequence[str]) -> None:
    for points, marker, name, colour in zip(
        points_MBD, _MARKERS, names, (_SOFT, *LIGHT), strict=False
    ):
        # What the others are to be compared with lies below them, and shows around them.
        size, alpha = (70, 0.55) if colour == _SOFT else (24, 0.85)
        ax.scatter(
            points[:, 0],
            points[:, 1],
            c=colour,
            marker=marker,
            s=size,
            alpha=alpha,
            linewidths=0,
            label=name,
        )
    ax.set_title("coloured by model")
    ax.legend(
        title="model",
        loc="upper center",
        bbox_to_anchor=(0.5, -0.01),
        ncols=3,
        handletextpad=0.1,
        columnspacing=1.4,
    )


def draw_outputs(probes: Sequence[Probe], path: Path, title: str) -> None:
    """Write the mean output over samples of unseen classes, for up to 6 clients which have such classes (Figure 3)."""
    outputs = [
        (probe, output_distribution(probe.probabilities, probe.labels, probe.seen))
        for probe in probes
    ]
    biased = [(probe, output) for probe, output in outputs if output is not None][:_PANELS]
    across = min(3, max(1, len(biased)))
    down = math.ceil(len(biased) / across)
    with figure_file(
        path, title, (max(7.0, 4.2 * across), 1.2 + 2.9 * down) if biased else (7.0, 3.0)
    ) as figure:
        if not biased:
            return _say(figure.subplots(), "Every probed client has seen every class.")
        panels = figure.subplots(down, across, sharey=True, squeeze=False)
        for ax, (probe, output) in zip(panels.flat, biased, strict=False):
            _bars(ax, probe, output)
        for ax in panels[:, 0]:
            ax.set_ylabel("mean probability")
        for ax in panels.flat[len(biased) :]:
            ax.set_axis_off()
        handles, names = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3)
    return None


def _bars(ax: Axes, probe: Probe, output: Floats) -> None:
    from matplotlib.ticker import MaxNLocator

    classes, rows = np.arange(len(output)), ~probe.seen[probe.labels]
    truth = np.bincount(probe.labels[rows], minlength=len(output)) / rows.sum()
    for chosen, colour, label in (
        (probe.seen, LIGHT[0], "seen class"),
        (~probe.seen, LIGHT[1], "unseen class"),
    ):
        ax.bar(classes[chosen], output[chosen], 0.8, color=colour, label=label)
    ax.hlines(
        truth[~probe.seen], classes[~probe.seen] - 0.4, classes[~probe.seen] + 0.4, color=_INK, linewidth=1.4,
        label="true share of the samples",
    )  # fmt: skip
    ax.set_title(f"client {probe.client}: {probe.seen.sum()} of {len(output)} classes seen")
    ax.set_xlabel("class")
    ax.xaxis.set_major_locator(MaxNLocator(11, integer=True))


_PROBED = (
    "local_accuracy", "local_accuracy_worst", "feature_distance", "feature_similarity", "feature_likeness",
    "unseen_probability", "seen_share",
)  # fmt: skip


def draw_bias(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write how accuracy, feature bias and classifier bias go over the rounds; False, and no file, without probes."""
    if not finite_values([row.get(key) for row in rows for key in _PROBED]):
        return False
    with figure_file(path, title, (14.0, 5.0)) as figure:
        accuracy, features, classifier = figure.subplots(1, 3, sharex=True)
        similarity = features.twinx()
        similarity.spines["right"].set_visible(True)
        curves = [
            _over_rounds(accuracy, rows, "accuracy_global", "global model", LIGHT[7]),
            _over_rounds(accuracy, rows, "local_accuracy", "local models, mean", LIGHT[0]),
            _over_rounds(accuracy, rows, "local_accuracy_worst", "local models, worst", LIGHT[1]),
            _over_rounds(
                features,
                rows,
                "feature_distance",
                "distance / length of received features",
                LIGHT[0],
            ),
            _over_rounds(
                similarity,
                rows,
                "feature_similarity",
                "cosine, local and received (right axis)",
                LIGHT[1],
            ),
            _over_rounds(
                similarity,
                rows,
                "feature_likeness",
                "cosine, seen and unseen classes (right axis)",
                LIGHT[2],
            ),
            _over_rounds(classifier, rows, "unseen_probability", "of the true class", LIGHT[0]),
            _over_rounds(classifier, rows, "seen_share", "of all seen classes together", LIGHT[1]),
        ]
        accuracy.set(title="Accuracy on the central test set", ylabel="accuracy")
        features.set(title="Features of local models", ylabel="relative distance")
        similarity.set(ylabel="cosine similarity")
        classifier.set(
            title="Output on classes never seen", ylabel="mean probability", ylim=(-0.02, 1.02)
        )
        for ax, lines in (
            (accuracy, curves[:3]),
            (features, curves[3:6]),
            (classifier, curves[6:]),
        ):
            ax.grid(True)
            handles = [line for found in lines for line in found]
            ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16))
        if not classifier.lines:
            _say(classifier, "Every probed client has seen every class.")
    return True


def draw_reports(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write what methods report of themselves, columns "method.name", over the rounds; False, and no file, without."""
    own = (metric_of(rows), "decomposition.")  # have pictures of their own
    keys = [key for key in _dotted(rows) if not key.startswith(own)]
    if not keys:
        return False
    across = min(3, len(keys))
    down = -(-len(keys) // across)
    with figure_file(path, title, (4.6 * across, 3.6 * down)) as figure:
        panels = list(figure.subplots(down, across, squeeze=False).flat)
        for ax, key in zip(panels, keys, strict=False):
            _over_rounds(ax, rows, key, key, LIGHT[0])
            ax.set(title=key.replace("_", " "))
            ax.grid(True)
        for ax in panels[len(keys) :]:
            ax.set_visible(False)
    return True


_TERMS = {
    "global_loss": "after aggregation, all data",
    "local_loss": "local models at home",
    "distribution_shift": "distribution shift",
    "aggregation": "aggregation",
}


def draw_decomposition(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write FedLD's parts of the loss, signed, over the rounds; False, and no file, without."""
    if not any(key.startswith("decomposition.") for key in _dotted(rows)):
        return False
    with figure_file(path, title, (7.0, 4.8)) as figure:
        ax = figure.subplots()
        ax.axhline(0, color=_SOFT, linewidth=1)
        for (name, label), colour in zip(_TERMS.items(), (_INK, *LIGHT), strict=False):
            _over_rounds(ax, rows, f"decomposition.{name}", label, colour)
        ax.set(title="Loss on the participants' samples, and its three parts", ylabel="mean loss")
        ax.grid(True)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return True


def draw_domains(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write the scores of every domain over the rounds, a panel for each kind of model; False without domains."""
    metric = metric_of(rows)
    kinds: dict[str, list[str]] = {}
    for key in _dotted(rows):
        kind, _, domain = key.partition(".")
        if kind.startswith(metric):
            kinds.setdefault(kind, []).append(domain)
    if not kinds:
        return False
    names = {
        metric: "Clients' models",
        f"{metric}_shared": "Shared model",
        f"{metric}_finetuned": "Fine-tuned models",
    }
    with figure_file(path, title, (5.6 * len(kinds), 4.8)) as figure:
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False).flat
        for ax, (kind, domains) in zip(panels, kinds.items(), strict=True):
            for domain, colour in zip(
                domains, itertools.cycle((*LIGHT, "#a9b800", _INK)), strict=False
            ):
                _over_rounds(ax, rows, f"{kind}.{domain}", domain, colour)
            ax.set(title=f"{names.get(kind, kind)}, by domain", ylabel=metric)
            ax.grid(True)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)
    return True


def _dotted(rows: Sequence[Row]) -> list[str]:
    """Columns "kind.name" that hold a number, in the order of their first."""
    return list(
        dict.fromkeys(
            key for row in rows for key in row if "." in key and finite_values([row[key]])
        )
    )


def _over_rounds(ax: Axes, rows: Sequence[Row], key: str, label: str, colour: str) -> list[Line2D]:
    """Draw the known values of a column; the line, or none where there is no value."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    points = [
        (float(row.get("round") or 0), value)
        for row in rows
        for value in finite_values([row.get(key)])
    ]
    if not points:
        return []
    marker = (
        "o" if len(points) <= 12 else None
    )  # few points are seen as points, as in a run's other plots
    return ax.plot(*np.array(points).T, color=colour, marker=marker, markersize=4, label=label)
