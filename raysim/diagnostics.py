"""How biased local training leaves the clients' models: measures of feature and classifier bias, and their pictures.

Guo, Tang and Lin, "FedBR" (ICML 2023): Figure 2 (features), Figure 3 (classifier), Figure 15 (t-SNE) and Table 6
(accuracy of local models). A local model is probed before averaging, beside the model that its client received, on
balanced rows of the central test set. The paper shows pictures; the numbers for features and classifier are ours.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from raysim.data.partition import Floats, Ints
from raysim.metrics import Row, known, replace_file
from raysim.report import LIGHT, theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Reals: TypeAlias = NDArray[np.float32] | Floats
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Probe:
    """What a client's local model says of the n balanced rows, and what the model said that it had received."""

    client: int
    version: int
    labels: Ints  # [n]
    seen: Bools  # [C], the classes in the client's training data
    accuracy: float  # on all balanced rows
    features: Reals  # [n, F], of the local model
    received: Reals  # [n, F], of the received model
    probabilities: Reals  # [n, C], of the local model


# ---------------------------------------------------------------- measures


def balanced_rows(labels: Ints, per_class: int, generator: np.random.Generator) -> Ints:
    """Positions, ascending: of every class that occurs, `per_class` drawn without replacement, or all it has."""
    positions = (np.flatnonzero(labels == label) for label in np.unique(labels))
    drawn = [generator.choice(rows, min(per_class, len(rows)), replace=False) for rows in positions]
    return np.sort(np.concatenate([np.empty(0, np.int64), *drawn]))


def feature_distance(local: Reals, received: Reals) -> float:
    """Mean over rows of |local - received|, in units of the mean |received|; nan where every received row is zero.

    Features that did not move have the distance 0, zero or not.
    """
    local, received = np.asarray(local, np.float64), np.asarray(received, np.float64)
    moved, scale = (float(np.linalg.norm(x, axis=1).mean()) for x in (local - received, received))
    return moved / scale if scale else math.nan if moved else 0.0


def feature_similarity(local: Reals, received: Reals) -> float:
    """Mean row-wise cosine; exactly 1 for identical features. A zero row is like a zero row alone."""
    local, received = np.asarray(local, np.float64), np.asarray(received, np.float64)
    squares = (local * local).sum(axis=1), (received * received).sum(axis=1)
    lengths = np.sqrt(squares[0] * squares[1])
    cosines = (squares[0] == squares[1]).astype(np.float64)  # for zero rows: both are zero, or one
    np.divide((local * received).sum(axis=1), lengths, out=cosines, where=lengths != 0)
    return float(cosines.mean())


def feature_likeness(features: Reals, labels: Ints, seen: Bools) -> float | None:
    """Mean cosine between rows of seen and rows of unseen classes: how alike one model makes what its client knows and
    what it does not (Figure 2); None without either."""
    features = np.asarray(features, np.float64)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = np.divide(features, lengths, out=np.zeros_like(features), where=lengths != 0)
    known_rows, unknown = unit[seen[labels]], unit[~seen[labels]]
    return float((known_rows @ unknown.T).mean()) if len(known_rows) and len(unknown) else None


def unseen_probability(probabilities: Reals, labels: Ints, seen: Bools) -> float | None:
    """Mean probability of the true class over the rows of classes that the client has not seen; None without such."""
    rows = np.flatnonzero(~seen[labels])
    return float(probabilities[rows, labels[rows]].mean(dtype=np.float64)) if len(rows) else None


def seen_share(probabilities: Reals, labels: Ints, seen: Bools) -> float | None:
    """Mean probability of all seen classes together over the rows of unseen ones: 0 is right, 1 is full bias."""
    output = output_distribution(probabilities, labels, seen)
    return None if output is None else float(output[seen].sum())


def output_distribution(probabilities: Reals, labels: Ints, seen: Bools) -> Floats | None:
    """Mean output [C] over the rows of classes that the client has not seen (Figure 3); None without such rows."""
    rows = ~seen[labels]
    return np.asarray(probabilities[rows].mean(axis=0, dtype=np.float64)) if rows.any() else None


def _mean(values: Sequence[float | None]) -> float | None:
    found = known(values)
    return float(np.mean(found)) if found else None


def summarise_probes(probes: Sequence[Probe]) -> dict[str, float | None]:
    """Columns of a history row: means over the probed clients (and the worst accuracy), None where none is known."""
    accuracies = [probe.accuracy for probe in probes]
    return {
        "local_accuracy": _mean(accuracies),
        "local_accuracy_worst": min(known(accuracies), default=None),
        "feature_distance": _mean([feature_distance(p.features, p.received) for p in probes]),
        "feature_similarity": _mean([feature_similarity(p.features, p.received) for p in probes]),
        "feature_likeness": _mean([feature_likeness(p.features, p.labels, p.seen) for p in probes]),
        "unseen_probability": _mean([unseen_probability(p.probabilities, p.labels, p.seen) for p in probes]),
        "seen_share": _mean([seen_share(p.probabilities, p.labels, p.seen) for p in probes]),
    }


# ---------------------------------------------------------------- file

_ARRAYS = ("labels", "seen", "features", "probabilities")


def save_probes(probes: Sequence[Probe], path: Path) -> None:
    """Write one safetensors file, atomically; received features that clients of a version share are kept once."""
    stored: dict[tuple[int, tuple[int, ...], bytes], int] = {}
    arrays: dict[str, NDArray[Any]] = {}
    owners = []
    for index, probe in enumerate(probes):
        arrays.update({f"{name}.{index}": getattr(probe, name) for name in _ARRAYS})
        # By content: where parameters are personal, two clients of a version have received different models.
        content = (probe.version, probe.received.shape, probe.received.tobytes())
        owners.append(stored.setdefault(content, index))
        if owners[-1] == index:
            arrays[f"received.{index}"] = probe.received
    arrays["client"] = np.array([probe.client for probe in probes], np.int64)
    arrays["version"] = np.array([probe.version for probe in probes], np.int64)
    arrays["accuracy"] = np.array([probe.accuracy for probe in probes], np.float64)
    arrays["received"] = np.array(owners, np.int64)
    replace_file(Path(path), save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def load_probes(path: Path) -> list[Probe]:
    """What `save_probes` wrote, bit for bit and in its order. Raises `ValueError` where the file holds no probes."""
    try:
        arrays = load(Path(path).read_bytes())
        return [
            Probe(
                client=int(client),
                version=int(arrays["version"][index]),
                accuracy=float(arrays["accuracy"][index]),
                received=arrays[f"received.{arrays['received'][index]}"],
                **{name: arrays[f"{name}.{index}"] for name in _ARRAYS},
            )
            for index, client in enumerate(arrays["client"])
        ]
    except (SafetensorError, KeyError, IndexError) as problem:
        raise ValueError(f"{path} is no readable file of probes; restore it or run the study again.") from problem


# ---------------------------------------------------------------- pictures

_INK, _SOFT = "#22262a", "#9aa1a7"
_CLASS_COLOURS = (*LIGHT, "#a9b800", _INK)
_MARKERS = ("o", "^", "s", "D", "v")  # the received model first
_MODELS, _ROWS, _PANELS = 4, 150, 6  # clients and rows of a t-SNE (a few seconds), clients of a figure of outputs


@contextmanager
def _figure(path: Path, title: str, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure in the report's looks; when the block ends it is a PNG with 130 pixels per inch."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(theme(_INK) | {"axes.titlesize": 11}):
        figure = Figure(figsize=size, dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        figure.suptitle(textwrap.fill(title, int(9 * size[0])), fontsize=13)
        yield figure
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    replace_file(Path(path), buffer.getvalue())


def _say(ax: Axes, sentence: str) -> None:
    """A sentence where there is nothing to draw."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, textwrap.fill(sentence, 30), transform=ax.transAxes, ha="center", va="center", alpha=0.8)


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
    return np.concatenate([np.flatnonzero(labels == c)[: max(1, _ROWS // len(classes))] for c in classes])


def _embed(features: Floats) -> Floats:
    """t-SNE of [m, F] to [m, 2], m >= 2; always the same for the same features."""
    from sklearn.manifold import TSNE

    features = features / (np.abs(features).max() or 1.0)  # t-SNE knows no scale, but squares what it is given
    perplexity = min(30.0, (len(features) - 1) / 3)
    start = "pca" if features.shape[1] > 1 and np.ptp(features, axis=0).any() else "random"
    embedded: Floats = TSNE(perplexity=perplexity, init=start, random_state=0).fit_transform(features)
    return embedded


def draw_features(probes: Sequence[Probe], path: Path, title: str) -> None:
    """Write a joint t-SNE of the received features and those of up to 4 local models on the same rows (Figures 2, 15).

    Shown are up to 10 classes and about 150 rows, for clients which received the same version.
    """
    chosen = _comparable(probes)
    with _figure(path, title, (12.0, 6.9 if chosen else 3.0)) as figure:
        if not chosen:
            return _say(figure.subplots(), "No probed model has finite features on these rows.")
        rows = _shown_rows(chosen[0].labels)
        features = np.stack([chosen[0].received[rows], *(probe.features[rows] for probe in chosen)]).astype(np.float64)
        points = _embed(features.reshape(-1, features.shape[-1])).reshape(len(features), len(rows), 2)
        names = [f"received model (version {chosen[0].version})", *(f"client {probe.client}" for probe in chosen)]
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
        ax.scatter(points[:, 0], points[:, 1], c=colours, marker=marker, s=24, alpha=0.75, linewidths=0)
    handles = [Line2D([], [], color=c, marker="o", linestyle="") for c in _CLASS_COLOURS[: len(classes)]]
    ax.set_title("coloured by class, markers as on the right")
    ax.legend(
        handles, [str(c) for c in classes], title="class", loc="upper center", bbox_to_anchor=(0.5, -0.01),
        ncols=5, handletextpad=0.1, columnspacing=1.4,
    )  # fmt: skip


def _by_model(ax: Axes, points_MBD: Floats, names: Sequence[str]) -> None:
    for points, marker, name, colour in zip(points_MBD, _MARKERS, names, (_SOFT, *LIGHT), strict=False):
        # What the others are to be compared with lies below them, and shows around them.
        size, alpha = (70, 0.55) if colour == _SOFT else (24, 0.85)
        ax.scatter(points[:, 0], points[:, 1], c=colour, marker=marker, s=size, alpha=alpha, linewidths=0, label=name)
    ax.set_title("coloured by model")
    ax.legend(
        title="model", loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=3, handletextpad=0.1, columnspacing=1.4
    )


def draw_outputs(probes: Sequence[Probe], path: Path, title: str) -> None:
    """Write the mean output over samples of unseen classes, for up to 6 clients which have such classes (Figure 3)."""
    outputs = [(probe, output_distribution(probe.probabilities, probe.labels, probe.seen)) for probe in probes]
    biased = [(probe, output) for probe, output in outputs if output is not None][:_PANELS]
    across = min(3, max(1, len(biased)))
    down = math.ceil(len(biased) / across)
    with _figure(path, title, (max(7.0, 4.2 * across), 1.2 + 2.9 * down) if biased else (7.0, 3.0)) as figure:
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
    for chosen, colour, label in ((probe.seen, LIGHT[0], "seen class"), (~probe.seen, LIGHT[1], "unseen class")):
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
    if not known([row.get(key) for row in rows for key in _PROBED]):
        return False
    with _figure(path, title, (14.0, 5.0)) as figure:
        accuracy, features, classifier = figure.subplots(1, 3, sharex=True)
        similarity = features.twinx()
        similarity.spines["right"].set_visible(True)
        curves = [
            _over_rounds(accuracy, rows, "accuracy_global", "global model", LIGHT[7]),
            _over_rounds(accuracy, rows, "local_accuracy", "local models, mean", LIGHT[0]),
            _over_rounds(accuracy, rows, "local_accuracy_worst", "local models, worst", LIGHT[1]),
            _over_rounds(features, rows, "feature_distance", "distance / length of received features", LIGHT[0]),
            _over_rounds(similarity, rows, "feature_similarity", "cosine, local and received (right axis)", LIGHT[1]),
            _over_rounds(
                similarity, rows, "feature_likeness", "cosine, seen and unseen classes (right axis)", LIGHT[2]
            ),
            _over_rounds(classifier, rows, "unseen_probability", "of the true class", LIGHT[0]),
            _over_rounds(classifier, rows, "seen_share", "of all seen classes together", LIGHT[1]),
        ]
        accuracy.set(title="Accuracy on the central test set", ylabel="accuracy")
        features.set(title="Features of local models", ylabel="relative distance")
        similarity.set(ylabel="cosine similarity")
        classifier.set(title="Output on classes never seen", ylabel="mean probability", ylim=(-0.02, 1.02))
        for ax, lines in ((accuracy, curves[:3]), (features, curves[3:6]), (classifier, curves[6:])):
            ax.grid(True)
            handles = [line for found in lines for line in found]
            ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16))
        if not classifier.lines:
            _say(classifier, "Every probed client has seen every class.")
    return True


def draw_reports(rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write what methods report of themselves, columns "method.name", over the rounds; False, and no file, without."""
    keys = list(dict.fromkeys(key for row in rows for key in row if "." in key and known([row[key]])))
    if not keys:
        return False
    across = min(3, len(keys))
    down = -(-len(keys) // across)
    with _figure(path, title, (4.6 * across, 3.6 * down)) as figure:
        panels = list(figure.subplots(down, across, squeeze=False).flat)
        for ax, key in zip(panels, keys, strict=False):
            _over_rounds(ax, rows, key, key, LIGHT[0])
            ax.set(title=key.replace("_", " "))
            ax.grid(True)
        for ax in panels[len(keys) :]:
            ax.set_visible(False)
    return True


def _over_rounds(ax: Axes, rows: Sequence[Row], key: str, label: str, colour: str) -> list[Line2D]:
    """Draw the known values of a column; the line, or none where there is no value."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    points = [(float(row.get("round") or 0), value) for row in rows for value in known([row.get(key)])]
    if not points:
        return []
    marker = "o" if len(points) <= 12 else None  # few points are seen as points, as in a run's other plots
    return ax.plot(*np.array(points).T, color=colour, marker=marker, markersize=4, label=label)
