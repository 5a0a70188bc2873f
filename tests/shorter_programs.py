"""Make programs of notebooks and pages shorter, so that their tests take less time."""

from __future__ import annotations

import math
import re

# The rounds of a run ("rounds=10"), the rounds and the version after which a method changes
# ("warmup_rounds=10", "first_version=10"), and the trials of a sweep.
NUMBERS = re.compile(r"(rounds|first_version|sweep\.trials)=(\d+)")
SHARE = 0.2
SMALLEST = 2  # so that a round receives what the round before it has left


def shorten(program: str) -> str:
    """Return a program in which each number of rounds or trials is a fifth, but at least two.

    What a method changes after some rounds thus also happens in the shorter run.
    """

    def reduce(match: re.Match[str]) -> str:
        key, number = match.groups()
        return f"{key}={max(SMALLEST, math.ceil(SHARE * int(number)))}"

    return NUMBERS.sub(reduce, program)
