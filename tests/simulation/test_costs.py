"""Test energy, money and CO2 of jobs against arithmetic by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from tiny_runs import run, run_spec

from raysim.api.messages import Job
from raysim.conformance import agreement
from raysim.simulation.costs import COLUMNS, Cost, Costs, FleetCosts
from raysim.simulation.device_classes import DeviceClasses
from raysim.simulation.fleet import Fate, Fixed, Ideal, Lognormal, Speeds
from raysim.simulation.planner import Load, Planner
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.simulation.selection_rules import PowerOfChoice

COST = Cost(computing_w=5, receiving_w=2, sending_w=3, idle_w=0.5, gb_price=4, gb_co2=50)
FLEET = Lognormal(cost=COST, kwh_price=0.2, kwh_co2=400)


def costs(clients: int = 2, kinds: tuple[int, ...] = (0, 0)) -> Costs:
    """Return a new `Costs` object for the jobs of one or two clients.

    The clients train 10 and 20 samples a second. Both receive 4 and send 8 bytes a second.
    kinds: the kind of each client's costs. Kind 0 has the costs `COST`. Kind 1 has no
    costs except for 1 watt during training.
    """
    speeds = np.array([10.0, 20.0]), np.array([4.0, 4.0]), np.array([8.0, 8.0])
    prices = FleetCosts([COST, Cost(computing_w=1)], np.array(kinds, np.int16), 0.2, 400.0)
    return Costs(prices, Fixed(Speeds(*speeds), Fate()), np.arange(clients))


def test_cost_of_a_job_is_the_sum_of_its_phases() -> None:
    # Client 0: 6 floats down in 6 s, 30 samples in 3 s, 4 floats up in 2 s.
    job = Job(0, 0, 0, 0, start=1.0, finish=12.0, work=30.0, down=6, up=4)
    joules, gigabytes = 6 * 2 + 3 * 5 + 2 * 3, 40 / 1e9
    energy, money, co2 = costs().of(job)
    assert energy == pytest.approx(joules / 3600)
    assert money == pytest.approx(joules / 3.6e6 * 0.2 + gigabytes * 4)
    assert co2 == pytest.approx(joules / 3.6e6 * 400 + gigabytes * 50)


@pytest.mark.parametrize(
    ("finish", "joules"), [(4.0, 4 * 2), (8.0, 6 * 2 + 2 * 5), (10.0, 6 * 2 + 3 * 5 + 3)]
)
def test_lost_job_costs_nothing_after_it_is_lost(finish: float, joules: float) -> None:
    job = Job(0, 0, 0, 0, finish=finish, arrives=False, work=30.0, down=6, up=4)
    energy, money, _ = costs().of(job)
    assert energy == pytest.approx(joules / 3600)
    assert money == pytest.approx(joules / 3.6e6 * 0.2 + 24 / 1e9 * 4), "it sends nothing"


def test_cost_of_a_job_depends_on_the_clients_device() -> None:
    job = Job(0, 1, 0, 0, finish=6.0, work=40.0, down=6, up=4)
    assert costs(kinds=(0, 1)).of(job).energy_wh == pytest.approx(2 * 1 / 3600)


def test_idle_energy_counts_idle_seconds_of_all_clients() -> None:
    """Check the idle energy of two clients after ten seconds: 0.5 watts times the idle seconds.

    Both clients are idle in the first second and in the last five seconds. In the four seconds
    between, only one client is idle.
    """
    added, job = costs(), Job(0, 0, 0, 0, start=1.0, finish=5.0, work=1.0)
    added.start(job, 1.0)
    added.end(job, 5.0)
    idle = 0.5 * (2 * 1 + 4 + 2 * 5) / 3600
    assert added.totals(10.0)["idle_wh"] == pytest.approx(idle)


def test_history_has_the_cost_of_all_jobs() -> None:
    result = run(run_spec(), Synchronous(4), replace(FLEET, dropout=0.3), rounds=4)
    last = result.rows[-1]
    for name in ("energy_wh", "money", "co2_g"):
        assert last[name] == pytest.approx(sum(getattr(job, name) for job in result.jobs))
    assert [row["energy_wh"] for row in result.rows] == sorted(
        row["energy_wh"] for row in result.rows
    )


def test_fleet_without_costs_has_no_cost_columns() -> None:
    result = run(run_spec(), Synchronous(4), Lognormal())
    assert not {*COLUMNS} & {*result.rows[-1]}
    assert all(job.energy_wh == job.money == job.co2_g == 0 for job in result.jobs)


def test_run_has_the_same_bits_whether_or_not_its_costs_are_recorded() -> None:
    with_costs, without = (run(run_spec(), Buffered(4, 2), fleet) for fleet in (FLEET, Lognormal()))
    assert with_costs.bits == without.bits


def test_costs_of_a_run_are_the_same_after_resuming() -> None:
    rule = PowerOfChoice(5)
    agreement.check_resumed(lambda: run_spec(selection=rule), Buffered(4, 2), FLEET)


def test_extra_pass_over_the_data_costs_energy() -> None:
    def load(client: int, version: int, earlier: int, accepted: int) -> Load:
        return Load(30.0, 6, 4)

    added = costs()
    speeds = np.array([10.0, 20.0]), np.array([4.0, 4.0]), np.array([8.0, 8.0])
    devices = Fixed(Speeds(*speeds), Fate())
    plan = Planner(
        Synchronous(1),
        devices,
        0,
        np.array([30, 30]),
        load,
        selection=PowerOfChoice(2),
        costs=added,
    )
    aggregation = plan.next_aggregation()
    chosen = aggregation.dispatched[0].client
    # Each receives 6 floats, computes a third of its 30 samples, and sends one float.
    passes = sum(6 * 2 + 10 / speed * 5 + 0.5 * 3 for speed in (10, 20))
    training = 30 / (10, 20)[chosen] * 5 + 2 * 3
    assert aggregation.costs["energy_wh"] == pytest.approx((passes + training) / 3600)
    assert aggregation.down == 12 and aggregation.up == 2 + 4


def test_costs_of_a_fleet_follow_the_clients_device_classes() -> None:
    result = run(run_spec(), Synchronous(4), DeviceClasses())
    assert all(result.rows[-1][name] > 0 for name in COLUMNS)
    fleet_costs = DeviceClasses().costs(0, 50)
    assert fleet_costs is not None
    kinds = DeviceClasses().labels(0, 50).kinds
    assert np.array_equal(fleet_costs.kinds, kinds)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Ideal(cost=Cost(computing_w=-1)), "fleet.cost.computing_w"),
        (lambda: Ideal(kwh_price=-1), "fleet.kwh_price"),
        (lambda: Ideal(kwh_co2=float("nan")), "fleet.kwh_co2"),
        (lambda: DeviceClasses(cost=Cost(idle_w=1)), "fleet.cost"),
    ],
)
def test_error_of_an_invalid_cost_setting_contains_its_key(make: object, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        make()  # type: ignore[operator]


def test_costs_saved_as_json_and_restored_have_the_same_totals() -> None:
    added, other = costs(), costs()
    added.start(Job(0, 0, 0, 0), 1.0)
    other.restore(json.loads(json.dumps(added.state())))
    assert other.totals(3.0) == added.totals(3.0)
