"""Test DP-FedAvg against its textbook, and its epsilons against published accountants."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tiny_runs import MLP, NORMED_MLP, run, run_spec, tiny_data

from raysim.api.method import Method
from raysim.methods.dp_fedavg import DPFedAvg, epsilon, noise_of_sum
from raysim.methods.fedopt import FedAvgM
from raysim.methods.fedprox import FedProx
from raysim.methods.scaffold import Scaffold
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import declare_run
from textbook.check import Row, check
from textbook.dp_fedavg import dp_fedavg, epsilon_poisson

SPENT = dict.fromkeys(("dp_fedavg.epsilon", "dp_fedavg.epsilon_poisson"), "the accountant's")
SEVEN: dict[str, Any] = {
    "study": {"data": tiny_data(clients=7, samples=120)},
    "schedule": Synchronous(7),
}
ROWS = {
    "as it is": Row(partial(dp_fedavg, m=3, z=1.0, c=0.1), lambda: [DPFedAvg()], skips=SPENT),
    "little noise, of seven": Row(
        partial(dp_fedavg, m=7, z=0.01, c=0.5, gamma=0.3, eta=0.5),
        lambda: [DPFedAvg(0.01, 0.5, 0.3, 0.5)],
        skips=SPENT,
        **SEVEN,
    ),
    "noise of the bits": Row(
        partial(dp_fedavg, m=3, z=0.2, c=0.2, s=0.15),
        lambda: [DPFedAvg(0.2, 0.2, bit_noise=0.15)],
        skips=SPENT,
    ),
    "a bound that stays": Row(
        partial(dp_fedavg, m=3, z=0.1, c=0.3, gamma=None),
        lambda: [DPFedAvg(0.1, 0.3, None)],
        skips=SPENT,
    ),
    "no noise": Row(partial(dp_fedavg, m=3, z=0.0, c=0.3), lambda: [DPFedAvg(0.0, 0.3)]),
}


@pytest.mark.parametrize("name", ROWS)
def test_dp_fedavg_run_equals_its_textbook_computation(name: str) -> None:
    check(ROWS[name])


def test_privacy_loss_epsilon_grows_with_every_round() -> None:
    ended = run(run_spec(DPFedAvg(delta=1e-3)), Synchronous(3))
    for number, row in enumerate(ended.rows, start=1):
        spent = 1.0, ended.coordinator.server.able, 3, number, 1e-3
        assert row["dp_fedavg.epsilon"] == epsilon(*spent)
        assert row["dp_fedavg.epsilon_poisson"] == epsilon(*spent, poisson=True)
    assert ended.rows[0]["dp_fedavg.epsilon"] < ended.rows[-1]["dp_fedavg.epsilon"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("clients", "cohort", "rounds"), [(60000, 256, 14062), (100, 10, 50), (10, 10, 3)]
)
def test_dp_fedavg_epsilon_equals_the_formulas_of_the_papers(
    clients: int, cohort: int, rounds: int
) -> None:
    by_hand = epsilon_poisson(2.2, cohort / clients, rounds, 1e-5)
    assert epsilon(2.2, clients, cohort, rounds, 1e-5, poisson=True) == pytest.approx(
        by_hand, rel=1e-6
    )
    # Everybody takes part: the Gaussian mechanism, of twice the sensitivity where neighbours
    # replace a client.
    everybody = epsilon_poisson(1.1, 1.0, rounds, 1e-5)
    assert epsilon(2.2, cohort, cohort, rounds, 1e-5) == pytest.approx(everybody, rel=1e-6)
    assert by_hand < epsilon(2.2, clients, cohort, rounds, 1e-5) <= everybody * (1 + 1e-9)


def test_dp_fedavg_adds_more_noise_if_the_unclipped_count_is_private_too() -> None:
    assert noise_of_sum(1.0, 1.0) == pytest.approx((4 / 3) ** 0.5) and noise_of_sum(0.0, 1.0) == 0.0


class Sending(Method):
    """A method that uploads a number."""

    name = "sending"

    def setup(self, run: Any) -> None:
        run.upload("number", 1)


@pytest.mark.parametrize(
    ("others", "model", "stale", "named"),
    [
        ((), NORMED_MLP, False, "model: "),
        ((Scaffold(),), MLP, False, "'scaffold' .* 'dp_fedavg'"),
        ((Sending(),), MLP, False, "'sending' .* 'dp_fedavg'"),
        ((), MLP, True, "schedule"),
    ],
)
def test_dp_fedavg_refuses_runs_without_a_privacy_guarantee(
    others: Any, model: Any, stale: bool, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        declare_run(run_spec(DPFedAvg(0.0), *others, model=model, stale=stale))


def test_dp_fedavg_combines_with_fedprox_and_server_momentum() -> None:
    declarations = declare_run(run_spec(DPFedAvg(), FedProx(), FedAvgM()))
    assert not [*declarations.warnings]
