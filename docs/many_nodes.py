"""Compute the cost of a round on many nodes.

`uv run python docs/many_nodes.py` writes the tables of the page docs/many_nodes.md.

Every stage is a sum of bytes over rates and of counts times constants. Most constants are measured,
and some are assumed. `jobs.benchmarks.cluster` measures a round on your own cluster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raysim.api.messages import Job
from raysim.results.tables import to_markdown
from raysim.simulation.assignment import assign_groups
from raysim.vectors.tree_sum import covered_ranges

PAGE = Path(__file__).parent / "many_nodes.md"

# Measured on two cores (AVX-512), see the page.
JOB = 70e-6  # s of the coordinator per job over Ray: sample, dispatch, collect, record
CALL = 1e-3  # s of the coordinator per call
ADD = 0.18e-9  # s of one core per float of each vector that is added
PUT = 1.2e9  # bytes per second into a store, by one process
# Assumed.
LINK = 12e9  # bytes per second between a GPU and memory
SUMS = 2  # of the 20 clients of a worker, and of the 160 of a node, where all have equal work
THREADS = 4  # cores that eight threads are worth when adding, before memory is the limit


@dataclass(frozen=True)
class Cluster:
    """A cluster with a worker per GPU and the coordinator on the first node.

    network: bytes per second of a node.
    """

    nodes: int = 8
    gpus: int = 8
    network: float = 3.1e9  # 25 Gbit/s
    clients_per_worker: int = 20  # in a round

    @property
    def workers(self) -> int:
        """Number of workers, one per GPU."""
        return self.nodes * self.gpus

    @property
    def clients(self) -> int:
        """Number of clients in a round."""
        return self.workers * self.clients_per_worker


@dataclass(frozen=True)
class Stage:
    """A stage of a round.

    bytes: over the network, in total; calls: of the coordinator; bottleneck: what limits it.
    """

    name: str
    seconds: float
    bytes: float = 0.0
    calls: int = 0
    bottleneck: str = ""


def stages(cluster: Cluster, floats: float, combine: bool) -> Iterator[Stage]:
    """Yield the stages of a round, without the training."""
    vector, others = 4 * floats, cluster.nodes - 1
    on_node = SUMS * cluster.gpus
    add = ADD * floats / THREADS
    workers = cluster.workers
    yield Stage(
        "plan, dispatch, collect",
        cluster.clients * JOB + workers * CALL,
        0,
        workers,
        "coordinator, one core",
    )
    yield Stage("publish", vector / PUT, bottleneck="coordinator, one core")
    yield Stage(
        "to the nodes",
        others * vector / cluster.network,
        others * vector,
        bottleneck="first node's network",
    )
    yield Stage("to the GPUs", vector / LINK)
    yield Stage(
        "copy off the GPUs, add on workers",
        cluster.clients_per_worker * (vector / LINK + 2 * ADD * floats),
    )
    yield Stage("sums into the store", SUMS * vector / PUT)
    arrays = others * on_node
    if combine:
        arrays = arriving(cluster)
        hops = math.ceil(math.log2(cluster.nodes))
        moved = others * SUMS - arrays
        yield Stage("add on the nodes", on_node * add + SUMS * vector / PUT, 0, others * SUMS)
        if moved > 0:
            yield Stage(
                "from node to node",
                (hops - 1) * (vector / cluster.network + add + vector / PUT),
                moved * vector,
                moved,
                "networks of pairs of nodes",
            )
    yield Stage(
        "sums to the first node",
        arrays * vector / cluster.network,
        arrays * vector,
        bottleneck="its network",
    )
    yield Stage(
        "add on the first node", (on_node + arrays) * add, bottleneck="coordinator, its cores"
    )
    yield Stage("server step", 3 * add, bottleneck="coordinator, its cores")


def memory(cluster: Cluster, floats: float, combine: bool) -> tuple[float, float]:
    """Return the bytes in the stores of the first and another node when all sums have arrived."""
    vector, on_node, others = 4 * floats, SUMS * cluster.gpus, cluster.nodes - 1
    arrays = arriving(cluster) if combine else others * on_node
    return (1 + on_node + arrays) * vector, (1 + on_node + SUMS * combine) * vector


def arriving(cluster: Cluster) -> int:
    """Return how many vectors reach the coordinator's node if nodes add up, for equal jobs."""
    jobs = [Job(number, number, 0, 0, work=1.0) for number in range(cluster.clients)]
    nodes = [worker // cluster.gpus for worker in range(cluster.workers)]
    shares = assign_groups([jobs], [0.0] * cluster.workers, nodes, keeps_nodes=True)
    elsewhere = [
        job.number for share, node in zip(shares, nodes, strict=True) if node for job in share
    ]
    return len(covered_ranges(elsewhere, cluster.clients))


WAYS = (
    ("sums of workers to the first node", False),
    ("added up per node", True),
)
MODELS = (("11 M", 11e6), ("1 B", 1e9))


def seconds(value: float) -> str:
    """Format seconds with two digits, and from 10 seconds on as a whole number."""
    return f"{value:.2g}" if value < 9.95 else f"{value:,.0f}"


def size(value: float) -> str:
    """Format bytes as MB or GB."""
    return (
        f"{value / 1e6:,.0f} MB"
        if value < 1e9
        else f"{value / 1e9:,.{1 if value < 1e11 else 0}f} GB"
    )


def by_stage(floats: float, cluster: Cluster) -> str:
    """Return a Markdown table with the time and the bytes of each stage of a round.

    There is a column for each way of adding up the updates. The last rows have the total time, and
    the bytes in the stores of nodes.
    floats: the number of parameters of the model.
    """
    ways = [list(stages(cluster, floats, combine)) for _, combine in WAYS]
    names = list(
        dict.fromkeys(
            stage.name for way in reversed(ways) for stage in way if stage.name != "server step"
        )
    )
    rows = []
    for name in (*names, "server step"):
        same_stage = [next((stage for stage in way if stage.name == name), None) for way in ways]
        cells = [_cell(stage) if stage else "" for stage in same_stage]
        bottleneck = next(stage.bottleneck for stage in same_stage if stage) or "none"
        rows.append([name, *cells, bottleneck])
    totals = [f"**{seconds(sum(stage.seconds for stage in way))} s**" for way in ways]
    rows.append(["total", *totals, ""])
    stores = [" and ".join(map(size, memory(cluster, floats, combine))) for _, combine in WAYS]
    rows.append(["in the stores of the first and another node", *stores, ""])
    return to_markdown(["stage", *(name for name, *_ in WAYS), "bottleneck"], rows)


def _cell(stage: Stage) -> str:
    parts = [f"{seconds(stage.seconds)} s", size(stage.bytes) if stage.bytes else ""]
    return ", ".join(filter(None, [*parts, f"{stage.calls} calls" if stage.calls else ""]))


def by_size() -> str:
    """Return a Markdown table with the seconds of a round, for each model and each cluster."""
    clusters = [Cluster(nodes, network=rate) for rate in (3.1e9, 12.5e9) for nodes in (2, 8, 32)]
    head = ["parameters", *(f"{c.nodes} nodes, {c.network * 8 / 1e9:.0f} Gbit/s" for c in clusters)]
    rows = []
    for name, floats in (*MODELS, ("5 B", 5e9)):
        rows.append(
            [
                name,
                *(
                    f"{seconds(sum(s.seconds for s in stages(c, floats, True)))} s"
                    for c in clusters
                ),
            ]
        )
    return to_markdown(head, rows)


def tables() -> dict[str, str]:
    """Return the tables of the page docs/many_nodes.md, by name.

    On the page, a comment with the name stands before each table.
    """
    return {name: by_stage(floats, Cluster()) for name, floats in MODELS} | {"sizes": by_size()}


def fill_tables(text: str) -> str:
    """Return the text of the page docs/many_nodes.md with newly computed tables.

    text: the text of the page with the old tables.
    """
    for name, table in tables().items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{table}\n\g<2>", text, flags=re.DOTALL
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(fill_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
