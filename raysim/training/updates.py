"""Make the update, or the failure, of a trained job."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from math import isfinite, nan

import numpy as np
import torch
from torch import Tensor

from raysim.api.composition import STEP_HOOKS, failing_method_name
from raysim.api.context import Context
from raysim.api.entries import Entries
from raysim.api.hook_checks import check_report, format_error, format_traceback
from raysim.api.messages import Failure, Job, Probe, Update
from raysim.api.update_code import UpdateCode
from raysim.primitives.users_lines import users_line
from raysim.training.attack import check_norm
from raysim.training.own_training import LocalTrainingError
from raysim.training.run_spec import RunSpec
from raysim.training.trainer import RunningJob, Trainer
from raysim.training.transfer import MemoryCopies, read_scalars, to_device
from raysim.vectors.blocks import new_like
from raysim.vectors.optimizer import widest_float

# The same object in all updates, so that it is pickled once per call.
_NO_COUNTERS = np.empty(0, np.int64)


class NotFiniteError(FloatingPointError):
    """The error for a client whose loss, trained tensors or upload have NaN or infinite values.

    entry: the full name of a tensor in the upload, such as "scaffold.control". If a method's own
    training returned the values, it is the name of this method and a dot. It is "" for parameters,
    buffers or losses after raysim's training.
    """

    def __init__(self, text: str, entry: str = ""):
        super().__init__(text)
        self.method = entry.partition(".")[0]


def sum_over_rows(losses: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the sum of the losses of all rows, from the mean losses of batches.

    losses: [batches], the mean loss of each batch.
    rows: the number of rows in each batch.
    """
    weights = _row_weights(tuple(rows), losses.device)
    return torch.dot(losses.to(weights.dtype), weights)


@functools.lru_cache(maxsize=64)
def _row_weights(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the number of rows of each batch as a tensor [batches]."""
    return to_device(np.array(rows, np.int64), device).to(widest_float(device))


class UpdateBuilder:
    """A builder of the messages with which a worker reports trained and failed jobs.

    trainer: its vector has the trained model.
    copies: the caller must call `copies.wait()` before it reads an update's arrays.
    """

    def __init__(self, spec: RunSpec, trainer: Trainer, copies: MemoryCopies, worker: str):
        self.spec, self.trainer, self.copies, self.worker = spec, trainer, copies, worker
        self.vector, self.layout = trainer.vector, trainer.vector.layout
        self.compression: tuple[str, UpdateCode] | None = None
        compression = trainer.declarations.compressor
        if compression is not None and compression[1].compresses_up:
            self.compression = compression

    def update(
        self,
        job: Job,
        running: RunningJob,
        base: Tensor,
        seconds: float,
        is_summed: bool,
        probe: Probe | None,
    ) -> tuple[Update, Tensor]:
        """Return the update of a trained job, and its delta [layout.shared] on the device.

        The delta is the trained minus the received tensors. With compression, it is what the server
        decodes. The delta overwrites the trained tensors in the trainer's vector. The caller must
        not change the delta, because a client state may contain it.

        base: [layout.shared], the received vector.
        seconds: wall time of the job.
        is_summed: True if the worker adds the delta to a sum; then the update has no delta.
        probe: None if the model was not probed.
        Raises NotFiniteError or ValueError for an update that must not be aggregated.
        """
        ctx, plan = running.ctx, running.ctx.plan
        loss_rows = running.loss_rows()
        check_report(ctx.report, "job")
        delta = self.vector.shared.sub_(base)
        loss, norm = self._check(job, ctx.losses, loss_rows, delta, ctx.upload)
        delta = self._compress(ctx, delta)
        update = Update(
            job=job.number,
            client=job.client,
            version=job.version,
            samples=plan.samples,
            trained=running.samples,
            steps=running.step_count,
            loss=loss,
            seconds=seconds,
            counters=self._counters(),
            extras={key: self.copies.copy(value) for key, value in ctx.upload.items()},
            moves=self._moves(ctx),
            report=ctx.report,
            probe=probe,
            loss_rows=sum(loss_rows),
            norm=norm,
            replica=job.replica,
            delta=None if is_summed else self.copies.copy(new_like(delta).copy_(delta)),
        )
        return update, delta

    def failure(self, job: Job, error: BaseException) -> Failure:
        """Return the message that a job has failed, with a text about the error.

        job: the job as it was dispatched.
        error: the error that stopped the job.
        """
        client = self.spec.data.label(job.client)
        place = f"{client}, version {job.version}, worker {self.worker}"
        text = f"{place}: {format_error(error)}{users_line(error)}"
        method = failing_method_name(error)
        if isinstance(error, NotFiniteError | LocalTrainingError):
            method = error.method
        # The lines of raysim that found a value that is not finite would not help anybody.
        trace = "" if isinstance(error, NotFiniteError) else format_traceback(error)
        return Failure(job.number, job.client, job.version, self.worker, method, text, trace)

    def _compress(self, ctx: Context, delta: Tensor) -> Tensor:
        """Return the delta [layout.shared] as the server decodes it; `delta` is overwritten."""
        if self.compression is None:
            return delta
        name, compressor = self.compression
        state = Entries[Tensor](ctx, "state", name)
        key = int(ctx.stream("compression").integers(2**63 - 1))
        sent = delta[: self.layout.trained]
        received, following = compressor.send(sent, state, self.layout, key)
        state |= following
        if len(received) == len(delta):
            return received
        if received is not sent:
            sent.copy_(received)
        return delta

    def _check(
        self,
        job: Job,
        losses: Tensor,
        loss_rows: Sequence[int],
        delta: Tensor,
        upload: Mapping[str, Tensor],
    ) -> tuple[float, float]:
        """Check that an update is finite; return its mean loss per row and its norm.

        The mean loss is nan without losses. The norm is that of the shared parameters in `delta`.

        losses: the task loss of each step that has one.
        loss_rows: the number of rows over which each loss is a mean.
        delta: [layout.shared].
        Raises NotFiniteError, or ValueError for a norm above `faults.norm`.
        """
        # If a norm or sum is finite, all its terms are. Personal entries must be finite, too,
        # because the client's next job starts from them.
        trained = self.layout.trained
        scalars = [
            sum_over_rows(losses, loss_rows),
            torch.linalg.vector_norm(delta[:trained]),
            *(value.sum() for value in upload.values()),
        ]
        if trained < self.layout.total:
            scalars.append(self.vector.data[trained:].sum())
        total_loss, norm, *sums = read_scalars(scalars)
        rest = sums.pop() if trained < self.layout.total else 0.0
        loss = total_loss / sum(loss_rows) if loss_rows else nan
        is_loss_finite = isfinite(loss) or not len(losses)
        # Finite values may have an infinite sum.
        is_vector_finite = isfinite(norm) and isfinite(rest)
        is_vector_finite = is_vector_finite or bool(self.vector.data.isfinite().all())
        if not (is_loss_finite and is_vector_finite):
            if self.trainer.own_training is not None:
                raise self._own_training_error(self.trainer.own_training.method)
            raise NotFiniteError(self._describe_divergence(losses, job))
        check_norm(norm, self.spec.settings.faults.norm)
        for (key, value), total in zip(upload.items(), sums, strict=True):
            if not (isfinite(total) or bool(value.isfinite().all())):
                raise NotFiniteError(
                    f"the upload {key} is not finite. Decrease local.lr or set local.clip.", key
                )
        return loss, norm

    def _own_training_error(self, method: str) -> NotFiniteError:
        """Return the error for NaN or infinite values after a method's hook `train`.

        The error names the first tensor with such a value, or the loss if all tensors are finite.
        """
        tensors = self.vector.named(self.vector.data, self.vector.counters)
        name = next((name for name, value in tensors.items() if not value.isfinite().all()), "")
        what = f"'{name}'" if name else "a loss"
        text = f"{what} is nan or infinite ({self.spec.dtype}) after the training of method "
        text += f"'{method}'. Lower its learning rate, or check what it computes."
        return NotFiniteError(text, f"{method}.")

    def _counters(self) -> np.ndarray:
        """Return the values of the shared integer buffers after training."""
        if not self.layout.shared_counters:
            return _NO_COUNTERS
        return self.copies.copy(self.vector.counters[: self.layout.shared_counters].clone())

    def _moves(self, ctx: Context) -> tuple[tuple[int, int, float], ...]:
        """Return the value of `Update.moves`; () if no method reads single updates.

        Each tuple describes a slice of the shared parameters: its start, its end, and the sum of
        the learning rates of all optimizer steps on it.
        """
        if not self.trainer.declarations.reads_updates:
            return ()
        movements = ctx.optimizers.movements()
        return tuple(
            (part.start, part.stop, steps * factor * ctx.rate) for part, steps, factor in movements
        )

    def _describe_divergence(self, losses: Tensor, job: Job) -> str:
        """Describe the first step whose loss is not finite, and what to change."""
        rate = self.spec.settings.local.rate(job.version)
        steps = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        place = "the parameters or buffers are not finite"
        if steps:
            place = f"the loss is not finite from step {steps[0] + 1} of {len(losses)}"
        methods = self.trainer.declarations.methods
        if steps and steps[0] == 0 and job.version == 0:
            # No parameter has changed yet, so the learning rate is not the cause.
            suspects = ["the loss", "the data"] + [
                f"method '{declared.method}'"
                for declared in methods
                if any(declared.has_hook(hook) for hook in STEP_HOOKS)
            ]
            listed = f"{', '.join(suspects[:-1])} or {suspects[-1]}"
            return f"{place}, before the first step. Check {listed}."
        foreign = {
            method.name
            for method in self.spec.methods
            if not type(method).__module__.startswith("raysim.")
        }
        advice = "Decrease local.lr or set local.clip"
        for declared in methods:
            changes_gradient = "gradient" in declared.hooks or "perturb" in declared.hooks
            if declared.method in foreign and changes_gradient:
                advice += f", or check method '{declared.method}', which writes gradients"
        return f"{place} (learning rate {rate:g}). {advice}."
