"""pFedAvg: FedAvg whose clients are judged on models adapted to their own data; training itself is FedAvg's.

A baseline of the FRAug paper (Chen et al., ICCV 2023, Table 2), which gives no equation; not Per-FedAvg, the
meta-learning method. With w the shared model and w_k what client k made of it, client k's own model v_k is

    after_local      v_k = w_k, as client k trained it last: before the average, and stale where it sat out
    finetune         v_k = w after some epochs on the client's data, made for an evaluation and then forgotten
    finetune_last    the same, only after the last round

Choices where the source is silent
- It names neither the mode nor the number of steps; a result has to name the mode. In after_local the column
  `accuracy` is that of v_k; in the fine-tuning modes `accuracy_finetuned` is.
- Fine-tuning uses the run's optimiser anew, its rate at that version, its batches, and cross-entropy alone, on random
  streams of its own; BatchNorm is in train mode meanwhile. head_only steps the head, with the extractor in eval mode.
- A client that never trained is judged on the shared model in after_local; where few take part, fine-tune.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from raysim.api.declarations import Finetune
from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.setup import Setup

MODES = ("after_local", "finetune", "finetune_last")


class PFedAvg(Method):
    """mode: which model is a client's own. adapt_epochs and head_only: of the fine-tuning modes."""

    name = "pfedavg"
    paper = "baseline of Chen et al., ICCV 2023"

    def __init__(
        self,
        mode: Literal["after_local", "finetune", "finetune_last"] = "after_local",
        adapt_epochs: int = 1,
        head_only: bool = False,
    ):
        one_of("method.pfedavg.mode", mode, MODES)
        if head_only and mode == "after_local":
            raise ValueError(
                "method.pfedavg.head_only=true has no effect with mode=after_local, which does "
                "not fine-tune. Set mode=finetune."
            )
        self.mode, self.head_only = mode, head_only
        self.adapt_epochs = int(at_least("method.pfedavg.adapt_epochs", adapt_epochs, 0))

    def setup(self, run: Setup) -> None:
        """Keep the trained model on the client, or let evaluation fine-tune the shared one."""
        if self.mode == "after_local":
            run.client_state("model", lambda samples: torch.empty(0))
            return
        last = self.mode == "finetune_last"
        run.finetune(Finetune(self.adapt_epochs, head=self.head_only, last=last))
        run.skip("end", "personalise")

    def end(self, job: LocalJob) -> None:
        """Keep w_k."""
        job.state["model"] = job.vector.shared.clone()

    def personalise(self, client: PersonalModel) -> None:
        """Load w_k, if the client ever trained."""
        if len(client.state["model"]):
            client.vector.shared.copy_(client.state["model"])
