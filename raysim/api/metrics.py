"""Define metrics beyond raysim's own: functions that a user wrote, and metrics of torchmetrics.

A run computes the metrics that `evaluate.metrics` or `raysim.run(metrics=...)` lists.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.api.objectives import MetricRule, Objective
from raysim.api.structures import OnStructures
from raysim.primitives.checks import one_of
from raysim.primitives.errors import first_line, nearest
from raysim.primitives.extras import import_optional
from raysim.primitives.kinds import IGNORED, POSITION_KINDS, Kind, TargetField

ScoredUnit: TypeAlias = Literal["sample", "set"]

MetricFunction: TypeAlias = Callable[[Tensor, Tensor], Any]
MAX_TRIED_ROWS = 64
LOSS_NAMES = ("loss", "train_loss")  # columns of every run, whose names metrics cannot have
# The prefix of torchmetrics' classes for each kind of task.
_PREFIXES: dict[Kind, str] = {
    "classification": "multiclass",
    "multilabel": "multilabel",
    "regression": "",
    "positions": "multiclass",
    "causal": "multiclass",
}
_SHORT_NAMES = {"f1": "f1_score", "iou": "jaccard_index", "map": "average_precision"}


class ScoredTask(Protocol):
    """The facts of a `Task` that its metrics depend on."""

    @property
    def kind(self) -> Kind:
        """The kind of the task."""
        ...

    @property
    def num_classes(self) -> int:
        """The number of classes, or of other outputs."""
        ...

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one label."""
        ...

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the model's output for one sample."""
        ...

    @property
    def objective(self) -> Objective:
        """The loss and the usual metrics."""
        ...

    @property
    def targets(self) -> tuple[TargetField, ...]:
        """Descriptions of the arrays in one label; () if a label is a single array.

        A label has several arrays if it is a dictionary or a list, such as boxes and their classes.
        """
        ...


@dataclass(frozen=True)
class Metric:
    """A metric that a user defines by a function.

    function: takes outputs [n, C] and the same labels as the loss. It returns a score for each
    sample, [n], or one number for all of them.
    name: None takes the function's name.
    higher: True if a higher score is better; None takes the function's `higher_is_better`, or True.
    per: "sample" if the function returns a score for each sample; the metric is the mean of these
    scores. "set" if the function returns one number, for the central test set, a client or a
    domain. With None, raysim finds out by a call with random data. For structured labels, None
    means "sample".
    """

    function: MetricFunction
    name: str | None = None
    higher: bool | None = None
    per: ScoredUnit | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(
                f"metrics: {self.function!r} is not a function. Give a function of outputs and "
                "labels."
            )
        one_of("metrics.per", self.per, (*get_args(ScoredUnit), None))

    @property
    def title(self) -> str:
        """The name of the metric in columns of the history: `name`, or else the function's name."""
        # The function of a functools.partial.
        function = getattr(self.function, "func", self.function)
        return self.name or str(getattr(function, "__name__", type(function).__name__))

    @property
    def is_higher_better(self) -> bool:
        """True if a higher score is better."""
        if self.higher is not None:
            return self.higher
        return getattr(self.function, "higher_is_better", True) is not False


@dataclass(frozen=True)
class SampleScores:
    """A user's function of outputs and labels that returns one value for each sample.

    name: the name of the metric, for errors.
    """

    function: MetricFunction
    name: str

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return a score for each of B samples, [B].

        If the user's function returns several values for a sample, the score is their mean. Raise
        ValueError if the function does not return at least one value for each sample.
        outputs, labels: [B, ...], the model's outputs and the samples' labels.
        """
        values = torch.as_tensor(self.function(outputs, labels))
        if not values.ndim or len(values) != len(outputs):
            raise ValueError(
                f"evaluate.metrics: {self.name} returns the shape {list(values.shape)} for "
                f"{len(outputs)} samples. Return one value for each sample. If it must return one "
                "number for all samples of a set, pass raysim.Metric(function, per='set')."
            )
        return values if values.ndim == 1 else values.flatten(1).to(torch.float64).mean(1)


@dataclass(frozen=True)
class SetScore:
    """A user's function of outputs and labels that returns one number for a set of samples.

    name: the name of the metric, for errors.
    """

    function: MetricFunction
    name: str

    def __call__(self, rows: np.ndarray) -> float:
        """Return the score of a set of n samples.

        rows: the structured array [n] that `SetRows` makes, with the fields "outputs" and "labels".
        """
        outputs = torch.from_numpy(np.ascontiguousarray(rows["outputs"]))
        labels = torch.from_numpy(np.ascontiguousarray(rows["labels"]))
        advice = "Return one number, nan if the score is not defined."
        with _errors_with_shapes(self.name, outputs, labels, advice):
            return float(self.function(outputs, labels))


@contextmanager
def _errors_with_shapes(name: str, outputs: Tensor, labels: Tensor, advice: str) -> Iterator[None]:
    """Turn errors of a user's metric into a ValueError that shows its name and its inputs' shapes.

    The call of the metric is the body of a `with` block. No gradients are computed in it.
    outputs, labels: the arguments of the metric.
    advice: the error's last sentence, which says what to do.
    """
    try:
        with torch.no_grad():
            yield
    except Exception as error:  # any error of a user's own code
        raise ValueError(
            f"evaluate.metrics: {name} fails for outputs {list(outputs.shape)} and labels "
            f"{list(labels.shape)} ({type(error).__name__}: {first_line(error)}). {advice}"
        ) from error


class SetRows:
    """The outputs and labels of a set of samples, collected batch by batch."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add the outputs and labels of a batch."""
        self._outputs.append(outputs)
        self._labels.append(labels)

    def array(self) -> np.ndarray:
        """Return all samples that were added, as an array with one entry for each sample."""
        columns = {
            "outputs": torch.cat(self._outputs).cpu().numpy(),
            "labels": torch.cat(self._labels).cpu().numpy(),
        }
        fields = [(name, values.dtype, values.shape[1:]) for name, values in columns.items()]
        rows = np.empty(len(columns["outputs"]), np.dtype(fields))
        for name, values in columns.items():
            rows[name] = values
        return rows


def row_functions(metrics: Sequence[MetricRule]) -> list[Callable[..., Tensor] | None]:
    """Return the functions that compute the metrics' scores of single samples.

    A function (`MetricRule.rows`) that several metrics use is listed once. All metrics that need
    the outputs and labels of a whole set have one common entry, None.
    """
    return list(dict.fromkeys(metric.rows for metric in metrics))


class ScoresOfRows:
    """The scores of each sample in a set, collected batch by batch.

    For a metric that needs the whole set (`MetricRule.rows` is None), outputs and labels are
    collected instead.
    """

    def __init__(self, metrics: Sequence[MetricRule]) -> None:
        self._functions = row_functions(metrics)
        self._parts: list[SetRows | list[Tensor]] = [
            SetRows() if function is None else [] for function in self._functions
        ]

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Compute the scores of the samples of a batch, and append them to the collected scores.

        For a metric that needs the whole set, append outputs and labels instead.
        outputs, labels: [B, ...], the model's outputs and the samples' labels.
        """
        for function, parts in zip(self._functions, self._parts, strict=True):
            if function is None:
                assert isinstance(parts, SetRows), "made for functions that are None"
                parts.add(outputs, labels)
            else:
                assert isinstance(parts, list), "made for functions that are not None"
                parts.append(function(outputs, labels))

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the collected scores of all n samples: an array [n, ...] for each row function.

        If a row function is None, the array is structured, [n], with the fields "outputs" and
        "labels".
        """
        return tuple(
            parts.array() if isinstance(parts, SetRows) else torch.cat(parts).cpu().numpy()
            for parts in self._parts
        )


# ---- from names and functions to rules -----------------------------------------------------------
def resolve_metrics(
    main: str | None, metrics: Sequence[str | Metric], task: ScoredTask
) -> tuple[MetricRule, ...]:
    """Return rules that compute the metrics of a run, with the main metric first.

    main: `evaluate.metric`; None means the first of `metrics`, or the task's usual metrics.
    metrics: names of metrics, or `Metric` objects of the user.
    Raise ValueError for an unknown name, for two equal names, and for a user's metric with
    `per=None` that fails on random outputs.
    """
    rules = [_resolve(metric, task) for metric in metrics]
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"evaluate.metrics has {name} more than once. Remove or rename one.")
    if main is None:
        return tuple(rules) or task.objective.metrics[: task.objective.usual_metrics]
    if "+" in main:
        raise ValueError(
            f"evaluate.metric={main} names several metrics, but it must name one, the main metric. "
            f"To compute all of them, set evaluate.metrics={main}; the first one is then the main "
            "metric."
        )
    if main not in names:
        return (_resolve(main, task, "evaluate.metric"), *rules)
    first = rules[names.index(main)]
    return (first, *(rule for rule in rules if rule is not first))


def _resolve(metric: str | Metric, task: ScoredTask, key: str = "evaluate.metrics") -> MetricRule:
    if isinstance(metric, Metric):
        return _own_rule(metric, task)
    return task.objective.metric(metric) or _torch_rule(metric, task, key)


def _own_rule(metric: Metric, task: ScoredTask) -> MetricRule:
    name = metric.title
    if not name.isidentifier():
        raise ValueError(
            f"evaluate.metrics: {name!r} cannot name a column: a name has letters, digits and _, "
            'and no digit first. Give another name, raysim.Metric(function, name="mine").'
        )
    if name in LOSS_NAMES:
        raise ValueError(
            f"evaluate.metrics: {name} is already a column of every history. Give the metric "
            'another name, raysim.Metric(function, name="mine").'
        )
    function, per = metric.function, metric.per
    if task.kind == "structure":
        function, per = OnStructures(function, task.targets), per or "sample"
    per = per or _find_per(metric, task)
    if per == "sample":
        rows = SampleScores(function, name)
        return MetricRule(name, rows, higher=metric.is_higher_better)
    summarise = SetScore(function, name)
    return MetricRule(name, None, summarise, metric.is_higher_better)


def _find_per(metric: Metric, task: ScoredTask) -> ScoredUnit:
    """Call a user's metric with random outputs, to find out what it scores.

    Return "sample" if the metric returns a score for each sample, and "set" if it returns one
    number. Raise ValueError for any other result.
    """
    outputs, labels = example_scores(task)
    name = metric.title
    with _errors_with_shapes(name, outputs, labels, "Correct it, or leave it out."):
        value = metric.function(outputs, labels)
        shape = list(torch.as_tensor(value).shape)
    if not shape:
        return "set"
    if shape[0] == len(outputs):
        return "sample"
    raise ValueError(
        f"evaluate.metrics: {name} returns the shape {shape} for {len(outputs)} samples. Return "
        "one value for each sample, or one number for all."
    )


def example_scores(task: ScoredTask) -> tuple[Tensor, Tensor]:
    """Return random outputs and labels of a few samples, to try a user's metric with.

    If the task has C classes, the labels are 0, 1, ..., C - 1, 0, 1, and so on.
    """
    generator = torch.Generator().manual_seed(0)
    rows = min(MAX_TRIED_ROWS, 2 * task.num_classes + 3)
    if task.kind in POSITION_KINDS:
        rows = 3
    outputs = torch.randn(rows, *task.output_shape, generator=generator)
    if task.kind in ("classification", *POSITION_KINDS):
        labels = torch.arange(rows * math.prod(task.label_shape)) % task.num_classes
        return outputs, labels.view(rows, *task.label_shape)
    labels = torch.randn(rows, *task.output_shape, generator=generator)
    return outputs, (labels > 0).float() if task.kind == "multilabel" else labels


# ---- torchmetrics --------------------------------------------------------------------------------
def _torch_rule(name: str, task: ScoredTask, key: str) -> MetricRule:
    """Return the metric of torchmetrics that has this name; raise ValueError if there is none.

    key: the setting that contains this name, such as "evaluate.metric"; errors show it.
    """
    usual = [metric.name for metric in task.objective.metrics]
    if task.kind == "structure":
        raise ValueError(
            f"{key}={name} cannot score the targets of this data, because each target is a "
            "dictionary or list of values. Give your own metric function, or leave this metric "
            "out."
        )
    classes = _torch_classes(task.kind, f"{key}={name} is none of {', '.join(usual)}, and")
    wanted = _SHORT_NAMES.get(name, name).replace("_", "").lower()
    cls = classes.get(wanted)
    if cls is None:
        near = nearest(name, [*usual, *classes])
        advice = f"Did you mean {near}?" if near else f"Set it to one of {', '.join(usual)}."
        raise ValueError(
            f"{key}={name} is not a metric for {task.kind}. {advice} If you passed your own "
            "function when you started this run, pass it again: raysim.run(metrics=[...])."
        )
    score = SetScore(TorchMetric(wanted, task.kind, task.num_classes), name)
    example = _structured(*example_scores(task))
    score(example)  # raises an error for a metric that returns a curve or a matrix
    return MetricRule(name, None, score, cls.higher_is_better is not False)


def _structured(outputs: Tensor, labels: Tensor) -> np.ndarray:
    rows = SetRows()
    rows.add(outputs, labels)
    return rows.array()


@functools.cache
def _torch_classes(kind: Kind, error_start: str) -> dict[str, Any]:
    """Return the metrics of torchmetrics for a kind of task, as classes by name.

    Raise ValueError if torchmetrics is not installed.
    error_start: the first words of this error.
    """
    family = "regression" if kind == "regression" else "classification"
    import_optional("torchmetrics", error_start)
    module = import_optional(f"torchmetrics.{family}", error_start)
    prefix = _PREFIXES[kind]
    names = [name for name in dir(module) if name.lower().startswith(prefix)]
    classes = {name.lower().removeprefix(prefix): getattr(module, name) for name in names}
    return {name: cls for name, cls in classes.items() if isinstance(cls, type)}


@dataclass(frozen=True)
class TorchMetric:
    """A metric of torchmetrics as a function of outputs and labels.

    It gets the softmax or the sigmoid of the outputs, and for a regression the outputs.

    name: such as "f2".
    kind: the kind of the task, which decides the class of torchmetrics.
    outputs: the number of outputs for a sample.
    """

    name: str
    kind: Kind
    outputs: int

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the score of n samples, one number.

        outputs, labels: [n, ...], the outputs of the model and the labels.
        """
        cls = _torch_classes(self.kind, f"evaluate.metrics={self.name}")[self.name]
        parameters = inspect.signature(cls).parameters
        sizes = dict.fromkeys(("num_classes", "num_labels", "num_outputs"), self.outputs)
        arguments = {key: size for key, size in sizes.items() if key in parameters}
        if self.kind in POSITION_KINDS:
            arguments["ignore_index"] = IGNORED
        metric = cls(**arguments)
        if self.kind == "regression":
            is_one_value = outputs[0].numel() == 1
            shape = (-1,) if is_one_value else (len(outputs), -1)
            value: Tensor = metric(outputs.reshape(shape), labels.reshape(shape))
        elif self.kind == "multilabel":
            value = metric(outputs.sigmoid(), labels.long())
        else:
            value = metric(outputs.softmax(1), labels)
        return value
