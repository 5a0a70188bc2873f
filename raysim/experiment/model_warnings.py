"""Warn about a network whose outputs do not fit the loss, or whose weights are not pretrained."""

from __future__ import annotations

import torch
from torch import nn

from raysim.models.split import ExternalModel, example_inputs
from raysim.models.zoo import find_random_weights
from raysim.primitives.kinds import POSITION_KINDS
from raysim.training.run_spec import RunSpec

MAX_NAMED_WEIGHTS = 5


def weight_warnings(model: nn.Module) -> list[str]:
    """Return a list with a warning if the files of a pretrained model do not have all its weights.

    model: the network of the run.
    """
    names = find_random_weights(model)
    if not names:
        return []
    shown = ", ".join(names[:MAX_NAMED_WEIGHTS])
    more = len(names) - MAX_NAMED_WEIGHTS
    shown += f" and {more} more" if more > 0 else ""
    return [
        f"model.pretrained=true: {len(names)} weights in front of the head have random values, "
        f"because the files of model.name do not have them: {shown}"
    ]


def output_warnings(spec: RunSpec, model: nn.Module) -> list[str]:
    """Return a list with one warning if a user's classifier ends in a softmax, else an empty list.

    The default loss, cross-entropy, applies a softmax itself. With another loss, return [].
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
