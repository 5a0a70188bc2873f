"""Oort and power-of-choice by hand: dictionaries and loops over single clients.

Oort: Lai et al., OSDI 2021, Algorithm 1. Power-of-choice: Cho et al. 2020. Both rules choose
clients from what the server knows about them, with a random generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


def draw(generator: np.random.Generator, weights: Mapping[int, float], count: int) -> list[int]:
    """Draw `count` clients one after another, with probabilities in proportion to their weights.

    Clients with weight 0 are drawn only if there are not enough clients with a positive weight.
    """
    times = {client: generator.standard_exponential() for client in weights}
    positive = [client for client in weights if weights[client] > 0]
    positive.sort(key=lambda client: times[client] / weights[client])
    return [*positive, *(client for client in weights if weights[client] <= 0)][:count]


def power_of_choice(
    generator: np.random.Generator,
    samples: Mapping[int, int],
    losses: Mapping[int, float],
    candidates: int,
    count: int,
) -> list[int]:
    """Draw candidates in proportion to their samples; return those with the largest losses.

    samples: the number of samples of each idle client.
    losses: the loss of each client, if it is known. Unknown losses count as infinite.
    candidates: the number of clients to draw.
    count: the number of clients to return.
    """
    drawn = draw(generator, samples, candidates)
    chosen: list[int] = []
    while len(chosen) < min(count, len(drawn)):
        left = [client for client in drawn if client not in chosen]
        chosen.append(max(left, key=lambda client: losses.get(client, math.inf)))
    return chosen


@dataclass
class OortByHand:
    """Oort's rule, which chooses the clients of one round after another.

    A known client has reported a loss. Its utility is its number of samples times its loss. Its
    score is the scaled utility plus a bonus, which is larger the longer ago the client was chosen.
    If the duration of a client is above a limit (`preferred`), its score is multiplied by
    (limit / duration)^penalty.

    exploration: the fraction of chosen clients that are not known.
    decay, least: each round multiplies `exploration` by `decay`, but it stays at least `least`.
    cutoff: n known clients are drawn from those with at least `cutoff` times the n-th best score.
    clip: a quantile of the known clients' utilities; larger utilities are reduced to it.
    preferred: the limit is this percentile of the known durations; 100 means no limit.
    window, delta: after each `window` rounds, `preferred` grows by `delta` if utilities were lower
    than in the `window` rounds before.
    number: the number of rounds so far.
    exploited: the known clients that the last round has chosen.
    utilities: the mean utility of the chosen known clients, for each earlier round that chose any.
    """

    exploration: float
    decay: float
    least: float
    cutoff: float
    clip: float
    preferred: float
    window: int
    delta: float
    penalty: float
    number: int = 0
    last_round: dict[int, int] = field(default_factory=dict)
    exploited: list[int] = field(default_factory=list)
    utilities: list[float] = field(default_factory=list)

    def choose(
        self,
        generator: np.random.Generator,
        idle: Sequence[int],
        samples: Mapping[int, int],
        losses: Mapping[int, float],
        seconds: Mapping[int, float],
        expected: Mapping[int, float],
        count: int,
    ) -> list[int]:
        """Return the clients of the next round.

        losses, seconds: for each client that has reported, mean loss and duration of its last job.
        expected: for each client that has not reported, the expected duration of a job, in seconds.
        """
        self.number += 1
        if self.exploited:
            reported = [samples[c] * losses[c] for c in self.exploited if c in losses]
            self.utilities.append(sum(reported) / len(reported) if reported else 0.0)
            rounds = len(self.utilities)
            if rounds >= 2 * self.window and rounds % self.window == 0:
                before = sum(self.utilities[-2 * self.window : -self.window])
                if before > sum(self.utilities[-self.window :]):
                    self.preferred = min(100.0, self.preferred + self.delta)
        limit = math.inf
        if self.preferred < 100 and losses:
            durations = sorted(seconds[client] for client in losses)
            place = int(len(durations) * self.preferred / 100)
            limit = durations[min(place, len(durations) - 1)]
        self.exploration = max(self.exploration * self.decay, self.least)
        known = [client for client in idle if client in losses]
        unknown = [client for client in idle if client not in losses]
        new_count = min(count - int(count * (1 - self.exploration)), len(unknown))
        best_count = min(count - new_count, len(known))
        new_count = min(count - best_count, len(unknown))

        best: list[int] = []
        if best_count:
            scores = self._scores(known, samples, losses, seconds, limit)
            bar = self.cutoff * sorted(scores.values(), reverse=True)[best_count - 1]
            able = {client: score for client, score in scores.items() if score >= bar}
            best = draw(generator, able, best_count)
        new: list[int] = []
        if new_count:
            weights = {c: samples[c] * self._factor(expected[c], limit) for c in unknown}
            new = draw(generator, weights, new_count)
        self.exploited = best
        for client in (*best, *new):
            self.last_round[client] = self.number
        return [*best, *new]

    def _scores(
        self,
        known: Sequence[int],
        samples: Mapping[int, int],
        losses: Mapping[int, float],
        seconds: Mapping[int, float],
        limit: float,
    ) -> dict[int, float]:
        utility = {client: samples[client] * losses[client] for client in known}
        ordered = sorted(utility.values())
        highest = ordered[min(int(len(ordered) * self.clip), len(ordered) - 1)]
        lowest = 0.999 * ordered[0]
        scores = {}
        for client in known:
            scaled = (min(utility[client], highest) - lowest) / max(highest - lowest, 1e-4)
            uncertainty = math.sqrt(0.1 * math.log(self.number) / self.last_round[client])
            scores[client] = (scaled + uncertainty) * self._factor(seconds[client], limit)
        return scores

    def _factor(self, duration: float, limit: float) -> float:
        return (limit / duration) ** self.penalty if duration > limit else 1.0
