"""Checks that every method must pass."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from raysim.api.client_state import to_flat_arrays
from raysim.api.composition import HOOKS, check_names, suspicious_methods
from raysim.api.declarations import Participation, RunFacts
from raysim.api.messages import Failure, Job, TrainingResult
from raysim.api.method import Method, parameters
from raysim.conformance import agreement
from raysim.conformance.agreement import Make
from raysim.conformance.runs import FinishedRun, Spy, coordinate, run_to_end
from raysim.conformance.study import Study
from raysim.primitives.errors import RefusedError
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import RunStoppedError
from raysim.simulation.fleet import Fleet
from raysim.simulation.load import StepMessages, varying_tensors
from raysim.simulation.schedule import Schedule
from raysim.training.run_spec import declare_run

# A client state with more different bytes does not occur elsewhere by chance.
MAX_COMMON_BYTES = 8


def checks(method: Method, study: Study) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each check of a method as a pair: its name, and the function to call.

    study: describes the tiny run for the checks (`raysim.conformance.Study`). Its `methods` do not
    contain `method`: the checks add it.
    """
    for text, check in _checks(method, study):
        yield text, partial(_call_check, check)


def _call_check(check: Callable[[], object]) -> None:
    """Call a check; if its run is refused or stops with an error, raise AssertionError instead."""
    try:
        check()
    except (RunStoppedError, RefusedError) as error:
        raise AssertionError(str(error)) from None


def _checks(method: Method, study: Study) -> Iterator[tuple[str, Callable[[], object]]]:
    study = replace(study, methods=(*study.methods, method))
    yield "it has a name and arguments of its own", partial(check_arguments, method)
    yield "its hooks and what it keeps have names that fit", partial(check_declarations, study.spec)
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
        yield (
            f"what travels is declared and is not what clients keep, {under}",
            partial(check_messages, study.spec, schedule, fleet),
        )
    exact = partial(study.spec, torch.float64)
    yield (
        "the same numbers from recorded steps, or a refusal",
        partial(agreement.check_recorded, exact, rounds=3),
    )


def check_arguments(method: Method) -> None:
    """Check that the method has a name, and that no argument has the same name as a hook.

    The constructor stores each argument as an attribute, which would replace the hook.
    """
    assert isinstance(getattr(method, "name", None), str), f"{type(method).__name__} has no name"
    taken = parameters(method).keys() & {*HOOKS}
    assert not taken, (
        f"method {method.name!r} has an argument with the name of a hook: {sorted(taken)[0]}"
    )


def check_declarations(make: Make) -> None:
    """Check that the method's declarations are valid, and that it overrides a hook.

    The check also fails for a function that is probably a misspelt hook.
    make: function that returns the run, with new methods in each call.
    """
    spec = make()
    try:
        check_names(spec.methods)
        declare_run(spec)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    warning = next(suspicious_methods(spec.methods), "")
    assert not warning, warning


# --- messages -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class WatchedRun:
    """A finished run with the content of all its messages.

    uploads: the names of the tensors that clients send next to the update.
    personal: the names of the networks' tensors that stay on the clients.
    secrets: the names and the bytes of client states that no message may contain. States that have
    few different bytes are left out. So are states that are equal to a declared upload or to most
    of an update.
    """

    run: FinishedRun
    spy: Spy
    uploads: set[str]
    personal: set[str]
    secrets: list[tuple[str, bytes]]


def check_messages(
    make: Make, schedule: Schedule, fleet: Fleet | None = None, **settings: Any
) -> WatchedRun:
    """Check the messages of a run between server and clients; return the run.

    The messages must have as many floats as the history counts. They must not contain personal
    parameters or undeclared client states.
    make: returns the run, with new method objects at each call. The run has five rounds.
    fleet: None uses `Lognormal`.
    settings: other settings to change in the run; `runs.with_settings` lists them.
    """
    seen = _watch(make, schedule, fleet, **settings)
    methods = make().methods
    _check_secrets(seen, {method.name for method in methods})
    _check_costs(seen, pooled=any(method.pools for method in methods))
    return seen


def _watch(make: Make, schedule: Schedule, fleet: Fleet | None, **settings: Any) -> WatchedRun:
    spec = make()
    spy = Spy(spec)
    result = run_to_end(coordinate(spec, schedule, fleet, runtime=spy, rounds=5, **settings))
    assert not result.failures, result.failures[0].error
    layout = result.coordinator.layout
    personal = {entry.name for entry in (*layout.entries, *layout.counters) if entry.personal}
    uploads = {name for update in spy.updates for name in update.extras}
    client_arrays = [
        (key, _bytes(value))
        for state in spy.states
        for key, value in to_flat_arrays(state).items()
        if key not in uploads
    ]
    # Declared uploads, which may be equal to a client state.
    sent = {_bytes(array) for update in spy.updates for array in update.extras.values()}
    moved = [_bytes(update.delta) for update in spy.updates if update.delta is not None]
    moved += [_bytes(total) for result in spy.trained for total in result.sums.values()]
    secrets = [
        (key, value)
        for key, value in client_arrays
        if len(set(value)) > MAX_COMMON_BYTES and value not in sent
    ]
    secrets = [
        (key, value)
        for key, value in secrets
        if not any(_is_most_of(value, update) for update in moved)
    ]
    return WatchedRun(result, spy, uploads, personal, secrets)


def _check_secrets(seen: WatchedRun, names: set[str]) -> None:
    """Check that no update contains personal parameters or undeclared client state.

    Check also that each upload's name begins with a method's name and a dot, and that all updates
    have the same uploads.
    names: the names of the run's methods.
    """
    layout = seen.run.coordinator.layout
    assert all(entry.personal == (entry.start >= layout.shared) for entry in layout.entries)
    for name in seen.uploads:
        assert name.partition(".")[0] in names, (
            f"the upload {name!r} must begin with its method's name and a dot"
        )
    for update in seen.spy.updates:
        assert set(update.extras) == seen.uploads, (
            "the updates carry different uploads; each update must carry all of them"
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
                f"the client state {key!r} is sent to the server, in "
                f"{_part_with_secret(trained, secrets)} of a message, but it is not declared. Do "
                "not send it, or declare it with run.upload."
            )


def _part_with_secret(result: TrainingResult, secrets: list[bytes]) -> str:
    """Return the name of the field of a result that contains a secret, such as "`report`".

    If no field contains all bytes of a secret, return "a part".
    """
    parts = [
        vars(answer) if isinstance(answer, Failure) else answer._asdict()
        for answer in result.updates
    ]
    for part in (*parts, {"sums": result.sums}):
        for name, value in part.items():
            if any(secret in pickle.dumps(value) for secret in secrets):
                return f"`{name}`"
    return "a part"


def _is_most_of(stored: bytes, update: bytes) -> bool:
    """Return True if an update begins with a client state that makes up more than half of it.

    For a shorter state, return False, because equal bytes may be a coincidence.
    stored: the bytes of the client state.
    """
    return update.startswith(stored) and 2 * len(stored) > len(update)


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _check_costs(seen: WatchedRun, pooled: bool) -> None:
    """Check that the history counts exactly the floats that messages contain.

    seen: the run and its recorded messages.
    pooled: True if one model is trained on the data of all clients together, so that nothing is
    sent.
    """
    spy, row = seen.spy, seen.run.rows[-1]
    if pooled:
        assert row["floats_down"] is None and row["floats_up"] is None
        return
    once = sum(array.size for array in spy.constants.values())
    planned = {
        job.number: job for aggregation in seen.run.aggregations for job in aggregation.dispatched
    }
    messages = _step_messages(seen.run.coordinator)
    for job, published in sorted(spy.sent, key=lambda sent: sent[0].number):
        first = once if job.participation == 0 else 0
        received = published.floats + sum(map(np.size, job.extras.values())) + first
        if messages is not None:
            received -= messages.saved(job.client, job.version)
        received -= _omitted(seen, job, "down")
        _check_floats("receives", job.number, planned[job.number].down, received)
    _check_floats(
        "receive", -1, int(row["floats_down"] or 0), sum(job.down for job in planned.values())
    )
    shared = seen.run.coordinator.declarations.floats_up
    varies = bool(varying_tensors(seen.run.coordinator.declarations))
    unplanned = 0  # floats that aggregated updates have more than planned
    aggregated = {
        job.number for aggregation in seen.run.aggregations for job in aggregation.aggregated
    }
    for update in spy.updates:
        job = planned[update.job]
        sent = shared + update.floats - _omitted(seen, job, "up")
        if not varies:
            _check_floats("sends", update.job, job.up, sent)
        elif update.job in aggregated:
            unplanned += sent - job.up
    running = seen.run.coordinator.planner.running
    before = sum(array.size for part in spy.contributed for array in part.values())
    up = sum(job.up for job in planned.values() if job.number not in running)
    _check_floats("send", -1, int(row["floats_up"] or 0), before + up + unplanned)


def _step_messages(coordinator: Coordinator) -> StepMessages | None:
    """Return an object that computes how many floats a job does not receive due to compression.

    With compression, the server sends the compressed changes between versions. It sends them in
    place of all parameters. Return None if the server compresses nothing.
    """
    words, layout = coordinator.declarations.step_words, coordinator.layout
    if words is None:
        return None
    return StepMessages(words, layout.trained, len(coordinator.counts))


def _omitted(seen: WatchedRun, job: Job, direction: Literal["down", "up"]) -> int:
    """Return how many floats of the model a job does not transfer (`Setup.omit`).

    seen: the run and its recorded messages.
    direction: "down" for the message that the client receives, "up" for the message that it sends.
    """
    coordinator = seen.run.coordinator
    samples, spec = int(coordinator.counts[job.client]), coordinator.spec
    facts = RunFacts(spec.task, spec.settings.local, coordinator.layout, 0, frozenset())
    earlier = job.participation
    participation = Participation(job.version, samples, 0.0, earlier, 0, facts, job.client)
    floats = 0
    for declared in coordinator.declarations.methods:
        for omission in declared.omissions:
            floats += getattr(omission, direction)(participation)
    return floats


def _check_floats(what: str, number: int, declared: int, moved: int) -> None:
    who = f"job {number} {what}" if number >= 0 else f"all jobs together {what}"
    assert declared == moved, (
        f"{who} {moved} floats, and {declared} are declared. "
        "Correct the sizes in the method's setup."
    )
