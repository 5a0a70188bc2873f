"""Warn about a user's network whose outputs do not fit the loss."""

from __future__ import annotations

import torch
from torch import nn

from raysim.models.split import ExternalModel, example_inputs
from raysim.primitives.kinds import POSITION_KINDS
from raysim.training.run_spec import RunSpec


def output_warnings(spec: RunSpec, model: nn.Module) -> list[str]:
    """Return a warning if a user's classifier ends in a softmax.

    The usual loss, cross-entropy, takes logits and applies a softmax itself.
    spec: the run's settings, task and loss.
    model: the network, which is run on a batch of example inputs.
    """
    task = spec.task
    if not isinstance(spec.model, ExternalModel) or spec.loss:
        return []
    if task.kind not in ("classification", *POSITION_KINDS):
        return []
    was_training = model.training
    inputs = example_inputs(task.shape, task.tokens)
    if inputs.is_floating_point():
        inputs = inputs.to(task.dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = model.eval()(inputs)
    model.train(was_training)
    sums = outputs.sum(1)
    is_distribution = bool((outputs >= 0).all()) and torch.allclose(
        sums, torch.ones_like(sums), atol=1e-4
    )
    if not is_distribution:
        return []
    return [
        "model: the outputs of this network are probabilities (it ends in a softmax), and the loss "
        "applies a softmax itself; remove the last layer, or set a loss that takes probabilities"
    ]
