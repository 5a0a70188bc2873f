"""FedRep and FedPer: share the extractor, and let each client keep its own head.

Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning"
(ICML 2021), Algorithm 1; Arivazhagan et al., "Federated Learning with Personalization Layers"
(2019).

    FedRep (mode=alternate)   the head is trained for head_epochs epochs, then the extractor for
                              body_epochs epochs
    FedPer (mode=joint)       head and extractor are trained together
    FedRep and FedPer         the server averages the extractors; a client is scored with the shared
                              extractor and its own head

Departures from the paper
- With mode=alternate, local.epochs is head_epochs + body_epochs, and need not be set. local.steps
  is divided in the ratio head_epochs : body_epochs. Head and extractor have separate optimizers.
- While the head is trained, the extractor is in train mode, as in the authors' code. BatchNorm's
  running statistics then change.
- A client that never trained has the initial head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from raysim.api.context import Stage
from raysim.api.declarations import FORWARD, Participation
from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Plan
    from raysim.api.declarations import Local
    from raysim.api.setup import Setup

TrainingMode: TypeAlias = Literal["alternate", "joint"]


def head_steps(steps: int, head_epochs: int, body_epochs: int) -> int:
    """Return the number of a job's first steps that train the head, rounded down.

    It is steps * head_epochs / (head_epochs + body_epochs), for a job of `steps` steps.
    """
    return steps * head_epochs // (head_epochs + body_epochs)


class FedRep(Method):
    """A method that shares the extractor and keeps a head on each client.

    mode: "alternate" (FedRep) trains the head before the extractor; "joint" (FedPer) trains both
    together and ignores the numbers of epochs.
    head_epochs: the number of epochs that train the head.
    body_epochs: the number of epochs that train the extractor. With `local.steps`, the steps are
    divided in the ratio head_epochs : body_epochs.
    """

    name = "fedrep"
    paper = "Collins et al., ICML 2021"

    def __init__(
        self,
        mode: TrainingMode = "alternate",
        head_epochs: int = 10,
        body_epochs: int = 1,
    ):
        self.mode = one_of("method.fedrep.mode", mode, get_args(TrainingMode))
        self.head_epochs = at_least("method.fedrep.head_epochs", head_epochs, 1)
        self.body_epochs = at_least("method.fedrep.body_epochs", body_epochs, 1)

    @property
    def _total_epochs(self) -> int:
        return self.head_epochs + self.body_epochs

    @property
    def _fewest_steps(self) -> int:
        """Return the smallest local.steps with which at least one step trains the head."""
        return math.ceil(self._total_epochs / self.head_epochs)

    def settings(self, local: Local) -> Mapping[str, object]:
        """Return the job length that FedRep needs, under the key local.epochs or local.steps.

        The key is the setting that the run uses. local.epochs becomes head_epochs + body_epochs.
        local.steps is raised until at least one step trains the head. In mode joint the result is
        empty.
        """
        if self.mode == "joint":
            return {}
        if local.epochs is not None:
            return {"local.epochs": self._total_epochs}
        return {"local.steps": max(local.steps or 0, self._fewest_steps)}

    def setup(self, run: Setup) -> None:
        """Declare the head as personal; in mode alternate, also declare the stages of a job."""
        run.needs("features")
        head = run.model.get_submodule("head")
        run.private_parameters([f"model.head.{name}" for name, _ in head.named_parameters()])
        if self.mode == "joint":
            run.skip("cost")
            return
        epochs, steps = run.local.epochs, run.local.steps
        run.require(
            epochs is None or epochs == self._total_epochs,
            f"local.epochs: {epochs} is not the sum of method.fedrep.head_epochs="
            f"{self.head_epochs} and method.fedrep.body_epochs={self.body_epochs}. Leave "
            f"local.epochs out, or set local.epochs={self._total_epochs}.",
        )
        run.require(
            steps is None or steps >= self._fewest_steps,
            f"local.steps: {steps} steps are too few. With method.fedrep.head_epochs="
            f"{self.head_epochs} and method.fedrep.body_epochs={self.body_epochs}, only "
            f"{self.head_epochs}/{self._total_epochs} of the steps train the head. This is less "
            f"than one step. Set local.steps={self._fewest_steps} or more.",
        )
        run.stages(self._stages)

    def _stages(self, plan: Plan) -> Sequence[Sequence[Stage]]:
        """Return a list for each batch of a job, with the one stage of this batch.

        The stages of the first batches train the head, those of later batches the extractor.
        plan: the batches of the job.
        """
        first = head_steps(plan.steps, self.head_epochs, self.body_epochs)
        head = Stage("fedrep.head", ("model.head",))
        body = Stage("fedrep.body", ("model.extractor",))
        return [[head]] * first + [[body]] * (plan.steps - first)

    def cost(self, job: Participation) -> float:
        """Return the cost of a job minus that of plain training, as a number of trained samples.

        The result is negative, because a step that trains the head has no backward pass through the
        extractor.
        """
        share = self.head_epochs / self._total_epochs
        return (FORWARD - 1) * share * job.trained_samples
