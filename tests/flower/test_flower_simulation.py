import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.common import ndarrays_to_parameters
from flwr.server import Server, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAdam, FedAvg

from raysim.flower import start_simulation
from raysim.primitives.errors import RefusedError
from raysim.simulation.fleet import Lognormal


def start(**settings):
    from tiny_flower_app.numpy_client import old_client_fn

    initial = ndarrays_to_parameters([np.zeros((2, 2), np.float32), np.zeros(2)])
    usual = {
        "client_fn": old_client_fn,
        "num_clients": 6,
        "config": ServerConfig(num_rounds=2),
        "strategy": FedAdam(fraction_fit=0.5, initial_parameters=initial),
        "runtime": "inprocess",
    }
    return start_simulation(**{**usual, **settings})


def test_function_start_simulation_returns_a_history():
    history = start()
    assert [number for number, _ in history.losses_distributed] == [1, 2]
    assert start().losses_distributed == history.losses_distributed
    assert start(seed=1).losses_distributed != history.losses_distributed


def test_function_start_simulation_takes_a_client_fn_with_context():
    from tiny_flower_app.numpy_client import client_fn

    assert start(client_fn=client_fn).losses_distributed == start().losses_distributed


def test_function_start_simulation_accepts_a_server_object():
    strategy = FedAvg()
    server = Server(client_manager=SimpleClientManager(), strategy=strategy)
    history = start(server=server, strategy=None)  # asks a client for the initial parameters
    assert len(history.losses_distributed) == 2
    assert server.parameters.tensors
    assert server.strategy is strategy
    assert not {"fit", "aggregate_fit"} & (vars(server).keys() | vars(strategy).keys())


class CountingStrategy(FedAvg):
    """A strategy that counts its rounds."""

    rounds = 0

    def aggregate_fit(self, server_round, results, failures):
        self.rounds += 1
        self.clients = [client.cid for client, _ in results]
        return super().aggregate_fit(server_round, results, failures)


def test_function_start_simulation_calls_the_passed_strategy_object():
    strategy = CountingStrategy()
    start(strategy=strategy)
    assert strategy.rounds == 2
    assert strategy.clients == sorted(strategy.clients)


def test_function_start_simulation_takes_client_fn_with_optional_arguments():
    from tiny_flower_app.numpy_client import client_fn, old_client_fn

    usual = start().losses_distributed
    older = start(client_fn=lambda cid, dataset="mnist": old_client_fn(cid))
    newer = start(client_fn=lambda context, dataset="mnist": client_fn(context))
    assert older.losses_distributed == newer.losses_distributed == usual
    with pytest.raises(RefusedError, match=r"client_fn.*'dataset'"):
        start(client_fn=lambda cid, dataset: old_client_fn(cid))


class OlderServer(Server):
    """A server whose `fit` returns only a history, as in older versions of Flower.

    `fit` also stores the names of the clients in the attribute `cids`.
    """

    def fit(self, num_rounds, timeout):
        history, _ = super().fit(num_rounds, timeout)
        self.cids = set(self.client_manager().all())
        return history


def test_function_start_simulation_accepts_old_flower_servers_and_numbers_clients_from_0():
    server = OlderServer(client_manager=SimpleClientManager(), strategy=FedAvg())
    history = start(server=server, strategy=None)
    assert server.cids == {"0", "1", "2", "3", "4", "5"}
    usual = Server(client_manager=SimpleClientManager(), strategy=FedAvg())
    assert history.losses_distributed == start(server=usual, strategy=None).losses_distributed


def test_function_start_simulation_continues_an_interrupted_run(tmp_path):
    straight = start(fleet=Lognormal(dropout=0.2))
    out = tmp_path / "run"
    start(fleet=Lognormal(dropout=0.2), out=out)
    file = out / "replies.bin"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    continued = start(fleet=Lognormal(dropout=0.2), out=out, resume=True)
    assert continued.losses_distributed == straight.losses_distributed


@pytest.mark.parametrize("wrong", [{"clients_ids": ["1"]}, {"runtime": "cloud"}])
def test_function_start_simulation_refuses_wrong_arguments(wrong):
    with pytest.raises(RefusedError, match=next(iter(wrong))):
        start(**wrong)
