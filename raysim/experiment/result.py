"""What a finished run is in Python: tables of its rounds and clients, its models, and what they say of test samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from raysim.api.messages import PublishedVersion, ScoringTask
from raysim.experiment.run_folder import last_checkpoint
from raysim.experiment.settings import Experiment, Rows
from raysim.models.split import original_network
from raysim.primitives.errors import Refused
from raysim.runtime.inprocess import InProcess, preserve_torch_settings
from raysim.simulation import checkpoint
from raysim.simulation.coordinator import Coordinator
from raysim.training.determinism import make_deterministic
from raysim.training.run_spec import RunSpec, build_networks
from raysim.training.worker import Worker

if TYPE_CHECKING:
    import pandas as pd

MODEL, BEST = "model.safetensors", "best.safetensors"


class Predictions(NamedTuple):
    """What a model says of n test samples."""

    labels: np.ndarray  # [n], as the data has them
    scores: np.ndarray  # [n, outputs], as evaluation ranks them: logits, unless a method makes something else of them
    rows: np.ndarray  # [n] their places in the data set, training rows first

    def __repr__(self) -> str:
        right = ""
        if (
            len(self.labels) and self.labels.ndim == 1 and self.labels.dtype.kind in "iu"
        ):  # labels are classes
            right = f", {float((self.classes == self.labels).mean()):.4f} of them right"
        return f"Predictions({len(self.labels)} rows, scores {list(self.scores.shape)}{right})"

    @property
    def classes(self) -> np.ndarray:
        """[n] the class with the highest score."""
        return np.asarray(self.scores.argmax(1))


@dataclass(frozen=True, eq=False)
class Result:
    """A run: where it lies, its summary, and its history (a row per aggregation).

    What needs its models builds them from the folder's files, in this process, on the CPU.
    """

    folder: Path
    summary: dict[str, Any]
    rows: Rows
    source: Experiment | Callable[[], Experiment] = field(repr=False)

    def __repr__(self) -> str:
        metric = self.summary.get("metric", "accuracy")
        scores = {key: self.summary.get(key) for key in (metric, f"{metric}_global")}
        told = "".join(f", {key} {score:.4f}" for key, score in scores.items() if score is not None)
        return f"Result({self.folder}: {self.summary.get('rounds', len(self.rows))} rounds{told})"

    @cached_property
    def experiment(self) -> Experiment:
        """The run, built and checked."""
        return self.source if isinstance(self.source, Experiment) else self.source()

    # --- tables ------------------------------------------------------------------------------------------------------
    @property
    def history(self) -> pd.DataFrame:
        """A row per aggregation, as in history.parquet; nan where nothing was measured."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    @property
    def clients(self) -> pd.DataFrame:
        """A row per client, by its number: training and test samples, and the scores of the last evaluation."""
        import pandas as pd

        if not (path := self.folder / "clients.parquet").is_file():
            raise Refused(
                f"{self.folder} has no clients.parquet: an earlier version wrote it, or it has no round yet"
            )
        return pd.read_parquet(path).set_index("client")

    # --- models ------------------------------------------------------------------------------------------------------
    def model(self, best: bool = False) -> nn.Module:
        """The shared model with the final weights, in eval mode on the CPU; its keys are those of the model given.

        best: with the weights of the best round, as `summary["best_model"]` says. Raises Refused where clients keep a
        part of it to themselves, or the run has not finished.
        """
        self._refuse_personal()
        return _filled(self.experiment.spec, self._shared(BEST if best else MODEL))

    def client_model(self, client: int) -> nn.Module:
        """The model that is scored for this client: with what it keeps to itself, and as methods personalise it.

        Raises Refused where there is no such client, or no checkpoint of the last round holds what clients keep.
        """
        with self._at_the_end() as end:
            worker, task, published, state = end.asked(self._client(client))
            tensors = worker.scored_tensors(task, published, state)
        return _filled(self.experiment.spec, tensors)

    def client_state(self, client: int) -> dict[str, np.ndarray]:
        """What this client keeps to itself, by full name: personal tensors, and what methods declare (`Method.state`).

        Of a client that never trained what it would start from; empty where clients keep nothing. Raises Refused as
        `client_model` does.
        """
        with self._at_the_end() as end:
            worker, task, _, state = end.asked(self._client(client))
            return {
                name: value.copy() for name, value in worker.client_tensors(task, state).items()
            }

    def predictions(self, client: int | None = None, best: bool = False) -> Predictions:
        """Labels and scores on the central test set by the shared model, or on a client's own tests by its own model.

        By the weights that were evaluated last, which a method (FedExP) may choose. best: by the shared model of the
        best round. Raises Refused where there are no such samples, and as `model` and `client_model` do.
        """
        if client is None:
            self._refuse_personal()
        elif best:
            raise Refused(
                "best=True: the clients' own models of the best round are not kept. Leave out client or best"
            )
        data = self.experiment.spec.data
        rows = data.central if client is None else data.partition.test.rows(self._client(client))
        if not len(rows):
            whose = (
                "the data has no central test set: name a client"
                if client is None
                else f"{data.label(client)} has none"
            )
            raise Refused(f"there is nothing to predict: {whose}, result.predictions(client=...)")
        with self._at_the_end() as end:
            worker, task, published, state = end.asked(client)
            if best:
                published = end.published_as(self._shared(BEST))
            labels, scores = worker.predictions(replace(task, rows=rows), published, state)
        return Predictions(labels, scores, rows)

    def _client(self, client: int) -> int:
        count = len(self.experiment.spec.data.partition.test)
        if not (isinstance(client, (int, np.integer)) and 0 <= client < count):
            raise Refused(f"client {client} does not exist: this run has clients 0 to {count - 1}")
        return int(client)

    def _refuse_personal(self) -> None:
        _, layout = build_networks(self.experiment.spec)
        if any(
            entry.personal and entry.network == "model"
            for entry in (*layout.entries, *layout.counters)
        ):
            raise Refused(
                "every client of this run has a model of its own: ask for one, client_model(client)"
            )

    def _shared(self, name: str = MODEL) -> Mapping[str, Tensor]:
        path = self.folder / name
        if path.is_file():
            return load_file(path)
        if name == BEST and (self.folder / MODEL).is_file():
            raise Refused(
                f"{self.folder} has no {BEST}: an earlier version of raysim ran it. Run it again"
            )
        raise Refused(
            f"{self.folder} has no {name}: the run has not finished; out={self.folder} resume=latest"
        )

    @contextmanager
    def _at_the_end(self) -> Iterator[_End]:
        with preserve_torch_settings():
            make_deterministic(self.experiment.spec.threads)
            yield self._end

    @cached_property
    def _end(self) -> _End:
        path = last_checkpoint(self.folder, self.experiment.spec.settings.checkpoint)
        is_last = checkpoint.version_of(path) == self.summary.get("rounds")
        return _End(self.experiment, self._shared(), path if is_last else "")


class _End:
    """Where a run ended: its coordinator and a worker, in this process; of its last checkpoint if it has one."""

    def __init__(self, experiment: Experiment, shared: Mapping[str, Tensor], path: str):
        spec = replace(experiment.spec, device="cpu", lanes=1, graph=False)
        self.worker, self.path = Worker(spec), path
        self.coordinator = Coordinator(
            spec, experiment.schedule, experiment.fleet, InProcess(self.worker), resume=path
        )
        server = self.coordinator.server
        if path:
            self.coordinator.saver.restore()
            self.published = replace(server.published(), vector=server.scored().numpy())
        else:
            for name, view in self.coordinator.initial.named(
                server.vector, server.counters
            ).items():
                view.copy_(shared[name])
            self.published = PublishedVersion(0, server.vector.numpy(), server.counters.numpy())

    def published_as(self, shared: Mapping[str, Tensor]) -> PublishedVersion:
        """Return these weights, by full name, as workers receive them."""
        server = self.coordinator.server
        vector, counters = server.vector.clone(), server.counters.clone()
        for name, view in self.coordinator.initial.named(vector, counters).items():
            view.copy_(shared[name])
        return PublishedVersion(0, vector.numpy(), counters.numpy())

    def asked(self, client: int | None) -> tuple[Worker, ScoringTask, PublishedVersion, Any]:
        """Return what scores a client's own model (None: the shared one), without rows, and its state."""
        private, none = self.coordinator.client_states, np.empty(0, np.int64)
        if client is None:
            return self.worker, ScoringTask(-1, none), self.published, None
        if not self.path and (private.stateful or self.worker.personalises):
            raise Refused(
                "no checkpoint of the last round holds what clients keep: set checkpoint.every above 0"
            )
        extras = self.coordinator.server.sent_to(client)
        task = ScoringTask(client, none, private.accepted_job(client), extras)
        return self.worker, task, self.published, private.state(client)


def _filled(spec: RunSpec, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The run's model with these values, by full name, as tensors of its own."""
    model = build_networks(spec)[0]["model"]
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            network, _, path = name.partition(".")
            if network == "model" and path in own:  # a buffer may be no part of what is stored
                own[path].copy_(tensor)
    return original_network(model).eval()
