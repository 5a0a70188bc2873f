"""Types that describe the inputs and the labels of a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

# The label of a sample, by kind: one of several classes (classification); several labels, each
# present or absent (multilabel); numbers (regression); a class for each position, such as a pixel
# (positions); the next token for each position (causal); a dictionary of arrays (structure).
Kind: TypeAlias = Literal[
    "classification", "multilabel", "regression", "positions", "causal", "structure"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Kinds with a class for each position.
POSITION_KINDS: tuple[Kind, ...] = ("positions", "causal")

# The stored label of samples and positions that losses and scores ignore, as in PyTorch's losses.
IGNORED = -100


class Tokens(NamedTuple):
    """Inputs that are sequences of token numbers below `size`.

    `padding` is the token that fills up short sequences; models ignore it.
    """

    size: int
    padding: int = 0


FLOAT_BYTES = 4  # size of a parameter in messages between server and clients


class InputField(NamedTuple):
    """One of several inputs of a sample.

    name: the model's argument that gets this input; "" if the model takes inputs by position.
    has_tokens: True for token numbers, which the model gets as int64; False for floats.
    """

    name: str
    shape: tuple[int, ...]
    has_tokens: bool = False


class TargetField(NamedTuple):
    """One array of the target of a sample, such as its boxes [k, 4].

    shape: the largest shape in the data set; samples may be shorter along the first axis.
    has_integers: True for int64 values, False for floats.
    """

    name: str
    shape: tuple[int, ...]
    has_integers: bool = False


class PackedShape(tuple[int, ...]):
    """The shape of a row that stores all inputs of a sample: a tuple with the number of floats.

    fields: the inputs, in their order in the row.
    """

    fields: tuple[InputField, ...]

    def __new__(cls, fields: Sequence[InputField]) -> PackedShape:
        """Return the shape of a row that stores all inputs of one sample, flat, one after another.

        fields: the descriptions of the inputs, in their order in the row.
        """
        shape = super().__new__(cls, (sum(math.prod(field.shape) for field in fields),))
        shape.fields = tuple(fields)
        return shape

    def __reduce__(self) -> tuple[type[PackedShape], tuple[tuple[InputField, ...]]]:
        """Pickle only the fields; unpickling computes the shape from the fields."""
        return PackedShape, (self.fields,)

    @property
    def arguments(self) -> dict[str, tuple[int, ...]] | list[tuple[int, ...]]:
        """The shapes of the inputs: a dict by name, or a list if the inputs have no names."""
        if self.fields[0].name:
            return {field.name: field.shape for field in self.fields}
        return [field.shape for field in self.fields]


# Metrics of which a smaller value is better.
LOWER_IS_BETTER = frozenset(("mae", "mse", "perplexity", "sample_loss"))
# Metrics between 0 and 1, which can be shown in percent.
SHARES = frozenset(("accuracy", "auroc", "f1", "f1_samples", "iou"))
