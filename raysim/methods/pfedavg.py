"""pFedAvg: train FedAvg, and score each client with a model that is adapted to its own data.

Source: a baseline of the FRAug paper (Chen et al., ICCV 2023, Table 2), not the meta-learning
method Per-FedAvg. w is the shared model. The setting `mode` chooses the model v_k with which client
k is scored:

    after_local      the model that client k trained last, even if it was many rounds ago
    finetune         w after some epochs on the client's data; only for the evaluation
    finetune_last    like finetune, but clients are fine-tuned only after the last round

The paper does not name its mode. Therefore, name the mode when you report a result.

Choices that the paper leaves open
- The accuracy of v_k is in the column `accuracy` with mode=after_local, otherwise in
  `accuracy_finetuned`.
- With mode=after_local, a client that never trained is scored with w.
- Fine-tuning uses the task loss alone, the run's settings and current learning rate, and a new
  optimizer. BatchNorm is in train mode.
- With head_only=True, only the head is fine-tuned, and the extractor is in eval mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch

from raysim.api.declarations import Finetune
from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.setup import Setup

ModelMode: TypeAlias = Literal["after_local", "finetune", "finetune_last"]


class PFedAvg(Method):
    """FedAvg that scores each client with a model adapted to the client's data.

    mode: "after_local" scores the client's last trained model, "finetune" the shared model after
    fine-tuning. "finetune_last" fine-tunes only after the last round.
    adapt_epochs: the epochs of fine-tuning.
    head_only: True fine-tunes only the head.
    """

    name = "pfedavg"
    paper = "baseline of Chen et al., ICCV 2023"

    def __init__(
        self,
        mode: ModelMode = "after_local",
        adapt_epochs: int = 1,
        head_only: bool = False,
    ):
        one_of("method.pfedavg.mode", mode, get_args(ModelMode))
        if head_only and mode == "after_local":
            raise ValueError(
                "method.pfedavg.head_only=true has no effect with "
                "method.pfedavg.mode=after_local, which does not fine-tune. Set "
                "method.pfedavg.mode=finetune."
            )
        self.mode, self.head_only = mode, head_only
        self.adapt_epochs = int(at_least("method.pfedavg.adapt_epochs", adapt_epochs, 0))

    def setup(self, run: Setup) -> None:
        """Declare how clients get the models with which they are scored.

        With mode="after_local", the client state keeps the trained model. All other modes fine-tune
        the shared model before scoring.
        """
        if self.mode == "after_local":
            run.client_state("model", lambda samples: torch.empty(0))
            return
        last = self.mode == "finetune_last"
        run.finetune(Finetune(self.adapt_epochs, head=self.head_only, last=last))
        run.skip("end", "personalise")

    def end(self, job: LocalJob) -> None:
        """Keep the trained model on the client."""
        job.state["model"] = job.vector.shared.clone()

    def personalise(self, client: PersonalModel) -> None:
        """Load the client's trained model, if there is one."""
        if len(client.state["model"]):
            client.vector.shared.copy_(client.state["model"])
