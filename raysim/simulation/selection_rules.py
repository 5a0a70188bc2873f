"""Selection rules: by samples, in turns, by participation, by loss, and by a deadline.

A rule knows the jobs, durations and staleness of each client. Some rules also use training results,
such as losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from raysim.api.selection import Report, Selection, SelectionView
from raysim.primitives.checks import above, at_least, one_of


@dataclass(frozen=True)
class Weighted(Selection):
    """Draw clients with a probability in proportion to their training samples."""

    def select(self, view: SelectionView) -> np.ndarray:
        """Draw `view.count` clients without replacement."""
        return view.draw(view.count, weights=view.samples)


@dataclass(frozen=True)
class RoundRobin(Selection):
    """Let clients take turns, in the order of their numbers.

    A client loses its turn if it is busy or unavailable.
    """

    def state(self, clients: int) -> Mapping[str, np.ndarray]:
        """Return the initial state: under the name "next", the client whose turn is next.

        clients: the number of clients; not used.
        """
        return {"next": np.zeros((), np.int64)}

    def select(self, view: SelectionView) -> np.ndarray:
        """Return the next `view.count` clients that are idle and available."""
        clients = view.clients
        first = np.searchsorted(clients, view.state["next"])
        chosen = np.roll(clients, -first)[: view.count]
        view.state["next"] = chosen[-1] + 1
        return chosen


@dataclass(frozen=True)
class FewestJobs(Selection):
    """Choose the clients with the fewest jobs so far; among equals, draw at random."""

    def select(self, view: SelectionView) -> np.ndarray:
        """Return the `view.count` clients with the fewest jobs."""
        ties = view.generator.random(len(view.clients))
        order = np.lexsort((ties, view.participations))
        return view.clients[order[: view.count]]


@dataclass(frozen=True)
class PowerOfChoice(Selection):
    """Draw candidates, and choose the clients with the largest losses among them.

    Source: Cho, Wang, Joshi, "Client Selection in Federated Learning: Convergence Analysis and
    Power-of-Choice Selection Strategies" (arXiv 2010.01243, 2020). Candidates are drawn without
    replacement, with a probability in proportion to their samples.

    candidates: the number of candidates, d in the paper.
    loss: the loss that decides:

    - "measured": the loss of the current model, which the candidates compute. This costs a forward
      pass, traffic and time. It is pi_pow-d in the paper, or pi_cpow-d with `samples`.
    - "last": the mean training loss of the client's last aggregated job, pi_rpow-d in the paper.
      Clients without such a job are chosen first.

    samples: for "measured": the most samples on which a candidate computes its loss; None uses all.
    """

    candidates: int = 20
    loss: str = "measured"
    samples: int | None = None

    def __post_init__(self) -> None:
        at_least("selection.candidates", self.candidates, 1)
        one_of("selection.loss", self.loss, ("measured", "last"))
        if self.samples is None:
            return
        at_least("selection.samples", self.samples, 1)
        if self.loss == "last":
            raise ValueError(
                f"selection.samples={self.samples} has no effect with selection.loss=last, which "
                "measures no losses. Set selection.samples=null, or selection.loss=measured."
            )

    @property
    def reports(self) -> tuple[Report, ...]:
        """The reports of clients that this rule uses: the training loss, if `loss` is "last"."""
        return ("loss",) if self.loss == "last" else ()

    @property
    def measures(self) -> bool:
        """True if candidates must compute losses, that is if `loss` is "measured"."""
        return self.loss == "measured"

    def select(self, view: SelectionView) -> np.ndarray:
        """Draw candidates and return those with the largest losses.

        If candidates have equal losses, those that were drawn earlier are preferred.
        """
        if self.candidates < view.count:
            raise ValueError(
                f"selection.candidates={self.candidates} is less than the {view.count} clients "
                f"that are dispatched at once. Set selection.candidates={view.count} or more."
            )
        candidates = view.draw(self.candidates, weights=view.samples)
        if self.measures:
            losses = view.measure(candidates, self.samples)
        else:
            losses = view.facts.loss[candidates]
        losses = np.where(np.isnan(losses), np.inf, losses)
        order = np.argsort(-losses, kind="stable")
        return candidates[order[: view.count]]


@dataclass(frozen=True)
class FedCS(Selection):
    """Choose as many clients as are expected to finish before a deadline.

    Source: Nishio, Yonetani, "Client Selection for Federated Learning with Heterogeneous Resources
    in Mobile Edge" (ICC 2019), Algorithm 3. Clients are added one by one: each time, the client
    that prolongs the round least. The choice ends before the first client that would miss the
    deadline. At least one client is chosen. The expected durations assume no drop-outs.

    deadline: in virtual seconds.
    candidates: the number of idle clients that are drawn to choose from; None uses all.
    uplink: "shared" is one link for all clients, which send one after another, as in the paper.
    "own" is a link for each client, as on raysim's virtual clock.
    """

    deadline: float = 60.0
    candidates: int | None = None
    uplink: str = "shared"

    def __post_init__(self) -> None:
        above("selection.deadline", self.deadline, 0)
        if self.candidates is not None:
            at_least("selection.candidates", self.candidates, 1)
        one_of("selection.uplink", self.uplink, ("shared", "own"))

    def select(self, view: SelectionView) -> np.ndarray:
        """Return at most `view.count` clients that are expected to meet the deadline."""
        clients = view.clients
        if self.candidates is not None and self.candidates < len(clients):
            clients = np.sort(view.draw(self.candidates))
        total = view.expected_seconds[np.searchsorted(view.clients, clients)]
        sending = view.sending_seconds(clients)
        if self.uplink == "own":
            order = np.argsort(total, kind="stable")
            fitting = int(np.count_nonzero(total <= self.deadline))
            return clients[order[: max(1, min(fitting, view.count))]]
        return clients[self._schedule_uploads(total - sending, sending, view.count)]

    def _schedule_uploads(self, ready: np.ndarray, sending: np.ndarray, count: int) -> list[int]:
        """Return the positions of clients that meet the deadline, in the order of their uploads.

        If no client meets the deadline, return the client that finishes first.
        ready: seconds from each client's dispatch to the end of the training.
        sending: seconds of each client's upload.
        count: the largest number of positions.
        """
        is_left = np.ones(len(ready), bool)
        chosen: list[int] = []
        end = 0.0  # virtual time at which the last upload ends
        while is_left.any() and len(chosen) < count:
            prolongs = np.where(is_left, sending + np.maximum(ready - end, 0.0), np.inf)
            place = int(np.argmin(prolongs))
            if end + prolongs[place] > self.deadline and chosen:
                break
            is_left[place] = False
            chosen.append(place)
            end += float(prolongs[place])
        return chosen
