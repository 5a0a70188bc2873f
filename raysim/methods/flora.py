"""FLoRA: stack the factors of all clients, and add their product to the frozen weights.

Source: Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations" (NeurIPS 2024), Algorithm 1. A layer with the frozen weight W0 uses W0 + s B A. K
clients take part; client i has the weight p_i:

    A = [A_1; ...; A_K],    B = [p_1 B_1, ..., p_K B_K],    B A = sum_i p_i B_i A_i
    W0 <- W0 + s B A,    then A is drawn again and B is 0

Departures from the paper
- The traffic of a job is the factors that its client sends and, from version 1 on, one received
  stack A, B. It leaves out W0, also for a client that missed rounds.
- The counted size of a stack assumes the largest possible number of updates and the mean rank of
  all clients. A layer's stack counts at most as many floats as W0 has.
- The scale s, model.lora.alpha / model.lora.rank, is the same for all ranks.
- A separate head of the model is trained and averaged, too.
- Stale updates are added without a correction.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from raysim.api.method import Method
from raysim.methods.lora_factors import (
    ClientRanks,
    Ranks,
    check_ranks,
    declare_ranks,
    find_factors,
    mean_delta,
    require_adapters,
    require_products,
    require_sharing,
    skip_rank_hooks,
    truncate,
)
from raysim.models.lora import CONVOLUTIONS, Adapter, find_adapters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from raysim.api.declarations import Participation
    from raysim.api.local_job import LocalJob
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup
    from raysim.vectors.layout import Layout


def stack_product(factors: Sequence[tuple[Tensor, Tensor, float]]) -> Tensor:
    """Return the sum over clients of weight * B A, [m, n], computed from the stacked factors.

    factors: for each client, A [r, n], B [m, r] and the weight; the rank r may differ.
    """
    a = torch.cat([client_a for client_a, _, _ in factors])
    b = torch.cat([share * client_b for _, client_b, share in factors], 1)
    return b @ a


class FLoRA(Method):
    """A method that adds the product of the stacked factors to the frozen weights.

    ranks: the ranks of the clients' adapters. None gives all clients model.lora.rank. From a list,
    each client draws its rank. A mapping has a rank for each kind of device, such as {phone_low: 2,
    tablet: 8}.
    """

    name = "flora"
    paper = "Wang et al., NeurIPS 2024"

    def __init__(self, ranks: Ranks = None):
        self.ranks = check_ranks("method.flora.ranks", ranks)

    def setup(self, run: Setup) -> None:
        """Turn the weights of layers with adapters into buffers that the server changes."""
        adapters = require_adapters(run)
        require_products(run, adapters)
        require_sharing(run)
        run.excludes("partialfed", "it keeps models on clients, but the frozen weights change")
        run.owns("step")  # a new draw of A is not a step that another rule could scale
        run.corrects("mix")  # after the terms of other methods
        scalings = [adapter.scaling for adapter in adapters]
        run.server_state("scalings", lambda server: torch.tensor(scalings, dtype=torch.float64))
        sizes = [_make_buffer(run, adapter) for adapter in adapters]
        self._count(run, declare_ranks(run, self.ranks, adapters), sizes)
        skip_rank_hooks(run, self.ranks)

    @staticmethod
    def _count(run: Setup, ranks: ClientRanks, sizes: Sequence[int]) -> None:
        """Declare which floats do not travel, so that traffic and virtual time leave them out.

        Clients receive the stacked factors of the last aggregation and send their own factors. At
        version 0, they receive no factors. The frozen weights do not travel.
        sizes: the floats of the frozen weight in each layer with an adapter.
        """
        mean_rank = float(ranks.of_client.mean())
        stack = 0
        for (_, floats), size in zip(ranks.sizes, sizes, strict=True):
            stack += min(size, math.ceil(run.max_updates * mean_rank) * floats)
        weights, factors = sum(sizes), sum(full * floats for full, floats in ranks.sizes)

        def not_received(job: Participation) -> int:
            return weights + factors - (stack if job.version else 0)

        run.omit(not_received, lambda job: weights + ranks.omitted(job))

    # --- a client's job -----------------------------------------------------------------------
    def begin(self, job: LocalJob) -> None:
        """Start from the received factor A, reduced to the client's rank, and from B = 0."""
        truncate(job, int(job.received["rank"]))

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        """Set the gradient to 0 for the rows of A and columns of B that the client does not have.

        grad: the gradient with respect to `job.params[at]`, changed in place.
        """
        grad *= job.scratch["mask"][at]

    # --- an aggregation -----------------------------------------------------------------------
    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the change of all shared parameters and float buffers, from version to version.

        The result is a flat vector [layout.shared], in which the buffers come after the parameters.
        """
        direction = torch.cat([mean_delta(aggregation, server), _buffers(aggregation, server)])
        models = []
        for update, delta in zip(aggregation.updates, aggregation.deltas, strict=True):
            models.append(aggregation.base(update) + delta)
        shares = [weight / aggregation.divisor for weight in aggregation.weights]
        draw = server.stream("a")
        all_factors = find_factors(server.layout)
        weights = _weight_slices(server.layout)
        scalings = server.state["scalings"].tolist()
        for factors, scaling, weight in zip(all_factors, scalings, weights, strict=True):
            stacked = []
            for model, share in zip(models, shares, strict=True):
                a, b = factors.matrices(model)
                stacked.append((a.double(), b.double(), share))
            direction[weight] = (scaling * stack_product(stacked)).flatten().to(direction)
            bound = 1 / math.sqrt(factors.columns)
            new_a = draw.uniform(-bound, bound, factors.a.stop - factors.a.start)
            direction[factors.a] = torch.from_numpy(new_a).to(direction) - server.vector[factors.a]
            direction[factors.b] = -server.vector[factors.b]
        return direction


def _make_buffer(run: Setup, adapter: Adapter) -> int:
    """Turn the frozen weight of an adapted layer into a buffer; return its size in floats."""
    layer = run.model.get_submodule(f"{adapter.layer}.base_layer")
    run.require(
        isinstance(layer, (nn.Linear, *CONVOLUTIONS)),
        f"model.lora.layers: the layer '{adapter.layer}' is a {type(layer).__name__}, but method "
        "'flora' can change only weights of linear layers and convolutions. Leave the layer out.",
    )
    weight = cast("Tensor", layer.weight)
    sharers = [
        name
        for name, parameter in run.model.named_parameters(remove_duplicate=False)
        if parameter is weight and not name.startswith(f"{adapter.layer}.")
    ]
    run.require(
        not sharers,
        f"model.lora.layers: the layer '{adapter.layer}' shares its weight with "
        f"{', '.join(sharers)}, but method 'flora' would change only one of them. "
        f"{_advise_other_layers(run, adapter)}",
    )
    del layer.weight
    layer.register_buffer("weight", weight.detach().clone())
    return weight.numel()


def _advise_other_layers(run: Setup, left_out: Adapter) -> str:
    """Return the end of an error: advice to give no adapter to the layer of `left_out`.

    The advice has an override that names the other layers, such as
    "model.lora.layers=c_attn+c_proj". Without other names, there is no override.
    """
    names = dict.fromkeys(adapter.layer.rpartition(".")[2] for adapter in find_adapters(run.model))
    del names[left_out.layer.rpartition(".")[2]]
    if not names:
        return "Name another layer."
    return f"Leave the layer out: model.lora.layers={'+'.join(names)}"


def _weight_slices(layout: Layout) -> list[slice]:
    """Return where the vector holds the weight of each layer with an adapter.

    The slices have the order of the factors that `find_factors` returns.
    """
    entries = {entry.path: entry for entry in layout.entries if entry.network == "model"}
    slices = []
    for path in entries:
        layer, separator, _ = path.partition(".lora_A.")
        if separator:
            weight = entries[f"{layer}.base_layer.weight"]
            slices.append(slice(weight.start, weight.stop))
    return slices


def _buffers(aggregation: Aggregation, server: ServerView) -> Tensor:
    """Return the mean change of the shared float buffers, such as BatchNorm's statistics.

    The change is the weighted mean of the clients' buffers minus the server's buffers: a flat
    vector in the order of `server.vector`.
    """
    trained, total = server.layout.trained, float(sum(aggregation.weights))
    step = torch.zeros_like(server.vector[trained:])
    for update, delta, weight in zip(
        aggregation.updates, aggregation.deltas, aggregation.weights, strict=True
    ):
        value = aggregation.base(update)[trained:] + delta[trained:]
        step += weight / total * (value - server.vector[trained:])
    return step
