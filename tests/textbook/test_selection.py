"""Test Oort and power-of-choice in whole runs.

In each round, a run must choose the clients that a second implementation of the rule chooses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from tiny_runs import FinishedRun, coordinate, run_spec, run_to_end, tiny_data

from raysim.api.messages import Update
from raysim.primitives.streams import stream
from raysim.simulation.fleet import Lognormal
from raysim.simulation.oort import Oort
from raysim.simulation.schedule import Synchronous
from raysim.simulation.selection_rules import PowerOfChoice
from raysim.training.worker import Worker
from textbook.plain import logits
from textbook.selection import OortByHand, power_of_choice

SEED, COHORT = 5, 4


def logged_run(
    rule: Any, rounds: int
) -> tuple[FinishedRun, list[dict[int, float]], list[dict[int, float]]]:
    """Run `rounds` rounds with the selection `rule`; return the run and two lists of losses.

    Each list has for each aggregation a dictionary from clients to losses. The first list has the
    losses that the aggregation's clients reported. The second list has the losses of all clients at
    the version before the aggregation, which this function computes.
    """
    spec = run_spec(data=tiny_data(clients=14, samples=300), seed=SEED, selection=rule)
    coordinator = coordinate(spec, Synchronous(COHORT), Lognormal(), rounds=rounds)
    losses: list[dict[int, float]] = []
    report = coordinator.planner.report

    def listen(updates: list[Update]) -> None:
        losses.append({update.client: update.loss for update in updates})
        report(updates)

    by_hand: list[dict[int, float]] = []
    worker = Worker(spec)

    def plan() -> Any:
        named = coordinator.initial.named(coordinator.server.vector, coordinator.server.counters)
        params = {name: tensor.clone() for name, tensor in named.items()}
        of_version = {}
        for client in range(len(coordinator.counts)):
            inputs, labels = worker.trainer.gather(spec.data.partition.train.rows(client))
            of_version[client] = float(F.cross_entropy(logits(params, inputs, False), labels))
        by_hand.append(of_version)
        return next_aggregation()

    next_aggregation = coordinator.planner.next_aggregation
    coordinator.planner.report = listen  # type: ignore[method-assign, assignment]
    coordinator.planner.next_aggregation = plan  # type: ignore[method-assign]
    return run_to_end(coordinator), losses, by_hand


def samples_of(result: FinishedRun) -> dict[int, int]:
    counts = result.coordinator.counts
    return {client: int(counts[client]) for client in np.flatnonzero(counts).tolist()}


OORT = {
    "defaults": Oort(),
    "pacer": Oort(pacer_step=2, pacer_delta=35.0, exploration_decay=0.7),
    "no preference": Oort(preferred=100.0, exploration_decay=0.5, cutoff=0.5, clip=0.6),
    "exploit": Oort(exploration=0.3, exploration_min=0.0, penalty=0.5),
}


@pytest.mark.parametrize("name", OORT)
def test_oort_choice_equals_a_computation_by_hand(name: str) -> None:
    rule = OORT[name]
    result, reports, _ = logged_run(rule, rounds=14)
    samples = samples_of(result)
    by_hand = OortByHand(
        rule.exploration,
        rule.exploration_decay,
        rule.exploration_min,
        rule.cutoff,
        rule.clip,
        rule.preferred,
        rule.pacer_step,
        rule.pacer_delta,
        rule.penalty,
    )
    planner = result.coordinator.planner
    clients = len(result.coordinator.counts)
    work = np.array([planner._load(client, 0, 0, 0).work for client in range(clients)])
    _, down, up = planner._load(0, 0, 0, 0)
    expected = dict(enumerate(planner.devices.seconds(work, down, up).tolist()))
    losses: dict[int, float] = {}
    seconds: dict[int, float] = {}
    exploits = False
    for number, aggregation in enumerate(result.aggregations):
        generator = stream(SEED, "selection", number)
        chosen = by_hand.choose(
            generator, sorted(samples), samples, losses, seconds, expected, COHORT
        )
        assert [job.client for job in aggregation.dispatched] == sorted(chosen), f"round {number}"
        exploits |= bool(by_hand.exploited)
        losses |= reports[number]
        seconds |= {job.client: job.finish - job.start for job in aggregation.aggregated}
    assert exploits and by_hand.number == 14
    if name == "pacer":
        assert by_hand.preferred > rule.preferred, "the pacer acts"


@pytest.mark.parametrize("loss", ["last", "measured"])
def test_power_of_choice_equals_a_computation_by_hand(loss: str) -> None:
    result, reports, by_hand = logged_run(PowerOfChoice(7, loss=loss), rounds=8)
    samples = samples_of(result)
    known: dict[int, float] = {}
    for number, aggregation in enumerate(result.aggregations):
        generator = stream(SEED, "selection", number)
        if loss == "measured":
            known = by_hand[number]
        chosen = power_of_choice(generator, samples, known, 7, COHORT)
        assert [job.client for job in aggregation.dispatched] == sorted(chosen), f"round {number}"
        if loss == "last":
            known |= reports[number]
