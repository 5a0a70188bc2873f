"""The hooks of a method: the moments of a run in which it may act.

A method overrides the hooks that it needs. raysim calls the hooks in this order:

- before the run: `settings`, `model`, `setup`
- when a job is dispatched: `cost`
- a client's job: `begin`, `prepare`; for each batch `batch`, `loss`, `perturb`, `gradient`; `end`
- an aggregation: `weigh`, `combine`, `step`, `absorb`
- before a client's own model is scored: `personalise`

A step may be recorded as a CUDA graph. The hooks for each batch may therefore use only tensor
operations, not `.item()` or `if tensor`.
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
    """One part of a federated algorithm, on the client, on the server or both.

    name: begins the names of the method's state, messages and reports.
    paper: the source, or "".
    weighting: the default weights of updates: "samples" for the numbers of training samples, or
    "uniform".
    pools: True if one model is trained on the data of all clients together.

    A constructor must store each argument as an attribute of the same name, and raise ValueError
    for bad values:

        class Lasso(Method):
            name = "lasso"

            def __init__(self, lam: float = 1e-3):
                self.lam = lam

            def gradient(self, job, grad, at):
                grad += self.lam * job.params[at].sign()
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    weighting: ClassVar[str] = "samples"
    pools: ClassVar[bool] = False

    def __repr__(self) -> str:
        name = getattr(self, "name", type(self).__name__)  # `check_name` refuses no name
        settings = ", ".join(f"{key}={value!r}" for key, value in parameters(self).items())
        return f"{name}({settings})"

    # --- before the run -----------------------------------------------------------------------
    def model(self, task: Task, model: nn.Module) -> nn.Module:
        """Return the model to train instead of `model`; only one method of a list may do so.

        The returned model may contain `model`. If `model` has `features` and `head`, the returned
        model must have them, too.
        """
        return model

    def settings(self, local: Local) -> Mapping[str, object]:
        """Return the settings that the method needs, by key: {"local.epochs": 1}.

        These values replace the defaults. They do not replace values that the user set; if such a
        value does not fit, `setup` must raise ValueError.
        """
        return {}

    def setup(self, run: Setup) -> None:
        """Declare what the method adds to a run, such as networks, state and tensors to send.

        raysim calls this hook in each process, sometimes repeatedly. Raise ValueError for settings
        that do not fit the run.
        run: has a function for each declaration, such as `run.client_state`, and facts about the
        run.
        """

    def cost(self, job: Participation) -> float:
        """Return the method's additional cost in a job, as a number of samples.

        A forward and a backward pass of a sample cost 1, a forward pass alone 1/3
        (`raysim.api.declarations.FORWARD`). raysim needs the cost at dispatch, before training.
        """
        return 0.0

    # --- a client's job -----------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Begin a job after the received model was loaded, for example by changing `job.start`.

        The batches are not planned yet, because `run.select` may use what this hook computes.
        """

    def prepare(self, job: LocalJob) -> None:
        """Prepare a job after its batches are planned (`job.plan`), before its first step.

        raysim calls `begin` of all methods first. Write only to `job.state` and `job.scratch`. Do
        not change the model, because `job.frozen()` may already have copied it.
        """

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        """Return the batch, with other inputs or targets if the method changes them."""
        return batch

    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Return the scalar loss to minimise, usually `loss` plus a term of the method.

        raysim calls this hook in stages with the task loss.
        out: the model's features and outputs (logits) for the batch.
        loss: the task loss plus the terms of earlier methods, a scalar. It is 0 if this method
        replaces the task loss (`Setup.owns`).
        """
        return loss

    def perturb(
        self,
        job: LocalJob,
        params: Tensor,
        grad: Tensor,
        gradient_at: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return the gradient to use instead of `grad`; only one method of a run may do so.

        raysim calls this hook in stages with the task loss, before the hook `gradient` and before
        clipping.

        params: the parameters that `job.stage` trains, [m]; do not change them.
        grad: their gradient [m]; do not change it.
        gradient_at: a function from a shift [m] to the gradient [m] at params + shift, on the same
        batch and with the same random numbers. For example, sharpness-aware minimisation is

            return gradient_at(rho * grad / grad.norm())
        """
        return grad

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Change `grad`, the gradient of the shared parameters `job.params[at]`, in place.

        raysim calls this hook in every stage, once for each contiguous range of shared parameters
        that the stage trains.
        at: the range, as positions in the flat vector `job.params`.
        """

    def end(self, job: LocalJob) -> None:
        """Finish a job after its training: assign entries of `job.upload` and `job.state`."""

    # --- an aggregation -----------------------------------------------------------------------
    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        """Return the aggregation with other weights: `aggregation.with_weights(weights)`.

        `aggregation.weights` has a number for each update: its weight by the setting `weighting`,
        changed by earlier methods. `combine` uses the returned weights. By default the weights are
        unchanged.
        """
        return aggregation

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Combine all updates to one direction [layout.trained]; only one method may do so.

        The default is the updates' weighted mean. Float buffers, such as BatchNorm's statistics,
        are averaged. To replace this average too, return a vector [layout.shared], in which the
        buffers come after the parameters.
        """
        raise NotImplementedError

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the step [layout.trained] that is added to the current version.

        direction: [layout.trained], the result of `combine`, changed by the methods before this
        one; it may be changed in place.
        """
        return direction

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Update `server.state` after the step, for example from the uploads of clients.

        `server.vector` is then the new version; `server.version` is still the number of the
        aggregations before this one. `aggregation.uploads(name)` has the tensors that clients sent.
        """

    # --- scoring ------------------------------------------------------------------------------
    def personalise(self, client: PersonalModel) -> None:
        """Change `client.vector` in place to the client's personalised model.

        Only one method may do so. raysim calls this hook before it scores a client's own model,
        even if the client never trained.
        """


def parameters(method: Method) -> dict[str, object]:
    """Return the public attributes of a method object by name, such as {"mu": 0.01}.

    They are the settings `method.NAME.*`, because a constructor stores each argument as an
    attribute of the same name.
    """
    return {key: value for key, value in vars(method).items() if not key.startswith("_")}
