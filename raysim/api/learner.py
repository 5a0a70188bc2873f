"""Define learners: models that are not `torch.nn.Module`s, such as those of scikit-learn.

The parameters of a learner are arrays in nested dictionaries, lists and tuples, or bytes. raysim
copies arrays of floats into the run's flat vector, and treats them like the parameters of a neural
network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.declarations import Task
from raysim.api.hook_checks import HookError, format_error, format_traceback
from raysim.api.local_job import LocalJob, ScoredModel
from raysim.api.local_training import LocalResult
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.api.setup import Setup
from raysim.models.split import WholeNetwork
from raysim.primitives.checks import at_least

Parameters: TypeAlias = Any  # an array, or a mapping or sequence of `Parameters`
_SEPARATOR = ":"


@dataclass(frozen=True)
class LearnerUpdate:
    """The update of one client, for a learner whose parameters are bytes.

    parameters: the bytes that `fit` returned.
    weight: the weight in a mean over the updates. Weights sum to 1, unless a method uses another
    divisor, for example for stale updates.
    samples: the number of the client's training samples.
    """

    client: int
    parameters: bytes
    weight: float
    samples: int
    staleness: int


class EvaluationData:
    """The samples that a learner is evaluated on.

    client: -1 for sets that belong to no client.
    name: "client", "validation", "central", "domain:NAME" for the domain NAME of the clients' test
    samples, or "central:NAME" for the domain NAME of the central test set.
    rows: int64 [n], the positions of the samples in the data set.
    state: the client state that the learner declared, by name; empty without a client.
    """

    def __init__(self, scored: ScoredModel):
        self.client, self.name, self.rows = scored.client, scored.name, scored.rows
        self.task, self.seed = scored.task, scored.seed
        self.state: Mapping[str, Any] = scored.state
        self._scored = scored

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Read the samples from the data set: return normalised inputs [n, ...], and labels.

        Labels are classes [n], or [n, ...] if the task is not classification.
        """
        inputs, labels = self._scored.tensors()
        return inputs.cpu().numpy(), labels.cpu().numpy()


class Learner(Method):
    """The base class of a user's model that has its own parameters and its own training.

    Implement `initial`, `fit`, and `predict` or `evaluate`. Choose the learner with the group
    `learner`, or with `raysim.run(learner=MyLearner())`.

    Parameters are a nested structure of arrays, or bytes. The server averages arrays of floats.
    Each entry of other arrays becomes the largest value among the clients. A learner with bytes
    must implement `aggregate`; the number of bytes may change.
    """

    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        """Return the initial parameters: arrays whose shapes never change, or bytes.

        task: the learning task: `task.shape` is the shape of one input, `task.num_classes` the
        number of classes, and `task.kind` the kind of task.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a function 'initial'. Define it.")

    def fit(
        self, parameters: Parameters, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Parameters, LocalResult | None]:
        """Train on a client's samples; return the new parameters, and a `LocalResult` or None.

        The `LocalResult` has numbers for the history, such as the training loss.
        parameters: a copy of the received version.
        inputs: the client's training inputs, [n, ...].
        labels: classes [n], or [n, ...] if the task is not classification, such as floats [n, C].
        job: has settings, random generators and client state.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a function 'fit'. Define it.")

    def predict(self, parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        """Return the outputs [n, C] for inputs [n, ...]: logits of C classes, or C values.

        parameters: the parameters of the model that is scored, such as the current version.
        inputs: the normalised inputs of n samples.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a function 'predict'. Define it.")

    def evaluate(self, parameters: Parameters, data: EvaluationData) -> Mapping[str, float]:
        """Return scores by name for a set of samples, such as {"accuracy": 0.9}, or {}.

        Implement this function or `predict`. The sets are test and validation samples of clients,
        the central test set, and domains. One score should be the main metric (`evaluate.metric`).
        data: `data.arrays()` returns the inputs and labels.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no function 'evaluate'. Define `evaluate` or "
            "`predict` in the learner."
        )

    def aggregate(self, parameters: bytes, updates: Sequence[LearnerUpdate]) -> bytes:
        """Combine the updates of clients into the next version of the learner's parameters.

        raysim calls this function on the server, only if the parameters are bytes.
        parameters: the current version.
        updates: at least one, in the order of arrival.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has parameters of type bytes and needs a function 'aggregate'. "
            "Define it, or use arrays."
        )

    def upload_bytes(self, task: Task, received: int) -> int:
        """Estimate how many bytes a job will send to the server, `received` by default.

        raysim calls this function before training, only if the learner's parameters are bytes.
        received: bytes of the version that the job starts from, rounded up to a multiple of 4.
        """
        return received

    # --- what raysim calls ----------------------------------------------------------------------
    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """Replace the run's model by a module that holds the learner's parameters."""
        rng = np.random.default_rng(int(torch.randint(2**62, (1,))))
        try:
            initial = self.initial(task, rng)
        except (Exception, SystemExit) as error:
            text = f"initial of {type(self).__name__} failed: {format_error(error).rstrip('.')}."
            raise ValueError(f"{text}\n{format_traceback(error)}".rstrip()) from error
        network = LearnerNetwork(self, initial, task.dtype, task.num_classes)
        return WholeNetwork(network, task.num_classes)

    def setup(self, run: Setup) -> None:
        """Declare that clients train with `fit`, and are scored with `evaluate` if there is one.

        If the learner's parameters are bytes, also declare how they are sent and aggregated.
        """
        run.train(self.fit_client)
        run.without_gradients()
        if type(self).evaluate is not Learner.evaluate:
            run.evaluate(self.evaluate_set)
        network = getattr(run.model, "net", None)  # the attribute is missing if `initial` failed
        if not isinstance(network, LearnerNetwork) or network.content is None:
            run.skip("absorb")
            return
        run.require(
            type(self).aggregate is not Learner.aggregate,
            f"{type(self).__name__}: its initial parameters are bytes, but it has no function "
            "'aggregate'. Define it, or use arrays.",
        )
        initial = _encode(network.content)
        run.without_parameters()
        run.server_state("model", lambda server: initial)
        run.send("model", floats=initial.numel(), varies=True)
        planned = functools.partial(self._planned_words, run.task)
        run.upload("model", planned(initial.numel()), planned=planned)
        run.load_model(_load_content)

    def _planned_words(self, task: Task, received: int) -> int:
        """Return how many 32-bit words a job will send, for a learner whose parameters are bytes.

        task: the learning task.
        received: the number of 32-bit words that the job receives as parameters.
        """
        name = f"upload_bytes of {type(self).__name__}"
        size = at_least(name, self.upload_bytes(task, 4 * (received - 1)), 0)
        return 1 + math.ceil(size / 4)

    def fit_client(self, job: LocalJob) -> LocalResult | None:
        """Call the user's `fit` with the received parameters and the client's samples.

        Store the new parameters: arrays in the job's network, bytes in the job's upload. Return the
        `LocalResult` that `fit` returned, or None.
        """
        network: LearnerNetwork = job.model.net  # type: ignore[assignment]
        if network.content is not None:
            network.content = _decode(job.received["model"])
        inputs, labels = job.arrays()
        returned = self.fit(network.parameters_as_arrays(), inputs, labels, job)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"fit of {type(self).__name__} returned {type(returned).__name__}. Return a pair: "
                "the parameters, and a LocalResult or None."
            )
        parameters, result = returned
        if network.content is None:
            network.set_parameters(parameters)
            return result
        job.upload["model"] = _encode(_check_bytes(parameters, self, "fit"))
        job.report["bytes_down"] = len(network.content)
        job.report["bytes_up"] = len(parameters)
        return result

    def evaluate_set(self, scored: ScoredModel) -> Mapping[str, float]:
        """Pass the parameters and a set of samples to `evaluate`."""
        network: LearnerNetwork = scored.vector.networks["model"].net  # type: ignore[assignment]
        return self.evaluate(network.parameters_as_arrays(), EvaluationData(scored))

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Call `aggregate` with the clients' parameters, and store the result as server state.

        raysim calls this hook only for a learner whose parameters are bytes.
        """
        contents = [_decode(upload) for upload in aggregation.uploads("model")]
        divisor = aggregation.divisor
        updates = []
        for index, update in enumerate(aggregation.updates):
            weight = aggregation.weights[index] / divisor
            staleness = aggregation.staleness[index]
            updates.append(
                LearnerUpdate(update.client, contents[index], weight, update.samples, staleness)
            )
        parameters = self.aggregate(_decode(server.state["model"]), updates)
        server.state["model"] = _encode(_check_bytes(parameters, self, "aggregate"))


def _load_content(scored: ScoredModel) -> None:
    """Store the current version of the learner's parameters in the module that is scored.

    This function is used only for a learner whose parameters are bytes.
    scored: the model; its module is a `LearnerNetwork`, which holds the bytes.
    """
    network: LearnerNetwork = scored.vector.networks["model"].net  # type: ignore[assignment]
    network.content = _decode(scored.received["model"])


def _check_bytes(parameters: object, learner: Learner, function: str) -> bytes:
    if isinstance(parameters, bytes):
        return parameters
    raise TypeError(
        f"{function} of {type(learner).__name__} returned {type(parameters).__name__} as "
        "parameters. Return bytes, as initial does."
    )


def _encode(content: bytes) -> Tensor:
    """Return bytes as an int32 tensor with four bytes in each element.

    The first element is the number of bytes. If the bytes do not fill the last element, zeros
    follow them.
    """
    padded = content + bytes(-len(content) % 4)
    words = np.frombuffer(padded, np.int32)
    return torch.from_numpy(np.concatenate([np.array([len(content)], np.int32), words]))


def _decode(words: Tensor) -> bytes:
    array = words.cpu().numpy()
    return array[1:].tobytes()[: int(array[0])]


class LearnerNetwork(nn.Module):
    """A PyTorch module that holds the parameters of a learner.

    Float arrays become parameters, all other arrays buffers. Parameters that are bytes become the
    attribute `content`, which is None for arrays.
    initial: the learner's initial parameters.
    dtype: the type of the module's parameters.
    outputs: the number of the learner's outputs for a sample.
    """

    def __init__(self, learner: Learner, initial: Parameters, dtype: torch.dtype, outputs: int):
        super().__init__()
        self.learner, self.outputs = learner, outputs
        self.content = initial if isinstance(initial, bytes) else None
        self.structure = _structure(initial)
        self.dtypes: dict[str, np.dtype[Any]] = {}
        self.attributes: dict[str, str] = {}
        arrays = [] if self.content is not None else _flatten(initial)
        for name, value in arrays:
            array = np.asarray(value)
            self.dtypes[name] = array.dtype
            self.attributes[name] = attribute = self._free_attribute(name)
            if array.dtype.kind == "f":
                self.register_parameter(attribute, nn.Parameter(torch.tensor(array, dtype=dtype)))
            elif array.dtype.kind in "iub":
                self.register_buffer(attribute, torch.tensor(array, dtype=torch.int64))
            else:
                raise ValueError(
                    f"the initial parameter '{name}' of {type(learner).__name__} has the type "
                    f"{array.dtype}. Use arrays of numbers, or bytes."
                )

    def _free_attribute(self, name: str) -> str:
        """Return a name for a new attribute of the module, made from the name of an array.

        Each "." becomes "_". "_" is appended while the module has an attribute of this name.
        name: such as "layers:0:conv.weight".
        """
        attribute = name.replace(".", "_")
        while hasattr(self, attribute):
            attribute += "_"
        return attribute

    def parameters_as_arrays(self) -> Parameters:
        """Return a copy of the parameters, with the structure and types that `initial` returned.

        The copy is a nested structure of NumPy arrays. If the learner's parameters are bytes, the
        result is these bytes.
        """
        if self.content is not None:
            return self.content
        arrays = {}
        for name, dtype in self.dtypes.items():
            tensor: Tensor = getattr(self, self.attributes[name])
            arrays[name] = tensor.detach().cpu().numpy().astype(dtype)
        return _unflatten(self.structure, arrays)

    def set_parameters(self, parameters: Parameters) -> None:
        """Store a nested structure of arrays.

        Raises HookError if names, shapes or kinds of numbers differ from the initial parameters.
        """
        arrays = {name: np.asarray(value) for name, value in _flatten(parameters)}
        if arrays.keys() != self.dtypes.keys():
            raise HookError(
                f"{type(self.learner).__name__} returned the parameters {sorted(arrays)} instead "
                f"of {sorted(self.dtypes)}. Return the same nested structure that fit received, "
                "with new values."
            )
        with torch.no_grad():
            for name, array in arrays.items():
                tensor: Tensor = getattr(self, self.attributes[name])
                if array.shape != tuple(tensor.shape):
                    raise HookError(
                        f"{type(self.learner).__name__} returned '{name}' of shape "
                        f"{list(array.shape)} instead of {list(tensor.shape)}. Do not "
                        "change the shapes of parameters."
                    )
                kind, dtype = array.dtype.kind, self.dtypes[name]
                if kind not in ("fiub" if dtype.kind == "f" else "iub"):
                    raise HookError(
                        f"{type(self.learner).__name__} returned '{name}' of type {array.dtype} "
                        f"instead of {dtype}. Do not change the types of parameters."
                    )
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(array)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the learner's outputs [n, C], without gradients."""
        outputs = self.learner.predict(self.parameters_as_arrays(), inputs.cpu().numpy())
        array = np.asarray(outputs)
        expected = (len(inputs), self.outputs)
        if array.shape != expected or array.dtype.kind not in "fiub":
            raise HookError(
                f"predict of {type(self.learner).__name__} returned {array.dtype} of shape "
                f"{list(array.shape)}. Return numbers of shape {list(expected)}: a row of outputs "
                "for each sample."
            )
        return torch.as_tensor(array, dtype=inputs.dtype, device=inputs.device)


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
    """Return the nested structure with each array replaced by its name."""
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
    """Return a copy of `structure` in which each name is replaced by the array of this name.

    structure: nested dictionaries, lists and tuples of names, made by `_structure`.
    arrays: the arrays by name.
    """
    if isinstance(structure, dict):
        return {key: _unflatten(value, arrays) for key, value in structure.items()}
    if isinstance(structure, list | tuple):
        parts = [_unflatten(value, arrays) for value in structure]
        return tuple(parts) if isinstance(structure, tuple) else parts
    return arrays[structure]
