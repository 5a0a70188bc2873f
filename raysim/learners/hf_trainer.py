"""Local training by the `Trainer` of Hugging Face's transformers, for any torch model.

Source: Wolf et al., "Transformers: State-of-the-art natural language processing" (EMNLP 2020).

Choices
- The loss is the run's loss. Learning rate, batch size, length of training, weight decay and
  clipping come from `local.*`. `options` sets or overrides any argument of `TrainingArguments`.
- The optimizer is AdamW, unless `options.optim` sets another one. It starts again in each job.
- Biases, layers of the type LayerNorm, and layers with a name such as "norm" have no weight decay.
  Most BatchNorm and GroupNorm layers have it.
- By default, the Trainer writes no files and reports nowhere.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.primitives.extras import import_optional

LARGEST_ADAM_RATE = 0.02  # above it, a run warns: local.lr has a default for SGD


@dataclass(frozen=True, repr=False)
class HFTrainer(Method):
    """A method that trains each client with a `transformers.Trainer`.

    To use your own callbacks, derive a class and override `callbacks`.

    options: arguments of `transformers.TrainingArguments`, such as lr_scheduler_type.

    Raises ValueError if an argument is unknown or a package is missing.
    """

    name = "hf_trainer"
    paper = "Wolf et al., EMNLP 2020"

    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import_optional("accelerate", "learner=hf_trainer")
        transformers = import_optional("transformers", "learner=hf_trainer")
        try:
            transformers.TrainingArguments("unused", **self._silent_arguments(), **self.options)
        except TypeError as error:
            raise ValueError(
                f"learner.options={self.options}: {error}. "
                "Use arguments of transformers.TrainingArguments."
            ) from None

    def setup(self, run: Setup) -> None:
        """Declare that clients train with `train_client`; warn if local.lr is large for AdamW."""
        run.train(self.train_client)
        has_own_rate = {"optim", "learning_rate"} & set(self.options)
        if run.local.lr > LARGEST_ADAM_RATE and not has_own_rate:
            run.warn(
                f"local.lr={run.local.lr} is large for the Trainer's AdamW, which usually needs "
                "0.001 or less. Set local.lr=0.001, or 0.00002 with model.pretrained=true."
            )

    def callbacks(self, job: LocalJob) -> list[Any]:
        """Return callbacks for the Trainer of a job; the default is none."""
        return []

    def train_client(self, job: LocalJob) -> LocalResult:
        """Train the model of a job with a new Trainer."""
        import transformers

        inputs, labels = job.tensors()
        samples = _Samples(inputs, labels)
        with tempfile.TemporaryDirectory(prefix="raysim-trainer-") as folder:
            arguments = transformers.TrainingArguments(folder, **self._arguments(job))
            trainer = transformers.Trainer(
                model=_WithLoss(job.model, job.task.objective.loss),
                args=arguments,
                train_dataset=samples,
                callbacks=self.callbacks(job),
            )
            trainer.remove_callback(transformers.PrinterCallback)
            with _exclude_from_collection():
                output = trainer.train()
        steps = int(output.global_step)
        batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
        passed = min(steps * batch, round((output.metrics.get("epoch") or 0) * len(labels)))
        return LocalResult(loss=float(output.training_loss), samples=passed, steps=steps)

    def _arguments(self, job: LocalJob) -> dict[str, Any]:
        local = job.local
        seed = int(job.stream("trainer").integers(2**31 - 1))
        values: dict[str, Any] = {
            "learning_rate": job.rate,
            "per_device_train_batch_size": local.batch,
            "weight_decay": local.weight_decay,
            "lr_scheduler_type": "constant",
            "seed": seed,
            "data_seed": seed,
            "use_cpu": job.params.device.type == "cpu",
            "max_grad_norm": local.clip or 0.0,
        }
        values |= {"max_steps": local.steps} if local.steps else {"num_train_epochs": local.epochs}
        return values | self._silent_arguments() | self.options

    def _silent_arguments(self) -> dict[str, Any]:
        """Return arguments for the Trainer, so that it writes no files and prints nothing."""
        return {
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }


@contextmanager
def _exclude_from_collection() -> Iterator[None]:
    """Let garbage collections in a `with` block skip all objects that existed before the block.

    The Trainer collects garbage after each training. Without this exclusion, the collection takes
    1.9 of the 2.2 seconds of a small job.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _WithLoss(nn.Module):
    """A model that returns its loss with its outputs, as a Trainer expects."""

    def __init__(self, model: nn.Module, loss: Any):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.model(inputs)
        return {"loss": self.loss(outputs, labels), "logits": outputs}


class _Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A data set whose samples are dictionaries with the keys "inputs" and "labels"."""

    def __init__(self, inputs: Tensor, labels: Tensor):
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}
