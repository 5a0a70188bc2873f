"""Local training by the `Trainer` of Lightning.

To train your own module, derive a class from `LightningTrainer` and override its function `module`.

Source: Falcon et al., "PyTorch Lightning" (2019).

Choices
- The default module has the run's loss and `local.optimizer`, with only the settings `local.lr`,
  `local.weight_decay` and, for SGD, `local.momentum`.
- The length of training and the clipping of gradients come from `local.*`. `options` sets or
  overrides any argument of `lightning.Trainer`.
- By default, the Trainer writes no files, shows nothing and uses one device.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.primitives.extras import import_optional

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True, repr=False)
class LightningTrainer(Method):
    """A method that trains each client with a `lightning.Trainer`.

    options: arguments of `lightning.Trainer`, such as accumulate_grad_batches.

    Raises ValueError if an argument is unknown or the package is missing.
    """

    name = "lightning"
    paper = "Falcon et al., 2019"

    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lightning = import_optional("lightning", "learner=lightning")
        try:
            with _silence():
                lightning.Trainer(**_silent_arguments() | {"accelerator": "cpu"} | self.options)
        except TypeError as error:
            raise ValueError(
                f"learner.options={self.options}: {error}. Use arguments of lightning.Trainer."
            ) from None

    def setup(self, run: Setup) -> None:
        """Declare that clients train with `train_client`.

        Raises ValueError if `local.optimizer` is not "sgd", "adam" or "adamw".
        """
        run.require(
            run.local.optimizer in OPTIMIZERS,
            f"local.optimizer={run.local.optimizer}: learner=lightning supports only "
            f"{', '.join(OPTIMIZERS)}. Set local.optimizer to one of these.",
        )
        run.train(self.train_client)

    def module(self, job: LocalJob) -> Any:
        """Return a `LightningModule` that trains `job.model`.

        Only the parameters of `job.model` are sent to the server.
        """
        return _default_module(job)

    def train_client(self, job: LocalJob) -> LocalResult:
        """Train the model of a job with a new Trainer."""
        import lightning

        generator = job.torch_generator("batches")
        loader = DataLoader(
            job.dataset(), batch_size=job.local.batch, shuffle=True, generator=generator
        )
        local, device = job.local, job.params.device
        length = {"max_steps": local.steps} if local.steps else {"max_epochs": local.epochs}
        place: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
        if device.type == "cuda":
            place = {"accelerator": "gpu", "devices": [device.index or 0]}
        values = (
            _silent_arguments() | place | length | {"gradient_clip_val": local.clip} | self.options
        )
        module = self.module(job)
        with _silence():
            trainer = lightning.Trainer(**values)
            trainer.fit(module, loader)
        steps = int(trainer.global_step)
        loss = trainer.callback_metrics.get("loss")
        mean_loss = float("nan") if loss is None else float(loss)
        passed = round(steps * job.samples / max(1, len(loader)))
        return LocalResult(loss=mean_loss, samples=passed, steps=steps)


def _default_module(job: LocalJob) -> Any:
    """Return a `LightningModule` with the run's loss and optimizer."""
    import lightning

    local, loss_function = job.local, job.task.objective.loss

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def training_step(self, batch: Any, index: int) -> Any:
            inputs, labels = batch
            loss = loss_function(self.model(inputs), labels)
            self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(labels))
            return loss

        def configure_optimizers(self) -> Any:
            values: dict[str, Any] = {"lr": job.rate, "weight_decay": local.weight_decay}
            if local.optimizer == "sgd":
                values["momentum"] = local.momentum
            return OPTIMIZERS[local.optimizer](self.model.parameters(), **values)

    return Module()


def _silent_arguments() -> dict[str, Any]:
    """Return arguments for the Trainer, so that it writes no files and prints nothing."""
    return {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "barebones": False,
    }


@contextmanager
def _silence() -> Iterator[None]:
    """Hide Lightning's advice on devices and data loaders, which would appear for each job."""
    loggers = [logging.getLogger("lightning.pytorch"), logging.getLogger("lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
