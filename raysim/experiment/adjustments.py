"""Change a run's settings and data if its methods or its model require this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from raysim.api.declarations import Local
from raysim.api.declare import Declarations
from raysim.api.method import Method
from raysim.data.federated import FederatedData, drop_single_rows, pool_clients
from raysim.data.partition import Partitioner
from raysim.experiment.config_files import Node, is_set
from raysim.experiment.instantiate import format_value
from raysim.experiment.parts import build_settings
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import user_path
from raysim.simulation.schedule import Schedule, Synchronous, check_concurrency
from raysim.training.batch_plan import layer_needing_two_rows
from raysim.training.run_spec import Checkpoint, RunSpec


def meet_requirements(node: Node, methods: Sequence[Method]) -> tuple[Node, tuple[str, ...]]:
    """Set each key to the value that a method requires, unless the user set the key.

    Return the new configuration, and a sentence for each changed key. If the user set a key to a
    value that the method does not allow, `Method.setup` refuses it later.
    """
    sentences = []
    for method in methods:
        required = method.settings(build_settings(node)[0].local)
        for key, value in required.items():
            section, _, name = key.rpartition(".")
            values = node.get(section) if section else node
            if not isinstance(values, Mapping) or name not in values:
                raise RefusedError(
                    f"method '{method.name}' requires {key}={format_value(value)}, but this key "
                    "does not exist. Correct what the method's `settings()` returns."
                )
            if values[name] == value or is_set(key, node):
                continue
            sentences.append(
                f"{key}={format_value(value)} in place of {format_value(values[name])}, "
                f"because method '{method.name}' requires it"
            )
            changed = {**values, name: value}
            node = {**node, section: changed} if section else changed
    return node, tuple(sentences)


def drop_untrainable_clients(
    spec: RunSpec, declarations: Declarations, partitioner: Partitioner
) -> tuple[RunSpec, tuple[str, ...]]:
    """Remove the training sample of clients with only one, if the model cannot train on it.

    For example, BatchNorm needs two samples. These clients remain clients, but never train. Return
    the changed `spec`, and a tuple with a warning if there are such clients.
    Raise `ValueError` if the model needs two samples, but the batch size is 1 or no client has two.
    """
    counts, batch = spec.data.partition.train.counts, spec.settings.local.batch
    clients = len(counts)
    single = int(np.count_nonzero(counts == 1))
    if batch > 1 and not single:
        return spec, ()
    layer = layer_needing_two_rows(declarations)
    if not layer:
        return spec, ()
    other_model = "choose a model without such a layer"
    if hasattr(spec.model, "norm"):
        other_model = "choose model.norm=group"
    if batch == 1:
        raise ValueError(
            f"local.batch: the model cannot train on batches of 1 row, because of its {layer}. Set "
            f"local.batch=2 or more, or {other_model}."
        )
    if single == np.count_nonzero(counts):
        raise ValueError(
            "partition: no client has more than one training sample, but the model cannot train "
            f"on a batch of one sample, because of the model's {layer}. Split the data over "
            f"fewer clients, or {other_model}."
        )
    larger_clients = "give each client two samples or more"
    if hasattr(partitioner, "minimum"):
        larger_clients = "raise partition.minimum"
    warning = (
        f"partition: {single} of {clients} clients have one training sample and never train, "
        f"because the model cannot train on a batch of one row (its {layer}). "
        f"To let them train, {larger_clients}, or {other_model}."
    )
    return replace(spec, data=drop_single_rows(spec.data)), (warning,)


def make_folder_absolute(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint options with an absolute folder, so that every process finds it."""
    if not checkpoint.folder or "://" in checkpoint.folder:
        return checkpoint
    return replace(checkpoint, folder=str(user_path(checkpoint.folder).absolute()))


def pool_training(
    data: FederatedData, schedule: Schedule, local: Local, method: str
) -> tuple[FederatedData, Schedule, Local]:
    """Return data, schedule and local training for one client that has the samples of all clients.

    A round processes as many samples as an average round of the federated run.
    method: the name of the method, for errors.
    Raise `RefusedError` if the schedule is not synchronous.
    """
    if not isinstance(schedule, Synchronous):
        raise RefusedError(
            f"method '{method}' trains one model on the data of all clients, which needs "
            "synchronous rounds. Set schedule=synchronous."
        )
    counts = data.partition.train.counts
    check_concurrency(schedule, counts)
    cohort_share = schedule.cohort / np.count_nonzero(counts)
    if local.steps is not None:
        local = replace(local, steps=local.steps * schedule.cohort)
    elif local.epochs is not None:
        epochs = local.epochs * cohort_share
        if float(epochs).is_integer():
            local = replace(local, epochs=int(epochs))
        else:
            samples = len(data.partition.train.indices)
            steps = max(1, round(epochs * samples / local.batch))
            local = replace(local, epochs=None, steps=steps)
    return pool_clients(data), Synchronous(1), local
