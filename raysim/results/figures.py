"""Draw probes, scores of domains, loss decompositions and the numbers that methods report.

A loss decomposition splits the loss after an aggregation into the local loss, the shift between
clients' data, and the effect of the aggregation.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.api.messages import Probe
from raysim.data.partition import Floats, Ints
from raysim.primitives.checks import finite_values
from raysim.primitives.files import replace_file
from raysim.results.history import Row, metric_of, metrics_of
from raysim.results.theme import INK, LIGHT, MANY_COLOURS, line_style, page_theme
from raysim.training.probe import output_distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_GREY = "#9aa1a7"
_MARKERS = ("o", "^", "s", "D", "v")  # the received model first
_MAX_FEATURE_CLIENTS = 4
_FEATURE_ROWS = 150  # t-SNE of these rows takes a few seconds
_MAX_OUTPUT_CLIENTS = 6
_MAX_MARKED_POINTS = 12  # a curve of so few points shows each of them
_LEGEND_COLUMNS = 4
_ALL_CLASSES_SEEN = "Every probed client has seen all classes of the probed samples."


@contextmanager
def figure_file(
    path: Path | io.BytesIO,
    title: str,
    size: tuple[float, float],
    *,
    dark: bool = False,
    about: Mapping[str, str] | None = None,
) -> Iterator[Figure]:
    """Yield a figure with the colours and fonts of the report; write it as a PNG after `with`.

    path: the file, or a buffer in memory.
    size: width and height in inches of 130 pixels.
    about: metadata of the PNG.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(page_theme(dark) | {"axes.titlesize": 11}):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        figure = Figure(figsize=size, dpi=130, layout=layout)
        figure.suptitle(textwrap.fill(title, int(9 * size[0])), fontsize=13)
        yield figure
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata=about)
    if isinstance(path, io.BytesIO):
        path.write(buffer.getvalue())
    else:
        replace_file(Path(path), buffer.getvalue())


def _draw_sentence(ax: Axes, sentence: str) -> None:
    ax.set_axis_off()
    text = textwrap.fill(sentence, 30)
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", alpha=0.8)


# --- features -------------------------------------------------------------------------------------
def draw_features(probes: Sequence[Probe], path: Path, title: str) -> None:
    """Write a picture of the features that trained models and the received model compute.

    All models get the same samples, and t-SNE maps the features to points in the plane. Without
    finite features, the picture shows a sentence.
    """
    chosen = _comparable_probes(probes)
    with figure_file(path, title, (12.0, 6.9 if chosen else 3.0)) as figure:
        if not chosen:
            _draw_sentence(figure.subplots(), "No probed model has finite features on these rows.")
            return
        rows = _shown_rows(chosen[0].labels)
        features = np.stack([chosen[0].received[rows], *(probe.features[rows] for probe in chosen)])
        points = _embed(features.astype(np.float64).reshape(-1, features.shape[-1]))
        points_MBD = points.reshape(len(features), len(rows), 2)
        names = [f"received model (version {chosen[0].version})"]
        names += [f"client {probe.client}" for probe in chosen]
        left, right = figure.subplots(1, 2, sharex=True, sharey=True)
        _draw_by_class(left, points_MBD, chosen[0].labels[rows])
        _draw_by_model(right, points_MBD, names)
        for ax in (left, right):
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(visible=True, color=_GREY)


def _comparable_probes(probes: Sequence[Probe]) -> list[Probe]:
    """Return probes of clients that received the same version, measured on the same samples.

    Choose the version with the most probes; of several such versions, the newest. Leave out probes
    with infinite or nan features. Return at most `_MAX_FEATURE_CLIENTS` probes.
    """
    finite = []
    for probe in probes:
        if np.isfinite(probe.features).all() and np.isfinite(probe.received).all():
            finite.append(probe)
    counts = Counter(probe.version for probe in finite)
    version = max(counts, key=lambda v: (counts[v], v), default=None)
    chosen = [probe for probe in finite if probe.version == version]
    same_rows = [probe for probe in chosen if np.array_equal(probe.labels, chosen[0].labels)]
    return same_rows[:_MAX_FEATURE_CLIENTS]


def _shown_rows(labels: Ints) -> Ints:
    """Return the positions of at most `_FEATURE_ROWS` rows to plot.

    These are the first rows of each class, for up to 10 classes. Each class gets the same number of
    rows, or all its rows if it has fewer.
    labels: int [rows], the class of each row.
    """
    classes = np.unique(labels)[: len(MANY_COLOURS)]
    rows_per_class = max(1, _FEATURE_ROWS // len(classes))
    return np.concatenate([np.flatnonzero(labels == label)[:rows_per_class] for label in classes])


def _embed(features: Floats) -> Floats:
    """Map feature vectors to points in the plane by t-SNE.

    A second call with the same array returns the same points.
    features: [vectors, length of a vector], at least two vectors. The result is [vectors, 2].
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    # t-SNE does not depend on the scale, but squares of large features would overflow.
    features = features / (np.abs(features).max() or 1.0)
    perplexity = min(30.0, (len(features) - 1) / 3)
    has_spread = features.shape[1] > 1 and np.ptp(features, axis=0).any()
    start = "pca" if has_spread else "random"
    tsne = TSNE(perplexity=perplexity, init=start, random_state=0)
    # More threads wait for each other, which takes ten times as long if a core is busy.
    with threadpool_limits(1, "openmp"):
        embedded: Floats = tsne.fit_transform(features)
    return embedded


def _draw_by_class(ax: Axes, points_MBD: Floats, labels: Ints) -> None:
    from matplotlib.lines import Line2D

    classes = np.unique(labels)
    colours = np.array(MANY_COLOURS)[np.searchsorted(classes, labels)]
    for points, marker in zip(points_MBD, _MARKERS, strict=False):
        ax.scatter(
            points[:, 0], points[:, 1], c=colours, marker=marker, s=24, alpha=0.75, linewidths=0
        )
    handles = []
    for colour in MANY_COLOURS[: len(classes)]:
        handles.append(Line2D([], [], color=colour, marker="o", linestyle=""))
    ax.set_title("coloured by class, markers as on the right")
    ax.legend(
        handles,
        [str(label) for label in classes],
        title="class",
        loc="upper center",
        bbox_to_anchor=(0.5, -0.01),
        ncols=5,
        handletextpad=0.1,
        columnspacing=1.4,
    )


def _draw_by_model(ax: Axes, points_MBD: Floats, names: Sequence[str]) -> None:
    colours = (_GREY, *LIGHT)
    for points, marker, name, colour in zip(points_MBD, _MARKERS, names, colours, strict=False):
        # The received model is larger and lies below the others, so that it shows around them.
        is_received = colour == _GREY
        ax.scatter(
            points[:, 0],
            points[:, 1],
            c=colour,
            marker=marker,
            s=70 if is_received else 24,
            alpha=0.55 if is_received else 0.85,
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


# --- outputs --------------------------------------------------------------------------------------
def draw_outputs(probes: Sequence[Probe], path: Path, title: str) -> None:
    """Write a picture of the classes that local models predict for samples of unseen classes.

    An unseen class does not occur in the client's training samples. Each client, up to 6, has a
    panel with the mean predicted probability of each class. If no client has an unseen class, the
    picture shows a sentence that says so.
    """
    outputs = []
    for probe in probes:
        output = output_distribution(probe.probabilities, probe.labels, probe.seen)
        if output is not None:
            outputs.append((probe, output))
    outputs = outputs[:_MAX_OUTPUT_CLIENTS]
    if not outputs:
        with figure_file(path, title, (7.0, 3.0)) as figure:
            _draw_sentence(figure.subplots(), _ALL_CLASSES_SEEN)
        return

    columns = min(3, len(outputs))
    rows = math.ceil(len(outputs) / columns)
    with figure_file(path, title, (max(7.0, 4.2 * columns), 1.2 + 2.9 * rows)) as figure:
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for ax, (probe, output) in zip(panels.flat, outputs, strict=False):
            _draw_output(ax, probe, output)
        for ax in panels[:, 0]:
            ax.set_ylabel("mean probability")
        for ax in panels.flat[len(outputs) :]:
            ax.set_axis_off()
        handles, names = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=3)


def _draw_output(ax: Axes, probe: Probe, output: Floats) -> None:
    from matplotlib.ticker import MaxNLocator

    classes = np.arange(len(output))
    is_unseen_row = ~probe.seen[probe.labels]
    true_shares = np.bincount(probe.labels[is_unseen_row], minlength=len(output))
    true_shares = true_shares / is_unseen_row.sum()
    for chosen, colour, label in (
        (probe.seen, LIGHT[0], "seen class"),
        (~probe.seen, LIGHT[1], "unseen class"),
    ):
        ax.bar(classes[chosen], output[chosen], 0.8, color=colour, label=label)
    unseen = classes[~probe.seen]
    ax.hlines(
        true_shares[~probe.seen],
        unseen - 0.4,
        unseen + 0.4,
        color=INK,
        linewidth=1.4,
        label="true share of the samples",
    )
    ax.set_title(f"client {probe.client}: {probe.seen.sum()} of {len(output)} classes seen")
    ax.set_xlabel("class")
    ax.xaxis.set_major_locator(MaxNLocator(11, integer=True))


# --- bias -----------------------------------------------------------------------------------------
_PROBE_COLUMNS = (
    "local_accuracy",
    "local_accuracy_worst",
    "feature_distance",
    "feature_similarity",
    "feature_likeness",
    "unseen_probability",
    "seen_share",
)


def draw_bias(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write a picture of the effects that probes measured in local models, over the rounds.

    It has three panels:

    - The accuracies of the shared model and of the local models.
    - The features of local models: their distance and similarity to features of the received model,
      and the similarity between seen and unseen classes.
    - The outputs for samples of unseen classes, which are not in the client's training samples.

    Returns False, and writes nothing, if the history has no probes.
    """
    if not finite_values([row.get(key) for row in rows for key in _PROBE_COLUMNS]):
        return False
    with figure_file(path, title, (14.0, 5.0)) as figure:
        accuracy, features, classifier = figure.subplots(1, 3, sharex=True)
        similarity = features.twinx()
        similarity.spines["right"].set_visible(True)
        accuracy_lines = [
            *_draw_column(accuracy, rows, "accuracy_global", "shared model", color=LIGHT[7]),
            *_draw_column(accuracy, rows, "local_accuracy", "local models, mean", color=LIGHT[0]),
            *_draw_column(
                accuracy, rows, "local_accuracy_worst", "local models, worst", color=LIGHT[1]
            ),
        ]
        feature_lines = [
            *_draw_column(
                features,
                rows,
                "feature_distance",
                "distance / length of received features",
                color=LIGHT[0],
            ),
            *_draw_column(
                similarity,
                rows,
                "feature_similarity",
                "cosine, local and received (right axis)",
                color=LIGHT[1],
            ),
            *_draw_column(
                similarity,
                rows,
                "feature_likeness",
                "cosine, seen and unseen classes (right axis)",
                color=LIGHT[2],
            ),
        ]
        classifier_lines = [
            *_draw_column(
                classifier, rows, "unseen_probability", "of the true class", color=LIGHT[0]
            ),
            *_draw_column(
                classifier, rows, "seen_share", "of all seen classes together", color=LIGHT[1]
            ),
        ]
        accuracy.set(title="Accuracy on the central test set", ylabel="accuracy")
        features.set(title="Features of local models", ylabel="relative distance")
        similarity.set(ylabel="cosine similarity")
        classifier.set(
            title="Output on classes never seen", ylabel="mean probability", ylim=(-0.02, 1.02)
        )
        for ax, lines in (
            (accuracy, accuracy_lines),
            (features, feature_lines),
            (classifier, classifier_lines),
        ):
            ax.grid(True)
            ax.legend(handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.16))
        if not classifier_lines:
            _draw_sentence(classifier, _ALL_CLASSES_SEEN)
    return True


# --- methods, decomposition, domains --------------------------------------------------------------
def draw_reports(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write a picture of the numbers that methods report (columns "method.name") over rounds.

    Returns False, and writes nothing, if there are no such columns.
    """
    drawn_elsewhere = (*metrics_of(rows), metric_of(rows), "decomposition.")
    keys = [key for key in _dotted_columns(rows) if not key.startswith(drawn_elsewhere)]
    if not keys:
        return False
    columns = min(3, len(keys))
    panel_rows = math.ceil(len(keys) / columns)
    with figure_file(path, title, (4.6 * columns, 3.6 * panel_rows)) as figure:
        panels = list(figure.subplots(panel_rows, columns, squeeze=False).flat)
        for ax, key in zip(panels, keys, strict=False):
            _draw_column(ax, rows, key, key, color=LIGHT[0])
            ax.set(title=key.replace("_", " "))
            ax.grid(True)
        for ax in panels[len(keys) :]:
            ax.set_visible(False)
    return True


_TERMS = {
    "global_loss": "after aggregation, all data",
    "local_loss": "local models on their own data",
    "distribution_shift": "distribution shift",
    "aggregation": "aggregation",
}


def draw_decomposition(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write a picture of the loss over the rounds, and of the three parts that add up to it.

    A part may be negative. `raysim/methods/loss_decomposition.py` defines the parts.

    Returns False, and writes nothing, if the history has no loss decomposition.
    """
    if not any(key.startswith("decomposition.") for key in _dotted_columns(rows)):
        return False
    with figure_file(path, title, (7.0, 4.8)) as figure:
        ax = figure.subplots()
        ax.axhline(0, color=_GREY, linewidth=1)
        for (name, label), colour in zip(_TERMS.items(), (INK, *LIGHT), strict=False):
            _draw_column(ax, rows, f"decomposition.{name}", label, color=colour)
        ax.set(title="Loss on the participants' samples, and its three parts", ylabel="mean loss")
        ax.grid(True)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    return True


def draw_domains(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write one picture with the scores over the rounds; each domain has a curve.

    Each kind of model that was scored has a panel: the clients' models, the shared model, the
    fine-tuned models.

    Returns False, and writes nothing, if the history has no scores of single domains.
    """
    metric = metric_of(rows)
    domains_by_kind: dict[str, list[str]] = {}
    for key in _dotted_columns(rows):
        kind, _, domain = key.partition(".")
        if kind.startswith(metric):
            domains_by_kind.setdefault(kind, []).append(domain)
    if not domains_by_kind:
        return False
    names = {
        metric: "Clients' models",
        f"{metric}_shared": "Shared model",
        f"{metric}_finetuned": "Fine-tuned models",
    }
    most_domains = max(map(len, domains_by_kind.values()))
    legend_rows = math.ceil(most_domains / _LEGEND_COLUMNS)
    size = (5.6 * len(domains_by_kind), 4.4 + 0.24 * legend_rows)
    with figure_file(path, title, size) as figure:
        panels = figure.subplots(1, len(domains_by_kind), sharey=True, squeeze=False).flat
        for ax, (kind, domains) in zip(panels, domains_by_kind.items(), strict=True):
            for index, domain in enumerate(domains):
                _draw_column(ax, rows, f"{kind}.{domain}", domain, **line_style(index))
            ax.set(title=f"{names.get(kind, kind)}, by domain", ylabel=metric)
            ax.grid(True)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=_LEGEND_COLUMNS)
    return True


def _dotted_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of numbers whose names have a dot."""
    keys: dict[str, None] = {}
    for row in rows:
        for key, value in row.items():
            if "." in key and finite_values([value]):
                keys[key] = None
    return list(keys)


def _draw_column(ax: Axes, rows: Sequence[Row], key: str, label: str, **style: Any) -> list[Line2D]:
    """Draw the finite values of a column over the rounds.

    Returns a list with the line, or an empty list if the column has no finite value.
    style: arguments of matplotlib's `plot`.
    """
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    points = []
    for row in rows:
        for value in finite_values([row.get(key)]):
            points.append((float(row.get("round") or 0), value))
    if not points:
        return []
    marker = "o" if len(points) <= _MAX_MARKED_POINTS else None
    return ax.plot(*np.array(points).T, marker=marker, markersize=4, label=label, **style)
