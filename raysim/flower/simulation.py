"""Replace Flower's old `start_simulation`, on raysim's workers and virtual clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.client import ClientApp
from flwr.server import (
    ClientManager,
    History,
    Server,
    ServerApp,
    ServerAppComponents,
    ServerConfig,
    SimpleClientManager,
)
from flwr.server.strategy import FedAvg, Strategy

from raysim.experiment.settings import RuntimeOptions
from raysim.flower.project import inspect_client_app, with_one_argument
from raysim.flower.session import AppRun, run_app, warn_on_stderr
from raysim.primitives.errors import RefusedError
from raysim.simulation.fleet import Fleet, Ideal


def start_simulation(
    *,
    client_fn: Callable[..., Any],
    num_clients: int,
    clients_ids: list[str] | None = None,
    client_resources: dict[str, float] | None = None,
    server: Server | None = None,
    config: ServerConfig | None = None,
    strategy: Strategy | None = None,
    client_manager: ClientManager | None = None,
    ray_init_args: dict[str, Any] | None = None,
    keep_initialised: bool | None = False,
    actor_type: Any = None,
    actor_kwargs: dict[str, Any] | None = None,
    actor_scheduling: Any = "DEFAULT",
    seed: int = 0,
    samples: int = 100,
    fleet: Fleet | None = None,
    runtime: str = "local",
    workers: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> History:
    """Run rounds of federated learning with simulated clients; return Flower's history.

    The arguments up to `actor_scheduling` are those of `flwr.simulation.start_simulation`.
    client_fn: function that makes a client.
    num_clients: the number N of clients. Their cids are "0" to "N-1", as in Flower before version
    1.9.
    clients_ids: must be None.
    client_resources: {"num_cpus": C, "num_gpus": G} for each worker.
    server: None makes a server from `strategy` and `client_manager`. If a server is given,
    `strategy` and `client_manager` have no effect.
    config: the number of rounds, and the virtual seconds that a round waits for replies. None runs
    one round without such a limit.
    strategy: None is Flower's FedAvg.
    client_manager: None is Flower's SimpleClientManager.
    ray_init_args, keep_initialised, actor_type, actor_kwargs, actor_scheduling: have no effect.

    seed: the seed of `random`, NumPy, torch and the fleet.
    samples: the samples that a training message takes on the virtual clock.
    fleet: None is `Ideal()`.
    runtime: "local" for workers on Ray, or "inprocess" for one worker in this process.
    workers: None starts as many as fit.
    out: the run's folder; None stores nothing.
    resume: True continues the run in `out`.

    Raises ValueError for wrong arguments.
    Raises RunStoppedError if the strategy fails or several workers die.
    Raises ReplayError if a continued run does not send the same messages again.
    """
    if clients_ids is not None:
        raise RefusedError("clients_ids: Flower no longer supports it. Set num_clients instead.")
    if runtime not in ("local", "inprocess"):
        raise RefusedError(f"runtime={runtime!r} does not exist. Use 'local' or 'inprocess'.")
    resources = client_resources or {}
    options = RuntimeOptions(
        name="local" if runtime == "local" else "inprocess",
        workers=workers,
        cpus=resources.get("num_cpus", 1.0),
        gpus=resources.get("num_gpus") or None,
    )
    settings = config or ServerConfig()
    if server is None:
        manager = client_manager or SimpleClientManager()
        server = Server(client_manager=manager, strategy=strategy or FedAvg())
    histories: list[History] = []
    kind: Any = type(server)

    class RecordingServer(kind):
        """A copy of the user's server that also stores the history of its rounds."""

        def __init__(self) -> None:
            self.__dict__ = server.__dict__

        def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
            """Run the rounds, store the history, and return it with the duration in seconds.

            If the server's class was written for an older version of Flower, its `fit` returns only
            the history. The duration is then 0.
            """
            returned: Any = super().fit(num_rounds=num_rounds, timeout=timeout)
            history, seconds = (returned, 0.0) if isinstance(returned, History) else returned
            histories.append(history)
            return history, seconds

    def server_fn(context: Context) -> ServerAppComponents:
        return ServerAppComponents(server=RecordingServer(), config=settings)

    run = AppRun(
        client_app=inspect_client_app(
            ClientApp(client_fn=with_one_argument(client_fn, "client_fn")), "client_fn"
        ),
        server_app=ServerApp(server_fn=server_fn),
        folder=_main_folder(),
        clients=num_clients,
        seed=seed,
        samples=samples,
        fleet=fleet or Ideal(),
        runtime=options,
        device="cuda" if options.gpus else "cpu",
        out=Path(out) if out else None,
        resumes=resume,
    )
    run_app(run, warn_on_stderr)
    return histories[0]


def _main_folder() -> Path:
    """Return the folder of the user's main script; without a script, the current folder.

    If the user's code fails, the error message names the failing line of a file in this folder.
    """
    file = getattr(sys.modules["__main__"], "__file__", None)
    return Path(file).resolve().parent if file else Path.cwd()
