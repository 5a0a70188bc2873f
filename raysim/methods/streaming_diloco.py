"""Streaming DiLoCo: divide the model into fragments, and synchronise one of them in each job.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed
Free Lunch" (2025), Algorithm 2. With P fragments, fragment v mod P is *due* in version v. A job
with the base version v sends this fragment. Symbols:

    x, u        the server's model and its momentum
    beta, eta   the factor of the momentum, and the server's learning rate
    l           the client's model, which stays on the client between its jobs
    s           the base version of the client's last job
    g           for each parameter, the value that the client received last
    w_i         the weight of client i
    x_p         the parameters of x that belong to fragment p; the same for l, g, u

Algorithm:

    receive     l_p <- x_p,  g_p <- x_p for the fragments p due in the versions s to v - 1
    train       l <- AdamW(l), all fragments
    send        D_p = l_p - g_p for p = v mod P
    aggregate   d_p = sum_i w_i D_i,p / sum_i w_i,   u_p <- beta u_p + d_p
                x_p <- x_p + eta (d_p + beta u_p)

Departures from the paper
- Training waits while a fragment is exchanged (tau = 0).
- Received values replace those of the client (alpha = 0).
- Clients use `local.optimizer`. Its state starts again in each job, unless
  local.keep_optimizer=true.
- Values travel as 32 bits, not 4 bits.
- Each fragment moves by the mean of its updates, even if some updates are stale.

The simulated traffic to a client is an estimate: it takes the number of the client's earlier jobs
minus 1 as s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import at_least, between, one_of
from raysim.vectors.layout import Entry, Layout

if TYPE_CHECKING:
    from raysim.api.declarations import Participation
    from raysim.api.declare import Declarations
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

Pattern: TypeAlias = Literal["strided", "sequential"]

# Methods that read a client's whole movement, or keep models or values for each parameter.
WHOLE_MODEL_METHODS = (
    "scaffold", "fedcm", "fedspeed", "ditto", "apfl", "pfedme", "fedala", "partialfed", "local",
    "fedproto", "ca2fl", "ace", "fednova", "qfedavg", "hetlora", "centralized",
)  # fmt: skip


def fragments_of(layout: Layout, count: int, pattern: Pattern) -> tuple[tuple[slice, ...], ...]:
    """Return for each fragment the slices of the vector that belong to it.

    A fragment consists of whole layers; with fewer layers than fragments, some fragments are empty.
    Parameters are in the same layer if their names are equal up to the first number, such as
    "model.net.blocks.0". For names without a number, a layer is a module.

    count: the number of fragments.
    pattern: "strided" puts layer i into fragment i mod count; "sequential" keeps neighbouring
    layers together.
    """
    layers: dict[str, list[Entry]] = {}
    for entry in layout.entries:
        if entry.stop <= layout.trained:
            layers.setdefault(_layer_name(entry.name), []).append(entry)
    numbers = np.arange(len(layers))
    fragment = numbers % count if pattern == "strided" else numbers * count // len(layers)
    entries: list[list[Entry]] = [[] for _ in range(count)]
    for number, layer in zip(fragment.tolist(), layers.values(), strict=True):
        entries[number] += layer
    return tuple(layout.stretches(part) for part in entries)


def _layer_name(name: str) -> str:
    """Return the name of the layer to which a parameter belongs.

    It is the parameter's name, up to and including the first number. If there is no number, it is
    the name of the parameter's module.
    """
    numbered = re.match(r".*?\.\d+(?=\.)", name)
    return numbered.group() if numbered else name.rpartition(".")[0]


def due_fragments(since: int, version: int, count: int) -> Sequence[int]:
    """Return the numbers of the fragments that are due in the versions `since` to `version` - 1.

    count: the number of fragments; fragment v mod `count` is due in version v.
    """
    return [number % count for number in range(max(since, version - count), version)]


class StreamingDiLoCo(Method):
    """A method that synchronises one fragment of the model in each round.

    fragments: the number of fragments.
    server_lr: the server's learning rate.
    momentum: the factor of the server's momentum.
    pattern: how layers are divided into fragments, "strided" or "sequential"; see `fragments_of`.
    """

    name = "streaming_diloco"
    paper = "Douillard et al. 2025"
    weighting = "uniform"

    def __init__(
        self,
        fragments: int = 3,
        server_lr: float = 0.7,
        momentum: float = 0.9,
        pattern: Pattern = "strided",
    ):
        self.fragments = at_least("method.streaming_diloco.fragments", fragments, 1)
        self.server_lr = at_least("method.streaming_diloco.server_lr", server_lr, 0.0)
        self.momentum = between("method.streaming_diloco.momentum", momentum, 0.0, 1.0)
        self.pattern = one_of("method.streaming_diloco.pattern", pattern, get_args(Pattern))

    def setup(self, run: Setup) -> None:
        """Declare the client state and server state; count only sent fragments as traffic."""
        for other in WHOLE_MODEL_METHODS:
            run.excludes(other, "it needs all parameters, but each job sends only a part of them")
        run.owns("step")
        run.check(self._check_fragments)
        run.client_state("local", run.zeros)
        run.client_state("received", run.zeros)
        run.client_state("version", lambda samples: torch.full((1,), -1))
        run.server_state("momentum", run.zeros)
        run.omit(
            lambda job: run.layout.trained - self._floats_down(run.layout, job),
            lambda job: run.layout.trained - self._size(run.layout, job.version % self.fragments),
        )

    def _check_fragments(self, run: Declarations) -> Sequence[str]:
        """Return a warning if there are fewer layers than fragments."""
        fragments = fragments_of(run.layout, self.fragments, self.pattern)
        empty = sum(not places for places in fragments)
        if not empty:
            return ()
        return (
            f"method.streaming_diloco.fragments={self.fragments}: {empty} of them are empty, "
            "because the clients share fewer layers. Their rounds synchronise nothing; set it to "
            f"{self.fragments - empty}.",
        )

    def _size(self, layout: Layout, fragment: int) -> int:
        places = fragments_of(layout, self.fragments, self.pattern)[fragment]
        return sum(place.stop - place.start for place in places)

    def _floats_down(self, layout: Layout, job: Participation) -> int:
        """Return an estimate of how many floats a client receives in a job.

        A client's first job receives all floats. A later job receives the fragments that were due
        since the base version of the previous job. k earlier jobs count as if they started from the
        versions 0 to k - 1.
        """
        if not job.earlier_jobs:
            return layout.trained
        since = job.earlier_jobs - 1  # its last version, unless it missed rounds
        due = due_fragments(since, job.version, self.fragments)
        return sum(self._size(layout, fragment) for fragment in due)

    # --- a client's job -----------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Start from the client's last trained model, with some fragments of the received model.

        The received fragments are those that were synchronised since the base version of the
        client's previous job. The first job starts from the whole received model.
        """
        trained = job.layout.trained
        version = int(job.state["version"])
        received = job.broadcast[:trained].clone()
        if version >= 0:
            places = fragments_of(job.layout, self.fragments, self.pattern)
            local, known = job.state["local"].clone(), job.state["received"].clone()
            for fragment in due_fragments(version, job.version, self.fragments):
                for place in places[fragment]:
                    local[place] = known[place] = received[place]
            start = job.start.clone()
            start[:trained] = local
            job.start, received = start, known
        job.scratch["received"] = received

    def end(self, job: LocalJob) -> None:
        """Store the trained model as client state; reduce the update to one fragment.

        This is fragment v mod P, with v the job's base version and P the number of fragments. For
        all other parameters, the update is 0.
        """
        trained, fragment = job.layout.trained, job.version % self.fragments
        received: Tensor = job.scratch["received"]
        params = job.params[:trained]
        local = params.clone()
        params.copy_(job.broadcast[:trained])
        for place in fragments_of(job.layout, self.fragments, self.pattern)[fragment]:
            params[place] = local[place] + (params[place] - received[place])
        job.state["local"], job.state["received"] = local, received
        job.state["version"] = torch.tensor([job.version])

    # --- an aggregation -----------------------------------------------------------------------
    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the server's step with Nesterov's momentum, [layout.trained].

        The step of a fragment is 0 if no update of this aggregation contains the fragment.
        direction: [layout.trained], the mean of all updates.
        """
        weights = [0.0] * self.fragments
        for update, weight in zip(aggregation.updates, aggregation.weights, strict=True):
            weights[update.version % self.fragments] += weight
        total = float(sum(aggregation.weights))
        step = torch.zeros_like(direction)
        momentum = server.state["momentum"]
        places = fragments_of(server.layout, self.fragments, self.pattern)
        for weight, fragment in zip(weights, places, strict=True):
            for place in fragment if weight else ():
                mean = direction[place] / (weight / total)
                momentum[place] = self.momentum * momentum[place] + mean
                step[place] = self.server_lr * (mean + self.momentum * momentum[place])
        return step
