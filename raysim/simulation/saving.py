"""Write the checkpoints and the final model of a run, and continue from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from raysim.primitives.memory import peak_memory_bytes
from raysim.simulation import checkpoint, snapshot
from raysim.simulation.checkpoint import Checkpoints
from raysim.simulation.events import Finished, Saved
from raysim.simulation.snapshot import RunState
from raysim.training.frozen_weights import BASE
from raysim.training.run_spec import RunSettings
from raysim.vectors.layout import Vector


class RunSaver:
    """The object that saves and restores a run.

    initial: a model with the names of the final model's tensors.
    folder: the folder for the model. Checkpoints are also written there, unless `checkpoint.folder`
    is set. With "", neither the model nor checkpoints are written.
    address: the checkpoint to continue from; "" starts a new run.
    base: the checksum of frozen weights; "" if no weight is frozen.
    """

    def __init__(
        self,
        run: RunState,
        initial: Vector,
        settings: RunSettings,
        folder: str,
        address: str,
        base: str = "",
    ):
        self._base = base
        self._run, self._initial, self._folder, self._address = run, initial, folder, address
        self._every = settings.checkpoint.every if folder else 0
        self._rounds = settings.rounds
        self._checkpoints = Checkpoints(
            settings.checkpoint.folder_for(folder), settings.checkpoint.keep, address
        )

    @property
    def writes_checkpoints(self) -> bool:
        """True if the run writes checkpoints."""
        return self._every > 0

    @property
    def is_due(self) -> bool:
        """True if a checkpoint must be written now.

        This is so after every `checkpoint.every` rounds, but not after the last round. There the
        coordinator always writes a checkpoint if the run writes checkpoints.
        """
        version = self._run.replicas.version
        return self.writes_checkpoints and version % self._every == 0 and version < self._rounds

    @property
    def has_folder(self) -> bool:
        """True if the run has a folder, so that `save` can write a checkpoint.

        With `checkpoint.every=0`, no checkpoints are written regularly, but `save` can still write
        one.
        """
        return bool(self._folder)

    def save(self) -> Saved:
        """Write a checkpoint; return the event `Saved` for it."""
        version = self._run.replicas.version
        address = self._checkpoints.write(version, snapshot.take(self._run))
        return Saved(version, address, self._checkpoints.removal_failure)

    def restore(self) -> bool:
        """Continue from the checkpoint at `address`; return False if there is none."""
        if not self._address:
            return False
        snapshot.restore(checkpoint.read(self._address), self._run)
        return True

    def finish(self) -> Finished:
        """Write the final model and the model of the best round; return the run's last event.

        If there are several replicas, the final model is their mean.
        """
        replicas, best = self._run.replicas, self._run.best_model
        self._write_model("model.safetensors", *replicas.mean())
        if best.vector is not None and best.counters is not None:
            self._write_model("best.safetensors", best.vector, best.counters)
        model = snapshot.model_sha256(replicas)
        state = snapshot.state_sha256(replicas, self._run.client_states)
        return Finished(
            model, state, peak_memory_bytes(), self._run.jobs.unfinished(), best.summary()
        )

    def _write_model(self, name: str, vector: Tensor, counters: Tensor) -> None:
        if not self._folder:
            return
        named = self._initial.named(vector, counters)
        arrays = {key: tensor.numpy() for key, tensor in named.items()}
        notes = {BASE: self._base} if self._base else None
        checkpoint.save_model(arrays, Path(self._folder) / name, notes)
