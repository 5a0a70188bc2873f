"""What inputs and labels may be, in words that data, models and tasks share."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

# One class of several; any number of labels, each there or not; numbers.
Kind: TypeAlias = Literal["classification", "multilabel", "regression"]
KINDS: tuple[Kind, ...] = ("classification", "multilabel", "regression")


class Tokens(NamedTuple):
    """Inputs that are sequences of token numbers below `size`; `padding` fills short ones up and is never looked at."""

    size: int
    padding: int = 0


LOWER_IS_BETTER = frozenset(("mae", "mse"))  # metrics that are errors
