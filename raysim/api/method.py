"""What a method may do: sixteen hooks, of which it fills those that it needs.

Every default does nothing, and a hook that no method of a run fills is never called. `setup`
declares; `begin`, `prepare`, `batch`, `loss`, `gradient`, `perturb` and `end` are the moments of a client's
job; `weigh`, `combine`, `step` and `absorb` those of an aggregation. Hooks that run once for each
batch keep to tensors (no `.item()`, no `if tensor`), because a step may be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from raysim.api.context import Batch, Outputs
    from raysim.api.declarations import Local, Participation, Task
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


class Method:
    """One part of a federated algorithm.

    The constructor stores its arguments under their own names, after checking them.

    name: what the method is called; everything that it keeps, sends and reports carries it.
    paper: where it is from. weighting: the weights of updates that it asks for, unless the
    configuration says otherwise. pools: it trains one model on the data of all clients.
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    weighting: ClassVar[str] = "samples"
    pools: ClassVar[bool] = False

    def __repr__(self) -> str:
        name = getattr(self, "name", type(self).__name__)  # a class may lack one: refused later
        settings = ", ".join(f"{key}={value!r}" for key, value in parameters(self).items())
        return f"{name}({settings})"

    # --- before the run -----------------------------------------------------------------------
    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """Replace or wrap the model; only one method of a list may. It keeps `features`, `head`."""
        return model

    def setup(self, run: Setup) -> None:
        """Declare networks, state, what is sent and uploaded, stages, needs and warnings."""

    def cost(self, job: Participation) -> float:
        """Return the samples that a job passes through the model in addition to plain training.

        In units of a forward and backward pass; known at dispatch, never from training.
        """
        return 0.0

    def settings(self, local: Local) -> Mapping[str, object]:
        """Return the settings that the method cannot run without, by key ("local.epochs").

        They are set, and the plan says so, unless the user set the key: then `setup` refuses it.
        """
        return {}

    # --- a client's job -----------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Act after the received model was loaded, before training; change it here.

        The batches are not planned yet, because `run.select` may use what this hook computes.
        """

    def prepare(self, job: LocalJob) -> None:
        """Act once the batches of the job are planned (`job.plan`), before its first step.

        Called after `begin` of all methods. Write `job.state` and `job.scratch`; leave the model
        as it is, for `job.frozen()` already holds it.
        """

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        """Return the batch with other inputs or targets."""
        return batch

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the loss to minimise: usually `loss` plus a term of the method.

        `loss` is what the task and the methods before this one made; `out` has features and logits.
        """
        return loss

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Correct, in place, the gradient of the shared parameters `job.params[at]`."""

    def perturb(
        self,
        job: LocalJob,
        params: Tensor,
        grad: Tensor,
        gradient_at: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the gradient to use, made of gradients at shifted points (SAM); one method may.

        Called in stages with the task loss only: a stage with a loss of its own (FedBR's
        projector) descends its plain gradient.

        params, grad: [n] all parameters that `job.stage` trains and their gradient; not to be
        changed. gradient_at(shift): the gradient [n] at params + shift on the same batch, with the
        same random numbers. Corrections, clipping and the optimizer act on what is returned.
        """
        return grad

    def end(self, job: LocalJob) -> None:
        """Act after training: fill `job.upload`, replace entries of `job.state`."""

    # --- an aggregation -----------------------------------------------------------------------
    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        """Return the aggregation with other weights: `aggregation.with_weights(weights)`."""
        return aggregation

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Combine updates into one direction [layout.trained]; only one method of a list may.

        A vector [layout.shared] decides on buffers as well.
        """
        raise NotImplementedError

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the step [layout.trained] that is added to the current version.

        direction: [layout.trained] as the methods before this one left it; it may be changed in
        place.
        """
        return direction

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Update server state after the step."""

    # --- scoring ------------------------------------------------------------------------------
    def personalise(self, client: PersonalModel) -> None:
        """Change `client.vector` into the client's own model, for clients never trained as well."""


def parameters(method: Method) -> dict[str, object]:
    """Return a method's settings by name."""
    return {key: value for key, value in vars(method).items() if not key.startswith("_")}
