"""The model that all clients share, as something that predicts on inputs as the data set stores them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor, nn

from raysim.data.batches import Pipeline
from raysim.training.run_spec import RunSpec, declare_run


class SharedModel(nn.Module):
    """Raw inputs [B, ...] to the scores [B, outputs] that evaluation ranks: normalise, forward, and a method's own."""

    def __init__(self, model: nn.Module, pipeline: Pipeline):
        super().__init__()
        self.model, self._pipeline = model, pipeline

    def forward(self, inputs: Tensor) -> Tensor:
        """In eval mode; the weights are those after the last aggregation."""
        scores: Tensor = self.model(self._pipeline.normalise(inputs))
        return scores


def load_shared_model(spec: RunSpec, weights: Path) -> tuple[SharedModel, np.ndarray] | None:
    """The model with these weights on the CPU, and two empty inputs; None where clients keep parts of it."""
    declarations = declare_run(spec)
    networks, layout = declarations.networks, declarations.layout
    if any(
        entry.personal and entry.network == "model" for entry in (*layout.entries, *layout.counters)
    ):
        return None
    own = networks["model"].state_dict()
    for name, tensor in load_file(weights).items():
        network, _, path = name.partition(".")
        if network == "model":
            own[path].copy_(tensor)
    model = SharedModel(networks["model"], spec.data.pipeline)
    inputs = spec.data.open().inputs
    return model.eval().requires_grad_(False), np.zeros((2, *inputs.shape[1:]), inputs.dtype)
