"""Test forecasts of runs: staleness, virtual time and lost jobs before anything is trained."""

from __future__ import annotations

import pytest
from tiny_runs import BUFFER, TimedFleet, equal_clients, run_spec

from raysim.simulation.events import RunStoppedError
from raysim.simulation.fleet import Fleet, Ideal
from raysim.simulation.forecast import Forecast, forecast
from raysim.simulation.load import make_planner
from raysim.simulation.planner import PlannedAggregation, Planner
from raysim.simulation.schedule import Immediate, Oversample, Schedule, Synchronous
from raysim.simulation.selection_rules import PowerOfChoice
from raysim.training.run_spec import declare_run


def planner(schedule: Schedule, fleet: Fleet, clients: int) -> Planner:
    spec = run_spec(data=equal_clients(clients))
    return make_planner(spec, declare_run(spec), schedule, fleet)


@pytest.mark.parametrize("rounds", [1, 2, 100])
def test_forecast_of_a_synchronous_round_waits_for_slowest_client(rounds: int) -> None:
    result = forecast(planner(Synchronous(2), TimedFleet((1.0, 3.0)), 2), rounds)
    assert result == Forecast(
        in_flight=pytest.approx(4 / 3), seconds=3.0, staleness=0.0, lost=0.0, discarded=0.0
    )


def test_forecast_counts_discarded_work() -> None:
    result = forecast(planner(Oversample(1, 2), TimedFleet((1.0, 4.0)), 2), 1)
    assert result == Forecast(in_flight=2.0, seconds=1.0, staleness=0.0, lost=0.0, discarded=0.5)


def test_predicted_staleness_is_right_if_updates_arrive_at_the_same_time() -> None:
    result = forecast(planner(Immediate(3), TimedFleet((1.0,) * 3), 3), 10)
    # Of ten steps the last five take from 2 s to 4 s: staleness 2, 0, 1, 2, 0.
    assert result == Forecast(in_flight=3.0, seconds=0.4, staleness=1.0, lost=0.0, discarded=0.0)


def test_two_aggregations_in_one_second_are_forecast_as_half_a_second_each() -> None:
    # All three updates arrive after 1 s, each of them is an aggregation.
    result = forecast(planner(Immediate(3), TimedFleet((1.0,) * 3), 3), 2)
    assert result.seconds == 0.5 and result.in_flight == 3.0


def test_forecast_counts_lost_jobs() -> None:
    result = forecast(planner(BUFFER, Ideal(dropout=0.9), 6), 100)
    assert 0.5 < result.lost < 1


@pytest.mark.parametrize(
    ("schedule", "workers", "least", "most"),
    [
        (Synchronous(3), 2, 0.75, 0.75),  # equal jobs: two at once, and then one
        (Synchronous(3), 3, 1.0, 1.0),
        (Immediate(1), 2, 0.5, 0.5),
        (Immediate(16), 2, 0.95, 1.0),
        (Oversample(2, 2), 2, 1.0, 1.0),  # what is thrown away is not trained
    ],
)
def test_predicted_fraction_of_busy_workers_depends_on_the_schedule(
    schedule: Schedule, workers: int, least: float, most: float
) -> None:
    result = forecast(planner(schedule, TimedFleet((1.0,) * 16), 16), 200, workers)
    assert least <= result.workers_busy <= most


def test_forecast_predicts_an_idle_worker_if_selection_needs_reports() -> None:
    """The forecast predicts that one of two workers is idle if the next jobs are not known early.

    Each aggregation uses one update. The selection chooses the next client only after it has got
    the loss of this update.
    """
    spec = run_spec(data=equal_clients(16), selection=PowerOfChoice(16, loss="last"))
    fleet = TimedFleet((1.0,) * 16)
    made = make_planner(spec, declare_run(spec), Immediate(16), fleet)
    result = forecast(made, 200, workers=2)
    assert result.workers_busy == 0.5
    assert result.workers_busy_ahead > 0.95


def test_forecast_accepts_jobs_that_last_0_seconds() -> None:
    assert forecast(planner(BUFFER, TimedFleet((0.0,) * 6), 6), 3).in_flight == 0


def test_forecast_uses_all_planned_rounds_if_the_planner_stops_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = planner(Synchronous(2), TimedFleet((1.0, 3.0)), 2)
    real, count = made.next_aggregation, 0

    def next_aggregation() -> PlannedAggregation:
        nonlocal count
        count += 1
        if count > 1:
            raise RunStoppedError("nobody is left")
        return real()

    monkeypatch.setattr(made, "next_aggregation", next_aggregation)
    assert forecast(made, 9).seconds == 3.0
    with pytest.raises(RunStoppedError, match="nobody is left"):
        forecast(made, 9)
