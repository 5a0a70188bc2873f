"""What a process spends its time on, as spans of a few kinds; a second counts for the innermost span that is open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

# In the order in which tables and pictures have them.
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
MAX_KEPT_SPANS = 100_000  # spans that a track remembers one by one; all of them count


class Span(NamedTuple):
    """What was done, and when, in seconds since the epoch."""

    name: str
    kind: str
    start: float
    stop: float


@dataclass(frozen=True)
class Track:
    """Where the time of a process went: seconds by kind, the first spans, and how many there were."""

    name: str
    seconds: dict[str, float]
    spans: tuple[Span, ...] = ()
    count: int = 0


@dataclass
class Spans:
    """Notes spans while they open and close.

    whole: kinds that take all of their time, whatever is done inside. settle: called before a span closes, to wait for
    a device that works on its own.
    """

    whole: Sequence[str] = ()
    settle: Callable[[], object] = field(default=lambda: None)
    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    calls: list[Span] = field(default_factory=list)  # spans that lie in no other
    count: int = 0
    _open: list[tuple[str, list[float]]] = field(
        default_factory=list
    )  # kinds, and seconds of spans inside
    # Clocks of processes differ in where they start, and the one that is adjusted may jump.
    _epoch: float = field(default_factory=lambda: time.time() - time.perf_counter())

    def now(self) -> float:
        """Seconds since the epoch, on this process's steady clock."""
        return self._epoch + time.perf_counter()

    @contextmanager
    def span(self, name: str, kind: str) -> Iterator[None]:
        """Time what is done inside."""
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
        """Time every call of an object's method from now on; of other objects nothing changes."""
        function = getattr(owner, name)

        def timed(*args: object, **options: object) -> object:
            with self.span(name.strip("_"), kind):
                return function(*args, **options)

        setattr(owner, name, timed)

    def take(self, name: str) -> Track:
        """All so far as a track, which later spans are no part of."""
        track = Track(name, self.seconds, tuple(self.spans), self.count)
        self.seconds, self.spans, self.calls, self.count = {}, [], [], 0
        return track
