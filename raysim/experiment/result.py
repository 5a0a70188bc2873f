"""Show a run in Python: tables of rounds and clients, models, and their predictions."""

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

from raysim.api.declarations import Generation
from raysim.api.learner import LearnerNetwork
from raysim.api.messages import PublishedVersion, ScoringTask
from raysim.experiment.run_folder import last_checkpoint
from raysim.experiment.settings import Experiment, Rows
from raysim.models.split import original_network
from raysim.primitives.errors import RefusedError, errors_as_refusals
from raysim.primitives.files import without_password
from raysim.results.clients import read_client_scores
from raysim.results.number_format import format_amount
from raysim.results.text_samples import write_texts
from raysim.runtime.inprocess import InProcess, preserve_torch_settings
from raysim.simulation import checkpoint
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.server import Server
from raysim.training.determinism import make_deterministic
from raysim.training.run_spec import RunSpec, build_networks, declare_run
from raysim.training.worker import Worker

if TYPE_CHECKING:
    import pandas as pd

MODEL, BEST = "model.safetensors", "best.safetensors"


class Predictions(NamedTuple):
    """The labels of n test samples, and the outputs of a model for them.

    labels: [n, ...], as in the data.
    scores: [n, outputs, ...]: logits, unless a method changes them. For text, the last axis of
    `labels` and `scores` has the positions.
    rows: [n], the positions in the data set, in which the source's training samples come first.
    """

    labels: np.ndarray
    scores: np.ndarray
    rows: np.ndarray

    def __repr__(self) -> str:
        labels = self.labels
        accuracy = ""
        has_classes = labels.ndim == 1 and labels.dtype.kind in "iu"
        if len(labels) and has_classes:
            accuracy = f", {float((self.classes == labels).mean()):.4f} of them right"
        return f"Predictions({len(labels)} rows, scores {list(self.scores.shape)}{accuracy})"

    @property
    def classes(self) -> np.ndarray:
        """Return for each sample the number of the class with the highest score.

        The shape is that of `labels`. The result has no meaning for a regression.
        """
        return np.asarray(self.scores.argmax(1))


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a run: folder, summary, history (a row per aggregation), and models.

    Models are built from the folder's files when they are needed, in this process and on the CPU.
    folder: the run's folder, or a local copy of the folder behind `url`.
    summary: as in summary.json; for an unfinished run, it is computed from the history.
    url: where the files were sent, or "".
    """

    folder: Path
    summary: dict[str, Any]
    rows: Rows
    source: Experiment | Callable[[], Experiment] = field(repr=False)
    url: str = ""

    def __repr__(self) -> str:
        metric = self.summary.get("metric", "accuracy")
        scores = ""
        for key in (metric, f"{metric}_global"):
            if self.summary.get(key) is not None:
                scores += f", {key} {self.summary[key]:.4f}"
        rounds = format_amount(self.summary.get("rounds", len(self.rows)), "round")
        return f"Result({self._address}: {rounds}{scores})"

    @property
    def _address(self) -> str:
        return without_password(self.url) or str(self.folder)

    @cached_property
    def experiment(self) -> Experiment:
        """Return the run as an `Experiment`, which has all objects of the run."""
        return self.source if isinstance(self.source, Experiment) else self.source()

    # --- tables -----------------------------------------------------------------------------------
    @property
    def history(self) -> pd.DataFrame:
        """Return a row per aggregation, as in history.parquet; values not measured are missing."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    @property
    def clients(self) -> pd.DataFrame:
        """Return a table with a row for each client: its numbers of samples and its last scores.

        The index has the client numbers. The columns are `samples` (for training), `tests` (test
        samples) and each score, such as `accuracy`. A score is nan if the last evaluation did not
        score the client. Some runs also have the columns `user`, `unseen` or `replica`.
        Raise `RefusedError` if the run has not stored this table.
        """
        import pandas as pd

        path = self.folder / "clients.parquet"
        if not path.is_file():
            raise RefusedError(
                f"{self._address} has no clients.parquet: the run is in progress or was killed, or "
                "an earlier version of raysim wrote it. Wait for its end, continue it with "
                "resume=latest, or run it again."
            )
        return pd.read_parquet(path).set_index("client")

    @property
    def client_scores(self) -> pd.DataFrame:
        """Return a table with the scores of clients in each round with an evaluation.

        The columns are `round`, `client`, and one for each score; an undefined score is nan. To get
        one column per client: `result.client_scores.pivot(index="round", columns="client",
        values="accuracy")`.
        Raise `RefusedError` if the run has stored no scores of clients.
        """
        with errors_as_refusals():
            scores = read_client_scores(self.folder)
        if scores is None:
            raise RefusedError(
                f"{self.folder} has no client_scores.parquet, because an earlier version of raysim "
                "wrote this run or because no client was scored. Start the run again, with "
                "partition.test_fraction above 0."
            )
        return scores.to_pandas()

    # --- models -----------------------------------------------------------------------------------
    def model(self, best: bool = False) -> nn.Module:
        """Return the shared model with the final weights, in eval mode on the CPU.

        Its `state_dict` has the keys of the user's model.
        best: True loads the round with the best validation score or, without validation samples,
        the lowest training loss. `summary["best_model"]["round"]` is its number.
        Raise `RefusedError` if the run has not finished, if clients have personal parameters, or if
        a learner's parameters are bytes. With `best`, also raise it if no round has a finite score.
        """
        self._refuse_personal()
        if not self._has_parameters():
            raise RefusedError(
                "the parameters of this learner are bytes, not a torch module. Use "
                "result.parameters()."
            )
        return _model_with(self.experiment.spec, self._shared(BEST if best else MODEL))

    def text(
        self,
        *prompts: str,
        tokens: int = 200,
        temperature: float = 0.8,
        best: bool = False,
        client: int | None = None,
    ) -> list[str]:
        """Return each prompt, followed by the text that the language model writes after it.

        Without prompts, the model writes one document. The run's seed decides the random numbers.
        tokens: the largest number of tokens to add to a prompt.
        temperature: the divisor of the logits; 0 always takes the most probable token.
        best: True uses the weights of the best round, and needs client=None. False uses the final
        ones.
        client: the client whose own model writes (`client_model`); None uses the shared model.
        Raise `RefusedError` if the data are not text, the vocabulary cannot encode a prompt, or the
        model is missing.
        """
        spec = self.experiment.spec
        if spec.task.kind != "causal":
            raise RefusedError(
                f"this run has a model for {spec.task.kind}, but only a model for language data "
                "(data.kind=causal) writes text. Load another run."
            )
        if best and client is not None:
            raise _no_best_client()
        with errors_as_refusals():
            generate = Generation(tokens, list(prompts), temperature)
            model = self.model(best) if client is None else self.client_model(client)
            return write_texts(spec, model, generate)

    def parameters(self) -> Any:
        """Return the final parameters of a learner, in the format that its function `fit` receives.

        Raise `RefusedError` for a torch model or an unfinished run. Also raise it for parameters
        that are bytes if the last round stored no checkpoint.
        """
        with self._final_state() as final:
            worker, task, published, state = final.scoring(None)
            network = getattr(worker.vector.networks["model"], "net", None)
            if not isinstance(network, LearnerNetwork):
                raise RefusedError("this run trains a torch model. Use result.model().")
            if network.content is not None and not final.path:
                raise RefusedError(
                    "checkpoint.every: the run wrote no checkpoint of its last round. The final "
                    "parameters of the learner are only in this checkpoint. Set checkpoint.every "
                    "above 0, and start the run again."
                )
            worker.scored_tensors(task, published, state)
            return network.parameters_as_arrays()

    def client_model(self, client: int) -> nn.Module:
        """Return the model with which a client is scored, in eval mode on the CPU.

        It has the final shared tensors and the client's personal tensors. With a method such as
        Ditto, it is the client's personal model.
        Raise `RefusedError` if no client has this number, or if the run has not finished. If the
        run has client states, personal models or several replicas, also raise it without a
        checkpoint of the last round.
        """
        with self._final_state() as final:
            worker, task, published, state = final.scoring(self._client(client))
            tensors = worker.scored_tensors(task, published, state)
        return _model_with(self.experiment.spec, tensors)

    def client_state(self, client: int) -> dict[str, np.ndarray]:
        """Return the state of a client by name: personal tensors, and what methods declare.

        Names are full, such as "model.bn1.weight". A client that never trained has its initial
        state. Without client states, the result is empty.
        Raise `RefusedError` in the same cases as `client_model`.
        """
        with self._final_state() as final:
            worker, task, _, state = final.scoring(self._client(client))
            return {
                name: value.copy() for name, value in worker.client_tensors(task, state).items()
            }

    def predictions(self, client: int | None = None, best: bool = False) -> Predictions:
        """Return labels and model outputs for the central test set, or for a client's test set.

        client: None uses the shared model and the central test set, a number the client's own model
        and test set.
        best: True uses the shared model of the best round, and needs client=None. False uses the
        final model as the run scores it or, without a checkpoint of the last round, the final
        version.
        Raise `RefusedError` if the client does not exist, the test set is empty, or the model or
        checkpoint is missing. With client=None, also raise it if clients have personal parameters.
        """
        if client is None:
            self._refuse_personal()
        elif best:
            raise _no_best_client()
        data = self.experiment.spec.data
        rows = data.central if client is None else data.partition.test.rows(self._client(client))
        if not len(rows):
            reason, choice = "the data has no central test set", "a client"
            if client is not None:
                reason = f"{data.label(client)} has no test samples"
                choice = "another client"
            raise RefusedError(
                f"client={client}: there is nothing to predict, because {reason}. Call "
                f"result.predictions(client=NUMBER) with the number of {choice}."
            )
        with self._final_state() as final:
            worker, task, published, state = final.scoring(client)
            if best:
                published = final.version_of(self._shared(BEST))
            labels, scores = worker.predictions(replace(task, rows=rows), published, state)
        return Predictions(labels, scores, rows)

    def _client(self, client: int) -> int:
        count = len(self.experiment.spec.data.partition.test)
        if not (isinstance(client, (int, np.integer)) and 0 <= client < count):
            raise RefusedError(
                f"client {client} does not exist. This run has the clients 0 to {count - 1}."
            )
        return int(client)

    def _has_parameters(self) -> bool:
        declared = declare_run(self.experiment.spec).methods
        return all(method.has_parameters for method in declared)

    def _refuse_personal(self) -> None:
        _, layout = build_networks(self.experiment.spec)
        entries = (*layout.entries, *layout.counters)
        if any(entry.personal and entry.network == "model" for entry in entries):
            raise RefusedError(
                "every client of this run has a model of its own. Give a client: client_model(7), "
                "text(client=7) or predictions(7), for example."
            )

    def _shared(self, name: str = MODEL) -> Mapping[str, Tensor]:
        path = self.folder / name
        if path.is_file():
            return load_file(path)
        if name == BEST and (self.folder / MODEL).is_file():
            raise RefusedError(
                f"{self._address} has no {BEST}: no round has a finite score to choose by, or an "
                "earlier version of raysim made this run. Use best=False, or run it again."
            )
        raise RefusedError(
            f"{self._address} has no {name}: the run has not finished. "
            f"Continue it with out={self._address} resume=latest."
        )

    @contextmanager
    def _final_state(self) -> Iterator[_FinalState]:
        with preserve_torch_settings():
            make_deterministic(self.experiment.spec.threads)
            yield self._state

    @cached_property
    def _state(self) -> _FinalState:
        path = last_checkpoint(self.folder, self.experiment.spec.settings.checkpoint)
        is_last = checkpoint.version_of(path) == self.summary.get("rounds")
        return _FinalState(self.experiment, self._shared(), path if is_last else "")


def _no_best_client() -> RefusedError:
    return RefusedError(
        "best=True: the clients' own models are kept only for the last round. Remove "
        "`client` or `best=True`."
    )


class _FinalState:
    """The coordinator and a worker of a finished run, both in this process.

    shared: the final shared tensors by full name; used only without a checkpoint.
    path: the checkpoint of the last round; "" if there is none.
    """

    def __init__(self, experiment: Experiment, shared: Mapping[str, Tensor], path: str):
        spec = replace(experiment.spec, device="cpu", lanes=1, graph=False)
        self.worker, self.path = Worker(spec), path
        self.coordinator = Coordinator(
            spec, experiment.schedule, experiment.fleet, InProcess(self.worker), resume=path
        )
        server = self.coordinator.server
        if path:
            self.coordinator.saver.restore()
            vector, counters = self.coordinator.replicas.scored()
            self.published = replace(
                server.published(), vector=vector.numpy(), counters=counters.numpy()
            )
        else:
            for name, view in self.coordinator.initial.named(
                server.vector, server.counters
            ).items():
                view.copy_(shared[name])
            self.published = PublishedVersion(0, server.vector.numpy(), server.counters.numpy())

    def version_of(self, shared: Mapping[str, Tensor]) -> PublishedVersion:
        """Return a version of the shared model that has the tensors in `shared`.

        shared: the values of all shared tensors, by full name, such as the tensors of the best
        round.
        """
        server = self.coordinator.server
        vector, counters = server.vector.clone(), server.counters.clone()
        for name, view in self.coordinator.initial.named(vector, counters).items():
            view.copy_(shared[name])
        return PublishedVersion(0, vector.numpy(), counters.numpy())

    def scoring(self, client: int | None) -> tuple[Worker, ScoringTask, PublishedVersion, Any]:
        """Return what is needed to score a client or the shared model.

        The result has the worker, a scoring task without samples, the version to score, and the
        client's state (None for the shared model).
        client: the number of the client; None for the shared model.
        Raise `RefusedError` if a checkpoint is needed, but the last round stored none.
        """
        client_states, no_rows = self.coordinator.client_states, np.empty(0, np.int64)
        if client is None:
            return self.worker, ScoringTask(-1, no_rows), self.published, None
        replicas, published = self.coordinator.replicas, self.published
        has_states = client_states.stateful or self.worker.personalises
        if not self.path and (has_states or not replicas.is_single):
            raise RefusedError(
                "checkpoint.every: the run wrote no checkpoint of its last round, and only such "
                "a checkpoint has client states and replicas. Set checkpoint.every above 0, and "
                "start the run again."
            )
        server = self._server_of(client)
        if not replicas.is_single:
            published = replace(server.published(), vector=server.scored().numpy())
        task = ScoringTask(
            client, no_rows, client_states.committed_job(client), server.sent_to(client)
        )
        return self.worker, task, published, client_states.state(client)

    def _server_of(self, client: int) -> Server:
        """Return the `Server` of the model (replica) with which a client is scored.

        Each replica has its `Server`. Some topologies choose the client's replica by losses: the
        replica with the smallest loss on the client's training samples.
        """
        replicas = self.coordinator.replicas
        if not replicas.network.chosen_by_loss:
            return replicas.server_of(client)
        client_states = self.coordinator.client_states
        state = self.worker.states.get(
            client, client_states.committed_job(client), client_states.state(client)
        )
        versions = [server.published(number) for number, server in enumerate(replicas.servers)]
        return replicas.servers[self.worker.scorer.best_version(client, versions, state)]


def _model_with(spec: RunSpec, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the run's model, in which tensors have the given values.

    tensors: the values by full name.
    spec: the run's settings and model.
    """
    model = build_networks(spec)[0]["model"]
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            network, _, path = name.partition(".")
            if network == "model":
                state[path].copy_(tensor)
    return original_network(model).eval()
