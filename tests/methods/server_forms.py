"""What server rules make of random updates, beside what their functions say: a part of `test_one_mathematics.FORMS`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tiny_runs import Block
from torch import Tensor, nn

from raysim.api.declarations import Task
from raysim.api.messages import Published, Update
from raysim.api.method import Method
from raysim.api.server_view import Aggregation
from raysim.methods import fedbuff, fedcda, fedexp, fedgh, fedld, fedopt, groupdro, inco
from raysim.primitives.streams import stream
from raysim.simulation.server import Server
from raysim.vectors.layout import Layout, plan_layout

Pair = tuple[Any, Any]
Extras = Mapping[str, Any]
CLIENTS, WIDTH = 6, 11
NONE = np.empty(0, np.int64)


def normal(random: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(random.standard_normal(shape))


def server(random: np.random.Generator, *methods: Method, weighting: Any = "uniform", layout: Any = None) -> Server:
    """A server of six clients of random sizes, at a random vector without buffers."""
    layout = layout or Layout((), (), WIDTH, WIDTH, WIDTH, 0, 0)
    counts, start = random.integers(1, 50, size=CLIENTS), normal(random, layout.trained)
    return Server(
        layout, start, torch.from_numpy(NONE), methods, counts, 5, Task((1, 8, 8), 5, CLIENTS), weighting, 5, CLIENTS
    )


def step(
    at: Server,
    deltas: Tensor,
    clients: Sequence[int] = range(CLIENTS),
    staleness: Sequence[int] = (0,) * CLIENTS,
    extras: Sequence[Extras] = ({},) * CLIENTS,
) -> Tensor:
    """The vector after an aggregation of these updates."""
    updates = [
        Update(k, client, at.version - late, 9, 9, 1, 0.0, 0.0, NONE, extra, delta=delta.numpy())
        for k, (delta, client, late, extra) in enumerate(zip(deltas, clients, staleness, extras, strict=False))
    ]
    bases = {at.version - late: Published(at.version - late, at.vector.numpy(), NONE) for late in staleness}
    at.step(updates, {}, staleness[: len(updates)], bases)
    return at.vector


def optimiser(make: Callable[[], Method], name: str, states: Mapping[str, str], **settings: Any) -> Any:
    """Three steps of a method of FedOpt and of its function; states: by argument, the key in the server's state."""

    def form(random: np.random.Generator) -> Pair:
        at = server(random, make(), weighting="samples")
        want = {"params": at.vector.clone()} | {key: at.state[state].clone() for key, state in states.items()}
        weights = torch.from_numpy(at.counts).double()
        for number in (1, 2, 3):
            deltas = normal(random, CLIENTS, WIDTH)
            step(at, deltas)
            known = settings | ({"step": number} if settings.get("step") else {})
            want = getattr(fedopt, name)(**want, delta=weights @ deltas / weights.sum(), **known)
        return {"params": at.vector} | {key: at.state[state] for key, state in states.items()}, want

    return form


def adaptive(make: Callable[[], Method], name: str, **settings: Any) -> Any:
    moments = {f"{key}_moment": f"{make().name}.{key}_moment" for key in ("first", "second")}
    return optimiser(make, name, moments, **settings)


def each(*forms: Callable[[np.random.Generator], Pair]) -> Callable[[np.random.Generator], Pair]:
    """Several settings of one function."""

    def form(random: np.random.Generator) -> Pair:
        pairs = [one(random) for one in forms]
        return [got for got, _ in pairs], [want for _, want in pairs]

    return form


def stretched(random: np.random.Generator) -> Pair:
    """FedExP: its factor and its step, with what a client sends."""
    got, want = [], []
    for scale, minimum in (("one", 1.0), ("count", 0.0)):
        method = fedexp.FedExP(0.3, scale, minimum=minimum)  # type: ignore[arg-type]
        at, deltas = server(random, method, weighting="samples"), normal(random, CLIENTS, WIDTH)
        extras: list[dict[str, Any]] = [{} for _ in deltas]
        for delta, upload in zip(deltas, extras, strict=True):
            vector = SimpleNamespace(layout=at.layout, data=at.vector + delta)
            job: Any = SimpleNamespace(vector=vector, received=at.vector, upload=upload)
            method.finish(job)
        start, weights = at.vector.clone(), torch.from_numpy(at.counts)
        known = {"deltas": deltas, "weights": weights, "epsilon": 0.3, "epsilon_scale": scale, "minimum": minimum}
        got += [step(at, deltas, extras=extras), at.report["fedexp.step_size"]]
        want += [fedexp.server_step(params=start, **known), fedexp.server_step_size(**known)]
    return got, want


def buffered(random: np.random.Generator) -> Pair:
    """FedBuff, with a server rate."""
    got, want = [], []
    for normalization, weighting in (("count", "uniform"), ("none", "uniform"), ("weights", "samples")):
        methods = fedbuff.FedBuff(0.7, normalization), fedopt.FedAvgM(0.3, 0.0)  # type: ignore[arg-type]
        at, deltas = server(random, *methods, weighting=weighting), normal(random, CLIENTS, WIDTH)
        late, start = random.integers(0, 4, size=CLIENTS), at.vector.clone()
        known: dict[str, Any] = {
            "deltas": deltas,
            "staleness": torch.from_numpy(late),
            "exponent": 0.7,
            "sample_weights": torch.from_numpy(at.counts) if weighting == "samples" else None,
            "normalization": normalization,
        }
        got += [step(at, deltas, staleness=late.tolist()), (at.vector - start) / 0.3]
        want += [fedbuff.buffered_step(params=start, server_lr=0.3, **known), fedbuff.buffered_aggregate(**known)]
    return got, want


class Weights(Method):
    """Keeps the weights that an aggregation ends with."""

    name = "weights"
    paper = "a test"

    def absorb(self, aggregation: Aggregation, server: Any) -> None:
        self.used = torch.tensor(aggregation.weights, dtype=torch.float64)


def reweighted(random: np.random.Generator) -> Pair:
    """GroupDRO: q of all clients, and the participants' weights."""
    at = server(random, groupdro.GroupDRO(0.4, prior="samples"), weights := Weights())
    clients, losses = [4, 0, 3], random.exponential(size=3)
    q = at.state["groupdro.log_weights"].softmax(0)
    step(at, normal(random, 3, WIDTH), clients, extras=[{"groupdro.loss": np.array([loss])} for loss in losses])
    new = groupdro.updated_weights(q, torch.from_numpy(losses), torch.tensor(clients), 0.4)
    return [at.state["groupdro.log_weights"].softmax(0), weights.used / weights.used.sum()], [
        new,
        groupdro.aggregation_weights(new, torch.tensor(clients)),
    ]


def chosen(random: np.random.Generator, batches: int = 2, equal_losses: bool = False) -> tuple[Any, ...]:
    """FedCDA after some rounds: its choice, newest first, its mean, and what the functions need for theirs.

    Candidates are in the order in which the participants choose.
    """
    at = server(random, fedcda.FedCDA(3, batches, 0.3, 3, cache="memory"))

    def aggregate(clients: Sequence[int]) -> None:
        losses = np.full(CLIENTS, 0.7) if equal_losses else 5 * random.exponential(size=CLIENTS)
        step(at, normal(random, len(clients), WIDTH), clients, extras=[{"fedcda.loss": loss[None]} for loss in losses])

    for cohort in ((0, 1, 2, 3), (5, 2, 0), (3, 1, 2)):
        aggregate(cohort)
    aggregate((5, 1, 2, 0))
    state = {key.removeprefix("fedcda."): value for key, value in at.state.items()}
    clients, pushes = state["clients"].tolist(), state["pushes"].tolist()
    order = [[0, 1, 2, 5][k] for k in stream(5, "fedcda.batches", 3).permutation(4)]
    rows = [clients.index(client) for client in order]
    counts = [min(3, pushes[row]) for row in rows]
    places = [[(pushes[row] - 1 - back) % 3 for back in range(3)] for row in rows]
    fixed = [row for row in range(len(clients)) if row not in rows]
    absent = torch.tensor(fixed), state["selected"][fixed]
    known = {
        "candidates": torch.stack([state["models"][row, own] for row, own in zip(rows, places, strict=True)]),
        "candidate_losses": torch.stack([state["losses"][row, own] for row, own in zip(rows, places, strict=True)]),
        "num_candidates": torch.tensor(counts),
        "fixed_models": state["models"][absent],
        "fixed_losses": state["losses"][absent],
    }
    choice = [own.index(int(state["selected"][row])) for row, own in zip(rows, places, strict=True)]
    everybody = state["models"][torch.arange(len(clients)), state["selected"]]
    return choice, at.vector, known, everybody


def greedy(random: np.random.Generator) -> Pair:
    choice, mean, known, everybody = chosen(random)
    want = fedcda.greedy_selection(**known, smoothness=0.3, num_batches=2)
    return [choice, mean], [want.tolist(), fedcda.cross_round_aggregate(models=everybody)]


def in_one_batch(random: np.random.Generator) -> Pair:
    choice, _, known, _ = chosen(random, 1)
    return choice, fedcda.select_models(**known, smoothness=0.3).tolist()


def best(random: np.random.Generator) -> Pair:
    """The choice of one batch is the best of all, by the objective; of equal losses, by the divergence alone."""
    got, want = [], []
    for equal in (False, True):
        choice, _, known, _ = chosen(random, 1, equal)

        def value(places: Sequence[int], known: Mapping[str, Tensor] = known, equal: bool = equal) -> float:
            models = torch.cat([known["candidates"][torch.arange(4), list(places)], known["fixed_models"]])
            if equal:
                return float(fedcda.divergence(models=models))
            losses = torch.cat([known["candidate_losses"][torch.arange(4), list(places)], known["fixed_losses"]])
            return float(fedcda.selection_objective(models=models, losses=losses, smoothness=0.3))

        got.append(choice)
        want.append(list(min(itertools.product(*(range(int(n)) for n in known["num_candidates"])), key=value)))
    return got, want


def harmonized(random: np.random.Generator) -> Pair:
    """FedGH: the mean of harmonised updates, formed or not."""
    got, want = [], []
    for test in ("original", "current"):
        at = server(random, fedgh.FedGH(conflict_test=test), weighting="samples")  # type: ignore[arg-type]
        deltas, start, weights = normal(random, CLIENTS, WIDTH), at.vector.clone(), torch.from_numpy(at.counts)
        rows = fedgh.harmonized_gradients(gradients=deltas, conflict_test=test)
        got += [step(at, deltas) - start] * 2
        want.append(fedgh.harmonized_aggregate(gradients=deltas, weights=weights, conflict_test=test))
        want.append(weights.double() @ rows / weights.sum())
    return got, want


def hierarchical(random: np.random.Generator) -> Pair:
    """FedLD's FedGH, tensor by tensor, in the second round."""
    at = server(random, fedgh.HierarchicalFedGH(0.01), layout=plan_layout({"model": nn.Linear(4, 3)}))
    step(at, normal(random, CLIENTS, 15))
    deltas, start, reference = normal(random, CLIENTS, 15), at.vector.clone(), at.state[fedgh.REFERENCE].clone()
    want = [
        fedgh.hierarchical_harmonized_gradient(gradients=deltas[:, part], reference=reference[part], eps=0.01)
        for part in (slice(0, 12), slice(12, 15))
    ]
    return step(at, deltas) - start, torch.cat(want)


def principal(random: np.random.Generator) -> Pair:
    """FedLD's server: the mean of revised updates, formed or not."""
    got, want = [], []
    for normalization in ("l2", "sum", "none"):
        method = fedld.PrincipalGradient(0.7, normalization)  # type: ignore[arg-type]
        at, deltas = server(random, method, weighting="samples"), normal(random, CLIENTS, WIDTH)
        known: dict[str, Any] = {"gradients": deltas, "num_components": 4, "normalization": normalization}
        start, weights = at.vector.clone(), torch.from_numpy(at.counts)
        got += [step(at, deltas) - start] * 2
        want.append(fedld.principal_gradient_aggregate(**known, weights=weights))
        want.append(weights.double() @ fedld.revise_gradients(**known) / weights.sum())
    return got, want


def mixed(random: np.random.Generator) -> Pair:
    """InCo in a stage of three blocks."""
    stage = nn.Module()
    stage.layer1 = nn.Sequential(Block(3), Block(3), Block(3))
    layout = plan_layout({"model": stage})
    shapes = {entry.path: (slice(entry.start, entry.stop), entry.shape) for entry in layout.within(["model"])}
    pairs = inco.source_parameters(names=list(shapes), shapes=[list(shape) for _, shape in shapes.values()])
    assert len(pairs) == 4
    got, want = [], []
    for settings in ({}, {"granularity": "tensor"}, {"align": "conflict"}, {"clamp_max": 0.1, "value_clip": None}):
        direction = normal(random, layout.trained) / 20
        new, at = direction.clone(), SimpleNamespace(layout=layout)
        nothing = Aggregation([], [], [], [], {})
        for target, source in pairs.items():
            own, other = (direction[part].view(shape) for part, shape in (shapes[target], shapes[source]))
            found = inco.cross_layer_gradient(target=own, source=other, **settings)  # type: ignore[arg-type]
            new[shapes[target][0]] = found.flatten()
        got.append(inco.InCo(**settings).mix(direction, nothing, at))  # type: ignore[arg-type]
        want.append(new)
    return got, want


MOMENTUM = {"momentum_buffer": "fedavgm.momentum"}
MOMENTS = {"server_lr": 0.1, "beta1": 0.6, "beta2": 0.8, "tau": 0.05}

SERVER_FORMS: dict[str, Callable[[np.random.Generator], Pair]] = {
    "raysim.methods.fedopt:fedavgm_step": each(
        *(
            optimiser(
                lambda nesterov=nesterov: fedopt.FedAvgM(0.7, 0.6, nesterov),  # type: ignore[misc]
                "fedavgm_step",
                MOMENTUM,
                server_lr=0.7,
                momentum=0.6,
                nesterov=nesterov,
            )
            for nesterov in (False, True)
        )
    ),
    "raysim.methods.fedopt:fedadagrad_step": adaptive(
        lambda: fedopt.FedAdagrad(0.1, 0.6, 0.05), "fedadagrad_step", server_lr=0.1, beta1=0.6, tau=0.05
    ),
    "raysim.methods.fedopt:fedadam_step": each(
        adaptive(lambda: fedopt.FedAdam(**MOMENTS), "fedadam_step", **MOMENTS),
        adaptive(lambda: fedopt.FedAdam(**MOMENTS, bias_correction=True), "fedadam_step", **MOMENTS, step=True),
    ),
    "raysim.methods.fedopt:fedyogi_step": each(
        adaptive(lambda: fedopt.FedYogi(**MOMENTS), "fedyogi_step", **MOMENTS),
        adaptive(lambda: fedopt.FedYogi(**MOMENTS, bias_correction=True), "fedyogi_step", **MOMENTS, step=True),
    ),
    "raysim.methods.fedexp:server_step": stretched,
    "raysim.methods.fedexp:server_step_size": stretched,
    "raysim.methods.fedbuff:buffered_step": buffered,
    "raysim.methods.fedbuff:buffered_aggregate": buffered,
    "raysim.methods.groupdro:updated_weights": reweighted,
    "raysim.methods.groupdro:aggregation_weights": reweighted,
    "raysim.methods.fedcda:greedy_selection": greedy,
    "raysim.methods.fedcda:cross_round_aggregate": greedy,
    "raysim.methods.fedcda:select_models": in_one_batch,
    "raysim.methods.fedcda:selection_objective": best,
    "raysim.methods.fedcda:divergence": best,
    "raysim.methods.fedgh:harmonized_aggregate": harmonized,
    "raysim.methods.fedgh:harmonized_gradients": harmonized,
    "raysim.methods.fedgh:hierarchical_harmonized_gradient": hierarchical,
    "raysim.methods.fedld:principal_gradient_aggregate": principal,
    "raysim.methods.fedld:revise_gradients": principal,
    "raysim.methods.inco:cross_layer_gradient": mixed,
}
