"""Reduce the rounds of programs in texts, so that their tests take less time."""

from __future__ import annotations

import math
import re

# "rounds=10", "warmup_rounds=10", and the version from which a program on a page uses more data.
NUMBER_OF_ROUNDS = re.compile(r"(rounds|first_version)=(\d+)")
SHARE = 0.2
MIN_ROUNDS = 2  # so that a round receives what the round before it has left


def with_fewer_rounds(program: str) -> str:
    """Return a program in which each number of rounds is a fifth, rounded up, but at least two.

    What a method changes after some rounds thus also happens in the shorter run.
    """

    def reduce(match: re.Match[str]) -> str:
        name, number = match.groups()
        return f"{name}={max(MIN_ROUNDS, math.ceil(SHARE * int(number)))}"

    return NUMBER_OF_ROUNDS.sub(reduce, program)
