"""Measure how a process spends its time, as time intervals (spans) of a few kinds.

If a span is inside another one, its time counts only for the inner span.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

# The kinds of work, in the order in which tables and pictures show them.
KINDS = (
    "steps",
    "gathering",
    "copies",
    "sums",
    "evaluation",
    "saving",
    "other",
    "messages",
    "waiting",
)
# At most so many spans are listed one by one; the seconds count all of them.
MAX_KEPT_SPANS = 100_000


class Span(NamedTuple):
    """A time interval in which a process did one thing.

    name: what the process did, as the trace shows it.
    kind: the category of work to which the time is added.
    start, stop: seconds since 1970-01-01 (Unix time).
    """

    name: str
    kind: str
    start: float
    stop: float


@dataclass(frozen=True)
class Track:
    """The recorded time of a process.

    name: the process, as the trace shows it.
    seconds: the seconds of each kind of work.
    spans: the first `MAX_KEPT_SPANS` spans; later ones count only in `seconds` and `count`.
    count: the number of all spans.
    """

    name: str
    seconds: dict[str, float]
    spans: tuple[Span, ...] = ()
    count: int = 0


@dataclass
class Spans:
    """A recorder of the time intervals (spans) of a process.

    whole: kinds of work. Spans inside a span of such a kind are not recorded.
    settle: called before a span closes, to wait for an asynchronous device.

    These fields cover the time since the last call of `take`:

    seconds: the seconds of each kind of work.
    spans: at most `MAX_KEPT_SPANS` spans.
    calls: the spans that are not inside another span.
    count: the number of all spans.
    """

    whole: Sequence[str] = ()
    settle: Callable[[], object] = field(default=lambda: None)
    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    calls: list[Span] = field(default_factory=list)
    count: int = 0
    # Kinds of the open spans, and the seconds of the spans inside each.
    _open: list[tuple[str, list[float]]] = field(default_factory=list)
    # perf_counter has another zero in each process, and time.time may jump.
    _epoch: float = field(default_factory=lambda: time.time() - time.perf_counter())

    def now(self) -> float:
        """Return the seconds since the epoch; changes of the system's clock have no effect."""
        return self._epoch + time.perf_counter()

    @contextmanager
    def span(self, name: str, kind: str) -> Iterator[None]:
        """Measure the time of the code inside this context.

        name: what the code does, as traces show it.
        kind: the kind of work for which the time counts.
        """
        if self._open and self._open[-1][0] in self.whole:
            yield
            return
        inside: list[float] = []
        self._open.append((kind, inside))
        start = self.now()
        try:
            yield
        finally:
            self.settle()
            self._close(Span(name, kind, start, self.now()), sum(inside))

    def _close(self, span: Span, inside: float) -> None:
        self._open.pop()
        seconds = span.stop - span.start
        self.seconds[span.kind] = self.seconds.get(span.kind, 0.0) + seconds - inside
        self.count += 1
        if len(self.spans) < MAX_KEPT_SPANS:
            self.spans.append(span)
        if self._open:
            self._open[-1][1].append(seconds)
        else:
            self.calls.append(span)

    def watch(self, owner: object, name: str, kind: str) -> None:
        """Measure every later call of the method `name` of the object `owner`.

        kind: the kind of work for which the time counts.
        """
        function = getattr(owner, name)

        def timed(*args: object, **options: object) -> object:
            with self.span(name.strip("_"), kind):
                return function(*args, **options)

        setattr(owner, name, timed)

    def take(self, name: str) -> Track:
        """Return a `Track` with all spans since the last `take`, and clear the recorder.

        name: the name of the process in the trace.
        """
        track = Track(name, self.seconds, tuple(self.spans), self.count)
        self.seconds, self.spans, self.calls, self.count = {}, [], [], 0
        return track
