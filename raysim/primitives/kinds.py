"""The kinds of inputs and labels that data, models and tasks share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

# Labels: one class of several; any number of labels, each present or not; numbers; one class for
# each position of a sample, such as a pixel or a token; the next token at each position; a
# dictionary of arrays.
Kind: TypeAlias = Literal[
    "classification", "multilabel", "regression", "positions", "causal", "structure"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Kinds with a class for each position.
POSITION_KINDS: tuple[Kind, ...] = ("positions", "causal")

# The stored label of positions and of samples that count neither in a loss nor in a score. It is
# the default of PyTorch's losses.
IGNORED = -100


class Tokens(NamedTuple):
    """Inputs that are sequences of token numbers below `size`.

    `padding` is the number that fills up short sequences; it is ignored.
    """

    size: int
    padding: int = 0


FLOAT_BYTES = 4  # of a parameter that travels


class InputField(NamedTuple):
    """One of several inputs of a sample.

    name: the argument of the model; "" if the model takes its inputs by position. shape: that of
    one sample. has_tokens: True for token numbers, which the model gets as int64; other inputs are
    floats.
    """

    name: str
    shape: tuple[int, ...]
    has_tokens: bool = False


class TargetField(NamedTuple):
    """One array of the target of a sample, such as its boxes [k, 4].

    shape: the largest shape; the first axis may be shorter. has_integers: True for int64, else the
    values are floats.
    """

    name: str
    shape: tuple[int, ...]
    has_integers: bool = False


class PackedShape(tuple[int, ...]):
    """The shape of a sample with several inputs, which is stored as one row of floats.

    fields: the inputs, in their order in the row.
    """

    fields: tuple[InputField, ...]

    def __new__(cls, fields: Sequence[InputField]) -> PackedShape:
        """Return the shape of the row."""
        shape = super().__new__(cls, (sum(math.prod(field.shape) for field in fields),))
        shape.fields = tuple(fields)
        return shape

    def __reduce__(self) -> tuple[type[PackedShape], tuple[tuple[InputField, ...]]]:
        """Pickle as the fields."""
        return PackedShape, (self.fields,)

    @property
    def arguments(self) -> dict[str, tuple[int, ...]] | list[tuple[int, ...]]:
        """The shape of each input: by name, or a list if the inputs have no names."""
        if self.fields[0].name:
            return {field.name: field.shape for field in self.fields}
        return [field.shape for field in self.fields]


# Metrics that are errors.
LOWER_IS_BETTER = frozenset(("mae", "mse", "perplexity", "sample_loss"))
# Metrics between 0 and 1, which can be shown in percent.
SHARES = frozenset(("accuracy", "auroc", "f1", "f1_samples", "iou"))
