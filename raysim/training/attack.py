"""Attackers among the clients: who they are, and what they send, or learn from, in place of the truth.

They are drawn once from the seed, among the clients that have samples. With y their label of C and D what they learnt:

    label_flip   they train on C - 1 - y                                  Fang et al., USENIX Security 2020
    sign_flip    -scale D                                                 Li et al., AAAI 2019 (RSA)
    scaled       scale D                                                  Bagdasaryan et al., AISTATS 2020
    gaussian     noise of deviation sigma                                 Blanchard et al., NeurIPS 2017
    alie         mean + z deviation of the honest updates, by coordinate  Baruch et al., NeurIPS 2019, Algorithm 3

Choices where the papers are silent
- The server's side changes the updates once they are there, before anything is made of them: on any number of workers
  the same bits. What else attackers upload or keep, and BatchNorm's statistics, are what their training left.
- ALIE's statistics are those of the honest updates of the same aggregation, with the population's deviation; the paper
  estimates them from the attackers' own data. z is that of each aggregation's n updates and m attackers, at least 0.
- A changed update has to pass `faults.norm` like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raysim.api.messages import Failure, Update
from raysim.data.partition import CSR, Ints
from raysim.primitives.checks import above, at_least, between, require
from raysim.primitives.streams import stream
from raysim.vectors.blocks import in_blocks


@dataclass(frozen=True)
class Attack:
    """kind: what attackers do. share: of the clients, rounded. scale: of sign_flip and scaled. sigma: of gaussian.
    z: of alie; None: as the paper computes it.
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
            "another one with attack.kind=scaled",
            "times 1 changes nothing",
        )

    @property
    def on_updates(self) -> bool:
        """Whether it is on what clients send, and not on their data."""
        return self.kind not in ("none", "label_flip")


# --- mathematics ------------------------------------------------------------------------------------------------------
def largest_z(updates: int, attackers: int) -> float:
    """z_max of so many updates in all: the normal quantile of (n - m - s) / (n - m), s = floor(n / 2 + 1) - m."""
    honest = updates - attackers
    share = (honest - (updates // 2 + 1 - attackers)) / honest
    return max(0.0, NormalDist().inv_cdf(min(share, 1 - 0.5 / honest))) if share > 0 else 0.0


def a_little(honest: Sequence[Tensor], z: float) -> Tensor:
    """[d] mean + z * deviation of the vectors ``honest`` [d], coordinate by coordinate."""
    found = torch.empty_like(honest[0])

    def fill(part: slice) -> None:
        rows = torch.stack([row[part] for row in honest])
        found[part] = rows.mean(0) + z * rows.std(0, correction=0)

    in_blocks(len(found), fill)
    return found


# --- who and what -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Attackers:
    """The attackers of a run. counts [clients]: training samples; most: the norm above which an update is refused."""

    attack: Attack
    seed: int
    counts: Ints
    most: float | None = None
    label: Callable[[int], str] = "client {}".format  # what a client is called in errors

    @cached_property
    def clients(self) -> Ints:
        """Who they are, ascending."""
        if self.attack.kind == "none":
            return np.empty(0, np.int64)
        able = np.flatnonzero(self.counts)
        drawn = stream(self.seed, "attack.clients").permutation(able)[
            : round(self.attack.share * len(able))
        ]
        return np.sort(drawn)

    @cached_property
    def _members(self) -> frozenset[int]:
        return frozenset(self.clients.tolist())

    def among(self, clients: Sequence[int]) -> int:
        """How many of these attack."""
        return sum(client in self._members for client in clients)

    def check(self, kind: str, train: CSR, size: int) -> None:
        """Raises ValueError where the attack cannot be carried out. kind: of task; size: updates in an aggregation."""
        attack = self.attack
        if attack.kind != "none" and not len(self.clients):
            raise ValueError(
                f"attack.share={attack.share:g} of {len(self.counts)} clients is nobody: raise it"
            )
        if attack.kind == "alie" and size < 3:
            raise ValueError(
                f"attack.kind=alie hides among the updates of an aggregation, which has at most {size}: aggregate more"
            )
        if attack.kind != "label_flip":
            return
        if kind != "classification":
            raise ValueError(
                f"attack.kind=label_flip needs classes, and this data is for {kind}: choose another kind"
            )
        theirs = np.isin(train.owners, self.clients)
        if np.isin(train.indices[theirs], train.indices[~theirs]).any():
            raise ValueError(
                "attack.kind=label_flip would flip labels of honest clients, for clients share samples in this "
                "partition: choose another one"
            )

    def labels(self, labels: Tensor, train: CSR, classes: int) -> Tensor:
        """The labels [n] of a data set as the clients see them; itself unless some are flipped."""
        if self.attack.kind != "label_flip":
            return labels
        rows = torch.from_numpy(train.indices[np.isin(train.owners, self.clients)])
        seen = labels.clone()
        seen[rows] = classes - 1 - seen[rows]
        return seen

    def poisoned(
        self, updates: Sequence[Update | Failure], trained: int, version: int
    ) -> list[Update | Failure]:
        """Return the updates that the server gets: the attackers' first `trained` entries are changed.

        version: the server's, to which they are about to be added.
        """
        deltas = {
            place: update.delta
            for place, update in enumerate(updates)
            if isinstance(update, Update)
        }
        honest = [
            torch.from_numpy(delta)[:trained]
            for place, delta in deltas.items()
            if delta is not None and updates[place].client not in self._members
        ]
        common = None
        if self.attack.kind == "alie" and 0 < len(honest) < len(deltas):
            z = (
                largest_z(len(deltas), len(deltas) - len(honest))
                if self.attack.z is None
                else self.attack.z
            )
            common = a_little(honest, z).numpy()
        return [
            self._changed(update, trained, common, (version, place))
            if isinstance(update, Update) and update.client in self._members
            else update
            for place, update in enumerate(updates)
        ]

    def _changed(
        self, update: Update, trained: int, common: np.ndarray | None, place: tuple[int, int]
    ) -> Update | Failure:
        assert update.delta is not None, (
            "workers sum no updates of a run whose attackers change them"
        )
        delta = update.delta.copy()
        params = delta[:trained]
        if self.attack.kind in ("sign_flip", "scaled"):
            params *= -self.attack.scale if self.attack.kind == "sign_flip" else self.attack.scale
        elif self.attack.kind == "gaussian":
            params[:] = self.attack.sigma * stream(
                self.seed, "attack.noise", *place
            ).standard_normal(trained)
        elif common is not None:
            params[:] = common
        try:
            check_norm(float(torch.linalg.vector_norm(torch.from_numpy(params))), self.most)
        except ValueError as error:
            text = f"{self.label(update.client)}: {error}"
            return Failure(update.job, update.client, update.version, "server", "", text)
        return replace(update, delta=delta)


def check_norm(norm: float, most: float | None) -> None:
    """Raises ValueError where the norm of an update is not finite, or above what faults.norm allows."""
    if not math.isfinite(norm):
        raise ValueError("the update has no finite norm; lower local.lr or set local.clip")
    if most is not None and norm > most:
        raise ValueError(f"the update has the norm {norm:g}, faults.norm={most:g} allows less")
