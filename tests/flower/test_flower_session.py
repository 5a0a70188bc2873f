import contextlib
import logging
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

import flwr.server.strategy as older
import flwr.serverapp.strategy as newer
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig

from raysim.experiment.settings import RuntimeOptions
from raysim.flower import session
from raysim.flower.project import load_object, read_project
from raysim.flower.replies import ReplayError
from raysim.flower.session import AppRun, run_app
from raysim.flower.worker import AppWorker
from raysim.primitives.errors import RefusedError
from raysim.runtime.inprocess import InProcess
from raysim.simulation.events import RunStoppedError
from raysim.simulation.fleet import Lognormal
from raysim.simulation.runtime import WorkerDiedError


def no_text(text):
    pass


@pytest.fixture
def run(project):
    found = read_project(project)
    return AppRun(
        found.client_app,
        load_object(found.server_app, project, "serverapp"),
        project,
        clients=found.clients,
        run_config=found.config,
        fleet=Lognormal(dropout=0.1),
    )


def numpy_run(run, strategy, rounds=2):
    def server_fn(context):
        return ServerAppComponents(strategy=strategy(), config=ServerConfig(num_rounds=rounds))

    app = "tiny_flower_app.numpy_client:app"
    return replace(run, client_app=app, server_app=ServerApp(server_fn=server_fn))


def use_workers(monkeypatch, count):
    @contextlib.contextmanager
    def workers(run, say):
        yield InProcess(*(AppWorker(run.spec()) for _ in range(count)))

    monkeypatch.setattr(session, "_workers", workers)


def numbers(result):
    return {name: value for name, value in result.summary.items() if name != "replayed"}


def test_result_of_an_app_contains_its_messages_and_its_training_loss(run):
    result = run_app(run, no_text)
    trained = result.messages[result.messages.type == "train"]
    answered = trained[trained.fate == "answered"]
    assert len(trained) == 2 * 3  # fraction_train=0.6 of 5 clients
    assert list(answered["round"].unique()) == [1, 2]
    assert result.summary["virtual_seconds"] > 0
    assert result.summary["train.train_loss"] > 0
    assert len(result.summary["model_sha256"]) == 64


def test_app_is_bit_identical_on_one_and_three_workers(run, monkeypatch):
    one = run_app(run, no_text)
    use_workers(monkeypatch, 3)
    three = run_app(run, no_text)
    assert numbers(one) == numbers(three)
    assert one.messages.equals(three.messages)
    assert numbers(run_app(replace(run, seed=1), no_text)) != numbers(one)


def first_strategy():
    initial = ndarrays_to_parameters([np.zeros((2, 2), np.float32), np.zeros(2)])
    return older.FedAvg(fraction_fit=0.8, initial_parameters=initial)


def test_app_with_the_older_flower_interface_has_equal_bits_on_1_and_3_workers(run, monkeypatch):
    older_run = numpy_run(replace(run, clients=20), first_strategy)
    one = run_app(older_run, no_text)
    use_workers(monkeypatch, 3)
    three = run_app(older_run, no_text)
    assert one.summary["model_sha256"] == three.summary["model_sha256"]
    assert numbers(one)["virtual_seconds"] == numbers(three)["virtual_seconds"]


@pytest.mark.parametrize("kept", [0.0, 0.4, 0.75])
@pytest.mark.parametrize("is_older", [False, True])
def test_interrupted_app_continues_to_the_results_of_an_uninterrupted_run(
    run, tmp_path, kept, is_older
):
    if is_older:
        run = numpy_run(run, first_strategy)
    straight = run_app(run, no_text)
    stored = replace(run, out=tmp_path / "run", resumes=True)
    run_app(stored, no_text)
    file = stored.out / "replies.bin"
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    continued = run_app(stored, no_text)
    assert numbers(continued) == numbers(straight)
    answered = straight.summary["answered"]
    assert continued.summary["replayed"] < answered
    assert (continued.summary["replayed"] > 0) == (kept > 0)


def test_rerun_of_finished_app_reads_replies_from_the_folder_of_the_run(run, tmp_path, monkeypatch):
    stored = replace(run, out=tmp_path / "run", resumes=True)
    result = run_app(stored, no_text)
    monkeypatch.setattr(AppWorker, "answer", None)
    again = run_app(stored, no_text)
    assert numbers(again) == numbers(result)
    assert again.summary["replayed"] == result.summary["answered"]


def test_session_refuses_messages_that_differ_from_stored_ones(run, tmp_path):
    calls = []

    def strategy():
        calls.append(1)
        start = np.full((2, 2), len(calls), np.float32)  # differs from run to run
        return older.FedAvg(initial_parameters=ndarrays_to_parameters([start, np.zeros(2)]))

    stored = replace(numpy_run(run, strategy), out=tmp_path / "run", resumes=True)
    run_app(stored, no_text)
    with pytest.raises(ReplayError, match=r"replies\.bin"):
        run_app(stored, no_text)


def test_session_refuses_folder_of_another_run(run, tmp_path):
    stored = replace(run, out=tmp_path / "run", resumes=True)
    run_app(stored, no_text)
    with pytest.raises(RefusedError, match="seed=1"):
        run_app(replace(stored, seed=1), no_text)
    with pytest.raises(RefusedError, match="device=meta"):
        run_app(replace(stored, device="meta"), no_text)
    with pytest.raises(RefusedError, match="out="):
        run_app(replace(stored, resumes=False), no_text)


def test_summary_has_the_scores_of_a_strategy(run):
    def score(server_round, arrays):
        return MetricRecord({"accuracy": 0.1 * server_round, "list": [1.0]})

    main = newer_app(lambda grid: newer.FedAvg().start(grid, start_record(), 2, evaluate_fn=score))
    summary = run_app(replace(run, server_app=main), no_text).summary
    assert summary["server.accuracy"] == 0.2
    assert "server.list" not in summary


def test_summary_has_the_scores_of_an_app_with_the_older_flower_interface(run):
    def score(server_round, parameters, config):
        return 10.0 - server_round, {"accuracy": 0.1 * server_round}

    def strategy():
        initial = ndarrays_to_parameters([np.zeros((2, 2), np.float32), np.zeros(2)])
        return older.FedAvg(initial_parameters=initial, evaluate_fn=score)

    summary = run_app(numpy_run(run, strategy), no_text).summary
    assert summary["server.accuracy"] == 0.2
    assert summary["server.loss"] == 8.0


def test_summary_has_scores_that_a_custom_server_loop_logs(run):
    def main(grid):
        list(grid.get_node_ids())
        log(logging.INFO, "\t└──> MetricRecord: %s", MetricRecord({"accuracy": 0.5}))

    summary = run_app(replace(run, server_app=newer_app(main)), no_text).summary
    assert summary["server.accuracy"] == 0.5
    again = newer_app(lambda grid: list(grid.get_node_ids()))
    summary = run_app(replace(run, server_app=again), no_text).summary
    assert not any(name.startswith("server.") for name in summary)


def test_error_of_failing_server_app_mentions_the_file_of_the_error(run):
    app = newer_app(lambda grid: 1 / 0)
    with pytest.raises(RunStoppedError, match=r"ZeroDivisionError.*test_flower_session"):
        run_app(replace(run, server_app=app, folder=run.folder.parent), no_text)


class DyingWorker(AppWorker):
    """A worker that dies whenever client 1 gets a message."""

    def answer(self, requests):
        if any(request.client == 1 for request in requests):
            raise WorkerDiedError("the process ended")
        return super().answer(requests)


class Revived(InProcess):
    """A runtime whose workers can be called again after they died.

    A call is executed when `get` reads its result.
    """

    def call(self, worker, method, *args, returns=1):
        return [lambda: getattr(self.members[worker], method)(*args)]

    def get(self, ref):
        return ref()

    def revive(self, worker):
        pass


@pytest.mark.parametrize("is_older", [False, True])
def test_app_that_ends_its_worker_stops_the_run(run, monkeypatch, is_older):
    @contextlib.contextmanager
    def workers(run, say):
        yield Revived(DyingWorker(run.spec()))

    monkeypatch.setattr(session, "_workers", workers)
    if is_older:
        run = numpy_run(run, first_strategy)
    with pytest.raises(RunStoppedError, match=r"3 workers died.*clients: .*1"):
        run_app(replace(run, fleet=Lognormal()), no_text)


@pytest.mark.parametrize("runtime", ["inprocess", "local"])
def test_app_that_cannot_be_imported_is_refused(run, runtime):
    options = RuntimeOptions(name=runtime, workers=2)
    broken = replace(run, client_app="tiny_flower_app.missing_package:app", runtime=options)
    with pytest.raises(RefusedError, match=r"clientapp=tiny_flower_app.*missing_package.py, line"):
        run_app(broken, no_text)


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        (
            "shape",
            r"client 1 has arrays\['weight'\].*\[3, 3\] and lacks arrays\['weight'\].*\[2, 3\]",
        ),
        ("no_loss", r"client 1 lacks metrics\['loss'\]"),
    ],
)
def test_error_mentions_the_client_whose_reply_lacks_an_array_or_a_metric(run, kind, difference):
    start = ArrayRecord([np.zeros((2, 3), np.float32)])
    arrays = ArrayRecord({"weight": start["0"]})
    strategy = newer.FedAvg(fraction_evaluate=0.0, weighted_by_key="loss")
    app = newer_app(lambda grid: strategy.start(grid, arrays, 1))
    broken = replace(run, client_app=f"tiny_flower_app.broken:{kind}", server_app=app)
    with pytest.raises(RunStoppedError, match=difference):
        run_app(replace(broken, fleet=Lognormal()), no_text)


def newer_app(main):
    app = ServerApp()

    @app.main()
    def _main(grid, context):
        main(grid)

    return app


START = {"weight": np.zeros((1, 3), np.float32), "bias": np.zeros(1, np.float32)}


def start_record():
    from flwr.app import Array

    return ArrayRecord({name: Array(value) for name, value in START.items()})


NEWER = {
    "FedAvg": {},
    "FedAvgM": {},
    "FedAdam": {},
    "FedAdagrad": {},
    "FedYogi": {},
    "FedMedian": {},
    "FedTrimmedAvg": {},
    "FedProx": {"proximal_mu": 0.1},
    "QFedAvg": {"client_learning_rate": 0.1, "train_loss_key": "train_loss"},
    "Krum": {"num_malicious_nodes": 1},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 2},
    "Bulyan": {"num_malicious_nodes": 0},
}


@pytest.mark.parametrize("name", NEWER)
def test_message_based_strategies_reduce_the_loss(run, name):
    strategy = getattr(newer, name)(**NEWER[name])
    results = []

    def main(grid):
        started = strategy.start(grid, start_record(), 2, evaluate_config=ConfigRecord())
        results.append(started)

    run_app(replace(run, server_app=newer_app(main), fleet=Lognormal()), no_text)
    losses = results[0].evaluate_metrics_clientapp
    assert losses[2]["eval_loss"] < 5  # at the start: 5 on average
    assert losses[2]["eval_loss"] != losses[1]["eval_loss"]


@pytest.mark.parametrize(
    "name",
    [
        "DifferentialPrivacyServerSideFixedClipping",
        "DifferentialPrivacyServerSideAdaptiveClipping",
        "DifferentialPrivacyClientSideFixedClipping",
        "DifferentialPrivacyClientSideAdaptiveClipping",
    ],
)
@pytest.mark.parametrize("is_older", [False, True])
def test_strategies_with_differential_privacy_finish_a_run(run, name, is_older):
    clipping = {"clipping_norm": 5.0} if "Fixed" in name else {}
    if is_older:
        older_run = numpy_run(
            run,
            lambda: getattr(older, name)(
                first_strategy(), noise_multiplier=0.1, num_sampled_clients=4, **clipping
            ),
        )
        if "ClientSide" in name:
            from flwr.client import mod

            mods = [mod.fixedclipping_mod if clipping else mod.adaptiveclipping_mod]
            older_run = replace(older_run, client_app=app_with(mods))
        result = run_app(older_run, no_text)
        assert result.summary["answered"] > 5
        return
    import inspect

    wrapper = getattr(newer, name)
    wanted = inspect.signature(wrapper).parameters
    values = {"noise_multiplier": 0.1, "num_sampled_clients": 5, **clipping}
    strategy = wrapper(
        newer.FedAvg(), **{key: value for key, value in values.items() if key in wanted}
    )
    if "ClientSide" in name:
        pytest.skip("the app has no clipping mod; the older one covers it")
    main = newer_app(lambda grid: strategy.start(grid, start_record(), 2))
    result = run_app(replace(run, server_app=main, fleet=Lognormal()), no_text)
    assert result.summary["answered"] == 20


def app_with(mods):
    from flwr.client import ClientApp
    from tiny_flower_app.numpy_client import client_fn

    from raysim.flower.project import inspect_client_app

    return inspect_client_app(ClientApp(client_fn=client_fn, mods=mods), "app")


OLDER = {
    "FedAvg": {},
    "FedAvgM": {"server_momentum": 0.9},
    "FedAdam": {},
    "FedAdagrad": {},
    "FedYogi": {},
    "FedMedian": {},
    "FedTrimmedAvg": {},
    "FedProx": {"proximal_mu": 0.1},
    "Krum": {"num_malicious_clients": 1},
    "FaultTolerantFedAvg": {},
}


@pytest.mark.parametrize("name", OLDER)
def test_strategies_of_older_apps_run(run, name):
    initial = ndarrays_to_parameters([np.zeros((2, 2), np.float32), np.zeros(2)])

    def strategy():
        return getattr(older, name)(initial_parameters=initial, **OLDER[name])

    result = run_app(replace(numpy_run(run, strategy), fleet=Lognormal()), no_text)
    assert result.summary["answered"] == 20
    assert result.summary["failed"] == 0


def test_app_is_bit_identical_on_ray_and_in_one_process(run, tmp_path, ray_session):
    from raysim.runtime import ray as on_ray

    options = RuntimeOptions(name="local", workers=2)
    with on_ray.keep_processes("flower"):
        for each in (run, numpy_run(run, first_strategy)):
            there = run_app(replace(each, runtime=options), no_text)
            assert numbers(there) == numbers(run_app(each, no_text))
