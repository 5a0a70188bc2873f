"""FedBABU: train the model without its head, and fine-tune the head before a client is scored.

Source: Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification"
(ICLR 2022). The body is the model without its head. Clients train bodies with the same initial
head, which is never trained in jobs nor sent. The server averages the bodies. Before a client is
scored, the head is fine-tuned on the client's samples; finetune="all" also fine-tunes the body.

Departures from the paper
- With finetune="head", the body is in eval mode during fine-tuning.
- The shared model is scored, too. Columns that end in `_finetuned` have the scores of the clients'
  fine-tuned models.
- The body is trained with the run's optimizer. In jobs, weight decay does not change the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from raysim.api.context import Stage
from raysim.api.declarations import Finetune
from raysim.api.method import Method
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.setup import Setup

FinetunedPart: TypeAlias = Literal["head", "all"]


class FedBABU(Method):
    """A method that trains the body only, and fine-tunes a head for each client's score.

    epochs: epochs of fine-tuning before a client is scored; 0 for none.
    finetune: the part that is fine-tuned, "head", or "all" for head and body.
    """

    name = "fedbabu"
    paper = "Oh et al., ICLR 2022"

    def __init__(self, epochs: int = 5, finetune: FinetunedPart = "head"):
        self.epochs = int(at_least("method.fedbabu.epochs", epochs, 0))
        self.finetune = one_of("method.fedbabu.finetune", finetune, get_args(FinetunedPart))

    def setup(self, run: Setup) -> None:
        """Declare that jobs do not change the head, and that it is fine-tuned before scoring."""
        run.needs("features")
        head = run.model.get_submodule("head")
        run.fixed_parameters([f"model.head.{name}" for name, _ in head.named_parameters()])
        run.stages([Stage("fedbabu.body", ("model.extractor",))])
        run.finetune(Finetune(self.epochs, head=self.finetune == "head"))
