"""Draw the replicas of a run and their links, with colours for the clients' scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.api.topology import Network
from raysim.results.figures import figure_file
from raysim.results.history import Row, metric_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CLIENTS = 400  # with more clients, the points would cover each other
_LINK = "#9aa1a7"
_FLOAT_MB = 4e-6  # megabytes of one float
_ARC = 1.3 * math.pi  # the angle of the arc of clients around a replica


def draw_topology(
    network: Network,
    clients: Mapping[str, np.ndarray],
    rows: Sequence[Row],
    path: Path,
    title: str,
) -> bool:
    """Write a picture of the clients, the replicas and their links.

    clients: the columns of clients.parquet.

    Returns False, and writes nothing, for one replica without exchanges, more than `MAX_CLIENTS`
    clients, or clients without scores.
    """
    metric = metric_of(rows)
    scores = clients.get(metric)
    is_single = network.replicas == 1 and not network.exchanges
    if is_single or scores is None or np.isnan(scores).all() or len(scores) > MAX_CLIENTS:
        return False
    if network.moves_clients:
        # Clients are drawn at the model that they were scored with.
        is_scored = ~np.isnan(scores)
        replica_of = clients["replica"][is_scored].astype(np.int64)
        network, scores = replace(network, replica_of=replica_of), scores[is_scored]
    with figure_file(path, title, (7.6, 6.6)) as figure:
        ax = figure.subplots()
        if network.on_clients:
            positions = _circle(len(scores), 1.0)
            _draw_neighbours(ax, network, positions)
            sizes = np.full(len(scores), 60.0)
        else:
            replicas = _circle(network.replicas, 1.0)
            positions = _around(replicas, network.replica_of)
            means = _mean_scores(scores, network)
            _draw_servers(ax, network, replicas, positions, rows)
            sizes = np.repeat([40.0, 220.0], [len(scores), len(means)])
            positions = np.concatenate([positions, replicas])
            scores = np.concatenate([scores, means])
        points = ax.scatter(
            positions[:, 0], positions[:, 1], c=scores, s=sizes, cmap="viridis", zorder=3
        )
        figure.colorbar(points, ax=ax, label=f"{metric} of the clients", shrink=0.75)
        ax.set_aspect("equal")
        ax.set_axis_off()
    return True


def traffic(rows: Sequence[Row], replicas: int) -> np.ndarray:
    """Return the traffic between each replica and its clients in megabytes, [replicas, 2].

    The columns are the traffic to the clients and the traffic to the replica, until the replica's
    last aggregation. A replica without an aggregation has 0.
    """
    megabytes = np.zeros((replicas, 2))
    for row in rows:
        replica = row.get("replica")
        if replica is None:
            continue
        floats = row["replica_floats_down"], row["replica_floats_up"]
        megabytes[int(replica)] = [_FLOAT_MB * (number or 0) for number in floats]
    return megabytes


def _circle(count: int, radius: float) -> np.ndarray:
    """Return positions on a circle, [count, 2]; the first one is at the top."""
    angles = math.pi / 2 - 2 * math.pi * np.arange(count) / max(1, count)
    return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _around(centers: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """Place the members of each group on an arc around the center of the group.

    Return the positions of the members, [members, 2].
    centers: the center of each group, [groups, 2].
    group_of: the number of each member's group, [members].
    """
    positions = np.zeros((len(group_of), 2))
    radius = min(0.5, 2.2 / max(4, len(centers)))
    for group, center in enumerate(centers):
        members = np.flatnonzero(group_of == group)
        outwards = math.atan2(center[1], center[0])
        spread = _ARC * (np.arange(len(members)) + 0.5) / max(1, len(members)) - _ARC / 2
        angles = outwards + spread
        positions[members] = center + radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return positions


def _mean_scores(scores: np.ndarray, network: Network) -> np.ndarray:
    """Return the mean score of each replica's scored clients; nan if none was scored.

    scores: [clients], nan for a client that was not scored.
    """
    is_scored = ~np.isnan(scores)
    replica_of = network.replica_of[is_scored]
    counts = np.bincount(replica_of, minlength=network.replicas)
    totals = np.bincount(replica_of, scores[is_scored], minlength=network.replicas)
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)


def _draw_neighbours(ax: Axes, network: Network, positions: np.ndarray) -> None:
    from matplotlib.collections import LineCollection

    assert network.mixing is not None, "clients with replicas exchange"
    lines = []
    for replica in range(network.replicas):
        for source in network.mixing.row(replica)[0]:
            if source > replica:
                lines.append(positions[[replica, source]])
    alpha = max(0.08, min(0.8, 40 / max(1, len(lines))))
    ax.add_collection(LineCollection(lines, colors=_LINK, linewidths=1.0, alpha=alpha))


def _draw_servers(
    ax: Axes,
    network: Network,
    replicas: np.ndarray,
    positions: np.ndarray,
    rows: Sequence[Row],
) -> None:
    """Draw the links of the replicas, and write the name of each replica.

    A replica is linked to the clients that it serves. If replicas have schedules of their own, the
    traffic of each replica is written, too. If replicas exchange, each is also linked to the centre
    of the picture, where the traffic of all exchanges is written.

    replicas, positions: the positions of replicas and clients in the picture, [replicas, 2] and
    [clients, 2].
    rows: the history, from which the traffic is read.
    """
    from matplotlib.collections import LineCollection

    lines = [
        [position, replicas[network.replica_of[client]]]
        for client, position in enumerate(positions)
    ]
    ax.add_collection(LineCollection(lines, colors=_LINK, linewidths=0.6, alpha=0.5))
    megabytes = traffic(rows, network.replicas)
    for replica, place in enumerate(replicas):
        down, up = megabytes[replica]
        text = f"{network.name} {replica}"
        if network.own_schedules:
            text += f"\n{down:.3g} MB down\n{up:.3g} MB up"
        # Write the text on the link to the cloud, because no client is near it.
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        ax.annotate(
            text, 0.58 * place, ha="center", va="center", fontsize=7, color="black", bbox=box
        )
    if not network.exchanges:
        return
    links = [[place, (0.0, 0.0)] for place in replicas]
    ax.add_collection(LineCollection(links, colors=_LINK, linewidths=2.0))
    total = _FLOAT_MB * float(rows[-1].get("floats_links") or 0)
    ax.annotate(
        f"exchanges\n{total:.3g} MB",
        (0.0, 0.0),
        ha="center",
        va="center",
        fontsize=8,
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": _LINK},
        color="black",
    )
