"""Define selection rules, which choose the clients to dispatch, and the data for them.

A rule must store everything that it remembers in `SelectionView.state`. Its choice may depend only
on the view that it gets. Otherwise results depend on the number of workers, and on whether a run is
stopped and resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from raysim.data.partition import Floats, Ints

# The reports that a rule may ask clients for: a job's mean training loss, the norm of its update.
Report: TypeAlias = Literal["loss", "norm"]


@dataclass(frozen=True, eq=False)
class ClientFacts:
    """The facts that the server knows about each client: arrays [clients]; nan means unknown.

    participations: the number of jobs dispatched so far.
    accepted: the number of jobs in the aggregations so far; failed jobs count, too.
    loss: the mean training loss of the last aggregated job. It is known only if the selection rule
    has "loss" in `reports`.
    norm: the Euclidean norm of the last aggregated update. It is known only if the selection rule
    has "norm" in `reports`.
    seconds: the duration of the last job that was not lost, in virtual seconds.
    last_finish: the virtual second in which the same job finished.
    staleness: the staleness of the last job in an aggregation; failed jobs count, too.
    """

    samples: Ints
    participations: np.ndarray  # int32
    accepted: np.ndarray  # int32
    loss: Floats
    norm: Floats
    seconds: Floats
    staleness: Floats
    last_finish: Floats

    def read_only(self) -> ClientFacts:
        """Return the same arrays as views that cannot be changed."""
        views = {entry.name: getattr(self, entry.name).view() for entry in fields(self)}
        for view in views.values():
            view.flags.writeable = False
        return ClientFacts(**views)


def draw_weighted(
    generator: np.random.Generator, clients: Ints, weights: np.ndarray, count: int
) -> Ints:
    """Draw clients without replacement, int64, in the order of the draw.

    Each draw takes one of the remaining clients with a probability in proportion to its weight.
    Clients of weight 0 come last, in the order of `clients`.
    clients: int64 [n], the clients to draw from.
    weights: [n], at least 0.
    count: the number of clients to draw; above n, all are drawn.
    """
    # The order of independent exponential times has the distribution of such draws.
    times = generator.standard_exponential(len(clients))
    positive = np.flatnonzero(weights > 0)
    times = times[positive] / weights[positive]
    if count < len(positive):
        first = np.argpartition(times, count)[:count]
        return clients[positive[first[np.argsort(times[first])]]]
    drawn = clients[positive[np.argsort(times)]]
    rest = clients[np.flatnonzero(~(weights > 0))]
    return np.concatenate([drawn, rest])[:count]


@dataclass(eq=False)
class SelectionView:
    """The argument of a selection rule: the idle and available clients, with facts about each.

    Properties such as `samples` and `loss` have a value for each of `clients`. A rule does not use
    the fields that are functions; they are for raysim.

    count: the largest number of clients to choose.
    pool: the pool to choose from; -1 means all clients.
    now: the virtual time in seconds.
    concurrency: the largest number of clients in flight.
    facts: the facts of all clients, idle or not.
    is_idle: bool [clients of the run], True for `clients`.
    state: the arrays that the rule remembers and may change; checkpoints contain them.
    """

    count: int
    pool: int
    now: float
    version: int
    concurrency: int
    facts: ClientFacts
    is_idle: np.ndarray
    state: MutableMapping[str, np.ndarray]
    make_generator: Callable[[], np.random.Generator]
    measure_losses: Callable[[Sequence[int], int | None], Floats]
    estimate_seconds: Callable[[], Floats]
    estimate_sending: Callable[[Sequence[int]], Floats]

    @cached_property
    def clients(self) -> Ints:
        """The idle and available clients, ascending, int64 [n]."""
        return np.flatnonzero(self.is_idle)

    @cached_property
    def samples(self) -> Ints:
        """The number of training samples of each client in `clients`, int64 [n]."""
        return self.facts.samples[self.clients]

    @cached_property
    def participations(self) -> np.ndarray:
        """The number of jobs of each client so far, int32 [n]."""
        return self.facts.participations[self.clients]

    @cached_property
    def accepted(self) -> np.ndarray:
        """The number of each client's jobs in the aggregations so far, int32 [n].

        Failed jobs count, too: an aggregation may be planned before its jobs are trained.
        """
        return self.facts.accepted[self.clients]

    @cached_property
    def loss(self) -> Floats:
        """The mean training loss of each client's last aggregated job, float64 [n]; nan if none.

        A rule that reads it must have "loss" in its attribute `reports`: `reports = ("loss",)`.
        """
        return self.facts.loss[self.clients]

    @cached_property
    def norm(self) -> Floats:
        """The Euclidean norm of each client's last aggregated update, float64 [n]; nan if none.

        A rule that reads it must have "norm" in its attribute `reports`: `reports = ("norm",)`.
        """
        return self.facts.norm[self.clients]

    @cached_property
    def seconds(self) -> Floats:
        """The duration in virtual seconds of each client's last job, float64 [n]; nan if none.

        Lost jobs and jobs in flight do not count.
        """
        return self.facts.seconds[self.clients]

    @cached_property
    def staleness(self) -> Floats:
        """The staleness of each client's last job in an aggregation, float64 [n]; nan if none.

        Failed jobs count, too.
        """
        return self.facts.staleness[self.clients]

    @cached_property
    def last_finish(self) -> Floats:
        """The virtual time at which each client's last job finished, float64 [n]; nan if none.

        Lost jobs and jobs in flight do not count.
        """
        return self.facts.last_finish[self.clients]

    @cached_property
    def expected_seconds(self) -> Floats:
        """The expected virtual seconds of a job of each client in `clients`, float64 [n].

        A job receives the model, trains and sends the update. The fleet estimates each client's
        first job, so clients without a job so far have a value, too. Later jobs have the same
        value.
        """
        return self.estimate_seconds()[self.clients]

    def sending_seconds(self, clients: Sequence[int] | np.ndarray) -> Floats:
        """Return the virtual seconds that each client needs to send its update, float64.

        `expected_seconds` contains these seconds. They are 0 if the fleet only knows the duration
        of a whole job.
        clients: the numbers of clients.
        """
        return self.estimate_sending([int(client) for client in clients])

    @cached_property
    def generator(self) -> np.random.Generator:
        """The random generator of this call of `select`."""
        return self.make_generator()

    def draw(self, count: int, weights: np.ndarray | None = None) -> Ints:
        """Draw idle, available clients without replacement, int64, in the order of the draw.

        count: the number of clients; if fewer are idle, all are returned.
        weights: [n], at least 0. Each draw takes one of the remaining clients with a probability in
        proportion to its weight. Clients of weight 0 come last. None means equal probabilities.
        """
        clients = self.clients
        if weights is None:
            size = min(count, len(clients))
            return self.generator.choice(clients, size=size, replace=False)
        return draw_weighted(self.generator, clients, np.asarray(weights, np.float64), count)

    def measure(self, clients: Sequence[int] | np.ndarray, samples: int | None = None) -> Floats:
        """Return the current model's loss on each client's training samples, float64 [clients].

        The rule must set `measures = True`, and may call `measure` once in each `select`. On the
        virtual clock, each client receives the model and sends one float. Jobs start when the
        slowest client has sent its loss. While a run is only planned, all losses are nan.
        clients: one or more of `self.clients`.
        samples: the largest number of samples of each client, drawn again after each aggregation;
        None means all.
        """
        return self.measure_losses([int(client) for client in clients], samples)


class Selection:
    """A rule that chooses the clients of each dispatch.

    reports: the results of training that the rule needs: "loss" for `SelectionView.loss`, "norm"
    for `SelectionView.norm`.
    measures: True if the rule calls `SelectionView.measure`.

    A rule with neither lets the planner decide about many aggregations before their jobs are
    trained.
    """

    @property
    def reports(self) -> tuple[Report, ...]:
        """The results of training that the rule needs: "loss", "norm", both, or none of them.

        A subclass may set a class attribute instead: `reports = ("loss",)`.
        """
        return ()

    @property
    def measures(self) -> bool:
        """True if the rule calls `SelectionView.measure`."""
        return False

    @property
    def plans_ahead(self) -> bool:
        """True if the rule's decisions do not depend on training."""
        return not self.reports and not self.measures

    def state(self, clients: int) -> Mapping[str, np.ndarray]:
        """Return the initial arrays that the rule remembers, by name.

        clients: the number of clients.
        """
        return {}

    def select(self, view: SelectionView) -> Sequence[int] | np.ndarray:
        """Return the clients to dispatch: at most `view.count` of `view.clients`, each once.

        raysim calls this function when a client is idle and available. If no job is in flight,
        return at least one client. If the rule returns fewer than `view.count` clients, raysim
        calls it again later.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no function 'select'. Define it in this class."
        )


@dataclass(frozen=True)
class Random(Selection):
    """Choose clients uniformly at random."""

    def select(self, view: SelectionView) -> Sequence[int] | np.ndarray:
        """Draw `view.count` clients without replacement, all with the same probability."""
        # The planner makes the same draw in less time, and does not call this function.
        return view.draw(view.count)
