"""Use a Flower ClientApp as a learner: the app trains and evaluates in place of raysim.

Source: Flower (Beutel et al., arXiv:2007.14390), version 1.42.

Choices
- raysim aggregates the updates. A project's ServerApp provides only the initial parameters and the
  config of its first message for training. `raysim flower run` runs the whole ServerApp.
- The app loads its own data. `data` and `partition` give the numbers of clients and samples, for
  virtual time and weights.
- The state in an app's Context is the client's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raysim.api.declarations import Task
from raysim.api.learner import EvaluationData, Learner, LearnerNetwork, Parameters
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.setup import Setup
from raysim.flower.project import LoadedClientApp, Project, flatten, load_client_app, read_project
from raysim.primitives.errors import RefusedError
from raysim.primitives.extras import import_optional

if TYPE_CHECKING:
    from raysim.flower.client import AppRunner
    from raysim.flower.initial import InitialModel

KEY = "learner.app"


class FlowerLearner(Learner):
    """A learner that lets a Flower ClientApp train, by sending it messages.

    app: "module:object" of a ClientApp, a client_fn or a class of clients. "" uses the ClientApp in
    the project's pyproject.toml.
    folder: the project's folder; None is the current folder.
    run_config: values that replace values of the same name in the project's run config.
    train_config: values for the config of each training message. They are added to the config of
    the ServerApp's first training message, and replace values of the same name.
    evaluate_config: the config of each message for evaluation.
    parameters: "module:function" that returns the initial parameters. "" gets them from the
    project's ServerApp or, without a ServerApp, from `get_parameters` of client 0.

    Raises `RefusedError` for an app that cannot be used.
    """

    name = "flower"
    paper = "Beutel et al., arXiv:2007.14390"

    def __init__(
        self,
        app: str = "",
        folder: str | None = None,
        run_config: dict[str, Any] | None = None,
        train_config: dict[str, Any] | None = None,
        evaluate_config: dict[str, Any] | None = None,
        parameters: str = "",
    ):
        import_optional("flwr", "learner=flower")
        self.app = app
        self.folder = folder
        self.run_config = dict(run_config or {})
        self.train_config = flatten(train_config or {}, "learner.train_config")
        self.evaluate_config = flatten(evaluate_config or {}, "learner.evaluate_config")
        self.parameters = parameters
        self._root = Path(folder or ".").expanduser().resolve()
        project = self._project()
        self._resolved_config = project.run_config(self.run_config, "learner.run_config")
        self._reference = app or project.client_app
        if not self._reference:
            raise RefusedError(
                f"{KEY} is not set, and {project.file} does not name a ClientApp. Set "
                f"{KEY}=module:object."
            )
        loaded = self._load()
        if not loaded.can_train:
            raise RefusedError(
                f"{KEY}={self._reference}: the app has no function for training. "
                "Add one with @app.train()."
            )
        self._made: dict[tuple[int, int], InitialModel] = {}  # by number of clients and seed

    def _project(self) -> Project:
        return read_project(self._root)

    def _load(self) -> LoadedClientApp:
        """Return the ClientApp, which each process loads once."""
        return load_client_app(self._reference, self._root, KEY)

    # --- the model ----------------------------------------------------------------------------
    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        """Return the app's initial parameters: arrays by name.

        task: the learning task, which has the number of clients.
        rng: decides the app's seed.
        Raises `RefusedError` if nothing provides the parameters, or if they cannot be read.
        """
        from raysim.flower.initial import make_initial

        # The parameters are stored, so that workers, which get a copy of the learner, have them.
        seed = int(rng.integers(2**62))
        made = self._made.get((task.population, seed))
        if made is None:
            project = self._project()
            runner = self.runner(task.population, seed)
            made = make_initial(runner, self.parameters, project.server_app, self._reference)
            self._made[task.population, seed] = made
        return dict(made.arrays)

    def setup(self, run: Setup) -> None:
        """Declare to raysim that clients train with the app, in place of raysim's steps.

        Also declare a client state: the records that the app keeps in a client's context.
        """
        super().setup(run)
        run.client_state("context", _no_records)

    def runner(self, clients: int, seed: int) -> AppRunner:
        """Return the object through which the app answers messages.

        clients: the number of clients.
        seed: the seed from which the app's random generators are seeded.
        """
        from raysim.flower.client import AppRunner

        return AppRunner(self._load(), clients, self._resolved_config, seed, self._root)

    # --- a job --------------------------------------------------------------------------------
    def fit_client(self, job: LocalJob) -> LocalResult:
        """Send the client a message for training; store the parameters of its reply in the job.

        Raises AppError if the app fails.
        Raises ValueError if the arrays of the reply have other names or shapes than those sent.
        """
        from raysim.flower.local_work import train

        network: LearnerNetwork = job.model.net  # type: ignore[assignment]
        sent: dict[str, Any] = {}
        for made in self._made.values():
            sent.update(made.config)
        sent.update(self.train_config)
        trained = train(
            self.runner(job.task.population, job.seed),
            network.parameters_as_arrays(),
            sent,
            client=job.client,
            number=job.participation,
            version=job.version,
            state=job.state["context"],
        )
        network.set_parameters(trained.arrays)
        job.state["context"] = trained.state
        return trained.result

    def evaluate(self, parameters: Parameters, data: EvaluationData) -> Mapping[str, float]:
        """Send a client a message for evaluation; return the numbers in its reply.

        Return {} if the app has no function for evaluation, or if the samples belong to no client.
        parameters: the arrays of the scored version, by name.
        """
        from raysim.flower.local_work import evaluate

        if data.client < 0 or not self._load().can_evaluate:
            return {}
        runner = self.runner(data.task.population, data.seed)
        state: bytes = data.state.get("context", b"")
        return evaluate(runner, parameters, self.evaluate_config, data.client, state)


def _no_records(samples: int) -> bytes:
    """Return the client state of a client that was never trained: packed records without content.

    samples: the number of the client's samples, which is not used.
    """
    return b""
