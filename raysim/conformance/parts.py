"""Checks of models, sources, partitions, schedules, selections, topologies, fleets, observers."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import nn

from raysim.api.selection import Selection
from raysim.api.topology import Topology
from raysim.conformance import agreement
from raysim.conformance.runs import SEED, coordinate, run
from raysim.conformance.study import Study
from raysim.data.partition import CSR, Partition, Partitioner
from raysim.data.raw import Source
from raysim.experiment.recorder import Follower
from raysim.models.classifier import Classifier, ModelRecipe, is_split
from raysim.primitives.kinds import IGNORED
from raysim.results.observers import CurrentRun, Observer, UserObserver
from raysim.simulation.fleet import Fleet
from raysim.simulation.network import make_network
from raysim.simulation.schedule import Buffered, Schedule, Synchronous
from raysim.training.run_spec import build_networks, declare_run, sample_flops

# Each check has a name, and a function that raises AssertionError if the check fails.
Checks: TypeAlias = Iterator[tuple[str, Callable[[], object]]]


def _run_checks(study: Study) -> Checks:
    """Yield the checks of a whole run: the same bits on two workers, and after resuming.

    study: describes the tiny run for the checks (`raysim.conformance.Study`). The checks repeat the
    run with each schedule in `study.schedules`.
    """
    for schedule, fleet in study.each():
        under = f"under {type(schedule).__name__.lower()}"
        yield (
            f"the same bits on one worker and on two, {under}",
            partial(agreement.check_workers, study.spec, schedule, fleet),
        )
        yield (
            f"the same bits straight and resumed, {under}",
            partial(agreement.check_resumed, study.spec, schedule, fleet),
        )


# --- models ------------------------------------------------------------------------------------
def of_model(model: ModelRecipe, study: Study) -> Checks:
    """Yield the checks of a model.

    model: the recipe that builds the model. It replaces `study.model` in all checks.
    study: describes the tiny run for the checks (`raysim.conformance.Study`).
    """
    study = replace(study, model=model)
    yield "a seed gives the same values, another one others", partial(_check_seeds, study)
    yield "features and a head make the outputs", partial(_check_head, study)
    yield from _run_checks(study)
    exact = partial(study.spec, torch.float64)
    yield (
        "the same numbers from recorded steps, or a refusal",
        partial(agreement.check_recorded, exact, rounds=3),
    )


def _network(study: Study, seed: int = SEED) -> nn.Module:
    spec = study.spec()
    return build_networks(replace(spec, settings=replace(spec.settings, seed=seed)))[0]["model"]


def _check_seeds(study: Study) -> None:
    values = []
    with torch.random.fork_rng(devices=[]):
        for seed, elsewhere in ((1, 0), (1, 1), (2, 0)):
            torch.manual_seed(elsewhere)  # a network that draws from it differs
            values.append(_network(study, seed).state_dict())
    one, again, other = values
    assert one.keys() == again.keys() == other.keys(), (
        "the model has other parameters with another seed"
    )
    assert all(torch.equal(one[name], again[name]) for name in one), (
        "one seed gives two networks, perhaps by a global generator"
    )
    assert any(not torch.equal(one[name], other[name]) for name in one), (
        "two seeds give the same network"
    )


def _check_head(study: Study) -> None:
    task, model = study.spec().task, cast(Classifier, _network(study).eval())
    inputs = task.example(4)
    with torch.no_grad():
        logits = model(inputs)
        assert logits.shape == (4, task.num_classes), (
            f"outputs of shape {list(logits.shape)} must be [4, classes]"
        )
        if not is_split(model):
            return
        features = model.features(inputs)
        made = model.head(features)
    assert features.shape == (4, model.feature_dim), (
        f"features of shape {list(features.shape)} must be [4, feature_dim]"
    )
    assert torch.equal(made, logits), "the head makes other outputs of the features than the model"


# --- data --------------------------------------------------------------------------------------
def of_data(data: Source, study: Study) -> Checks:
    """Yield the checks of a source of samples.

    data: the source, which replaces `study.data` in all checks.
    study: describes the tiny run for the checks (`raysim.conformance.Study`).
    """
    yield "it reads the same samples twice", partial(_check_read_twice, data)
    yield "labels and domains name what there is", partial(_check_labels, data)
    yield from _run_checks(replace(study, data=data))


def _check_read_twice(data: Source) -> None:
    np.random.seed(0)  # noqa: NPY002 (a source that draws from it differs)
    one = data.read()
    np.random.seed(1)  # noqa: NPY002
    other = data.read()
    for key, value in vars(one).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, getattr(other, key)), (
                f"{key} differ when the data are read again"
            )


def _check_labels(data: Source) -> None:
    dataset = data.build()
    assert 0 < dataset.train_rows <= len(dataset), (
        f"{dataset.train_rows} of {len(dataset)} rows are for training"
    )
    for what, numbers, names in (
        ("label", dataset.labels, dataset.class_names),
        ("domain", dataset.domains, dataset.domain_names),
    ):
        if numbers.ndim == 1 and numbers.dtype.kind == "i":
            if what == "label":  # samples may have no label
                numbers = numbers[numbers != IGNORED]
            assert numbers.min(initial=0) >= 0 and numbers.max(initial=0) < len(names), (
                f"a {what} has no name: there are {len(names)}"
            )


# --- partitions --------------------------------------------------------------------------------
def of_partition(partition: Partitioner, study: Study) -> Checks:
    """Yield the checks of a partition.

    partition: the partition, which replaces `study.partition` in all checks.
    study: describes the tiny run for the checks (`raysim.conformance.Study`).
    """
    yield "a seed gives the same split", partial(_check_split_seeds, partition, study)
    yield (
        "no sample belongs to two clients, or to training and test",
        partial(_check_disjoint, partition, study),
    )
    yield from _run_checks(replace(study, partition=partition))


def _parts(partition: Partitioner, study: Study) -> Partition:
    data = study.data.build()
    rows, (groups, names) = data.train_rows, data.groups()
    return partition.split(groups[:rows], data.domains[:rows], len(names), SEED)


def _check_split_seeds(partition: Partitioner, study: Study) -> None:
    np.random.seed(0)  # noqa: NPY002
    one = _parts(partition, study)
    np.random.seed(1)  # noqa: NPY002
    other = _parts(partition, study)
    for name in ("train", "test"):
        left, right = getattr(one, name), getattr(other, name)
        same = np.array_equal(left.indices, right.indices) and np.array_equal(
            left.offsets, right.offsets
        )
        assert same, f"one seed gives two splits of the {name} samples"


def _check_disjoint(partition: Partitioner, study: Study) -> None:
    parts, rows = _parts(partition, study), study.data.build().train_rows
    assert len(parts.train) == len(parts.test) > 0, (
        "training and test rows must be of the same clients"
    )
    for name, part in (("train", parts.train), ("test", parts.test)):
        _check_rows(part, name, rows)
    used = np.concatenate([parts.train.indices, parts.test.indices])
    assert len(np.unique(used)) == len(used), (
        "a sample belongs to two clients, or to training and test"
    )
    assert parts.train.counts.any(), "no client has a training sample"


def _check_rows(part: CSR, name: str, rows: int) -> None:
    assert part.indices.dtype == part.offsets.dtype == np.int64, (
        f"{name}: rows and offsets must be int64"
    )
    assert part.offsets[0] == 0 and part.offsets[-1] == len(part.indices), (
        f"{name}: offsets must go from 0 to the end"
    )
    assert (np.diff(part.offsets) >= 0).all(), f"{name}: offsets must not fall"
    inside = len(part.indices) == 0 or (part.indices.min() >= 0 and part.indices.max() < rows)
    assert inside, f"{name}: a row is not one of 0 to {rows - 1}"


# --- schedules ---------------------------------------------------------------------------------
def of_schedule(schedule: Schedule, study: Study) -> Checks:
    """Yield the checks of a schedule.

    schedule: the schedule, which replaces all schedules in `study.schedules`.
    study: describes the tiny run for the checks (`raysim.conformance.Study`).
    """
    study = replace(study, schedules=(schedule,))
    yield "it keeps its promises, and keeps no state", partial(_check_promises, schedule, study)
    yield from _run_checks(study)


def _check_promises(schedule: Schedule, study: Study) -> None:
    before = copy.deepcopy(schedule)
    result = run(study.spec(), schedule, study.fleet, rounds=8)
    assert vars(schedule) == vars(before), (
        "the schedule has changed. Let its decisions follow from what it sees."
    )
    jobs = [job for job in (*result.jobs, *result.finished.jobs) if math.isfinite(job.finish)]
    most = max(sum(other.start <= job.start < other.finish for other in jobs) for job in jobs)
    assert most <= schedule.concurrency, (
        f"{most} jobs are in flight at once, concurrency={schedule.concurrency}"
    )
    if not schedule.stale:
        assert not any(job.staleness for job in jobs), (
            "an update is stale, and the schedule says that none ever is"
        )
    if (limit := schedule.max_staleness) is not None:
        worst = max(job.staleness for job in jobs)
        assert worst <= limit, f"the staleness of an update is {worst}, max_staleness={limit}"


# --- selections --------------------------------------------------------------------------------
def of_selection(selection: Selection, study: Study) -> Checks:
    """Yield the checks of a selection rule.

    selection: the rule, which replaces `study.selection` in all checks.
    study: describes the tiny run for the checks (`raysim.conformance.Study`).
    """
    study = replace(study, selection=selection)
    yield "it keeps no state in itself", partial(_check_memory, selection, study)
    yield from _run_checks(study)


def _check_memory(selection: Selection, study: Study) -> None:
    before = copy.deepcopy(selection)
    for schedule, fleet in study.each():
        run(study.spec(), schedule, fleet, rounds=8)
    assert vars(selection) == vars(before), (
        "the selection has changed. Keep what it remembers in view.state."
    )


# --- topologies --------------------------------------------------------------------------------
def of_topology(topology: Topology, study: Study) -> Checks:
    """Yield the checks of a topology, each as a description and a function.

    study: describes the tiny run for the checks. The topology replaces `study.topology`. If
    `study.schedules` has its default value, other schedules with at most two jobs in flight replace
    it.
    """
    study = replace(study, topology=topology)
    if study.schedules == Study().schedules:
        study = replace(study, schedules=(Synchronous(2), Buffered(2, 1)))
    yield "a seed gives the same network, which fits its clients", partial(_check_network, study)
    yield "it keeps no state", partial(_check_topology_memory, topology, study)
    yield from _run_checks(study)


def _check_network(study: Study) -> None:
    spec = study.spec()
    declarations = declare_run(spec)
    one, other = (make_network(spec, declarations, study.fleet) for _ in range(2))
    clients = len(study.federated.partition.train)
    assert one.replica_of.shape == (clients,) and one.replica_of.dtype.kind == "i", (
        f"replica_of must be integers, one for each of the {clients} clients"
    )
    assert ((one.replica_of >= 0) & (one.replica_of < one.replicas)).all(), (
        f"replica_of must have numbers from 0 to {one.replicas - 1}"
    )
    for name in ("shares", "client_floats"):
        values, expected = getattr(one, name), clients if name == "client_floats" else one.replicas
        assert values is None or (len(values) == expected and (values >= 0).all()), (
            f"{name} must have {expected} values of at least 0"
        )
    assert (one.replica_of == other.replica_of).all(), "a client has another replica with one seed"
    assert (one.mixing is None) == (other.mixing is None), (
        "of two networks with one seed, only one exchanges between replicas"
    )
    if one.mixing is not None and other.mixing is not None:
        same = all(map(np.array_equal, one.mixing, other.mixing))
        assert same, "the weights of an exchange differ with one seed"


def _check_topology_memory(topology: Topology, study: Study) -> None:
    before = copy.deepcopy(topology)
    for schedule, fleet in study.each():
        run(study.spec(), schedule, fleet, rounds=3)
    assert vars(topology) == vars(before), (
        "the topology has changed. Let `connect` follow from the facts that it gets."
    )


# --- fleets ------------------------------------------------------------------------------------
def of_fleet(fleet: Fleet, study: Study) -> Checks:
    """Yield the checks of a fleet.

    fleet: the fleet, which replaces `study.fleet` in all checks.
    study: describes the tiny run for the checks (`raysim.conformance.Study`).
    """
    study = replace(study, fleet=fleet)
    yield (
        "a seed gives the same devices, and no job takes negative time",
        partial(_check_devices, fleet, study),
    )
    yield from _run_checks(study)


def _check_devices(fleet: Fleet, study: Study) -> None:
    clients = len(study.federated.partition.train)
    spec = study.spec()
    one, other = (fleet.devices(SEED, clients, partial(sample_flops, spec)) for _ in range(2))
    for client in range(clients):
        trip = one.trip(client, 0, 5.0, 20.0, 1000, 1000)
        assert trip == other.trip(client, 0, 5.0, 20.0, 1000, 1000), (
            f"client {client} takes another time with one seed"
        )
        assert 5.0 <= trip.finish < math.inf, (
            f"client {client} starts at 5 s and finishes at {trip.finish} s"
        )
    floats = np.full(clients, 1000)
    seconds = one.seconds(np.full(clients, 20.0), floats, floats)
    assert seconds.shape == (clients,) and (seconds >= 0).all(), (
        "seconds must be one number of at least 0 per client"
    )


# --- observers ---------------------------------------------------------------------------------
def of_observer(observer: Observer, study: Study) -> Checks:
    """Yield the checks of an observer.

    study: describes the tiny run for the checks (`raysim.conformance.Study`). The checks execute
    this run with and without the observer, and compare the results.
    """
    yield (
        "it follows a run to its end and changes nothing",
        partial(_check_follows, observer, study),
    )


def _check_follows(observer: Observer, study: Study) -> None:
    schedule = study.schedules[0]
    alone = run(study.spec(), schedule, study.fleet)
    with tempfile.TemporaryDirectory() as folder:
        followed = CurrentRun(Path(folder), rounds=3, title="a run")
        events = coordinate(
            study.spec(), schedule, study.fleet, folder=folder, checkpoint_every=2
        ).run()
        Follower(
            followed, events, [UserObserver(observer, type(observer).__name__)]
        ).follow_to_end()
    assert (
        followed.finished is not None
        and followed.finished.model_sha256 == alone.finished.model_sha256
    )
    assert [row["train_loss"] for row in followed.rows] == [row["train_loss"] for row in alone.rows]
