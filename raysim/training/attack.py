"""Simulate attackers among the clients: choose them, and change their labels or updates.

The attackers are drawn once, among the clients with samples. `attack.kind` is "none" or one of the
attacks in the table. y is a label of C classes. D is the update that the attacker would send if it
were honest. mean and std are the mean and standard deviation of each parameter over the honest
updates of the same aggregation.

    label_flip   train on C - 1 - y                   Fang et al., USENIX Security 2020
    sign_flip    send -scale D                        Li et al., AAAI 2019 (RSA)
    scaled       send scale D                         Bagdasaryan et al., AISTATS 2020
    gaussian     send noise from N(0, sigma^2)        Blanchard et al., NeurIPS 2017
    alie         send mean + z std                    Baruch et al., NeurIPS 2019, Algorithm 3

Choices that the papers leave open:
- The server replaces only the shared parameters of an attacker's update, when the update arrives.
- If the norm of these parameters is infinite, nan, or above `faults.norm`, the job has failed.
- std has the divisor n, the number of honest updates.
- z is computed for each aggregation (`largest_z`).
A departure from ALIE: in the paper, the attackers estimate mean and std from their own data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raysim.api.messages import Failure, Update
from raysim.api.method import Method
from raysim.api.server_view import ServerView
from raysim.api.setup import Setup
from raysim.data.partition import CSR, Ints
from raysim.primitives.checks import above, at_least, between, require
from raysim.primitives.streams import stream
from raysim.vectors.blocks import in_blocks


@dataclass(frozen=True)
class Attack:
    """The settings `attack.*`.

    kind: "none" for no attackers.
    share: the share of the clients that attack.
    scale: the factor on the update for "sign_flip" and "scaled".
    sigma: the standard deviation of the noise for "gaussian".
    z: for "alie", the number of standard deviations that attackers add to the mean; None computes
    it as in the paper.
    """

    kind: Literal["none", "label_flip", "sign_flip", "scaled", "gaussian", "alie"] = "none"
    share: float = 0.2
    scale: float = 1.0
    sigma: float = 1.0
    z: float | None = None

    def __post_init__(self) -> None:
        between("attack.share", self.share, 0, 1)
        above("attack.scale", self.scale, 0)
        above("attack.sigma", self.sigma, 0)
        if self.z is not None:
            at_least("attack.z", self.z, 0)
        changes = self.kind != "scaled" or self.scale != 1
        require(
            "attack.scale",
            self.scale,
            changes,
            "a number other than 1 with attack.kind=scaled",
            "a factor of 1 does not change an update",
        )


# --- mathematics ----------------------------------------------------------------------------------
def largest_z(updates: int, attackers: int) -> float:
    """Return the largest z that the ALIE paper allows in an aggregation; at least 0.

    n is the number of updates, and m is the number of updates from attackers. With
    s = floor(n / 2 + 1) - m, the result is the normal quantile at p = (n - m - s) / (n - m). A p
    above 1 - 0.5 / (n - m) is reduced to this value, so that z is finite.
    """
    honest = updates - attackers
    share = (honest - (updates // 2 + 1 - attackers)) / honest
    if share <= 0:
        return 0.0
    quantile = NormalDist().inv_cdf(min(share, 1 - 0.5 / honest))
    return max(0.0, quantile)


def shifted_mean(honest: Sequence[Tensor], z: float) -> Tensor:
    """Return mean + z * population standard deviation, [d], over the vectors `honest` [d]."""
    shifted = torch.empty_like(honest[0])

    def fill(part: slice) -> None:
        rows = torch.stack([row[part] for row in honest])
        shifted[part] = rows.mean(0) + z * rows.std(0, correction=0)

    in_blocks(len(shifted), fill)
    return shifted


# --- the method -----------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False, repr=False)
class Attackers(Method):
    """The attackers of a run, as a method that comes before the user's methods.

    seed: the seed that decides which clients attack.
    train: the rows of each client's training samples in the data set.
    max_norm: the norm above which an update is a failure; None allows any finite norm.
    label: returns the name of a client for errors.
    """

    name = "attackers"

    attack: Attack
    seed: int
    train: CSR
    max_norm: float | None = None
    label: Callable[[int], str] = "client {}".format

    @cached_property
    def clients(self) -> Ints:
        """The clients that attack, ascending."""
        if self.attack.kind == "none":
            return np.empty(0, np.int64)
        able = np.flatnonzero(self.train.counts)
        order = stream(self.seed, "attack.clients").permutation(able)
        return np.sort(order[: round(self.attack.share * len(able))])

    @cached_property
    def _members(self) -> frozenset[int]:
        return frozenset(self.clients.tolist())

    def setup(self, run: Setup) -> None:
        """Declare how the attack changes labels or updates.

        Raises ValueError if the attack is impossible in this run.
        """
        attack = self.attack
        run.require(
            len(self.clients),
            f"attack.share={attack.share:g} selects 0 of {len(self.train)} clients. Increase "
            "attack.share.",
        )
        run.count_clients("attackers", self._members)
        if attack.kind == "label_flip":
            self._check_labels(run)
            run.change_labels(functools.partial(self.flip_labels, classes=run.task.num_classes))
            return
        run.require(
            attack.kind != "alie" or run.max_updates >= 3,
            "attack.kind=alie needs at least 3 updates in an aggregation, but the schedule "
            f"aggregates at most {run.max_updates}. Aggregate more updates at once.",
        )
        run.change_updates(self.change_updates)

    def _check_labels(self, run: Setup) -> None:
        run.require(
            run.task.kind == "classification" and not run.task.has_unlabelled,
            "attack.kind=label_flip needs a class for each sample, but this data is for "
            f"{run.task.kind}, or has samples without a class. Choose another kind.",
        )
        attackers = np.isin(self.train.owners, self.clients)
        rows = self.train.indices
        run.require(
            not np.isin(rows[attackers], rows[~attackers]).any(),
            "attack.kind=label_flip would flip labels of honest clients, because clients share "
            "samples in this partition. Choose another partition or another kind.",
        )

    def flip_labels(self, labels: Tensor, classes: int) -> Tensor:
        """Replace the labels of attackers' samples; return the labels [n] of the data set.

        A label y of an attacker's sample becomes `classes` - 1 - y.
        """
        rows = torch.from_numpy(self.train.indices[np.isin(self.train.owners, self.clients)])
        flipped = labels.clone()
        flipped[rows] = classes - 1 - flipped[rows]
        return flipped

    def change_updates(
        self, arrivals: Sequence[Update | Failure], server: ServerView
    ) -> list[Update | Failure]:
        """Replace the shared parameters in attackers' updates; return all updates and failures.

        A replaced update becomes a failure if its norm is above `faults.norm`, nan or infinite.
        """
        trained = server.layout.trained
        common = self._common_update(arrivals, trained)
        changed: list[Update | Failure] = []
        for place, arrival in enumerate(arrivals):
            if isinstance(arrival, Update) and arrival.client in self._members:
                keys = server.version, place
                arrival = self._changed_update(arrival, trained, common, keys, server.replica)
            changed.append(arrival)
        return changed

    def _common_update(
        self, arrivals: Sequence[Update | Failure], trained: int
    ) -> np.ndarray | None:
        """Return the vector that all attackers send as their update in the attack ALIE, [trained].

        Return None for any other attack, or if no honest client or no attacker has sent an update.
        trained: the number of shared trainable parameters.
        """
        if self.attack.kind != "alie":
            return None
        updates = [arrival for arrival in arrivals if isinstance(arrival, Update)]
        honest = [
            torch.from_numpy(update.delta)[:trained]
            for update in updates
            if update.delta is not None and update.client not in self._members
        ]
        attackers = len(updates) - len(honest)
        if not honest or not attackers:
            return None
        z = self.attack.z
        if z is None:
            z = largest_z(len(updates), attackers)
        return shifted_mean(honest, z).numpy()

    def _changed_update(
        self,
        update: Update,
        trained: int,
        common: np.ndarray | None,
        keys: tuple[int, int],
        replica: int,
    ) -> Update | Failure:
        assert update.delta is not None, "workers do not sum updates that a method changes"
        attack = self.attack
        delta = update.delta.copy()
        params = delta[:trained]
        if attack.kind == "sign_flip":
            params *= -attack.scale
        elif attack.kind == "scaled":
            params *= attack.scale
        elif attack.kind == "gaussian":
            purpose = f"attack.noise.replica{replica}" if replica else "attack.noise"
            noise = stream(self.seed, purpose, *keys)
            params[:] = attack.sigma * noise.standard_normal(trained)
        elif common is not None:
            params[:] = common
        try:
            check_norm(float(torch.linalg.vector_norm(torch.from_numpy(params))), self.max_norm)
        except ValueError as error:
            text = f"{self.label(update.client)}: {error}"
            return Failure(update.job, update.client, update.version, "server", "", text)
        return update._replace(delta=delta)


def check_norm(norm: float, max_norm: float | None) -> None:
    """Raise ValueError if an update's norm is not finite, or above what `faults.norm` allows."""
    if not math.isfinite(norm):
        raise ValueError(
            "the norm of the update is nan or infinite. Decrease local.lr, or set local.clip."
        )
    if max_norm is not None and norm > max_norm:
        raise ValueError(
            f"faults.norm={max_norm:g}: the norm of the update is {norm:g}, which is above this "
            "limit. Decrease local.lr, or increase faults.norm."
        )
