"""APFL: score each client with a mixture of the shared model and a model of its own.

Source: Deng et al., "Adaptive Personalized Federated Learning" (arXiv 2003.13461, 2020), Algorithm
1. w is the shared model in training, v_i the client's own model, m the mixture, and alpha_i the
mixing weight. eta is the learning rate, and f the loss on the batch:

    m = alpha_i v_i + (1 - alpha_i) w
    v_i <- v_i - eta alpha_i grad f(m)
    w <- w - eta grad f(w)                          averaged as in FedAvg

If `adaptive` is set, alpha_i changes once in a job, on the first batch before the first step:

    alpha_i <- clip(alpha_i - eta <v_i - w, grad f(m)>, 0, 1)

Departures from the paper
- v_i starts as the initial model. m has the BatchNorm statistics of v_i.
- f(m) is the task loss without terms of other methods.
- The optimizer of v_i has the run's settings. This optimizer starts again in each job, unless
  local.keep_optimizer=true.
- The gradient for alpha_i is computed in train mode and without augmentation. It costs no virtual
  time.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from raysim.api.context import Stage
from raysim.api.declarations import Participation
from raysim.api.method import Method
from raysim.primitives.checks import between

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.setup import Setup

PERSONAL, SHARED = "apfl.model", "model"


def mix(personal: nn.Module, shared: nn.Module, alpha: Tensor | float) -> dict[str, Tensor]:
    """Return the mixture alpha * personal + (1 - alpha) * shared, by the name of the parameter.

    Gradients reach only the personal parameters.
    personal, shared: the client's own model and the shared model, with equal layers.
    """
    received = dict(shared.named_parameters())
    return {
        path: alpha * value + (1.0 - alpha) * received[path].detach()
        for path, value in personal.named_parameters()
    }


class APFL(Method):
    """A method that scores each client with a mixture of the shared and the client's own model.

    alpha: the initial weight of the client's model in the mixture.
    adaptive: True learns this weight.
    """

    name = "apfl"
    paper = "Deng et al., 2020"

    def __init__(self, alpha: float = 0.5, adaptive: bool = True):
        self.alpha = between("method.apfl.alpha", alpha, 0.0, 1.0)
        self.adaptive = adaptive

    def setup(self, run: Setup) -> None:
        """Declare the client state: the client's own model and its mixing weight alpha.

        Each step has two stages: the first one trains the client's own model, the second one the
        shared model.
        """
        run.excludes("local", "it mixes with a shared model, but local training has none")
        run.network("model", copy.deepcopy(run.model), private=True)
        run.client_state("alpha", lambda samples: self.alpha)
        run.stages([Stage("apfl.personal", (PERSONAL,), self._mixture_loss), Stage()])

    def cost(self, job: Participation) -> float:
        """Return the cost of training the client's own model, in trained samples.

        It is equal to the cost of training the shared model: one more forward and backward pass of
        each batch.
        """
        return job.trained_samples

    def prepare(self, job: LocalJob) -> None:
        """Adapt the mixing weight alpha on the job's first batch; store it for the next job."""
        if self.adaptive:
            job.state["alpha"] = self._adapted_alpha(job)
        job.scratch["alpha"] = job.params.new_tensor(job.state["alpha"])

    def _adapted_alpha(self, job: LocalJob) -> float:
        """Return the mixing weight alpha after one gradient step on the job's first batch."""
        personal = job.network("model")
        alpha: float = job.state["alpha"]
        own_params, shared_params = (
            dict(personal.named_parameters()),
            dict(job.model.named_parameters()),
        )
        mixture = mix(personal, job.model, alpha)
        params = {path: value.detach().requires_grad_() for path, value in mixture.items()}
        inputs, labels = job.gather(job.rows[job.plan.positions[: job.plan.sizes[0]]])
        with job.keep_statistics():
            outputs = functional_call(personal, params, (inputs,))
        loss = job.task.objective.loss(outputs, labels)
        grads = torch.autograd.grad(
            loss, list(params.values()), allow_unused=True, materialize_grads=True
        )
        slope = 0.0
        for path, grad in zip(params, grads, strict=True):
            slope += float(
                ((own_params[path] - shared_params[path]).detach() * grad).sum(dtype=torch.float64)
            )
        return min(1.0, max(0.0, alpha - job.rate * slope))

    def _mixture_loss(self, job: LocalJob, out: Outputs) -> Tensor:
        """Return the task loss of the mixture of the client's own and the shared model."""
        personal = job.network("model")
        mixture = mix(personal, job.model, job.scratch["alpha"])
        outputs = functional_call(personal, mixture, (out.batch.inputs,))
        return job.task.objective.loss(outputs, out.batch.targets)

    def personalise(self, client: PersonalModel) -> None:
        """Load the mixture of the client's own model and the shared model, for scoring.

        BatchNorm's statistics are those of the client's own model.
        """
        networks, alpha = client.vector.networks, client.state["alpha"]
        mixture = mix(networks[PERSONAL], networks[SHARED], alpha)
        tensors = mixture | dict(networks[PERSONAL].named_buffers())
        with torch.no_grad():
            for path, value in networks[SHARED].state_dict(keep_vars=True).items():
                value.copy_(tensors[path])
