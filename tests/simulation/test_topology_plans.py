"""Test the planner with all topologies and selections, and with random schedules and fleets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, reject, settings, strategies as st
from test_planner import CLIENTS, COUNTS, FLEETS, SCHEDULES, is_available, load
from test_selection import RULES, steps

from raysim.api.selection import Random, Selection
from raysim.api.topology import Federation, Network, Star, Topology
from raysim.simulation.fleet import Fleet
from raysim.simulation.planner import PlannedAggregation, Planner
from raysim.simulation.schedule import Schedule
from raysim.simulation.topologies import Clustered, Gossip, Hierarchical

SLOW = {"bandwidth_up": 100.0, "bandwidth_down": 100.0}  # a meeting takes virtual time
TOPOLOGIES: dict[str, Topology] = {
    "star": Star(),
    "two edges": Hierarchical(2, every=2, **SLOW),
    "three edges": Hierarchical(3, every=1, bandwidth_sigma=1.0),
    "edges by seconds": Hierarchical(2, seconds=0.5, **SLOW),
    "ring": Gossip("ring", every=2),
    "pairs": Gossip("expander", exchange="pairwise", mix="before"),
    "by loss": Clustered("loss", 3),
    "by updates": Clustered("updates", 3),
}
NAMES = st.sampled_from(sorted(TOPOLOGIES))
SELECTIONS: dict[str, Selection] = {"random": Random(), **RULES}


def make_plan(
    topology: str, rule: str, schedule: Schedule, fleet: Fleet, seed: int, counts: Sequence[int]
) -> tuple[Planner, Network]:
    """Return a planner and its network; let Hypothesis skip schedules that cannot be planned.

    Such a schedule needs more clients than a replica has.
    topology, rule: keys of `TOPOLOGIES` and `SELECTIONS`.
    """
    facts = Federation(seed, np.asarray(counts), "samples", 10)
    network = TOPOLOGIES[topology].connect(facts)
    devices = fleet.devices(seed, len(counts), lambda: 1.0)
    arguments: dict[str, Any] = {"selection": SELECTIONS[rule], "network": network}
    try:
        return Planner(schedule, devices, seed, np.asarray(counts), load, **arguments), network
    except ValueError as error:
        assert "schedule" in str(error)
        reject()


@settings(deadline=None, max_examples=120)
@given(NAMES, st.sampled_from(sorted(SELECTIONS)), SCHEDULES, FLEETS, st.integers(0, 99), COUNTS)
def test_jobs_of_every_topology_end_once_and_time_never_decreases(
    topology: str, rule: str, schedule: Schedule, fleet: Fleet, seed: int, counts: list[int]
) -> None:
    plan, network = make_plan(topology, rule, schedule, fleet, seed, counts)
    found = steps(plan, 12)
    jobs = [job for step in found for job in step.dispatched]
    assert [job.number for job in jobs] == list(range(len(jobs)))
    devices = fleet.devices(seed, len(counts), lambda: 1.0)
    assert all(is_available(devices, job.client, job.start) for job in jobs)
    ends: Counter[int] = Counter()
    for version, step in enumerate(found):
        assert step.aggregated and step.version == version
        ends.update([job.number for job in (*step.aggregated, *step.lost, *step.discarded)])
        assert all(job.arrives and job.finish <= step.now for job in step.aggregated)
        assert min(step.staleness) >= 0
        if schedule.max_staleness is not None:
            assert max(step.staleness) <= schedule.max_staleness
    assert set(ends.values()) <= {1}, "no job ends twice"
    times = [step.now for step in found]
    assert times == sorted(times)
    for client in range(len(counts)):
        own = [job for job in jobs if job.client == client]
        assert all(before.finish <= after.start for before, after in pairwise(own)), "never twice"
    if rule == "random":
        assert found[-1].down == sum(job.down for job in jobs)
    if network.own_schedules:
        check_replica_schedules(found, network)
    elif network.exchanges:
        every = [(step.version + 1) % network.every == 0 for step in found]
        assert [step.meets for step in found] == every


def check_replica_schedules(found: Sequence[PlannedAggregation], network: Network) -> None:
    """Check aggregations of a topology in which each replica has its own schedule.

    Each replica must have its own clients, versions and traffic. Replicas that exchange models must
    wait for each other.
    found: the planned aggregations, in order.
    """
    made, since_meeting = [0] * network.replicas, [0] * network.replicas
    down = [0] * network.replicas
    meetings = 0
    for step in found:
        for job in step.dispatched:
            down[int(network.replica_of[job.client])] += job.down
        assert {int(network.replica_of[job.client]) for job in step.aggregated} == {step.site}
        assert step.site_version == made[step.site]
        made[step.site] += 1
        since_meeting[step.site] += 1
        if not network.seconds:
            assert max(since_meeting) <= network.every, "an edge waits for the others"
            assert step.meets == (min(since_meeting) == network.every)
        if step.meets:
            meetings += 1
            since_meeting = [0] * network.replicas
        assert step.between == meetings * network.link_floats
    for before, after in pairwise(found):
        if before.meets:
            assert all(job.start >= before.now for job in after.dispatched), "all edges meet first"


@settings(deadline=None, max_examples=60)
@given(NAMES, st.sampled_from(sorted(SELECTIONS)), SCHEDULES, FLEETS, st.integers(0, 99), COUNTS)
def test_restored_planner_continues_unchanged_with_every_topology(
    topology: str, rule: str, schedule: Schedule, fleet: Fleet, seed: int, counts: list[int]
) -> None:
    words = topology, rule, schedule, fleet, seed, counts
    whole, first, again = (make_plan(*words)[0] for _ in range(3))
    expected = steps(whole, 9)
    steps(first, 4)
    stored = json.loads(json.dumps(first.state()))
    arrays = {name: np.array(array) for name, array in first.selection_arrays().items()}
    again.restore(stored, first.participations, first.accepted, arrays)
    assert steps(again, 5) == expected[4:]


def test_every_topology_can_be_planned_with_two_clients_a_round() -> None:
    """A schedule that needs only two clients can be planned with every topology.

    So the random tests, which skip schedules that cannot be planned, do not skip all examples of a
    topology.
    """
    from raysim.simulation.fleet import Ideal
    from raysim.simulation.schedule import Synchronous

    for topology in TOPOLOGIES:
        plan, _ = make_plan(topology, "random", Synchronous(2), Ideal(), 0, [5] * CLIENTS)
        assert steps(plan, 3)
