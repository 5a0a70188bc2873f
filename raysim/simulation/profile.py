"""Profile a run: measure the time of the coordinator and of each worker by activity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from raysim.primitives.spans import Spans, Track
from raysim.simulation.events import Profiled
from raysim.simulation.runtime import Ref, Runtime
from raysim.training.profile import WorkerTrack


class WatchedRuntime:
    """A runtime that measures how long the calls of a run take, and when each worker is called.

    runtime: the runtime that executes the calls.
    spans: the recorder of the measured times.
    """

    def __init__(self, runtime: Runtime, spans: Spans):
        self.runtime, self.spans = runtime, spans
        # By worker: the times of its calls.
        self.call_times: defaultdict[int, list[float]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def put(self, value: object) -> Ref:
        """Store a value once for all workers; return a reference to it."""
        with self.spans.span("put", "messages"):
            return self.runtime.put(value)

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        """Call a method of a worker without waiting; return references to what the method returns.

        method: the name of a method of `Worker`.
        args: the arguments, or references to them.
        returns: the number of returned values.
        """
        self.call_times[worker].append(self.spans.now())
        kind = "waiting" if self.runtime.is_in_process else "messages"
        with self.spans.span(method, kind):
            return self.runtime.call(worker, method, *args, returns=returns)

    def get(self, ref: Ref) -> Any:
        """Wait for the value of a reference and return it."""
        with self.spans.span("get", "messages"):
            return self.runtime.get(ref)

    def ready(self, refs: Sequence[Ref], seconds: float) -> int | None:
        """Wait until the value of a reference exists or is lost; return the reference's index.

        Return None after `seconds`. The profile counts the time under "waiting".
        refs: references to values. The first value that exists or is lost ends the wait.
        """
        with self.spans.span("wait", "waiting"):
            return self.runtime.ready(refs, seconds)

    def revive(self, worker: int) -> None:
        """Replace a worker that died; the profile of the dead worker is lost."""
        self.call_times[worker] = []
        self.runtime.revive(worker)

    def release(self, worker: int, may_return: bool = True) -> None:
        """Stop using a worker; its profile is lost.

        may_return: False means that the worker is never started again.
        """
        self.call_times.pop(worker, None)
        self.runtime.release(worker, may_return)


class Profile:
    """The profile of a run: how long the coordinator and the workers take for each type of work.

    runtime: executes functions on the workers. The run must use the profile's attribute `runtime`
    instead, which measures every call.
    """

    def __init__(self, runtime: Runtime):
        self.spans = Spans()
        self.runtime = WatchedRuntime(runtime, self.spans)
        self.start = self.spans.now()

    def watch(self, server: object, evaluator: object, saver: object) -> None:
        """Measure from now on how long the server's sums, the evaluation and the saving take.

        server: the server or the replicas. The time in its method `step` counts as "sums".
        evaluator: the time in its methods `score` and `columns` counts as "evaluation".
        saver: the time in its methods `save` and `finish` counts as "saving".
        """
        for owner, name, kind in (
            (server, "step", "sums"),
            (evaluator, "score", "evaluation"),
            (evaluator, "columns", "evaluation"),
            (saver, "save", "saving"),
            (saver, "finish", "saving"),
        ):
            self.spans.watch(owner, name, kind)
        self.start = self.spans.now()

    def take(self) -> Profiled:
        """Return the times of the coordinator and of all workers since the profile started.

        Time of the coordinator in which nothing was measured counts as "other".
        """
        stop = self.spans.now()
        track = self.spans.take("coordinator")
        rest = max(0.0, stop - self.start - sum(track.seconds.values()))
        tracks = [Track(track.name, {**track.seconds, "other": rest}, track.spans, track.count)]
        runtime = self.runtime.runtime
        for worker, call_times in sorted(self.runtime.call_times.items()):
            worker_track: WorkerTrack = runtime.get(runtime.call(worker, "profile")[0])
            tracks.append(add_idle_time(worker_track, call_times, self.start, stop))
        return Profiled(self.start, stop, tuple(tracks))


def add_idle_time(
    worker_track: WorkerTrack, call_times: Sequence[float], start: float, stop: float
) -> Track:
    """Add idle time to the times that a worker has measured; return all times by activity.

    A worker is idle between two calls. The time until the coordinator makes the next call counts as
    "waiting", and the time from then until the worker begins the call counts as "messages".
    call_times: when the coordinator made the calls.
    start, stop: the beginning and the end of the profile. All times are in seconds since the epoch.
    """
    waiting = messages = 0.0
    last_end = start
    for (begin, end), call_time in zip(worker_track.calls, call_times, strict=False):
        gap = max(0.0, begin - last_end)
        message = min(gap, max(0.0, begin - max(call_time, last_end)))
        messages += message
        waiting += gap - message
        last_end = max(last_end, end)
    waiting += max(0.0, stop - last_end)
    track = worker_track.track
    seconds = {**track.seconds, "messages": messages, "waiting": waiting}
    return Track(track.name, seconds, track.spans, track.count)
