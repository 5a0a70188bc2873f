"""Probe a client's local model before it is averaged: score it next to the received model."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from raysim.api.context import Context
from raysim.api.messages import Probe
from raysim.models import Classifier
from raysim.primitives.streams import stream
from raysim.training.probe import balanced_rows
from raysim.training.trainer import Trainer

PROBE_FEATURES = 200  # about the number of rows whose features a probe stores


def probe_local_model(trainer: Trainer, ctx: Context, rows: np.ndarray, score_batch: int) -> Probe:
    """Measure a model that was just trained, and the model from which its training started.

    The accuracy of the trained model is measured on all `rows`. Features of both models, and class
    probabilities of the trained model, are stored for about `PROBE_FEATURES` rows: equally many of
    each class, or all rows of a small class.

    trainer: its vector contains the trained model.
    rows: samples of the central test set, as rows of the data set.
    score_batch: the number of rows in a batch for scoring.
    """
    trainer.set_training(False)
    received = cast("Classifier", ctx.frozen()["model"])
    labels, scores, local_features, received_features = [], [], [], []
    with torch.inference_mode():
        for inputs, targets in trainer.data.gather_parts(rows, score_batch):
            labels.append(targets)
            scores.append(ctx.model(inputs))
            local_features.append(ctx.model.features(inputs))
            received_features.append(received.features(inputs))
    label, score = torch.cat(labels), torch.cat(scores)
    per_class = max(1, PROBE_FEATURES // trainer.task.num_classes)
    generator = stream(trainer.seed, "probe.features")
    selected = balanced_rows(label.cpu().numpy(), per_class, generator)
    return Probe(
        client=ctx.client,
        version=ctx.version,
        labels=label.cpu().numpy()[selected],
        seen=(ctx.class_counts() > 0).numpy(),
        accuracy=float((score.argmax(1) == label).double().mean()),
        features=torch.cat(local_features).cpu().float().numpy()[selected],
        received=torch.cat(received_features).cpu().float().numpy()[selected],
        probabilities=score.softmax(1).cpu().float().numpy()[selected],
    )
