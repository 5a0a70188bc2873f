"""Oort's selection of clients: statistical utility times system utility, with exploration.

Source: Lai, Zhu, Madhyastha, Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
Selection" (OSDI 2021), Algorithm 1. The utility of a client that has reported a loss is

    (U + sqrt(0.1 log R / L)) * min(1, T / D)^penalty

    U   the client's samples times its mean loss, clipped at a quantile and scaled to [0, 1]
    R   the current round
    L   the round that chose the client last
    D   the duration of the client's last job that was not lost
    T   the preferred duration, a percentile of the known durations

Exploration draws clients without a loss. A client's probability is in proportion to its samples
times min(1, T / D)^penalty, with the expected duration as D.

Departures from the paper
- U uses the mean loss of a client's samples, which every job reports. The paper uses the root mean
  square.
- U is scaled to [0, 1], and T is a percentile of the known durations, as in the released code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.api.selection import Report, Selection, SelectionView, draw_weighted
from raysim.primitives.checks import above, at_least, between, in_range

UNCERTAINTY = 0.1  # weight of the logarithm of the round in the temporal uncertainty
SMALLEST_RANGE = 1e-4  # of utilities, by which they are divided


@dataclass(frozen=True)
class Oort(Selection):
    """The selection rule Oort: prefer clients with large losses, many samples and short jobs.

    The loss of a client is known after one of its updates was aggregated. Clients with a known loss
    are drawn in proportion to the utility in `raysim.simulation.oort`.

    exploration, exploration_decay, exploration_min: the fraction of a round's clients that are
    drawn without a known loss. It starts at `exploration`. Every round multiplies it by
    `exploration_decay`, down to `exploration_min`.
    cutoff: if a round draws k clients with a known loss, each needs at least `cutoff` times the
    k-th largest utility.
    clip: a quantile of the products of samples and loss over clients. Larger products are reduced
    to this quantile.
    preferred: the preferred duration T is this percentile of the known durations. With 100,
    durations have no effect.
    pacer_step, pacer_delta: `preferred` grows by `pacer_delta` when losses fall. Each round has a
    value: the mean of samples times loss over its chosen clients with a known loss. Losses fall if
    the sum of the last `pacer_step` values is less than the sum of the `pacer_step` values before.
    penalty: if a client's job has a duration D longer than T, the client's utility is multiplied by
    (T / D)^penalty.
    """

    exploration: float = 0.9
    exploration_decay: float = 0.98
    exploration_min: float = 0.2
    cutoff: float = 0.95
    clip: float = 0.95
    preferred: float = 30.0
    pacer_step: int = 20
    pacer_delta: float = 5.0
    penalty: float = 2.0

    reports: ClassVar[tuple[Report, ...]] = ("loss",)

    def __post_init__(self) -> None:
        for name in ("exploration", "exploration_min", "cutoff", "clip"):
            between(f"selection.{name}", getattr(self, name), 0, 1)
        in_range("selection.exploration_decay", self.exploration_decay, above=0, most=1)
        in_range("selection.preferred", self.preferred, above=0, most=100)
        at_least("selection.pacer_step", self.pacer_step, 1)
        at_least("selection.pacer_delta", self.pacer_delta, 0)
        above("selection.penalty", self.penalty, 0)

    def state(self, clients: int) -> Mapping[str, np.ndarray]:
        """Return the initial arrays of this rule's memory, by name.

        - "round": the number of rounds (choices of clients) so far.
        - "exploration", "preferred": the present values of these options.
        - "chosen_in" [clients]: the latest round that chose the client, from 1; 0 for none.
        - "exploited": the clients of the latest round that had a known loss when they were chosen.
        - "utilities": for each earlier round, the mean of samples times loss over its "exploited"
          clients. There are at most 2 * `pacer_step` - 1 entries.
        - "picks": the clients that the latest round chose and `select` has not returned yet.
        """
        return {
            "round": np.zeros((), np.int64),
            "exploration": np.array(self.exploration),
            "preferred": np.array(self.preferred),
            "chosen_in": np.zeros(clients, np.int32),
            "exploited": np.empty(0, np.int64),
            "utilities": np.empty(0),
            "picks": np.empty(0, np.int64),
        }

    def select(self, view: SelectionView) -> np.ndarray:
        """Return up to `view.count` idle clients to dispatch, in random order.

        With pools, or if `view.count` is at least `view.concurrency`, each call is a new round.
        Otherwise a round chooses `view.concurrency` clients and stores them in the array "picks".
        Calls take idle clients from there, until a new round is needed.
        """
        if view.pool >= 0 or view.count >= view.concurrency:
            return self._choose(view, view.count)
        chosen = self._take_picks(view, [])
        if len(chosen) < view.count:
            view.state["picks"] = self._choose(view, view.concurrency)
            chosen = self._take_picks(view, chosen)
        return np.array(chosen, np.int64)

    def _take_picks(self, view: SelectionView, chosen: list[int]) -> list[int]:
        """Move idle clients from the state's array "picks" to the end of `chosen`; return `chosen`.

        "picks" has the clients that the latest round chose and that `select` has not returned yet.
        Stop when `chosen` has `view.count` clients. Drop busy and repeated clients.
        """
        picks = view.state["picks"]
        taken = 0
        while len(chosen) < view.count and taken < len(picks):
            client = int(picks[taken])
            if view.is_idle[client] and client not in chosen:
                chosen.append(client)
            taken += 1
        view.state["picks"] = picks[taken:]
        return chosen

    # --- a round ----------------------------------------------------------------------------------
    def _choose(self, view: SelectionView, size: int) -> np.ndarray:
        """Choose `size` clients for a new round; return them in random order."""
        state, facts = view.state, view.facts
        round_number = int(state["round"]) + 1
        state["round"] = np.array(round_number)
        is_known = np.isfinite(facts.loss)
        self._adjust_pace(view, is_known)
        preferred_s = self._preferred_seconds(float(state["preferred"]), facts.seconds[is_known])
        known = np.flatnonzero(view.is_idle & is_known)
        unknown = np.flatnonzero(view.is_idle & ~is_known)

        share = max(float(state["exploration"]) * self.exploration_decay, self.exploration_min)
        state["exploration"] = np.array(share)
        explored = min(size - int(size * (1 - share)), len(unknown))
        exploited = min(size - explored, len(known))
        explored = min(size - exploited, len(unknown))

        best = self._exploit(view, known, round_number, preferred_s, exploited)
        new = self._explore(view, unknown, preferred_s, explored)
        state["exploited"] = best
        chosen = np.concatenate([best, new])
        state["chosen_in"][chosen] = round_number
        return view.generator.permutation(chosen)

    def _adjust_pace(self, view: SelectionView, is_known: np.ndarray) -> None:
        """Record the last round's utility; if utility has fallen, allow longer durations.

        is_known: bool [clients], True for a client that has reported a loss.
        """
        state = view.state
        last = state["exploited"]
        if not len(last):
            return
        last = last[is_known[last]]
        utilities = view.facts.samples[last] * view.facts.loss[last]
        history = np.append(state["utilities"], utilities.mean() if len(last) else 0.0)
        step = self.pacer_step
        if len(history) == 2 * step:
            if history[:step].sum() > history[step:].sum():
                longer = float(state["preferred"]) + self.pacer_delta
                state["preferred"] = np.array(min(100.0, longer))
            history = history[step:]
        state["utilities"] = history

    @staticmethod
    def _preferred_seconds(percentile: float, seconds: np.ndarray) -> float:
        """Return the preferred duration in seconds: a percentile of known durations.

        Return infinity for percentile 100, or if `seconds` is empty.
        percentile: from 0 to 100.
        seconds: the known durations. Each is the duration of a client's last job that was not lost.
        Only clients that have reported a loss have an entry.
        """
        if percentile >= 100 or not len(seconds):
            return math.inf
        position = min(int(len(seconds) * percentile / 100), len(seconds) - 1)
        return float(np.partition(seconds, position)[position])

    def _exploit(
        self,
        view: SelectionView,
        known: np.ndarray,
        round_number: int,
        preferred_s: float,
        count: int,
    ) -> np.ndarray:
        """Draw `count` clients with a large utility, among the clients that have reported a loss.

        known: the idle clients that have reported a loss.
        round_number: the number of the new round, from 1.
        preferred_s: the preferred duration in seconds.
        """
        if not count:
            return known[:0]
        facts = view.facts
        utility = facts.samples[known] * facts.loss[known]
        position = min(int(len(utility) * self.clip), len(utility) - 1)
        highest = np.partition(utility, position)[position]
        lowest = 0.999 * utility.min()
        scaled = np.minimum(utility, highest) - lowest
        scaled /= max(highest - lowest, SMALLEST_RANGE)
        rounds = np.maximum(view.state["chosen_in"][known], 1)
        score = scaled + np.sqrt(UNCERTAINTY * math.log(round_number) / rounds)
        score *= self._system_factor(facts.seconds[known], preferred_s)
        last = np.partition(score, len(score) - count)[len(score) - count]
        candidates = np.flatnonzero(score >= self.cutoff * last)
        return draw_weighted(view.generator, known[candidates], score[candidates], count)

    def _explore(
        self, view: SelectionView, unknown: np.ndarray, preferred_s: float, count: int
    ) -> np.ndarray:
        """Draw `count` clients that have not reported a loss; prefer fast ones with many samples.

        unknown: the idle clients that have not reported.
        preferred_s: the preferred duration in seconds.
        """
        if not count:
            return unknown[:0]
        weights = view.facts.samples[unknown].astype(np.float64)
        if preferred_s < math.inf:
            weights *= self._system_factor(view.estimate_seconds()[unknown], preferred_s)
        return draw_weighted(view.generator, unknown, weights, count)

    def _system_factor(self, seconds: np.ndarray, preferred_s: float) -> np.ndarray:
        """Return each client's system utility min(1, preferred_s / seconds)^penalty, float [n].

        seconds: float [n], the durations of the clients' jobs.
        preferred_s: the preferred duration in seconds; infinity gives every client 1.
        """
        if preferred_s == math.inf:
            return np.ones(len(seconds))
        factor = np.minimum(1.0, preferred_s / np.maximum(seconds, preferred_s))
        return np.asarray(factor**self.penalty)
