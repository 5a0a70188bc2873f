"""Where the time of a run goes: the coordinator's own, and what each worker was doing meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raysim.primitives.spans import Spans, Track
from raysim.simulation.events import Profiled
from raysim.simulation.runtime import Ref, Runtime
from raysim.training.profile import WorkerTrack


class WatchedRuntime:
    """A runtime of which every call is timed, and of which it is known when each worker was called."""

    def __init__(self, runtime: Runtime, spans: Spans):
        self.runtime, self.spans = runtime, spans
        self.asked: list[list[float]] = [
            [] for _ in range(runtime.workers)
        ]  # by worker: when it was called

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def put(self, value: object) -> Ref:
        """See `Runtime`."""
        with self.spans.span("put", "messages"):
            return self.runtime.put(value)

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        """See `Runtime`. Workers in this process work at once, and the coordinator waits for them."""
        self.asked[worker].append(self.spans.now())
        with self.spans.span(method, "waiting" if self.runtime.is_in_process else "messages"):
            return self.runtime.call(worker, method, *args, returns=returns)

    def get(self, ref: Ref) -> Any:
        """See `Runtime`."""
        with self.spans.span("get", "messages"):
            return self.runtime.get(ref)

    def ready(self, refs: Sequence[Ref], seconds: float) -> int | None:
        """See `Runtime`."""
        with self.spans.span("wait", "waiting"):
            return self.runtime.ready(refs, seconds)

    def revive(self, worker: int) -> None:
        """See `Runtime`; what the dead worker had spent its time on is lost with it."""
        self.asked[worker] = []
        self.runtime.revive(worker)


class Profile:
    """Times a coordinator, from outside, and asks its workers in the end."""

    def __init__(self, runtime: Runtime):
        self.spans = Spans()
        self.runtime = WatchedRuntime(runtime, self.spans)
        self.start = self.spans.now()

    def watch(self, server: object, evaluator: object, saver: object) -> None:
        """Start the profile, and time what these parts of a coordinator do from now on."""
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
        """All so far."""
        stop = self.spans.now()
        own = self.spans.take("coordinator")
        rest = max(0.0, stop - self.start - sum(own.seconds.values()))
        tracks = [Track(own.name, {**own.seconds, "other": rest}, own.spans, own.count)]
        inner, asked = self.runtime.runtime, self.runtime.asked
        for worker, times in enumerate(asked):
            found: WorkerTrack = inner.get(inner.call(worker, "profile")[0])
            tracks.append(add_idle_time(found, times, self.start, stop))
        return Profiled(self.start, stop, tuple(tracks))


def add_idle_time(found: WorkerTrack, asked: Sequence[float], start: float, stop: float) -> Track:
    """A worker's track with the time between its calls: it waited until it was called, and then for the message.

    asked: when the coordinator made each call; calls arrive in their order.
    """
    waiting = messages = 0.0
    since = start
    for (begin, end), called in zip(found.calls, asked, strict=False):
        gap = max(0.0, begin - since)
        message = min(gap, max(0.0, begin - max(called, since)))
        messages, waiting, since = messages + message, waiting + gap - message, max(since, end)
    own = found.track
    seconds = {**own.seconds, "messages": messages, "waiting": waiting + max(0.0, stop - since)}
    return Track(own.name, seconds, own.spans, own.count)
