"""Ramps: weights between 0 and 1 that grow over the rounds of a run, or stay constant.

The ramp "exp" is from FRAug (Chen et al., ICCV 2023), and "laine_aila" from temporal ensembling
(Laine and Aila, ICLR 2017).
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

RampForm: TypeAlias = Literal["exp", "laine_aila", "reciprocal", "constant"]


def rampup_coefficient(step: int, total_steps: int, gamma: float, form: str = "exp") -> float:
    """Return the weight of a round, between 0 and 1; later rounds never have smaller weights.

    step: the round s, from 0; for "exp" at most T.
    total_steps: T.
    form: the formula:

        "exp"          e^(gamma (s - T))
        "laine_aila"   e^(-gamma (1 - min(s / T, 1))^2)
        "reciprocal"   1 - 1 / (gamma s + 1)
        "constant"     1/2
    """
    if form == "exp":
        return math.exp(gamma * (step - total_steps))
    if form == "laine_aila":
        return math.exp(-gamma * (1.0 - min(step / total_steps, 1.0)) ** 2)
    if form == "reciprocal":
        return 1.0 - 1.0 / (gamma * step + 1.0)
    return 0.5
