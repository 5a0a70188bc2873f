"""What a round costs on many nodes, by arithmetic: `uv run python docs/many_nodes.py` writes the page's tables.

Every stage is bytes over a rate, or a count times a measured constant. `jobs.benchmarks.cluster` and
`jobs.benchmarks.scale` measure the constants again on a cluster of yours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from raysim.results.tables import to_markdown
from raysim.simulation.group_sums import PART_FLOATS

PAGE = Path(__file__).parent / "many_nodes.md"

# Measured on two cores (AVX-512), see the page.
JOB = 70e-6  # s of the coordinator for each job behind Ray: drawn, sent, collected, written down
CALL = 1e-3  # s of the coordinator for each call
ADD = 0.18e-9  # s of a core for each float of each vector that is added
PUT = 1.2e9  # bytes a second into a store, by one process
# Assumed of a server.
LINK = 12e9  # bytes a second between a GPU and memory
THREADS = 4  # cores' worth that eight threads gain in adding, before memory is the limit


@dataclass(frozen=True)
class Cluster:
    """nodes x gpus, a worker on each GPU, the coordinator on the first node; network: bytes a second of a node."""

    nodes: int = 8
    gpus: int = 8
    network: float = 3.1e9  # 25 Gbit/s
    each: int = 20  # clients a round for each GPU

    @property
    def workers(self) -> int:
        """One for each GPU."""
        return self.nodes * self.gpus

    @property
    def clients(self) -> int:
        """Of a round."""
        return self.workers * self.each


@dataclass(frozen=True)
class Stage:
    """bytes: that cross a network, in all; messages: calls of the coordinator; serial: what everybody waits for."""

    name: str
    seconds: float
    bytes: float = 0.0
    messages: int = 0
    serial: str = ""


def stages(cluster: Cluster, floats: float, summation: int, combine: bool) -> Iterator[Stage]:
    """Those of a round besides training itself."""
    vector, others = 4 * floats, cluster.nodes - 1
    groups = math.ceil(cluster.clients / summation)
    on_worker, on_node = groups / cluster.workers, groups / cluster.nodes
    add = ADD * floats / THREADS
    workers = cluster.workers
    yield Stage(
        "plan, dispatch, collect",
        cluster.clients * JOB + workers * CALL,
        0,
        workers,
        "coordinator, one core",
    )
    yield Stage("publish", vector / PUT, serial="coordinator, one core")
    yield Stage(
        "to the nodes",
        others * vector / cluster.network,
        others * vector,
        serial="first node's network",
    )
    yield Stage("to the GPUs", vector / LINK)
    yield Stage("off the GPUs, added on workers", cluster.each * (vector / LINK + ADD * floats))
    yield Stage("sums into the store", on_worker * vector / PUT)
    if not combine:
        arrays = others * on_node
        yield Stage(
            "sums to the first node",
            arrays * vector / cluster.network,
            arrays * vector,
            0,
            "its network",
        )
        yield Stage("added there", groups * add, serial="coordinator, its cores")
    else:
        parts = math.ceil(floats / PART_FLOATS)
        slowest = max(vector / cluster.network, on_node * add) / parts
        seconds = (others + parts - 1) * slowest + others * parts * CALL
        yield Stage(
            "from node to node", seconds, others * vector, others * parts, "a chain of nodes"
        )
        yield Stage("added on the first node", (on_node + 1) * add, serial="coordinator, its cores")
    yield Stage("server's step", 3 * add, serial="coordinator, its cores")


def memory(cluster: Cluster, floats: float, summation: int, combine: bool) -> tuple[float, float]:
    """Bytes in the stores of the first node and of another one, when all sums are there."""
    vector, groups = 4 * floats, math.ceil(cluster.clients / summation)
    own = groups / cluster.nodes
    return (1 + (own + 1 if combine else groups)) * vector, (1 + own + combine) * vector


WAYS = (
    ("256 sums to the first node", 5, False),
    ("nodes add up", 5, True),
    ("nodes add up, `summation=20`", 20, True),
)
MODELS = (("11 M", 11e6), ("1 B", 1e9))


def seconds(value: float) -> str:
    """With two digits."""
    return f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes as MB or GB."""
    return (
        f"{value / 1e6:,.0f} MB"
        if value < 1e9
        else f"{value / 1e9:,.{1 if value < 1e11 else 0}f} GB"
    )


def by_stage(floats: float, cluster: Cluster) -> str:
    """A row for each stage, a column for each way."""
    ways = [list(stages(cluster, floats, summation, combine)) for _, summation, combine in WAYS]
    names = list(
        dict.fromkeys(stage.name for way in ways for stage in way if stage.name != "server's step")
    )
    rows = []
    for name in (*names, "server's step"):
        found = [next((stage for stage in way if stage.name == name), None) for way in ways]
        cells = [_cell(stage) if stage else "" for stage in found]
        serial = next(stage.serial for stage in found if stage) or "no place"
        rows.append([name, *cells, serial])
    totals = [f"**{seconds(sum(stage.seconds for stage in way))} s**" for way in ways]
    rows.append(["all of it", *totals, ""])
    stores = [
        " and ".join(map(size, memory(cluster, floats, summation, combine)))
        for _, summation, combine in WAYS
    ]
    rows.append(["in the stores of the first and another node", *stores, ""])
    return to_markdown(["stage", *(name for name, *_ in WAYS), "one after another in"], rows)


def _cell(stage: Stage) -> str:
    parts = [f"{seconds(stage.seconds)} s", size(stage.bytes) if stage.bytes else ""]
    return ", ".join(filter(None, [*parts, f"{stage.messages} calls" if stage.messages else ""]))


def by_size() -> str:
    """Seconds of a round for other clusters and networks."""
    clusters = [Cluster(nodes, network=rate) for rate in (3.1e9, 12.5e9) for nodes in (2, 8, 32)]
    head = ["parameters", *(f"{c.nodes} nodes, {c.network * 8 / 1e9:.0f} Gbit/s" for c in clusters)]
    rows = []
    for name, floats in (*MODELS, ("5 B", 5e9)):
        rows.append(
            [
                name,
                *(
                    f"{seconds(sum(s.seconds for s in stages(c, floats, 20, True)))} s"
                    for c in clusters
                ),
            ]
        )
    return to_markdown(head, rows)


def tables() -> dict[str, str]:
    """All of the page, by the name of their place."""
    return {name: by_stage(floats, Cluster()) for name, floats in MODELS} | {"sizes": by_size()}


def filled(text: str) -> str:
    """The page with its tables as they are now."""
    for name, table in tables().items():
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>{table}\n\g<2>", text, flags=re.DOTALL
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
