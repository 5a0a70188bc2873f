"""MOON: pull features towards those of the received model, away from the client's last model.

Source: Li, He and Song, "Model-Contrastive Federated Learning" (CVPR 2021), eqs. (3) and (4). For
the same inputs, z are the features of the trained model and z_g those of the received model. z_p
are the features of the client's previous model p:

    l_con = -log exp(cos(z, z_g) / tau) / (exp(cos(z, z_g) / tau) + sum_p exp(cos(z, z_p) / tau))
    loss  = cross-entropy + mu l_con

The received and previous models are in eval mode, as in the authors' code.

Departures from the paper or public code
- A client's first job has no l_con. The authors' code uses a random previous model.
- The previous model changes with each job. In FedBR's code of MOON, it never changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.context import without_gradient
from raysim.api.declarations import FORWARD, Participation, Task
from raysim.api.method import Method
from raysim.models.classifier import Classifier
from raysim.primitives.checks import above, at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

ProjectionHead: TypeAlias = Literal["mlp", "none"]


def model_contrastive_loss(
    z_local: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float
) -> Tensor:
    """Return MOON's contrastive loss l_con, averaged over the batch; 0 without previous models.

    z_local, z_global: [B, D], features of the model in training and of the received model.
    z_previous: [P, B, D], features of P previous models of the client.
    temperature: tau, above 0.
    """
    if not len(z_previous):
        return z_local.new_zeros(())
    references = torch.cat([z_global.unsqueeze(0), z_previous])
    logits = F.cosine_similarity(z_local.unsqueeze(0), references, dim=-1).T / temperature
    # The received model is the correct class out of P + 1.
    answers = torch.zeros(len(z_local), dtype=torch.int64, device=z_local.device)
    return F.cross_entropy(logits, answers)


class Moon(Method):
    """A method that pulls features to those of the received model, away from previous models.

    mu: the weight of the contrastive loss.
    temperature: tau, which divides the cosines between features.
    head: "mlp" adds a projection of two linear layers and compares its outputs. "none" compares the
    features.
    width: the hidden units of the projection; None uses the number of the model's features.
    out: the outputs of the projection.
    previous: how many of the client's last trained models are used.
    """

    name = "moon"
    paper = "Li et al., CVPR 2021"

    def __init__(
        self,
        mu: float = 1.0,
        temperature: float = 0.5,
        head: ProjectionHead = "mlp",
        width: int | None = None,
        out: int = 256,
        previous: int = 1,
    ):
        self.mu = at_least("method.moon.mu", mu, 0.0)
        above("method.moon.temperature", temperature, 0.0)
        self.temperature = temperature
        self.head = one_of("method.moon.head", head, get_args(ProjectionHead))
        self.width = None if width is None else int(at_least("method.moon.width", width, 1))
        self.out = int(at_least("method.moon.out", out, 1))
        self.previous = int(at_least("method.moon.previous", previous, 1))

    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """Append the projection to the extractor; return the new model.

        The features are then the outputs of the projection. With head="none", return the model
        unchanged.
        """
        base = cast(Classifier, model)
        if self.head == "none":
            return base
        hidden = self.width or base.feature_dim
        projection = nn.Linear(base.feature_dim, hidden), nn.ReLU(), nn.Linear(hidden, self.out)
        return Classifier(nn.Sequential(base.extractor, *projection), self.out, base.num_classes)

    def setup(self, run: Setup) -> None:
        """Declare the client state: the vectors of the client's previous models, one in each row.

        The state is [count, layout.total] with a `count` of at most the setting `previous`. Before
        the client's first job, it is empty: [0]. With mu=0, there is no such state.
        """
        run.needs("features")
        if self.mu:
            run.client_state("previous", lambda samples: torch.empty(0))

    def cost(self, job: Participation) -> float:
        """Return the cost of the forward passes of the received and the previous models.

        The unit is the training of one sample; a forward pass costs a third of it.
        """
        previous = min(job.earlier_jobs, self.previous)
        if not self.mu or not previous:
            return 0.0
        return FORWARD * job.trained_samples * (1 + previous)

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add mu times the contrastive loss, if the client has a previous model."""
        if not self.mu or not len(job.state["previous"]):
            return loss
        features = [
            self._features(job, out, number, values)
            for number, values in enumerate(job.state["previous"])
        ]
        z_previous = torch.stack(features)
        z_global = out.base_features
        contrast = model_contrastive_loss(out.features, z_global, z_previous, self.temperature)
        return loss + self.mu * contrast

    def end(self, job: LocalJob) -> None:
        """Store the trained model as a previous model. Keep only the last `previous` models."""
        if self.mu:
            previous = job.state["previous"].to(job.params)
            models = torch.cat([previous, job.params.unsqueeze(0)])
            job.state["previous"] = models[-self.previous :].clone()

    @staticmethod
    def _features(job: LocalJob, out: Outputs, number: int, values: Tensor) -> Tensor:
        """Return the features that a previous model computes for the batch, without gradients.

        number: the position of this model among the client's previous models.
        values: [layout.total], the vector of this previous model.
        """
        model = cast(Classifier, job.frozen(f"moon.{number}", values)["model"])
        return without_gradient(lambda: model.features(out.batch.inputs))
