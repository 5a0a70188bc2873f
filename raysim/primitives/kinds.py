"""The kinds of inputs and labels that data, models and tasks share."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

# Labels: one class of several; any number of labels, each present or not; numbers.
Kind: TypeAlias = Literal["classification", "multilabel", "regression"]
KINDS: tuple[Kind, ...] = ("classification", "multilabel", "regression")


class Tokens(NamedTuple):
    """Inputs that are sequences of token numbers below `size`.

    `padding` is the number that fills up short sequences; it is ignored.
    """

    size: int
    padding: int = 0


FLOAT_BYTES = 4  # of a parameter that travels

# Metrics that are errors.
LOWER_IS_BETTER = frozenset(("mae", "mse"))
# Metrics between 0 and 1, which can be shown in percent.
SHARES = frozenset(("accuracy", "auroc", "f1", "f1_samples", "iou"))
