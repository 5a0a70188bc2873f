"""What every method must keep to."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from raysim.api.client_state import to_flat_arrays
from raysim.api.composition import HOOKS, check_names, suspicious_methods
from raysim.api.messages import TrainingResult
from raysim.api.method import Method, parameters
from raysim.conformance import agreement
from raysim.conformance.agreement import Make
from raysim.conformance.runs import FinishedRun, Spy, coordinate, run_to_end
from raysim.conformance.study import Study
from raysim.primitives.errors import Refused
from raysim.simulation.events import RunStoppedError
from raysim.simulation.fleet import Fleet
from raysim.simulation.schedule import Schedule
from raysim.training.run_spec import declare_run

LEAST = 8  # different bytes that a secret has; fewer are found anywhere by chance


def checks(method: Method, study: Study) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is checked of a method, and how."""
    for text, check in _checks(method, study):
        yield text, partial(_asserted, check)


def _asserted(check: Callable[[], object]) -> None:
    """What ends a run is what the check says."""
    try:
        check()
    except (RunStoppedError, Refused) as error:
        raise AssertionError(str(error)) from None


def _checks(method: Method, study: Study) -> Iterator[tuple[str, Callable[[], object]]]:
    study = replace(study, methods=(*study.methods, method))
    yield "it has a name and arguments of its own", partial(named, method)
    yield "its hooks and what it keeps have names that fit", partial(fits, study.spec)
    for schedule, fleet in study.each():
        under = f"under {type(schedule).__name__.lower()}"
        yield (
            f"the same bits on one worker and on two, {under}",
            partial(agreement.on_workers, study.spec, schedule, fleet),
        )
        yield (
            f"the same bits straight and resumed, {under}",
            partial(agreement.resumed, study.spec, schedule, fleet),
        )
        yield (
            f"what travels is declared and is not what clients keep, {under}",
            partial(travels, study.spec, schedule, fleet),
        )
    exact = partial(study.spec, torch.float64)
    yield (
        "the same numbers from recorded steps, or a refusal",
        partial(agreement.recorded, exact, rounds=3),
    )


def named(method: Method) -> None:
    """Its attributes are its arguments, and none has the name of a hook."""
    assert isinstance(getattr(method, "name", None), str), f"{type(method).__name__} has no name"
    taken = parameters(method).keys() & {*HOOKS}
    assert not taken, (
        f"method {method.name!r} has an argument with the name of a hook: {sorted(taken)[0]}"
    )


def fits(make: Make) -> None:
    """Its functions are hooks, or something calls them, and what clients keep bears its name."""
    spec = make()
    try:
        check_names(spec.methods)
        declare_run(spec)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    assert not (doubt := next(suspicious_methods(spec.methods), "")), doubt


# --- what travels -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Seen:
    """What a run's messages carried."""

    run: FinishedRun
    spy: Spy
    uploads: set[str]  # names of what is sent beside the update
    personal: set[str]  # names of the networks' tensors that stay
    secrets: list[
        tuple[str, bytes]
    ]  # what clients keep, with its name, and never send by its own name


def travels(make: Make, schedule: Schedule, fleet: Fleet | None = None) -> Seen:
    """What passes between coordinator and worker is what methods declare, and nothing of what clients keep."""
    seen = _watched(make, schedule, fleet)
    methods = make().methods
    _keeps(seen, {method.name for method in methods})
    _costs(seen, pooled=any(method.pools for method in methods))
    return seen


def _watched(make: Make, schedule: Schedule, fleet: Fleet | None) -> Seen:
    spec = make()
    spy = Spy(spec)
    found = run_to_end(coordinate(spec, schedule, fleet, runtime=spy, rounds=5))
    assert not found.failures, found.failures[0].error
    layout = found.coordinator.layout
    personal = {entry.name for entry in (*layout.entries, *layout.counters) if entry.personal}
    uploads = {name for update in spy.updates for name in update.extras}
    kept = [
        (key, _bytes(value))
        for state in spy.states
        for key, value in to_flat_arrays(state).items()
        if key not in uploads
    ]
    sent = {
        _bytes(array) for update in spy.updates for array in update.extras.values()
    }  # on purpose
    moved = [
        _bytes(update.delta) for update in spy.updates if update.delta is not None
    ]  # as every run sends
    moved += [_bytes(total) for result in spy.trained for total in result.sums.values()]
    secrets = [(key, value) for key, value in kept if len(set(value)) > LEAST and value not in sent]
    secrets = [
        (key, value)
        for key, value in secrets
        if not any(_is_most_of(value, update) for update in moved)
    ]
    return Seen(found, spy, uploads, personal, secrets)


def _keeps(seen: Seen, names: set[str]) -> None:
    """Neither personal parameters nor client state are in an update; what is sent bears its method's name."""
    layout = seen.run.coordinator.layout
    assert all(entry.personal == (entry.start >= layout.shared) for entry in layout.entries)
    for name in seen.uploads:
        assert name.partition(".")[0] in names, (
            f"the upload {name!r} must begin with its method's name and a dot"
        )
    for update in seen.spy.updates:
        assert set(update.extras) == seen.uploads, (
            "every update of a method carries the same uploads"
        )
        assert update.delta is None or update.delta.shape == (layout.shared,)
        assert update.counters.shape == (layout.shared_counters,)
    assert all(
        total.shape == (layout.shared,)
        for result in seen.spy.trained
        for total in result.sums.values()
    )
    for trained in seen.spy.trained:
        message = pickle.dumps(trained)
        if key := next((key for key, secret in seen.secrets if secret in message), ""):
            secrets = [secret for name, secret in seen.secrets if name == key]
            raise AssertionError(
                f"{key!r}, which a client keeps, is in {_place(trained, secrets)} of a message, byte for byte: keep it "
                "out of there, or send it by its name with `ctx.upload`"
            )


def _place(result: TrainingResult, secrets: list[bytes]) -> str:
    """The part of a message that holds one of the secrets."""
    for part in (*map(vars, result.updates), {"sums": result.sums}):
        for name, value in part.items():
            if any(secret in pickle.dumps(value) for secret in secrets):
                return f"`{name}`"
    return "a part"


def _is_most_of(kept: bytes, update: bytes) -> bool:
    """Whether this is the update itself, perhaps without its last tensors: a short part of it would be a leak."""
    return update.startswith(kept) and 2 * len(kept) > len(update)


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _costs(seen: Seen, pooled: bool) -> None:
    """The floats that the history counts, which follow from what methods declare, are those that messages carry."""
    spy, row = seen.spy, seen.run.rows[-1]
    if pooled:
        assert row["floats_down"] is None and row["floats_up"] is None
        return
    once = sum(array.size for array in spy.kept.values())
    planned = {job.number: job for each in seen.run.aggregations for job in each.dispatched}
    for job, published in spy.sent:
        first = once if job.participation == 0 else 0
        received = published.floats + sum(map(np.size, job.extras.values())) + first
        _told("receives", job.number, planned[job.number].down, received)
    _told("receive", -1, int(row["floats_down"] or 0), sum(job.down for job in planned.values()))
    shared = seen.run.coordinator.layout.shared
    for update in spy.updates:
        _told("sends", update.job, planned[update.job].up, shared + update.floats)
    running = seen.run.coordinator.planner.running
    before = sum(array.size for part in spy.contributed for array in part.values())
    up = sum(job.up for job in planned.values() if job.number not in running)
    _told("send", -1, int(row["floats_up"] or 0), before + up)


def _told(what: str, number: int, declared: int, moved: int) -> None:
    who = f"job {number} {what}" if number >= 0 else f"all jobs together {what}"
    assert declared == moved, (
        f"{who} {moved} floats, and {declared} are declared: correct the method's `cost`"
    )
