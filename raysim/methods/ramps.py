"""Ramps: weights between 0 and 1 that grow over the rounds of a run.

Sources: "exp" is the ramp of FRAug (Chen et al., ICCV 2023); "laine_aila" is the ramp of Laine and
Aila, "Temporal Ensembling for Semi-Supervised Learning" (ICLR 2017).
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

RampForm: TypeAlias = Literal["exp", "laine_aila", "reciprocal", "constant"]
RAMPS = get_args(RampForm)


def rampup_coefficient(step: int, total_steps: int, gamma: float, form: str = "exp") -> float:
    """Return the value of a ramp, between 0 and 1; it never decreases from step to step.

    step: the current round s, at least 0 and, for "exp", at most T.
    total_steps: the number T of rounds of the ramp.
    gamma: the speed of the ramp, in the formula of its form.
    form: "exp" is e^(gamma (s - T)), as in FRAug's paper; "laine_aila" is e^(-gamma (1 - min(s/T,
    1))^2); "reciprocal" is 1 - 1/(gamma s + 1); "constant" is 1/2 in all rounds.
    """
    if form == "exp":
        return math.exp(gamma * (step - total_steps))
    if form == "laine_aila":
        return math.exp(-gamma * (1.0 - min(step / total_steps, 1.0)) ** 2)
    if form == "reciprocal":
        return 1.0 - 1.0 / (gamma * step + 1.0)
    return 0.5
