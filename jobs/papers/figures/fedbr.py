"""Redraw figures of FedBR, on RotatedMNIST at 14 x 14 pixels with a small CNN.

Probes (`raysim.results.probes`) measure features and outputs of clients' models before aggregation.
They use the same number of test samples of each class; of a class with fewer samples, they use all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from jobs.papers.figures.core import (
    Panel,
    PaperFigure,
    Runs,
    curve,
    embed,
    image_panel,
    panel,
    points_by_class,
    series,
)
from raysim.api.messages import Probe
from raysim.experiment.result import Result
from raysim.methods.fedbr import random_sample_mean
from raysim.results.probes import load_probes
from raysim.training.probe import output_distribution

ROUNDS, ROWS = 30, 200
SMALL = (
    "experiment=fedbr/rotated_mnist",
    "model=small_cnn",
    "data.pool=2",
    "data.rotation.test=spread",
    "partition.fraction=0.1",
    "local.steps=20",
    "local.lr=0.05",
    f"rounds={ROUNDS}",
    "evaluate.every=3",
)
PROBED = ("evaluate.probe={rounds}", f"evaluate.probe_rows={ROWS}")
SCALE = (
    "14 x 14 pixels, small CNN, a tenth of the images, 30 rounds of 20 steps at rate 0.05, one seed"
)
ONE_ROUND = "14 x 14 pixels, small CNN, a tenth of the images, one round, one seed"
MILD = "partition.alpha=10.0"  # Dirichlet with 1.0 per class, as concentration is prior_scaled


# --- features and outputs -------------------------------------------------------------------------
def probes(result: Result) -> list[Probe]:
    """Return the probes of a run's last probed round."""
    files = sorted((result.folder / "probes").glob("*.safetensors"))
    return load_probes(files[-1])


def run_with_probes(runs: Runs, *overrides: str, rounds: int = ROUNDS) -> Result:
    """Return a run that probes its local models in the last of `rounds` rounds."""
    words = [word.format(rounds=rounds) for word in PROBED]
    return runs.run(*SMALL, f"rounds={rounds}", *words, *overrides)


def feature_panels(models: Mapping[str, np.ndarray], labels: np.ndarray) -> list[Panel]:
    """Return a panel for each model: a t-SNE of its features, by class.

    models: maps the title of each panel to the features of a model, [m, F].
    labels: the labels of the m rows.
    """
    return [
        panel("points", title, "", "", points_by_class(embed(features), labels))
        for title, features in models.items()
    ]


def _most_uneven(local: Sequence[Probe]) -> Probe:
    """Return the probe of the client that has the fewest classes."""
    return min(local, key=lambda probe: (int(probe.seen.sum()), probe.client))


def features(runs: Runs) -> Sequence[Panel]:
    """Return three panels with the features of a central, a local and the global model.

    The central model is trained on all data. The global model is what clients receive in FedAvg's
    last round. The local model is trained by the client with the fewest classes, starting from the
    global model.
    """
    federated = probes(run_with_probes(runs, "method=fedavg"))
    central = probes(run_with_probes(runs, "method=centralized"))[0]
    local = _most_uneven(federated)
    models = {
        "central model": central.features,
        f"local model of client {local.client}, {int(local.seen.sum())} of 10 classes": (
            local.features
        ),
        "global model": local.received,
    }
    if not np.array_equal(central.labels, local.labels):
        raise ValueError(
            "the probes of method=centralized and method=fedavg have different labels. Remove both "
            "run folders, so that the runs are made again with the same test samples."
        )
    return feature_panels(models, local.labels)


def outputs(runs: Runs, is_local: bool) -> Sequence[Panel]:
    """Return one panel, a bar chart about the client that has the fewest classes.

    is_local: True shows the mean output of the client's trained model on test samples. Only samples
    of classes that the client lacks are used; without such samples, all bars are 0. False shows the
    fraction of the client's training samples in each class.
    """
    result = run_with_probes(runs, "method=fedavg")
    probe = _most_uneven(probes(result))
    classes = range(len(probe.seen))
    if not is_local:
        counts = _class_counts(result, probe.client)
        lines = [series("samples", classes, (counts / counts.sum()).tolist())]
        return [panel("bars", f"labels of client {probe.client}", "class", "share", lines)]
    output = output_distribution(probe.probabilities, probe.labels, probe.seen)
    values = np.zeros(len(probe.seen)) if output is None else output
    title = f"local model of client {probe.client}, on classes that the client lacks"
    return [panel("bars", title, "class", "mean output", [series("", classes, values.tolist())])]


def _class_counts(result: Result, client: int) -> np.ndarray:
    data = result.experiment.spec.data
    rows = data.partition.train.rows(client)
    return np.bincount(np.asarray(data.open().labels)[rows], minlength=10)


# --- ablations ------------------------------------------------------------------------------------
def ablation(runs: Runs, words: Mapping[str, tuple[str, ...]]) -> Sequence[Panel]:
    """Return a panel with the central accuracy of FedAvg and of FedBR in several settings.

    words: maps the label of each setting to its overrides.
    """
    lines = [curve("FedAvg", runs.run(*SMALL, "method=fedavg"), "accuracy_global", 100)]
    for label, overrides in words.items():
        result = runs.run(*SMALL, "method=fedbr", *overrides)
        lines.append(curve(label, result, "accuracy_global", 100))
    return [panel("lines", "RotatedMNIST", "round", "accuracy, %", lines)]


PROJECTIONS = {"projection": (), "no projection": ("method.fedbr.projection=none",)}
ONCE = "method.fedbr.pseudo_refresh=once"
REFRESHES = {"new in each round": (), "drawn once": (ONCE,)}
MEANS = {
    f"means of {count} samples": (ONCE, f"method.fedbr.samples_per_mean={count}")
    for count in (1, 10, 50)
}
LABELS = {
    "means of balanced labels": (ONCE, "method.fedbr.sources=classes"),
    "means of unbalanced labels": (ONCE, "method.fedbr.sources=balanced"),
}


# --- pseudo-data ----------------------------------------------------------------------------------
def pseudo_data(runs: Runs) -> Sequence[Panel]:
    """Return three panels of 16 images each, made from the samples of client 0.

    The images are single samples, means of 2 samples, and means of 10 samples.
    """
    result = runs.run(*SMALL, "method=fedavg")
    data = result.experiment.spec.data
    rows = data.partition.train.rows(0)
    inputs = torch.from_numpy(np.asarray(data.open().inputs)[rows]).float()
    generator = np.random.default_rng(0)
    panels = []
    for samples in (1, 2, 10):
        indices = torch.from_numpy(generator.integers(len(inputs), size=(16, samples)))
        images = random_sample_mean(inputs, indices).numpy()
        images = images.reshape(len(images), *images.shape[-2:])
        title = "samples of client 0" if samples == 1 else f"means of {samples} samples"
        panels.append(image_panel(title, images))
    return panels


# --- other starts ---------------------------------------------------------------------------------
def from_start(runs: Runs, epochs: int, *overrides: str) -> Sequence[Panel]:
    """Return panels about a start model, and about the model that one client trains from it.

    A run of FedAvg with one round begins with the start model. The client is the one with the
    fewest classes. The panels show the features of both models, and the mean output of the client's
    model on classes that the client lacks, if there are any.
    epochs: the epochs of the centralized training of the start model; 0 takes FedAvg's final model.
    overrides: overrides of the run with one round.
    """
    if epochs:
        words = ["method=centralized", f"rounds={epochs}", "local.steps=null", "local.epochs=1"]
        words += ["schedule.cohort=10", "evaluate.every=1"]
        start = runs.run(*SMALL, *words)
    else:
        start = runs.run(*SMALL, "method=fedavg")
    file = start.folder / "model.safetensors"
    probe = _most_uneven(
        probes(run_with_probes(runs, "method=fedavg", f"init={_place(file)}", *overrides, rounds=1))
    )
    panels = feature_panels(
        {
            "received model": probe.received,
            f"local model of client {probe.client}, {int(probe.seen.sum())} of 10 classes": (
                probe.features
            ),
        },
        probe.labels,
    )
    output = output_distribution(probe.probabilities, probe.labels, probe.seen)
    if output is not None:
        lines = [series("", range(len(output)), output.tolist())]
        title = "its output on classes that the client lacks"
        panels.append(panel("bars", title, "class", "mean output", lines))
    return panels


def _place(file: Path) -> str:
    return str(file.resolve())


def _start(number: int, shows: str, epochs: int, *overrides: str) -> PaperFigure:
    return PaperFigure(
        f"fedbr/{number}",
        shows,
        ONE_ROUND,
        lambda runs: from_start(runs, epochs, *overrides),
    )


FIGURES = (
    PaperFigure(
        "fedbr/2", "features of a central, a local and the global model (t-SNE)", SCALE, features
    ),
    PaperFigure("fedbr/3a", "the labels of a client", SCALE, lambda runs: outputs(runs, False)),
    PaperFigure(
        "fedbr/3b",
        "the mean output of its local model on samples of classes that it lacks",
        SCALE,
        lambda runs: outputs(runs, True),
    ),
    PaperFigure(
        "fedbr/6a",
        "FedBR with and without the projection",
        SCALE,
        lambda runs: ablation(runs, PROJECTIONS),
    ),
    PaperFigure(
        "fedbr/6b",
        "pseudo-data that are new in each round, or drawn once",
        SCALE,
        lambda runs: ablation(runs, REFRESHES),
    ),
    PaperFigure(
        "fedbr/6c",
        "the number of samples in a mean of pseudo-data, drawn once",
        SCALE,
        lambda runs: ablation(runs, MEANS),
    ),
    PaperFigure(
        "fedbr/6d",
        "pseudo-data from samples of balanced and of unbalanced labels, drawn once",
        SCALE,
        lambda runs: ablation(runs, LABELS),
    ),
    PaperFigure("fedbr/8", "pseudo-data as pictures", "14 x 14 pixels", pseudo_data),
    _start(10, "a local model from the global extractor with a fresh head", 0, "init.redraw=head"),
    _start(11, "a local model from a model pre-trained for 1 epoch", 1),
    _start(12, "a local model from a model pre-trained for 3 epochs", 3),
    _start(13, "a local model from a model pre-trained for 10 epochs", 10),
    _start(14, "a local model from the global model, mild split", 0, MILD),
    _start(15, "a local model from a model pre-trained for 10 epochs, mild split", 10, MILD),
)
