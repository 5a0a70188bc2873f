"""Functions for methods with special rules for the factors A and B of adapters.

A client of rank r receives, trains and sends the first r rows of A and columns of B. Later rows and
columns are 0 in the client's vector. `raysim/models/lora.py` describes the factors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from raysim.methods.recombination import parameters_of
from raysim.models.lora import Adapter, find_adapters
from raysim.primitives.checks import require
from raysim.primitives.streams import stream
from raysim.vectors.gram import linear_combination

if TYPE_CHECKING:
    from raysim.api.declarations import Participation
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup
    from raysim.vectors.layout import Layout

# Methods that change how factors are trained or averaged; a list may have only one of them.
LORA_METHODS = ("ffa_lora", "fedsa_lora", "flexlora", "hetlora", "flora")
# Methods that keep values for each entry of the vector from one version to later ones.
KEEPERS = ("scaffold", "fedcm", "feddyn", "fedspeed", "ditto", "apfl", "pfedme", "fedala")

Ranks: TypeAlias = dict[str, int] | list[int] | None


def require_adapters(run: Setup) -> tuple[Adapter, ...]:
    """Return the adapters of the run's model. Raise ValueError if it has none.

    Also declare that the method cannot be combined with another one of `LORA_METHODS`, which all
    change how adapters are trained or averaged.
    """
    for other in LORA_METHODS:
        if other != run.method:
            run.excludes(other, "both change how the factors of adapters are trained or averaged")
    adapters = find_adapters(run.model)
    run.require(
        adapters,
        f"model.lora.rank: the model has no adapters, but method '{run.method}' needs them. Set "
        "model.lora.rank=4, for example, or leave the method out.",
    )
    return adapters


def require_products(run: Setup, adapters: Sequence[Adapter]) -> None:
    """Refuse runs in which the server cannot replace the factors A and B of the adapters.

    Methods whose server replaces A and B in each aggregation (FlexLoRA, FLoRA) call this function.
    It refuses the methods in `KEEPERS`, which store a value for each entry of A and B. It also
    refuses grouped convolutions, because B A does not have their shape.
    """
    for other in KEEPERS:
        run.excludes(
            other, "it keeps values for each parameter, but the factors get new values in each step"
        )
    for adapter in adapters:
        a = run.model.get_parameter(adapter.a)
        b = run.model.get_parameter(adapter.b)
        run.require(
            b.numel() == len(a) * len(b),
            f"model.lora.layers: the layer '{adapter.layer}' is a grouped convolution, for which "
            f"method '{run.method}' is not defined. Leave the layer out.",
        )


@dataclass(frozen=True)
class Factors:
    """The positions of the factors A and B of an adapter in the vector.

    a: the slice of A, a matrix [rank, columns].
    b: the slice of B, a matrix [rows, rank].
    rows, columns: the size of the product B A.
    """

    a: slice
    b: slice
    rank: int
    rows: int
    columns: int

    def matrices(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return A [rank, columns] and B [rows, rank] as views of a vector."""
        a = vector[self.a].view(self.rank, self.columns)
        return a, vector[self.b].view(self.rows, self.rank)


def find_factors(layout: Layout) -> tuple[Factors, ...]:
    """Return the positions of the factors of each adapter, in the order of the vector.

    Adapters whose factors are not trained, or not shared, are left out.
    """
    shared = [entry for entry in layout.entries if entry.stop <= layout.trained]
    entries = {entry.path: entry for entry in shared if entry.network == "model"}
    factors = []
    for path, a in entries.items():
        b = entries.get(re.sub(r"\.(lora_|lora_embedding_)A\.", r".\1B.", path))
        if b is None or b is a:
            continue
        rank, floats = a.shape[0], a.stop - a.start
        rows = (b.stop - b.start) // rank
        places = slice(a.start, a.stop), slice(b.start, b.stop)
        factors.append(Factors(*places, rank, rows, floats // rank))
    return tuple(factors)


# --- ranks of clients -----------------------------------------------------------------------------
def check_ranks(key: str, ranks: Ranks) -> Ranks:
    """Return a copy of a method's setting `ranks`, after a check.

    key: the key of the setting, such as "method.flora.ranks".
    ranks: a list of ranks, a rank for each kind of device, or None.
    Raise ValueError if `ranks` is empty or a rank is not a positive integer.
    """
    if ranks is None:
        return None
    require(key, ranks, len(ranks), "one rank or more, or null")
    if isinstance(ranks, Mapping):
        rank_of_place = {f"{key}.{device}": rank for device, rank in ranks.items()}
    else:
        rank_of_place = {f"{key}[{index}]": rank for index, rank in enumerate(ranks)}
    for place, rank in rank_of_place.items():
        require(place, rank, isinstance(rank, int) and rank >= 1, "an integer from 1 on")
    return dict(ranks) if isinstance(ranks, Mapping) else list(ranks)


def require_sharing(run: Setup) -> None:
    """Declare that the method cannot be combined with the methods local and fedproto.

    The clients of these methods share no adapters.
    """
    for other in ("local", "fedproto"):
        run.excludes(other, "its clients share no adapters")


def declare_ranks(run: Setup, ranks: Ranks, adapters: Sequence[Adapter]) -> ClientRanks:
    """Send each job its client's rank; return the ranks of the clients.

    ranks: a rank for each kind of device, or a list from which each client draws a rank. None sends
    nothing and gives every client the rank of the adapters.
    """
    sizes = [
        (len(run.model.get_parameter(adapter.a)), _floats_per_rank(run, adapter))
        for adapter in adapters
    ]
    highest = max(rank for rank, _ in sizes)
    if ranks is None:
        return ClientRanks(np.full(1, highest), sizes, is_equal=True)
    key = f"method.{run.method}.ranks"
    for rank in ranks.values() if isinstance(ranks, Mapping) else ranks:
        run.require(
            rank <= highest,
            f"{key}: the rank {rank} is above model.lora.rank={highest}. Increase "
            "model.lora.rank, or decrease the rank.",
        )
    of_client = _ranks_of_clients(run, key, ranks)
    run.send_to_client("rank", lambda client, server: torch.tensor([int(of_client[client])]), 1)
    return ClientRanks(of_client, sizes)


@dataclass(frozen=True, eq=False)
class ClientRanks:
    """The ranks of all clients, and the sizes of the adapters.

    of_client: int [clients], the rank of each client; [1] if `is_equal`.
    sizes: for each adapter, its rank in the model, and the number of floats for each rank (a row of
    A and a column of B).
    is_equal: True if all clients have the rank of the model, because the setting `ranks` is None.
    """

    of_client: np.ndarray
    sizes: Sequence[tuple[int, int]]
    is_equal: bool = False

    def floats(self, client: int) -> int:
        """Return the number of floats of a client's factors."""
        rank = int(self.of_client[0 if self.is_equal else client])
        return sum(min(full, rank) * floats for full, floats in self.sizes)

    def omitted(self, job: Participation) -> int:
        """Return how many fewer floats the client's factors have than the model's factors."""
        return sum(full * floats for full, floats in self.sizes) - self.floats(job.client)

    def omit(self, run: Setup) -> None:
        """Leave floats beyond a client's rank out of its traffic and virtual time.

        A client of rank r receives and sends only the first r rows of A and columns of B.
        """
        if not self.is_equal:
            run.omit(self.omitted, self.omitted)


def _floats_per_rank(run: Setup, adapter: Adapter) -> int:
    a, b = run.model.get_parameter(adapter.a), run.model.get_parameter(adapter.b)
    return (a.numel() + b.numel()) // len(a)


def _ranks_of_clients(run: Setup, key: str, ranks: Sequence[int] | Mapping[str, int]) -> np.ndarray:
    """Return the rank of each client, int64 [clients].

    key: the key of the setting `ranks`, for errors.
    ranks: a list from which each client draws a rank, or a rank for each kind of device.
    """
    if not isinstance(ranks, Mapping):
        places = stream(run.seed, "lora.ranks").integers(len(ranks), size=run.task.clients)
        return np.array(ranks)[places]
    devices = run.devices
    names = () if devices is None else devices.names
    for name in ranks:
        run.require(
            name in names, f"{key}.{name}: the fleet has no such device. {_format_devices(names)}"
        )
    missing = [name for name in names if name not in ranks]
    run.require(
        not missing,
        f"{key}: the fleet has devices without a rank: {', '.join(missing)}. Give each of them a "
        "rank.",
    )
    assert devices is not None, "a name was found in it"
    rank_of_kind = np.array([ranks[name] for name in names])
    return np.asarray(rank_of_kind[devices.kinds])


def _format_devices(names: Sequence[str]) -> str:
    if not names:
        return "Give a list of ranks instead."
    return f"Give a rank for each of {', '.join(names)}; or a list of ranks."


def needs_mask(run: Setup, ranks: Ranks) -> bool:
    """Return True if clients must set the gradients of some rows of A and columns of B to 0.

    Beyond a client's rank, gradients differ from 0 only if another method changes gradients.
    ranks: the setting `ranks` of the method; None gives all clients the rank of the model.
    """
    return ranks is not None and bool(run.others_fill("gradient") or run.others_fill("perturb"))


def skip_rank_hooks(run: Setup, ranks: Ranks) -> None:
    """Skip the hooks `begin` and `gradient` in a run in which they do nothing.

    `gradient` is also skipped if no other method of the run changes gradients.
    ranks: the setting `ranks` of FLoRA, FlexLoRA or HetLoRA. None skips both hooks.
    """
    if ranks is None:
        run.skip("begin")
    if not needs_mask(run, ranks):
        run.skip("gradient")


def rank_mask(job: LocalJob, rank: int) -> Tensor:
    """Return a mask [layout.trained] of the parameters that a client of this rank trains.

    The mask is 0 for rows of an adapter's A and columns of B after the first `rank`. It is 1 for
    all other trained parameters.
    """
    mask = torch.ones(job.layout.trained, dtype=job.params.dtype, device=job.params.device)
    for factors in find_factors(job.layout):
        a, b = factors.matrices(mask)
        a[rank:] = 0.0
        b[:, rank:] = 0.0
    return mask


def truncate(job: LocalJob, rank: int) -> None:
    """Reduce all adapters of the job's start model to `rank`.

    Rows of A and columns of B after the first `rank` become 0. The mask from `rank_mask` is stored
    in `job.scratch["mask"]`.
    """
    mask = rank_mask(job, rank)
    start = job.start.clone()
    start[: len(mask)] *= mask
    job.start = start
    job.scratch["mask"] = mask


# --- values of clients on the server --------------------------------------------------------------
def mean_delta(aggregation: Aggregation, server: ServerView) -> Tensor:
    """Return the weighted mean of the updates, a vector [layout.trained].

    The result is bit-identical to FedAvg's mean.
    """
    rows = parameters_of(aggregation, server)
    total = linear_combination(rows, aggregation.weights)
    return total.div_(aggregation.divisor)
