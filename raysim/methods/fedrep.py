"""FedRep and FedPer: the extractor is shared, and every client keeps a head of its own.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning" (ICML
2021), Algorithm 1; Arivazhagan, Aggarwal, Singh and Choudhary, "Federated Learning with Personalization Layers" (2019).

    FedRep (mode=alternate)   head_epochs of the head with the extractor fixed, then body_epochs of the extractor with
                              the head fixed
    FedPer (mode=joint)       head and extractor together
    both                      extractors are averaged; a client is scored with the shared extractor and its own head

Choices where the sources differ or are silent
- local.epochs is the sum of both phases, and is set to it unless the user sets it; a budget of local.steps is cut in
  the same proportion. Mode joint uses it all.
- The extractor is in train mode during head steps too (the authors' code): dropout is on and BatchNorm's running
  statistics move, though no parameter of the extractor does.
- Each phase has an optimiser of its own, so neither weight decay nor momentum moves what is fixed.
- Weights by samples, as the authors' code; the paper's clients are of equal size.
- A client that never trained has the initial head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from torch import nn

from raysim.api.context import Stage
from raysim.api.declarations import FORWARD, Cost, Participation
from raysim.api.hooked_method import HookedMethod
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Plan
    from raysim.api.declarations import Local
    from raysim.api.hooked_method import OldSetup as Setup


def head_steps(steps: int, head_epochs: int, body_epochs: int) -> int:
    """How many of a job's steps train the head: the first of them."""
    return steps * head_epochs // (head_epochs + body_epochs)


class FedRep(HookedMethod):
    """mode: "alternate" is FedRep, "joint" FedPer, to which the two numbers of epochs mean nothing."""

    name = "fedrep"
    paper = "Collins et al., ICML 2021"
    needs = frozenset(("features",))

    def __init__(self, mode: Literal["alternate", "joint"] = "alternate", head_epochs: int = 10, body_epochs: int = 1):
        self.mode = one_of("method.fedrep.mode", mode, ("alternate", "joint"))
        self.head_epochs = at_least("method.fedrep.head_epochs", head_epochs, 1)
        self.body_epochs = at_least("method.fedrep.body_epochs", body_epochs, 1)

    @property
    def idle(self) -> frozenset[str]:
        """FedPer has one stage, that of FedAvg."""
        return frozenset({"stages", "cost"} if self.mode == "joint" else ())

    def personal(self, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """The head."""
        return [f"model.head.{name}" for name, _ in networks["model"].get_submodule("head").named_parameters()]

    @property
    def _total_epochs(self) -> int:
        return self.head_epochs + self.body_epochs

    @property
    def _fewest_steps(self) -> int:
        """Return the smallest budget in steps in which the head has one."""
        return math.ceil(self._total_epochs / self.head_epochs)

    def require(self, local: Local) -> Mapping[str, object]:
        """Return the sum of both phases, or the smallest budget in steps."""
        if self.mode == "joint":
            return {}
        if local.epochs is not None:
            return {"local.epochs": self._total_epochs}
        return {"local.steps": max(local.steps or 0, self._fewest_steps)}

    def check(self, setup: Setup) -> Sequence[str]:
        """In mode alternate the budget is the sum of both phases, and both have a step in it."""
        if self.mode == "joint":
            return ()
        local = setup.local
        if local.epochs is not None and local.epochs != self._total_epochs:
            raise ValueError(
                f"local.epochs: {local.epochs} is not the sum of method.fedrep.head_epochs={self.head_epochs} "
                f"and method.fedrep.body_epochs={self.body_epochs}. "
                f"Leave local.epochs out, or set local.epochs={self._total_epochs}."
            )
        if local.steps is not None and local.steps < self._fewest_steps:
            raise ValueError(
                f"local.steps: {local.steps} leaves no step for the head, whose share is "
                f"method.fedrep.head_epochs={self.head_epochs} of {self._total_epochs}. "
                f"Set local.steps={self._fewest_steps} or more."
            )
        return ()

    def stages(self, plan: Plan) -> Sequence[tuple[Stage, ...]]:
        """An entry per step: first the head's, then the extractor's."""
        first = head_steps(plan.steps, self.head_epochs, self.body_epochs)
        head, body = Stage("fedrep.head", ("model.head",)), Stage("fedrep.body", ("model.extractor",))
        return [(head,)] * first + [(body,)] * (plan.steps - first)

    def cost(self, job: Participation) -> Cost:
        """Head steps save the extractor's backward pass."""
        share = self.head_epochs / (self.head_epochs + self.body_epochs)
        return Cost(samples=(FORWARD - 1) * share * job.trained)
