"""Load the model that all clients share; it normalises its inputs itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor, nn

from raysim.data.batches import Pipeline
from raysim.training.run_spec import RunSpec, declare_run


class SharedModel(nn.Module):
    """A model that maps raw inputs [B, ...] to outputs [B, outputs], such as class logits.

    model: the network, whose inputs are normalised.
    pipeline: the object that normalises raw inputs as clients do.
    """

    def __init__(self, model: nn.Module, pipeline: Pipeline):
        super().__init__()
        self.model = model
        self._pipeline = pipeline

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs, [B, outputs], such as a logit for each class."""
        scores: Tensor = self.model(self._pipeline.normalise(inputs))
        return scores


def load_shared_model(spec: RunSpec, weights: Path) -> tuple[SharedModel, np.ndarray] | None:
    """Return a trained model, on the CPU and in eval mode, and an example of its inputs.

    The example has two inputs of zeros. Return None if a part of the model is personal, or a method
    trains something without parameters, such as boosted trees.
    weights: the run's file of weights, such as model.safetensors.
    """
    declarations = declare_run(spec)
    if not all(method.has_parameters for method in declarations.methods):
        return None
    networks, layout = declarations.networks, declarations.layout
    for entry in (*layout.entries, *layout.counters):
        if entry.personal and entry.network == "model":
            return None
    state = networks["model"].state_dict()
    for name, tensor in load_file(weights).items():
        network, _, path = name.partition(".")
        if network == "model":
            state[path].copy_(tensor)
    model = SharedModel(networks["model"], spec.data.pipeline)
    inputs = spec.data.open().inputs
    example = np.zeros((2, *inputs.shape[1:]), inputs.dtype)
    return model.eval().requires_grad_(False), example
