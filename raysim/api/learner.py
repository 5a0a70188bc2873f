"""Learners: models that are not `torch.nn.Module`s, such as those of scikit-learn or JAX.

A learner keeps its parameters in a nested structure of dictionaries, lists and tuples whose leaves
are arrays. raysim copies the arrays into its flat vector, so that they are averaged, sent, counted
and saved like the parameters of a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.declarations import Task
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.models.split import WholeNetwork

Parameters: TypeAlias = Any  # an array, or a mapping or sequence of `Parameters`
_SEPARATOR = ":"


class Learner(Method):
    """A model with its own parameters and training; the base class of what a user writes.

    Implement `initial`, `fit` and `predict`. A learner is an option of the group `learner` or an
    object, `raysim.run(learner=MyLearner())`: it replaces the run's model and its local training,
    and it can be combined with schedules, fleets and server-side methods. The server averages
    arrays of floats. Of arrays of integers and booleans the server keeps the largest value at each
    position.
    """

    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        """Return the initial parameters, a nested structure of arrays whose shapes never change.

        task: gives `task.shape` of one input, `task.num_classes` and `task.kind`. rng: random
        generator.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a function 'initial'")

    def fit(
        self, parameters: Parameters, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Parameters, LocalResult | None]:
        """Train on a client's samples, inputs [n, ...] and labels [n]; return new parameters."""
        raise NotImplementedError(f"{type(self).__name__} needs a function 'fit'")

    def predict(self, parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        """Return the outputs [n, C] for inputs [n, ...]: logits of C classes, or C values."""
        raise NotImplementedError(f"{type(self).__name__} needs a function 'predict'")

    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """Replace the run's model by a module that holds the learner's parameters."""
        rng = np.random.default_rng(int(torch.randint(2**62, (1,))))
        network = LearnerNetwork(self, self.initial(task, rng), task.dtype)
        return WholeNetwork(network, task.num_classes)

    def setup(self, run: Setup) -> None:
        """Train clients with `fit`."""
        run.train(self.fit_client)
        run.without_gradients()

    def fit_client(self, job: LocalJob) -> LocalResult | None:
        """Pass a client's parameters and samples to `fit`, and store what it returns."""
        network: LearnerNetwork = job.model.net  # type: ignore[assignment]
        inputs, labels = job.arrays()
        returned = self.fit(network.parameters_as_arrays(), inputs, labels, job)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"fit of {type(self).__name__} returned {type(returned).__name__}. Return a pair: "
                "the parameters, and a LocalResult or None."
            )
        parameters, result = returned
        network.set_parameters(parameters)
        return result


class LearnerNetwork(nn.Module):
    """A module with a learner's parameters: floats as parameters, other arrays as buffers."""

    def __init__(self, learner: Learner, initial: Parameters, dtype: torch.dtype):
        super().__init__()
        self.learner = learner
        self.structure = _structure(initial)
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.attributes: dict[str, str] = {}
        for name, value in _flatten(initial):
            array = np.asarray(value)
            self.dtypes[name] = array.dtype
            self.attributes[name] = attribute = self._free_attribute(name)
            if array.dtype.kind == "f":
                self.register_parameter(attribute, nn.Parameter(torch.tensor(array, dtype=dtype)))
            elif array.dtype.kind in "iub":
                self.register_buffer(attribute, torch.tensor(array, dtype=torch.int64))
            else:
                raise TypeError(
                    f"the initial parameter '{name}' of {type(learner).__name__} has the type "
                    f"{array.dtype}. Use arrays of numbers."
                )

    def _free_attribute(self, name: str) -> str:
        """Return a name for a tensor that neither the module nor another tensor uses."""
        attribute = name.replace(".", "_")
        while hasattr(self, attribute):
            attribute += "_"
        return attribute

    def parameters_as_arrays(self) -> Parameters:
        """Return a copy of the parameters with the structure and the types of the initial ones."""
        arrays = {}
        for name, dtype in self.dtypes.items():
            tensor: Tensor = getattr(self, self.attributes[name])
            arrays[name] = tensor.detach().cpu().numpy().astype(dtype)
        return _unflatten(self.structure, arrays)

    def set_parameters(self, parameters: Parameters) -> None:
        """Store a nested structure of arrays.

        Raises ValueError if names or shapes differ from those of the initial parameters.
        """
        arrays = {name: np.asarray(value) for name, value in _flatten(parameters)}
        if arrays.keys() != self.dtypes.keys():
            raise ValueError(
                f"{type(self.learner).__name__} returned the parameters {sorted(arrays)} instead "
                f"of {sorted(self.dtypes)}. Return the nest that fit received, with other values."
            )
        with torch.no_grad():
            for name, array in arrays.items():
                tensor: Tensor = getattr(self, self.attributes[name])
                if array.shape != tuple(tensor.shape):
                    raise ValueError(
                        f"{type(self.learner).__name__} returned '{name}' of shape "
                        f"{list(array.shape)} instead of {list(tensor.shape)}. Keep the shape."
                    )
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the learner's outputs [n, C], without gradients."""
        outputs = self.learner.predict(self.parameters_as_arrays(), inputs.cpu().numpy())
        return torch.as_tensor(np.asarray(outputs), dtype=inputs.dtype, device=inputs.device)


def _flatten(parameters: Parameters, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each array of a nested structure with its name, such as "layers:0:weight"."""
    if isinstance(parameters, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(parameters.items())
    elif isinstance(parameters, list | tuple):
        items = iter(enumerate(parameters))
    else:
        yield prefix or "parameters", parameters
        return
    for key, value in items:
        name = f"{prefix}{_SEPARATOR}{key}" if prefix else str(key)
        yield from _flatten(value, name)


def _structure(parameters: Parameters, prefix: str = "") -> Any:
    """Return the nested structure with the name of each array in place of the array."""
    if isinstance(parameters, Mapping):
        return {
            key: _structure(value, f"{prefix}{_SEPARATOR}{key}" if prefix else str(key))
            for key, value in parameters.items()
        }
    if isinstance(parameters, list | tuple):
        parts = [
            _structure(value, f"{prefix}{_SEPARATOR}{index}" if prefix else str(index))
            for index, value in enumerate(parameters)
        ]
        return tuple(parts) if isinstance(parameters, tuple) else parts
    return prefix or "parameters"


def _unflatten(structure: Any, arrays: Mapping[str, np.ndarray]) -> Parameters:
    """Rebuild the nested dictionaries and lists that `structure` describes from named arrays."""
    if isinstance(structure, dict):
        return {key: _unflatten(value, arrays) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        parts = [_unflatten(value, arrays) for value in structure]
        return tuple(parts) if isinstance(structure, tuple) else parts
    return arrays[structure]
