"""The history's row of an aggregation: traffic, clients' reports and activity of workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from raysim.api.declare import Declarations
from raysim.api.messages import Failure, Update
from raysim.simulation.calls import WorkerCalls
from raysim.simulation.client_states import ClientStates
from raysim.simulation.dispatcher import Dispatcher
from raysim.simulation.events import Row
from raysim.simulation.planner import PlannedAggregation
from raysim.simulation.replicas import Replicas
from raysim.training.probe import summarise_probes
from raysim.training.run_spec import RunSpec


class RowWriter:
    """The object that makes the history's row of each aggregation.

    Some columns count events since the last row, such as deaths of workers.
    network_columns: returns columns of the bytes sent between nodes since the last row.
    """

    def __init__(
        self,
        spec: RunSpec,
        declarations: Declarations,
        calls: WorkerCalls,
        dispatcher: Dispatcher,
        client_states: ClientStates,
        network_columns: Callable[[], Row] = dict,
    ):
        self.declarations, self._network_columns = declarations, network_columns
        self.calls, self.dispatcher, self.client_states = calls, dispatcher, client_states
        self.rows: list[Row] = []  # rows of the reported rounds
        self.itemsize = spec.dtype.itemsize
        self.metric, *self.other_metrics = [metric.name for metric in spec.task.metrics]
        self._earlier = 0.0  # wall seconds of earlier sessions of this run
        self._since = time.monotonic()
        self._worked: dict[str, float] = {}  # by worker: its seconds of work at the last row
        self._row_at = 0.0  # wall time of this session at the last row
        self._deaths = 0  # deaths of workers up to the last row

    def start(self) -> None:
        """Start to measure wall time; call this when the run starts or is resumed."""
        self._since = time.monotonic()

    def resume(self, wall_seconds: float, rows: list[Row]) -> None:
        """Continue from a checkpoint.

        wall_seconds: the wall time of the run up to the checkpoint.
        rows: the rows of the history up to the checkpoint.
        """
        self._earlier, self.rows = wall_seconds, rows

    @property
    def wall_seconds(self) -> float:
        """The wall time of the run in seconds, including the time before it was resumed."""
        return self._earlier + time.monotonic() - self._since

    def row(
        self,
        replicas: Replicas,
        aggregation: PlannedAggregation,
        updates: Sequence[Update],
        failures: Sequence[Failure],
        store_bytes: int,
    ) -> Row:
        """Return the row of an aggregation that was just made; scores are still missing.

        replicas: the replicas after the aggregation.
        updates, failures: the results of the aggregation's jobs.
        store_bytes: the bytes in the object store when all updates had arrived.
        """
        staleness = aggregation.staleness
        row: Row = {
            "round": replicas.version,
            "virtual_seconds": aggregation.now,
            "wall_seconds": self.wall_seconds,
            "floats_down": None if self.declarations.pools else aggregation.down,
            "floats_up": None if self.declarations.pools else aggregation.up,
            "train_loss": _mean_loss(updates),
            self.metric: None,
            f"{self.metric}_worst": None,
            f"{self.metric}_global": None,
            "loss_global": None,
            **self._other_scores(),
            "clients": len(updates),
            "failures": len(failures),
            "worker_deaths": self.calls.deaths - self._deaths,
            "samples": sum(update.trained for update in updates),
            "worker_seconds": sum(update.seconds for update in updates),
            **self._busy(),
            "store_bytes": store_bytes,
            "spilled_bytes": self.client_states.spilled_bytes + replicas.bytes_on_disk,
            **self._network_columns(),
            "staleness": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "lost": len(aggregation.lost),
            "discarded": len(aggregation.discarded),
            **aggregation.costs,
        }
        self._deaths = self.calls.deaths
        row |= _mean_reports(updates) | replicas.report
        if not replicas.is_single:
            row["floats_links"] = aggregation.between
            row |= _replica_columns(replicas, aggregation)
        probes = [update.probe for update in updates if update.probe is not None]
        if probes:
            row |= summarise_probes(probes)
        for declared in self.declarations.methods:
            for column, clients in declared.counted_clients.items():
                row[column] = sum(update.client in clients for update in updates)
        return row

    def _other_scores(self) -> Row:
        """Return the columns of all metrics except the main one.

        Their values are None until the scores of the round arrive.
        """
        row: Row = {}
        for name in self.other_metrics:
            row |= {name: None, f"{name}_worst": None, f"{name}_global": None}
        return row

    def store_bytes(self, version_bytes: int, result_floats: int) -> int:
        """Return the bytes in the object store when all updates of a round have arrived.

        version_bytes: the bytes of all versions in the store.
        result_floats: the number of floats in the workers' results that were not collected yet.
        Results are updates and sums of updates.
        """
        return version_bytes + result_floats * self.itemsize + self.client_states.bytes

    def _busy(self) -> Row:
        """Return columns with the share of wall time in which workers worked since the last row.

        The columns are the mean over workers and the smallest share. If workers report how busy
        their GPUs are, the mean of these shares is a third column.
        """
        now, worked = time.monotonic() - self._since, self.dispatcher.busy_s
        span = max(now - self._row_at, 1e-9)
        shares: list[float] = []
        left_workers = set(range(self.calls.workers)).difference(self.calls.active)
        left = {f"worker-{worker}" for worker in left_workers}
        for worker, total in worked.items():
            if worker in left:
                continue
            since_last_row = total - self._worked.get(worker, 0.0)
            shares.append(min(1.0, since_last_row / span))
        shares += [0.0] * (len(self.calls.active) - len(shares))
        self._worked, self._row_at = dict(worked), now
        row: Row = {"worker_busy": sum(shares) / len(shares), "worker_busy_least": min(shares)}
        device_use = list(self.dispatcher.device_use.values())
        if device_use:
            row["device_busy"] = _mean(device_use)
        return row


def _replica_columns(replicas: Replicas, aggregation: PlannedAggregation) -> Row:
    """Return columns with the replica that aggregated, and its traffic.

    If the replicas do not have separate schedules, there are no such columns: return {}.
    """
    if not replicas.network.own_schedules:
        return {}
    return {
        "replica": aggregation.site,
        "replica_floats_down": aggregation.site_down,
        "replica_floats_up": aggregation.site_up,
    }


def _mean(values: Sequence[float]) -> float:
    # One value is frequent (`schedule=immediate`), and NumPy would cost ten times as much.
    return float(np.mean(values)) if len(values) > 1 else float(values[0])


def _mean_loss(updates: Sequence[Update]) -> float | None:
    """Return the mean training loss over all trained samples; None if no update has a loss."""
    pairs = [(update.loss, update.loss_rows) for update in updates if math.isfinite(update.loss)]
    rows = sum(count for _, count in pairs)
    return math.fsum(loss * count for loss, count in pairs) / rows if rows else None


def _mean_reports(updates: Sequence[Update]) -> Row:
    """Return a column for each value that methods reported in the clients' jobs (`job.report`).

    The column has the mean over the clients whose jobs reported the value.
    """
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.report.items():
            values.setdefault(name, []).append(value)
    return {name: _mean(reported) for name, reported in values.items()}
