"""The event loop: sample, dispatch, collect, aggregate, evaluate, record, checkpoint; the same for every schedule.

Virtual time decides every order. Hosts get work as soon as the vector it starts from exists; the loop waits for results
only when an aggregation needs them, so later events are looked at before earlier work is done.
"""

from __future__ import annotations

import hashlib
import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from raysim.api.composition import owners
from raysim.api.messages import Failure, Job, Probe, Published, SingleUpdate, Update
from raysim.primitives.memory import peak_memory
from raysim.primitives.streams import stream
from raysim.simulation import checkpoint
from raysim.simulation.client_states import States
from raysim.simulation.dispatcher import Dispatcher, Flight
from raysim.simulation.evaluator import Evaluator, Scoring
from raysim.simulation.events import Event, Finished, Round, Row, Saved, Started, TooManyFailures
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import Ref, Runtime
from raysim.simulation.schedule import Aggregate, Dispatch, Schedule, View
from raysim.simulation.server import Server, asked_weighting
from raysim.training.determinism import make_deterministic
from raysim.training.probe import balanced_rows, summarise_probes
from raysim.training.run_spec import RunSpec, build_networks
from raysim.vectors.layout import Vector


@dataclass
class _Pending:
    """A round whose evaluation may still run."""

    row: Row
    failures: tuple[Failure, ...]
    probes: tuple[Probe, ...]
    scoring: list[Scoring] = field(default_factory=list)


def check_concurrency(schedule: Schedule, counts: np.ndarray) -> None:
    """Refuse a schedule that keeps more clients at work than have samples (counts: of each client)."""
    able = int(np.count_nonzero(counts))
    if schedule.concurrency > able:
        key = "cohort" if hasattr(schedule, "cohort") else "concurrency"
        raise ValueError(
            f"schedule.{key}={schedule.concurrency} is more than the {able} clients that have samples "
            f"(of {len(counts)}): set schedule.{key}={able} or less"
        )


class Coordinator:
    """One run. `run()` yields its events and ends with `Finished`.

    folder: where model and checkpoints go; "": nowhere, and no checkpoint is written. resume: a checkpoint's folder.
    """

    def __init__(
        self,
        spec: RunSpec,
        schedule: Schedule,
        fleet: Fleet,
        runtime: Runtime,
        folder: str = "",
        resume: str = "",
    ):
        self.spec, self.schedule, self.fleet, self.runtime = spec, schedule, fleet, runtime
        self.settings, self.folder, self.resume = (settings := spec.settings), folder, resume
        make_deterministic(spec.threads)
        networks, self.layout = build_networks(spec)
        self.initial = Vector(networks, self.layout, torch.device("cpu"), spec.dtype)
        self.counts = spec.data.partition.train.counts
        self.server = Server(
            self.layout,
            self.initial.shared.clone(),
            self.initial.counters[: self.layout.shared_counters].clone(),
            spec.methods,
            self.counts,
            settings.seed,
            spec.task,
            settings.weighting or asked_weighting(spec.methods),
            settings.summation,
            schedule.size,
        )
        self._checkpoint_every = settings.checkpoint.every if folder else 0
        self.eligible = np.flatnonzero(self.counts)
        check_concurrency(schedule, self.counts)
        if settings.evaluate.probe and not len(spec.data.central):
            raise ValueError(
                f"evaluate.probe={settings.evaluate.probe} looks at local models on the central test set, of "
                "which the data has none: set evaluate.probe=0"
            )
        stays = self.layout.personal > 0 or self.layout.total_counters > self.layout.shared_counters
        self.stateful = stays or bool(owners(spec.methods, "state"))
        self.pooled = any(method.pools for method in spec.methods)
        self.states = States(runtime, settings.state.bytes, folder)
        self.dispatcher = Dispatcher(runtime, settings.summation, self.stateful, self.layout.shared, self.states)
        self.evaluator = Evaluator(spec, self.layout, runtime, self.dispatcher)
        self._costers = owners(spec.methods, "cost")

        self.now = 0.0
        self.draw = 0  # cohorts drawn so far
        self.number = 0  # jobs dispatched so far
        self.turns: dict[int, int] = {}  # by client: dispatches so far
        self.flights: dict[int, Flight] = {}  # dispatched, not aggregated; by number
        self.running: list[tuple[float, int, int]] = []  # heap of (finish, client, number)
        self.arrived: list[int] = []
        self.floats = {"down": 0, "up": 0}
        self.wall = 0.0  # of earlier sessions of this run
        self.rows: list[Row] = []

        self._published: dict[int, tuple[Published, Ref]] = {}
        self._latest: dict[int, int] = {}  # by client: its last job, accepted or not
        self._pending: list[_Pending] = []
        self._once = 0  # floats that a client receives at its first participation only
        self._worked: dict[str, float] = {}  # by host: its seconds of work at the last row
        self._row_at = 0.0  # wall time of this session at the last row
        self._deaths = 0  # of hosts, up to the last row

    # --- the loop ------------------------------------------------------------------------------------------------
    def run(self) -> Iterator[Event]:
        """Run to the last round. Raises TooManyFailures after writing a checkpoint."""
        self._since = time.monotonic()
        if self.resume:
            self._restore(checkpoint.read(Path(self.resume)))
        else:
            self._contribute()
        self._hand_out()
        yield Started(list(self.rows))
        self._publish()
        while self.server.version < self.settings.rounds:
            taken = self._look_ahead()
            refs = {version: ref for version, (_, ref) in self._published.items()}
            summable = self.server.summable and not self.settings.evaluate.decomposes(self.server.version + 1)
            self.dispatcher.submit(taken, list(self.flights.values()), refs, summable)
            yield from self._report()
            pending = self._aggregate(taken)
            self._publish()
            self._evaluate(pending)
            version, every = self.server.version, self._checkpoint_every
            if every and version % every == 0 and version < self.settings.rounds:
                yield from self._report()
                yield self._save()
        yield from self._report()
        if self._checkpoint_every:
            yield self._save()
        yield self._finish()

    def _look_ahead(self) -> list[Flight]:
        """Follow the schedule on virtual time until it aggregates; the flights it takes, in order of acceptance."""
        while True:
            idle = len(self.eligible) - len(self.running)
            action = self.schedule.decide(View(len(self.running), self.arrived, idle))
            if isinstance(action, Aggregate):
                self.arrived = self.arrived[len(action.jobs) :]
                return [self.flights.pop(number) for number in action.jobs]
            if isinstance(action, Dispatch):
                self._dispatch(action.count)
            else:
                self._next_instant()

    def _next_instant(self) -> None:
        """Advance the clock to the next arrival and take all arrivals of that instant, ties by client id."""
        self.now = self.running[0][0]
        while self.running and self.running[0][0] == self.now:
            _, _, number = heapq.heappop(self.running)
            flight = self.flights[number]
            flight.staleness = self.server.version - flight.job.version
            self.floats["up"] += flight.up
            self.arrived.append(number)

    def _dispatch(self, count: int) -> None:
        """Send so many idle clients off with the current version."""
        published, _ = self._published[self.server.version]
        for client in self._sample(count):
            turn = self.turns.get(client, 0)
            self.turns[client] = turn + 1
            samples = int(self.counts[client])
            once = self._once if turn == 0 else 0
            trained = self.settings.local.budget(samples)
            costs = [method.cost(self.server, samples, trained, turn) for method in self._costers]
            extras = self.server.sent_to(client)
            job = Job(
                number=self.number,
                client=client,
                turn=turn,
                version=self.server.version,
                state=self._latest.get(client, -1) if self.stateful else -1,
                weight=self.server.weight(client),
                extras=extras,
                probe=self.settings.evaluate.probes(self.server.version + 1),
            )
            self.number += 1
            self._latest[client] = job.number
            work = trained + sum(cost.samples for cost in costs)
            down = published.floats + once + sum(a.size for a in extras.values()) + sum(cost.down for cost in costs)
            up = self.layout.shared + sum(cost.up for cost in costs)
            finish = self.now + self.fleet.duration(self.settings.seed, client, work, down, up)
            self.floats["down"] += down
            self.flights[job.number] = Flight(job, finish, work, up)
            heapq.heappush(self.running, (finish, client, job.number))

    def _sample(self, count: int) -> list[int]:
        """Idle clients, uniformly without replacement, ascending; its cost grows with the cohort."""
        busy = np.searchsorted(self.eligible, np.sort(np.array([client for _, client, _ in self.running], np.int64)))
        generator = stream(self.settings.seed, "cohort", self.draw)
        self.draw += 1
        ranks = generator.choice(len(self.eligible) - len(busy), size=count, replace=False)
        places = ranks + np.searchsorted(busy - np.arange(len(busy)), ranks, side="right")  # step over the busy ones
        return [int(client) for client in np.sort(self.eligible[places])]

    # --- hosts ---------------------------------------------------------------------------------------------------
    def _contribute(self) -> None:
        """Collect what clients send before round 0, and let the methods assemble it."""
        methods = owners(self.spec.methods, "contribute")
        if not methods:
            return
        shares = np.array_split(self.eligible, self.runtime.hosts)
        calls = [self.dispatcher.call(host, "contribute", share.tolist()) for host, share in enumerate(shares)]
        parts = [part for call in calls for part in self.dispatcher.wait(call)]
        self.floats["up"] += sum(array.size for part in parts for array in part.values())
        for method in methods:
            method.assemble({key: [part[key] for part in parts] for key in parts[0]}, self.server)

    def _hand_out(self) -> None:
        """Give every host what its clients receive once, and what is probed; counted at a client's first dispatch."""
        once = self.server.sent_once()
        self._once = sum(array.size for array in once.values())
        if once or self.settings.evaluate.probe:
            self.dispatcher.keep(self.runtime.put(once), self._probed())

    def _probed(self) -> np.ndarray:
        """Rows of the central test set, as many of each class."""
        central, rows = self.spec.data.central, self.settings.evaluate.probe_rows
        labels = self.spec.data.open().labels[central]
        each = max(1, rows // max(1, len(np.unique(labels))))
        return central[balanced_rows(labels, each, stream(self.settings.seed, "probe"))]

    def _publish(self) -> None:
        """Store the current version for all hosts; forget versions that no job needs."""
        version = self.server.version
        published = self.server.published()
        if version not in self._published:
            self._published[version] = (published, self.runtime.put(published))
        needed = {flight.job.version for flight in self.flights.values()} | {version}
        for old in [v for v in self._published if v not in needed]:
            del self._published[old]

    # --- aggregation and scoring ---------------------------------------------------------------------------------
    def _aggregate(self, flights: Sequence[Flight]) -> _Pending:
        results = self.dispatcher.floats([*flights, *self.flights.values()])
        outcomes, sums = self.dispatcher.collect(flights)
        stored = self._stored(results)
        failures = tuple(outcome for outcome in outcomes if isinstance(outcome, Failure))
        if len(failures) > self.settings.faults.tolerate * len(flights):
            raise self._too_many(failures, flights)
        updates = [outcome if isinstance(outcome, Update) else None for outcome in outcomes]
        bases = {version: published for version, (published, _) in self._published.items()}
        self.server.step(updates, sums, [flight.staleness for flight in flights], bases)
        self.dispatcher.accept(flights)
        present = [update for update in updates if update is not None]
        scoring = []
        if present and self.settings.evaluate.decomposes(self.server.version):
            singles = [update for update in present if isinstance(update, SingleUpdate)]
            scoring.append(self.evaluator.decompose(singles, bases, self.server.published()))
        losses = [update.loss for update in present if np.isfinite(update.loss)]
        row: Row = {
            "round": self.server.version,
            "virtual_seconds": self.now,
            "wall_seconds": self.wall + time.monotonic() - self._since,
            "floats_down": None if self.pooled else self.floats["down"],
            "floats_up": None if self.pooled else self.floats["up"],
            "train_loss": float(np.mean(losses)) if losses else None,
            "accuracy": None,
            "accuracy_worst": None,
            "accuracy_global": None,
            "loss_global": None,
            "clients": len(present),
            "failures": len(failures),
            "host_deaths": self.dispatcher.deaths - self._deaths,
            "samples": sum(update.trained for update in present),
            "host_seconds": sum(update.seconds for update in present),
            **self._busy(),
            "store_bytes": stored,
            "spilled_bytes": self.states.spilled_bytes,
            "staleness": float(np.mean([flight.staleness for flight in flights])),
        }
        self._deaths = self.dispatcher.deaths
        names = dict.fromkeys(name for update in present for name in update.report)
        for name in names:  # the mean over the clients that report it
            row[name] = float(np.mean([update.report[name] for update in present if name in update.report]))
        row |= self.server.report
        probes = tuple(update.probe for update in present if update.probe is not None)
        if probes:
            row |= summarise_probes(probes)
        return _Pending(row, failures, probes, scoring)

    def _stored(self, results: int) -> int:
        """Bytes kept in the object store when a round's results are all there: live versions, results, states.

        results: floats that were under way. What is not known yet counts as what a job uploads, or as other states.
        """
        published = [p.vector.nbytes + p.counters.nbytes + _bytes(p.extras) for p, _ in self._published.values()]
        return sum(published) + results * self.spec.dtype.itemsize + self.dispatcher.state_bytes

    def _busy(self) -> Row:
        """The share of wall time since the last row that hosts worked: their mean, and the one that worked least.

        A call counts when its results are taken.
        """
        now, worked = time.monotonic() - self._since, self.dispatcher.busy
        span = max(now - self._row_at, 1e-9)
        shares = [min(1.0, (total - self._worked.get(host, 0.0)) / span) for host, total in worked.items()]
        shares += [0.0] * (self.runtime.hosts - len(shares))
        self._worked, self._row_at = dict(worked), now
        return {"host_busy": float(np.mean(shares)), "host_busy_least": min(shares)}

    def _too_many(self, failures: tuple[Failure, ...], flights: Sequence[Flight]) -> TooManyFailures:
        share = len(failures) / len(flights)
        text = (
            f"{len(failures)} of {len(flights)} clients failed in round {self.server.version + 1}, first: "
            f"{f'method {failures[0].method!r}, ' if failures[0].method else ''}{failures[0].error}. "
            f"faults.tolerate={self.settings.faults.tolerate} allows fewer; set it to {share:g} to leave them out "
            "and go on"
        )
        if self.folder:
            for flight in reversed(flights):  # back to before the aggregation, for the checkpoint
                self.flights[flight.job.number] = flight
                self.arrived.insert(0, flight.job.number)
            self.flights = dict(sorted(self.flights.items()))
            text += f"; resume continues from {self._save().path}"
        return TooManyFailures(text + "\n" + failures[0].traceback)

    def _evaluate(self, pending: _Pending) -> None:
        """Start scoring the current version; hosts do it before they train the next."""
        self._pending.append(pending)
        version = self.server.version
        if not self.settings.evaluate.evaluates(version, self.settings.rounds):
            return
        published, ref = self._published[version]
        if (scored := self.server.scored()) is not self.server.vector:
            published = Published(version, scored.numpy(), self.server.counters.numpy(), mark="scored")
            ref = self.runtime.put(published)
        pending.scoring.append(self.evaluator.score(self.server, ref))

    def _report(self) -> Iterator[Round]:
        """Complete the rows of scored rounds."""
        for pending in self._pending:
            for scoring in pending.scoring:
                pending.row |= self.evaluator.columns(scoring)
            self.rows.append(pending.row)
            yield Round(pending.row, pending.failures, pending.probes)
        self._pending = []

    # --- the end, and what a run is --------------------------------------------------------------------------------
    def _finish(self) -> Finished:
        model = hashlib.sha256(self.server.vector.numpy().tobytes() + self.server.counters.numpy().tobytes())
        rest = hashlib.sha256()
        for key, array in sorted(self._client_states().items()):
            rest.update(key.encode() + np.ascontiguousarray(array).tobytes())
        for name, tensor in sorted(self.server.state.items()):
            rest.update(name.encode())
            rest.update(tensor.contiguous().numpy().data)  # as it lies: a cache may be larger than memory
        if self.folder:
            shared = self.initial.named(self.server.vector, self.server.counters)
            path = Path(self.folder) / "model.safetensors"
            save_file({name: tensor.clone() for name, tensor in shared.items()}, path)
        return Finished(model.hexdigest(), rest.hexdigest(), peak_memory())

    def _client_states(self) -> dict[str, np.ndarray]:
        """Accepted private states, "client/name"."""
        return {
            f"{client}/{key}": np.asarray(array)
            for client, number in self.states.accepted.items()
            for key, array in self.states.state(client, number).items()
        }

    def _save(self) -> Saved:
        """Write a checkpoint. Jobs under way are in it as jobs: they run again from their base versions."""
        server: dict[str, np.ndarray] = {
            "vector": self.server.vector.numpy(),
            "counters": self.server.counters.numpy(),
            **{f"state/{name}": tensor.numpy() for name, tensor in self.server.state.items()},
        }
        for version in {flight.job.version for flight in self.flights.values()}:
            published = self._published[version][0]
            server |= {
                f"published/{version}/vector": published.vector,
                f"published/{version}/counters": published.counters,
            }
            server |= {f"published/{version}/extras/{key}": value for key, value in published.extras.items()}
        for number, flight in self.flights.items():
            server |= {f"job/{number}/{key}": value for key, value in flight.job.extras.items()}
        numbers = {
            "version": self.server.version,
            "now": self.now,
            "draw": self.draw,
            "number": self.number,
            "turns": list(self.turns.items()),
            "arrived": self.arrived,
            "floats": self.floats,
            "wall": self.wall + time.monotonic() - self._since,
            "accepted": list(self.states.accepted.items()),
            "flights": [
                {"finish": f.finish, "work": f.work, "up": f.up, "staleness": f.staleness}
                | asdict(f.job)
                | {"extras": {}}
                for f in self.flights.values()
            ],
            "rows": self.rows,
        }
        snapshot = checkpoint.Snapshot(numbers, server, self._client_states())
        path = checkpoint.write(Path(self.folder) / "checkpoints", self.server.version, snapshot)
        return Saved(self.server.version, str(path))

    def _restore(self, snapshot: checkpoint.Snapshot) -> None:
        numbers, arrays = snapshot.numbers, snapshot.server
        self.server.version = numbers["version"]
        self.server.vector = torch.from_numpy(arrays["vector"])
        self.server.counters = torch.from_numpy(arrays["counters"])
        self.server.state = {
            k.removeprefix("state/"): torch.from_numpy(v) for k, v in arrays.items() if k.startswith("state/")
        }
        self.now, self.draw, self.number, self.wall = (numbers[key] for key in ("now", "draw", "number", "wall"))
        self.turns, self.states.accepted = dict(map(tuple, numbers["turns"])), dict(map(tuple, numbers["accepted"]))
        self._latest = dict(self.states.accepted)
        self.arrived, self.floats, self.rows = numbers["arrived"], numbers["floats"], numbers["rows"]
        states: dict[int, dict[str, np.ndarray]] = {client: {} for client in self.states.accepted}
        for key, array in snapshot.clients.items():
            client, _, name = key.partition("/")
            states[int(client)][name] = array
        for owned, state in states.items():
            self.states.restore(owned, state)
        for entry in numbers["flights"]:
            extras = _under(arrays, f"job/{entry['number']}/")
            names = ("number", "client", "turn", "version", "state", "weight", "probe")
            job = Job(**{key: entry[key] for key in names}, extras=extras)
            flight = Flight(job, entry["finish"], entry["work"], entry["up"], staleness=entry["staleness"])
            self.flights[job.number] = flight
            self._latest[job.client] = job.number
            if job.number not in self.arrived:
                self.running.append((flight.finish, job.client, job.number))
            if job.version not in self._published:
                held = _under(arrays, f"published/{job.version}/")
                published = Published(job.version, held["vector"], held["counters"], _under(held, "extras/"))
                self._published[job.version] = (published, self.runtime.put(published))
        heapq.heapify(self.running)


def _bytes(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _under(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """The entries below a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
