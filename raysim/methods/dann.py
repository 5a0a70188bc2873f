"""DANN: learn features that do not show which client a sample comes from.

Source: Ganin et al., "Domain-Adversarial Training of Neural Networks" (JMLR 2016), with alternating
steps as in DomainBed and in FedBR's Appendix A. The domain of a sample is the number i of its
client. z are the features of a sample with the label y, omega is the classifier, delta the
discriminator, CE the cross-entropy, and lam a setting:

    discriminator step:  CE(delta(z), i), z constant
    generator step:      CE(omega(z), y) - lam CE(delta(z), i), delta constant

Departures from the paper
- With r = `discriminator_steps`, step k = 1, 2, ... of a job trains the discriminator if k mod (1 +
  r) < r. r = 1 trains it in half of the steps, as FedBR's code does.
- The paper trains both networks in one step, with a gradient-reversal layer (mode="grl").
- There is no gradient penalty, as in FedBR's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.api.context import Stage
from raysim.api.declarations import FORWARD, Participation
from raysim.api.method import Method
from raysim.primitives.checks import above, at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs, Plan
    from raysim.api.declarations import Local
    from raysim.api.local_job import LocalJob
    from raysim.api.setup import Setup

TrainingMode: TypeAlias = Literal["alternate", "grl"]

DISCRIMINATOR = "dann.discriminator"


def discriminator_loss(domain_logits: Tensor, domain: int | Tensor) -> Tensor:
    """Return the discriminator's mean cross-entropy, with the client's number as the label.

    domain_logits: [B, N] for N clients.
    domain: the number of the client, as an int or a scalar tensor.
    """
    scores = F.log_softmax(domain_logits, dim=-1)
    if isinstance(domain, Tensor):  # in a recorded step, which is replayed for other clients
        # Gather all columns, so that the sum has the memory layout and the bits of the other case.
        return -scores.gather(1, domain.expand_as(scores))[:, 0].mean()
    return -scores[:, domain].mean()


def generator_loss(
    class_logits: Tensor, labels: Tensor, domain_logits: Tensor, domain: int | Tensor, weight: float
) -> Tensor:
    """Return the classifier's cross-entropy minus `weight` times the `discriminator_loss`.

    With this loss, the features hide the client from the discriminator.
    class_logits: [B, C], the classifier's outputs.
    labels: int64 [B], or probabilities [B, C].
    domain_logits: [B, N], the discriminator's outputs for N clients.
    domain: the number of the client.
    """
    return F.cross_entropy(class_logits, labels) + adversary(domain_logits, domain, weight)


def adversary(domain_logits: Tensor, domain: int | Tensor, weight: float) -> Tensor:
    """Return minus `weight` times the `discriminator_loss`.

    DANN adds the result to the classifier's loss.

    domain_logits: [B, N], the discriminator's outputs for N clients.
    domain: the number of the client.
    """
    return -weight * discriminator_loss(domain_logits, domain)


def is_discriminator_step(step: int, d_steps_per_g_step: int) -> bool:
    """Return True if a step of a job trains the discriminator, not the classifier.

    step: the number of the step in its job, from 1.
    d_steps_per_g_step: the number of discriminator steps for each step of the classifier.
    """
    return step % (1 + d_steps_per_g_step) < d_steps_per_g_step


class _Reversal(torch.autograd.Function):
    """The identity function, whose gradient is multiplied by -weight (gradient reversal)."""

    @staticmethod
    def forward(features: Tensor, weight: float) -> Tensor:
        return features.view_as(features)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.weight = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * -ctx.weight, None


class Dann(Method):
    """A method that trains features from which a discriminator cannot guess the client.

    lam: the weight with which the discriminator's loss is subtracted from the classifier's loss.
    width: the width of the discriminator's two hidden layers.
    discriminator_steps: the number of discriminator steps for each step of the classifier.
    rate: factor on local.lr for the discriminator.
    mode: "alternate" trains one network in a step; "grl" trains both, with gradient reversal.
    """

    name = "dann"
    paper = "Ganin et al., JMLR 2016"

    def __init__(
        self,
        lam: float = 0.01,
        width: int = 256,
        discriminator_steps: int = 1,
        rate: float = 1.0,
        mode: TrainingMode = "alternate",
    ):
        self.lam = at_least("method.dann.lam", lam, 0.0)
        self.width = int(at_least("method.dann.width", width, 1))
        self.discriminator_steps = int(
            at_least("method.dann.discriminator_steps", discriminator_steps, 1)
        )
        above("method.dann.rate", rate, 0.0)
        if mode == "grl" and (rate != 1 or discriminator_steps != 1):
            raise ValueError(
                "method.dann.mode=grl trains both networks in one step, so "
                f"method.dann.rate={rate} and "
                f"method.dann.discriminator_steps={discriminator_steps} have no effect. Set both "
                "to 1, or set method.dann.mode=alternate."
            )
        self.rate = rate
        self.mode = one_of("method.dann.mode", mode, get_args(TrainingMode))

    def settings(self, local: Local) -> Mapping[str, object]:
        """Return {"local.steps": S}: S is local.steps, but at least `discriminator_steps` + 1.

        So each job trains both the discriminator and the classifier. The result is {} if the run
        sets local.epochs, and with mode="grl".
        """
        if self.mode != "alternate" or local.steps is None:
            return {}
        return {"local.steps": max(local.steps, 1 + self.discriminator_steps)}

    def setup(self, run: Setup) -> None:
        """Add the discriminator, which has one output for each client; declare the stages."""
        run.needs("features")
        clients, period = run.task.clients, 1 + self.discriminator_steps
        run.require(
            clients > 1,
            f"partition.clients={clients}: the discriminator of method 'dann' distinguishes "
            "clients, so it needs at least 2. Set partition.clients=2 or more.",
        )
        steps = run.local.steps
        run.require(
            self.mode == "grl" or steps is None or steps >= period,
            f"local.steps={steps}: method 'dann' alternates one step of the classifier with "
            f"method.dann.discriminator_steps={self.discriminator_steps} steps of the "
            f"discriminator. A job needs at least {period} steps to train both. Set "
            f"local.steps={period} or more.",
        )
        size, width = run.model.feature_dim, self.width
        layers = (
            nn.Linear(size, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, clients),
        )
        run.network("discriminator", nn.Sequential(*layers))
        run.stages(self._stages)

    def _stages(self, plan: Plan) -> Sequence[Sequence[Stage]]:
        """Return the stages of a cycle of steps, which a job repeats until its end.

        The result has a list for each step of the cycle, with the one stage of this step.
        plan: has no effect.
        """
        if self.mode == "grl":
            return [[Stage(trains=("model", DISCRIMINATOR))]]
        adversary = Stage(
            "dann.discriminate", (DISCRIMINATOR,), self.discriminator_objective, rate=self.rate
        )
        turn = []
        for step in range(1, 2 + self.discriminator_steps):
            trains_delta = is_discriminator_step(step, self.discriminator_steps)
            turn.append([adversary if trains_delta else Stage()])
        return turn

    def cost(self, job: Participation) -> float:
        """Return the cost of a job minus the cost of plain training, in trained samples.

        The result is negative with mode="alternate", because steps that train the discriminator
        make no backward pass through the model. With mode="grl", it is 0.
        """
        if self.mode == "grl":
            return 0.0
        share = self.discriminator_steps / (1 + self.discriminator_steps)
        return (FORWARD - 1) * share * job.trained_samples

    def begin(self, job: LocalJob) -> None:
        """Store the client's number as a tensor, which a recorded step can read."""
        job.scratch["domain"] = torch.tensor(job.client, device=job.params.device)

    def discriminator_objective(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the discriminator's loss for a batch; no gradient reaches the features."""
        with torch.no_grad():
            features = out.features
        logits = job.network("discriminator")(features)
        return discriminator_loss(logits, job.scratch["domain"])

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add -lam times the discriminator's loss to the task loss.

        With mode=grl the discriminator's loss is added, and only its gradient for the features is
        multiplied by -lam.
        """
        discriminator, domain = job.network("discriminator"), job.scratch["domain"]
        if self.mode == "grl":
            reversed_features = _Reversal.apply(out.features, self.lam)
            return loss + discriminator_loss(discriminator(reversed_features), domain)
        if not self.lam:
            return loss
        return loss + adversary(discriminator(out.features), domain, self.lam)
