"""Decide which models the server of a run has, and make a `Server` object for each model.

A replica is one of these models. A `Network` says which clients each replica serves, and when
replicas exchange their parameters.
"""

from __future__ import annotations

import copy
import functools

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.declare import Declarations
from raysim.api.setup import MethodDeclaration
from raysim.api.topology import Federation, Network
from raysim.primitives.streams import torch_seed
from raysim.simulation.fleet import Fleet
from raysim.simulation.replicas import Replicas
from raysim.simulation.server import Server, default_weighting, make_server
from raysim.training.run_spec import RunSpec
from raysim.vectors.layout import Vector


def make_network(spec: RunSpec, declarations: Declarations, fleet: Fleet) -> Network:
    """Build the topology of a run: which clients each replica serves, and when replicas exchange.

    fleet: gives the region of each client.
    Raises ValueError if the topology does not fit the run's clients, methods or compression.
    """
    settings, counts = spec.settings, spec.data.partition.train.counts
    federation = Federation(
        settings.seed,
        counts,
        settings.weighting or default_weighting(spec.methods),
        declarations.layout.shared,
        functools.partial(_label_counts, spec),
        functools.partial(fleet.regions, settings.seed, len(counts)),
    )
    network = spec.topology.connect(federation)
    _check_network(network, spec)
    _check_methods(network, declarations)
    _check_compression(network, declarations)
    return network


def describe_network(network: Network) -> str:
    """Describe the replicas and their exchanges in one line; "" for a single replica."""
    if network.replicas == 1 and not network.exchanges:
        return ""
    if network.on_clients:
        text = f"{network.replicas} clients with a model each"
    elif network.moves_clients:
        text = f"up to {network.replicas} {network.name}s"
    else:
        sizes = np.bincount(network.replica_of, minlength=network.replicas)
        clients = f"{sizes.min()} to {sizes.max()}" if np.ptp(sizes) else f"{sizes[0]}"
        plural = "s" if network.replicas > 1 else ""
        text = f"{network.replicas} {network.name}{plural} with {clients} clients each"
    if network.own_schedules:
        text += f" and a schedule each; each aggregation of one {network.name} counts as a round"
    return "; ".join(part for part in (text, network.summary) if part)


def _label_counts(spec: RunSpec) -> np.ndarray | None:
    """Count each client's training samples of each class: int64 [clients, classes].

    Return None if the task is not a classification.
    """
    if spec.task.kind != "classification":
        return None
    labels, train = spec.data.open().groups()[0], spec.data.partition.train
    counts = np.zeros((len(train), spec.task.num_classes), np.int64)
    np.add.at(counts, (train.owners, labels[train.indices]), 1)
    return counts


def _check_network(network: Network, spec: RunSpec) -> None:
    counts = spec.data.partition.train.counts
    samples = np.bincount(network.replica_of, counts, minlength=network.replicas)
    empty = np.flatnonzero(samples == 0)
    if len(empty) and not (network.on_clients or network.moves_clients):
        raise ValueError(
            f"topology: no client of {network.name} {empty[0]} has samples, so its model cannot be "
            "trained. Assign clients with samples to it, or use fewer models."
        )
    if network.replicas == 1:
        return
    evaluate = spec.settings.evaluate
    if evaluate.decompose:
        raise ValueError(
            f"evaluate.decompose={evaluate.decompose} compares local models with one shared model, "
            f"but the topology has {network.replicas} models. Set evaluate.decompose=0."
        )
    if network.on_clients and spec.data.partition.unseen_count:
        raise ValueError(
            "evaluate.unseen: unseen clients would have untrained models, because in this "
            "topology each client has its own model. Set evaluate.unseen=0."
        )


def _check_compression(network: Network, declarations: Declarations) -> None:
    """Raise ValueError if the compression does not work with the topology."""
    compression = declarations.compressor
    if compression is None:
        return
    name, compressor = compression
    if network.on_clients:
        raise ValueError(
            f"compression={name} compresses messages between clients and a server, but in this "
            "topology clients exchange models without a server. Set compression=none or "
            "topology=star."
        )
    if compressor.compresses_down and network.replicas > 1:
        raise ValueError(
            f"compression.direction={compressor.direction} compresses the changes of the server's "
            "model, so the server must have a single model. This topology has "
            f"{network.replicas} models. Set compression.direction=up or topology=star."
        )


def _check_methods(network: Network, declarations: Declarations) -> None:
    """Raise ValueError if a method does not work with the topology."""
    if network.replicas == 1 and not network.on_clients:
        return
    for declared in declarations.methods:
        if declared.evaluate is not None:
            raise ValueError(
                f"topology: '{declared.method}' scores models with its own function "
                "(run.evaluate), which is possible only with one model. Set topology=star."
            )
        if not declared.has_parameters:
            raise ValueError(
                f"topology: the parameters of '{declared.method}' are bytes, but a topology with "
                "several models needs parameters that are arrays. Set topology=star."
            )
        if declared.pools:
            raise ValueError(
                f"topology: method '{declared.method}' trains one model on the data of all "
                "clients, but the topology has several models. Set topology=star, or leave the "
                "method out."
            )
        if network.moves_clients and declared.needs_fixed_clients:
            raise ValueError(
                f"topology: method '{declared.method}' needs clients that stay with one model, "
                f"because {declared.needs_fixed_clients}. In this topology clients change "
                "between models. Set topology=star, or leave the method out."
            )
        if network.chosen_by_loss and any(send.to == "client" for send in declared.sends):
            raise ValueError(
                f"topology: method '{declared.method}' sends tensors to single clients, but in "
                "this topology clients receive all models and choose one. Set topology=star, or "
                "leave the method out."
            )
        part = server_part(declared)
        if network.on_clients and part:
            raise ValueError(
                f"topology: method '{declared.method}' needs a server for several clients "
                f"({part}), but in this topology each client has its own model and no server. "
                "Set topology=star, or leave the method out."
            )


def server_part(declared: MethodDeclaration) -> str:
    """Return the first hook or declaration of a method that needs a server; "" if none does.

    Examples are "combine" (a hook) and "run.send" (a declaration). A method that needs a server
    does not work if each client has its own replica.
    """
    for hook in ("weigh", "combine", "step", "absorb"):
        if declared.has_hook(hook):
            return hook
    if any(send.to != "once" for send in declared.sends):
        return "run.send"
    return "run.scores" if declared.scored is not None else ""


def make_replicas(
    spec: RunSpec,
    declarations: Declarations,
    initial: Vector,
    size: int,
    network: Network,
    folder: str,
) -> Replicas:
    """Return the replicas of a run before its first round, each with its server.

    size: the largest number of updates in one aggregation.
    network: the topology, with the clients that each replica serves.
    folder: the run's folder.
    """
    vector = initial.shared.clone()
    counters = initial.counters[: initial.layout.shared_counters].clone()
    make = functools.partial(make_server, spec, declarations, vector, counters, size)
    if network.replicas == 1:
        return Replicas(network, [make()], declarations)
    partition = spec.data.partition
    servers = []
    for replica in range(network.replicas):
        counts, unseen = partition.train.counts, partition.unseen_count
        if not network.on_clients:
            counts, unseen = replica_clients(spec, network.replica_of, replica)
        servers.append(make(counts, unseen, replica))
    if network.chosen_by_loss:
        for server in servers[1:]:
            server.vector = _drawn_vector(spec, declarations, vector, server.replica)
    set_clients = functools.partial(_set_clients, spec) if network.moves_clients else None
    budget = spec.settings.state.bytes
    return Replicas(network, servers, declarations, set_clients, budget, folder)


def replica_clients(spec: RunSpec, replica_of: np.ndarray, replica: int) -> tuple[np.ndarray, int]:
    """Return how many samples each client has for a replica, and how many clients never train it.

    The first result, int64 [clients], is the number of a client's training samples if this replica
    serves the client, and otherwise 0. The second result counts the clients that this replica does
    not serve, and all unseen clients.
    replica_of: int [clients], the replica that serves each client.
    """
    partition = spec.data.partition
    is_member = replica_of == replica
    counts = np.where(is_member, partition.train.counts, 0)
    if partition.unseen is not None:
        is_member[partition.unseen] = False
    return counts, len(counts) - int(np.count_nonzero(is_member))


def _set_clients(spec: RunSpec, replica_of: np.ndarray, server: Server) -> None:
    """Tell the server of a replica which clients the replica serves from now on.

    replica_of: int [clients], the replica that serves each client.
    server: the server of the replica.
    """
    server.set_clients(*replica_clients(spec, replica_of, server.replica))


def _drawn_vector(
    spec: RunSpec, declarations: Declarations, vector: Tensor, replica: int
) -> Tensor:
    """Return a copy of the shared vector in which the model's tensors have new random values.

    Tensors of further networks, such as a method's discriminator, keep the values of `vector`,
    float [layout.shared]. Each replica gets different random values.
    Raises ValueError if a layer of the model cannot draw initial values.
    """
    with torch.random.fork_rng(devices=[]):
        seed = torch_seed(spec.settings.seed, "topology.initial", replica)
        torch.default_generator.manual_seed(seed)
        model = draw_again(declarations.networks["model"])
    drawn = vector.clone()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for entry in declarations.layout.entries:
        if entry.network == "model" and not entry.personal:
            drawn[entry.start : entry.stop] = tensors[entry.path].detach().flatten()
    return drawn


def draw_again(model: nn.Module) -> nn.Module:
    """Return a copy of a model with new initial values, by PyTorch's rule for each layer.

    Raises ValueError if a layer with parameters has no function `reset_parameters`.
    """
    model = copy.deepcopy(model)
    for name, layer in model.named_modules():
        if not any(True for _ in layer.parameters(recurse=False)):
            continue
        if not hasattr(layer, "reset_parameters"):
            raise ValueError(
                "topology.rule=loss needs models with different initial values, but raysim "
                f"cannot draw new values for {name or 'the model'} ({type(layer).__name__}), "
                "because this layer has no function reset_parameters. Choose another model, or "
                "set topology.rule=updates."
            )
        layer.reset_parameters()
    return model
