"""Define methods that only figures of the papers need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from raysim.api.method import Method
from raysim.methods.fedbss import FedBSS, split_by_uncertainty
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup


class LossHalf(Method):
    """A method that trains on the half of each client's samples with the lowest or highest losses.

    The received model computes the losses. The method reports the Euclidean distance between
    trained and received parameters.
    half: "low" or "high" losses.
    warmup_rounds: the number of first rounds, in which clients train on all samples.
    """

    name = "loss_half"

    def __init__(self, half: Literal["low", "high"] = "low", warmup_rounds: int = 0):
        self.half = one_of("method.loss_half.half", half, ("low", "high"))
        self.warmup_rounds = int(at_least("method.loss_half.warmup_rounds", warmup_rounds, 0))

    def setup(self, run: Setup) -> None:
        """Declare that the method needs classes, and that it selects samples."""
        run.needs("classes")
        run.select(self._select)

    def begin(self, job: LocalJob) -> None:
        """Order the client's samples by their losses."""
        if job.version < self.warmup_rounds:
            return
        job.model.eval()
        with torch.no_grad():
            losses = [
                cross_entropy(job.model(inputs), labels, reduction="none")
                for inputs, labels in job.data()
            ]
        job.model.train()
        job.scratch["order"] = torch.cat(losses).argsort(stable=True)

    def _select(self, job: LocalJob, epoch: int, epochs: int) -> np.ndarray | None:
        if job.version < self.warmup_rounds:
            return None
        order = job.scratch["order"].cpu().numpy()
        count = max(1, len(order) // 2)
        return np.asarray(order[:count] if self.half == "low" else order[-count:])

    def end(self, job: LocalJob) -> None:
        """Report how far the parameters moved."""
        trained = job.layout.trained
        job.report["moved"] = float((job.params[:trained] - job.start[:trained]).norm())


class Moved(Method):
    """A method that changes nothing, and reports how far each client's parameters moved."""

    name = "moved"

    def end(self, job: LocalJob) -> None:
        """Report how far the parameters moved."""
        trained = job.layout.trained
        job.report["moved"] = float((job.params[:trained] - job.start[:trained]).norm())


class SplitPoints(FedBSS):
    """FedBSS that also reports which fraction of a client's samples it treats as unbiased.

    The history has a column for each reporting client.
    warmup_rounds: the number of first rounds, in which clients train on all samples and report
    nothing.
    clients: clients 0 to `clients` - 1 report.
    """

    name = "split_points"

    def __init__(self, warmup_rounds: int = 0, clients: int = 5):
        super().__init__(warmup_rounds)
        self.clients = clients

    def end(self, job: LocalJob) -> None:
        """Report the fraction of the client's samples that FedBSS treats as unbiased."""
        if job.client >= self.clients or job.version < self.warmup_rounds:
            return
        losses, uncertainties = job.state["losses"], job.state["uncertainties"]
        split = split_by_uncertainty(losses=losses, uncertainties=uncertainties)
        job.report[f"client_{job.client}"] = split["num_unbiased"] / len(losses)
