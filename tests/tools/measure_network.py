"""Measure what a run sends over a network, and how long a round takes on several links.

    uv run python tests/tools/measure_network.py --turns 3 --out network.json

This command uses three machines. Each turn makes a synchronous and a buffered run on undisturbed
links, and then on each kind of slow or lossy links. Runs with the same schedule must have the same
bits. The table has these columns:
- seconds per round, and their ratio to the undisturbed run in the same turn
- megabytes per round that the coordinator's node receives and sends, counted on the link and, in
  brackets, in raysim's history
- megabytes per round that TCP sent again, for all nodes together

    uv run python tests/tools/measure_network.py --nodes 2 4 8 --cohorts 3 10 100

This command measures how many vectors of the model's size the coordinator's node receives in a
round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from network_cluster import Link, NetworkCluster, Traffic, find_obstacle

MACHINES = 3
FIRST_ROUND = 5  # of those that are measured; before it, workers start and receive the data
# Round-trip times and losses between two machines: a packet passes two links.
KINDS: Mapping[str, Mapping[int, Link]] = {
    "20 ms": dict.fromkeys(range(MACHINES), Link(delay=5)),
    "100 Mbit/s": dict.fromkeys(range(MACHINES), Link(rate=100)),
    "1 % loss": dict.fromkeys(range(MACHINES), Link(loss=0.005)),
    "one node at 20 Mbit/s, 100 ms": {2: Link(rate=20, delay=50)},
}
UNDISTURBED = "undisturbed"
SCHEDULES = {
    "synchronous": ["schedule=synchronous", "schedule.cohort=12"],
    "buffered": ["schedule=buffered", "schedule.concurrency=12", "schedule.size=6"],
}
STUDY = [
    "runtime=cluster",
    "runtime.strategy=SPREAD",
    "data=synthetic",
    "data.samples=1200",
    "partition=iid",
    "model=mlp",
    "tracking=none",
    "checkpoint.every=0",
    "evaluate.every=1000000",
]
# Runs on the head, and prints each row of the history when it exists.
PROGRAM = """\
import json, sys, raysim
def tell(row):
    print("ROW", json.dumps(row), flush=True)
result = raysim.run(sys.argv[1:], quiet=True, on_round=tell)
print("END", result.summary["model_sha256"], flush=True)
"""


@dataclass(frozen=True)
class Measurement:
    """The measured time and traffic of a run.

    turn: the index of the repetition, from 0.
    schedule: a key of `SCHEDULES`; in a result of `measure_sums`, the number of clients in a round.
    kind: a key of `KINDS`, or `UNDISTURBED`; in a result of `measure_sums`, the number of nodes.
    seconds: the median of the seconds per round.
    links: the mean bytes per round that each machine received and sent, counted on its link.
    columns: the mean bytes per round that each node of Ray received and sent, from raysim's
    history. Node 0 is machine 0, but other nodes and machines may have different numbers.
    resent: the mean bytes per round that TCP sent again, for each machine.
    """

    turn: int
    schedule: str
    kind: str
    seconds: float
    links: Sequence[tuple[float, float]]
    columns: Sequence[tuple[float, float]]
    resent: Sequence[float]
    model_sha256: str


def measure(
    cluster: NetworkCluster, turn: int, schedule: str, kind: str, overrides: Sequence[str]
) -> Measurement:
    """Make a run and measure its rounds, from round `FIRST_ROUND` to the last round but one.

    The first round is round 0.
    turn, schedule, kind: labels of the result; they do not change the run.
    overrides: the run's overrides, with those of the schedule.
    """
    words = ["python", "-c", PROGRAM, *STUDY, *overrides]
    words.append(f"out={cluster.shared}/{schedule}-{time.monotonic_ns()}")
    process = cluster.machines[0].popen(words, stdout=-1)
    assert process.stdout is not None
    rows: list[dict[str, Any]] = []
    traffic: list[list[Traffic]] = []
    sha256 = ""
    for line in process.stdout:
        if line.startswith("ROW "):
            rows.append(json.loads(line.removeprefix("ROW ")))
            traffic.append([machine.traffic for machine in cluster.machines])
        elif line.startswith("END "):
            sha256 = line.split()[1]
    if process.wait() or len(rows) <= FIRST_ROUND + 1:
        raise RuntimeError(f"the {schedule} run on {kind} links failed")
    first, last = FIRST_ROUND - 1, len(rows) - 2
    count = last - first
    walls = [float(row["wall_seconds"]) for row in rows[first : last + 1]]
    steps = [after - before for before, after in pairwise(walls)]
    links = []
    resent = []
    for before, after in zip(traffic[first], traffic[last], strict=True):
        received = (after.received - before.received) / count
        links.append((received, (after.sent - before.sent) / count))
        resent.append((after.resent - before.resent) / count)
    nodes = range(len(cluster.machines))
    columns = [_columns(rows[first + 1 : last + 1], node) for node in nodes]
    seconds = statistics.median(steps)
    return Measurement(turn, schedule, kind, seconds, links, columns, resent, sha256)


def _columns(rows: Sequence[Mapping[str, Any]], node: int) -> tuple[float, float]:
    """Return the mean bytes per round that a node received and sent, by the history.

    The result is (0, 0) if the history has no columns for the node.
    """
    received = statistics.fmean(row.get(f"node_{node}_in_bytes", 0) for row in rows)
    sent = statistics.fmean(row.get(f"node_{node}_out_bytes", 0) for row in rows)
    return received, sent


def measure_all(turns: int, overrides: list[str], kinds: Sequence[str]) -> Iterator[Measurement]:
    """Yield a measurement for each repetition, each disturbance of the links and each schedule.

    turns: the number of repetitions. Each repetition first measures undisturbed links, then each
    disturbance.
    overrides: overrides of all runs.
    kinds: the disturbances, keys of `KINDS`.
    """
    with NetworkCluster(MACHINES) as cluster:
        cluster.start_ray([1] * MACHINES)
        for turn in range(turns):
            for kind in (UNDISTURBED, *kinds):
                for number, link in KINDS.get(kind, {}).items():
                    cluster.machines[number].set_link(link)
                for schedule in SCHEDULES:
                    words = [*SCHEDULES[schedule], *overrides]
                    yield measure(cluster, turn, schedule, kind, words)
                for machine in cluster.machines:
                    machine.set_link(Link())


def table(measurements: Sequence[Measurement]) -> str:
    """Return the table of the measurements in Markdown."""
    lines = [
        "| schedule | links | seconds per round | ratio | coordinator's node receives | it sends "
        "| sent again by all nodes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for schedule in SCHEDULES:
        chosen = [entry for entry in measurements if entry.schedule == schedule]
        for kind in dict.fromkeys(entry.kind for entry in chosen):
            lines.append(_line(schedule, kind, chosen))
    return "\n".join(lines)


def _line(schedule: str, kind: str, chosen: Sequence[Measurement]) -> str:
    entries = [entry for entry in chosen if entry.kind == kind]
    seconds = statistics.median(entry.seconds for entry in entries)
    undisturbed = {entry.turn: entry.seconds for entry in chosen if entry.kind == UNDISTURBED}
    ratio = statistics.median(entry.seconds / undisturbed[entry.turn] for entry in entries)
    cells = []
    for direction in range(2):
        link = statistics.median(entry.links[0][direction] for entry in entries)
        column = statistics.median(entry.columns[0][direction] for entry in entries)
        cells.append(f"{link / 1e6:.2f} MB ({column / 1e6:.2f})")
    cells.append(f"{statistics.median(sum(entry.resent) for entry in entries) / 1e6:.2f} MB")
    return f"| {schedule} | {kind} | {seconds:.2f} | {ratio:.1f} | {' | '.join(cells)} |"


def measure_sums(nodes: int, cohorts: Sequence[int], overrides: list[str]) -> Iterator[Measurement]:
    """Measure a run of synchronous rounds for each cohort size, on a cluster of some nodes.

    nodes: the number of nodes.
    cohorts: the numbers of clients in a round.
    overrides: overrides of all runs.
    """
    with NetworkCluster(nodes) as cluster:
        cluster.start_ray([1] * nodes)
        for cohort in cohorts:
            words = ["schedule=synchronous", f"schedule.cohort={cohort}", *overrides]
            words.append(f"partition.clients={max(cohorts)}")
            yield measure(cluster, 0, str(cohort), str(nodes), words)


def model_bytes(width: int) -> int:
    """Return the bytes of the model: two hidden layers of a width, 64 inputs and 10 classes."""
    weights = 64 * width + width * width + 10 * width
    return 4 * (weights + 2 * width + 10)


def table_of_sums(measurements: Sequence[Measurement], vector_bytes: float) -> str:
    """Return a Markdown table of how many model-sized vectors the coordinator's node receives.

    Rows are numbers of clients, and columns numbers of nodes. A cell has the number per round as
    counted on the link, and as in raysim's history (in brackets).
    measurements: the measurements that `measure_sums` yields.
    vector_bytes: the bytes of a vector of the model's size.
    """
    nodes = list(dict.fromkeys(entry.kind for entry in measurements))
    titles = [f"{count} node{'s' * (count != '1')}" for count in nodes]
    lines = [f"| clients per round | {' | '.join(titles)} |", "| --- " * (len(nodes) + 1) + "|"]
    for cohort in dict.fromkeys(entry.schedule for entry in measurements):
        cells = []
        for entry in measurements:
            if entry.schedule == cohort:
                received, column = entry.links[0][0], entry.columns[0][0]
                cells.append(f"{received / vector_bytes:.2f} ({column / vector_bytes:.2f})")
        lines.append(f"| {cohort} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure runs on a cluster whose nodes have separate networks; print a Markdown table.

    The table has a round's seconds and traffic on undisturbed and on disturbed links. With --nodes,
    it has the number of vectors that the coordinator's node receives.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, help="pairs of runs for each case (3)")
    parser.add_argument("--rounds", type=int, default=40, help="of each run (40)")
    parser.add_argument("--width", type=int, default=1000, help="of the two hidden layers (1000)")
    parser.add_argument(
        "--links", nargs="*", default=[*KINDS], choices=[*KINDS], help="the kinds of links (all)"
    )
    parser.add_argument(
        "--nodes", nargs="*", type=int, default=[], help="measure sums on 2 or more"
    )
    parser.add_argument("--cohorts", nargs="*", type=int, default=[3, 10, 100])
    parser.add_argument("--out", type=Path, help="file for all numbers")
    arguments = parser.parse_args()
    obstacle = find_obstacle()
    if obstacle:
        sys.exit(f"measure_network: {obstacle}")
    overrides = [
        f"rounds={arguments.rounds}",
        f"model.widths=[{arguments.width},{arguments.width}]",
    ]
    measurements: list[Measurement] = []
    if arguments.nodes:
        for nodes in arguments.nodes:
            for entry in measure_sums(nodes, arguments.cohorts, overrides):
                measurements.append(entry)
                print(f"{entry.kind} nodes, {entry.schedule} clients: {entry.links}", flush=True)
        print(table_of_sums(measurements, model_bytes(arguments.width)))
        return
    for entry in measure_all(arguments.turns, overrides, arguments.links):
        measurements.append(entry)
        print(f"{entry.schedule}, {entry.kind}: {entry.seconds:.3f} s per round", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps([vars(other) for other in measurements], indent=1))
    print(table(measurements))
    for schedule in SCHEDULES:
        sums = {entry.model_sha256 for entry in measurements if entry.schedule == schedule}
        print(f"{schedule}: {'the same bits in all runs' if len(sums) == 1 else sums}")


if __name__ == "__main__":
    main()
