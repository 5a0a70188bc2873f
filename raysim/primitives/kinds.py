"""The kinds of inputs and labels that data, models and tasks share."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

# Labels: one class of several; any number of labels, each present or not; numbers; one class for
# each position of a sample, such as a pixel or a token.
Kind: TypeAlias = Literal["classification", "multilabel", "regression", "positions"]
KINDS: tuple[Kind, ...] = ("classification", "multilabel", "regression", "positions")

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

# Metrics that are errors.
LOWER_IS_BETTER = frozenset(("mae", "mse"))
# Metrics between 0 and 1, which can be shown in percent.
SHARES = frozenset(("accuracy", "auroc", "f1", "f1_samples", "iou"))
