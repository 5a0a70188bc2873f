"""DP-FedAvg: clip the clients' updates and add noise, for differential privacy of clients.

Source: McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018),
Algorithm 1 with flat clipping and a fixed denominator. The clipping bound C adapts as in Andrew et
al., "Differentially Private Learning with Adaptive Clipping" (NeurIPS 2021), Algorithm 1. x is the
model, and N(0, q) is Gaussian noise with the variance q. A round has m clients with the updates
D_i. The bit b_i is 1 if |D_i| <= C, otherwise 0. The settings are z (`noise`), s (`bit_noise`),
`quantile` and `rate`:

    x <- x + (sum_i D_i min(1, C / |D_i|) + N(0, (z_D C)^2)) / m
    C <- C exp(-rate (b - quantile)),  b = (sum_i b_i + N(0, s^2)) / m
    z_D = (z^-2 - (2 s)^-2)^(-1/2)

The two noisy sums together have the privacy loss of the first sum alone with noise z.

The two epsilons
- The guarantee is (epsilon, delta)-differential privacy of clients. It covers the models and bounds
  C of the run, but no other columns of the history and no scores of single clients.
- ``dp_fedavg.epsilon`` is for rounds of exactly m of the n clients with samples, which raysim
  draws. Neighbouring data sets differ in the data of one client. This changes the sum of clipped
  updates by at most 2 C, so epsilon is computed for the noise z / 2 (Wang, Balle and
  Kasiviswanathan, AISTATS 2019).
- ``dp_fedavg.epsilon_poisson`` is what most papers print. It assumes that each client joins a round
  independently with probability m / n, which is not true for raysim's rounds. Neighbouring data
  sets then differ by one added client.
- Neither number holds if the devices decide which clients take part (availability, over-selection,
  deadlines).
- The noise comes from the run's seed. The method measures the cost of privacy, but protects nobody.

Departures from the papers
- s is m / 20 by default, as in the paper, but at least z. With noise 0 no epsilon is reported.
- All clients have the same weight. A failed client adds 0 to both sums; the divisor is still m.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.norm_clipping import clip_factor
from raysim.methods.recombination import weighted_rows
from raysim.primitives.checks import above, at_least, between, in_range
from raysim.primitives.extras import import_optional
from raysim.vectors.gram import linear_combination

if TYPE_CHECKING:
    from raysim.api.declare import Declarations
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

_ORDERS = (*range(2, 65), 80, 96, 128, 256, 512, 1024)


def noise_of_sum(noise: float, bit_noise: float) -> float:
    """Return z_D, the noise for the sum of the updates: (noise^-2 - (2 bit_noise)^-2)^(-1/2).

    With z_D, the sum and the number of unclipped updates together have the same privacy loss as the
    sum alone with `noise`. z_D and `noise` are in units of the clipping bound.
    noise: the noise of the sum alone; 0 returns 0.
    bit_noise: the standard deviation of the noise on the number of unclipped updates.
    """
    return (noise**-2 - (2 * bit_noise) ** -2) ** -0.5 if noise else 0.0


def adapted_bound(bound: float, within: float, quantile: float, rate: float) -> float:
    """Return the next clipping bound, bound * exp(-rate * (within - quantile)).

    bound: the current clipping bound.
    within: the (noisy) share of updates that `bound` did not clip.
    quantile: the share of updates that should not be clipped.
    """
    return bound * math.exp(-rate * (within - quantile))


@functools.cache
def _divergences(noise: float, clients: int, cohort: int, poisson: bool) -> np.ndarray:
    """Return the Renyi divergences of one round, one for each order in `_ORDERS`.

    noise: the standard deviation of the noise divided by the clipping bound.
    clients: the number of clients with samples.
    cohort: the (expected) number of clients in a round.
    poisson: False for rounds of a fixed size.
    """
    privacy = import_optional("dp_accounting", "method=dp_fedavg")
    relation = privacy.NeighboringRelation
    accountant = import_optional("dp_accounting.rdp", "method=dp_fedavg").RdpAccountant(
        _ORDERS, relation.ADD_OR_REMOVE_ONE if poisson else relation.REPLACE_ONE
    )
    gaussian = privacy.GaussianDpEvent(noise if poisson else noise / 2)
    if poisson:
        accountant.compose(privacy.PoissonSampledDpEvent(cohort / clients, gaussian))
    else:
        accountant.compose(privacy.SampledWithoutReplacementDpEvent(clients, cohort, gaussian))
    divergences: np.ndarray = accountant.rdp
    return divergences


def epsilon(
    noise: float, clients: int, cohort: int, rounds: int, delta: float, poisson: bool = False
) -> float:
    """Return the epsilon of the (epsilon, delta)-differential privacy after some rounds.

    noise: the standard deviation of a round's noise, in units of the clipping bound.
    clients: the number of clients that have samples.
    cohort: the number of clients in a round; with `poisson`, its expected value.
    delta: the probability with which the guarantee may fail.
    poisson: True if each client joins a round independently; False if rounds have a fixed size.
    """
    spent = rounds * _divergences(noise, clients, cohort, poisson)
    rdp = import_optional("dp_accounting.rdp", "method=dp_fedavg")
    return float(rdp.compute_epsilon(np.array(_ORDERS), spent, delta)[0])


class DPFedAvg(Method):
    """A server rule with clipped updates and noise, for differential privacy.

    Updates that are longer than the clipping bound C are scaled down to the length C.
    noise: the number z, on which epsilon depends; 0 adds no noise. With a constant C, the noise on
    the sum of updates has the standard deviation z C. With a `quantile`, it has z_D C with z_D =
    (z^-2 - (2 bit_noise)^-2)^(-1/2).
    clip: the clipping bound C in the first round.
    quantile: the share of updates that C should not clip; None keeps C constant.
    rate: the speed at which C changes.
    bit_noise: the standard deviation of the noise on the number of unclipped updates, with a
    `quantile`. None takes the larger of `noise` and m / 20 for a round of m clients.
    delta: the probability delta of the guarantee; None is n^-1.1 for n clients with samples.
    """

    name = "dp_fedavg"
    paper = "McMahan et al., ICLR 2018; Andrew et al., NeurIPS 2021"
    weighting = "uniform"

    def __init__(
        self,
        noise: float = 1.0,
        clip: float = 0.1,
        quantile: float | None = 0.5,
        rate: float = 0.2,
        bit_noise: float | None = None,
        delta: float | None = None,
    ):
        self.noise = at_least("method.dp_fedavg.noise", noise, 0.0)
        self.clip = above("method.dp_fedavg.clip", clip, 0.0)
        if quantile is not None:
            between("method.dp_fedavg.quantile", quantile, 0.0, 1.0)
        self.quantile = quantile
        self.rate = at_least("method.dp_fedavg.rate", rate, 0.0)
        if bit_noise is not None:
            reason = "the noise of the bits must be more than half of the noise"
            above("method.dp_fedavg.bit_noise", bit_noise, noise / 2, reason)
        self.bit_noise = bit_noise
        if delta is not None:
            in_range("method.dp_fedavg.delta", delta, above=0, below=1)
        self.delta = delta

    def setup(self, run: Setup) -> None:
        """Declare the server state, and refuse schedules and methods that would break privacy.

        The server state is the clipping bound and the number of rounds so far.
        """
        run.excludes(
            "fedexp", "the step of 'fedexp' depends on single updates, which are not private"
        )
        run.needs_clients("its noise hides a client among others")
        run.require(
            not run.has_stale_updates,
            "schedule: method 'dp_fedavg' computes epsilon for synchronous rounds, but with this "
            "schedule updates may be stale. Choose schedule=synchronous.",
        )
        run.check(self._check_privacy)
        if self.noise:
            import_optional("dp_accounting", "method=dp_fedavg")
        run.server_state("bound", lambda server: torch.tensor(self.clip, dtype=torch.float64))
        run.server_state("releases", lambda server: torch.tensor(0))

    def _check_privacy(self, run: Declarations) -> Sequence[str]:
        """Raise ValueError if the server would see values to which this method adds no noise.

        Such values are buffers, single updates that another method reads, and what another method
        uploads besides updates. The returned sequence of warnings is always empty.
        """
        statistics = [e for e in run.layout.entries if not (e.parameter or e.personal)]
        for entry in statistics:
            if entry.network != "model":
                method = entry.network.partition(".")[0]
                raise ValueError(
                    f"method '{method}' shares the buffer '{entry.name}' of its network, but "
                    "method 'dp_fedavg' adds noise only to parameters. Remove one of the two "
                    "methods."
                )
        if statistics:
            raise ValueError(
                "model: method 'dp_fedavg' adds noise only to parameters, but clients of this "
                f"run also send the buffer '{statistics[0].name}'. Choose a model without such "
                "buffers, or keep BatchNorm on the clients with method=dp_fedavg+fedbn."
            )
        for other in run.methods:
            if other.method != self.name and other.sees_updates():
                raise ValueError(
                    f"method '{other.method}' sends the server more than clipped updates, or "
                    "reads the update of a single client on the server, but method 'dp_fedavg' "
                    "adds noise only to the sum of clipped updates. Remove one of the two "
                    "methods."
                )
        return ()

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the noisy mean of the clipped updates; set the next clipping bound."""
        rows, bound = weighted_rows(aggregation, server), float(server.state["bound"])
        factors = [clip_factor(row, bound) for row in rows]
        total = linear_combination(rows, factors)
        random = server.stream("noise")
        cohort, adapts = server.max_updates, self.quantile is not None
        num_within = float(sum(factor == 1.0 for factor in factors))

        bit_noise = max(cohort / 20, self.noise) if self.bit_noise is None else self.bit_noise
        noise = noise_of_sum(self.noise, bit_noise) if adapts else self.noise
        if self.noise:
            draws = torch.from_numpy(noise * bound * random.standard_normal(len(total)))
            total += draws.to(total.dtype)
            if adapts:
                num_within += bit_noise * float(random.standard_normal())

        self._record(server, bound, num_within / cohort)
        if self.quantile is not None:
            next_bound = adapted_bound(bound, num_within / cohort, self.quantile, self.rate)
            server.state["bound"].fill_(next_bound)
        return total.div_(cohort)

    def _record(self, server: ServerView, bound: float, within: float) -> None:
        """Write the clipping bound and the share of unclipped updates into the history.

        With noise, also write epsilon, the privacy loss of all rounds so far.
        bound: the clipping bound.
        within: the share of unclipped updates; noisy if the bound adapts and `noise` is above 0.
        """
        releases = int(server.state["releases"].add_(1))
        server.report |= {"bound": bound, "within": within}
        if self.noise:
            clients = server.clients_with_samples
            delta = float(max(clients, 2)) ** -1.1 if self.delta is None else self.delta
            spent = self.noise, clients, min(server.max_updates, clients), releases, delta
            server.report["epsilon"] = epsilon(*spent)
            server.report["epsilon_poisson"] = epsilon(*spent, poisson=True)
